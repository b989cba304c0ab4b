"""File locks that end with the process that took them: who holds one lives. Used for stores, checkpoint writers and
directories.

The lock is flock(2). Whoever may open the file can take it, so whenever it is opened its mode is set back to its owner
alone. A forked child (a data worker of torch's DataLoader) would share it and keep a dead trainer's lock
alive, so a child gives up its copy at once.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import functools
import mmap
import os
import time
from pathlib import Path

from hetstream.base.files import Directory
from hetstream.base.locks import keep_to_owner
from hetstream.base.posix import fcntl, register_at_fork
from hetstream.checkpoint.errors import CheckpointError

_POLL_S = 0.005
_held: set[FileLock] = set()


class FileLock:
    """A lock that is held from the beginning to `release`; also a context manager.

    Attributes:
        path: the locked file. It is made if it is missing, and never deleted by a lock.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        _held.add(self)

    @classmethod
    def try_exclusive(cls, path: Path, directory: Directory | None = None) -> FileLock | None:
        """Take the lock alone, or None while anybody holds it.

        Args:
            path: of the file; it is made if it is missing.
            directory: that the file is in: then it is opened there, and no link is followed.

        Raises:
            CheckpointError: the file system has no locks.
            OSError: the file cannot be opened.
        """
        flags = os.O_RDWR | os.O_CREAT
        descriptor = directory.open_file(path.name, flags) if directory else os.open(path, flags | os.O_CLOEXEC, 0o600)
        return cls._try(path, descriptor, fcntl.LOCK_EX)

    @classmethod
    def try_shared(cls, path: Path, directory: Directory | None = None) -> FileLock | None:
        """Take the lock beside others that share it, or None while somebody holds it alone. The file must exist.

        Args:
            path: of the file.
            directory: as of `try_exclusive`.

        Raises:
            CheckpointError: the file system has no locks.
            OSError: the file cannot be opened.
        """
        descriptor = directory.open_file(path.name) if directory else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return cls._try(path, descriptor, fcntl.LOCK_SH)

    @classmethod
    def wait_exclusive(cls, path: Path, timeout_s: float, directory: Directory | None = None) -> FileLock:
        """Take the lock alone, waiting for it; for `directory` see `try_exclusive`.

        Raises:
            CheckpointError: it was not free within `timeout_s`, or the file system has no locks.
            OSError: the file cannot be opened.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            lock = cls.try_exclusive(path, directory)
            if lock:
                return lock
            if time.monotonic() > deadline_s:
                raise CheckpointError(f"{path} was locked by another process for {timeout_s:g} s: fuser -v {path}")
            time.sleep(_POLL_S)

    @classmethod
    def _try(cls, path: Path, descriptor: int, kind: int) -> FileLock | None:
        lock = cls(path, descriptor)
        try:
            keep_to_owner(descriptor)
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            lock._close()
            return None
        except OSError as exc:
            lock._close()
            if exc.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            raise CheckpointError(
                f"{path}: the file system has no file locks ({exc.strerror}), and checkpoints need them; "
                "ask for the mount option (Lustre: flock), or use another directory"
            ) from exc
        return lock

    def is_of(self, path: Path) -> bool:
        """Return whether the locked file is the one that has this name now: it may have been deleted or moved
        meanwhile.
        """
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except FileNotFoundError:
            return False

    @property
    def is_held(self) -> bool:
        """Whether it is not released."""
        return self in _held

    def release(self) -> None:
        """Give the lock up; a second time does nothing."""
        if self in _held:
            # By name, and not by closing alone: a child that was forked while it was taken may have a copy.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        _held.discard(self)
        os.close(self._descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_locked(path: Path, directory: Directory | None = None) -> bool:
    """Return whether a living process holds the lock of a file alone; False if the file cannot be opened. For
    `directory` see `FileLock.try_exclusive`.

    Raises:
        CheckpointError: the file system has no locks.
    """
    try:
        lock = FileLock.try_shared(path, directory)
    except OSError:
        return False
    if lock:
        lock.release()
    return lock is None


def _forget_in_child() -> None:
    for lock in list(_held):
        lock._close()


register_at_fork(after_in_child=_forget_in_child)


# The pages of mapped memory: have them there before somebody touches them, or free them, without the GIL.
#
# Called for slots and for files that are read.


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
