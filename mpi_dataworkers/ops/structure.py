"""What holds a batch's tensors and arrays: one pickle stream, in which each of them is a number.

One stream for the whole batch, as torch's worker processes write, so what is one object there is one object here: a
list that occurs twice, a dict in two dataclasses, a list that holds itself. Tensors and arrays lie outside of it,
wherever they are in the batch: in a dataclass, in a tensor subclass, in an object that only its own `__reduce__` knows.
Called by `tree.py`, which sends them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import operator
import pickle
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch._tensor
import torch._utils
import torch.multiprocessing.reductions

from hetstream.mpi_dataworkers.errors import ProtocolError, RemoteError
from hetstream.mpi_dataworkers.ops.pipeline import StagedBatch
from hetstream.mpi_dataworkers.wire.codec import Buffer, Leaf

# What cloudpickle knows of the classes that it has written or read by value.
_CloudPickler: Any = cloudpickle.Pickler
_id_of_class: Any = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
_class_by_id: Any = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID

# Stands in the stream for the list of what lies outside of it; pickle's protocol 5 has one byte for that.
_OUTSIDE = pickle.PickleBuffer(bytearray())
_item: Any = operator.getitem
_stays_inside = functools.partial(operator.is_not, _OUTSIDE)
_NUMBERS = re.compile(r"[<>|=][biufc][0-9]{1,2}")
# Of pickles before protocol 5: NumPy reads an array of this size, and one of another byte order, by copying its bytes.
_COPIED_UP_TO_BYTES = 1000
_OTHER_BYTE_ORDER = ">" if sys.byteorder == "little" else "<"
# torch's own ways to make a tensor of a storage.
_OF_STORAGE = {torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3}
_rebuild_subclass: Any = torch._tensor._rebuild_from_type_v2
_rebuild_typed_storage: Any = torch.multiprocessing.reductions.rebuild_typed_storage


@dataclass
class Structure:
    """A batch without its tensors and arrays.

    Attributes:
        stream: what holds them.
        tensors: those with a storage of the CPU: the item `number` of what lies outside.
        wholes: numbers of the tensors that stand for a whole storage.
        arrays: type, shape, whether the first dimension is the innermost in memory, and whether the array has memory of
            its own, of the item `-1 - number`.
        buffers: the bytes of the arrays.
        holds_objects: reading the stream runs code of classes that hetstream does not know.
    """

    stream: bytes = b""
    tensors: list[torch.Tensor] = field(default_factory=list)
    wholes: set[int] = field(default_factory=set)
    arrays: list[tuple[str, Sequence[int], bool, bool]] = field(default_factory=list)
    buffers: list[Leaf] = field(default_factory=list)
    holds_objects: bool = False

    def reduced(self, value: Any) -> Any:
        """How a pickler writes what is neither a container nor a plain value."""
        kind = type(value)
        if kind is torch.Tensor and is_plain(value):
            self.tensors.append(value)
            return _item, (_OUTSIDE, len(self.tensors) - 1)
        if kind is np.ndarray and (name := _name_of(value.dtype)) and value.dtype.metadata is None:
            return self._array(value, name)
        if kind is StagedBatch:
            return StagedBatch, (value.batch, list(value.extra))
        if value is _item or value is StagedBatch:
            return NotImplemented
        self.holds_objects = True
        if isinstance(value, torch.Tensor):
            return self._special(value)
        if isinstance(value, torch.storage.TypedStorage) and value._untyped_storage.device.type == "cpu":
            return _rebuild_typed_storage, (value._untyped_storage, value.dtype)
        if kind is torch.UntypedStorage and value.device.type == "cpu":
            _raise_if_without_memory(value)
            self.wholes.add(len(self.tensors))  # which is the number that its bytes get next
            return _storage_of, (torch.empty(0, dtype=torch.uint8).set_(value),)
        if isinstance(value, np.ndarray) and _is_pickled_as_array(kind) and _is_copied(value):
            return value.__reduce__()
        if kind is np.ndarray and not value.dtype.hasobject and value.nbytes:
            # Of a type that only its own pickled form names: ml_dtypes', structured, text, time.
            is_turned = value.flags.f_contiguous and not value.flags.c_contiguous
            raw = np.ascontiguousarray(value.T if is_turned else value).reshape(-1).view(np.uint8)
            return _array_of, (raw, value.dtype, value.shape, is_turned)
        if isinstance(value, np.ndarray) and value.nbytes and not value.dtype.hasobject and _is_pickled_as_array(kind):
            return _array_as, (np.asarray(value), kind)
        if isinstance(value, tuple) and hasattr(kind, "_fields") and not getattr(value, "__dict__", None):
            return _named_tuple, (kind, tuple(value))
        return _reduce_for_trainer(value)

    def _array(self, array: np.ndarray[Any, Any], name: str) -> Any:
        is_copied = _is_copied(array)
        if is_copied and array.dtype.byteorder == _OTHER_BYTE_ORDER:
            array = pickle.loads(pickle.dumps(array, protocol=4))
            name = array.dtype.str
        flags = array.flags
        is_turned = not flags.c_contiguous and flags.f_contiguous
        rows = array if flags.c_contiguous else np.ascontiguousarray(array.T if is_turned else array)
        self.arrays.append((name, array.shape, is_turned, is_copied))
        self.buffers.append(rows.reshape(-1).view(np.uint8).data if array.size else b"")
        return _item, (_OUTSIDE, -len(self.arrays))

    def _special(self, tensor: torch.Tensor) -> Any:
        """A tensor with more than a storage, a type and a place: torch says what it is made of.

        Raises:
            RuntimeError: it is part of a graph, and torch's worker processes refuse it.
        """
        refuse_inner(tensor)
        reduced: Any = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        if reduced[0] is _rebuild_subclass:
            rebuild, kind, arguments, state = reduced[1]
            if rebuild in _OF_STORAGE and (plain := rebuild(*arguments)).is_cpu:
                _raise_if_without_memory(arguments[0]._untyped_storage)
                return _rebuild_subclass, (_itself, kind, (plain,), state)
        return reduced


def _is_copied(array: np.ndarray[Any, Any]) -> bool:
    """Whether what torch's worker process sends is copied where it is read: in that host's byte order, and with memory
    of its own."""
    # By protocol 5, Python's default from 3.14 on, what is in order comes as a view of its bytes.
    is_view = pickle.DEFAULT_PROTOCOL >= 5 and type(array) is np.ndarray and array.flags.forc
    return not is_view and (array.nbytes <= _COPIED_UP_TO_BYTES or array.dtype.byteorder == _OTHER_BYTE_ORDER)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of a storage of the CPU."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def refuse_inner(tensor: torch.Tensor) -> None:
    """Raise torch's own error for a tensor that autograd has made: its graph does not travel.

    Raises:
        RuntimeError: it is such a one. Of subclasses torch lets them pass, as leaves.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.requires_grad and not tensor.is_leaf:
        torch.multiprocessing.reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]


