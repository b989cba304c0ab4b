"""One of torch's worker processes over an IterableDataset, as a data worker plays it for an unmodified program.

Its batches are torch's own: the dataset is a copy, the generators begin as torch seeds worker process w of a pass and
go on from batch to batch, and torch's own fetcher reads (torch/utils/data/_utils/worker.py, `_worker_loop`). So a
reader that begins anew comes to the same batches, and none of them can be had without those before it.

A dataset with `state_dict` and `load_state_dict` may save who takes over from reading them again. Whether it goes on
where it was is seen first: a second copy that is given the state makes the next batch, too. What a shuffle buffer
holds, say, is often not part of a state.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import io
import logging
import math
import os
import pickle
import random
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from multiprocessing.sharedctypes import SynchronizedBase, synchronized
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import worker as torch_worker

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.batch_comparison import compare
from hetstream.mpi_dataworkers.ops.pickling import kind_of_number, rebuild_number
from hetstream.mpi_dataworkers.ops.pipeline import LARGEST_BASE_SEED, MadeStep, OwnGenerators, Pipeline, SampleError
from hetstream.mpi_dataworkers.order.sharding import pack, unpack
from hetstream.mpi_dataworkers.wire.messages import Failure, ShardOrder, WorkerSeeds

_log = logging.getLogger(__name__)
_Kinds: Any = _DatasetKind
# A state is taken this often, and is believed after so many have shown that a copy goes on from them.
_SAVES_EACH_S = 10.0
_PROOFS = 2
_DEEPEST = 12  # no place of shared memory is looked for beyond
# Of threads that user code has begun: the worker process that they belong to. They run on between its batches.
_worker_of: weakref.WeakKeyDictionary[threading.Thread, Any] = weakref.WeakKeyDictionary()
_numpy_seed: Any = torch_worker._generate_state
# What user code may draw from: the generators of Python, NumPy and torch, and those that its objects and modules hold.
_States = tuple[Any, Any, torch.Tensor, list[Any]]


class TorchsWorker:
    """What one of torch's worker processes reads of a pass; stands in for a `ShardReader`.

    Args:
        pipeline: the dataset, of which it reads a copy, and the collate function.
        order: which worker process of how many, and the form of its batches.
        workers: what torch seeds it with, and who the trainer is.
        at_sample: called with -1 before each batch.

    Attributes:
        pipeline: as given.
        num_steps: how many batches it has, -1 until its end was reached.
        snapshot: what another one needs to go on; empty where there is no new one.
        snapshot_step: the batch that comes next there.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        order: ShardOrder,
        workers: WorkerSeeds,
        at_sample: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.pipeline, self.num_steps = pipeline, -1
        self._order, self._workers, self._at_sample = order, workers, at_sample
        self._indices = [None] * order.batch_size if order.batch_size else None  # what torch's sampler gives it
        self._position = self._num_samples = 0
        self._ahead: list[MadeStep | SampleError | None] = []  # what was made to prove a state
        self._fetcher: Any = None
        self._info: Any = None
        self._held = OwnGenerators()
        self._states: _States | None = None
        self.snapshot, self.snapshot_step = b"", 0
        self._num_proved = 0  # states with which a second copy has gone on
        self._next_save = time.monotonic() + _SAVES_EACH_S
        self._kept: bytes = b""  # of the pass before, with which this one begins
        self._as_sent = b""  # the dataset at the beginning, of workers that are kept

    def read(self, step: int, snapshot: bytes = b"", without: Collection[Failure] = ()) -> MadeStep | None:  # noqa: ARG002
        """Make one batch, and all before it that this reader has not made.

        Args:
            step: which one.
            snapshot: of a reader that was at or before the step; "" for the beginning.
            without: as of `ShardReader.read`; not used.

        Returns:
            The batch; None when there are fewer.

        Raises:
            SampleError: user code raised.
            PipelineError: the dataset cannot be copied.
        """
        if 0 <= self.num_steps <= step:
            return None
        saved = unpack(snapshot) if snapshot else None
        if saved is not None:
            self._kept = saved["kept"]
        if saved is not None and (saved["step"] > step or saved["state"] is None):
            saved = None
        if self._fetcher is None or step < self._position or (saved is not None and self._position < saved["step"]):
            try:
                self._begin(saved)
            except SampleError:
                if saved is None:
                    raise
                self._begin(None)
        while self._position < step:
            # What a batch before this one raises was, or will be, raised in its own place.
            with contextlib.suppress(SampleError):
                if self._next() is None:
                    return None
        if self._position > 0 and time.monotonic() >= self._next_save:
            self._save()
        return self._next()

    def _begin(self, saved: dict[str, Any] | None) -> None:
        """Be a worker process that torch starts now, or one that was at a snapshot."""
        pipeline, order, workers = self.pipeline, self._order, self._workers
        if workers.held:  # others have drawn since, and those of modules do not travel with the dataset
            try:
                held_by(pipeline).restore(unpack(workers.held)["states"])
            except Exception as error:
                raise PipelineError(f"generators that the dataset draws from are others here: {error!r}") from error
        kept = unpack(self._kept) if self._kept else None
        dataset = self._own_dataset(kept)
        base_seed = workers.base_seed & LARGEST_BASE_SEED
        seed = base_seed + order.shard
        self._info = torch_worker.WorkerInfo(id=order.shard, num_workers=order.num_shards, seed=seed, dataset=dataset)
        self._held = OwnGenerators(dataset, pipeline.collate_fn, pipeline.worker_init_fn)
        self._position, self._ahead, self._states, self._fetcher = 0, [], None, None
        self._at_sample(-1)
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        np.random.seed(_numpy_seed(base_seed, order.shard))
        try:
            with self._acting():
                if pipeline.worker_init_fn is not None and kept is None:
                    pipeline.worker_init_fn(order.shard)
                if saved is not None and not saved["iterators"]:
                    dataset.load_state_dict(saved["state"])
                if kept is not None:
                    _restore(kept["states"], self._held)
                arguments = dataset, self._indices is not None, self._collate, order.drop_last
                fetcher = _Kinds.create_fetcher(_Kinds.Iterable, *arguments)
                if saved is not None and saved["iterators"]:
                    fetcher.dataset_iter.load_state_dict(saved["state"])
        except Exception as error:
            raise SampleError(-1) from error
        if saved is not None:
            self._position, self._states = saved["step"], saved["states"]
            self._held = OwnGenerators(dataset, pipeline.collate_fn, pipeline.worker_init_fn)
        self._fetcher = fetcher

    def _own_dataset(self, kept: dict[str, Any] | None) -> Any:
        """A copy of the dataset, or what was kept of it with what the program has written into shared memory since."""
        given = self.pipeline.dataset
        try:
            dataset = pickle.loads(kept["dataset"]) if kept is not None and kept["dataset"] else _copied(given)
            for path in self._workers.shared:
                _take_over(held_at(dataset, path), held_at(given, path))
            if self._workers.are_kept and (kept is None or not kept["dataset"]):
                self._as_sent = _pickled(dataset)
        except Exception as error:  # copying runs user code (__deepcopy__, __reduce__): any exception may come
            raise PipelineError(
                f"{type(given).__name__} cannot be copied, and each worker reads a copy of its own: "
                f"{type(error).__name__}: {error}"
            ) from error
        return dataset

    def kept(self) -> bytes:
        """What the next pass of a worker process that torch keeps begins with, at the end of this one; else empty."""
        if not self._workers.are_kept:
            return b""
        try:
            dataset = self._info.dataset
            pickled = _pickled(dataset)
            if pickled == self._as_sent:
                pickled = b""
            elif self._workers.shares_more:
                raise PipelineError("what the program writes into its shared memory between passes cannot be followed")
            elif (found := compare(pickle.loads(pickled), dataset)).differences or found.not_compared:
                raise PipelineError(f"a copy is another: {[*found.differences, *found.not_compared][0]}")
            return pack({"dataset": pickled, "states": self._states})
        except Exception as error:  # noqa: BLE001, pickling runs user code
            _log.info("what worker %d has of its dataset cannot be kept: %r", self._order.shard, error)
            return b""

    def _collate(self, samples: Any) -> Any:
        self._num_samples = 1 if self._indices is None else len(samples)
        return self.pipeline.collate_fn(samples)

    def _next(self) -> MadeStep | None:
        """The next batch; None at the end."""
        found = self._ahead.pop() if self._ahead else self._fetched()
        if found is None:
            self.num_steps = self._position
            return None
        self._position += 1
        if isinstance(found, SampleError):
            raise found
        return found

    def _fetched(self) -> MadeStep | SampleError | None:
        """What torch's fetcher gives next."""
        self._at_sample(-1)
        try:
            with self._acting():
                batch = self._fetcher.fetch(self._indices)
        except StopIteration:  # also of a sample or `collate_fn`, as in torch
            return None
        except Exception as error:  # noqa: BLE001, user code may raise anything
            raised = SampleError(-1)
            raised.__cause__ = error
            return raised
        return MadeStep(batch, self._num_samples, 0, [])

    def _save(self) -> None:
        """Take a snapshot, if the dataset has a state from which another copy goes on as this one does."""
        dataset, iterator = self._info.dataset, self._fetcher.dataset_iter
        owner = next((each for each in (iterator, dataset) if _has_state(each)), None)
        self._next_save = time.monotonic() + _SAVES_EACH_S if owner is not None else math.inf
        if owner is None:
            return
        try:
            with self._acting():
                state = owner.state_dict()
            snapshot = pack(
                {
                    "step": self._position,
                    "iterators": owner is iterator,
                    "state": state,
                    "states": self._states,
                    "kept": self._kept,
                }
            )
            if self._num_proved < _PROOFS:
                self._prove(snapshot)
        except Exception as error:  # noqa: BLE001, user code; what has no state is read again
            _log.info("no state of %s is used: %r", type(owner).__name__, error)
            self._next_save = math.inf
            return
        self.snapshot, self.snapshot_step = snapshot, self._position

    def _prove(self, snapshot: bytes) -> None:
        """See that a second copy goes on from a snapshot as this one does: both make the next batch.

        Raises:
            PipelineError: it does not.
        """
        other = TorchsWorker(self.pipeline, self._order, self._workers, self._at_sample)
        other._begin(unpack(snapshot))
        found, expected = other._fetched(), self._fetched()
        self._ahead = [expected]
        if not isinstance(found, MadeStep) or not isinstance(expected, MadeStep):
            raise PipelineError("its end and its errors prove nothing")
        if differences := compare(found.batch, expected.batch).differences:
            raise PipelineError(f"batch {self._position} of a copy that was given it is another: {differences[0]}")
        self._num_proved += 1

    @contextlib.contextmanager
    def _acting(self) -> Iterator[None]:
        """Let user code see that worker process: its number, its random numbers, and its trainer's rank."""
        if self._states is not None:
            _restore(self._states, self._held)
        before, torch_worker._worker_info = torch_worker._worker_info, self._info
        try:
            with of_rank(self._workers):
                yield
        finally:
            torch_worker._worker_info = before
            self._states = random.getstate(), np.random.get_state(), torch.get_rng_state(), self._held.states()


