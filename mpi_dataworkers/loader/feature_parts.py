"""A loader's `features`: which part of the graph data workers have, and which one the trainer finishes.

Used by `data_loader.py`. What a batch was handed over for stands in it: where the cut changes between two steps,
batches of both cuts may be under way, and each is finished by its own part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.cut_graph import CutGraph
from hetstream.mpi_dataworkers.features.cut_transform import Compute, DataWorkersPart, HandedOver, TrainersPart
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.fused import FusedTransform
from hetstream.mpi_dataworkers.ops.staged import BatchStage

_log = logging.getLogger(__name__)


class FeatureParts:
    """The parts of a loader's feature graph.

    Args:
        device: where batches come. On a CUDA device a graph that is not cut is the trainer's as a whole.
        missing: why the device that was asked for is not there; then data workers have the whole graph.
        compute: gives what computes the trainer's part; default: `FusedTransform` on a CUDA device, else torch.

    Attributes:
        use_stage: has data workers use another stage from the next step on; set by the loader.
    """

    def __init__(
        self, device: torch.device, missing: str = "", compute: Callable[[FeatureGraph], Compute] | None = None
    ) -> None:
        self.use_stage: Callable[[BatchStage], None] | None = None
        self._device = device
        self._missing = missing
        self._make = compute or (self._fused if device.type == "cuda" else None)
        self._parts: dict[str, TrainersPart] = {}
        self._shortage = ""
        self._has_said_so = False

    def stage_of(self, features: FeatureGraph | CutGraph) -> BatchStage:
        """What data workers run for it; the trainer's part is ready when this returns."""
        graph = features.graph if isinstance(features, CutGraph) else features
        cut = self._chosen(features)
        if cut is None or cut.trainer is None:
            return FeatureTransform(graph)
        try:
            compute = None if self._make is None else self._make(cut.trainer)
        except (FeatureError, torch.OutOfMemoryError) as error:
            self._say(str(error).partition("\n")[0])
            return FeatureTransform(graph)
        self._parts[cut.fingerprint] = TrainersPart(cut, compute)
        return DataWorkersPart(cut)

    def finish(self, batch: Any) -> Any:
        """What the training loop gets of a batch, wherever that was made; one that is whole is it already."""
        if type(batch) is not HandedOver:
            return batch
        part = self._parts[batch.fingerprint]
        made = part(batch)
        if self._shortage and self.use_stage is not None:
            self._say(self._shortage)
            self._missing, self._shortage = self._shortage, ""
            self.use_stage(FeatureTransform(part.cut.graph))
        return made

    def _chosen(self, features: FeatureGraph | CutGraph) -> CutGraph | None:
        """Where the graph is cut; None where data workers have all of it."""
        if self._missing:
            self._say(self._missing)
            return None
        if isinstance(features, CutGraph):
            return features
        return CutGraph(features, tuple(step.name for step in features.steps)) if self._device.type == "cuda" else None

    def _fused(self, graph: FeatureGraph) -> Compute:
        return FusedTransform(graph, device=self._device, on_shortage=self.note_shortage)

    def note_shortage(self, reason: str) -> None:
        """A batch was computed in host memory, because the GPU has no room: data workers are to do all of the next."""
        self._shortage = reason

    def _say(self, reason: str) -> None:
        if not self._has_said_so:
            _log.warning("hetstream: features: data workers compute the whole graph: %s", reason)
        self._has_said_so = True
