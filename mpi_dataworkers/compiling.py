"""C++ of this package as a library: compiled where it is used, by the host's compiler, once in a process.

It is made where nobody else can have a hand in it, and nothing stays on the disk: the file is unlinked as soon as it is
loaded. Called by `features/native.py` and `images/decoder.py`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from hetstream.base.files import temporary_place

# What the bits of a result depend on: nothing is contracted or reordered, so that all hosts compute the same.
_EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_FAST = ("-O3", "-march=native")
# Compilers keep to half the width of the vectors of x86 unless they are told to use all of it.
_WIDE = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
# On a busy host; it takes about a second on a quiet one.
_COMPILER_S = 120.0


def compiler() -> str | None:
    """The path of a C++ compiler; None where there is none."""
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def compiled(path: str, source: Path) -> ctypes.CDLL:
    """A library of one source file.

    Args:
        path: of the compiler.
        source: the file.

    Raises:
        OSError: it cannot be compiled or loaded; with what the compiler said last.
    """
    # Of a file that is mapped NFS keeps another name until the process ends.
    with tempfile.TemporaryDirectory(prefix="hetstream-", dir=temporary_place(), ignore_cleanup_errors=True) as folder:
        made = Path(folder) / f"{source.stem}.so"
        said = ""
        for flags in ((*_FAST, *_WIDE), _FAST, ("-O3",)):  # from what is known of most compilers to what all know
            command = [path, *flags, *_EXACT, "-std=c++11", "-shared", "-fPIC", "-o", str(made), str(source)]
            try:
                # What one part of the compiler writes for the next is made into the program, too.
                environ = {**os.environ, "TMPDIR": folder}
                done = subprocess.run(
                    command, env=environ, capture_output=True, text=True, check=False, timeout=_COMPILER_S
                )
                if done.returncode == 0:
                    return ctypes.CDLL(str(made))
                said = done.stderr.strip()[-1000:]
            except (OSError, subprocess.TimeoutExpired) as error:
                said = str(error)
        raise OSError(said)
