"""One copy of each pickled pipeline for all processes of a data worker: fetched once, and mapped by each.

What is shared here are bytes, never objects: each process unpickles for itself, so what a dataset opens in
`__setstate__` is its own. (Where it opens nothing, `fork_server.py` loads it for all.) Arrays and tensors lie in the
mapped memory, which a process copies page by page as it writes to it.

The memory belongs to no name: it is made by the supervisor before it forks, and is gone with the last process. Who has
mapped a slot holds a lock on it, which the kernel takes away at the process's end; a slot that nobody has locked is
used again. A process that is stopped keeps its locks; the others do not wait for it, but fetch for themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from hetstream.mpi_dataworkers.children import is_stopped
from hetstream.mpi_dataworkers.ops.pickled_pipeline import PickledPipeline
from hetstream.mpi_dataworkers.wire.messages import ProvidePipeline
from hetstream.mpi_dataworkers.wire.pipeline_transfer import buffers_in, places_of, read_into

_NUM_SLOTS = 16
# A small pickled pipeline stays for processes that come later.
_KEEP_UNUSED_BYTES = 1 << 20
# Of a slot: the pipeline's id, written last; the bytes of the message without its contents.
_NAME_BYTES = 64
_LENGTH_BYTES = 8
# Of the turn: the process that had it last.
_PID_BYTES = 8
_LOOK_AGAIN_S = 0.02


class Exchange:
    """The slots, shared by a supervisor and its children; made before the fork.

    Args:
        num_slots: pipelines that can be kept at a time; what comes when all are in use is kept by one process alone.
    """

    def __init__(self, num_slots: int = _NUM_SLOTS) -> None:
        self._turn = os.memfd_create("hetstream-turn")
        self._slots = [_own_memory() for _ in range(num_slots)]

    @contextlib.contextmanager
    def alone(self, should_stop: Callable[[], bool]) -> Iterator[bool]:
        """Wait until no other process of this data worker fetches a pickled pipeline, or the one that does is stopped.

        Gives:
            Whether the others wait for this one.
        """
        own = _opened(self._turn)
        try:
            while not (turn := _locked(own, fcntl.LOCK_EX)) and not should_stop() and not self._is_held_up():
                time.sleep(_LOOK_AGAIN_S)
            if turn:
                os.pwrite(own, os.getpid().to_bytes(_PID_BYTES, "little"), 0)
            yield turn
        finally:
            os.close(own)

    def _is_held_up(self) -> bool:
        """Whether the process whose turn it is, or was a moment ago, does not run."""
        return is_stopped(int.from_bytes(os.pread(self._turn, _PID_BYTES, 0), "little"))

    def find(self, pipeline_id: str) -> PickledPipeline | None:
        """Map a pickled pipeline that is here."""
        for slot in self._slots:
            if _name_of(slot) != pipeline_id:
                continue
            own = _opened(slot)
            try:
                if _locked(own, fcntl.LOCK_SH) and _name_of(own) == pipeline_id:
                    return _mapped(own)
            finally:
                os.close(own)
        return None

    def keep(self, message: ProvidePipeline, directory: Path, shared: bool = True) -> PickledPipeline:
        """Put a pickled pipeline here and map it. Call it inside `alone`.

        Args:
            message: as it came.
            directory: where large pickled pipelines lie, the service's `pipelines_dir`.
            shared: the other processes wait for this one; else it keeps the pickled pipeline for itself.

        Raises:
            HandoverFailed: its bytes cannot be had.
        """
        own = self._free_slot() if shared else _own_memory()
        try:
            _fill(own, message, directory)
            # As `alone` holds the others back, none comes between the two locks.
            fcntl.flock(own, fcntl.LOCK_SH)
            return _mapped(own)
        finally:
            os.close(own)

    def _free_slot(self) -> int:
        """A slot that this process has locked, or memory of its own. Gives the memory of unused large ones back."""
        free = [own for own in map(_opened, self._slots) if _locked_or_closed(own)]
        facts = {own: os.fstat(own) for own in free}
        chosen = min(free, key=lambda own: (facts[own].st_size > 0, facts[own].st_mtime), default=-1)
        for own in free:
            if own == chosen or facts[own].st_size > _KEEP_UNUSED_BYTES:
                os.ftruncate(own, 0)
            if own != chosen:
                os.close(own)
        return chosen if chosen >= 0 else _own_memory()

    def give_back(self, pipeline_id: str) -> None:
        """Free the memory of a pickled pipeline, unless a process has it mapped."""
        for slot in self._slots:
            if _name_of(slot) != pipeline_id:
                continue
            own = _opened(slot)
            try:
                if _locked(own, fcntl.LOCK_EX) and _name_of(own) == pipeline_id:
                    os.ftruncate(own, 0)
            finally:
                os.close(own)

    def close(self) -> None:
        """Give it all back; what is mapped stays for as long as it is used."""
        for descriptor in (self._turn, *self._slots):
            os.close(descriptor)


def _own_memory() -> int:
    return os.memfd_create("hetstream-pipeline")


def _opened(descriptor: int) -> int:
    """Open the file anew: locks belong to an open file, and the inherited one is common to all processes."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def _locked_or_closed(own: int) -> bool:
    if _locked(own, fcntl.LOCK_EX):
        return True
    os.close(own)
    return False


def _locked(own: int, kind: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(own, kind | fcntl.LOCK_NB)
        return True
    return False


def _name_of(slot: int) -> str:
    return os.pread(slot, _NAME_BYTES, 0).rstrip(b"\0").decode()


def _fill(own: int, message: ProvidePipeline, directory: Path) -> None:
    contents = message.contents
    without_data = msgspec.structs.replace(contents, data=b"")
    head = msgspec.msgpack.encode(msgspec.structs.replace(message, contents=without_data))
    start = _start_of(len(head))
    num_bytes = places_of(contents.sizes)[-1]
    os.ftruncate(own, start + num_bytes)
    with mmap.mmap(own, start + num_bytes) as whole, memoryview(whole) as view, view[start:] as room:
        view[_NAME_BYTES : _NAME_BYTES + _LENGTH_BYTES] = len(head).to_bytes(_LENGTH_BYTES, "little")
        view[_NAME_BYTES + _LENGTH_BYTES : _NAME_BYTES + _LENGTH_BYTES + len(head)] = head
        read_into(room, contents, directory)
    os.pwrite(own, message.pipeline_id.encode().ljust(_NAME_BYTES, b"\0"), 0)


def _start_of(head_bytes: int) -> int:
    """Where the buffers start: on a page, behind the head."""
    return -(-(_NAME_BYTES + _LENGTH_BYTES + head_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE


def _mapped(own: int) -> PickledPipeline:
    """Map a full slot; what is written to the memory is seen by this process alone.

    The mapping has a descriptor of the same open file, so the lock is held for as long as an array lies in the memory.
    """
    whole = memoryview(mmap.mmap(own, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    head_bytes = int.from_bytes(whole[_NAME_BYTES : _NAME_BYTES + _LENGTH_BYTES], "little")
    head = whole[_NAME_BYTES + _LENGTH_BYTES :][:head_bytes]
    message = msgspec.msgpack.decode(head, type=ProvidePipeline)
    buffers = buffers_in(whole[_start_of(head_bytes) :], message.contents)
    blob = buffers.pop(0) if message.contents.with_blob else message.blob
    return PickledPipeline(message.pipeline_id, message.program, message.settings, blob, buffers, message.shared)
