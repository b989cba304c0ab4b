"""A job's speed against CPUs of data workers, from what it has measured: (measurements) -> points. Pure.

Called by `jobs_table.py`. The curve is the least concave one above what was measured, so that noise makes no knee where
there is none; beyond the last measurement it goes on as it did there with data workers, up to the speed of a trainer
that never waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from hetstream.hetjob.site.measured import Measured, SpeedPoint

# Points of a curve: the beginning, bends, and the knee.
POINTS = 8
# No loading needs more: a job that says so says too much. The most that is published are 64 to 128.
MAX_CPUS_PER_GPU = 256.0
# A job that has measured nothing is taken to be so fast with the machines' own number of CPUs, and faster beyond.
_ASSUMED_SPEED = 0.5
# Of a speed as a share of the ideal. What a job reports may be as near to 0 as it likes; what is divided by it may not.
_DIGITS = 9

Curve = tuple[tuple[float, ...], tuple[float, ...]]


def curve_of(measured: Measured, gpus: float) -> Curve:
    """CPUs and speeds, `POINTS` each.

    Args:
        measured: with at least one point of one data worker or more.
        gpus: of the job, as Slurm says.
    """
    return _curve_of(measured.points, measured.ideal_steps_per_s, gpus)


# By what the curve depends on alone: the rest of a job's measurements is another one in each report.
@lru_cache(1 << 16)
def _curve_of(points: tuple[SpeedPoint, ...], ideal_steps_per_s: float, gpus: float) -> Curve:
    most = MAX_CPUS_PER_GPU * max(gpus, 1.0)
    known, local = {0.0: 0.0}, 0.0
    for point in points:
        cpus = float(point.cpus * point.workers)
        share = round(min(point.steps_per_s / ideal_steps_per_s, 1.0), _DIGITS)
        if not point.workers:
            local = max(local, share)
        elif cpus <= most:
            known[cpus] = max(known.get(cpus, 0.0), share)
    hull = _hull(sorted(known.items()))
    end_cpus, end_speed = hull[-1]
    if len(hull) > 1 and end_speed < 1.0:
        before_cpus, before_speed = hull[-2]
        slope = (end_speed - before_speed) / (end_cpus - before_cpus)
        reach = min(end_cpus + (1.0 - end_speed) / slope, most) if slope > 0 else end_cpus
        hull[-1:] = [(reach, min(end_speed + slope * (reach - end_cpus), 1.0))]
    # Data workers take the place of the job's own loading. One that is hardly faster than that is no bend: the second
    # brings as much as the first makes, not as little as the first gained.
    return _padded(_hull([(0.0, local), *hull[1:]]))


def assumed_curve(wanted_cpus: float, gpus: float, cpus_per_gpu: float) -> Curve:
    """The curve of a job that has measured nothing: by the machines' ratio, so that to want much gives no right to it.

    Args:
        wanted_cpus: of all data workers that it wants.
        gpus: of the job.
        cpus_per_gpu: of the site's machines.
    """
    knee = cpus_per_gpu * max(gpus, 1.0)
    if wanted_cpus * _ASSUMED_SPEED <= knee:
        return _padded([(0.0, 0.0), (wanted_cpus, 1.0)] if wanted_cpus > 0 else [(0.0, 0.0)])
    return _padded([(0.0, 0.0), (knee, _ASSUMED_SPEED), (wanted_cpus, 1.0)])


def _hull(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The upper hull from the left to the greatest speed."""
    hull: list[tuple[float, float]] = []
    for cpus, speed in points:
        if hull and speed <= hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], (cpus, speed)) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append((cpus, speed))
    return hull


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def _padded(points: list[tuple[float, float]]) -> Curve:
    # Of too many bends those in the middle go: what is left of a hull is one.
    while len(points) > POINTS:
        del points[len(points) // 2]
    points = points + [points[-1]] * (POINTS - len(points))
    return tuple(cpus for cpus, _ in points), tuple(speed for _, speed in points)
