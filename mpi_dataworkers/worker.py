"""A data worker: takes leases from the dispatcher, makes their batches, sends them to the loaders.

One `DataWorker` is one process, forked by `supervisor.py`. Its main thread runs user code and sends batches; a second
thread keeps the connection to the dispatcher, so that a long sample does not look like a dead worker.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np

from mpi_dataworkers.address import ServiceAddress
from mpi_dataworkers.bucketing import LengthBuckets, plan_of
from mpi_dataworkers.cache import BatchCache, CachedBatch
from mpi_dataworkers.codec import Leaf, fuse
from mpi_dataworkers.config import slurm_job_from_environment
from mpi_dataworkers.dispatcher.state import HEARTBEAT_S
from mpi_dataworkers.errors import HetstreamError, PipelineError, ServiceUnavailable
from mpi_dataworkers.exchange import Exchange
from mpi_dataworkers.faults import reach
from mpi_dataworkers.fork_server import FORK_FROM_BYTES, ask_to_be_forked, objects_bytes
from mpi_dataworkers.forks import ForksEndHere
from mpi_dataworkers.gather import Gatherer
from mpi_dataworkers.handover import HandoverFailed
from mpi_dataworkers.interpreter import this_interpreter
from mpi_dataworkers.loaded import LoadedProgram, OtherProgram
from mpi_dataworkers.messages import (
    AddProcess,
    Alive,
    Batch,
    CloseSession,
    Delivery,
    Draining,
    DrainWorker,
    DropDefinition,
    EndOfShard,
    FailLease,
    FailStep,
    Failure,
    Fate,
    FetchDefinition,
    FinishLease,
    GrantLease,
    HeldLease,
    LeaveWorker,
    ListedOrder,
    Message,
    PlannedOrder,
    ProvideDefinition,
    Refused,
    RegisterWorker,
    RenewWorker,
    RevokeLease,
    Session,
    ShardOrder,
    ShutDown,
    TrimLease,
    UnknownPeer,
    WorkerHeartbeat,
    WorkerRegistered,
)
from mpi_dataworkers.ops.index_form import INTS, IndexForm, unpack_indices
from mpi_dataworkers.ops.iterable import ShardReader
from mpi_dataworkers.ops.pipeline import (
    Definition,
    EnteredPipeline,
    Pipeline,
    SampleError,
    describe_failure,
    leave_out,
    use_one_thread,
    without,
)
from mpi_dataworkers.ops.rounds import RankReader, SharedRounds, open_shard
from mpi_dataworkers.ops.shared_memory import WriteWatch
from mpi_dataworkers.ops.tree import flatten
from mpi_dataworkers.sharding import Indices, SampleSeeds
from mpi_dataworkers.threads import ThreadTeam
from mpi_dataworkers.transports.base import PeerUnreachable, Reconnected, WorkerEndpoint
from mpi_dataworkers.transports.rails import RailSender, Receivers
from mpi_dataworkers.transports.zmq import ZmqWorkerEndpoint
from mpi_dataworkers.watch import WorkPage

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
# A dispatcher may be away for as long as a restart takes; after this the data worker takes the job for ended.
GIVE_UP_S = 60.0
# The control thread looks several times a second; if it did not for so long, it could not.
_HELD_UP_S = 2.0
# A silent dispatcher may have come to its end; the address file says so.
_ASK_FILE_S = 2.0
# Time for the last batches to leave at an orderly end; after a signal `ending.py` says until when.
_LINGER_S = 2.0
# Who waits for a definition looks this often whether it is still to have it.
_LOOK_AGAIN_S = 0.5
# A pipeline that could not be loaded is loaded anew after this: what was missing may be there now.
_LOAD_AGAIN_S = 5.0
# A registration that got no answer (the dispatcher died before it gave one) is sent again after this.
_REGISTER_AGAIN_S = 1.0
# A program may change its dataset for each epoch; the oldest forms are forgotten, and fetched again if need be.
_MAX_PIPELINES = 8
# A loader between two epochs keeps its connections; a dead one's are closed after this.
_KEEP_CONNECTION_S = 5.0


class _LeaseGone(Exception):
    """The lease was revoked, or the worker is to stop, while it waited: nobody is to hear of it."""


class _ForkedAnew(Exception):
    """This process is to leave: one in its place shares the memory of the lease's pipeline with others."""


