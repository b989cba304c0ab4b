"""Limits of memory and processor time: what is left of those that the host and the job's control groups set, and lower
ones for work on input that may have been made to use up both."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from hetstream.base.posix import resource

_STATM = Path("/proc/self/statm")
_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MOUNTS = Path("/proc/self/mountinfo")


class TimeExceeded(RuntimeError):
    """The work took more processor time than it may."""


def take_all_descriptors() -> None:
    """Let this process have as many files and connections as it may: what a login shell sets is for its programs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def lower(memory_bytes: int, cpu_s: int) -> None:
    """Let this process take so much more memory and processor time for good. At the end of the time comes SIGXCPU.

    Args:
        memory_bytes: private memory, as RLIMIT_DATA counts it.
        cpu_s: of all threads together.
    """
    for kind, wanted in (
        (resource.RLIMIT_DATA, _data_bytes() + memory_bytes),
        (resource.RLIMIT_CPU, _used_s() + cpu_s),
    ):
        soft, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (_least(wanted, soft, hard), hard))


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
        undo.enter_context(_lowered(resource.RLIMIT_DATA, _data_bytes() + memory_bytes))
        if threading.current_thread() is threading.main_thread():
            former = signal.signal(signal.SIGXCPU, _raise)
            undo.callback(signal.signal, signal.SIGXCPU, former)
            undo.enter_context(_lowered(resource.RLIMIT_CPU, _used_s() + cpu_s))
        yield


@contextlib.contextmanager
def _lowered(kind: int, wanted: int) -> Iterator[None]:
    """Lower the soft limit, which this process may raise again."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (_least(wanted, soft, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def _least(*limits: int) -> int:
    return min(limit for limit in limits if limit != resource.RLIM_INFINITY)


def _data_bytes() -> int:
    """Private memory that this process has."""
    return int(_STATM.read_text().split()[5]) * resource.getpagesize()


def _used_s() -> int:
    """Processor time that it has taken."""
    used = os.times()
    return int(used.user + used.system)


def _raise(*_: object) -> None:
    raise TimeExceeded("the limit of processor time is reached")


def available_bytes() -> int:
    """Return memory that this process may still take before something is taken from it or another one.

    What the host has available (MemAvailable), within the limits of this process's control groups: a job's limit stands
    above the group of the process, so all groups up to the root count, of version 1 and of version 2. File cache that
    the kernel would drop is no use of memory. What cannot be read does not limit.
    """
    available = sys.maxsize
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        available = int(_fields(_MEMINFO, ":")["MemAvailable"].split()[0]) << 10
    for group, files in _groups():
        available = min(available, _left_in(group, files))
    return available


@dataclass(frozen=True)
class _Files:
    """What the files of a version of control groups are called.

    Attributes:
        limits: most that may be used; the lowest counts.
        used: how much is.
        cache: field of memory.stat with what of that the kernel would drop.
    """

    limits: tuple[str, ...]
    used: str
    cache: str


_VERSION_1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
# Above memory.high a process is slowed down to a crawl.
_VERSION_2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")


def _groups() -> Iterator[tuple[Path, _Files]]:
    """The control groups of this process that limit memory, from its own to the root of what is mounted."""
    own: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN_GROUPS.read_text().splitlines():
            number, controllers, name = line.split(":", 2)
            if number == "0" or "memory" in controllers.split(","):
                own["cgroup2" if number == "0" else "cgroup"] = name
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _MOUNTS.read_text().splitlines():
            before, after = (part.split() for part in line.split(" - ", 1))
            root, mount, kind, options = Path(before[3]), Path(before[4]), after[0], after[-1].split(",")
            if kind not in own or (kind == "cgroup" and "memory" not in options):
                continue
            path = Path(own[kind])
            # In a container the group of the process may lie outside what is mounted.
            inner = path.relative_to(root) if path.is_relative_to(root) and ".." not in path.parts else Path()
            files = _VERSION_2 if kind == "cgroup2" else _VERSION_1
            yield from ((mount / folder, files) for folder in (inner, *inner.parents))


def _left_in(group: Path, files: _Files) -> int:
    limits = []
    for name in files.limits:
        with contextlib.suppress(OSError, ValueError):  # "max" is none
            limits.append(int((group / name).read_text()))
    with contextlib.suppress(OSError, ValueError, KeyError):
        if limits:
            cache_bytes = int(_fields(group / "memory.stat", None)[files.cache])
            return max(0, min(limits) - int((group / files.used).read_text()) + cache_bytes)
    return sys.maxsize


def _fields(path: Path, separator: str | None) -> dict[str, str]:
    return dict(line.split(separator, 1) for line in path.read_text().splitlines())


# Who may stay where places are limited: connections of strangers, for one. Pure.

T = TypeVar("T", bound=Hashable)


class ConnectionLimit(Generic[T]):
    """So many places. Whoever takes more than others gives way first, so a crowd of one user shuts out itself alone.

    Args:
        most: places in all.
        most_each: of one owner; None: all.
    """

    def __init__(self, most: int, most_each: int | None = None) -> None:
        self._most = most
        self._most_each = most if most_each is None else most_each
        self._owners: dict[T, Hashable] = {}
        self._taken: dict[Hashable, dict[T, None]] = {}  # of each owner, in the order of their coming

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[T]:
        return iter(self._owners)

    def enter(self, key: T, owner: Hashable) -> None:
        """It takes a place, whether there is one or not."""
        self._owners[key] = owner
        self._taken.setdefault(owner, {})[key] = None

    def leave(self, key: T) -> None:
        """It is gone. A second time does nothing."""
        if key not in self._owners:
            return
        owner = self._owners.pop(key)
        del self._taken[owner][key]
        if not self._taken[owner]:
            del self._taken[owner]

    def one_too_many(self) -> T | None:
        """Return who is to leave next, the oldest of the owner with the most; None while there is room for all."""
        most = max(self._taken.values(), key=len, default=None)
        if most is None or (len(self._owners) <= self._most and len(most) <= self._most_each):
            return None
        return next(iter(most))


# How long somebody has to wait who asks more often than he may. Pure; the clock is an argument.


class RateLimit:
    """So many turns a second for each owner, and some at once: a bucket of tokens each (a generic cell rate algorithm).

    Whoever asks too often waits, and only he. An owner who asks seldom costs no memory.

    Args:
        per_s: of one owner.
        at_once: of one owner who has not asked for long.
        longest_s: nobody's wait is longer, however many of his turns nobody took in the end.
    """

    def __init__(self, per_s: float, at_once: int, longest_s: float) -> None:
        self._interval_s = 1 / per_s
        self._ahead_s = at_once / per_s
        self._longest_s = longest_s
        self._next: dict[Hashable, float] = {}  # owner -> when his bucket is full again

    def __len__(self) -> int:
        return len(self._next)

    def wait_s(self, owner: Hashable, now_s: float) -> float:
        """Take a turn, and say in how many seconds it comes; 0: now."""
        if owner not in self._next:
            self._next = {key: full_s for key, full_s in self._next.items() if full_s > now_s}
        full_s = max(now_s, self._next.get(owner, now_s)) + self._interval_s
        self._next[owner] = min(full_s, now_s + self._ahead_s + self._longest_s)
        return max(0.0, self._next[owner] - now_s - self._ahead_s)
