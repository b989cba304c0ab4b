"""Where fronts of samples are kept: a directory of one user on one host, bounded in bytes, shared by all his processes.

    hetstream-cache-1000/           mode 0700
        account                     bytes of all entries, shared by mapping; its lock is held to look through all
        users                       each process that uses the store holds it shared
        GROUP/                      one front: its code, parameters and libraries
            users                   as above; a group that nobody holds is the first to go
            claims                  a process holds the byte of a key while it makes the entry (`Claim`)
            differs                 there when the front was seen not to be deterministic; why
            KEY                     one entry: header, checksum, value

An entry is written under another name and renamed. What is damaged, or was not written to its end, is no entry. Nothing
is synced: after a crash of the host an entry may be damaged, and is made again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetstream.base.files import Directory, is_temporary, own_directory, temporary_name
from hetstream.base.limits import available_bytes
from hetstream.base.locks import wait_for_lock
from hetstream.base.posix import fcntl
from hetstream.mpi_dataworkers.ops.cached_values import Part
from hetstream.mpi_dataworkers.ops.pickling import checksum_of
from hetstream.mpi_dataworkers.process.config import MEMORY, CachePlace
from hetstream.mpi_dataworkers.wire.codec import aligned

# Magic with the version of the format, checksum of what follows, bytes of the value, CPU time that it saves.
_HEADER = struct.Struct("<8sQQd32x")
_MAGIC = b"hetcach2"
# Bytes of all entries; an entry is refused up to this benefit, until then (CLOCK_MONOTONIC).
_ACCOUNT = struct.Struct("<qdd")
_USERS, _DIFFERS, _CLAIMS, _ACCOUNT_NAME = "users", "differs", "claims", "account"
_NO_ENTRIES = frozenset((_USERS, _DIFFERS, _CLAIMS))
# struct flock of Linux on 64 bits: kind, where from, first byte, bytes, process.
_BYTE_LOCK = struct.Struct("=hhxxxxqqixxxx")
_FIRST_POLL_S, _MOST_POLL_S = 0.005, 0.05
# What is looked through again and again must not cost more than a hundredth of the time.
_LOOK_PAUSE = 100.0
_LEAST_PAUSE_S = 1.0
# Room is made for more than one entry, and only by what is worth less by so much: else entries of one worth would
# change places in each epoch, and none would be found in the next.
_ROOM_SHARE, _BETTER = 0.02, 1.25
# An entry of a front in use that nobody has asked for in so long belongs to a file that is gone or has changed.
_STALE_S = 7 * 86400.0
_TOUCH_S = 3600.0
# Of a process that died while it wrote.
_LEFT_S = 60.0
_LEAST_MEMORY = 256 << 20
_LOCK_S = 1.0
_MOST_PIECES = 1024  # of writev(2)


class Entry(NamedTuple):
    """What is known of an entry without reading it; `benefit` is CPU time saved per byte."""

    group: str
    name: str
    num_bytes: int
    benefit: float
    used_s: float


def victims(
    entries: Sequence[Entry], idle: Collection[str], need_bytes: int, benefit: float, now_s: float
) -> tuple[list[Entry], float]:
    """Which entries make room for a new one. Pure.

    First those that no running program uses, the longest unused first; then those of less benefit.

    Args:
        entries: all.
        idle: groups that no process uses.
        need_bytes: that are to be free.
        benefit: of the new one.
        now_s: time of day.

    Returns:
        They, and up to which benefit others would not get room either; infinity where there is room.
    """
    is_idle = {entry for entry in entries if entry.group in idle or now_s - entry.used_s > _STALE_S}
    order = sorted(entries, key=lambda entry: (entry not in is_idle, *_rank(entry, entry in is_idle)))
    chosen: list[Entry] = []
    for entry in order:
        if need_bytes <= 0:
            break
        if entry not in is_idle and entry.benefit * _BETTER >= benefit:
            return chosen, entry.benefit * _BETTER
        chosen.append(entry)
        need_bytes -= entry.num_bytes
    return chosen, -math.inf if need_bytes <= 0 else math.inf


def _rank(entry: Entry, is_idle: bool) -> tuple[float, float]:
    return (entry.used_s, entry.benefit) if is_idle else (entry.benefit, entry.used_s)


class Damaged(Exception):
    """An entry is not what was written."""


class Claim:
    """A process makes an entry, and others wait for it.

    The claim is a lock on one byte of the group's file, which the system gives back when the process dies. It belongs
    to the open file, so the threads of a process have it in common.

    Args:
        descriptor: of that file.
        key: of the entry.
    """

    def __init__(self, descriptor: int, key: str) -> None:
        self._descriptor, self._byte = descriptor, int(key[:15], 16)

    def take(self) -> bool:
        """Take it, if no other process has it."""
        return self._set(fcntl.F_WRLCK)

    def give_back(self) -> None:
        """Let another process have it."""
        self._set(fcntl.F_UNLCK)

    def _set(self, kind: int) -> bool:
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _BYTE_LOCK.pack(kind, os.SEEK_SET, self._byte, 1, 0))
        except OSError as error:  # a file system without such locks has nobody wait
            return error.errno not in (errno.EAGAIN, errno.EACCES)
        return True


class CacheStore:
    """The store of this user on this host.

    Args:
        place: where it is, and its bound.

    Raises:
        OSError: it cannot be used; the text says why. A directory of another user, or one in whose place others could
            put another one, is refused.
    """

    def __init__(self, place: CachePlace) -> None:
        path = store_path(place)
        self._open = contextlib.ExitStack()
        self._is_memory = place.kind == MEMORY
        self._directory = self._open.enter_context(own_directory(path))
        os.fchmod(self._directory.descriptor, 0o700)
        self._hold(self._directory)
        self._lock = self._directory.open_file(_ACCOUNT_NAME, os.O_RDWR | os.O_CREAT)
        self._open.callback(os.close, self._lock)
        if os.fstat(self._lock).st_size < _ACCOUNT.size:
            os.ftruncate(self._lock, _ACCOUNT.size)
        self._account = self._open.enter_context(mmap.mmap(self._lock, _ACCOUNT.size))
        self._groups: dict[str, Directory] = {}
        self._claims: dict[str, int] = {}
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
        self.bound_bytes = place.bound_bytes or (self._total() + free) // 2
        self._num_put = 0
        self._of_threads = threading.Lock()

    def _hold(self, directory: Directory) -> None:
        descriptor = directory.open_file(_USERS, os.O_RDWR | os.O_CREAT)
        self._open.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.utime(descriptor)

    def group(self, name: str) -> Directory:
        """The directory of a front, which this process uses from now on."""
        if name not in self._groups:
            directory = self._open.enter_context(self._directory.make(name))
            self._hold(directory)
            self._claims[name] = directory.open_file(_CLAIMS, os.O_RDWR | os.O_CREAT)
            self._open.callback(os.close, self._claims[name])
            self._groups[name] = directory
        return self._groups[name]

    def wait_for_maker(self, group: str, key: str, timeout_s: float) -> tuple[Claim | None, bool]:
        """Claim an entry that is not there; while another process makes it, wait.

        Returns:
            The claim, to be given back; None where the other has it still. And whether the other had it.
        """
        directory = self.group(group)
        claim = Claim(self._claims[group], key)
        if claim.take():
            return claim, False
        deadline_s, pause_s = time.monotonic() + timeout_s, _FIRST_POLL_S
        while time.monotonic() < deadline_s and not directory.has(key):
            time.sleep(pause_s)
            pause_s = min(_MOST_POLL_S, 1.5 * pause_s)
            if claim.take():
                return claim, True
        return None, True

    def why_ended(self, group: str) -> str:
        """In what the front's values differed when they were made again; "" where they did not."""
        with contextlib.suppress(FileNotFoundError):
            return self.group(group).read(_DIFFERS, 4096).decode(errors="replace")
        return ""

    def end(self, group: str, why: str) -> None:
        """Keep nothing of a front any more, for any process of this user on this host."""
        directory = self.group(group)
        with directory.replacing(_DIFFERS) as descriptor:
            os.write(descriptor, why.encode()[:4096])
        self._remove([(group, name) for name in directory.names() if name not in _NO_ENTRIES])

    def get(self, group: str, key: str) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], float] | None:
        """The bytes of a value and the CPU time that it took; None where it is not there.

        Raises:
            Damaged: it is not what was written; it is removed.
        """
        try:
            descriptor = self.group(group).open_file(key)
        except FileNotFoundError:
            return None
        except OSError as error:  # a link, or something else that nobody puts there
            self._remove([(group, key)])
            raise Damaged(str(error)) from error
        try:
            status = os.fstat(descriptor)
            data = aligned(status.st_size)
            num_read = 0
            while num_read < len(data) and (num := os.readv(descriptor, [data[num_read:].data])):  # of 2 GiB at most
                num_read += num
            if time.time() - status.st_atime > _TOUCH_S:
                os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))
        finally:
            os.close(descriptor)
        if num_read == len(data) >= _HEADER.size:
            magic, checksum, num_bytes, cost_s = _HEADER.unpack_from(data.data)
            value = data[_HEADER.size :]
            if (magic, checksum, num_bytes) == (_MAGIC, checksum_of([value.data]), len(value)):
                return value, cost_s
        self._remove([(group, key)])
        raise Damaged(f"{self._directory.path / group / key} is damaged")

    def put(self, group: str, key: str, parts: Sequence[Part], cost_s: float) -> bool:
        """Keep a value, if its benefit gives it room.

        Raises:
            OSError: it cannot be written.
        """
        views = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
        num_bytes = sum(view.nbytes for view in views)
        if not self._has_room(_HEADER.size + num_bytes, cost_s / num_bytes):
            return False
        checksum = checksum_of(views)
        directory, temporary = self.group(group), temporary_name(key)
        try:
            descriptor = directory.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:  # another thread is at it
            return False
        try:
            try:
                _write(descriptor, [memoryview(_HEADER.pack(_MAGIC, checksum, num_bytes, cost_s)), *views])
            finally:
                os.close(descriptor)
            was_there = directory.has(key)
            directory.rename(temporary, key)
        except BaseException:
            directory.unlink(temporary, missing_ok=True)
            raise
        if not was_there:
            self._add(_HEADER.size + num_bytes)
        return True

    # --- room ------------------------------------------------------------------------------------------------------

    def _total(self) -> int:
        total: int = _ACCOUNT.unpack_from(self._account)[0]
        return total

    def _add(self, num_bytes: int) -> None:
        with self._alone():
            total, refused, until_s = _ACCOUNT.unpack_from(self._account)
            _ACCOUNT.pack_into(self._account, 0, max(0, total + num_bytes), refused, until_s)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._of_threads:
            # Its holder may have been stopped. Without the lock nothing is kept, and the next look counts anew.
            wait_for_lock(self._directory.path / _ACCOUNT_NAME, self._lock, _LOCK_S)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _has_room(self, num_bytes: int, benefit: float) -> bool:
        self._num_put += 1
        if self._is_memory and self._num_put % 64 == 0 and available_bytes() < _LEAST_MEMORY:
            return False
        total, refused, until_s = _ACCOUNT.unpack_from(self._account)
        if total + num_bytes <= self.bound_bytes:
            return True
        if num_bytes > self.bound_bytes or (benefit <= refused and time.monotonic() < until_s):
            return False
        with self._alone():
            began_s = time.monotonic()
            entries = self._entries()
            total = sum(entry.num_bytes for entry in entries)
            need_bytes = total + num_bytes - self.bound_bytes
            refused = -math.inf
            if need_bytes > 0:
                need_bytes += int(self.bound_bytes * _ROOM_SHARE)
                chosen, refused = victims(entries, self._idle(), need_bytes, benefit, time.time())
                self._unlink([(entry.group, entry.name) for entry in chosen])
                total -= sum(entry.num_bytes for entry in chosen)
            now_s = time.monotonic()
            until_s = now_s + max(_LEAST_PAUSE_S, _LOOK_PAUSE * (now_s - began_s))
            _ACCOUNT.pack_into(self._account, 0, total, refused, until_s)
        return bool(total + num_bytes <= self.bound_bytes)

    def _entries(self) -> list[Entry]:
        """All entries; what writers that are gone have left is removed."""
        found = []
        for group in self._directory.names():
            if not self._directory.has_directory(group):
                continue
            with self._directory.enter(group) as directory:
                for name in directory.names():
                    with contextlib.suppress(OSError, struct.error):
                        status = directory.status(name)
                        if is_temporary(name) and time.time() - status.st_mtime > _LEFT_S:
                            directory.unlink(name, missing_ok=True)
                        if name in _NO_ENTRIES or is_temporary(name):
                            continue
                        descriptor = directory.open_file(name)
                        try:
                            cost_s = _HEADER.unpack(os.read(descriptor, _HEADER.size))[3]
                        finally:
                            os.close(descriptor)
                        used_s = max(status.st_atime, status.st_mtime)
                        found.append(Entry(group, name, status.st_size, cost_s / status.st_size, used_s))
        return found

    def _idle(self) -> set[str]:
        """Groups that no process uses."""
        idle = set()
        for group in self._directory.names():
            if self._directory.has_directory(group) and group not in self._groups:
                with self._directory.enter(group) as directory:
                    if _is_free(directory):
                        idle.add(group)
        return idle

    def _remove(self, names: Sequence[tuple[str, str]]) -> None:
        num_bytes = 0
        for group, name in names:
            with contextlib.suppress(OSError):
                num_bytes += self.group(group).status(name).st_size
        self._unlink(names)
        self._add(-num_bytes)

    def _unlink(self, names: Sequence[tuple[str, str]]) -> None:
        for group, name in names:
            with contextlib.suppress(OSError), self._directory.enter(group) as directory:
                directory.unlink(name, missing_ok=True)

    def close(self) -> None:
        """Leave the store: what this process alone has used may be the first to go."""
        self._groups, self._claims = {}, {}
        self._open.close()

    def __del__(self) -> None:
        self.close()


