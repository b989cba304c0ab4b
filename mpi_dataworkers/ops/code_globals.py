"""What a pipeline's code reads outside of itself: the program's modules, their globals and class attributes.

Found in the trainer, from the classes and functions that the pipeline is made of, by following the names in their code
through the program's own modules. What code finds in another way (`getattr` with a made-up name, `globals()`, installed
packages) is not seen. Used by `ops.program`.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import io
import logging
import os
import pickle
import random
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.utils.data

import hetstream
from hetstream.mpi_dataworkers.generators import deterministic
from hetstream.mpi_dataworkers.ops.pickling import reduce_code

# (module, dotted name inside it).
Place = tuple[str, str]

# A larger value is data that belongs into the dataset.
_MAX_VALUE_BYTES = 64 << 10
_SCRIPTS = ("__main__", "__mp_main__")
_Cached: Any = type(functools.lru_cache(print))
# Plain data of a class's body; what else stands there was made by the class statement.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
# What a class's statement makes of its body, and what describes its slots.
_OF_CLASSES = (FunctionType, type, staticmethod, classmethod, property, functools.cached_property, MemberDescriptorType)
# States of this process, or far too large: they are not what a program sets for its dataset.
_LEFT_OUT = (
    torch.Tensor,
    torch.Generator,
    torch.nn.Module,
    torch.utils.data.Dataset,
    torch.utils.data.DataLoader,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    logging.Logger,
    logging.Handler,
    io.IOBase,
)


class _TooLarge(Exception):
    """A value is larger than what is sent."""


class _Capped(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _MAX_VALUE_BYTES:
            raise _TooLarge
        return super().write(data)


class _ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles what travels.

    Attributes:
        met: classes and functions in it.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.met: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _LEFT_OUT):
            raise pickle.PicklingError(f"{type(value).__qualname__} is not sent")
        if isinstance(value, FunctionType | type):
            self.met.append(value)
        if isinstance(value, CodeType):
            return reduce_code(value)
        return super().reducer_override(value)


class Reached:
    """What is reached from some classes and functions.

    Args:
        roots: the classes and functions.
        is_own: whether a module is the program's own.

    Attributes:
        modules: names of the program's own modules.
        values: what stands in them under names that the code reads, by place.
        digests: of these, in pickled form; None of one that is not sent.
        unsent: what classes of these modules hold and does not travel, by place: it was made by the class statement.
    """

    def __init__(self, roots: Iterable[Any], is_own: Callable[[ModuleType | None], bool]) -> None:
        self.modules: set[str] = set()
        self.values: dict[Place, Any] = {}
        self.digests: dict[Place, bytes | None] = {}
        self.unsent: dict[Place, Any] = {}
        self._is_own = functools.cache(is_own)
        self._seen: dict[int, Any] = {}  # with the objects, so that no id is used again
        self._waiting: list[Any] = list(roots)
        while self._waiting:
            self._visit(self._waiting.pop())

    def add(self, place: Place, value: Any) -> None:
        """Note a value, and follow the classes and functions that it holds, as a registry does."""
        self.values[place] = value
        self.digests[place] = self.digest(value, self._waiting)

    @staticmethod
    def digest(value: Any, met: list[Any] | None = None) -> bytes | None:
        """Digest of a value's pickled form; None for one that is not sent.

        Args:
            value: any.
            met: gets the classes and functions in one that is sent.
        """
        stream = _Capped()
        pickler = _ValuePickler(stream)
        try:
            pickler.dump(value)
        except Exception:  # noqa: BLE001, user code runs (__reduce__): what cannot be pickled is not sent
            return None
        if met is not None:
            met += pickler.met
        return hashlib.blake2b(stream.getvalue(), digest_size=8).digest()

    @staticmethod
    def pickled(values: Mapping[Place, Any]) -> bytes:
        """Values that have a digest, in one pickle."""
        stream = io.BytesIO()
        _ValuePickler(stream).dump(dict(values))
        return stream.getvalue()

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, staticmethod | classmethod | MethodType):
            self._waiting.append(value.__func__)
        elif isinstance(value, property):
            self._waiting += [accessor for accessor in (value.fget, value.fset) if accessor is not None]
        elif isinstance(value, functools.partial | functools.cached_property):
            self._waiting.append(value.func)
        elif isinstance(value, type):
            for kind in value.__mro__:
                self._visit_class(kind)
        elif isinstance(value, FunctionType):
            self._visit_function(value)
        if isinstance(value, FunctionType | _Cached | deterministic) and hasattr(value, "__wrapped__"):
            self._waiting.append(value.__wrapped__)

    def _home(self, value: Any) -> str | None:
        """The module that a class or function says it comes from, if that is the program's own or its script."""
        name = getattr(value, "__module__", None)
        if not isinstance(name, str) or (name not in _SCRIPTS and not self._is_own(sys.modules.get(name))):
            return None
        return name

    def _visit_class(self, kind: type) -> None:
        home = self._home(kind)
        if home is None:
            return
        self.modules.add(home)
        # A class of the script travels whole; of a local one there is no name to find it by.
        module = None if home in _SCRIPTS or not _is_found(kind) else home
        for name, value in list(vars(kind).items()):
            if isinstance(value, _PLAIN):
                plain = not name.startswith("__") and not issubclass(kind, enum.Enum)
                if module is not None and plain:
                    self.add((module, f"{kind.__qualname__}.{name}"), value)
            else:
                self._waiting.append(value)
                if module is not None and self._is_foreign(value, module, f"{kind.__qualname__}.{name}"):
                    self.add((module, f"{kind.__qualname__}.{name}"), value)
                elif module is not None and not (name.startswith("__") or isinstance(value, _OF_CLASSES)):
                    self.unsent[module, f"{kind.__qualname__}.{name}"] = value

    def _visit_function(self, function: FunctionType) -> None:
        name = function.__globals__.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        is_script = name in _SCRIPTS
        if not is_script and not self._is_own(module):
            return
        names, read_here = {*names_in(function.__code__)}, globals_in(function.__code__)
        # What a function of the script reads travels with it; so its values are followed, but not sent.
        holder = module if module is not None and vars(module) is function.__globals__ and not is_script else None
        if holder is not None:
            self.modules.add(holder.__name__)
        for read in read_here & function.__globals__.keys():
            self._see(holder, read, function.__globals__[read], names, set())
        for cell in function.__closure__ or ():
            try:
                self._see(None, "", cell.cell_contents, names, set())
            except ValueError:  # it is empty
                continue

    def _see(self, holder: ModuleType | None, name: str, value: Any, names: set[str], met: set[str]) -> None:
        """Follow what a function finds under a name; in a module, what it may find under its other names.

        Args:
            holder: module in which it stands; None where it travels with what reads it.
            name: its name there.
            value: what it is.
            names: that the function reads.
            met: modules that were followed for this function.
        """
        if isinstance(value, ModuleType):
            if self._is_own(value) and value.__name__ not in met:
                met.add(value.__name__)
                self.modules.add(value.__name__)
                for member in names & vars(value).keys():
                    self._see(value, member, vars(value)[member], names, met)
            return
        if isinstance(value, FunctionType | type):
            self._waiting.append(value)
            if holder is not None and self._is_foreign(value, holder.__name__, name):
                self.add((holder.__name__, name), value)
            return
        self._waiting += [value, type(value)]
        if holder is not None and not name.startswith("__"):
            self.add((holder.__name__, name), value)

    def _is_foreign(self, value: Any, module: str, name: str) -> bool:
        """Whether a function or class stands where its own definition did not put it: the program may have done so."""
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        home = self._home(value) if isinstance(value, FunctionType | type) else None
        if home is None or (home == module and value.__qualname__ == name):
            return False
        return home in _SCRIPTS or _is_found(value)


