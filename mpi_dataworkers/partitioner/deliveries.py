"""Batches as they came to the training loop, each with what data workers have computed for it.

A program may change a batch before its forward gets it, in ways that nobody counts. So of each tensor that data workers
have computed from there is a copy here, and their values are taken for a tensor that has the same bytes, whatever the
program did in between: moved it, cloned it, put it in an object of its own. Called by `forward.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from hetstream.mpi_dataworkers.partitioner.leaves import same_bytes

# Programs fetch some batches ahead of the forward.
_MOST = 6


class Delivery:
    """One batch.

    Args:
        generation: of the cut that its values are of.
        leaves: the tensors that they were computed from, by number; copied.
        values: what data workers have computed.

    Attributes:
        was_used: a forward had the values.
    """

    def __init__(self, generation: int, leaves: Mapping[int, torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self.generation = generation
        self.values = values
        self.was_used = False
        self._leaves = {number: leaf.clone() for number, leaf in leaves.items()}
        self._versions = [value._version for value in values]

    def is_of(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tensors are these leaves, byte for byte."""
        return all(same_bytes(tensor, self._leaves[number]) for number, tensor in zip(numbers, tensors, strict=True))

    def is_as_sent(self) -> bool:
        """Whether the program has changed no value in place: it may be an output of an earlier call."""
        return all(value._version == then for value, then in zip(self.values, self._versions, strict=True))


class Deliveries:
    """The last batches of a loader."""

    def __init__(self) -> None:
        self._last: deque[Delivery] = deque(maxlen=_MOST)

    def add(self, delivery: Delivery) -> None:
        """Note one."""
        self._last.appendleft(delivery)

    def clear(self) -> None:
        """Forget all."""
        self._last.clear()

    def any_for(self, generations: Sequence[int]) -> bool:
        """Whether some batch has values of one of these cuts."""
        return any(delivery.generation in generations for delivery in self._last)

    def find(self, generation: int, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> Delivery | None:
        """The batch of which tensors are leaves."""
        found = (each for each in self._last if each.generation == generation and each.is_of(numbers, tensors))
        return next(found, None)
