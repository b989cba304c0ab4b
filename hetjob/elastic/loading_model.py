"""How long data workers take for a step by their number, fitted to the running job's own rates. Pure.

A step is loaded in `shared_s + by_number_s / n` seconds by n data workers: what all of them share, such as a file
system or the trainer's link, and what they divide. It is the data-loading term of the resource model
(`slurm_plugin/model/`); the trainer works beside that, so a step takes the longer of both. The controller asks the
model only while its checks pass: enough different numbers of data workers, far enough apart, and all near the curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetstream.hetjob.elastic.step_terms import StepTerm

# Two points lie on any curve of this form: a third one says whether the job is of it.
_LEAST_POINTS = 3
# The largest number of data workers seen, by the smallest.
_LEAST_RANGE = 2.0
# Of each point from the curve, relative.
_MOST_ERROR = 0.05
# What was seen of a number of data workers says nothing of a job that has changed since.
_KEEP_S = 1800.0


@dataclass(frozen=True, slots=True)
class LoadingModel:
    """The fitted term.

    Attributes:
        shared_s: for a step, however many data workers there are.
        by_number_s: for a step with one data worker, besides.
        num_points: numbers of data workers that it was fitted to.
        error: of the point that is furthest from the curve, as a share of it.
    """

    shared_s: float
    by_number_s: float
    num_points: int
    error: float = 0.0

    def per_s(self, num_data_workers: int) -> float:
        """Steps a second that so many make."""
        return 1 / (self.shared_s + self.by_number_s / num_data_workers)

    def needed(self, per_s: float) -> int | None:
        """The fewest data workers that make so many steps a second; None if no number does."""
        left_s = 1 / per_s - self.shared_s
        if left_s <= 0 or self.by_number_s / left_s > 1e6:
            return None
        return max(1, math.ceil(self.by_number_s / left_s - 1e-9))

    def __str__(self) -> str:
        return (
            f"{1e3 * self.shared_s:.1f} ms that data workers share and {1e3 * self.by_number_s:.1f} ms that they "
            f"divide, measured with {self.num_points} numbers of them"
        )


class LoadingPoints:
    """What was seen of data workers of one size."""

    def __init__(self) -> None:
        self._cpus = 0
        self._points: dict[int, tuple[float, float]] = {}  # number -> steps a second, when

    def note(self, cpus: int, num_data_workers: int, per_s: float, now: float) -> None:
        """So many data workers of so many CPUs make so many steps a second, if never idle."""
        if cpus != self._cpus:
            self._cpus, self._points = cpus, {}
        if num_data_workers > 0 and per_s > 0 and math.isfinite(per_s):
            self._points[num_data_workers] = per_s, now
        self._points = {number: point for number, point in self._points.items() if now - point[1] <= _KEEP_S}

    def forget(self) -> None:
        """It led to nothing: look anew."""
        self._points = {}

    def model(self) -> LoadingModel | None:
        """The term; None while the points do not identify it."""
        return fitted([(number, per_s) for number, (per_s, _) in sorted(self._points.items())])

    def term(self, num_data_workers: int) -> StepTerm:
        """The same for so many data workers, as a part of a step."""
        model = self.model()
        if model is None or num_data_workers < 1:
            seen = ", ".join(map(str, sorted(self._points))) or "none"
            rule = (
                f"{_LEAST_POINTS} numbers of data workers, a factor of {_LEAST_RANGE:g} apart, and rates on one curve"
            )
            return StepTerm("T_data", None, None, f"that takes {rule}; seen were {seen}")
        seconds = 1 / model.per_s(num_data_workers)
        return StepTerm("T_data", seconds, model.error * seconds, f"with {num_data_workers} data workers: {model}")


def fitted(points: Sequence[tuple[int, float]]) -> LoadingModel | None:
    """Scaled least squares with no negative part; None where the points do not identify both parts.

    Args:
        points: a number of data workers, at least 1, and the steps a second that they make, above 0; each number once.
    """
    if len(points) < _LEAST_POINTS or points[-1][0] < _LEAST_RANGE * points[0][0]:
        return None
    # Each row is divided by the seconds that were measured, so that relative errors count: (rate, rate / number) -> 1.
    rows = [(per_s, per_s / number) for number, per_s in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    if not (math.isfinite(determinant) and determinant > 0):
        return None
    shared_s, by_number_s = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if shared_s < 0:
        shared_s, by_number_s = 0.0, b / bb
    elif by_number_s < 0:
        shared_s, by_number_s = a / aa, 0.0
    error = max(abs(row[0] * shared_s + row[1] * by_number_s - 1) for row in rows)
    if error > _MOST_ERROR:
        return None
    return LoadingModel(shared_s, by_number_s, len(points), error)
