"""One shard of an IterableDataset, read in rounds of like length: step j of rank r is slice r of round j.

A round is made from many elements, of which each rank has its part. So a data worker that serves several ranks reads
the shard once for all of them (`SharedRounds`), and keeps the slices that are still to be asked for, within a
bound. A rank that is further behind than that, or comes back, has a reader of its own, which begins at the shard's
beginning (what waits in the buckets is no part of a dataset's state), until it is where the others are.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.failures import StepFailures, Verdict
from hetstream.mpi_dataworkers.ops.iterable import Shard, ShardSteps
from hetstream.mpi_dataworkers.ops.pipeline import MadeStep, SampleError, describe_failure, seed_generators
from hetstream.mpi_dataworkers.ops.shard_reader import ShardReader
from hetstream.mpi_dataworkers.order.length_rounds import RoundFormer
from hetstream.mpi_dataworkers.order.sharding import derive_seed
from hetstream.mpi_dataworkers.wire.messages import ErrorPolicy, Failure

# Rounds whose slices wait for the ranks that are behind: more than a lease is ahead of another.
_KEPT_ROUNDS = 256
# So that the seeds of collate functions are none of those of elements.
_COLLATE_SEED = 0x636F6C6C


class _RoundReader(ShardSteps):
    """A shard's iterator and the rounds that it has formed.

    Args:
        shard, at_sample: as in `ShardSteps`.
        ranks: whose slices are kept until they are asked for.
    """

    def __init__(self, shard: Shard, at_sample: Callable[[int], None], ranks: Collection[int]) -> None:
        super().__init__(shard, at_sample)
        self._ranks = ranks
        self._kept: OrderedDict[int, dict[int, list[Any]]] = OrderedDict()
        self._formed: deque[list[list[Any]]] = deque()
        self._keep_from = 0

    def comes_to(self, rank: int, step: int) -> bool:
        """Whether it has the slice, or gets there without beginning anew."""
        return step >= self.position or rank in self._kept.get(step, ())

    def slice_of(self, rank: int, step: int) -> list[Any] | None:
        """The samples of a rank's step, once; None when the shard has fewer steps.

        Raises:
            SampleError, PipelineError: as `ShardReader.read`.
        """
        if step not in self._kept:
            self._keep_from = step
            try:
                if self.samples_of(step) is None:
                    return None
            except SampleError:
                # The next try may go better, and then the rounds are others: no rank may go on with these.
                self.forget_position()
                self._kept.clear()
                raise
        slices = self._kept[step]
        samples = slices.pop(rank)
        if not slices:
            del self._kept[step]
        return samples

    def begin(self, saved: dict[str, Any] | None) -> None:
        order = self.shard.order
        self._former = RoundFormer[Any](order.batch_size, order.world_size, order.drop_last)
        self._formed.clear()
        self._kept.clear()
        super().begin(saved)

    def next_samples(self) -> list[Any] | None:
        """Form the next round and keep its slices; None at the end."""
        buckets = self.shard.pipeline.stream_buckets
        assert buckets is not None
        try:
            while not self._formed and not self.is_exhausted:
                # Each element has a seed of its own: the steps of an element depend on its neighbours' lengths.
                seed_generators(derive_seed(self.seed, self.num_elements))
                with self.as_worker():
                    found = self.next_element()
                    if found is not None:
                        self._formed.extend(self._former.add(found[0], buckets.bucket(found[0])))
            self.check_divided()
            if self.is_exhausted:
                self._formed.extend(self._former.end())
                self._former = RoundFormer[Any](1, 1)
        except PipelineError:
            raise
        except Exception as error:
            self.position += 1
            raise SampleError(-1) from error
        if not self._formed:
            self.num_steps = self.position
            return None
        formed = self._formed.popleft()
        if self.position >= self._keep_from:
            self._kept[self.position] = {rank: formed[rank] for rank in self._ranks}
        while len(self._kept) > _KEPT_ROUNDS:
            self._kept.popitem(last=False)
        self.position += 1
        return formed


class _Readers:
    """The readers of one shard: one for all ranks, and one for each that is away from the others."""

    def __init__(self, begin: Callable[[Collection[int]], _RoundReader], ranks: Collection[int]) -> None:
        self._begin = begin
        self._common = begin(ranks)
        self._own: dict[int, _RoundReader] = {}

    def slice_of(self, rank: int, step: int) -> tuple[list[Any] | None, int]:
        """A rank's samples of a step, and the number of steps once that is known, else -1."""
        reader, own = self._common, self._own.pop(rank, None)
        behind = not reader.comes_to(rank, step)
        if behind or (own is not None and own.comes_to(rank, step) and own.position > reader.position):
            reader = own if own is not None and own.comes_to(rank, step) else self._begin([rank])
            self._own[rank] = reader
        return reader.slice_of(rank, step), reader.num_steps


