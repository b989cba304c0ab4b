"""Tensors of a batch for which type and shape do not say all: that overlap in memory, have gaps or another order in it,
repeat numbers (`expand`), or want a gradient.

torch's worker processes hand storages over, so all of this arrives as it was. Here only numbers travel, each once. The
memory that tensors have in common is sent as one piece; where there are gaps in it, the numbers are sent side by side,
and the trainer puts them into a room of the same form. The tensors are made anew as views.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch._utils

from hetstream.mpi_dataworkers.ops.structure import refuse_inner
from hetstream.mpi_dataworkers.wire.codec import ALIGN_BYTES

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
        if len(group) > 1 or is_storage or not _is_in_order(group[0]):
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


def _is_in_order(view: _View) -> bool:
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
