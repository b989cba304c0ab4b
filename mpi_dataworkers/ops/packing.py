"""Tensors and their bytes: each with a buffer of its own, or many small ones of one dtype in one."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch

from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.wire.codec import ALIGN_BYTES, Buffer, Scattered

# Views of one storage that autograd takes for tensors of their own: each may be changed in place, unlike those of
# torch.split. Half the cost of torch's other ways.
_part: Any = torch.unsafe_split_with_sizes
# A small tensor that is kept keeps no more than this: it leaves the memory of its message, alone or in the company of
# others that are small.
_OWN_BELOW_BYTES = 64 << 10
# Of many tensors in one buffer, these are small, on average: copying larger ones would cost as much as their way here.
_SMALL_BYTES = 16 << 10
# Tensors of this size, on average, leave from where they lie if the transport can do that: a piece more costs less than
# the copy does.
_IN_PIECES_FROM_BYTES = 64 << 10
# Gaps of whole rows may be so large, on average. Else rows are numbers: smaller gaps, but each tensor has to get its
# shape.
_MOST_GAP_BYTES = 1 << 10
_address_of, _first_of = ctypes.addressof, ctypes.c_char.from_buffer
# Gives a tensor a shape of as many numbers, where it lies. `view` makes what autograd takes for a view of the other: a
# change in place of one tensor of a batch would count as a change of its neighbours, and `detach_` would be refused.
_shape: Any = torch.Tensor.resize_
_NUMPY_DTYPES = {
    getattr(torch, name): np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}


@dataclass(frozen=True)
class Rows:
    """How tensors lie in a buffer that they share: one after the other, in row-major order each, with gaps so that each
    starts at a multiple of `ALIGN_BYTES`.

    Attributes:
        shape: of the rows that they are made of: their dimensions after the first, if they have these in common. Else
            none, and their rows are their numbers.
        are_common: they have.
        lengths: rows of each.
        gaps: rows behind each; empty where there are none.
    """

    shape: list[int]
    are_common: bool
    lengths: list[int]
    gaps: list[int]

    @classmethod
    def of(cls, dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> Rows:
        """Those of tensors of these shapes."""
        shape = list(shapes[0][1:])
        if all(len(each) > 0 and [*each[1:]] == shape for each in shapes):
            lengths = [each[0] for each in shapes]
            row_bytes = math.prod(shape) * dtype.itemsize
            gaps = _gaps(lengths, row_bytes)
            if sum(gaps) * row_bytes <= _MOST_GAP_BYTES * len(gaps):
                return cls(shape, True, lengths, gaps)
        lengths = list(map(math.prod, shapes))
        return cls([], False, lengths, _gaps(lengths, dtype.itemsize))

    @property
    def sizes(self) -> list[int]:
        """Numbers of each, with its gap."""
        row = math.prod(self.shape)
        return [(length + gap) * row for length, gap in zip(self.lengths, self.gaps or repeat(0), strict=False)]


def _gaps(lengths: Sequence[int], row_bytes: int) -> list[int]:
    """Rows to be left out behind each of so many, so that the next one is aligned; none if all are."""
    unit = ALIGN_BYTES // math.gcd(ALIGN_BYTES, row_bytes)
    gaps = [-length % unit for length in lengths]
    return gaps if any(gaps) else []


@dataclass(frozen=True)
class Pack:
    """Tensors that share a buffer.

    Attributes:
        numbers: which they are.
        dtype: of all of them.
        rows: how they lie there.
    """

    numbers: list[int]
    dtype: torch.dtype
    rows: Rows

    @functools.cached_property
    def num_bytes(self) -> int:
        """All of them, with their gaps."""
        return sum(self.rows.sizes) * self.dtype.itemsize

    @functools.cached_property
    def _gaps(self) -> list[torch.Tensor | None]:
        """What is written into the gaps; none behind a tensor that has none, as torch cannot copy all types with it."""
        rows = self.rows
        zeros = torch.zeros(sum(rows.gaps), *rows.shape, dtype=self.dtype)
        parts = _part(zeros, rows.gaps) if rows.gaps else []
        return [part if gap else None for part, gap in zip(parts, rows.gaps, strict=True)]

    def of(self, tensors: list[torch.Tensor]) -> Scattered:
        """The buffer of a batch's tensors."""
        are_large = self.num_bytes >= _IN_PIECES_FROM_BYTES * len(tensors)
        pieces = functools.partial(self._pieces, tensors) if are_large else None
        return Scattered(self.num_bytes, functools.partial(self._write, tensors), pieces)

    def _with_gaps(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self._gaps:
            return tensors
        both = zip(tensors, self._gaps, strict=True)
        return [piece for tensor, gap in both for piece in ((tensor,) if gap is None else (tensor, gap))]

    def _pieces(self, tensors: list[torch.Tensor]) -> list[Buffer]:
        return list(map(bytes_of_tensor, self._with_gaps(tensors)))

    @torch.no_grad()
    def _fill(self, tensors: list[torch.Tensor], flat: torch.Tensor) -> None:
        rows = self.rows
        # Without reshaping each where the first dimension is all in which they differ.
        alike = tensors if rows.are_common else [tensor.reshape(-1) for tensor in tensors]
        torch.cat(self._with_gaps(alike), out=flat.view(-1, *rows.shape) if rows.shape else flat)

    def _write(self, tensors: list[torch.Tensor], memory: memoryview) -> None:
        self._fill(tensors, torch.frombuffer(memory, dtype=self.dtype))


@dataclass(frozen=True)
class PackLayout:
    """Tensors that share a buffer.

    Attributes:
        dtype: of all of them.
        numbers: which they are.
        row_shape: of the rows that they are made of.
        lengths: rows of each; where there are gaps and no `shapes`, each is followed by its gap's.
        step: how many of the `lengths` are one tensor's.
        shapes: of each, where their rows are numbers.
        lasts, stops: how they are grouped to be copied: the number after each group's last one, and where it stops.
    """

    dtype: torch.dtype
    numbers: list[int]
    row_shape: list[int]
    lengths: list[int]
    step: int
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
            lengths = self.lengths[first * self.step : last * self.step]
            some_parts = _part(some.view(-1, *self.row_shape) if self.row_shape else some, lengths)[:: self.step]
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
    rows = Rows.of(dtype, shapes)
    sizes = rows.sizes
    are_small = sum(sizes) * dtype.itemsize < _SMALL_BYTES * len(sizes)
    groups = _in_company(sizes, _OWN_BELOW_BYTES // dtype.itemsize) if are_small else ([len(sizes)], [sum(sizes)])
    if not rows.are_common:  # the shape says what of its part is a tensor's
        return PackLayout(dtype, numbers, [], sizes, 1, shapes, *groups)
    lengths, step = rows.lengths, 1
    if rows.gaps:
        lengths, step = [rows for both in zip(rows.lengths, rows.gaps, strict=True) for rows in both], 2
    return PackLayout(dtype, numbers, rows.shape, lengths, step, [], *groups)


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
    num_bytes = buffer.nbytes
    if num_bytes >= _OWN_BELOW_BYTES:
        return buffer
    # As `codec.aligned`, which takes longer.
    whole = bytearray(num_bytes + ALIGN_BYTES)
    start = -_address_of(_first_of(whole)) % ALIGN_BYTES
    own = memoryview(whole)[start : start + num_bytes]
    own[:] = buffer
    return own


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
