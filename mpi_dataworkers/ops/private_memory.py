"""Memory that a process shares with others, which it has as a copy of its own from now on.

Of the program's shared memory (a tensor after `share_memory_()`, a `numpy.memmap` that writes, a
`multiprocessing.Value`) a process that only compares must change nothing. The kernel copies a page when it is written
to, and says afterwards that it did (proc(5), smaps): no buffer and no library needs to be known for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from hetstream.mpi_dataworkers.ops.shared_memory import shared_mappings

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED, _MREMAP_MAYMOVE = 0x10, 1
_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

# Locks and semaphores of processes (sem_open(3)) work in memory that is shared; and what this package itself shares.
_STAYS_SHARED = ("/dev/shm/sem.", "/memfd:hetstream-", "anon_inode:")
_DELETED = " (deleted)"
# Memory without a file that can be opened is copied.
_MOST_COPIED_BYTES = 1 << 30


@dataclass(frozen=True)
class _Mapping:
    """A shared mapping, as it was.

    Attributes:
        start, size: of its addresses, bytes.
        offset: in its file, bytes.
        name: as the kernel writes it.
        file: descriptor of what it shows.
        source: address of the same memory, where `file` is a copy of it; else None.
    """

    start: int
    size: int
    offset: int
    name: str
    file: int
    source: int | None = None


class PrivateMemory:
    """The writable shared memory of this process, of which it has a copy from now on.

    Where nobody has written in this process, it still shows what other processes write into a file's memory.

    Raises:
        OSError: of some memory no copy can be had.
    """

    def __init__(self) -> None:
        self._mappings = [mapping for line in sorted(shared_mappings()) if (mapping := _mapping_of(line)) is not None]
        self.renew()

    def renew(self) -> None:
        """Show what the others have written, and forget what this process has."""
        for each in self._mappings:
            if each.source is not None:
                _copy(each.source, each.size, each.file)
            flags = mmap.MAP_PRIVATE | _MAP_FIXED
            _of_kernel(_libc.mmap(each.start, each.size, _READ_AND_WRITE, flags, each.file, each.offset), each.name)

    def written(self) -> str:
        """Name of memory that this process has written to; "" where it has not."""
        if not self._mappings:
            return ""
        name = ""
        with open("/proc/self/smaps", "rb") as lines:
            for line in lines:
                first, _, value = line.partition(b" ")
                if not first.endswith(b":"):
                    start = int(first.partition(b"-")[0], 16)
                    name = next((each.name for each in self._mappings if 0 <= start - each.start < each.size), "")
                elif name and first == b"Anonymous:" and int(value.split()[0]):
                    return name
        return ""


def _mapping_of(line: str) -> _Mapping | None:
    """A mapping of which a copy is to be had (proc(5), maps); opens what it shows."""
    addresses, rights, offset, device, inode, *names = line.split(maxsplit=5)
    name = names[0] if names else ""
    if not rights.startswith("rw") or name.startswith(_STAYS_SHARED):
        return None
    with contextlib.suppress(OSError):
        if stat.S_ISCHR(os.stat(name).st_mode):
            return None  # memory of a device
    start, stop = (int(address, 16) for address in addresses.split("-"))
    for path in _paths(addresses, name):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            found = os.fstat(file)
            numbers = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
            if stat.S_ISREG(found.st_mode) and (numbers, str(found.st_ino)) == (device, inode):
                return _Mapping(start, stop - start, int(offset, 16), name, file)
            os.close(file)
    if stop - start > _MOST_COPIED_BYTES:
        raise OSError(f"no copy can be had of {stop - start} bytes of shared memory ({name or 'without a name'})")
    source = _of_kernel(_libc.mremap(start, 0, stop - start, _MREMAP_MAYMOVE), name)
    file = os.memfd_create("hetstream-copy", os.MFD_CLOEXEC)
    os.truncate(file, stop - start)
    return _Mapping(start, stop - start, 0, name, file, source)


def _paths(addresses: str, name: str) -> Iterator[str]:
    """Where the memory of a mapping may be opened; the second is for processes of root (proc(5), map_files)."""
    if not name.endswith(_DELETED):
        yield name
    yield f"/proc/self/map_files/{addresses}"
    for descriptor in os.listdir("/proc/self/fd"):
        yield f"/proc/self/fd/{descriptor}"


def _copy(source: int, size: int, file: int) -> None:
    """Copy memory into a file, up to where there is some."""
    memory = memoryview((ctypes.c_char * size).from_address(source)).cast("B")
    done = 0
    with contextlib.suppress(OSError):  # EFAULT: the file is shorter than what shows it
        while done < size:
            done += os.pwrite(file, memory[done:], done)


def _of_kernel(address: int | None, name: str) -> int:
    if address is None or address == _FAILED:
        raise OSError(ctypes.get_errno(), f"no copy can be had of shared memory ({name or 'without a name'})")
    return address
