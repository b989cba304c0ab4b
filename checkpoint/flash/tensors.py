"""From a program's state to tensors and a tree, to a plan of where each tensor is copied, and back to views.

Called by the checkpointer for every save. Flattening looks at every tensor once; everything else is done once for each
layout and kept: which entries there are, which tensors share memory, and the views of a slot that are copied into.
Never allocates for a save that has the layout of the one before.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils import _pytree

from checkpoint.errors import DamagedCheckpoint, StateMismatch, UnsupportedState
from checkpoint.layout import ALIGN_BYTES, ITEM_BYTES, Entry, Layout, TensorSpec, lay_out
from checkpoint.structure import (
    MAX_INLINE_BYTES,
    TENSOR,
    Encoder,
    MakeForeign,
    Node,
    Shard,
    TensorRef,
    inline_bytes,
    loaded_class,
    name_of,
)

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
# Kept under the name of another dtype, with one more dimension, because safetensors has no name for them.
_CARRIERS: dict[str, tuple[str, int]] = {"C128": ("F64", 2), "C32": ("F16", 2), "F4_X2": ("U8", 1)}
for _name, _torch_name in (
    ("F8_E8M0", "float8_e8m0fnu"),
    ("F4_X2", "float4_e2m1fn_x2"),
    ("C128", "complex128"),
    ("C32", "complex32"),
):
    if hasattr(torch, _torch_name):  # a torch of before this dtype
        DTYPES[_name] = getattr(torch, _torch_name)
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WORDS: dict[str, Callable[[str], Any]] = {
    "$dtype": lambda word: getattr(torch, word),
    "$layout": lambda word: getattr(torch, word),
    "$memory_format": lambda word: getattr(torch, word),
    "$device": torch.device,
}
# Overlapping tensors are kept as the memory that they span unless that is so much more than the tensors themselves.
_MAX_SPAN_FACTOR = 2


Move = tuple[int, int, int]
"""A copy in main memory: to which address, from which one, and how many bytes."""


@dataclass
class Leaves:
    """A state taken apart.

    Attributes:
        tree: top-level key to encoded value; tensors are numbers.
        names: of the tensors: their places in the state.
        tensors: the tensors themselves, not copied.
        kinds: what each is, as in `TensorRef.kind`.
        shards: number of a tensor to its place in the sharded whole.
        plain: the top-level keys that hold nothing but tensors and values in plain containers, and the numbers of their
            tensors.
        stepped: numbers of the tensors that only the step of an optimizer changes: parameters and optimizers' states,
            but not buffers, which a forward pass may change. Known where it was asked for.
    """

    tree: dict[str, Node] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    shards: dict[int, Shard] = field(default_factory=dict)
    plain: dict[str, range] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)

    @functools.cached_property
    def signature(self) -> Signature:
        """Of the tensors, as they are when it is first asked for."""
        tensors = self.tensors
        return Signature(
            self.names,
            self.kinds,
            self.shards,
            [tensor.dtype for tensor in tensors],
            [tensor.shape for tensor in tensors],
            [tensor.stride() for tensor in tensors],
            [tensor.device for tensor in tensors],
            [tensor.is_neg() or tensor.is_conj() for tensor in tensors],
            [tensor.is_contiguous() for tensor in tensors],
            [tensor.data_ptr() for tensor in tensors],
        )


class Flattener:
    """Takes states apart.

    Args:
        allow_pickle: pickle what has no other form, instead of refusing it.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle
        self._leaves = Leaves()
        self._is_plain = True
        self._finds_stepped = False
        self._encoder = Encoder(
            {
                torch.Tensor: self._tensor,
                torch.nn.Parameter: self._parameter,
                torch.nn.Buffer: self._tensor,
                np.ndarray: self._array,
                bytes: self._bytes,
                torch.Size: lambda _path, value: {"$size": list(value)},
                torch.dtype: _word,
                torch.layout: _word,
                torch.memory_format: _word,
                torch.device: lambda _path, value: {"$device": str(value)},
            },
            self._foreign,
        )

    def flatten(self, state: Mapping[str, Any], *, finds_stepped: bool = False) -> Leaves:
        """Take a state apart; objects with `state_dict` are replaced by what it gives.

        Args:
            state: top-level key to anything.
            finds_stepped: fill `Leaves.stepped`, too.

        Raises:
            UnsupportedState: something in it cannot be stored.
        """
        leaves = self._leaves = Leaves()
        self._finds_stepped = finds_stepped
        try:
            for key, value in state.items():
                begin, self._is_plain = len(leaves.tensors), True
                leaves.tree[key] = self._encoder.encode(key, value)
                if self._is_plain:
                    leaves.plain[key] = range(begin, len(leaves.tensors))
        finally:
            self._leaves = Leaves()  # keep no tensor alive
        return leaves

    def _add(self, path: str, tensor: torch.Tensor, kind: str) -> Node:
        if tensor.dtype not in NAMES or tensor.is_meta:
            raise _unsupported(path, tensor.dtype)
        leaves = self._leaves
        number = len(leaves.tensors)
        leaves.names.append(path)
        leaves.tensors.append(tensor)
        leaves.kinds.append(kind)
        return {TENSOR: number}

    def _tensor(self, path: str, tensor: torch.Tensor) -> Node:
        if tensor.layout is not torch.strided:
            return self._sparse(path, tensor)
        return self._add(path, tensor, "grad" if tensor.requires_grad else "tensor")

    def _parameter(self, path: str, tensor: torch.Tensor) -> Node:
        return self._add(path, tensor, "parameter" if tensor.requires_grad else "frozen_parameter")

    def _sparse(self, path: str, tensor: torch.Tensor) -> Node:
        self._is_plain = False
        if tensor.layout is not torch.sparse_coo:
            return self._no_form(path, tensor, f"a tensor of layout {tensor.layout}")
        parts = [
            self._add(f"{path}.indices", tensor._indices(), "tensor"),
            self._add(f"{path}.values", tensor._values(), "tensor"),
        ]
        return {"$sparse_coo": [parts, list(tensor.shape), tensor.is_coalesced()]}

    def _array(self, path: str, array: np.ndarray[Any, Any]) -> Node:
        if array.nbytes <= MAX_INLINE_BYTES or not array.dtype.isnative or array.dtype not in _NUMPY_DTYPES:
            return self._encoder.unusual(path, array)
        is_plain = array.flags.writeable and all(stride >= 0 for stride in array.strides)
        return self._add(path, torch.from_numpy(array if is_plain else array.copy()), "numpy")

    def _bytes(self, path: str, value: bytes, kind: str = "bytes") -> Node:
        if len(value) <= MAX_INLINE_BYTES and kind == "bytes":
            return inline_bytes(path, value)
        return self._add(path, torch.frombuffer(bytearray(value or b"\0"), dtype=torch.uint8), kind)

    def _foreign(self, path: str, value: Any) -> Node:
        self._is_plain = False
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._tensor_subclass(path, value)
        if callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None)):
            return self._object(path, value)
        if kind in _pytree.SUPPORTED_NODES:
            children, context = _pytree.SUPPORTED_NODES[kind].flatten_fn(value)
            context_node = self._encoder.item(f"{path}[context]", context)
            return {"$node": [name_of(kind), context_node, self._encoder.items(path, children)]}
        return self._no_form(path, value, None) if self._allow_pickle and not _has_form(value) else NotImplemented

    def _object(self, path: str, value: Any) -> Node:
        begin = len(self._leaves.tensors)
        node = self._encoder.item(path, value.state_dict())
        if self._finds_stepped:
            mine = range(begin, len(self._leaves.tensors))
            if isinstance(value, torch.nn.Module):
                parameters = {one.data_ptr() for one in value.parameters()}
                self._leaves.stepped.update(n for n in mine if self._leaves.tensors[n].data_ptr() in parameters)
            elif isinstance(value, torch.optim.Optimizer):
                self._leaves.stepped.update(mine)
        return node

    def _tensor_subclass(self, path: str, tensor: torch.Tensor) -> Node:
        module = sys.modules.get("torch.distributed.tensor")
        if module is not None and isinstance(tensor, module.DTensor):
            local, shard = _local_shard(path, tensor)
            kind = self._kind_of(tensor)
            self._leaves.shards[len(self._leaves.tensors)] = shard
            return self._add(path, local, kind)
        if isinstance(tensor, torch.nn.Parameter) and not hasattr(tensor, "__torch_dispatch__"):
            return self._parameter(path, tensor)
        return self._no_form(path, tensor, f"a tensor of type {type(tensor).__module__}.{type(tensor).__qualname__}")

    @staticmethod
    def _kind_of(tensor: torch.Tensor) -> str:
        if isinstance(tensor, torch.nn.Parameter):
            return "parameter" if tensor.requires_grad else "frozen_parameter"
        return "grad" if tensor.requires_grad else "tensor"

    def _no_form(self, path: str, value: Any, what: str | None) -> Node:
        if not self._allow_pickle:
            raise UnsupportedState(
                f"{path} is {what}, which a checkpoint cannot hold. Store a plain tensor instead "
                "(to_dense(), to_local(), dequantize()), or allow pickle with allow_pickle=True, to save and to load"
            )
        try:
            data = pickle.dumps(value)
        except Exception as error:  # pickling runs the user's code
            raise UnsupportedState(f"{path} cannot be pickled either: {error}") from error
        return {"$pickle": self._bytes(path, data, "pickle")}


