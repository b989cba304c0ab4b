"""Settings of the whole process that decide about samples: torch's worker processes have them from the fork."""

from __future__ import annotations

import contextlib
import csv
import decimal
import faulthandler
import functools
import gc
import importlib
import json
import logging
import os
import re
import sys
import time
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from hetstream.mpi_dataworkers.ops.code_globals import is_own
from hetstream.mpi_dataworkers.ops.process_memory import Looking

# What the program has set for its warnings and log lines: torch's worker processes have it from the fork.
#
# It travels as text, which is the same in all processes of a program. A logger's handlers travel where they are plain
# ones that write to standard output or standard error. Others (of files, rich consoles, with formatters of a class of
# their own) stay in the program.

_SCRIPTS = ("__main__", "__mp_main__")
_STREAMS = ("stdout", "stderr")
# Of a handler: the name of its stream, its level, and format, format of dates and style of its lines.
_Handler = tuple[str, int, str | None, str | None, str]
# Of a logger: its level, whether it passes lines on and is switched off, and its handlers.
_Logger = tuple[int, bool, bool, list[_Handler]]
_STYLES: dict[Any, str] = {kind: style for style, (kind, _) in logging._STYLES.items()}
_UNSET: _Logger = logging.NOTSET, True, False, []
_set_here: set[str] = set()  # names of loggers


def warning_filters() -> str:
    """The filters of warnings, the first one first. Those for a class of the script are left out."""
    found: dict[Any, None] = {}  # of equal ones the first one counts
    filters: Any = warnings.filters
    for action, message, category, module, line in filters:
        if category.__module__ not in _SCRIPTS and "<locals>" not in category.__qualname__:
            kind = category.__module__, category.__qualname__
            found[action, _pattern(message), kind, _pattern(module), line] = None
    return json.dumps(list(found))


def _pattern(pattern: Any) -> str:
    return str(pattern.pattern if isinstance(pattern, re.Pattern) else pattern or "")


def set_warning_filters(text: str) -> None:
    """Set what `warning_filters` has given; without filters for classes that are not here."""
    warnings.resetwarnings()
    for action, message, (module_name, name), module, line in reversed(json.loads(text)):
        category: Any = None
        with contextlib.suppress(ImportError, AttributeError):
            category = importlib.import_module(module_name)
            for part in name.split("."):
                category = getattr(category, part)
            warnings.filterwarnings(action, message, category, module, line)


def loggers() -> str:
    """The loggers that have something of their own, by name; the root logger's is empty."""
    named = {
        name: found for name, found in logging.root.manager.loggerDict.items() if isinstance(found, logging.Logger)
    }
    found = {name: _described(logger) for name, logger in named.items() if not _is_ours(name)}
    own = {name: logger for name, logger in found.items() if logger != _UNSET}
    return json.dumps({"": _described(logging.root)} | own, sort_keys=True)


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "hetstream"


def _described(logger: logging.Logger) -> _Logger:
    handlers = [found for handler in logger.handlers if (found := _handler(handler)) is not None]
    return logger.level, logger.propagate, logger.disabled, handlers


def _handler(handler: logging.Handler) -> _Handler | None:
    formatter = handler.formatter
    streams = [name for name in _STREAMS if getattr(handler, "stream", None) is getattr(sys, name)]
    if type(handler) is not logging.StreamHandler or not streams or handler.filters:
        return None
    if formatter is None:
        return streams[0], handler.level, None, None, "%"
    if type(formatter) is not logging.Formatter or type(formatter._style) not in _STYLES:
        return None
    return streams[0], handler.level, formatter._fmt, formatter.datefmt, _STYLES[type(formatter._style)]


def set_loggers(text: str) -> None:
    """Set what `loggers` has given, in the place of what a module has set here when it was imported."""
    values = json.loads(text)
    _set_here.update(values)
    for name, (level, propagate, disabled, handlers) in (dict.fromkeys(_set_here, _UNSET) | values).items():
        logger = logging.getLogger(name or None)
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled
        for handler in [handler for handler in logger.handlers if _handler(handler) is not None]:
            logger.removeHandler(handler)
        for stream, least, text, dates, style in handlers:
            made: logging.Handler = logging.StreamHandler(getattr(sys, stream))
            made.setLevel(least)
            if text is not None:
                made.setFormatter(logging.Formatter(text, dates, style))
            logger.addHandler(made)


