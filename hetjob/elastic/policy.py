"""How many data workers a trainer needs: measured rates in, numbers out. Pure; called by `controller.py`.

A trainer that never waited would take `steps_per_s / (1 - wait_share)`; a data worker that is never idle makes what its
busy time says. The quotient is the number of data workers, before anything is tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetstream.hetjob.elastic.snapshot import Companion, CompanionState, Snapshot

# Nearly all of the time waited tells nothing of how fast the trainer would be: at most so many times faster.
_MOST_SPEED_UP = 20.0


def demand_per_s(snapshot: Snapshot) -> float:
    """Steps per second that the training loops would take if they never waited for data."""
    return snapshot.steps_per_s / max(1.0 - snapshot.wait_share, 1.0 / _MOST_SPEED_UP)


def rate_of_one(snapshot: Snapshot, cpus: int) -> float:
    """Steps per second of one data worker with so many CPUs; 0 while none was measured."""
    measured = [companion for companion in snapshot.of(CompanionState.WORKING) if companion.rate_per_s > 0]
    same = [companion.rate_per_s for companion in measured if companion.cpus == cpus]
    if same:
        return sum(same) / len(same)
    if snapshot.fixed and snapshot.fixed_rate_per_s > 0:
        return snapshot.fixed_rate_per_s / snapshot.fixed
    total_cpus = sum(companion.cpus for companion in measured)
    return cpus * sum(companion.rate_per_s for companion in measured) / total_cpus if total_cpus else 0.0


def capacity_per_s(snapshot: Snapshot) -> float:
    """Steps per second that all data workers would make if none were ever idle, however fast the trainer is."""
    return snapshot.fixed_rate_per_s + sum(companion.rate_per_s for companion in snapshot.of(CompanionState.WORKING))


def needed(snapshot: Snapshot, cpus: int, headroom: float) -> int | None:
    """Data workers that would make `headroom` times what the trainer could take; None while their rate is not known."""
    rate = rate_of_one(snapshot, cpus)
    return max(1, math.ceil(demand_per_s(snapshot) * headroom / rate - 1e-9)) if rate > 0 else None


def slowest(companions: Sequence[Companion], count: int) -> list[Companion]:
    """So many of them, those that help least first: the slowest, of equal ones the youngest."""
    return sorted(companions, key=lambda companion: (companion.rate_per_s, -companion.since, companion.job_id))[:count]
