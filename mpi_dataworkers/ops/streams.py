"""One shard of an IterableDataset, and the way to one of its steps: for data workers, the loader in process and its
fallback.

A step is a function of (pipeline, seed, epoch, shard, step): before the first element, and before each step, the
generators of `random`, NumPy and torch are seeded, so a reader that begins anew and skips comes to the same batches.

With `on_error="skip"` an element that raises is left out where it is met, because an iterator cannot be asked for it
again; which ones were left out is part of the snapshot, so that who reads the shard again leaves out the same.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import dis
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, GeneratorType
from typing import Any

import msgspec
import numpy as np
from torch.utils.data._utils import worker as torch_worker

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.generators import making_sample
from hetstream.mpi_dataworkers.ops.pipeline import MadeStep, Pipeline, SampleError, describe_failure, seed_generators
from hetstream.mpi_dataworkers.order.bucketing import RoundFormer
from hetstream.mpi_dataworkers.order.reorder import as_ranges
from hetstream.mpi_dataworkers.order.sharding import derive_seed, pack, permute, unpack
from hetstream.mpi_dataworkers.order.visitation import Cut
from hetstream.mpi_dataworkers.wire.failures import OnFailure, StepFailures
from hetstream.mpi_dataworkers.wire.messages import ErrorPolicy, Failure, ShardOrder

_DIVIDE_THEMSELVES = (Cut.ITSELF.value, Cut.ITSELF_FOR_RANKS.value)
# An iterator that raises so often without an element between does not get any further.
_MAX_IN_A_ROW = 1000
_SEES_ALL_VARIABLES = {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"}


def files_of(dataset: Any) -> Sequence[Any] | None:
    """The attribute `files` of a dataset, if it is a sequence."""
    files = getattr(dataset, "files", None)
    sized = hasattr(files, "__len__") and hasattr(files, "__getitem__")
    return None if not sized or isinstance(files, str | bytes | dict) else files


def generator_problem(dataset: Any) -> str:
    """Why the elements of a dataset cannot be left out one by one, and what to change."""
    return (
        f"{type(dataset).__name__}.__iter__ is a generator, and a generator ends with its exception: what follows "
        "a bad element could not be read. Give `return map(self.decode, self.read())`, where the generator `read` "
        "gives what cannot fail and `decode` makes elements of it, or an iterator with a __next__ that goes on; or "
        "catch the exception where it is raised"
    )


class _Info(torch_worker.WorkerInfo):
    """What `get_worker_info()` gives to a dataset that reads a shard; remembers whether the dataset looked at it."""

    def __getattribute__(self, name: str) -> Any:
        if name == "id":
            object.__getattribute__(self, "__dict__")["asked"] = True
        return super().__getattribute__(name)


def may_use_its_number(worker_init_fn: Callable[[int], None]) -> bool:
    """Whether a `worker_init_fn` may divide the dataset by the number that it is given.

    A function whose code never names that parameter cannot: it seeds by `torch.initial_seed()`, or sets up a library.
    Of all others nobody knows.
    """
    if not isinstance(worker_init_fn, FunctionType) or worker_init_fn.__code__.co_argcount == 0:
        return True
    code = worker_init_fn.__code__
    number = code.co_varnames[0]
    if number in code.co_cellvars or _SEES_ALL_VARIABLES & set(code.co_names):
        return True
    # One instruction may load two variables, and then has a tuple of names.
    loaded = (instruction.argval for instruction in dis.get_instructions(code))
    return any(number in (value if isinstance(value, tuple) else (value,)) for value in loaded)


@dataclass(frozen=True)
class Shard:
    """One shard of one epoch.

    Attributes:
        pipeline: the dataset, of which a reader makes a copy, and the collate function.
        order: which shard of how many, and how they are cut.
        seed: base of the random state.
        epoch: the epoch.
    """

    pipeline: Pipeline
    order: ShardOrder
    seed: int
    epoch: int


class ShardSteps(abc.ABC):
    """The iterator of one shard, where it is, and how it gets to a step. What a step is made of, subclasses say.

    Args:
        shard: which one.
        at_sample: called with -1 before each element.
        skips: leave out elements that raise.

    Attributes:
        pipeline: the shard's.
        num_steps: how many steps the shard has, -1 until its end was reached.
        position: the step that comes next.
        num_elements: how many the iterator has given.
        is_exhausted: it gives no more.
        is_last_try: if this attempt at the step fails, too, the step is left out.
        failures: elements that are left out of the step that is being read.
    """

    def __init__(self, shard: Shard, at_sample: Callable[[int], None] = lambda _: None, skips: bool = False) -> None:
        self.num_steps = -1
        self.shard = shard
        self.seed = derive_seed(shard.seed, shard.epoch, shard.order.seed_shard)
        self.position = 0
        self.num_elements = 0
        self.is_exhausted = False
        self.is_last_try = False
        self.failures: list[Failure] = []
        self._skips = skips
        self._at_sample = at_sample
        self.pipeline = shard.pipeline
        self._order = shard.order
        self._iterator: Any = None
        self._dataset: Any = None
        self._info: Any = None
        self._has_asked = False  # it is known to have asked for its shard; see also `_Info`
        self._is_undivided = False  # the first shard has all, because the dataset did not ask
        self._left_out: set[int] = set()  # elements, by their number in the iterator's order
        self._judged = 0  # of the elements before this one it is known whether they are left out
        self._is_wanted = True  # the step that is being read; else it is passed over

    @abc.abstractmethod
    def next_samples(self) -> Any:
        """What the next step is made of; None at the end.

        Raises:
            SampleError: user code raised; the step counts as read.
        """

    def forget_position(self) -> None:
        """Begin anew at the next step."""
        self._iterator, self.position = None, 0

    def samples_of(self, step: int, snapshot: bytes = b"") -> Any:
        """Go to a step, and have what it is made of; None when the shard has fewer steps.

        Raises:
            SampleError, PipelineError: as `next_samples` and `begin`.
        """
        if 0 <= self.num_steps <= step:
            return None
        saved = unpack(snapshot) if snapshot else None
        if saved is not None and saved["elements"] > self._judged:
            self._judged = saved["elements"]
            self._left_out = {number for first, stop in saved["left_out"] for number in range(first, stop)}
        if saved is not None and (saved["state"] is None or saved["step"] > step):
            saved = None
        if self._iterator is None or step < self.position or (saved is not None and self.position < saved["step"]):
            try:
                self.begin(saved)
            except SampleError:
                if step == 0 or self._skips:
                    raise
        self._is_wanted = False
        while self.position < step:
            # An exception of a step before this one was, or will be, raised in its own place.
            with contextlib.suppress(SampleError):
                if self.next_samples() is None:
                    return None
        self._is_wanted = True
        return self.next_samples()

    def begin(self, saved: dict[str, Any] | None) -> None:
        """Have an iterator over a copy of the dataset, at the beginning or where a snapshot was made.

        Raises:
            SampleError: user code raised.
            PipelineError: the dataset cannot be copied, or not go back.
        """
        try:
            self._dataset = copy.deepcopy(self.pipeline.dataset)
        except Exception as error:  # copying runs user code (__deepcopy__, __reduce__): any exception may come
            raise PipelineError(
                f"{type(self.pipeline.dataset).__name__} cannot be copied, and each shard reads a copy of its own: "
                f"{type(error).__name__}: {error}. Open files and connections in __iter__."
            ) from error
        divides_itself = self._order.cut in _DIVIDE_THEMSELVES
        self._choose_files()
        self._info = None
        if self._order.cut != Cut.WHOLE.value:
            self._info = _Info(
                id=self._order.shard if divides_itself else 0,
                num_workers=self._order.num_shards if divides_itself else 1,
                seed=self.seed,
                dataset=self._dataset,
            )
        self._has_asked = False
        self.position, self.num_elements, self.is_exhausted = 0, 0, False
        seed_generators(self.seed)
        with self.as_worker(), making_sample(self.seed):
            try:
                if self.pipeline.worker_init_fn is not None and self._info is not None:
                    self._has_asked = may_use_its_number(self.pipeline.worker_init_fn)
                    # Not `self._info.id`, which would count as asked by the dataset.
                    self.pipeline.worker_init_fn(self._order.shard if divides_itself else 0)
                if saved is not None and not saved["iterators"]:
                    self._dataset.load_state_dict(saved["state"])
                self._iterator = iter(self._dataset)
                if saved is not None and saved["iterators"]:
                    self._iterator.load_state_dict(saved["state"])
            except Exception as error:
                name, kind = type(self._dataset).__name__, type(error).__name__
                self._iterator = None
                if saved is not None:
                    raise PipelineError(f"{name} cannot go back to where it was: {kind}: {error}") from error
                if self._skips and self.is_last_try:
                    raise PipelineError(
                        f"{name} cannot be read at all, so nothing is left out: {kind}: {error}"
                    ) from error
                if self._skips:
                    raise SampleError(-1) from error
                # As in torch, that is all of it: one failed step.
                self._iterator, self.position = iter(()), 1
                self._has_asked = True
                raise SampleError(-1) from error

        if self._skips and isinstance(self._iterator, GeneratorType):
            self._iterator = None
            raise PipelineError(generator_problem(self._dataset))
        if saved is not None:
            self._has_asked = True  # where it began
            self.position, self.num_elements, self.is_exhausted = saved["step"], saved["elements"], saved["exhausted"]

    def save(self) -> bytes:
        """What another reader needs to go on from here."""
        methods = ("state_dict", "load_state_dict")
        owner: Any = self._iterator
        if not all(hasattr(owner, name) for name in methods):
            owner = self._dataset
        state = None
        if all(hasattr(owner, name) for name in methods):
            try:
                with self.as_worker():
                    state = owner.state_dict()
            except Exception as error:
                raise SampleError(-1) from error
        elif not self._left_out:
            return b""
        saved = {
            "step": self.position,
            "elements": self.num_elements,
            "exhausted": self.is_exhausted,
            # As torchdata: a dataset that is its own iterator is asked to begin, and then told where it was.
            "iterators": owner is self._iterator,
            "state": state,
            # A reader with a state does not read again what lies before.
            "left_out": as_ranges(sorted(self._left_out)) if state is None else [],
        }
        try:
            return pack(saved)
        except Exception as error:  # pickling runs user code
            raise PipelineError(
                f"state_dict() of {type(owner).__name__} holds what cannot be pickled ({error!r}): "
                "it travels with the batches and is part of the loader's state"
            ) from error

    def _choose_files(self) -> None:
        cut, order = self._order.cut, self._order
        if cut not in (Cut.FILES.value, Cut.EACH_FILE.value):
            return
        files = files_of(self._dataset) or []
        if cut == Cut.EACH_FILE.value and len(files) != order.num_shards:
            raise PipelineError(
                f"the dataset has {len(files)} files here and {order.num_shards} in the trainer: all hosts must see "
                "the same data"
            )
        numbers = np.arange(len(files), dtype=np.int64)
        if order.shuffle and len(files):
            numbers = permute(numbers, len(files), order.order_seed, self.shard.epoch)
        self._dataset.files = [files[number] for number in numbers[order.shard :: order.num_shards].tolist()]

    def next_element(self) -> tuple[Any] | None:
        """The next element of this shard; None at the end."""
        in_a_row = 0
        while not self.is_exhausted:
            self._at_sample(-1)
            element, error = None, None
            try:
                element = next(self._iterator)
            except StopIteration:
                self.is_exhausted = True
                break
            except Exception as raised:
                if not self._skips:
                    raise
                error = raised
            number, self.num_elements = self.num_elements, self.num_elements + 1
            in_a_row = 0 if error is None else in_a_row + 1
            if in_a_row > _MAX_IN_A_ROW:
                name = type(self._dataset).__name__
                raise PipelineError(f"the iterator of {name} raised {in_a_row} times in a row, and goes on") from error
            is_here = self._order.cut != Cut.ELEMENTS.value or number % self._order.num_shards == self._order.shard
            if is_here and (not self._skips or self._keeps(number, error)):
                return (element,)
        return None

    def _keeps(self, number: int, error: Exception | None) -> bool:
        """Whether an element is part of its step, for who leaves some out."""
        if number >= self._judged:
            self._judged = number + 1
            if error is not None:
                self._left_out.add(number)
        if number in self._left_out:
            self.failures.append(self._told(number, error))
            return False
        if error is not None and self._is_wanted:
            raise error  # it was there when the shard was read before, and may be at the next try
        return True

    def _told(self, number: int, error: Exception | None) -> Failure:
        failure = describe_failure(error or RuntimeError("left out, as it was when the shard was read before"))
        text = f"element {number} of shard {self._order.shard}: {failure.text}"
        return msgspec.structs.replace(failure, sample_index=number, text=text)

    @property
    def _asked(self) -> bool:
        return self._has_asked or (self._info is not None and "asked" in vars(self._info))

    def is_of_the_first(self) -> bool:
        """Whether the dataset does not divide itself, so that the first shard has all of it and this one nothing."""
        return self._order.cut == Cut.ITSELF.value and self._order.shard > 0 and not self._asked

    def check_divided(self) -> None:
        """See that a dataset that divides itself has done so.

        Raises:
            PipelineError: it has not.
        """
        order, name = self._order, type(self._dataset).__name__
        if order.num_shards == 1 or order.cut not in _DIVIDE_THEMSELVES:
            return
        if self._is_undivided and self._asked:
            raise PipelineError(
                f"{name} asked torch.utils.data.get_worker_info().id only after its first elements, which no other "
                "shard has: ask in __iter__ before the first element"
            )
        if self._asked or (order.shard > 0 and order.cut == Cut.ITSELF.value):
            return
        if order.cut == Cut.ITSELF.value:
            self._is_undivided = True
            return
        raise PipelineError(
            f"{name} did not ask torch.utils.data.get_worker_info().id, so each of {order.num_shards} shards would "
            "read all of it. Divide it there, as for torch's num_workers, or give the loader "
            "sharding=ShardingPolicy.DATA (each shard reads all and keeps its part), FILE or DYNAMIC (the dataset has "
            "`files`). One rank alone would read it once."
        )

    @contextlib.contextmanager
    def as_worker(self) -> Iterator[None]:
        """Let user code see its shard in `get_worker_info()`."""
        before, torch_worker._worker_info = torch_worker._worker_info, self._info
        try:
            yield
        finally:
            torch_worker._worker_info = before


# Steps of one shard of an IterableDataset, of elements that follow one another. For others see `Shard`.


class ShardReader(ShardSteps):
    """Makes the steps of one shard; arguments as `ShardSteps`.

    Attributes:
        snapshot: where the reader was after the last step, as `snapshots.pack` gives it, if the dataset or its iterator
            has a state, and what it has left out, if it has.
        snapshot_step: the step that comes next there.
    """

    def __init__(self, shard: Shard, at_sample: Callable[[int], None] = lambda _: None, skips: bool = False) -> None:
        super().__init__(shard, at_sample, skips)
        self.snapshot, self.snapshot_step = b"", 0

    def read(self, step: int, snapshot: bytes = b"", without: Collection[Failure] = ()) -> MadeStep | None:
        """Make one step: the next one costs its elements, another one as many as lie before it.

        Args:
            step: which one.
            snapshot: of a reader of this shard at or before the step, in whatever process; "" for the beginning.
            without: if there are any, the step's elements are read and left out, all of them.

        Returns:
            The step, or None when the shard has fewer.

        Raises:
            SampleError: user code raised; the step counts as read.
            PipelineError: the dataset does not divide itself, or cannot be copied.
        """
        self.is_last_try = bool(without)
        samples = self.samples_of(step, snapshot)
        if samples is None:
            return None
        self.snapshot, self.snapshot_step = self.save(), self.position
        failures = self.failures
        if without or not samples:
            return MadeStep(None, 0, len(samples) + len(failures), [*failures, *without])
        together = samples if self.shard.order.batch_size else samples[0]
        batch = self.pipeline.collated(together, derive_seed(self.seed, step))
        return MadeStep(batch, len(samples), len(failures), failures)

    def next_samples(self) -> list[Any] | None:
        """The elements of the next step; None at the end."""
        order = self.shard.order
        wanted = max(1, order.batch_size)
        samples: list[Any] = []
        self.failures = []
        seed = derive_seed(self.seed, self.position)
        seed_generators(seed)
        try:
            with self.as_worker(), making_sample(seed):
                while len(samples) < wanted and (found := self.next_element()) is not None:
                    samples += found
        except PipelineError:
            raise
        except Exception as error:
            if self.is_of_the_first():
                self.num_steps = self.position
                return None
            self.position += 1
            raise SampleError(-1) from error
        self.check_divided()
        if self.is_of_the_first():
            self.num_steps = self.position
            return None
        if order.drop_last and len(samples) < wanted:
            samples = []
        # A step that has nothing but what it left out is given, so that it is told.
        if not samples and not self.failures:
            self.num_steps = self.position
            return None
        self.position += 1
        return samples


# One shard of an IterableDataset, read in rounds of like length: step j of rank r is slice r of round j.
#
# A round is made from many elements, of which each rank has its part. So a data worker that serves several ranks reads
# the shard once for all of them (`SharedRounds`), and keeps the slices that are still to be asked for, within a
# bound. A rank that is further behind than that, or comes back, has a reader of its own, which begins at the shard's
# beginning (what waits in the buckets is no part of a dataset's state), until it is where the others are.

# Rounds whose slices wait for the ranks that are behind: more than a lease is ahead of another.
_KEPT_ROUNDS = 256
# So that the seeds of collate functions are none of those of elements.
_COLLATE_SEED = 0x636F6C6C


class _RoundReader(ShardSteps):
    """A shard's iterator and the rounds that it has formed.

    Args:
        shard, at_sample: as in `ShardSteps`.
        ranks: whose slices are kept until they are asked for.
    """

    def __init__(self, shard: Shard, at_sample: Callable[[int], None], ranks: Collection[int]) -> None:
        super().__init__(shard, at_sample)
        self._ranks = ranks
        self._kept: OrderedDict[int, dict[int, list[Any]]] = OrderedDict()
        self._formed: deque[list[list[Any]]] = deque()
        self._keep_from = 0

    def comes_to(self, rank: int, step: int) -> bool:
        """Whether it has the slice, or gets there without beginning anew."""
        return step >= self.position or rank in self._kept.get(step, ())

    def slice_of(self, rank: int, step: int) -> list[Any] | None:
        """The samples of a rank's step, once; None when the shard has fewer steps.

        Raises:
            SampleError, PipelineError: as `ShardReader.read`.
        """
        if step not in self._kept:
            self._keep_from = step
            try:
                if self.samples_of(step) is None:
                    return None
            except SampleError:
                # The next try may go better, and then the rounds are others: no rank may go on with these.
                self.forget_position()
                self._kept.clear()
                raise
        slices = self._kept[step]
        samples = slices.pop(rank)
        if not slices:
            del self._kept[step]
        return samples

    def begin(self, saved: dict[str, Any] | None) -> None:
        order = self.shard.order
        self._former = RoundFormer[Any](order.batch_size, order.world_size, order.drop_last)
        self._formed.clear()
        self._kept.clear()
        super().begin(saved)

    def next_samples(self) -> list[Any] | None:
        """Form the next round and keep its slices; None at the end."""
        buckets = self.shard.pipeline.stream_buckets
        assert buckets is not None
        try:
            while not self._formed and not self.is_exhausted:
                # Each element has a seed of its own: the steps of an element depend on its neighbours' lengths.
                seed_generators(derive_seed(self.seed, self.num_elements))
                with self.as_worker():
                    found = self.next_element()
                    if found is not None:
                        self._formed.extend(self._former.add(found[0], buckets.bucket(found[0])))
            self.check_divided()
            if self.is_exhausted:
                self._formed.extend(self._former.end())
                self._former = RoundFormer[Any](1, 1)
        except PipelineError:
            raise
        except Exception as error:
            self.position += 1
            raise SampleError(-1) from error
        if not self._formed:
            self.num_steps = self.position
            return None
        formed = self._formed.popleft()
        if self.position >= self._keep_from:
            self._kept[self.position] = {rank: formed[rank] for rank in self._ranks}
        while len(self._kept) > _KEPT_ROUNDS:
            self._kept.popitem(last=False)
        self.position += 1
        return formed


class _Readers:
    """The readers of one shard: one for all ranks, and one for each that is away from the others."""

    def __init__(self, begin: Callable[[Collection[int]], _RoundReader], ranks: Collection[int]) -> None:
        self._begin = begin
        self._common = begin(ranks)
        self._own: dict[int, _RoundReader] = {}

    def slice_of(self, rank: int, step: int) -> tuple[list[Any] | None, int]:
        """A rank's samples of a step, and the number of steps once that is known, else -1."""
        reader, own = self._common, self._own.pop(rank, None)
        behind = not reader.comes_to(rank, step)
        if behind or (own is not None and own.comes_to(rank, step) and own.position > reader.position):
            reader = own if own is not None and own.comes_to(rank, step) else self._begin([rank])
            self._own[rank] = reader
        return reader.slice_of(rank, step), reader.num_steps


