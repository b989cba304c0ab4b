"""Operations on a grid of steps, some for each layer; places the operations of one feature at a time, by exact search.

Used by `algorithm_1.py` and `search.py`, which differ in the prices that an operation pays for a step. Operations of
one kind at one step are one kernel. An operation is at a later step than the one that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hetstream.mpi_dataworkers.gpu_features.schedule import Kernel, Problem

Numbers = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
# What each operation of a part pays for each step: a row for each operation.
Prices = Callable[[Places], Numbers]


@dataclass
class Snapshot:
    """Where everything was."""

    step_of: Places
    counts: Places
    loads: Numbers


@dataclass
class Placement:
    """Where the operations of a problem are.

    Attributes:
        steps: how many each layer has.
        counts_launches: whether operations go where they need no new kernel, if they can, before prices count.
        layer_of_step: the layer of each step, steps in the order in which they run.
        kinds: of operations; `kind_of` has the place there for each operation.
        work: of each operation: memory_s, compute_s.
        capacity: the same of what each layer leaves.
        trees: for each operation that needs no other, the parts of all that need it: each a path, after those before.
        step_of: of each operation; -1 where it is nowhere.
        counts: operations at work, by kind and step.
        loads: of each layer: memory_s, compute_s, with its launches.
    """

    problem: Problem
    steps: Sequence[int]
    counts_launches: bool = True
    layer_of_step: Places = field(init=False)
    kinds: list[str] = field(init=False)
    kind_of: Places = field(init=False)
    work: Numbers = field(init=False)
    capacity: Numbers = field(init=False)
    trees: list[list[Places]] = field(init=False)
    step_of: Places = field(init=False)
    counts: Places = field(init=False)
    loads: Numbers = field(init=False)

    def __post_init__(self) -> None:
        operations, layers = self.problem.operations, self.problem.layers
        self.layer_of_step = np.repeat(np.arange(len(layers)), self.steps)
        self.kinds = sorted({operation.kind for operation in operations})
        place = {kind: at for at, kind in enumerate(self.kinds)}
        self.kind_of = np.array([place[operation.kind] for operation in operations], dtype=np.int64)
        self.work = np.array([(each.memory_s, each.compute_s) for each in operations]).reshape(-1, 2)
        self.capacity = np.array([(layer.memory_s, layer.compute_s) for layer in layers])
        # The steps of each layer; the number of all steps where it has fewer than others.
        self._grid = np.full((len(layers), max(self.steps)), self.num_steps)
        for layer, count in enumerate(self.steps):
            self._grid[layer, :count] = np.flatnonzero(self.layer_of_step == layer)
        self._parents = np.array([operation.parent for operation in operations], dtype=np.int64)
        self._heights = heights(self.problem)
        self.trees = trees_of(self.problem)
        self.clear()

    @property
    def num_steps(self) -> int:
        """Of all layers."""
        return len(self.layer_of_step)

    def clear(self) -> None:
        """Nothing is anywhere."""
        self.step_of = np.full(len(self.problem.operations), -1, dtype=np.int64)
        self.counts = np.zeros((len(self.kinds), self.num_steps), dtype=np.int64)
        self.loads = np.zeros((len(self.problem.layers), 2))

    def rank(self) -> tuple[float, int]:
        """As that of `Cost`."""
        over: Numbers = (self.loads - self.capacity).max(axis=1)
        return round(float(over[over > 0].sum()), 12), int(np.count_nonzero(self.counts))

    def snapshot(self) -> Snapshot:
        """What `restore` takes."""
        return Snapshot(self.step_of.copy(), self.counts.copy(), self.loads.copy())

    def restore(self, snapshot: Snapshot) -> None:
        """Everything is where it was then."""
        self.step_of, self.counts = snapshot.step_of.copy(), snapshot.counts.copy()
        self.loads = snapshot.loads.copy()

    def remove(self, tree: int) -> None:
        """Take the operations of a tree out."""
        for part in self.trees[tree]:
            for at in part.tolist():
                self._move(at, -1)

    def put(self, tree: int, prices: Prices) -> None:
        """Put the operations of a tree, which is out, where each part of it is cheapest, one after the other.

        What a part pays is how much longer it makes the training step, all of its operations together, and the prices.
        """
        for part in self.trees[tree]:
            parent = self.problem.operations[int(part[0])].parent
            first = int(self.step_of[parent]) + 1 if parent >= 0 else 0
            asked = prices(part)
            steps = self._cheapest(part, first, asked)
            if len(steps) < len(part):  # an infinite price closes a step that the part cannot do without
                steps = self._cheapest(part, first, np.where(np.isfinite(asked), asked, 0.0))
            for at, step in zip(part.tolist(), steps, strict=True):
                self.put_operation(at, step)

    def take(self, kernels: Sequence[Kernel], step_within: Sequence[int]) -> None:
        """Be this schedule; of each operation the step within its layer is given."""
        self.clear()
        first_step = np.concatenate([[0], np.cumsum(self.steps)]).tolist()
        for kernel in kernels:
            for at in kernel.operations:
                self._move(at, first_step[kernel.layer] + step_within[at])

    def put_operation(self, at: int, step: int) -> None:
        """Put one that is nowhere to a step."""
        self._move(at, step)

    def remove_operation(self, at: int) -> None:
        """Take one out, which is put back before anything else is done with those around it."""
        self._move(at, -1)

    def window(self, operations: Sequence[int]) -> tuple[int, int]:
        """The first and the last step at which all of these could be, while those around them stay where they are."""
        low = int(self._step_after(self._parents[operations]).max())
        inner = np.isin(self._parents, operations)
        high = int(self.step_of[inner].min(initial=self.num_steps)) - 1
        return low, high

    def _step_after(self, parents: Places) -> Places:
        return np.where(parents >= 0, self.step_of[parents] + 1, 0)

    def _move(self, at: int, step: int) -> None:
        """From where it is to a step, or out; one end of the two is nowhere."""
        was = int(self.step_of[at])
        kind, sign, where = self.kind_of[at], (1, -1)[step < 0], max(step, was)
        layer = self.layer_of_step[where]
        before = self.counts[kind, where]
        self.counts[kind, where] += sign
        is_launch = before == 0 if sign > 0 else before == 1
        self.loads[layer] += sign * (self.work[at] + (self.problem.launch_s if is_launch else 0.0))
        self.step_of[at] = step

    def _cheapest(self, part: Places, first: int, prices: Numbers) -> list[int]:
        """A step for each operation of a path, ascending.

        Steps and layers ascend together, so the operations in one layer follow one another in the path: first every
        stretch of the path gets its best steps within every layer, then the path is cut into such stretches.
        """
        steps = np.arange(self.num_steps)
        last = self.num_steps - 1 - self._heights[part]
        allowed = (steps >= first) & (steps <= last[:, None])
        if self.counts_launches:  # which are whole, and prices add up to less than that
            prices = prices + (self.counts[self.kind_of[part]] == 0)
        by_step = np.where(allowed, prices, math.inf)
        by_layer = np.append(by_step, np.full((len(part), 1), math.inf), axis=1)[:, self._grid].transpose(1, 0, 2)
        tables = _stretches(by_layer)
        best = np.stack([table.min(axis=2) for table in tables], axis=2)  # [layer, first, last of a stretch]
        is_possible = np.isfinite(best)
        launches = np.floor(np.where(is_possible & self.counts_launches, best, 0.0))
        work = np.cumsum(self.work[part], axis=0)
        of_stretch = work[None] - (work - self.work[part])[:, None]  # [first, last, resource]
        over = (self.loads - self.capacity)[:, None, None] + of_stretch[None]
        exposed = np.maximum(over.max(axis=3) + launches * self.problem.launch_s, 0.0)
        exposed -= np.maximum((self.loads - self.capacity).max(axis=1), 0.0)[:, None, None]
        stretches = cuts(np.where(is_possible, exposed + best - launches, math.inf))
        found: list[int] = []
        for layer, begin, end in stretches:
            limit = by_layer.shape[2]
            for number in range(end, begin - 1, -1):
                limit = int(tables[number][layer, begin, :limit].argmin())
                found.append(int(self._grid[layer, limit]))
        return found[::-1]

    def kernels(self) -> tuple[Kernel, ...]:
        """What is launched, in order."""
        found: dict[tuple[int, int], list[int]] = {}
        for at, step in enumerate(self.step_of.tolist()):
            found.setdefault((step, int(self.kind_of[at])), []).append(at)
        return tuple(
            Kernel(int(self.layer_of_step[step]), self.kinds[kind], tuple(found[step, kind]))
            for step, kind in sorted(found)
        )


def _stretches(prices: Numbers) -> list[Numbers]:
    """For the last operation of a stretch: the least sum of prices by layer, first operation and step of the last.

    Args:
        prices: by layer, operation and step within the layer.
    """
    num_layers, num, num_steps = prices.shape
    table = np.full((num_layers, num, num_steps), math.inf)
    found = []
    for number in range(num):
        before = np.full_like(table, math.inf)
        before[:, :, 1:] = np.minimum.accumulate(table, axis=2)[:, :, :-1]
        table = before + prices[:, number, None]
        table[:, number] = prices[:, number]
        found.append(table)
    return found


def cuts(prices: Numbers) -> list[tuple[int, int, int]]:
    """The cheapest way to cut a path into stretches with ascending layers: layer, first, last; the last one first.

    Args:
        prices: by layer, first and last operation of a stretch.
    """
    num_layers, num, _ = prices.shape
    best = np.full(num + 1, math.inf)
    best[0] = 0.0
    choices = []
    for layer in range(num_layers):
        candidates = best[:num, None] + prices[layer]
        begins = candidates.argmin(axis=0)
        least = candidates[begins, np.arange(num)]
        is_better = least < best[1:]
        choices.append(np.where(is_better, begins, -1))
        best[1:] = np.where(is_better, least, best[1:])
    found, end = [], num
    for layer in range(num_layers - 1, -1, -1):
        begin = int(choices[layer][end - 1]) if end else -1
        if begin >= 0:
            found.append((layer, begin, end - 1))
            end = begin
    return found


def heights(problem: Problem) -> Places:
    """Of each operation: how many are needed one after the other by those that need it."""
    found = np.zeros(len(problem.operations), dtype=np.int64)
    for at in range(len(problem.operations) - 1, -1, -1):
        parent = problem.operations[at].parent
        if parent >= 0:
            found[parent] = max(found[parent], found[at] + 1)
    return found


def longest_chain(problem: Problem) -> int:
    """Operations that need one another, at most: no schedule has fewer steps."""
    return int(heights(problem).max(initial=-1)) + 1


def trees_of(problem: Problem) -> list[list[Places]]:
    """As `Placement.trees`: each path goes on with the child below which the most operations follow one another."""
    tall = heights(problem)
    children: list[list[int]] = [[] for _ in problem.operations]
    roots: list[int] = []
    for at, operation in enumerate(problem.operations):
        (children[operation.parent] if operation.parent >= 0 else roots).append(at)
    found = []
    for root in roots:
        parts, starts = [], [root]
        for start in starts:  # it grows meanwhile
            path, at = [start], start
            while children[at]:
                tallest = max(children[at], key=lambda child: int(tall[child]))
                starts += [child for child in children[at] if child != tallest]
                path.append(tallest)
                at = tallest
            parts.append(np.array(path, dtype=np.int64))
        found.append(parts)
    return found


def steps_of_layers(problem: Problem, kernels: Sequence[Kernel]) -> tuple[list[int], list[int]]:
    """The earliest step within its layer for each operation of a schedule, and how many steps each layer needs."""
    step_of = [0] * len(problem.operations)
    layer_of = [-1] * len(problem.operations)
    needed = [1] * len(problem.layers)
    for kernel in kernels:
        parents = (problem.operations[at].parent for at in kernel.operations)
        within = [step_of[parent] + 1 for parent in parents if parent >= 0 and layer_of[parent] == kernel.layer]
        for at in kernel.operations:
            step_of[at], layer_of[at] = max(within, default=0), kernel.layer
        needed[kernel.layer] = max(needed[kernel.layer], step_of[kernel.operations[0]] + 1)
    return step_of, needed
