"""Pickling with large buffers apart: neither side copies them, and the processes of one host can share them.

Used by `pickled_pipeline.py` for what travels to data workers. NumPy arrays put their memory out of band by themselves
(pickle protocol 5); torch's CPU tensors do so here. A tensor of another kind (a subclass, sparse, with gradients, on a
device) goes torch's own way, in which storages of the CPU are what is kept apart.
"""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import ctypes
import dis
import importlib
import io
import linecache
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, update_wrapper
from multiprocessing.heap import BufferWrapper
from multiprocessing.shared_memory import ShareableList, SharedMemory
from multiprocessing.sharedctypes import SynchronizedBase, synchronized
from types import CodeType, FunctionType, ModuleType
from typing import Any, NewType

import cloudpickle
import msgspec
import numpy as np
import torch
import torch.multiprocessing.reductions
import xxhash

from hetstream.mpi_dataworkers.ops.fork_safety import importing
from hetstream.mpi_dataworkers.ops.process_memory import SharedMappings
from hetstream.mpi_dataworkers.wire.codec import ALIGN_BYTES, Buffer, aligned
from hetstream.mpi_dataworkers.wire.messages import Program

# Below this a buffer of its own costs more than its copy in the pickle stream.
APART_FROM_BYTES = 64 << 10

# What cloudpickle knows of the classes that it has written or read by value, and the functions that its pickles name.
_cloud: Any = cloudpickle.cloudpickle
_Cached: Any = type(lru_cache(print))
_new_type: Any = NewType
_NUMBERS = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)
_rebuild_typed_storage: Any = torch.multiprocessing.reductions.rebuild_typed_storage
# What of a class is called when its object is pickled, and packages whose functions of these names change nothing.
_CALLED = ("__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs_ex__", "__getnewargs__")
_CHANGE_NOTHING = frozenset((*sys.stdlib_module_names, "numpy", "torch", "cloudpickle", "hetstream"))
# Kinds of arrays that only look at their memory in another way.
_VIEWS = (np.memmap, np.recarray)
# Samples may note which object has made them by its id, and the program looks for that object. torch's forked workers
# have the program's ids. So for a copy, what the code of a pipeline's classes calls `id` gives that of the original: by
# the id of a copy the copy, and the original's id. When the copy is gone, another object may lie there.
_originals: dict[int, tuple[weakref.ref[Any], int]] = {}
_MOST_IDS = 10_000  # of more objects nobody looks for one by its id
_users: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()  # see `_is_of_users`
# Classes that `unpickle` has made. The next pickle that names one of them gets another.
_made: weakref.WeakSet[type] = weakref.WeakSet()


class RunsUserCode(Exception):
    """To pickle an object would run code of the user's, or of a package that he has installed."""


@dataclass(frozen=True)
class Pickled:
    """A value in pickled form.

    Attributes:
        blob: the pickle stream.
        buffers: those that it refers to, views of the value's own memory: the large ones, and all shared ones.
        shared: numbers of the buffers that lie in memory which this process shares with others.
        met: the classes and functions that the value is made of.
    """

    blob: bytes
    buffers: list[memoryview]
    shared: list[int]
    met: list[Any]


