"""Coordinated reads: an order in which the batches of all ranks at one step hold samples of like length. Pure.

Beside `sharding.EpochPlan`, and used in its place when a loader knows its samples' lengths. All ranks wait for the one
with the longest batch; with lengths that differ much, reading alike is what keeps them busy. As the order is a plan
and no protocol between readers, a rank that restarts finds its round from (epoch, step), and finite data ends for all
ranks at one step.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.order.sharding import EpochPlan, Indices, derive_seed, permute
from hetstream.mpi_dataworkers.wire.messages import PlannedOrder

# So that the seeds of buckets and of the order of rounds are none of those of an epoch plan.
_BUCKET_SEED = 0x6275636B


def boundary_problems(boundaries: Sequence[int]) -> list[str]:
    """Return what is wrong with boundaries of buckets, if anything."""
    whole = all(isinstance(boundary, int | np.integer) and boundary > 0 for boundary in boundaries)
    if boundaries and whole and all(a < b for a, b in itertools.pairwise(boundaries)):
        return []
    return [f"bucket_boundaries={list(boundaries)!r}: must be positive whole numbers in ascending order"]


class LengthBuckets:
    """The samples of a dataset by bucket of length; travels to data workers as part of the pipeline.

    Args:
        lengths: length of each sample, in whatever unit a batch's cost grows with (tokens, frames), whole numbers >= 0.
        boundaries: ascending lengths; bucket b holds boundaries[b-1] <= length < boundaries[b], the first and the last
            bucket are open, as in tf.data's `bucket_by_sequence_length`.

    Attributes:
        lengths: int64 array [num_samples].
        boundaries: as given.
        starts: int64 array [num_buckets + 1]; the members of bucket b are members[starts[b] : starts[b + 1]].
        members: int64 array [num_samples] of sample indices, ascending within a bucket.

    Raises:
        PipelineError: lengths or boundaries break their rule.
    """

    def __init__(self, lengths: Sequence[int] | npt.NDArray[Any], boundaries: Sequence[int]) -> None:
        given = np.asarray(lengths)
        self.boundaries = tuple(boundaries)
        problems = []
        if given.ndim != 1 or (given.size and (given.dtype.kind not in "iu" or int(given.min()) < 0)):
            problems.append(
                f"lengths has shape {given.shape} and dtype {given.dtype}: must be whole numbers >= 0, one a sample"
            )
        problems += boundary_problems(self.boundaries)
        if problems:
            raise PipelineError("; ".join(problems))
        self.lengths = given.astype(np.int64)
        bucket_of = np.searchsorted(np.asarray(self.boundaries), self.lengths, side="right").astype(np.uint32)
        self.members: Indices = np.argsort(bucket_of, kind="stable").astype(np.int64)
        sizes = np.bincount(bucket_of, minlength=len(self.boundaries) + 1)
        self.starts: Indices = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def description(self) -> str:
        """Boundaries and a digest of the lengths: what makes two orders by bucket the same."""
        digest = hashlib.blake2b(self.lengths.tobytes(), digest_size=8).hexdigest()
        return f"{','.join(map(str, self.boundaries))} of lengths {digest}"

    def __reduce__(self) -> tuple[Callable[..., LengthBuckets], tuple[Any, ...]]:
        # The rest follows from these; lengths fit 32 bits as a rule, and are most of the pickled pipeline.
        fits = not self.lengths.size or int(self.lengths.max()) < 1 << 31
        return LengthBuckets, (self.lengths.astype(np.int32) if fits else self.lengths, self.boundaries)


@dataclass(frozen=True)
class BucketPlan:
    """The order of one epoch for all ranks, each round from one bucket.

    A round is `batch_size * world_size` samples, or `global_batch_size`, and rank r takes the r-th slice of it. What
    does not fill a round of its bucket is joined across buckets, in order of length, into the last rounds of the epoch,
    so that nothing is lost or repeated; with `drop_last` it is left out, and then every round is of one bucket. A step
    is looked up in time that does not depend on the number of samples.

    Attributes:
        buckets: the samples by length.
        batch_size, world_size, drop_last, seed, epoch, global_batch_size: as in `EpochPlan`.
        shuffle: permute the samples inside the buckets and the order of the rounds, by (seed, epoch).

    Raises:
        PipelineError: no division gives every rank the same number of non-empty steps.
    """

    buckets: LengthBuckets
    batch_size: int
    world_size: int = 1
    drop_last: bool = False
    shuffle: bool = False
    seed: int = 0
    epoch: int = 0
    global_batch_size: int | None = None

    def __post_init__(self) -> None:
        _ = self._remainder_plan  # refuses a division that cannot work

    @property
    def num_samples(self) -> int:
        """Length of the dataset."""
        return len(self.buckets)

    @property
    def _round_samples(self) -> int:
        return self.batch_size * self.world_size if self.global_batch_size is None else self.global_batch_size

    @functools.cached_property
    def _full_rounds(self) -> Indices:
        """Rounds that each bucket fills by itself."""
        sizes = np.diff(self.buckets.starts)
        samples = self._round_samples
        rounds: Indices = sizes // samples
        left_over = int((sizes - rounds * samples).sum())
        # With a global batch size the rounds must not depend on the number of ranks.
        least = self.world_size if self.global_batch_size is None else (samples + 1) // 2
        if 0 < left_over < least and not self.drop_last and rounds.any():
            # Too few for a batch of each rank: they are divided together with a round of the longest samples.
            rounds[np.flatnonzero(rounds)[-1]] -= 1
        return rounds

    @functools.cached_property
    def _remainder_plan(self) -> EpochPlan:
        """How the samples that fill no round are divided: positions in the buckets' remainders, joined."""
        left_over = 0 if self.drop_last else self.num_samples - int(self._full_rounds.sum()) * self._round_samples
        return EpochPlan(left_over, self.batch_size, self.world_size, global_batch_size=self.global_batch_size)

    @functools.cached_property
    def _ends(self) -> tuple[Indices, Indices]:
        """Running totals over the buckets: of full rounds, and of samples in the remainders."""
        remainders = np.diff(self.buckets.starts) - self._full_rounds * self._round_samples
        return np.cumsum(self._full_rounds), np.cumsum(remainders)

    @property
    def num_steps(self) -> int:
        """Steps of each rank in this epoch."""
        return int(self._full_rounds.sum()) + self._remainder_plan.num_steps

    def bucket(self, step: int) -> int | None:
        """Return the bucket of a step, the same for all ranks; None for a step of remainders."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is outside {self.num_steps} steps")
        number = self._round(step)
        return None if number is None else int(np.searchsorted(self._ends[0], number, side="right"))

    def _round(self, step: int) -> int | None:
        """Number of the round among the full ones, which are counted bucket by bucket."""
        full = int(self._ends[0][-1])
        if step >= full:
            return None
        if not self.shuffle:
            return step
        return int(permute(np.array([step]), full, derive_seed(self.seed, _BUCKET_SEED), self.epoch)[0])

    def indices(self, step: int, rank: int = 0) -> Indices:
        """Sample indices of one step of one rank, int64, at least one and at most a full step's.

        Raises:
            IndexError: the step or the rank is outside the plan.
        """
        if not (0 <= step < self.num_steps and 0 <= rank < self.world_size):
            raise IndexError(f"step {step} of rank {rank} is outside {self.num_steps} steps, {self.world_size} ranks")
        number = self._round(step)
        if number is None:
            return self._remainders(self._remainder_plan.indices(step - int(self._ends[0][-1]), rank))
        bucket = int(np.searchsorted(self._ends[0], number, side="right"))
        before = int(self._ends[0][bucket - 1]) if bucket else 0
        share, extra = divmod(self._round_samples, self.world_size)
        first = (number - before) * self._round_samples + rank * share + min(rank, extra)
        return self._members(bucket, np.arange(first, first + share + (rank < extra), dtype=np.int64))

    def _remainders(self, positions: Indices) -> Indices:
        ends = self._ends[1]
        bucket_of = np.searchsorted(ends, positions, side="right")
        parts = []
        for bucket in np.unique(bucket_of).tolist():
            before = int(ends[bucket - 1]) if bucket else 0
            used = int(self._full_rounds[bucket]) * self._round_samples
            parts.append(self._members(bucket, positions[bucket_of == bucket] - before + used))
        return np.concatenate(parts)

    def _members(self, bucket: int, places: Indices) -> Indices:
        start, stop = (int(place) for place in self.buckets.starts[bucket : bucket + 2])
        if self.shuffle:
            places = permute(places, stop - start, derive_seed(self.seed, _BUCKET_SEED, bucket), self.epoch)
        return self.buckets.members[start + places]

    def cost(self, step: int) -> StepCost:
        """Return what a step costs for the lengths of its samples, over all ranks."""
        batches = [self.buckets.lengths[self.indices(step, rank)] for rank in range(self.world_size)]
        longest = [int(lengths.max()) for lengths in batches]
        real = sum(int(lengths.sum()) for lengths in batches)
        return StepCost(real, sum(most * len(lengths) for most, lengths in zip(longest, batches, strict=True)), longest)


def order_of(plan: EpochPlan | BucketPlan, rank: int) -> PlannedOrder:
    """Return a plan as a loader announces it: everything but the epoch and the buckets, which travel elsewhere."""
    part = (plan.shard, plan.num_shards) if isinstance(plan, EpochPlan) else (0, 1)
    return PlannedOrder(
        plan.num_samples,
        plan.batch_size,
        plan.world_size,
        rank,
        plan.drop_last,
        plan.shuffle,
        plan.seed,
        isinstance(plan, BucketPlan),
        *part,
        plan.global_batch_size,
    )


@functools.lru_cache(maxsize=16)
def plan_of(order: PlannedOrder, epoch: int, buckets: LengthBuckets | None = None) -> EpochPlan | BucketPlan:
    """Return the plan of one epoch of an order that a loader has announced; `buckets` are its pipeline's."""
    if buckets is None:
        return _epoch_plan(order, epoch)
    return BucketPlan(
        buckets,
        order.batch_size,
        order.world_size,
        order.drop_last,
        order.shuffle,
        order.order_seed,
        epoch,
        order.global_batch_size,
    )


