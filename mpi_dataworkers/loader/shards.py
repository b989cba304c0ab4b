"""A pass that is divided into streams of steps: shards of an IterableDataset, parts or copies of an indexed one.

Each stream that is being read is a session of its own with the service; `interleave.Interleave` says whose step is
next. Used by `data_loader.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch.utils.data

from hetstream.mpi_dataworkers.loader.delivered import Delivered, Ended, LocalFallback
from hetstream.mpi_dataworkers.loader.division import Division, interleave_of, snapshots_of
from hetstream.mpi_dataworkers.loader.indexed import LocalEpoch
from hetstream.mpi_dataworkers.loader.loader_connection import LoaderConnection
from hetstream.mpi_dataworkers.loader.local_workers import BeginWorker, FailedStep, PlainLoader, early_end, no_collate
from hetstream.mpi_dataworkers.loader.order import PlannedSteps
from hetstream.mpi_dataworkers.loader.session import LoaderSession, SessionRequest
from hetstream.mpi_dataworkers.loader.user_errors import LocalFailure, rebuild_error
from hetstream.mpi_dataworkers.ops.iterable import ShardReader
from hetstream.mpi_dataworkers.ops.pipeline import MadeStep, Pipeline, SampleError, generators_kept, make_step
from hetstream.mpi_dataworkers.ops.rounds import RankReader, open_shard, read_step
from hetstream.mpi_dataworkers.order.interleave import Interleave, Place
from hetstream.mpi_dataworkers.order.reorder import as_ranges
from hetstream.mpi_dataworkers.order.visitation import Cut
from hetstream.mpi_dataworkers.wire.messages import BatchFailed, ErrorPolicy


class ShardedIterator(Iterator[Any]):
    """One pass over several streams from data workers.

    Args:
        connection: the loader's.
        division: how the pass is divided.
        seed: base of the random state of samples.
        epoch: the epoch.
        state: position to continue from, of `shard_state`; None for the beginning.
        owner: the loader object, kept alive for as long as it is iterated.
    """

    def __init__(
        self,
        connection: LoaderConnection,
        division: Division,
        seed: int,
        epoch: int,
        state: dict[str, Any] | None,
        owner: object,
    ) -> None:
        assert connection.client is not None
        self._owner = owner
        self._connection, self._client = connection, connection.client
        self._division, self._seed, self._epoch = division, seed, epoch
        self._num_copies = int(state["copies"]) if state else max(1, self._client.num_data_workers)
        self._width = division.width(self._num_copies)
        self._interleave = interleave_of(division, self._num_copies, state)
        self._any_order = division.any_order
        self._ahead = [(first, stop) for first, stop in state["ahead"]] if state else []
        self._sent = connection.definition()
        self._snapshots = dict(snapshots_of(state))
        self._readers: dict[int, ShardReader | RankReader] = {}
        self._sessions: list[LoaderSession] = []
        self._open = True
        self._started = time.monotonic()
        self.position = int(state["step"]) if state else 0
        for place in self._interleave.slots:
            self._sessions.append(self._open_session(place))

    def shard_state(self) -> dict[str, Any]:
        """Position in each stream that is being read, as plain values."""
        ahead = [list(steps) for steps in self._sessions[0].buffer.ahead()] if self._sessions else []
        return _state(self._division, self.position, self._num_copies, ahead, self._snapshots, self._interleave)

    def _open_session(self, place: Place) -> LoaderSession:
        steps = self._division.steps_of(place.shard, self._epoch)
        request = SessionRequest(
            definition=self._sent.message,
            epoch=self._epoch,
            seed=self._seed,
            order=steps.order if isinstance(steps, PlannedSteps) else steps,
            first_step=place.step,
            num_steps=steps.num_steps if isinstance(steps, PlannedSteps) else -1,
            min_window=self._connection.min_window,
            errors=self._connection.skipped.policy,
            sharers=min(self._width, len(self._interleave.slots)),
            at_most_once=self._division.guarantee.visitation == "at_most_once",
            in_order=not (self._division.any_order and self._division.guarantee.cut is Cut.STEPS),
            ahead=self._ahead,
            snapshot=self._snapshots.get(place.shard, b""),
        )
        return self._client.open_session(request)

    def __next__(self) -> Any:
        started = time.monotonic()
        while self._interleave.slots:
            number, item = self._take(started)
            if isinstance(item, Ended):
                self._end(number, item)
                continue
            self.position += 1
            place = self._interleave.slots[number]
            self._interleave.taken(number, self._sessions[number].buffer.position - place.step)
            if isinstance(item, Delivered) and item.snapshot:
                self._snapshots[place.shard] = item.snapshot
            if isinstance(item, BatchFailed):
                raise rebuild_error(item)
            if isinstance(item.payload, LocalFailure):
                raise item.payload.error
            if item.num_skipped:
                self._connection.leave_out(self._epoch, self.position - 1, item.num_skipped, item.left_out)
            if item.num_samples == 0:
                continue
            waited_s = time.monotonic() - started
            self._connection.count(steps=1, samples=item.num_samples, bytes=item.num_bytes, wait_s=waited_s)
            return item.payload
        if self._open:
            self._connection.count(epochs=1)
        self.close()
        raise StopIteration

    def _take(self, started: float) -> tuple[int, Delivered | BatchFailed | Ended]:
        """The next step, or end, and the number of its place."""
        turn, total = self._interleave.next_slot, len(self._sessions)
        order = [(turn + offset) % total for offset in range(total if self._any_order else 1)]
        timeout_s = self._connection.timeout_s
        lost = sum(session.num_lost for session in self._sessions)
        try:
            chosen, item = self._client.take(
                [self._sessions[number] for number in order], started + timeout_s if timeout_s > 0 else None
            )
        except TimeoutError:
            raise RuntimeError(f"DataLoader timed out after {timeout_s:g} seconds") from None
        self._connection.count(lost_steps=sum(session.num_lost for session in self._sessions) - lost)
        number = order[chosen]
        if not isinstance(item, LocalFallback):
            self._client.say_streaming()
            return number, item
        self._client.say_local(item.reason)
        session = self._sessions[number]
        made = self._make(self._interleave.slots[number].shard, item.step)
        if made is None:
            self._client.end_session_at(session, item.step)
            return number, Ended.ENDED
        self._connection.count(local_steps=1)
        return number, self._client.put_local(session, made)

    def _make(self, shard: int, step: int) -> Delivered | None:
        """Make a step in this process; None when the stream has no such step."""
        policy = self._connection.skipped.policy
        try:
            steps = self._division.steps_of(shard, self._epoch)
            if isinstance(steps, PlannedSteps):
                return self._connection.make_locally(self._sent, steps, step, self._seed, self._epoch)
            if shard not in self._readers:
                self._readers[shard] = open_shard(
                    self._connection.pipeline, steps, self._seed, self._epoch, skips=policy.on_error != "raise"
                )
            with generators_kept():
                reader = self._readers[shard]
                made = read_step(reader, step, self._snapshots.get(shard, b""), policy)
            if made is None:
                return None
            return Delivered(
                self._connection.pinned(made.batch),
                made.num_samples,
                0,
                "local",
                num_skipped=made.num_skipped,
                left_out=made.left_out,
                snapshot=reader.snapshot,
            )
        except SampleError as error:
            failure = error.user_error()
            return Delivered(LocalFailure(failure if isinstance(failure, Exception) else error), -1, 0, "local")
        except Exception as error:  # noqa: BLE001, user code may raise anything; raised in the step's place
            return Delivered(LocalFailure(error), -1, 0, "local")

    def _end(self, number: int, how: Ended) -> None:
        if how is Ended.LOST:
            self._connection.count(lost_shards=1)
        self._client.close_session(self._sessions[number])
        self._snapshots.pop(self._interleave.slots[number].shard, None)
        self._readers.pop(self._interleave.slots[number].shard, None)
        begun = self._interleave.ended(number)
        if begun is None:
            del self._sessions[number]
        else:
            self._sessions[number] = self._open_session(begun)

    def close(self) -> None:
        """End the pass; safe to call twice."""
        if self._open:
            self._open = False
            self._connection.count(elapsed_s=time.monotonic() - self._started)
            for session in self._sessions:
                self._client.close_session(session)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self._connection.count(elapsed_s=time.monotonic() - self._started)
            for session in self._sessions:
                self._client.abandon(session)


def _state(
    division: Division, step: int, copies: int, ahead: list[list[int]], snapshots: dict[int, bytes], order: Interleave
) -> dict[str, Any]:
    named = {str(shard): snapshot for shard, snapshot in snapshots.items()}
    rank = division.dealt[0]
    return {"rank": rank, "step": step, "copies": copies, "ahead": ahead, "snapshots": named} | order.state()


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
        order = interleave_of(self._division, int(self._state["copies"]) if self._state else 1, self._state)
        readers: dict[int, ShardReader | RankReader] = {}
        ahead, self._snapshots = _ahead_of(self._state), dict(snapshots_of(self._state))
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
        steps = self._division.steps_of(place.shard, self._epoch)
        if isinstance(steps, PlannedSteps):
            indices = steps.indices(place.step)
            if indices is None:
                return None
            seeds = steps.seeds(place.step, indices, self._seed, self._epoch)
            return make_step(self._pipeline, indices, seeds, self._policy), b""
        if place.shard not in readers:
            skips = self._policy.on_error != "raise"
            readers[place.shard] = open_shard(self._pipeline, steps, self._seed, self._epoch, skips=skips)
        reader = readers[place.shard]
        made = read_step(reader, place.step, self._snapshots.get(place.shard, b""), self._policy)
        return None if made is None else (made, reader.snapshot)


def _ahead_of(state: dict[str, Any] | None) -> set[int]:
    """Steps of a single stream that were taken out of order, before the state was saved."""
    return {step for first, stop in (state["ahead"] if state else ()) for step in range(first, stop)}


def _skip_ahead(order: Interleave, ahead: set[int]) -> None:
    while order.slots[order.next_slot].step in ahead:
        order.taken(order.next_slot)


class LocalShardedIterator(LocalEpoch):
    """One pass over several streams in process: in the training thread, or with `num_workers` in one process beside it.

    One, because the order of the steps is that of the shards, whoever makes them.
    """

    def __init__(
        self,
        connection: LoaderConnection,
        division: Division,
        seed: int,
        epoch: int,
        state: dict[str, Any] | None,
        torch_options: dict[str, Any],
    ) -> None:
        self._division = division
        self._epoch = epoch
        self._num_copies = int(state["copies"]) if state else 1
        self._interleave = interleave_of(division, self._num_copies, state)
        self._ahead, self._snapshots = _ahead_of(state), dict(snapshots_of(state))
        self.position = int(state["step"]) if state else 0
        options = torch_options | {"num_workers": min(1, torch_options["num_workers"])}
        iterable = division.num_samples < 0
        pipeline = connection.pipeline if iterable else connection.pipeline.with_own_generators()
        begin = None if iterable else BeginWorker(pipeline, seed)
        loader = PlainLoader(
            _WholePass(pipeline, division, seed, epoch, state, connection.skipped.policy),
            batch_size=None,
            collate_fn=no_collate,
            generator=torch.Generator(),  # its own, so that the program's generators are not advanced
            # Of an IterableDataset each shard calls it, as a data worker of torch would.
            **options | {"worker_init_fn": begin},
        )
        self._iterator = iter(loader)
        super().__init__(connection)

    def shard_state(self) -> dict[str, Any]:
        """Position in each stream that is being read, as plain values."""
        first = self._interleave.slots[0].step if self._interleave.slots else 0
        ahead = [list(steps) for steps in as_ranges(sorted(step for step in self._ahead if step >= first))]
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
                self._connection.leave_out(self._epoch, self.position - 1, made.num_skipped, made.left_out)
            if made.num_samples == 0:
                continue
            waited_s = time.monotonic() - started
            self._connection.count(steps=1, samples=made.num_samples, local_steps=1, wait_s=waited_s)
            return made.batch
        self._iterator = iter(())  # ends torch's processes
        if self._interleave.slots:
            raise early_end(self.position)
        self._end()
