"""Which samples each step of one pass has, as the loader sees it. No torch, no I/O.

A planned order is a function of (seed, epoch) that data workers compute themselves; a listed order comes from the
program's own sampler and is drawn as it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mpi_dataworkers.errors import PipelineError
from mpi_dataworkers.messages import ListedOrder
from mpi_dataworkers.messages import PlannedOrder as PlannedOrderMessage
from mpi_dataworkers.sharding import EpochPlan, Indices, SampleSeeds


class PlannedPass:
    """Steps of an order that is a function of (seed, epoch)."""

    def __init__(self, plan: EpochPlan, rank: int) -> None:
        self.num_steps = plan.num_steps
        self.order = PlannedOrderMessage(
            plan.num_samples,
            plan.batch_size,
            plan.world_size,
            rank,
            plan.drop_last,
            plan.shuffle,
            plan.seed,
        )
        self._plan = plan
        self._rank = rank

    def indices(self, step: int) -> Indices | None:
        """Sample indices of a step, or None after the last."""
        return self._plan.indices(step, self._rank) if step < self.num_steps else None

    def seeds(self, step: int, indices: Indices, seed: int, epoch: int) -> SampleSeeds:  # noqa: ARG002, see ListedPass
        """Seeds of the step's samples."""
        return SampleSeeds(indices, seed, epoch)

    def forget(self, step: int) -> None:
        """Nothing is kept."""


class ListedPass:
    """Steps as the program's own sampler gives them; drawn as they are needed."""

    def __init__(self, index_sampler: Iterable[Any], batched: bool, first_step: int = 0) -> None:
        self.num_steps = -1
        self.order = ListedOrder(batched)
        self._iterator = iter(index_sampler)
        self._batched = batched
        self._drawn: dict[int, Indices] = {}
        self._next = 0
        self._first_step = first_step

    def indices(self, step: int) -> Indices | None:
        """Sample indices of a step, or None after the last.

        Raises:
            PipelineError: the sampler gives something else than whole numbers.
        """
        while self._next <= step and self.num_steps < 0:
            try:
                drawn = next(self._iterator)
            except StopIteration:
                self.num_steps = self._next
                break
            array = np.asarray(drawn if self._batched else [drawn])
            if array.dtype.kind not in "iu" or array.ndim != 1 or array.size == 0:
                raise PipelineError(
                    f"the sampler gave {drawn!r} for step {self._next}; data workers need whole-number indices. "
                    "Keep this loader local (num_workers of torch), or map keys to numbers in the dataset."
                )
            if self._next >= self._first_step:
                self._drawn[self._next] = array.astype(np.int64)
            self._next += 1
        return self._drawn.get(step)

    def seeds(self, step: int, indices: Indices, seed: int, epoch: int) -> SampleSeeds:
        """Seeds of the step's samples."""
        return SampleSeeds(indices, seed, epoch, step)

    def forget(self, step: int) -> None:
        """Drop a step that the training loop has taken."""
        self._drawn.pop(step, None)


Order = PlannedPass | ListedPass
