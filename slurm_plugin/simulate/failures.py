"""Nodes that fail and come back, drawn from a seed. Pure."""

from __future__ import annotations

import heapq
import math

import numpy as np

from hetstream.slurm_plugin.simulate.scenario import FailureOptions


class Failures:
    """The next failure or repair of any node."""

    def __init__(self, options: FailureOptions, num_nodes: int, seed: int) -> None:
        self._options = options
        self._draw = np.random.default_rng([seed, 2])
        self._queue: list[tuple[float, int, bool]] = []
        self.num_down = 0
        if math.isfinite(options.node_mtbf_s):
            first_s = self._draw.exponential(options.node_mtbf_s, num_nodes).tolist()
            self._queue = [(at_s, node, True) for node, at_s in enumerate(first_s)]
            heapq.heapify(self._queue)

    def next_s(self) -> float:
        """When it is."""
        return self._queue[0][0] if self._queue else math.inf

    def due(self, now_s: float) -> list[tuple[int, bool]]:
        """Nodes that change now, and whether they fail."""
        found = []
        while self._queue and self._queue[0][0] <= now_s:
            _, node, fails = heapq.heappop(self._queue)
            self.num_down += 1 if fails else -1
            then_s = self._options.repair_s if fails else float(self._draw.exponential(self._options.node_mtbf_s))
            heapq.heappush(self._queue, (now_s + then_s, node, not fails))
            found.append((node, fails))
        return found