def follow_threads() -> None:
    """Have `get_worker_info()` tell a thread in which worker process it was begun, from now on in this process.

    A data worker plays several in turn. Threads that read ahead ask between the batches of theirs, too.
    """
    if hasattr(torch_worker, "_of_this_thread"):
        return
    begin: Any = threading.Thread.start

    @functools.wraps(begin)
    def start(thread: threading.Thread) -> None:
        if (info := torch_worker.get_worker_info()) is not None:
            _worker_of[thread] = info
        begin(thread)

    kind: Any = threading.Thread
    module: Any = torch_worker
    kind.start = start
    module._of_this_thread = lambda: _worker_of.get(threading.current_thread(), module._worker_info)
    # User code has the function itself, by whatever name.
    module.get_worker_info.__code__ = _ask.__code__


def _ask() -> Any:  # runs as a function of torch's module
    return _of_this_thread()  # type: ignore[name-defined]  # noqa: F821


def beginning_with(kept: bytes) -> bytes:
    """The snapshot with which a pass begins whose worker process was kept."""
    return pack({"step": 0, "state": None, "kept": kept})


def places_of_shared(root: Any) -> list[list[str | int]]:
    """Where an object holds tensors in shared memory, and values and arrays of `multiprocessing`: names of attributes,
    and keys and places in what they hold."""
    found: list[list[str | int]] = []
    seen: set[int] = set()
    waiting: list[tuple[Any, list[str | int]]] = [(root, [])]
    while waiting:
        held, path = waiting.pop()
        if id(held) in seen or len(path) > _DEEPEST:
            continue
        seen.add(id(held))
        if isinstance(held, torch.Tensor):
            is_shared: Any = held.is_shared  # torch does not say what it gives
            found += [path] if is_shared() else []
        elif isinstance(held, SynchronizedBase):
            found.append(path)
        elif isinstance(held, dict):
            waiting += [(each, [*path, key]) for key, each in held.items() if isinstance(key, str | int)]
        elif isinstance(held, list | tuple):
            waiting += [(each, [*path, place]) for place, each in enumerate(held)]
        elif hasattr(held, "__dict__") and not isinstance(held, type | ModuleType):
            waiting += [(each, [*path, name]) for name, each in vars(held).items()]
    return found


