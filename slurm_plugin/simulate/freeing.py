"""What jobs held that have ended, until Slurm has cleaned up behind them and gives it to others. Pure."""

from __future__ import annotations

from collections import deque

from hetstream.slurm_plugin.simulate.nodes import Nodes, Placement, Shape


class Freeing:
    """Resources on their way from one job to another.

    Attributes:
        gpus, cpus: how many.

    Args:
        free_s: how long that takes.
    """

    def __init__(self, free_s: float) -> None:
        self._free_s = free_s
        self._held: deque[tuple[float, Shape, Placement]] = deque()
        self.gpus = self.cpus = 0.0

    @property
    def held(self) -> list[tuple[Shape, Placement]]:
        """By whom it was."""
        return [(shape, placement) for _, shape, placement in self._held]

    def add(self, shape: Shape, placement: Placement, now_s: float) -> None:
        """A job has ended."""
        self._held.append((now_s + self._free_s, shape, placement))
        self._count(shape, 1)

    def next_s(self) -> float:
        """When something is free next."""
        return self._held[0][0] if self._held else float("inf")

    def give_back(self, nodes: Nodes, now_s: float) -> bool:
        """Give to the nodes what is free now; whether that is anything."""
        found = False
        while self._held and self._held[0][0] <= now_s:
            _, shape, placement = self._held.popleft()
            nodes.give_back(shape, placement)
            self._count(shape, -1)
            found = True
        return found

    def _count(self, shape: Shape, sign: int) -> None:
        self.gpus += sign * shape.units * shape.gpus
        self.cpus += sign * (shape.units * shape.cpus + shape.extra_cpus)