class _StepFailed(Exception):
    """User code raised for a step."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class DataWorker:
    """One data worker process.

    Args:
        service: address and keys.
        worker_id: 32 hexadecimal digits.
        replaces: id of the dead process whose place this one takes, or "".
        cache_bytes: finished batches to keep for other loaders that share them.
        page: where it says what it is doing.
        fate: how the process that it replaces ended.
        over_mpi: this process is a rank of an MPI world.
        exchange: definitions that this host has; None for a process that shares them with no other.
        num_threads: that make the samples of a batch, where the dataset is thread-safe.
        has_ended: whether the service is over, for when there is no connection on which to be told.
        slot: its place among its supervisor's processes; "" where nobody can fork it anew.
        loaded: what was loaded before this process was forked.
        forks_anew: its supervisor has a large pipeline loaded once for its processes, and forks them anew.
    """

    def __init__(
        self,
        service: ServiceAddress,
        worker_id: str,
        replaces: str = "",
        cache_bytes: int = 0,
        page: WorkPage | None = None,
        fate: Fate | None = None,
        over_mpi: bool = False,
        exchange: Exchange | None = None,
        num_threads: int = 1,
        has_ended: Callable[[], bool] = lambda: False,
        slot: str = "",
        loaded: LoadedProgram | None = None,
        forks_anew: bool = False,
    ) -> None:
        self._address = service.address
        self._registration = RegisterWorker(
            socket.gethostname(),
            os.getpid(),
            replaces,
            [],
            fate,
            slurm_job_from_environment(),
            slot,
            interpreter=this_interpreter(),
        )
        self._page = page or WorkPage()
        self._shares = exchange is not None
        self._exchange = exchange or Exchange(num_slots=0)
        self._definitions_dir = service.definitions_dir
        self._team = ThreadTeam(num_threads, use_one_thread) if num_threads > 1 else None
        self._said_one_thread = False
        self._endpoint: WorkerEndpoint = ZmqWorkerEndpoint(service, worker_id, CONNECT_TIMEOUT_S, has_ended)
        self._sender = RailSender(service.batch_key, worker_id, over_mpi)
        self._has_ended = has_ended
        self._lock = threading.Lock()
        self._number = 0
        self._held: dict[int, GrantLease] = {}  # guarded by _lock: leases not finished and not revoked
        self._at: tuple[int, int] = (0, 0)  # guarded by _lock: token and step in work
        # When the registration that is under way was sent; None while there is none. Of the control thread.
        self._asked_at: float | None = None
        self._receivers: dict[str, Receivers] = {}  # guarded by _lock: where each session's batches go
        self._used: dict[Receivers, float] = {}  # of the main thread: when a lease for them was begun
        self._next_look = 0.0
        self._doubted: set[Receivers] = set()  # guarded by _lock: receivers to connect to afresh
        self._definitions: dict[str, ProvideDefinition] = {}  # guarded by _lock: those that came
        self._asked_for: set[str] = set()  # guarded by _lock: definitions that are on their way
        self._dropped: set[str] = set()  # guarded by _lock: definitions that no loader uses
        self._definition_came = threading.Condition(self._lock)
        self._outbox: collections.deque[Message] = collections.deque()
        self._leases: queue.SimpleQueue[GrantLease | None] = queue.SimpleQueue()
        self._pipelines: dict[str, EnteredPipeline | Exception] = {}
        self._write_watches: dict[str, WriteWatch] = {}  # of the pipelines that hold shared memory
        self._failed_at: dict[str, float] = {}  # when those that are exceptions could not be loaded
        self._definitions_used: dict[str, Definition] = {}  # of the pipelines: siblings find them while they are held
        self._loaded = loaded or LoadedProgram()
        self._forks_anew = forks_anew
        # That a pipeline must exceed for which this process is forked anew: so never in turn for two of one size.
        self._asked_bytes = objects_bytes(self._loaded.kept)
        self._readers: dict[str, ShardReader | RankReader] = {}  # by session
        self._rounds = SharedRounds()
        self._cache = BatchCache(cache_bytes)
        self._failure: BaseException | None = None
        # A plain flag, because `stop` runs in signal handlers, where a second signal may come inside the first:
        # the lock of an Event would then wait for itself.
        self._stopping = False
        self._renew = False
        self._drains = False  # guarded by _lock
        self._done = False  # the main thread makes no more batches
        self._control = threading.Thread(target=self._run_control, name="hetstream-control", daemon=True)

    def stop(self) -> None:
        """Ask the worker to leave after the step it is making; safe in a signal handler."""
        self._stopping = True
        self._leases.put(None)  # SimpleQueue.put may be interrupted by itself
        self._endpoint.wake()  # its lock is reentrant

    @property
    def wants_renewal(self) -> bool:
        """Whether it has left so that its supervisor forks a fresh process in its slot."""
        return self._renew

    def run(self) -> None:
        """Work until the dispatcher ends the service or `stop` is called.

        Raises:
            HetstreamError: the dispatcher refused this worker, or was away for longer than `GIVE_UP_S`.
        """
        self._control.start()
        try:
            while (lease := self._next_lease()) is not None and not self._stopping:
                self._work_on(lease)
                self._drop_unused(time.monotonic())
        finally:
            self._stopping = True
            with self._lock:
                self._drain()
            self._done = True
            self._endpoint.wake()
            self._control.join()
            self._close()
        if self._failure is not None:
            raise self._failure

    def _close(self) -> None:
        ending = self._page.ending
        self._sender.close(min(ending.batches_by, time.monotonic() + _LINGER_S))
        self._endpoint.close(ending.messages_by)
        if self._team is not None:
            self._team.close()
        if not self._shares:
            self._exchange.close()

    # --- main thread: user code -------------------------------------------------------------------------------------

    def _next_lease(self) -> GrantLease | None:
        while True:
            try:
                return self._leases.get(timeout=_KEEP_CONNECTION_S)
            except queue.Empty:
                self._drop_unused(time.monotonic())

    def _drop_unused(self, now: float) -> None:
        """Close connections to loaders that read nothing, some time after: a dead loader's memory hangs on them."""
        if now < self._next_look:
            return
        self._next_look = now + _KEEP_CONNECTION_S
        with self._lock:
            in_use = set(self._receivers.values())
        for receivers, used_at in list(self._used.items()):
            if receivers not in in_use and now - used_at > _KEEP_CONNECTION_S:
                self._sender.drop(receivers)
                del self._used[receivers]

    def _work_on(self, lease: GrantLease) -> None:
        receivers = tuple(lease.session.receivers)
        self._used[receivers] = time.monotonic()
        with self._lock:
            doubted = receivers in self._doubted
            self._doubted.discard(receivers)
        if doubted:
            self._sender.drop(receivers)
        started, waited_s = time.monotonic(), 0.0
        gathered = Gatherer(functools.partial(self._sender.room, receivers))
        try:
            for step in range(lease.first_step, lease.stop_step):
                with self._lock:
                    if self._stopping:
                        self._drain()
                    held = self._held.get(lease.token)
                    if held is None:
                        return
                    if step >= held.stop_step:
                        break
                    self._at = (lease.token, step)
                begun = time.monotonic()  # without what sending took: that may have waited for the network
                reach("worker.before_make")
                self._page.begin(lease.session.session_id, lease.token, step, lease.session.errors.sample_timeout_s)
                try:
                    goes_on = self._make(lease, step, gathered)
                except _StepFailed as failed:
                    # The dispatcher leases what is left: the failed step to someone else where there is one.
                    self._send(receivers, gathered.rest())
                    self._settle(lease.token, FailStep(lease.token, step, failed.failure))
                    return
                finally:
                    self._page.rest()
                self._page.note_made()
                reach("worker.after_make")
                now = time.monotonic()
                waited_s += self._send(receivers, gathered.due(now, now - begun))
                if not goes_on:
                    break
            waited_s += self._send(receivers, gathered.rest())
        except (PeerUnreachable, HandoverFailed) as error:
            _log.warning("session=%s gave a lease back: %s", lease.session.session_id, error)
            self._settle(lease.token, FailLease(lease.token, str(error)))
        except OtherProgram:
            self._settle(lease.token, FailLease(lease.token, "its process serves another program"))
            self._page.wish("")
            self._renew = True
            self.stop()
        except _ForkedAnew:
            with self._lock:
                self._held.pop(lease.token, None)  # the dispatcher takes it back when this process drains
            self._renew = True
            self.stop()
        except _LeaseGone:
            return
        else:
            reach("worker.before_finish")
            self._settle(lease.token, self._finished(lease, time.monotonic() - started - waited_s, waited_s))
            reach("worker.after_finish")

    def _finished(self, lease: GrantLease, busy_s: float, waited_s: float) -> FinishLease:
        reader = self._readers.get(lease.session.session_id)
        dropped = self._cache.take_dropped()
        if reader is None:
            return FinishLease(lease.token, busy_s, dropped, waited_s=waited_s)
        return FinishLease(lease.token, busy_s, dropped, reader.snapshot, reader.snapshot_step, waited_s)

    def _send(self, receivers: Receivers, deliveries: Sequence[tuple[Delivery, Sequence[Leaf]]]) -> float:
        """Send what is ready; how long that waited for the loader or the network."""
        waited_s = 0.0
        for header, frames in deliveries:
            waited_s += self._sender.send(receivers, header, frames)
            reach("worker.batch_sent")
        return waited_s

    def _settle(self, token: int, report: Message) -> None:
        with self._lock:
            if self._held.pop(token, None) is None:
                return
            self._outbox.append(report)
        self._endpoint.wake()

    def _make(self, lease: GrantLease, step: int, gathered: Gatherer) -> bool:
        """Make a step's batch, or take it from the cache, and put it where it leaves from.

        Returns:
            Whether there are more steps, as far as this one shows.
        """
        session = lease.session
        key = session.sharing.key if session.sharing is not None else ""
        epoch, place, position = place_of(lease, step)
        snapshot = b""
        names = session.session_id, step, lease.token
        left_out = lease.left_out.get(step, [])
        lacking = without(session.errors, left_out)
        one = None if lacking else self._cache.get(key, position)
        if one is not None:
            again = Batch(*names, one.num_samples, one.spec, one.buffers, "cache", lease.shift)
            gathered.add_alone(again, one.frames)
            return True
        num_skipped = 0
        with ForksEndHere():
            pipeline = self._pipeline(lease)
            try:
                if isinstance(session.order, ShardOrder):
                    reader = self._reader(session, session.order, pipeline)
                    made = reader.read(step, lease.snapshot, left_out)
                    if made is None:
                        end = EndOfShard(session.session_id, reader.num_steps, lease.token)
                        gathered.add_alone(end, [])
                        self._outbox.append(end)  # before the lease is settled
                        return False
                    batch, num_samples = made.batch, made.num_samples
                    num_skipped, left_out = made.num_skipped, made.left_out
                    snapshot = reader.snapshot
                else:
                    indices, form = indices_of(lease, epoch, place, pipeline.buckets)
                    listed_step = None if isinstance(session.order, PlannedOrder) else step
                    seeds = SampleSeeds(indices, session.seed, epoch, listed_step)
                    kept, their_seeds = leave_out(indices, seeds, lacking)
                    num_samples, num_skipped = len(kept), len(indices) - len(kept)
                    # A step that has failed before is made sample by sample: what ends the process is then at fault.
                    team = None if step in lease.left_out else self._team
                    batch = pipeline.make_batch(kept, their_seeds, self._page, team, form) if num_samples > 0 else None
                    if session.definition_id in self._write_watches:
                        self._write_watches[session.definition_id].check()
                spec, buffers = flatten(batch)
            except PipelineError as error:
                raise _StepFailed(describe_failure(error, is_final=True)) from error
            except Exception as error:
                _log.info("session=%s step=%d failed: %r", session.session_id, step, error)
                raise _StepFailed(describe_failure(error)) from error
            except BaseException as error:
                # What passes `except Exception`, as sys.exit() does, is no reason to end: others are served here too.
                _log.warning("session=%s step=%d: user code raised %s", session.session_id, step, type(error).__name__)
                self._readers.pop(session.session_id, None)
                work = self._page.read()
                failed = SampleError(work.sample_index if work is not None else -1)
                failed.__cause__ = error
                raise _StepFailed(describe_failure(failed)) from error
        origin: Literal["made", "again"] = "again" if lease.again else "made"
        if key and not lacking:
            frames, places = fuse(buffers)
            self._cache.put(key, position, CachedBatch(num_samples, spec, places, frames))
            gathered.add_alone(Batch(*names, num_samples, spec, places, origin, lease.shift), frames)
        else:
            places = gathered.place(buffers, time.monotonic())
            gathered.add(Batch(*names, num_samples, spec, places, origin, lease.shift, num_skipped, left_out, snapshot))
        return True

    def _reader(self, session: Session, order: ShardOrder, pipeline: Pipeline) -> ShardReader | RankReader:
        """The shard's reader, which stays where the last lease left it."""
        if session.session_id not in self._readers:
            with self._lock:
                ended = self._readers.keys() - self._receivers.keys()
            for session_id in ended:
                del self._readers[session_id]
            self._readers[session.session_id] = open_shard(
                pipeline,
                order,
                session.seed,
                session.epoch,
                self._page.at_sample,
                self._rounds,
                session.definition_id,
                session.errors.on_error != "raise",
            )
        return self._readers[session.session_id]

    def _pipeline(self, lease: GrantLease) -> Pipeline:
        definition_id = lease.session.definition_id
        if self._dropped or self._failed_at:  # asked without the lock, at each step: the next one comes soon
            self._forget_old(definition_id)
        if definition_id not in self._pipelines:
            try:
                pipeline = self._load(definition_id, lease)
                self._pipelines[definition_id] = EnteredPipeline(pipeline, self._number)
                self._say_if_threads_do_not_help(pipeline)
            except (_LeaseGone, _ForkedAnew, OtherProgram, HandoverFailed):
                raise
            except Exception as error:  # noqa: BLE001, user code again; every step of this pipeline fails alike
                self._pipelines[definition_id] = error
                self._failed_at[definition_id] = time.monotonic()
            while len(self._pipelines) > _MAX_PIPELINES:
                self._forget(next(iter(self._pipelines)))
        entered = self._pipelines[definition_id]
        if isinstance(entered, EnteredPipeline):
            base_seed = lease.session.seed
            if entered.is_new(base_seed):
                self._page.at_sample(-1)
            try:
                self._loaded.apply(self._definitions_used[definition_id].settings)
                return entered.enter(base_seed)
            except Exception as error:  # noqa: BLE001, worker_init_fn may raise anything; as above
                entered = self._pipelines[definition_id] = error
                self._failed_at[definition_id] = time.monotonic()
        raise _StepFailed(describe_failure(entered, is_final=True))

    def _forget_old(self, definition_id: str) -> None:
        """Forget what no loader uses, and this pipeline if it could not be loaded some time ago."""
        with self._lock:
            dropped, self._dropped = self._dropped, set()
        if time.monotonic() - self._failed_at.get(definition_id, math.inf) > _LOAD_AGAIN_S:
            dropped.add(definition_id)
        for name in dropped:
            self._forget(name)
            if self._page.shares == name:
                self._page.shares = ""
                if not self._pipelines:  # to leave costs what other pipelines have in this process, a cache, say
                    self._asked_bytes = 0

    def _forget(self, definition_id: str) -> None:
        self._loaded.take(definition_id)
        if self._page.wished[0] == definition_id:
            self._page.wish("")
        self._pipelines.pop(definition_id, None)
        self._write_watches.pop(definition_id, None)
        self._failed_at.pop(definition_id, None)
        self._definitions_used.pop(definition_id, None)

    def _say_if_threads_do_not_help(self, pipeline: Pipeline) -> None:
        if self._team is not None and not pipeline.threads_help and not self._said_one_thread:
            self._said_one_thread = True
            _log.warning(
                "one of the threads makes all samples of %s: it does not say thread_safe = True, or gives whole "
                "batches. Use --processes for the CPUs of this data worker",
                type(pipeline.dataset).__name__,
            )

    def _load(self, definition_id: str, lease: GrantLease) -> Pipeline:
        """Have a pipeline: as it was when this process was forked, or unpickled."""
        taken = self._loaded.take(definition_id)
        if taken is not None:
            found, pipeline = taken
        else:
            self._page.rest()  # no user code runs while it waits
            found = self._find(definition_id, lease.token)
            if self._forks_anew and objects_bytes(found) > max(FORK_FROM_BYTES, self._asked_bytes):
                self._ask_to_be_forked(found, lease)
            self._page.at_sample(-1)
            pipeline = self._loaded.load(found)
        self._definitions_used[definition_id] = found
        if found.shared:
            self._write_watches[definition_id] = WriteWatch(found.digest_of_shared)
        return pipeline

    def _find(self, definition_id: str, token: int) -> Definition:
        """A definition, from bytes that this host has or that come from the dispatcher."""
        found = self._exchange.find(definition_id)
        if found is None:
            with self._exchange.alone(lambda: not self._holds(token)) as is_its_turn:
                if not self._holds(token):
                    raise _LeaseGone
                found = self._exchange.find(definition_id)
                if found is None:
                    came = self._fetch(definition_id, token)
                    found = self._exchange.keep(came, self._definitions_dir, shared=is_its_turn)
                    num_bytes = len(came.blob) + sum(came.contents.sizes)
                    _log.info("pipeline=%s fetched for this host: %d bytes", definition_id[:8], num_bytes)
        return found

    def _ask_to_be_forked(self, definition: Definition, lease: GrantLease) -> None:
        limit_s = lease.session.errors.sample_timeout_s
        if ask_to_be_forked(self._page, definition, limit_s, lambda: self._holds(lease.token)):
            raise _ForkedAnew
        if not self._holds(lease.token):
            raise _LeaseGone
        self._asked_bytes = objects_bytes(definition)

    def _holds(self, token: int) -> bool:
        with self._lock:
            return token in self._held and not self._stopping

    def _fetch(self, definition_id: str, token: int) -> ProvideDefinition:
        """Ask the dispatcher for a definition, once for each connection, and wait for it."""
        with self._lock:
            if definition_id not in self._asked_for and definition_id not in self._definitions:
                self._asked_for.add(definition_id)
                self._outbox.append(FetchDefinition(definition_id))
        self._endpoint.wake()
        with self._definition_came:
            while definition_id not in self._definitions:
                self._definition_came.wait(_LOOK_AGAIN_S)
                if token not in self._held or self._stopping:
                    raise _LeaseGone
            return self._definitions.pop(definition_id)

    # --- control thread: the dispatcher -----------------------------------------------------------------------------

    def _run_control(self) -> None:
        try:
            self._talk()
        except Exception as error:  # noqa: BLE001, the thread's boundary: the main thread raises it
            self._failure = error
        finally:
            self._leases.put(None)

    def _talk(self) -> None:
        self._register()
        next_heartbeat = time.monotonic() + HEARTBEAT_S
        last_heard = looked_at = time.monotonic()
        # The main thread may wait for a loader; the dispatcher is to know in any case that this data worker leaves.
        while not self._done and (now := time.monotonic()) < (leave_by := self._page.ending.batches_by):
            messages = self._endpoint.poll(max(0.0, min(next_heartbeat, leave_by) - now))
            now = time.monotonic()
            if now - looked_at > _HELD_UP_S:
                last_heard = now  # user code held the GIL: nobody was asked, so nobody could answer
            looked_at = now
            for message in messages:
                last_heard = now
                self._handle(message)
            if self._stopping:
                with self._lock:
                    self._drain()
            while self._outbox:
                self._endpoint.send(self._outbox.popleft())
            if now >= next_heartbeat:
                with self._lock:
                    held = sorted(self._held)
                self._endpoint.send(WorkerHeartbeat(held))
                next_heartbeat = now + HEARTBEAT_S
                if now - last_heard > _ASK_FILE_S and not self._stopping and self._has_ended():
                    _log.info("the service has ended")
                    self.stop()
            if now - last_heard > GIVE_UP_S:
                raise ServiceUnavailable(
                    f"the dispatcher at {self._address} was silent for {GIVE_UP_S:g} s; this data worker ends. Is its "
                    "host up, and reachable from this one?"
                )
        while self._outbox:
            self._endpoint.send(self._outbox.popleft())
        self._endpoint.send(LeaveWorker())

    def _register(self) -> None:
        self._asked_at = time.monotonic()
        with self._lock:
            held = [
                HeldLease(lease.token, lease.session.session_id, lease.first_step, lease.stop_step, lease.shift)
                for lease in self._held.values()
            ]
        self._endpoint.send(msgspec.structs.replace(self._registration, held=held, program=self._loaded.program))

    def _drain(self) -> None:
        """Keep only the step in work, and say once how far that leaves each lease. Call it with the lock."""
        if self._drains:
            return
        self._drains = True
        token, step = self._at
        kept = self._held.get(token)
        self._held.clear()
        if kept is not None:
            self._held[token] = msgspec.structs.replace(kept, stop_step=step + 1)
        reach("worker.draining")
        self._outbox.append(Draining([(token, step + 1)] if kept is not None else [], self._renew))

    def _trim(self, token: int, stop_step: int) -> None:
        with self._lock:
            lease = self._held.get(token)
            if lease is None:
                return
            if stop_step <= lease.first_step:
                del self._held[token]
            elif stop_step < lease.stop_step:
                self._held[token] = msgspec.structs.replace(lease, stop_step=stop_step)

    def _handle(self, message: Message | Reconnected) -> None:
        if isinstance(message, GrantLease):
            with self._lock:
                if self._drains:
                    return  # granted before the dispatcher heard of it; it takes the lease back when it does
                self._held[message.token] = message
                self._receivers[message.session.session_id] = tuple(message.session.receivers)
            reach("worker.lease_received")
            self._leases.put(message)
        elif isinstance(message, TrimLease):
            self._trim(message.token, message.stop_step)
        elif isinstance(message, RevokeLease):
            with self._lock:
                self._held.pop(message.token, None)
                # A lease in doubt was sent, so it is no longer held: the session says where to.
                if message.reconnect and message.session_id in self._receivers:
                    self._doubted.add(self._receivers[message.session_id])
        elif isinstance(message, CloseSession):
            with self._lock:
                self._receivers.pop(message.session_id, None)
                ended = [t for t, lease in self._held.items() if lease.session.session_id == message.session_id]
                for token in ended:
                    del self._held[token]
        elif isinstance(message, ProvideDefinition):
            with self._definition_came:
                self._asked_for.discard(message.definition_id)
                self._definitions[message.definition_id] = message
                self._definition_came.notify_all()
        elif isinstance(message, DropDefinition):
            with self._lock:
                self._definitions.pop(message.definition_id, None)
                self._dropped.add(message.definition_id)
        elif isinstance(message, WorkerRegistered):
            self._number, self._asked_at = message.number, None
            self._registration = msgspec.structs.replace(self._registration, replaces="", fate=None)
            _log.info("data_worker=%d registered", message.number)
            reach("worker.registered")
            with self._lock:
                self._outbox.extend(FetchDefinition(one) for one in sorted(self._asked_for))
                if self._drains:  # and another incarnation of the dispatcher does not know
                    held = [(lease.token, lease.stop_step) for lease in self._held.values()]
                    self._outbox.append(Draining(held, self._renew))
        elif isinstance(message, Reconnected):
            self._register()
        elif isinstance(message, UnknownPeer):
            if self._asked_at is None or time.monotonic() - self._asked_at > _REGISTER_AGAIN_S:
                self._register()
        elif isinstance(message, ShutDown | DrainWorker | RenewWorker):
            self._renew = isinstance(message, RenewWorker)
            self._page.wish("")  # who takes its place serves another program
            self.stop()
        elif isinstance(message, AddProcess):
            self._page.ask_for_another()
        elif isinstance(message, Refused):
            raise HetstreamError(f"the dispatcher refused this data worker: {message.text}")
        elif not isinstance(message, Alive):
            raise HetstreamError(f"the dispatcher sent {type(message).__name__}, which is no message for a data worker")


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
