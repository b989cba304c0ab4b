"""How policies fill the pool with whole data workers: by an order of pieces, or up to one level of all jobs. Pure.

Both keep every job's minimum, give no CPU twice, give nothing that makes nobody faster, and leave no CPU on which a
data worker that makes somebody faster would fit. A job whose data worker no longer fits leaves what remains to those
with smaller ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.policy.table import Allocation, Floats, Ints, JobTable, Pool, Reason

# Speed against CPUs of data workers, as pieces of whole data workers. Pure; used by the policies and the rules.
#
# A measured curve has its bends where it was measured, which need not be at whole data workers of the size that a job
# asks for. A data worker across a bend is a piece of its own here, so what a piece says of each of its data workers is
# exact.

# A slope, in speed per CPU, that is a rounding error and not a gain: 1 CPU in a thousand million.
_NO_GAIN = 1e-9


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of the curves, (jobs, pieces) each, in the order in which a job takes them.

    Attributes:
        start: data workers before the piece.
        count: how many it has; 0 for padding, and where more CPUs bring nothing.
        slope: speed that each CPU of it brings; falls from piece to piece.
        speed: (jobs, pieces + 1): with the minimum, and at the end of each piece.
    """

    start: Ints
    count: Ints
    slope: Floats
    speed: Floats

    @property
    def end(self) -> Ints:
        """Data workers after each piece."""
        return self.start + self.count


def speed_at(table: JobTable, cpus: npt.NDArray[np.float64]) -> Floats:
    """Speeds with these CPUs of data workers.

    Args:
        table: has the curves.
        cpus: (jobs,) or (jobs, any number).
    """
    return along(table.curve_cpus, table.curve_speed, cpus)


def along(curve_cpus: Floats, curve_speed: Floats, cpus: npt.NDArray[np.float64]) -> Floats:
    """Speeds on curves, even between two points; beyond the last it stays.

    Args:
        curve_cpus, curve_speed: (jobs, points).
        cpus: (jobs,) or (jobs, any number).
    """
    flat = cpus.ndim == 1
    asked = cpus[:, None] if flat else cpus
    speed = np.repeat(curve_speed[:, :1], asked.shape[1], axis=1)
    for left in range(curve_cpus.shape[1] - 1):
        start, end = curve_cpus[:, left, None], curve_cpus[:, left + 1, None]
        rise = curve_speed[:, left + 1, None] - curve_speed[:, left, None]
        width = end - start
        slope = np.divide(rise, width, out=np.zeros_like(rise), where=width > 0)
        speed += slope * np.clip(asked - start, 0.0, width)
    return speed[:, 0] if flat else speed


def limits_of(table: JobTable) -> Ints:
    """Data workers that each job may have at most by its own wish and cap, at least its minimum."""
    limits: Ints = np.maximum(np.minimum(table.wanted, table.cap), table.minimum)
    return limits


def pieces_of(table: JobTable) -> Pieces:
    """Return the curves from each job's minimum to its limit, as far as they rise."""
    bends = _bends_of(table)
    cut = np.clip(bends.knots, table.minimum[:, None], limits_of(table)[:, None])
    start = cut[:, :-1]
    count = np.where(bends.slope > _NO_GAIN, cut[:, 1:] - start, 0)
    first = speed_at(table, (table.minimum * table.cpus).astype(np.float64)) if table.minimum.any() else bends.first
    speed = np.empty(cut.shape)
    speed[:, 0] = first
    np.cumsum(bends.slope * (count * table.cpus[:, None]), axis=1, out=speed[:, 1:])
    speed[:, 1:] += first[:, None]
    return Pieces(start, count, bends.slope, speed)


def saturation_of(table: JobTable, pieces: Pieces) -> Ints:
    """Data workers beyond which a job is not faster, or may not have more; at least its minimum."""
    saturation: Ints = np.where(pieces.count > 0, pieces.end, 0).max(axis=1, initial=0)
    return np.maximum(saturation, table.minimum)


@dataclass(frozen=True, eq=False)
class _Bends:
    """The curves at whole data workers, whatever minimums and limits are."""

    knots: Ints
    slope: Floats
    first: Floats


