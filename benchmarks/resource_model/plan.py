"""The plans of one job: every configuration of a grid, its cost and its gain, reduced to the exact front. Pure.

DLRover-RM searches them with NSGA-II. A grid of 64 by 16 has a thousand points and takes less than a millisecond whole,
and the same input gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.resource_model.pareto import front
from benchmarks.resource_model.step_time import StepTimeModel
from benchmarks.resource_model.terms import Array, Configurations

# More than this is no grid of one job but a mistake: a million points take a quarter of a second.
MOST_POINTS = 4 << 20


@dataclass(frozen=True)
class Prices:
    """What resources cost.

    Attributes:
        per_cpu: of one CPU for the time that is planned for.
        per_process: of a trainer, a server or a data worker besides its CPUs: its memory.
    """

    per_cpu: float = 1.0
    per_process: float = 0.0

    def of(self, configurations: Configurations) -> Array:
        """Costs (equation 7 of the paper), shape (n,)."""
        processes = configurations.trainers + configurations.servers + configurations.data_workers
        return self.per_cpu * configurations.cpus + self.per_process * processes


@dataclass(frozen=True)
class Plans:
    """The front of a job.

    Attributes:
        configurations: by growing cost.
        costs: of each, shape (n,).
        gains: samples a second more than now, less what the change costs, shape (n,).
        samples_per_s: that the model predicts, shape (n,).
    """

    configurations: Configurations
    costs: Array
    gains: Array
    samples_per_s: Array

    def __len__(self) -> int:
        return len(self.costs)


def grid(**choices: Sequence[float]) -> Configurations:
    """Every combination of the choices; names as in `Configurations.of`.

    Raises:
        ValueError: too many, or none.
    """
    num = math.prod(len(values) for values in choices.values())
    if not 0 < num <= MOST_POINTS:
        raise ValueError(f"a grid of {num} points: between 1 and {MOST_POINTS:,}")
    if len(choices) == 1:
        return Configurations.of(**choices)
    axes = np.meshgrid(*(np.asarray(values, dtype=np.float64) for values in choices.values()), indexing="ij")
    return Configurations.of(**{name: axis.ravel() for name, axis in zip(choices, axes, strict=True)})


def plans(
    model: StepTimeModel,
    candidates: Configurations,
    now: Configurations,
    prices: Prices,
    *,
    change_s: float = 0.0,
    horizon_s: float = math.inf,
    most_cost: float = math.inf,
) -> Plans:
    """The job's front, with what it has now.

    Args:
        model: of the job.
        candidates: configurations that are allowed.
        now: the one that it has, of length 1.
        prices: of resources.
        change_s: time in which nothing is trained while the job changes.
        horizon_s: time over which a change must pay: what is left of the job.
        most_cost: of a plan.
    """
    together = now.joined(candidates)
    speeds = model.samples_per_s(together)
    costs = prices.of(together)
    lost = speeds * min(1.0, change_s / horizon_s) if horizon_s > 0 else speeds
    gains = speeds - speeds[0] - lost
    gains[0] = 0.0
    allowed = np.flatnonzero(costs <= most_cost)
    chosen = allowed[front(costs[allowed], gains[allowed])]
    return Plans(together[chosen], costs[chosen], gains[chosen], speeds[chosen])


def fastest(found: Plans, enough: float = 0.99) -> int:
    """The cheapest plan that has this share of the greatest speed: the last percent costs the most.

    Raises:
        ValueError: there is no plan.
    """
    if not len(found):
        raise ValueError("no plan is within the limits")
    return int(np.argmax(found.samples_per_s >= enough * found.samples_per_s.max()))
