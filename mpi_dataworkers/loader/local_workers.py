"""The pipeline in process: torch's own DataLoader, with the worker processes that the program asks for.

Used by `pass_iterator.py`. Indexed data that is not divided has as many processes as the program asks for, each of
which makes whole steps. Divided data has one at most: the order of its steps is that of the shards, whoever makes them.

Both give for each step the `MadeStep` and a snapshot of the shard's reader, or a `FailedStep`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import multiprocessing
import os
import select
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import context
from typing import Any, Final

import torch
import torch.utils.data
from torch import _utils as torch_utils
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data._utils import signal_handling

from hetstream.mpi_dataworkers.loader.shards import Order, PassShards
from hetstream.mpi_dataworkers.loader.user_errors import handed_over, made_at, raised_by_torch, reraised
from hetstream.mpi_dataworkers.ops.origins import PassSeeds
from hetstream.mpi_dataworkers.ops.pipeline import MadeStep, Pipeline, SampleError, generators_kept, make_step
from hetstream.mpi_dataworkers.ops.streams import RankReader, Shard, ShardReader, open_shard, read_step
from hetstream.mpi_dataworkers.ops.worker_context import EnteredPipeline, enter_worker, with_origins_of
from hetstream.mpi_dataworkers.order.interleave import Slot
from hetstream.mpi_dataworkers.process.children import going_first
from hetstream.mpi_dataworkers.process.handlers import others
from hetstream.mpi_dataworkers.process.programs import MARK
from hetstream.mpi_dataworkers.wire.messages import ErrorPolicy, ShardOrder

# torch's worker processes as they are when a pass begins, which wait until they are needed.
#
# torch forks the processes of a pass when it begins, and what the program changes afterwards they do not see. So a
# loader that leaves data workers in the middle of a pass needs processes that were forked before it. They wait at their
# very start, and cost what torch's own cost at the start of a pass: a fork each.

_LOOKS_EACH_S: Final = 5.0  # for the parent, as torch's workers do
_BEGIN, _END = b"b", b"e"


class Start:
    """A pipe on which worker processes wait."""

    def __init__(self) -> None:
        self._parent = os.getpid()
        self._theirs, self._ours = os.pipe()
        self._num_waiting = 0

    def context(self) -> context.BaseContext:
        """Makes processes that wait; all else as torch's default for forked ones does."""
        return _Context(self)

    def make(self, *args: Any, **keywords: Any) -> Any:
        """A process that waits when it is started."""
        process = Process(*args, **keywords)
        process.waits_for = self
        self._num_waiting += 1
        return process

    def give(self) -> None:
        """Have the processes begin."""
        self._tell(_BEGIN)

    def close(self) -> None:
        """Have those that still wait end. Called again, or in a forked process, it does nothing."""
        if os.getpid() == self._parent and self._num_waiting >= 0:
            self._tell(_END)

    def _tell(self, what: bytes) -> None:
        # One byte each. The end of the pipe says nothing: whatever was forked since may hold it, too.
        number, self._num_waiting = self._num_waiting, -1
        with contextlib.suppress(BrokenPipeError):
            os.write(self._ours, what * number)
        os.close(self._ours)
        os.close(self._theirs)

    def wait(self) -> None:
        """In a worker process: come back when it is to begin; else the process ends here."""
        os.close(self._ours)
        waiting = select.poll()
        waiting.register(self._theirs, select.POLLIN)
        # An interrupt is the trainer's; torch's workers are silent about it, too.
        with contextlib.suppress(KeyboardInterrupt), going_first():
            while os.getppid() == self._parent:
                if waiting.poll(_LOOKS_EACH_S * 1000):
                    if os.read(self._theirs, 1) != _BEGIN:
                        break
                    os.close(self._theirs)
                    return
        os._exit(0)


class _Context(context.ForkContext):
    def __init__(self, start: Start) -> None:
        super().__init__()
        self._start = start

    def Process(self, *args: Any, **keywords: Any) -> Any:  # type: ignore[override]
        return self._start.make(*args, **keywords)


