"""`native.cpp` as a library: compiled where it is used, by the host's C++ compiler, once in a process.

It is made where nobody else can have a hand in it, and nothing stays on the disk: the file is unlinked as soon as it is
loaded.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hetstream.base.private import temporary_place

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("native.cpp")
# What the bits of a result depend on: nothing is contracted or reordered, so that all hosts compute the same.
_EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_FAST = ("-O3", "-march=native")
# Compilers keep to half the width of the vectors of x86 unless they are told to use all of it.
_WIDE = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
# On a busy host; it takes about a second on a quiet one.
_COMPILER_S = 120.0


class Group(ctypes.Structure):
    """`Group` of native.cpp: what one call computes. Addresses are numbers here."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("num_steps", "num_features", "num_rows", "width"),
            *("steps", "numbers", "sizes", "values", "valid", "lengths", "made", "made_lengths"),
        )
    )


def compiler() -> str | None:
    """The path of a C++ compiler; None where there is none."""
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


@functools.cache
def library() -> Any | None:
    """The functions of native.cpp; None, and a line in the log, where they cannot be compiled."""
    path = compiler()
    if path is None:
        _log.warning("features: no C++ compiler (g++, clang++) on this host: the graph runs with torch")
        return None
    try:
        # Of a file that is mapped NFS keeps another name until the process ends.
        with tempfile.TemporaryDirectory(
            prefix="hetstream-features-", dir=temporary_place(), ignore_cleanup_errors=True
        ) as folder:
            return _compiled(path, Path(folder) / "features.so")
    except OSError as error:
        _log.warning("features: %s cannot compile %s; the graph runs with torch: %s", path, _SOURCE, error)
        return None


def _compiled(path: str, made: Path) -> Any:
    """The functions of native.cpp.

    Raises:
        OSError: they cannot be compiled or loaded; with what the compiler said last.
    """
    said = ""
    for flags in ((*_FAST, *_WIDE), _FAST, ("-O3",)):  # from what is known of most compilers to what all know
        command = [path, *flags, *_EXACT, "-std=c++11", "-shared", "-fPIC", "-o", str(made), str(_SOURCE)]
        try:
            # What one part of the compiler writes for the next is made into the program, too.
            environ = {**os.environ, "TMPDIR": str(made.parent)}
            done = subprocess.run(
                command, env=environ, capture_output=True, text=True, check=False, timeout=_COMPILER_S
            )
            if done.returncode == 0:
                return _loaded(made)
            said = done.stderr.strip()[-1000:]
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
    raise OSError(said)


def _loaded(path: Path) -> Any:
    found = ctypes.CDLL(str(path))
    found.hetstream_run.argtypes = [ctypes.POINTER(Group)]
    found.hetstream_run.restype = ctypes.c_int
    found.hetstream_sizes.argtypes = [ctypes.POINTER(Group), ctypes.c_void_p]
    found.hetstream_sizes.restype = None
    found.hetstream_are_lists.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    found.hetstream_are_lists.restype = ctypes.c_int
    return found
