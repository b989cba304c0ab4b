"""What a prefix cache keeps, as bytes: plain values of Python, arrays, tensors and images.

Arrays lie raw beside a pickle of what holds them, which names no class and no function: reading it runs no code. What
comes back is what was given, down to strides, or the value is not kept.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
from typing import Any

import numpy as np
import torch

from hetstream.mpi_dataworkers.wire.codec import ALIGN_BYTES, Buffer

# Their pickles name nothing. A set is not among them: its order may be another one each time.
_PLAIN = frozenset((type(None), bool, int, float, str, bytes, tuple, list, dict))
_IMAGE_MODES = frozenset(("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16"))
# Tensors with a class that says what they show, and nothing more.
_TENSOR_CLASSES = {"Tensor": "torch", **dict.fromkeys(("Image", "Mask", "Video"), "torchvision.tv_tensors")}

Part = bytes | memoryview


class NotKept(Exception):
    """A value that is not kept; the text says why."""


class _Writer(pickle.Pickler):
    """Pickles what holds arrays, and notes their bytes.

    Attributes:
        raw: the arrays' bytes, with gaps, from a place that is aligned.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.raw: list[Part] = []
        self._num_bytes = 0
        self._places: dict[int, tuple[int, Any]] = {}  # with the values, so that no id is used again
        self._ranges: list[tuple[int, int]] = []

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return None
        if id(value) in self._places:
            return self._places[id(value)][0]
        description, raw = self._leaf(value, kind)
        gap = -self._num_bytes % ALIGN_BYTES
        at = self._num_bytes + gap
        self._num_bytes = at + memoryview(raw).nbytes
        self.raw += [bytes(gap), raw]
        self._places[id(value)] = len(self._places), value
        return len(self._places) - 1, at, description

    def _leaf(self, value: Any, kind: type) -> tuple[tuple[Any, ...], Part]:
        name = kind.__qualname__
        if isinstance(value, torch.Tensor) and kind is _class_of_tensors(name):
            if vars(value):
                raise NotKept(f"a tensor of it has the attribute {min(vars(value))}")
            raw = self._alone(_numbers_of(value.as_subclass(torch.Tensor)))
            return ("tensor", name, str(value.dtype)[6:], tuple(value.shape), value.stride()), raw
        if kind is np.ndarray:
            return _described(value), self._alone(_bytes_of(value))
        if isinstance(value, np.generic):
            return ("scalar", *_described(np.asarray(value))[1:]), _bytes_of(np.asarray(value)).data
        if name == "Image" and kind.__module__ == "PIL.Image" and value.mode in _IMAGE_MODES:
            if strange := vars(value).keys() - _attributes_of_images(value.mode):
                raise NotKept(f"an image of it has the attribute {min(strange)}")
            return ("image", value.mode, value.size, dict(value.info)), value.tobytes()
        raise NotKept(f"{kind.__module__}.{name} is no plain value, array, tensor or PIL.Image.Image")

    def _alone(self, raw: np.ndarray[Any, Any]) -> Part:
        start, stop = raw.ctypes.data, raw.ctypes.data + raw.nbytes
        if any(start < last and first < stop for first, last in self._ranges):
            raise NotKept("two of its arrays share memory")
        self._ranges.append((start, stop))
        return raw.data


@functools.cache
def _attributes_of_images(mode: str) -> frozenset[str]:
    """Those that every image has, and what it has read of its own info."""
    return frozenset((*vars(_images().new(mode, (1, 1))), "_exif"))


def _images() -> Any:
    return importlib.import_module("PIL.Image")


def _class_of_tensors(name: str) -> Any:
    return getattr(sys.modules.get(_TENSOR_CLASSES.get(name, "")), name, None)


def _numbers_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory from the first to the last element of a tensor."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.requires_grad or tensor.is_quantized:
        raise NotKept("a tensor of it is quantized, needs gradients or is not in the host's memory")
    if tensor.is_conj() or tensor.is_neg():
        raise NotKept("a tensor of it is a conjugate or negative view")
    steps = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    span = 1 + sum(steps) if tensor.numel() else 0
    if span > 2 * tensor.numel() + 64:
        raise NotKept("a tensor of it is a small part of a larger one: call .contiguous()")
    raw: np.ndarray[Any, Any] = tensor.detach().as_strided((span,), (1,)).view(torch.uint8).numpy()
    return raw


def _described(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    if array.dtype.hasobject or array.dtype.names is not None or array.dtype.subdtype is not None:
        raise NotKept(f"an array of it has the dtype {array.dtype}")
    flags = array.flags
    if not flags.c_contiguous and not flags.f_contiguous:
        raise NotKept("an array of it is a view with gaps or turned around: call np.ascontiguousarray")
    return "array", array.dtype.str, array.shape, "C" if flags.c_contiguous else "F", flags.writeable


def _bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (array if array.flags.c_contiguous else array.T).reshape(-1).view(np.uint8)


def packed(value: Any) -> list[Part]:
    """A value as buffers, which `unpacked` reads in one piece; they may be the value's own memory.

    Raises:
        NotKept: it holds something else than what this module keeps.
    """
    stream = io.BytesIO()
    writer = _Writer(stream)
    try:
        writer.dump(value)
    except (pickle.PicklingError, RecursionError) as error:
        raise NotKept(str(error)) from error
    head = stream.getbuffer()
    gap = bytes(-(8 + len(head)) % ALIGN_BYTES)
    return [len(head).to_bytes(8, "little"), head, gap, *writer.raw]


class _Reader(pickle.Unpickler):
    def __init__(self, head: Buffer, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        super().__init__(io.BytesIO(head))
        self._raw = raw
        self._made: dict[int, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a cached value: it names no code")

    def persistent_load(self, known: Any) -> Any:
        if isinstance(known, int):
            return self._made[known]
        place, at, description = known
        made = self._made[place] = _rebuilt(description, self._raw[at:])
        return made


def unpacked(data: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
    """The value; its arrays and tensors are views of this memory.

    Raises:
        Exception: it is not what `packed` has made.
    """
    end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    return _Reader(data[8:end].data, data[end + -end % ALIGN_BYTES :]).load()


def _rebuilt(leaf: tuple[Any, ...], raw: np.ndarray[Any, Any]) -> Any:
    """What a leaf was; its bytes are the first of `raw`."""
    kind, *described = leaf
    if kind == "image":
        mode, size, info = described
        num_bytes = len(_images().new(mode, (size[0], 1)).tobytes()) * size[1]
        image = _images().frombytes(mode, size, raw[:num_bytes].data)
        image.info = info
        return image
    if kind == "tensor":
        name, dtype_name, shape, strides = described
        dtype = getattr(torch, dtype_name)
        span = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        tensor = torch.from_numpy(raw[: span * dtype.itemsize]).view(dtype).as_strided(shape, strides)
        cls = _class_of_tensors(name) or getattr(importlib.import_module(_TENSOR_CLASSES[name]), name)
        return tensor if cls is torch.Tensor else tensor.as_subclass(cls)
    dtype_text, shape, order, is_writeable = described
    dtype = np.dtype(dtype_text)
    array = raw[: int(np.prod(shape, dtype=np.int64)) * dtype.itemsize].view(dtype)
    array = array.reshape(shape) if order == "C" else array.reshape(shape[::-1]).T
    array.flags.writeable = is_writeable
    return array[()] if kind == "scalar" else array
