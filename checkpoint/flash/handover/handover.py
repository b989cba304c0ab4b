"""A job's part in seamless migration: `acquisition.py` is the successor's way in, here is the owner's way out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.handover_request import living_request, read_request
from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.faults import reach
from hetstream.checkpoint.flash.handover.acquisition import DirectoryAcquisition
from hetstream.checkpoint.policy.handover import Asked, answer
from hetstream.checkpoint.policy.retention import Retention
from hetstream.checkpoint.record.generation import Generation

_log = logging.getLogger(__name__)

_POLL_S = 0.01


class JobHandover(DirectoryAcquisition):
    """From its predecessor up to its successor; plugged into a checkpointer as its `Succession`.

    Args:
        directory: of the checkpoints.
        identity: of this process.
        keep: which checkpoints stay.
        takes_over: Slurm's id of the job whose training this one takes over; "" if none.
        timeout_s: how long to wait for that job, once asked.

    Attributes:
        successor: to whom to hand over, once somebody asks.
    """

    def __init__(
        self, directory: CheckpointDirectory, identity: JobIdentity, keep: Retention, takes_over: str, timeout_s: float
    ) -> None:
        super().__init__(directory, identity, keep, takes_over, timeout_s)
        self.successor: JobIdentity | None = None
        self._said = ""

    def note_restored(self, step: int) -> None:
        """Write down how long nobody trained, if this start took over."""
        if not self.has_waited:
            return
        self.has_waited = False
        event = self._directory.take_over(self.identity)
        if event.pause_s is None:
            _log.warning(
                "the job that was asked to hand over ended without saving: this one goes on from step %d", step
            )
            return
        _log.info("took over after step %d: nobody trained for %.2f s", step, event.pause_s)
        if event.step != step:
            _log.warning("step %s was handed over, and step %d is what could be restored", event.step, step)

    def asked(self) -> str:
        """Why to stop: another job asks to go on; "" while none does."""
        path = self._directory.path
        request = read_request(path)
        if request is None:
            return ""
        is_live = living_request(path) is not None
        found = answer(self._directory.attempt, Asked(request.attempt, str(request.successor), is_live))
        if found.hands_over:
            reach("handover.heard")
            self.successor = request.successor
            _log.info("%s: the next save is the last one here: %s", path, found.reason)
            return found.reason
        if found.reason != self._said:
            self._said = found.reason
            _log.info("%s is not handed over: %s", path, found.reason)
        return ""

    def hand_over(
        self, saved: Generation, last_step_s: float, timeout_s: float, has_writer: Callable[[], bool]
    ) -> None:
        """Give the directory up as soon as what the successor needs is on disk; the rest can wait. See `Succession`."""
        assert self.successor is not None
        deadline_s = time.monotonic() + timeout_s
        # What is committed: this rank's checkpoint writer hears of it later where another one comes last.
        while (newest := self._directory.newest()) is None or newest < saved:
            if time.monotonic() > deadline_s or not has_writer():
                _log.error("%s is not on disk, and %s goes on without it", saved, self.successor)
                break
            time.sleep(_POLL_S)
        reach("handover.saved")
        self._directory.hand_over(self.successor, saved.step, last_step_s)
        pause_s = time.time() - last_step_s
        _log.info("handed over to %s, %.2f s after the end of step %d", self.successor, pause_s, saved.step)
