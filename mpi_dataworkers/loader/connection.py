"""What one loader object keeps between iterations: its pipeline, its connection to the service, its statistics.

Used by `data_loader.py` and, for torch's own class, by `unmodified.py`. `client.py` is the side that talks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from hetstream.base.errors import OptionsError
from hetstream.base.text import printable
from hetstream.mpi_dataworkers.errors import PipelineError, ServiceUnavailable
from hetstream.mpi_dataworkers.loader import step_times
from hetstream.mpi_dataworkers.loader.batches import TorchBatches
from hetstream.mpi_dataworkers.loader.canary import Canary
from hetstream.mpi_dataworkers.loader.client import ClientOptions, ServiceClient, name_loader
from hetstream.mpi_dataworkers.loader.isolated_steps import StepsApart
from hetstream.mpi_dataworkers.loader.live_objects import ask_apart, left_out, unseen_change
from hetstream.mpi_dataworkers.loader.local_workers import LocalWorkers
from hetstream.mpi_dataworkers.loader.process_connection import service_at
from hetstream.mpi_dataworkers.loader.session import Delivered
from hetstream.mpi_dataworkers.loader.shards import Order
from hetstream.mpi_dataworkers.loader.statistics import LoaderStatistics, SkippedSamples
from hetstream.mpi_dataworkers.ops.cache_store import leave_no_memory
from hetstream.mpi_dataworkers.ops.origins import PassSeeds
from hetstream.mpi_dataworkers.ops.pickled_pipeline import (
    PickledPipeline,
    copy_of,
    difference,
    find_unpicklable,
    has_changed,
    pickle_pipeline,
)
from hetstream.mpi_dataworkers.ops.pickling import RunsUserCode, digest_of, pickle_apart
from hetstream.mpi_dataworkers.ops.pipeline import (
    BatchStage,
    MadeStep,
    Pipeline,
    SampleError,
    StagedBatch,
    Stages,
    Watched,
    device_of,
    generators_kept,
    make_step,
    same_stages,
)
from hetstream.mpi_dataworkers.ops.process_memory import WriteWatch
from hetstream.mpi_dataworkers.ops.program import LIBRARY_SETTINGS
from hetstream.mpi_dataworkers.ops.settings import registered
from hetstream.mpi_dataworkers.ops.structure import refuse_graphs
from hetstream.mpi_dataworkers.ops.worker_context import EnteredPipeline, acting_as_data_worker
from hetstream.mpi_dataworkers.process.config import (
    MEMORY,
    TrainerIdentity,
    buffer_bytes_from_environment,
    compression_from_environment,
    transports_from_environment,
)
from hetstream.mpi_dataworkers.process.handlers import others
from hetstream.mpi_dataworkers.process.interpreter import announce
from hetstream.mpi_dataworkers.wire.address import parse_service
from hetstream.mpi_dataworkers.wire.codec import Buffer, aligned
from hetstream.mpi_dataworkers.wire.messages import (
    CacheReport,
    ErrorPolicy,
    Failure,
    ListedOrder,
    PlannedOrder,
    Program,
    ProvidePipeline,
    Sharing,
)
from hetstream.mpi_dataworkers.wire.pipeline_transfer import HandoverFailed, buffers_in, pack, places_of, read_into

# What a loader has given to data workers: its pipeline as it was when it was sent, and a copy of that in the trainer.

_log = logging.getLogger(__name__)


@functools.cache
def _say_once(line: str) -> None:
    _log.warning("%s", line)


@dataclass(frozen=True)
class SentPipeline:
    """A pipeline as data workers have it.

    Attributes:
        message: what they are sent.
        pickled: the same here. Its buffers are the dataset's own memory: the program may have written to them since.
        shared_digest: of those that lie in shared memory, as they were sent.
        stages: the program's own objects.
    """

    message: ProvidePipeline
    pickled: PickledPipeline
    shared_digest: str
    stages: Stages


class SentPipelines:
    """The pipelines that a loader has sent.

    Args:
        address_file: of the service.
        knows_hetstream: see `Program`.

    Attributes:
        last: what was sent last.
    """

    def __init__(self, address_file: Path, knows_hetstream: bool = True) -> None:
        self._knows_hetstream = knows_hetstream
        self._address_file = address_file
        self._directory_found: Path | None = None
        self.last: SentPipeline | None = None
        self._said_kept = False
        self._copied: tuple[str, EnteredPipeline, WriteWatch] | None = None
        # What was sent with other stages, and what it was made of.
        self._restaged: tuple[SentPipeline, SentPipeline] | None = None

    def now(self, pipeline: Pipeline) -> SentPipeline:
        """A pipeline as it is now.

        A dataset that the program has used may hold what cannot be pickled (an open file): it is then as it was last
        sent, if nothing else of it shows a change.

        Raises:
            PipelineError: it cannot be pickled, or not be handed over.
        """
        objects = _objects_of(pipeline)
        try:
            pickled = self._pickled(pipeline)
        except PipelineError as error:
            if self.last is None:
                raise
            self.last = self.with_stages(self.last, pipeline)
            if changed := _change_since(self.last.pickled, pipeline):
                raise PipelineError(f"{changed} changed since data workers got it, and now {error}") from error
            if not self._said_kept:
                _log.warning("hetstream: data workers keep the dataset as they got it: now %s", error)
            self._said_kept = True
            return self.last
        if not self._knows_hetstream:
            if found := registered(pickled.program.modules, LIBRARY_SETTINGS):
                raise PipelineError(f"{found}. A module that the dataset's own imports can do it")
            if path := left_out(pickled, objects):
                raise PipelineError(f"data workers would have another {path}: its class leaves it out of its pickle")
            if change := unseen_change(pickled.pipeline_id, objects):
                raise PipelineError(f"the program has changed what data workers do not see: {change}")
        self.last = self._sent(pickled, pickled.buffers, self.last, pipeline.stages)
        return self.last

    def with_shared_memory(self, sent: SentPipeline) -> SentPipeline:
        """A pipeline as it was sent, but with what the program has written into shared memory since.

        Raises:
            PipelineError: it cannot be handed over.
        """
        pickled = sent.pickled
        if pickled.digest_of_shared() == sent.shared_digest:
            return sent
        buffers = list(pickled.buffers)
        if len(pickled.shared) < len(buffers):
            try:
                buffers = list(self._as_sent(sent))
            except HandoverFailed as error:
                raise PipelineError(f"its shared memory changed, and the rest cannot be sent again: {error}") from error
            for number in pickled.shared:
                buffers[number] = pickled.buffers[number]
        return self._sent(pickled.with_buffers(buffers), pickled.buffers, sent, sent.stages)

    def with_stages(self, sent: SentPipeline, pipeline: Pipeline) -> SentPipeline:
        """A pipeline as it was sent, but with the stages that it has now: other changes are for the next pass.

        Raises:
            PipelineError: it cannot be pickled, or not be handed over.
        """
        stages = pipeline.stages
        if same_stages(sent.stages, stages):
            return sent
        if self._restaged is not None and self._restaged[0] is sent and same_stages(self._restaged[1].stages, stages):
            return self._restaged[1]
        try:
            as_sent = self._pickled(pipeline.with_stages(sent.stages))
            is_as_sent = as_sent.pipeline_id
        except PipelineError:
            is_as_sent = ""  # it holds an open file by now, say
        if is_as_sent != sent.pickled.pipeline_id:
            if sent.pickled.shared:
                raise PipelineError(
                    "the stages cannot be changed now: the dataset has changed since data workers got it, and "
                    "holds shared memory, of which they would get a copy. Change them between two iterations"
                )
            pipeline = copy_of(self._private(sent))[0].with_stages(stages)
        pickled = self._pickled(pipeline)
        self.last = self._sent(pickled, pickled.buffers, sent, stages)
        self._restaged = sent, self.last
        return self.last

    def _pickled(self, pipeline: Pipeline) -> PickledPipeline:
        """A pipeline in pickled form. A program that only knows torch has its objects afterwards as before.

        Raises:
            PipelineError: it cannot be pickled, or that would change it.
        """
        if self._knows_hetstream:
            return pickle_pipeline(pipeline)
        try:
            return pickle_pipeline(pipeline, knows_hetstream=False, runs_user_code=False)
        except RunsUserCode:
            ask_apart(_objects_of(pipeline), lambda: pickle_pipeline(pipeline, knows_hetstream=False))
            return pickle_pipeline(pipeline, knows_hetstream=False)

    @contextlib.contextmanager
    def entered(self, sent: SentPipeline) -> Iterator[EnteredPipeline]:
        """A copy of what data workers have, for a step that the trainer makes itself: its own objects are untouched.

        Raises:
            PipelineError: the step has written into shared memory.
        """
        if self._copied is None or self._copied[0] != sent.pickled.pipeline_id:
            private = self._private(sent)
            pipeline = EnteredPipeline(copy_of(private)[0], 0)
            self._copied = sent.pickled.pipeline_id, pipeline, WriteWatch(private.digest_of_shared)
        _, pipeline, watch = self._copied
        with pipeline.in_trainer():
            yield pipeline
        watch.check()

    def _private(self, sent: SentPipeline) -> PickledPipeline:
        """A pipeline as it was sent, in memory of its own."""
        pickled = sent.pickled
        if has_changed(pickled):
            try:
                pickled = replace(pickled, buffers=self._as_sent(sent))
            except HandoverFailed as error:
                _log.warning("hetstream: steps made here have arrays that the program has written to: %s", error)
        return pickled.in_private()

    def _sent(
        self,
        pickled: PickledPipeline,
        own: Sequence[Buffer],
        before: SentPipeline | None,
        stages: Stages,
    ) -> SentPipeline:
        """Hand a pipeline over, unless data workers have it; `own` are the buffers in the dataset's own memory."""
        if before is not None and before.pickled.pipeline_id == pickled.pipeline_id:
            message = before.message
        else:
            blob, contents = pack(pickled.blob, pickled.buffers, self._directory)
            names = pickled.pipeline_id, pickled.program, pickled.settings
            message = ProvidePipeline(*names, blob, contents, pickled.written)
        return SentPipeline(message, replace(pickled, buffers=own), pickled.digest_of_shared(), stages)

    @property
    def _directory(self) -> Path:
        if self._directory_found is None:  # later the service may be away, which is no reason to stop
            self._directory_found = service_at(self._address_file).pipelines_dir
        return self._directory_found

    def _as_sent(self, sent: SentPipeline) -> list[memoryview]:
        """The buffers with the bytes that were sent.

        Raises:
            HandoverFailed: their file cannot be read.
        """
        contents = sent.message.contents
        room = aligned(places_of(contents.sizes)[-1]).data
        read_into(room, contents, self._directory)
        return buffers_in(room, contents)[int(contents.with_blob) :]


