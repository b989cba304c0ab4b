"""Decides where a feature graph is cut: the trainer's GPU keeps what fits beside training, data workers get the rest.
Pure.

Called by programs when they make a loader. `recut.py` decides anew while a program trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.cut_graph import CutGraph
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.gpu_features.checks import check_graph, check_number
from hetstream.mpi_dataworkers.gpu_features.cut_costs import CutCosts
from hetstream.mpi_dataworkers.gpu_features.operations import Batches, Device
from hetstream.mpi_dataworkers.gpu_features.schedule import Layer, Problem


@dataclass(frozen=True)
class HybridFeatures:
    """A feature graph whose cut follows what is measured while the program trains: a loader's `features`.

    Attributes:
        graph: the graph.
        gpu: the trainer's GPU, such as `operations.H200`; None where it is not known, or the trainer has none.
        layers: of the model, with what each leaves of that GPU; () where that is not known: then what counts is by how
            much steps are measured to be longer.

    Raises:
        FeatureError: there are layers, and no GPU that they leave something of; or something is of another type, or
            numbers of a layer are negative, infinite or NaN.
    """

    graph: FeatureGraph
    gpu: Device | None = None
    layers: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        _check("HybridFeatures", self.graph, self.gpu, self.layers)
        if self.layers and self.gpu is None:
            raise FeatureError("HybridFeatures: layers leave something of a GPU; give gpu=, such as operations.H200")
        if self.layers:
            Problem((), tuple(self.layers), 0.0)  # which looks at their numbers


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
        FeatureError: a number is negative, infinite or NaN, something is of another type, or there is no layer.
    """
    _check("decide", graph, device, layers)
    if device is None or not isinstance(batches, Batches):
        raise FeatureError(f"decide: {batches!r} on {device!r}: give Batches(rows=...) and a Device")
    if not layers:
        raise FeatureError("there is no layer: nothing is known of what the GPU leaves")
    check_number("allowed_s", allowed_s)
    costs = CutCosts(graph, batches, device, layers)
    whole_exposed_s = exposed_s = costs.exposed_s(costs.kept(0))
    moved, count = 0, len(costs.order)
    if exposed_s > allowed_s:
        # Between these lies how many have to move, at least.
        first, moved, exposed_s = 1, count, 0.0
        while first < moved:
            middle = (first + moved) // 2
            kept = costs.kept(middle)
            if costs.least_exposed_s(kept) <= allowed_s and (less_s := costs.exposed_s(kept)) <= allowed_s:
                moved, exposed_s = middle, less_s
            else:
                first = middle + 1
    reason = _reason(moved, count, exposed_s, whole_exposed_s, allowed_s)
    return HybridDecision(costs.cut(costs.kept(moved)), exposed_s, whole_exposed_s, reason)


def _check(who: str, graph: object, gpu: object, layers: object) -> None:
    """Raise FeatureError where something is of another type; a layer's own numbers are the `Problem`'s to check."""
    check_graph(who, graph)
    if gpu is not None and not isinstance(gpu, Device):
        raise FeatureError(f"{who}: the GPU is {gpu!r}; give a Device, such as operations.H200")
    if layers is not None and not isinstance(layers, Sequence):
        raise FeatureError(f"{who}: layers={layers!r}: give a tuple of Layer")


def _reason(moved: int, count: int, exposed_s: float, whole_exposed_s: float, allowed_s: float) -> str:
    allowed = f"{allowed_s * 1e6:.3g} us are allowed"
    if not moved:
        return f"all {count} operators fit beside training: it is {exposed_s * 1e6:.3g} us longer, and {allowed}"
    whole = f"with the whole graph on the GPU a step is {whole_exposed_s * 1e6:.3g} us longer, and {allowed}"
    if moved == count:
        return f"{whole}: no operator fits, data workers have all {count}"
    return f"{whole}: data workers have {moved} of {count} operators, and it is {exposed_s * 1e6:.3g} us longer"
