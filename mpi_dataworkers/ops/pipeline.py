"""From sample indices to a batch: the one function that data workers, the loader in process and its fallback all run.

A batch depends on the pipeline, the indices and the seeds, and on nothing else: before each sample the generators of
Python's `random`, of NumPy and of torch are seeded (see `sharding.SampleSeeds`), and those that the dataset holds (see
`own_generators`), or, for a thread-safe dataset, those of `sample_generator`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import getitem
from typing import Any, Protocol

import cloudpickle
import numpy as np
import torch
import torch.utils.data
from torch.utils.data._utils import pin_memory as torch_pin
from torch.utils.data._utils import worker as torch_worker

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.generators import making_sample
from hetstream.mpi_dataworkers.interpreter import this_interpreter
from hetstream.mpi_dataworkers.ops.index_form import INTS, IndexForm
from hetstream.mpi_dataworkers.ops.own_generators import OwnGenerators
from hetstream.mpi_dataworkers.ops.pickling import digest_of, pickle_apart, unpickle
from hetstream.mpi_dataworkers.ops.program import is_own, program_of, settings_of
from hetstream.mpi_dataworkers.ops.reached import Reached
from hetstream.mpi_dataworkers.order.bucketing import LengthBuckets
from hetstream.mpi_dataworkers.order.rounds import StreamBuckets
from hetstream.mpi_dataworkers.order.sharding import Indices
from hetstream.mpi_dataworkers.sources.together import reads_apart
from hetstream.mpi_dataworkers.wire.codec import Buffer
from hetstream.mpi_dataworkers.wire.messages import ErrorPolicy, Failure, Program
from hetstream.mpi_dataworkers.worker.failures import StepFailures, Verdict
from hetstream.mpi_dataworkers.worker.threads import ThreadTeam

_pin_memory: Any = torch_pin.pin_memory
_numpy_seed: Any = torch_worker._generate_state


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

# torch draws a base seed from 0 to this.
_LARGEST_BASE_SEED = 2**63 - 1


# Of an exception's text and of its traceback; more says no more, and goes through the dispatcher.
_MOST_TEXT = 64 << 10


class SampleError(Exception):
    """User code raised for one sample; the cause is chained. Internal: it carries the index to where it is reported."""

    def __init__(self, sample_index: int) -> None:
        super().__init__(sample_index)
        self.sample_index = sample_index

    def user_error(self) -> BaseException:
        """The exception that user code raised."""
        if isinstance(self.__cause__, StopIteration):
            # As itself it would end the training loop as if the data had ended (compare PEP 479).
            return RuntimeError(f"the dataset raised {self.__cause__!r}")
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
        num_workers: processes that user code sees in `get_worker_info()`: the loader's own number, at least 1.
        own_generators: what `with_own_generators` found in the objects here; None where they are not used.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    num_samples: int
    worker_init_fn: Callable[[int], None] | None = None
    batched: bool = True
    buckets: LengthBuckets | None = None
    stream_buckets: StreamBuckets | None = None
    num_workers: int = 1
    own_generators: OwnGenerators | None = field(default=None, compare=False)

    @property
    def thread_safe(self) -> bool:
        """Whether the dataset says that several threads may make its samples; they draw from `sample_generator()`."""
        return is_its_own(self.dataset, "thread_safe") and self.dataset.thread_safe is True

    def with_own_generators(self) -> Pipeline:
        """The same, for the process that makes its samples: what it holds of generators is seeded before each."""
        return replace(self, own_generators=OwnGenerators(self.dataset, self.collate_fn))

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
        """Read, transform and collate the samples of one step.

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
        wanted = indices.tolist()
        # Most steps have this form, and comparing costs more than looking: one that is equal gives the same.
        given = wanted if form is INTS else form.given(indices)
        seeds_all = not self.thread_safe
        if not self.batched:
            read = partial(getitem, self.dataset, wanted[0] if form is INTS else given)
            sample = -1 if isinstance(wanted[0], list) else wanted[0]
            samples = self._one(read, sample, seeds[0], seeds_all, watched)
        elif reads_apart(self.dataset):
            samples = self._together(self.dataset.read_samples, wanted, seeds[0], watched)
            transform = self.dataset.transform
            if transform is not None:
                work = [partial(transform, raw) for raw in samples], wanted, seeds
                samples = self._each(*work, seeds_all, watched, team)
        elif callable(getattr(self.dataset, "__getitems__", None)):
            samples = self._together(self.dataset.__getitems__, given, seeds[0], watched)
        else:
            reads = [partial(getitem, self.dataset, index) for index in given]
            samples = self._each(reads, wanted, seeds, seeds_all, watched, team)
        watched.at_sample(-1)
        if not seeds_all:
            self._seed(seeds[0])
        return self._collate(samples)

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

        def one(place: int, thread: int) -> Any:
            return self._one(*work[place], seeds_all, watched, thread)

        if team is None or not self.threads_help:
            return [one(place, 0) for place in range(len(work))]
        return team.map(one, len(work), watched.rest)

    def _together(self, read: Callable[[Any], list[Any]], wanted: Any, seed: int, watched: Watched) -> Any:
        # One seed for the batch: the dataset does not say where one sample's random numbers begin.
        watched.at_sample(-1)
        self._seed(seed)
        try:
            with making_sample(seed):
                return read(wanted)
        except Exception as error:
            raise SampleError(-1) from error

    def _one(
        self, make: Callable[[], Any], index: int, seed: int, seeds_all: bool, watched: Watched, thread: int = 0
    ) -> Any:
        watched.at_sample(index, thread)
        if seeds_all:
            self._seed(seed)
        try:
            with making_sample(seed):
                return make()
        except Exception as error:
            raise SampleError(index) from error

    def _seed(self, seed: int) -> None:
        seed_generators(seed)
        if self.own_generators is not None:
            self.own_generators.seed(seed)

    def _collate(self, samples: Any) -> Any:
        try:
            return self.collate_fn(samples)
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


