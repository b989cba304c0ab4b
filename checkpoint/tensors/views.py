"""Bytes in memory as tensors, uncopied, and the values of a structure that only torch knows.

Called by restores and conversions; `leaves.py` is the way there.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetstream.checkpoint.errors import DamagedCheckpoint, StateMismatch
from hetstream.checkpoint.record.layout import Entry
from hetstream.checkpoint.record.structure import TensorRef
from hetstream.checkpoint.record.tree import (
    MakeForeign,
    Node,
    loaded_json,
    loaded_numbers,
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
