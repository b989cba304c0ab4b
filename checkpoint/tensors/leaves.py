"""From a program's state to tensors and a tree, and back.

Called for every save and restore. Flattening looks at every tensor once and copies none; where each is copied to is
decided by `copy_plan.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import pickle
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils import _pytree

from hetstream.checkpoint.errors import DamagedCheckpoint, StateMismatch, UnsupportedState
from hetstream.checkpoint.record.layout import Entry
from hetstream.checkpoint.record.structure import Shard, TensorRef
from hetstream.checkpoint.record.tree import (
    MAX_INLINE_BYTES,
    TENSOR,
    Data,
    Encoder,
    MakeForeign,
    Node,
    PlainObject,
    inline_bytes,
    loaded_json,
    loaded_numbers,
    name_of,
    numbers_in,
    renumbered,
)

# Bytes in memory as tensors, uncopied, and the values of a structure that only torch knows.
#
# Called by restores and conversions.

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
CARRIERS: dict[str, tuple[str, int]] = {"C128": ("F64", 2), "C32": ("F16", 2), "F4_X2": ("U8", 1)}
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


def bytes_as_tensor(data: memoryview) -> torch.Tensor:
    """Return memory as a tensor of bytes, without copying; read-only memory must not be written through it."""
    if not len(data):
        return torch.empty(0, dtype=torch.uint8)
    if not data.readonly:
        return torch.frombuffer(data, dtype=torch.uint8)
    with warnings.catch_warnings():
        # torch has no read-only tensors; nobody writes to those of read-only memory.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(data, dtype=torch.uint8)


def tensor_of(entry: Entry, data: memoryview) -> torch.Tensor:
    """Return one entry's bytes as its tensor, without copying."""
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
    """Return whether a reference is its entry as it lies there."""
    return ref.dtype is None and ref.shape is None and ref.strides is None and not ref.offset_bytes


def view_of(ref: TensorRef, entry: Entry, view: torch.Tensor) -> torch.Tensor:
    """Return the tensor of a reference as it lies in its entry, without copying: row-major if `is_permuted`.

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
    if is_right and ref.kind in ("bytes", "pickle"):
        # No byte twice: they are copied, and few can be said to be very many.
        is_right = math.prod(shape) * dtype.itemsize <= entry.num_bytes
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
    """Return what makes the values again that the pure structure does not know, for `Record.decode`.

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
        if tag == "$file":
            file = io.BytesIO(again(body[0]))
            file.seek(body[1])
            return file
        if tag == "$numbers":
            return loaded_numbers(again(body[0]), *body[1:])
        if tag == "$json":
            return again(loaded_json(again(body)))
        if tag == "$pickle":
            return _unpickled(again(body), allow_pickle=allow_pickle)
        raise DamagedCheckpoint(f"the structure has a value of kind {tag!r}, which this release does not know")

    return foreign


def _unpickled(data: bytes, *, allow_pickle: bool) -> Any:
    if not allow_pickle:
        raise StateMismatch(
            "the checkpoint holds a pickled object. Unpickling runs what the file says, so it has to be allowed: "
            "allow_pickle=True, for checkpoints of your own"
        )
    return pickle.loads(data)


