"""Makes the batch of a leased step: from the cache, by a shard's reader, or from the samples of its indices.

User code runs here, in the main thread of `worker.py`. Whatever it raises becomes the failure of the step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.changes import acts_on_files, changed_by
from hetstream.mpi_dataworkers.ops.index_form import INTS, IndexForm, unpack_indices
from hetstream.mpi_dataworkers.ops.pipeline import (
    MadeStep,
    Pipeline,
    SampleError,
    describe_failure,
    leave_out,
    use_one_thread,
    without,
)
from hetstream.mpi_dataworkers.ops.streams import RankReader, Shard, ShardReader, SharedRounds, open_shard
from hetstream.mpi_dataworkers.ops.torch_streams import TorchsWorker, follow_threads
from hetstream.mpi_dataworkers.ops.tree import flatten
from hetstream.mpi_dataworkers.order.bucketing import LengthBuckets, plan_of
from hetstream.mpi_dataworkers.order.reorder import as_ranges
from hetstream.mpi_dataworkers.order.sharding import Indices, SampleSeeds
from hetstream.mpi_dataworkers.process.children import ForksEndHere
from hetstream.mpi_dataworkers.sources import reads_apart
from hetstream.mpi_dataworkers.threads import ThreadTeam
from hetstream.mpi_dataworkers.wire.codec import FUSE_BELOW_BYTES, Buffer, Leaf, Parcel, fuse, shared_bytes, size_of
from hetstream.mpi_dataworkers.wire.messages import (
    Batch,
    Batches,
    Delivery,
    EndOfShard,
    FinishLease,
    GrantLease,
    ListedOrder,
    PlannedOrder,
    Ranges,
    SessionSpec,
    ShardOrder,
)
from hetstream.mpi_dataworkers.wire.pipeline_transfer import HandoverFailed
from hetstream.mpi_dataworkers.worker.leases import DispatcherConnection, HeldLeases, LeaseGone
from hetstream.mpi_dataworkers.worker.pipelines import Pipelines, StepFailed
from hetstream.mpi_dataworkers.worker.process import EarlierStage, WorkPage

# Small batches that are made in quick succession leave a data worker in one message. Pure; used by `worker.py`.
#
# A message has its price (system calls and thread switches on both sides), whatever its size. Each step in it is still
# a batch of its own to the loader, which takes it in or drops it by its own step and token.

# What one message gathers at most: many times what its price buys in copies, little against a loader's window, and
# below the 4 MiB from which NumPy asks for huge pages: most messages are not full.
GATHER_BYTES = 3 << 20
# No finished batch waits longer than this for company, if the steps go on taking as long as they do.
GATHER_S = 0.001


class Gatherer:
    """What a data worker has made for one loader and not yet sent, in order.

    Args:
        room: lends memory from which the transport sends without a copy, or None where it has none of that size.
    """

    def __init__(self, room: Callable[[int], memoryview | None] = lambda _: None) -> None:
        self._lend = room
        self._ready: list[tuple[Delivery, Sequence[Leaf]]] = []
        self._batches: list[Batch] = []
        self._parcel: Parcel | None = None
        self._since = 0.0
        self._room = 0

    def place(self, buffers: Sequence[Leaf], now: float) -> list[tuple[int, int, int]]:
        """Find places in the open message for a batch that is `add`ed next; small buffers are copied there.

        Args:
            buffers: of its tensors.
            now: when it was made, s.
        """
        self._room = shared_bytes(buffers)
        if self._parcel is not None and not self._parcel.has_room(self._room):
            self._close()
        if self._parcel is None:
            self._parcel, self._since = self._new_parcel(buffers), now
        return self._parcel.add(buffers)

    def _new_parcel(self, buffers: Sequence[Leaf]) -> Parcel:
        num_bytes = max(self._room, GATHER_BYTES)
        # Large buffers leave from where they lie, and the transport lays them out itself.
        are_small = all(size_of(buffer) < FUSE_BELOW_BYTES for buffer in buffers)
        return Parcel(num_bytes, self._lend(num_bytes) if are_small else None)

    def add(self, batch: Batch) -> None:
        """Add the batch whose buffers were placed last."""
        self._batches.append(batch)

    def add_alone(self, delivery: Delivery, frames: Sequence[Leaf]) -> None:
        """Add a message of its own, behind all that was added before."""
        self._close()
        self._ready.append((delivery, frames))

    def due(self, now: float, step_s: float) -> list[tuple[Delivery, Sequence[Leaf]]]:
        """Take out what is to be sent now.

        Args:
            now: the time, s.
            step_s: what the last step took; the next one will take about as long.
        """
        parcel = self._parcel
        if parcel is not None:
            is_full = parcel.has_large or not parcel.has_room(max(1, self._room))
            if is_full or now + step_s > self._since + GATHER_S:
                self._close()
        ready, self._ready = self._ready, []
        return ready

    def rest(self) -> list[tuple[Delivery, Sequence[Leaf]]]:
        """Take out all that is left."""
        self._close()
        ready, self._ready = self._ready, []
        return ready

    def _close(self) -> None:
        if self._parcel is not None:
            header = self._batches[0] if len(self._batches) == 1 else Batches(self._batches)
            self._ready.append((header, self._parcel.frames()))
            self._parcel, self._batches = None, []


# A data worker's sliding window of finished batches, for loaders that read the same stream. Pure: no socket, no clock.
#
# Used for sessions that share (`messages.Sharing`). What is kept is the flattened batch, ready to be sent
# again: several jobs' copies of one step are one piece of memory. The oldest batches leave first.


@dataclass(frozen=True)
class CachedBatch:
    """A flattened batch: what `ops.tree.flatten` and `codec.fuse` made of it. Nobody writes to its frames."""

    num_samples: int
    spec: bytes
    buffers: list[tuple[int, int, int]]
    frames: list[Buffer]

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        return len(self.spec) + sum(memoryview(frame).nbytes for frame in self.frames)


class BatchCache:
    """Finished batches by (share key, position), the newest that fit.

    Args:
        limit_bytes: most bytes to hold; a batch that is larger alone is not kept.

    Attributes:
        num_bytes: what it holds now.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.num_bytes = 0
        self._limit_bytes = limit_bytes
        self._batches: OrderedDict[tuple[str, int], CachedBatch] = OrderedDict()
        self._dropped: defaultdict[str, list[int]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._batches)

    def get(self, key: str, position: int) -> CachedBatch | None:
        """Return the batch, if it is still here."""
        return self._batches.get((key, position))

    def put(self, key: str, position: int, batch: CachedBatch) -> None:
        """Keep a batch and drop the oldest ones that no longer fit beside it."""
        if (key, position) in self._batches:
            return
        self._batches[key, position] = batch
        self.num_bytes += batch.num_bytes
        while self.num_bytes > self._limit_bytes:
            (old_key, old_position), old = self._batches.popitem(last=False)
            self.num_bytes -= old.num_bytes
            self._dropped[old_key].append(old_position)

    def take_dropped(self) -> dict[str, Ranges]:
        """Return positions dropped since the last call, by share key, as ascending ranges [first, stop)."""
        if not self._dropped:
            return {}
        dropped, self._dropped = self._dropped, defaultdict(list)
        return {key: as_ranges(sorted(positions)) for key, positions in dropped.items()}