class Process(multiprocessing.Process):  # the name is seen by the program
    waits_for: Start

    def run(self) -> None:
        self.waits_for.wait()
        del self.waits_for
        self.__class__ = multiprocessing.Process  # type: ignore[assignment]  # as user code knows it
        self.run()


def forks(multiprocessing_context: Any) -> bool:
    """Whether processes of a loader are forked, and have what is in the program's memory then."""
    if multiprocessing_context is not None:
        return bool(multiprocessing_context.get_start_method() == "fork")
    # To ask for the default would be to decide on it.
    method = multiprocessing.get_start_method(allow_none=True)
    return (method or multiprocessing.get_all_start_methods()[0]) == "fork"


_ExceptionWrapper: Any = torch_utils.ExceptionWrapper
_TorchLoader: Any = torch.utils.data.DataLoader
_signals: Any = signal_handling

# For a process that waits and is told to end.
_ENDS_IN_S = 5.0


class FailedStep:
    """In the place of a step: user code raised while torch's own DataLoader made it.

    A value, because an exception would look like torch's own (a timeout, a process that died), which takes no step.

    Args:
        error: what user code raised.
        in_trainer: in the training process; else the exception has to travel.
    """

    def __init__(self, error: BaseException, in_trainer: bool) -> None:
        kind = type(error)
        where = "in a process of the loader"
        self._error: Any = error if in_trainer else _ExceptionWrapper((kind, error, error.__traceback__), where)

    def raised(self, step: int) -> BaseException:
        """The exception, with its own type; it is of this step."""
        if isinstance(self._error, BaseException):
            return made_at(self._error, step) if isinstance(self._error, Exception) else self._error
        return made_at(reraised(self._error), step)


class FailedInTorch(FailedStep):
    """The same for a program that only knows torch.

    Args:
        handed: what torch's worker process hands over.
        error: what was raised, where it hands over nothing.
        in_trainer: as above.
    """

    def __init__(self, handed: bytes, error: BaseException, in_trainer: bool) -> None:
        super().__init__(error, in_trainer)
        self._handed = handed

    def raised(self, step: int) -> BaseException:
        """The exception, as torch raises it."""
        return raised_by_torch(self._handed) or super().raised(step)


class ShardEnd:
    """In the place of a step: the shard whose turn it was has no more."""


# What a `StepDataset` is asked for: the seeds of the pass, the step, and what `make_step` takes beside the pipeline.
StepRequest = tuple[Any, ...]


def request_of(order: Order, step: int, seeds: PassSeeds, policy: ErrorPolicy) -> StepRequest | None:
    """What makes a step in one of torch's processes; None after the last. Draws the program's sampler up to it."""
    indices = order.indices(step)
    if indices is None:
        return None
    return seeds, step, indices, order.seeds(step, indices, seeds), policy, order.form(step)


def one_sample_of(order: Order, step: int, seeds: PassSeeds, policy: ErrorPolicy, as_step: int) -> StepRequest | None:
    """What makes the first sample of a step alone, as a step of another number; None where there is none."""
    indices = order.indices(step)
    if indices is None or not len(indices):
        return None
    first = indices[:1]
    return seeds, as_step, first, order.seeds(step, first, seeds), policy, order.form(step)


