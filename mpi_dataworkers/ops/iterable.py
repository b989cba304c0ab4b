"""One shard of an IterableDataset, and the way to one of its steps: for data workers, the loader in process and its
fallback, through `shard_reader.py` and `round_reader.py`.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, GeneratorType
from typing import Any

import msgspec
import numpy as np
from torch.utils.data._utils import worker as torch_worker

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.generators import making_sample
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline, SampleError, describe_failure, seed_generators
from hetstream.mpi_dataworkers.order.reorder import as_ranges
from hetstream.mpi_dataworkers.order.sharding import derive_seed, permute
from hetstream.mpi_dataworkers.order.snapshots import pack, unpack
from hetstream.mpi_dataworkers.order.visitation import Cut
from hetstream.mpi_dataworkers.wire.messages import Failure, ShardOrder

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
