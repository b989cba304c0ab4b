"""A batch as structure and buffers: flatten it in the data worker, rebuild it in the trainer, bit for bit.

Tensors and NumPy arrays become (dtype, shape) and a raw buffer; many small tensors of one dtype share a buffer. What
else there is to tensors (strides, common memory, a gradient) is kept beside them. A tensor, or a list, tuple or
dict of tensors, is written down as such; any other batch is one pickle stream (`structure.py`), in which each tensor
and array is a number. Both sides have proved that they hold the job's key before a byte of it is read.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
import torch
import torch._utils

from hetstream.base.text import is_unicode
from hetstream.mpi_dataworkers.errors import ProtocolError, RemoteError
from hetstream.mpi_dataworkers.ops.structure import load_structure, number_arrays, refuse_inner, take_structure
from hetstream.mpi_dataworkers.wire.codec import ALIGN_BYTES, FUSE_BELOW_BYTES, Buffer, Leaf, Scattered

# Tensors and their bytes: each with a buffer of its own, or many small ones of one dtype in one.

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


# Tensors of a batch for which type and shape do not say all: that overlap in memory, have gaps or another order in it,
# repeat numbers (`expand`), or want a gradient.
#
# torch's worker processes hand storages over, so all of this arrives as it was. Here only numbers travel, each once.
# The memory that tensors have in common is sent as one piece; where there are gaps in it, the numbers are sent side by
# side, and the trainer puts them into a room of the same form. The tensors are made anew as views.

# Where a tensor of the batch is found among what was sent: the number of an earlier tensor of the batch, if it is that
# very object; [number of a memory], if that is the tensor; or [number, dtype, offset in bytes, shape, strides, whether
# it wants a gradient, what else torch notes of it]. The memories are what was sent, and after it the rooms.
Place = int | list[Any]
# Memory to be made, in bytes, and what is put there: [number of what was sent, offset in bytes, shape, strides].
Room = tuple[int, list[list[Any]]]

_start_of: Any = torch.Tensor.data_ptr
_noted: Any = torch._utils.get_tensor_metadata
_note: Any = torch._utils.set_tensor_metadata
# A column of a large table has gaps that are larger than its numbers. A room takes at most so much, or so many times
# the bytes that were sent; beyond that a tensor comes without its gaps.
_MOST_ROOM_BYTES, _MOST_ROOM_TIMES = 64 << 20, 16
# Types that torch can copy with gaps, by size: it cannot copy each type.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def have_common_memory(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> bool:
    """Whether some of the tensors overlap.

    Args:
        tensors: those of a batch, each in row-major order.
        sizes: bytes of each.
    """
    if len(tensors) < 2:
        return False
    starts = list(map(_start_of, tensors))
    ends = list(map(operator.add, starts, sizes))
    # Nothing overlaps when each begins where the one before has ended; then both orders are the same.
    starts.sort()
    ends.sort()
    return any(map(operator.gt, ends, starts[1:]))


def are_aligned(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors start where a tensor of their own would: so they come, and in no other place of a cache line
    than behind torch's worker processes, whose storages begin on pages."""
    return not any(tensor.storage_offset() * tensor.element_size() % ALIGN_BYTES for tensor in tensors)


@dataclass
class Gathered:
    """What is sent of tensors.

    Attributes:
        sent: the memory that they lie in; where there are gaps in it, their numbers.
        places: of each of them.
        rooms: of those with gaps.
    """

    sent: list[torch.Tensor]
    places: list[Place]
    rooms: list[Room]


