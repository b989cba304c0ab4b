"""Into which streams of steps the data of one loader is divided: shards, parts or copies; and a position in them.

`pass_shards.py` says how far they were read. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hetstream.mpi_dataworkers.errors import StateError
from hetstream.mpi_dataworkers.loader.step_indices import PlannedSteps
from hetstream.mpi_dataworkers.order.interleave import Interleave, deal
from hetstream.mpi_dataworkers.order.sharding import EpochPlan, derive_seed
from hetstream.mpi_dataworkers.order.visitation import Cut, ShardingPlan
from hetstream.mpi_dataworkers.wire.messages import ShardOrder

# A state with more was not written by a loader: there are not so many data workers.
_MAX_COPIES = 1 << 16


@dataclass(frozen=True)
class Division:
    """Into which streams the passes of one loader are divided.

    Attributes:
        sharding_plan: the policy, and into how many shards.
        num_samples: length of an indexed dataset, -1 for an IterableDataset.
        batch_size: samples in a step; 0: each step is one sample.
        drop_last, shuffle: as the loader's.
        seed: base of the order.
        copies_alike: copies have the same order (the user gave a seed).
        rank, world_size: which trainer this is.
        in_order: the order of the steps is that of the data; else that of their arrival.
        in_rounds: every rank reads all shards of an IterableDataset, its slice of rounds of like length.
    """

    sharding_plan: ShardingPlan
    num_samples: int
    batch_size: int
    drop_last: bool
    shuffle: bool
    seed: int
    copies_alike: bool
    rank: int
    world_size: int
    in_order: bool = True
    in_rounds: bool = False

    @property
    def shard_owner(self) -> tuple[int, int]:
        """Which rank this is, of how many that own shards; (0, 1) where each rank has a part of every shard."""
        return (self.rank, self.world_size) if self.num_samples < 0 and not self.in_rounds else (0, 1)

    def total_shards(self, num_copies: int) -> int:
        """How many shards there are, of all ranks together."""
        return num_copies if self.sharding_plan.cut is Cut.COPIES else self.sharding_plan.num_shards

    def shards(self, num_copies: int) -> Sequence[int]:
        """This rank's shards: its share of an IterableDataset's, of an indexed dataset its slice of each."""
        if self.sharding_plan.cut is Cut.COPIES:
            return range(num_copies)
        rank, num_ranks = self.shard_owner
        return range(rank, self.sharding_plan.num_shards, num_ranks)

    def width(self, num_copies: int) -> int:
        """How many of them are read at a time."""
        if self.sharding_plan.cut is Cut.COPIES:
            return max(1, num_copies)
        return max(1, self.sharding_plan.width // self.shard_owner[1])

    def steps_of(self, shard: int, epoch: int) -> PlannedSteps | ShardOrder:
        """Which samples the steps of one shard have."""
        cut, num_shards = self.sharding_plan.cut, self.sharding_plan.num_shards
        alike = cut is Cut.COPIES and (self.copies_alike or shard == 0)
        if self.num_samples < 0:
            seed_shard = 0 if alike else shard
            return ShardOrder(
                cut.value,
                shard,
                max(1, num_shards),
                self.batch_size,
                self.drop_last,
                self.shuffle,
                self.seed,
                seed_shard,
                *((self.rank, self.world_size) if self.in_rounds else ()),
            )
        num_samples, seed = self.num_samples, self.seed
        if cut is Cut.INDICES:
            num_samples = len(range(shard, self.num_samples, num_shards))
        if not alike and cut is not Cut.STEPS:
            seed = derive_seed(self.seed, shard) >> 1  # seeds travel as signed 64-bit numbers
        part = (shard, num_shards) if cut is Cut.INDICES else (0, 1)
        plan = EpochPlan(
            num_samples, self.batch_size, self.world_size, self.drop_last, self.shuffle, seed, epoch, *part
        )
        return PlannedSteps(plan, self.rank)

    @property
    def any_order(self) -> bool:
        """Whether steps are given as they come: of several streams whichever has one, of a single one any step."""
        return self.sharding_plan.cut is Cut.COPIES or not self.in_order

    @property
    def believes_length(self) -> bool:
        """Whether an IterableDataset's `__len__` says how many samples this loader gives, as for torch."""
        is_whole = self.world_size == 1 and self.sharding_plan.cut is not Cut.COPIES
        return self.num_samples < 0 and is_whole and not self.in_rounds

    def check(self) -> None:
        """Refuse samples that cannot be divided among the ranks.

        Raises:
            PipelineError: a shard has too few samples for its ranks.
        """
        if self.num_samples >= 0 and self.sharding_plan.cut is not Cut.COPIES:
            for shard in self.shards(0):
                self.steps_of(shard, epoch=0)

    def num_steps(self, epoch: int) -> int | None:
        """Steps of this rank in one pass; None when nobody knows."""
        if self.num_samples < 0 or self.sharding_plan.cut is Cut.COPIES:
            return None
        shards = (self.steps_of(shard, epoch) for shard in self.shards(0))
        return sum(steps.num_steps for steps in shards if isinstance(steps, PlannedSteps))


def snapshots_of(state: dict[str, Any] | None) -> Iterator[tuple[int, bytes]]:
    """Where the readers of shards were, by shard."""
    for shard, snapshot in (state["snapshots"] if state else {}).items():
        yield int(shard), snapshot


def interleave_of(division: Division, num_copies: int, state: dict[str, Any] | None) -> Interleave:
    """In which order the shards are read, from a saved position on."""
    order = Interleave(division.shards(num_copies), division.width(num_copies))
    if state is not None:
        order.load(state, division.total_shards(num_copies))
    return order


def own_position(division: Division, state: Any) -> dict[str, Any]:
    """A saved position as this rank's: of all ranks' together (`data_state.merge_states`) its part.

    Raises:
        StateError: it is none of this division, or another rank's.
    """
    rank, num_ranks = division.shard_owner
    try:
        copies, step, whose = int(state["copies"]), int(state["step"]), state["rank"]
        taken = [(int(first), int(stop)) for first, stop in state["taken_out_of_order"]]
        dict(snapshots_of(state))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StateError(f"the state has no position in the shards of this loader: {error!r}") from error
    if not 0 < copies <= _MAX_COPIES or step < 0 or any(not 0 <= first < stop for first, stop in taken):
        raise StateError(f"the state has a damaged position in the shards of this loader: {state!r}")
    if whose is None:
        dealt = deal(state, division.total_shards(copies), rank, num_ranks, division.width(copies))
        mine = {str(shard) for shard, _ in dealt["slots"]}
        snapshots = {shard: snapshot for shard, snapshot in state["snapshots"].items() if shard in mine}
        state = {**state, **dealt, "rank": rank, "snapshots": snapshots}
    elif whose != rank:
        raise StateError(
            f"this is the state of rank {whose}, and this is rank {rank}: each rank of an IterableDataset has a state "
            "of its own (or load what merge_states() makes of all of them)"
        )
    interleave_of(division, copies, state)
    return dict(state)
