"""Our way to a schedule: every feature in turn moves to where it is cheapest, given where all others are. Pure.

Each operation pays by how much longer it makes the training step, and a share of its kernel's launch that is smaller
the more operations the kernel has: so features gather in few kernels, and go where a layer has room. From a schedule
that no feature wants to leave, one kernel is closed or some features are taken out, and they look for new places. What
comes out is kept if it is not worse. The search begins with the paper's schedules, too, so it is not worse than those.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from hetstream.mpi_dataworkers.gpu_features.schedule import (
    Cost,
    Kernel,
    Numbers,
    Operation,
    OperationPlacement,
    Places,
    Problem,
    Snapshot,
    check_each,
    check_is,
    check_number,
    cost_of,
    cuts,
    least_exposed_s,
    longest_chain,
    steps_of_layers,
)

# RAP's own way to a schedule: kernels as large as they can be, then one after the other into the layers. Pure.
#
# Called as the beginning of our search, which then is never worse, and by benchmarks to compare with. The paper leaves
# open how far a kernel fits a capacity that was measured with another operator, and what becomes of kernels that fit
# nowhere; its published program measures with Ngram and puts them beside the last layer, and so does this.

PROBE = "Ngram"
# Orders in which the features are placed, from the beginning; and how often all are placed again.
_ALGORITHM_1_ORDERS, _ALGORITHM_1_SWEEPS = 4, 6
# By which operations are weighed that can run: their number, and the lengths of what waits for them.
POWERS = (0, 1, 2, 3)
_Fused = tuple[str, tuple[int, ...]]


def fuse(problem: Problem, seed: int = 0) -> list[_Fused]:
    """Return the kernels of the paper's section 6.2, in order: the sum of the squares of their sizes is as large as it
    gets.

    The paper gives this to a solver of integer programs. Here each feature in turn moves where it makes the sum
    largest, until none can; on the plans of this project that finds larger sums than HiGHS does in a minute.

    Raises:
        FeatureError: this is no problem.
    """
    check_is("problem", problem, Problem, "a Problem")
    draw = Random(seed)
    steps = [max(8, math.ceil(1.5 * longest_chain(problem))), *[0] * (len(problem.layers) - 1)]
    grid = OperationPlacement(problem, steps, counts_launches=False)

    def prices(part: Places) -> Numbers:
        # Each counts itself and the larger square of its kernel.
        prices: Numbers = -2.0 * grid.counts[grid.kind_of[part]].astype(np.float64) - 1.0
        return prices

    best, best_sum = grid.snapshot(), -1
    for _ in range(_ALGORITHM_1_ORDERS):
        grid.clear()
        trees = list(range(len(grid.trees)))
        draw.shuffle(trees)
        for tree in trees:
            grid.put(tree, prices)
        for _ in range(_ALGORITHM_1_SWEEPS):
            before = int((grid.counts**2).sum())
            for tree in trees:
                grid.remove(tree)
                grid.put(tree, prices)
            if int((grid.counts**2).sum()) <= before:
                break
        if int((grid.counts**2).sum()) > best_sum:
            best, best_sum = grid.snapshot(), int((grid.counts**2).sum())
    grid.restore(best)
    return [(kernel.kind, kernel.operations) for kernel in grid.kernels()]


def gather(operations: Sequence[Operation], powers: Sequence[int] = POWERS) -> list[_Fused]:
    """Kernels for all of these, in order: each holds all operations that can run of the kind that weighs most.

    This is the weighted majority merge of shortest common supersequences (Branke, Middendorf and Schneider, 1998). An
    operation weighs as much as the longest chain that begins with it, to one of several powers, of which the one counts
    that needs the fewest kernels: where chains are of different lengths, the long ones must not be left over. It takes
    no time, and where features have many operators it needs fewer kernels than `fuse`.

    Args:
        operations: each after the one that it needs.
        powers: of the weights; 0 is the number of operations alone.

    Raises:
        FeatureError: these are no operations.
    """
    check_each("operations", operations, Operation)
    heights = [1] * len(operations)
    children: dict[int, list[int]] = {}
    for at, operation in enumerate(operations):
        children.setdefault(operation.parent, []).append(at)
    for at in range(len(operations) - 1, -1, -1):
        if (parent := operations[at].parent) >= 0:
            heights[parent] = max(heights[parent], heights[at] + 1)
    return min((_gathered(operations, children, heights, power) for power in powers), key=len)


def _gathered(
    operations: Sequence[Operation], children: dict[int, list[int]], heights: Sequence[int], power: int
) -> list[_Fused]:
    ready: dict[str, list[int]] = {}
    weights: Counter[str] = Counter()

    def add(more: Sequence[int]) -> None:
        for at in more:
            ready.setdefault(operations[at].kind, []).append(at)
            weights[operations[at].kind] += heights[at] ** power

    add(children.get(-1, ()))
    found: list[_Fused] = []
    while ready:
        kind = max(sorted(ready), key=weights.__getitem__)
        together = ready.pop(kind)
        weights[kind] = 0
        found.append((kind, tuple(together)))
        for at in together:
            add(children.get(at, ()))
    return found


def algorithm_1(problem: Problem, fused: Sequence[_Fused], *, two_resources: bool = False) -> tuple[Kernel, ...]:
    """Assign fused kernels to layers as the paper's Algorithm 1 does, which cuts kernels where a layer is full.

    Args:
        problem: the problem.
        fused: the kernels of `fuse`, in order.
        two_resources: look at both resources of a layer, which the paper does not.
    """
    room = [_room(problem, layer, two_resources) for layer in range(len(problem.layers))]
    total_s = sum(problem.launch_s + _alone_s(problem, operations) for _, operations in fused)
    chosen: set[int] = set()
    for layer in sorted(range(len(room)), key=lambda at: -float(room[at].min())):
        if sum(float(room[at].min()) for at in chosen) < total_s:
            chosen.add(layer)
    waiting = list(reversed(fused))
    found: list[Kernel] = []
    for layer in sorted(chosen):
        left = room[layer]
        while waiting:
            kind, operations = waiting.pop()
            fits = _fitting(problem, operations, left, two_resources)
            if fits:
                found.append(Kernel(layer, kind, operations[:fits]))
                left = left - _load(problem, operations[:fits], two_resources)
            if fits < len(operations):
                waiting.append((kind, operations[fits:]))
                break
    last = max(chosen, default=0)
    found += [Kernel(last, kind, operations) for kind, operations in reversed(waiting)]
    return tuple(found)


def _room(problem: Problem, layer: int, two_resources: bool) -> Numbers:
    """What fits beside a layer, in seconds: of each resource, or of a kernel of the operator that is probed with."""
    leaves = problem.layers[layer]
    if two_resources:
        return np.array([leaves.memory_s, leaves.compute_s])
    probes = [each for each in problem.operations if each.kind == PROBE] or list(problem.operations)
    memory_s, compute_s = sum(each.memory_s for each in probes), sum(each.compute_s for each in probes)
    alone_s = max(memory_s, compute_s)
    by_resource = [
        available_s * alone_s / taken_s
        for available_s, taken_s in ((leaves.memory_s, memory_s), (leaves.compute_s, compute_s))
        if taken_s > 0
    ]
    return np.array([min(by_resource, default=leaves.memory_s)])


def _alone_s(problem: Problem, operations: Sequence[int]) -> float:
    some = [problem.operations[at] for at in operations]
    return max(sum(each.memory_s for each in some), sum(each.compute_s for each in some))


def _load(problem: Problem, operations: Sequence[int], two_resources: bool) -> Numbers:
    """What a kernel takes of a layer's room."""
    some: list[Operation] = [problem.operations[at] for at in operations]
    memory_s, compute_s = sum(each.memory_s for each in some), sum(each.compute_s for each in some)
    by_resource = [memory_s, compute_s] if two_resources else [max(memory_s, compute_s)]
    return problem.launch_s + np.array(by_resource)


