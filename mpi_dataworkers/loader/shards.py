"""A pass that is divided into streams of steps: shards of an IterableDataset, parts or copies of an indexed one.

Each stream that is being read is a session of its own with the service; `interleave.Interleave` says whose step is
next. Used by `data_loader.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.utils.data

from hetstream.mpi_dataworkers.errors import StateError
from hetstream.mpi_dataworkers.loader.client import Delivered, Ended, LocalFallback, Pass
from hetstream.mpi_dataworkers.loader.order import PlannedPass
from hetstream.mpi_dataworkers.loader.stream import (
    BeginWorker,
    FailedStep,
    LocalFailure,
    LocalPass,
    PlainLoader,
    Stream,
    early_end,
    no_collate,
    rebuild_error,
)
from hetstream.mpi_dataworkers.ops.iterable import ShardReader
from hetstream.mpi_dataworkers.ops.pipeline import MadeStep, Pipeline, SampleError, generators_kept, make_step
from hetstream.mpi_dataworkers.ops.rounds import RankReader, open_shard, read_step
from hetstream.mpi_dataworkers.order.interleave import Interleave, Place, deal
from hetstream.mpi_dataworkers.order.reorder import as_ranges
from hetstream.mpi_dataworkers.order.sharding import EpochPlan, derive_seed
from hetstream.mpi_dataworkers.order.visitation import Cut, Guarantee
from hetstream.mpi_dataworkers.wire.messages import BatchFailed, ErrorPolicy, ShardOrder

# A state with more was not written by a loader: there are not so many data workers.
_MAX_COPIES = 1 << 16


@dataclass(frozen=True)
class Division:
    """Into which streams the passes of one loader are divided.

    Attributes:
        guarantee: the policy.
        num_samples: length of an indexed dataset, -1 for an IterableDataset.
        batch_size: samples in a step; 0: each step is one sample.
        drop_last, shuffle: as the loader's.
        seed: base of the order.
        copies_alike: copies have the same order (the user gave a seed).
        rank, world_size: which trainer this is.
        in_order: the order of the steps is that of the data; else that of their arrival.
        in_rounds: every rank reads all shards of an IterableDataset, its slice of rounds of like length.
    """

    guarantee: Guarantee
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
    def dealt(self) -> tuple[int, int]:
        """Which rank this is of how many that have shards of their own; (0, 1) where each has a part of every shard."""
        return (self.rank, self.world_size) if self.num_samples < 0 and not self.in_rounds else (0, 1)

    def known(self, num_copies: int) -> int:
        """How many streams there are, for all ranks."""
        return num_copies if self.guarantee.cut is Cut.COPIES else self.guarantee.num_shards

    def shards(self, num_copies: int) -> Sequence[int]:
        """This rank's streams: its share of an IterableDataset's, of an indexed dataset its slice of each."""
        if self.guarantee.cut is Cut.COPIES:
            return range(num_copies)
        rank, num_ranks = self.dealt
        return range(rank, self.guarantee.num_shards, num_ranks)

    def width(self, num_copies: int) -> int:
        """How many of them are read at a time."""
        if self.guarantee.cut is Cut.COPIES:
            return max(1, num_copies)
        return max(1, self.guarantee.width // self.dealt[1])

    def stream(self, shard: int, epoch: int) -> PlannedPass | ShardOrder:
        """One stream's order."""
        cut, num_shards = self.guarantee.cut, self.guarantee.num_shards
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
        return PlannedPass(plan, self.rank)

    @property
    def any_order(self) -> bool:
        """Whether steps are given as they come: of several streams whichever has one, of a single one any step."""
        return self.guarantee.cut is Cut.COPIES or not self.in_order

    def num_steps(self, epoch: int) -> int | None:
        """Steps of this rank in one pass; None when nobody knows."""
        if self.num_samples < 0 or self.guarantee.cut is Cut.COPIES:
            return None
        streams = (self.stream(shard, epoch) for shard in self.shards(0))
        return sum(stream.num_steps for stream in streams if isinstance(stream, PlannedPass))