def _objects_of(pipeline: Pipeline) -> dict[str, Any]:
    return {**pipeline.user_objects, "worker_init_fn": pipeline.worker_init_fn}


def _change_since(pickled: PickledPipeline, pipeline: Pipeline) -> str:
    """What the program has changed of its pipeline since it was defined; "" for nothing."""
    if has_changed(pickled):
        return "an array"
    copied, changed_classes = copy_of(pickled.in_private())
    if changed_classes:
        return f"the class {changed_classes[0].__qualname__}"
    return difference(copied, pipeline)


# What a batch stage must be, and what tells two of them apart. Used by `options.py`, too.


def picklable_stage(name: str, value: Any) -> Iterator[str]:
    """A function of a batch that data workers can have, or None."""
    if value is None:
        return
    if not callable(value):
        yield f"{name}={value!r}: must be a function of a batch or None"
        return
    if device := device_of(value):
        yield (
            f"{name}: it holds a tensor on {device}, a device that data workers do not have. Move it with .cpu(), or "
            "keep this part in the training loop"
        )
        return
    try:
        pickle_apart(value)
    except others() as error:  # pickling runs user code: any exception may come
        yield (
            f"{name}: {find_unpicklable(value)} cannot be pickled ({error}), and data workers get the stage pickled. "
            "Make it a function or a class of a module, open files and connections when it is first called, or leave "
            "them out in __getstate__"
        )


