"""In which order one `DataLoader` reads its data: how many steps a pass has, and which samples each step has.

There are three kinds, and `order_of` chooses one by the loader's options:

* `PlannedOrder`: of indexed data, a function of the seed and the epoch alone;
* `SamplerOrder`: the program's own sampler decides;
* `DividedOrder`: the data is divided into shards, parts or copies (`shards.py`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sized
from dataclasses import replace
from typing import Any

from hetstream.mpi_dataworkers.errors import StateError
from hetstream.mpi_dataworkers.loader.options import LoaderOptions
from hetstream.mpi_dataworkers.loader.pass_iterator import Position
from hetstream.mpi_dataworkers.loader.shards import (
    Division,
    ListedSteps,
    PassShards,
    PlannedSteps,
    SamplerEpochSetter,
    beginning_again,
    beginning_of,
    own_position,
)
from hetstream.mpi_dataworkers.order.bucketing import BucketPlan, LengthBuckets, padding_waste, step_spread
from hetstream.mpi_dataworkers.order.data_state import DataState
from hetstream.mpi_dataworkers.order.sharding import EpochPlan, derive_seed
from hetstream.mpi_dataworkers.order.visitation import Cut
from hetstream.mpi_dataworkers.process.config import TrainerIdentity

_log = logging.getLogger(__name__)

# `stats` computes padding_waste and step_spread over this many of the last steps; each step costs about 0.1 ms.
_NUM_STEPS_JUDGED = 16


class LoaderOrder(ABC):
    """The order in which one loader reads its data.

    Attributes:
        seed: base of the order, and of augmentation where no two ranks make the same sample; see `seed_of_rank`.
        rank, world_size: this trainer's part of the order; (0, 1) where the program's own sampler divides it.
        description: what the order depends on beside the dataset, compared when a state is loaded.
        is_global: the order is the same at any world size, because of `global_batch_size`.
        buckets: the samples by length, with `lengths`; None without.
        believes_length: an IterableDataset's `__len__` says how long a pass is, as for torch.
    """

    is_global = False
    buckets: LengthBuckets | None = None
    believes_length = False

    def __init__(self, seed: int, rank: int, world_size: int, description: Mapping[str, str]) -> None:
        self.seed = seed
        self.rank, self.world_size = rank, world_size
        self.description = dict(description)

    @abstractmethod
    def num_steps(self, epoch: int) -> int | None:
        """Steps of this rank in one pass; None when nobody knows.

        Raises:
            TypeError: the program's sampler has no length.
        """

    @abstractmethod
    def begin_pass(self, epoch: int, at: Position, num_data_workers: int) -> PassShards:
        """The steps of a pass.

        Args:
            epoch: of the order and of the random state of samples; each pass has another.
            at: where the pass begins.
            num_data_workers: at least 1; where each data worker goes over all of the data, the number of copies.

        Raises:
            StateError: the program's sampler does not give again what it gave before the position.
        """

    @abstractmethod
    def note_num_samples(self, num_samples: int) -> None:
        """The indexed dataset has this length now; -1: it has none."""

    @abstractmethod
    def own_shards(self, saved: DataState, here: DataState) -> dict[str, Any] | None:
        """A saved position in the shards of a pass, as this rank's; None where the number of steps says all.

        Args:
            saved: the state to continue from.
            here: the state of the loader that is to continue.

        Raises:
            StateError: it is of another dataset or order; every difference is named.
        """

    def beginning(self) -> str:
        """How the program's sampler would begin its next epoch, of `sampler_state`; "" without one."""
        return ""

    def costs_by_length(self, epoch: int, num_taken: int) -> dict[str, float]:  # noqa: ARG002, see PlannedOrder
        """What the last steps of all ranks cost for the lengths of their samples; empty without `lengths`.

        Args:
            epoch: the pass whose steps are taken.
            num_taken: steps of it that were taken.
        """
        return {}