@dataclass(frozen=True)
class _Bytes:
    """The memory of a storage, which is aligned where it is read."""

    numbers: np.ndarray[Any, np.dtype[np.uint8]]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with some buffers apart; see `Pickled`."""

    def __init__(self, stream: io.BytesIO, runs_user_code: bool) -> None:
        super().__init__(stream, protocol=5, buffer_callback=self._stays)
        self._runs_user_code = runs_user_code
        self.buffers: list[memoryview] = []
        self.shared: list[int] = []
        self.met: dict[int, Any] = {}
        self.objects: list[Any] = []  # of users' classes
        # By address and size: views of one storage stay views of one storage. Each entry keeps its storage alive, so
        # that no other one gets its address meanwhile.
        self._storages: dict[tuple[int, int], _Bytes] = {}

    @cached_property
    def _mappings(self) -> SharedMappings:
        return SharedMappings()

    def _stays(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer stays in the stream; else it is kept apart."""
        view = buffer.raw()
        is_shared = view.nbytes > 0 and view in self._mappings
        if view.nbytes < APART_FROM_BYTES and not is_shared:
            return True
        if is_shared:
            self.shared.append(len(self.buffers))
        self.buffers.append(view)
        return False

    def reducer_override(self, value: Any) -> Any:
        """Take plain tensors apart, and note what has code; the rest is cloudpickle's."""
        if isinstance(value, type | FunctionType):
            self.met[id(value)] = value
        elif _is_of_users(type(value)):
            self.objects.append(value)
        if isinstance(value, CodeType):
            return reduce_code(value)
        if isinstance(value, ModuleType) and type(value) is not ModuleType and sys.modules.get(value.__name__) is value:
            # As torch.backends.cudnn; cloudpickle only knows those that are exactly modules.
            return importlib.import_module, (value.__name__,)
        if isinstance(value, _Cached) and _cloud._lookup_module_and_qualname(value) is None:
            # Of the script, or local: by itself it is pickled by name.
            parameters = value.cache_parameters()
            return (
                _make_cached,
                (parameters["maxsize"], parameters["typed"]),
                value.__wrapped__,
                None,
                None,
                _fill_cached,
            )
        if isinstance(value, NewType) and _cloud._lookup_module_and_qualname(value) is None:
            return _new_type, (value.__name__, value.__supertype__)
        if type(value) is cached_property:  # up to Python 3.11 it has a lock
            return _rebuild_cached_property, (value.func, value.attrname)
        if type(value) in _VIEWS:  # by themselves they are copied into the stream
            return _rebuild_view, (np.asarray(value), type(value))
        if type(value) is np.ndarray and not value.flags.forc and self._mappings.hold(value):
            # As above, where an array has gaps or is turned: with what lies between its first and last byte.
            return _rebuild_with_gaps, (_window_of(value), value.dtype, value.shape, value.strides)
        if isinstance(value, SharedMemory | ShareableList):
            # By itself it is pickled by name: other hosts do not have it, and on this one a process that has opened it
            # removes it when it ends (before Python 3.13).
            raise pickle.PicklingError("shared memory belongs to the processes of one host")
        if isinstance(value, SynchronizedBase):  # by itself only a process that is being started may have it
            return synchronized, (value.get_obj(),)
        if isinstance(value, _NUMBERS) and isinstance(getattr(value, "_wrapper", None), BufferWrapper):
            # Without a lock; by itself it is copied into the stream.
            memory: Any = (ctypes.c_ubyte * ctypes.sizeof(value)).from_buffer(value)
            return rebuild_number, (*kind_of_number(value), np.frombuffer(memory, np.uint8))
        if is_of_started_manager(value):
            # By itself it is pickled without the key of its server, which refuses whoever has another one.
            raise pickle.PicklingError("a multiprocessing.Manager answers the processes of its program alone")
        if isinstance(value, torch.storage.TypedStorage) and value._untyped_storage.device.type == "cpu":
            return _rebuild_typed_storage, (value._untyped_storage, value.dtype)
        if type(value) is torch.UntypedStorage and value.device.type == "cpu":
            return _rebuild_storage, (self._bytes_of(value),)
        if isinstance(value, _Bytes):
            return _aligned, (value.numbers,)
        if type(value) is not torch.Tensor or not _is_plain(value):
            if not self._runs_user_code and not isinstance(value, type | FunctionType) and _is_user_code(type(value)):
                raise RunsUserCode(f"{type(value).__module__}.{type(value).__qualname__}")
            return _with_whole_name(value, super().reducer_override(value))
        place = value.storage_offset(), tuple(value.size()), value.stride()
        return _rebuild_tensor, (self._bytes_of(value.untyped_storage()), value.dtype, *place)

    def _bytes_of(self, storage: torch.UntypedStorage) -> _Bytes:
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._storages:
            self._storages[key] = _Bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
        return self._storages[key]


def _with_whole_name(value: Any, reduction: Any) -> Any:
    """Let a class that travels by value keep its `__qualname__`, which cloudpickle 3.1 leaves out: messages name it."""
    if isinstance(value, type) and isinstance(reduction, tuple) and reduction[0] is _cloud._make_skeleton_class:
        kind, name, bases, namespace, *others = reduction[1]
        arguments = kind, name, bases, {**namespace, "__qualname__": value.__qualname__}, *others
        return reduction[0], arguments, *reduction[2:]
    return reduction


