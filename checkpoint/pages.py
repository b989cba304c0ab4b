"""The pages of mapped memory: have them there before somebody touches them, or free them, without the GIL.

Called for slots and for files that are read.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import mmap


class Populate(enum.IntEnum):
    """What for; the numbers are those of linux/mman.h since Linux 5.14."""

    READ = 22
    WRITE = 23


def populate(mapping: mmap.mmap, offset: int, num_bytes: int, how: Populate) -> bool:
    """Enter pages into this process's page tables; of a file that is not in memory, read them.

    Args:
        mapping: memory that this process may write to. The GIL is kept for other.
        offset: where, a multiple of a page.
        num_bytes: how much.

    Returns:
        Whether it was done. If not, the kernel does not know how, or the pages cannot be read.
    """
    try:
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    except TypeError:  # read-only; mmap.madvise keeps the GIL
        try:
            mapping.madvise(how, offset, num_bytes)
        except OSError:
            return False
        return True
    # By ctypes, without the GIL.
    done = _libc().madvise(ctypes.c_void_p(start + offset), ctypes.c_size_t(num_bytes), int(how))
    return bool(done == 0)


def give_back(mapping: mmap.mmap) -> None:
    """Free the memory behind a shared mapping, in every process that has it mapped; its bytes are zeros from then on.

    Where the file system cannot, it is freed when the last process has unmapped it.

    Args:
        mapping: all of a file that this process may write to. The GIL is free meanwhile.
    """
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(len(mapping)), mmap.MADV_REMOVE)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
