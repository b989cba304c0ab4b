"""Streaming for torch's own DataLoader in a program that does not know hetstream. Called by the start-up hook.

The program's sampler is drawn in the trainer in the very order in which torch would draw it, and no further ahead, so
the samples come in the order that they have without hetstream, and the program's own random numbers are the same.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import torch
import torch.distributed
import torch.utils.data
from torch.utils.data import dataloader as torch_dataloader

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.horovod import horovod_identity
from hetstream.mpi_dataworkers.loader.canary import Canary, Differs
from hetstream.mpi_dataworkers.loader.connection import LoaderConnection, SentPipeline, ServiceOptions
from hetstream.mpi_dataworkers.loader.local_workers import CurrentSteps, PlainLoader, RedrawnSteps, forks
from hetstream.mpi_dataworkers.loader.pass_iterator import LocalSource, PassIterator, StepSource
from hetstream.mpi_dataworkers.loader.remote_source import RemoteSource
from hetstream.mpi_dataworkers.loader.shards import LookAhead, PartlyListedSteps, PassShards
from hetstream.mpi_dataworkers.loader.torch_calls import call_as_in, torch_options
from hetstream.mpi_dataworkers.loader.unmodified_streams import StreamedStreamIter, reads_as_torch, why_no_stream
from hetstream.mpi_dataworkers.loader.user_errors import is_of_sample
from hetstream.mpi_dataworkers.ops.pipeline import BatchStage, Pipeline, device_of
from hetstream.mpi_dataworkers.order.bucketing import LengthBuckets, StreamBuckets
from hetstream.mpi_dataworkers.order.sharding import derive_seed
from hetstream.mpi_dataworkers.process.config import (
    cache_from_environment,
    identity_from_environment,
    service_from_environment,
    streams_in_process_loaders,
)
from hetstream.mpi_dataworkers.process.handlers import others
from hetstream.mpi_dataworkers.wire.messages import WorkerSeeds

# What a torch DataLoader asks for, in hetstream's words: its pipeline, whether it can be streamed, its connection.


def distributed_identity() -> tuple[int, int] | None:
    """Rank and world size of torch.distributed or Horovod, when the program has initialised one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return horovod_identity()


def why_not_streamable(loader: Any) -> str | None:
    """Why a torch DataLoader cannot be streamed, or None when it can."""
    is_stream = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if loader.num_workers == 0 and (is_stream or not streams_in_process_loaders()):
        return (
            "torch promises that the program's own dataset makes these batches; set num_workers=1 or more"
            f"{'' if is_stream else ', or --stream-in-process-loaders,'} to let data workers make them"
        )
    if is_stream and (reason := why_no_stream(loader)) is not None:
        return reason
    if (
        not is_stream
        and not hasattr(loader.dataset, "__len__")
        and loader.batch_sampler is None
        and loader.sampler is None
    ):
        return f"{type(loader.dataset).__name__} has no length and there is no sampler"
    if loader.multiprocessing_context is not None:
        return "multiprocessing_context asks for worker processes of this program. To stream it, leave that out"
    return None


# Samplers that can be drawn ahead without anybody seeing it: what they take of a shared generator, they take at their
# first step. Only these classes themselves: a subclass may do more.
_UNSEEN = (
    torch.utils.data.SequentialSampler,
    torch.utils.data.WeightedRandomSampler,
    torch.utils.data.DistributedSampler,
)
# The same of accelerate, by name, as it may not be installed: a sampler, and those that choose from another's batches.
_UNSEEN_BY_NAME = {"accelerate.data_loader.SeedableRandomSampler"}
_CHOOSING_BY_NAME = {"accelerate.data_loader.BatchSamplerShard", "accelerate.data_loader.SkipBatchSampler"}


def look_ahead_of(loader: Any) -> LookAhead:
    """How far torch draws a loader's sampler ahead, and how far it can be drawn without anybody seeing it."""
    sampler = loader._index_sampler
    # What a sampler does at its end, after its last step, is seen: it may draw once more, or count its epochs.
    num_unseen = len(sampler) - 1 if _is_unseen(sampler) else 0
    return LookAhead(int(loader.prefetch_factor or 0) * int(loader.num_workers), num_unseen)


