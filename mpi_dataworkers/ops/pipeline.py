"""From sample indices to a batch: the one function that data workers, the loader in process and its fallback all run.

A batch depends on the pipeline, the indices and the seeds, and on nothing else: before each sample the generators of
Python's `random`, of NumPy and of torch are seeded (see `sharding.SampleSeeds`), and those that the dataset holds (see
`own_generators`), or, for a thread-safe dataset, those of `sample_generator`. Before the batch stage they are seeded
once more, from the seed of the step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import random
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import getitem
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import torch.utils.data
from torch.utils.data._utils import pin_memory as torch_pin
from torch.utils.data._utils import worker as torch_worker

from hetstream.mpi_dataworkers.errors import FeatureError, PipelineError, SourceError
from hetstream.mpi_dataworkers.generators import deterministic, making_sample
from hetstream.mpi_dataworkers.ops.code_globals import is_programs, names_in
from hetstream.mpi_dataworkers.ops.index_form import INTS, IndexForm
from hetstream.mpi_dataworkers.ops.origins import PLAIN, Origins, digest_of_state
from hetstream.mpi_dataworkers.ops.prefix_cache import PrefixCache
from hetstream.mpi_dataworkers.order.bucketing import LengthBuckets, StreamBuckets
from hetstream.mpi_dataworkers.order.sharding import Indices, derive_seed
from hetstream.mpi_dataworkers.process.children import ForksEndHere
from hetstream.mpi_dataworkers.process.handlers import others, suppressed_others
from hetstream.mpi_dataworkers.process.interpreter import this_interpreter
from hetstream.mpi_dataworkers.sources import reads_apart
from hetstream.mpi_dataworkers.threads import ThreadTeam
from hetstream.mpi_dataworkers.wire.failures import OnFailure, StepFailures
from hetstream.mpi_dataworkers.wire.messages import CacheReport, ErrorPolicy, Failure

# The batch stage: user code that gets each finished batch, after collate, in the process that has made it.
#
# `tree.py` takes a `StagedBatch` apart as it does any batch, so its tensors travel as tensors.

BatchStage = Callable[[Any], Any]
_pin_memory: Any = torch_pin.pin_memory


@dataclass(frozen=True)
class StagedBatch:
    """What a batch stage may return: a batch for the program, and tensors that the program does not see.

    Attributes:
        batch: what the training loop gets.
        extra: what `LoaderConnection.on_extra` gets just before.
    """

    batch: Any
    extra: Sequence[torch.Tensor]

    def pin_memory(self) -> StagedBatch:
        """The same in pinned memory; torch's own loader calls it, in process."""
        return StagedBatch(_pin_memory(self.batch), _pin_memory(list(self.extra)))


def run_stage(stage: BatchStage, batch: Any, seed: int) -> Any:
    """Run a batch stage, alike in every process: without gradients, which do not travel, and without
    `get_worker_info()`, which is not the same everywhere.

    Args:
        stage: the stage.
        batch: what it gets.
        seed: of `sample_generator()`; the global generators are seeded before.
    """
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        with torch.no_grad(), making_sample(seed):
            return stage(batch)
    finally:
        torch_worker._worker_info = info


# Which sample of a step is at fault, where what was raised names a row: a feature graph's or a source's error.
#
# The pipeline then leaves out that sample alone, if it leaves any out.


def place_at_fault(error: BaseException | None, samples: Sequence[Any], make: Callable[[Any], Any]) -> int:
    """Where the sample at fault stands among those of a step; -1 where nobody knows.

    Args:
        error: what was raised for all of them.
        samples: they, or their indices.
        make: does the same with a part of them; raises such an error again, or one with it as its cause.
    """
    if not isinstance(error, FeatureError | SourceError) or not 0 <= error.row < len(samples):
        return -1
    places = [error.row]
    if isinstance(error, FeatureError):
        if error.num_rows != len(samples):
            return -1
        # A collate function may sort, so that the row is another sample's.
        places += [place for place in range(len(samples)) if place != error.row]
    return next((place for place in places if _fails(type(error), make, samples[place : place + 1])), -1)


def named(error: BaseException | None, sample: Any) -> None:
    """Say of what was raised for a sample which row of which file it is, if it is a `sources.table.Row`."""
    if error is not None and isinstance(origin := getattr(sample, "origin", None), str):
        error.args = (f"{error}; it is {origin}",)