def _fitting(problem: Problem, operations: Sequence[int], left: Numbers, two_resources: bool) -> int:
    """How many of a kernel's first operations fit."""
    low, high = 0, len(operations)
    while low < high:
        middle = (low + high + 1) // 2
        fits = bool((_load(problem, operations[:middle], two_resources) <= left).all())
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


# Steps of each layer, at least; more where the longest chain needs them.
_STEPS = 4
# Orders in which all features are placed from the beginning; how often they then look for better places.
_ORDERS, _SWEEPS = 6, 4
# Of a launch: what an operation pays that is alone in its kernel. One of them is drawn for each round.
_SHARES = (0.02, 0.1, 0.4, 1.0)
# Rounds without a better schedule after which it is enough: for each operation, and at least.
_IDLE_ROUNDS, _LEAST_IDLE_ROUNDS = 3, 40000
# The same for fewer kernels, where nothing can be exposed less.
_ROUNDS_FOR_KERNELS = 2000
# Rounds from the best schedule through worse ones, and by how much worse, in launches.
_ROUNDS_OF_A_DESCENT, _WORSE = 400, (0.1, 0.3, 1.0, 3.0)
# How often such a descent begins with everything placed anew.
_ANEW = 0.25
# What is added to each price at random, in launches; one of them is drawn for each round.
_NOISES = (0.0, 0.0, 0.05, 0.3, 1.0)
# How often layers get other ends.
_CUT_ANEW = 0.08
# Features that are taken out together, of all of them.
_MOST_DISTURBED = 0.2
# How often all of them may be placed anew: a part of the time, where there are many.
_TIME_FOR_ORDERS = 0.3


