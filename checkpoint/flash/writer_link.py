"""A trainer's link to its checkpoint writer: sees that there is one, logs its errors, waits until it is done.

Called by the checkpointer. A trainer waits for the job's checkpoint writer; where the job has none, it starts its own.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hetstream.base.errors import HetstreamError
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.persist.writer import spawn_writer
from hetstream.checkpoint.record.layout import Generation

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
        """Whether a writer will bring what is in memory to disk, once it has started; true if there is nothing."""
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