def is_its_own(value: object, name: str) -> bool:
    """Whether an attribute stands in an object or in its class: a wrapper may find those of what it wraps."""
    # A loop, not `any` over a generator: it is asked for each batch.
    for kind in type(value).__mro__:
        if name in kind.__dict__:
            return True
    return name in getattr(value, "__dict__", ())


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
    return {*policy.quarantined, *(failure.sample_index for failure in left_out)}


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


@dataclass(frozen=True)
class MadeStep:
    """A batch, and what it lacks.

    Attributes:
        batch: the batch; None when no sample is left.
        num_samples, num_skipped: samples of the step that are in it, and that are not.
        left_out: those that failed now, as in `messages.Batch`.
    """

    batch: Any
    num_samples: int
    num_skipped: int
    left_out: list[Failure]

    def pin_memory(self) -> MadeStep:
        """The same with its batch in pinned memory; torch's own loader calls it, in process."""
        return replace(self, batch=_pin_memory(self.batch))


def make_step(
    pipeline: Pipeline, indices: Indices, seeds: Sequence[int], policy: ErrorPolicy, form: IndexForm = INTS
) -> MadeStep:
    """Make a step in this process, with the attempts and the policy that it has on data workers.

    Raises:
        SampleError: user code raised, and the policy is to raise.
    """
    failures = StepFailures()
    while True:
        kept, their_seeds = leave_out(indices, seeds, without(policy, failures.left_out))
        try:
            batch = pipeline.make_batch(kept, their_seeds, form=form) if len(kept) else None
            return MadeStep(batch, len(kept), len(indices) - len(kept), failures.left_out)
        except SampleError as error:
            if failures.note("", describe_failure(error), policy) is Verdict.RAISE:
                raise


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch's CPU."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # torch's generator makes the same numbers of it, and user code can put `torch.initial_seed()` into a tensor.
    torch.default_generator.manual_seed(seed & _LARGEST_BASE_SEED)


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


# --- definition: the pipeline as it travels -------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """A pipeline in pickled form, with what its code needs of the program around it.

    Attributes:
        definition_id: see `digest_of`.
        program: the trainer's.
        settings: what the trainer has set, for `ops.program.SettingsInForce`.
        blob: the pickle stream, for `load_pipeline`.
        buffers: the large buffers that the stream refers to. In the trainer they are the dataset's own memory; in a
            data worker they are shared with others until someone writes to them.
        shared: numbers of the buffers that lie in memory which the trainer shares with other processes; where samples
            are made, of those that they could write to.
    """

    definition_id: str
    program: Program
    settings: bytes
    blob: Buffer
    buffers: Sequence[Buffer] = ()
    shared: Sequence[int] = ()

    def with_buffers(self, buffers: Sequence[Buffer]) -> Definition:
        """The same pipeline with other bytes in its buffers."""
        definition_id = digest_of(self.blob, buffers, self.program, self.settings)
        return replace(self, definition_id=definition_id, buffers=buffers)

    def in_private(self) -> Definition:
        """The same in memory of its own: what samples write there is not written into the program's arrays."""
        return replace(self, buffers=[bytearray(buffer) for buffer in self.buffers], shared=self.written)

    @property
    def written(self) -> list[int]:
        """Of the shared buffers those that samples could write to."""
        return [number for number in self.shared if not memoryview(self.buffers[number]).readonly]

    def digest_of_shared(self) -> str:
        """Digest of the buffers that lie in shared memory, as they are now."""
        return digest_of(b"", [self.buffers[number] for number in self.shared], self.program, b"")