class RankReader:
    """What one rank reads of a shard; stands in for a `ShardReader`.

    Attributes:
        pipeline: the shard's.
        num_steps: how many steps the shard has, -1 until its end was reached.
        snapshot, snapshot_step: none, as rounds have none.
    """

    def __init__(self, readers: _Readers, shard: Shard) -> None:
        self.num_steps = -1
        self.snapshot, self.snapshot_step = b"", 0
        self.pipeline = shard.pipeline
        self._readers, self._rank = readers, shard.order.rank
        self._seed = derive_seed(shard.seed, shard.epoch, shard.order.seed_shard, _COLLATE_SEED)

    def read(self, step: int, _: bytes = b"", __: Collection[Failure] = ()) -> MadeStep | None:
        """Make one step of this rank, as `ShardReader.read`; there is no snapshot, and nothing is left out."""
        samples, self.num_steps = self._readers.slice_of(self._rank, step)
        if samples is None:
            return None
        seed = derive_seed(self._seed, step, self._rank)
        seed_generators(seed)
        return MadeStep(self.pipeline.collated(samples, seed), len(samples), 0, [])


class SharedRounds:
    """The shards that one process reads for several ranks; one is forgotten with its last `RankReader`."""

    def __init__(self) -> None:
        self._shards: weakref.WeakValueDictionary[Any, _Readers] = weakref.WeakValueDictionary()

    def readers(self, key: tuple[Any, ...], make: Callable[[], _Readers]) -> _Readers:
        """The readers of a shard."""
        found = self._shards.get(key)
        if found is None:
            found = self._shards[key] = make()
        return found


