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
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from hetstream.mpi_dataworkers.embedding.client import EmbeddingClient
from hetstream.mpi_dataworkers.embedding.history import Chunk
from hetstream.mpi_dataworkers.embedding.optimizers import RowOptimizer
from hetstream.mpi_dataworkers.embedding.ranks import Ranks
from hetstream.mpi_dataworkers.embedding.row_cache import Ids, RowCache, Slots
from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.wire.messages import EmbeddingTable

Initial = Callable[[torch.Tensor], object]
_Bytes = npt.NDArray[np.uint8]

# Weights that are drawn and handed on at once; a multiple of 16, in which torch draws.
_CHUNK_NUMBERS = 1 << 22
_CHUNK_ROWS = 1 << 16
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass
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
class TableConfig:
    """What a table is, and what its rows are before their first update.

    Attributes:
        name: the same on all ranks.
        num_rows: ids are 0 to `num_rows` - 1.
        dim: weights of a row.
        dtype: of weights, float32 or bfloat16.
        new_rows: rows come into being when they are first used, uniform between plus and minus this; None: all are
            drawn at once.
        fills: for so many rows in a row each, what fills a tensor of their weights, where all are drawn at once.
        zero_row: a row of zeros, or None.
    """

    name: str
    num_rows: int
    dim: int
    dtype: torch.dtype
    new_rows: float | None
    fills: Sequence[tuple[int, Initial]]
    zero_row: int | None = None


@dataclass(eq=False)
class _Step:
    """What is known of one step.

    Attributes:
        unique: ids that this rank looks up, each once, ascending.
        owned: ids that any rank needs of this one.
        order: where those of each rank are in `unique`, rank after rank; None with one rank.
        counts: how many each rank has.
        asked: for each rank, where the ids that it needs of this one are in `owned`.
        slots: of `owned`; None until they have places.
    """

    number: int
    unique: torch.Tensor
    owned: Ids
    order: torch.Tensor | None = None
    counts: list[int] = field(default_factory=list)
    asked: list[torch.Tensor] = field(default_factory=list)
    slots: Slots | None = None


