"""Plans of several jobs together, within what the cluster has. Pure.

`upgrades` takes, again and again, the upgrade that brings most for its cost; if serving the one job first that gains
most alone brings more, it does that. What it gains is at least half of the best gain, and mostly nearly all of it:
`docs/measured/model.txt`, and `tests/slurm_plugin/policy/test_packing.py`, which compares all choices.
Choosing whole plans by gain over cost, which is how the paper's equation 12 reads, favours tiny ones. `exact` is the
best there is, for scoring; its time grows with jobs times capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.resource_model.pareto import front, upper_hull
from benchmarks.resource_model.terms import Array


@dataclass(frozen=True)
class Candidates:
    """The plans of one job, as a front.

    Attributes:
        costs: by growing cost, shape (n,); the first is what the job has in any case.
        values: what each is worth, growing, shape (n,): its gain times the job's weight.
    """

    costs: Array
    values: Array


@dataclass(frozen=True)
class Choice:
    """One plan for each job.

    Attributes:
        plans: index of the plan for each job.
        cost, value: of all together.
    """

    plans: tuple[int, ...]
    cost: float
    value: float


def weight(remaining_s: float, rho: float = 2.5, epsilon: float = 1e-9) -> float:
    """The paper's weight of a job (equation 14): the less time it has left, the more it counts."""
    return float((remaining_s + epsilon) ** -rho)


def upgrades(jobs: Sequence[Candidates], capacity: float) -> Choice:
    """Upgrade by upgrade, the one of most value for its cost first, then whatever still fits.

    Args:
        jobs: the candidates of each; what they have in any case is taken to fit.
        capacity: cost that all may have together.
    """
    hulls = [upper_hull(job.costs, job.values) for job in jobs]
    steps = [
        (_slope(choices, before, after), job, before, after)
        for job, (choices, hull) in enumerate(zip(jobs, hulls, strict=True))
        for before, after in pairwise(hull.tolist())
    ]
    steps.sort(key=lambda step: (-step[0], step[1], step[2]))
    least = [int(hull[0]) if len(hull) else 0 for hull in hulls]
    found = _upgraded(jobs, least, steps, capacity)
    alone = _best_alone(jobs, least, capacity)
    if alone is None:
        return found
    other = _upgraded(jobs, alone, steps, capacity)
    return other if other.value > found.value else found


def _best_alone(jobs: Sequence[Candidates], least: Sequence[int], capacity: float) -> list[int] | None:
    """The plan in which one job gains most alone, and the others have what they have in any case; None without a job.

    A small upgrade that brings much for its cost may take the room of a large one that brings far more.
    """
    left = capacity - sum(float(job.costs[at]) for job, at in zip(jobs, least, strict=True))
    gains = []
    for number, (job, at) in enumerate(zip(jobs, least, strict=True)):
        fits = np.flatnonzero(job.costs - job.costs[at] <= left)
        best = int(fits[np.argmax(job.values[fits])]) if len(fits) else at
        gains.append((float(job.values[best] - job.values[at]), -number, best))
    if not gains:
        return None
    _, number, best = max(gains)
    return [*least[:-number], best, *least[-number + 1 :]]


def _upgraded(
    jobs: Sequence[Candidates], begin: Sequence[int], steps: Sequence[tuple[float, int, int, int]], capacity: float
) -> Choice:
    plan = list(begin)
    left = capacity - sum(float(job.costs[at]) for job, at in zip(jobs, plan, strict=True))
    for _, job, before, after in steps:
        extra = float(jobs[job].costs[after] - jobs[job].costs[before])
        if plan[job] == before and extra <= left:
            plan[job], left = int(after), left - extra
    _fill(jobs, plan, left)
    return _choice(jobs, plan)


def _slope(choices: Candidates, before: int, after: int) -> float:
    """What an upgrade brings for its cost."""
    return float(
        (choices.values[after] - choices.values[before]) / max(choices.costs[after] - choices.costs[before], 1e-300)
    )


def _fill(jobs: Sequence[Candidates], plan: list[int], left: float) -> None:
    """Spend what is left on plans beside the hulls, the best single step first, until nothing fits."""
    while True:
        best: tuple[float, int, int] | None = None
        for job, choices in enumerate(jobs):
            at = plan[job]
            more = np.flatnonzero(choices.costs[at + 1 :] - choices.costs[at] <= left) + at + 1
            if len(more) and choices.values[more[-1]] > choices.values[at]:
                step = (-float(choices.values[more[-1]] - choices.values[at]), job, int(more[-1]))
                best = step if best is None else min(best, step)
        if best is None:
            return
        _, job, after = best
        left -= float(jobs[job].costs[after] - jobs[job].costs[plan[job]])
        plan[job] = after


def exact(jobs: Sequence[Candidates], capacity: float) -> Choice:
    """The best choice, by fronts of the first one, two, three jobs and so on: nothing that is beaten is kept."""
    costs, values, plan_of = np.zeros(1), np.zeros(1), np.zeros((1, 0), dtype=np.int64)
    least_after = np.append(np.cumsum([job.costs.min() for job in jobs][::-1])[::-1][1:], 0.0)
    for job, reserved in zip(jobs, least_after, strict=True):
        all_costs = (costs[:, None] + job.costs[None, :]).ravel()
        all_values = (values[:, None] + job.values[None, :]).ravel()
        fits = np.flatnonzero(all_costs <= capacity - reserved + 1e-9)
        kept = fits[front(all_costs[fits], all_values[fits])]
        before, chosen = np.divmod(kept, len(job.costs))
        costs, values = all_costs[kept], all_values[kept]
        plan_of = np.concatenate([plan_of[before], chosen[:, None]], axis=1)
    if not len(values):
        raise ValueError("what the jobs have in any case is more than the capacity")
    return _choice(jobs, plan_of[int(np.argmax(values))].tolist())


def joint_front(jobs: Sequence[Candidates], capacity: float) -> tuple[Array, Array]:
    """Costs and values of everything that no other choice of all jobs together beats."""
    costs, values = np.zeros(1), np.zeros(1)
    for job in jobs:
        costs = (costs[:, None] + job.costs[None, :]).ravel()
        values = (values[:, None] + job.values[None, :]).ravel()
        fits = np.flatnonzero(costs <= capacity)
        kept = fits[front(costs[fits], values[fits])]
        costs, values = costs[kept], values[kept]
    return costs, values


def _choice(jobs: Sequence[Candidates], plan: Sequence[int]) -> Choice:
    cost = sum(float(job.costs[at]) for job, at in zip(jobs, plan, strict=True))
    value = sum(float(job.values[at]) for job, at in zip(jobs, plan, strict=True))
    return Choice(tuple(plan), cost, value)
