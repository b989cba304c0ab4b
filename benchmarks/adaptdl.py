"""AdaptDL (Pollux, OSDI'21) in DLRover-RM's setting: workers by goodput. Written from the paper's formulas.

A step takes (gradient^y + sync^y)^(1/y): the gradient's time is the same for any number of workers, as each keeps its
batch; synchronisation takes a constant and, for each worker beyond two, a slope. Fitted to what was measured, by the
root mean square of logarithms; until two numbers of workers are known, synchronisation counts as free. What is shared
out maximises the harmonic mean of the jobs' speedups over an equal share, each less what a change costs; nobody gets
more than twice as many workers as he ever had.

Pollux also changes the batch and with it the statistical efficiency. Here the jobs are asynchronous and their batch and
number of steps are set, so efficiency is 1 and goodput is throughput. It knows no parameter servers: jobs keep theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from benchmarks.resource_model.terms import Array, Configurations
from benchmarks.schedulers import CORES, EVERY_S, Job, Scheduler, cores_of, with_more

# Of y, as published; and the least of the other parameters, so that logarithms exist.
_MOST_OVERLAP, _LEAST_S = 10.0, 1e-4
_MOST_GROWTH = 2


def step_s(parameters: Array, workers: Array) -> Array:
    """How long steps take with so many workers, by (gradient, constant, slope, y)."""
    gradient, constant, slope, overlap = parameters
    sync = np.where(workers > 1, constant + slope * np.maximum(workers - 2, 0), 0.0)
    found: Array = gradient * (1.0 + (sync / gradient) ** overlap) ** (1.0 / overlap)
    return found


def fitted(workers: Array, measured_s: Array) -> Array:
    """The parameters that explain what was measured best."""
    if len(np.unique(workers)) < 2:
        return np.array([float(np.exp(np.log(measured_s).mean())), 0.0, 0.0, 1.0])
    from scipy.optimize import minimize

    scale_s = float(measured_s.min())

    def error(parameters: Array) -> float:
        return float(np.square(np.log(step_s(parameters, workers)) - np.log(measured_s / scale_s)).mean())

    bounds = [(_LEAST_S, None), (0.0, None), (0.0, None), (1.0, _MOST_OVERLAP)]
    found = minimize(error, np.array([0.9, 0.05, 0.01, 1.5]), method="L-BFGS-B", bounds=bounds).x
    return np.array([found[0] * scale_s, found[1] * scale_s, found[2] * scale_s, found[3]])


def goodput_scheduler(change_s: float) -> Scheduler:
    """AdaptDL's, every round.

    Args:
        change_s: what a change costs, which the scheduler knows.
    """

    def act(jobs: Sequence[Job]) -> list[Configurations]:
        per_worker = float(jobs[0].have.trainer_cpus[0])
        free = CORES - sum(cores_of(job.have) - job.have.trainers[0] * per_worker for job in jobs)
        fair = max(1.0, free / per_worker / len(jobs))
        choices, values = [], []
        for job in jobs:
            assert job.seen is not None
            tried = job.seen.configurations.trainers
            workers = np.arange(1, int(min(_MOST_GROWTH * tried.max(), free / per_worker)) + 1).astype(np.float64)
            parameters = fitted(tried, job.seen.step_s)
            speedup = workers / step_s(parameters, workers) * step_s(parameters, np.array([fair])) / fair
            age_s = EVERY_S * len(tried)
            num_changes = int(np.count_nonzero(np.diff(tried)))
            after = max(0.0, age_s - num_changes * change_s) / (age_s + change_s)
            choices.append(workers)
            values.append(np.where(workers == job.have.trainers[0], speedup, speedup * after))
        best = _best(choices, values, free / per_worker)
        return [with_more(job.have, trainers=num - job.have.trainers[0]) for job, num in zip(jobs, best, strict=True)]

    return act


def _best(choices: Sequence[Array], values: Sequence[Array], workers: float) -> list[float]:
    """One choice a job, with the greatest harmonic mean of values; the paper searches, a few jobs can be enumerated."""
    *others, last = range(len(choices))
    found, least = [float(one[0]) for one in choices], np.inf
    for places in product(*(range(len(choices[job])) for job in others)):
        left = workers - sum(float(choices[job][at]) for job, at in zip(others, places, strict=True))
        num = int(np.searchsorted(choices[last], left, side="right"))
        if not num:
            continue
        # The least sum of inverses is the greatest harmonic mean.
        cost = sum(1.0 / max(float(values[job][at]), 1e-12) for job, at in zip(others, places, strict=True))
        costs = cost + 1.0 / np.maximum(values[last][:num], 1e-12)
        at = int(np.argmin(costs))
        if costs[at] < least:
            least = float(costs[at])
            chosen = [float(choices[job][place]) for job, place in zip(others, places, strict=True)]
            found = [*chosen, float(choices[last][at])]
    return found
