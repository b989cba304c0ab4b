"""Tensors and their bytes: each with a buffer of its own, or many small ones of one dtype in one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.wire.codec import Buffer, Scattered

# Views of one storage that autograd takes for tensors of their own: each may be changed in place, unlike those of
# torch.split. Half the cost of torch's other ways.
_part: Any = torch.unsafe_split_with_sizes
# torch.cat copies with memcpy, which takes a third longer where the places are not on 32 bytes; this copies each tensor
# by itself, which costs 0.5 us more. It is worth it for tensors of this size and more.
_copy_each: Any = torch._foreach_copy_
_CAT_ALIGN_BYTES = 32
_COPY_EACH_FROM_BYTES = 48 << 10
# A small tensor that is kept keeps no more than this: it leaves the memory of its message, alone or in the company of
# others that are small.
_OWN_BELOW_BYTES = 64 << 10
# Of many tensors in one buffer, these are small, on average: copying larger ones would cost as much as their way here.
_SMALL_BYTES = 16 << 10
# Tensors of this size, on average, leave from where they lie if the transport can do that: a piece more costs less than
# the copy does.
_IN_PIECES_FROM_BYTES = 64 << 10
# Gives a tensor a shape of as many numbers, where it lies. `view` makes what autograd takes for a view of the other: a
# change in place of one tensor of a batch would count as a change of its neighbours, and `detach_` would be refused.
_shape: Any = torch.Tensor.resize_
_NUMPY_DTYPES = {
    getattr(torch, name): np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}


@dataclass(frozen=True)
class Pack:
    """Tensors that share a buffer: their bytes one after the other, in row-major order each.

    Attributes:
        numbers: which they are.
        dtype: of all of them.
        row_shape: their dimensions after the first, if they have these in common; else None.
        lengths: their first dimensions, if they have the `row_shape` in common; else how many numbers each has.
    """

    numbers: list[int]
    num_bytes: int
    dtype: torch.dtype
    row_shape: torch.Size | None
    lengths: list[int]

    @functools.cached_property
    def _is_copied_singly(self) -> bool:
        unit = self.num_bytes // sum(self.lengths)
        is_aligned = all(length * unit % _CAT_ALIGN_BYTES == 0 for length in self.lengths)
        return not is_aligned and self.num_bytes >= _COPY_EACH_FROM_BYTES * len(self.lengths)

    def of(self, tensors: list[torch.Tensor]) -> Scattered:
        """The buffer of a batch's tensors."""
        are_large = self.num_bytes >= _IN_PIECES_FROM_BYTES * len(tensors)
        pieces = functools.partial(_bytes_of_each, tensors) if are_large else None
        return Scattered(self.num_bytes, functools.partial(self._write, tensors), pieces)

    def _alike(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        # Without reshaping each where the first dimension is all in which they differ.
        return tensors if self.row_shape is not None else [tensor.reshape(-1) for tensor in tensors]

    @torch.no_grad()
    def _fill(self, tensors: list[torch.Tensor], flat: torch.Tensor) -> None:
        whole = flat.view(-1, *self.row_shape) if self.row_shape else flat
        if self._is_copied_singly:
            _copy_each(_part(whole, self.lengths), self._alike(tensors))
        else:
            torch.cat(self._alike(tensors), out=whole)

    def _write(self, tensors: list[torch.Tensor], memory: memoryview) -> None:
        self._fill(tensors, torch.frombuffer(memory, dtype=self.dtype))


@dataclass(frozen=True)
class PackLayout:
    """Tensors that share a buffer.

    Attributes:
        dtype: of all of them.
        numbers: which they are.
        row_shape: their dimensions after the first, if they have these in common; else none.
        lengths: their first dimensions, if they have the `row_shape` in common; else how many numbers each has.
        shapes: of each, if they have not.
        lasts, stops: how they are grouped to be copied: the number after each group's last one, and where it stops.
    """

    dtype: torch.dtype
    numbers: list[int]
    lengths: list[int]
    row_shape: list[int]
    shapes: list[list[int]]
    lasts: list[int]
    stops: list[int]

    def parts(self, buffer: memoryview) -> Sequence[torch.Tensor]:
        """Them all, as views."""
        flat = torch.frombuffer(buffer, dtype=self.dtype)
        if len(flat) != self.stops[-1]:
            raise ProtocolError(f"{self.stops[-1]} numbers were to come in a buffer that has {len(flat)}")
        parts: list[torch.Tensor] = []
        begin = first = 0
        for last, stop in zip(self.lasts, self.stops, strict=True):
            some = flat[begin:stop]
            # Of a buffer that is no larger, `owned` has made a copy.
            if buffer.nbytes >= _OWN_BELOW_BYTES > some.nbytes:
                some = some.clone()
            some_parts = _part(some.view(-1, *self.row_shape) if self.row_shape else some, self.lengths[first:last])
            parts += map(_shape, some_parts, self.shapes[first:last]) if self.shapes else some_parts
            begin, first = stop, last
        return parts


@dataclass(frozen=True)
class TensorLayout:
    """A tensor with a buffer of its own.

    Attributes:
        number: which it is.
    """

    number: int
    dtype: torch.dtype
    shape: list[int]

    @functools.cached_property
    def _num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @functools.cached_property
    def _array_of(self) -> Callable[[memoryview], Any] | None:
        """An array of its shape; NumPy makes one in half the time that torch takes. It may keep no more alive than the
        owner of the memory, so not the view by whose end a transport knows that its memory is free: only for `owned`.
        """
        dtype = _NUMPY_DTYPES.get(self.dtype)
        return None if dtype is None else functools.partial(np.ndarray, tuple(self.shape), dtype)

    def view(self, buffer: memoryview) -> torch.Tensor:
        """It, as a view of its buffer."""
        num_bytes = buffer.nbytes
        if num_bytes != self._num_bytes:
            raise ProtocolError(f"{self._num_bytes} bytes of a tensor were to come in a buffer that has {num_bytes}")
        if num_bytes == 0:  # nothing is made of it but an empty tensor, whatever the shape says
            return torch.empty(self.shape, dtype=self.dtype)
        if self._array_of is not None and type(buffer.obj) is bytearray:
            return torch.from_numpy(self._array_of(buffer))
        return _shape(torch.frombuffer(buffer, dtype=self.dtype), self.shape)  # type: ignore[no-any-return]


def pack_layout(dtype: torch.dtype, numbers: list[int], shapes: list[list[int]]) -> PackLayout:
    """How tensors of these numbers and shapes lie in their buffer."""
    row_shape = shapes[0][1:]
    sizes = [math.prod(shape) for shape in shapes]
    are_small = sum(sizes) * dtype.itemsize < _SMALL_BYTES * len(sizes)
    groups = _in_company(sizes, _OWN_BELOW_BYTES // dtype.itemsize) if are_small else ([len(sizes)], [sum(sizes)])
    if all(len(shape) > 0 and shape[1:] == row_shape for shape in shapes):
        return PackLayout(dtype, numbers, [shape[0] for shape in shapes], row_shape, [], *groups)
    return PackLayout(dtype, numbers, sizes, [], shapes, *groups)


def _in_company(sizes: list[int], limit: int) -> tuple[list[int], list[int]]:
    """Group neighbours of which all together are smaller than the limit; who is larger is alone.

    Returns:
        For each group the number after its last member, and where it stops.
    """
    lasts: list[int] = []
    stops: list[int] = []
    begin = end = 0
    for index, size in enumerate(sizes):
        if end > begin and end + size - begin >= limit:
            lasts.append(index)
            stops.append(end)
            begin = end
        end += size
    return [*lasts, len(sizes)], [*stops, end]


def owned(buffer: memoryview) -> memoryview:
    """A small buffer in memory of its own."""
    return memoryview(bytearray(buffer)) if buffer.nbytes < _OWN_BELOW_BYTES else buffer


def bytes_of_tensor(tensor: torch.Tensor) -> Buffer:
    """A tensor's bytes in row-major order, uncopied where they lie so."""
    if tensor.dtype in _NUMPY_DTYPES and tensor.is_contiguous():
        try:
            return tensor.numpy().data.cast("B")
        except (RuntimeError, TypeError):  # rare, and costs more to ask than to try
            return _bytes_of_special(tensor)
    return _bytes_of_special(tensor)


def _bytes_of_special(tensor: torch.Tensor) -> Buffer:
    """The same where it is empty, not contiguous, a view that conjugates or negates, or no NumPy's."""
    if tensor.numel() == 0:
        return b""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in _NUMPY_DTYPES:
        return tensor.numpy().data.cast("B")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _bytes_of_each(tensors: list[torch.Tensor]) -> list[Buffer]:
    return list(map(bytes_of_tensor, tensors))