class ShardedIterator(Iterator[Any]):
    """One pass over several streams from data workers.

    Args:
        stream: the loader's stream.
        division: how the pass is divided.
        seed: base of the random state of samples.
        epoch: the epoch.
        state: position to continue from, of `shard_state`; None for the beginning.
        owner: the loader object, kept alive for as long as it is iterated.
    """

    def __init__(
        self, stream: Stream, division: Division, seed: int, epoch: int, state: dict[str, Any] | None, owner: object
    ) -> None:
        assert stream.client is not None
        self._owner = owner
        self._stream, self._client = stream, stream.client
        self._division, self._seed, self._epoch = division, seed, epoch
        self._num_copies = int(state["copies"]) if state else max(1, self._client.num_data_workers)
        self._width = division.width(self._num_copies)
        self._interleave = _interleave(division, self._num_copies, state)
        self._any_order = division.any_order
        self._ahead = [(first, stop) for first, stop in state["ahead"]] if state else []
        self._sent = stream.definition()
        self._snapshots = dict(_snapshots_of(state))
        self._readers: dict[int, ShardReader | RankReader] = {}
        self._passes: list[Pass] = []
        self._open = True
        self._started = time.monotonic()
        self.position = int(state["step"]) if state else 0
        for place in self._interleave.slots:
            self._passes.append(self._begin(place))

    def shard_state(self) -> dict[str, Any]:
        """Position in each stream that is being read, as plain values."""
        ahead = [list(one) for one in self._passes[0].buffer.ahead()] if self._passes else []
        return _state(self._division, self.position, self._num_copies, ahead, self._snapshots, self._interleave)

    def _begin(self, place: Place) -> Pass:
        stream = self._division.stream(place.shard, self._epoch)
        order = stream.order if isinstance(stream, PlannedPass) else stream
        num_steps = stream.num_steps if isinstance(stream, PlannedPass) else -1
        at_most_once = self._division.guarantee.visitation == "at_most_once"
        return self._client.open_pass(
            self._sent.message,
            self._epoch,
            self._seed,
            order,
            place.step,
            num_steps,
            self._stream.min_window,
            sharers=min(self._width, len(self._interleave.slots)),
            at_most_once=at_most_once,
            in_order=not (self._division.any_order and self._division.guarantee.cut is Cut.STEPS),
            ahead=self._ahead,
            errors=self._stream.skipped.policy,
            snapshot=self._snapshots.get(place.shard, b""),
        )

    def __next__(self) -> Any:
        started = time.monotonic()
        while self._interleave.slots:
            number, item = self._take(started)
            if isinstance(item, Ended):
                self._end(number, item)
                continue
            self.position += 1
            place = self._interleave.slots[number]
            self._interleave.taken(number, self._passes[number].buffer.position - place.step)
            if isinstance(item, Delivered) and item.snapshot:
                self._snapshots[place.shard] = item.snapshot
            if isinstance(item, BatchFailed):
                raise rebuild_error(item)
            if isinstance(item.payload, LocalFailure):
                raise item.payload.error
            if item.num_skipped:
                self._stream.leave_out(self._epoch, self.position - 1, item.num_skipped, item.left_out)
            if item.num_samples == 0:
                continue
            waited_s = time.monotonic() - started
            self._stream.count(steps=1, samples=item.num_samples, bytes=item.num_bytes, wait_s=waited_s)
            return item.payload
        if self._open:
            self._stream.count(epochs=1)
        self.close()
        raise StopIteration

    def _take(self, started: float) -> tuple[int, Delivered | BatchFailed | Ended]:
        """The next step, or end, and the number of its place."""
        turn, total = self._interleave.next_slot, len(self._passes)
        order = [(turn + offset) % total for offset in range(total if self._any_order else 1)]
        timeout_s = self._stream.timeout_s
        lost = sum(one.num_lost for one in self._passes)
        try:
            chosen, item = self._client.take_of(
                [self._passes[number] for number in order], started + timeout_s if timeout_s > 0 else None
            )
        except TimeoutError:
            raise RuntimeError(f"DataLoader timed out after {timeout_s:g} seconds") from None
        self._stream.count(lost_steps=sum(one.num_lost for one in self._passes) - lost)
        number = order[chosen]
        if not isinstance(item, LocalFallback):
            self._client.say_streaming()
            return number, item
        self._client.say_local(item.reason)
        one = self._passes[number]
        made = self._make(self._interleave.slots[number].shard, item.step)
        if made is None:
            self._client.end_pass_at(one, item.step)
            return number, Ended.ENDED
        self._stream.count(local_steps=1)
        return number, self._client.put_local(one, made)

    def _make(self, shard: int, step: int) -> Delivered | None:
        """Make a step in this process; None when the stream has no such step."""
        policy = self._stream.skipped.policy
        try:
            stream = self._division.stream(shard, self._epoch)
            if isinstance(stream, PlannedPass):
                return self._stream.make_locally(self._sent, stream, step, self._seed, self._epoch)
            if shard not in self._readers:
                self._readers[shard] = open_shard(
                    self._stream.pipeline, stream, self._seed, self._epoch, skips=policy.on_error != "raise"
                )
            with generators_kept():
                reader = self._readers[shard]
                made = read_step(reader, step, self._snapshots.get(shard, b""), policy)
            if made is None:
                return None
            rest = made.num_skipped, made.left_out, reader.snapshot
            return Delivered(self._stream.pinned(made.batch), made.num_samples, 0, "local", 0, *rest)
        except SampleError as error:
            failure = error.user_error()
            return Delivered(LocalFailure(failure if isinstance(failure, Exception) else error), -1, 0, "local")
        except Exception as error:  # noqa: BLE001, user code may raise anything; raised in the step's place
            return Delivered(LocalFailure(error), -1, 0, "local")

    def _end(self, number: int, how: Ended) -> None:
        if how is Ended.LOST:
            self._stream.count(lost_shards=1)
        self._client.close_pass(self._passes[number])
        self._snapshots.pop(self._interleave.slots[number].shard, None)
        self._readers.pop(self._interleave.slots[number].shard, None)
        begun = self._interleave.ended(number)
        if begun is None:
            del self._passes[number]
        else:
            self._passes[number] = self._begin(begun)

    def close(self) -> None:
        """End the pass; safe to call twice."""
        if self._open:
            self._open = False
            self._stream.count(elapsed_s=time.monotonic() - self._started)
            for one in self._passes:
                self._client.close_pass(one)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self._stream.count(elapsed_s=time.monotonic() - self._started)
            for one in self._passes:
                self._client.abandon(one)