def gather(tensors: Sequence[torch.Tensor], wholes: Set[int]) -> Gathered:
    """Replace tensors by the memory that they lie in.

    Args:
        tensors: those of a batch.
        wholes: numbers of those that stand for a storage, which has the same size at the other end.

    Raises:
        RuntimeError: one is part of a graph; torch's own error.
    """
    firsts: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        firsts.setdefault(id(tensor), index)
        refuse_inner(tensor)
    views = [_View.of(tensors[index], index) for index in firsts.values()]
    gathered = Gathered([], [firsts[id(tensor)] for tensor in tensors], [])
    for group in _groups(views):
        is_storage = not wholes.isdisjoint(view.index for view in group)
        if len(group) > 1 or is_storage or not _lies_in_order(group[0]):
            _send_memory(group, is_storage, gathered)
        else:
            gathered.places[group[0].index] = [len(gathered.sent)]
            gathered.sent.append(group[0].tensor)
    return gathered


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor and where it lies.

    Attributes:
        index: its number in the batch.
        start, stop: the first address, and the one after the last.
        shape, strides: of its numbers without those that are repeated.
        num_bytes: of these.
    """

    tensor: torch.Tensor
    index: int
    start: int
    stop: int
    shape: list[int]
    strides: Sequence[int]
    num_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor, index: int) -> _View:
        start, strides, item_bytes = tensor.data_ptr(), tensor.stride(), tensor.element_size()
        shape = [size if stride else min(size, 1) for size, stride in zip(tensor.shape, strides, strict=True)]
        num_bytes = math.prod(shape) * item_bytes
        if num_bytes and not start:
            raise RuntimeError(
                f"a tensor of {tuple(tensor.shape)} has no memory (a ZeroTensor of autograd?): clone() it"
            )
        steps = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        stop = start + (steps + 1) * item_bytes if num_bytes else start
        return cls(tensor, index, start, stop, shape, strides, num_bytes)

    def place(self, memory: int, offset: int, strides: Sequence[int]) -> Place:
        """Where it is found, in a memory of this number."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        noted = self.tensor.requires_grad, _noted(self.tensor)
        return [memory, dtype, offset, list(self.tensor.shape), list(strides), *noted]

    def numbers(self) -> torch.Tensor:
        """Its numbers as they lie, without those that are repeated, in a type that torch can copy."""
        carrier = torch.empty(0, dtype=_CARRIERS[self.tensor.element_size()])
        return carrier.set_(self.tensor.untyped_storage(), self.tensor.storage_offset(), self.shape, self.strides)


def _lies_in_order(view: _View) -> bool:
    """Whether type and shape are all there is to a tensor that is alone in its memory."""
    tensor = view.tensor
    if tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return False
    return view.strides == strides_in_order(tensor.shape) and (not view.num_bytes or are_aligned([tensor]))