@functools.lru_cache(maxsize=64)
def _epoch_plan(order: PlannedOrder, epoch: int) -> EpochPlan:
    # Made once for all steps: checking it costs as much as the rest of a small step's indices.
    return EpochPlan(
        order.num_samples,
        order.batch_size,
        order.world_size,
        order.drop_last,
        order.shuffle,
        order.order_seed,
        epoch,
        order.shard,
        order.num_shards,
        order.global_batch_size,
    )


@dataclass(frozen=True)
class StepCost:
    """Lengths of one step's batches.

    Attributes:
        real: sum of the samples' lengths, all ranks.
        padded: the same when each rank pads its batch to its longest sample.
        longest: length of the longest sample of each rank.
    """

    real: int
    padded: int
    longest: list[int]


def padding_waste(costs: Sequence[StepCost]) -> float:
    """Share of the padded elements that are padding, 0 to 1."""
    padded = sum(cost.padded for cost in costs)
    return 1 - sum(cost.real for cost in costs) / padded if padded else 0.0


def step_spread(costs: Sequence[StepCost]) -> float:
    """Share of the steps' time that ranks wait for the slowest, 0 to 1, where a step's time goes with its length."""
    slowest = sum(max(cost.longest) * len(cost.longest) for cost in costs)
    return 1 - sum(sum(cost.longest) for cost in costs) / slowest if slowest else 0.0


