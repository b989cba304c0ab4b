"""An embedding table as a training process has it: the rows of its steps, ahead of them, and their updates.

Each row belongs to one rank (`ranks.py`), which keeps it while it is in use (`row_cache.py`), updates it with the
gradients of all ranks, added up in the order of ranks, and writes it back to an embedding server (`client.py`). So a
row that a step reads has all updates of the steps before, whatever the number of servers and however far steps are
known ahead. Without servers all rows stay on their ranks.
"""

from __future__ import annotations

import collections
import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from hetstream.mpi_dataworkers.embedding.client import EmbeddingClient, PendingRows
from hetstream.mpi_dataworkers.embedding.history import Chunk
from hetstream.mpi_dataworkers.embedding.optimizers import RowOptimizer
from hetstream.mpi_dataworkers.embedding.ranks import Ranks
from hetstream.mpi_dataworkers.embedding.row_cache import Ids, RowCache, Slots
from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.wire.messages import EmbeddingTable

Initial = Callable[[torch.Tensor], object]

# Weights that are drawn and handed on at once; a multiple of 16, in which torch draws.
_CHUNK_NUMBERS = 1 << 22
_CHUNK_ROWS = 1 << 16
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True)
class TableStats:
    """What a table has done in this process.

    Attributes:
        steps: that were updated.
        looked_up: rows that steps of all ranks needed of this rank.
        hits: of those, rows that were at hand.
        known_ahead: steps whose ids were known before.
        wait_s: time that the training thread waited for rows of servers.
        exchange_s: time that it gave rows and gradients to other ranks, and waited for theirs.
    """

    steps: int = 0
    looked_up: int = 0
    hits: int = 0
    known_ahead: int = 0
    wait_s: float = 0.0
    exchange_s: float = 0.0


@dataclass(frozen=True)
class TableShape:
    """What a table has.

    Attributes:
        name: the same on all ranks.
        num_rows: ids are 0 to `num_rows` - 1.
        dim: weights of a row.
        dtype: of weights, float32 or bfloat16.
    """

    name: str
    num_rows: int
    dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class FirstRows:
    """What rows are before their first update.

    Attributes:
        new_rows: rows come into being when they are first used, uniform between plus and minus this; None: all are
            drawn at once.
        fills: for so many rows in a row each, what fills a tensor of their weights, where all are drawn at once.
        zero_row: a row of zeros, or None.
    """

    new_rows: float | None
    fills: Sequence[tuple[int, Initial]]
    zero_row: int | None = None


class _Step:
    """What is known of one step.

    Attributes:
        unique: ids that this rank looks up, each once, ascending.
        order: where those of each rank are among them, rank after rank; None with one rank.
        counts: how many each rank has.
        asked: for each rank, where the ids that it needs of this one are in `owned`.
        owned: ids that any rank needs of this one.
        slots: of these; None until they have places.
        claim: which claim of the table gave it these places.
        pending: rows that were asked for then.
    """

    def __init__(self, number: int, unique: torch.Tensor) -> None:
        self.number = number
        self.unique = unique
        self.order: torch.Tensor | None = None
        self.counts: list[int] = []
        self.asked: list[torch.Tensor] = []
        self.owned: Ids = np.empty(0, np.int64)
        self.slots: Slots | None = None
        self.claim = 0
        self.pending: PendingRows | None = None


