"""Streaming for torch's own DataLoader over an IterableDataset, in a program that does not know hetstream.

torch gives each of N worker processes a copy of the dataset, and batch k is the next one of worker k mod N among those
that have more. Data workers play these N workers (`ops.torch_streams`), so the batches are torch's own.

That they are is seen in each pass: it begins with torch's own worker processes, which give the program its batches.
Meanwhile data workers make the same ones, and those are compared. When enough were equal and data workers are where the
program is, torch's processes end, and data workers go on. So no time is lost where data workers come late, and nothing
is where they differ: torch goes on.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import random
import time
from typing import Any, Protocol

import torch
import torch.distributed
from torch.utils.data import dataloader as torch_dataloader

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.loader.canary import Differs
from hetstream.mpi_dataworkers.loader.connection import LoaderConnection, SentPipeline
from hetstream.mpi_dataworkers.loader.local_workers import PlainLoader, forks
from hetstream.mpi_dataworkers.loader.pass_iterator import PassIterator
from hetstream.mpi_dataworkers.loader.remote_source import RemoteSource
from hetstream.mpi_dataworkers.loader.session import Ended, LoaderSession, LocalFallback, Step
from hetstream.mpi_dataworkers.loader.shards import Division, PassShards
from hetstream.mpi_dataworkers.loader.torch_calls import call_as_in, torch_options
from hetstream.mpi_dataworkers.loader.user_errors import is_of_sample, summary_of, timed_out
from hetstream.mpi_dataworkers.ops.batch_comparison import compare
from hetstream.mpi_dataworkers.ops.pipeline import generators_kept
from hetstream.mpi_dataworkers.ops.torch_streams import beginning_with, num_buffers, pack_states, places_of_shared
from hetstream.mpi_dataworkers.order.visitation import Cut, ShardingPlan, ShardingPolicy
from hetstream.mpi_dataworkers.process.config import rank_environment
from hetstream.mpi_dataworkers.process.handlers import others
from hetstream.mpi_dataworkers.wire.messages import Failure, WorkerSeeds

_log = logging.getLogger(__name__)
_TorchIterator: Any = torch_dataloader._BaseDataLoaderIter

# Batches of each worker that are compared at least, in a loader's first pass and in later ones.
_FIRST_OF_EACH, _LATER_OF_EACH = 2, 1
_LEAST_COMPARED = 8
# The number that is compared is drawn: up to 2 ** _DEEPER times as many, so that what shows late shows in some pass.
_DEEPER = 3.0
# For how long the program may wait until data workers are where it is, and of the pass so far.
_PAUSE_S, _PAUSE_SHARE = 2.0, 0.05
# Without any data worker for so long, torch's workers read all of the pass again: one that is lost comes back sooner.
_NONE_FOR_S = 30.0
_LOOK_AGAIN_S = 0.05
# Iterators of others that read a stream as torch's own does, but for the worker that begins.
_READ_AS_TORCH = {"litdata.streaming.dataloader._StreamingMultiProcessingDataLoaderIter"}
_KEPT_WITHIN_S = 5.0


class Keeper(Protocol):
    """What a loader object keeps from one iterator to the next; see `unmodified`."""

    connection: LoaderConnection | None

    def leave(self, reason: str) -> None:
        """Leave the service for good, and say why."""


class _NotYet(Exception):
    """The next step is not there."""


class StreamSource(RemoteSource):
    """The steps of a stream from data workers. What they do not make is not made here: it raises `Differs`.

    Attributes:
        until: when `take` has waited long enough, on the monotonic clock, s; it raises `_NotYet` then.
        kept: what the workers that have ended begin the next pass with, by number, if they are kept.
    """

    until = 0.0
    _without_since: float | None = None

    def __init__(self, connection: LoaderConnection, shards: PassShards, sent: SentPipeline) -> None:
        super().__init__(connection, shards, sent=sent)
        self.kept: dict[int, bytes] = {}
        self._are_kept = shards.seeds.workers is not None and shards.seeds.workers.are_kept

    def _end_shard(self, slot_index: int, how: Ended) -> None:
        session = self._sessions[slot_index]
        shard = self._shard_of[session.session_id]
        deadline = time.monotonic() + _KEPT_WITHIN_S
        # The dispatcher may have said first that it has ended.
        while self._are_kept and session.kept is None and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
        if session.kept:
            self.kept[shard] = session.kept
        super()._end_shard(slot_index, how)

    def _take_from(self, sessions: list[LoaderSession]) -> tuple[int, Step | LocalFallback | Ended]:
        timeout_s = self._connection.timeout_s
        last = time.monotonic() + timeout_s if timeout_s > 0 else None
        while True:
            deadline = self.until if last is None else min(self.until, last)
            step: Step | LocalFallback | Ended | None = None
            try:
                index, step = self._client.take(sessions, None if deadline == math.inf else deadline)
            except TimeoutError:
                pass  # by whose deadline is looked at below
            except HetstreamError as error:
                if self._client.is_inherited:  # torch's workers are not this process's, either
                    raise
                raise Differs(self.shards.position, str(error)) from error
            if step is not None and not isinstance(step, LocalFallback):
                self._without_since = None
                return index, step
            now = time.monotonic()
            if now >= self.until:
                raise _NotYet
            if last is not None and now >= last:
                raise timed_out(timeout_s)
            if step is None:
                continue
            # Data workers that are there may read again what one that was lost had read.
            self._without_since = None if step.is_late else self._without_since or now
            if self._without_since is not None and now - self._without_since > _NONE_FOR_S:
                raise Differs(self.shards.position, step.reason)
            time.sleep(_LOOK_AGAIN_S)

    def _look_at_failure(self, step: int, failure: Failure) -> None:  # noqa: ARG002
        # torch's own workers raise it where they raise it.
        raise Differs(self.shards.position, f"a data worker raises {failure.error_type[1]}: {summary_of(failure)}")


class StreamedStreamIter(_TorchIterator):  # type: ignore[misc]
    """torch's iterator of a DataLoader over an IterableDataset, whose batches come from data workers.

    Args:
        loader: a DataLoader of torch.
        kept: what it keeps; it has a connection to a service.
        sent: what data workers run.
        is_first: no pass of this loader has begun before.
    """

    def __init__(self, loader: Any, kept: Keeper, sent: SentPipeline, is_first: bool) -> None:
        self._kept, self._sent, self._is_first = kept, sent, is_first
        self._is_left = False  # torch's workers are to read again what the program has had, and to go on
        self._streamed: PassIterator | None = None
        self._plain: Any = None  # torch's own iterator
        self._history: list[tuple[int, bool]] = []  # of the passes of kept workers: batches, and whether it ended
        self._from_before: dict[int, bytes] = {}  # what kept workers begin with
        assert kept.connection is not None
        self._connection: LoaderConnection = kept.connection
        generator = loader.generator or torch.default_generator
        self._before = before = generator.get_state()  # it gives torch's workers the base seed of this pass
        call_as_in(torch_dataloader._MultiProcessingDataLoaderIter.__init__, "__init__", super().__init__, loader)
        # All of them are as the program is now, also those whose processes wait.
        self._torchs, self._spare = self._torchs_loader(loader, before), self._torchs_loader(loader, before)
        self._batch_size = loader.batch_size or 1
        self._held_states = pack_states(kept.connection.pipeline)
        self._plain = iter(self._torchs)
        try:
            self._spare.start_workers()
        except OSError:  # they are not needed yet
            _log.debug("torch's worker processes begin when they are needed", exc_info=True)
        self._reset(loader, first_iter=True)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin a pass; with persistent_workers, also the second one and those after it."""
        super()._reset(loader, first_iter)
        reason = ""
        if not first_iter:
            reason = self._end_pass()
        each = _FIRST_OF_EACH if self._is_first else _LATER_OF_EACH
        least = max(each * self._num_workers, _LEAST_COMPARED if self._is_first else 0)
        self._is_first = False
        self._num_to_compare = int(least * 2 ** random.Random().uniform(0, _DEEPER)) if self._plain is not None else 0
        self._num_given, self._is_over = 0, False
        self._copies: dict[int, Any] = {}  # of what torch's workers have given it, by step
        self._began, self._first_came = time.monotonic(), 0.0
        if reason:
            self._go_on_locally(reason)
        elif self._kept.connection is not None:
            num_written = len(self._sent.pickled.written)
            shards = _shards_of(
                loader, self._base_seed, self._held_states, self._history, self._from_before, num_written
            )
            self._source = StreamSource(self._connection, shards, self._sent)
            self._source.until = math.inf if self._plain is None else 0.0
            self._streamed = PassIterator(self._connection, self._source, owner=self._kept)

    def _end_pass(self) -> str:
        """Get ready for another pass of kept workers; gives why it cannot be made by data workers, or ""."""
        was_streamed = self._streamed is not None
        if was_streamed and self._plain is not None and self._is_over:
            self._come_to_the_end()
        self._history.append((self._num_given, self._is_over))
        if self._streamed is not None:
            self._streamed.close()
            self._streamed = None
        if self._plain is not None:
            self._plain = iter(self._torchs)
        if self._kept.connection is None:
            return ""
        if not self._is_over:
            return "the program has left a pass, and how far its kept workers were then, data workers do not know"
        if len(self._source.kept) < self._num_workers:
            return "what its kept workers hold at the end of a pass cannot be sent, or came too late"
        self._from_before = self._source.kept
        assert self._connection.sent_pipelines is not None
        try:
            self._sent = self._connection.sent_pipelines.with_shared_memory(self._sent)
        except PipelineError as error:
            return str(error)
        return ""

    def _come_to_the_end(self) -> None:
        """Have data workers come to the end of a pass that the program is through with, if that takes no longer than
        the program may wait for them."""
        with contextlib.suppress(Differs, _NotYet):
            self._come_to_the_program(self._longest_pause_s)
            self._source.take()

    def _torchs_loader(self, loader: Any, generator_state: torch.Tensor) -> PlainLoader:
        """The loader as it is without us; its workers have the base seed of this pass."""
        generator = torch.Generator()
        generator.set_state(generator_state)
        plain = PlainLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate_fn=loader.collate_fn,
            generator=generator,
            **torch_options(loader),
        )
        plain.first_step = _first_worker(loader)
        return plain

    def _next_data(self) -> Any:
        reason = ""
        try:
            if self._streamed is not None and self._plain is not None:
                self._look()
            if self._streamed is not None and self._plain is None:
                batch = next(self._streamed)
                # Not one more: where a handler of a signal has interrupted this, the next call gives that batch.
                self._num_given = self._source.shards.position
                return batch
        except StopIteration:
            self._is_over = True
            raise
        except Differs as found:
            reason = str(found)
        if reason:  # here, where `Differs` is not the context of what the program's own samples raise
            self._go_on_locally(reason)
        return self._next_of_torch()

    def _look(self) -> None:
        """Compare what data workers have made by now, and let them go on in the place of torch's workers, if they can.

        Raises:
            Differs: they cannot.
        """
        if self._kept.connection is None:  # another iterator of this loader has left, and has said why
            self._end_streaming()
            return
        with contextlib.suppress(_NotYet):
            self._come_to_the_program(0.0)
        if self._is_there():
            with contextlib.suppress(_NotYet):  # they were slower than was to be expected: torch's workers go on
                self._come_to_the_program(self._longest_pause_s)
                self._source.until = math.inf
                self._plain = None  # its processes end

    def _come_to_the_program(self, limit_s: float) -> None:
        """Have data workers come to where the program is, and compare on the way.

        Raises:
            _NotYet: they have not got there in time.
            Differs: a batch is not torch's own.
        """
        self._source.until = time.monotonic() + limit_s
        while self._source.shards.position < self._num_given:
            self._compare_next()

    @property
    def _longest_pause_s(self) -> float:
        return max(_PAUSE_S, _PAUSE_SHARE * (time.monotonic() - self._began))

    def _compare_next(self) -> None:
        """Move past the next step, which the program has."""
        number, found = self._source.shards.position, self._source.take()
        if found is None:
            raise Differs(number, f"data workers have {number} batches, and torch's own have more")
        if isinstance(found, Exception):
            raise Differs(number, f"a data worker raises {type(found).__name__}")
        self._first_came = self._first_came or time.monotonic()
        if number in self._copies:
            expected = self._copies[number]
            with generators_kept():
                try:
                    comparison = compare(found.payload, expected)
                except others() as error:
                    raise Differs(
                        number, f"batch {number} cannot be compared: {type(error).__name__}: {error}"
                    ) from error
            self._connection.count(compared_steps=1, differing_steps=bool(comparison.differences))
            if comparison.not_compared and self._connection.canary is not None:
                self._connection.canary.say(f"no rule compares {', '.join(comparison.not_compared[:3])}", "no rule")
            if comparison.differences:
                raise Differs(number, f"batch {number} of data workers is not torch's own: {comparison.differences[0]}")
        self._source.advance()
        self._copies.pop(number, None)

    def _is_there(self) -> bool:
        """Whether enough was compared, and data workers are where the program is, or will be soon."""
        position, now = self._source.shards.position, time.monotonic()
        if position < self._num_to_compare:
            return False
        missing_s = (self._num_given - position) * (now - self._first_came) / position
        return missing_s <= self._longest_pause_s

    def _next_of_torch(self) -> Any:
        if self._is_left:  # done again from its beginning where a handler of a signal has interrupted it
            self._plain = self._read_again()
            self._is_left = False
        if self._plain is None:
            raise StopIteration
        began = time.monotonic()
        try:
            batch = next(self._plain)
        except StopIteration:
            self._is_over = True
            if not self._persistent_workers:
                self._end_streaming()
            raise
        except Exception as error:
            if is_of_sample(error) and self._streamed is not None:
                # What follows in that worker process is torch's to say.
                self._leave(f"torch's own worker raises {type(error).__name__}, and goes on")
            raise
        number, self._num_given = self._num_given, self._num_given + 1
        if self._streamed is not None and number < self._num_to_compare:
            try:
                with generators_kept():
                    self._copies[number] = copy.deepcopy(batch)  # the program may write to it
            except others() as error:
                self._leave(f"its batches cannot be copied, and so not be compared: {type(error).__name__}: {error}")
        self._connection.count(steps=1, samples=self._batch_size, local_steps=1, wait_s=time.monotonic() - began)
        return batch

    def _go_on_locally(self, reason: str) -> None:
        """From here on torch's workers make all batches of this loader."""
        if self._plain is not None:
            self._leave(reason)
            return
        self._is_left = True
        number = self._num_given + sum(number for number, _ in self._history)
        self._leave(f"{reason}. Its own workers read {number} batches again that it has had" if number else reason)

    def _read_again(self) -> Any:
        """torch's own iterator behind what the program has had; with kept workers, also in the passes before."""
        self._torchs = self._spare
        self._spare.generator.set_state(self._before)
        self._spare._iterator = None
        for number, is_over in self._history:
            _drop(iter(self._spare), number + is_over)
        plain = iter(self._spare)
        _drop(plain, self._num_given)
        return plain

    def _leave(self, reason: str) -> None:
        self._end_streaming()
        self._kept.leave(reason)

    def close(self) -> None:
        """End its worker processes now, also where a traceback still holds it."""
        self._end_streaming()
        plain, self._plain = self._plain, None
        if plain is not None:
            plain._shutdown_workers()
        self._spare.end_waiting()

    def _end_streaming(self) -> None:
        streamed, self._streamed = self._streamed, None
        self._copies.clear()
        if streamed is not None:
            streamed.close()


