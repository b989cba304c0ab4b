"""What batches and arguments are made of: tensors and plain values; and whether two tensors are the same.

A list of plain values is one leaf, so that a batch with the names of its files has as many leaves whatever its size.
"""

from __future__ import annotations

import ctypes
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
    """The leaves alone."""
    return flatten(value)[0]


def _is_plain_list(value: Any) -> bool:
    return type(value) in (list, tuple) and all(type(item) in _PLAIN for item in value)


def same_bytes(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are of the same type, size and contents, each byte of them; NaN equals itself."""
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


# Whole numbers of so many bytes: comparing them compares bytes.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
