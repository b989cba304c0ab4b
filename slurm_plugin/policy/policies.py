"""The policies by name, and the rules that hold under any of them. Pure.

A policy is a function of the form `Policy`, and a line in `POLICIES`. The rules are limits of a user's and of a
tenant's data workers, in CPUs: a group that the policy would give more than its cap is divided by the same policy
within its cap; what it leaves goes to the others. A cap holds at every moment: a job of a capped group grows only as
far as what its group still holds leaves room. Minimums stay: they are parts of jobs that run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from hetstream.slurm_plugin.errors import PolicyError
from hetstream.slurm_plugin.policy.filling import (
    Pieces,
    ascending,
    fill_by_gain,
    fill_in_order,
    fill_to_level,
    limits_of,
    pieces_of,
    saturation_of,
    speed_at,
    take,
    with_reasons,
)
from hetstream.slurm_plugin.policy.table import (
    NO_CAP,
    Allocation,
    Codes,
    Floats,
    Ints,
    JobTable,
    Policy,
    Pool,
    Reason,
    checked,
)

# Stands for every user, or every tenant, that has no cap of its own.
EVERYBODY = "*"
# CPUs that one group leaves may bring the next above its cap; after these rounds every group that could is capped.
_MAX_ROUNDS = 4


def caps_of(names: Iterable[str], caps: Mapping[str, int]) -> Ints | None:
    """Return the caps of groups in the order of their codes; None if there are none at all.

    Args:
        names: of the groups.
        caps: in CPUs, by name; `EVERYBODY` for those that are not named.
    """
    if not caps:
        return None
    return np.array([caps.get(name, caps.get(EVERYBODY, NO_CAP)) for name in names], np.int64)


def with_caps(policy: Policy) -> Policy:
    """Return the policy within `Pool.user_caps` and `Pool.tenant_caps`."""

    def capped(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        caps = ((table.user, pool.user_caps, Reason.USER_CAP), (table.tenant, pool.tenant_caps, Reason.TENANT_CAP))
        if pool.user_caps is None and pool.tenant_caps is None:
            return policy(table, pool, now_s)
        limited, why = table, np.full(len(table), -1, np.int8)
        found = policy(table, pool, now_s)
        for turn in range(_MAX_ROUNDS + 1):
            is_changed = False
            for group, cap, reason in caps:
                size = found.workers if turn < _MAX_ROUNDS else np.minimum(limited.wanted, limited.cap)
                for code in _over(group, cap, np.maximum(size, 0) * table.cpus, found.workers > table.minimum):
                    limited = _within(policy, limited, group == code, int(cap[code]), now_s, why, reason)  # type: ignore[index]
                    is_changed = True
            if not is_changed:
                break
            found = policy(limited, pool, now_s)
        workers = found.workers.copy()
        for group, cap, reason in caps:
            _hold_back(table, workers, group, cap, why, reason)
        is_limit = (limited.cap < table.cap) & (found.workers >= limited.cap)
        is_capped = (why >= 0) & (is_limit | (workers < found.workers))
        return Allocation(workers, np.where(is_capped, why, found.reasons).astype(np.int8))

    return capped


def _over(group: Ints, cap: Ints | None, cpus: Ints, counts: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[int]:
    """Codes of the groups above their caps, as far as any of their jobs has more than its minimum."""
    if cap is None or not len(group):
        return []
    caps = np.full(max(len(cap), int(group.max()) + 1), NO_CAP * NO_CAP, np.int64)
    caps[: len(cap)] = np.where(cap < NO_CAP, cap, NO_CAP * NO_CAP)
    used = np.bincount(group, weights=cpus, minlength=len(caps))
    movable = np.bincount(group, weights=counts, minlength=len(caps)) > 0
    return [int(code) for code in np.flatnonzero((used > caps) & movable)]


def _within(
    policy: Policy,
    table: JobTable,
    members: np.ndarray[tuple[int], np.dtype[np.bool_]],
    cap: int,
    now_s: float,
    why: Codes,
    reason: Reason,
) -> JobTable:
    """The table in which these jobs may have what the policy gives them of their cap alone."""
    own = policy(table.rows(members), Pool(cap), now_s).workers
    caps = table.cap.copy()
    caps[members] = np.minimum(caps[members], own)
    why[members] = reason
    return replace(table, cap=caps)


def _hold_back(table: JobTable, workers: Ints, group: Ints, cap: Ints | None, why: Codes, reason: Reason) -> None:
    """Let nobody grow into what others of his group have not given back yet. Changes `workers` and `why`."""
    held = np.maximum(table.current, table.minimum)
    grown = np.maximum(workers, held) * table.cpus
    for code in _over(group, cap, grown, workers > held):
        members = np.flatnonzero((group == code) & (workers > held))
        room = int(cap[code]) - int((held * table.cpus)[group == code].sum())  # type: ignore[index]
        more = take((workers - held)[members], table.cpus[members], room)
        why[members] = np.where(more < (workers - held)[members], reason, why[members])
        workers[members] = held[members] + more


# A floor of speed: no running job is starved for the sake of the others, as far as the pool goes.
#
# Each job has, before the policy divides the rest, as many data workers as bring it to the floor. Where the pool is too
# small even for that, who has been below the floor for longest is first, so that in the end everybody's turn comes: age
# beats every priority. Put `steady` around it, so that whoever had his turn keeps it for a while.

# 5 % of the greatest speed: costs the mean completion time a percent where the cluster is not overloaded.
FLOOR = 0.05


def with_floor(policy: Policy, floor: float = FLOOR) -> Policy:
    """Return the policy above this floor.

    Args:
        policy: divides what is above the floor.
        floor: share of the speed of a trainer that never waits for data; 0 for none.
    """

    def floored(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        lifted = _lifted(table, pool, floor)
        found = policy(replace(table, minimum=lifted), pool, now_s)
        is_floor = (lifted > table.minimum) & (found.workers == lifted) & (found.reasons == Reason.MINIMUM)
        return Allocation(found.workers, np.where(is_floor, Reason.FLOOR, found.reasons).astype(np.int8))

    return floored


def workers_for(table: JobTable, pieces: Pieces, speed: float) -> Ints:
    """Data workers, at least the minimum, with which each job has this speed, or the greatest that it can have."""
    per_worker = pieces.slope * table.cpus[:, None]
    short = np.maximum(speed - pieces.speed[:, :-1], 0.0)
    needed = np.ceil(np.divide(short, per_worker, out=np.zeros_like(short), where=per_worker > 0) - 1e-9)
    workers: Ints = table.minimum + np.minimum(needed, pieces.count).astype(np.int64).sum(axis=1)
    return workers


def _lifted(table: JobTable, pool: Pool, floor: float) -> Ints:
    more = workers_for(table, pieces_of(table), floor) - table.minimum
    # Of those that starve for as long, the least need first: so more of them are brought to the floor.
    order = np.lexsort((more * table.cpus, -table.starved_s))
    budget = pool.cpus - int((table.minimum * table.cpus).sum())
    lifted: Ints = table.minimum.copy()
    lifted[order] += take(more[order], table.cpus[order], budget)
    return lifted


# What to do with jobs of whose speed nothing has been heard for a while: leave them as they are, and then guess.
#
# A frozen job keeps what it has, as far as the pool goes: neither a policy nor a broken measurement moves it. After a
# longer time it counts as one that needs as many CPUs for a GPU as the site's machines have.

FREEZE_AFTER_S = 300.0
FALL_BACK_AFTER_S = 3600.0
# Of the machines of the published traces 8 to 12.
MACHINE_CPUS_PER_GPU = 8.0


def with_staleness(
    policy: Policy,
    freeze_after_s: float = FREEZE_AFTER_S,
    fall_back_after_s: float = FALL_BACK_AFTER_S,
    cpus_per_gpu: float = MACHINE_CPUS_PER_GPU,
) -> Policy:
    """Return the policy, for the jobs of which something is known.

    Args:
        policy: divides.
        freeze_after_s: what is known is older: the job stays as it is.
        fall_back_after_s: older still: the machine's ratio.
        cpus_per_gpu: of the site's machines.
    """

    def patient(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        is_old = table.stale_s >= freeze_after_s
        if not is_old.any():
            return policy(table, pool, now_s)
        is_lost = table.stale_s >= fall_back_after_s
        is_frozen = is_old & ~is_lost
        guessed = _by_ratio(table, is_lost, cpus_per_gpu)
        extra = np.where(is_frozen, np.maximum(table.current - table.minimum, 0), 0)
        kept = take(extra, table.cpus, pool.cpus - int((table.minimum * table.cpus).sum()))
        frozen = guessed.minimum + kept
        guessed = replace(
            guessed,
            minimum=frozen,
            wanted=np.where(is_frozen, frozen, guessed.wanted),
        )
        found = policy(guessed, pool, now_s)
        reasons = np.select([is_frozen, is_lost], [Reason.FROZEN, Reason.MACHINE_RATIO], found.reasons)
        return Allocation(found.workers, reasons.astype(np.int8))

    return patient


def _by_ratio(table: JobTable, is_lost: np.ndarray[tuple[int], np.dtype[np.bool_]], cpus_per_gpu: float) -> JobTable:
    knee = cpus_per_gpu * np.maximum(table.gpus, 1.0)
    wanted = np.maximum(np.minimum(table.wanted, np.ceil(knee / table.cpus).astype(np.int64)), table.minimum)
    cpus, speed = table.curve_cpus.copy(), table.curve_speed.copy()
    cpus[is_lost, 1:], speed[is_lost, 1:] = knee[is_lost, None], 1.0
    cpus[is_lost, 0], speed[is_lost, 0] = 0.0, 0.0
    return replace(table, wanted=np.where(is_lost, wanted, table.wanted), curve_cpus=cpus, curve_speed=speed)


# A move must pay: what a job has is changed only where that is worth the time in which the moved CPUs do nothing.
#
# Between an allocation and its effect lie a report, the job's cooldown, the drain of one data worker and the start of
# another. A job is given more where what it gains in the time in which it surely keeps it exceeds that; less only where
# somebody has use for it, and not soon after its last change. A job that is new is not made to wait for its part, nor
# one below the floor of speed for what brings it there: they take from whoever the policy names, but nobody below the
# floor soon after his last change. Where not even the floors of all fit, jobs so have theirs in turn. What nobody wants
# stays with those that have it.


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
    """Return the policy without moves that do not pay.

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
    """Data workers that are given back, in this order, until they have a number of CPUs together."""
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


