"""A plan of where each tensor of a state is copied: which entries there are, and which tensors share one.

Called by `capture.py` when a save finds a layout that the save before had not; the plan is kept as long as the layout
is. Reads addresses, shapes and strides, never a value.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from hetstream.checkpoint.record.layout import ALIGN_BYTES, ITEM_BYTES, Layout, TensorSpec, lay_out
from hetstream.checkpoint.record.structure import TensorRef
from hetstream.checkpoint.tensors.leaves import CARRIERS, DTYPES, NAMES, Leaves, Move, Signature, dtype_of, view_of

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
        """Return whether tensors at these addresses share memory as those did that the plan was made for."""
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
        """Return whether the same is copied to the same places."""
        same_tensors = (self.sources, self.spans) == (other.sources, other.spans)
        same_tensors = same_tensors and self.shared == other.shared
        return same_tensors and self.layout.digest == other.layout.digest and self.encoded_refs == other.encoded_refs

    def moves(self, addresses: Sequence[int], begin: int, entries: np.ndarray[Any, np.dtype[np.int64]]) -> list[Move]:
        """Return how plain entries get into a payload.

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
        """Return where an entry of `tensors_to_copy` goes.

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
        """Return what is copied, in the order of the entries."""
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
        """Return whether the entry is what lies in main memory."""
        first = self.members[0]
        is_as_it_lies = self.is_span or (seen.are_contiguous[first] and not seen.are_lazy[first])
        return is_as_it_lies and seen.devices[first].type == "cpu"

    def view_of(self, seen: Signature, index: int) -> _View:
        """Return which part of the entry a member is."""
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


# Copies within main memory: in pieces, by as many threads as are free to take one. For saves and for restores.

# Bytes from which on threads share a copy; waiting for the GIL would take longer than a smaller one.
_SHARED_BYTES = 64 << 10
# What a thread takes at a time, and for how much another one is worth its start. More threads than the limit are not
# faster than memory is.
_PIECE_BYTES = 8 << 20
_THREAD_BYTES = 64 << 20
_MAX_THREADS = 8
_MAX_INTERRUPTS = 100


def copy_in_memory(
    destinations: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], moves: Sequence[Move] = ()
) -> None:
    """Copy CPU tensors; no thread waits while there is something left to copy. Autograd does not notice.

    Args:
        destinations: in main memory.
        tensors: of the same shapes, in main memory.
        moves: more, by their addresses.
    """
    left_to_torch: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    moves = [*moves]
    for destination, tensor in zip(destinations, tensors, strict=True):
        is_plain = tensor.is_contiguous() and destination.is_contiguous()
        are_alike = tensor.dtype == destination.dtype and tensor.nbytes == destination.nbytes
        if not is_plain or tensor.is_conj() or tensor.is_neg() or not are_alike:
            left_to_torch[0].append(destination)
            left_to_torch[1].append(tensor)
        else:
            moves.append((destination.data_ptr(), tensor.data_ptr(), tensor.nbytes))
    shared = [move for move in moves if move[2] >= _SHARED_BYTES]
    remaining = deque(piece for move in shared for piece in (_pieces(*move) if move[2] > _PIECE_BYTES else (move,)))
    shared_bytes = sum(move[2] for move in shared)
    wanted = min(torch.get_num_threads(), _MAX_THREADS, shared_bytes // _THREAD_BYTES)
    helpers = [_Helper(remaining) for _ in range(1, wanted)]
    try:
        for helper in helpers:
            helper.start()
        if left_to_torch[0]:
            torch._foreach_copy_(*left_to_torch)
        for move in moves:
            if move[2] < _SHARED_BYTES:
                ctypes.memmove(*move)
        _copy_pieces(remaining)
    except BaseException:
        remaining.clear()
        raise
    finally:
        settle([helper.end for helper in helpers], remaining.clear)


def settle(ends: Iterable[Callable[[], object]], hasten: Callable[[], object] = lambda: None) -> None:
    """Call functions that wait, each until it has returned: what they wait for writes to memory that others get.

    An interrupt meanwhile (Ctrl-C, a signal handler that raises) is raised when all have.

    Args:
        ends: each may be called again.
        hasten: called when an interrupt has come, and the result is of no more use.
    """
    interrupt: BaseException | None = None
    for end in ends:
        for _ in range(_MAX_INTERRUPTS):  # a device that is lost fails each time, and writes no more
            try:
                end()
                break
            except BaseException as error:  # noqa: BLE001, raised below
                interrupt = error
                hasten()
    if interrupt:
        raise interrupt


class _Helper:
    """A thread that copies pieces until none is left.

    Args:
        remaining: the pieces, for all threads.
    """

    def __init__(self, remaining: deque[Move]) -> None:
        self._remaining = remaining
        # Each side first says what it does, and then looks what the other one does: at least one of them sees it.
        self._has_begun = False
        self._is_over = False
        # Thread.join would do, but Ctrl-C in it makes Python take the thread for ended (bpo-45274).
        self._is_done = threading.Event()

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._work, name="checkpoint copy").start()

    def end(self) -> None:
        """Wait until it copies no more, and never will. It may be called again."""
        self._is_over = True
        if self._has_begun:
            self._is_done.wait()

    def _work(self) -> None:
        self._has_begun = True
        try:
            if not self._is_over:
                _copy_pieces(self._remaining)
        finally:
            self._is_done.set()


def _copy_pieces(remaining: deque[Move]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            ctypes.memmove(*remaining.popleft())  # without the GIL


def _pieces(into: int, start: int, num_bytes: int) -> Iterator[Move]:
    return ((into + at, start + at, min(_PIECE_BYTES, num_bytes - at)) for at in range(0, num_bytes, _PIECE_BYTES))
