"""A batch as structure and buffers: flatten it in the data worker, rebuild it in the trainer, bit for bit.

Tensors and NumPy arrays become (dtype, shape) and a raw buffer; many small tensors of one dtype share a buffer. What
else there is to tensors (strides, common memory, a gradient) is `common_memory.py`'s. A tensor, or a list, tuple or
dict of tensors, is written down as such; any other batch is one pickle stream (`structure.py`), in which each tensor
and array is a number. Both sides have proved that they hold the job's key before a byte of it is read.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch._utils

from hetstream.base.text import is_unicode
from hetstream.mpi_dataworkers.errors import ProtocolError, RemoteError
from hetstream.mpi_dataworkers.ops.common_memory import (
    Place,
    Room,
    are_aligned,
    gather,
    have_common_memory,
    strides_in_order,
    take_apart,
)
from hetstream.mpi_dataworkers.ops.packing import (
    Pack,
    PackLayout,
    Rows,
    TensorLayout,
    bytes_of_tensor,
    owned,
    pack_layout,
)
from hetstream.mpi_dataworkers.ops.structure import load_structure, number_arrays, take_structure
from hetstream.mpi_dataworkers.wire.codec import FUSE_BELOW_BYTES, Leaf

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