def is_of_started_manager(value: Any) -> bool:
    """Whether it is a proxy of what a manager holds that this process has started."""
    managers = sys.modules.get("multiprocessing.managers")
    return (
        managers is not None
        and issubclass(type(value), managers.BaseProxy)
        and getattr(value._manager, "_process", None) is not None
    )


def _is_user_code(kind: type) -> bool:
    """Whether pickling an object of a class calls a function that may change something."""
    found = [next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None) for name in _CALLED]
    for function in (*found, copyreg.dispatch_table.get(kind)):
        if isinstance(function, FunctionType) and (function.__module__ or "").split(".")[0] not in _CHANGE_NOTHING:
            return True
    return False


def _is_plain(tensor: Any) -> bool:
    """Whether its storage, type, offset, size and stride are all there is to it."""
    return bool(
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not any(getattr(tensor, "names", ()))  # named tensors, of older releases
        and not vars(tensor)
    )


def reduce_code(code: CodeType) -> Any:
    """How code of the script is pickled: with its file, which cloudpickle leaves out, for tracebacks and warnings. Text
    that is in no file (a cell of a notebook) comes along."""
    file = sys.intern(code.co_filename)
    text = "" if _is_there(file) else sys.intern("".join(linecache.getlines(file)))
    return _rebuild_code, (file, text, *_cloud._code_reduce(code))


_is_there = lru_cache(os.path.exists)


def _rebuild_code(file: str, text: str, make: Callable[..., CodeType], arguments: Sequence[Any]) -> CodeType:
    if text and file not in linecache.cache:
        # Without a time of change `linecache` does not look for the file.
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    return make(*arguments).replace(co_filename=file)


class _Filled:
    """A function that is known later: it may name the one that is made of it."""

    function: Callable[..., Any]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.function(*arguments, **keywords)


def _make_cached(maxsize: int | None, typed: bool) -> Any:
    return lru_cache(maxsize, typed)(_Filled())


def _fill_cached(cached: Any, function: Callable[..., Any]) -> None:
    cached.__wrapped__.function = function
    update_wrapper(cached, function)


def kind_of_number(value: Any) -> tuple[Any, int | None]:
    """What `rebuild_number` needs of a number or an array of ctypes beside its memory: kind, and length of an array."""
    kind: Any = type(value)
    return (kind._type_, len(value)) if isinstance(value, ctypes.Array) else (kind, None)


def rebuild_number(kind: Any, length: int | None, memory: Buffer) -> Any:
    """A number or an array of ctypes in this memory, or in memory of its own if that cannot be written to."""
    kind = kind if length is None else kind * length
    return kind.from_buffer_copy(memory) if memoryview(memory).readonly else kind.from_buffer(memory)


def _rebuild_cached_property(function: Callable[[Any], Any], name: str) -> cached_property[Any]:
    rebuilt = cached_property(function)
    rebuilt.attrname = name
    return rebuilt