# Which samples a leased step has. Pure.


def place_of(lease: GrantLease, step: int) -> tuple[int, int, int]:
    """Epoch and step whose samples a leased step has, and its position in the stream that its session shares.

    They are its own but in a shared stream in window mode, which goes on from epoch to epoch.
    """
    session = lease.session
    if session.sharing is None:
        return session.epoch, step, step
    position = session.epoch * session.sharing.num_steps + step + lease.shift
    return *divmod(position, session.sharing.num_steps), position


def indices_of(
    lease: GrantLease, epoch: int, step: int, buckets: LengthBuckets | None = None
) -> tuple[Indices, IndexForm]:
    """Sample indices of a step, int64, and the form in which the dataset is asked; `buckets` are the pipeline's."""
    order = lease.session.order
    if isinstance(order, PlannedOrder):
        return plan_of(order, epoch, buckets if order.bucketed else None).indices(step, order.rank), INTS
    if lease.steps is None or not isinstance(order, ListedOrder):
        raise PipelineError(f"lease {lease.token} names no samples for step {step} of a listed order")
    counts = np.frombuffer(lease.steps.counts, dtype="<i4")
    number = step - lease.steps.first_step
    first = int(counts[:number].sum())
    numbers = np.frombuffer(lease.steps.indices, dtype="<i8")[first : first + int(counts[number])]
    return unpack_indices(numbers, order.batched)


