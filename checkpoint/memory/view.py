"""The other side of a store: what the checkpoint writer, `gc` and tools do with the store of a trainer, living or dead.

Nothing here changes a generation. A store is removed by who holds its trainer's lock and its checkpoint writer's lock:
nobody lives who could use it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hetstream.base.errors import HetstreamError
from hetstream.base.files import Directory
from hetstream.checkpoint.config import NO_JOB
from hetstream.checkpoint.disk.ownership import read_lineage
from hetstream.checkpoint.errors import DamagedLineage, StoreInUse
from hetstream.checkpoint.locks import FileLock
from hetstream.checkpoint.memory.store_files import (
    FALLBACK,
    SHARED_MEMORY,
    Holder,
    SlotContent,
    StoreFiles,
    WriterStatus,
    list_stores,
    stores_prefix,
)
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.record.lineage import Lineage

_PIPE_BYTES = 1 << 16
# Whoever looks whether a checkpoint writer lives holds its lock for a moment.
_GRACE_S, _POLL_S = 0.1, 0.002


class StoreView:
    """A store as its checkpoint writer sees it. A context manager.

    Args:
        path: the store's directory.

    Raises:
        CheckpointError: it is not there.
        ForeignOwner: it is another user's.
    """

    def __init__(self, path: Path) -> None:
        self.files = StoreFiles(path)
        self.files.check_owner()
        self._writer_lock: FileLock | None = None
        self._pipe = -1

    @property
    def path(self) -> Path:
        """The store's directory."""
        return self.files.path

    @property
    def holder(self) -> Holder:
        """Who has or had the store as its trainer: job, rank, checkpoint directory."""
        return self.files.holder()

    @property
    def closed(self) -> bool:
        """Whether the trainer has ended as it should: what is in memory may go once it is on disk."""
        return self.files.closed.exists()

    @property
    def persisted(self) -> Generation | None:
        """Newest generation that this checkpoint writer or one before it reported as persisted."""
        status = self.files.read_status()
        return status.persisted if status else None

    def trainer_alive(self) -> bool:
        """Return whether the trainer's process lives."""
        return self.files.is_trainer_alive()

    def writer_alive(self) -> bool:
        """Return whether this or another process is the store's checkpoint writer."""
        return self._writer_lock is not None or self.files.is_writer_alive()

    def become_writer(self) -> None:
        """Be the only checkpoint writer of the store until `close`.

        Raises:
            StoreInUse: another process is.
        """
        deadline_s = time.monotonic() + _GRACE_S
        while self._writer_lock is None:
            self._writer_lock = self._try_lock(self.files.writer_lock)
            if self._writer_lock is None:
                if time.monotonic() > deadline_s:
                    raise StoreInUse(
                        f"{self.path} has a checkpoint writer that lives: fuser -v {self.files.writer_lock}"
                    )
                time.sleep(_POLL_S)

    def fileno(self) -> int:
        """To poll for reading: the trainer has published a generation, or has closed the store."""
        if self._pipe < 0:
            # Read and write: without a writer of its own the pipe would report its end over and over.
            self._pipe = os.open(self.files.wake, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        return self._pipe

    def drain(self) -> None:
        """Take off all that has come, so that the next poll waits for something new."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fileno(), _PIPE_BYTES):
                pass

    def generations(self) -> list[SlotContent]:
        """Return the complete generations, newest first."""
        return self.files.complete()

    def ask_to_stop(self, reason: str) -> None:
        """Ask the trainer to save once more and to end: its job will end soon.

        Raises:
            OSError: there is no room.
        """
        self.files.write_stop_reason(reason)

    def report(self, status: WriterStatus) -> None:
        """Tell the trainer, and the checkpoint writer after this one, what has been done."""
        self.files.write_status(status)

    def remove(self) -> bool:
        """Delete the store and free its memory, unless its trainer or another checkpoint writer lives: then False."""
        trainer = self._try_lock(self.files.trainer_lock)
        writer = self._writer_lock or self._try_lock(self.files.writer_lock)
        try:
            if trainer is None or writer is None or not trainer.is_of(self.files.trainer_lock):
                return False
            self.files.delete()
            return True
        finally:
            for lock in (trainer, writer if writer is not self._writer_lock else None):
                if lock:
                    lock.release()

    def close(self) -> None:
        """Stop being the checkpoint writer. A second time does nothing."""
        if self._writer_lock:
            self._writer_lock.release()
            self._writer_lock = None
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def __enter__(self) -> StoreView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try_lock(self, path: Path) -> FileLock | None:
        try:
            return FileLock.try_exclusive(path)
        except FileNotFoundError:
            return None


@dataclass(frozen=True)
class FoundStore:
    """A store of this user, for `gc` and lists.

    Attributes:
        path: its directory.
        holder: who has or had it.
        trainer_alive: whether the trainer lives.
        writer_alive: whether a checkpoint writer lives.
        closed: whether the trainer ended as it should.
        generations: what is in it, newest first.
        persisted: newest generation on disk.
        num_bytes: memory that it takes.
        is_orphaned: the checkpoint directory that it was made for was deleted, and another has its name, such
            as a copy from before.
    """

    path: Path
    holder: Holder
    trainer_alive: bool
    writer_alive: bool
    closed: bool
    generations: list[Generation]
    persisted: Generation | None
    num_bytes: int
    is_orphaned: bool = False


def places(directories: Iterable[Path]) -> list[Path]:
    """Return where stores of these checkpoint directories may be: in shared memory, or where none was to be had. A link
    in the place of the latter was put there by somebody else, and is not followed.
    """
    fallbacks = [directory / FALLBACK for directory in directories]
    return [SHARED_MEMORY, *(path for path in fallbacks if not path.is_symlink())]


def find_stores(roots: Iterable[Path] = (SHARED_MEMORY,)) -> list[FoundStore]:
    """Return the stores of this user below some directories, with those that are half made or half deleted.

    `StoreView(found.path).remove()` deletes one that is nobody's.
    """
    found = []
    for files in (files for root in roots for files in list_stores(root, stores_prefix())):
        try:
            files.check_owner()
        except HetstreamError:
            continue  # it has just gone, or is a foreigner's
        status = files.read_status()
        found.append(
            FoundStore(
                files.path,
                files.holder(),
                files.is_trainer_alive(),
                files.is_writer_alive(),
                files.closed.exists(),
                [content.header.generation for content in files.complete()],
                status.persisted if status else None,
                files.num_bytes(),
                _is_orphaned(files),
            )
        )
    return found


def _is_orphaned(files: StoreFiles) -> bool:
    there = Lineage()
    with contextlib.suppress(OSError, DamagedLineage), Directory.open(files.holder().directory) as root:
        there = read_lineage(root)
    return there.directory_id != "" and not there.knows(files.read_start_id())


# Which stores in memory belong to nobody any more, each with the reason. Pure; called by `hetstream ckpt gc`.
#
# A store is kept while anybody could still use it: a process that holds it, or a job that may go on with it, requeued
# or not. What is in memory alone is given up only if the user says so.


def reason_to_keep(store: FoundStore, jobs: Mapping[str, str] | None, *, discard_unsaved: bool) -> str:
    """Return why a store must stay; "" if it may go.

    Args:
        store: as it was found.
        jobs: Slurm jobs of this user that are not over, id to state; None if Slurm did not say.
        discard_unsaved: give up generations that are not on disk.
    """
    job = store.holder.job
    if store.trainer_alive:
        return f"its trainer lives, pid {store.holder.pid} on {store.holder.host}"
    if store.writer_alive:
        return "its checkpoint writer lives"
    if job != NO_JOB and jobs is None:
        return f"Slurm did not say whether job {job} is over"
    if job != NO_JOB and jobs is not None and job in jobs:
        return f"job {job} is {jobs[job]}"
    newest = store.generations[0] if store.generations else None
    is_unsaved = newest is not None and (store.persisted is None or newest > store.persisted)
    if is_unsaved and not store.is_orphaned and not discard_unsaved:
        return (
            f"{newest} is in memory alone; `hetstream internal writer --once` writes it, --discard-unsaved gives it up"
        )
    return ""


def reason_to_remove(store: FoundStore) -> str:
    """Return why a store that need not stay is nobody's."""
    job = store.holder.job
    owner = "its program is gone" if job == NO_JOB else f"job {job} is over"
    newest = store.generations[0] if store.generations else None
    if newest is None:
        return f"{owner} and it holds nothing"
    if store.persisted is not None and store.persisted >= newest:
        return f"{owner} and {newest} is on disk"
    if store.is_orphaned:
        return f"{owner}; {newest} is of a checkpoint directory that was deleted and made again"
    return f"{owner}; {newest} is given up"