def refuse_graphs(batch: object) -> None:
    """Raise what a batch with a graph raises on its way from a data worker, for one that the trainer has made.

    It was made with a copy of the dataset: there the graph ends, and the dataset's own parameters get no gradient.

    Raises:
        RuntimeError: torch's own error.
    """
    try:
        tensors = take_structure(batch).tensors
    except Exception:  # noqa: BLE001, pickling runs user code; what cannot travel data workers say
        return
    for tensor in tensors:
        refuse_inner(tensor)


@functools.lru_cache(maxsize=64)
def _name_of(dtype: np.dtype[Any]) -> str | None:
    """NumPy's name of a type of numbers, where it leads back to the type: those of ml_dtypes have such names, too."""
    name = dtype.str
    return name if _NUMBERS.fullmatch(name) and dtype in _types_named(name) else None


def _types_named(name: str) -> list[np.dtype[Any]]:
    try:
        return [np.dtype(name)]
    except TypeError:
        return []


def _raise_if_without_memory(storage: torch.UntypedStorage) -> None:
    # torch says so itself; a subclass that wraps other tensors has such a one, which is not to be read.
    storage.data_ptr()


def _itself(value: Any) -> Any:
    return value


def _storage_of(whole: torch.Tensor) -> torch.UntypedStorage:
    return whole.untyped_storage()