@dataclass(frozen=True)
class Found:
    """A schedule.

    Attributes:
        kernels: in the order in which they are launched.
        cost: what it costs.
        reason: why the search ended.
    """

    kernels: tuple[Kernel, ...]
    cost: Cost
    reason: str


def search(
    problem: Problem, *, seed: int = 0, limit_s: float = 20.0, clock: Callable[[], float] = time.monotonic
) -> Found:
    """Return a schedule that exposes as little as can be found, and among those one with few kernels.

    Args:
        problem: the problem.
        seed: two searches that both end before the time limit find the same.
        limit_s: seconds after which it ends with what it has; 0: with the first schedules.
        clock: says what time it is, in seconds.

    Raises:
        FeatureError: this is no problem, seed no whole number, or limit_s negative or NaN.
    """
    check_is("problem", problem, Problem, "a Problem")
    check_is("seed", seed, int, "a whole number")
    check_number("limit_s", limit_s, may_be_infinite=True)
    if not problem.operations:
        return Found((), cost_of(problem, ()), "there is nothing to do")
    began = clock()
    searching = _Search(problem, Random(seed), lambda: (clock() - began) / limit_s if limit_s else math.inf)
    fused, gathered = fuse(problem, seed), gather(problem.operations)
    schedules = [algorithm_1(problem, fused, two_resources=both) for both in (False, True)]
    searching.begin([*schedules, algorithm_1(problem, gathered, two_resources=True)])
    reason = searching.improve()
    kernels = searching.grid.kernels()
    return Found(kernels, cost_of(problem, kernels), reason)


