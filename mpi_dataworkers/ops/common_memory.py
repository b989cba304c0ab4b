"""Tensors of a batch that lie in the same memory: what a program writes to one of them must be seen in the others.

torch keeps this between its worker processes and the program, as storages are what it hands over. Here the memory that
tensors have in common is sent once, as bytes, and the tensors are made anew as views of it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

# Where a tensor of the batch is found among what was sent: the number of an earlier tensor of the batch, if it is that
# very object; [number of what was sent], if that is the tensor; or [number, dtype, offset in bytes, shape, strides].
Place = int | list[Any]

_start_of: Any = torch.Tensor.data_ptr


def have_common_memory(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> bool:
    """Whether some of the tensors overlap.

    Args:
        tensors: those of a batch.
        sizes: bytes of the numbers of each. What lies between numbers that are not side by side is not seen here.
    """
    if len(tensors) < 2:
        return False
    starts = list(map(_start_of, tensors))
    ends = list(map(operator.add, starts, sizes))
    # Nothing overlaps when each begins where the one before has ended; then both orders are the same.
    starts.sort()
    ends.sort()
    return any(map(operator.gt, ends, starts[1:]))


def gather(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Place]]:
    """Replace tensors that overlap by the memory that they have in common.

    It is sent only where that takes no more bytes than the tensors would: two columns of a wide table stay apart.

    Returns:
        What is to be sent, and for each of the tensors its place.
    """
    firsts: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        firsts.setdefault(id(tensor), index)
    sent: list[torch.Tensor] = []
    places: list[Place] = [firsts[id(tensor)] for tensor in tensors]
    for group in _groups(tensors, sorted(firsts.values())):
        memory = _memory_of([tensors[index] for index in group])
        if memory is None:
            for index in group:
                places[index] = [len(sent)]
                sent.append(tensors[index])
            continue
        for index in group:
            tensor = tensors[index]
            offset = tensor.data_ptr() - memory.data_ptr()
            dtype = str(tensor.dtype).removeprefix("torch.")
            places[index] = [len(sent), dtype, offset, list(tensor.shape), list(tensor.stride())]
        sent.append(memory)
    return sent, places


def take_apart(places: Sequence[Place], sent: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The tensors of a batch, where `gather` has replaced some.

    Raises:
        RuntimeError, TypeError, ValueError, IndexError or AttributeError: the places do not fit what was sent.
    """
    found: list[torch.Tensor] = []
    memories: dict[int, torch.Tensor] = {}
    for place in places:
        if isinstance(place, int):
            found.append(found[place])
            continue
        number, *view = place
        whole = sent[number]
        if whole is None:
            raise ValueError(f"a batch's structure names tensor {number}, which did not come")
        if not view:
            found.append(whole)
            continue
        name, offset, shape, strides = view
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype) or offset % dtype.itemsize:
            raise ValueError(f"a batch's structure names a view of {name} at {offset} bytes")
        if number not in memories:
            # Strided views count from where the storage begins; small tensors may lie inside another one's.
            memories[number] = whole.clone() if whole.storage_offset() else whole
        memory = memories[number]
        numbers = memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
        found.append(numbers.as_strided(shape, strides, offset // dtype.itemsize))
    return found


def _groups(tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> list[list[int]]:
    """Group those whose memory overlaps."""
    groups: list[list[int]] = []
    reach = 0
    for index in sorted(indices, key=lambda index: tensors[index].data_ptr()):
        start, stop = _extent(tensors[index])
        if groups and start < reach:
            groups[-1].append(index)
        else:
            groups.append([index])
        reach = max(reach, stop)
    return groups


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its memory begins and ends."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.element_size()


def _memory_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory of tensors that overlap, as bytes; None if that is more than theirs, or they are no plain views."""
    if len(tensors) < 2 or any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
        return None
    start, stop = tensors[0].data_ptr(), max(_extent(tensor)[1] for tensor in tensors)
    storage = tensors[0].untyped_storage()
    begin = start - storage.data_ptr()
    if stop - start > sum(tensor.numel() * tensor.element_size() for tensor in tensors):
        return None
    if begin + stop - start > storage.nbytes():  # two arrays' tensors, say: each knows of its own part alone
        return None
    if any((tensor.data_ptr() - start) % tensor.element_size() for tensor in tensors):
        return None
    return torch.empty(0, dtype=torch.uint8).set_(storage, begin, (stop - start,))  # type: ignore[call-overload,no-any-return]
