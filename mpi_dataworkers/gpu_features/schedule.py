"""Which operators run as one kernel, and beside which layer of the model: the problem, a schedule, what it costs. Pure.

A training step is a row of layers. Each leaves something of the GPU unused, in two resources: traffic to memory, and
arithmetic. Both are counted in seconds of the whole GPU, as RAP does with one resource (its section 5). A kernel holds
operators of one class for several features, none of which needs another one of them (section 6). It adds to its
layer's load what its operators take of each resource and, in both, one launch. Where a layer's load is more than what
it leaves, the step is longer by the larger of the two excesses: that time is *exposed*.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import UnionType

import numpy as np
import numpy.typing as npt

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.graph import FeatureGraph

# Numbers and objects that programs give: what is said of one that cannot be. Pure.

_LONGEST_VALUE = 200
_LARGEST_TILE = 512
_LARGEST_GRID = 2**31 - 1  # programs that CUDA launches at once


def check_number(
    name: str,
    value: object,
    least: float = 0.0,
    most: float = math.inf,
    *,
    is_above: bool = False,
    may_be_infinite: bool = False,
) -> None:
    """Raise FeatureError, in which it is called `name`, where this is no number, or smaller or larger than it may be.

    Args:
        name: of the number, for the message.
        value: what was given.
        least, most: that it may be.
        is_above: it must be larger than the least.
        may_be_infinite: positive infinity will do, too.
    """
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # a whole number that no float64 holds
        number = math.nan
    is_enough = number > least if is_above else number >= least
    if is_enough and number <= most and (may_be_infinite or math.isfinite(number)):
        return
    rule = f"above {least:g}" if is_above else f"at least {least:g}"
    rule += "" if math.isinf(most) else f", at most {most:g}"
    raise FeatureError(f"{name}={_said(value)}: give a {'' if may_be_infinite else 'finite '}number, {rule}")


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise FeatureError where this is no whole number, or smaller or larger than it may be."""
    if not isinstance(value, Integral) or int(value) < least or (most is not None and int(value) > most):
        rule = f"at least {least}" if most is None else f"{least} to {most}"
        raise FeatureError(f"{name}={_said(value)}: give a whole number, {rule}")


def check_is(name: str, value: object, kind: type | UnionType, hint: str) -> None:
    """Raise FeatureError where this is of another type; `hint` says what to give."""
    if not isinstance(value, kind):
        raise FeatureError(f"{name}={_said(value)}: give {hint}")


def check_each(name: str, values: object, kind: type) -> None:
    """Raise FeatureError where this is no tuple or list of objects of one type."""
    if not isinstance(values, tuple | list):
        raise FeatureError(f"{name}={_said(values)}: give a tuple of {kind.__name__}")
    for at, value in enumerate(values):
        check_is(f"{name}[{at}]", value, kind, f"a {kind.__name__}")


def check_callable(name: str, value: object, hint: str) -> None:
    """Raise FeatureError where this cannot be called; `hint` says what to give."""
    if not callable(value):
        raise FeatureError(f"{name}={_said(value)}: give {hint}")


def check_graph(who: str, graph: object) -> None:
    """Raise FeatureError where this is no feature graph."""
    if not isinstance(graph, FeatureGraph):
        raise FeatureError(f"{who}: graph is a {type(graph).__name__}; give a FeatureGraph")


def check_programs(name: str, value: object) -> None:
    """Raise FeatureError where this number of programs cannot be launched."""
    check_whole(name, value, 1, _LARGEST_GRID)


def check_tile(tile: int) -> None:
    """Raise FeatureError where a program cannot work on this number of values."""
    if not isinstance(tile, int) or not 1 <= tile <= _LARGEST_TILE or tile & (tile - 1):
        raise FeatureError(f"tile={tile!r}: a power of two, at most {_LARGEST_TILE}")


