"""The policies by name, and the rules that hold under any of them.

A policy is a function of the form `Policy`, and a line in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from hetstream.slurm_plugin.errors import PolicyError
from hetstream.slurm_plugin.policy.filling import (
    ascending,
    fill_by_gain,
    fill_in_order,
    fill_to_level,
    pieces_of,
    saturation_of,
    with_reasons,
)
from hetstream.slurm_plugin.policy.rules import (
    FALL_BACK_AFTER_S,
    FLOOR,
    FREEZE_AFTER_S,
    MACHINE_CPUS_PER_GPU,
    MoveCost,
    with_caps,
    with_floor,
    with_staleness,
    with_steadiness,
)
from hetstream.slurm_plugin.policy.table import Allocation, Floats, JobTable, Policy, Pool, Reason, checked

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
    """What holds under any policy; see `rules.py`.

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
