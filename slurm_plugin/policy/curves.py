"""Speed against CPUs of data workers, as pieces of whole data workers. Pure; used by the policies and the rules.

A measured curve has its bends where it was measured, which need not be at whole data workers of the size that a job
asks for. A data worker across a bend is a piece of its own here, so what a piece says of each of its data workers is
exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.policy.table import Floats, Ints, JobTable

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
    """The curves from each job's minimum to its limit, as far as they rise."""
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
