"""Leaves of batches that are not sent: what makes one when something reads it. Called by `partition.py`."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hetstream.mpi_dataworkers.ops.staged import StagedBatch
from hetstream.mpi_dataworkers.partitioner.leaves import leaves_of
from hetstream.mpi_dataworkers.partitioner.provenance import Unsent
from hetstream.mpi_dataworkers.partitioner.split import sending_all

# Leaves that were not sent and are read are made once more; after so many times they are sent again.
_MOST_REMADE = 3


class SparedLeaves:
    """What is known of the leaves of a loader's batches.

    Attributes:
        read: numbers of those that the program has read itself.
        num_remade: how often one that had not been sent was made once more.
    """

    def __init__(self) -> None:
        self.read: set[int] = set()
        self.num_remade = 0
        self._times: dict[int, int] = {}

    @functools.cached_property
    def may_be(self) -> bool:
        """Whether leaves may be spared: functions that torch.compile must compile as a whole refuse a spared one."""
        contexts = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_TorchDynamoContext", ())
        compiled = (found for found in gc.get_objects() if issubclass(type(found), contexts))
        return not any(getattr(found, "fullgraph", False) or getattr(found, "nopython", False) for found in compiled)

    def makers(self, shapes: Mapping[int, tuple[int, ...]], again: Callable[[], Any] | None) -> dict[int, Unsent]:
        """What makes the leaves that a batch came without.

        Args:
            shapes: of those leaves, by number.
            again: makes the batch once more; None where nothing does.
        """
        made: list[Any] = []

        def make(number: int) -> torch.Tensor:
            if not made:
                if again is None:
                    raise RuntimeError("a tensor of the batch was not sent, and the batch cannot be made once more")
                with sending_all():
                    batch = again()
                made.extend(leaves_of(batch.batch if type(batch) is StagedBatch else batch))
            self._times[number] = self._times.get(number, 0) + 1
            self.num_remade += 1
            leaf: torch.Tensor = made[number]
            return leaf

        return {number: (shape, functools.partial(make, number)) for number, shape in shapes.items()}

    def often_read(self, spared: tuple[int, ...]) -> set[int]:
        """Those of the leaves that are not sent, and were made so often that they had better be; they count as read."""
        often = {number for number in spared if self._times.get(number, 0) >= _MOST_REMADE}
        self.read |= often
        return often