def define(pipeline: Pipeline) -> Definition:
    """Pickle a pipeline. Classes and functions of `__main__` travel by value, those of modules by name.

    Raises:
        PipelineError: something in it cannot be pickled; the message names the object.
    """
    try:
        pickled = pickle_apart(pipeline)
    except Exception as error:  # pickling runs user code (__reduce__, __getstate__): any exception may come
        where = find_unpicklable(pipeline)
        raise PipelineError(
            f"the dataset cannot be sent to data workers: {where} cannot be pickled ({error}). Open files, locks and "
            "connections belong into __getitem__ or worker_init_fn, or leave them out in __getstate__."
        ) from error
    try:
        reached = Reached(pickled.met, is_own)
        rest = program_of(reached), settings_of(reached), pickled.blob
    except Exception as error:  # looking at a proxy runs user code, too
        raise PipelineError(
            f"the dataset cannot be sent to data workers: an object that its code names cannot be looked at ({error!r})"
        ) from error
    return Definition("", *rest, shared=pickled.shared).with_buffers(pickled.buffers)


def has_changed(definition: Definition) -> bool:
    """Whether the program has written to the arrays of a dataset since it was defined in this process."""
    return definition.with_buffers(definition.buffers).definition_id != definition.definition_id


def load_pipeline(definition: Definition) -> Pipeline:
    """Rebuild a pipeline, in a data worker in the program that it comes from.

    Raises:
        PipelineError: it cannot be rebuilt here, or its dataset has another length here.
    """
    try:
        pipeline: Pipeline = unpickle(definition.blob, definition.buffers)[0]
        here = len(pipeline.dataset) if pipeline.num_samples >= 0 else -1
    except BaseException as error:  # unpickling runs user code: anything may come (a module that calls sys.exit, too)
        text = f"{type(error).__name__}: {error}"
        raise PipelineError(
            f"the dataset cannot be rebuilt in a data worker: {text}. What it imports and opens when it is unpickled "
            "must be on the data workers' hosts, under the same names."
        ) from error
    if here != pipeline.num_samples:
        raise PipelineError(
            f"the dataset has {here} samples in a data worker and {pipeline.num_samples} in the trainer: its files "
            "changed, or differ between hosts. All hosts must see the same data."
        )
    return pipeline


def copy_of(definition: Definition) -> tuple[Pipeline, list[type]]:
    """A copy of a pipeline in the process that has defined it. Its classes are the program's own, as they are now.

    Args:
        definition: in private memory; what samples write is written there.

    Returns:
        The copy, and classes of the script that the program has changed since.

    Raises:
        PipelineError: user code raised.
    """
    try:
        return unpickle(definition.blob, definition.buffers)
    except Exception as error:  # unpickling runs user code: any exception may come
        raise PipelineError(f"the dataset cannot be rebuilt in the trainer: {type(error).__name__}: {error}") from error


def difference(copied: Any, current: Any, path: str = "", depth: int = 0) -> str:
    """Where two objects differ, as `dataset.transform`, as far as pickling shows; "" when it shows nothing.

    Args:
        copied: the earlier one, unpickled.
        current: the later one, of which a part can no longer be pickled.
    """
    try:
        # Through pickle once, as the earlier one: what Python shares between objects is then alike.
        same = cloudpickle.dumps(copied) == cloudpickle.dumps(unpickle(cloudpickle.dumps(current))[0])
        return "" if same else path.lstrip(".") or "it"
    except Exception:  # noqa: BLE001, pickling runs user code; the question is only whether it raises
        if depth >= 8 or type(copied) is not type(current) or not hasattr(current, "__dict__"):
            return ""
    before, after = vars(copied), vars(current)
    for name in before.keys() & after.keys():
        if found := difference(before[name], after[name], f"{path}.{name}", depth + 1):
            return found
    return ""


def find_unpicklable(value: Any, path: str = "", above: Sequence[Any] = ()) -> str:
    """Name the innermost object that cannot be pickled, as `dataset.transform.lock (_thread.lock)`, or of a script
    `dataset.__getitem__ -> global LOCK (_thread.lock)`."""
    above = (*above, value)
    try:
        parts = list(_named_parts(value)) if len(above) <= 8 else []
    except Exception:  # noqa: BLE001, a proxy's own code, which asks for its object
        parts = []
    for name, part in parts:
        try:
            pickle_apart(part)
        except Exception:  # noqa: BLE001, the question is only whether it raises
            if not any(part is one for one in above):
                return find_unpicklable(part, path + name, above)
    return f"{path.lstrip('.') or 'it'} ({type(value).__module__}.{type(value).__qualname__})"