# GoldMiner's SRTF: the job whose remaining work needs the least CPU time comes first.
#
# The cost of a piece is remaining work x CPUs / speed at its end. A job whose remaining work is not known counts as the
# median of the others, which one wrong estimate does not move. One whose estimate is uncertain counts as long as it is
# on average, which is longer than its median.

# Beyond this the mean of a log-normal is all tail: an estimate that says nothing counts 7 times its median.
_LARGEST_SIGMA = 2.0


def srtf(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    cost = pieces.end * table.cpus[:, None] / np.maximum(pieces.speed[:, 1:], 1e-12)
    return fill_in_order(table, pool, pieces, cost * (expected_remaining_s(table) / table.weight)[:, None])


def expected_remaining_s(table: JobTable) -> Floats:
    """Work left on average, in seconds at speed 1."""
    mean = table.remaining_s * np.exp(np.minimum(table.remaining_sigma, _LARGEST_SIGMA) ** 2 / 2)
    is_known = np.isfinite(mean)
    usual_s = float(np.median(mean[is_known])) if is_known.any() else 1.0
    return np.where(is_known, np.maximum(mean, 0.0), usual_s)


# DLRover-RM's weighted selection, as upgrades: RE x WG, gain for its cost times a weight for jobs that end soon.
#
# RE is speed (once for each GPU) for each CPU; WG is 1 / (time that is left + 1 s)^rho, with the time that is left if
# the job has all that makes it faster. What is maximised is the sum of gain x WG over all jobs: with data workers of
# one size it is the greatest, with several at least half of that. It is not the paper's equation 12 as printed, the sum
# of gain / cost x WG of one plan for each job, which favours plans of a single CPU: of that the result is seldom the
# greatest, and some four fifths on average in the small cases that a test enumerates.

# The paper's: a large one favours short jobs, with 0 all count alike.
RHO = 2.5
_EPSILON_S = 1.0


def dlrover(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    best_speed = np.maximum(pieces.speed[:, -1], 1e-12)
    # Logarithms: the ratio of the greatest and the least weight has more digits than a float.
    weight = -RHO * np.log(expected_remaining_s(table) / best_speed + _EPSILON_S) + np.log(table.weight)
    gain = np.log(np.maximum(pieces.slope, 1e-300)) + np.log(np.maximum(table.gpus, 1.0))[:, None]
    return fill_by_gain(table, pool, pieces, gain + weight[:, None])


# GoldMiner's Fair: all jobs at one speed, as a share of the speed that each would have if it never waited for data.
#
# Water-filling: each data worker goes to the job with the lowest speed for its weight. The lowest of all speeds is the
# greatest that there can be. Where not all can have a data worker, those with the smallest come first, so that as many
# as can be are raised. Above the lowest, the speeds are near the best (leximin) and not always the best. It believes
# what jobs measure.


def fair(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    top = saturation_of(table, pieces)
    # Speed grows with the CPUs, so a curve that is cut at its ends is cut at their speeds.
    knots = np.clip(table.curve_cpus / table.cpus[:, None], table.minimum[:, None], top[:, None])
    speed = np.clip(table.curve_speed, pieces.speed[:, :1], pieces.speed[:, -1:])
    return with_reasons(table, pool, pieces, fill_to_level(table, pool, top, knots, speed / table.weight[:, None]))


# What nobody wants stays with those that have it: the end of a job's wish is no reason to drain its data workers.


def with_leftovers(policy: Policy) -> Policy:
    """Return the policy, after which jobs keep what they have, as far as CPUs are left; the least for its
    weight first.
    """

    def kept(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        found = policy(table, pool, now_s)
        top = np.maximum(np.minimum(table.current, table.cap), found.workers)
        knots = np.stack([np.zeros_like(top), top], axis=1).astype(np.float64)
        levels = knots * (table.cpus / (table.weight * np.maximum(table.gpus, 1.0)))[:, None]
        workers = fill_to_level(replace(table, minimum=found.workers), pool, top, knots, levels)
        reasons = np.where(workers > found.workers, Reason.KEPT, found.reasons).astype(np.int8)
        return Allocation(workers, reasons)

    return kept


# GoldMiner's MaxTP: a great sum of speeds. Each CPU goes where it brings most; a job counts once for each GPU.
#
# The sum is the greatest where all data workers have one size. With several it may not be: what is left over after the
# best ones may be too small for the next. It is never below half of the greatest, and 98 % of it on average over the
# instances of `tests/slurm_plugin/policy/test_packing.py`, which are compared with all allocations.


def maxtp(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    gain = pieces.slope * (table.gpus * table.weight)[:, None]
    return fill_by_gain(table, pool, pieces, np.log(np.maximum(gain, 1e-300)))


# Weighted max-min fairness of CPUs: the next data worker goes to the job with the fewest CPUs for its weight.
#
# The weight counts once for each GPU. The daemon's own choice where an admin makes none: nothing that a job says of its
# speed gives it a right to more, so it needs no trust and no measurement.


def share(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    top = saturation_of(table, pieces)
    knots = np.stack([np.zeros_like(top), top], axis=1).astype(np.float64)
    levels = knots * (table.cpus / (table.weight * np.maximum(table.gpus, 1.0)))[:, None]
    return with_reasons(table, pool, pieces, fill_to_level(table, pool, top, knots, levels))


# Hetstream's own: SRTF's order, changed where that saves time, as long as nobody is later by it than SRTF's latest.
#
# SRTF orders jobs by remaining time x CPUs. Three things make a better order for the mean completion time:
#
# * Of two jobs with equal CPU work, one that needs fewer CPUs for longer is first: it takes little from the other, and
#   cannot make up for lost time by more CPUs later. So CPUs count with an exponent above 1.
# * A job that holds many GPUs is first: while it waits for data, they are held for nothing, and others may wait for
#   them.
# * A job that has data workers is before another of nearly the same work: moving them leaves CPUs idle for a while.
#
# Jobs that need many CPUs pay for that. So the policy foresees when each job would end if CPUs were given in an order:
# when the CPU work of all up to it is done, and not before it could be alone. The time from its submission to then, by
# the time that it needs alone, is its stretch. A job whose stretch would come near the greatest in SRTF's own order
# moves forward.

# Exponents. Chosen on lists of 88, 120 and 150 jobs from seeds 5000 on of `make bench-sched`'s generator: a mean
# below SRTF's and a worst slowdown not above it at all three loads. `make bench-sched` judges them on other lists.
WIDTH_POWER, GPU_POWER, STAY_POWER, LATE_POWER = 1.35, 0.2, 0.2, 2.0
# A job is late from this far below the greatest stretch in SRTF's order on, and never below this stretch.
LATE_MARGIN, LATE_FROM = 0.5, 1.3
_LEAST = 1e-12


def stretch(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    if not len(table) or not pieces.count.shape[1]:
        return fill_in_order(table, pool, pieces, np.zeros(pieces.count.shape))
    left_s = np.maximum(expected_remaining_s(table), 1.0)
    cpus = np.maximum(pieces.end * table.cpus[:, None], 1.0)
    need = np.log(cpus) - np.log(np.maximum(pieces.speed[:, 1:], _LEAST))
    alone_s = left_s / np.maximum(pieces.speed[:, -1], _LEAST)
    # A job whose whole length is not known is never late: its age says nothing then.
    is_known = np.isfinite(table.total_s)
    total_s = np.maximum(np.where(is_known, table.total_s, 0.0), left_s)

    def stretches(rank: Floats) -> Floats:
        order = ascending(rank + need[:, -1], np.arange(len(table)))
        ends_s = np.empty(len(table))
        ends_s[order] = np.cumsum((alone_s * cpus[:, -1])[order]) / max(pool.cpus, 1)
        return np.where(is_known, (table.age_s + np.maximum(ends_s, alone_s)) / total_s, 1.0)

    srtf = np.log(left_s) - np.log(table.weight)
    rank = srtf + (WIDTH_POWER - 1) * np.log(cpus[:, -1]) - GPU_POWER * np.log(np.maximum(table.gpus, 1.0))
    rank -= STAY_POWER * np.minimum(table.current * table.cpus / cpus[:, -1], 1.0)
    late = max(LATE_FROM, float(stretches(srtf).max()) - LATE_MARGIN)
    rank -= LATE_POWER * np.log(np.maximum(stretches(rank) / late, 1.0))
    return fill_in_order(table, pool, pieces, need + rank[:, None])


DEFAULT_POLICY = "share"
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"share": share, "fair": fair, "maxtp": maxtp, "srtf": srtf, "dlrover": dlrover, "stretch": stretch}
)


@dataclass(frozen=True)
class Rules:
    """What holds under any policy.

    Attributes:
        floor: share of its greatest speed that every job has, as far as the pool goes.
        move: what a change costs.
        freeze_after_s: a job of which nothing has been heard for longer stays as it is.
        fall_back_after_s: of which nothing has been heard for longer still counts by the machines' ratio.
        cpus_per_gpu: that ratio.
    """

    floor: float = FLOOR
    move: MoveCost = field(default_factory=MoveCost)
    freeze_after_s: float = FREEZE_AFTER_S
    fall_back_after_s: float = FALL_BACK_AFTER_S
    cpus_per_gpu: float = MACHINE_CPUS_PER_GPU


def under_all_rules(policy: Policy, rules: Rules | None = None) -> Policy:
    """Return the policy as the daemon runs it.

    Raises:
        PolicyError: when it is called: the policy gave out what it must not.
    """
    rules = rules or Rules()
    found = with_floor(checked(policy), rules.floor)
    found = with_staleness(found, rules.freeze_after_s, rules.fall_back_after_s, rules.cpus_per_gpu)
    found = with_steadiness(with_leftovers(found), rules.move, rules.floor)
    return with_caps(found)


def policy_named(name: str) -> Policy:
    """Return the policy of this name.

    Raises:
        PolicyError: there is none.
    """
    if name not in POLICIES:
        raise PolicyError(f"no policy {name!r}: there are {', '.join(POLICIES)}")
    return POLICIES[name]
