"""A plan of where each tensor of a state is copied: which entries there are, and which tensors share one.

Called by `capture.py` when a save finds a layout that the save before had not; the plan is kept as long as the layout
is. Reads addresses, shapes and strides, never a value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from hetstream.checkpoint.record.layout import ALIGN_BYTES, ITEM_BYTES, Layout, TensorSpec, lay_out
from hetstream.checkpoint.record.structure import TensorRef
from hetstream.checkpoint.tensors.leaves import Leaves, Move, Signature
from hetstream.checkpoint.tensors.views import CARRIERS, DTYPES, NAMES, dtype_of, view_of

# Overlapping tensors are kept as the memory that they span unless that is so much more than the tensors themselves.
_MAX_SPAN_FACTOR = 2

# dtype, shape, strides, offset and is_permuted of a `TensorRef`, and those of one that is the whole entry.
_View = tuple[str | None, tuple[int, ...] | None, tuple[int, ...] | None, int, bool]
_WHOLE: _View = (None, None, None, 0, False)


@dataclass(frozen=True)
class Span:
    """An entry that is a stretch of memory which several tensors are views of.

    Attributes:
        entry: its index.
        leaf: number of a tensor whose storage it is in.
        offset_bytes: where it begins, from the beginning of that tensor.
    """

    entry: int
    leaf: int
    offset_bytes: int


@dataclass(frozen=True)
class Plan:
    """How the tensors of a state are laid out.

    Attributes:
        layout: the entries.
        refs: what each number in the tree is.
        encoded_refs: the same as JSON.
        sources: for each entry, the number of the tensor that is copied into it.
        spans: the entries that are copied from a stretch of memory instead.
        entries: for each tensor, the entry that it is in.
        offsets: for each tensor, how many bytes behind the beginning of that entry's memory it begins.
        num_bytes: for each entry, how much memory its tensors take; 0 if it shares none whatever lies there.
        are_plain: for each entry, whether its bytes are copied as they lie in main memory.
        shared: top-level keys that are equal on every rank, so that rank 0 alone writes them.
    """

    layout: Layout
    refs: list[TensorRef]
    encoded_refs: msgspec.Raw
    sources: list[int]
    spans: list[Span]
    entries: np.ndarray[Any, np.dtype[np.int64]]
    offsets: np.ndarray[Any, np.dtype[np.int64]]
    num_bytes: np.ndarray[Any, np.dtype[np.int64]]
    are_plain: np.ndarray[Any, np.dtype[np.bool_]]
    shared: tuple[str, ...] = ()

    def fits(self, addresses: Sequence[int]) -> bool:
        """Whether tensors at these addresses share memory as those did that the plan was made for."""
        starts = np.array(addresses, np.int64) - self.offsets
        shares = self.num_bytes[self.entries] > 0
        begins = np.zeros(len(self.num_bytes), np.int64)
        begins[self.entries] = starts
        if not np.array_equal(begins[self.entries][shares], starts[shares]):
            return False
        alone = self.num_bytes > 0
        order = np.argsort(begins[alone])
        begins, ends = begins[alone][order], (begins[alone] + self.num_bytes[alone])[order]
        return bool(np.all(begins[1:] >= ends[:-1]))

    def is_like(self, other: Plan) -> bool:
        """Whether the same is copied to the same places."""
        same_tensors = (self.sources, self.spans) == (other.sources, other.spans)
        same_tensors = same_tensors and self.shared == other.shared
        return same_tensors and self.layout.digest == other.layout.digest and self.encoded_refs == other.encoded_refs

    def moves(self, addresses: Sequence[int], begin: int, entries: np.ndarray[Any, np.dtype[np.int64]]) -> list[Move]:
        """How plain entries get into a payload.

        Args:
            addresses: of the tensors, as in `Signature`.
            begin: address of the payload.
            entries: their indices.
        """
        sources, shifts, offsets, sizes = self._places
        starts = np.array(addresses, np.int64)[sources[entries]] + shifts[entries]
        return list(zip((begin + offsets[entries]).tolist(), starts.tolist(), sizes[entries].tolist(), strict=True))

    @functools.cached_property
    def _places(self) -> tuple[np.ndarray[Any, np.dtype[np.int64]], ...]:
        """For each entry: a tensor, how far behind its beginning the entry begins, its offset and its size."""
        shifts = np.zeros(len(self.sources), np.int64)
        for span in self.spans:
            shifts[span.entry] = span.offset_bytes
        entries = self.layout.entries
        offsets = np.array([entry.offset for entry in entries], np.int64)
        sizes = np.array([entry.num_bytes for entry in entries], np.int64)
        return np.array(self.sources, np.int64), shifts, offsets, sizes

    def destination(self, index: int, memory: torch.Tensor) -> torch.Tensor:
        """Where an entry of `tensors_to_copy` goes.

        Args:
            memory: of the payload, as bytes.
        """
        entry = self.layout.entries[index]
        if not entry.num_bytes:
            return torch.empty(entry.shape, dtype=dtype_of(entry))
        view = memory[entry.offset : entry.offset + entry.num_bytes].view(dtype_of(entry)).view(entry.shape)
        if any(span.entry == index for span in self.spans):
            return view
        return view_of(self.refs[self.sources[index]], entry, view)

    def tensors_to_copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is copied, in the order of the entries."""
        copied = [tensors[index] for index in self.sources]
        for span in self.spans:
            entry = self.layout.entries[span.entry]
            copied[span.entry] = _stretch(tensors[span.leaf], span.offset_bytes, DTYPES[entry.dtype], entry.shape)
        return copied