def strides_in_order(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides that torch gives a new tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _groups(views: Sequence[_View]) -> list[list[_View]]:
    """Group those whose memory overlaps, each in the order of their addresses."""
    groups: list[list[_View]] = []
    reach = 0
    for view in sorted(views, key=lambda view: view.start):
        if view.num_bytes and groups and view.start < reach:
            groups[-1].append(view)
        else:
            groups.append([view])
        reach = max(reach, view.stop)
    return groups


def _send_memory(group: Sequence[_View], is_storage: bool, gathered: Gathered) -> None:
    """Send the memory that tensors lie in: as it is, if that takes no more bytes than they have, else without gaps."""
    needed = sum(view.num_bytes for view in group)
    if not needed:
        for view in group:
            gathered.places[view.index] = view.place(len(gathered.sent), 0, view.strides)
            gathered.sent.append(torch.empty(0, dtype=view.tensor.dtype))
        return
    first, begin = group[0].tensor, group[0].start
    is_one_type = all(view.tensor.dtype is first.dtype for view in group)
    stop = max(view.stop for view in group)
    has_no_gaps = stop - begin <= needed + max(_CARRIERS)
    begin -= (begin - first.untyped_storage().data_ptr()) % ALIGN_BYTES
    length = stop - begin
    memory = _window(first, begin, length, is_one_type) if has_no_gaps else None
    offsets = [view.start - begin for view in group]
    fits = not any(offset % view.tensor.element_size() for offset, view in zip(offsets, group, strict=True))
    if fits and memory is not None and not is_storage:
        number = len(gathered.sent)
        gathered.sent.append(memory)
    elif fits and length <= _most_room(needed):
        number = -1 - len(gathered.rooms)
        gathered.rooms.append((length, _pieces(group, offsets, memory, gathered.sent)))
    else:
        for view in group:
            strides = [
                step if stride else 0 for step, stride in zip(strides_in_order(view.shape), view.strides, strict=True)
            ]
            gathered.places[view.index] = view.place(len(gathered.sent), 0, strides)
            gathered.sent.append(view.numbers())
        return
    for view, offset in zip(group, offsets, strict=True):
        gathered.places[view.index] = view.place(number, offset, view.strides)


def _pieces(
    group: Sequence[_View], offsets: Sequence[int], memory: torch.Tensor | None, sent: list[torch.Tensor]
) -> list[list[Any]]:
    """Send what is put into a room: its memory in one piece, or the numbers of each tensor."""
    if memory is not None:
        sent.append(memory)
        return [[len(sent) - 1, 0, list(memory.shape), [1]]]
    pieces = []
    for view, offset in zip(group, offsets, strict=True):
        pieces.append([len(sent), offset, view.shape, list(view.strides)])
        sent.append(view.numbers())
    return pieces


def _window(tensor: torch.Tensor, begin: int, num_bytes: int, in_its_type: bool) -> torch.Tensor | None:
    """Memory of a tensor's storage; None if it does not reach so far. Two arrays' tensors may overlap, and each storage
    knows of its own part alone."""
    storage = tensor.untyped_storage()
    start = begin - storage.data_ptr()
    if start + num_bytes > storage.nbytes():
        return None
    dtype = tensor.dtype if in_its_type else torch.uint8
    empty = torch.empty(0, dtype=dtype)
    return empty.set_(storage, start // dtype.itemsize, (num_bytes // dtype.itemsize,))  # type: ignore[call-overload,no-any-return]


def _most_room(sent_bytes: int) -> int:
    return max(_MOST_ROOM_BYTES, _MOST_ROOM_TIMES * sent_bytes)


def take_apart(
    places: Sequence[Place], rooms: Sequence[Room], sent: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """The tensors of a batch, where `gather` has replaced some.

    Raises:
        RuntimeError, TypeError, ValueError, IndexError or AttributeError: the places do not fit what was sent.
    """
    memories = [*sent, *[_room(*room, sent) for room in rooms][::-1]]
    found: list[torch.Tensor] = []
    for place in places:
        if isinstance(place, int):
            found.append(found[place])
            continue
        number, *view = place
        memory = memories[number]
        if memory is None:
            raise ValueError(f"a batch's structure names tensor {number}, which did not come")
        if not view:
            found.append(memory)
            continue
        name, offset, shape, strides, wants_gradient, noted = view
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a batch's structure names a tensor of {name}")
        if memory.storage_offset() * memory.element_size() % dtype.itemsize:
            # A small one that lies inside another one's storage.
            memory = memories[number] = memory.clone()
        tensor = _view_of(memory, dtype, offset, shape, strides)
        if noted:
            _note(tensor, dict(noted))
        found.append(tensor.requires_grad_() if wants_gradient else tensor)
    return found


def _view_of(
    memory: torch.Tensor, dtype: torch.dtype, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """A tensor of its own in this memory: none that autograd takes for a view, as others may be views of the same."""
    steps = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    stop = offset + (steps + 1) * dtype.itemsize if math.prod(shape) else offset
    if min([offset, *shape, *strides]) < 0 or offset % dtype.itemsize or stop > memory.numel() * memory.element_size():
        raise ValueError(f"a batch's structure names a view of {dtype} at {offset} bytes, which is not in its memory")
    start = (memory.storage_offset() * memory.element_size() + offset) // dtype.itemsize
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), start, shape, strides)


def _room(num_bytes: int, pieces: Sequence[Sequence[Any]], sent: Sequence[torch.Tensor | None]) -> torch.Tensor:
    numbers = [sent[piece[0]] for piece in pieces]
    if num_bytes > _most_room(sum(tensor.numel() * tensor.element_size() for tensor in numbers if tensor is not None)):
        raise ValueError(f"a batch's structure wants {num_bytes} bytes for the numbers of {len(pieces)} tensors")
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    for tensor, (_, offset, shape, strides) in zip(numbers, pieces, strict=True):
        if tensor is None:
            raise ValueError("a batch's structure names a tensor which did not come")
        _view_of(memory, tensor.dtype, offset, shape, strides).copy_(tensor.reshape(shape))
    return memory


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()

_TENSOR, _STRIDED = torch.Tensor, torch.strided
_look = operator.attrgetter("dtype", "shape", "layout", "is_cpu")
_is_in_order: Any = torch.Tensor.is_contiguous
_offset_of: Any = torch.Tensor.storage_offset
_wants_gradient = operator.attrgetter("requires_grad")
_KINDS: dict[type, str] = {torch.Tensor: "t", list: "l", tuple: "u"}
_CONTAINERS: dict[str, Any] = {"l": list, "u": tuple}
# So many small tensors of one dtype are worth a buffer in common: torch gathers and parts them in one call each.
_PACK_FROM = 8
# Specs that carry no large values, and so repeat from batch to batch, are read once.
_CACHED_SPEC_BYTES = 1 << 16
_DTYPE_NAMES = {dtype: name for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
# What a spec that does not fit its bytes may raise.
_MALFORMED = (
    msgspec.MsgspecError, StopIteration, ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError,
)  # fmt: skip


def flatten(batch: object) -> tuple[bytes, list[Leaf]]:
    """Take a batch apart.

    Returns:
        The spec, and the buffers that it names. Large tensors and arrays share memory with the batch where it is
        contiguous.

    Raises:
        RuntimeError: a tensor is part of a graph, which does not travel; torch's own error.
        Exception: whatever user code raises, or what says that something cannot be pickled.
    """
    tensors: list[torch.Tensor] = []
    arrays: Sequence[Leaf] = ()
    wholes: Set[int] = frozenset()
    known = None
    names = _names_of_tensors(batch, tensors)
    if names is not None:
        try:
            known = _plan_of_tensors(names, tuple(map(_look, tensors)))
        except RuntimeError:
            known = None  # of nested tensors, which have no shape
    if known is not None:
        plan, tree, spec = known
    else:
        structure = take_structure(batch)
        tensors, wholes, arrays = structure.tensors, structure.wholes, [*structure.buffers, structure.stream]
        plan, spec, tree = _plan_of(tensors), b"", ["p", structure.arrays, structure.holds_objects]
    gathered = None
    if wholes or not _are_apart_in_order(tensors, plan):
        gathered = gather(tensors, wholes)
        tensors, plan, spec = gathered.sent, _plan_of(gathered.sent), b""
    if not spec:
        extra = (gathered.places, gathered.rooms) if gathered is not None else ()
        spec = _encoder.encode((plan.table, plan.numbers, tree, *extra))
    if len(plan.packs) == 1 and not plan.alone:
        return spec, [plan.packs[0].of(tensors), *arrays]
    if not plan.packs:
        return spec, [*map(bytes_of_tensor, tensors), *arrays]
    buffers: list[Leaf] = [pack.of([tensors[index] for index in pack.numbers]) for pack in plan.packs]
    buffers += [bytes_of_tensor(tensors[index]) for index in plan.alone]
    return spec, [*buffers, *arrays]


def _are_apart_in_order(tensors: Sequence[torch.Tensor], plan: _Plan) -> bool:
    """Whether type and shape are all there is to the tensors: each in row-major order, aligned, not in another one's
    memory, without a gradient."""
    if not all(map(_is_in_order, tensors)) or any(map(_wants_gradient, tensors)):
        return False
    if any(map(_offset_of, tensors)) and not are_aligned(tensors):
        return False
    if plan.is_odd and not (
        all(tensors[index].stride() == strides and not tensors[index].is_neg() for index, strides in plan.thin)
        and not any(tensors[index].is_conj() for index in plan.complex)
        and (plan.sizes.count(0) < 2 or len(set(map(id, tensors))) == len(tensors))
    ):
        return False
    return len(tensors) == 1 or not have_common_memory(tensors, plan.sizes)


@dataclass(frozen=True)
class _Plan:
    """How tensors of some types and shapes are written.

    Attributes:
        packs: those that share a buffer.
        alone: numbers of those with a buffer of their own.
        sizes: bytes of each.
        thin: those without a dimension, or with one of one number or none, of which torch says that they are in order
            whatever its stride (the imaginary part of a conjugate, say): number and strides in order.
        complex: numbers of those of complex type.
        is_odd: there are such, or some without numbers, of which memory does not show whether they are one object.
        table, numbers: their types and shapes, and the numbers of the packs, as they are in the spec.
    """

    packs: list[Pack]
    alone: list[int]
    sizes: list[int]
    thin: list[tuple[int, tuple[int, ...]]]
    complex: list[int]
    is_odd: bool
    table: msgspec.Raw
    numbers: msgspec.Raw


@functools.lru_cache(maxsize=64)
def _plan(dtypes: tuple[torch.dtype, ...], shapes: tuple[torch.Size, ...]) -> _Plan:
    """The small tensors of each dtype share a buffer, where they are many."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    sizes = [dtype.itemsize * shape.numel() for dtype, shape in zip(dtypes, shapes, strict=True)]
    for index, (dtype, size) in enumerate(zip(dtypes, sizes, strict=True)):
        if 0 < size < FUSE_BELOW_BYTES and not dtype.is_complex:
            by_dtype.setdefault(dtype, []).append(index)
    packs = []
    for dtype, numbers in by_dtype.items():
        if len(numbers) >= _PACK_FROM:
            packs.append(Pack(numbers, dtype, Rows.of(dtype, [shapes[index] for index in numbers])))
    packed = {index for pack in packs for index in pack.numbers}
    alone = [index for index in range(len(dtypes)) if index not in packed]
    table = [(_DTYPE_NAMES[dtype], shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
    raw = [msgspec.Raw(_encoder.encode(part)) for part in (table, [pack.numbers for pack in packs])]
    thin = [(index, strides_in_order(shape)) for index, shape in enumerate(shapes) if min(shape, default=0) < 2]
    complex_ones = [index for index, dtype in enumerate(dtypes) if dtype.is_complex]
    return _Plan(packs, alone, sizes, thin, complex_ones, bool(thin or complex_ones), *raw)


def _plan_of(tensors: Sequence[torch.Tensor]) -> _Plan:
    return _plan(tuple([tensor.dtype for tensor in tensors]), tuple([tensor.shape for tensor in tensors]))


def _names_of_tensors(batch: object, tensors: list[torch.Tensor]) -> type | tuple[str, ...] | None:
    """What most batches are: a tensor, a list or a tuple of tensors, or a dict of them by name.

    Args:
        batch: the batch.
        tensors: gets its tensors.

    Returns:
        The names of a dict's tensors, else the type of the batch; None if it is something else.
    """
    kind = type(batch)
    if kind is _TENSOR:
        tensors.append(batch)  # type: ignore[arg-type]
        return _TENSOR
    if kind is list or kind is tuple:
        tensors += batch  # type: ignore[arg-type]
        return kind if set(map(type, tensors)) == {_TENSOR} else None
    if type(batch) is dict and set(map(type, batch.values())) == {_TENSOR} and set(map(type, batch)) == {str}:
        tensors += batch.values()
        return tuple(batch)
    return None


@functools.lru_cache(maxsize=64)
def _plan_of_tensors(
    names: type | tuple[str, ...], looks: tuple[tuple[Any, ...], ...]
) -> tuple[_Plan, list[Any], bytes] | None:
    """How a batch of tensors is written, its structure, and its spec: the same for all batches with the same ones.

    Args:
        names: as `_names_of_tensors` gives them.
        looks: `_look` of each.

    Returns:
        None if one of them is no plain tensor, or one of the names no text.
    """
    if any(dtype in _QUANTIZED or layout is not _STRIDED or not is_cpu for dtype, _, layout, is_cpu in looks):
        return None
    plan = _plan(tuple(look[0] for look in looks), tuple(look[1] for look in looks))
    if isinstance(names, tuple) and not all(map(is_unicode, names)):
        return None
    tree = ["d", names] if isinstance(names, tuple) else [_KINDS[names]]
    return plan, tree, _encoder.encode((plan.table, plan.numbers, tree))


def unflatten(spec: bytes, buffers: list[memoryview]) -> Any:
    """Put a batch together again.

    Large tensors are views of `buffers`. Small ones are copied, so that a program which keeps one (a label, an id) does
    not keep the message that it came in.

    Raises:
        ProtocolError: the spec and the buffers do not fit.
    """
    try:
        layout = _read_cached(spec) if len(spec) <= _CACHED_SPEC_BYTES else _read(spec)
        next_buffer = map(owned, buffers).__next__
        tensors = layout.tensors(next_buffer)
        if layout.places:
            tensors = take_apart(layout.places, layout.rooms, tensors)
        kind, *parts = layout.tree
        if kind == "d":
            return dict(zip(parts[0], tensors, strict=True))
        if kind == "p":
            names_of_arrays, holds_objects = parts
            arrays = number_arrays(names_of_arrays, next_buffer)
            return load_structure(next_buffer(), [*tensors, *arrays], holds_objects)
        if kind == "t":
            (tensor,) = tensors
            return tensor
        return _CONTAINERS[kind](tensors)
    except RemoteError:
        raise  # from the user's class; it is a RuntimeError, too
    except _MALFORMED as error:
        raise ProtocolError(f"a batch's structure does not fit its bytes: {error!r}") from error


def holds_objects(spec: bytes) -> bool:
    """Whether `unflatten` would run code of classes that it does not know, which may raise or hang."""
    if len(spec) > _CACHED_SPEC_BYTES:
        return True  # most likely, and reading it twice costs more than a thread
    try:
        return _read_cached(spec).holds_objects
    except _MALFORMED:
        return False  # `unflatten` says so


@dataclass(frozen=True)
class _Layout:
    """A spec as it was read.

    Attributes:
        num_tensors: all of them.
        packs: the tensors that share a buffer.
        alone: the tensors with a buffer of their own.
        tree: the structure: "t" for a tensor, "l" or "u" for a list or a tuple of tensors, "d" with names for a dict of
            them; for anything else "p", with `arrays` and `holds_objects` of its `Structure`.
        places, rooms: where its tensors are found among those that were sent, if `gather` has replaced some.
        in_order: all of them share one buffer, in order.
    """

    num_tensors: int
    packs: list[PackLayout]
    alone: list[TensorLayout]
    tree: list[Any]
    places: list[Place]
    rooms: list[Room]
    in_order: bool

    @property
    def holds_objects(self) -> bool:
        """Whether its stream names classes or functions that hetstream does not know."""
        return self.tree[0] == "p" and bool(self.tree[2])

    def tensors(self, next_buffer: Callable[[], memoryview]) -> Sequence[torch.Tensor | None]:
        """All tensors, as views of the buffers."""
        if self.in_order:
            return self.packs[0].parts(next_buffer())
        if not self.packs:
            return [layout.view(next_buffer()) for layout in self.alone]
        built: list[torch.Tensor | None] = [None] * self.num_tensors
        for pack in self.packs:
            for index, part in zip(pack.numbers, pack.parts(next_buffer()), strict=True):
                built[index] = part
        for layout in self.alone:
            built[layout.number] = layout.view(next_buffer())
        return built


def _read(spec: bytes) -> _Layout:
    table, packs, tree, *extra = _decoder.decode(spec)
    places, rooms = extra or ([], [])
    dtypes = [getattr(torch, name) for name, _ in table]
    if not _QUANTIZED.isdisjoint(dtypes):  # torch crashes when one of these gets a shape
        raise ValueError("a batch's structure names a quantized tensor, which travels as what it is made of")
    shapes = [shape for _, shape in table]
    packed = {index for pack in packs for index in pack}
    layouts = [pack_layout(dtypes[pack[0]], pack, [shapes[index] for index in pack]) for pack in packs]
    alone = [TensorLayout(index, dtypes[index], shapes[index]) for index in range(len(table)) if index not in packed]
    in_order = packs == [list(range(len(table)))]
    return _Layout(len(table), layouts, alone, tree, places, rooms, in_order)


_read_cached = functools.lru_cache(maxsize=64)(_read)