def _rebuild_view(data: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
    viewed: np.ndarray[Any, Any] = data.view(kind)
    return viewed


def _window_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The memory from an array's first byte to its last one."""
    forward = array[tuple(slice(None, None, -1 if stride < 0 else 1) for stride in array.strides)]
    first = forward[(slice(1),) * array.ndim].reshape(1).view(np.uint8)
    steps = zip(forward.shape, forward.strides, strict=True)
    num_bytes = array.itemsize + sum((size - 1) * stride for size, stride in steps)
    return np.lib.stride_tricks.as_strided(first, (num_bytes,), (1,), writeable=array.flags.writeable)


def _rebuild_with_gaps(
    window: np.ndarray[Any, np.dtype[np.uint8]], dtype: np.dtype[Any], shape: Sequence[int], strides: Sequence[int]
) -> np.ndarray[Any, Any]:
    start = sum((1 - size) * stride for size, stride in zip(shape, strides, strict=True) if stride < 0)
    rebuilt: np.ndarray[Any, Any] = np.ndarray(shape, dtype, window, start, strides)
    return rebuilt


def _aligned(numbers: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What comes in the stream lies somewhere: kernels that compute with it could be others than in the program."""
    if numbers.ctypes.data % ALIGN_BYTES == 0:
        return numbers
    own = aligned(numbers.nbytes)
    own[:] = numbers
    return own


def _rebuild_tensor(
    data: np.ndarray[Any, np.dtype[np.uint8]],
    dtype: torch.dtype,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(_rebuild_storage(data), offset, size, stride)


def _rebuild_storage(data: np.ndarray[Any, np.dtype[np.uint8]]) -> torch.UntypedStorage:
    return torch.from_numpy(data).untyped_storage()


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


def pickle_apart(value: Any, runs_user_code: bool = True) -> Pickled:
    """Pickle anything. Classes and functions of the script travel by value, those of modules by name.

    Args:
        value: it.
        runs_user_code: call what a class says about how its objects are pickled.

    Raises:
        RunsUserCode: that is to be called, and must not.
        Exception: whatever that code raises, and what pickle says of what cannot be pickled.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, runs_user_code)
    with _script_by_value():
        pickler.dump(value)
    stream.write(_ids_of(pickler.objects, lambda: pickler.memo.copy()))
    return Pickled(stream.getvalue(), pickler.buffers, pickler.shared, list(pickler.met.values()))


class _Unpickler(pickle.Unpickler):
    """Reads what `pickle_apart` has written; see `unpickle`.

    Attributes:
        changed: classes that this process has, and that are not what they were when the pickle was written.
    """

    def __init__(self, blob: Buffer, buffers: Sequence[Buffer]) -> None:
        self.stream = io.BytesIO(blob)
        super().__init__(self.stream, buffers=buffers)
        self.changed: list[type] = []
        self._known: set[type] = set()

    def find_class(self, module: str, name: str) -> Any:
        with contextlib.nullcontext() if module in sys.modules else importing():
            found = super().find_class(module, name)
        if found is _cloud._make_skeleton_class or found is _cloud._make_skeleton_enum:
            return partial(self._find_or_make, found)
        return self._set_state if found is _cloud._class_setstate else found

    def _find_or_make(self, make: Callable[..., type], *arguments: Any) -> type:
        *description, class_id, extra = arguments
        with _cloud._DYNAMIC_CLASS_TRACKER_LOCK:
            known: type | None = _cloud._DYNAMIC_CLASS_TRACKER_BY_ID.get(class_id)
        if known is not None and known not in _made:
            self._known.add(known)
            return known
        made = make(*description, None, extra)
        _made.add(made)
        with _cloud._DYNAMIC_CLASS_TRACKER_LOCK:
            _cloud._DYNAMIC_CLASS_TRACKER_BY_CLASS[made] = class_id
            _cloud._DYNAMIC_CLASS_TRACKER_BY_ID[class_id] = made
        return made

    def _set_state(self, kind: type, state: tuple[dict[str, Any], Any]) -> type:
        if kind not in self._known:
            _cloud._class_setstate(kind, state)
        elif not all(
            _is_alike(value, vars(kind).get(name)) for name, value in state[0].items() if _is_users(name, value)
        ):
            self.changed.append(kind)
        return kind


def _is_users(name: str, value: Any) -> bool:
    """Whether a program can have set an attribute of a class; the others are Python's."""
    return isinstance(value, FunctionType) if name.startswith("__") else name != "_abc_impl"


def _is_alike(before: Any, now: Any) -> bool:
    """Whether an attribute of a class is as it was, as far as its code or its pickled form shows."""
    if type(before) is not type(now):
        return False
    if isinstance(before, FunctionType):
        return bool(before.__code__ == now.__code__)
    if isinstance(before, staticmethod | classmethod):
        return _is_alike(before.__func__, now.__func__)
    if isinstance(before, property):
        return _is_alike(before.fget, now.fget) and _is_alike(before.fset, now.fset)
    if isinstance(before, set | frozenset):  # Python orders them anew
        return bool(before == now)
    try:
        return bool(cloudpickle.dumps(before) == cloudpickle.dumps(now))
    except Exception:  # noqa: BLE001, pickling runs user code; what cannot be pickled cannot be compared
        return True


def unpickle(blob: Buffer, buffers: Sequence[Buffer] = ()) -> tuple[Any, list[type]]:
    """Read what `pickle_apart` has written.

    Classes that travel by value and that this process has (it has defined them itself, or settings have brought them)
    are left as they are. Others are made for this pickle alone. cloudpickle itself would take the class that it made
    for an earlier pickle, and change it to what it is in this one, under the hands of all who use it.

    Returns:
        The value, and the classes that were left as they are, but were different when the pickle was written.
    """
    unpickler = _Unpickler(blob, buffers)
    value = unpickler.load()
    if ids := unpickler.stream.read():
        _keep_ids(ids, unpickler.memo.copy())
    return value, unpickler.changed


def id_of_original(value: Any) -> int:
    """What `id` gives in the code of a pipeline's classes."""
    own = builtins.id(value)
    reference, original = _originals.get(own, (None, own))
    return original if reference is not None and reference() is value else own


def _is_of_users(kind: type) -> bool:
    """Whether a class, or one that it extends, is of the program or of a package whose samples may note an object."""
    known = _users.get(kind)
    if known is None:
        known = _users[kind] = any(base.__module__.partition(".")[0] not in _CHANGE_NOTHING for base in kind.__mro__)
    return known


def _asking(kind: type) -> Iterator[FunctionType]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in _CHANGE_NOTHING:
            for value in vars(base).values():
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if not isinstance(function, FunctionType) or not _names_id(function.__code__):
                    continue
                if function.__globals__.get("id", id_of_original) is id_of_original:
                    yield function


def _names_id(code: CodeType) -> bool:
    """Whether code calls `id` by its name; an attribute of this name, as of torch's `get_worker_info()`, is none."""
    found = dis.get_instructions(code) if "id" in code.co_names else ()
    return any(each.opname == "LOAD_GLOBAL" and each.argval == "id" for each in found) or any(
        _names_id(part) for part in code.co_consts if isinstance(part, CodeType)
    )


def _ids_of(objects: list[Any], memo: Callable[[], dict[int, tuple[int, Any]]]) -> bytes:
    """The ids of objects, to follow the pickle that holds them; empty if no code asks for any.

    Args:
        objects: of users' classes.
        memo: gives a pickler's, by id: the place of each object.
    """
    if len(objects) > _MOST_IDS or not any(True for kind in {*map(type, objects)} for _ in _asking(kind)):
        return b""
    places = memo()
    return pickle.dumps({places[id(each)][0]: id_of_original(each) for each in objects if id(each) in places})


def _keep_ids(data: bytes, memo: dict[int, Any]) -> None:
    """Have copies answer with what `_ids_of` has noted.

    Args:
        data: what it gave.
        memo: an unpickler's, by place.
    """
    for place, original in pickle.loads(data).items():
        copy = memo[place]
        try:
            reference = weakref.ref(copy, partial(_forget, id(copy)))
        except TypeError:  # `__slots__` without one for references: who else had its id cannot be told
            continue
        _originals[id(copy)] = reference, original
        for function in _asking(type(copy)):
            function.__globals__["id"] = id_of_original


def _forget(own: int, _: Any) -> None:
    _originals.pop(own, None)


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
    for index, (_, class_id) in enumerate(mentioned):
        blob = blob.replace(class_id, b"%032x" % index)
    alike = msgspec.structs.replace(program, owners={})  # the same user's, on each host
    return digest_of_buffers([msgspec.msgpack.encode(alike), blob, *buffers])


def digest_of_buffers(buffers: Sequence[Buffer]) -> str:
    """Digest of buffers and their sizes, as fast as memory is read."""
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(memoryview(buffer).nbytes.to_bytes(8, "little"))
        digest.update(buffer)
    return str(digest.hexdigest())


def checksum_of(buffers: Sequence[Buffer]) -> int:
    """Checksum of buffers as of one, with 64 bits, as fast as memory is read."""
    checksum = xxhash.xxh3_64()
    for buffer in buffers:
        checksum.update(buffer)
    return int(checksum.intdigest())
