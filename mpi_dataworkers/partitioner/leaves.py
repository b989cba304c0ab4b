"""What batches and arguments are made of: tensors and plain values; and whether two tensors are the same.

A list of plain values is one leaf, so that a batch with the names of its files has as many leaves whatever its size.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_pytree: Any = pytree
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Leaves, and how they are put together, for `torch.utils._pytree.tree_unflatten`."""
    leaves, spec = _pytree.tree_flatten(value, is_leaf=_is_plain_list)
    return leaves, spec


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves alone."""
    return flatten(value)[0]


def _is_plain_list(value: Any) -> bool:
    return type(value) in (list, tuple) and all(type(item) in _PLAIN for item in value)


def same_bytes(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are of the same type, size and contents, each byte of them; NaN equals itself."""
    if value.dtype != other.dtype or value.shape != other.shape:
        return False
    if value.device != other.device:
        other = other.to(value.device)
    if value.device.type == "cpu" and value.is_contiguous() and other.is_contiguous():
        return not _memcmp(value.data_ptr(), other.data_ptr(), value.nbytes)
    whole = _WHOLE.get(value.element_size())
    if whole is None or value.dtype == whole or value.is_quantized:
        return torch.equal(value, other)
    return torch.equal(value.detach().view(whole), other.detach().view(whole))


# Whole numbers by their size in bytes: comparing them compares bytes.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Batches as they came to the training loop, each with what data workers have computed for it.
#
# A program may change a batch before its forward gets it, in ways that nobody counts. So of each tensor that data
# workers have computed from there is a copy here, and their values are taken for a tensor that has the same bytes,
# whatever the program did in between: moved it, cloned it, put it in an object of its own. Called by `forward.py`.

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
        """Return whether tensors are these leaves, byte for byte."""
        return all(same_bytes(tensor, self._leaves[number]) for number, tensor in zip(numbers, tensors, strict=True))

    def is_as_sent(self) -> bool:
        """Return whether the program has changed no value in place: it may be an output of an earlier call."""
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
        """Return whether some batch has values of one of these cuts."""
        return any(delivery.generation in generations for delivery in self._last)

    def find(self, generation: int, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> Delivery | None:
        """Return the batch of which tensors are leaves."""
        found = (each for each in self._last if each.generation == generation and each.is_of(numbers, tensors))
        return next(found, None)
