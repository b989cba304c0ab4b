"""Memory of a process: what its allocator keeps.

`give_back_freed_memory` is called once by a process that strangers may have hold memory: the dispatcher.
`keep_freed_memory` is called once by a process that receives or makes batches. A batch of some megabytes that is
allocated, faulted in page by page and unmapped again costs more CPU time than its way through TCP. glibc only;
elsewhere nothing is changed.
"""

from __future__ import annotations

import ctypes

# From malloc.h of glibc, see mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Blocks below this come from the heap and are used again. Above it the kernel's pages are a small part of the cost.
_HEAP_BELOW_BYTES = 256 << 20
# Free memory at the top of the heap up to here is kept: about what a loader's window holds.
_KEEP_BYTES = 512 << 20
# Below a frame of the control port, of which strangers may make the dispatcher hold a thousand. Set, it stays; else
# each larger block that is freed raises it, and what then comes from the heap is kept below whatever lives longer.
_UNMAPPED_FROM_BYTES = 32 << 10


def give_back_freed_memory() -> None:
    """Let glibc's malloc give large blocks back to the kernel as soon as they are freed (see mallopt(3))."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _UNMAPPED_FROM_BYTES)


def keep_freed_memory() -> None:
    """Let glibc's malloc hold on to freed blocks of the size of batches, in the whole process (see mallopt(3))."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _HEAP_BELOW_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
