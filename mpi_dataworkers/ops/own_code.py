"""Which code is the program's own: Python source that lies outside of the installation and of hetstream."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import hetstream

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