def digest_of_stages(stages: Stages) -> str:
    """What tells stages from other ones under the same `pipeline_name`; "" without a stage."""
    if stages == (None, None):
        return ""
    pickled = pickle_apart(stages)
    return " stages " + digest_of(pickled.blob, pickled.buffers, Program("", []), b"")


# How a loader shares its batches with loaders of other jobs: the keywords checked, the key made, the cursor kept.
#
# The service's side is `dispatcher/sharing.py` and `steps.py`.

SharingMode = Literal["lossless", "window"]


class SharedStream:
    """What one loader keeps of the stream that it shares.

    Args:
        mode: `lossless` (every batch of the loader's own order) or `window` (skip what other jobs are past).
        pipeline_name: name of the pipeline that the user gave, or "" to go by the digest of what travels.

    Attributes:
        shift: how far the loader is from its own numbering; None before the first batch.
    """

    def __init__(self, mode: SharingMode, pipeline_name: str) -> None:
        self.mode = mode
        self.shift: int | None = None
        self._pipeline_name = pipeline_name

    def with_others(
        self,
        pipeline_id: str,
        stages: Stages,
        seed: int,
        order: PlannedOrder | ListedOrder,
        num_steps: int,
    ) -> Sharing:
        """The key under which sessions of other loaders meet this one's: all that a batch depends on but its place.

        A name says that the pipelines are the same when the loaders are made; their stages may be others by now.
        """
        pipeline = f"digest {pipeline_id}"
        if self._pipeline_name:
            pipeline = f"name {self._pipeline_name}" + digest_of_stages(stages)
        parts = msgspec.msgpack.encode((self.mode, pipeline, seed, order))
        return Sharing(hashlib.blake2b(parts, digest_size=16).hexdigest(), self.mode, num_steps)

    def skipped(self, shift: int) -> int:
        """Take note of a batch's shift, and say how many batches of the common stream were left out before it.

        What was over before the loader's first batch is not counted.
        """
        before, self.shift = self.shift, shift
        return 0 if before is None else max(0, shift - before)


