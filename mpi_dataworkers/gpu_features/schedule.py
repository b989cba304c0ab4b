"""Which operators run as one kernel, and beside which layer of the model: the problem, a schedule, what it costs. Pure.

A training step is a row of layers. Each leaves something of the GPU unused, in two resources: traffic to memory, and
arithmetic. Both are counted in seconds of the whole GPU, as RAP does with one resource (its section 5). A kernel holds
operators of one class for several features, none of which needs another one of them (section 6). It adds to its
layer's load what its operators take of each resource and, in both, one launch. Where a layer's load is more than what
it leaves, the step is longer by the larger of the two excesses: that time is *exposed*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.gpu_features.checks import check_each, check_is, check_whole

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
    """What kernels cost, in whatever order.

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
    """What is exposed if work and so many launches could be divided among the layers at will, as water is.

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
    """What is wrong with a schedule whose kernels are launched in this order; nothing, if it can be carried out.

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
