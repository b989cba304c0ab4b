"""The DataLoader that training programs use: torch's keywords, torch's iteration, batches made by data workers.

This module is what a program calls. The work is done by

* `options.py`: the keywords, their checks and their help;
* `order.py`: which steps a pass over the data has, and which samples each step has;
* `pass_iterator.py`: begins one pass after the other, and knows where the training loop is; the steps come from data
  workers (`remote_source.py`) or from this process;
* `connection.py`: what outlives a pass, the pipeline, the connection to the service and the statistics.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec
import torch
import torch.utils.data

from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.loader.features import checked_features, feature_parts
from hetstream.mpi_dataworkers.loader.options import LoaderOptions, takes
from hetstream.mpi_dataworkers.loader.order import order_of
from hetstream.mpi_dataworkers.loader.pass_iterator import (
    LoaderPosition,
    LocalSource,
    OnDevice,
    PassIterator,
    Position,
    PositionTracker,
    StepSource,
)
from hetstream.mpi_dataworkers.loader.remote_source import RemoteSource
from hetstream.mpi_dataworkers.loader.statistics import SkippedSample
from hetstream.mpi_dataworkers.loader.torch_calls import torch_options
from hetstream.mpi_dataworkers.loader.unmodified import (
    distributed_identity,
    make_connection,
    pipeline_of,
    say_pinning_has_no_effect,
)
from hetstream.mpi_dataworkers.ops.pipeline import BatchStage, fingerprint_of
from hetstream.mpi_dataworkers.order.data_state import MAX_EPOCH, DataState
from hetstream.mpi_dataworkers.process.config import service_from_environment
from hetstream.mpi_dataworkers.process.faults import reach

_TorchLoader: Any = torch.utils.data.DataLoader  # Any: torch's `__iter__` promises an iterator class of its own
_T_co = TypeVar("_T_co", covariant=True)


class DataLoader(_TorchLoader, Generic[_T_co]):  # type: ignore[misc]
    """torch's DataLoader, whose batches come from data workers when there is a service.

    Batch k of epoch e depends on the dataset, `seed`, e and k alone: not on the number of data workers, on which of
    them died, or on whether there is a service at all. Each sample's random augmentation is seeded from
    (seed, epoch, sample index), or in a sampler's order from (seed, rank, epoch, step, place in the step). Iterating a
    second time gives the next epoch; `set_epoch` chooses one.

    With `torch.distributed` initialised (or under `srun`), rank r of R reads the r-th slice of each global batch of
    `batch_size * R` samples, and every rank has the same number of steps. With `sampler` or `batch_sampler` the
    program's own order is kept and each rank reads what its sampler says.

    Its keywords are torch's and those of `LoaderOptions`; `help(DataLoader.__init__)` says what each of them means.

    Raises:
        OptionsError: keywords break their rules, or are not supported; the message names every problem.
        PipelineError: the dataset cannot be streamed; the message names the object.
        ServiceUnavailable, AuthenticationError, JobNameConflict: the service cannot be used.
    """

    @takes(LoaderOptions)  # programs give the keywords; here they come as one value, which `options.check` judges
    def __init__(self, options: LoaderOptions) -> None:
        identity = options.check(distributed_identity)
        super().__init__(options.dataset, **options.torch_keywords(identity.world_size))
        self.seed = options.seed or 0
        self._repeat = options.repeat
        self._device, missing = options.place()
        features = options.features
        self._features = None if features is None else feature_parts(features, self._device, missing)
        self._position = LoaderPosition()
        self._order = order_of(self, options, identity)
        service = options.service or service_from_environment()
        options.say_what_has_no_effect(service is not None)
        say_pinning_has_no_effect(self)
        self._connection = make_connection(
            self,
            options.service_options(service, identity, self._description()),
            buckets=self._order.buckets or options.stream_buckets(),
            batch_stage=options.batch_stage if self._features is None else self._features.stage,
            gpu_stage=options.gpu_stage,
            cache_place=options.cache_place,
        )
        if self._features is not None:
            self._features.attach(self._connection, self.num_workers)
        self._connection.close_with(self)  # also when the program drops the loader without `close`

    def _description(self) -> dict[str, str]:
        """The dataset and its order in words: a saved state must have the same, and so must all ranks of a program."""
        return {"fingerprint": fingerprint_of(self.dataset)} | self._order.description

    # Iterating

    def __len__(self) -> int:
        """Steps of this rank in an epoch, `repeat` times over.

        Raises:
            TypeError: the number is not known: of an endless stream, of sharding OFF, and of an IterableDataset that
                has no `__len__` or is divided among ranks.
        """
        num_steps = self._order.num_steps(self._position.next.epoch)
        if num_steps is None and self._order.believes_length:
            num_steps = int(super().__len__())  # from the dataset's `__len__`, which torch takes at its word, too
        if num_steps is None or self._repeat is None:
            what = "an endless stream" if self._repeat is None else f"a stream of {type(self.dataset).__name__}"
            raise TypeError(f"{what} has no length that is known before it ends")
        return num_steps * self._repeat

    def __iter__(self) -> Iterator[Any]:
        """Begin an iteration over one epoch; the next call begins the next epoch."""
        finish = None if self._features is None else self._features.finish
        passes = self._begin_pass, self.__len__, self._repeat, type(self.dataset).__name__
        if self._device.type == "cpu":
            return PositionTracker(self._position, *passes, finish)
        ahead = PositionTracker(self._position, *passes, is_prefetched=True)
        return OnDevice(ahead, self._device, self._position, finish)

    def _begin_pass(self, at: Position) -> PassIterator:
        """Begin a pass at a position."""
        self._refresh_pipeline(at)
        if self._features is not None:
            self._features.begin_pass()
        connection = self._connection
        client = connection.client
        num_data_workers = max(1, client.num_data_workers) if client is not None else 1
        shards = self._order.begin_pass(at.order_epoch(self._repeat), at, num_data_workers)
        source: StepSource
        if client is not None:
            source = RemoteSource(connection, shards)
        else:
            source = LocalSource(connection, shards, torch_options(self))
        return PassIterator(connection, source, owner=self)

    def _refresh_pipeline(self, at: Position) -> None:
        """Use the dataset, `collate_fn` and so on that the loader has now: programs replace them between epochs.

        Raises:
            PipelineError: the dataset's length has changed, and a pass that begins at this position needs the old one.
        """
        before = self._connection.pipeline
        pipeline = pipeline_of(
            self,
            buckets=before.buckets or before.stream_buckets,
            batch_stage=before.batch_stage,
            gpu_stage=before.gpu_stage,
            forward_stage=before.forward_stage,
            cache_place=before.cache_place,
        )
        if pipeline.num_samples != before.num_samples and (reason := self._why_length_is_fixed(at)):
            raise PipelineError(
                f"the dataset had {before.num_samples} samples and has {pipeline.num_samples} now: {reason}. "
                "Make a new DataLoader for the new data."
            )
        self._connection.pipeline = pipeline
        self._order.note_num_samples(pipeline.num_samples)

    def _why_length_is_fixed(self, at: Position) -> str:
        """Why the dataset may not have another length than before; "" when it may."""
        if self._order.world_size > 1:
            return "the other ranks, which divide it with this one, may not know"
        if self._connection.shared is not None:
            return "other jobs, which share the batches, do not know"
        if self._order.buckets is not None:
            return "lengths= has the old number"
        return "the state that was loaded has the old number" if at.step > 0 or at.shards is not None else ""

    # What comes next

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration.

        After `load_state_dict`, the epoch of that state keeps the state's position. If that is the epoch's end, the
        iteration is empty. Any other epoch is read from its beginning.

        Raises:
            OptionsError: the epoch is no whole number from 0 to 2**31 - 1.
        """
        if not isinstance(epoch, numbers.Integral) or isinstance(epoch, bool) or not 0 <= epoch <= MAX_EPOCH:
            raise OptionsError(f"set_epoch({epoch!r}): must be a whole number from 0 to {MAX_EPOCH}")
        self._position.set_epoch(int(epoch))

    @property
    def batch_stage(self) -> BatchStage | None:
        """The batch stage that the next step has; None where there is none."""
        return self._connection.pipeline.batch_stage

    def set_batch_stage(self, batch_stage: BatchStage | None) -> None:
        """Use another batch stage, or none, from the next step on. An iteration may be under way.

        No batch is lost or comes twice: batches that were made ahead with the old stage are dropped and made again.
        With `device=`, one batch is already on its way to the device, and still has the old stage.

        Raises:
            OptionsError: it is no function, or cannot be pickled; the old stage stays.
            PipelineError: the pipeline cannot be handed to data workers now; the old stage stays.
        """
        if self._features is not None:
            raise OptionsError("set_batch_stage on a loader with features: change the graph with set_features")
        self._connection.use_batch_stage(batch_stage)

    def set_features(self, features: Any) -> None:
        """Compute other features, or cut the graph elsewhere, from the next step on, as `set_batch_stage`.

        Another graph in the place of `HybridFeatures` is cut where that is until it is decided anew; a `CutGraph` ends
        deciding.

        Raises:
            FeatureError: the batches of the pass that is under way do not have what the graph takes; the one before
                stays. Before the first batch of a pass that is not known, and raised at its step.
            OptionsError: the loader has no features, or this is no feature graph; the one before stays.
            PipelineError: the pipeline cannot be handed to data workers now; the graph before stays.
        """
        if self._features is None:
            raise OptionsError("set_features on a loader without features: give it features= when it is made")
        sent = self._connection.pipeline
        is_same_data = sent.dataset is self.dataset and sent.collate_fn is self.collate_fn
        self._features.use(checked_features(features), is_same_data=is_same_data)

    # Saving and restoring the position

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that the training loop has taken, as plain values.

        A state that was taken after the last batch of an epoch continues with the next epoch. Only if `set_epoch`
        then names the epoch that has ended is the iteration empty.

        Every rank has the same state, except with a sampler of the program's own, an IterableDataset or `sharding`.
        """
        state = self._state_at(self._position.taken)
        reach("loader.state_taken")
        return state.as_dict()

    def _state_at(self, at: Position) -> DataState:
        return DataState(
            epoch=at.epoch,
            pass_index=at.pass_index,
            step=at.step,
            shards=at.shards,
            world_size=self._order.world_size,
            is_global=self._order.is_global,
            pipeline=self._connection.pipeline.description() | self._description(),
            sampler=self._order.beginning() if at.beginning is None else at.beginning,
            drawn=at.drawn,
            quarantined=self._connection.skipped.state(),
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position.

        It takes constant time; a sampler of the program's own has to draw its indices again. The world size may be
        another one with `global_batch_size`, and for an IterableDataset with a state that `merge_states` has made.

        Raises:
            StateError: the state is of another dataset, order or batch size, or damaged; every difference is named.
        """
        loaded = DataState.read(state)
        shards = self._order.own_shards(loaded, self._state_at(Position(0)))
        self._connection.skipped.load_state(loaded.quarantined)
        self._position.load(
            Position(
                epoch=loaded.epoch,
                pass_index=loaded.pass_index,
                step=loaded.step,
                shards=shards,
                beginning=loaded.sampler,
                drawn=loaded.drawn,
                is_loaded=True,
            )
        )

    # Looking and ending

    def stats(self) -> dict[str, Any]:
        """Counts since the loader was made, and rates over the last seconds. Cheap: it reads counters.

        Times are in seconds, sizes in bytes; docs/reference.md, "Statistics", explains each key.

        With `lengths` there are two more, over the last steps of all ranks: padding_waste is the share of a padded
        batch that is padding. step_spread is the share of a step that ranks wait for the rank with the longest
        samples, if time grows with length.
        """
        taken = self._position.taken
        by_length = self._order.costs_by_length(taken.order_epoch(self._repeat), taken.step)
        cut = self._connection.statistics.features
        by_features = {} if cut is None else {"features": msgspec.structs.asdict(cut)}
        return self._connection.stats() | by_length | by_features

    @property
    def skipped_samples(self) -> list[SkippedSample]:
        """The first 1000 samples that `on_error` skipped: (epoch, sample_index, error), in the order of the steps.

        A sample_index of -1 stands for a whole step.
        """
        return list(self._connection.skipped.samples)

    def close(self) -> None:
        """Leave the service; safe to call twice. Also done when the interpreter ends."""
        if self._features is not None:
            self._features.close()
        self._connection.close()

    def __enter__(self) -> DataLoader[_T_co]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
