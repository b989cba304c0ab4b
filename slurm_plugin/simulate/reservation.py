"""EASY's reservation: when the first job of the queue can start, and which others may start before it. Pure."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from hetstream.slurm_plugin.simulate.freeing import Freeing
from hetstream.slurm_plugin.simulate.nodes import Nodes, Placement, Shape
from hetstream.slurm_plugin.simulate.running import Running


class Reservation:
    """The earliest start of one job, if those that run end when they are planned to.

    Attributes:
        start_s: that; infinite if even the empty cluster has no room, with nodes that are away.

    Args:
        shape: of the job.
        nodes: as they are, without jobs that are in nobody's way.
        running: all jobs.
        leaving: rows of the jobs that are in nobody's way.
        freeing: what jobs held that have ended.
        now_s: the time.
        limit_factor: see `Running.planned_ends_s`.
    """

    def __init__(
        self,
        shape: Shape,
        nodes: Nodes,
        running: Running,
        leaving: Set[int],
        freeing: Freeing,
        now_s: float,
        limit_factor: float,
    ) -> None:
        self._shape = shape
        self._now_s = now_s
        ends_s = running.planned_ends_s(now_s, limit_factor)
        rows = [
            row
            for row in np.argsort(ends_s, kind="stable").tolist()
            if running.placements[row] is not None and row not in leaving
        ]
        nodes = nodes.copy()
        nodes.give_back_all(freeing.held)
        held = [placement for placement in (running.placements[row] for row in rows) if placement is not None]
        # The fewest ends with which it fits: that it fits never becomes untrue with one end more.
        low, high = 1, len(rows)
        self.start_s = np.inf
        self._then = nodes.copy()
        while low <= high:
            middle = (low + high) // 2
            then = nodes.copy()
            then.give_back_all(held[:middle])
            if then.find(shape) is None:
                low = middle + 1
            else:
                high = middle - 1
                self.start_s, self._then = float(ends_s[rows[middle - 1]]), then

    def allows(self, shape: Shape, placement: Placement, end_s: float) -> bool:
        """Whether another job may start now there, which is planned to end then."""
        if end_s <= self.start_s:
            return True
        self._then.take(shape, placement)
        fits = self._then.find(self._shape) is not None
        self._then.give_back(shape, placement)
        return fits

    def started(self, shape: Shape, placement: Placement, end_s: float) -> None:
        """It has started: if it is still there at the reserved time, its resources are not."""
        if end_s > self.start_s:
            self._then.take(shape, placement)
