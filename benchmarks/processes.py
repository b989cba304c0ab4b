"""What benchmarks look at of other processes, and how they wait for what those do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path


def wait(condition: Callable[[], object], what: str, timeout_s: float = 120.0, every_s: float = 0.1) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: it did not come in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(every_s)


def state_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: state, parent, group, ...; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet has."""
    return state_of(pid)[:1] not in ([], ["Z"], ["X"])


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def command_line(pid: int) -> bytes:
    """Of a process, its words ended by zeros; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def all_processes() -> Iterator[int]:
    """The ids of all processes of this machine."""
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