def order_of(loader: Any, options: LoaderOptions, identity: TrainerIdentity) -> LoaderOrder:
    """The order that a loader's options ask for.

    Args:
        loader: the torch DataLoader, whose own constructor has run.
        options: its keywords.
        identity: who this trainer is.

    Raises:
        PipelineError: the data cannot be divided among the ranks.
    """
    if options.is_listed:
        description = options.order_description(options.sharding_plan())
        return SamplerOrder(loader, seed_of_rank(options.seed or 0, identity.rank), identity.rank, description)
    rank, world_size = identity.rank, identity.world_size
    sharding_plan = options.sharding_plan(world_size)
    description = options.order_description(sharding_plan)
    division = options.division(sharding_plan, rank, world_size)
    if division is not None:
        return DividedOrder(division, description)
    return PlannedOrder(options, loader.batch_size, rank, world_size, description)


def seed_of_rank(seed: int, rank: int) -> int:
    """A base of random numbers that no other rank has; rank 0 has the seed itself.

    For an order in which the place of a sample says which random numbers it has: two ranks that read other samples in
    the same places would augment them alike. Of indexed data in a planned order, and of shards, the sample's index or
    the shard says it, so that a sample is augmented alike whatever the number of ranks.
    """
    return derive_seed(seed, rank) >> 1 if rank else seed  # seeds travel as signed 64-bit numbers


class PlannedOrder(LoaderOrder):
    """Indexed data in an order that is a function of the seed and the epoch.

    Args:
        options: the loader's.
        batch_size: samples in a full step of this rank.
        rank, world_size: which trainer this is.
        description: see `LoaderOrder`.

    Raises:
        PipelineError: the samples cannot be divided among the ranks.
    """

    def __init__(
        self, options: LoaderOptions, batch_size: int, rank: int, world_size: int, description: Mapping[str, str]
    ) -> None:
        super().__init__(options.seed or 0, rank, world_size, description)
        self.is_global = options.global_batch_size is not None
        self._dataset: Sized = options.dataset
        self.buckets = options.length_buckets()
        self._division: dict[str, Any] = {
            "batch_size": batch_size,
            "world_size": world_size,
            "drop_last": options.drop_last,
            "shuffle": bool(options.shuffle),
            "seed": self.seed,
            "global_batch_size": options.global_batch_size,
        }
        self.plan(0)  # refuses a division that cannot work here, and not at the first epoch

    def plan(self, epoch: int) -> EpochPlan | BucketPlan:
        """The steps of all ranks in an epoch."""
        if self.buckets is not None:
            return BucketPlan(self.buckets, **self._division, epoch=epoch)
        return EpochPlan(len(self._dataset), **self._division, epoch=epoch)

    def num_steps(self, epoch: int) -> int:
        """See `LoaderOrder`."""
        return self.plan(epoch).num_steps

    def begin_pass(self, epoch: int, at: Position, num_data_workers: int) -> PassShards:  # noqa: ARG002, see LoaderOrder
        """See `LoaderOrder`."""
        return PassShards.undivided(PlannedSteps(self.plan(epoch), self.rank), self.seed, epoch, at.step)

    def note_num_samples(self, num_samples: int) -> None:
        """Nothing: the dataset is asked for its length at each pass."""

    def own_shards(self, saved: DataState, here: DataState) -> None:
        """See `LoaderOrder`: the number of steps says all."""
        saved.check_fits(here, self.num_steps(saved.epoch))
        _refuse_shards(saved)

    def costs_by_length(self, epoch: int, num_taken: int) -> dict[str, float]:
        """See `LoaderOrder`."""
        if self.buckets is None:
            return {}
        if num_taken == 0 and epoch > 0:
            epoch, num_taken = epoch - 1, self.num_steps(epoch - 1)
        plan = self.plan(epoch)
        assert isinstance(plan, BucketPlan)
        costs = [plan.cost(step) for step in range(max(0, num_taken - _NUM_STEPS_JUDGED), num_taken)]
        return {"padding_waste": padding_waste(costs), "step_spread": step_spread(costs)}


