"""The jobs that run: their speeds and when they end. Pure; a struct of arrays with a row for each running job.

Between two events speeds are constant, so what is left of a job is a straight line: it is written down only when the
job's speed changes, and its end is exact.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.simulate.nodes import Placement, Shape

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# job: its place in the workload; -1 for a free row. left_s: work at since_s, in seconds at the ideal speed.
# held_cpus: of trainers and of fixed data workers. useful_cpus: with which the job is at its ideal speed.
# demand: CPUs of data workers with which it is at its best. target: those it was given; active: of them, those that
# already work. changed_s: when its target last did. slow_since_s: since when it has been below LEAST_SPEED.
# limit_s: its time limit, as far as the scheduler knows one. base: the speed that it has by its CPUs; its speed is that
# times factor, which is below 1 for a job that shares a GPU. shared_gpus: those that it is on and does not hold.
_FLOATS = (
    "left_s", "since_s", "speed", "end_s", "start_s", "gpus", "held_cpus", "useful_cpus", "demand", "overhead",
    "target", "active", "changed_s", "slow_since_s", "limit_s",
    "base", "factor", "shared_gpus",
)  # fmt: skip
# Below this share of its ideal speed a job counts as starved.
LEAST_SPEED = 0.05


class Running:
    """Rows of running jobs; `top` rows are in use, some of them free.

    A free row has no work, no speed, no resources and never ends, so that whole columns can be summed.
    """

    def __init__(self, size: int = 64) -> None:
        self.job: Ints = np.full(size, -1, dtype=np.int64)
        self.left_s = self.since_s = self.speed = self.end_s = self.start_s = self.gpus = np.zeros(0)
        self.held_cpus = self.useful_cpus = self.demand = self.overhead = np.zeros(0)
        self.target = self.active = self.changed_s = self.slow_since_s = self.limit_s = np.zeros(0)
        self.base = self.factor = self.shared_gpus = np.zeros(0)
        for name in _FLOATS:
            setattr(self, name, np.zeros(size))
        self.end_s.fill(np.inf)
        self.top = 0
        self.count = 0
        self.placements: list[tuple[Shape, Placement] | None] = [None] * size
        self._free: list[int] = []

    def add(self, job: int, shape: Shape, placement: Placement, values: dict[str, Any]) -> int:
        """A job starts; its row."""
        if self._free:
            row = heapq.heappop(self._free)
        else:
            row = self.top
            if row == len(self.job):
                self._grow()
            self.top += 1
        self.job[row] = job
        self.placements[row] = (shape, placement)
        for name, value in values.items():
            getattr(self, name)[row] = value
        self.count += 1
        return row

    def remove(self, row: int) -> tuple[Shape, Placement]:
        """A job runs no more; what it held."""
        held = self.placements[row]
        assert held is not None, f"row {row} is free"
        self.job[row] = -1
        self.placements[row] = None
        for name in _FLOATS:
            getattr(self, name)[row] = 0.0
        self.end_s[row] = np.inf
        self.count -= 1
        heapq.heappush(self._free, row)
        return held

    def set_speed(self, rows: Ints, speed: Floats, now_s: float) -> None:
        """From now on these jobs run at these speeds, less what sharing a GPU costs them."""
        self.base[rows] = speed
        self._run_at(rows, speed * self.factor[rows], now_s)

    def set_factor(self, rows: Ints, factor: Floats, now_s: float) -> None:
        """From now on these jobs run at this share of the speed that their CPUs give them."""
        self.factor[rows] = factor
        self._run_at(rows, self.base[rows] * factor, now_s)

    def _run_at(self, rows: Ints, speed: Floats, now_s: float) -> None:
        left_s = self.left_now(rows, now_s)
        self.left_s[rows] = left_s
        self.since_s[rows] = now_s
        self.speed[rows] = speed
        is_slow, was_slow = speed < LEAST_SPEED, np.isfinite(self.slow_since_s[rows])
        self.slow_since_s[rows] = np.where(is_slow, np.where(was_slow, self.slow_since_s[rows], now_s), np.inf)
        runs = speed > 0
        self.end_s[rows] = np.where(runs, now_s + left_s / np.where(runs, speed, 1.0), np.inf)

    def left_now(self, rows: Ints, now_s: float) -> Floats:
        """Work left of these jobs."""
        left: Floats = np.maximum(0.0, self.left_s[rows] - self.speed[rows] * (now_s - self.since_s[rows]))
        return left

    def next_end(self) -> tuple[float, int]:
        """When the next job ends if no speed changes, and its row; of several the first."""
        if not self.count:
            return np.inf, -1
        row = int(self.end_s[: self.top].argmin())
        return float(self.end_s[row]), row

    def rows(self) -> Ints:
        """Rows in use, by the number of their job."""
        rows = np.flatnonzero(self.job[: self.top] >= 0)
        return rows[np.argsort(self.job[rows], kind="stable")]

    def planned_ends_s(self, now_s: float, limit_factor: float) -> Floats:
        """When each row's job ends as far as a scheduler can tell: by its time limit, from now on at the earliest.

        Of a job without one, by its present speed, times an error of limits.
        """
        rows, start_s, limit_s = np.arange(self.top), self.start_s[: self.top], self.limit_s[: self.top]
        speed = np.maximum(self.speed[: self.top], LEAST_SPEED)
        ends = now_s + self.left_now(rows, now_s) / speed
        guessed = start_s + limit_factor * (ends - start_s)
        planned: Floats = np.where(np.isfinite(limit_s), np.maximum(start_s + limit_s, now_s), guessed)
        return planned

    def _grow(self) -> None:
        size = len(self.job)
        self.job = np.concatenate([self.job, np.full(size, -1, dtype=np.int64)])
        for name in _FLOATS:
            fresh = np.full(size, np.inf) if name == "end_s" else np.zeros(size)
            setattr(self, name, np.concatenate([getattr(self, name), fresh]))
        self.placements += [None] * size
