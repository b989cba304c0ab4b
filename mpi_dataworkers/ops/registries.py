"""What a program has registered with other packages: an image opener, a function in the place of theirs, a module.

torch's worker processes have it from the trainer. Data workers import the same packages, but nobody registers anything
there, so a loader whose program does stays local. Seen are the program's own classes, functions and objects where they
stand in installed modules, and in the tables there; and modules that were made, not imported. Not seen are plain values
and other packages' classes in such tables: imports of packages put many of these there.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from hetstream.mpi_dataworkers.ops.own_code import is_own
from hetstream.mpi_dataworkers.ops.shared_memory import Looking

_TABLES = frozenset((dict, list, set, OrderedDict, defaultdict))
_SCRIPTS = ("__main__", "__mp_main__")
# Of all looks; beyond that they take a hundredth of the time.
_LOOKS_TAKE_S = 2.0
# Longer ones are data.
_MOST_ENTRIES = 20_000
# Of one process, sent by `process_settings`, or of training and compilers, which data workers do not run.
# fmt: off
_PASSED_OVER = frozenset((
    *_SCRIPTS, "sys", "re", "linecache", "inspect", "threading", "warnings", "logging", "weakref", "multiprocessing",
    "importlib", "signal", "atexit", "asyncio", "typing", "unittest", "cloudpickle", "hetstream", "triton", "sympy",
    "torch._dynamo", "torch._inductor", "torch._functorch", "torch._subclasses", "torch._logging", "torch._library",
    "torch.library", "torch.fx", "torch.jit", "torch.multiprocessing", "torch.distributed", "torch.nn", "torch.optim",
    "torch.export", "torch.autograd", "torch.utils._pytree", "torch.utils._cxx_pytree"
))
# fmt: on
# Where samples print to, and trainers that run together put a function of their own.
_PRINT = ("builtins", "print")
# What compiled code makes for itself.
_OF_COMPILED = ("cython_runtime", "_cython_")


@dataclass
class _Looked:
    """What was found beside some modules of the program.

    Attributes:
        places: objects in each module that is nobody's but the installation's, and its tables, as ids; these are
            quickly compared.
        found: as `registered` gives it; None before the first look.
    """

    places: dict[str, tuple[int, list[tuple[Any, int]]]] = field(default_factory=dict)
    found: str | None = None


_looking = Looking(_LOOKS_TAKE_S)
_looked_beside: dict[frozenset[str], _Looked] = {}  # by the program's modules that loaders' datasets are of


def registered(modules: Collection[str], sent: Collection[tuple[str, str]] = ()) -> str:
    """What the program has registered and data workers do not have, on one line; "" for nothing.

    Args:
        modules: of the program, that data workers import: what they register is registered there.
        sent: tables that data workers are sent, by module and name.
    """
    looked = _looked_beside.setdefault(frozenset(modules), _Looked())
    look = functools.partial(_look, looked.places, modules, sent)
    found = look() if looked.found is None else _looking.look(look)
    if found is not None:
        looked.found = found
    return looked.found or ""


def _look(
    places: dict[str, tuple[int, list[tuple[Any, int]]]], modules: Collection[str], sent: Collection[tuple[str, str]]
) -> str:
    for name, module in [*sys.modules.items()]:
        if _is_made(name, module):
            return f"the program has made the module {name}, and data workers cannot import it"
        if not isinstance(module, ModuleType) or _is_passed_over(name):
            continue
        ids = _ids(vars(module).values())
        known = places.get(name)
        if known is not None and known[0] == ids and all(_ids_in(table) == then for table, then in known[1]):
            continue
        if is_own(module):
            continue
        members = [*vars(module).items()]
        if found := _in_module(name, members, modules, sent):
            return found
        places[name] = ids, [(value, _ids_in(value)) for _, value in members if type(value) in _TABLES]
    return ""


def _in_module(
    name: str, members: Sequence[tuple[str, Any]], modules: Collection[str], sent: Collection[tuple[str, str]]
) -> str:
    for member, value in members:
        if member.startswith("__") or (name, member) in sent or (name, member) == _PRINT:
            continue
        if isinstance(value, FunctionType | type) and _is_only_here(value, modules):
            return f"the program has put {value.__qualname__} in the place of {name}.{member}"
        if any(_is_only_here(entry, modules) for entry in _entries_of(value)):
            return f"the program has registered an object of its own in {name}.{member}"
    return ""


def _ids(values: Iterable[Any]) -> int:
    return hash(tuple(map(id, values)))


def _ids_in(table: Any) -> int:
    return _ids([*table, *table.values()] if isinstance(table, dict) else table)


def _is_made(name: str, module: Any) -> bool:
    """Whether no file and no package has a module."""
    if type(module) is not ModuleType or "." in name or name in _SCRIPTS or name.startswith(_OF_COMPILED):
        return False
    return module.__spec__ is None and module.__loader__ is None and "__file__" not in vars(module)


@functools.cache
def _is_passed_over(name: str) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in _PASSED_OVER for end in (1, 2, 3))


def _entries_of(value: Any) -> Iterator[Any]:
    if type(value) not in _TABLES or len(value) > _MOST_ENTRIES:
        return
    for entry in [*value, *value.values()] if isinstance(value, Mapping) else [*value]:
        if type(entry) in (tuple, list):
            yield from entry
        else:
            yield entry


def _is_only_here(value: Any, modules: Collection[str]) -> bool:
    kind = value if isinstance(value, FunctionType | type) else type(value)
    name = kind.__module__
    if name in _SCRIPTS:
        return True
    # Nearly all are of installed modules: a look at the name first.
    return isinstance(name, str) and name not in modules and name not in _installed and _is_programs(name)


_installed: set[str] = set()


def _is_programs(name: str) -> bool:
    if is_own(sys.modules.get(name)):
        return True
    _installed.add(name)
    return False
