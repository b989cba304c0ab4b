"""Records in shared memory that one process writes and another reads, at any time, without a lock.

A page has two places. The writer fills them in turn, so a writer that dies in the middle leaves the record before. A
record has its number and a checksum: the reader takes the newest whole one, and what is torn, or was overwritten by
somebody else, counts as nothing. Pages are memory files without a name (memfd_create(2)), passed as descriptors.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import zlib
from dataclasses import fields
from typing import Generic, TypeVar

from hetstream.hetjob.gpu.orders import Order, Statistics, Work

T = TypeVar("T", Order, Statistics, Work)

# Grows with each change of a record's fields, or of the introduction's; a job and a coordinator of two versions refuse
# each other.
VERSION = 6
SIZE_BYTES = 4096
_PLACE_BYTES = SIZE_BYTES // 2
_HEAD = struct.Struct("<4sIQ")  # magic, version, number of the record
_CHECKSUM = struct.Struct("<I")
_MAGIC = {Order: b"HGOR", Statistics: b"HGST", Work: b"HGWK"}
# linux/fcntl.h, since 5.1; Python has no name for it before 3.13.
_F_SEAL_FUTURE_WRITE = 0x0010
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Page(Generic[T]):
    """A mapped page of one kind of record.

    Args:
        descriptor: of the memory file; it is not needed afterwards.
        kind: of the record.
        writable: whether this process writes it.
    """

    def __init__(self, descriptor: int, kind: type[T], *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._memory = mmap.mmap(descriptor, SIZE_BYTES, mmap.MAP_SHARED, protection)
        self._kind: type[T] = kind
        self._names = [field.name for field in fields(kind)]
        self._body = struct.Struct(f"<{len(self._names)}q")
        self._length = _HEAD.size + self._body.size + _CHECKSUM.size
        self._number = 0
        self._seen: tuple[bytes, bytes] | None = None
        self._newest: T | None = None

    def write(self, record: T) -> None:
        """Make this the newest record."""
        self._number += 1
        content = _HEAD.pack(_MAGIC[self._kind], VERSION, self._number) + self._body.pack(
            *[getattr(record, name) for name in self._names]
        )
        content += _CHECKSUM.pack(zlib.crc32(content))
        start = self._number % 2 * _PLACE_BYTES
        self._memory[start : start + len(content)] = content

    def read(self) -> T | None:
        """The newest whole record; None if there is none. What was read before is not checked again."""
        seen = self._memory[: self._length], self._memory[_PLACE_BYTES : _PLACE_BYTES + self._length]
        if seen != self._seen:
            found = [place for place in map(self._record_of, seen) if place is not None]
            self._newest = max(found, key=lambda place: place[0])[1] if found else None
            self._seen = seen
        return self._newest

    def close(self) -> None:
        """Unmap it."""
        self._memory.close()

    def _record_of(self, content: bytes) -> tuple[int, T] | None:
        checked = content[: -_CHECKSUM.size]
        if _CHECKSUM.unpack_from(content, len(checked))[0] != zlib.crc32(checked):
            return None
        magic, version, number = _HEAD.unpack_from(content)
        if magic != _MAGIC[self._kind] or version != VERSION:
            return None
        return number, self._kind(*self._body.unpack_from(content, _HEAD.size))


def make_orders() -> tuple[Page[Order], int]:
    """A page that this process writes, and a descriptor for the job, which can only read it.

    The mapping is made first. Then the file is sealed against any further writing, where the kernel can do that, and
    the descriptor is opened anew for reading only: that alone keeps out jobs of other users.
    """
    descriptor = os.memfd_create("hetstream-gpu-orders", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, SIZE_BYTES)
        page = Page(descriptor, Order, writable=True)
        os.fchmod(descriptor, 0o400)
        with contextlib.suppress(OSError):  # Linux before 5.1
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE | fcntl.F_SEAL_SEAL)
        return page, os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(descriptor)


def make_statistics() -> tuple[Page[Statistics], int]:
    """A page that this process reads, and a descriptor for the job, which writes it. Nobody can change its size."""
    descriptor = _written_by_jobs("hetstream-gpu-statistics")
    try:
        return Page(descriptor, Statistics, writable=False), descriptor
    except OSError:
        os.close(descriptor)
        raise


def make_work() -> tuple[int, int]:
    """Two descriptors of a page: one for the guaranteed job, which writes it, and one for the others, which read it.

    Whoever has the first can keep it for ever, so each guaranteed job has a page of its own.
    """
    descriptor = _written_by_jobs("hetstream-gpu-work")
    try:
        os.fchmod(descriptor, 0o400)
        return descriptor, os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        os.close(descriptor)
        raise


def _written_by_jobs(name: str) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, SIZE_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE | fcntl.F_SEAL_SEAL)
        return descriptor
    except OSError:
        os.close(descriptor)
        raise
