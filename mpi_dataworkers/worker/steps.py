"""Makes the batch of a leased step: from the cache, by a shard's reader, or from the samples of its indices.

User code runs here, in the main thread of `worker.py`. Whatever it raises becomes the failure of the step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.forks import ForksEndHere
from hetstream.mpi_dataworkers.ops.acts_on_files import acts_on_files
from hetstream.mpi_dataworkers.ops.changes import changed_by
from hetstream.mpi_dataworkers.ops.index_form import IndexForm
from hetstream.mpi_dataworkers.ops.iterable import Shard
from hetstream.mpi_dataworkers.ops.pipeline import (
    MadeStep,
    Pipeline,
    SampleError,
    describe_failure,
    leave_out,
    use_one_thread,
    without,
)
from hetstream.mpi_dataworkers.ops.round_reader import RankReader, SharedRounds, open_shard
from hetstream.mpi_dataworkers.ops.shard_reader import ShardReader
from hetstream.mpi_dataworkers.ops.tree import flatten
from hetstream.mpi_dataworkers.order.sharding import Indices, SampleSeeds
from hetstream.mpi_dataworkers.sources.together import reads_apart
from hetstream.mpi_dataworkers.threads import ThreadTeam
from hetstream.mpi_dataworkers.wire.codec import Leaf, fuse
from hetstream.mpi_dataworkers.wire.messages import (
    Batch,
    EndOfShard,
    FinishLease,
    GrantLease,
    PlannedOrder,
    SessionSpec,
    ShardOrder,
)
from hetstream.mpi_dataworkers.wire.pipeline_transfer import HandoverFailed
from hetstream.mpi_dataworkers.worker.cache import BatchCache, CachedBatch
from hetstream.mpi_dataworkers.worker.connection import DispatcherConnection
from hetstream.mpi_dataworkers.worker.earlier import EarlierStage
from hetstream.mpi_dataworkers.worker.gather import Gatherer
from hetstream.mpi_dataworkers.worker.indices import indices_of, place_of
from hetstream.mpi_dataworkers.worker.leases import HeldLeases, LeaseGone
from hetstream.mpi_dataworkers.worker.pipelines import Pipelines, StepFailed
from hetstream.mpi_dataworkers.worker.watch import WorkPage

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
        self._readers: dict[str, ShardReader | RankReader] = {}  # by session
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
            gathered.add_alone(end, [])
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
            gathered.add(Batch(*names, made.num_samples, spec, places, origin, lease.shift, *report, wrote=made.wrote))
        return True

    def finished(self, lease: GrantLease, busy_s: float, waited_s: float) -> FinishLease:
        """What to tell the dispatcher when all steps of a lease were made.

        Args:
            lease: that was worked on.
            busy_s: how long that took, without `waited_s`. With the waits for the stage before, which its loader tells.
            waited_s: how long sending waited.
        """
        reader = self._readers.get(lease.session.session_id)
        dropped = self._cache.take_dropped()
        if reader is None:
            return FinishLease(lease.token, busy_s, dropped, waited_s=waited_s)
        return FinishLease(lease.token, busy_s, dropped, reader.snapshot, reader.snapshot_step, waited_s)

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
                    reader = self._reader(session, session.order, pipeline)
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
            _refuse_changes(pipeline, kept[:1], pass_seeds.of_step(kept[:1], listed_step, epoch), self._page, form)
        # A step that has failed before is made sample by sample: what ends the process is then at fault.
        team = None if step in lease.left_out else self._team
        began = time.monotonic()
        first = pipeline if earlier is None else pipeline.before_gpu
        batch = first.make_batch(kept, their_seeds, self._page, team, form)
        if earlier is not None:
            earlier.missed(time.monotonic() - began)
            batch = pipeline.finished(batch, their_seeds[0])
        self._pipelines.check_writes(session.pipeline_id)
        return MadeStep(batch, len(kept), len(indices) - len(kept), left_out)

    def _finished(
        self, earlier: MadeStep, indices: Indices, seeds: SampleSeeds, pipeline: Pipeline, lease: GrantLease
    ) -> MadeStep:
        """Make a step of what the stage before has made of it."""
        if earlier.num_samples == 0:
            return earlier
        _, their_seeds = leave_out(indices, seeds, without(lease.session.errors, earlier.left_out))
        self._page.at_sample(-1)
        return msgspec.structs.replace(earlier, batch=pipeline.finished(earlier.batch, their_seeds[0]))

    def _reader(self, session: SessionSpec, order: ShardOrder, pipeline: Pipeline) -> ShardReader | RankReader:
        """The shard's reader, which stays where the last lease left it."""
        if session.session_id not in self._readers:
            for session_id in self._readers.keys() - self._leases.sessions.keys():
                del self._readers[session_id]
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
