"""Whether samples change what makes them: counts, generators that are made late, arrays in place.

Where they do, what a sample is may depend on those that its process made before, and torch's worker processes make
other ones than data workers do. Which of the changes matter nobody can tell. But what a sample leaves for itself alone
is the same when it is made once more: a cache has it already, and what it overwrites gets the value that it had. So
one sample is made twice, and what the objects hold is looked at after each.

Seen are the objects that the pipeline holds, what the program's own functions and classes name, and their attributes.
Not seen are values inside of other packages' modules and of objects that show nothing.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import hashlib
import io
import itertools
import logging
import marshal
import mmap
import os
import random
import reprlib
import stat
import sys
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hetstream.base.posix import open_flags
from hetstream.mpi_dataworkers.ops.code_globals import globals_in, is_own, is_programs, names_in
from hetstream.mpi_dataworkers.ops.pickling import digest_of_buffers

# What was found at each path: an immutable value, the length of a container, a digest.
State = Mapping[str, Any]

# Looking takes a moment for each object: of a long list, which is data, only the beginning.
_MOST_ITEMS = 1_000
_MOST_OBJECTS = 20_000
# Of all arrays and tensors together; of others their shape, and of tensors the number of changes that torch counts.
_MOST_BYTES = 64 << 20
# Of a value that is looked at to its end: about a second of each. More is nothing that a program only reads.
_MOST_WHOLE_OBJECTS = 200_000
_MOST_WHOLE_VALUES = 10_000_000
_MOST_WHOLE_BYTES = 8 << 30
_VALUES = (type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis))
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
# What a program may put in the place of another one.
_REPLACEABLE = (type, FunctionType, BuiltinFunctionType)
_SIZED: tuple[Any, ...] = (dict, list, tuple, deque, set, frozenset)
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_NESTED = frozenset((dict, list, tuple, set, frozenset))
# Of packages with these names the methods that write an object down are called; they are not the user's.
_THEIRS = frozenset((*sys.stdlib_module_names, "numpy", "torch"))
_BY_VALUE = 2  # the version of marshal that writes equal values alike, whichever of them are one object
# What a loader keeps from one pass to the next.
_OF_LOADERS = "hetstream.mpi_dataworkers.loader."
_OF_LANGUAGE = frozenset(
    ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__qualname__", "__slotnames__")
)


def state_of(roots: Mapping[str, Any], *, with_generators: bool = True) -> State:
    """What some objects hold now.

    Args:
        roots: by the names that paths begin with.
        with_generators: of random numbers; each draw changes them.
    """
    return dict(_Look(roots, with_generators))


def objects_at(roots: Mapping[str, Any], paths: Collection[str]) -> dict[str, Any]:
    """What stands at some paths of `state_of`."""
    look = _Look(roots, with_generators=False)
    deque(look, maxlen=0)
    return {path: look.objects[path] for path in paths if path in look.objects}


def look_at(roots: Mapping[str, Any]) -> tuple[State, dict[str, Any]]:
    """`state_of` without generators, and the objects at its paths."""
    look = _Look(roots, with_generators=False)
    return dict(look), look.objects


def is_alike(before: Any, after: Any) -> bool:
    """Whether what `state_of` noted of an object and of its copy is alike; how often a tensor was changed is not."""
    if isinstance(after, tuple) and len(after) == 4 and isinstance(before, tuple):
        return before[:3] == after[:3]
    return _is_same(before, after)


def writes_itself(kind: type) -> bool:
    """Whether a class of the program says how its objects are pickled."""
    names = ("__getstate__", "__reduce__", "__reduce_ex__")
    return any(names_of.keys() & {*names} and is_programs(base) for base in kind.__mro__ for names_of in [vars(base)])


class TooLarge(Exception):
    """An object holds more than is looked at."""


def digest_of_state(value: Any) -> bytes:
    """Digest of all that an object holds; the same in another process, and whatever the draws of generators.

    Raises:
        TooLarge: it holds too much.
    """
    look = _Look({"": value}, with_generators=False, is_whole=True)
    noted = ((path, _as_text(found)) for path, found in look)
    return hashlib.blake2b(repr(sorted(noted)).encode(errors="surrogatepass"), digest_size=8).digest()


def digest_of_code(code: CodeType) -> str:
    """Digest of what a function does; not of where it stands."""
    constants = [digest_of_code(part) if isinstance(part, CodeType) else _constant(part) for part in code.co_consts]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    does = code.co_code, code.co_argcount, code.co_kwonlyargcount, code.co_flags, constants, names
    return digest_of_buffers([repr(does).encode(errors="surrogatepass")])


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def change_between(before: State, after: State) -> str:
    """The first thing that differs, on one line; "" where nothing does."""
    for path, value in after.items():
        if path not in before:
            return f"{path} is new"
        if not _is_same(before[path], value):
            was, now = _shown(before[path]), _shown(value)
            return f"{path} changes" if was == now else f"{path}: {was}, then {now}"
    return next((f"{path} is gone" for path in before if path not in after), "")


def changed_by(make: Callable[[], object], roots: Mapping[str, Any]) -> str:
    """What a sample changes when it is made a second time, on one line; "" where that is nothing.

    Args:
        make: makes it, with the same random numbers each time.
        roots: as `state_of`.
    """
    roots = {**roots, "os.environ": os.environ}
    make()
    before = state_of(roots)
    make()
    return change_between(before, state_of(roots))


def _is_same(before: Any, after: Any) -> bool:
    return type(before) is type(after) and (before == after or repr(before) == repr(after))  # NaN is not NaN


def _shown(value: Any) -> str:
    return reprlib.repr(value) if isinstance(value, _VALUES) else "something else"


def _is_the_only_one(value: Any) -> bool:
    """Whether it is a function or class of another package, found there by its name: another one replaces it."""
    is_such = isinstance(value, _REPLACEABLE) and "<locals>" not in value.__qualname__
    return is_such and not is_programs(value)


def _as_text(found: Any) -> str:
    """What was noted, without what belongs to one process."""
    if isinstance(found, _Same):
        return ""
    if isinstance(found, tuple):
        parts = (sorted(map(repr, part)) if isinstance(part, set) else part for part in found)
        return repr([part for part in parts if not isinstance(part, _Same)])
    return repr(found)


class _Same:
    """Is equal to another one of the very same object; a method of an object is made anew each time."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class _Look:
    """One look at some objects, the near ones first; iterates over paths and values.

    Args:
        roots: as `state_of`.
        with_generators: as `state_of`.
        is_whole: look at all that they hold, or raise `TooLarge`.
    """

    def __init__(self, roots: Mapping[str, Any], with_generators: bool, is_whole: bool = False) -> None:
        self._with_generators, self._is_whole = with_generators, is_whole
        self._most_objects = _MOST_WHOLE_OBJECTS if is_whole else _MOST_OBJECTS
        self._values_left = _MOST_WHOLE_VALUES
        self._waiting = deque((name, value) for name, value in roots.items())
        self._seen: dict[int, Any] = {}  # with the objects, so that no id is used again
        self.objects: dict[str, Any] = {}
        self._bytes_left = _MOST_WHOLE_BYTES if is_whole else _MOST_BYTES

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        while self._waiting:
            path, value = self._waiting.popleft()
            if type(value) in _VALUES or isinstance(value, _Same):
                yield path, value
            elif isinstance(value, _GENERATORS) and not self._with_generators:
                continue
            elif id(value) not in self._seen:
                if len(self._seen) >= self._most_objects:
                    self._stop()
                    continue
                self._seen[id(value)] = self.objects[path] = value
                try:
                    yield path, self._noted(value)
                    self._waiting += [(f"{path}{name}", part) for name, part in _parts_of(value)]
                    if self._is_whole and (beyond := _beyond_look(value)):
                        yield f"{path}[...]", self._digest_of_all(path, beyond)
                except TooLarge:
                    raise
                except Exception:  # noqa: BLE001, a proxy asks for its object, and there is none
                    continue

    def _stop(self) -> None:
        """There is more than is looked at."""
        if self._is_whole:
            raise TooLarge

    def _digest_of_all(self, path: str, items: list[Any]) -> str:
        """Digest of many items, layer by layer: each layer at once is a hundred times as fast as one by one.

        What is neither a plain value nor a plain container is left to wait, to be looked at by itself.
        """
        digests, layer = [], items
        while layer:
            self._values_left -= len(layer)
            if self._values_left < 0:
                raise TooLarge
            kinds = set(map(type, layer))
            if not kinds <= _PLAIN:
                digests.append(digest_of_buffers([repr([kind.__qualname__ for kind in map(type, layer)]).encode()]))
            plain = layer if kinds <= _PLAIN else [item for item in layer if type(item) in _PLAIN]
            nested = [item for item in layer if type(item) in _NESTED]
            values = [plain, list(map(len, nested))]
            digests.append(digest_of_buffers([marshal.dumps(values, _BY_VALUE)]))
            if kinds - _PLAIN - _NESTED:
                others = (item for item in layer if type(item) not in _PLAIN | _NESTED)
                self._waiting += [(f"{path}[...{number}]", item) for number, item in enumerate(others)]
            layer = list(itertools.chain.from_iterable(map(_items_in_order, nested)))
        return " ".join(digests)

    def _noted(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return kind.__qualname__, value.shape, value.dtype, self._of_tensor(value)
        if isinstance(value, np.ndarray):
            return kind.__qualname__, value.shape, value.dtype.str, self._digest(value)
        if isinstance(value, torch.Generator):
            return zlib.crc32(value.get_state().numpy().tobytes())
        if isinstance(value, mmap.mmap):
            return self._digest(np.frombuffer(value, np.uint8))
        if isinstance(value, io.BytesIO | io.StringIO):
            return value.tell(), value.getvalue()
        if isinstance(value, set | frozenset):
            if self._is_whole:
                return len(value), self._digest_of_all("", _items_in_order(value))
            return len(value), {part for part in itertools.islice([*value], _MOST_ITEMS) if type(part) in _VALUES}
        # Not the user's own `__len__`: looking runs nobody's code.
        length = next((base.__len__(value) for base in _SIZED if isinstance(value, base)), -1)
        named = f"{kind.__module__}.{kind.__qualname__}"
        if self._is_whole and kind is FunctionType and is_programs(value):
            return named, digest_of_code(value.__code__)
        return (named, _Same(value)) if _is_the_only_one(value) else (named, length)

    def _of_tensor(self, tensor: torch.Tensor) -> int | str:
        if tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.nbytes <= self._bytes_left:
            return self._digest(tensor.detach().flatten().view(torch.uint8).numpy())
        self._stop()
        return tensor._version

    def _digest(self, array: np.ndarray[Any, Any]) -> str:
        is_file = isinstance(array, np.memmap) and array.mode != "c"
        if array.dtype.hasobject or is_file:
            return ""
        if array.nbytes > self._bytes_left:
            self._stop()
            return ""
        self._bytes_left -= array.nbytes
        return digest_of_buffers([np.ascontiguousarray(array).reshape(-1).view(np.uint8).data])


def _beyond_look(value: Any) -> list[Any]:
    """What `_parts_of` leaves out of a long container."""
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return value.reshape(-1)[_MOST_ITEMS:].tolist() if value.size > _MOST_ITEMS else []
    base = next((base for base in (dict, list, tuple, deque) if isinstance(value, base)), None)
    if base is None or base.__len__(value) <= _MOST_ITEMS:
        return []
    beyond = itertools.islice(dict.items(value) if base is dict else base.__iter__(value), _MOST_ITEMS, None)
    return list(beyond)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _items_in_order(container: Any) -> list[Any]:
    """What a plain container holds; of a set the plain values, in an order that is the same in another process."""
    if isinstance(container, dict):
        return list(itertools.chain.from_iterable(container.items()))
    if isinstance(container, set | frozenset):
        return sorted(filter(_is_plain, container), key=lambda item: (type(item).__qualname__, repr(item)))
    return list(container)


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, with what is added to its path."""
    if isinstance(value, torch.Tensor | ModuleType | logging.Logger | _BaseDataLoaderIter):
        return
    if type(value).__module__.startswith(_OF_LOADERS):  # a loader that collates with its own method holds them
        return
    if isinstance(value, np.ndarray):
        items = itertools.islice(value.flat, _MOST_ITEMS) if value.dtype.hasobject else ()
        yield from ((f"[{place}]", part) for place, part in enumerate(items))
    elif isinstance(value, type):
        if is_programs(value):
            yield from ((f".{name}", part) for name, part in [*vars(value).items()] if name not in _OF_LANGUAGE)
            yield from ((f".__mro__[{place}]", base) for place, base in enumerate(value.__mro__))
            yield ".__class__", type(value)
    elif isinstance(value, MethodType):
        yield from ((".__func__", value.__func__), (".__self__", value.__self__))
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, staticmethod | classmethod | property | functools.cached_property):
        yield from (
            (f".{name}", getattr(value, name)) for name in ("__func__", "fget", "fset", "func") if hasattr(value, name)
        )
    elif isinstance(value, ContextVar):
        yield ".get()", value.get(None)
    elif isinstance(value, GeneratorType):
        if value.gi_frame is not None:
            yield from ((".gi_frame.f_lasti", value.gi_frame.f_lasti), (".gi_yieldfrom", value.gi_yieldfrom))
            yield from ((f".{name}", part) for name, part in value.gi_frame.f_locals.items())
    else:
        yield from _parts_of_instance(value)


def _parts_of_instance(value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    yield from ((f".{name}", part) for name, part in [*getattr(value, "__dict__", {}).items()])
    for name in copyreg._slotnames(kind):  # type: ignore[attr-defined]
        with contextlib.suppress(AttributeError):
            yield f".{name}", object.__getattribute__(value, name)
    if isinstance(value, dict):
        for place, (key, part) in enumerate(itertools.islice([*dict.items(value)], _MOST_ITEMS)):
            yield f"[{key!r}]" if type(key) in _VALUES else f"[{type(key).__qualname__} {place}]", part
    elif isinstance(value, list | tuple | deque):
        base: Any = next(base for base in _SIZED if isinstance(value, base))
        yield from ((f"[{place}]", part) for place, part in zip(range(_MOST_ITEMS), base.__iter__(value), strict=False))
    elif not isinstance(value, set | frozenset | io.IOBase):
        # What Python writes down to make it anew, as an iterator's place.
        base = next(base for base in kind.__mro__ if vars(base).keys() & {"__reduce__", "__reduce_ex__"})
        if base is not object and base.__module__.partition(".")[0] in _THEIRS:
            yield ".__reduce__()", value.__reduce_ex__(4)
    yield ".__class__", kind


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            yield f".{name}", cell.cell_contents
    if not is_programs(function):
        return
    yield from ((".__defaults__", function.__defaults__), (".__kwdefaults__", function.__kwdefaults__))
    yield from ((f".{name}", part) for name, part in [*vars(function).items()])
    names = sorted({*names_in(function.__code__)})
    read_here = globals_in(function.__code__)
    places, met = [function.__globals__], {function.__module__}
    for place in places:  # modules of the program in modules, and what is imported here alone
        for name in names:
            module = place.get(name) or sys.modules.get(name)
            if isinstance(module, ModuleType) and is_own(module) and module.__name__ not in met:
                met.add(module.__name__)
                places.append(vars(module))
    for place in places:
        read = read_here if place is function.__globals__ else names
        found = [(f" {place.get('__name__')}.{name}", place[name]) for name in sorted(read) if name in place]
        yield from found
        # Of other packages' modules what this code names: `math.floor` may be the program's own by now.
        for path, module in found:
            if isinstance(module, ModuleType) and not is_own(module):
                yield from (
                    (f"{path}.{name}", _Same(value))
                    for name in names
                    if isinstance(value := vars(module).get(name), _REPLACEABLE)
                )


# What user code makes or changes in the file system while it makes a step, by Python's audit events (PEP 578).
#
# Bytes that a process writes say less: an empty file, a directory or a link has none. What C code writes by itself
# raises no event.
#
# Not told is what Python and torch do by themselves: byte code of modules and whatever an import makes, names that
# `tempfile` chooses, what `multiprocessing` needs, and hetstream's own.

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TMPFILE = open_flags("O_TMPFILE") & ~open_flags("O_DIRECTORY")  # leaves nothing
# Which arguments of an event are the path and the directory that it may be below, and whether something has to be there
# or must not be: else the call changes nothing.
_ACTS = {
    "os.mkdir": (0, 2, False),
    "os.link": (1, 3, False),
    "os.symlink": (1, 2, False),
    "os.rename": (0, 2, True),
    "os.remove": (0, 1, True),
    "os.rmdir": (0, 1, True),
    "os.truncate": (0, -1, True),
}
# They act for whoever calls them.
_HELPERS = frozenset({"os", "shutil", "pathlib", "pathlib._local", "io", "tempfile", "codecs", "gzip", "bz2", "lzma"})
_OWN = "hetstream", "multiprocessing", "torch.multiprocessing"


class _State:
    def __init__(self) -> None:
        self.is_on = False
        self.found = ""
        self.temporary: set[str] = set()  # what `tempfile` has made in this step


_state = _State()


class acts_on_files:
    """Inside, note what user code makes or changes in the file system.

    Attributes:
        act: the first one, on one line; "" for none.
    """

    # Written out: a generator as context takes four times as long, of the time for each step.
    __slots__ = ("act",)

    def __enter__(self) -> acts_on_files:
        _audit()
        _state.is_on, _state.found = True, ""
        if _state.temporary:
            _state.temporary.clear()
        return self

    def __exit__(self, *_: object) -> None:
        _state.is_on, self.act = False, _state.found


@functools.cache
def _audit() -> None:
    """Once in a process and its children: an audit hook cannot be taken away."""
    sys.addaudithook(_look)


def _look(event: str, args: tuple[Any, ...]) -> None:
    if not _state.is_on:
        return
    if event == "open":
        if not args[2] & _WRITING or args[2] & _TMPFILE:
            return
    elif event not in _ACTS:
        return
    if _state.found:
        return
    number, below, is_there = _ACTS.get(event, (0, -1, False))
    if not isinstance(args[number], str | bytes | os.PathLike):  # an open file
        return
    place = _place(args[number], args[below] if below >= 0 else -1)
    if not _changes(event, place, is_there):
        return
    caller = sys._getframe(1)
    if caller.f_globals.get("__name__") == "tempfile":
        _state.temporary.add(place)
        return
    is_temporary = event != "os.rename" and any(f"{place}/".startswith(f"{made}/") for made in _state.temporary)
    if not is_temporary and _is_users(caller):
        _state.found = f"{event} {place!r}"


def _place(path: Any, descriptor: int) -> str:
    """The path with all links on the way to its directory followed."""
    directory, name = os.path.split(os.fsdecode(path).rstrip("/"))
    if descriptor >= 0:
        directory = f"/proc/self/fd/{descriptor}/{directory}"
    return os.path.join(os.path.realpath(directory), name)


def _changes(event: str, place: str, is_there: bool) -> bool:
    try:
        mode = (os.stat if event == "open" else os.lstat)(place).st_mode
    except OSError:
        return not is_there and os.path.isdir(os.path.dirname(place))
    return is_there or (event == "open" and stat.S_ISREG(mode))


def _is_users(caller: FrameType) -> bool:
    """Whether user code, or a library for it, does that, and no import."""
    frame: FrameType | None = caller
    doer = ""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        if not doer and name not in _HELPERS:
            doer = name
        if name.partition(".")[0] == "hetstream":
            break
        frame = frame.f_back
    return not doer.startswith(_OWN)
