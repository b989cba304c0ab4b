"""The parts of all ranks as one state: any box of a sharded tensor, whoever saved which piece of it.

Called by `dcp.py` and `weights.py`, and by a restore whose ranks are not those that saved. Reads what is needed and no
more: a rank that wants a quarter of each tensor touches a quarter of the files.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hetstream.base.text import count_words
from hetstream.checkpoint.disk import commit
from hetstream.checkpoint.disk.rank_file import Compare, open_file
from hetstream.checkpoint.errors import DamagedCheckpoint, MissingRanks, NoCheckpoint
from hetstream.checkpoint.record.layout import Entry, Generation
from hetstream.checkpoint.record.structure import Record, TensorRef
from hetstream.checkpoint.tensors.leaves import make_foreign, tensor_of, view_of

CheckpointPath = str | os.PathLike[str]
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and shape, one number for each dimension


@dataclass(frozen=True)
class RankPart:
    """What one rank saved.

    Attributes:
        rank: which.
        record: its structure.
        tensors: one for each of the record's; they may lie in a mapped file.
        check: compares the rest of the file with its checksums, once; called before a tensor is used.
    """

    rank: int
    record: Record
    tensors: Sequence[torch.Tensor]
    check: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True)
class Piece:
    """A rank's piece of a tensor.

    Attributes:
        part: whose.
        tensor: its values, not yet checked.
        offsets: where it belongs in the whole.
    """

    part: RankPart
    tensor: torch.Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Whole:
    """A sharded tensor.

    Attributes:
        name: its place in the state, joined by dots, as torch.distributed.checkpoint names it.
        shape: of all of it.
        pieces: none twice, though ranks may hold copies.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Of all pieces."""
        return self.pieces[0].tensor.dtype

    def read(self, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the values of a box: a view if one piece has them all, else a copy.

        Raises:
            MissingRanks: no piece holds some of them.
            DamagedCheckpoint: a file that holds some is damaged.
        """
        there = []
        for piece in self.pieces:
            overlap = overlap_of((tuple(offsets), tuple(shape)), (piece.offsets, tuple(piece.tensor.shape)))
            if overlap is not None:
                there.append((piece, *overlap))
        found = sum(math.prod(size) for _, _, size in there)
        # Before memory is taken for what nobody has.
        if found != math.prod(shape) and not any(size == tuple(shape) for _, _, size in there):
            raise MissingRanks(
                f"{self.name}: the files of {count_words(len(self.pieces), 'rank')} hold {found} of the "
                f"{math.prod(shape)} elements from {tuple(offsets)} of {self.shape}; another rank's file is missing"
            )
        out: torch.Tensor | None = None
        for piece, begin, size in there:
            piece.part.check()
            values = cut(piece.tensor, [b - o for b, o in zip(begin, piece.offsets, strict=True)], size)
            if size == tuple(shape):
                return values
            if out is None:
                out = torch.empty(tuple(shape), dtype=self.dtype)
            cut(out, [b - o for b, o in zip(begin, offsets, strict=True)], size).copy_(values)
        return torch.empty(tuple(shape), dtype=self.dtype) if out is None else out


def overlap_of(left: Box, right: Box) -> Box | None:
    """Return what two boxes have in common, or None."""
    begin = tuple(map(max, left[0], right[0]))
    ends = (min(a + b, c + d) for a, b, c, d in zip(*left, *right, strict=True))
    size = tuple(end - start for start, end in zip(begin, ends, strict=True))
    return (begin, size) if all(length > 0 for length in size) else None