_log = logging.getLogger(__name__)


class StepMaker:
    """Makes steps, one after the other. Of the main thread.

    Args:
        pipelines: of this process.
        leases: say which sessions go on.
        dispatcher: is told where a shard ends.
        page: where the process says what it is doing.
        cache_bytes: finished batches to keep for other loaders that share them.
        num_threads: that make the samples of a batch, where the dataset is thread-safe.
        earlier: has the batches that a GPU stage begins with; None in a data worker without a GPU.
    """

    def __init__(
        self,
        pipelines: Pipelines,
        leases: HeldLeases,
        dispatcher: DispatcherConnection,
        page: WorkPage,
        cache_bytes: int,
        num_threads: int,
        earlier: EarlierStage | None = None,
    ) -> None:
        self._earlier = earlier
        self._pipelines, self._leases, self._dispatcher, self._page = pipelines, leases, dispatcher, page
        self._cache = BatchCache(cache_bytes)
        self._team = ThreadTeam(num_threads, use_one_thread) if num_threads > 1 else None
        self._said_one_thread = False
        self._readers: dict[str, ShardReader | RankReader | TorchsWorker] = {}  # by session
        self._rounds = SharedRounds()
        self._tried: set[str] = set()  # pipelines of which a sample was made twice

    def close(self) -> None:
        """End its threads."""
        self.rest()
        if self._team is not None:
            self._team.close()

    def rest(self) -> None:
        """No session goes on: leave the stage before alone."""
        if self._earlier is not None:
            self._earlier.close()

    def make(self, lease: GrantLease, step: int, gathered: Gatherer) -> bool:
        """Make a step's batch, or take it from the cache, and put it where it leaves from.

        Returns:
            Whether there are more steps, as far as this one shows.

        Raises:
            StepFailed: user code raised.
            LeaseGone, ForkedAnew, OtherProgram, HandoverFailed: there is no pipeline to make it with.
        """
        session = lease.session
        key = session.sharing.key if session.sharing is not None else ""
        position = place_of(lease, step)[2] if key else 0
        names = session.session_id, step, lease.token
        lacking = without(session.errors, lease.left_out.get(step, []))
        cached = self._cache.get(key, position) if key and not lacking else None
        if cached is not None:
            again = Batch(*names, cached.num_samples, cached.spec, cached.buffers, "cache", lease.shift)
            gathered.add_alone(again, cached.frames)
            return True
        result = self._run_user_code(lease, step, lacking)
        reader = self._readers.get(session.session_id)
        if result is None:
            assert reader is not None
            end = EndOfShard(session.session_id, reader.num_steps, lease.token)
            kept = reader.kept() if isinstance(reader, TorchsWorker) else b""
            gathered.add_alone(msgspec.structs.replace(end, kept=kept), [])
            self._dispatcher.tell(end)  # before the lease is settled
            return False
        made, spec, buffers = result
        origin: Literal["made", "again"] = "again" if lease.again else "made"
        if key and not lacking:
            frames, places = fuse(buffers)
            self._cache.put(key, position, CachedBatch(made.num_samples, spec, places, frames))
            gathered.add_alone(Batch(*names, made.num_samples, spec, places, origin, lease.shift), frames)
        else:
            places = gathered.place(buffers, time.monotonic())
            snapshot = reader.snapshot if reader is not None else b""
            report = made.num_skipped, made.left_out, snapshot
            header = Batch(*names, made.num_samples, spec, places, origin, lease.shift, *report, made.wrote)
            gathered.add(msgspec.structs.replace(header, cache=made.cache) if made.cache is not None else header)
        return True

    def finished(self, lease: GrantLease, busy_s: float, waited_s: float) -> FinishLease:
        """Return what to tell the dispatcher when all steps of a lease were made.

        Args:
            lease: that was worked on.
            busy_s: how long that took, without `waited_s`. With the waits for the stage before, which its loader tells.
            waited_s: how long sending waited.
        """
        reader = self._readers.get(lease.session.session_id)
        dropped = self._cache.take_dropped()
        if reader is None:
            return FinishLease(lease.token, busy_s, dropped, waited_s=waited_s)
        snapshot, reader.snapshot = reader.snapshot, b""  # it is told once
        return FinishLease(lease.token, busy_s, dropped, snapshot, reader.snapshot_step, waited_s)

    def _run_user_code(
        self, lease: GrantLease, step: int, lacking: set[int]
    ) -> tuple[MadeStep, bytes, list[Leaf]] | None:
        """Make a step and take its batch apart; None where the shard has no such step."""
        session = lease.session
        with ForksEndHere():
            pipeline = self._pipelines.enter(lease, step)
            self._say_if_threads_do_not_help(pipeline)
            try:
                if isinstance(session.order, ShardOrder):
                    reader = self._reader(session, session.order, pipeline, lease.snapshot)
                    made = reader.read(step, lease.snapshot, lease.left_out.get(step, []))
                    if made is None:
                        return None
                else:
                    with acts_on_files() as found:
                        made = self._make_of_indices(lease, step, lacking, pipeline)
                    if found.act:
                        made = msgspec.structs.replace(made, wrote=found.act)
                return made, *flatten(made.batch)
            except (StepFailed, LeaseGone, HandoverFailed):  # of the stage before
                raise
            except PipelineError as error:
                raise StepFailed(describe_failure(error, is_final=True)) from error
            except Exception as error:
                _log.info("session=%s step=%d failed: %r", session.session_id, step, error)
                raise StepFailed(describe_failure(error)) from error
            except BaseException as error:
                # What passes `except Exception`, as sys.exit() does, is no reason to end: others are served here too.
                _log.warning("session=%s step=%d: user code raised %s", session.session_id, step, type(error).__name__)
                self._readers.pop(session.session_id, None)
                work = self._page.read()
                failed = SampleError(work.sample_index if work is not None else -1)
                failed.__cause__ = error
                raise StepFailed(describe_failure(failed)) from error

    def _make_of_indices(self, lease: GrantLease, step: int, lacking: set[int], pipeline: Pipeline) -> MadeStep:
        session = lease.session
        epoch, epoch_step, _ = place_of(lease, step)
        indices, form = indices_of(lease, epoch, epoch_step, pipeline.buckets)
        listed_step = None if isinstance(session.order, PlannedOrder) else step
        pass_seeds = self._pipelines.seeds_of(session)
        seeds = pass_seeds.of_step(indices, listed_step, epoch)
        kept, their_seeds = leave_out(indices, seeds, lacking) if lacking else (indices, seeds)
        left_out = lease.left_out.get(step, [])
        if len(kept) == 0:
            return MadeStep(None, 0, len(indices), left_out)
        earlier = self._earlier if pipeline.gpu_stage is not None else None
        if earlier is not None:
            self._page.rest()  # no user code runs while it waits
            taken = earlier.take(lease, step)
            if taken is not None:
                return self._finished(taken, indices, seeds, pipeline, lease)
        is_shared = session.sharing is not None  # each of its samples is made once for all
        if step == 0 and session.worker_seeds is None and not is_shared and session.pipeline_id not in self._tried:
            self._tried.add(session.pipeline_id)
            _refuse_changes(
                replace(pipeline, cache=None),
                kept[:1],
                pass_seeds.of_step(kept[:1], listed_step, epoch),
                self._page,
                form,
            )
        # A step that has failed before is made sample by sample: what ends the process is then at fault.
        team = None if step in lease.left_out else self._team
        began = time.monotonic()
        first = pipeline if earlier is None else pipeline.before_gpu
        batch = first.make_batch(kept, their_seeds, self._page, team, form)
        if earlier is not None:
            earlier.missed(time.monotonic() - began)
            batch = pipeline.finished(batch, their_seeds[0])
        self._pipelines.check_writes(session.pipeline_id)
        cache = None if pipeline.cache is None else pipeline.cache.take_report()
        return MadeStep(batch, len(kept), len(indices) - len(kept), left_out, cache=cache)

    def _finished(
        self, earlier: MadeStep, indices: Indices, seeds: SampleSeeds, pipeline: Pipeline, lease: GrantLease
    ) -> MadeStep:
        """Make a step of what the stage before has made of it."""
        if earlier.num_samples == 0:
            return earlier
        _, their_seeds = leave_out(indices, seeds, without(lease.session.errors, earlier.left_out))
        self._page.at_sample(-1)
        return msgspec.structs.replace(earlier, batch=pipeline.finished(earlier.batch, their_seeds[0]))

    def _reader(
        self, session: SessionSpec, order: ShardOrder, pipeline: Pipeline, snapshot: bytes
    ) -> ShardReader | RankReader | TorchsWorker:
        """The shard's reader, which stays where the last lease left it."""
        if session.session_id not in self._readers:
            for session_id in self._readers.keys() - self._leases.sessions.keys():
                del self._readers[session_id]
            if session.worker_seeds is not None:
                if session.worker_seeds.passes_before and not snapshot:
                    raise PipelineError("what its worker process had kept is lost")
                follow_threads()
                self._readers[session.session_id] = TorchsWorker(
                    pipeline, order, session.worker_seeds, self._page.at_sample
                )
                return self._readers[session.session_id]
            self._readers[session.session_id] = open_shard(
                Shard(pipeline, order, session.seed, session.epoch),
                self._page.at_sample,
                session.errors.on_error != "raise",
                self._rounds,
                session.pipeline_id,
            )
        return self._readers[session.session_id]

    def _say_if_threads_do_not_help(self, pipeline: Pipeline) -> None:
        if self._team is not None and not self._said_one_thread and not pipeline.threads_help:
            self._said_one_thread = True
            _log.warning(
                "one of the threads makes all samples of %s: it does not say thread_safe = True, or gives whole "
                "batches. Use --processes for the CPUs of this data worker",
                type(pipeline.dataset).__name__,
            )


def _refuse_changes(pipeline: Pipeline, index: Indices, seed: Sequence[int], page: WorkPage, form: IndexForm) -> None:
    """See that samples leave what makes them as it is: else each would depend on who made which before it.

    A program that only knows torch keeps its own worker processes then, see `loader.compared_pass`; a loader of
    hetstream's own says that its batches are the same whoever makes them.

    Raises:
        PipelineError: they change it.
    """
    if reads_apart(pipeline.dataset):  # a source of hetstream's
        return
    with contextlib.suppress(SampleError):  # it is the step's own failure, and is told as that
        changes = changed_by(lambda: pipeline.make_batch(index, seed, page, form=form), pipeline.user_objects)
        if changes:
            raise PipelineError(
                f"samples of {type(pipeline.dataset).__name__} change what makes them ({changes}), and data workers "
                "make them in any order. Let it hold what samples only read, or a cache of them"
            )
