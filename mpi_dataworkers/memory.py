"""Memory of a process: what its allocator keeps, and what it may still take.

`keep_freed_memory` is called once by a process that receives or makes batches. A batch of some megabytes that is
allocated, faulted in page by page and unmapped again costs more CPU time than its way through TCP. glibc only;
elsewhere nothing is changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

# From malloc.h of glibc, see mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Blocks below this come from the heap and are used again. Above it the kernel's pages are a small part of the cost.
_HEAP_BELOW_BYTES = 256 << 20
# Free memory at the top of the heap up to here is kept: about what a loader's window holds.
_KEEP_BYTES = 512 << 20
_GIVES_NO_LIMIT = sys.maxsize


def keep_freed_memory() -> None:
    """Let glibc's malloc hold on to freed blocks of the size of batches, in the whole process (see mallopt(3))."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _HEAP_BELOW_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


def available_bytes() -> int:
    """Memory that this process may still take: what the host has available, within the limit of its control group.

    MemAvailable of proc_meminfo(5); memory.max and memory.current of the group (version 2), less the file cache that
    the kernel would drop (inactive_file of memory.stat). What cannot be read does not limit.
    """
    available = _GIVES_NO_LIMIT
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) << 10
    with contextlib.suppress(OSError, ValueError, StopIteration, KeyError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
        group = Path("/sys/fs/cgroup") / own
        cache = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text()) - int(cache)
        available = available if limit == "max" else min(available, max(0, int(limit) - used))
    return available