# The last few curves and what was made of them, the newest first. The rules ask for the same several times a round.
# Only arrays that nobody can write to are kept.
_known: list[tuple[tuple[npt.NDArray[Any], ...], _Bends]] = []
_MOST_KNOWN = 4


def _bends_of(table: JobTable) -> _Bends:
    given = (table.curve_cpus, table.curve_speed, table.cpus)
    is_fixed = not any(column.flags.writeable for column in given)
    if is_fixed:
        for known, bends in tuple(_known):
            if all(bend is other for bend, other in zip(known, given, strict=True)):
                return bends
    knots, speed = _whole_knots(table)
    cpus = np.diff(knots, axis=1) * table.cpus[:, None]
    gain = np.diff(speed, axis=1)
    bends = _Bends(knots, np.divide(gain, cpus, out=np.zeros_like(gain), where=cpus > 0), speed[:, 0])
    if is_fixed:
        _known.insert(0, (given, bends))
        del _known[_MOST_KNOWN:]
    return bends


def _whole_knots(table: JobTable) -> tuple[Ints, Floats]:
    """Bends at whole data workers, and the speeds there."""
    exact = table.curve_cpus / table.cpus[:, None]
    below = np.floor(exact)
    if np.array_equal(below, exact):
        return below.astype(np.int64), table.curve_speed
    both = np.empty((exact.shape[0], 2 * exact.shape[1]))
    both[:, ::2], both[:, 1::2] = below, np.ceil(exact)
    np.maximum.accumulate(both, axis=1, out=both)
    return both.astype(np.int64), speed_at(table, both * table.cpus[:, None])


# Data workers: a smaller part of one is an error of rounding.
_ROUNDING = 1e-9


def take(counts: Ints, sizes: Ints, budget: int) -> Ints:
    """Return how many of each are taken, in this order, as far as the budget goes; what does not fit is passed over.

    Args:
        counts: the most of each.
        sizes: CPUs of one.
        budget: CPUs.
    """
    taken = np.zeros_like(counts)
    fitting = np.flatnonzero((counts > 0) & (sizes <= budget))
    while len(fitting):
        total = np.cumsum(counts[fitting] * sizes[fitting])
        whole = int(np.searchsorted(total, budget, side="right"))
        taken[fitting[:whole]] = counts[fitting[:whole]]
        budget -= int(total[whole - 1]) if whole else 0
        if whole == len(fitting):
            break
        cut = fitting[whole]
        taken[cut] = budget // sizes[cut]
        budget -= int(taken[cut] * sizes[cut])
        # What was cut does not fit any more, so each turn ends with one size less: there are few sizes.
        fitting = fitting[whole + 1 :]
        fitting = fitting[sizes[fitting] <= budget]
    return taken


def ascending(keys: Floats, ties: Ints) -> npt.NDArray[np.intp]:
    """Return the order of keys, of equal ones by the second key, then as they stand.

    NumPy sorts several times as fast where equal keys may come in any order, and most keys have no equal.
    """
    order = np.argsort(keys)
    in_order = keys[order]
    if np.any(in_order[1:] == in_order[:-1]):
        return np.lexsort((ties, keys))
    return order


def _first_ones(have: Ints, sizes: Ints) -> Ints:
    """A second key: of jobs without any data worker those come first whose own are small, so that more have one."""
    return np.where(have == 0, sizes, np.iinfo(np.int64).max)


def fill_in_order(table: JobTable, pool: Pool, pieces: Pieces, key: Floats) -> Allocation:
    """Take pieces by ascending key, a job's own in their order; of equal keys as `_first_ones` says, then the lower id.

    Args:
        table: the jobs.
        pool: what is divided.
        pieces: of `table`.
        key: (jobs, pieces).
    """
    key = np.maximum.accumulate(np.where(pieces.count > 0, key, -np.inf), axis=1)
    row, place = np.nonzero(pieces.count)
    order = ascending(key[row, place], _first_ones(pieces.start[row, place], table.cpus[row]))
    row, place = row[order], place[order]
    taken = take(pieces.count[row, place], table.cpus[row], _beyond_minimum(table, pool))
    workers = table.minimum + np.bincount(row, weights=taken, minlength=len(table)).astype(np.int64)
    return with_reasons(table, pool, pieces, workers)