def open_shard(
    shard: Shard,
    at_sample: Callable[[int], None] = lambda _: None,
    skips: bool = False,
    shared: SharedRounds | None = None,
    pipeline_id: str = "",
) -> ShardReader | RankReader:
    """A reader of one shard, for this rank, of a loader of hetstream's own.

    Args:
        shard: which one.
        at_sample: as in `ShardSteps`.
        skips: leave out elements that raise; not in rounds.
        shared: with whom to share rounds; None to read for one rank alone.
        pipeline_id: names the pipeline among the shared.
    """
    order = shard.order
    if order.world_size == 0:
        return ShardReader(shard, at_sample, skips)

    def begin(ranks: Collection[int]) -> _RoundReader:
        return _RoundReader(shard, at_sample, ranks)

    if shared is None:
        readers = _Readers(begin, [order.rank])
    else:
        key = pipeline_id, shard.seed, shard.epoch, msgspec.structs.replace(order, rank=0)
        readers = shared.readers(key, lambda: _Readers(begin, range(order.world_size)))
    return RankReader(readers, shard)


def read_step(reader: ShardReader | RankReader, step: int, snapshot: bytes, policy: ErrorPolicy) -> MadeStep | None:
    """Read a step in this process, with the attempts and the policy that it has on data workers.

    Raises:
        SampleError: user code raised, and the policy is to raise.
    """
    if policy.on_error == "raise":
        return reader.read(step, snapshot)
    failures = StepFailures()
    while True:
        try:
            return reader.read(step, snapshot, failures.left_out)
        except SampleError as error:
            if failures.note("", describe_failure(error), policy) is OnFailure.RAISE:
                raise
