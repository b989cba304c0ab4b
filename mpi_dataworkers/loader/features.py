"""A loader's `features`: which part of the graph data workers have, and which one the trainer finishes.

Used by `data_loader.py`. What a batch was handed over for stands in it: where the cut changes between two steps,
batches of both cuts may be under way, and each is finished by its own part.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hetstream.base.errors import HetstreamError, OptionsError
from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.batches import missing_columns
from hetstream.mpi_dataworkers.features.cut import Compute, CutGraph, DataWorkersPart, HandedOver, TrainersPart
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.gpu_features.capacity import Clock, CudaClock, HostClock
from hetstream.mpi_dataworkers.gpu_features.corun import Shortage, came_back, fell_short, next_try
from hetstream.mpi_dataworkers.gpu_features.fused import FusedTransform, has_memory
from hetstream.mpi_dataworkers.gpu_features.hybrid import HybridFeatures, Recut, Recutter, Seen, carried_over, trainers
from hetstream.mpi_dataworkers.gpu_features.operations import Batches
from hetstream.mpi_dataworkers.loader.connection import LoaderConnection
from hetstream.mpi_dataworkers.wire.messages import FeatureCut

# Looks at how the steps of a loader with `HybridFeatures` go, and has a `Recutter` decide about the cut in a thread.
#
# `FeatureParts` notes each batch and carries out what was decided, both in the training thread.

_log = logging.getLogger(__name__)
# A look is over at least this many steps and this time.
_STEPS, _LOOK_S = 20, 1.0
# A longer step is an evaluation, or a checkpoint, and no step.
_PAUSE_S, _PAUSE_FACTOR = 1.0, 10.0
# Longest wait for a decision that is being made when the loader closes.
_CLOSED_WITHIN_S = 2.0
# Batches on the device after which the time of the oldest is given up.
_MOST_MARKS = 16


class PartTimes:
    """Takes the time of the trainer's part of each batch, on the host and on its device: `with times: ...`.

    A device is behind the host, and nobody waits for it: its time is that of the last batch that it has finished.

    Args:
        clock: of the device.

    Attributes:
        host_s: of the last batch: launching alone, where a device computes.
        device_s: of a batch, on the device.
    """

    def __init__(self, clock: Clock) -> None:
        self.host_s = self.device_s = 0.0
        self._clock = clock
        self._marks: collections.deque[tuple[Any, Any]] = collections.deque(maxlen=_MOST_MARKS)

    @property
    def most_s(self) -> float:
        """Of the two the longer one: the device may work while the host goes on, and the host while it does."""
        return max(self.host_s, self.device_s)

    def __enter__(self) -> None:
        self._began, self._first = time.perf_counter(), self._clock.mark()

    def __exit__(self, *_: object) -> None:
        self._marks.append((self._first, self._clock.mark()))
        self.host_s = time.perf_counter() - self._began
        while self._marks and self._clock.is_over(self._marks[0][1]):
            self.device_s = self._clock.seconds(*self._marks.popleft())


@dataclass(frozen=True)
class LoaderContext:
    """What a loader knows besides its batches.

    Attributes:
        wait_s: in which the training loop has waited for data since the loader was made.
        num_data_workers, wire_bytes_per_s, batches_ahead: as `Seen`.
    """

    wait_s: float
    num_data_workers: int
    wire_bytes_per_s: float | None
    batches_ahead: int


class FeatureRecuts:
    """Looks, and decides in a thread; one decision at a time.

    Args:
        recutter: decides.
        look: gives the surroundings.
        clock: seconds, never going back.
    """

    def __init__(
        self, recutter: Recutter, look: Callable[[], LoaderContext], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.recutter = recutter
        self._look, self._clock = look, clock
        self._thread: threading.Thread | None = None
        self._decided: Recut | None = None
        self._has_failed = False
        self._begin_look()

    def _begin_look(self) -> None:
        self._num_steps = 0
        self._began = self._last = self._clock()
        self._before: LoaderContext | None = None
        self._trainer_s = self._data_worker_s = self._num_rows = self._list_length = 0.0

    def note(self, handed: HandedOver, trainer_s: float) -> None:
        """A batch is finished.

        Args:
            handed: of which it was made.
            trainer_s: that the trainer's part took.
        """
        now = self._clock()
        mean_s = (self._last - self._began) / self._num_steps if self._num_steps else 0.0
        is_pause = self._num_steps > 0 and now - self._last > max(_PAUSE_S, _PAUSE_FACTOR * mean_s)
        if is_pause or handed.fingerprint != self.recutter.cut.fingerprint or self._before is None:
            self._begin_look()  # with the next batch: nothing is known of how long this one took
            self._before = self._look()
            return
        self._num_steps += 1
        self._last = now
        self._trainer_s += trainer_s
        self._data_worker_s += handed.seconds
        self._num_rows += handed.num_rows
        self._list_length += handed.list_length
        if self._num_steps < _STEPS or now - self._began < _LOOK_S or self._thread is not None or self._has_failed:
            return
        seen = self._seen(self._before, now)
        self._begin_look()
        if seen is not None:
            recutter = self.recutter
            self._thread = threading.Thread(
                target=self._decide, args=(recutter, seen, now), name="hetstream-recut", daemon=True
            )
            self._thread.start()

    def _seen(self, before: LoaderContext, now: float) -> Seen | None:
        num, around = self._num_steps, self._look()
        wait_s, trainer_s = (around.wait_s - before.wait_s) / num, self._trainer_s / num
        num_rows = round(self._num_rows / num)
        if num_rows < 1 or around.num_data_workers != before.num_data_workers:
            return None
        return Seen(
            step_s=max(0.0, (now - self._began) / num - wait_s - trainer_s),
            wait_s=wait_s,
            trainer_s=trainer_s,
            data_worker_s=self._data_worker_s / num,
            num_data_workers=around.num_data_workers,
            wire_bytes_per_s=around.wire_bytes_per_s,
            batches_ahead=around.batches_ahead,
            batches=Batches(num_rows, self._list_length / num),
        )

    def _decide(self, recutter: Recutter, seen: Seen, now: float) -> None:
        try:
            decided = recutter.decide(seen, now)
        except Exception:  # noqa: BLE001, of a thread: said, and the cut stays
            _log.exception("hetstream: features: the cut stays as it is, and is not decided anew")
            self._has_failed = True
            return
        if recutter is self.recutter:  # else for a graph that is not the loader's any more
            self._decided = decided

    def decided(self) -> Recut | None:
        """What was decided since this was last asked."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread, found, self._decided = None, self._decided, None
        return found

    def begin_again(self, recutter: Recutter) -> None:
        """Decide about another graph from now on."""
        self.recutter, self._decided = recutter, None
        self._begin_look()

    def close(self) -> None:
        """Decide nothing more."""
        self._has_failed = True
        if self._thread is not None:
            self._thread.join(_CLOSED_WITHIN_S)