def num_buffers(root: Any, places: list[list[str | int]]) -> int:
    """In how many pieces of memory lie what is at these places."""
    held = [held_at(root, path) for path in places]
    return len({each.untyped_storage().data_ptr() if isinstance(each, torch.Tensor) else id(each) for each in held})


def held_at(root: Any, path: list[str | int]) -> Any:
    """What lies at a place of `places_of_shared`."""
    for step in path:
        inside: Any = root if isinstance(root, dict | list | tuple) else vars(root)
        root = inside[step]
    return root


def _take_over(into: Any, given: Any) -> None:
    """Write what the program has written into shared memory."""
    if isinstance(given, torch.Tensor):
        into.copy_(given)
    else:
        target, source = into.get_obj(), given.get_obj()
        ctypes.memmove(ctypes.addressof(target), ctypes.addressof(source), ctypes.sizeof(source))


def _copied(dataset: Any) -> Any:
    try:
        return copy.deepcopy(dataset)
    except Exception:  # noqa: BLE001, as of a module that it holds, with which it has travelled all the same
        return pickle.loads(_pickled(dataset))


class _Copier(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with copies of what worker processes share: each that is played here reads one of its own."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, SynchronizedBase):
            return super().reducer_override(value)
        held: Any = value.get_obj()
        return _rebuild_value, (*kind_of_number(held), bytes(held))


def _rebuild_value(kind: Any, length: int | None, data: bytes) -> Any:
    return synchronized(rebuild_number(kind, length, data))


def _pickled(dataset: Any) -> bytes:
    stream = io.BytesIO()
    _Copier(stream).dump(dataset)
    return stream.getvalue()


def _has_state(owner: Any) -> bool:
    return all(hasattr(owner, name) for name in ("state_dict", "load_state_dict"))


def held_by(pipeline: Pipeline) -> OwnGenerators:
    """The generators that a pipeline's objects and their modules hold."""
    return OwnGenerators(pipeline.dataset, pipeline.collate_fn, pipeline.worker_init_fn)


def pack_states(pipeline: Pipeline) -> bytes:
    """The states of those generators, as they are in the program; empty where there are none."""
    states = held_by(pipeline).states()
    return pack({"states": states}) if states else b""


def _restore(states: _States, held: OwnGenerators) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    held.restore(states[3])


@contextlib.contextmanager
def of_rank(workers: WorkerSeeds) -> Iterator[None]:
    """Let user code find its trainer's rank, in the environment and, where the trainer has it, in `torch.distributed`.

    torch's worker processes are forked from the trainer and find both. The process group here is of PyTorch's kind that
    sends nothing.
    """
    before = {name: os.environ.get(name) for name in workers.environment}
    _set(workers.environment)
    distributed = torch.distributed
    # In a process that torch has forked from the trainer it is there.
    is_missing = workers.world_size > 0 and not distributed.is_initialized()
    if is_missing:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the kind

        distributed.init_process_group("fake", rank=workers.rank, world_size=workers.world_size, store=FakeStore())
    try:
        yield
    finally:
        if is_missing:  # it took 20 us; other pipelines have another rank, or none
            distributed.destroy_process_group()
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
