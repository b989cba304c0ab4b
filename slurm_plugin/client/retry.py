"""Which failures of Slurm's commands pass by themselves, and how long to wait. Used by the client.

slurmctld answers "Resource temporarily unavailable" to an update in the first seconds after a submission (24.11 and
26.05), and under load connections time out. A request refused so had no effect; after a lost answer nobody knows.
"""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Callable
from typing import TypeVar

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.client.run import EXIT_TIMED_OUT

# Together 12.6 s: longer than the 1-3 s that an update is refused after a submission, and than one MessageTimeout.
DELAYS_S = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4)

_BUSY = re.compile(
    "Resource temporarily unavailable|try again|Unable to contact slurm controller|Connection refused|"
    "Slurm backup controller in standby mode|Transport endpoint is not connected",
    re.IGNORECASE,
)
_LOST = re.compile("Socket timed out|Connection reset|Zero Bytes were transmitted|Communication.*error", re.IGNORECASE)


class Failure(enum.Enum):
    """What a failed command means for trying again."""

    REFUSED = "refused"  # slurmctld has decided
    BUSY = "busy"  # nothing happened
    LOST = "lost"  # it may have happened


def failure_of(error: SlurmCommandError) -> Failure:
    """Judge a failure by what the command said."""
    if error.returncode == EXIT_TIMED_OUT or _LOST.search(error.stderr):
        return Failure.LOST
    return Failure.BUSY if _BUSY.search(error.stderr) else Failure.REFUSED


def is_denied(error: SlurmCommandError) -> bool:
    """Whether Slurm keeps this from the user (ESLURM_ACCESS_DENIED in slurm_errno.c, 22.05 to 26.05)."""
    return "Access/permission denied" in error.stderr


def is_of_scrontab(error: SlurmCommandError) -> bool:
    """Whether Slurm refused because of a job of scrontab, which nobody can change, hold or requeue (slurm_errno.c)."""
    return "scrontab" in error.stderr


_T = TypeVar("_T")


def with_retries(
    act: Callable[[], _T],
    *,
    find: Callable[[], _T | None] | None = None,
    repeatable: bool = True,
    sleep: Callable[[float], object] = time.sleep,
) -> _T:
    """Do something until it succeeds, is refused, or has failed too often.

    Args:
        act: what to do.
        find: looks, after a lost answer, for what the attempt before has done.
        repeatable: doing it twice does no harm. What is neither repeatable nor to be found fails with a lost answer.
        sleep: waits between two attempts, in seconds.

    Raises:
        SlurmCommandError: the last failure.
    """
    in_doubt = False
    for delay_s in DELAYS_S:
        try:
            found = find() if in_doubt and find else None
            if found is not None:
                return found
            in_doubt = False
            return act()
        except SlurmCommandError as error:
            failure = failure_of(error)
            if failure is Failure.REFUSED or (failure is Failure.LOST and not repeatable and find is None):
                raise
            in_doubt = in_doubt or failure is Failure.LOST
            sleep(delay_s)
    found = find() if in_doubt and find else None
    return act() if found is None else found
