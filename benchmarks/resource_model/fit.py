"""Fit a step-time model to observations: scaled non-negative least squares. Pure; the home of scipy.

DLRover-RM minimises the logarithmic error and names non-negative least squares, which minimises the absolute one. Each
row divided by its measured time gives the relative error, which is what counts: it halves the error on configurations
that were not seen (docs/measured/model.txt). A step in which something else held the job up is no error of the model:
errors that are large beside the others count by their size, not its square (Huber 1964).

A step that overlaps loading with computing shows only the slower side. Which one that was is known where the loader
measured its waits. Else both sides are fitted, each observation goes to the side that is slower by the fit, and so on
until nothing moves, from several beginnings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.resource_model.identify import confused_terms, lost_directions
from benchmarks.resource_model.step_time import Side, StepTimeModel
from benchmarks.resource_model.terms import Array, Configurations, Family, Flags, ModelError, Term, Workload

# A loader that waits for less of its time than this is fed: a scheduler's hiccup is no lack of data.
_FED = 0.02
# Shares of the observations that are taken to be bound by data in the beginning.
_BEGINNINGS = (0.2, 0.4, 0.6, 0.8)
# A side of its own must explain so much: terms more always explain a little of the noise.
_BETTER = 0.5
_MOST_ROUNDS = 25
# Huber's threshold in standard deviations: without stragglers the fit loses 5 % in precision. The deviation is taken
# from the median error, of which stragglers make nothing; an error of one in a thousand is none.
_HUBER, _OF_MEDIAN, _LEAST_DEVIATION = 1.345, 1.4826, 1e-3
_HUBER_ROUNDS, _SETTLED = 6, 1e-4


@dataclass(frozen=True)
class Observations:
    """What was measured.

    Attributes:
        configurations: of length n.
        step_s: seconds a step, shape (n,).
        wait_share: share of the step in which trainers waited for data, shape (n,); NaN, or None for all, where that
            was not measured.
    """

    configurations: Configurations
    step_s: Array
    wait_share: Array | None = None

    def __post_init__(self) -> None:
        num = len(self.configurations)
        if self.step_s.shape != (num,) or (self.wait_share is not None and self.wait_share.shape != (num,)):
            raise ValueError(f"{num} configurations need as many measured times and wait shares")
        if not np.all(np.isfinite(self.step_s) & (self.step_s > 0)):
            raise ValueError("a step's time must be positive")

    def __len__(self) -> int:
        return len(self.configurations)

    def joined(self, other: Observations) -> Observations:
        """These, then the others."""
        waits = [
            np.full(len(observed), np.nan) if observed.wait_share is None else observed.wait_share
            for observed in (self, other)
        ]
        return Observations(
            self.configurations.joined(other.configurations),
            np.concatenate([self.step_s, other.step_s]),
            np.concatenate(waits),
        )


def fit(family: Family, workload: Workload, seen: Observations, prior: float = 0.0) -> StepTimeModel:
    """The model that fits best.

    Args:
        family: what the steps of the job are made of; terms that the workload has not are left out.
        workload: of the job.
        seen: at least one observation; a few more than terms, in different configurations, for a model that is known.
        prior: weight, in observations, of the belief that all terms take equal parts of a step: with few observations
            it says something of terms that have not varied, where 0 takes them for nothing. 0.1 is plenty.

    Raises:
        ModelError: there is no observation, or scipy is not installed.
    """
    if not len(seen):
        raise ModelError("there is nothing to fit: not one observation")
    family = family.of(workload)
    compute = family.columns(family.compute, seen.configurations, workload)
    if not family.loading:
        return StepTimeModel(family, workload, _side(family.compute, compute, seen.step_s, prior), None)
    loading = family.columns(family.loading, seen.configurations, workload)
    if seen.wait_share is not None and np.all(np.isfinite(seen.wait_share)):
        waits = np.clip(seen.wait_share, 0.0, 1.0)
        starving = waits > _FED
        # A starving step is as long as its data takes, and its computing is what is left without the wait.
        computing = waits < 1.0
        first = _side(family.compute, compute[computing], (seen.step_s * (1 - waits))[computing], prior)
        second = _loading_side(family, loading, seen.step_s, starving, prior)
        return StepTimeModel(family, workload, first, second)
    bound = _bound_by_data(compute, loading, seen.step_s)
    first = _side(family.compute, compute[~bound], seen.step_s[~bound], prior)
    second = _loading_side(family, loading, seen.step_s, bound, prior)
    return StepTimeModel(family, workload, first, second)


def _loading_side(family: Family, loading: Array, step_s: Array, bound: Flags, prior: float) -> Side:
    """What loading takes; as much as it could where no observation was bound by it.

    With fewer data workers than were ever tried the job may starve, and nothing says that it would not: the slope is
    the largest with which no observation would have waited. Nothing is known by it, so no interval ends there.
    """
    if bound.any():
        return _side(family.loading, loading[bound], step_s[bound], prior)
    slopes = np.zeros(len(family.loading))
    slopes[0] = float((step_s / loading[:, 0]).min())
    names = tuple(term.name for term in family.loading)
    return Side(family.loading, slopes, np.zeros((len(slopes),) * 2), float("nan"), 0, float("inf"), (names,))


def _bound_by_data(compute: Array, loading: Array, step_s: Array) -> Flags:
    """Which observations are bound by data, of shape (n,)."""
    order = np.argsort(-loading[:, 0], kind="stable")
    best: Flags = np.zeros(len(step_s), dtype=np.bool_)
    least, worth = _loss(compute, loading, step_s, best), _BETTER
    for share in _BEGINNINGS:
        bound: Flags = np.zeros(len(step_s), dtype=np.bool_)
        bound[order[: max(1, round(share * len(step_s)))]] = True
        for _ in range(_MOST_ROUNDS):
            times = _sides(compute, loading, step_s, bound)
            moved = times[1] > times[0]
            if np.array_equal(moved, bound):
                break
            bound = moved
        loss = _loss(compute, loading, step_s, bound)
        if loss < least * worth:
            best, least, worth = bound, loss, 1 - 1e-9
    return best


def _sides(compute: Array, loading: Array, step_s: Array, bound: Flags) -> tuple[Array, Array]:
    free = ~bound
    first = compute @ _slopes(compute[free], step_s[free]) if free.any() else np.zeros(len(step_s))
    second = loading @ _slopes(loading[~free], step_s[~free]) if not free.all() else np.zeros(len(step_s))
    return first, second


def _loss(compute: Array, loading: Array, step_s: Array, bound: Flags) -> float:
    """Sum of the squared relative errors of the maximum; a side of few observations must not hide behind the other."""
    times = np.maximum(*_sides(compute, loading, step_s, bound))
    return float((((times - step_s) / step_s) ** 2).sum())


def _slopes(columns: Array, times: Array, prior: float = 0.0, weights: Array | None = None) -> Array:
    """Non-negative slopes with the least relative error, shape (k,); weights of its squares: shape (n,)."""
    rows = columns / times[:, None]
    target = np.ones(len(rows))
    if weights is not None:
        rows, target = rows * np.sqrt(weights)[:, None], np.sqrt(weights)
    if prior > 0:
        usual = rows.mean(axis=0)
        present = np.flatnonzero(usual > 0)
        believed = np.sqrt(prior) * np.diag(usual)[present]
        rows = np.concatenate([rows, believed])
        target = np.append(target, np.full(len(present), np.sqrt(prior) / len(present)))
    norms = np.linalg.norm(rows, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    solution = _nnls(rows / scale, target)
    found: Array = np.where(norms > 0, solution / scale, 0.0)
    return found


def _settled(columns: Array, times: Array, prior: float) -> tuple[Array, Array]:
    """Slopes of which stragglers make little, and the weights of the observations: shapes (k,) and (n,)."""
    weights = np.ones(len(times))
    slopes = _slopes(columns, times, prior)
    for _ in range(_HUBER_ROUNDS):
        free = len(times) - int((slopes > 0).sum())
        if free <= 2:
            break  # too few to say which of them is off
        errors = np.abs(columns @ slopes / times - 1)
        deviation = _OF_MEDIAN * float(np.median(errors)) * (len(times) / free) ** 0.5
        weights = np.minimum(1.0, _HUBER * max(deviation, _LEAST_DEVIATION) / np.maximum(errors, _LEAST_DEVIATION))
        before, slopes = slopes, _slopes(columns, times, prior, weights)
        if np.allclose(slopes, before, rtol=_SETTLED):
            break
    return slopes, weights


def _side(terms: Sequence[Term], columns: Array, times: Array, prior: float) -> Side:
    num, num_terms = columns.shape
    names = tuple(term.name for term in terms)
    if not num:
        return Side(tuple(terms), np.zeros(num_terms), np.zeros((num_terms, num_terms)), float("nan"), 0, float("inf"),
                    (names,))  # fmt: skip
    slopes, weights = _settled(columns, times, prior)
    rows = columns / times[:, None]
    condition, confused = confused_terms(rows, names)
    # Also of slopes at their bound of 0: they may be above it by as much as the observations leave open.
    inverse, unseen, seen = lost_directions(rows * np.sqrt(weights)[:, None])
    covariance, noise, half_width = np.zeros((num_terms, num_terms)), float("nan"), float("inf")
    free = num - (num_terms - unseen.shape[1])
    if free > 0:
        noise = float(np.sqrt((((rows @ slopes) - 1) ** 2).sum() / free))
        covariance = noise**2 * inverse
        half_width = _student_t95(free)
    return Side(
        tuple(terms), slopes, covariance, noise, num, condition, confused, half_width, unseen, seen
    )  # fmt: skip


def _student_t95(free: int) -> float:
    """Half the width, in standard deviations, within which 95 of 100 lie with so many free observations."""
    from scipy.special import stdtrit

    return float(stdtrit(free, 0.975))


def _nnls(rows: Array, target: Array) -> Array:
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        raise ModelError(
            "the resource model needs scipy, which is not installed here. Run: pip install scipy"
        ) from error
    solution, _ = nnls(rows, target, maxiter=50 * rows.shape[1] + 100)
    found: Array = np.asarray(solution, dtype=np.float64)
    return found