def _named_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What is pickled with an object. Its methods are, where its class travels by value, with what they read."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    elif inspect.isfunction(value):
        try:
            found = inspect.getclosurevars(value)
        except ValueError:  # a name of its closure has no value yet
            return
        yield from ((f".<closure>.{name}", item) for name, item in found.nonlocals.items())
        yield from ((f" -> global {name}", item) for name, item in found.globals.items())
    elif not inspect.isclass(value):
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())
        for kind in type(value).__mro__:
            yield from ((f".{name}", item) for name, item in vars(kind).items() if inspect.isfunction(item))


# --- what user code sees in a data worker ---------------------------------------------------------------------------


@contextlib.contextmanager
def acting_as_data_worker() -> Iterator[None]:
    """Let the trainer enter a pipeline for one step, and be itself again."""
    before = torch_worker._worker_info
    try:
        yield
    finally:
        torch_worker._worker_info = before


class EnteredPipeline:
    """A pipeline in a process that plays the part of one of torch's worker processes.

    `torch.utils.data.get_worker_info()` has an id below the loader's `num_workers`, the dataset that this process uses
    and torch's seed of that worker: the base seed that torch draws for the pass, plus the id. `worker_init_fn` runs
    once for each base seed, with the generators seeded as torch seeds them for it: torch starts its workers anew for
    each pass, and with `persistent_workers` draws one base seed. Of an IterableDataset each shard plays the part of a
    worker, see `ops.iterable`.

    Args:
        pipeline: as it was loaded in this process.
        number: of the data worker.
    """

    def __init__(self, pipeline: Pipeline, number: int) -> None:
        private = replace(pipeline, collate_fn=_PrivateCollate(pipeline.collate_fn))
        self._worker_id = number % pipeline.num_workers
        self._is_iterable = isinstance(pipeline.dataset, torch.utils.data.IterableDataset)
        self._loaded = pipeline
        self._pipeline = private if self._is_iterable else private.with_own_generators()
        self._entered: set[int] = set()
        # What user code was shown last: to make it anew for each step would cost more than a small sample.
        self._shown_for: int | None = None
        self._shown: Any = None

    def is_new(self, base_seed: int) -> bool:
        """Whether `enter` would run user code."""
        return base_seed not in self._entered

    def enter(self, base_seed: int) -> Pipeline:
        """Let user code see its part; what `worker_init_fn` raises passes through.

        Returns:
            The pipeline to run now.
        """
        if base_seed == self._shown_for:
            torch_worker._worker_info = self._shown  # another pipeline may have been entered since
            return self._pipeline
        begins = not self._is_iterable and self.is_new(base_seed)
        self._shown = enter_worker(self._loaded, base_seed, self._worker_id, begins)
        self._shown_for = base_seed
        if self.is_new(base_seed):
            self._entered.add(base_seed)
            if not self._is_iterable:  # also those that worker_init_fn has made
                self._pipeline = self._pipeline.with_own_generators()
        return self._pipeline


def enter_worker(pipeline: Pipeline, base_seed: int, worker_id: int, begins: bool) -> Any:
    """Show user code a worker's id, seed and dataset; when it begins, seed as torch does and run `worker_init_fn`.

    Returns:
        What `get_worker_info()` gives.
    """
    base_seed &= _LARGEST_BASE_SEED
    seed = base_seed + worker_id
    info = torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker_id, num_workers=pipeline.num_workers, seed=seed, dataset=pipeline.dataset
    )
    if begins and pipeline.worker_init_fn is not None:
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        np.random.seed(_numpy_seed(base_seed, worker_id))
        pipeline.worker_init_fn(worker_id)
    return info


@dataclass(frozen=True)
class _PrivateCollate:
    """A collate function that does not see `get_worker_info()`.

    Where torch sees it, `default_collate` puts each batch into a new shared-memory segment, for a parent process that
    a data worker does not have; that costs several times what collating into private memory does.
    """

    collate_fn: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        info, torch_worker._worker_info = torch_worker._worker_info, None
        try:
            return self.collate_fn(samples)
        finally:
            torch_worker._worker_info = info


def use_one_thread() -> None:
    """Keep torch's thread pool out of data worker processes: each has one CPU."""
    torch.set_num_threads(1)
