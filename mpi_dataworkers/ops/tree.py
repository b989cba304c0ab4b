"""A batch as structure and buffers: flatten it in the data worker, rebuild it in the trainer, bit for bit.

Tensors and NumPy arrays become (dtype, shape) and a raw buffer; many small tensors of one dtype share a buffer. The
order of their dimensions in memory stays (channels_last, say) where they lie there without gaps. Tensors that overlap
in memory do so in the trainer, too. Lists, tuples, named tuples, dicts, numbers, text and None are written as they are.
Anything else (a dataclass, a PIL image, a sparse tensor) is pickled as a leaf; both sides have proved that they hold
the job's key before a byte of it is read.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import torch._utils

from hetstream.base.text import is_unicode
from hetstream.mpi_dataworkers.errors import ProtocolError, RemoteError
from hetstream.mpi_dataworkers.ops.common_memory import Place, gather, have_common_memory, take_apart
from hetstream.mpi_dataworkers.ops.leaves import load_leaf, pickle_leaf
from hetstream.mpi_dataworkers.ops.packing import Pack, PackLayout, TensorLayout, bytes_of_tensor, owned, pack_layout
from hetstream.mpi_dataworkers.ops.staged import StagedBatch
from hetstream.mpi_dataworkers.wire.codec import FUSE_BELOW_BYTES, Leaf

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()

_PLAIN = (type(None), bool, int, float, str, bytes)
_TENSOR, _STRIDED = torch.Tensor, torch.strided
_look = operator.attrgetter("dtype", "shape", "layout", "is_cpu")
_INT64_MAX = 2**63 - 1
_NUMBERS = re.compile(r"[<>|=][biufc][0-9]{1,2}")
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
    """
    tensors: list[torch.Tensor] = []
    arrays: list[Leaf] = []
    known = None
    names = _names_of_tensors(batch, tensors)
    if names is not None:
        try:
            known = _plan_of_tensors(names, tuple(map(_look, tensors)))
        except RuntimeError:
            known = None  # of nested tensors, which have no shape
    if (
        known is not None
        and all(tensors[index].is_contiguous() for index in known[0].may_turn)
        and (len(tensors) == 1 or not have_common_memory(tensors, known[0].sizes))
    ):
        plan, spec = known
    else:
        tensors = []
        tree = _describe(batch, tensors, arrays)
        places: list[Place] = []
        plan = _plan_of(tensors)
        if have_common_memory(tensors, plan.sizes):
            tensors, places = gather(tensors)
            plan = _plan_of(tensors)
        spec = _encoder.encode((plan.table, plan.numbers, tree, places))
    if len(plan.packs) == 1 and not plan.alone:
        return spec, [plan.packs[0].of(tensors), *arrays]
    if not plan.packs:
        return spec, [*map(bytes_of_tensor, tensors), *arrays]
    buffers: list[Leaf] = [pack.of([tensors[index] for index in pack.numbers]) for pack in plan.packs]
    buffers += [bytes_of_tensor(tensors[index]) for index in plan.alone]
    return spec, buffers + arrays