# Rounds of like length from a stream: in a round, each rank has one batch, of elements of about one length. Pure.
#
# Used in place of `bucketing.BucketPlan` where lengths are known only when the elements come. The rounds of a shard are
# a function of its elements alone, so whoever reads the shard forms the same ones: step j of rank r is slice r of round
# j. `ops/streams.py` reads the shards.

T = TypeVar("T")


@dataclass(frozen=True)
class StreamBuckets:
    """How the elements of a stream are told apart by length; travels to data workers as part of the pipeline.

    Attributes:
        length_of: an element's length, a whole number >= 0.
        boundaries: ascending lengths, as in `bucketing.LengthBuckets`.

    Raises:
        PipelineError: boundaries break their rule.
    """

    length_of: Callable[[Any], int]
    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        if problems := boundary_problems(self.boundaries):
            raise PipelineError("; ".join(problems))

    @property
    def description(self) -> str:
        """What makes two orders by bucket the same, as far as it can be named."""
        name = getattr(self.length_of, "__qualname__", type(self.length_of).__qualname__)
        return f"{','.join(map(str, self.boundaries))} of {name}"

    def bucket(self, element: Any) -> int:
        """Return the element's bucket, from 0.

        Raises:
            PipelineError: `length_of` gives no length.
        """
        length = self.length_of(element)
        try:
            is_length = int(length) == length >= 0
        except (TypeError, ValueError):
            is_length = False
        if not is_length:
            raise PipelineError(f"length_of gives {length!r} for an element: must be a whole number >= 0")
        return bisect.bisect_right(self.boundaries, length)


