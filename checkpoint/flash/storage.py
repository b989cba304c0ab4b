"""Where one rank's checkpoints are: its store in memory, the directory on disk, and the checkpoint writer between them.

Called by the checkpointer of every rank. A job owns the directory from its start; one that takes over from another job
owns it only when it restores (`ownership.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.config import job_and_component, job_has_writers, takes_over
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.errors import NotOnDisk
from hetstream.checkpoint.flash.candidates import RestoreCandidates, Sources
from hetstream.checkpoint.flash.host import find_host
from hetstream.checkpoint.flash.options import CheckpointOptions
from hetstream.checkpoint.flash.ownership import DirectoryOwnership, JobHandover, other_hosts_of
from hetstream.checkpoint.flash.ranks import Communicator, from_rank_0, together
from hetstream.checkpoint.flash.source import MemorySource
from hetstream.checkpoint.flash.writer_link import WriterLink
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import FALLBACK, StoreFiles, StoreIdentity, make_fallback
from hetstream.checkpoint.memory.store_recovery import newest_attempt
from hetstream.checkpoint.policy.retention import Retention
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.record.lineage import Lineage

_log = logging.getLogger(__name__)

# How often `check_health` looks.
_CHECK_S = 1.0


class CheckpointStorage:
    """The memory, the directory and the checkpoint writer of one rank. Every rank opens it at the same point.

    Args:
        path: of the directory.
        keep: which checkpoints stay on disk.
        ranks: of the job.
        options: of the checkpointer.

    Attributes:
        directory: of the checkpoints.
        handover: how this job comes to the directory, and gives it to the next.
        store: of this rank, in memory.
        writer: brings to disk what is in the store.
        host: which ranks share this one's host.
        is_open: `begin_closing` has not been called.
    """

    def __init__(
        self, path: str | os.PathLike[str], keep: Retention, ranks: Communicator, options: CheckpointOptions
    ) -> None:
        job, component = job_and_component()
        self._ranks = ranks
        self._options = options
        self.directory = CheckpointDirectory(path)
        identity = JobIdentity.of_this_process(f"{job}+{component}" if component else job)
        self.handover = JobHandover(self.directory, identity, keep, takes_over(), options.hand_over_timeout_s)
        self._fallback = (options.fallback or self.directory.path / FALLBACK).absolute()
        self._others = other_hosts_of(self.directory, ranks.rank, options)
        self._ownership = DirectoryOwnership(self.directory, ranks, self.handover, self._others)
        self._checked_s = 0.0
        self.is_open = True
        store = StoreIdentity(job, component, ranks.rank, self.directory.path)
        with contextlib.ExitStack() as undo:
            self._ownership.begin(newest_attempt(store, (options.shared_memory.absolute(), self._fallback)))
            undo.callback(self.directory.release)
            self.store = self._open_store(dataclasses.replace(store, lineage=self._ownership.lineage))
            undo.callback(self.store.close)
            self.writer = WriterLink(self.store, self.directory.path)
            if self._others:
                self.store.when_renewed.append(self._others.on_renewed)
            self._ownership.settle(self.store)
            self.host = find_host(ranks, self.store, self.directory.path)
            self.writer.start(job_has_writer=job_has_writers())
            undo.pop_all()
        self._memory = MemorySource(self.store, self.host)

    def _open_store(self, identity: StoreIdentity) -> Store:
        options = self._options

        def open_here() -> Store:
            if options.fallback is None:
                make_fallback(self.directory.path)
            return Store.open(identity, options.num_slots, options.shared_memory.absolute(), self._fallback)

        return together(self._ranks, open_here, undo=Store.close)

    @property
    def attempt(self) -> int:
        """Number of this start of the training; 0: another job has the directory, until this one takes it over."""
        return self._ownership.attempt

    def populate(self) -> None:
        """Map and read what an earlier start of the job left in memory, while the program makes its model."""
        self.store.populate()
        self._memory.read_ahead()

    def check_health(self) -> None:
        """See, about once a second, whether somebody has deleted the store, and whether the checkpoint writer fails."""
        if time.monotonic() > self._checked_s + _CHECK_S:
            self._checked_s = time.monotonic()
            self.store.renew_if_deleted()
            self.writer.check(between_saves=True)

    def stop_reason(self) -> str:
        """Why the job's checkpoint writer asks the program to end; "" while it does not."""
        return self.store.stop_reason() if self.is_open else ""

    # Owning the directory

    def check_owner(self) -> None:
        """Refuse to save before the directory is taken over.

        Raises:
            OptionsError: another job has it.
        """
        if not self.attempt:
            raise OptionsError("restore() or load() comes first in a job that takes over from another")

    def become_owner(self) -> None:
        """Own the directory, and have a store that nobody has deleted.

        A job that takes over from another asks it to stop here, and waits until it has.
        """
        self.store.renew_if_deleted()
        if not self.attempt:
            self._ownership.take_over(self.store)
        # Other ranks of the host look into this rank's store, which may be another one than at the start.
        self._memory.host = self.host = find_host(self._ranks, self.store, self.directory.path)

    def go_back(self, start: Generation, *, has_saved: bool) -> None:
        """Leave behind all that is newer than a generation; see `DirectoryOwnership.go_back`."""
        self._ownership.go_back(start, self.store, has_saved=has_saved)

    # What there is to restore

    def candidates(self) -> RestoreCandidates:
        """What the owner of the directory can restore from.

        Raises:
            DirectoryReplaced: another directory has taken the place of the one that this training began in.
        """
        self._ownership.check_directory()
        sources = Sources(self.directory, self._memory, self._others, self.host)
        return RestoreCandidates(self._ranks, sources, self._ownership.lineage)

    def candidates_on_disk(self) -> RestoreCandidates:
        """What is in the directory while another job owns it."""
        lineage = from_rank_0(self._ranks, self.directory.lineage, Lineage)
        return RestoreCandidates(self._ranks, Sources(self.directory), lineage)

    # Ending

    def mark_closed(self) -> None:
        """The process dies: tell the checkpoint writer that the memory may go once it is on disk."""
        if self.is_open:
            with contextlib.suppress(OSError):
                self.store.mark_closed()

    def begin_closing(self) -> None:
        """Watch the checkpoint writer no more."""
        self.is_open = False
        self.writer.end()

    def close(self, unsaved: Generation | None, *, keep_memory: bool, hands_over: bool) -> None:
        """Bring the newest generation to disk, and give up the store and the directory.

        Args:
            unsaved: what this rank saved last, until a job's checkpoint writer has it on disk; None: do not wait.
            keep_memory: leave the generations in memory for the next start.
            hands_over: another job goes on with the training.

        Raises:
            NotOnDisk: after all else: the newest generation could not be written.
        """
        timeout_s, is_owner = self._options.close_timeout_s, self.attempt > 0 and not hands_over
        self.store.renew_if_deleted()
        if not keep_memory and not self.writer.has_writer():
            _log.error("the newest generation stays in memory, as there is no checkpoint writer: %s", self.store.path)
            keep_memory = True
        if unsaved and not keep_memory:
            self.writer.await_job_writer(unsaved, timeout_s)
        self.store.close(keep=keep_memory, keep_unsaved=True)
        self.writer.await_end(timeout_s)
        self._ownership.end()
        if is_owner:
            with contextlib.suppress(OSError):
                self._fallback.rmdir()  # unless it is used, or the user's
        if unsaved and not keep_memory:
            self._check_written(unsaved)

    def _check_written(self, unsaved: Generation) -> None:
        """See that a generation is on disk, now that no checkpoint writer of this rank's own is left.

        Raises:
            NotOnDisk: it could not be written.
        """
        files = StoreFiles(self.store.path)
        if not files.path.is_dir() or not files.has_unsaved():
            return
        status = files.read_status()
        why = status.error if status else ""
        if files.is_writer_alive() and not why:
            return  # the job's, which goes on with it
        raise NotOnDisk(
            f"{unsaved} is not on disk: {why or 'its checkpoint writer is gone'}. It stays in the memory of this host, "
            f"{files.path}, as long as the job does. Make room; then write it with hetstream internal writer --once, "
            "or start the program again here"
        )
