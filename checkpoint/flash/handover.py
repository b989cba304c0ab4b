"""A job's part in seamless migration: `handover.py` is the successor's way in, here is the owner's way out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import Claim, JobIdentity, living_request, read_request
from hetstream.checkpoint.errors import DirectoryInUse, reach
from hetstream.checkpoint.policy.handover import Action, Asked, Seen, Taking, answer, decide
from hetstream.checkpoint.policy.retention import Retention
from hetstream.checkpoint.record.layout import Generation

# Seamless migration, from the trainers' side: a job goes on in place of another that trains until this one is ready.
#
#     the successor                                            the owner
#     starts, imports, makes its model                     trains
#     restore(): asks, and waits for the directory's lock  sees it in should_save, which says True: the last save
#                                                          stopping is True; the loop ends; close(): on disk, lock free
#     has the lock, restores what was handed over          ends
#     trains
#
# `DirectoryAcquisition` is how the successor gets the directory, and how every start does; `handover.py` is
# the owner's look at who asks, and its end. What they decide is in `policy/handover.py`,
# the files are those of `checkpoint/disk/ownership.py`.

_log = logging.getLogger(__name__)

_ACQUISITION_POLL_S = 0.02
# So long one call of `acquire` waits: then the other ranks, which wait in a collective operation, are told so.
_MAX_WAIT_S = 1.0
_SAY_WAITING_S = 10.0
_ADVICE = "two jobs cannot share a checkpoint directory: end that job (scancel), or choose another directory"


class DirectoryAcquisition:
    """Rank 0's way into a checkpoint directory, which another job may still have.

    Args:
        directory: which.
        identity: of this process.
        keep: which checkpoints stay.
        takes_over: Slurm's id of the job whose training this one takes over; "" if none.
        timeout_s: how long to wait for that job, once asked.

    Attributes:
        has_waited: the directory came from a living job.
    """

    def __init__(
        self, directory: CheckpointDirectory, identity: JobIdentity, keep: Retention, takes_over: str, timeout_s: float
    ) -> None:
        self.has_waited = False
        self.identity = identity
        self._directory = directory
        self._keep = keep
        self._takes_over = takes_over
        self._timeout_s = timeout_s
        self._claim: Claim | None = None
        self._asked_attempt = 0
        self._asked_s = self._said_s = 0.0

    def acquire(self, above: int, *, is_ready: bool) -> int:
        """Become the owner, or ask the one that this job takes over. See `Succession`.

        Raises:
            DirectoryInUse: it is another job's than that which is taken over, which also did not stop in time.
        """
        until_s = time.monotonic() + _MAX_WAIT_S
        while True:
            refused = ""
            other = self._other_successor()
            if not other:
                try:
                    attempt = self._directory.acquire(self.identity, self._keep, above)
                except DirectoryInUse as error:
                    refused = str(error)
                else:
                    self.withdraw()
                    return attempt
            try:
                waits = self._waits(other, refused, is_ready=is_ready)
            except BaseException:
                self.withdraw()
                raise
            if not waits or time.monotonic() > until_s:
                return 0
            time.sleep(_ACQUISITION_POLL_S)

    def withdraw(self) -> None:
        """Ask no more: the directory is ours, or this job ends."""
        if self._claim:
            self._claim.withdraw()
        self._claim = None

    def _other_successor(self) -> str:
        request = living_request(self._directory.path)
        return str(request.successor) if request and request.successor != self.identity else ""

    def _waits(self, other: str, refused: str, *, is_ready: bool) -> bool:
        """Do what is to be done about a directory that could not be taken; whether to try again at once."""
        owner, path, now_s = self._directory.owner(), self._directory.path, time.monotonic()
        decision = decide(
            Taking(
                self._takes_over,
                is_ready,
                self._asked_attempt,
                now_s - self._asked_s if self._asked_attempt else 0.0,
                self._timeout_s,
            ),
            Seen(
                owner.identity.job.partition("+")[0] if owner else "",
                str(owner.identity) if owner else "",
                owner.attempt if owner else 0,
                other,
            ),
        )
        if decision.action is Action.REFUSE:
            named = other or self._takes_over
            raise DirectoryInUse(f"{path}: {decision.reason}; {_ADVICE}" if named else refused)
        if decision.action is Action.GIVE_UP:
            raise DirectoryInUse(
                f"{path}: {decision.reason}. Its program must call should_save after each step and end when stopping "
                "is true; and what it saved last must get to disk. It trains on; see its log"
            )
        if decision.action is Action.ASK:
            assert owner is not None
            self._claim = self._claim or Claim(path, self.identity)
            self._claim.ask(owner.attempt, time.time())
            self._asked_attempt, self.has_waited = owner.attempt, True
            self._asked_s = self._asked_s or now_s
            self._said_s = now_s
            _log.info("%s: this job is initialised and asks for the hand-over: %s", path, decision.reason)
        if decision.action is Action.LATER:
            _log.info("%s: %s; then it is asked for the hand-over", path, decision.reason)
        if now_s > self._said_s + _SAY_WAITING_S and is_ready:
            self._said_s = now_s
            _log.info("%s: %s, of %.0f s at most", path, decision.reason, self._timeout_s)
        return is_ready


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