class StepDataset(torch.utils.data.Dataset[Any]):
    """Steps as elements: lets torch's own worker processes run the pipeline, a batch an element."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._entered: EnteredPipeline | None = None  # in one of torch's worker processes
        self._here: Pipeline | None = None  # in the trainer

    def __getitem__(self, request: Any) -> Any:
        try:
            return self.make(request)
        except SampleError as error:
            in_trainer, (seeds, step, *_) = self._entered is None, request
            if seeds.workers is None:
                return FailedStep(error.user_error(), in_trainer)
            return FailedInTorch(handed_over(error, self._pipeline, step), error.user_error(), in_trainer)

    def make(self, request: StepRequest) -> tuple[MadeStep, bytes]:
        """Make a step.

        Raises:
            SampleError: user code raised for it.
        """
        seeds, step, *work = request
        info = torch.utils.data.get_worker_info()
        if info is not None and self._entered is None:
            self._entered = EnteredPipeline(self._pipeline, info.id, is_torchs=True)
        if self._entered is not None:
            return make_step(self._entered.enter(seeds, step), *work), b""
        if self._here is None:
            self._here = self._pipeline.with_own_generators()
            if seeds.workers is not None:
                self._here = with_origins_of(self._here, seeds.workers)
        with generators_kept(self._here.own_generators):
            return make_step(self._here, *work), b""


def no_collate(batch: Any) -> Any:
    """The batch as it is: torch's own DataLoader gets whole ones."""
    return batch


@functools.cache
def _iterator_class(kind: Any) -> Any:
    """A class of torch's iterators, of which nothing is changed."""
    base = torch_dataloader._BaseDataLoaderIter
    as_torch = vars(torch_dataloader.DataLoader).get(MARK) or {each: vars(each) for each in (base, kind)}
    of_kind, of_base = (
        {name: value for name, value in as_torch[each].items() if isinstance(value, types.FunctionType)}
        for each in (kind, base)
    )

    own_process = os.getpid  # at the interpreter's end this module has no names any more

    def end(iterator: Any) -> None:
        # In a process that was forked since, or where it could not begin, there is nothing to end.
        if vars(iterator).get("_of_process") == own_process():
            kind.__del__(iterator)

    def reset(iterator: Any, loader: Any, *args: Any, **keywords: Any) -> None:
        iterator._first_step = loader.first_step
        of_kind["_reset"](iterator, loader, *args, **keywords)

    def put_index(iterator: Any) -> None:
        if iterator._start is not None:
            return
        if iterator._send_idx == 0 and iterator._first_step:
            # torch begins with worker 0. The first step here has been made by others up to now, and goes where it would
            # have gone.
            workers = itertools.cycle(range(iterator._num_workers))
            first = iterator._first_step % iterator._num_workers
            iterator._worker_queue_idx_cycle = itertools.islice(workers, first, None)
        of_kind["_try_put_index"](iterator)

    def shut_down(iterator: Any) -> None:
        start, iterator._start = iterator._start, None
        if start is not None:
            # Nothing was put into their queues, and nothing is: the collector of garbage may be closing these.
            start.close()
            for worker in iterator._workers:
                worker.join(_ENDS_IN_S)
                if worker.is_alive():
                    worker.kill()
                    worker.join()
            iterator._workers = []
        of_kind["_shutdown_workers"](iterator)

    methods: dict[str, Any] = of_kind | ({"__del__": end} if hasattr(kind, "__del__") else {})
    if "_try_put_index" in of_kind:
        methods |= {"_reset": reset, "_try_put_index": put_index, "_shutdown_workers": shut_down, "_start": None}
    # Behind `kind`, whose `super()` looks for the next class: there the methods of torch's base hide what it has now.
    return type(kind.__name__, (kind, type(base.__name__, (base,), of_base)), methods)


