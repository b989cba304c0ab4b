"""Backfill holes: how long a companion asks for, and when it leaves before its time limit ends it. Pure.

Slurm's backfill plans a start for each job that waits; until then its CPUs stand idle. A companion with `--time-min`
starts in such a hole if the hole is at least that long, and nobody's planned start moves. Slurm up to 24.11 then grants
just the minimum, later ones the whole hole (seen on 22.05.8, 24.11.5 and 26.05.5). So the minimum is a guess of how
long holes are: twice as long after a companion that has lasted, half as long for one that waits.

Called by `hetstream.hetjob.master.controller_state_file`, which knows the companions.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

# The most that Slurm takes: behind everybody, with priority/basic too.
NICE = 2147483645
# Nobody who comes later waits longer than this for a companion that has started; its successor costs little.
LONGEST_S = 3600.0
# A hole in which less than this share of the time is useful is left to others.
_LEAST_USEFUL_SHARE = 0.5
# Before any companion has started: Python and torch from a file system that is not busy.
_FIRST_START_S = 10.0
# Looks come once a second, and Slurm's own clock counts whole seconds.
_LEAST_LEAD_S = 10.0
# By Slurm's default backfill looks every 30 s; one that it has passed over once does not fit.
_WAIT_S = 45.0
_MINUTE_S = 60.0  # Slurm counts time limits in these


@dataclass(frozen=True, slots=True)
class TimeRequest:
    """What a companion asks for.

    Attributes:
        time_min_s: the least, in whole minutes.
        time_s: the most, likewise.
    """

    time_min_s: float
    time_s: float

    @property
    def options(self) -> tuple[str, ...]:
        """The same for sbatch, in minutes."""
        return f"--time={self.time_s / _MINUTE_S:.0f}", f"--time-min={self.time_min_s / _MINUTE_S:.0f}"


class Holes:
    """What one job has learnt of holes.

    Args:
        time_min_s: what the script says that a hole must have at the least.
        allowed_s: the most that a companion may have; None without a limit.

    Attributes:
        longest_s: that a companion asks for.
    """

    def __init__(self, time_min_s: float, allowed_s: float | None = None) -> None:
        self._given_s = _whole_minutes(time_min_s)
        longest_s = max(LONGEST_S, 2 * self._given_s)
        # Rounded down: of a minute that has begun, Slurm would have it all.
        self.longest_s = longest_s if allowed_s is None else min(longest_s, allowed_s // _MINUTE_S * _MINUTE_S)
        self._guess_s = self._given_s
        self._starts_s: deque[float] = deque(maxlen=5)
        self._drains_s: deque[float] = deque(maxlen=5)

    @property
    def start_s(self) -> float:
        """From a companion's start by Slurm until it serves: of the last ones, the slowest."""
        return max(self._starts_s, default=_FIRST_START_S)

    @property
    def least_s(self) -> float:
        """The shortest hole that is worth a companion."""
        useless_s = self.start_s + self.lead_s()
        return max(self._given_s, _whole_minutes(useless_s / (1 - _LEAST_USEFUL_SHARE)))

    def request(self, left_s: float | None) -> TimeRequest | None:
        """Return what the next companion asks for; None if the job ends before one would be of use.

        Args:
            left_s: until the job ends; None if that is not known.
        """
        time_s = self.longest_s if left_s is None else min(self.longest_s, _whole_minutes(left_s))
        if time_s < self.least_s:
            return None
        return TimeRequest(min(max(self._guess_s, self.least_s), time_s), time_s)

    def why_not(self, left_s: float | None) -> str:
        """Return why `request` gave none."""
        end = "" if left_s is None else f", and the job ends in {max(0.0, left_s):.0f} s"
        return (
            f"a companion is worth a hole of {self.least_s:.0f} s (it takes {self.start_s:.0f} s to start and leaves "
            f"{self.lead_s():.0f} s before its end){end}"
        )

    def shorter(self, asked_s: float, waited_s: float) -> float | None:
        """Return what a companion that waits asks for at the least from now on; None if that stays as it is.

        Args:
            asked_s: at the least, until now.
            waited_s: since it asked for that.
        """
        shorter_s = max(self.least_s, _whole_minutes(asked_s / 2))
        if waited_s < _WAIT_S or shorter_s >= asked_s:
            return None
        self._guess_s = min(self._guess_s, shorter_s)
        return shorter_s

    def lasted(self, asked_s: float, granted_s: float) -> None:
        """A companion has come to its end: the next hole may be longer.

        Args:
            asked_s: at the least.
            granted_s: by Slurm; more than that where it grants the whole hole, so that no guess is needed.
        """
        if granted_s <= asked_s:
            self._guess_s = max(self._guess_s, min(_whole_minutes(2 * granted_s), self.longest_s))

    def lead_s(self, step_s: float = 0.0) -> float:
        """Return how long before its end a companion is told to leave.

        Args:
            step_s: that one of its processes takes for a step; 0 while that is not known.
        """
        return max(_LEAST_LEAD_S, 5.0 + 2 * max(step_s, *self._drains_s, 0.0))

    def is_due(self, left_s: float, granted_s: float, step_s: float = 0.0) -> bool:
        """Return whether a companion has to leave now.

        Args:
            left_s: until its time limit ends it.
            granted_s: time that Slurm has given it in all; most of that is used in any case.
            step_s: see `lead_s`.
        """
        return left_s <= min(self.lead_s(step_s), granted_s / 3)

    def started(self, seconds: float) -> None:
        """Note how long a companion took from its start by Slurm until it served."""
        self._starts_s.append(seconds)

    def drained(self, seconds: float) -> None:
        """Note how long one took to leave."""
        self._drains_s.append(seconds)


def _whole_minutes(seconds: float) -> float:
    """Up to the next one, as Slurm counts; at least one."""
    return _MINUTE_S * max(1, math.ceil(seconds / _MINUTE_S - 1e-9))