def _drop(plain: Any, num_batches: int) -> None:
    """Have torch's workers make batches that the program has had, with what its samples raised."""
    for _ in range(num_batches):
        try:
            next(plain)
        except StopIteration:
            return
        except Exception as error:
            if not is_of_sample(error):
                raise


def _shards_of(
    loader: Any,
    base_seed: int,
    held: bytes,
    history: list[tuple[int, bool]],
    from_before: dict[int, bytes],
    num_written: int,
) -> PassShards:
    """One stream of steps for each of torch's workers, read in turn; `num_written` buffers are in shared memory."""
    number, are_kept, distributed = loader.num_workers, loader.persistent_workers, torch.distributed
    is_known = distributed.is_available() and distributed.is_initialized()
    rank, world_size = (distributed.get_rank(), distributed.get_world_size()) if is_known else (0, 0)
    shared = places_of_shared(loader.dataset) if are_kept else []
    shares_more = are_kept and num_written != num_buffers(loader.dataset, shared)
    seeds = WorkerSeeds(
        base_seed, len(history), [], are_kept, rank, world_size, rank_environment(), shared, shares_more, held
    )
    plan = ShardingPlan(ShardingPolicy.HINT, "exactly_once", Cut.ITSELF, number, number)
    division = Division(plan, -1, loader.batch_size or 0, loader.drop_last, False, 0, False, 0, 1)
    shards = PassShards.divided(division, base_seed, len(history), 1, None, worker_seeds=seeds)
    shards.next_slot = _first_worker(loader)
    shards.snapshots = {shard: beginning_with(kept) for shard, kept in from_before.items()}
    return shards


def reads_as_torch(kind: Any, loader: Any) -> bool:
    """Whether iterators of a class that is not torch's give a stream's batches as torch's do."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    profiles = getattr(loader, "_profile_batches", False) or getattr(loader, "_profile_cprofile", False)
    return name in _READ_AS_TORCH and isinstance(loader.dataset, torch.utils.data.IterableDataset) and not profiles


def _first_worker(loader: Any) -> int:
    """The worker that makes a pass's first batch: LitData's loader goes on with the one whose turn it was."""
    resumed = getattr(loader, "restore", False) and getattr(loader, "_latest_worker_idx", 0)
    return int(resumed) % int(loader.num_workers) if resumed else 0


def why_no_stream(loader: Any) -> str | None:
    """Why a torch DataLoader over an IterableDataset stays local, or None."""
    if isinstance(loader.dataset, torch.utils.data.IterDataPipe):
        return "torch gives its DataPipes random numbers that all workers share. To stream it, use an IterableDataset"
    if not forks(None):
        return "its workers are not forked: what they begin with is not what the program has now"
    return None