def _is_unseen(sampler: Any) -> bool:
    kind = type(sampler)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind is torch.utils.data.BatchSampler:
        return _is_unseen(sampler.sampler)
    if name in _CHOOSING_BY_NAME:
        return _is_unseen(sampler.batch_sampler)
    if kind is torch.utils.data.RandomSampler and sampler.generator is not None:
        # It draws anew with replacement, and when it goes round.
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return kind in _UNSEEN or kind is torch.utils.data.RandomSampler or name in _UNSEEN_BY_NAME


def pipeline_of(
    loader: Any,
    buckets: LengthBuckets | StreamBuckets | None = None,
    batch_stage: BatchStage | None = None,
    gpu_stage: BatchStage | None = None,
    forward_stage: BatchStage | None = None,
    begins: bool = True,
    cache_place: str | None = None,
) -> Pipeline:
    """What makes a loader's batches, as the loader is now; its class knows nothing of buckets, stages and cache.

    Without `cache_place` the environment says where fronts of samples are kept. `begins` says whether `worker_init_fn`
    runs: torch without worker processes does not run it.
    """
    iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    try:
        num_samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") and not iterable else -1
    except Exception:  # noqa: BLE001, user code; torch itself does not ask for a length where there is a sampler
        num_samples = -1
    batched = loader.batch_sampler is not None
    return Pipeline(
        loader.dataset,
        loader.collate_fn,
        num_samples,
        loader.worker_init_fn if begins else None,
        batched,
        buckets=buckets if isinstance(buckets, LengthBuckets) else None,
        stream_buckets=buckets if isinstance(buckets, StreamBuckets) else None,
        num_workers=max(1, loader.num_workers),
        has_workers=loader.num_workers > 0,
        batch_stage=batch_stage,
        gpu_stage=gpu_stage,
        forward_stage=forward_stage,
        cache_place=cache_from_environment() if cache_place is None else cache_place,
    )


def say_pinning_has_no_effect(loader: Any) -> None:
    """Warn as torch does at each iteration, for a loader of ours."""
    if loader.pin_memory and not torch.cuda.is_available():
        warnings.warn("pin_memory=True has no effect: this process has no GPU", UserWarning, stacklevel=4)


def make_connection(
    loader: Any,
    options: ServiceOptions,
    buckets: LengthBuckets | StreamBuckets | None = None,
    batch_stage: BatchStage | None = None,
    gpu_stage: BatchStage | None = None,
    begins: bool = True,
    cache_place: str | None = None,
) -> LoaderConnection:
    """The connection of a loader; `options.description` is what the loader says beside its pipeline's description."""
    pipeline = pipeline_of(loader, buckets, batch_stage, gpu_stage, begins=begins, cache_place=cache_place)
    described = replace(options, description=pipeline.description() | options.description)
    min_window = max(2, int(loader.prefetch_factor or 2) * int(loader.num_workers))
    return LoaderConnection(pipeline, described, loader.pin_memory, loader.timeout, min_window)


_log = logging.getLogger(__name__)
_TorchIterator: Any = torch_dataloader._BaseDataLoaderIter
# Where a loader object keeps what belongs to it. A table beside it would keep alive a loader that collates with its own
# method.
_KEPT = "_hetstream"