def _write(descriptor: int, pieces: list[memoryview]) -> None:
    while pieces:
        num = os.writev(descriptor, pieces[:_MOST_PIECES])
        while pieces and num >= len(pieces[0]):
            num -= len(pieces.pop(0))
        if num:
            pieces[0] = pieces[0][num:]


def store_path(place: CachePlace) -> Path:
    """The directory of this user's store."""
    return Path("/dev/shm" if place.kind == MEMORY else place.path) / f"hetstream-cache-{os.geteuid()}"


def _is_free(directory: Directory) -> bool:
    """Whether no process uses a store or a group."""
    descriptor = directory.open_file(_USERS, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@functools.cache
def leave_no_memory() -> None:
    """When this program ends, and its processes with it, remove this user's store in memory if no other uses it."""
    util.Finalize(None, remove_from_memory, exitpriority=-100)


def remove_from_memory() -> None:
    """Remove this user's store in memory, if no process uses it."""
    with contextlib.suppress(OSError), Directory.open_safe(store_path(CachePlace(MEMORY)).parent) as memory:
        name = store_path(CachePlace(MEMORY)).name
        with memory.enter(name) as store:
            if not _is_free(store):
                return
            for group in store.names():
                if store.has_directory(group):
                    store.remove_directory(group)
        memory.remove_directory(name)