def _state(
    division: Division, step: int, copies: int, ahead: list[list[int]], snapshots: dict[int, bytes], order: Interleave
) -> dict[str, Any]:
    named = {str(shard): snapshot for shard, snapshot in snapshots.items()}
    rank = division.dealt[0]
    return {"rank": rank, "step": step, "copies": copies, "ahead": ahead, "snapshots": named} | order.state()


def _snapshots_of(state: dict[str, Any] | None) -> Iterator[tuple[int, bytes]]:
    """Where the readers of shards were, by shard."""
    for shard, snapshot in (state["snapshots"] if state else {}).items():
        yield int(shard), snapshot


def _interleave(division: Division, num_copies: int, state: dict[str, Any] | None) -> Interleave:
    order = Interleave(division.shards(num_copies), division.width(num_copies))
    if state is not None:
        order.load(state, division.known(num_copies))
    return order


def own_position(division: Division, state: Any) -> dict[str, Any]:
    """A saved position as this rank's: of all ranks' together (`data_state.merge_states`) its part.

    Raises:
        StateError: it is none of this division, or another rank's.
    """
    rank, num_ranks = division.dealt
    try:
        copies, step, whose = int(state["copies"]), int(state["step"]), state["rank"]
        ahead = [(int(first), int(stop)) for first, stop in state["ahead"]]
        dict(_snapshots_of(state))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StateError(f"the state has no position in the shards of this loader: {error!r}") from error
    if not 0 < copies <= _MAX_COPIES or step < 0 or any(not 0 <= first < stop for first, stop in ahead):
        raise StateError(f"the state has a damaged position in the shards of this loader: {state!r}")
    if whose is None:
        dealt = deal(state, division.known(copies), rank, num_ranks, division.width(copies))
        mine = {str(shard) for shard, _ in dealt["places"]}
        snapshots = {shard: snapshot for shard, snapshot in state["snapshots"].items() if shard in mine}
        state = {**state, **dealt, "rank": rank, "snapshots": snapshots}
    elif whose != rank:
        raise StateError(
            f"this is the state of rank {whose}, and this is rank {rank}: each rank of an IterableDataset has a state "
            "of its own (or load what merge_states() makes of all of them)"
        )
    _interleave(division, copies, state)
    return dict(state)


# --- in process -----------------------------------------------------------------------------------------------------