@dataclass(frozen=True)
class _Plan:
    """How tensors of some types and shapes are written.

    Attributes:
        packs: those that share a buffer.
        alone: numbers of those with a buffer of their own.
        sizes: bytes of each.
        may_turn: numbers of those whose dimensions may lie in memory in more than one order.
        table, numbers: their types and shapes, and the numbers of the packs, as they are in the spec.
    """

    packs: list[Pack]
    alone: list[int]
    sizes: list[int]
    may_turn: list[int]
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
            row_shapes = {shapes[index][1:] if shapes[index] else None for index in numbers}
            row_shape = row_shapes.pop() if len(row_shapes) == 1 else None
            lengths = [shapes[index].numel() if row_shape is None else shapes[index][0] for index in numbers]
            packs.append(Pack(numbers, sum(sizes[index] for index in numbers), dtype, row_shape, lengths))
    packed = {index for pack in packs for index in pack.numbers}
    alone = [index for index in range(len(dtypes)) if index not in packed]
    table = [(_DTYPE_NAMES[dtype], shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
    raw = [msgspec.Raw(_encoder.encode(part)) for part in (table, [pack.numbers for pack in packs])]
    may_turn = [index for index, shape in enumerate(shapes) if sum(size > 1 for size in shape) > 1]
    return _Plan(packs, alone, sizes, may_turn, *raw)


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
def _plan_of_tensors(names: type | tuple[str, ...], looks: tuple[tuple[Any, ...], ...]) -> tuple[_Plan, bytes] | None:
    """How a batch of tensors is written, and its spec: the same for all batches with the same ones.

    Args:
        names: as `_names_of_tensors` gives them.
        looks: `_look` of each.

    Returns:
        None if one of them is no plain tensor, or one of the names no text.
    """
    if any(dtype in _QUANTIZED or layout is not _STRIDED or not is_cpu for dtype, _, layout, is_cpu in looks):
        return None
    plan = _plan(tuple(look[0] for look in looks), tuple(look[1] for look in looks))
    leaves = ["t"] * len(looks)
    tree: Any
    if isinstance(names, tuple):
        if not all(map(is_unicode, names)):
            return None
        tree = ["d", [["v", name] for name in names], leaves]
    else:
        tree = "t" if names is _TENSOR else ["l" if names is list else "u", leaves]
    return plan, _encoder.encode((plan.table, plan.numbers, tree, ()))


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
            tensors = take_apart(layout.places, tensors)
        if layout.names is not None:
            return dict(zip(layout.names, tensors, strict=True))
        return _build(layout.tree, iter(tensors).__next__, next_buffer)
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
        tree: the structure.
        places: where its tensors are found among those that were sent, if some have memory in common.
        names: of the tensors, if that is a dict of them and of nothing else.
        in_order: all of them share one buffer, in order.
        holds_objects: it has parts that are pickled.
    """

    num_tensors: int
    packs: list[PackLayout]
    alone: list[TensorLayout]
    tree: Any
    places: list[Place]
    names: list[str] | None
    in_order: bool
    holds_objects: bool

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
    table, packs, tree, places = _decoder.decode(spec)
    dtypes = [getattr(torch, name) for name, _ in table]
    shapes = [shape for _, shape in table]
    packed = {index for pack in packs for index in pack}
    layouts = [pack_layout(dtypes[pack[0]], pack, [shapes[index] for index in pack]) for pack in packs]
    alone = [TensorLayout(index, dtypes[index], shapes[index]) for index in range(len(table)) if index not in packed]
    in_order = packs == [list(range(len(table)))]
    return _Layout(len(table), layouts, alone, tree, places, _names_in(tree), in_order, _has_objects(tree))


def _has_objects(node: Any) -> bool:
    if node == "t" or node[0] in "vnsf":
        return False
    return node[0] in "pk" or any(_has_objects(child) for part in node[1:] for child in part)


def _names_in(tree: Any) -> list[str] | None:
    if type(tree) is list and len(tree) == 3 and tree[0] == "d" and all(node == "t" for node in tree[2]):
        names = [node[1] for node in tree[1] if node[0] == "v" and type(node[1]) is str]
        return names if len(names) == len(tree[1]) == len(tree[2]) else None
    return None


_read_cached = functools.lru_cache(maxsize=64)(_read)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether type, shape and one piece of memory are all there is to a tensor."""
    return tensor.is_cpu and tensor.layout is _STRIDED and not tensor.is_quantized and not tensor.is_nested


def _dims_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """A tensor's dimensions in the order of their strides, if it fills its memory so; None for any other one."""
    strides = tensor.stride()
    dims = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
    return dims if tensor.permute(dims).is_contiguous() else None


def _describe_tensor(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
    dims = None if tensor.is_contiguous() else _dims_in_memory(tensor)
    if dims is None:
        tensors.append(tensor)
        return "t"
    tensors.append(tensor.permute(dims))
    return ["s", sorted(range(len(dims)), key=dims.__getitem__)]


def _describe(value: Any, tensors: list[torch.Tensor], arrays: list[Leaf]) -> Any:
    kind = type(value)
    if kind is _TENSOR and _is_plain(value):
        return _describe_tensor(value, tensors)
    if kind is np.ndarray and value.dtype.kind in "biufc":
        if value.flags.f_contiguous and not value.flags.c_contiguous:
            return ["f", _describe(value.T, tensors, arrays)]
        array = np.ascontiguousarray(value)
        arrays.append(array.reshape(-1).view(np.uint8).data if array.size else b"")
        return ["n", value.dtype.str, list(value.shape)]
    if kind is str:
        return ["v", value] if is_unicode(value) else ["p", pickle_leaf(value)]
    if kind in _PLAIN and not (kind is int and abs(value) > _INT64_MAX):
        return ["v", value]
    if kind is list:
        return ["l", _describe_all(value, tensors, arrays)]
    if kind is tuple:
        return ["u", _describe_all(value, tensors, arrays)]
    if kind is StagedBatch:
        return ["x", _describe_all([value.batch, *value.extra], tensors, arrays)]
    if kind is dict:
        are_names = all(type(key) is str and is_unicode(key) for key in value)
        keys = [["v", key] if are_names else _describe(key, tensors, arrays) for key in value]
        return ["d", keys, _describe_all(value.values(), tensors, arrays)]
    if isinstance(value, tuple) and hasattr(kind, "_fields") and not getattr(value, "__dict__", None):
        return ["k", pickle_leaf(kind), _describe_all(value, tensors, arrays)]
    return ["p", pickle_leaf(value)]


def _describe_all(values: Iterable[Any], tensors: list[torch.Tensor], arrays: list[Leaf]) -> list[Any]:
    nodes = []
    for value in values:
        # The leaves of most batches, without a call for each.
        if type(value) is _TENSOR and _is_plain(value) and (value.dim() < 2 or value.is_contiguous()):
            tensors.append(value)
            nodes.append("t")
        else:
            nodes.append(_describe(value, tensors, arrays))
    return nodes


def _build(node: Any, next_tensor: Callable[[], Any], next_buffer: Callable[[], memoryview]) -> Any:
    if node == "t":
        return next_tensor()
    kind = node[0]
    if kind == "s":
        return next_tensor().permute(node[1])
    if kind == "f":
        return _build(node[1], next_tensor, next_buffer).T
    if kind == "n":
        # NumPy reads a dtype as a small language of its own: only plain numbers are let in.
        if not _NUMBERS.fullmatch(node[1]):
            raise ProtocolError(f"a batch's structure names an array of {node[1]!r}")
        return np.frombuffer(next_buffer(), dtype=np.dtype(node[1])).reshape(node[2])
    if kind == "v":
        return node[1]
    if kind == "l":
        return _build_all(node[1], next_tensor, next_buffer)
    if kind == "u":
        return tuple(_build_all(node[1], next_tensor, next_buffer))
    if kind == "x":
        batch, *extra = _build_all(node[1], next_tensor, next_buffer)
        return StagedBatch(batch, extra)
    if kind == "d":
        keys = _build_all(node[1], next_tensor, next_buffer)
        return dict(zip(keys, _build_all(node[2], next_tensor, next_buffer), strict=True))
    if kind == "k":
        # Not by a call: a class may have a `__new__` of its own, which takes something else than the fields.
        return tuple.__new__(load_leaf(node[1]), _build_all(node[2], next_tensor, next_buffer))
    if kind == "p":
        return load_leaf(node[1])
    raise ProtocolError(f"a batch's structure names the unknown node {kind!r}")


def _build_all(nodes: Any, next_tensor: Callable[[], Any], next_buffer: Callable[[], memoryview]) -> list[Any]:
    # The leaves of most batches, without a call for each.
    return [
        next_tensor() if node == "t" else node[1] if node[0] == "v" else _build(node, next_tensor, next_buffer)
        for node in nodes
    ]
