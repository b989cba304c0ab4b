"""What user code sees in a data worker: the part of one of torch's worker processes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.utils.data._utils import worker as torch_worker

from hetstream.mpi_dataworkers.ops.pipeline import LARGEST_BASE_SEED, Pipeline

_numpy_seed: Any = torch_worker._generate_state


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
        self._pipeline = private.with_own_generators()
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
    base_seed &= LARGEST_BASE_SEED
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