Features = FeatureGraph | CutGraph | HybridFeatures
# Cuts whose batches may still be under way: of an iterator that another thread goes on with, say.
_MOST_PARTS = 8
_LONGEST_REASON = 300
# Batches of which statistics say what computed the data workers' part: hosts may differ.
_CODES = 32


@dataclass(frozen=True)
class _Wanted:
    """What the program wants, or what was decided for it: `recutter` is None where the cut is fixed."""

    cut: CutGraph
    recutter: Recutter | None = None


@dataclass(frozen=True)
class _Plan:
    """What is in force."""

    cut: CutGraph
    stage: DataWorkersPart
    recutter: Recutter | None = None


@dataclass(frozen=True)
class TrainersDevice:
    """Where the trainer's part runs.

    Attributes:
        compute: makes what computes a graph there, which is given what to call when a batch found no memory; None:
            torch, in host memory.
        has_memory: whether there is a number of bytes.
        clock: of the device.
    """

    compute: Callable[[FeatureGraph, Callable[[str, int], None]], Compute] | None = None
    has_memory: Callable[[int], bool] = lambda _: True
    clock: Clock = HostClock()  # noqa: RUF009, it has no state


def device_of(device: torch.device) -> TrainersDevice:
    """A CUDA device computes with `FusedTransform`; what is on another one, torch computes in host memory."""
    if device.type != "cuda":
        return TrainersDevice()

    def fused(graph: FeatureGraph, note_shortage: Callable[[str, int], None]) -> Compute:
        return FusedTransform(graph, device=device, on_shortage=note_shortage)

    return TrainersDevice(fused, lambda num_bytes: has_memory(device, num_bytes), CudaClock())


