"""Limits of memory and processor time for work on input that may have been made to use up both."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

_STATM = Path("/proc/self/statm")


class TimeExceeded(RuntimeError):
    """The work took more processor time than it may."""


@contextlib.contextmanager
def limited(memory_bytes: int, cpu_s: int) -> Iterator[None]:
    """Let a block take so much more memory and processor time than this process has taken, and no more.

    Memory beyond that raises MemoryError, or what a library makes of it. Time is limited in the main thread alone,
    where signals arrive.

    Args:
        memory_bytes: private memory, as RLIMIT_DATA counts it.
        cpu_s: of all threads together.

    Raises:
        TimeExceeded: the block took longer.
    """
    with contextlib.ExitStack() as undo:
        data_bytes = int(_STATM.read_text().split()[5]) * resource.getpagesize()
        undo.enter_context(_lowered(resource.RLIMIT_DATA, data_bytes + memory_bytes))
        if threading.current_thread() is threading.main_thread():
            former = signal.signal(signal.SIGXCPU, _raise)
            undo.callback(signal.signal, signal.SIGXCPU, former)
            used = os.times()
            undo.enter_context(_lowered(resource.RLIMIT_CPU, int(used.user + used.system) + cpu_s))
        yield


@contextlib.contextmanager
def _lowered(kind: int, wanted: int) -> Iterator[None]:
    """Lower the soft limit, which this process may raise again."""
    soft, hard = resource.getrlimit(kind)
    known = [one for one in (soft, hard, wanted) if one != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def _raise(*_: object) -> None:
    raise TimeExceeded("the limit of processor time is reached")