_OF_ARRAYS = {"edgeitems", "threshold", "floatmode", "precision", "suppress", "linewidth", "nanstr", "infstr", "sign"}
_print_options: Any = torch._tensor_str.PRINT_OPTS


def _flushes_denormals() -> bool:
    return bool((torch.full((1,), 1e-40) * 1.0).item() == 0.0)  # there is a setter alone


def _umask() -> int:
    """As it is, without setting it: another thread may make a file meanwhile. It is there since Linux 4.7."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^Umask:\s*(\d+)", status, re.MULTILINE)
    return int(found[1], 8) if found else -1


def _set_umask(umask: int) -> None:
    if umask >= 0:
        os.umask(umask)


def _decimal_context() -> tuple[Any, ...]:
    """Without its flags, which say what has happened so far."""
    context = decimal.getcontext()
    traps = [kind.__name__ for kind, is_set in context.traps.items() if is_set]
    return context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp, traps


def _set_decimal_context(values: tuple[Any, ...]) -> None:
    prec, rounding, least, most, capitals, clamp, names = values
    traps = [getattr(decimal, name) for name in names]
    decimal.setcontext(decimal.Context(prec, rounding, least, most, capitals, clamp, [], traps))


def _set_array_errors(values: Mapping[str, Any]) -> None:
    np.seterr(**values)


def _set_mkldnn(is_enabled: bool) -> None:
    torch._C._set_mkldnn_enabled(is_enabled)


def _autocast() -> tuple[Any, ...]:
    """Of the kinds of devices on which data workers compute."""
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def _set_autocast(values: tuple[Any, ...]) -> None:
    is_enabled, dtype, keeps_casts = values
    torch.set_autocast_enabled("cpu", is_enabled)
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_cache_enabled(keeps_casts)
    torch.clear_autocast_cache()


def _garbage() -> tuple[Any, ...]:
    return gc.isenabled(), gc.get_threshold()


def _set_garbage(values: tuple[Any, ...]) -> None:
    (gc.enable if values[0] else gc.disable)()
    gc.set_threshold(*values[1])


def _set_faulthandler(is_enabled: bool) -> None:
    (faulthandler.enable if is_enabled else faulthandler.disable)()


def _time_zone() -> tuple[Any, ...]:
    return time.tzname, time.timezone, time.altzone


def _set_time_zone(_: tuple[Any, ...]) -> None:
    time.tzset()  # TZ is the program's by now


def _most_digits() -> int:
    return getattr(sys, "get_int_max_str_digits", lambda: -1)()


def _set_most_digits(most: int) -> None:
    if most >= 0:
        sys.set_int_max_str_digits(most)


def _printing() -> tuple[Any, ...]:
    """But for functions that format arrays."""
    of_arrays = {name: value for name, value in np.get_printoptions().items() if name in _OF_ARRAYS}
    return of_arrays, tuple(vars(_print_options).items())


def _set_printing(values: tuple[Any, ...]) -> None:
    np.set_printoptions(**values[0])
    vars(_print_options).update(values[1])


# Settings of the whole process, or of the thread that makes samples, that decide about samples: getter and setter.
_IN_FORCE: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "precision of products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "gradients": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "autocast": (_autocast, _set_autocast),
    "denormal numbers": (_flushes_denormals, torch.set_flush_denormal),
    "mkldnn": (torch._C._get_mkldnn_enabled, _set_mkldnn),
    "decimal context": (_decimal_context, _set_decimal_context),
    "errors of arrays": (np.geterr, _set_array_errors),
    "umask": (_umask, _set_umask),
    "collection of garbage": (_garbage, _set_garbage),
    "depth of recursion": (sys.getrecursionlimit, sys.setrecursionlimit),
    "switching of threads": (sys.getswitchinterval, sys.setswitchinterval),
    "time zone": (_time_zone, _set_time_zone),
    "digits of integers": (_most_digits, _set_most_digits),
    "fields of csv": (csv.field_size_limit, csv.field_size_limit),
    "printing of arrays": (_printing, _set_printing),
    "tracebacks of faults": (faulthandler.is_enabled, _set_faulthandler),
    "filters of warnings": (warning_filters, set_warning_filters),
    "loggers": (loggers, set_loggers),
}


def settings_in_force() -> dict[str, Any]:
    """Those of this process now, by name."""
    return {name: get() for name, (get, _) in _IN_FORCE.items()}


def put_in_force(wanted: Mapping[str, Any]) -> None:
    """Have this process have them."""
    found = settings_in_force()
    for name, value in wanted.items():
        if found[name] != value:
            _IN_FORCE[name][1](value)


# What a program has registered with other packages: an image opener, a function in the place of theirs, a module.
#
# torch's worker processes have it from the trainer. Data workers import the same packages, but nobody registers
# anything there, so a loader whose program does stays local. Seen are the program's own classes, functions and objects
# where they stand in installed modules, and in the tables there; and modules that were made, not imported. Not seen are
# plain values and other packages' classes in such tables: imports of packages put many of these there.

_TABLES = frozenset((dict, list, set, OrderedDict, defaultdict))
# Of all looks; beyond that they take a hundredth of the time.
_LOOKS_TAKE_S = 2.0
# Longer ones are data.
_MOST_ENTRIES = 20_000
# Of one process, sent by `process_settings`, or of training and compilers, which data workers do not run.
# fmt: off
_PASSED_OVER = frozenset((
    *_SCRIPTS, "sys", "re", "linecache", "inspect", "threading", "warnings", "logging", "weakref", "multiprocessing",
    "importlib", "signal", "atexit", "_ctypes", "ctypes", "asyncio", "typing", "unittest", "cloudpickle", "hetstream",
    "triton", "sympy", "torch._dynamo", "torch._inductor", "torch._functorch", "torch._subclasses", "torch._logging",
    "torch._library", "torch.library", "torch.fx", "torch.jit", "torch.multiprocessing", "torch.distributed",
    "torch.nn", "torch.optim", "torch.export", "torch.autograd", "torch.utils._pytree", "torch.utils._cxx_pytree"
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
        if isinstance(value, FunctionType | type) and _is_only_here(value, modules) and not _imports(name, value):
            return f"the program has put {value.__qualname__} in the place of {name}.{member}"
        if any(_is_only_here(entry, modules) and not _imports(name, entry) for entry in _entries_of(value)):
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
    is_known = module.__spec__ is not None or module.__loader__ is not None or "__file__" in vars(module)
    return not is_known and not _is_of_compiled(module)


def _is_of_compiled(module: ModuleType) -> bool:
    """Whether compiled code has made a module, as SWIG's does when it is imported: nothing of Python is in it."""
    held = [value for name, value in vars(module).items() if not name.startswith("__")]
    kinds = [value for value in held if isinstance(value, type)]
    others = [value for value in held if not isinstance(value, type)]
    return (
        bool(held)
        and all(isinstance(each, BuiltinFunctionType) or type(each).__name__ == "PyCapsule" for each in others)
        and not any(isinstance(member, FunctionType) for kind in kinds for member in vars(kind).values())
        and not any("__dict__" in vars(kind) or "__weakref__" in vars(kind) for kind in kinds)  # those of `class`
    )


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


def _imports(name: str, value: Any) -> bool:
    """Whether a module's own code names the package of a value, as `import` does: so it has it in data workers, too.

    Packages that are installed to be worked on (`pip install -e`) lie where the program's own modules do.
    """
    kind = value if isinstance(value, FunctionType | type) else type(value)
    package = kind.__module__.partition(".")[0]
    # Not as an attribute: a module that is loaded when it is used would be loaded by that.
    spec = vars(sys.modules[name]).get("__spec__")
    find = getattr(spec.loader if spec is not None else None, "get_code", None)
    try:
        code = find(name) if find is not None else None
    except (ImportError, OSError, SyntaxError):
        return False  # its file is gone or another one by now
    return package not in _SCRIPTS and code is not None and _names(code, package)


def _names(code: CodeType, package: str) -> bool:
    named = [*code.co_names, *(each for each in code.co_consts if isinstance(each, str))]
    return any(f"{name}.".startswith(f"{package}.") for name in named) or any(
        _names(each, package) for each in code.co_consts if isinstance(each, CodeType)
    )


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
