"""Measured curves of speed over CPUs of data workers: what a job of a workload has, and how a table writes it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.policy.curves import along

Floats = npt.NDArray[np.float64]
# (CPUs of data workers, speed as a share of the ideal one), from (0, 0) on.
Points = tuple[tuple[float, float], ...]

MOST_POINTS, _MOST_CPUS = 16, 1e6
# Of a slope: measured curves come as rounded numbers.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Curves:
    """A curve for each job.

    Attributes:
        cpus: (jobs, points): CPUs of data workers of the whole job, ascending from 0; padded with the last value.
        speed: (jobs, points): with so many, as a share of the ideal. Concave, from 0; padded like `cpus`.
    """

    cpus: Floats
    speed: Floats

    def rows(self, places: npt.NDArray[np.int64]) -> Curves:
        """The curves of these jobs."""
        return Curves(self.cpus[places], self.speed[places])

    def speed_with(self, cpus: Floats) -> Floats:
        """The speed of each job with so many CPUs of data workers."""
        return along(self.cpus, self.speed, cpus)


def curves_of(points: Sequence[Points], units: Sequence[float]) -> Curves:
    """Put curves together.

    Args:
        points: of each job, for one of its units.
        units: of each job.
    """
    width = max(len(own) for own in points)
    padded = np.array([[*own, *([own[-1]] * (width - len(own)))] for own in points])
    return Curves(padded[:, :, 0] * np.asarray(units, dtype=float)[:, None], padded[:, :, 1])


def parse_curve(text: str) -> Points:
    """Read a curve such as `8:0.3 16:0.55 64:0.95`; it begins at 0:0.

    Raises:
        ValueError: it is none, with what is wrong.
    """
    written = text.split()
    if len(written) > MOST_POINTS:
        raise ValueError(f"it has {len(written)} points: must be at most {MOST_POINTS}")
    points = [(0.0, 0.0), *map(_point, written)]
    slopes = []
    for (cpus, speed), (more_cpus, more_speed) in pairwise(points):
        if more_cpus <= cpus or more_speed < speed:
            raise ValueError(f"{more_cpus:g}:{more_speed:g} comes after {cpus:g}:{speed:g}: both numbers must rise")
        slopes.append((more_speed - speed) / (more_cpus - cpus))
    steeper = [place for place in range(1, len(slopes)) if slopes[place] > slopes[place - 1] + _ROUNDING]
    if steeper:
        cpus, speed = points[steeper[0] + 1]
        raise ValueError(f"at {cpus:g}:{speed:g} it is steeper than before: no CPU may bring more than one before it")
    return tuple(points)


def _point(word: str) -> tuple[float, float]:
    cpus, _, speed = word.partition(":")
    try:
        point = float(cpus), float(speed)
    except ValueError:
        point = math.nan, math.nan
    if not (0 < point[0] <= _MOST_CPUS and 0 < point[1] <= 1):
        raise ValueError(f"{word!r}: must be CPUs:SPEED, with a speed above 0 and at most 1, such as 16:0.55")
    return point
