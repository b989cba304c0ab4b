"""Which signals end a process, and for whom one is meant that Slurm sends to a whole step.

Used by the processes of a job's own steps. `sbatch --signal` and `scancel --signal` signal every step of a job, and
proctrack/linuxproc every process of a step: what warns a trainer must not end what serves it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

# Those of an error in this process, those that cannot be held, and those that end nothing by themselves (signal(7)).
_OTHERS = (
    *("SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS", "SIGPIPE"),
    *("SIGCHLD", "SIGCONT", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGWINCH"),
)
# Whatever else may come ends a process that does not expect it.
FATAL = frozenset(signal.valid_signals()) - {getattr(signal, name) for name in _OTHERS}
# Beside SIGTERM, from a parent in a step to its child: of two SIGTERM on their way only the first is seen.
STOP_OF_PARENT = signal.SIGRTMAX - 2
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SLURMSTEPD = "slurmstepd"


def is_in_step() -> bool:
    """Whether this process is part of a Slurm step."""
    return "SLURM_STEP_ID" in os.environ


def is_of_step(received: signal.struct_siginfo) -> bool:
    """Whether Slurm has sent a signal, as it does to all of a step or of a job.

    That it warns or that it ends the job cannot be seen from the signal.
    """
    try:
        return Path(f"/proc/{received.si_pid}/comm").read_text().strip() == _SLURMSTEPD
    except OSError:
        return False  # whoever sent it is gone, or hidden: then it is meant


def stop_requests() -> Callable[[], bool]:
    """Hold all signals that would end this process, and give a function that says whether one asks for its end.

    What Slurm sends is for the step's task, which is its child, and decides for those below it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, FATAL)
    is_asked = False

    def ask() -> bool:
        nonlocal is_asked
        while (received := signal.sigtimedwait((*_STOP_SIGNALS, STOP_OF_PARENT), 0)) is not None:
            is_asked |= received.si_pid == os.getppid() or not is_of_step(received)
        return is_asked

    return ask


def hold_warnings() -> None:
    """Let what would warn this process wait until `pass_over_warnings`, also where it becomes another program first.

    A program that begins has no handlers yet, and one that replaces another keeps what is held.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, FATAL - {*_STOP_SIGNALS})


def pass_over_warnings() -> None:
    """Let nothing but SIGTERM and SIGINT end this process and those that it forks.

    The signals have handlers and are not ignored, because ignored ones would stay so in programs that are started.
    """
    for number in FATAL - {*_STOP_SIGNALS}:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FATAL - {*_STOP_SIGNALS})


def sleep_in_parts(seconds: float) -> None:
    """Sleep, and hear of a signal a second later at the most.

    One that comes after Python has looked for signals, and before the system call, does not end `time.sleep`.
    """
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(1.0, left_s))
