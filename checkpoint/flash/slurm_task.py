"""What Slurm has started above this program, if that dies of the SIGTERM with which Slurm ends a job.

Slurm kills all of a step as soon as its tasks have ended. A shell that waits for the program, and neither catches nor
ignores SIGTERM, ends at once; the program below it is killed before it can save. Only a look: nothing is changed.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

_log = logging.getLogger(__name__)

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
    """The task of a Slurm step above a process, if SIGTERM ends it, as in "bash (process 17)"; else "".

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