class PlainLoader(_TorchLoader):  # type: ignore[misc]
    """torch's own DataLoader, as it is without the hook and whatever else has changed its class.

    Attributes:
        first_step: number of the first step of the next iteration, which decides on the worker that makes it.
    """

    _iterator: Any
    _waiting: Any = None  # an iterator whose worker processes wait
    first_step = 0

    def _get_iterator(self, start: Start | None = None) -> Any:
        several, single = torch_dataloader._MultiProcessingDataLoaderIter, torch_dataloader._SingleProcessDataLoaderIter
        kind: Any = _iterator_class(several if self.num_workers else single)
        iterator = kind.__new__(kind)
        iterator._start = start
        try:
            iterator.__init__(self)
            iterator._of_process = os.getpid()
        except BaseException:  # a handler of a signal: torch has no end for what it has half begun
            with contextlib.suppress(ValueError):  # they are not known yet
                _signals._remove_worker_pids(id(iterator))
            for worker in vars(iterator).get("_workers", ()):
                worker.kill()
                worker.join()
            raise
        return iterator

    def start_workers(self) -> None:
        """Start the worker processes of the next iteration now; they wait until it begins."""
        start = Start()
        asked: Any = self.multiprocessing_context  # type: ignore[has-type]
        self.multiprocessing_context = start.context()
        try:
            self._waiting = self._get_iterator(start)
        except BaseException:
            start.close()
            raise
        finally:
            self.multiprocessing_context = asked
        # The death of a process that waits is not the program's.
        _signals._remove_worker_pids(id(self._waiting))
        self._waiting._worker_pids_set = False

    def end_waiting(self) -> None:
        """End the worker processes that still wait."""
        self._waiting = None

    def _started(self) -> Any:
        """The iterator whose worker processes were waiting, and begin now; None where there is none any more."""
        iterator, self._waiting = self._waiting, None
        if iterator is None or not all(worker.is_alive() for worker in iterator._workers):
            return None
        start, iterator._start = iterator._start, None
        _signals._set_worker_pids(id(iterator), tuple(worker.pid for worker in iterator._workers))
        iterator._worker_pids_set = True
        start.give()
        iterator._first_step = self.first_step
        iterator._sampler_iter = iter(iterator._index_sampler)
        for _ in range(iterator._prefetch_factor * iterator._num_workers):
            iterator._try_put_index()
        return iterator

    def __iter__(self) -> Any:
        if self.persistent_workers and self._iterator is not None:
            self._iterator._reset(self)
            return self._iterator
        iterator = self._started()
        if iterator is None:
            iterator = self._get_iterator()
        if self.persistent_workers:
            self._iterator = iterator
        return iterator


@dataclass(frozen=True)
class BeginWorker:
    """The `worker_init_fn` of torch's processes that run a pipeline: they show user code what a data worker shows."""

    pipeline: Pipeline
    base_seed: int

    def __call__(self, worker_id: int) -> None:
        enter_worker(self.pipeline, self.base_seed, worker_id, begins=True)


class RedrawnSteps:
    """Steps that are given from the first one on once more, if whoever they are for has to begin anew.

    Args:
        steps: what gives them, once.
    """

    def __init__(self, steps: Iterator[Any]) -> None:
        self._steps = steps
        self._drawn: list[Any] = []
        self._next = 0
        self._is_kept = True

    def begin(self) -> RedrawnSteps:
        """Begin with the first one."""
        self._next = 0
        return self

    def begun(self) -> None:
        """They are not needed again."""
        self._is_kept = False

    def __iter__(self) -> RedrawnSteps:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._drawn):
            if not self._is_kept:
                return next(self._steps)
            self._drawn.extend(itertools.islice(self._steps, 1))
        if self._next == len(self._drawn):
            raise StopIteration
        self._next += 1
        return self._drawn[self._next - 1]


class CurrentSteps:
    """The sampler of torch's DataLoader: the steps of the pass that began last."""

    def __init__(self) -> None:
        self.steps: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.steps


class LocalWorkers:
    """torch's own DataLoader over the steps of passes, one after the other; its worker processes may outlive a pass.

    Args:
        pipeline: what makes a step.
        torch_options: keywords of torch's DataLoader.
    """

    def __init__(self, pipeline: Pipeline, torch_options: dict[str, Any]) -> None:
        self._steps = CurrentSteps()
        self._current: weakref.ref[object] | None = None
        self._loader = PlainLoader(
            StepDataset(pipeline),
            batch_size=None,
            sampler=self._steps,
            collate_fn=no_collate,
            generator=torch.Generator(),  # its own, so that the program's generators are not advanced
            **torch_options | {"worker_init_fn": None},  # `EnteredPipeline` runs it
        )

    def begin(self, owner: object, steps: Iterator[Any]) -> Iterator[Any]:
        """Make steps; ends the owner before this one, whose worker processes these are."""
        self._steps.steps, self._current = steps, weakref.ref(owner)
        iterator: Iterator[Any] = iter(self._loader)
        return iterator

    def is_current(self, owner: object) -> bool:
        """Whether the worker processes still work for this owner."""
        return self._current is not None and self._current() is owner


