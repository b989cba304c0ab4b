"""Rounds of like length from a stream: in a round, each rank has one batch, of elements of about one length. Pure.

Used in place of `bucketing.BucketPlan` where lengths are known only when the elements come. The rounds of a shard are a
function of its elements alone, so whoever reads the shard forms the same ones: step j of rank r is slice r of round j.
`ops/round_reader.py` reads the shards.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.order.bucketing import boundary_problems

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
        """The element's bucket, from 0.

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
        """The shard has no more elements.

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