class RoundFormer(Generic[T]):
    """Forms the rounds of one shard from its elements in order of arrival.

    A bucket that holds `world_size * batch_size` elements is a round, and rank r has the r-th slice of it. The newest
    round is held back: at the shard's end, when fewer elements are left than ranks, it is divided anew together with
    them, so that every rank has as many steps. Other leftovers are joined in order of bucket into rounds of their own.

    Args:
        batch_size: samples in a full batch of one rank.
        world_size: number of ranks.
        drop_last: leave out what fills no round of its bucket.
    """

    def __init__(self, batch_size: int, world_size: int, drop_last: bool = False) -> None:
        self._batch_size, self._world_size, self._drop_last = batch_size, world_size, drop_last
        self._buckets: dict[int, list[T]] = {}
        self._held: list[T] = []

    def add(self, element: T, bucket: int) -> list[list[list[T]]]:
        """Take in the shard's next element.

        Args:
            element: the next element.
            bucket: its bucket, of `StreamBuckets.bucket`.

        Returns:
            The rounds that are ready now, mostly none: of each round, the elements of each rank.
        """
        waiting = self._buckets.setdefault(bucket, [])
        waiting.append(element)
        if len(waiting) < self._batch_size * self._world_size:
            return []
        del self._buckets[bucket]
        ready, self._held = self._held, waiting
        return self._divide(ready)

    def end(self) -> list[list[list[T]]]:
        """Note that the shard has no more elements.

        Returns:
            Its last rounds, as `add` gives them.

        Raises:
            PipelineError: it has fewer elements than there are ranks.
        """
        left_over = [element for _, waiting in sorted(self._buckets.items()) for element in waiting]
        if self._drop_last:
            left_over = []
        elif len(left_over) < self._world_size and self._held:
            left_over, self._held = self._held + left_over, []
        if 0 < len(left_over) < self._world_size:
            raise PipelineError(
                f"a shard has {len(left_over)} elements for {self._world_size} ranks, which cannot have the same "
                "number of steps without repeating one. Use fewer shards (num_shards=, larger files), fewer ranks, or "
                "drop_last=True."
            )
        return self._divide(self._held) + self._divide(left_over)

    def _divide(self, elements: list[T]) -> list[list[list[T]]]:
        """Rounds of equal size, of as few batches of at most `batch_size` as there can be with one for every rank.

        With batches of one element some have two when the ranks could not have as many otherwise.
        """
        full = self._batch_size * self._world_size
        num_rounds = min(-(-len(elements) // full), len(elements) // self._world_size)
        return [_evenly(part, self._world_size) for part in _evenly(elements, num_rounds)]


def _evenly(elements: Sequence[T], num_parts: int) -> list[list[T]]:
    """Parts in order whose sizes differ by at most one."""
    ends = [len(elements) * number // num_parts for number in range(num_parts + 1)] if num_parts else []
    return [list(elements[first:stop]) for first, stop in itertools.pairwise(ends)]
