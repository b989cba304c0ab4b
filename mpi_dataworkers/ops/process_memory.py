"""Which memory of this process its other processes see when it is written to.

A dataset can hold such memory: a tensor after `share_memory_()`, an array over `multiprocessing.shared_memory`, a
`numpy.memmap`. Torch's worker processes, which are forked, see what the trainer writes there later; of all else they
keep what it was when they began.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from mmap import PAGESIZE
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.wire.codec import Buffer

_T = TypeVar("_T")

_MAPS, _PAGES = Path("/proc/self/maps"), Path("/proc/self/pagemap")
# Looking takes no more than this share of the time, but for the first time, and where it is short.
_LOOK_SHARE = 0.01
# What may be saved up of that: one look that takes long by chance does not delay the next ones.
_MOST_LEFT_S = 0.01
# Of an entry of pagemap, see https://docs.kernel.org/admin-guide/mm/pagemap.html: the page is in memory, and of a file.
_IS_THERE, _IS_OF_FILE = 1 << 63, 1 << 61


def _shared_lines() -> Iterator[str]:
    with _MAPS.open(errors="surrogateescape", newline="\n") as lines:
        for line in lines:  # the names of files hold what `splitlines` takes for the end of a line
            if line.split(maxsplit=2)[1].endswith("s"):
                yield line.rstrip("\n")


def shared_mappings() -> frozenset[str]:
    """The shared mappings of this process, as the kernel writes them."""
    return frozenset(_shared_lines())


class SharedMappings:
    """The shared mappings of this process, as they are now (proc(5))."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for line in _shared_lines():
            start, stop = line.split(maxsplit=1)[0].split("-")
            self._starts.append(int(start, 16))
            self._stops.append(int(stop, 16))

    def __contains__(self, buffer: Buffer) -> bool:
        return self.hold(np.frombuffer(buffer, dtype=np.uint8))

    def hold(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether an array lies there."""
        address, _ = array.__array_interface__["data"]
        number = bisect.bisect_right(self._starts, address) - 1
        return number >= 0 and address < self._stops[number]


class PrivatePages:
    """Buffers in private mappings of files, of which this process has a page of its own as soon as it writes to it.

    Args:
        buffers: which; what they have in common with others on a page, at their ends, is looked at by its bytes.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._ends: list[np.ndarray[Any, Any]] = []
        self._pages: list[tuple[int, int]] = []  # number of the first one, and how many
        for buffer in buffers:
            array = np.frombuffer(buffer, dtype=np.uint8)
            before = -array.__array_interface__["data"][0] % PAGESIZE
            num_pages = max(0, array.nbytes - before) // PAGESIZE
            behind = before + num_pages * PAGESIZE
            self._ends += [array[:before], array[behind:]]
            self._pages.append(((array.__array_interface__["data"][0] + before) // PAGESIZE, num_pages))

    def own(self) -> list[bytes]:
        """One bit for each page: whether it is this process's own."""
        found = []
        with _PAGES.open("rb", buffering=0) as entries:
            for first, num_pages in self._pages:
                entries.seek(8 * first)
                pages = np.frombuffer(entries.read(8 * num_pages), dtype=np.uint64)
                found.append(np.packbits((pages & (_IS_THERE | _IS_OF_FILE)) == _IS_THERE).tobytes())
        return found

    def look(self) -> list[bytes]:
        """What is another one when this process has written to the buffers."""
        return [*self.own(), *(end.tobytes() for end in self._ends)]


class Looking:
    """How often something may be looked at: what that takes is a small share of the time.

    Args:
        saved_s: what looks may take beyond that.
        each_s: what they may take each time that is asked.
        clock: seconds.
        cpu_clock: seconds of this thread, which other processes do not prolong.
    """

    def __init__(
        self,
        saved_s: float = 0.0,
        each_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._each_s, self._clock, self._cpu_clock = each_s, clock, cpu_clock
        self._left_s, self._most_s, self._asked_at = saved_s, max(saved_s, _MOST_LEFT_S), clock()

    def look(self, look: Callable[[], _T]) -> _T | None:
        """What a look gives; None if looks have taken too much of the time."""
        now = self._clock()
        earned_s = self._each_s + _LOOK_SHARE * (now - self._asked_at)
        self._asked_at, self._left_s = now, min(self._left_s + earned_s, self._most_s)
        if self._left_s < 0:
            return None
        began_s = self._cpu_clock()
        found = look()
        self._left_s -= self._cpu_clock() - began_s
        return found


class WriteWatch:
    """Finds out that somebody writes into memory which is shared in the trainer.

    Args:
        look: gives something of that memory that is another one when somebody has written.
        before: what it gave at first; None to look now.
        looking: how often it may be looked.
    """

    def __init__(self, look: Callable[[], object], before: object = None, looking: Looking | None = None) -> None:
        self._look, self._looking = look, looking or Looking()
        self._before = look() if before is None else before

    def has_written(self) -> bool:
        """Look, unless that has taken too much of the time."""
        found = self._looking.look(self._look)
        return found is not None and found != self._before

    def check(self) -> None:
        """The same in a data worker, when samples were made.

        A cache that torch's worker processes fill for each other would stay empty where the program looks for it.

        Raises:
            PipelineError: they have written.
        """
        if self.has_written():
            raise PipelineError(
                "the dataset writes into shared memory while it makes samples. Of torch's worker processes the trainer "
                "and the others would see that; a data worker has a copy of its own. Fill the memory before the "
                "loader is iterated, or let worker processes of the program make the samples: torch's own DataLoader "
                "stays local with multiprocessing_context='fork' and num_workers of 1 or more"
            )


# Segments of `multiprocessing.shared_memory` that belong to the program, and that samples attach to by name.
#
# Python registers a segment with a tracker process at each attachment, too (cpython#82300; 3.13 lets the caller
# decline, and still does it by default). The tracker unlinks what is registered when the last process that shares it
# has ended. Torch's worker processes are forked from the trainer and share its tracker. Data worker processes have
# another one, and leave earlier than the program.

_KIND = "shared_memory"  # as the tracker calls it


class _Calls(threading.local):
    is_attaching = False


_calls = _Calls()
_register, _unregister = resource_tracker.register, resource_tracker.unregister
_make = SharedMemory.__init__


def leave_attachments_alone() -> None:
    """From now on a segment is unlinked at the end of this process, and of those it forks, only if they created it."""
    resource_tracker.register = _register_what_is_made
    resource_tracker.unregister = _unregister_in_any_case
    SharedMemory.__init__ = _noted  # type: ignore[method-assign]


@functools.wraps(_make)
def _noted(self: SharedMemory, name: str | None = None, create: bool = False, *args: Any, **options: Any) -> None:
    before, _calls.is_attaching = _calls.is_attaching, not create
    try:
        _make(self, name, create, *args, **options)
    finally:
        _calls.is_attaching = before


def _register_what_is_made(name: Any, rtype: str) -> None:
    if rtype != _KIND or not _calls.is_attaching:
        _register(name, rtype)


def _unregister_in_any_case(name: Any, rtype: str) -> None:
    """Unlinked is also what was only attached to, or was made by another process that shares the tracker. The tracker
    holds a set of names, and complains of one that is not in it."""
    if rtype == _KIND:
        _register(name, rtype)
    _unregister(name, rtype)


# Memory that a process shares with others, which it has as a copy of its own from now on.
#
# Of the program's shared memory (a tensor after `share_memory_()`, a `numpy.memmap` that writes, a
# `multiprocessing.Value`) a process that only compares must change nothing. The kernel copies a page when it is written
# to, and says afterwards that it did (proc(5), smaps): no buffer and no library needs to be known for that.

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
