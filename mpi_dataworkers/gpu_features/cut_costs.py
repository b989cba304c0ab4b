"""What the two parts of a cut feature graph cost, by which operators the trainer keeps. Pure.

Used by `hybrid.py`, which decides before a program trains, and by `recut.py`, which decides anew while it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetstream.mpi_dataworkers.features.cut_graph import CutGraph, behind
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.gpu_features.algorithm_1 import algorithm_1, fuse
from hetstream.mpi_dataworkers.gpu_features.checks import check_is
from hetstream.mpi_dataworkers.gpu_features.operations import CPU_CORE, Batches, Device, operations_of, sizes_of
from hetstream.mpi_dataworkers.gpu_features.placement import trees_of
from hetstream.mpi_dataworkers.gpu_features.schedule import Layer, Operation, Problem, cost_of, least_exposed_s


@dataclass(frozen=True)
class CutCost:
    """What a cut costs for each batch, by the model.

    Attributes:
        data_worker_s: of a CPU core, for the data workers' part.
        trainer_s: of a CPU core, if the trainer's part ran on one.
        exposed_s: by which a training step is longer, where the trainer's part runs beside the layers of a model.
        handed_bytes: that data workers hand over.
    """

    data_worker_s: float
    trainer_s: float
    exposed_s: float
    handed_bytes: float


class CutCosts:
    """What each cut of a graph costs. Cuts that were asked for are remembered.

    Args:
        graph: the graph.
        batches: what it is computed for.
        gpu: the trainer's; None where the trainer's part runs on a CPU.
        layers: of the model, with what each leaves of the GPU; () where that is not known.

    Attributes:
        order: operators in the order in which they move to data workers: by feature, the dearest one first, each after
            the one that it needs. So features move whole, few of them, and what stays is a part that can be cut off.

    Raises:
        FeatureError: something is of another type.
    """

    def __init__(
        self, graph: FeatureGraph, batches: Batches, gpu: Device | None = None, layers: Sequence[Layer] = ()
    ) -> None:
        check_is("batches", batches, Batches, "Batches(rows=...)")
        self.graph, self.batches = graph, batches
        on_a_core = operations_of(graph, batches.rows, batches.list_length, CPU_CORE)
        self._core_s = {each.name: each.alone_s + CPU_CORE.launch_s for each in on_a_core}
        self._sizes = sizes_of(graph, batches.rows, batches.list_length)
        device = gpu or CPU_CORE
        operations = on_a_core if gpu is None else operations_of(graph, batches.rows, batches.list_length, gpu)
        self._hides = gpu is not None and bool(layers)
        self._problem = Problem(operations, tuple(layers) or (Layer("none", 0.0, 0.0, 0.0),), device.launch_s)
        self.order = _order(self._problem)
        self._known: dict[frozenset[str], CutCost] = {}

    def kept(self, num_moved: int) -> frozenset[str]:
        """What the trainer keeps when the first `num_moved` operators have moved."""
        return frozenset(self.order[num_moved:])

    def cut(self, kept: frozenset[str]) -> CutGraph:
        """The graph, cut so that the trainer has these operators."""
        order = self.graph.order
        return CutGraph(self.graph, tuple(step.name for step in order if step.name in kept and step.of not in kept))

    def of(self, kept: frozenset[str]) -> CutCost:
        """What a cut costs."""
        if kept not in self._known:
            moved_s = sum(seconds for name, seconds in self._core_s.items() if name not in kept)
            handed = sum(self._sizes[name].num_bytes for name in _handed(self.cut(kept)))
            trainer_s = sum(self._core_s[name] for name in kept)
            self._known[kept] = CutCost(moved_s, trainer_s, self.exposed_s(kept), handed)
        return self._known[kept]

    def exposed_s(self, kept: frozenset[str]) -> float:
        """What the paper's schedule exposes, with both resources: `search` finds better ones, in more time."""
        if not self._hides or not kept:
            return 0.0
        problem = self._of_trainer(kept)
        return cost_of(problem, algorithm_1(problem, fuse(problem), two_resources=True)).exposed_s

    def least_exposed_s(self, kept: frozenset[str]) -> float:
        """No schedule exposes less; it is known at once."""
        return least_exposed_s(self._of_trainer(kept)) if self._hides else 0.0

    def _of_trainer(self, kept: frozenset[str]) -> Problem:
        places: dict[int, int] = {}
        found: list[Operation] = []
        for at, each in enumerate(self._problem.operations):
            if each.name in kept:
                places[at] = len(found)
                parent = places.get(each.parent, -1)
                found.append(Operation(each.name, each.kind, parent, each.memory_s, each.compute_s))
        return Problem(tuple(found), self._problem.layers, self._problem.launch_s)


def trainers(cut: CutGraph) -> frozenset[str]:
    """The operators of the trainer's part, by their names in the whole graph."""
    return behind(cut.graph, cut.first)


def carried_over(cut: CutGraph, graph: FeatureGraph) -> CutGraph:
    """Another graph, cut where this one is: the trainer keeps the operators that it has, and those that need them.

    What is new goes to data workers, until it is decided anew.
    """
    kept = trainers(cut)
    before = {step for step in cut.graph.steps if step.name in kept}
    return CutGraph(graph, tuple(step.name for step in graph.steps if step in before))


def _handed(cut: CutGraph) -> list[str]:
    """The features that data workers hand over, by their names in the whole graph."""
    made = [name for output in cut.data_workers.outputs for name in output.of] if cut.data_workers is not None else []
    return [*made, *(name for name, _ in cut.passed)]


def _order(problem: Problem) -> list[str]:
    def seconds(tree: Sequence[int]) -> float:
        return sum(problem.operations[at].alone_s for at in tree)

    trees = [sorted(int(at) for part in parts for at in part) for parts in trees_of(problem)]
    ordered = sorted(trees, key=lambda tree: (-seconds(tree), tree))
    return [problem.operations[at].name for tree in ordered for at in tree]
