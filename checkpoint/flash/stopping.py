"""Whether a program is to end, and why. Who asks is a signal, the job's checkpoint writer, or the job's successor.

Called by the checkpointer. `StopRequest` hears the signals; by `StopAgreement` all ranks end after the same step.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from hetstream.checkpoint.flash.ranks import Communicator, gather
from hetstream.checkpoint.flash.storage import CheckpointStorage

# How all ranks agree to end after the same step: a rank was asked to, or another job goes on in place of this one.
#
# Called by `FlashCheckpointer.should_save` after each step. A signal, or the request of a host's checkpoint writer,
# reaches ranks at different steps. A rank that ended alone would leave the others in a collective operation for ever.

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
# Several ranks count steps, as their clocks differ. The bound is for steps that become slower meanwhile.
_MAX_STEPS = 100


class _Look(msgspec.Struct, frozen=True):
    """What a rank has seen.

    Attributes:
        reason: why to stop; "" to go on.
        hands_over: another job goes on; rank 0's counts.
        num_steps: until the next look; rank 0's counts.
    """

    reason: str = ""
    hands_over: bool = False
    num_steps: int = 1


class StopAgreement:
    """Whether to stop: the ranks look about once a second, and have the same answer at each step.

    All of them look after the same step, in one small exchange, which also says after how many steps they look again.

    Args:
        ranks: the ranks that have to agree.
        asked_here: why this rank was asked to end; "" if it was not.
        asked_by_successor: why to end for a job that goes on in place of this one; "" while none asks. For rank 0.

    Attributes:
        hands_over: whether another job goes on, on every rank.
        reason: why to stop, on every rank; "" to go on.
        has_looked: the program asks after its steps.
    """

    def __init__(
        self, ranks: Communicator, asked_here: Callable[[], str], asked_by_successor: Callable[[], str]
    ) -> None:
        self.hands_over = False
        self.reason = ""
        self.has_looked = False
        self._ranks = ranks
        self._asked_here = asked_here
        self._asked_by_successor = asked_by_successor
        self._look_s: float | None = None
        self._step = 0
        self._num_steps = 0

    def is_asked(self, step: int) -> bool:
        """Return whether to stop after this step. Every rank calls it after each step."""
        self.has_looked = True
        if self.reason:
            return True
        now_s = time.monotonic()
        if self._ranks.world_size == 1:
            if self._look_s is None or now_s >= self._look_s + _LOOK_S:
                self._look_s, self.reason = now_s, self._asked_by_successor()
                self.hands_over = self.reason != ""
            self.reason = self.reason or self._asked_here()
        elif not self._step <= step < self._step + self._num_steps:
            self._agree(step, now_s)
        return bool(self.reason)

    def _agree(self, step: int, now_s: float) -> None:
        num_steps = 1
        if self._look_s is not None and step > self._step:
            num_steps = steps_until_next(step - self._step, now_s - self._look_s)
        reason = self._asked_by_successor() if self._ranks.rank == 0 else ""
        asked = self._asked_here()
        asked = asked and f"rank {self._ranks.rank}: {asked}"
        looks = gather(self._ranks, _Look(reason or asked, reason != "", num_steps))
        self._look_s, self._step, self._num_steps = now_s, step, looks[0].num_steps
        self.hands_over = looks[0].hands_over
        self.reason = next((look.reason for look in looks if look.reason), "")
        if self.reason and not self.hands_over:
            _log.info("all ranks are asked to stop after step %d: %s", step, self.reason)


def steps_until_next(num_steps: int, elapsed_s: float) -> int:
    """After how many steps to look again: about a second's, but at most twice as many as last time, as steps change.

    Args:
        num_steps: since the last look.
        elapsed_s: since then.
    """
    wanted = round(_LOOK_S * num_steps / elapsed_s) if elapsed_s > 0 else _MAX_STEPS
    return max(1, min(_MAX_STEPS, 2 * num_steps, wanted))


# Signals that ask the program to stop: one is noted, the program's own handler still runs, and the program goes on.
#
# A program that looks whether it is asked to stop ends in its own time. One that never looks
# dies of SIGTERM, as it would without a checkpointer.

# Slurm, torchrun and a wrapper may each pass the same request on: what comes within this time is one.
REPEAT_S = 10.0


class StopRequest:
    """Whether a signal has asked the process to stop. Listens from `install` to `remove`.

    Args:
        signals: those that ask; for example SIGTERM, and what `sbatch --signal` sends.
        before_death: called when SIGTERM is about to end the process.
        clock: seconds, as `time.monotonic` counts them.

    Attributes:
        pid: of the process that is asked; its children have the handler too.
        previous: the handlers that were there before, by signal.
        is_removed: `remove` has been called.
    """

    def __init__(
        self, signals: Iterable[int], before_death: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._signals = tuple(signals)
        self._before_death = before_death
        self._clock = clock
        self.previous: dict[int, Any] = {}
        self.pid = os.getpid()
        self._is_watched = False
        self.is_removed = False
        self._received: list[int] = []
        self._asked_s = -math.inf

    def install(self) -> None:
        """Begin to listen. Python lets only the main thread do so: in others nothing happens, and the log says so."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "signals are not watched for: only the main thread can, and the checkpointer was made in another"
            )
            return
        for number in self._signals:
            self.previous[number] = _in_use(number, signal.signal(number, self._handle))

    def note_asked(self) -> None:
        """The program has been asked to end, in whatever way: a SIGTERM that follows soon is the same request."""
        if self._asked_s == -math.inf:
            self._asked_s = self._clock()

    def remove(self) -> None:
        """Give the signals back.

        Our handler stays, and hands on what comes, where the program has set handlers of its own meanwhile, and in
        another thread than the main one. It also stays in a program that was just asked to end: the same request may
        come once more, and must not end what is ending in order.
        """
        self.is_removed = True
        if self._is_asked_just_now():
            return
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self.previous.items():
            if signal.getsignal(number) == self._handle:
                # None: a handler that was not set from Python, and cannot be set again from it.
                signal.signal(number, signal.SIG_DFL if previous is None else previous)

    @property
    def reason(self) -> str:
        """Which signal came first; "" if none has."""
        return f"{signal.Signals(self._received[0]).name} came" if self._received else ""

    def note_watched(self) -> None:
        """The program looks, and will end in its own time: SIGTERM does not end it, unless it comes again later."""
        self._is_watched = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self.previous.get(number)
        is_own = os.getpid() == self.pid
        if number not in self._received and not self.is_removed:
            self._received.append(number)
            self._asked_s = self._clock()
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_IGN:
            return
        elif number == signal.SIGTERM and not (is_own and self._is_asked_just_now()):
            # The program never looks, or the signal came again after REPEAT_S, or this is a child of the program.
            if is_own:
                self._before_death()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _is_asked_just_now(self) -> bool:
        return self._is_watched and self._clock() < self._asked_s + REPEAT_S


