"""The cheapest way to part a graph in two (Dinic's method). Pure and exact; called by `cut.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

INFINITE = float("inf")
# Capacities are seconds. Less than this is the rounding of sums.
_NOTHING = 1e-15


class FlowNetwork:
    """Nodes and what may flow between them; nodes are whatever can be a key."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._edges_of: list[list[int]] = []
        self._head: list[int] = []
        self._left: list[float] = []  # an edge and its reverse stand side by side

    def _number(self, node: Hashable) -> int:
        if node not in self._numbers:
            self._numbers[node] = len(self._edges_of)
            self._edges_of.append([])
        return self._numbers[node]

    def add(self, tail: Hashable, head: Hashable, capacity: float) -> None:
        """Add an edge; none is made for a capacity of 0."""
        if capacity < 0:
            raise ValueError(f"an edge's capacity must be at least 0, it is {capacity}")
        if capacity == 0:
            return
        first, second = self._number(tail), self._number(head)
        for start, end, amount in ((first, second, capacity), (second, first, 0.0)):
            self._edges_of[start].append(len(self._head))
            self._head.append(end)
            self._left.append(amount)

    def source_side(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """The nodes on the source's side of the smallest minimum cut."""
        start, end = self._number(source), self._number(sink)
        while (levels := self._levels(start))[end] >= 0:
            places = [0] * len(self._edges_of)
            while self._push(start, end, levels, places):
                pass
        return {node for node, number in self._numbers.items() if levels[number] >= 0}

    def _levels(self, start: int) -> list[int]:
        levels = [-1] * len(self._edges_of)
        levels[start] = 0
        waiting = deque([start])
        while waiting:
            node = waiting.popleft()
            for edge in self._edges_of[node]:
                head = self._head[edge]
                if self._left[edge] > _NOTHING and levels[head] < 0:
                    levels[head] = levels[node] + 1
                    waiting.append(head)
        return levels

    def _push(self, start: int, end: int, levels: list[int], places: list[int]) -> bool:
        """Push along one path, without recursion: a forward is thousands of operators deep."""
        path: list[int] = []
        node = start
        while node != end:
            edges = self._edges_of[node]
            while places[node] < len(edges):
                edge = edges[places[node]]
                if self._left[edge] > _NOTHING and levels[self._head[edge]] == levels[node] + 1:
                    break
                places[node] += 1
            else:
                if not path:
                    return False
                edge = path.pop()
                node = self._head[edge ^ 1]
                places[node] += 1
                continue
            path.append(edge)
            node = self._head[edge]
        amount = min(self._left[edge] for edge in path)
        for edge in path:
            self._left[edge] -= amount
            self._left[edge ^ 1] += amount
        return True