def make_plan(leaves: Leaves, shared: Iterable[str] = ()) -> Plan:
    """Decide which entries a state needs; what counts is its signature, not what its tensors may have become since.

    Args:
        shared: top-level keys that are said to be equal on every rank. Those that hold a sharded tensor are not. Their
            tensors come last, so that a rank's own lie together.
    """
    seen = leaves.signature
    equal = leaves.equal_keys(shared)
    last = {*equal}
    groups = sorted(_group(leaves, seen), key=lambda group: _place(group, seen.names[group.named_after], last))
    specs: list[TensorSpec] = []
    sources: list[int] = []
    spans: list[Span] = []
    refs: list[TensorRef | None] = [None] * len(seen.names)
    names = _unique(seen.names)
    for group in groups:
        entry = len(specs)
        first = group.members[0]
        specs.append(TensorSpec(names[group.named_after], group.dtype, group.shape))
        sources.append(first)
        if group.is_span:
            spans.append(Span(entry, first, group.start - seen.addresses[first]))
        for index in group.members:
            view = group.view_of(seen, index)
            refs[index] = TensorRef(entry, seen.kinds[index], *view, shard=seen.shards.get(index))
    known = [ref for ref in refs if ref is not None]
    return Plan(
        lay_out(specs),
        known,
        msgspec.Raw(msgspec.json.encode(known)),
        sources,
        spans,
        np.array([ref.entry for ref in known], np.int64),
        np.array([ref.offset_bytes for ref in known], np.int64),
        np.array([group.num_bytes for group in groups], np.int64),
        np.array([group.is_plain(seen) for group in groups], bool),
        equal,
    )


def _place(group: _Group, name: str, shared: set[str]) -> tuple[bool, int, bool, int]:
    """Sorts entries as the layout will lay them, and a rank's own before the shared ones."""
    item_bytes = ITEM_BYTES[group.dtype]
    in_region_b = math.prod(group.shape) * item_bytes % ALIGN_BYTES != 0
    is_shared = name.partition(".")[0] in shared if shared else False
    return in_region_b, -item_bytes if in_region_b else 0, is_shared, group.named_after


@dataclass(slots=True)
class _Group:
    """Tensors that make one entry.

    Attributes:
        members: their numbers.
        named_after: one of them.
        dtype: of the entry.
        shape: of the entry.
        num_bytes: how much memory they span together; 0 if it shares none whatever lies there.
        start: of a span: the address at which it begins.
        is_span: the entry is a stretch of memory that they are views of.
    """

    members: list[int]
    named_after: int
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    start: int = 0
    is_span: bool = False

    def is_plain(self, seen: Signature) -> bool:
        """Whether the entry is what lies in main memory."""
        first = self.members[0]
        is_as_it_lies = self.is_span or (seen.are_contiguous[first] and not seen.are_lazy[first])
        return is_as_it_lies and seen.devices[first].type == "cpu"

    def view_of(self, seen: Signature, index: int) -> _View:
        """Which part of the entry a member is."""
        name, shape, strides = NAMES[seen.dtypes[index]], seen.shapes[index], seen.strides[index]
        is_contiguous = seen.are_contiguous[index]
        is_same = name == self.dtype and shape == self.shape
        if is_same and is_contiguous and not self.is_span:
            return _WHOLE
        dtype = None if name == self.dtype else name
        own_shape = None if is_same else tuple(shape)
        if not self.is_span:
            is_permuted = not is_contiguous and _is_dense(shape, strides)
            return dtype, own_shape, strides if is_permuted else None, 0, is_permuted
        return dtype, own_shape, None if is_contiguous else strides, seen.addresses[index] - self.start, False


def _group(leaves: Leaves, seen: Signature) -> list[_Group]:
    """Which tensors are one entry: equal views of one place, and views that overlap."""
    sizes = [0 if is_lazy else seen.memory_bytes(index) for index, is_lazy in enumerate(seen.are_lazy)]
    groups = []
    for clump in _clumps(seen, sizes):
        first = clump[0]
        if len(clump) == 1 and (seen.are_contiguous[first] or not sizes[first]):
            groups.append(_alone(seen, clump, sizes[first]))
            continue
        places: dict[Any, list[int]] = {}
        for index in clump:
            place = seen.addresses[index], seen.dtypes[index], seen.shapes[index], seen.strides[index]
            places.setdefault(place, []).append(index)
        span = _span(seen, leaves.tensors[first], [*places.values()])
        groups += [span] if span else [_alone(seen, members, sizes[members[0]]) for members in places.values()]
    return groups