def _in_use(number: int, handler: Any) -> Any:
    """The handler that is in use: in place of one that `remove` has left installed, the one that it hands on to."""
    owner = getattr(handler, "__self__", None)
    while isinstance(owner, StopRequest) and owner.is_removed:
        handler = owner.previous.get(number)
        owner = getattr(handler, "__self__", None)
    return handler


class Stopping:
    """Whether one rank is asked to end, and what all ranks have agreed on. Listens to signals until `remove`.

    Args:
        ranks: the ranks that have to agree.
        storage: of this rank; its checkpoint writer and the job's successor may ask.
        signals: the signals that ask.
    """

    def __init__(self, ranks: Communicator, storage: CheckpointStorage, signals: tuple[int, ...]) -> None:
        self._is_alone = ranks.world_size == 1
        self._storage = storage
        self._request = StopRequest(signals, before_death=storage.mark_closed)
        self._request.install()
        self._agreement = StopAgreement(ranks, self._asked_here, storage.handover.asked)

    def is_asked(self, step: int) -> bool:
        """Return whether to stop after this step: the same answer on every rank. Every rank calls it after each
        step.
        """
        return self._agreement.is_asked(step)

    def must_end(self, *, has_saved: bool) -> bool:
        """Return whether to end. The program that asks this ends in its own time: from now on SIGTERM leaves it that
        time.

        Args:
            has_saved: see `reason`.
        """
        self._request.note_watched()
        is_asked = self.reason(has_saved=has_saved) != ""
        if is_asked:
            self._request.note_asked()
        return is_asked

    def reason(self, *, has_saved: bool) -> str:
        """Return why to end, in words; "" for no reason.

        Args:
            has_saved: this rank has saved. One that saves and never calls `is_asked` goes by what it was asked itself.
        """
        is_agreed = not self._is_alone and (self._agreement.has_looked or not has_saved)
        return self._agreement.reason or ("" if is_agreed else self._asked_here())

    @property
    def hands_over(self) -> bool:
        """Whether another job goes on, on every rank."""
        return self._agreement.hands_over

    def remove(self) -> None:
        """Give the signals back."""
        self._request.remove()

    def _asked_here(self) -> str:
        """Why this rank was asked to end; "" if it was not."""
        return self._request.reason or self._storage.stop_reason()


# What Slurm has started above this program, if that dies of the SIGTERM with which Slurm ends a job.
#
# Slurm kills all of a step as soon as its tasks have ended. A shell that waits for the program, and neither catches nor
# ignores SIGTERM, ends at once; the program below it is killed before it can save. Only a look: nothing is changed.

_STEP_DAEMON = "slurmstepd"


def warn_of_wrapper() -> None:
    """Log what is above this process and keeps it from saving after SIGTERM; without such a task, nothing."""
    ended = task_that_sigterm_ends(os.getpid())
    if ended:
        _log.warning(
            "SIGTERM (scancel, preemption, the time limit) ends %s, which Slurm has started and below which this "
            "program runs. Slurm then kills the program before it can save its last step. Let the wrapper exec the "
            "program, or put this line at its beginning: trap : TERM",
            ended,
        )


def task_that_sigterm_ends(pid: int, proc: Path = Path("/proc")) -> str:
    """Return the task of a Slurm step above a process, if SIGTERM ends it, as in "bash (process 17)"; else "".

    Args:
        pid: of the process.
        proc: where the kernel tells of processes.
    """
    task = pid
    try:
        status = _status(proc, pid)
        while (parent := int(status["PPid"])) > 1:
            above = _status(proc, parent)
            if above["Name"] == _STEP_DAEMON:
                handled = int(status["SigIgn"], 16) | int(status["SigCgt"], 16)
                is_ended = task != pid and not handled >> (signal.SIGTERM - 1) & 1
                return f"{status['Name']} (process {task})" if is_ended else ""
            task, status = parent, above
    except (OSError, KeyError, ValueError):
        return ""  # a process has just ended, or others may not look at it
    return ""


def _status(proc: Path, pid: int) -> dict[str, str]:
    lines = (proc / str(pid) / "status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
