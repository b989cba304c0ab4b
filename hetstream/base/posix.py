"""Parts of Python that only POSIX systems have, or Linux alone.

hetstream runs on Linux. Elsewhere `from hetstream import DataLoader` still imports and makes batches in the program, so
that a script can be written and tried on any machine: what is missing there raises when it is used.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import fcntl
    import grp
    import pwd
    import resource
else:

    class _Missing(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise OSError(f"{self.__name__}.{name} is not on this system: this part of hetstream needs Linux")

    def _module(name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            return _Missing(name)

    fcntl, grp, pwd, resource = map(_module, ("fcntl", "grp", "pwd", "resource"))

__all__ = ["fcntl", "grp", "open_flags", "pwd", "realtime_signal", "register_at_fork", "resource", "signals"]


def open_flags(*names: str) -> int:
    """Flags of `os.open` together; those that the system does not know are left out."""
    flags = 0
    for name in names:
        flags |= getattr(os, name, 0)
    return flags


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return those of the signals that the system has."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def realtime_signal(before_last: int) -> int:
    """Return a real-time signal by its distance from the last one; SIGTERM where there are none."""
    last: int | None = getattr(signal, "SIGRTMAX", None)
    return signal.SIGTERM if last is None else last - before_last


def register_at_fork(**functions: Callable[[], object]) -> None:
    """As `os.register_at_fork`, where processes can be forked."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**functions)