def fill_by_gain(table: JobTable, pool: Pool, pieces: Pieces, log_gain: Floats) -> Allocation:
    """Take pieces by what a CPU of them gains, the most first; or serve one job first, if that gains more in all.

    By gain alone a small data worker may take the room of a large one that gains far more. The greater of both sums is
    never below half of the best one (Dantzig's greedy for the knapsack problem, and the best single item).

    Args:
        table: the jobs.
        pool: what is divided.
        pieces: of `table`.
        log_gain: logarithm of what each CPU of a piece gains, (jobs, pieces).
    """
    found = fill_in_order(table, pool, pieces, -log_gain)
    budget = _beyond_minimum(table, pool)
    if len(table) < 2 or not np.any(pieces.count):
        return found
    # One job's data workers as far as they fit alone, in the order of its pieces.
    taken = np.minimum(np.cumsum(pieces.count, axis=1), (budget // table.cpus)[:, None])
    taken = np.diff(taken, axis=1, prepend=0) * table.cpus[:, None]
    is_used = pieces.count > 0
    largest = float(log_gain[is_used].max())
    gain = np.where(is_used, np.exp(np.where(is_used, log_gain, 0.0) - largest), 0.0)
    best = int(np.argmax((gain * taken).sum(axis=1)))
    first = np.arange(len(table)) == best
    other = fill_in_order(table, pool, pieces, np.where(first[:, None], -np.inf, -log_gain))
    sums = [_gained(pieces, table, gain, allocation.workers) for allocation in (found, other)]
    return other if sums[1] > sums[0] * (1 + _ROUNDING) else found


def _gained(pieces: Pieces, table: JobTable, gain: Floats, workers: Ints) -> float:
    """What these data workers gain beyond the minimum."""
    taken = np.clip(workers[:, None] - pieces.start, 0, pieces.count) * table.cpus[:, None]
    return float((gain * taken).sum())


def fill_to_level(table: JobTable, pool: Pool, top: Ints, knots: Floats, levels: Floats) -> Ints:
    """Raise all jobs to one level, from their minimum: each data worker goes to the job with the lowest one.

    Of equal levels as `_first_ones` says, then the lower id.

    Args:
        table: the jobs.
        pool: what is divided.
        top: data workers that each has at most.
        knots: (jobs, points): data workers and parts of one, ascending, the last not below `top` by one or more.
        levels: at the knots; higher where the knot is, and even between two.
    """
    workers: Ints = table.minimum.copy()
    left = _beyond_minimum(table, pool)
    top = np.maximum(top, workers)
    while True:
        rows = np.flatnonzero((workers < top) & (table.cpus <= left))
        if not len(rows):
            return workers
        if len(rows) > left:
            # No more than `left` data workers fit, so none but the lowest jobs get one.
            level = _level_at(knots, levels, rows, workers[rows]).astype(np.float32)
            rows = np.sort(rows[np.lexsort((_first_ones(workers[rows], table.cpus[rows]), level))[:left]])
        more = _one_turn(knots[rows], levels[rows], workers[rows], top[rows], table.cpus[rows], left)
        if not more.any():
            return workers  # levels that do not rise: nothing says who is next
        workers[rows] += more
        left -= int((more * table.cpus[rows]).sum())


def with_reasons(table: JobTable, pool: Pool, pieces: Pieces, workers: Ints) -> Allocation:
    """Return the allocation, with the reasons that numbers alone tell."""
    left = pool.cpus - int((workers * table.cpus).sum())
    saturation, limits = saturation_of(table, pieces), limits_of(table)
    reasons = np.where(workers > table.minimum, Reason.SHARED, Reason.MINIMUM).astype(np.int8)
    full = workers >= saturation
    reasons[full] = Reason.SATURATED
    reasons[full & (saturation == 0)] = Reason.NO_NEED
    reasons[full & (workers >= limits)] = Reason.ALL_WANTED
    # Where nothing is left in any case, the pool is the reason and not the cap.
    is_capped = full & (workers >= limits) & (table.cap < table.wanted)
    reasons[is_capped & (table.cpus <= left)] = Reason.JOB_CAP
    reasons[is_capped & (table.cpus > left)] = Reason.SHARED
    return Allocation(workers, reasons)


def _beyond_minimum(table: JobTable, pool: Pool) -> int:
    return pool.cpus - int((table.minimum * table.cpus).sum())


def _one_turn(knots: Floats, levels: Floats, have: Ints, top: Ints, cpus: Ints, budget: int) -> Ints:
    """As many data workers more as the lowest levels need, until one does not fit or all have their last."""
    high, low = _water_levels(knots, levels, have, cpus, (budget, budget - int(cpus.sum())))
    # Whoever is below `low` fits for sure, rounded up as it is: that is what the second pool leaves room for.
    sure = np.ceil(_reached(knots, levels, low) - _ROUNDING).astype(np.int64) if np.isfinite(low) else have
    sure = np.clip(sure, have, top)
    # All that begin at the upper level or below it; more than fit.
    likely = np.floor(_reached(knots, levels, high) + _ROUNDING).astype(np.int64) + 1
    likely = np.clip(likely, sure, top)
    budget -= int(((sure - have) * cpus).sum())
    # One by one what lies between the two levels, the lowest first.
    counts = likely - sure
    row = np.repeat(np.arange(len(have)), counts)
    number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + sure[row]
    # Rounded, so that levels that are equal but for rounding errors are.
    level = _level_at(knots, levels, row, number).astype(np.float32)
    order = np.lexsort((_first_ones(number, cpus[row]), level))
    taken = take(np.ones(len(row), np.int64), cpus[row[order]], budget)
    more: Ints = sure - have + np.bincount(row[order], weights=taken, minlength=len(have)).astype(np.int64)
    return more


def _water_levels(knots: Floats, levels: Floats, have: Ints, cpus: Ints, budgets: tuple[int, ...]) -> list[float]:
    """The levels to which these CPUs raise all if data workers could be cut; -inf without any CPUs."""
    start = np.maximum(knots[:, :-1], have[:, None])
    width = (knots[:, 1:] - start) * cpus[:, None]
    row, place = np.nonzero((width > 0) & (levels[:, 1:] > levels[:, :-1]))
    bottom, high = levels[row, place], levels[row, place + 1]
    left = knots[row, place]
    low = bottom + (start[row, place] - left) / (knots[row, place + 1] - left) * (high - bottom)
    rate = width[row, place] / (high - low)
    # Between two bends, what all take together grows evenly with the level.
    bends = np.concatenate([low, high])
    order = np.argsort(bends)  # equal ones may come in any order: between them nothing is taken
    bends = bends[order]
    rates = np.cumsum(np.concatenate([rate, -rate])[order])
    total = np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(bends))])
    return [_level_of(budget, bends, rates, total) for budget in budgets]