def cut(tensor: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return a box of a tensor, uncopied."""
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


class Clash(NamedTuple):
    """A place where two ranks have values: the one that is taken, and one that is not."""

    name: str
    taken: Any
    other: Any


class Parts:
    """The state that all ranks saved together; a context manager that lets the checkpoint go.

    Args:
        parts: of all ranks, in any order.
        own_rank: whose values to take where the ranks have different ones; rank 0's where it has none.
        allow_pickle: unpickle what was pickled.
        lock: keeps the checkpoint from being removed; released by `close`.

    Attributes:
        wholes: the sharded tensors by name.

    Raises:
        DamagedCheckpoint: the structures break their form or do not belong together.
    """

    def __init__(
        self,
        parts: Sequence[RankPart],
        own_rank: int = 0,
        *,
        allow_pickle: bool = False,
        lock: contextlib.ExitStack | None = None,
    ) -> None:
        self._lock = lock
        ordered = sorted(parts, key=lambda part: (part.rank != own_rank, part.rank))
        if not ordered:
            raise MissingRanks("a checkpoint without the file of any rank")
        self._parts = ordered
        self._foreign = make_foreign(allow_pickle=allow_pickle)
        self._names = {part.rank: names_of(part.record) for part in ordered}
        self.wholes = {whole.name: whole for whole in self._gather()}

    def close(self) -> None:
        """Let the checkpoint go. What was read stays."""
        if self._lock:
            self._lock.close()

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tree(self, tensor: Callable[[Whole], Any], clashes: list[Clash] | None = None) -> dict[str, Any]:
        """Return the state of all ranks as one tree: dicts are merged key by key; a value that several ranks have is
        the first one's.

        Args:
            tensor: makes a leaf from what was saved of it.
            clashes: is given the values that were passed over, but for sharded tensors.
        """
        merged: dict[str, Any] = {}
        found: list[Clash] = []
        for part in self._parts:
            _merge(merged, self._decode(part, tensor), "", found)
        if clashes is not None:
            clashes += [clash for clash in found if clash.name not in self.wholes]
        return merged

    def _decode(self, part: RankPart, tensor: Callable[[Whole], Any]) -> dict[str, Any]:
        names = self._names[part.rank]
        numbers = iter(range(len(part.record.tensors)))

        def leaf(ref: TensorRef) -> Any:
            number = next(numbers)
            name, values = names[number], part.tensors[number]
            if ref.kind == "numpy":
                part.check()
                return values.numpy()
            if ref.kind in ("bytes", "pickle"):
                part.check()
                return values.numpy().tobytes()
            if ref.shard is not None:
                return tensor(self.wholes[name])
            return tensor(Whole(name, tuple(values.shape), (Piece(part, values, (0,) * values.ndim),)))

        return part.record.decode(leaf, self._foreign)

    def _gather(self) -> Iterator[Whole]:
        pieces: dict[str, dict[Box, Piece]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for part in self._parts:
            for number, name in self._names[part.rank].items():
                tensor, shard = part.tensors[number], part.record.tensors[number].shard
                if shard is None:
                    continue
                shape = shapes.setdefault(name, tuple(shard.global_shape))
                box = tuple(shard.offsets), tuple(tensor.shape)
                if not is_inside(box, shape) or shape != tuple(shard.global_shape):
                    raise DamagedCheckpoint(
                        f"{name}: rank {part.rank} saved {box[1]} at {box[0]} of {shard.global_shape}, another rank a "
                        f"part of {shape}"
                    )
                if tensor.numel() or not math.prod(shape):
                    pieces.setdefault(name, {}).setdefault(box, Piece(part, tensor, box[0]))
        for name, found in pieces.items():
            if len({piece.tensor.dtype for piece in found.values()}) > 1:
                raise DamagedCheckpoint(f"{name}: the ranks saved it in different dtypes")
            yield Whole(name, shapes[name], tuple(found.values()))


def is_inside(box: Box, shape: Sequence[int]) -> bool:
    """Return whether a box is one of a tensor of this shape."""
    return len(box[0]) == len(box[1]) == len(shape) and all(
        0 <= offset <= offset + size <= whole for offset, size, whole in zip(*box, shape, strict=True)
    )


def names_of(record: Record) -> dict[int, str]:
    """Return the name of each tensor of a record by its number: its place, joined by dots."""
    counter = iter(range(len(record.tensors)))
    # What is foreign here may hold tensors; they are found under its place.
    tree = record.decode(lambda ref: _Number(next(counter)), lambda tag, body, again: again(body))  # noqa: ARG005
    named = {int(value): name for name, value in walk("", tree) if isinstance(value, _Number)}
    return {index: named.get(index, f"#{index}") for index in range(len(record.tensors))}


class _Number(int):
    """A tensor's number in its record, told from the numbers of the state. Where it stands for the values of a set, a
    tuple or the like, which are in the payload: there are no tensors among them."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree with their places, joined by dots."""
    prefix = f"{path}." if path else ""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from walk(f"{prefix}{key}", item)
    elif isinstance(value, list | tuple | deque):
        for index, item in enumerate(value):
            yield from walk(f"{prefix}{index}", item)
    elif hasattr(value, "__dict__") and not isinstance(value, type | torch.Tensor | _Number):
        for key, item in vars(value).items():
            yield from walk(f"{prefix}{key}", item)
    else:
        yield path, value


def _merge(left: Any, right: Any, path: str, clashes: list[Clash]) -> None:
    for key, value in right.items():
        place = f"{path}.{key}" if path else str(key)
        if key not in left:
            left[key] = value
        elif isinstance(left[key], dict) and isinstance(value, dict):
            _merge(left[key], value, place, clashes)
        else:
            clashes.append(Clash(place, left[key], value))


def open_parts(
    path: CheckpointPath,
    own_rank: int = 0,
    *,
    allow_pickle: bool = False,
    read_only: bool = False,
    is_compared: bool = False,
) -> Parts:
    """Map the files of a committed checkpoint. Of the tensors only those are read, and checked, that are used.

    Args:
        path: DIR/step-0000000120.2, or a link to it such as DIR/latest.
        own_rank: as for `Parts`.
        allow_pickle: as for `Parts`.
        read_only: see `CheckpointDirectory`.
        is_compared: every byte of it has been compared with its checksum, here or in another process of this host.

    Raises:
        NoCheckpoint: there is none.
        MissingRanks: files of some ranks are not there.
        DamagedCheckpoint: a file is not what was written.
    """
    place = Path(path).resolve()
    generation = Generation.of_directory(place.name)
    with contextlib.ExitStack() as stack:
        held = generation and stack.enter_context(commit.holding(place.parent, generation, locks=not read_only))
        if generation is None or held is None:
            raise NoCheckpoint(f"{path} is no committed checkpoint, such as DIR/step-0000000120.2 or DIR/latest")
        manifests = commit.read_parts(held, generation)
        world_size = next((manifest.world_size for manifest in manifests.values()), 1)
        missing = [rank for rank in range(world_size) if rank not in manifests]
        if missing:
            raise MissingRanks(f"{place} lacks the parts of {len(missing)} of {world_size} ranks, first {missing[0]}")
        compare: Compare = "nothing" if is_compared else "structure"
        files = [open_file(held, manifest, compare=compare, copies=read_only) for manifest in manifests.values()]
        parts = [
            part_of(file.manifest.rank, file.record, file.entries, data, str(file.path), file.check)
            for file, data in ((file, [file.bytes_of(entry) for entry in file.entries]) for file in files)
        ]
        return Parts(parts, own_rank, allow_pickle=allow_pickle, lock=stack.pop_all())


def part_of(
    rank: int,
    record: Record,
    entries: Sequence[Entry],
    data: Sequence[memoryview],
    name: str,
    check: Callable[[], None] = lambda: None,
) -> RankPart:
    """Return a part whose tensors are views of a file.

    Args:
        rank: whose.
        record: its structure.
        entries: its entries.
        data: the bytes of each.
        name: of the file, for messages.
        check: as in `RankPart`.

    Raises:
        DamagedCheckpoint: the structure does not fit the entries.
    """
    views = [tensor_of(entry, content) for entry, content in zip(entries, data, strict=True)]
    tensors = []
    for ref in record.tensors:
        if ref.entry >= len(views):
            raise DamagedCheckpoint(f"{name}: the structure refers to entry {ref.entry} of {len(views)}")
        tensors.append(view_of(ref, entries[ref.entry], views[ref.entry]))
    return RankPart(rank, record, tensors, check)
