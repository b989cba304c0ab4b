"""Job-level tuning as in GoldMiner (SIGMOD'23, 3.4.1): how large a data worker is, and whether any pays. Pure.

Called by `controller.py`. Local loading is measured first; then a data worker of 1 CPU, of 2, of 4, as long as the
speed grows with the CPUs; then the number (`controller.py`); then what the trainer's own CPUs are still needed for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetstream.base.text import count_words
from hetstream.hetjob.elastic.snapshot import Snapshot
from hetstream.hetjob.elastic.step_terms import StepTerm

# Twice the CPUs must bring this share of twice the speed to be worth it: below it two small ones are better.
LINEAR_SHARE = 0.8
# More data workers must bring this share of what their number promises.
MARGINAL_SHARE = 0.2
# Over local loading, data workers must bring at least so much: they cost CPUs that others could have.
LEAST_GAIN = 0.05
# What a trainer gets over what it was seen to use, so that a peak costs no GPU time.
_TRAINER_HEADROOM = 1.25


@dataclass(frozen=True, slots=True)
class LocalLoading:
    """What a job's own loading costs.

    Attributes:
        wait_s: time that the training loop waited for a step which it made itself; of several ranks, by their number.
    """

    wait_s: float

    @classmethod
    def seen(cls, steps_per_s: float, wait_share: float) -> LocalLoading | None:
        """From the rates without data workers; None if no step was made."""
        return cls(wait_share / steps_per_s) if steps_per_s > 0 else None

    def steps_per_s(self, now: Snapshot) -> float:
        """Return how fast the trainer of now, which may have become slower or faster, would be with local loading."""
        busy_s = (1 - now.wait_share) / now.steps_per_s if now.steps_per_s > 0 else math.inf
        return 1 / (busy_s + self.wait_s) if busy_s + self.wait_s > 0 else math.inf


@dataclass(frozen=True, slots=True)
class SizeProgress:
    """How far the search for a data worker's size is.

    Attributes:
        best: the size so far.
        best_rate_per_s: steps that one of this size makes per second; 0 while that was not measured.
        probing: the size that is to be measured next; None when the search is over.
    """

    best: int
    best_rate_per_s: float
    probing: int | None


class SizeSearch:
    """Finds the CPUs of one data worker.

    Args:
        smallest, largest: of them.
        progress: of a search that goes on.

    Attributes:
        progress: how far it is.
    """

    def __init__(self, smallest: int, largest: int, progress: SizeProgress | None = None) -> None:
        self._largest = largest
        self.progress = progress or SizeProgress(smallest, 0.0, smallest if smallest < largest else None)

    @property
    def best(self) -> int:
        return self.progress.best

    @property
    def probing(self) -> int | None:
        return self.progress.probing

    def measured(self, rate_per_s: float) -> str:
        """Take in the rate of one data worker of the size `probing`; returns what follows from it, in words.

        Raises:
            ValueError: the search is over.
        """
        if self.probing is None:
            raise ValueError("the search for a data worker's size is over")
        best, best_rate_per_s = self.best, self.progress.best_rate_per_s
        size, ratio = self.probing, self.probing / best
        gain = rate_per_s / best_rate_per_s if best_rate_per_s > 0 else ratio
        made = f"{rate_per_s:.1f} steps/s with {count_words(size, 'CPU')}"
        if size != best:
            made += f", {gain:.1f} times as many as with {best}"
        if gain < LINEAR_SHARE * ratio:
            self.stop()
            return f"{made}: {best} it is"
        self.progress = SizeProgress(size, rate_per_s, min(2 * size, self._largest) if size < self._largest else None)
        return f"{made}: next {self.probing} are tried" if self.probing else f"{made}: {size} it is"

    def stop(self) -> None:
        """Be content with the best so far."""
        self.progress = replace(self.progress, probing=None)


def growth_paid(before_per_s: float, after_per_s: float, num_before: int, num_after: int) -> bool:
    """Return whether more data workers can make more steps, by enough of what their number promised.

    Args:
        before_per_s, after_per_s: what all of them can make; not what was taken, which the trainer's load changes too.
        num_before, num_after: how many there were and are.
    """
    return after_per_s >= before_per_s * (1 + MARGINAL_SHARE * (num_after / max(num_before, 1) - 1))


def remote_pays(local_per_s: float, remote_per_s: float) -> bool:
    """Return whether data workers are worth having at all."""
    return remote_per_s > local_per_s * (1 + LEAST_GAIN)


def trainer_cpus_needed(used: float) -> int:
    """CPUs that keep the speed of a trainer that was seen to use this number."""
    return max(1, math.ceil(used * _TRAINER_HEADROOM))


# How long data workers take for a step by their number, fitted to the running job's own rates. Pure.
#
# A step is loaded in `shared_s + by_number_s / n` seconds by n data workers: what all of them share, such as a file
# system or the trainer's link, and what they divide. It is the data-loading term of DLRover-RM's resource model; the
# trainer works beside that, so a step takes the longer of both. The controller asks the model only while its checks
# pass: enough different numbers of data workers, far enough apart, and all near the curve.

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
        """Return steps a second that this number of data workers makes."""
        return 1 / (self.shared_s + self.by_number_s / num_data_workers)

    def needed(self, per_s: float) -> int | None:
        """Return the fewest data workers that reach a rate of steps per second; None if no number does."""
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
        """Steps per second of data workers that are never idle, by their number and their CPUs."""
        if cpus != self._cpus:
            self._cpus, self._points = cpus, {}
        if num_data_workers > 0 and per_s > 0 and math.isfinite(per_s):
            self._points[num_data_workers] = per_s, now
        self._points = {number: point for number, point in self._points.items() if now - point[1] <= _KEEP_S}

    def forget(self) -> None:
        """It led to nothing: look anew."""
        self._points = {}

    def model(self) -> LoadingModel | None:
        """Return the term; None while the points do not identify it."""
        return fitted([(number, per_s) for number, (per_s, _) in sorted(self._points.items())])

    def term(self, num_data_workers: int) -> StepTerm:
        """Return the same for a number of data workers, as a part of a step."""
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
