"""A loader's `features`: which part of the graph data workers have, and which one the trainer finishes.

Used by `data_loader.py`. What a batch was handed over for stands in it: where the cut changes between two steps,
batches of both cuts may be under way, and each is finished by its own part.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.cut_graph import CutGraph
from hetstream.mpi_dataworkers.features.cut_transform import Compute, DataWorkersPart, HandedOver, TrainersPart
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.cut_costs import carried_over, trainers
from hetstream.mpi_dataworkers.gpu_features.fused import FusedTransform
from hetstream.mpi_dataworkers.gpu_features.hybrid import HybridFeatures
from hetstream.mpi_dataworkers.gpu_features.recut import Recut, Recutter
from hetstream.mpi_dataworkers.loader.feature_recuts import FeatureRecuts, Surroundings
from hetstream.mpi_dataworkers.loader.loader_connection import LoaderConnection
from hetstream.mpi_dataworkers.ops.staged import BatchStage
from hetstream.mpi_dataworkers.wire.messages import FeatureCut

_log = logging.getLogger(__name__)
Features = FeatureGraph | CutGraph | HybridFeatures
# Cuts whose batches may still be under way: of an iterator that another thread goes on with, say.
_MOST_PARTS = 8
_LONGEST_REASON = 300


@dataclass(frozen=True)
class _Plan:
    """What is in force: `cut` is None where data workers have the whole graph, `recutter` where the cut is fixed."""

    graph: FeatureGraph
    stage: BatchStage
    cut: CutGraph | None = None
    recutter: Recutter | None = None


class FeatureParts:
    """The parts of a loader's feature graph.

    Args:
        features: the graph, and where it is cut.
        device: where batches come. On a CUDA device a graph that is not cut is the trainer's as a whole.
        missing: why the device that was asked for is not there; then data workers have the whole graph.
        compute: gives what computes the trainer's part; default: `FusedTransform` on a CUDA device, else torch.
    """

    def __init__(
        self,
        features: Features,
        device: torch.device,
        missing: str = "",
        compute: Callable[[FeatureGraph], Compute] | None = None,
    ) -> None:
        self._device = device
        self._missing = missing
        self._make = compute or (self._fused if device.type == "cuda" else None)
        self._connection: LoaderConnection | None = None
        self._num_local_workers = 0
        self._parts: dict[str, TrainersPart] = {}
        self._recuts: FeatureRecuts | None = None
        self._shortage = ""
        self._has_said_so = False
        self._changing = threading.Lock()
        self._plan = self._planned(features, None)

    @property
    def stage(self) -> BatchStage:
        """What data workers run; the trainer's part is ready."""
        return self._plan.stage

    def attach(self, connection: LoaderConnection, num_local_workers: int) -> None:
        """Belong to a loader.

        Args:
            connection: the loader's; its stage is changed between two steps.
            num_local_workers: processes that make batches without a service.
        """
        self._connection, self._num_local_workers = connection, num_local_workers
        connection.has_features = True
        self._follow(self._plan)

    def use(self, features: Features) -> None:
        """Have other features from the next step on, or cut the graph elsewhere.

        Another graph in the place of one that is decided anew is cut where that is, until it is decided, too.

        Raises:
            OptionsError, PipelineError: data workers cannot have it; the one before stays.
        """
        with self._changing:
            self._follow(self._change(self._planned(features, self._plan)))

    def finish(self, batch: Any) -> Any:
        """What the training loop gets of a batch, wherever that was made; one that is whole is it already."""
        if type(batch) is not HandedOver:
            return batch
        part = self._parts.get(batch.fingerprint)
        if part is None:
            raise FeatureError(f"a batch of a cut came after the next {_MOST_PARTS} cuts: change it less often")
        began = time.perf_counter()
        made = part(batch)
        trainer_s = time.perf_counter() - began
        recuts = self._recuts
        if recuts is not None:
            recuts.note(batch, trainer_s)
        with self._changing:
            if self._shortage:
                self._say(self._shortage)
                self._missing, self._shortage = self._shortage, ""
                self._leave_to_data_workers()
            elif recuts is not None and recuts is self._recuts and (decided := recuts.decided()) is not None:
                self._carry_out(decided)
        return made

    def note_shortage(self, reason: str) -> None:
        """A batch was computed in host memory, because the GPU has no room: data workers are to do all of the next."""
        self._shortage = reason

    def close(self) -> None:
        """Decide nothing more."""
        if self._recuts is not None:
            self._recuts.close()

    # --- what is to be in force -------------------------------------------------------------------------------------

    def _planned(self, features: Features, now: _Plan | None) -> _Plan:
        """What data workers run for it; the trainer's part is ready when this returns."""
        graph = features if isinstance(features, FeatureGraph) else features.graph
        if self._missing:
            self._say(self._missing)
            return self._whole(graph, now)
        recutter = self._recutter_of(features, now)
        if recutter is not None:
            return self._cut(recutter.cut, recutter, now)
        if isinstance(features, CutGraph):
            return self._cut(features, None, now)
        return self._cut(_all_of(graph), None, now) if self._device.type == "cuda" else self._whole(graph, now)

    def _recutter_of(self, features: Features, now: _Plan | None) -> Recutter | None:
        if isinstance(features, FeatureGraph) and now is not None and now.recutter is not None:
            return now.recutter.with_graph(features)
        if not isinstance(features, HybridFeatures):
            return None
        if now is not None and now.cut is not None:
            return Recutter(features, carried_over(now.cut, features.graph))
        # A GPU is the graph's first place: the first steps say whether it has time for all of it.
        return Recutter(features, _all_of(features.graph) if self._device.type == "cuda" else None)

    def _cut(self, cut: CutGraph, recutter: Recutter | None, now: _Plan | None) -> _Plan:
        if now is not None and now.cut is not None and now.cut.fingerprint == cut.fingerprint:
            return replace(now, recutter=recutter)  # no batch has to be made again
        if cut.trainer is None and recutter is None:
            return self._whole(cut.graph, now)
        try:
            compute = None if self._make is None or cut.trainer is None else self._make(cut.trainer)
        except (FeatureError, torch.OutOfMemoryError) as error:
            self._say(str(error).partition("\n")[0])
            return self._whole(cut.graph, now)
        self._parts.pop(cut.fingerprint, None)
        self._parts[cut.fingerprint] = TrainersPart(cut, compute)
        while len(self._parts) > _MOST_PARTS:
            del self._parts[next(iter(self._parts))]  # the oldest
        return _Plan(cut.graph, DataWorkersPart(cut), cut, recutter)

    def _whole(self, graph: FeatureGraph, now: _Plan | None) -> _Plan:
        is_in_force = now is not None and now.cut is None and now.graph.digest == graph.digest
        return now if now is not None and is_in_force else _Plan(graph, FeatureTransform(graph))

    def _fused(self, graph: FeatureGraph) -> Compute:
        return FusedTransform(graph, device=self._device, on_shortage=self.note_shortage)

    def _say(self, reason: str) -> None:
        if not self._has_said_so:
            _log.warning("hetstream: features: data workers compute the whole graph: %s", reason)
        self._has_said_so = True

    # --- putting it in force ----------------------------------------------------------------------------------------

    def _change(self, plan: _Plan) -> _Plan:
        if plan.stage is not self._plan.stage and self._connection is not None:
            self._connection.use_batch_stage(plan.stage)
        self._plan = plan
        return plan

    def _follow(self, plan: _Plan) -> None:
        """Look at the steps from now on, if the cut is to follow them."""
        if self._recuts is not None and plan.recutter is None:
            self._recuts.close()
            self._recuts = None
        elif self._recuts is not None and plan.recutter is not None:
            self._recuts.begin_again(plan.recutter)
        elif plan.recutter is not None and self._connection is not None:
            self._recuts = FeatureRecuts(plan.recutter, self._surroundings)
        self._tell("nothing is decided yet" if plan.recutter is not None else "as the program says")

    def _surroundings(self) -> Surroundings:
        connection = self._connection
        assert connection is not None
        wait_s, client = connection.statistics.counters.wait_s, connection.client
        if client is None:
            return Surroundings(wait_s, self._num_local_workers, None, 0)
        return Surroundings(wait_s, client.num_data_workers, client.wire.bytes_per_s, client.num_waiting()[0])

    def _carry_out(self, decided: Recut) -> None:
        if decided.cut is not None:
            try:
                plan = self._change(self._cut(decided.cut, self._plan.recutter, self._plan))
            except HetstreamError as error:
                _log.warning("hetstream: features: the cut stays as it is, and is not decided anew: %s", error)
                self._follow(replace(self._plan, recutter=None))
                return
            _log.warning("hetstream: features: %s", decided.reason)
            if plan.recutter is None:
                self._follow(plan)
                return
        self._tell(decided.reason, decided.share)

    def _leave_to_data_workers(self) -> None:
        """From the next step on; the batch in hand is the loop's, whether they can have the graph or not."""
        try:
            self._follow(self._change(self._planned(self._plan.graph, self._plan)))
        except HetstreamError as error:
            _log.warning("hetstream: features: the cut stays as it is: %s", error)

    def _tell(self, reason: str, share: float = 0.0) -> None:
        """Put it into the loader's statistics, which the dispatcher is told."""
        if self._connection is None:
            return
        plan, num = self._plan, len(self._plan.graph.steps)
        on_trainer = 0 if plan.cut is None else len(trainers(plan.cut))
        self._connection.statistics.features = FeatureCut(num, on_trainer, share, reason[:_LONGEST_REASON])


def _all_of(graph: FeatureGraph) -> CutGraph:
    return CutGraph(graph, tuple(step.name for step in graph.steps))