def _level_of(budget: int, bends: Floats, rates: Floats, total: Floats) -> float:
    if budget <= 0:
        return -np.inf
    place = int(np.searchsorted(total, budget, side="left"))
    if place >= len(bends):
        return float(bends[-1]) if len(bends) else np.inf
    if place == 0:
        return float(bends[0])
    return float(bends[place - 1] + (budget - total[place - 1]) / rates[place - 1])


def _reached(knots: Floats, levels: Floats, level: float) -> Floats:
    """Data workers, in parts too, with which each job is at this level."""
    reached: Floats = knots[:, 0].copy()
    for left in range(knots.shape[1] - 1):
        rise = levels[:, left + 1] - levels[:, left]
        part = np.divide(level - levels[:, left], rise, out=np.zeros_like(rise), where=rise > 0)
        reached += np.clip(part, 0.0, 1.0) * (knots[:, left + 1] - knots[:, left])
    return reached


def _level_at(knots: Floats, levels: Floats, row: npt.NDArray[np.intp], number: Ints) -> Floats:
    """The level of a job with this number of data workers."""
    level: Floats = levels[row, 0].copy()
    for left in range(knots.shape[1] - 1):
        width = knots[:, left + 1] - knots[:, left]
        rise = levels[:, left + 1] - levels[:, left]
        slope = np.divide(rise, width, out=np.zeros_like(rise), where=width > 0)
        level += slope[row] * np.clip(number - knots[row, left], 0.0, width[row])
    return level
