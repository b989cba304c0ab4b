"""How much memory this process may still take, before it is taken. Read by stores; changes nothing."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """What the host has available (MemAvailable), within the limits of this process's control groups.

    A job's limit stands above the group of the process, so all groups up to the root count (cgroup v2: memory.max and
    memory.current, less the file cache that the kernel would drop). What cannot be read does not limit.
    """
    available = sys.maxsize
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) << 10
    with contextlib.suppress(OSError, StopIteration):
        lines = _OWN_GROUP.read_text().splitlines()
        own = _GROUPS / next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
        for group in (own, *own.parents):
            if group == _GROUPS:
                break
            available = min(available, _left_in(group))
    return available


def _left_in(group: Path) -> int:
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            cache = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
            return max(0, int(limit) - int((group / "memory.current").read_text()) + int(cache))
    return sys.maxsize