def _said(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."


# Longer than anything that is trained; sums of some thousands of them are finite.
_LONGEST_S = 1e9


@dataclass(frozen=True)
class Operation:
    """An operator of a feature graph, for one feature.

    Attributes:
        name: the feature that it makes.
        kind: operators of one kind can share a kernel.
        parent: the place of the operation that it needs, which is before its own; -1 where it needs an input alone.
        memory_s, compute_s: what it takes of the whole GPU's memory traffic and arithmetic.
    """

    name: str
    kind: str
    parent: int
    memory_s: float
    compute_s: float

    @property
    def alone_s(self) -> float:
        """How long it takes by itself, without the launch."""
        return max(self.memory_s, self.compute_s)


@dataclass(frozen=True)
class Layer:
    """A layer of the model, in forward or backward.

    Attributes:
        duration_s: without anything beside it.
        memory_s, compute_s: what it leaves of the GPU's memory traffic and arithmetic.
    """

    name: str
    duration_s: float
    memory_s: float
    compute_s: float


@dataclass(frozen=True)
class Problem:
    """What is to be scheduled.

    Raises:
        FeatureError: an operation needs a later one (a circle), a number is negative, infinite or NaN, or something is
            of another type.
    """

    operations: tuple[Operation, ...]
    layers: tuple[Layer, ...]
    launch_s: float

    def __post_init__(self) -> None:
        check_each("operations", self.operations, Operation)
        check_each("layers", self.layers, Layer)
        problems = list(self._problems())
        if problems:
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise FeatureError("this cannot be scheduled: " + "; ".join(problems[:5]) + more)

    def _problems(self) -> Iterator[str]:
        if not self.layers:
            yield "there is no layer"
        if not _is_time(self.launch_s):
            yield f"launch_s={self.launch_s}: a finite number of seconds, 0 to {_LONGEST_S:g}"
        for at, operation in enumerate(self.operations):
            if not isinstance(operation.parent, Integral) or not -1 <= operation.parent < at:
                yield f"operation {operation.name} needs number {operation.parent}, and is number {at} itself"
            if not isinstance(operation.kind, str):
                yield f"operation {operation.name}: kind={operation.kind!r}: a name"
            if not (_is_time(operation.memory_s) and _is_time(operation.compute_s)):
                seconds = f"memory_s={operation.memory_s}, compute_s={operation.compute_s}"
                yield f"operation {operation.name}: {seconds}: finite numbers of seconds, 0 to {_LONGEST_S:g}"
        for layer in self.layers:
            if not all(map(_is_time, (layer.duration_s, layer.memory_s, layer.compute_s))):
                yield f"{layer}: finite numbers of seconds, 0 to {_LONGEST_S:g}"

    @property
    def training_s(self) -> float:
        """A training step without preprocessing."""
        return sum(layer.duration_s for layer in self.layers)


@dataclass(frozen=True)
class Kernel:
    """Operations that are launched together.

    Attributes:
        layer: beside which it runs.
        operations: their places in the problem.
    """

    layer: int
    kind: str
    operations: tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """What a schedule costs.

    Attributes:
        exposed_s: by which the training step is longer.
        num_kernels: launches.
        loads: of each layer: memory_s, compute_s.
    """

    exposed_s: float
    num_kernels: int
    loads: tuple[tuple[float, float], ...]

    @property
    def rank(self) -> tuple[float, int]:
        """The smaller the better; time is told apart by the picosecond, so that sums in another order are the same."""
        return round(self.exposed_s, 12), self.num_kernels


def cost_of(problem: Problem, kernels: Sequence[Kernel]) -> Cost:
    """Return what kernels cost, in whatever order.

    Raises:
        FeatureError: this is no problem, or a kernel has a layer or an operation that the problem has not.
    """
    check_is("problem", problem, Problem, "a Problem")
    check_each("kernels", kernels, Kernel)
    for number, kernel in enumerate(kernels):
        check_whole(f"kernels[{number}]: layer", kernel.layer, 0, len(problem.layers) - 1)
        for at in kernel.operations:
            check_whole(f"kernels[{number}]: operation", at, 0, len(problem.operations) - 1)
    loads = [[0.0, 0.0] for _ in problem.layers]
    for kernel in kernels:
        load = loads[kernel.layer]
        for resource, name in enumerate(("memory_s", "compute_s")):
            load[resource] += problem.launch_s
            load[resource] += sum(getattr(problem.operations[at], name) for at in kernel.operations)
    exposed = 0.0
    for layer, (memory_s, compute_s) in zip(problem.layers, loads, strict=True):
        exposed += max(0.0, memory_s - layer.memory_s, compute_s - layer.compute_s)
    return Cost(exposed, len(kernels), tuple((memory_s, compute_s) for memory_s, compute_s in loads))


def least_exposed_s(problem: Problem) -> float:
    """No schedule exposes less: one launch of each kind that the longest chain of it needs, and all layers used up.

    Raises:
        FeatureError: this is no problem.
    """
    check_is("problem", problem, Problem, "a Problem")
    return max(0.0, filled_s(problem, sum(longest_chains(problem.operations).values())))


def filled_s(problem: Problem, num_launches: int) -> float:
    """Return what is exposed if work and so many launches could be divided among the layers at will, as water is.

    Below zero it is what still fits.

    It is the optimum of a linear program with three prices: of memory traffic, of arithmetic, and of launches, which
    take both. So there are three bounds: each resource with the launches, and the launches alone in what each layer
    leaves of both.
    """
    launches_s = num_launches * problem.launch_s
    bounds = [launches_s - sum(min(layer.memory_s, layer.compute_s) for layer in problem.layers)]
    for name in ("memory_s", "compute_s"):
        work = sum(getattr(operation, name) for operation in problem.operations)
        bounds.append(work + launches_s - sum(getattr(layer, name) for layer in problem.layers))
    return max(bounds)


def longest_chains(operations: Sequence[Operation]) -> dict[str, int]:
    """Of each kind, how many operations one feature needs one after the other: so many launches, at least."""
    counts: list[Counter[str]] = []
    most: Counter[str] = Counter()
    for operation in operations:
        count = Counter(counts[operation.parent]) if operation.parent >= 0 else Counter()
        count[operation.kind] += 1
        counts.append(count)
        most |= count
    return dict(most)


def problems_of(problem: Problem, kernels: Sequence[Kernel]) -> list[str]:
    """Return what is wrong with a schedule whose kernels are launched in this order; nothing, if it can be carried out.

    Raises:
        FeatureError: this is no problem, or these are no kernels.
    """
    check_is("problem", problem, Problem, "a Problem")
    check_each("kernels", kernels, Kernel)
    found: list[str] = []
    at_kernel: dict[int, int] = {}
    layer = 0
    for number, kernel in enumerate(kernels):
        if not 0 <= kernel.layer < len(problem.layers):
            found.append(f"kernel {number}: there is no layer {kernel.layer}")
        elif kernel.layer < layer:
            found.append(f"kernel {number}: its layer {kernel.layer} is over when layer {layer} has begun")
        layer = max(layer, kernel.layer)
        if not kernel.operations:
            found.append(f"kernel {number} is empty")
        for at in kernel.operations:
            if at in at_kernel:
                found.append(f"operation {problem.operations[at].name} runs twice")
            at_kernel[at] = number
            if problem.operations[at].kind != kernel.kind:
                found.append(f"operation {problem.operations[at].name} is no {kernel.kind}")
    for at, operation in enumerate(problem.operations):
        if at not in at_kernel:
            found.append(f"operation {operation.name} never runs")
        elif operation.parent >= 0 and at_kernel.get(operation.parent, -1) >= at_kernel[at]:
            found.append(f"operation {operation.name} runs before what it needs")
    return found


def _is_time(number: float) -> bool:
    return isinstance(number, Real) and 0 <= number <= _LONGEST_S


# Operations on a grid of steps, some for each layer; places the operations of one feature at a time, by exact search.
#
# Used by the two searches of `search.py`, which differ in the prices that an operation pays for a step. Operations of
# one kind at one step are one kernel. An operation is at a later step than the one that it needs.

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
class OperationPlacement:
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
        """Return what `restore` takes."""
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
        """Return the first and the last step at which all of these could be, while those around them stay where they
        are.
        """
        parents = self._parents[operations]
        low = int(np.where(parents >= 0, self.step_of[parents] + 1, 0).max())
        inner = np.isin(self._parents, operations)
        high = int(self.step_of[inner].min(initial=self.num_steps)) - 1
        return low, high

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
        """Return what is launched, in order."""
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
    """Return the cheapest way to cut a path into stretches with ascending layers: layer, first, last; the last one
    first.

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
    """As `OperationPlacement.trees`: each path goes on with the child below which the longest chain is."""
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
    """Return the earliest step within its layer for each operation of a schedule, and how many steps each layer
    needs.
    """
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