class Table:
    """See the module.

    Args:
        config: what it is.
        optimizer: updates rows.
        ranks: that train.
        client: of embedding servers, or None.
        cache_bytes: memory for rows that this process may have at once with servers.

    Attributes:
        num_updates: steps that rows were updated in, of this and earlier processes.
        num_changes: times that rows were changed or restored, in this process alone.
    """

    def __init__(
        self,
        config: TableConfig,
        optimizer: RowOptimizer,
        ranks: Ranks,
        client: EmbeddingClient | None,
        cache_bytes: int,
    ) -> None:
        self.num_rows, self.dim, self._config, self._ranks = config.num_rows, config.dim, config, ranks
        self.optimizer, self.client, self.stats = optimizer, client, TableStats()
        self._state_at = -(-config.dim * config.dtype.itemsize // 4)  # in words of four bytes
        self._words = self._state_at + optimizer.state_width(config.dim)
        self.spec = EmbeddingTable(config.name, config.num_rows, 4 * self._words)
        # Of this rank.
        self._ids = range(ranks.rank, config.num_rows, ranks.size)
        num_slots = len(self._ids)
        self._cache: RowCache | None = None
        if client is not None:
            num_slots = min(num_slots, max(1, cache_bytes // self.spec.row_bytes))
            self._cache = RowCache(config.num_rows, num_slots)
        self._rows = torch.zeros(num_slots, self._words)
        self._seed = 0
        self._has_rows = False  # on servers, beside those that were drawn at once
        self._known: collections.deque[_Step] = collections.deque()
        self._current: _Step | None = None
        self._num_steps = 0  # begun
        # Slots of rows that wait for their gradients, for as long as the tensors are there that will get them.
        self._waiting: list[tuple[weakref.ref[torch.Tensor], Slots]] = []
        self.num_updates = self.num_changes = 0
        self._device = torch.device("cpu")  # where gradients come from
        self._grads: list[tuple[_Step, torch.Tensor]] = []
        if client is not None:
            client.add_table(self.spec)
        self._begin()

    @property
    def _bytes(self) -> _Bytes:
        return self._rows.numpy().view(np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        if self.client is not None:
            raise EmbeddingError(
                f"table {self.spec.name} can be neither copied nor pickled: its rows are on embedding servers. "
                "Save the module's state_dict() and load that into another one"
            )
        return self.__dict__

    # --- initial rows ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._config.new_rows is None:
            start = 0
            for num_rows, fill in self._config.fills:
                self._draw(start, start + num_rows, fill)
                start += num_rows
            return
        self._seed = int(self._ranks.from_first(torch.randint(1 << 62, (1,))).item())
        if self.client is None:
            for start in range(0, len(self._ids), _CHUNK_ROWS):
                ids = np.asarray(self._ids[start : start + _CHUNK_ROWS])
                self._bytes[start : start + _CHUNK_ROWS] = self._new(ids)

    def _draw(self, first: int, end: int, fill: Initial) -> None:
        """Draw weights as torch draws those of its own module, and give them to whom they belong."""
        rows_at_once = max(16, _CHUNK_NUMBERS // self.dim // 16 * 16)
        starts = list(range(first, end, rows_at_once))
        if len(starts) > 1 and end - starts[-1] < 16:
            starts.pop()  # torch draws fewer than 16 numbers in another way
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            weights = torch.empty(stop - start, self.dim, dtype=self._config.dtype)
            fill(weights)
            weights = self._ranks.from_first(weights)
            if self._config.zero_row is not None and start <= self._config.zero_row < stop:
                weights[self._config.zero_row - start] = 0
            ids = np.arange(start, stop)
            ids = ids[ids % self._ranks.size == self._ranks.rank]
            self._put(ids, self._records(weights[torch.from_numpy(ids - start)]))

    def _records(self, weights: torch.Tensor, state: torch.Tensor | None = None) -> _Bytes:
        records = torch.zeros(len(weights), self._words)
        self._weights_of(records).copy_(weights)
        if state is not None:
            records[:, self._state_at :] = state
        return records.numpy().view(np.uint8)

    def _put(self, ids: Ids, records: _Bytes) -> None:
        """Set rows of this rank that no step uses."""
        if self.client is None:
            self._bytes[ids // self._ranks.size] = records
        else:
            self.client.write(self.spec, ids, records)

    def _new(self, ids: Ids) -> _Bytes:
        """Draw rows from (seed, id) alone: splitmix64 (Steele et al., 2014), 24 bits of each number."""
        if self._config.new_rows is None and len(ids):
            raise EmbeddingError(f"table {self.spec.name}: its servers lack {len(ids)} rows that were written")
        with np.errstate(over="ignore"):
            at = ids.astype(np.uint64)[:, None] * np.uint64(self.dim) + np.arange(self.dim, dtype=np.uint64)
            bits = (at + np.uint64(self._seed)) * _MIX[0]
            bits = (bits ^ (bits >> np.uint64(30))) * _MIX[1]
            bits = (bits ^ (bits >> np.uint64(27))) * _MIX[2]
            bits ^= bits >> np.uint64(31)
        unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
        if self._config.zero_row is not None:
            unit[ids == self._config.zero_row] = 0.0
        return self._records(torch.from_numpy(unit * np.float32(self._config.new_rows or 0.0)))

    # --- steps -----------------------------------------------------------------------------------------------------

    def announce(self, unique: torch.Tensor) -> None:
        """Say what a coming step of this rank looks up; on all ranks, in the order of steps.

        Args:
            unique: int64 ids, each once, ascending.
        """
        self._known.append(self._step_of(unique, self._num_steps + len(self._known) + 1))
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
        is_known = self._ranks.all_agree(step is not None and torch.equal(step.unique, unique))
        if step is None or not is_known:
            if step is None:
                self._num_steps += 1
            # One that is over already: its rows may leave as soon as they are read, unless they wait for gradients.
            step = self._step_of(unique, self._num_steps - 1)
        else:
            self.stats.known_ahead += 1
        records = self._rows.index_select(0, torch.from_numpy(self._slots_of(step)))
        return step, self._to_ranks(step, self._weights_of(records))

    def wait_for_grads(self, step: _Step, weights: torch.Tensor) -> None:
        """Keep the rows of a step here as long as this tensor is there."""
        if self._cache is not None and step.slots is not None:
            self._waiting.append((weakref.ref(weights), step.slots))

    def give(self, step: _Step, weights: torch.Tensor, grads: torch.Tensor) -> None:
        """Add gradients [ids, dim] of the weights that `take` returned; `update` applies them."""
        # The program may have the weights for longer, as a loss of the step before has them.
        self._waiting = [
            (ref, slots) for ref, slots in self._waiting if (kept := ref()) is not None and kept is not weights
        ]
        self._device = grads.device
        self._grads.append((step, grads.to("cpu", torch.float32)))
        self.wait_for_grads(step, self._grads[-1][1])

    def drop_grads(self) -> None:
        """Forget gradients that `update` has not applied: their `backward` failed."""
        self._grads.clear()

    def update(self) -> None:
        """Update all rows that got gradients; on all ranks."""
        given, self._grads = self._grads, []
        for step, grads in given:
            if self._cache is not None and not np.array_equal(self._cache.ids_at(self._slots_of(step)), step.owned):
                step.slots = None  # the table was restored since
                self._slots_of(step)
            self.wait_for_grads(step, grads)
        summed = [(self._slots_of(step), self._from_ranks(step, grads)) for step, grads in given]
        if not summed:
            return
        slots, grads = summed[0]
        if len(summed) > 1:  # looked up more than once in a step
            slots, where = np.unique(np.concatenate([slots for slots, _ in summed]), return_inverse=True)
            grads = torch.cat([grads for _, grads in summed])
            grads = torch.zeros(len(slots), self.dim).index_add_(0, torch.from_numpy(where), grads)
        if (scaler := self.optimizer.scaler) is not None and scaler.is_enabled():
            grads = grads * (1.0 / scaler.get_scale())
            is_finite = self._ranks.all_agree(bool(grads.isfinite().all()))
            self.optimizer.tell_scaler(is_finite, self._device)
            if not is_finite:
                return
        self.num_updates += 1
        self.num_changes += 1
        self.stats.steps += 1
        at = torch.from_numpy(slots)
        records = self._rows.index_select(0, at)
        stored = self._weights_of(records)
        weights = stored.float()
        self.optimizer.update(weights, records[:, self._state_at :], grads, self.num_updates)
        if weights is not stored:
            stored.copy_(weights)
        self._rows.index_copy_(0, at, records)
        if self._cache is not None:
            self._cache.changed(slots)

    def _weights_of(self, records: torch.Tensor) -> torch.Tensor:
        return records.view(self._config.dtype)[:, : self.dim]

    # --- among ranks -----------------------------------------------------------------------------------------------

    def _step_of(self, unique: torch.Tensor, number: int) -> _Step:
        if self._ranks.size == 1:
            return _Step(number, unique, unique.numpy())
        owners = unique % self._ranks.size
        order = torch.argsort(owners, stable=True)
        counts = torch.bincount(owners, minlength=self._ranks.size).tolist()
        asked = self._exchange(torch.split(unique[order], counts))
        owned, where = np.unique(torch.cat(asked).numpy(), return_inverse=True)
        places = torch.split(torch.from_numpy(where), [len(ids) for ids in asked])
        return _Step(number, unique, owned, order, counts, list(places))

    def _exchange(self, tensors: Sequence[torch.Tensor], lengths: Sequence[int] | None = None) -> list[torch.Tensor]:
        begun = time.monotonic()
        got = self._ranks.exchange(tensors, lengths)
        self.stats.exchange_s += time.monotonic() - begun
        return got

    def _to_ranks(self, step: _Step, weights: torch.Tensor) -> torch.Tensor:
        """Give each rank the rows that it needs, and return those that this one needs, in the order of its ids."""
        if step.order is None:
            return weights
        got = torch.cat(self._exchange([weights[where] for where in step.asked], step.counts))
        return torch.empty_like(got).index_copy_(0, step.order, got)

    def _from_ranks(self, step: _Step, grads: torch.Tensor) -> torch.Tensor:
        """Return the gradients of this rank's rows: the mean over ranks, as DistributedDataParallel makes it."""
        if step.order is None:
            return grads
        total = torch.zeros(len(step.owned), self.dim)
        got = self._exchange(torch.split(grads[step.order], step.counts), [len(where) for where in step.asked])
        for where, of_rank in zip(step.asked, got, strict=True):
            total.index_add_(0, where, of_rank)  # each row once, so in the order of ranks
        return total.div_(self._ranks.size)

    # --- places and servers ----------------------------------------------------------------------------------------

    def _slots_of(self, step: _Step) -> Slots:
        """Return where the rows of a step are, once they are there."""
        if step.slots is None:
            self._claim(step, must=True)
        slots = step.slots
        assert slots is not None
        if (cache := self._cache) is not None:
            self._wait(lambda: not cache.coming[slots].any())
        return slots

    def _wait(self, are_here: Callable[[], bool]) -> None:
        assert self.client is not None
        self.stats.wait_s += self.client.wait(are_here)

    def _claim_known(self) -> None:
        """Give places to the rows of coming steps, in their order, as far as there are any."""
        for step in self._known:
            if step.slots is None and not self._claim(step, must=False):
                return

    def _claim(self, step: _Step, must: bool) -> bool:
        self._has_rows = True
        if self._cache is None or self.client is None:
            step.slots, is_new = step.owned // self._ranks.size, np.zeros(len(step.owned), dtype=bool)
        else:
            claimed = self._cache.claim(step.owned, step.number) or self._claim_in_room(step)
            if claimed is None and must:
                # One that nobody announced may have the places of coming steps, which claim them again.
                self._wait_for_all()
                self._cache.release(self._num_steps + 1, self._num_steps - 1)
                for known in self._known:
                    known.slots = None
                claimed = self._claim_in_room(step)
            if claimed is None and must:
                raise EmbeddingError(
                    f"table {self.spec.name}: a step needs {len(step.owned)} rows of this rank, and there is memory "
                    f"for {self._cache.capacity} in all, beside those of lookups that wait for gradients. "
                    f"Give the table more, such as cache_bytes={8 * len(step.owned) * self.spec.row_bytes}; "
                    "look up under torch.no_grad() where no backward follows"
                )
            if claimed is None:
                return False
            step.slots, is_new = claimed
            if is_new.any():
                self.client.read(self.spec, step.owned[is_new], step.slots[is_new], self._deliver)
        self.stats.looked_up += len(step.owned)
        self.stats.hits += int(np.count_nonzero(~is_new))
        return True

    def _claim_in_room(self, step: _Step) -> tuple[Slots, npt.NDArray[np.bool_]] | None:
        """Claim places, and let rows that no known step needs leave for it."""
        assert self._cache is not None
        assert self.client is not None
        self._waiting = [waiting for waiting in self._waiting if waiting[0]() is not None]
        waiting = [slots for _, slots in self._waiting]
        num_rows = len(step.owned) - self._cache.num_free
        ids, slots, was_changed = self._cache.evict(num_rows, self._num_steps, waiting)
        self.client.write(self.spec, ids[was_changed], self._bytes[slots[was_changed]])
        return self._cache.claim(step.owned, step.number)

    def _wait_for_all(self) -> None:
        if (cache := self._cache) is not None:
            self._wait(lambda: not cache.coming.any())

    def _deliver(self, slots: Slots, rows: _Bytes, is_there: npt.NDArray[np.bool_]) -> None:
        """Take rows of a server; in the client's thread."""
        assert self._cache is not None
        self._bytes[slots] = rows
        if len(new := slots[~is_there]):
            self._bytes[new] = self._new(self._cache.ids_at(new))
            self._cache.changed(new)
        self._cache.coming[slots] = False

    # --- saved -----------------------------------------------------------------------------------------------------

    def write_back(self) -> None:
        """Write all rows back that the servers have not as they are."""
        if self._cache is not None and self.client is not None:
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
            self._wait_for_all()
            self._cache.clear()
            self._waiting.clear()

    def put_chunks(self, chunks: Iterable[Chunk], generation: str) -> None:
        """Set the rows of this rank to those of a generation; all that it has, if rows do not come into being."""
        if self._config.new_rows is not None and self._has_rows:
            raise EmbeddingError(
                f"table {self.spec.name} has rows that came into being when they were used, and may not be in "
                f"generation {generation}. Load it before it is used, or all tables of the program at once"
            )
        for _, ids, records in chunks:
            self._put(ids, records)
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
            records = torch.zeros(len(self._ids), self._words)
            into, are_here = records.numpy().view(np.uint8), np.zeros(len(records), dtype=bool)

            def deliver(places: Slots, rows: _Bytes, is_there: npt.NDArray[np.bool_]) -> None:
                into[places] = rows
                into[places[~is_there]] = self._new(places[~is_there] * size + self._ranks.rank)
                are_here[places] = True

            for start in range(0, len(records), _CHUNK_ROWS):
                places = np.arange(start, min(start + _CHUNK_ROWS, len(records)))
                self.client.read(self.spec, places * size + self._ranks.rank, places, deliver)
                self._wait(lambda places=places: bool(are_here[places].all()))  # type: ignore[misc]
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
