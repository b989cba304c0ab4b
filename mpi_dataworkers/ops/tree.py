"""A batch as structure and buffers: flatten it in the data worker, rebuild it in the trainer, bit for bit.

Tensors and NumPy arrays become (dtype, shape) and a raw buffer. Lists, tuples, named tuples, dicts, numbers, text and
None are written as they are. Anything else (a dataclass, a PIL image, a sparse tensor) is pickled as a leaf; both
sides have proved that they hold the job's key before a byte of it is read.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from mpi_dataworkers.codec import Buffer
from mpi_dataworkers.errors import ProtocolError, RemoteError

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()

_PLAIN = (type(None), bool, int, float, str, bytes)
_INT64_MAX = 2**63 - 1


def flatten(batch: object) -> tuple[bytes, list[Buffer]]:
    """Take a batch apart.

    Returns:
        The spec, and one buffer for each tensor or array, which share memory with the batch where it is contiguous.
    """
    buffers: list[Buffer] = []
    return _encoder.encode(_describe(batch, buffers)), buffers


def unflatten(spec: bytes, buffers: list[memoryview]) -> Any:
    """Put a batch together again; tensors are views of `buffers`.

    Raises:
        ProtocolError: the spec and the buffers do not fit.
    """
    try:
        return _build(_decoder.decode(spec), iter(buffers).__next__)
    except (msgspec.MsgspecError, StopIteration, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ProtocolError(f"a batch's structure does not fit its bytes: {error!r}") from error


def _describe(value: Any, buffers: list[Buffer]) -> Any:
    kind = type(value)
    if kind is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized:
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        buffers.append(_bytes_of_tensor(plain))
        return ["t", str(plain.dtype).removeprefix("torch."), list(plain.shape)]
    if kind is np.ndarray and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        buffers.append(array.reshape(-1).view(np.uint8).data if array.size else b"")
        return ["n", value.dtype.str, list(value.shape)]
    if kind in _PLAIN and not (kind is int and abs(value) > _INT64_MAX):
        return ["v", value]
    if kind is list:
        return ["l", [_describe(item, buffers) for item in value]]
    if kind is tuple:
        return ["u", [_describe(item, buffers) for item in value]]
    if kind is dict:
        return ["d", [[_describe(key, buffers), _describe(item, buffers)] for key, item in value.items()]]
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return ["k", _pickle(kind), [_describe(item, buffers) for item in value]]
    return ["p", _pickle(value)]


def _build(node: Any, next_buffer: Callable[[], memoryview]) -> Any:
    kind = node[0]
    if kind == "t":
        dtype, shape = getattr(torch, node[1]), node[2]
        buffer = next_buffer()
        if not buffer.nbytes:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(buffer, dtype=dtype).reshape(shape)
    if kind == "n":
        return np.frombuffer(next_buffer(), dtype=np.dtype(node[1])).reshape(node[2])
    if kind == "v":
        return node[1]
    if kind == "l":
        return [_build(item, next_buffer) for item in node[1]]
    if kind == "u":
        return tuple(_build(item, next_buffer) for item in node[1])
    if kind == "d":
        return {_build(key, next_buffer): _build(item, next_buffer) for key, item in node[1]}
    if kind == "k":
        return _load(node[1])(*(_build(item, next_buffer) for item in node[2]))
    if kind == "p":
        return _load(node[1])
    raise ProtocolError(f"a batch's structure names the unknown node {kind!r}")


def _load(leaf: bytes) -> Any:
    try:
        return pickle.loads(leaf)
    except Exception as error:  # unpickling runs user code: any exception may come, and it would come again
        raise RemoteError(f"an object in the batch cannot be unpickled: {error!r}") from error


def _bytes_of_tensor(tensor: torch.Tensor) -> Buffer:
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""


def resolve_class(module: str, qualified_name: str) -> Any:
    """Find a class by name; `__main__` means the trainer's program."""
    found: Any = sys.modules[module]
    for part in qualified_name.split("."):
        found = getattr(found, part)
    return found


class _LeafPickler(pickle.Pickler):
    """Writes a class of the trainer's `__main__` by name: the copy in the data worker is not the trainer's class."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) and value.__module__ == "__main__":
            return resolve_class, ("__main__", value.__qualname__)
        return NotImplemented


def _pickle(value: object) -> bytes:
    stream = io.BytesIO()
    _LeafPickler(stream, protocol=5).dump(value)
    return stream.getvalue()
