"""A move must pay: what a job has is changed only where that is worth the time in which the moved CPUs do nothing.

Between an allocation and its effect lie a report, the job's cooldown, the drain of one data worker and the start of
another. A job is given more where what it gains in the time in which it surely keeps it exceeds that; less only where
somebody has use for it, and not soon after its last change. A job that is new is not made to wait for its part, nor one
below the floor of speed for what brings it there: they take from whoever the policy names, but nobody below the floor
soon after his last change. Where not even the floors of all fit, jobs so have theirs in turn. What nobody wants stays
with those that have it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetstream.slurm_plugin.policy.curves import limits_of, pieces_of, saturation_of, speed_at
from hetstream.slurm_plugin.policy.filling import take
from hetstream.slurm_plugin.policy.floors import FLOOR, workers_for
from hetstream.slurm_plugin.policy.reasons import Reason
from hetstream.slurm_plugin.policy.table import Allocation, Floats, Ints, JobTable, Policy, Pool


@dataclass(frozen=True)
class MoveCost:
    """What a change costs.

    Attributes:
        report_s: until the job asks and hears of it.
        cooldown_s: from one change of a job's controller to its next.
        drain_s: until a data worker has finished the step that it is at.
        start_s: until a new one delivers.
        disturbance_s: work that a job loses by any change, as seconds at full speed: caches are cold, leases begin
            anew. It is why a few percent of speed more or less are no reason to move.
        noise: share of its data workers by which a job's wish swings without meaning it.
        hold_s: for so long after a change nothing is taken from a job, so the gain lasts as long. 12 minutes are at
            most 5 changes an hour.
    """

    report_s: float = 10.0
    cooldown_s: float = 10.0
    drain_s: float = 10.0
    start_s: float = 20.0
    disturbance_s: float = 40.0
    noise: float = 0.1
    hold_s: float = 720.0

    @property
    def idle_s(self) -> float:
        """For how long a moved CPU works for nobody."""
        return self.report_s + self.cooldown_s + self.drain_s + self.start_s


def with_steadiness(policy: Policy, cost: MoveCost | None = None, floor: float = FLOOR) -> Policy:
    """The policy without moves that do not pay.

    Args:
        policy: says where everybody should be.
        cost: of a move.
        floor: of speed.
    """
    cost = cost or MoveCost()

    def steady(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        aim = policy(table, pool, now_s)
        # Above its own limits a job has no claim to what it has.
        have = np.clip(table.current, table.minimum, np.maximum(table.cap, table.minimum))
        pieces = pieces_of(table)
        speed = _speed(table, have)
        shrinks = aim.workers < have
        lasts_s = _lasts_s(table, cost) - cost.idle_s
        is_new = ~np.isfinite(table.held_s)
        # Its whole part at once for a job that never had one; for one that is starved, what brings it to the floor.
        at_floor = workers_for(table, pieces, floor)
        first = np.where(is_new, aim.workers, np.minimum(at_floor, aim.workers))
        is_urgent = (first > have) & (speed < floor)
        # What was given within the last cooldown is still on its way.
        may_grow = (aim.workers > have) & ~is_urgent & (table.held_s >= cost.cooldown_s)
        use = np.minimum(limits_of(table), saturation_of(table, pieces))
        is_spare = shrinks & (have > use * (1 + cost.noise))
        may_shrink = is_spare | (shrinks & (table.held_s >= cost.hold_s))

        free = pool.cpus - int((have * table.cpus).sum())
        surplus = np.where(shrinks, have - aim.workers, 0)
        # What a job has up to the floor is taken soon after its last change only where the pool itself has shrunk.
        loose = np.where(may_shrink, surplus, np.minimum(surplus, np.maximum(have - at_floor, 0)))
        all_cpus = free + int((loose * table.cpus).sum())
        easy_cpus = free + int((surplus * table.cpus)[may_shrink].sum())
        oldest_first = np.argsort(-table.starved_s, kind="stable")
        more = _taken(table, np.where(is_urgent, first - have, 0), oldest_first, all_cpus)
        urgent_cpus = int((more * table.cpus).sum())
        wished = _taken(table, np.where(may_grow, aim.workers - have, 0), oldest_first, easy_cpus - urgent_cpus)
        pays = (_speed(table, have + wished) - speed) * lasts_s >= cost.disturbance_s
        more += np.where(pays | is_new, wished, 0)
        needed = int((more * table.cpus).sum()) - free
        # First what its owner has no use for, then from those that had theirs for longest.
        order = np.lexsort((-table.held_s, ~may_shrink, ~is_spare))
        given = _given(table, loose, order, needed)
        given += _given(table, surplus - loose, order, needed - int((given * table.cpus).sum()))
        workers = have + more - given
        return Allocation(workers, _reasons(table, aim, workers))

    return steady


def _speed(table: JobTable, workers: Ints) -> Floats:
    return speed_at(table, (workers * table.cpus).astype(np.float64))


def _lasts_s(table: JobTable, cost: MoveCost) -> Floats:
    """For how long a job surely has use for what it is given."""
    left: Floats = np.where(np.isfinite(table.remaining_s), np.minimum(table.remaining_s, cost.hold_s), cost.hold_s)
    return left


def _taken(table: JobTable, counts: Ints, order: np.ndarray[tuple[int], np.dtype[np.intp]], budget: int) -> Ints:
    taken = np.zeros_like(counts)
    taken[order] = take(counts[order], table.cpus[order], budget)
    return taken


def _given(table: JobTable, surplus: Ints, order: np.ndarray[tuple[int], np.dtype[np.intp]], needed: int) -> Ints:
    """Data workers that are given back, in this order, until so many CPUs are together."""
    given = np.zeros_like(surplus)
    counts, cpus = surplus[order], table.cpus[order]
    before = np.cumsum(counts * cpus) - counts * cpus
    given[order] = np.clip(-((before - needed) // cpus), 0, counts)
    return given


def _reasons(table: JobTable, aim: Allocation, workers: Ints) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    is_kept = (workers > aim.workers) & (workers > table.wanted)
    reasons = np.select(
        [workers == aim.workers, is_kept], [aim.reasons, np.full_like(aim.reasons, Reason.KEPT)], Reason.STEADY
    )
    return reasons.astype(np.int8)
