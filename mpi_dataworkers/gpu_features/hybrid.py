"""Decides where a feature graph is cut: the trainer's GPU keeps what fits beside training, data workers get the rest.
Pure.

Called by programs when they make a loader, and again whenever what the GPU leaves has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.cut_graph import CutGraph
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.gpu_features.algorithm_1 import algorithm_1, fuse
from hetstream.mpi_dataworkers.gpu_features.operations import Device, operations_of
from hetstream.mpi_dataworkers.gpu_features.placement import trees_of
from hetstream.mpi_dataworkers.gpu_features.schedule import Layer, Operation, Problem, cost_of, least_exposed_s


@dataclass(frozen=True)
class Batches:
    """What batches are like.

    Attributes:
        rows: of a batch.
        list_length: values in a list of a jagged input, on average.
    """

    rows: int
    list_length: float = 1.0


@dataclass(frozen=True)
class HybridDecision:
    """Where a graph is cut.

    Attributes:
        cut: the graph in two parts; a loader's `features`.
        exposed_s: by which a training step is longer, by the cost model.
        whole_exposed_s: the same with the whole graph on the GPU.
        reason: why it is cut there.
    """

    cut: CutGraph
    exposed_s: float
    whole_exposed_s: float
    reason: str


def decide(
    graph: FeatureGraph, batches: Batches, device: Device, layers: Sequence[Layer], allowed_s: float = 0.0
) -> HybridDecision:
    """Cut a graph so that what the GPU computes makes a training step no longer than is allowed.

    Features go to data workers whole, those that cost the GPU most first, so that few of them move. Of the last one as
    many operators stay as fit: data workers have those that come first.

    Args:
        graph: the graph.
        batches: what it is computed for.
        device: the trainer's GPU.
        layers: of the model, with what each leaves of the GPU.
        allowed_s: by which a training step may become longer.

    Raises:
        FeatureError: a number is negative, infinite or NaN, there is no layer, or batches have no row.
    """
    if batches.rows < 1 or not 0 <= batches.list_length < float("inf"):
        raise FeatureError(f"{batches}: rows of at least 1, and a finite list_length of at least 0")
    if not 0 <= allowed_s < float("inf"):
        raise FeatureError(f"allowed_s={allowed_s}: a finite number of seconds, 0 at least")
    whole = Problem(operations_of(graph, batches.rows, batches.list_length, device), tuple(layers), device.launch_s)
    order = _order(whole)
    whole_exposed_s = exposed_s = _exposed_s(whole)
    moved = 0
    if exposed_s > allowed_s:
        # Between these lies how many have to move, at least.
        first, moved, exposed_s = 1, len(order), 0.0
        while first < moved:
            middle = (first + moved) // 2
            less = _without(whole, order[:middle])
            if least_exposed_s(less) <= allowed_s and (less_s := _exposed_s(less)) <= allowed_s:
                moved, exposed_s = middle, less_s
            else:
                first = middle + 1
    kept = {whole.operations[at].name for at in order[moved:]}
    cut = CutGraph(graph, tuple(step.name for step in graph.order if step.name in kept and step.of not in kept))
    return HybridDecision(
        cut, exposed_s, whole_exposed_s, _reason(moved, len(order), exposed_s, whole_exposed_s, allowed_s)
    )


def _reason(moved: int, count: int, exposed_s: float, whole_exposed_s: float, allowed_s: float) -> str:
    allowed = f"{allowed_s * 1e6:.0f} us are allowed"
    if not moved:
        return f"all {count} operators fit beside training: it is {exposed_s * 1e6:.0f} us longer, and {allowed}"
    whole = f"with the whole graph on the GPU a step is {whole_exposed_s * 1e6:.0f} us longer, and {allowed}"
    if moved == count:
        return f"{whole}: no operator fits, data workers have all {count}"
    return f"{whole}: data workers have {moved} of {count} operators, and it is {exposed_s * 1e6:.0f} us longer"


def _order(problem: Problem) -> list[int]:
    """Operations in the order in which they move: by feature, the dearest one first, each after the one it needs."""

    def seconds(tree: Sequence[int]) -> float:
        return sum(problem.operations[at].alone_s for at in tree)

    trees = [sorted(int(at) for part in parts for at in part) for parts in trees_of(problem)]
    return [at for tree in sorted(trees, key=lambda tree: (-seconds(tree), tree)) for at in tree]


def _without(problem: Problem, gone: Sequence[int]) -> Problem:
    """The problem without some operations, none of which needs one that stays."""
    left_out = set(gone)
    places: dict[int, int] = {}
    kept: list[Operation] = []
    for at, each in enumerate(problem.operations):
        if at not in left_out:
            places[at] = len(kept)
            parent = places.get(each.parent, -1)
            kept.append(Operation(each.name, each.kind, parent, each.memory_s, each.compute_s))
    return Problem(tuple(kept), problem.layers, problem.launch_s)


def _exposed_s(problem: Problem) -> float:
    """What the paper's schedule exposes, with both resources: `search` finds better ones, but not between two steps."""
    if not problem.operations:
        return 0.0
    return cost_of(problem, algorithm_1(problem, fuse(problem), two_resources=True)).exposed_s