class _WholePass(torch.utils.data.IterableDataset[Any]):
    """The steps of a pass in their order: what was made, with its snapshot; a stream's end (None); or a failure."""

    def __init__(
        self,
        pipeline: Pipeline,
        division: Division,
        seed: int,
        epoch: int,
        state: dict[str, Any] | None,
        policy: ErrorPolicy,
    ) -> None:
        self._policy = policy
        self._pipeline, self._division, self._seed, self._epoch = pipeline, division, seed, epoch
        self._state = state

    def __iter__(self) -> Iterator[Any]:
        in_trainer = torch.utils.data.get_worker_info() is None
        order = _interleave(self._division, int(self._state["copies"]) if self._state else 1, self._state)
        readers: dict[int, ShardReader | RankReader] = {}
        ahead, self._snapshots = _ahead_of(self._state), dict(_snapshots_of(self._state))
        while order.slots:
            place = order.slots[order.next_slot]
            _skip_ahead(order, ahead)
            try:
                if in_trainer:
                    with generators_kept(self._pipeline.own_generators):
                        made = self._make(place, readers)
                else:
                    made = self._make(place, readers)
            except Exception as error:  # noqa: BLE001, user code may raise anything; raised in the step's place
                yield FailedStep(error.user_error() if isinstance(error, SampleError) else error, in_trainer)
                order.taken(order.next_slot)
                continue
            if made is None:
                yield None
                readers.pop(place.shard, None)
                order.ended(order.next_slot)
            else:
                yield made
                order.taken(order.next_slot)

    def _make(self, place: Place, readers: dict[int, ShardReader | RankReader]) -> tuple[MadeStep, bytes] | None:
        stream = self._division.stream(place.shard, self._epoch)
        if isinstance(stream, PlannedPass):
            indices = stream.indices(place.step)
            if indices is None:
                return None
            seeds = stream.seeds(place.step, indices, self._seed, self._epoch)
            return make_step(self._pipeline, indices, seeds, self._policy), b""
        if place.shard not in readers:
            skips = self._policy.on_error != "raise"
            readers[place.shard] = open_shard(self._pipeline, stream, self._seed, self._epoch, skips=skips)
        reader = readers[place.shard]
        made = read_step(reader, place.step, self._snapshots.get(place.shard, b""), self._policy)
        return None if made is None else (made, reader.snapshot)


def _ahead_of(state: dict[str, Any] | None) -> set[int]:
    """Steps of a single stream that were taken out of order, before the state was saved."""
    return {step for first, stop in (state["ahead"] if state else ()) for step in range(first, stop)}


def _skip_ahead(order: Interleave, ahead: set[int]) -> None:
    while order.slots[order.next_slot].step in ahead:
        order.taken(order.next_slot)


class LocalShardedIterator(LocalPass):
    """One pass over several streams in process: in the training thread, or with `num_workers` in one process beside it.

    One, because the order of the steps is that of the shards, whoever makes them.
    """

    def __init__(
        self,
        stream: Stream,
        division: Division,
        seed: int,
        epoch: int,
        state: dict[str, Any] | None,
        torch_options: dict[str, Any],
    ) -> None:
        self._division = division
        self._epoch = epoch
        self._num_copies = int(state["copies"]) if state else 1
        self._interleave = _interleave(division, self._num_copies, state)
        self._ahead, self._snapshots = _ahead_of(state), dict(_snapshots_of(state))
        self.position = int(state["step"]) if state else 0
        options = torch_options | {"num_workers": min(1, torch_options["num_workers"])}
        iterable = division.num_samples < 0
        pipeline = stream.pipeline if iterable else stream.pipeline.with_own_generators()
        begin = None if iterable else BeginWorker(pipeline, seed)
        loader = PlainLoader(
            _WholePass(pipeline, division, seed, epoch, state, stream.skipped.policy),
            batch_size=None,
            collate_fn=no_collate,
            generator=torch.Generator(),  # its own, so that the program's generators are not advanced
            # Of an IterableDataset each shard calls it, as a data worker of torch would.
            **options | {"worker_init_fn": begin},
        )
        self._iterator = iter(loader)
        super().__init__(stream)

    def shard_state(self) -> dict[str, Any]:
        """Position in each stream that is being read, as plain values."""
        first = self._interleave.slots[0].step if self._interleave.slots else 0
        ahead = [list(one) for one in as_ranges(sorted(step for step in self._ahead if step >= first))]
        return _state(self._division, self.position, self._num_copies, ahead, self._snapshots, self._interleave)

    def __next__(self) -> Any:
        started = time.monotonic()
        for item in self._iterator:
            _skip_ahead(self._interleave, self._ahead)
            shard = self._interleave.slots[self._interleave.next_slot].shard
            if item is None:
                self._snapshots.pop(shard, None)
                self._interleave.ended(self._interleave.next_slot)
                continue
            self.position += 1
            self._interleave.taken(self._interleave.next_slot)
            if isinstance(item, FailedStep):
                item.reraise()
            made, snapshot = item
            if snapshot:
                self._snapshots[shard] = snapshot
            if made.num_skipped:
                self._stream.leave_out(self._epoch, self.position - 1, made.num_skipped, made.left_out)
            if made.num_samples == 0:
                continue
            waited_s = time.monotonic() - started
            self._stream.count(steps=1, samples=made.num_samples, local_steps=1, wait_s=waited_s)
            return made.batch
        self._iterator = iter(())  # ends torch's processes
        if self._interleave.slots:
            raise early_end(self.position)
        self._end()