Move = tuple[int, int, int]
"""A copy in main memory: to which address, from which one, and how many bytes."""


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

    def memory_bytes(self, index: int) -> int:
        """Return how much memory a tensor spans, from its first element to behind the last."""
        dtype, shape = self.dtypes[index], self.shapes[index]
        if self.are_contiguous[index]:
            return math.prod(shape) * dtype.itemsize
        return _span_bytes(shape, self.strides[index], dtype.itemsize)


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
        states: what the `state_dict` of each object gave, by its place and the object's `id`: places are words, and
            two may have the same.
        generators: their states, where these are part of the state.
        unasked: places of objects that were not asked for their state. They are None in the tree.
        shapeless: names of what has no shape yet: parameters and buffers of lazy modules before their first forward
            pass. They are no tensors here, and None in the tree.
    """

    tree: dict[str, Node] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    shards: dict[int, Shard] = field(default_factory=dict)
    plain: dict[str, range] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    shapeless: list[str] = field(default_factory=list)
    states: dict[tuple[str, int], Any] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    unasked: list[str] = field(default_factory=list)

    @functools.cached_property
    def signature(self) -> Signature:
        """Of the tensors, as they are when it is first asked for.

        Raises:
            UnsupportedState: one has no shape of its own.
        """
        tensors = self.tensors
        dtypes = [tensor.dtype for tensor in tensors]
        may_be_conjugated = any(dtype.is_complex for dtype in {*dtypes})
        try:
            return Signature(
                self.names,
                self.kinds,
                self.shards,
                dtypes,
                [tensor.shape for tensor in tensors],
                [tensor.stride() for tensor in tensors],
                [tensor.device for tensor in tensors],
                [tensor.is_neg() or (may_be_conjugated and tensor.is_conj()) for tensor in tensors],
                [tensor.is_contiguous() for tensor in tensors],
                [tensor.data_ptr() for tensor in tensors],
            )
        except RuntimeError as error:
            nested = [name for name, tensor in zip(self.names, tensors, strict=True) if tensor.is_nested]
            if not nested:
                raise
            raise UnsupportedState(
                f"{nested[0]} is a nested tensor, which a checkpoint cannot hold: store the list that unbind() gives"
            ) from error

    def equal_keys(self, shared: Iterable[str]) -> tuple[str, ...]:
        """Of keys that are said to be equal on every rank, those that are: without a sharded tensor."""
        sharded = {index for index, shard in self.shards.items() if shard.is_sharded}
        return tuple(key for key in shared if not sharded or sharded.isdisjoint(numbers_in(self.tree[key])))

    def without(self, keys: Collection[str]) -> Leaves:
        """Return the same state without some top-level keys."""
        kept: list[int] = []
        plain: dict[str, range] = {}
        for key in self.tree:
            if key not in keys:
                begin = len(kept)
                kept += numbers_in(self.tree[key])
                if key in self.plain:
                    plain[key] = range(begin, len(kept))
        places = {index: place for place, index in enumerate(kept)}
        return Leaves(
            {key: renumbered(node, places) for key, node in self.tree.items() if key not in keys},
            [self.names[index] for index in kept],
            [self.tensors[index] for index in kept],
            [self.kinds[index] for index in kept],
            {places[index]: shard for index, shard in self.shards.items() if index in places},
            plain,
            {places[index] for index in self.stepped if index in places},
            [name for name in self.shapeless if name.partition(".")[0] not in keys],
            self.states,
            self.generators,
            self.unasked,
        )


# Objects whose `state_dict` changes nothing.
_HARMLESS = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_OWN = "hetstream."


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
        self._asks_all = True
        self._encoder = Encoder(
            {
                torch.Tensor: self._tensor,
                torch.nn.Parameter: self._parameter,
                torch.nn.Buffer: self._tensor,
                UninitializedParameter: self._shapeless,
                UninitializedBuffer: self._shapeless,
                np.ndarray: self._array,
                bytes: self._bytes,
                io.BytesIO: self._file,
                torch.Size: lambda _path, value: {"$size": list(value)},
                torch.dtype: _word,
                torch.layout: _word,
                torch.memory_format: _word,
                torch.device: lambda _path, value: {"$device": str(value)},
            },
            self._foreign,
            self._data,
        )

    @property
    def forms(self) -> Set[object]:
        """What kinds of values were met so far that are neither tensors nor JSON as they are."""
        return self._encoder.forms

    def flatten(self, state: Mapping[str, Any], *, finds_stepped: bool = False, asks_all: bool = True) -> Leaves:
        """Take a state apart; objects with `state_dict` are replaced by what it gives.

        Args:
            state: top-level key to anything.
            finds_stepped: fill `Leaves.stepped`, too.
            asks_all: ask objects of the program's own classes, too. To ask one may change it: torch's `get_state_dict`
                lets an optimizer without a state make a step.

        Raises:
            UnsupportedState: something in it cannot be stored.
        """
        leaves = self._leaves = Leaves()
        self._finds_stepped, self._asks_all = finds_stepped, asks_all
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
        index = len(leaves.tensors)
        leaves.names.append(path)
        leaves.tensors.append(tensor)
        leaves.kinds.append(kind)
        return {TENSOR: index}

    def _tensor(self, path: str, tensor: torch.Tensor) -> Node:
        if tensor.layout is not torch.strided:
            return self._sparse(path, tensor)
        return self._add(path, tensor, "grad" if tensor.requires_grad else "tensor")

    def _parameter(self, path: str, tensor: torch.Tensor) -> Node:
        if tensor.layout is not torch.strided:
            self._is_plain = False
            return self._no_form(path, tensor, f"a parameter of layout {tensor.layout}")
        return self._add(path, tensor, "parameter" if tensor.requires_grad else "frozen_parameter")

    def _shapeless(self, path: str, _tensor: torch.Tensor) -> Node:
        self._is_plain = False
        self._leaves.shapeless.append(path)
        return None

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
        if self._allow_pickle and (array.dtype.hasobject or not _is_numpys(array.dtype)):
            self._is_plain = False
            return self._no_form(path, array, None)
        if array.nbytes <= MAX_INLINE_BYTES or not array.dtype.isnative or array.dtype not in _NUMPY_DTYPES:
            return self._encoder.unusual(path, array)
        is_plain = array.flags.writeable and all(stride >= 0 for stride in array.strides)
        return self._add(path, torch.from_numpy(array if is_plain else array.copy()), "numpy")

    def _bytes(self, path: str, value: bytes, kind: str = "bytes") -> Node:
        if len(value) <= MAX_INLINE_BYTES and kind == "bytes":
            return inline_bytes(path, value)
        return self._add(path, torch.frombuffer(bytearray(value or b"\0"), dtype=torch.uint8), kind)

    def _file(self, path: str, file: io.BytesIO) -> Node:
        """A file in memory, which some libraries keep as a module's extra state."""
        return {"$file": [self._bytes(path, file.getvalue()), file.tell()]}

    def _data(self, path: str, data: Data) -> Node:
        self._is_plain = False
        return self._add(path, torch.frombuffer(data, dtype=torch.uint8), "bytes")

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
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(value).__mro__):
            raise UnsupportedState(
                f"{path} is a ZeroRedundancyOptimizer, which gives its state on one rank alone, after a call on all. "
                "Store what it has within (optimizer.optim), the part of each rank; it is restored on as many ranks"
            )
        if not self._asks_all and not isinstance(value, _HARMLESS) and not type(value).__module__.startswith(_OWN):
            self._leaves.unasked.append(path)
            return None
        state = self._leaves.states[path, id(value)] = value.state_dict()
        node = self._encoder.item(path, state)
        if self._finds_stepped and not self._leaves.shapeless:
            mine = range(begin, len(self._leaves.tensors))
            if isinstance(value, torch.nn.Module):
                parameters = {parameter.data_ptr() for parameter in value.parameters()}
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
        if isinstance(tensor, torch.nn.Parameter) and _is_strided(tensor):
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


def _is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a program's class has its values in memory, as torch's own have."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and tensor.layout is torch.strided


def _has_form(value: Any) -> bool:
    """Whether the structure knows values like this one without pickle."""
    is_named = isinstance(value, tuple) and hasattr(type(value), "_fields")
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, type)
    is_scalar = isinstance(value, np.generic) and not value.dtype.hasobject and _is_numpys(value.dtype)
    return is_named or is_data or isinstance(value, PlainObject) or is_scalar


def _is_numpys(dtype: np.dtype[Any]) -> bool:
    """Whether NumPy itself knows a dtype by its words. It calls those of other libraries, such as ml_dtypes, void."""
    return dtype.kind != "V" or dtype.names is not None or dtype.subdtype is not None or dtype.type is np.void


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