class FeatureParts:
    """The parts of a loader's feature graph.

    Args:
        features: the graph, and where it is cut.
        device: where batches come. On a CUDA device a graph that is not cut is the trainer's as a whole.
        missing: why the device that was asked for is not there; then data workers have the whole graph.
        place: where the trainer's part runs; default: on the device.
        now: seconds, never going back.
    """

    def __init__(
        self,
        features: Features,
        device: torch.device,
        missing: str = "",
        place: TrainersDevice | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._missing = missing
        self._place = place or device_of(device)
        self._times = PartTimes(self._place.clock)
        self._now = now
        self._connection: LoaderConnection | None = None
        self._num_local_workers = 0
        self._parts: dict[str, TrainersPart] = {}
        self._recuts: FeatureRecuts | None = None
        self._shortage = Shortage()
        self._noted: tuple[str, int] | None = None  # of a batch that found no memory, until that is carried out
        self._needed_bytes = 0
        self._has_said_so = False
        self._columns = ""
        self._codes: collections.deque[str] = collections.deque(maxlen=_CODES)
        self._told_codes: tuple[str, ...] = ()
        self._told = "", 0.0
        self._changing = threading.Lock()
        self._wanted = self._wanted_of(features, None)
        self._plan = self._planned(self._wanted, None)

    @property
    def stage(self) -> DataWorkersPart:
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

    def begin_pass(self) -> None:
        """Nothing is known of the columns of a pass until its first batch has come."""
        self._columns = ""

    def use(self, features: Features, *, is_same_data: bool = True) -> None:
        """Have other features from the next step on, or cut the graph elsewhere.

        Another graph in the place of one that is decided anew is cut where that is, until it is decided, too.

        Args:
            features: the graph, and where it is cut.
            is_same_data: whether the loader's dataset and `collate_fn` are those of the batches that have come.

        Raises:
            FeatureError: batches do not have what the graph takes; the graph before stays.
            OptionsError, PipelineError: data workers cannot have it; the one before stays.
        """
        inputs = (features if isinstance(features, FeatureGraph) else features.graph).inputs
        if is_same_data and (problems := missing_columns(inputs, self._columns)):
            raise FeatureError(
                f"set_features: the batches of this pass do not fit the graph: {'; '.join(problems)}. The graph before "
                "stays. Where the dataset gives it from the next pass on, call set_features behind that pass's iter()"
            )
        with self._changing:
            wanted = self._wanted_of(features, self._wanted)
            self._follow(self._change(self._planned(wanted, self._plan)))
            self._wanted = wanted

    def finish(self, batch: Any) -> Any:
        """What the training loop gets of a batch, wherever that was made."""
        if type(batch) is not HandedOver:
            return batch
        part = self._parts.get(batch.fingerprint)
        if part is None:
            raise FeatureError(f"a batch of a cut came after the next {_MOST_PARTS} cuts: change it less often")
        with self._times:
            made = part(batch)
        self._columns = batch.columns
        if batch.code:
            self._codes.append(batch.code)
        recuts = self._recuts
        if recuts is not None:
            is_modelled = bool(recuts.recutter.features.layers)
            recuts.note(batch, self._times.host_s if is_modelled else self._times.most_s)
        if self._noted is not None or self._shortage.is_short or recuts is not None or self._has_other_codes():
            with self._changing:
                self._look(recuts)
        return made

    def _look(self, recuts: FeatureRecuts | None) -> None:
        """What is to be done between two batches."""
        if self._noted is not None:
            (reason, num_bytes), self._noted = self._noted, None
            self._leave_to_data_workers(reason, num_bytes)
        elif next_try(self._shortage, self._now()).is_due:
            self._try_again()
        elif recuts is not None and recuts is self._recuts and (decided := recuts.decided()) is not None:
            self._carry_out(decided)
        if self._has_other_codes():
            self._tell(*self._told)

    def note_shortage(self, reason: str, num_bytes: int = 0) -> None:
        """A batch was computed in host memory, because the GPU has no room: data workers are to do all of the next.

        Args:
            reason: what the GPU said.
            num_bytes: that the batch needs, where that is known.
        """
        self._noted = reason, num_bytes

    def close(self) -> None:
        """Decide nothing more."""
        if self._recuts is not None:
            self._recuts.close()

    # --- what is to be in force -------------------------------------------------------------------------------------

    def _wanted_of(self, features: Features, before: _Wanted | None) -> _Wanted:
        recutter = self._recutter_of(features, before)
        if recutter is not None:
            return _Wanted(recutter.cut, recutter)
        if isinstance(features, FeatureGraph):
            return _Wanted(_all_of(features) if self._device.type == "cuda" else CutGraph(features))
        assert isinstance(features, CutGraph)
        return _Wanted(features)

    def _recutter_of(self, features: Features, before: _Wanted | None) -> Recutter | None:
        if isinstance(features, FeatureGraph) and before is not None and before.recutter is not None:
            return before.recutter.with_graph(features)
        if not isinstance(features, HybridFeatures):
            return None
        if before is not None and (before.recutter is not None or before.cut.trainer is not None):
            return Recutter(features, carried_over(before.cut, features.graph))
        # A GPU is the graph's first place: the first steps say whether it has time for all of it.
        return Recutter(features, _all_of(features.graph) if self._device.type == "cuda" else None)

    def _planned(self, wanted: _Wanted, now: _Plan | None) -> _Plan:
        """What data workers run for it; the trainer's part is ready when this returns."""
        if self._missing:
            self._say(self._missing)
        if self._missing or self._shortage.is_short:
            return self._cut(CutGraph(wanted.cut.graph), None, now)
        try:
            return self._cut(wanted.cut, wanted.recutter, now)
        except torch.OutOfMemoryError as error:
            self._shortage = fell_short(self._shortage, self._now())
            self._say(_first_line(error))
        except FeatureError as error:
            self._missing = _first_line(error)
            self._say(self._missing)
        return self._cut(CutGraph(wanted.cut.graph), None, now)

    def _cut(self, cut: CutGraph, recutter: Recutter | None, now: _Plan | None) -> _Plan:
        if now is not None and now.cut.fingerprint == cut.fingerprint:
            return replace(now, recutter=recutter)  # no batch has to be made again
        make = self._place.compute
        compute = None if make is None or cut.trainer is None else make(cut.trainer, self.note_shortage)
        self._parts.pop(cut.fingerprint, None)
        self._parts[cut.fingerprint] = TrainersPart(cut, compute)
        while len(self._parts) > _MOST_PARTS:
            del self._parts[next(iter(self._parts))]  # the oldest
        return _Plan(cut, DataWorkersPart(cut), recutter)

    def _say(self, reason: str) -> None:
        if not self._has_said_so:
            _log.warning("hetstream: features: data workers compute the whole graph: %s", reason)
        self._has_said_so = True

    # --- putting it in force ----------------------------------------------------------------------------------------

    def _change(self, plan: _Plan) -> _Plan:
        if plan.stage is not self._plan.stage and self._connection is not None:
            self._connection.use_batch_stage(plan.stage)
            self._codes.clear()
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

    def _surroundings(self) -> LoaderContext:
        connection = self._connection
        assert connection is not None
        wait_s, client = connection.statistics.counters.wait_s, connection.client
        if client is None:
            return LoaderContext(wait_s, self._num_local_workers, None, 0)
        return LoaderContext(wait_s, client.num_data_workers, client.wire.bytes_per_s, client.num_waiting()[0])

    def _carry_out(self, decided: Recut) -> None:
        if decided.cut is not None:
            wanted = _Wanted(decided.cut, self._plan.recutter)
            try:
                plan = self._change(self._planned(wanted, self._plan))
            except HetstreamError as error:
                _log.warning("hetstream: features: the cut stays as it is, and is not decided anew: %s", error)
                self._follow(replace(self._plan, recutter=None))
                return
            self._wanted = wanted
            _log.warning("hetstream: features: %s", decided.reason)
            if plan.recutter is None:
                self._follow(plan)
                return
        self._tell(decided.reason, decided.share)

    def _leave_to_data_workers(self, reason: str, num_bytes: int) -> None:
        """From the next step on; the batch in hand is the loop's, whether they can have the graph or not."""
        self._shortage = fell_short(self._shortage, self._now())
        self._needed_bytes = max(self._needed_bytes, num_bytes)
        self._say(reason)
        try:
            self._follow(self._change(self._planned(self._wanted, self._plan)))
        except HetstreamError as error:
            _log.warning("hetstream: features: the cut stays as it is: %s", error)
            self._shortage = came_back(self._shortage, self._now())

    def _try_again(self) -> None:
        """Back to the GPU from the next step on, if it has memory for a batch now."""
        before = self._shortage
        if not self._place.has_memory(self._needed_bytes):
            self._shortage = fell_short(before, self._now())
            return
        self._shortage = came_back(before, self._now())
        try:
            plan = self._change(self._planned(self._wanted, self._plan))
        except HetstreamError as error:
            self._shortage = fell_short(before, self._now())
            _log.warning("hetstream: features: data workers keep the whole graph: %s", error)
            return
        self._follow(plan)
        if not self._shortage.is_short:
            _log.warning("hetstream: features: the GPU has memory again, and computes its part of the graph")
            self._has_said_so = False

    def _has_other_codes(self) -> bool:
        return bool(self._codes) and self._codes[-1] not in self._told_codes

    def _tell(self, reason: str, share: float = 0.0) -> None:
        """Put it into the loader's statistics, which the dispatcher is told."""
        if self._connection is None:
            return
        self._told, self._told_codes = (reason, share), tuple(sorted({*self._codes}))
        if self._shortage.is_short:
            reason = next_try(self._shortage, self._now()).reason
        if self._told_codes:
            reason = f"{reason}; data workers run {'; others '.join(self._told_codes)}"
        num, on_trainer = len(self._plan.cut.graph.steps), len(trainers(self._plan.cut))
        self._connection.statistics.features = FeatureCut(num, on_trainer, share, reason[:_LONGEST_REASON])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _all_of(graph: FeatureGraph) -> CutGraph:
    return CutGraph(graph, tuple(step.name for step in graph.steps))


# The keyword `features`: what it may be, and its parts; graphs are loaded only where a loader has one.


def features_or_none(_: str, value: Any) -> Iterator[str]:
    """A feature graph, one that is cut, or one whose cut follows the steps; or None."""
    if value is not None:
        from hetstream.mpi_dataworkers.features.cut import CutGraph
        from hetstream.mpi_dataworkers.features.graph import FeatureGraph
        from hetstream.mpi_dataworkers.gpu_features.hybrid import HybridFeatures

        if not isinstance(value, FeatureGraph | CutGraph | HybridFeatures):
            yield (
                f"features={value!r}: must be a FeatureGraph, a CutGraph such as decide(...).cut, HybridFeatures, or "
                "None; a function of a batch is given as batch_stage"
            )


def checked_features(value: Any) -> Any:
    """The features.

    Raises:
        OptionsError: they are none.
    """
    if value is None or any(features_or_none("features", value)):
        raise OptionsError(
            f"set_features: features={value!r}: must be a FeatureGraph, a CutGraph such as decide(...).cut, or "
            "HybridFeatures"
        )
    return value


def feature_parts(features: Any, device: torch.device, missing: str) -> FeatureParts:
    """The parts of a loader's graph; see `FeatureParts`."""

    return FeatureParts(features, device, missing)