class SamplerOrder(LoaderOrder):
    """Indexed data in the order of the program's own sampler, which also says what this rank reads.

    Args:
        loader: the torch DataLoader whose sampler it is.
        seed, description: see `LoaderOrder`.
        own_rank: which trainer this is.
    """

    def __init__(self, loader: Any, seed: int, own_rank: int, description: Mapping[str, str]) -> None:
        super().__init__(seed, 0, 1, description)
        self._own_rank = own_rank
        self._index_sampler = loader._index_sampler
        self._is_batched = loader.batch_sampler is not None
        self._epoch_setter = SamplerEpochSetter(loader.sampler, loader.batch_sampler)

    def num_steps(self, epoch: int) -> int:  # noqa: ARG002, see LoaderOrder
        """See `LoaderOrder`."""
        return len(self._index_sampler)

    def begin_pass(self, epoch: int, at: Position, num_data_workers: int) -> PassShards:  # noqa: ARG002, see LoaderOrder
        """See `LoaderOrder`."""
        self._epoch_setter.begin(epoch)
        return PassShards.undivided(self._steps(at), self.seed, epoch, at.step)

    def _steps(self, at: Position) -> ListedSteps:
        sampler = self._index_sampler
        if at.beginning is None:
            return ListedSteps(sampler, self._is_batched, beginning_of(sampler, in_epoch=True))
        with beginning_again(sampler, at.beginning):
            steps = ListedSteps(sampler, self._is_batched, at.beginning)
            steps.skip(at.step, at.drawn)
        return steps

    def note_num_samples(self, num_samples: int) -> None:
        """Nothing: the sampler knows the dataset."""

    def own_shards(self, saved: DataState, here: DataState) -> None:
        """See `LoaderOrder`: the number of steps says all. How many there are only the sampler knows."""
        saved.check_fits(here, None)
        _refuse_shards(saved)
        if self._own_rank and not saved.ranks_differ:
            _log.warning(
                "hetstream: the state is of a release in which all ranks of a sampler's order drew the same numbers. "
                "From here on rank %d has its own: its samples are those of that run, their augmentation is not",
                self._own_rank,
            )

    def beginning(self) -> str:
        """See `LoaderOrder`."""
        return beginning_of(self._index_sampler, in_epoch=False)


class DividedOrder(LoaderOrder):
    """Data that is divided into shards, parts or copies.

    Args:
        division: into which.
        description: see `LoaderOrder`.

    Raises:
        PipelineError: the samples cannot be divided among the ranks.
    """

    def __init__(self, division: Division, description: Mapping[str, str]) -> None:
        super().__init__(division.seed, division.rank, division.world_size, description)
        self.believes_length = division.believes_length
        self._division = division
        division.check()

    def num_steps(self, epoch: int) -> int | None:
        """See `LoaderOrder`."""
        return self._division.num_steps(epoch)

    def begin_pass(self, epoch: int, at: Position, num_data_workers: int) -> PassShards:
        """See `LoaderOrder`."""
        seed, division = self.seed, self._division
        if division.sharding_plan.cut is Cut.COPIES and division.num_samples < 0 and not division.copies_alike:
            seed = seed_of_rank(seed, division.rank)  # each rank goes over all of it, in orders of its own
        return PassShards.divided(division, seed, epoch, num_data_workers, at.shards)

    def note_num_samples(self, num_samples: int) -> None:
        """See `LoaderOrder`."""
        self._division = replace(self._division, num_samples=num_samples)

    def own_shards(self, saved: DataState, here: DataState) -> dict[str, Any] | None:
        """See `LoaderOrder`."""
        saved.check_fits(here, self.num_steps(saved.epoch))
        if saved.shards is not None:
            return own_position(self._division, saved.shards)
        if saved.step > 0:
            raise _divided_otherwise()
        return None


def _refuse_shards(saved: DataState) -> None:
    if saved.shards is not None:
        raise _divided_otherwise()


def _divided_otherwise() -> StateError:
    return StateError("the state and this loader divide the data in different ways")
