"""Locks among processes of one user, which nobody else can hold: of a host's trainers, and of a service's directory.

flock(2) takes any descriptor of a file or directory, so whoever may open one may lock it, and hold up everybody else
for as long as he likes: /run and /dev/shm are open to all. The file of this lock can be opened by its owner alone, and
`keep_to_owner` does the same for files that are locked in other ways.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from hetstream.base.files import Directory, UntrustedFile
from hetstream.base.posix import fcntl, open_flags

_POLL_S = 0.005
_FLAGS = open_flags("O_RDWR", "O_CREAT", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK")


@contextlib.contextmanager
def own_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold a lock; its file is made, and is gone afterwards.

    Args:
        path: of the file, in a directory where nobody else can put another one in its place; that may be sticky.
        timeout_s: how long to wait for another holder.

    Raises:
        TimeoutError: another process of this user held it all the time.
        UntrustedFile: what has this name is somebody else's, or can be opened by others, or is no file.
        OSError: it cannot be made or opened.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        descriptor = os.open(path, _FLAGS, 0o600)
        try:
            _check(path, os.fstat(descriptor))
            wait_for_lock(path, descriptor, max(0.0, deadline_s - time.monotonic()))
            if not _is_named(path, descriptor):
                continue  # who held it before has removed it meanwhile, and another one may be there
            try:
                yield
            finally:
                if _is_named(path, descriptor):
                    os.unlink(path)
            return
        finally:
            # By name, and not by closing alone: a child that was forked meanwhile may have a copy.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


class HeldByAnother(Exception):
    """Another process holds a directory; the text is its process id, or "unknown"."""


def hold_directory(directory: Directory) -> int:
    """Hold a directory for this process alone, by a file `lock` in it that says which process it is.

    Returns:
        A descriptor; the directory is held until it is closed.

    Raises:
        DirectoryInUse: another process holds it.
        OSError: the file cannot be made.
    """
    lock = directory.open_file("lock", os.O_RDWR | os.O_CREAT)
    try:
        keep_to_owner(lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise HeldByAnother(holder) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def keep_to_owner(descriptor: int) -> None:
    """Take a file that is locked from all but its owner, whatever mode somebody has given it (`chmod -R g+rX`).

    Who has it open already may still hold its lock; nobody else comes to it.

    Args:
        descriptor: of a file that nobody needs to read. Another user's stays as it is, and so does one that has another
            name, too: somebody may have given a file of this user's the name of the lock (link(2)).
    """
    status = os.fstat(descriptor)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
    if is_own and stat.S_IMODE(status.st_mode) & 0o077:
        with contextlib.suppress(OSError):  # on a file system that cannot be written to
            os.fchmod(descriptor, 0o600)


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UntrustedFile(
            f"{path} is no file of user {os.geteuid()} that others cannot open (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}): somebody else could hold the lock. See: ls -l {path}"
        )


def wait_for_lock(path: Path, descriptor: int, timeout_s: float) -> None:
    """Lock a file that only its owner can open; `path` is its name, for the message.

    Raises:
        TimeoutError: another process held it all the time.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"another process has held the lock {path} for {timeout_s:g} s: fuser -v {path}")
        time.sleep(_POLL_S)


def _is_named(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False