def _has_form(value: Any) -> bool:
    """Whether the structure knows values like this one without pickle."""
    is_named = isinstance(value, tuple) and hasattr(type(value), "_fields")
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_named or is_data or (isinstance(value, np.generic) and not value.dtype.hasobject)


def _word(_path: str, value: Any) -> Node:
    return {f"${type(value).__name__}": str(value).removeprefix("torch.")}


_NUMPY_DTYPES = frozenset(
    np.dtype(word)
    for word in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)


def _local_shard(path: str, tensor: Any) -> tuple[torch.Tensor, Shard]:
    """A DTensor's part on this rank, and where it belongs."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedState(
            f"{path} is a DTensor with placements {tensor.placements}: a partial sum has no value of its own; "
            "call full_tensor() or redistribute() first"
        )
    local = tensor.to_local()
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    shard = Shard(
        global_shape=tuple(tensor.shape),
        offsets=tuple(offsets),
        mesh_shape=tuple(tensor.device_mesh.shape),
        placements=tuple(str(placement) for placement in tensor.placements),
    )
    return local, shard


# Plans

# dtype, shape, strides, offset and is_permuted of a `TensorRef`, and those of one that is the whole entry.
_View = tuple[str | None, tuple[int, ...] | None, tuple[int, ...] | None, int, bool]
_WHOLE: _View = (None, None, None, 0, False)


@dataclass(frozen=True)
class Signature:
    """All that a plan depends on; all but addresses is compared, and which tensors share memory is in these.

    Attributes:
        names: of `Leaves`.
        kinds: of `Leaves`.
        shards: of `Leaves`.
        dtypes: of the tensors.
        shapes: of the tensors.
        strides: of the tensors, in elements.
        devices: that they are on.
        are_lazy: whether their values are not those in memory, but conjugated or negative ones.
        are_contiguous: whether they are in row-major order without holes; follows from shape and strides.
        addresses: where they begin.
    """

    names: list[str]
    kinds: list[str]
    shards: dict[int, Shard]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    devices: list[torch.device]
    are_lazy: list[bool]
    are_contiguous: list[bool] = field(compare=False)
    addresses: list[int] = field(compare=False)

    def memory_bytes(self, number: int) -> int:
        """How much memory a tensor spans, from its first element to behind the last."""
        dtype, shape = self.dtypes[number], self.shapes[number]
        if self.are_contiguous[number]:
            return math.prod(shape) * dtype.itemsize
        return _span_bytes(shape, self.strides[number], dtype.itemsize)


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
        copied = [tensors[number] for number in self.sources]
        for span in self.spans:
            entry = self.layout.entries[span.entry]
            copied[span.entry] = _stretch(tensors[span.leaf], span.offset_bytes, DTYPES[entry.dtype], entry.shape)
        return copied


def make_plan(leaves: Leaves, shared: Iterable[str] = ()) -> Plan:
    """Decide which entries a state needs; what counts is its signature, not what its tensors may have become since.

    Args:
        shared: top-level keys whose tensors come last, so that a rank's own lie together.
    """
    seen = leaves.signature
    shared = set(shared)
    groups = sorted(_group(leaves, seen), key=lambda group: _place(group, seen.names[group.named_after], shared))
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
        for number in group.members:
            view = group.view_of(seen, number)
            refs[number] = TensorRef(entry, seen.kinds[number], *view, shard=seen.shards.get(number))
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

    def view_of(self, seen: Signature, number: int) -> _View:
        """Which part of the entry a member is."""
        name, shape, strides = NAMES[seen.dtypes[number]], seen.shapes[number], seen.strides[number]
        is_contiguous = seen.are_contiguous[number]
        is_same = name == self.dtype and shape == self.shape
        if is_same and is_contiguous and not self.is_span:
            return _WHOLE
        dtype = None if name == self.dtype else name
        own_shape = None if is_same else tuple(shape)
        if not self.is_span:
            is_permuted = not is_contiguous and _is_dense(shape, strides)
            return dtype, own_shape, strides if is_permuted else None, 0, is_permuted
        return dtype, own_shape, None if is_contiguous else strides, seen.addresses[number] - self.start, False


def _group(leaves: Leaves, seen: Signature) -> list[_Group]:
    """Which tensors are one entry: equal views of one place, and views that overlap."""
    sizes = [0 if is_lazy else seen.memory_bytes(number) for number, is_lazy in enumerate(seen.are_lazy)]
    groups = []
    for clump in _clumps(seen, sizes):
        first = clump[0]
        if len(clump) == 1 and (seen.are_contiguous[first] or not sizes[first]):
            groups.append(_alone(seen, clump, sizes[first]))
            continue
        places: dict[Any, list[int]] = {}
        for number in clump:
            place = seen.addresses[number], seen.dtypes[number], seen.shapes[number], seen.strides[number]
            places.setdefault(place, []).append(number)
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
    yield from ([number] for number in np.flatnonzero(begins == ends).tolist())
    for device in kinds.values():
        order = np.flatnonzero((begins < ends) & (devices == device))
        order = order[np.argsort(begins[order], kind="stable")]
        # A tensor begins a clump if it lies behind the ends of all before it.
        is_first = np.ones(len(order), bool)
        is_first[1:] = begins[order][1:] >= np.maximum.accumulate(ends[order])[:-1]
        firsts = np.flatnonzero(is_first)
        counts = np.diff(firsts, append=len(order))
        yield from ([number] for number in order[firsts[counts == 1]].tolist())
        for first, count in zip(firsts[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
            yield sorted(order[first : first + count].tolist())


def _alone(seen: Signature, members: list[int], num_bytes: int) -> _Group:
    first = members[0]
    name = NAMES[seen.dtypes[first]]
    carrier, width = _CARRIERS.get(name, (name, 0))
    shape = (*seen.shapes[first], width) if width else tuple(seen.shapes[first])
    return _Group(members, first, carrier, shape, num_bytes)


def _span(seen: Signature, tensor: torch.Tensor, places: list[list[int]]) -> _Group | None:
    """One entry for tensors that overlap, or None if each is better kept on its own.

    Args:
        tensor: the storage of this one has to hold all of it.
        places: their numbers, equal views of one place together.
    """
    members = sorted(number for place in places for number in place)
    ones = [place[0] for place in places]
    item_bytes = {one: seen.dtypes[one].itemsize for one in ones}
    used_bytes = {one: math.prod(seen.shapes[one]) * item_bytes[one] for one in ones}
    if len(ones) == 1 and used_bytes[ones[0]] <= seen.memory_bytes(ones[0]):
        return None
    start = min(seen.addresses[one] for one in ones)
    num_bytes = max(seen.addresses[one] + seen.memory_bytes(one) for one in ones) - start
    is_aligned = all((seen.addresses[one] - start) % item_bytes[one] == 0 for one in ones)
    is_worth_it = num_bytes <= _MAX_SPAN_FACTOR * sum(used_bytes.values())
    storage = tensor.untyped_storage()
    is_inside = storage.data_ptr() <= start and start + num_bytes <= storage.data_ptr() + storage.nbytes()
    if not (is_aligned and is_worth_it and is_inside) or any(NAMES[seen.dtypes[one]] in _CARRIERS for one in ones):
        return None
    for number in members:
        is_all = seen.addresses[number] == start and seen.memory_bytes(number) == num_bytes
        if is_all and seen.are_contiguous[number]:
            dtype, shape = NAMES[seen.dtypes[number]], tuple(seen.shapes[number])
            return _Group(members, number, dtype, shape, num_bytes, start, is_span=True)
    kinds = {seen.dtypes[one] for one in ones}
    kind = kinds.pop() if len(kinds) == 1 else torch.uint8
    shape = (num_bytes // kind.itemsize,)
    return _Group(members, members[0], NAMES[kind], shape, num_bytes, start, is_span=True)


def _unsupported(path: str, dtype: torch.dtype) -> UnsupportedState:
    if dtype in NAMES:
        return UnsupportedState(
            f"{path} is a tensor on the meta device: it has no values to save; materialise it first"
        )
    return UnsupportedState(
        f"{path} has dtype {dtype}, which a checkpoint cannot hold: save tensor.int_repr() with its scale and zero "
        "point, or tensor.view(torch.uint8)"
    )


def _span_bytes(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> int:
    """Bytes from the first element to behind the last."""
    if 0 in shape:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1) * item_bytes


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


# Views of a payload


def bytes_as_tensor(data: memoryview) -> torch.Tensor:
    """Memory as a tensor of bytes, without copying; read-only memory must not be written through it."""
    if not len(data):
        return torch.empty(0, dtype=torch.uint8)
    if not data.readonly:
        return torch.frombuffer(data, dtype=torch.uint8)
    with warnings.catch_warnings():
        # torch has no read-only tensors; nobody writes to those of read-only memory.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(data, dtype=torch.uint8)


def tensor_of(entry: Entry, data: memoryview) -> torch.Tensor:
    """One entry's bytes as its tensor, without copying."""
    if not entry.num_bytes:
        return torch.empty(entry.shape, dtype=dtype_of(entry))
    return bytes_as_tensor(data).view(dtype_of(entry)).view(entry.shape)


