"""One of torch's worker processes over an IterableDataset, as a data worker plays it for an unmodified program.

Its batches are torch's own: the dataset is a copy, the generators begin as torch seeds worker process w of a pass and
go on from batch to batch, and torch's own fetcher reads (torch/utils/data/_utils/worker.py, `_worker_loop`). So a
reader that begins anew comes to the same batches, and none of them can be had without those before it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import worker as torch_worker

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.pipeline import LARGEST_BASE_SEED, MadeStep, OwnGenerators, Pipeline, SampleError
from hetstream.mpi_dataworkers.wire.messages import Failure, ShardOrder, WorkerSeeds

_Kinds: Any = _DatasetKind
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
        first_states: of the generators that the pipeline's objects hold, as the program sent them.

    Attributes:
        pipeline: as given.
        num_steps: how many batches it has, -1 until its end was reached.
        snapshot, snapshot_step: none: who takes over reads again.
    """

    snapshot, snapshot_step = b"", 0

    def __init__(
        self,
        pipeline: Pipeline,
        order: ShardOrder,
        workers: WorkerSeeds,
        at_sample: Callable[[int], None] = lambda _: None,
        first_states: Sequence[Any] | None = None,
    ) -> None:
        self.pipeline, self.num_steps = pipeline, -1
        self._order, self._workers, self._at_sample, self._first_states = order, workers, at_sample, first_states
        self._indices = [None] * order.batch_size if order.batch_size else None  # what torch's sampler gives it
        self._position = self._num_samples = 0
        self._fetcher: Any = None
        self._info: Any = None
        self._held = OwnGenerators()
        self._states: _States | None = None

    def read(self, step: int, snapshot: bytes = b"", without: Collection[Failure] = ()) -> MadeStep | None:  # noqa: ARG002
        """Make one batch, and all before it that this reader has not made.

        Args:
            step: which one.
            snapshot, without: as of `ShardReader.read`; neither is used.

        Returns:
            The batch; None when there are fewer.

        Raises:
            SampleError: user code raised.
            PipelineError: the dataset cannot be copied.
        """
        if 0 <= self.num_steps <= step:
            return None
        if self._fetcher is None or step < self._position:
            self._begin()
        while self._position < step:
            # What a batch before this one raises was, or will be, raised in its own place.
            with contextlib.suppress(SampleError):
                if self._fetch() is None:
                    return None
        made = self._fetch()
        return None if made is None else MadeStep(made[0], self._num_samples, 0, [])

    def _begin(self) -> None:
        """Be a worker process that torch starts now."""
        pipeline, order, workers = self.pipeline, self._order, self._workers
        if self._first_states is not None:  # others have drawn since
            held_by(pipeline).restore(self._first_states)
        try:
            dataset = copy.deepcopy(pipeline.dataset)
        except Exception as error:  # copying runs user code (__deepcopy__, __reduce__): any exception may come
            raise PipelineError(
                f"{type(pipeline.dataset).__name__} cannot be copied, and each worker reads a copy of its own: "
                f"{type(error).__name__}: {error}"
            ) from error
        seed = (workers.base_seed & LARGEST_BASE_SEED) + order.shard
        self._info = torch_worker.WorkerInfo(id=order.shard, num_workers=order.num_shards, seed=seed, dataset=dataset)
        self._held = OwnGenerators(dataset, pipeline.collate_fn, pipeline.worker_init_fn)
        self._position, self._states, self._fetcher = 0, None, None
        self._at_sample(-1)
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        np.random.seed(_numpy_seed(workers.base_seed & LARGEST_BASE_SEED, order.shard))
        try:
            with self._acting():
                if pipeline.worker_init_fn is not None:
                    pipeline.worker_init_fn(order.shard)
                arguments = dataset, self._indices is not None, self._collate, order.drop_last
                self._fetcher = _Kinds.create_fetcher(_Kinds.Iterable, *arguments)
        except Exception as error:
            raise SampleError(-1) from error

    def _collate(self, samples: Any) -> Any:
        self._num_samples = 1 if self._indices is None else len(samples)
        return self.pipeline.collate_fn(samples)

    def _fetch(self) -> tuple[Any] | None:
        """The next batch; None at the end."""
        self._at_sample(-1)
        try:
            with self._acting():
                batch = self._fetcher.fetch(self._indices)
        except StopIteration:  # also of a sample or `collate_fn`, as in torch
            self.num_steps = self._position
            return None
        except Exception as error:
            self._position += 1
            raise SampleError(-1) from error
        self._position += 1
        return (batch,)

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
            self._states = _states_now(self._held)


def held_by(pipeline: Pipeline) -> OwnGenerators:
    """The generators that a pipeline's objects and their modules hold."""
    return OwnGenerators(pipeline.dataset, pipeline.collate_fn, pipeline.worker_init_fn)


def _states_now(held: OwnGenerators) -> _States:
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), held.states()


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
