"""Which samples each step of one pass has, as the loader sees it. No torch, no I/O.

A planned order is a function of (seed, epoch) that data workers compute themselves; a listed order comes from the
program's own sampler and is drawn as it is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from mpi_dataworkers.bucketing import BucketPlan, order_of
from mpi_dataworkers.errors import PipelineError, StateError
from mpi_dataworkers.messages import ListedOrder
from mpi_dataworkers.sharding import EpochPlan, Indices, SampleSeeds


class PlannedPass:
    """Steps of an order that is a function of (seed, epoch)."""

    def __init__(self, plan: EpochPlan | BucketPlan, rank: int) -> None:
        self.num_steps = plan.num_steps
        self.order = order_of(plan, rank)
        self._plan = plan

    def indices(self, step: int) -> Indices | None:
        """Sample indices of a step, or None after the last."""
        return self._plan.indices(step, self.order.rank) if step < self.num_steps else None

    def seeds(self, step: int, indices: Indices, seed: int, epoch: int) -> SampleSeeds:  # noqa: ARG002, see ListedPass
        """Seeds of the step's samples."""
        return SampleSeeds(indices, seed, epoch)

    def forget(self, step: int) -> None:
        """Nothing is kept."""


class ListedPass:
    """Steps as the program's own sampler gives them; drawn as they are needed.

    Args:
        index_sampler: what gives the indices of each step.
        batched: a step is a list of them.
        beginning: how the sampler began, for a later resume.
    """

    def __init__(self, index_sampler: Iterable[Any], batched: bool, beginning: str = "") -> None:
        self.num_steps = -1
        self.order = ListedOrder(batched)
        self.beginning = beginning
        self._iterator = iter(index_sampler)
        self._batched = batched
        self._drawn: dict[int, Indices] = {}
        self._digests = {0: b""}  # of all that was drawn before a step
        self._next = 0

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
            indices = array.astype(np.int64)
            self._drawn[self._next] = indices
            chained = hashlib.blake2b(self._digests[self._next], digest_size=16)
            chained.update(indices.tobytes())
            self._next += 1
            self._digests[self._next] = chained.digest()
        return self._drawn.get(step)

    def seeds(self, step: int, indices: Indices, seed: int, epoch: int) -> SampleSeeds:
        """Seeds of the step's samples."""
        return SampleSeeds(indices, seed, epoch, step)

    def forget(self, step: int) -> None:
        """Drop a step that the training loop has taken."""
        self._drawn.pop(step, None)
        self._digests.pop(step, None)

    def drawn(self, step: int) -> str:
        """Digest of the indices of all steps before this one, the training loop's next."""
        return self._digests[step].hex()

    def skip(self, num_steps: int, drawn: str) -> None:
        """Draw the steps that were taken before a resume.

        Raises:
            StateError: they are others than those that were taken.
        """
        for step in range(num_steps):
            if self.indices(step) is None:
                raise StateError(f"the sampler ends at step {step}, the state was saved at step {num_steps}")
            self.forget(step)
        if num_steps and self.drawn(num_steps) != drawn:
            raise StateError(
                f"the sampler gave other samples for the first {num_steps} steps when the state was saved: its data, "
                "its seed or its epoch differ (is set_epoch called as it was then?)"
            )


Order = PlannedPass | ListedPass
