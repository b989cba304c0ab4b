"""Where one rank's checkpoints are: its store in memory, the directory on disk, and the checkpoint writer between them.

Called by the checkpointer of every rank. A job owns the directory from its start; one that takes over from another job
owns it only when it restores (`ownership.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hetstream.base.errors import HetstreamError, OptionsError
from hetstream.checkpoint.config import job_and_component, job_has_writers, takes_over
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.errors import NotOnDisk
from hetstream.checkpoint.flash.candidates import RestoreCandidates, Sources
from hetstream.checkpoint.flash.options import CheckpointOptions
from hetstream.checkpoint.flash.ownership import DirectoryOwnership, JobHandover, other_hosts_of
from hetstream.checkpoint.flash.ranks import Communicator, find_host, from_rank_0, together
from hetstream.checkpoint.flash.sources import MemorySource
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import FALLBACK, StoreFiles, StoreIdentity, make_fallback
from hetstream.checkpoint.memory.store_recovery import newest_attempt
from hetstream.checkpoint.persist.writer import spawn_writer
from hetstream.checkpoint.policy import Retention
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.record.lineage import Lineage

_log = logging.getLogger(__name__)

_POLL_S = 0.005
# A job's checkpoint writer step starts with the job, and not always before its trainers.
_JOB_WRITER_TIMEOUT_S = 30.0
_WATCH_S = 0.5
_RESTART_LIMIT_S = 60.0
_SAY_WAITING_S = 30.0
# A job's checkpoint writer outlives the program, and may wait for ranks that never come: `close` does not wait for it
# for ever.
_JOB_WRITER_CLOSE_S = 60.0


class WriterLink:
    """The checkpoint writer that brings one rank's store to disk.

    Args:
        store: of this rank.
        directory: of the checkpoints.

    Attributes:
        process: the checkpoint writer that this trainer has started; None where the job has one.
    """

    def __init__(self, store: Store, directory: Path) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._former: list[subprocess.Popen[bytes]] = []
        self._store = store
        self._directory = directory
        self._is_ended = threading.Event()
        self._num_started = 0
        self._started_s = 0.0
        self._said_error = ""
        store.when_renewed.append(self._renew)

    def start(self, *, job_has_writer: bool) -> None:
        """Have a checkpoint writer: a job's own if it comes, else one of this trainer."""
        if job_has_writer:
            threading.Thread(target=self._watch, name="checkpoint writer watch", daemon=True).start()
        else:
            self._spawn()

    def _renew(self) -> None:
        """The store has been made anew in another directory. A job's checkpoint writer finds it. One of our own has
        nothing more to write and ends: start another."""
        if self.process:
            self._former.append(self.process)
            self._spawn()

    def end(self) -> None:
        """Watch no more; the store is about to be closed."""
        self._is_ended.set()

    def check(self, *, between_saves: bool = False) -> None:
        """Log what the checkpoint writer has failed at since the last check, and replace one that has died.

        Args:
            between_saves: no save waits for it, so one that dies again and again is replaced less and less often.
        """
        pause_s = min(_RESTART_LIMIT_S, 2.0**self._num_started) if between_saves else 0.0
        self._former = [process for process in self._former if process.poll() is None]
        status = self._store.status()
        error = status.error if status else ""
        is_due = time.monotonic() >= self._started_s + pause_s
        if is_due and self.process and self.process.poll() is not None and not self._store.is_writer_alive():
            _log.error("the checkpoint writer has ended with code %d: another is started", self.process.returncode)
            self._spawn()
        if error and error != self._said_error:
            _log.error("checkpoints do not get to disk, training goes on with those in memory: %s", error)
        self._said_error = error

    def has_writer(self) -> bool:
        """Return whether a writer will bring what is in memory to disk, once it has started; true if there is
        nothing.
        """
        if not self._store.held():
            return True
        for _ in range(2):
            while self.process and self.process.poll() is None and not self._store.is_writer_alive():
                time.sleep(_POLL_S)
            if self._store.is_writer_alive():
                return True
            self._spawn()
        return False

    def wait_for(self, wanted: Generation, timeout_s: float | None) -> bool:
        """Wait until a generation is on disk; whether it is.

        Args:
            wanted: this one, or a newer.
            timeout_s: for how long; None: until it is, or nobody is there who could bring it to disk, or the directory
                is gone.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._has_persisted(wanted):
            self._store.renew_if_deleted()
            is_late = deadline_s is not None and time.monotonic() > deadline_s
            status = self._store.status()
            is_lost = status is not None and status.is_lost
            # Until the store is closed, a job's checkpoint writer that is not there may still come, or one of our own.
            may_come = self.process.poll() is None if self.process else not self._is_ended.is_set()
            is_gone = not may_come and not self._store.is_writer_alive()
            if is_late or is_lost or is_gone:
                return self._has_persisted(wanted)
            time.sleep(_POLL_S)
        return True

    def await_job_writer(self, newest: Generation, timeout_s: float | None) -> None:
        """Wait for a job's checkpoint writer, if there is one: once the job's script ends, it has only KillWait left.

        Args:
            newest: what it is to bring to disk.
            timeout_s: for how long; None: a minute. It goes on afterwards, for as long as the job does.
        """
        if self.process:
            return
        timeout_s = _JOB_WRITER_CLOSE_S if timeout_s is None else timeout_s
        if not self.wait_for(newest, timeout_s):
            _log.warning(
                "%s is not on disk yet after %g s; the job's checkpoint writer goes on with it", newest, timeout_s
            )

    def await_end(self, timeout_s: float | None) -> None:
        """Wait for our own checkpoint writer once the store is closed: Slurm kills what runs when a job step ends.

        Args:
            timeout_s: for how long; None: until it ends.
        """
        if self._store.is_left:
            # Its checkpoint writer was there a moment ago, and has ended since.
            self._spawn()
        for process in [*self._former, *([self.process] if self.process else [])]:
            self._await_process(process, timeout_s)

    def _await_process(self, process: subprocess.Popen[bytes], timeout_s: float | None) -> None:
        began_s = time.monotonic()
        while True:
            try:
                process.wait(_SAY_WAITING_S if timeout_s is None else min(_SAY_WAITING_S, timeout_s))
            except subprocess.TimeoutExpired:
                waited_s = time.monotonic() - began_s
                _log.warning("the newest checkpoint has been on its way to disk for %.0f s", waited_s)
                if timeout_s is not None and waited_s >= timeout_s:
                    return
            else:
                return

    def _has_persisted(self, wanted: Generation) -> bool:
        status = self._store.status()
        return status is not None and status.persisted is not None and status.persisted >= wanted

    def _watch(self) -> None:
        # It may come late, and it may die: then nobody would bring anything to disk, and nobody would say so.
        seen_s = time.monotonic()
        while not self._is_ended.is_set():
            if self._store.is_writer_alive():
                seen_s = time.monotonic()
            elif time.monotonic() > seen_s + _JOB_WRITER_TIMEOUT_S:
                _log.warning(
                    "the job's checkpoint writer has been gone for %g s: the trainer starts its own",
                    _JOB_WRITER_TIMEOUT_S,
                )
                self._spawn()
                return
            self._is_ended.wait(_WATCH_S)

    def _spawn(self) -> None:
        self._num_started += 1
        self._started_s = time.monotonic()
        try:
            self.process = spawn_writer(self._store.path, self._directory)
        except HetstreamError as error:
            _log.error("checkpoints stay in memory: %s", error)


# Threads that make memory for checkpoints ready beside the program, one after the other.


class Background:
    """Runs functions beside the program, in the order in which they were started.

    A failure is logged and no more: the next save allocates what is missing.
    """

    def __init__(self) -> None:
        self._newest: threading.Thread | None = None

    def start(self, act: Callable[[], None]) -> None:
        """Do something once what was started before is done."""
        self.start_planned(act, lambda: ())

    def start_planned(self, act: Callable[..., None], plan: Callable[[], tuple[int, ...]]) -> None:
        """Plan something at once, and do it once what was started before is done.

        Args:
            act: what to do.
            plan: gives the arguments of `act`.
        """
        former = self._newest
        begin = threading.Event()

        def work() -> None:
            begin.wait()  # `Thread.start` returns once this thread lets go of the GIL, so it does that first
            try:
                arguments = plan()
                if former:
                    former.join()
                act(*arguments)
            except (HetstreamError, OSError) as error:
                _log.warning("there is no memory for checkpoints yet: %s", error)

        self._newest = threading.Thread(target=work, name="checkpoint memory", daemon=True)
        self._newest.start()
        begin.set()

    def wait(self) -> None:
        """Until all of it is done."""
        if self._newest:
            self._newest.join()


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
        """Return why the job's checkpoint writer asks the program to end; "" while it does not."""
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
        """Return what the owner of the directory can restore from.

        Raises:
            DirectoryReplaced: another directory has taken the place of the one that this training began in.
        """
        self._ownership.check_directory()
        sources = Sources(self.directory, self._memory, self._others, self.host)
        return RestoreCandidates(self._ranks, sources, self._ownership.lineage)

    def candidates_on_disk(self) -> RestoreCandidates:
        """Return what is in the directory while another job owns it."""
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