class Table:
    """See the module.

    Args:
        shape: its name and size.
        optimizer: updates rows.
        ranks: that train.
        client: of embedding servers, or None.
        cache_rows: rows that this process may have at once with servers.
        first: what rows are before their first update.

    Attributes:
        num_updates: steps that rows were updated in, of this and earlier processes.
        num_changes: times that rows were changed or restored, in this process alone.
    """

    def __init__(
        self,
        shape: TableShape,
        optimizer: RowOptimizer,
        ranks: Ranks,
        client: EmbeddingClient | None,
        cache_rows: int,
        first: FirstRows,
    ) -> None:
        self.num_rows, self.dim, self.dtype = num_rows, dim, dtype = shape.num_rows, shape.dim, shape.dtype
        self.optimizer, self._ranks, self.client = optimizer, ranks, client
        self._state_at = -(-dim * dtype.itemsize // 4)  # in words of four bytes
        self._words = self._state_at + optimizer.state_width(dim)
        self.spec = EmbeddingTable(shape.name, num_rows, 4 * self._words)
        num_owned = len(range(ranks.rank, num_rows, ranks.size))
        self._cache = RowCache(num_rows, min(cache_rows, num_owned)) if client is not None else None
        self._rows = torch.zeros(num_owned if self._cache is None else self._cache.capacity, self._words)
        self._first, self._seed = first, 0
        self._has_rows = False  # on servers, beside those that were drawn at once
        # Steps whose rows were asked for and may not have come.
        self._asked: list[_Step] = []
        self._num_claims = 0
        self._known: collections.deque[_Step] = collections.deque()
        self._current: _Step | None = None
        self._num_steps = 0  # begun
        # Slots of rows that wait for their gradients, for as long as the tensors are there that will get them.
        self._waiting: list[tuple[weakref.ref[torch.Tensor], Slots]] = []
        self.num_updates = self.num_changes = 0
        self._device = torch.device("cpu")  # where gradients come from
        self._grads: list[tuple[_Step, torch.Tensor]] = []
        self.stats = TableStats()
        if client is not None:
            client.add_table(self.spec)
        if first.new_rows is None:
            start = 0
            for num, fill in first.fills:
                self._draw(start, start + num, fill)
                start += num
        else:
            seed = torch.randint(1 << 62, (1,))
            self._seed = int(ranks.from_first(seed).item())
            if client is None:
                ids = np.arange(ranks.rank, num_rows, ranks.size)
                for part in np.split(ids, range(_CHUNK_ROWS, len(ids), _CHUNK_ROWS)):
                    self._bytes[part // ranks.size] = self._new(part)

    @property
    def _bytes(self) -> npt.NDArray[np.uint8]:
        return self._rows.numpy().view(np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        if self.client is not None:
            raise EmbeddingError(
                f"table {self.spec.name} can be neither copied nor pickled: its rows are on embedding servers. "
                "Save the module's state_dict() and load that into another one"
            )
        return self.__dict__

    # --- initial rows ----------------------------------------------------------------------------------------------

    def _draw(self, first: int, end: int, initial: Initial) -> None:
        """Draw weights as torch draws those of its own module, and give them to whom they belong."""
        rows_at_once = max(16, _CHUNK_NUMBERS // self.dim // 16 * 16)
        starts = list(range(first, end, rows_at_once))
        if len(starts) > 1 and end - starts[-1] < 16:
            starts.pop()  # torch draws fewer than 16 numbers in another way
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            weights = torch.empty(stop - start, self.dim, dtype=self.dtype)
            initial(weights)
            weights = self._ranks.from_first(weights)
            if self._first.zero_row is not None and start <= self._first.zero_row < stop:
                weights[self._first.zero_row - start] = 0
            ids = np.arange(start, stop)
            ids = ids[ids % self._ranks.size == self._ranks.rank]
            self._put(ids, self._records(weights[torch.from_numpy(ids - start)]))

    def _records(self, weights: torch.Tensor, state: torch.Tensor | None = None) -> npt.NDArray[np.uint8]:
        records = torch.zeros(len(weights), self._words)
        self._weights_of(records).copy_(weights)
        if state is not None:
            records[:, self._state_at :] = state
        return records.numpy().view(np.uint8)

    def _put(self, ids: Ids, records: npt.NDArray[np.uint8]) -> None:
        """Set rows of this rank that no step uses."""
        if self.client is None:
            self._bytes[ids // self._ranks.size] = records
        else:
            self.client.write(self.spec, ids, records)

    def _new(self, ids: Ids) -> npt.NDArray[np.uint8]:
        """Draw rows from (seed, id) alone: splitmix64 (Steele et al., 2014), 24 bits of each number."""
        if self._first.new_rows is None and len(ids):
            raise EmbeddingError(f"table {self.spec.name}: its servers lack {len(ids)} rows that were written")
        with np.errstate(over="ignore"):
            at = ids.astype(np.uint64)[:, None] * np.uint64(self.dim) + np.arange(self.dim, dtype=np.uint64)
            bits = (at + np.uint64(self._seed)) * _MIX[0]
            bits = (bits ^ (bits >> np.uint64(30))) * _MIX[1]
            bits = (bits ^ (bits >> np.uint64(27))) * _MIX[2]
            bits ^= bits >> np.uint64(31)
        unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
        if self._first.zero_row is not None:
            unit[ids == self._first.zero_row] = 0.0
        return self._records(torch.from_numpy(unit * np.float32(self._first.new_rows or 0)))

    # --- steps -----------------------------------------------------------------------------------------------------

    def announce(self, unique: torch.Tensor) -> None:
        """Say what a coming step of this rank looks up; on all ranks, in the order of steps.

        Args:
            unique: int64 ids, each once, ascending.
        """
        step = self._exchanged(unique, self._num_steps + len(self._known) + 1)
        self._known.append(step)
        self._claim_known()

    def begin_step(self) -> None:
        """Make the next step that was announced the current one."""
        self._num_steps += 1
        self._current = self._known.popleft()
        self._claim_known()

    def end_steps(self) -> None:
        """Forget what was announced: these steps do not come."""
        self._num_steps += len(self._known) + 1
        self._known.clear()
        self._current = None

    def take(self, unique: torch.Tensor) -> tuple[_Step, torch.Tensor]:
        """Return the rows of the current step, or of one that nobody has announced; on all ranks.

        Args:
            unique: as in `announce`.

        Returns:
            The step, for `wait_for_grads` and `give`, and weights [ids, dim].
        """
        step = self._current
        is_known = step is not None and torch.equal(step.unique, unique)
        if not self._ranks.all_agree(is_known):
            if step is None:
                self._num_steps += 1
            # One that is over already: its rows may leave as soon as they are read, unless they wait for gradients.
            step = self._exchanged(unique, self._num_steps - 1)
        else:
            self._count(known_ahead=1)
        assert step is not None
        if step.slots is None:
            self._claim(step, must=True)
        assert step.slots is not None
        # Also those that other steps have asked for, which may be its own.
        self._await_rows([other for other in self._asked if other.claim <= step.claim])
        weights = self._weights_of(self._rows.index_select(0, torch.from_numpy(step.slots)))
        return step, self._to_ranks(step, weights)

    def wait_for_grads(self, step: _Step, weights: torch.Tensor) -> None:
        """Keep the rows of a step here as long as this tensor is there."""
        assert step.slots is not None
        if self._cache is not None:
            self._waiting.append((weakref.ref(weights), step.slots))

    def give(self, step: _Step, weights: torch.Tensor, grads: torch.Tensor) -> None:
        """Add gradients [ids, dim] of the weights that `take` returned; `update` applies them."""
        # The program may have the weights for longer, as a loss of the step before has them.
        self._waiting = [waiting for waiting in self._waiting if waiting[0]() is not weights]
        self._device = grads.device
        grads = grads.to("cpu", torch.float32)
        self._grads.append((step, grads))
        self.wait_for_grads(step, grads)

    def update(self) -> None:
        """Update all rows that got gradients; on all ranks."""
        given, self._grads = self._grads, []
        for step, grads in given:
            assert step.slots is not None
            if self._cache is not None and not np.array_equal(self._cache.find(step.owned), step.slots):
                self._claim(step, must=True)  # the table was restored since
                self.wait_for_grads(step, grads)
                self._await_rows([step] if step.pending is not None else [])
        summed: list[tuple[Slots, torch.Tensor]] = []
        for step, grads in given:
            assert step.slots is not None
            summed.append((step.slots, self._from_ranks(step, grads)))
        if not summed:
            return
        slots, grads = summed[0]
        if len(summed) > 1:  # looked up more than once in a step
            slots, where = np.unique(np.concatenate([slots for slots, _ in summed]), return_inverse=True)
            grads = torch.zeros(len(slots), self.dim).index_add_(
                0, torch.from_numpy(where), torch.cat([grads for _, grads in summed])
            )
        if (scaler := self.optimizer.scaler) is not None:
            grads = grads * (1.0 / scaler.get_scale())
            is_finite = self._ranks.all_agree(bool(grads.isfinite().all()))
            self.optimizer.tell_scaler(is_finite, self._device)
            if not is_finite:
                return
        self.num_updates += 1
        self.num_changes += 1
        self._count(steps=1)
        if not len(slots):
            return
        at = torch.from_numpy(slots)
        records = self._rows.index_select(0, at)
        stored = self._weights_of(records)
        weights = stored if self.dtype is torch.float32 else stored.float()
        self.optimizer.update(weights, records[:, self._state_at :], grads, self.num_updates)
        if weights is not stored:
            stored.copy_(weights)
        self._rows.index_copy_(0, at, records)
        if self._cache is not None:
            self._cache.changed(slots)

    def drop_grads(self) -> None:
        """Forget gradients that `update` has not applied: their `backward` failed."""
        self._grads.clear()

    def _weights_of(self, records: torch.Tensor) -> torch.Tensor:
        return records.view(self.dtype)[:, : self.dim]

    def _count(self, **more: float) -> None:
        now = asdict(self.stats)
        self.stats = TableStats(**{name: value + more.get(name, 0) for name, value in now.items()})

    # --- among ranks -----------------------------------------------------------------------------------------------

    def _exchanged(self, unique: torch.Tensor, number: int) -> _Step:
        step = _Step(number, unique)
        if self._ranks.size == 1:
            step.owned = unique.numpy()
            return step
        begun = time.monotonic()
        owners = unique % self._ranks.size
        step.order = torch.argsort(owners, stable=True)
        step.counts = torch.bincount(owners, minlength=self._ranks.size).tolist()
        asked = self._ranks.tensors(torch.split(unique[step.order], step.counts), self._ranks.counts(step.counts))
        step.owned, where = np.unique(torch.cat(asked).numpy(), return_inverse=True)
        step.asked = list(torch.split(torch.from_numpy(where), [len(ids) for ids in asked]))
        self._count(exchange_s=time.monotonic() - begun)
        return step

    def _to_ranks(self, step: _Step, weights: torch.Tensor) -> torch.Tensor:
        """Give each rank the rows that it needs, and return those that this one needs, in the order of its ids."""
        if step.order is None:
            return weights
        begun = time.monotonic()
        got = torch.cat(self._ranks.tensors([weights[where] for where in step.asked], step.counts))
        self._count(exchange_s=time.monotonic() - begun)
        return torch.empty_like(got).index_copy_(0, step.order, got)

    def _from_ranks(self, step: _Step, grads: torch.Tensor) -> torch.Tensor:
        """Return the gradients of this rank's rows: the mean over ranks, as DistributedDataParallel makes it."""
        if step.order is None:
            return grads
        begun = time.monotonic()
        lengths = [len(where) for where in step.asked]
        total = torch.zeros(len(step.owned), self.dim)
        for where, got in zip(
            step.asked, self._ranks.tensors(torch.split(grads[step.order], step.counts), lengths), strict=True
        ):
            total.index_add_(0, where, got)  # each row once, so in the order of ranks
        self._count(exchange_s=time.monotonic() - begun)
        return total.div_(self._ranks.size)

    # --- places and servers ----------------------------------------------------------------------------------------

    def _claim_known(self) -> None:
        """Give places to the rows of coming steps, in their order, as far as there are any."""
        for step in self._known:
            if step.slots is None and not self._claim(step, must=False):
                return

    def _claim(self, step: _Step, must: bool) -> bool:
        if self._cache is None:
            step.slots = step.owned // self._ranks.size
            self._count(looked_up=len(step.owned), hits=len(step.owned))
            return True
        assert self.client is not None
        claimed = self._cache.claim(step.owned, step.number)
        if claimed is None:
            claimed = self._claim_in_room(step)
        if claimed is None and must:
            self._release_known()
            claimed = self._claim_in_room(step)
        if claimed is None:
            if must:
                raise EmbeddingError(
                    f"table {self.spec.name}: a step needs {len(step.owned)} rows of this rank, and there is memory "
                    f"for {self._cache.capacity} in all, beside those of lookups that wait for gradients. "
                    f"Give the table more, such as cache_bytes={8 * len(step.owned) * self.spec.row_bytes}; "
                    "look up under torch.no_grad() where no backward follows"
                )
            return False
        self._has_rows = True
        step.slots, is_new = claimed
        self._num_claims += 1
        step.claim = self._num_claims
        missing = np.flatnonzero(is_new)
        self._count(looked_up=len(step.owned), hits=len(step.owned) - len(missing))
        if len(missing):
            step.pending = self.client.read(self.spec, step.owned[missing], step.slots[missing], self._deliver)
            self._asked.append(step)
        return True

    def _claim_in_room(self, step: _Step) -> tuple[Slots, npt.NDArray[np.bool_]] | None:
        assert self._cache is not None
        self._make_room(len(step.owned), self._num_steps)
        return self._cache.claim(step.owned, step.number)

    def _release_known(self) -> None:
        """Let a lookup that nobody announced have the places of coming steps, which claim them again."""
        assert self._cache is not None
        self._await_rows(list(self._asked))
        self._cache.release(self._num_steps + 1, self._num_steps - 1)
        for step in self._known:
            step.slots = None

    def _await_rows(self, steps: list[_Step]) -> None:
        """Wait for rows that steps have asked for."""
        for step in steps:
            assert self.client is not None
            assert step.pending is not None
            self._count(wait_s=self.client.wait(step.pending))
            self._asked.remove(step)
            step.pending = None

    def _make_room(self, num_rows: int, before_step: int) -> None:
        assert self._cache is not None
        assert self.client is not None
        # A step that is over may have looked nothing up. Rows that come after they left would be another id's.
        self._await_rows([step for step in self._asked if step.number < before_step])
        self._waiting = [waiting for waiting in self._waiting if waiting[0]() is not None]
        waiting = np.concatenate([np.empty(0, np.int64), *(slots for _, slots in self._waiting)])
        ids, slots, was_changed = self._cache.evict(num_rows - self._cache.num_free, before_step, waiting)
        self.client.write(self.spec, ids[was_changed], self._bytes[slots[was_changed]])

    def _deliver(self, slots: Slots, rows: npt.NDArray[np.uint8], is_there: npt.NDArray[np.bool_]) -> None:
        """Take rows of a server; in the client's thread."""
        self._bytes[slots] = rows
        if not is_there.all():
            assert self._cache is not None
            new = slots[~is_there]
            self._bytes[new] = self._new(self._cache.ids_at(new))
            self._cache.changed(new)

    # --- saved -----------------------------------------------------------------------------------------------------

    def write_back(self) -> None:
        """Write all rows back that the servers have not as they are."""
        if self._cache is not None:
            assert self.client is not None
            ids, slots = self._cache.written()
            self.client.write(self.spec, ids, self._bytes[slots])

    def check_idle(self) -> None:
        """Refuse to restore a table in a loop.

        Raises:
            EmbeddingError: it is in one.
        """
        if self._known:
            raise EmbeddingError(
                f"table {self.spec.name} is restored while {len(self._known)} coming steps are known: restore it "
                "before the loop over hetstream.lookahead begins"
            )

    def forget(self) -> None:
        """Forget the rows at hand: the servers get others."""
        self.check_idle()
        self._current = None
        self.num_changes += 1
        if self._cache is not None:
            self._await_rows(list(self._asked))
            self._cache.clear()
            self._waiting.clear()

    def put_chunks(self, chunks: Iterable[Chunk], generation: str) -> None:
        """Set the rows of this rank to those of a generation; all that it has, if rows do not come into being."""
        assert self.client is not None
        if self._first.new_rows is not None and self._has_rows:
            raise EmbeddingError(
                f"table {self.spec.name} has rows that came into being when they were used, and may not be in "
                f"generation {generation}. Load it before it is used, or all tables of the program at once"
            )
        for _, ids, records in chunks:
            self.client.write(self.spec, ids, records)
        self._has_rows = True

    def state(self) -> dict[str, Any]:
        """Return what is to be restored besides the rows."""
        return {"table": msgspec.structs.asdict(self.spec), "num_updates": self.num_updates, "seed": self._seed}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, before the rows.

        Raises:
            EmbeddingError: it is another table's.
        """
        own = msgspec.structs.asdict(self.spec)
        if "generation" in state and state["table"] != own:
            raise EmbeddingError(
                f"the state is that of table {state['table']}, and this is {own}: give the table the name, size and "
                "optimizer that it was saved with"
            )
        self.num_updates, self._seed = int(state["num_updates"]), int(state["seed"])

    def all_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights [num_rows, dim] and the optimizer's state [num_rows, width]; on all ranks."""
        size, records = self._ranks.size, self._rows
        if self.client is not None:
            self.write_back()
            ids = np.arange(self._ranks.rank, self.num_rows, size)
            records = torch.zeros(len(ids), self._words)
            into = records.numpy().view(np.uint8)

            def deliver(places: Slots, rows: npt.NDArray[np.uint8], is_there: npt.NDArray[np.bool_]) -> None:
                into[places] = rows
                into[places[~is_there]] = self._new(ids[places[~is_there]])

            for part in np.split(ids, range(_CHUNK_ROWS, len(ids), _CHUNK_ROWS)):
                self._count(wait_s=self.client.wait(self.client.read(self.spec, part, part // size, deliver)))
        if size > 1:
            most = math.ceil(self.num_rows / size)
            own = torch.cat([records, records.new_zeros(most - len(records), self._words)])
            records = torch.stack(self._ranks.from_all(own), dim=1).reshape(-1, self._words)[: self.num_rows]
        return self._weights_of(records), records[:, self._state_at :]

    def set_all_rows(self, weights: torch.Tensor, state: torch.Tensor | None) -> None:
        """Set all rows; without a state of the optimizer, as those of a new table."""
        self.forget()
        if state is None:
            self.num_updates = 0
        own = torch.arange(self._ranks.rank, self.num_rows, self._ranks.size)
        for part in torch.split(own, max(1, _CHUNK_NUMBERS // self.dim)):
            self._put(part.numpy(), self._records(weights[part], None if state is None else state[part]))