def _array_of(
    raw: np.ndarray[Any, Any], dtype: np.dtype[Any], shape: Sequence[int], is_turned: bool
) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = raw.view(dtype)
    return array.reshape(shape[::-1]).T if is_turned else array.reshape(shape)


def _is_pickled_as_array(kind: type) -> bool:
    """Whether arrays of a class are pickled by NumPy's own code, as `numpy.memmap` is: as bytes, without attributes."""
    methods = "__reduce__", "__reduce_ex__", "__setstate__"
    return all(getattr(kind, name) is getattr(np.ndarray, name) for name in methods)


def _array_as(numbers: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
    viewed: np.ndarray[Any, Any] = numbers.view(kind)
    return viewed


def _named_tuple(kind: type[tuple[Any, ...]], values: tuple[Any, ...]) -> tuple[Any, ...]:
    # Not by a call: a class may have a `__new__` of its own, which takes something else than the fields.
    return tuple.__new__(kind, values)


def number_arrays(
    arrays: Sequence[tuple[str, Sequence[int], bool, bool]], next_buffer: Any
) -> list[np.ndarray[Any, Any]]:
    """The arrays of a structure, in the order in which they lie outside of the stream: views of their buffers, but for
    those with memory of their own.

    Raises:
        ProtocolError: a name is not of a type of numbers. NumPy reads a dtype as a small language of its own.
        ValueError, TypeError: a buffer does not fit.
    """
    found = []
    for name, shape, is_turned, is_copied in arrays:
        if not _NUMBERS.fullmatch(name):
            raise ProtocolError(f"a batch's structure names an array of {name!r}")
        buffer = next_buffer()
        if is_copied and 0 in shape:  # NumPy has other strides for one that was made than for one that was read
            empty: Any = np.ndarray((0,), np.dtype(name))
            empty.__setstate__((1, tuple(shape), empty.dtype, is_turned, b""))
            found.append(empty)
            continue
        numbers = np.frombuffer(buffer, dtype=np.dtype(name))
        array = numbers.reshape(shape[::-1]).T if is_turned else numbers.reshape(shape)
        found.append(array.copy(order="K") if is_copied else array)
    return found[::-1]


class _PlainUnpickler(pickle.Unpickler):
    """Reads a stream of containers, plain values and what lies outside; it knows no other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_item.__module__, _item.__name__):
            return _item
        if (module, name) == (StagedBatch.__module__, StagedBatch.__name__):
            return StagedBatch
        raise pickle.UnpicklingError(f"it names {module}.{name}, and was announced as one without objects")


def load_structure(stream: Buffer, outside: Sequence[Any], holds_objects: bool) -> Any:
    """Read what `take_structure` has written.

    Args:
        stream: of a `Structure`.
        outside: its tensors, and its arrays as `number_arrays` has them.
        holds_objects: as the structure says.

    Raises:
        RemoteError: user code raised.
        ProtocolError: the stream is damaged, or runs user code although it should not.
    """
    buffers: Any = itertools.repeat(outside)
    if holds_objects:
        try:
            return pickle.loads(stream, buffers=buffers)
        except Exception as error:  # unpickling runs user code: any exception may come, and it would come again
            raise RemoteError(f"an object in the batch cannot be unpickled: {error!r}") from error
    try:
        return _PlainUnpickler(io.BytesIO(stream), buffers=buffers).load()
    except Exception as error:  # a damaged stream: any exception may come
        raise ProtocolError(f"a batch's structure cannot be read: {error!r}") from error


def resolve_class(module: str, qualified_name: str) -> Any:
    """Find a class by name; `__main__` means the trainer's program."""
    found: Any = sys.modules[module]
    for part in qualified_name.split("."):
        found = getattr(found, part)
    return found


def find_class(class_id: str, module: str, qualified_name: str) -> Any:
    """Find the class whose copy a data worker has: by its name, or among those that this process has sent by value.

    Args:
        class_id: the one that cloudpickle gave it in the process whose definition the data worker has, which may be
            another one with the same definition.
        module, qualified_name: where it was defined.

    Raises:
        LookupError: it is not here.
    """
    if "<locals>" not in qualified_name:
        with contextlib.suppress(KeyError, AttributeError):
            return resolve_class(module, qualified_name)
    if class_id in _class_by_id:
        return _class_by_id[class_id]
    alike = [kind for kind in list(_id_of_class) if (kind.__module__, kind.__qualname__) == (module, qualified_name)]
    if len(alike) != 1:
        raise LookupError(
            f"there are {len(alike)} classes {qualified_name} of {module} in the training process. Define the class of "
            "the batch at the top of a module"
        )
    return alike[0]


def _set_attributes(value: object, state: Any) -> None:
    for part in state if isinstance(state, tuple) else (state,):
        for name, attribute in (part or {}).items():
            object.__setattr__(value, name, attribute)


def _reduce_for_trainer(value: Any) -> Any:
    """Write a class that came from the trainer as its name: the copy in the data worker is not the trainer's class."""
    if isinstance(value, type):
        if value in _id_of_class:
            return find_class, (_id_of_class[value], value.__module__, value.__qualname__)
        if value.__module__ in ("__main__", "__mp_main__") and "<locals>" not in value.__qualname__:
            return resolve_class, (value.__module__, value.__qualname__)
        return NotImplemented
    kind = type(value)
    if kind in _id_of_class and hasattr(kind, "__slots__") and not hasattr(kind, "__setstate__"):
        # The copy has no slots (cloudpickle leaves them out) but a `__dict__`, which the trainer's class may not have.
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(reduced, tuple) and len(reduced) > 2 and reduced[2] is not None:
            return (*(*reduced, None, None)[:5], _set_attributes)
    return NotImplemented


class _Pickler(pickle.Pickler):
    """Writes what both processes can find by name."""

    def __init__(self, stream: io.BytesIO, structure: Structure) -> None:
        super().__init__(stream, protocol=5, buffer_callback=_stays_inside)
        self._structure = structure

    def reducer_override(self, value: Any) -> Any:
        return self._structure.reduced(value)


class _ByValuePickler(_CloudPickler):  # type: ignore[misc]
    """Writes also functions and classes that only this process has, made by user code: several times slower."""

    def __init__(self, stream: io.BytesIO, structure: Structure) -> None:
        super().__init__(stream, protocol=5, buffer_callback=_stays_inside)
        self._structure = structure

    def reducer_override(self, value: Any) -> Any:
        reduced = self._structure.reduced(value)
        if reduced is NotImplemented and isinstance(value, type) and (place := _place_in_module(value)) is not None:
            return getattr, place
        return super().reducer_override(value) if reduced is NotImplemented else reduced


def _place_in_module(kind: type) -> tuple[object, str] | None:
    """Where a module has a class that does not say so itself: a named tuple in the body of a class, say.

    Returns:
        What has it, and under which name; None where its own name leads to it, or nothing does.
    """
    module = sys.modules.get(kind.__module__)
    if module is None or "<locals>" in kind.__qualname__:
        return None
    with contextlib.suppress(AttributeError):
        if resolve_class(kind.__module__, kind.__qualname__) is kind:
            return None
    members = list(vars(module).values())
    classes = [found for found in members if isinstance(found, type) and found.__module__ == kind.__module__]
    for owner in (module, *classes):
        for name, attribute in list(vars(owner).items()):
            if attribute is kind:
                return owner, name
    return None


def take_structure(batch: object) -> Structure:
    """Take a batch apart.

    Raises:
        Exception: whatever user code raises, or what says that something cannot be pickled.
    """
    try:
        return _taken(_Pickler, batch)
    except (pickle.PicklingError, AttributeError, TypeError):
        return _taken(_ByValuePickler, batch)


def _taken(kind: Any, batch: object) -> Structure:
    stream, structure = io.BytesIO(), Structure()
    kind(stream, structure).dump(batch)
    structure.stream = stream.getvalue()
    return structure
