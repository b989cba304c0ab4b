"""What Linux tells of processes that tests have started; an OSError if one is gone."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> set[int]:
    """Child processes of all threads of a process."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


def pss_bytes(pid: int) -> int:
    """Memory of a process, what it shares divided by those who share it, from /proc/PID/smaps_rollup (proc(5))."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def pss_of_all(pid: int) -> int:
    """Memory of a process and its children, what they share counted once."""
    return sum(map(pss_bytes, (pid, *children_of(pid))))