class _Kept:
    """What a loader object keeps from one iterator to the next. Copies and pickles of the loader have none.

    Attributes:
        connection: its connection to the service; None: the loader stays local, and the reason has been said.
        passes: gives each pass its number.
    """

    def __init__(self, loader: Any, connection: LoaderConnection | None) -> None:
        self._loader = weakref.ref(loader)
        self.connection = connection
        self._leaves: LoaderConnection | None = None
        self.passes = itertools.count()
        if connection is not None:
            # With this object, which the loader and its iterators hold: either may outlive the other.
            connection.close_with(self)

    def is_of(self, loader: Any) -> bool:
        """Whether it belongs to this loader object, and not to one that was copied from it."""
        return self._loader() is loader

    def stay_local(self) -> None:
        """Leave the service for good; called again where a handler of a signal has interrupted it."""
        self._leaves, self.connection = self.connection or self._leaves, None
        connection = self._leaves
        if connection is not None:
            # First all that may hold what one process alone can have: torch's own workers begin now.
            # Data workers at once: those that leave by themselves after a pass are not waited for any more.
            connection.end_processes()
            if connection.canary is not None:
                connection.canary.end_witnesses()
            connection.close()
            self._leaves = None

    def leave(self, reason: str) -> None:
        """Leave the service for good, and say why, if nobody has."""
        if self.connection is not None:
            _say_local(type(self.connection.pipeline.dataset).__name__, reason)
        self.stay_local()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def make_iterator(loader: Any, as_torch: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    """What `DataLoader._get_iterator` does under the hook.

    Args:
        loader: a DataLoader of torch.
        as_torch: torch's own method.
    """
    check = "check_worker_number_rationality"
    streamed = _streamed(loader, lambda: call_as_in(as_torch, check, getattr(loader, check)))
    return as_torch(loader) if streamed is None else streamed


def _streamed(loader: Any, check_workers: Callable[[], None]) -> Iterator[Any] | None:
    """An iterator whose batches data workers make; None where torch makes them."""
    kept = _kept_by(loader)
    if kept is None:
        _keep(loader, None)  # what pickles the loader itself, as a collate_fn of its own does, sees no change later
        try:
            kept = _keep(loader, _adopt(loader))
        except BaseException:  # Ctrl-C: the next iterator tries again
            vars(loader).pop(_KEPT, None)
            raise
    sent = _sent_now(kept, loader)
    if kept.connection is None:
        return None
    is_stream = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if is_stream and sent is None:
        return None  # without a service torch makes the batches of a stream
    if loader.num_workers > 0:
        check_workers()
    if not is_stream:
        return StreamedLoaderIter(loader, kept, sent)
    assert sent is not None
    return StreamedStreamIter(loader, kept, sent, next(kept.passes) == 0)


def connection_of(loader: Any) -> LoaderConnection | None:
    """A loader's connection under the hook, for stages that are to move; None where it stays local, and for streams."""
    kept = _kept_by(loader)
    is_stream = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    return kept.connection if kept is not None and not is_stream else None


def is_streamed(loader: Any) -> bool:
    """Whether data workers make batches of a loader that has begun to iterate."""
    kept = _kept_by(loader)
    return kept is not None and kept.connection is not None


def instead_of(kind: Any, loader: Any) -> Iterator[Any] | None:
    """What takes the place of an iterator that a loader's class makes itself, without asking DataLoader for one.

    None where it is to be made: the loader stays local then, and that is said once.
    """
    if issubclass(kind, StreamedLoaderIter | StreamedStreamIter) or isinstance(loader, PlainLoader):
        return None
    kept = _kept_by(loader)
    if reads_as_torch(kind, loader) and (kept is None or kept.connection is not None):
        return _streamed(loader, lambda: None)  # its class has checked
    if kept is None:
        _keep(loader, None)
        names = type(loader).__name__, kind.__name__
        reason = "{} makes an iterator of its own, {}, instead of asking DataLoader._get_iterator for one"
        _say_local(type(loader.dataset).__name__, reason.format(*names))
    return None


def _kept_by(loader: Any) -> _Kept | None:
    kept = vars(loader).get(_KEPT)
    return kept if kept is not None and kept.is_of(loader) else None


def _keep(loader: Any, connection: LoaderConnection | None) -> _Kept:
    kept = vars(loader)[_KEPT] = _Kept(loader, connection)
    return kept


def _adopt(loader: Any) -> LoaderConnection | None:
    service = service_from_environment()
    reason = why_not_streamable(loader)
    if reason is None and service is not None and (device := device_of(loader.dataset, loader.collate_fn)):
        reason = f"it holds a tensor on {device}, a device that data workers do not have. Keep its data in host memory"
    if reason is None:
        try:
            return _make(loader, service)
        except HetstreamError as error:
            reason = str(error)
    _say_local(type(loader.dataset).__name__, reason)
    return None


def _make(loader: Any, service: str | None) -> LoaderConnection:
    identity = identity_from_environment(distributed_identity())
    if not identity.is_named:
        # Every rank's sampler speaks for itself, so ranks need not meet, and must not collide.
        identity = replace(identity, job_name=f"{identity.job_name}.{uuid.uuid4().hex[:12]}")
    # Alone the program works, so what fails in data workers does not end it.
    options = ServiceOptions(
        service=service,
        identity=identity,
        description={},
        canary=Canary(loader.persistent_workers, makes_steps=loader.num_workers > 0),
        local_after_failure=True,
    )
    return make_connection(loader, options, begins=loader.num_workers > 0)


def _sent_now(kept: _Kept, loader: Any, before: SentPipeline | None = None) -> SentPipeline | None:
    """The loader's pipeline for data workers; None in process, and where the loader now stays local.

    Args:
        kept: what the loader keeps.
        loader: a DataLoader of torch.
        before: what `persistent_workers` began with; as torch's worker processes, data workers then see no change but
            those in shared memory.
    """
    connection = kept.connection
    if connection is None:
        return None
    sent_pipelines, (batch_stage, forward_stage) = connection.sent_pipelines, connection.pipeline.stages
    try:
        if before is not None and sent_pipelines is not None:
            return sent_pipelines.with_shared_memory(sent_pipelines.with_stages(before, connection.pipeline))
        # Torch, too, looks at the loader anew for each iterator: another collate_fn, a dataset that has grown.
        connection.pipeline = pipeline_of(
            loader, batch_stage=batch_stage, forward_stage=forward_stage, begins=loader.num_workers > 0
        )
        return connection.sent_pipeline() if connection.client is not None else None
    except PipelineError as error:
        _say_local(type(loader.dataset).__name__, str(error))
        kept.stay_local()
        return None


@functools.lru_cache(maxsize=256)  # programs make a new loader for each epoch
def _say_local(kind: str, reason: str) -> None:
    _log.warning("hetstream: a DataLoader over %s stays local: %s", kind, reason)


class StreamedLoaderIter(_TorchIterator):  # type: ignore[misc]
    """torch's iterator of a DataLoader, whose batches come from data workers, or are made as theirs.

    It has torch's attributes, and uses them: what changes `_sampler_iter`, `_num_yielded` or a method of the base
    class, as SpeechBrain does, has its effect.

    Args:
        loader: a DataLoader of torch.
        kept: what it keeps; it has a connection.
        sent: what data workers run; None in process.
    """

    def __init__(self, loader: Any, kept: _Kept, sent: SentPipeline | None) -> None:
        self._kept = kept
        self._sent = sent
        self._streamed: PassIterator | None = None
        self._plain: Any = None  # torch's own iterator
        self._left: tuple[RedrawnSteps, str] | None = None  # what torch is to make, and why
        self._torchs: tuple[PlainLoader, CurrentSteps] | None = None
        generator = loader.generator or torch.default_generator
        self._before_base_seed = generator.get_state()
        several, single = torch_dataloader._MultiProcessingDataLoaderIter, torch_dataloader._SingleProcessDataLoaderIter
        call_as_in((several if loader.num_workers else single).__init__, "__init__", super().__init__, loader)
        assert kept.connection is not None
        own = kept.connection.pipeline.with_own_generators().own_generators
        self._worker_seeds = WorkerSeeds(
            self._base_seed, 0, [] if own is None else own.digests(), loader.persistent_workers
        )
        if self._num_workers > 0:
            # As torch does with worker processes: the sampler's iterator is made a second time.
            self._reset(loader, first_iter=True)
        else:
            self._begin(loader)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin a pass; with persistent_workers, also the second one and those after it."""
        super()._reset(loader, first_iter)
        if not first_iter and self._sent is not None:
            self._sent = _sent_now(self._kept, loader, self._sent)
        self._begin(loader)

    def _begin(self, loader: Any) -> None:
        if self._streamed is not None:
            self._streamed.close()
        self._options = torch_options(loader)
        self._streamed = self._plain = self._left = None
        self._num_again = 0  # steps that `_plain` makes once more, before all others
        self._is_lost = False  # the next step
        self._order = PartlyListedSteps(self._sampler_iter, self._auto_collation)
        connection = self._kept.connection
        if connection is None:
            self._plain = self._made_by_torch(self._sampler_iter, 0)
            return
        number = next(self._kept.passes)
        worker_seeds = self._worker_seeds
        if number and self._num_workers == 0:  # without worker processes the program's own generators go on
            own = [derive_seed(origin, number) for origin in worker_seeds.generators]
            worker_seeds = msgspec.structs.replace(worker_seeds, generators=own)
        shards = PassShards.undivided(self._order, self._base_seed, number, worker_seeds=worker_seeds)
        self._worker_seeds = msgspec.structs.replace(
            self._worker_seeds, passes_before=self._worker_seeds.passes_before + 1
        )
        source: StepSource
        if connection.client is not None:
            if self._num_workers > 0 and self._torchs is None and forks(loader.multiprocessing_context):
                with contextlib.suppress(OSError):  # they are not needed yet
                    self._of_torch()[0].start_workers()
            source = RemoteSource(connection, shards, look_ahead_of(loader), self._sent)
        else:
            source = LocalSource(connection, shards, self._options)
        self._streamed = PassIterator(connection, source, owner=self._kept)
        if self._order.num_steps == 0 and self._order.unlisted is not None:
            self._left = RedrawnSteps(self._order.unlisted), self._order.reason
            self._go_on_locally(*self._left)

    def _next_data(self) -> Any:
        if self._is_lost:
            try:
                self._next_step()
            except StopIteration as error:
                if not is_of_sample(error):
                    raise
            except others():  # whatever it was, nobody would have seen it
                _log.debug("a step that torch loses could not be made", exc_info=True)
            self._is_lost = False
        had_raised = self._order.has_raised
        try:
            return self._next_step()
        except StopIteration:
            raise
        except Exception:
            # What the sampler raises, torch raises where it has the step already, which is lost then.
            self._is_lost = self._streamed is not None and self._order.has_raised and not had_raised
            raise

    def _next_step(self) -> Any:
        if self._streamed is not None and self._left is None:
            try:
                if self._kept.connection is None and not self._streamed.has_batch:
                    # Another iterator of this loader has left the service, and has said why.
                    self._left = RedrawnSteps(self._order.from_step(self._streamed.shards.position)), ""
                elif self._streamed.wait() or self._order.unlisted is None:
                    if not self._streamed.has_batch and self._torchs is not None and not self._persistent_workers:
                        self._torchs[0].end_waiting()
                    return next(self._streamed)  # a StopIteration of a sample, too, as in torch
                else:
                    self._left = RedrawnSteps(self._order.unlisted), self._order.reason
            except Differs as found:
                self._left = RedrawnSteps(self._order.from_step(found.step)), str(found)
        if self._left is not None:
            # Here, where none of these is the context of what the program's own samples raise.
            self._go_on_locally(*self._left)
        if self._plain is None:
            raise StopIteration
        while self._num_again and self._plain._rcvd_idx < self._num_again:
            self._drop_next(self._plain)
        return next(self._plain)

    def _drop_next(self, plain: Iterator[Any]) -> None:
        """Have a step made that the program has had, with what its samples raised. Anything else is raised: the sampler
        is drawn ahead, a worker process may die, a handler of a signal may interrupt it."""
        try:
            next(plain)
        except Exception as error:
            if not is_of_sample(error):
                raise

    def _go_on_locally(self, steps: RedrawnSteps, reason: str) -> None:
        """From here on torch makes the steps, in this pass and in those that follow.

        Of a pass that has just begun its worker processes make the steps before, too, so that what they keep, count and
        draw is as if all had been theirs.

        What a handler of a signal interrupts is done again from its beginning, until it is all done.
        """
        assert self._streamed is not None
        first = self._streamed.shards.position
        self._streamed.close()
        before = self._order.steps_before(first) if self._num_workers > 0 else []
        if before:
            reason = f"{reason}. Its own workers make all steps of this pass, also those that it has had"
        if self._kept.connection is not None:
            _say_local(type(self._dataset).__name__, reason)
        self._kept.stay_local()
        self._num_again = len(before)
        plain = self._made_by_torch(itertools.chain(before, steps.begin()), first - len(before))
        steps.begun()
        self._plain, self._left, self._streamed = plain, None, None

    def _made_by_torch(self, steps: Iterator[Any], first: int) -> Iterator[Any]:
        """Steps from a number on, each by the worker process that makes it where all are torch's."""
        torchs, current = self._of_torch()
        current.steps, torchs.first_step = steps, first
        return iter(torchs)

    def _of_torch(self) -> tuple[PlainLoader, CurrentSteps]:
        """The loader as it is without us, and what it is to make."""
        if self._torchs is None:
            generator = torch.Generator()
            generator.set_state(self._before_base_seed)  # it gives torch's worker processes the base seed of this pass
            current = CurrentSteps()
            sampler = {"batch_sampler": current} if self._auto_collation else {"batch_size": None, "sampler": current}
            options = self._options | {"generator": generator, "collate_fn": self._collate_fn}
            self._torchs = PlainLoader(self._dataset, **sampler, **options), current
        return self._torchs
