"""RAP's own way to a schedule: kernels as large as they can be, then one after the other into the layers. Pure.

Called as the beginning of our search, which then is never worse, and by benchmarks to compare with. The paper leaves
open how far a kernel fits a capacity that was measured with another operator, and what becomes of kernels that fit
nowhere; its published program measures with Ngram and puts them beside the last layer, and so does this.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np

from hetstream.mpi_dataworkers.gpu_features.checks import check_each, check_is
from hetstream.mpi_dataworkers.gpu_features.placement import Numbers, Placement, Places, longest_chain
from hetstream.mpi_dataworkers.gpu_features.schedule import Kernel, Operation, Problem

PROBE = "Ngram"
# Orders in which the features are placed, from the beginning; and how often all are placed again.
_ORDERS, _SWEEPS = 4, 6
# By which operations are weighed that can run: their number, and the lengths of what waits for them.
POWERS = (0, 1, 2, 3)
_Fused = tuple[str, tuple[int, ...]]


def fuse(problem: Problem, seed: int = 0) -> list[_Fused]:
    """The kernels of the paper's section 6.2, in order: the sum of the squares of their sizes is as large as it gets.

    The paper gives this to a solver of integer programs. Here each feature in turn moves where it makes the sum
    largest, until none can; on the plans of this project that finds larger sums than HiGHS does in a minute.

    Raises:
        FeatureError: this is no problem.
    """
    check_is("problem", problem, Problem, "a Problem")
    draw = Random(seed)
    steps = [max(8, math.ceil(1.5 * longest_chain(problem))), *[0] * (len(problem.layers) - 1)]
    grid = Placement(problem, steps, counts_launches=False)

    def prices(part: Places) -> Numbers:
        # Each counts itself and the larger square of its kernel.
        prices: Numbers = -2.0 * grid.counts[grid.kind_of[part]].astype(np.float64) - 1.0
        return prices

    best, best_sum = grid.snapshot(), -1
    for _ in range(_ORDERS):
        grid.clear()
        trees = list(range(len(grid.trees)))
        draw.shuffle(trees)
        for tree in trees:
            grid.put(tree, prices)
        for _ in range(_SWEEPS):
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
