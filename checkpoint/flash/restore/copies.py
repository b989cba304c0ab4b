"""What is to be copied into the tensors of a program, noted first and copied at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import torch

from hetstream.checkpoint.flash.restore.stored import (
    StoredPart,
    StoredTensor,
)
from hetstream.checkpoint.tensors.copying import copy_in_memory
from hetstream.checkpoint.tensors.leaves import Leaves, Move
from hetstream.checkpoint.tensors.views import DTYPES

# Kinds of references whose values are made anew.
_NOT_TENSORS = ("numpy", "bytes", "pickle")
# dtype, shape, strides, offset and shard of a reference to an entry as it lies there, which is all of a tensor.
_WHOLE = {(None, None, None, 0, None)}
_MAIN_MEMORY = torch.device("cpu")


@dataclass
class Copies:
    """What is to be copied into the tensors of a program, once all of it is known."""

    _moves: list[Move] = field(default_factory=list)
    _moved: list[torch.Tensor] = field(default_factory=list)
    _copied: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self, here: torch.Tensor, saved: torch.Tensor | StoredTensor) -> None:
        """Note a tensor of the program, and what it shall hold."""
        if not isinstance(saved, StoredTensor):
            self._copied.append((here, saved))
        elif saved.address is None or not _is_plain(here):
            self._copied.append((here, saved.view))
        else:
            self.add_move(here, (here.data_ptr(), saved.address, here.nbytes))

    def add_move(self, here: torch.Tensor, move: Move) -> None:
        """Note a tensor in main memory, row-major and without holes, and where its bytes come from."""
        self._moves.append(move)
        self._moved.append(here)

    def take(self, others: Copies) -> None:
        """Note all that others have noted."""
        self._moves += others._moves
        self._moved += others._moved
        self._copied += others._copied

    @torch.no_grad()
    def run(self) -> None:
        """Copy. Autograd is told that the tensors have changed."""
        in_memory: list[tuple[torch.Tensor, torch.Tensor]] = []
        elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []
        for here, saved in self._copied:
            if here.layout is not torch.strided:
                here.copy_(saved)  # itself: it may get more or fewer values
            elif here.numel() and any(
                stride == 0 and size > 1 for stride, size in zip(here.stride(), here.shape, strict=True)
            ):
                # An expanded tensor cannot be written to as it is; its memory can.
                index = tuple(0 if stride == 0 else slice(None) for stride in here.stride())
                here[index].copy_(saved[index])
            elif here.is_conj() or here.is_neg():
                here.copy_(saved)
            elif here.is_cpu and saved.is_cpu:
                in_memory.append((here.detach(), saved))
            else:
                elsewhere.append((here.detach(), saved))
        copy_in_memory([here for here, _ in in_memory], [saved for _, saved in in_memory], self._moves)
        torch.autograd.graph.increment_version([*self._moved, *(here for here, _ in in_memory)])
        if elsewhere:
            torch._foreach_copy_([here for here, _ in elsewhere], [saved for _, saved in elsewhere])


def copies_alike(keys: list[str], leaves: Leaves, part: StoredPart) -> Copies | None:
    """The copies below some top-level keys; None if they are not alike, or not as simple as that.

    Compared are lists, and not tensor by tensor: there may be very many.
    """
    texts = [msgspec.json.encode([tree[key] for key in keys]) for tree in (leaves.tree, part.record.tree)]
    numbers = [number for key in keys for number in leaves.plain[key]]
    # Equal texts hold equal numbers.
    if texts[0] != texts[1] or (numbers and max(numbers) >= len(part.record.tensors)):
        return None
    refs = [part.record.tensors[number] for number in numbers]
    known = part.store.payload.entries
    if any(ref.entry >= len(known) for ref in refs):
        return None
    here = leaves.signature
    views = {(ref.dtype, ref.shape, ref.strides, ref.offset_bytes, ref.shard) for ref in refs}
    kinds = {ref.kind for ref in refs} | {here.kinds[number] for number in numbers}
    if not views <= _WHOLE or not kinds.isdisjoint(_NOT_TENSORS):
        return None
    entries = [known[ref.entry] for ref in refs]
    dtypes, shapes = [here.dtypes[number] for number in numbers], [here.shapes[number] for number in numbers]
    if shapes != [entry.shape for entry in entries] or dtypes != [DTYPES.get(entry.dtype) for entry in entries]:
        return None
    begin = part.store.payload.begin
    tensors = [leaves.tensors[number] for number in numbers]
    moves = [
        (here.addresses[number], begin + entry.offset, entry.num_bytes)
        for number, entry in zip(numbers, entries, strict=True)
    ]
    if len({move[0] for move in moves}) < len({move[:2] for move in moves if move[2]}):
        return None  # tensors that share memory here, and did not when they were saved
    are_plain = [
        here.are_contiguous[number] and not here.are_lazy[number] and here.devices[number] == _MAIN_MEMORY
        for number in numbers
    ]
    if all(are_plain):
        return Copies(moves, tensors)
    copies = Copies()
    for is_plain, tensor, move, ref, entry, dtype in zip(are_plain, tensors, moves, refs, entries, dtypes, strict=True):
        if is_plain:
            copies.add_move(tensor, move)
        else:
            copies.add(tensor, StoredTensor(ref, part.store, entry.shape, dtype, move[1]))
    return copies


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its values lie in main memory as they are, row-major and without holes."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