def _is_found(value: Any) -> bool:
    """Whether a class or function is found under its name in its module, so that it travels by name."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


@functools.lru_cache(maxsize=4096)
def globals_in(code: CodeType) -> frozenset[str]:
    """Names of globals alone: an attribute may have the name of a global that has nothing to do with it."""
    read = (each for each in dis.get_instructions(code) if "GLOBAL" in each.opname or each.opname == "LOAD_NAME")
    found = {each.argval for each in read}
    nested = [globals_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(found.union(*nested))


def names_in(code: CodeType) -> list[str]:
    """Names of globals and attributes in a function's code and in what is defined inside it, in their order."""
    names = [*code.co_names]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += names_in(constant)
    return names


# Which code is the program's own: Python source that lies outside of the installation and of hetstream.

OURS = os.path.dirname(os.path.abspath(hetstream.__file__))
_STDLIB = [os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
_SITE = {"site-packages", "dist-packages"}


def is_own(module: ModuleType | None) -> bool:
    """Whether a module is the program's own: Python source that lies outside of the installation and of hetstream."""
    # Of what a module has itself: some are imported when another attribute is asked for.
    path = vars(module).get("__file__") if isinstance(module, ModuleType) else getattr(module, "__file__", None)
    return isinstance(path, str) and is_own_file(path)


def is_programs(value: Any) -> bool:
    """The same of a class or a function; in a data worker code of the script has another module's name."""
    name = value.__module__
    return name in ("__main__", "__mp_main__") or is_own(sys.modules.get(name))


def is_own_file(path: str) -> bool:
    """The same of a module's file."""
    path = os.path.abspath(path)
    return path.endswith(".py") and not path.startswith(OURS + os.sep) and not is_installed(path)


def is_installed(path: str) -> bool:
    """Whether a directory or file belongs to the Python installation, which each host has for itself."""
    real = os.path.realpath(path)
    inside = any(real == directory or real.startswith(directory + os.sep) for directory in _STDLIB)
    zipped = real.endswith(".zip") and os.path.dirname(real) in map(os.path.dirname, _STDLIB)
    return inside or zipped or not _SITE.isdisjoint(Path(path).parts)