class _Search:
    """A search under way.

    Args:
        problem: the problem.
        draw: where what is random comes from.
        spent: says which part of the time is over.
    """

    def __init__(self, problem: Problem, draw: Random, spent: Callable[[], float]) -> None:
        self._problem = problem
        self._draw = draw
        self._spent = spent
        self._share = _SHARES[0]
        self._noise = 0.0  # what is added to each price at random, at most
        self._random = np.random.default_rng(draw.randrange(1 << 32))
        self._closed: tuple[int, int] | None = None  # kind and step where nothing may go in this round
        self.grid = OperationPlacement(problem, [1] * len(problem.layers))
        self._tree_of = {int(at): tree for tree, parts in enumerate(self.grid.trees) for part in parts for at in part}

    def begin(self, schedules: Sequence[Sequence[Kernel]]) -> None:
        """Take the best of some schedules and of some orders in which everything is placed from the beginning."""
        least = max(_STEPS, math.ceil(2 * longest_chain(self._problem) / len(self._problem.layers)))
        all_steps = [steps_of_layers(self._problem, kernels) for kernels in schedules]
        steps = [max(least, *needed) for needed in zip(*(needed for _, needed in all_steps), strict=True)]
        self.grid = OperationPlacement(self._problem, steps)
        best, best_rank = self.grid.snapshot(), (math.inf, 0)
        for kernels, (step_within, _) in zip(schedules, all_steps, strict=True):
            self.grid.take(kernels, step_within)
            if self.grid.rank() < best_rank:
                best, best_rank = self.grid.snapshot(), self.grid.rank()
        for number in range(_ORDERS):
            if self._spent() > _TIME_FOR_ORDERS:
                break
            self._share = _SHARES[number % len(_SHARES)]
            self._place_all()
            if self.grid.rank() < best_rank:
                best, best_rank = self.grid.snapshot(), self.grid.rank()
        self.grid.restore(best)

    def _place_all(self) -> None:
        self.grid.clear()
        trees = self._shuffled(range(len(self.grid.trees)))
        for tree in trees:
            self.grid.put(tree, self._prices)
        self._settle(trees)

    def improve(self) -> str:
        """Rounds until the time is over, or none has brought anything for long; why it ended. The best is left."""
        best, reason = self._best_of_rounds()
        self.grid.restore(best)
        return reason

    def _best_of_rounds(self) -> tuple[Snapshot, str]:
        least_s = round(least_exposed_s(self._problem), 12)
        enough = max(_LEAST_IDLE_ROUNDS, _IDLE_ROUNDS * len(self._problem.operations))
        best, best_rank, idle = self.grid.snapshot(), self.grid.rank(), 0
        now, now_rank, worse_s = best, best_rank, 0.0
        while idle < enough:
            if self._spent() > 1:
                return best, "the time was over"
            if best_rank[0] <= least_s and best_rank[1] <= len(self.grid.kinds):
                return best, "nothing can be better"
            if best_rank[0] <= least_s and idle > _ROUNDS_FOR_KERNELS:
                return best, "nothing is exposed that must not be"
            self._round()
            rank = self.grid.rank()
            idle += 1
            if rank < best_rank:
                best, best_rank, idle = self.grid.snapshot(), rank, 0
            # Something worse is gone on with, but less and less of it, until it begins again from the best.
            phase = idle % _ROUNDS_OF_A_DESCENT
            if phase == 0:
                worse_s = self._draw.choice(_WORSE) * self._problem.launch_s
                self.grid.restore(best)
                if self._draw.random() < _ANEW:
                    self._place_all()
                now, now_rank = self.grid.snapshot(), self.grid.rank()
            elif rank[0] <= now_rank[0] + worse_s * (1 - phase / _ROUNDS_OF_A_DESCENT) ** 2:
                now, now_rank = self.grid.snapshot(), rank
            else:
                self.grid.restore(now)
        return best, f"{enough} rounds brought nothing better"

    def _round(self) -> None:
        self._share = self._draw.choice(_SHARES)
        self._noise = self._draw.choice(_NOISES) * self._problem.launch_s
        choice = self._draw.random()
        if choice < _CUT_ANEW:
            self._cut_anew()
            return
        if choice < 0.4:
            for _ in range(self._draw.randint(1, 3)):
                self._shift(self._kernel())
            return
        if choice < 0.7:
            kind, step = self._kernel()
            self._closed = kind, step
            trees = sorted({self._tree_of[at] for at in self._members(kind, step)})
        else:
            most = min(len(self.grid.trees), max(3, round(_MOST_DISTURBED * len(self.grid.trees))))
            trees = self._draw.sample(range(len(self.grid.trees)), self._draw.randint(1, most))
        for tree in trees:
            self.grid.remove(tree)
        for tree in self._shuffled(trees):
            self.grid.put(tree, self._prices)
        self._closed = None

    def _kernel(self) -> tuple[int, int]:
        """Kind and step of a kernel; of few operations rather than of many."""
        kinds, steps = np.nonzero(self.grid.counts)
        weights = 1.0 / self.grid.counts[kinds, steps]
        [chosen] = self._draw.choices(range(len(kinds)), weights=weights.tolist())
        return int(kinds[chosen]), int(steps[chosen])

    def _members(self, kind: int, step: int) -> list[int]:
        found = np.flatnonzero((self.grid.step_of == step) & (self.grid.kind_of == kind))
        return [int(at) for at in found]

    def _shift(self, kernel: tuple[int, int]) -> None:
        """A whole kernel goes to the step that is cheapest for it, of those that the operations around it leave."""
        grid, (kind, step) = self.grid, kernel
        members = self._members(kind, step)
        low, high = grid.window(members)
        if low == high:
            return
        for at in members:
            grid.remove_operation(at)
        over = grid.loads - grid.capacity
        joined = over + grid.work[members].sum(axis=0)
        longer = [np.maximum(moved.max(axis=1), 0.0) for moved in (over, joined, joined + self._problem.launch_s)]
        exposed, join, launch = (each[grid.layer_of_step] for each in longer)
        prices = np.where(grid.counts[kind] > 0, join, launch) - exposed + self._shares(np.array([kind]))[0]
        prices[step] += self._noise
        goal = low + int(prices[low : high + 1].argmin())
        for at in members:
            grid.put_operation(at, goal)

    def _cut_anew(self) -> None:
        """The kernels in the order in which they run, and between which of them a layer ends is chosen best."""
        grid = self.grid
        # Those of one step do not need one another.
        kernels = sorted(grid.kernels(), key=lambda kernel: (grid.step_of[kernel.operations[0]], self._draw.random()))
        loads = [grid.work[list(kernel.operations)].sum(axis=0) + self._problem.launch_s for kernel in kernels]
        total = np.cumsum(loads, axis=0)
        of_stretch = total[None] - (total - loads)[:, None]
        over = (of_stretch[None] - grid.capacity[:, None, None]).max(axis=3)
        is_stretch = np.triu(np.ones(over.shape[1:], dtype=bool))
        layer_of = [0] * len(kernels)
        for layer, begin, end in cuts(np.where(is_stretch, np.maximum(over, 0.0), math.inf)):
            layer_of[begin : end + 1] = [layer] * (end + 1 - begin)
        moved = [Kernel(layer, each.kind, each.operations) for layer, each in zip(layer_of, kernels, strict=True)]
        step_within, needed = steps_of_layers(self._problem, moved)
        if all(count <= most for count, most in zip(needed, grid.steps, strict=True)):
            grid.take(moved, step_within)

    def _settle(self, trees: Sequence[int], sweeps: int = _SWEEPS) -> None:
        """Everybody looks for a better place, until nothing gets better."""
        for _ in range(sweeps):
            before = self.grid.rank()
            for tree in trees:
                self.grid.remove(tree)
                self.grid.put(tree, self._prices)
            if self.grid.rank() >= before:
                return

    def _shuffled(self, trees: Sequence[int] | range) -> list[int]:
        found = list(trees)
        self._draw.shuffle(found)
        return found

    def _prices(self, part: Places) -> Numbers:
        """What each operation of a path pays for each step beside the time that it makes the training step longer."""
        kinds = self.grid.kind_of[part]
        prices = self._shares(kinds)
        if self._closed is not None:
            kind, step = self._closed
            prices[kinds == kind, step] = math.inf
        return prices

    def _shares(self, kinds: Places) -> Numbers:
        """Of the launch of the kernel that is there, or would be; a row for each kind."""
        sizes = self.grid.counts[kinds].astype(np.float64)
        prices: Numbers = self._share * self._problem.launch_s / (sizes + 1.0)
        if self._noise:
            prices += self._noise * self._random.random(prices.shape)
        return prices