def _clumps(seen: Signature, sizes: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of tensors whose memory overlaps, together and ascending; most are alone.

    Args:
        sizes: of their memory; 0 for those that are alone whatever lies there.
    """
    begins = np.array(seen.addresses, np.int64)
    ends = begins + np.array(sizes, np.int64)
    kinds = {device: index for index, device in enumerate(dict.fromkeys(seen.devices))}
    devices = np.array([kinds[device] for device in seen.devices], np.int64)
    yield from ([index] for index in np.flatnonzero(begins == ends).tolist())
    for device in kinds.values():
        order = np.flatnonzero((begins < ends) & (devices == device))
        order = order[np.argsort(begins[order], kind="stable")]
        # A tensor begins a clump if it lies behind the ends of all before it.
        is_first = np.ones(len(order), bool)
        is_first[1:] = begins[order][1:] >= np.maximum.accumulate(ends[order])[:-1]
        firsts = np.flatnonzero(is_first)
        counts = np.diff(firsts, append=len(order))
        yield from ([index] for index in order[firsts[counts == 1]].tolist())
        for first, count in zip(firsts[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
            yield sorted(order[first : first + count].tolist())


def _alone(seen: Signature, members: list[int], num_bytes: int) -> _Group:
    first = members[0]
    name = NAMES[seen.dtypes[first]]
    carrier, width = CARRIERS.get(name, (name, 0))
    shape = (*seen.shapes[first], width) if width else tuple(seen.shapes[first])
    return _Group(members, first, carrier, shape, num_bytes)


def _span(seen: Signature, tensor: torch.Tensor, places: list[list[int]]) -> _Group | None:
    """One entry for tensors that overlap, or None if each is better kept on its own.

    Args:
        tensor: the storage of this one has to hold all of it.
        places: their numbers, equal views of one place together.
    """
    members = sorted(index for place in places for index in place)
    ones = [place[0] for place in places]
    item_bytes = {name: seen.dtypes[name].itemsize for name in ones}
    used_bytes = {name: math.prod(seen.shapes[name]) * item_bytes[name] for name in ones}
    if len(ones) == 1 and used_bytes[ones[0]] <= seen.memory_bytes(ones[0]):
        return None
    start = min(seen.addresses[name] for name in ones)
    num_bytes = max(seen.addresses[name] + seen.memory_bytes(name) for name in ones) - start
    is_aligned = all((seen.addresses[name] - start) % item_bytes[name] == 0 for name in ones)
    is_worth_it = num_bytes <= _MAX_SPAN_FACTOR * sum(used_bytes.values())
    storage = tensor.untyped_storage()
    is_inside = storage.data_ptr() <= start and start + num_bytes <= storage.data_ptr() + storage.nbytes()
    if not (is_aligned and is_worth_it and is_inside) or any(NAMES[seen.dtypes[name]] in CARRIERS for name in ones):
        return None
    for index in members:
        is_all = seen.addresses[index] == start and seen.memory_bytes(index) == num_bytes
        if is_all and seen.are_contiguous[index]:
            dtype, shape = NAMES[seen.dtypes[index]], tuple(seen.shapes[index])
            return _Group(members, index, dtype, shape, num_bytes, start, is_span=True)
    kinds = {seen.dtypes[name] for name in ones}
    kind = kinds.pop() if len(kinds) == 1 else torch.uint8
    shape = (num_bytes // kind.itemsize,)
    return _Group(members, members[0], NAMES[kind], shape, num_bytes, start, is_span=True)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill a stretch of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _stretch(tensor: torch.Tensor, offset_bytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Memory near a tensor, in the same storage, as a row-major tensor."""
    storage = tensor.untyped_storage()
    begin = tensor.data_ptr() - storage.data_ptr() + offset_bytes
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    made.set_(storage, begin, (math.prod(shape) * dtype.itemsize,), (1,))
    return made.view(dtype).view(shape)


def _unique(names: Sequence[str]) -> list[str]:
    """The names with a suffix where two places of the state read the same, such as keys 1 and "1"."""
    taken: set[str] = set()
    unique = []
    for name in names:
        # File formats reserve this one, and know no text that is not Unicode.
        plain = (name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()) or "_"
        plain = plain if plain != "__metadata__" else "__metadata__~"
        count, candidate = 1, plain
        while candidate in taken:
            count += 1
            candidate = f"{plain}~{count}"
        taken.add(candidate)
        unique.append(candidate)
    return unique
