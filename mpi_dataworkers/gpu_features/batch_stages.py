"""What data workers do of a batch for `corun.py`: pack it, or compute all of it where the trainer's GPU cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.cut_graph import CutGraph
from hetstream.mpi_dataworkers.features.cut_transform import DataWorkersPart
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.features.reading import Reader
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.arena import Packed, Packer
from hetstream.mpi_dataworkers.gpu_features.checks import check_graph, check_tile
from hetstream.mpi_dataworkers.gpu_features.launches import LaunchPlan, check_plan
from hetstream.mpi_dataworkers.gpu_features.opcodes import program_of


class Computed(NamedTuple):
    """A batch that data workers have computed.

    Attributes:
        features: the graph's outputs.
        digest: of the graph.
    """

    features: dict[str, Any]
    digest: str


class ComputedByDataWorkers:
    """A batch stage: the whole graph in data workers, marked so that nobody computes it again. It can be pickled.

    Args:
        graph: the graph.
        before: the loader's stage in whose place this one is; it does not go to data workers.
    """

    def __init__(self, graph: FeatureGraph, before: Any = None) -> None:
        self.graph = graph
        self.before = before
        self._transform = FeatureTransform(graph, native="exact")

    def __reduce__(self) -> tuple[object, ...]:
        return ComputedByDataWorkers, (self.graph,)

    def __call__(self, batch: Mapping[str, Any]) -> Computed:
        return Computed(self._transform(batch), self.graph.digest)


class PackedByDataWorkers:
    """A batch stage that packs raw columns for a plan, so that the trainer only copies them. It can be pickled.

        loader = DataLoader(..., collate_fn=collate_rows, batch_stage=PackedByDataWorkers(graph, plan))

    Raises:
        FeatureError: when it is made: the plan is none or another graph's, or the tile cannot be; when it is called:
            the batch does not fit the graph, and the message names each feature.
    """

    def __init__(self, graph: FeatureGraph, plan: LaunchPlan, tile: int = 256) -> None:
        check_graph("PackedByDataWorkers", graph)
        check_tile(tile)
        check_plan(plan, len(program_of(graph).chains))
        self._made_of = graph, plan, tile
        self._read = Reader(graph.inputs)
        launches = [each.chains for each in plan.launches]
        self._pack = Packer(graph, program_of(graph), tile, launches=launches, is_padded=plan.is_padded)

    def __reduce__(self) -> tuple[object, ...]:
        return PackedByDataWorkers, self._made_of

    def __call__(self, batch: Mapping[str, Any]) -> Packed:
        return self._pack(*self._read(batch))


def check_raw(loader: Iterable[Any], graph: FeatureGraph) -> None:
    """Raise FeatureError where a loader's batches have the graph's outputs already: it would be computed of those."""
    stage = getattr(loader, "batch_stage", None)
    stage = stage.cut if isinstance(stage, DataWorkersPart) else stage
    if isinstance(stage, CutGraph | FeatureTransform) and stage.graph.digest == graph.digest:
        raise FeatureError(
            "the loader's batches have this graph's outputs already, and CoRun needs raw columns: leave out the "
            "loader's features= or batch_stage="
        )
