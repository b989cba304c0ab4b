"""How many data workers each job may have: (pool, demands) -> limits with reasons. Pure; the clock has no part in it.

Called by the daemon's registry, which takes any function of this form (`Policy`) in the place of `allocate`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """What one job asks for.

    Attributes:
        job: its id, such as `8123`.
        minimum: data workers that it has in any case; the policy cannot go below.
        wanted: data workers that it would have if nobody else wanted any, at least `minimum`.
        cpus: of each of its data workers, at least 1.
        weight: above 0; a job of twice the weight has a right to twice the CPUs.
        current: data workers that it has; those beyond `wanted` it keeps as long as nobody wants their CPUs.
    """

    job: str
    minimum: int
    wanted: int
    cpus: int
    weight: float = 1.0
    current: int = 0


@dataclass(frozen=True, slots=True)
class Pool:
    """What is divided.

    Attributes:
        cpus: that data workers of these jobs hold, or could have now.
        demands: one for each job.
    """

    cpus: int
    demands: tuple[Demand, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """What one job may have.

    Attributes:
        limit: data workers, the minimum among them.
        reason: for its user and for the admin.
    """

    limit: int
    reason: str


Policy = Callable[[Pool], dict[str, Decision]]


def allocate(pool: Pool) -> dict[str, Decision]:
    """Weighted max-min fairness over minimum to wanted, one data worker at a time.

    The next data worker goes to the job that has the fewest CPUs for its weight, until nobody wants more or nothing
    fits. A job whose data worker no longer fits leaves what remains to those with smaller ones. What nobody wants is
    left to those that have it. Equal jobs are taken in the order of their ids, so that equal input gives equal limits.
    """
    limits = {demand.job: demand.minimum for demand in pool.demands}
    left = pool.cpus - sum(demand.minimum * demand.cpus for demand in pool.demands)
    left = _fill(pool, limits, left, {demand.job: demand.wanted for demand in pool.demands})
    _fill(pool, limits, left, {demand.job: demand.current for demand in pool.demands})
    return {demand.job: Decision(limits[demand.job], _reason(pool, demand, limits)) for demand in pool.demands}


def _fill(pool: Pool, limits: dict[str, int], left: int, targets: Mapping[str, int]) -> int:
    """Raise limits towards the targets, and return how many CPUs are left."""
    queue = [
        (limits[demand.job] * demand.cpus / demand.weight, demand.job, demand)
        for demand in pool.demands
        if limits[demand.job] < targets[demand.job]
    ]
    heapq.heapify(queue)
    while queue:
        _, job, demand = queue[0]
        if demand.cpus > left:
            heapq.heappop(queue)
            continue
        left -= demand.cpus
        limits[job] += 1
        if limits[job] < targets[job]:
            heapq.heapreplace(queue, (limits[job] * demand.cpus / demand.weight, job, demand))
        else:
            heapq.heappop(queue)
    return left


def _reason(pool: Pool, demand: Demand, limits: dict[str, int]) -> str:
    limit = limits[demand.job]
    if limit > demand.wanted:
        return f"it wants {demand.wanted} and keeps {limit}: nobody wants their CPUs"
    if limit == demand.wanted:
        return f"all that it wants: {demand.wanted}"
    sharing = f"{pool.cpus} CPUs are shared by {len(pool.demands)} job(s)"
    if limit > demand.minimum:
        return f"{limit} of {demand.wanted}: {sharing}, its weight is {demand.weight:g}"
    return f"its minimum {limit} of {demand.wanted}: {sharing}, and no more of {demand.cpus} CPUs fit its share"