class _ShardDataset(torch.utils.data.IterableDataset[Any]):
    """The steps of divided data in their order, and a `ShardEnd` where a shard ends."""

    def __init__(self, pipeline: Pipeline, shards: PassShards, policy: ErrorPolicy) -> None:
        self._pipeline, self._shards, self._policy = pipeline, shards, policy

    def __iter__(self) -> Iterator[Any]:
        in_trainer = torch.utils.data.get_worker_info() is None
        shards = self._shards
        readers: dict[int, ShardReader | RankReader] = {}
        while shards.slots:
            shards.skip_taken()
            slot_index = shards.next_slot
            slot = shards.slots[slot_index]
            try:
                if in_trainer:
                    with generators_kept(self._pipeline.own_generators):
                        made = self._make(slot, readers)
                else:
                    made = self._make(slot, readers)
            except others() as error:  # user code may raise anything; raised in the step's place
                yield FailedStep(error.user_error() if isinstance(error, SampleError) else error, in_trainer)
                shards.took(slot_index, slot.step + 1)
                continue
            if made is None:
                yield ShardEnd()
                readers.pop(slot.shard, None)
                shards.ended(slot_index)
            else:
                yield made
                shards.took(slot_index, slot.step + 1)

    def _make(self, slot: Slot, readers: dict[int, ShardReader | RankReader]) -> tuple[MadeStep, bytes] | None:
        shards, steps = self._shards, self._shards.steps_of(slot.shard)
        if not isinstance(steps, ShardOrder):
            indices = steps.indices(slot.step)
            if indices is None:
                return None
            seeds = steps.seeds(slot.step, indices, shards.seeds)
            return make_step(self._pipeline, indices, seeds, self._policy), b""
        if slot.shard not in readers:
            skips = self._policy.on_error != "raise"
            readers[slot.shard] = open_shard(Shard(self._pipeline, steps, shards.seeds.seed, shards.epoch), skips=skips)
        reader = readers[slot.shard]
        made = read_step(reader, slot.step, shards.snapshots.get(slot.shard, b""), self._policy)
        return None if made is None else (made, reader.snapshot)


def read_shards(
    pipeline: Pipeline, shards: PassShards, policy: ErrorPolicy, torch_options: dict[str, Any]
) -> Iterator[Any]:
    """The steps of divided data, made in the training thread, or with `num_workers` in one process beside it.

    Args:
        pipeline: what makes a step.
        shards: the data, as far as it was read; stays as it is.
        policy: what becomes of samples that fail.
        torch_options: keywords of torch's DataLoader.
    """
    indexed = pipeline.num_samples >= 0
    pipeline = pipeline.with_own_generators()
    loader = PlainLoader(
        _ShardDataset(pipeline, copy.deepcopy(shards), policy),
        batch_size=None,
        collate_fn=no_collate,
        generator=torch.Generator(),  # its own, so that the program's generators are not advanced
        **torch_options
        | {
            "num_workers": min(1, torch_options["num_workers"]),
            # Of an IterableDataset each shard calls it, as a data worker of torch would.
            "worker_init_fn": BeginWorker(pipeline, shards.seeds.seed) if indexed else None,
        },
    )
    iterator: Iterator[Any] = iter(loader)
    return iterator


def early_end(step: int) -> RuntimeError:
    """torch's own DataLoader says that there is no more, and there is: this is not the end of the data."""
    return RuntimeError(
        f"the DataLoader's processes ended before step {step}: one of them died, or user code (worker_init_fn, "
        "the sampler) raised"
    )