# For processes that are to end. One at a step that others wait for ends after it.
_END_S = 15.0
OnExtra = Callable[[int, Any, Sequence[torch.Tensor]], Any]
_open_connections: weakref.WeakSet[LoaderConnection] = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """What a loader asks of its service.

    Attributes:
        service: where it is; None: steps are made in process.
        identity: who this trainer is.
        description: the loader in words, compared between programs of one job name.
        shared: the stream that it shares with loaders of other jobs.
        buffer_bytes: finished batches to hold ahead of the training loop; None: what the environment says.
        skipped: what becomes of samples that fail.
        divides: the ranks divide the data among them.
        canary: compares some steps with the program's own.
        local_after_failure: what data workers raise is looked at: where the program does not, `Differs` is raised.
    """

    service: str | None
    identity: TrainerIdentity
    description: dict[str, str]
    shared: SharedStream | None = None
    buffer_bytes: int | None = None
    skipped: SkippedSamples = field(default_factory=lambda: SkippedSamples(ErrorPolicy(), None))
    divides: bool = False
    canary: Canary | None = None
    local_after_failure: bool = False


class LoaderConnection:
    """What one loader object keeps between iterations: its pipeline, its connection, its statistics.

    Args:
        pipeline: what makes a batch.
        options: what is asked of the service.
        pin: whether batches go to pinned memory.
        timeout_s: for a step to come; 0 for none.
        min_window: steps that may be under way even when they are larger than the buffer.

    Attributes:
        pipeline: the program's own objects; `make_locally` uses a copy of them.
        sent_pipelines: what data workers were given; None without a service.
        local_workers: with persistent_workers, torch's worker processes, which are kept from pass to pass.
        on_extra: given each step's number in its pass, its batch and the `extra` of its `StagedBatch`, just before the
            program gets the batch; what it returns is what the program gets.
        at_close: called when it leaves the service, by those that keep tensors of its batches.
        canary: as given.
        has_features: its batch stage is a part of the loader's features; no forward stage goes with it.
        closed: it has left the service, or the interpreter ends.
    """

    def __init__(
        self, pipeline: Pipeline, options: ServiceOptions, pin: bool, timeout_s: float, min_window: int
    ) -> None:
        service = options.service
        self.pipeline = pipeline
        self.skipped = options.skipped
        self.shared = options.shared
        self.canary, self.local_after_failure = options.canary, options.local_after_failure
        self.timeout_s = timeout_s
        self.min_window = min_window
        # The client, which may outlive this object, holds these two, and not this object.
        self._batches, self.statistics = TorchBatches(pin), LoaderStatistics()
        self._client: ServiceClient | None = None
        self._service = parse_service(service) if service is not None else None
        self.sent_pipelines: SentPipelines | None = None
        if self._service is not None:
            self.sent_pipelines = SentPipelines(self._service, knows_hetstream=not options.local_after_failure)
        self.local_workers: LocalWorkers | None = None
        self.on_extra: OnExtra | None = None
        self.at_close: list[Callable[[], None]] = []
        self.has_features = False
        self.closed = False
        if self._service is not None:
            announce(self._service)
            step_times.watch()
            client_options = ClientOptions(
                self._service,
                options.identity,
                name_loader(options.identity, options.description, options.divides),
                options.description,
                self._batches,
                self.statistics,
                options.buffer_bytes or buffer_bytes_from_environment(),
                transports_from_environment(),
                compression_from_environment(),
                device="cpu" if pipeline.gpu_stage is None else "gpu",
            )
            self._client = ServiceClient(client_options, self.sent_pipeline().message)
        if pipeline.cache_place.startswith(MEMORY):
            leave_no_memory()
        if pipeline.cache_place and isinstance(pipeline.dataset, torch.utils.data.IterableDataset):
            _say_once(
                f"hetstream: cache: cache={pipeline.cache_place} has no effect: elements of an IterableDataset "
                f"({type(pipeline.dataset).__name__}) are not kept. Those of a dataset with indices are"
            )
        _open_connections.add(self)

    @property
    def client(self) -> ServiceClient | None:
        """The loader at its service; of a process that was forked since, a client of its own."""
        if self._client is not None and self._client.is_inherited:
            try:
                self._client = self._client.in_this_process()
            except ServiceUnavailable as error:
                _log.warning("hetstream: this process was forked and works locally: %s", error)
                self._client = None
        return self._client

    def count(self, **changes: float) -> None:
        """Add to the statistics, which the dispatcher is told."""
        client, statistics = self._client, self.statistics
        dropped = client.duplicates_dropped if client is not None else statistics.counters.duplicates_dropped
        statistics.count(changes, dropped)

    def count_cache(self, report: CacheReport) -> None:
        """Add what a prefix cache did for a step, and log once what it says."""
        self.count(
            cache_hits=report.hits,
            cache_misses=report.misses,
            cache_bytes=report.num_bytes,
            cache_saved_s=report.saved_s,
        )
        for line in report.said:
            _say_once(f"hetstream: cache: {printable(line)}")

    def stats(self) -> dict[str, Any]:
        """Counts since the loader was made, and rates over the last seconds; see `DataLoader.stats`."""
        client, values = self.client, msgspec.structs.asdict(self.statistics.now())
        values["wait_share"] = min(1.0, values["wait_s"] / values["elapsed_s"]) if values["elapsed_s"] else 0.0
        values |= self.statistics.rates()
        values["num_data_workers"] = client.num_data_workers if client else 0
        values["batches_waiting"], values["batches_out_of_order"] = client.num_waiting() if client else (0, 0)
        values["transport"] = dict(client.batches_by_transport) if client else {}
        return values

    def use_batch_stage(self, batch_stage: BatchStage | None) -> None:
        """Use another batch stage, or none; each pass that is open goes on with it at its next step.

        Raises:
            OptionsError: it is no function, or cannot be pickled.
            PipelineError: the pipeline cannot be handed to data workers.
        """
        if problems := [*picklable_stage("batch_stage", batch_stage)]:
            raise OptionsError("DataLoader: " + "; ".join(problems))
        self._use(replace(self.pipeline, batch_stage=batch_stage))

    def use_forward_stage(self, forward_stage: BatchStage | None, on_extra: OnExtra | None) -> None:
        """Have a part of the model's forward run behind the program's own stages, or none of it, as `use_batch_stage`.

        Args:
            forward_stage: the part.
            on_extra: see the class.

        Raises:
            PipelineError: the pipeline cannot be handed to data workers.
        """
        self._use(replace(self.pipeline, forward_stage=forward_stage))
        self.on_extra = on_extra

    def _use(self, pipeline: Pipeline) -> None:
        """Have data workers use other stages."""
        if self.sent_pipelines is not None and self.sent_pipelines.last is not None:
            self.sent_pipelines.with_stages(self.sent_pipelines.last, pipeline)
        self.pipeline = pipeline
        self.local_workers = None  # the processes that it kept have the stages before
        if self.canary is not None:
            self.canary.forget_witness()

    def deliver(self, step: int, batch: Any) -> Any:
        """What the program gets of a batch: without the `extra` of a `StagedBatch`, and changed by `on_extra`.

        Args:
            step: its number in the pass.
            batch: as it was made.
        """
        extra: Sequence[torch.Tensor] = ()
        if type(batch) is StagedBatch:
            batch, extra = batch.batch, batch.extra
        return batch if self.on_extra is None else self.on_extra(step, batch, extra)

    def sent_pipeline(self) -> SentPipeline:
        """The pipeline as it is now, for data workers; see `SentPipelines.now`.

        Asked for at each pass: programs change their dataset between epochs (another transform, say), as they can with
        torch's worker processes, which are forked anew.

        Raises:
            PipelineError: it cannot be pickled, or not be handed over.
        """
        assert self.sent_pipelines is not None
        return self.sent_pipelines.now(self.pipeline)

    def make_locally(self, sent: SentPipeline, order: Order, step: int, seeds: PassSeeds) -> Delivered:
        """Make a step in this process, with a copy of what data workers have: the trainer's own objects, random state
        and place are untouched."""
        indices = order.indices(step)
        if indices is None:
            raise IndexError(step)
        assert self.sent_pipelines is not None
        with generators_kept(), acting_as_data_worker(), self.sent_pipelines.entered(sent) as entered:
            pipeline = entered.enter(seeds, step)
            try:
                their_seeds = order.seeds(step, indices, seeds)
                made = make_step(pipeline, indices, their_seeds, self.skipped.policy, order.form(step))
            except SampleError as error:
                raise error.user_error() from None
        refuse_graphs(made.batch)
        return Delivered.made_here(self.pinned(made.batch), made)

    def make_apart(self, apart: StepsApart, order: Order, step: int, seeds: PassSeeds) -> Delivered:
        """The same in a child of this process, of `isolated_steps`: the step may end who makes it."""
        indices = order.indices(step)
        if indices is None:
            raise IndexError(step)
        request = step, indices, order.seeds(step, indices, seeds), order.form(step), seeds
        found = apart.made(step, len(indices), self.skipped.policy, *request)
        assert found is not None
        return Delivered.made_here(self.pinned(found[0].batch), found[0])

    def makes_apart(self, sent: SentPipeline) -> StepsApart:
        """A child for steps of a pipeline."""
        sent_pipelines = self.sent_pipelines
        assert sent_pipelines is not None

        def make(policy: ErrorPolicy, watched: Watched, *request: Any) -> tuple[MadeStep, bytes]:
            step, indices, their_seeds, form, seeds = request
            with sent_pipelines.entered(sent) as entered:
                pipeline = entered.enter(seeds, step)
                return make_step(pipeline, indices, their_seeds, policy, form, watched), b""

        return StepsApart(make)

    def leave_out(self, epoch: int, step: int, num_skipped: int, left_out: Sequence[Failure]) -> None:
        """Count and report what the training loop does not get of a step.

        Raises:
            PipelineError: more samples are broken than `quarantine` can hold.
        """
        self.count(skipped=num_skipped)
        self.skipped.note(epoch, step, left_out)

    def pinned(self, batch: Any) -> Any:
        """The batch in pinned memory, if the loader pins and there is a GPU."""
        return self._batches.pinned(batch)

    def end_processes(self) -> None:
        """Have the processes end that made steps of this loader, so that its program can have what they hold."""
        if self._client is not None and not self._client.end_processes(_END_S):
            _log.warning(
                "hetstream: not all data workers have ended within %g s; what they hold (a port, a lock, a device) "
                "torch's own worker processes may lack",
                _END_S,
            )

    def close(self) -> None:
        """Leave the service."""
        self.closed = True
        step_times.pause()
        while self.at_close:
            self.at_close.pop()()
        if self._client is not None:
            self._client.close()
        _open_connections.discard(self)

    def close_with(self, owner: object) -> None:
        """Leave the service when the loader object is no more: programs make a new loader for each epoch."""
        if self._client is not None:
            weakref.finalize(owner, self._client.request_close).atexit = False


@atexit.register
def _close_connections() -> None:
    for connection in list(_open_connections):
        connection.close()