class RankReader:
    """What one rank reads of a shard; stands in for a `ShardReader`.

    Attributes:
        pipeline: the shard's.
        num_steps: how many steps the shard has, -1 until its end was reached.
        snapshot, snapshot_step: none, as rounds have none.
    """

    def __init__(self, readers: _Readers, shard: Shard) -> None:
        self.num_steps = -1
        self.snapshot, self.snapshot_step = b"", 0
        self.pipeline = shard.pipeline
        self._readers, self._rank = readers, shard.order.rank
        self._seed = derive_seed(shard.seed, shard.epoch, shard.order.seed_shard, _COLLATE_SEED)

    def read(self, step: int, _: bytes = b"", __: Collection[Failure] = ()) -> MadeStep | None:
        """Make one step of this rank, as `ShardReader.read`; there is no snapshot, and nothing is left out."""
        samples, self.num_steps = self._readers.slice_of(self._rank, step)
        if samples is None:
            return None
        seed = derive_seed(self._seed, step, self._rank)
        seed_generators(seed)
        return MadeStep(self.pipeline.collated(samples, seed), len(samples), 0, [])


class SharedRounds:
    """The shards that one process reads for several ranks; one is forgotten with its last `RankReader`."""

    def __init__(self) -> None:
        self._shards: weakref.WeakValueDictionary[Any, _Readers] = weakref.WeakValueDictionary()

    def readers(self, key: tuple[Any, ...], make: Callable[[], _Readers]) -> _Readers:
        """The readers of a shard."""
        found = self._shards.get(key)
        if found is None:
            found = self._shards[key] = make()
        return found


def open_shard(
    shard: Shard,
    at_sample: Callable[[int], None] = lambda _: None,
    skips: bool = False,
    shared: SharedRounds | None = None,
    pipeline_id: str = "",
) -> ShardReader | RankReader:
    """A reader of one shard, for this rank.

    Args:
        shard: which one.
        at_sample: as in `ShardSteps`.
        skips: leave out elements that raise; not in rounds.
        shared: with whom to share rounds; None to read for one rank alone.
        pipeline_id: names the pipeline among the shared.
    """
    order = shard.order
    if order.world_size == 0:
        return ShardReader(shard, at_sample, skips)

    def begin(ranks: Collection[int]) -> _RoundReader:
        return _RoundReader(shard, at_sample, ranks)

    if shared is None:
        readers = _Readers(begin, [order.rank])
    else:
        key = pipeline_id, shard.seed, shard.epoch, msgspec.structs.replace(order, rank=0)
        readers = shared.readers(key, lambda: _Readers(begin, range(order.world_size)))
    return RankReader(readers, shard)


def read_step(reader: ShardReader | RankReader, step: int, snapshot: bytes, policy: ErrorPolicy) -> MadeStep | None:
    """Read a step in this process, with the attempts and the policy that it has on data workers.

    Raises:
        SampleError: user code raised, and the policy is to raise.
    """
    if policy.on_error == "raise":
        return reader.read(step, snapshot)
    failures = StepFailures()
    while True:
        try:
            return reader.read(step, snapshot, failures.left_out)
        except SampleError as error:
            if failures.note("", describe_failure(error), policy) is Verdict.RAISE:
                raise
