"""What one loader object keeps between iterations: its pipeline, its connection to the service, its statistics.

Used by `data_loader.py` and, for torch's own class, by `unmodified.py`. `client.py` is the side that talks.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.config import (
    TrainerIdentity,
    buffer_bytes_from_environment,
    compression_from_environment,
    transports_from_environment,
)
from hetstream.mpi_dataworkers.errors import ServiceUnavailable
from hetstream.mpi_dataworkers.interpreter import announce
from hetstream.mpi_dataworkers.loader import batch_stages, optimizer_calls
from hetstream.mpi_dataworkers.loader.canary import Canary
from hetstream.mpi_dataworkers.loader.client import ServiceClient
from hetstream.mpi_dataworkers.loader.delivered import Delivered
from hetstream.mpi_dataworkers.loader.local_workers import LocalWorkers
from hetstream.mpi_dataworkers.loader.naming import name_loader
from hetstream.mpi_dataworkers.loader.pass_shards import PassShards
from hetstream.mpi_dataworkers.loader.registration import ClientOptions
from hetstream.mpi_dataworkers.loader.sent_pipelines import SentPipeline, SentPipelines
from hetstream.mpi_dataworkers.loader.sharing import SharedStream
from hetstream.mpi_dataworkers.loader.skipped import SkippedSamples
from hetstream.mpi_dataworkers.loader.statistics import LoaderStatistics
from hetstream.mpi_dataworkers.loader.step_indices import Order, TakenStep
from hetstream.mpi_dataworkers.loader.steps_apart import StepsApart
from hetstream.mpi_dataworkers.loader.torch_batches import TorchBatches
from hetstream.mpi_dataworkers.ops.entered import acting_as_data_worker
from hetstream.mpi_dataworkers.ops.origins import PassSeeds
from hetstream.mpi_dataworkers.ops.pipeline import MadeStep, Pipeline, SampleError, Watched, generators_kept, make_step
from hetstream.mpi_dataworkers.ops.staged import BatchStage, StagedBatch
from hetstream.mpi_dataworkers.ops.structure import refuse_graphs
from hetstream.mpi_dataworkers.wire.address import parse_service
from hetstream.mpi_dataworkers.wire.messages import ErrorPolicy, Failure

_log = logging.getLogger(__name__)
# For processes that are to end. One at a step that others wait for ends after it.
_END_S = 15.0
MakesAgain = Callable[[], Any]
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
        # Of the pass that delivered last. Weakly: a pass that ends early must end its processes then.
        self._again: weakref.WeakMethod[Callable[[], MakesAgain | None]] | None = None
        self.closed = False
        if self._service is not None:
            announce(self._service)
            optimizer_calls.watch()
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
        if problems := [*batch_stages.picklable_stage("batch_stage", batch_stage)]:
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

    def deliver(self, step: int, batch: Any, again: Callable[[], MakesAgain | None] | None = None) -> Any:
        """What the program gets of a batch: without the `extra` of a `StagedBatch`, and changed by `on_extra`.

        Args:
            step: its number in the pass.
            batch: as it was made.
            again: a bound method; what `last_again` calls.
        """
        self._again = None if again is None else weakref.WeakMethod(again)
        extra: Sequence[torch.Tensor] = ()
        if type(batch) is StagedBatch:
            batch, extra = batch.batch, batch.extra
        return batch if self.on_extra is None else self.on_extra(step, batch, extra)

    def last_again(self) -> MakesAgain | None:
        """What makes the last step once more, if that can be; to be asked before the next step is taken."""
        again = self._again() if self._again is not None else None
        return None if again is None else again()

    def sent_pipeline(self) -> SentPipeline:
        """The pipeline as it is now, for data workers; see `SentPipelines.now`.

        Asked for at each pass: programs change their dataset between epochs (another transform, say), as they can with
        torch's worker processes, which are forked anew.

        Raises:
            PipelineError: it cannot be pickled, or not be handed over.
        """
        assert self.sent_pipelines is not None
        return self.sent_pipelines.now(self.pipeline)

    def make_locally(self, sent: SentPipeline, order: Order | TakenStep, step: int, seeds: PassSeeds) -> Delivered:
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
        """The same in a child of this process, of `steps_apart`: the step may end who makes it."""
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

    def makes_again(self, sent: SentPipeline, shards: PassShards) -> MakesAgain | None:
        """What makes the batch of a pass's last step that was taken once more, in this process.

        Returns:
            A function that gives the batch; None where no one number says what a step is.
        """
        step, seeds = shards.position - 1, shards.seeds
        if shards.order is None or shards.at_most_once or not shards.in_order or self.shared is not None:
            return None
        order = shards.order.taken(step)
        return None if order is None else lambda: self.make_locally(sent, order, step, seeds).payload

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
        optimizer_calls.pause()
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