def dtype_of(entry: Entry) -> torch.dtype:
    """As torch knows it.

    Raises:
        DamagedCheckpoint: it does not.
    """
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise DamagedCheckpoint(f"tensor {entry.name!r} has dtype {entry.dtype!r}, which this torch does not have")
    return dtype


def is_whole(ref: TensorRef) -> bool:
    """Whether a reference is its entry as it lies there."""
    return ref.dtype is None and ref.shape is None and ref.strides is None and not ref.offset_bytes


def view_of(ref: TensorRef, entry: Entry, view: torch.Tensor) -> torch.Tensor:
    """The tensor of a reference as it lies in its entry, without copying: row-major if `is_permuted`.

    Raises:
        DamagedCheckpoint: the reference points outside its entry, or has a dtype unknown here.
    """
    if is_whole(ref):
        return view
    name = ref.dtype or entry.dtype
    if name not in DTYPES:
        raise DamagedCheckpoint(f"tensor {entry.name!r} has dtype {name!r}, which this torch does not have")
    dtype = DTYPES[name]
    shape = entry.shape if ref.shape is None else ref.shape
    strides = _row_major(shape) if ref.strides is None or ref.is_permuted else ref.strides
    is_right = (
        len(strides) == len(shape)
        and all(size >= 0 for size in shape)
        and all(stride >= 0 for stride in strides)
        and ref.offset_bytes % dtype.itemsize == 0
    )
    if is_right:
        count = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if all(shape) else 0
        is_right = ref.offset_bytes + count * dtype.itemsize <= entry.num_bytes
    if not is_right:
        raise DamagedCheckpoint(f"the structure describes a view of tensor {entry.name!r} that is not inside it: {ref}")
    if not all(shape):
        return torch.empty(shape, dtype=dtype)
    flat = view.reshape(-1).view(torch.uint8).view(dtype)
    return flat.as_strided(shape, strides, flat.storage_offset() + ref.offset_bytes // dtype.itemsize)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def make_foreign(*, allow_pickle: bool) -> MakeForeign:
    """What makes the values again that the pure structure does not know, for `Record.decode`.

    Args:
        allow_pickle: unpickle what was pickled. Only for checkpoints of one's own: unpickling runs what it says.
    """

    def foreign(tag: str, body: Node, again: Callable[[Node], Any]) -> Any:
        if tag in _WORDS:
            value = _WORDS[tag](body)
            if type(value).__name__ != tag[1:]:
                raise DamagedCheckpoint(f"the structure calls {body!r} a {tag[1:]}")
            return value
        if tag == "$size":
            return torch.Size(body)
        if tag == "$sparse_coo":
            parts, shape, is_coalesced = body
            indices, values = again(parts)
            return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True, is_coalesced=is_coalesced)
        if tag == "$node":
            return _registered(body[0], again(body[1]), again(body[2]))
        if tag == "$pickle":
            return _unpickled(again(body), allow_pickle=allow_pickle)
        raise DamagedCheckpoint(f"the structure has a value of kind {tag!r}, which this release does not know")

    return foreign


def _registered(name: str, context: Any, children: list[Any]) -> Any:
    """A value of a type that the program has registered with torch's pytree."""
    kind = loaded_class(name)
    if kind not in _pytree.SUPPORTED_NODES:
        raise StateMismatch(
            f"the checkpoint holds a {name}, which this program has not registered: call "
            "torch.utils._pytree.register_pytree_node for it before the checkpoint is loaded"
        )
    return _pytree.SUPPORTED_NODES[kind].unflatten_fn(children, context)


def _unpickled(data: bytes, *, allow_pickle: bool) -> Any:
    if not allow_pickle:
        raise StateMismatch(
            "the checkpoint holds a pickled object. Unpickling runs what the file says, so it has to be allowed: "
            "allow_pickle=True, for checkpoints of your own"
        )
    return pickle.loads(data)