def _fails(kind: type[FeatureError | SourceError], make: Callable[[Any], Any], sample: Any) -> bool:
    """Whether one sample alone is at fault, as the only row."""
    try:
        make(sample)
    except Exception as error:  # noqa: BLE001, user code
        return any(isinstance(each, kind) and each.row == 0 for each in (error, error.__cause__))
    return False


# What a dataset or a collate function holds: a look through attributes, lists, tuples and dictionaries.

# Looking takes a moment for each object: of a long list, which is data, only the beginning.
_MAX_ITEMS = 1_000
_MAX_OBJECTS = 20_000
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, np.ndarray)


def reachable(roots: tuple[Any, ...], is_wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """The wanted ones among the objects that some roots hold, the near ones first, each once; not what those hold."""
    waiting, seen = deque(roots), {id(root) for root in roots}
    kept_alive = list(roots)  # an id belongs to one object for as long as that lives
    while waiting:
        found = waiting.popleft()
        if is_wanted(found):
            yield found
            continue
        for part in _parts_of(found):
            if id(part) in seen or not _may_hold_more(part):
                continue
            if len(seen) < _MAX_OBJECTS:
                seen.add(id(part))
                kept_alive.append(part)
                waiting.append(part)


def _may_hold_more(part: Any) -> bool:
    try:
        return not (isinstance(part, _PLAIN) or inspect.isroutine(part))
    except others():  # a proxy asks for its object, and there is none
        return False


def _parts_of(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        return
    with suppressed_others():  # a proxy, as above
        attributes = value.__dict__
        if isinstance(attributes, dict):
            yield from list(attributes.values())
    # Not the methods of the user's own class, which may read a sample: looking runs nobody's code.
    items: Iterable[Any] = ()
    if isinstance(value, list):
        items = list.__iter__(value)
    elif isinstance(value, tuple):
        items = tuple.__iter__(value)
    elif isinstance(value, dict):
        items = dict.values(value)
    yield from list(itertools.islice(items, _MAX_ITEMS))


def device_of(*roots: Any) -> str:
    """The device of a tensor that is not in the host's memory, as `cuda:0`; "" when there is none."""
    for tensor in reachable(roots, lambda found: isinstance(found, torch.Tensor) and found.device.type != "cpu"):
        return str(tensor.device)
    return ""


def holders(root: Any) -> list[dict[Any, Any] | list[Any]]:
    """Where the parts of an object stand: attributes, dictionaries and lists, the nearest first.

    Long ones hold data; of many the first are given.
    """
    found: list[dict[Any, Any] | list[Any]] = []

    def note(held: Any) -> bool:
        with suppressed_others():  # a proxy, as above
            for place in (held, getattr(held, "__dict__", None)):
                if isinstance(place, dict | list) and len(place) <= _MAX_ITEMS:
                    found.append(place)
        return len(found) >= _MAX_ITEMS

    next(reachable((root,), note), None)
    return found


# Random generators that a dataset or a collate function holds itself, as in `self.rng = np.random.default_rng()`.
#
# torch's worker processes each have a copy of them, so what they draw depends on how many processes there are and on
# what each made before. Here they are seeded before each sample, as the global generators are: a sample then does not
# depend on who makes it. In a program that only knows torch the seed follows from the generator's own state (see
# `origins`), so the program's seeds keep their meaning, and two generators of one state draw the same numbers, as they
# do there.
#
# Found are generators of `random`, NumPy and torch, and objects with `set_random_state(seed=...)` (MONAI's transforms),
# wherever `reachable` looks, in the classes of what is there, and in globals of the program that its code names.


class OwnGenerators:
    """The generators that some objects hold.

    Args:
        *roots: where to look; what is attached to them later is not found.
    """

    def __init__(self, *roots: Any) -> None:
        found: dict[int, Any] = {}
        looked: set[int] = set()

        def note(held: Any) -> bool:
            if _is_generator(held) or _is_randomizable(held):
                found.setdefault(id(held), held)
                return True
            for generator in _beside(held, looked):
                found.setdefault(id(generator), generator)
            return False

        for _ in reachable(roots, note):
            pass
        self._found = list(found.values())

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._found)

    def seed(self, seed: int, origins: Sequence[int] | None = None) -> None:
        """Seed each of them, for one sample.

        Args:
            seed: 64 bits.
            origins: of each, see `Origins.own`.
        """
        for place, generator in enumerate(self._found):
            own = derive_seed(seed, place) if origins is None else derive_seed(seed ^ origins[place])
            _seed(generator, own)

    def states(self) -> list[Any]:
        """The states that they have now, for `restore` and `digests`."""
        return [_state_of(generator) for generator in self._found]

    def restore(self, states: Sequence[Any]) -> None:
        """Give each the state back that it had."""
        for generator, state in zip(self._found, states, strict=True):
            _restore(generator, state)

    def digests(self) -> list[int]:
        """Of the state of each, with its kind."""
        return [digest_of_state((type(generator).__name__, _state_of(generator))) for generator in self._found]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Give them the states back that they had."""
        states = self.states()
        try:
            yield
        finally:
            self.restore(states)


def _beside(held: Any, looked: set[int]) -> Iterator[Any]:
    """Generators in the classes of an object, and in globals and closures that its code names.

    Args:
        held: the object, or a function.
        looked: ids of classes and of code that was looked at before.
    """
    functions: list[Any] = [held]
    for kind in type(held).__mro__:
        if id(kind) not in looked and kind is not object:
            looked.add(id(kind))
            for value in vars(kind).values():
                if _is_generator(value):
                    yield value
                functions.append(value)
    with contextlib.suppress(Exception):  # a proxy asks for its object, and there is none
        functions += vars(held).values()
    for value in functions:
        yield from _named_by(function_of(value), looked)


def _named_by(function: FunctionType | None, looked: set[int]) -> Iterator[Any]:
    if function is None or id(function.__code__) in looked or not is_programs(function):
        return
    looked.add(id(function.__code__))
    named = [function.__globals__.get(name) for name in names_in(function.__code__)]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            named.append(cell.cell_contents)
    for value in named:
        if _is_generator(value):
            yield value
        else:
            yield from _named_by(function_of(value), looked)


def function_of(value: Any) -> FunctionType | None:
    """The function that a method, a property or a partial is made of."""
    for _ in range(8):  # a partial of a partial
        if isinstance(value, FunctionType):
            return value
        if isinstance(value, staticmethod | classmethod | MethodType):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, deterministic):
            value = value.function
        else:
            break
    return None


def _is_generator(value: Any) -> bool:
    return isinstance(value, random.Random | np.random.Generator | np.random.RandomState | torch.Generator)


def _is_randomizable(value: Any) -> bool:
    method = getattr(type(value), "set_random_state", None)
    if not inspect.isfunction(method):
        return False
    return "seed" in inspect.signature(method).parameters


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.set_random_state(seed=seed & 0xFFFFFFFF)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState | torch.Generator):
        return generator.get_state()
    return {name: _state_of(held) for name, held in _held_by(generator).items()}


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState | torch.Generator):
        generator.set_state(state)
    else:
        for name, held in _held_by(generator).items():
            # Not to a generator of its class, which other objects draw from: it was not seeded here.
            if name in getattr(generator, "__dict__", ()) and name in state:
                _restore(held, state[name])


def _held_by(randomizable: Any) -> dict[str, Any]:
    """The generators of an object with `set_random_state`, by attribute: its own, or as MONAI's its class's until it is
    seeded."""
    places = [*map(vars, reversed(type(randomizable).__mro__)), getattr(randomizable, "__dict__", {})]
    return {name: value for place in places for name, value in place.items() if _is_generator(value)}


class Watched(Protocol):
    """Is told where user code is, by the thread (0 is the process's main one)."""

    def at_sample(self, sample_index: int, thread: int = 0) -> None:
        """User code is about to run for a sample, or with -1 for all of them."""

    def rest(self, thread: int = 0) -> None:
        """None runs in this thread."""


class _Unwatched:
    def at_sample(self, sample_index: int, thread: int = 0) -> None: ...

    def rest(self, thread: int = 0) -> None: ...


_UNWATCHED = _Unwatched()

# What `random.seed` does with a whole number, without its look at what kind of seed it is: this runs for each sample.
_python_generator: Any = vars(random)["_inst"]
_seed_python = super(random.Random, _python_generator).seed

# torch draws a base seed from 0 to this.
LARGEST_BASE_SEED = 2**63 - 1


# Of an exception's text and of its traceback; more says no more, and goes through the dispatcher.
_MOST_TEXT = 64 << 10

# So that the numbers that a batch stage draws are none of those of samples and of collate functions.
_STAGE_SEED, _GPU_STAGE_SEED, _FORWARD_STAGE_SEED = 0x7374616765, 0x677075, 0x666F7277617264


# A pipeline's `batch_stage` and `forward_stage`.
Stages = tuple[BatchStage | None, BatchStage | None]


def same_stages(stages: Stages, others: Stages) -> bool:
    """Whether they are the very same objects: what they are made of may change unseen."""
    return stages[0] is others[0] and stages[1] is others[1]


class SampleError(Exception):
    """User code raised for one sample; the cause is chained. Internal: it carries the index to where it is reported."""

    def __init__(self, sample_index: int) -> None:
        super().__init__(sample_index)
        self.sample_index = sample_index

    def user_error(self) -> BaseException:
        """The exception that user code raised."""
        if isinstance(self.__cause__, StopIteration):
            # As itself it would end the training loop as if the data had ended (compare PEP 479).
            return RuntimeError(f"the dataset, or a function that the loader was given, raised {self.__cause__!r}")
        error = self.__cause__ or self
        # The exception is the user's own object: its text stays, its traceback says which sample (Python 3.11).
        note = f"hetstream: sample {self.sample_index}"
        if self.sample_index >= 0 and hasattr(error, "add_note") and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        return error


@dataclass(frozen=True)
class Pipeline:
    """What a data worker needs to make batches.

    Attributes:
        dataset: map-style dataset.
        collate_fn: turns a list of samples (or, unbatched, one sample) into a batch.
        num_samples: length of the dataset where it was defined, checked where it is used; -1 where it has none.
        worker_init_fn: called in each data worker process, see `EnteredPipeline`.
        batched: whether a step is a list of samples.
        buckets: the samples by length, when they are read in rounds of like lengths.
        stream_buckets: the same for the elements of an IterableDataset, whose lengths nobody knows before they come.
        batch_stage: what each batch goes through after `collate_fn`, if there is one.
        gpu_stage: what it goes through then, on data workers that have a GPU.
        forward_stage: what it goes through last, where its last stage runs: operators of the model's forward.
        num_workers: processes that user code sees in `get_worker_info()`: the loader's own number, at least 1.
        has_workers: these are processes of their own; else the program makes the samples itself.
        own_generators: what `with_own_generators` found in the objects here; None where they are not used.
        origins: what the seeds of samples are mixed with.
        cache_place: where the deterministic front of samples is kept, for `parse_cache`; "" where it is not.
        cache: it, in the process that makes the samples.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    num_samples: int
    worker_init_fn: Callable[[int], None] | None = None
    batched: bool = True
    buckets: LengthBuckets | None = None
    stream_buckets: StreamBuckets | None = None
    batch_stage: BatchStage | None = None
    gpu_stage: BatchStage | None = None
    forward_stage: BatchStage | None = None
    num_workers: int = 1
    has_workers: bool = False
    own_generators: OwnGenerators | None = field(default=None, compare=False)
    origins: Origins = field(default=PLAIN, compare=False)
    cache_place: str = ""
    cache: PrefixCache | None = field(default=None, compare=False)

    @property
    def thread_safe(self) -> bool:
        """Whether the dataset says that several threads may make its samples; they draw from `sample_generator()`."""
        return is_its_own(self.dataset, "thread_safe") and self.dataset.thread_safe is True

    @property
    def user_objects(self) -> dict[str, Any]:
        """What makes its samples, by the names that torch's DataLoader has for it."""
        return {"dataset": self.dataset, "collate_fn": self.collate_fn}

    def with_own_generators(self) -> Pipeline:
        """The same, for the process that makes its samples: what it holds of generators is seeded before each.

        Of an IterableDataset those of the batch stage alone: each shard has a copy of the dataset, and no seed for each
        element.
        """
        is_stream = isinstance(self.dataset, torch.utils.data.IterableDataset)
        roots = () if is_stream else (self.dataset, self.collate_fn)
        own = OwnGenerators(*roots, self.batch_stage, self.gpu_stage) or None
        keeps = bool(self.cache_place) and not is_stream
        return replace(
            self, own_generators=own, cache=PrefixCache(self.cache_place, self.dataset, own) if keeps else None
        )

    @property
    def threads_help(self) -> bool:
        """Whether the samples of a batch are made one by one, so that several threads can make them."""
        if not self.batched or not self.thread_safe or isinstance(self.dataset, torch.utils.data.IterableDataset):
            return False
        if reads_apart(self.dataset):
            return self.dataset.transform is not None
        return not callable(getattr(self.dataset, "__getitems__", None))

    def make_batch(
        self,
        indices: Indices,
        seeds: Sequence[int],
        watched: Watched = _UNWATCHED,
        team: ThreadTeam | None = None,
        form: IndexForm = INTS,
    ) -> Any:
        """Read, transform and collate the samples of one step, and run the batch stage.

        A dataset that `reads_apart` (hetstream's sources) is read once for the batch and transformed with a seed for
        each sample; another one with `__getitems__` has one seed for the batch. For a thread-safe
        one the global generators are seeded once, for the collate function: its samples do not draw from them.

        Args:
            indices: int64 array; one index when not batched, or with the shape (1, n) one that is a list.
            seeds: 64-bit seed of each sample.
            watched: told the index before user code runs for a sample, and -1 before it runs for all.
            team: threads that make the samples, of a thread-safe dataset; the batch is the same without.
            form: in which form the dataset is asked for them.

        Raises:
            SampleError: user code raised; the cause is its exception, the index -1 when it was not in one sample.
        """
        wanted, step_seed = indices.tolist(), seeds[0]  # which is computed at each look
        dataset = self.dataset if self.cache is None else self.cache.dataset
        # Most steps have this form, and comparing costs more than looking: one that is equal gives the same.
        given = wanted if form is INTS else form.given(indices)
        seeds_all = not self.thread_safe
        if not self.batched:
            read = partial(getitem, dataset, wanted[0] if form is INTS else given)
            sample = -1 if isinstance(wanted[0], list) else wanted[0]
            samples = self._make_sample(read, sample, step_seed, seeds_all, watched)
        elif reads_apart(self.dataset):
            samples = self._together(self.dataset.read_samples, wanted, wanted, step_seed, watched)
            transform = self.dataset.transform
            if transform is not None:
                work = [partial(transform, raw) for raw in samples], wanted, seeds
                samples = self._each(*work, seeds_all, watched, team)
        elif callable(getattr(dataset, "__getitems__", None)):
            samples = self._together(dataset.__getitems__, given, wanted, step_seed, watched)
        else:
            reads = [partial(getitem, dataset, index) for index in given]
            samples = self._each(reads, wanted, seeds, seeds_all, watched, team)
        watched.at_sample(-1)
        if not seeds_all:
            self._seed(step_seed)
        return self.collated(samples, step_seed, wanted)

    def _each(
        self,
        makes: Sequence[Callable[[], Any]],
        wanted: list[int],
        seeds: Sequence[int],
        seeds_all: bool,
        watched: Watched,
        team: ThreadTeam | None,
    ) -> list[Any]:
        work = list(zip(makes, wanted, seeds, strict=True))
        if team is None or not self.threads_help:
            return [self._make_sample(*each, seeds_all, watched) for each in work]

        def make(place: int, thread: int) -> Any:
            return self._make_sample(*work[place], seeds_all, watched, thread)

        return team.map(make, len(work), watched.rest)

    def _together(
        self, read: Callable[[Any], list[Any]], given: Any, wanted: list[int], seed: int, watched: Watched
    ) -> Any:
        # One seed for the batch: the dataset does not say where one sample's random numbers begin.
        watched.at_sample(-1)
        self._seed(seed)
        try:
            with making_sample(seed ^ self.origins.torch, self.cache):
                return read(given)
        except Exception as error:
            raise SampleError(_sample_at(place_at_fault(error, given, read), wanted)) from error

    def _make_sample(
        self, make: Callable[[], Any], index: int, seed: int, seeds_all: bool, watched: Watched, thread: int = 0
    ) -> Any:
        watched.at_sample(index, thread)
        if seeds_all:
            self._seed(seed)
        try:
            with making_sample(seed ^ self.origins.torch, self.cache):
                return make()
        except Exception as error:
            raise SampleError(index) from error

    def _seed(self, seed: int) -> None:
        seed_generators(seed, self.origins)
        if self.own_generators is not None:
            self.own_generators.seed(seed, self.origins.own)

    def collated(self, samples: Any, step_seed: int, indices: Sequence[Any] = ()) -> Any:
        """Make a batch of a step's samples: collate them, and run the batch stage.

        Args:
            samples: of the step.
            step_seed: 64 bits that no other step of the epoch has; with indexed data that of its first sample.
            indices: of indexed data, of the samples; an error of one of them alone then has its index.

        Raises:
            SampleError: user code raised. Where it says which row of the batch is at fault, it names the row's file.
        """
        try:
            return self._collated(samples, step_seed)
        except SampleError as error:
            if not self.batched:
                raise
            place = place_at_fault(error.__cause__, samples, lambda some: self._collated(some, step_seed))
            if place < 0:
                raise
            named(error.__cause__, samples[place])
            raise SampleError(_sample_at(place, indices)) from error.__cause__

    def _collated(self, samples: Any, step_seed: int) -> Any:
        try:
            batch = self.collate_fn(samples)
        except Exception as error:
            raise SampleError(-1) from error
        if self.batch_stage is not None:
            batch = self._staged(self.batch_stage, batch, derive_seed(step_seed, _STAGE_SEED))
        return self.finished(batch, step_seed)

    @property
    def stages(self) -> Stages:
        """What may change between two steps."""
        return self.batch_stage, self.forward_stage

    def with_stages(self, stages: Stages) -> Pipeline:
        """The same with others."""
        return replace(self, batch_stage=stages[0], forward_stage=stages[1])

    @property
    def before_gpu(self) -> Pipeline:
        """The same without its last stage: what data workers without a GPU run."""
        return self if self.gpu_stage is None else replace(self, gpu_stage=None, forward_stage=None)

    def finished(self, batch: Any, step_seed: int) -> Any:
        """Run the last stages on what `before_gpu` has collated; `step_seed` as in `collated`.

        Raises:
            SampleError: user code raised.
        """
        if self.gpu_stage is not None:
            batch = self._staged(self.gpu_stage, batch, derive_seed(step_seed, _GPU_STAGE_SEED))
            if device := device_of(batch):
                error = PipelineError(f"gpu_stage returned a tensor on {device}: give what it makes back with .cpu()")
                raise SampleError(-1) from error
        if self.forward_stage is not None:
            batch = self._staged(self.forward_stage, batch, derive_seed(step_seed, _FORWARD_STAGE_SEED))
        return batch

    def _staged(self, stage: BatchStage, batch: Any, seed: int) -> Any:
        self._seed(seed)
        try:
            return run_stage(stage, batch, seed ^ self.origins.torch)
        except Exception as error:
            raise SampleError(-1) from error

    def description(self) -> dict[str, str]:
        """What makes two pipelines the same, in words that an error can show."""
        by_length = self.buckets or self.stream_buckets
        return {
            "dataset": _name_of(self.dataset),
            "length": str(self.num_samples),
            "collate_fn": _name_of(self.collate_fn),
            "batched": str(self.batched),
        } | ({} if by_length is None else {"buckets": by_length.description})


def _sample_at(place: int, indices: Sequence[Any]) -> int:
    """The index of a sample of a step; -1 where it is not known, or is no number."""
    return indices[place] if 0 <= place < len(indices) and isinstance(indices[place], int) else -1


def is_its_own(value: object, name: str) -> bool:
    """Whether an attribute stands in an object or in its class: a wrapper may find those of what it wraps."""
    return hasattr(type(value), name) or name in getattr(value, "__dict__", ())


def fingerprint_of(dataset: Any) -> str:
    """What a dataset itself says that its samples depend on: its `fingerprint`, or Hugging Face's `_fingerprint`.

    A program's own attribute that is called so, and is no text or number, or a method that takes arguments, is none.
    """
    for name in ("fingerprint", "_fingerprint"):
        found = getattr(dataset, name) if is_its_own(dataset, name) else None
        if inspect.isroutine(found) and not inspect.signature(found).parameters:
            found = found()
        if isinstance(found, str | bytes | int):
            return str(found)
    return ""


def describe_failure(error: Exception, is_final: bool = False) -> Failure:
    """Put an exception of user code into a message: its type by name, its text, and where it happened."""
    sample_index = -1
    cause: BaseException = error
    if isinstance(error, SampleError):
        sample_index, cause = error.sample_index, error.user_error()
    kind = type(cause)
    try:
        text = str(cause)
    except Exception as failed:  # noqa: BLE001, user code again: the class makes its own text
        text = f"(its text cannot be made: {type(failed).__name__})"
    remote = "".join(traceback.format_exception(kind, cause, cause.__traceback__))
    name = (kind.__module__, kind.__qualname__)
    where = os.uname().nodename, os.getpid()
    python = str(this_interpreter())
    return Failure(sample_index, name, _sendable(text), _sendable(remote), *where, is_final, python)


def _sendable(text: str) -> str:
    """Text in UTF-8, and without its middle where an exception carries, say, all of its data."""
    text = text.encode(errors="backslashreplace").decode()
    num_left_out = len(text) - _MOST_TEXT
    if num_left_out <= 0:
        return text
    half = _MOST_TEXT // 2
    return f"{text[:half]}\n[... {num_left_out:,} characters left out ...]\n{text[-half:]}"


def without(policy: ErrorPolicy, left_out: Collection[Failure]) -> set[int]:
    """The samples that a step is to be made without; with -1 among them, all."""
    if not left_out and not policy.quarantined:  # as nearly all steps
        return set()
    return {*policy.quarantined, *[failure.sample_index for failure in left_out]}


def leave_out(indices: Indices, seeds: Sequence[int], samples: Collection[int]) -> tuple[Indices, Sequence[int]]:
    """A step without some samples, as `without` names them; the others keep their seeds.

    What is read by a list as its index is read whole, or not at all.
    """
    if -1 in samples:
        return indices[:0], []
    if not samples or indices.ndim > 1:
        return indices, seeds
    kept = [place for place, index in enumerate(indices.tolist()) if index not in samples]
    return indices[kept], [seeds[place] for place in kept]


class MadeStep(msgspec.Struct, frozen=True):
    """A batch, and what it lacks.

    Attributes:
        batch: the batch; None when no sample is left.
        num_samples, num_skipped: samples of the step that are in it, and that are not.
        left_out, wrote, cache: those that failed now, what samples did to files, and what a prefix cache did for them,
            as in `messages.Batch`.
    """

    batch: Any
    num_samples: int
    num_skipped: int
    left_out: list[Failure]
    wrote: str = ""
    cache: CacheReport | None = None

    def pin_memory(self) -> MadeStep:
        """The same with its batch in pinned memory; torch's own loader calls it, in process."""
        return msgspec.structs.replace(self, batch=_pin_memory(self.batch))


def make_step(
    pipeline: Pipeline,
    indices: Indices,
    seeds: Sequence[int],
    policy: ErrorPolicy,
    form: IndexForm = INTS,
    watched: Watched = _UNWATCHED,
) -> MadeStep:
    """Make a step in this process, with the attempts and the policy that it has on data workers.

    Raises:
        SampleError: user code raised, and the policy is to raise.
    """
    failures = StepFailures()
    while True:
        kept, their_seeds = leave_out(indices, seeds, without(policy, failures.left_out))
        try:
            with ForksEndHere():
                batch = pipeline.make_batch(kept, their_seeds, watched, form=form) if len(kept) else None
            cache = None if pipeline.cache is None else pipeline.cache.take_report()
            return MadeStep(batch, len(kept), len(indices) - len(kept), failures.left_out, cache=cache)
        except SampleError as error:
            if failures.note("", describe_failure(error), policy) is OnFailure.RAISE:
                raise


def seed_generators(seed: int, origins: Origins = PLAIN) -> None:
    """Seed the global generators of Python, NumPy and torch's CPU."""
    _seed_python(seed ^ origins.python)
    _python_generator.gauss_next = None
    np.random.seed((seed ^ origins.numpy) & 0xFFFFFFFF)
    # torch's generator makes the same numbers of it, and user code can put `torch.initial_seed()` into a tensor.
    torch.default_generator.manual_seed((seed ^ origins.torch) & LARGEST_BASE_SEED)


@contextlib.contextmanager
def generators_kept(own: OwnGenerators | None = None) -> Iterator[None]:
    """Give the trainer its own random state back after a batch was made in its process.

    Args:
        own: generators of the objects that make the batch, where those are the trainer's.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with own.kept() if own is not None else contextlib.nullcontext():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _name_of(value: Any) -> str:
    named = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    module = getattr(named, "__module__", "")
    return f"{module}.{getattr(named, '__qualname__', repr(named))}".removeprefix("builtins.")


def use_one_thread() -> None:
    """Keep torch's thread pool out of data worker processes: each has one CPU."""
    torch.set_num_threads(1)
