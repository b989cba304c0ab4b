"""The file that stands for an emulated GPU: its size, its core, and how much memory each process holds.

Each process has a place in the file for as long as it holds the place's lock: the kernel frees the lock, and so the
memory, when the process ends in whatever way, as a driver does. Jobs of several users write to one file. So whose a
place is says the kernel, which knows who holds the lock; who only looks waits for nobody; and no process holds more
than there is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

# What the names of emulated GPUs begin with.
PREFIX = "emulation:"
_HEAD = struct.Struct("<8sqqqq")  # magic, capacity, core, segment, bytes a second over the bus
_PLACE = struct.Struct("<qq")  # process, bytes held
_PLACES = 32
_FLOCK = struct.Struct("hhqqi0q")  # kind, whence, start, length, process: struct flock of fcntl(2) on 64 bits
# Whoever counts has the lock for microseconds.
_WAIT_S, _LOOK_S = 10.0, 0.001
_MAGIC = b"HGEMU001"
SIZE_BYTES = _HEAD.size + _PLACES * _PLACE.size


def resolved(gpu: str) -> str:
    """Return a GPU's one name: an emulated one's has its file's own path, however somebody has written it."""
    path = gpu.removeprefix(PREFIX)
    return gpu if path == gpu else f"{PREFIX}{os.path.realpath(path)}"


class EmulatedGpuFile:
    """One emulated GPU.

    Args:
        path: of the file.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(path)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            head = self._head = os.pread(self._descriptor, _HEAD.size, 0)
            if len(head) != _HEAD.size or not head.startswith(_MAGIC):
                raise ValueError(f"{os.fspath(path)} is no emulated GPU")
            _, self.capacity_bytes, self.core, self.segment_bytes, self.bus_bytes_per_s = _HEAD.unpack(head)
            if min(self.capacity_bytes, self.segment_bytes, self.bus_bytes_per_s) <= 0 or self.core < 0:
                raise ValueError(f"{os.fspath(path)} is no emulated GPU: a size in it is not above 0")
        except (OSError, ValueError):
            os.close(self._descriptor)
            raise
        self._own: int | None = None
        self._held_bytes = 0

    @staticmethod
    def create(path: Path, *, capacity_bytes: int, core: int, segment_bytes: int, bus_bytes_per_s: int) -> None:
        """Make a GPU that nobody uses.

        Raises:
            FileExistsError: something has this name, and stays as it is.
            OSError: the file cannot be made.
        """
        head = _HEAD.pack(_MAGIC, capacity_bytes, core, segment_bytes, bus_bytes_per_s)
        with path.open("xb") as file:
            try:
                file.write(head + bytes(SIZE_BYTES - len(head)))
                file.flush()
            except OSError:  # half a file would stand in the way of the next attempt
                path.unlink()
                raise

    def take(self, num_bytes: int) -> bool:
        """Hold more; whether there was so much."""
        with self._locked():
            if self._own is None:
                self._own = self._free_place()
            if sum(held for _, held in self._living()) + num_bytes > self.capacity_bytes:
                return False
            self._hold(self._held_bytes + num_bytes)
        return True

    def give(self, num_bytes: int) -> None:
        """Hold less."""
        with self._locked():
            self._hold(self._held_bytes - num_bytes)

    def held_by(self, pid: int) -> int:
        """Return what a process holds."""
        return sum(held for holder, held in self._living() if holder == pid)

    def held(self) -> dict[int, int]:
        """Return what each process holds, without a wait.

        Raises:
            OSError: the file is gone.
            ValueError: it is no emulated GPU any more, or another one has its name, as a GPU may fall off its bus.
        """
        held: dict[int, int] = {}
        if not os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
            raise ValueError("another file has its name")
        if os.fstat(self._descriptor).st_size != SIZE_BYTES or os.pread(self._descriptor, _HEAD.size, 0) != self._head:
            raise ValueError("its file is no emulated GPU any more")
        for pid, num_bytes in self._living():
            held[pid] = held.get(pid, 0) + num_bytes
        return held

    def close(self) -> None:
        """Hold nothing any more."""
        os.close(self._descriptor)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        until_s = time.monotonic() + _WAIT_S
        while not self._try_lock(1, 0):
            if time.monotonic() > until_s:
                raise OSError(f"process {self._locker(1, 0)} does not give back the lock of {self._path}: end it")
            time.sleep(_LOOK_S)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 0)

    def _hold(self, num_bytes: int) -> None:
        assert self._own is not None
        self._held_bytes = num_bytes
        os.pwrite(self._descriptor, _PLACE.pack(os.getpid(), num_bytes), _offset(self._own))

    def _free_place(self) -> int:
        for number in range(_PLACES):
            if self._try_lock(_PLACE.size, _offset(number)):
                os.pwrite(self._descriptor, _PLACE.pack(os.getpid(), 0), _offset(number))
                return number
        raise OSError(f"an emulated GPU has no more than {_PLACES} processes")

    def _living(self) -> Iterator[tuple[int, int]]:
        """Processes that hold memory, and how much."""
        for number in range(_PLACES):
            place = os.pread(self._descriptor, _PLACE.size, _offset(number)).ljust(_PLACE.size, b"\0")
            _, held = _PLACE.unpack(place)
            pid = os.getpid() if number == self._own else self._locker(_PLACE.size, _offset(number))
            if held > 0 and pid:
                yield pid, min(held, self.capacity_bytes)

    def _try_lock(self, num_bytes: int, start: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, num_bytes, start)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _locker(self, num_bytes: int, start: int) -> int:
        """Which other process has a lock there; 0 if none has."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, num_bytes, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_GETLK, asked))
        return 0 if kind == fcntl.F_UNLCK else int(pid)


def _offset(number: int) -> int:
    return _HEAD.size + number * _PLACE.size
