"""Pickling with large buffers apart: neither side copies them, and the processes of one host can share them.

Used by `pipeline.py` for what travels to data workers. NumPy arrays put their memory out of band by themselves (pickle
protocol 5); torch's CPU tensors do so here. A tensor of another kind (a subclass, sparse, with gradients, on a device)
goes torch's own way.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

import cloudpickle
import msgspec
import numpy as np
import torch
import xxhash

from mpi_dataworkers.codec import Buffer
from mpi_dataworkers.messages import Program

# Below this a buffer of its own costs more than its copy in the pickle stream.
APART_FROM_BYTES = 64 << 10


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with large buffers in `buffers`, and the classes and functions that it came to in `met`."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5, buffer_callback=self._stays)
        self.buffers: list[memoryview] = []
        self.met: dict[int, Any] = {}
        # By address and size: views of one storage stay views of one storage. Each entry keeps its storage alive, so
        # that no other one gets its address meanwhile.
        self._storages: dict[tuple[int, int], np.ndarray[Any, np.dtype[np.uint8]]] = {}

    def _stays(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer stays in the stream; else it is kept apart."""
        view = buffer.raw()
        if view.nbytes < APART_FROM_BYTES:
            return True
        self.buffers.append(view)
        return False

    def reducer_override(self, value: Any) -> Any:
        """Take plain tensors apart, and note what has code; the rest is cloudpickle's."""
        if isinstance(value, type | FunctionType):
            self.met[id(value)] = value
        if type(value) is not torch.Tensor or not _is_plain(value):
            return super().reducer_override(value)
        storage = value.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._storages:
            self._storages[key] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        place = value.storage_offset(), tuple(value.size()), value.stride()
        return _rebuild_tensor, (self._storages[key], value.dtype, *place)


def _is_plain(tensor: Any) -> bool:
    """Whether its storage, type, offset, size and stride are all there is to it."""
    return bool(
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not any(getattr(tensor, "names", ()))  # named tensors, of older releases
        and not vars(tensor)
    )


def _rebuild_tensor(
    data: np.ndarray[Any, np.dtype[np.uint8]],
    dtype: torch.dtype,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    storage = torch.from_numpy(data).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


@contextlib.contextmanager
def _script_by_value() -> Iterator[None]:
    """Have cloudpickle treat `__mp_main__`, the script of a process that `torch.multiprocessing.spawn` has started, as
    it treats `__main__`: no other process can import it."""
    script = sys.modules.get("__mp_main__")
    if script is None or script.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(script)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(script)


def pickle_apart(value: Any) -> tuple[bytes, list[memoryview], list[Any]]:
    """Pickle anything. Classes and functions of the script travel by value, those of modules by name.

    Returns:
        The pickle stream; the large buffers that it refers to, views of the value's own memory; the classes and
        functions that it is made of.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    with _script_by_value():
        pickler.dump(value)
    return stream.getvalue(), pickler.buffers, list(pickler.met.values())


def digest_of(blob: Buffer, buffers: Sequence[Buffer], program: Program, settings: bytes) -> str:
    """Digest of a pickled pipeline and its program, alike in every process that runs the same program.

    cloudpickle gives each class that travels by value a random id in each process; here such a class counts by the
    place of its first mention. Sets of strings still differ, as Python orders them anew in each process
    (PYTHONHASHSEED).

    Args:
        blob: the pickle stream.
        buffers: what it refers to; read as fast as memory is.
        program: where it runs and what it imports.
        settings: what it has set.
    """
    classes: dict[type, str] = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
    random_ids = {class_id.encode() for class_id in classes.values()}
    blob = b"".join((settings, blob))
    mentioned = sorted((blob.find(class_id), class_id) for class_id in random_ids if class_id in blob)
    for number, (_, class_id) in enumerate(mentioned):
        blob = blob.replace(class_id, b"%032x" % number)
    digest = xxhash.xxh3_128()
    parts: list[Buffer] = [msgspec.msgpack.encode(program), blob, *buffers]
    for part in parts:
        digest.update(memoryview(part).nbytes.to_bytes(8, "little"))
        digest.update(part)
    return str(digest.hexdigest())
