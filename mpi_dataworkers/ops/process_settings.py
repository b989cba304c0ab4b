"""Settings of the whole process that decide about samples: torch's worker processes have them from the fork."""

from __future__ import annotations

import csv
import decimal
import faulthandler
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetstream.mpi_dataworkers.ops.said import loggers, set_loggers, set_warning_filters, warning_filters

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
