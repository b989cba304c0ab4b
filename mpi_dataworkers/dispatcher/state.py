"""What the dispatcher decides: (state, message, now) -> instructions. No socket, no clock, no disk.

The loader is the authority on what it has: a step counts as done when the loader reports it received or consumed.
The dispatcher hands out the steps that are inside the loader's window and not yet there, as leases with a fencing
token; a lease whose worker is lost, silent or unable to deliver is revoked and its missing steps are leased again.
A batch is a pure function of its session and step, so making one twice is waste, never damage.

A lease goes ACTIVE -> SENT -> (gone). ACTIVE: a worker makes its steps. SENT: the worker has sent them all and the
loader has not reported all of them. From either it may be revoked. The end of an ACTIVE lease may be trimmed off, which
fences nothing: steps that were already made are as good as any.
"""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from mpi_dataworkers.dispatcher import events
from mpi_dataworkers.dispatcher.records import (
    ConsumerRecord,
    ForgetDefinition,
    ForgetWorker,
    Instruction,
    Lease,
    LeaseStatus,
    RememberDefinition,
    RememberStats,
    RememberWorker,
    Send,
    SessionRecord,
    WorkDone,
    WorkerRecord,
)
from mpi_dataworkers.dispatcher.sharing import ShareGroup, ShareGroups, different_under_one_name
from mpi_dataworkers.dispatcher.status import note_rates, status_of
from mpi_dataworkers.errors import ProtocolError
from mpi_dataworkers.failures import StepFailures, Verdict
from mpi_dataworkers.messages import (
    Alive,
    BatchFailed,
    CloseEpoch,
    CloseSession,
    ConsumerRegistered,
    Definition,
    Draining,
    DrainWorker,
    EndOfShard,
    ExtendEpoch,
    FailLease,
    FailStep,
    Failure,
    FetchDefinition,
    FinishLease,
    GrantLease,
    LeaseRevoked,
    LeaveConsumer,
    LeaveWorker,
    ListedOrder,
    LoaderHeartbeat,
    LoaderStats,
    LoaderToDispatcher,
    Membership,
    Message,
    OpenEpoch,
    ProvideDefinition,
    Refused,
    RegisterConsumer,
    RegisterWorker,
    ReportProgress,
    RequestStatus,
    RevokeLease,
    ShardOrder,
    Status,
    StepList,
    StepsLost,
    TrimLease,
    UnknownPeer,
    WorkerHeartbeat,
    WorkerRegistered,
    WorkerToDispatcher,
)
from mpi_dataworkers.rates import RecentRates
from mpi_dataworkers.reorder import as_ranges

# A worker is lost when it was silent this long; it sends a heartbeat every HEARTBEAT_S.
HEARTBEAT_S = 0.5
WORKER_TIMEOUT_S = 4.0
# A trainer may hold the GIL in a long call; taking it for dead only pauses its prefetch, it registers again by itself.
CONSUMER_TIMEOUT_S = 15.0
# A sent lease that the loader does not report within this time went to a broken connection.
ARRIVAL_TIMEOUT_S = 5.0
# A loader silent for longer is held up (the GIL in a long call): its reports are late, not its batches.
LOADER_PAUSE_S = ARRIVAL_TIMEOUT_S / 2
# A worker that could not reach a loader is not sent there again for this long.
UNREACHABLE_S = 10.0
# After a restart, wait at most this long for the workers of before to tell what they hold, so that the same steps are
# not leased to others. They register as soon as their connection is back; who is later loses only what it held.
RECOVERY_GRACE_S = 0.7
# One lease in work and one waiting: the worker never idles for a round trip.
LEASES_PER_WORKER = 2
# Long enough that control costs nothing, short enough that the tail of a window is shared among workers.
TARGET_LEASE_S = 0.02
MAX_LEASE_STEPS = 128
# A steal has to bring the end of the stolen lease forward by this much; what a worker does next is looked at as often.
STEAL_GAIN_S = TARGET_LEASE_S
# What the loader has is known this late.
_REPORT_DELAY_S = 0.15
# A worker that has made no step of a pass may have to load its pipeline first.
_UNKNOWN_STEP_S = 1.0

# Steps of a session whose end is not known: more than anybody reads.
_ENDLESS = 1 << 62

# Long enough for one burst of messages, which is what the server logs at a time.
_STORY_LENGTH = 512


class DispatcherState:
    """All that the dispatcher knows.

    Args:
        incarnation: number of this start of the dispatcher, from 1; the high half of every fencing token, so that
            tokens grow across restarts without journaling each one.
        now: time of the start, s, on the clock of all later calls.
        expected: peer ids of the data workers that were registered when the last dispatcher ended: nothing is leased
            until they have told what they hold, or `RECOVERY_GRACE_S` has passed.
    """

    def __init__(self, incarnation: int, now: float, expected: Collection[str] = ()) -> None:
        self.workers: dict[str, WorkerRecord] = {}
        self.consumers: dict[str, ConsumerRecord] = {}
        self.sessions: dict[str, SessionRecord] = {}
        self.leases: dict[int, Lease] = {}
        self.definitions: dict[str, ProvideDefinition] = {}
        self.incarnation = incarnation
        self.started_at = now
        self.workers_seen = 0
        self.workers_replaced = 0  # of them, those that came in the place of one that had died
        self.workers_lost = 0
        self.leases_granted = 0
        self.leases_revoked = 0
        self.recent = RecentRates(now, 0)  # of `leases_granted`
        self.story: deque[events.Event] = deque(maxlen=_STORY_LENGTH)
        self.events_told = 0
        self._shared = ShareGroups()
        self._waiting_for_definition: dict[str, set[str]] = {}
        # Workers that may get a lease, in the order in which they came free, by the number of leases that they have.
        self._free: list[dict[str, None]] = [{} for _ in range(LEASES_PER_WORKER)]
        self._token_base = incarnation << 32
        self._expected = set(expected)
        self._grant_from = now + (RECOVERY_GRACE_S if expected else 0.0)
        self._next_steal = now

    # --- entry points -----------------------------------------------------------------------------------------------

    def handle(self, peer: str, message: Message, now: float) -> list[Instruction]:
        """Take in one message of an authenticated peer.

        Raises:
            KeyError: the message is of a type that no peer sends to a dispatcher; the server refuses those first.
        """
        if isinstance(message, RegisterWorker):
            return self._register_worker(peer, message, now) + self._assign(now)
        if isinstance(message, RegisterConsumer):
            return self._register_consumer(peer, message, now)
        if isinstance(message, RequestStatus):
            return [Send(peer, self.status(now))]
        if peer in self.workers:
            self.workers[peer].last_seen = now
        elif peer in self.consumers:
            consumer = self.consumers[peer]
            if now - consumer.last_seen > LOADER_PAUSE_S:
                consumer.steady_since = now
            consumer.last_seen = now
        else:
            return [Send(peer, UnknownPeer())]
        if not isinstance(message, WorkerToDispatcher if peer in self.workers else LoaderToDispatcher):
            role = "data worker" if peer in self.workers else "loader"
            return self._refuse(peer, "ProtocolError", f"{type(message).__name__} is no message of a {role}")
        return _HANDLERS[type(message)](self, peer, message, now) + self._assign(now)

    def peer_gone(self, peer: str, now: float) -> list[Instruction]:
        """A peer's connection closed. If only the network blinked, the peer registers again and says what it has."""
        out: list[Instruction] = []
        if peer in self.workers:
            out = self._lose_worker(peer, now, "its connection closed")
        elif peer in self.consumers:
            out = self._drop_consumer(peer, "its connection closed")
        return out + self._assign(now)

    def tick(self, now: float) -> list[Instruction]:
        """Let time pass: find the silent and the undelivered, lease their steps again."""
        note_rates(self, now)
        out: list[Instruction] = []
        for peer, worker in list(self.workers.items()):
            if now - worker.last_seen > WORKER_TIMEOUT_S:
                out += self._lose_worker(peer, now, f"silent for {now - worker.last_seen:.1f} s")
        for peer, consumer in list(self.consumers.items()):
            if now - consumer.last_seen > CONSUMER_TIMEOUT_S:
                silence_s = now - consumer.last_seen
                out += [Send(peer, UnknownPeer()), *self._drop_consumer(peer, f"silent for {silence_s:.1f} s")]
        if self._expected and now >= self._grant_from:
            cause = f"they did not register within {RECOVERY_GRACE_S:g} s"
            self._tell(events.DataWorkersMissing(num_missing=len(self._expected), cause=cause))
            out += [ForgetWorker(peer) for peer in sorted(self._expected)]
            self._expected.clear()
        for lease in list(self.leases.values()):
            if lease.status is LeaseStatus.SENT and self._unreported_s(lease, now) > ARRIVAL_TIMEOUT_S:
                reason = f"sent {now - lease.sent_at:.1f} s ago and not received"
                out += self._mark_unreachable(lease, now, reason)
                out += self._revoke(lease, reason, reconnect=True)
        # Announced here too, because workers that were unreachable become reachable by time alone.
        return out + self._announce(now) + self._assign(now)

    def _unreported_s(self, lease: Lease, now: float) -> float:
        """How long a sent lease could have been reported; a loader that is held up says nothing of its connections."""
        record = self.sessions.get(lease.session_id)
        if record is None:
            return now - lease.sent_at
        consumer = self.consumers[record.consumer]
        paused = now - consumer.last_seen > LOADER_PAUSE_S
        return 0.0 if paused else now - max(lease.sent_at, consumer.steady_since)

    def next_deadline(self) -> float:
        """Seconds after which `tick` should be called at the latest."""
        return HEARTBEAT_S / 2

    def status(self, now: float) -> Status:
        """What goes on."""
        return status_of(self, now)

    def drain(self, peer: str, now: float) -> list[Instruction]:
        """Let a data worker leave without losing what it is making: no more leases, and it ends by itself."""
        if peer not in self.workers or self.workers[peer].draining:
            return []
        self._begin_drain(peer, "the service wants it to")
        return [Send(peer, DrainWorker()), *self._assign(now)]

    # --- loaders ----------------------------------------------------------------------------------------------------

    def _register_consumer(self, peer: str, message: RegisterConsumer, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for other_peer, other in list(self.consumers.items()):
            theirs = other.registration
            if differs := different_under_one_name(theirs.description, message.description):
                return self._refuse(peer, "PipelineError", differs)
            if other_peer == peer or (theirs.job_name, theirs.ordinal) != (message.job_name, message.ordinal):
                continue
            if theirs.description != message.description:
                return self._refuse(peer, "JobNameConflict", _conflict(theirs, message))
            if theirs.rank == message.rank:
                text = (
                    f"rank {message.rank} of job {message.job_name!r} was registered again by process {message.pid} on "
                    f"{message.host}; this process ({theirs.pid} on {theirs.host}) no longer receives batches. "
                    "If these are two programs, give each a job_name (or HETSTREAM_JOB_NAME) of its own."
                )
                out.append(Send(other_peer, Refused("Superseded", text)))
                out += self._drop_consumer(other_peer, text)
        known = self.consumers.get(peer)
        cause = "its connection is back" if known else ""
        self._tell(events.LoaderConnected(**_who(message), cause=cause))
        stats = known.stats if known else LoaderStats()
        recent = RecentRates(now, stats.steps, stats.bytes, stats.wait_s)
        self.consumers[peer] = ConsumerRecord(message, now, recent, stats)
        count = self._reachable_workers(peer, now)
        self.consumers[peer].announced_workers = count
        out.append(Send(peer, ConsumerRegistered(message.definition_id not in self.definitions, count)))
        return out

    def _provide_definition(self, peer: str, message: ProvideDefinition, _: float) -> list[Instruction]:
        out: list[Instruction] = []
        consumer = self.consumers[peer]
        consumer.registration = msgspec.structs.replace(consumer.registration, definition_id=message.definition_id)
        used = {record.session.definition_id for record in self.sessions.values()}
        used |= {consumer.registration.definition_id for consumer in self.consumers.values()}
        for old in self.definitions.keys() - used - {message.definition_id}:
            del self.definitions[old]
            out.append(ForgetDefinition(old))
        self.definitions[message.definition_id] = message
        out.append(RememberDefinition(message))
        self._tell(events.DefinitionRemembered(definition_id=message.definition_id, num_bytes=len(message.blob)))
        for worker in sorted(self._waiting_for_definition.pop(message.definition_id, ())):
            out.append(Send(worker, _definition_of(message)))
        return out

    def _open_epoch(self, peer: str, message: OpenEpoch, _: float) -> list[Instruction]:
        session = message.session
        ahead = message.num_steps if message.num_steps >= 0 else _ENDLESS
        known = message.consumed if isinstance(session.order, ListedOrder) else ahead
        record = SessionRecord(
            session=session,
            consumer=peer,
            num_steps=message.num_steps,
            known_steps=known,
            consumed=message.consumed,
            received=message.received,
            window=message.window,
            frontier=message.consumed,
        )
        record.keep_snapshot(message.consumed, message.snapshot)
        if record.reads_rounds:
            record.holder = next((one.holder for one in self.sessions.values() if one.shard == record.shard), "")
        self.sessions[session.session_id] = record
        if message.steps is not None:
            self._take_steps(record, message.steps)
        # A pass that is declared again after this dispatcher's restart: workers may hold leases of it.
        held = [lease for lease in self.leases.values() if lease.session_id == session.session_id]
        record.tokens = {lease.token for lease in held}
        record.sent = {lease.token for lease in held if lease.status is LeaseStatus.SENT}
        self._join_group(record, message, held)
        reached = max([stop for _, stop in message.received] + [lease.stop for lease in held], default=message.consumed)
        record.frontier = max(message.consumed, reached)
        leased = {step for lease in held for step in range(lease.first, lease.stop)}
        record.requeued = [s for s in record.missing(range(message.consumed, record.frontier)) if s not in leased]
        self._tell(
            events.SessionOpened(
                session=session.session_id,
                job=self.consumers[peer].registration.job_name,
                rank=self.consumers[peer].registration.rank,
                epoch=session.epoch,
                first_step=message.consumed,
                num_steps=message.num_steps,
            )
        )
        return []

    def _extend_epoch(self, _: str, message: ExtendEpoch, __: float) -> list[Instruction]:
        record = self.sessions.get(message.session_id)
        if record is None:
            return []
        self._take_steps(record, message.steps)
        record.num_steps = message.num_steps
        return []

    def _take_steps(self, record: SessionRecord, steps: StepList) -> None:
        for step, indices in _split_steps(steps):
            if step >= record.consumed:
                record.lists[step] = indices
        record.known_steps = max(record.known_steps, steps.first_step + len(steps.counts) // 4)

    def _loader_heartbeat(self, peer: str, message: LoaderHeartbeat, _: float) -> list[Instruction]:
        self.consumers[peer].stats = message.stats
        return [Send(peer, Alive())]

    def _report_progress(self, peer: str, message: ReportProgress, _: float) -> list[Instruction]:
        self.consumers[peer].stats = message.stats
        record = self.sessions.get(message.session_id)
        if record is None:
            return [Send(peer, UnknownPeer())]
        for step in range(record.consumed, message.consumed) if record.lists else ():
            record.lists.pop(step, None)
        record.consumed = max(record.consumed, message.consumed)
        record.lost = {step for step in record.lost if step >= record.consumed}
        record.received = message.received
        record.window = message.window
        record.frontier = max(record.frontier, record.consumed)
        record.requeued = record.missing(record.requeued)
        if record.failures:
            record.retries = set(record.missing(record.retries))
            record.failures = {step: one for step, one in record.failures.items() if step >= record.consumed}
        for token in list(record.sent):
            lease = self.leases[token]
            if record.has_all(lease.first, lease.stop):
                self._forget(lease)
        return []

    def _close_epoch(self, peer: str, message: CloseEpoch, _: float) -> list[Instruction]:
        consumer = self.consumers[peer]
        consumer.stats = message.stats
        if message.session_id in self.sessions:
            self.sessions[message.session_id].consumed = message.consumed
        cause = "the program left the loop or reached its end"
        return [RememberStats(consumer.registration, message.stats), *self._end_session(message.session_id, cause)]

    def _leave_consumer(self, peer: str, message: LeaveConsumer, _: float) -> list[Instruction]:
        self.consumers[peer].stats = message.stats
        return self._drop_consumer(peer, "it was closed", orderly=True)

    def _drop_consumer(self, peer: str, cause: str, orderly: bool = False) -> list[Instruction]:
        consumer = self.consumers.pop(peer)
        who = _who(consumer.registration)
        self._tell(events.LoaderLost(**who, steps=consumer.stats.steps, orderly=orderly, cause=cause))
        out: list[Instruction] = [RememberStats(consumer.registration, consumer.stats)]
        for worker in self.workers.values():
            worker.unreachable.pop(peer, None)
        ended = [key for key, record in self.sessions.items() if record.consumer == peer]
        cause = "its loader is gone"
        return out + [instruction for key in ended for instruction in self._end_session(key, cause)]

    def _end_session(self, session_id: str, cause: str) -> list[Instruction]:
        record = self.sessions.pop(session_id, None)
        if record is None:
            return []
        if record.session.sharing is not None:
            self._shared.leave(record.session.sharing.key, session_id)
        for token in list(record.tokens):
            self._forget(self.leases[token])
        for worker in self.workers.values():
            worker.step_s.pop(session_id, None)
        cause = "all steps were taken" if record.consumed == record.num_steps else cause
        of = {"step": record.consumed, "num_steps": record.num_steps}
        self._tell(events.SessionClosed(session=session_id, **of, cause=cause))
        return [Send(worker, CloseSession(session_id)) for worker in self.workers]

    # --- data workers -----------------------------------------------------------------------------------------------

    def _register_worker(self, peer: str, message: RegisterWorker, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        if message.replaces in self.workers:
            out += self._lose_worker(message.replaces, now, f"its process {_reason(message)}")
        if peer in self.workers:
            number, cause = self.workers[peer].number, "its connection is back"
        else:
            number, self.workers_seen = self.workers_seen, self.workers_seen + 1
            self.workers_replaced += bool(message.replaces)
            cause = f"in the place of a process that {_reason(message)}" if message.replaces else ""
        old_tokens = self.workers[peer].tokens if peer in self.workers else set()
        work = self.workers[peer].work if peer in self.workers else WorkDone(now, RecentRates(now, 0, 0))
        self.workers[peer] = WorkerRecord(number, message.host, message.pid, now, work)
        host, pid, num_held = message.host, message.pid, len(message.held)
        self._tell(events.DataWorkerRegistered(data_worker=number, host=host, pid=pid, num_held=num_held, cause=cause))
        out += [RememberWorker(peer), Send(peer, WorkerRegistered(number))]
        held_tokens = {held.token for held in message.held}
        for token in old_tokens - held_tokens:
            out += self._revoke(self.leases[token], "the data worker registered again without it")
        for held in message.held:
            # A token of this start of the dispatcher that is not known any more was revoked: it stays revoked.
            if held.token in self.leases:
                self.workers[peer].tokens.add(held.token)
            elif held.token < self._token_base and now < self._grant_from:
                lease = Lease(held.token, held.session_id, peer, held.first_step, held.stop_step, now, held.shift)
                self._adopt(lease)
            else:
                out.append(Send(peer, RevokeLease(held.token, held.session_id, False, "leased to another data worker")))
        self._note_load(peer)
        self._expected -= {peer, message.replaces}
        if not self._expected:
            self._grant_from = min(self._grant_from, now)
        fate = message.fate
        if fate is not None and fate.failure is not None and fate.session_id in self.sessions:
            record = self.sessions[fate.session_id]
            out += self._note_failure(record, fate.step, fate.token, message.replaces, fate.failure)
        return out + self._announce(now)

    def _adopt(self, lease: Lease) -> None:
        self.leases[lease.token] = lease
        self.workers[lease.worker].tokens.add(lease.token)
        record = self.sessions.get(lease.session_id)
        if record is not None:
            steps = range(lease.first, lease.stop)
            record.tokens.add(lease.token)
            record.retries.difference_update(steps)
            record.requeued = [step for step in record.requeued if step not in steps]
            if lease.stop > record.frontier:
                skipped = record.missing(range(record.frontier, lease.first))
                record.requeued = sorted({*record.requeued, *skipped})
                record.frontier = lease.stop
            self._note_place(lease, record)

    def _worker_heartbeat(self, peer: str, message: WorkerHeartbeat, now: float) -> list[Instruction]:
        out: list[Instruction] = [Send(peer, Alive())]
        worker = self.workers[peer]
        for token in worker.tokens - set(message.tokens):
            lease = self.leases[token]
            if now - lease.granted_at > 2 * HEARTBEAT_S:
                out += self._revoke(lease, "the data worker does not know of it")
        for token in set(message.tokens) - worker.tokens:
            if token not in self.leases:
                out.append(Send(peer, RevokeLease(token, "", False, "leased to another data worker")))
        return out

    def _finish_lease(self, peer: str, message: FinishLease, now: float) -> list[Instruction]:
        self._shared.drop(peer, message.dropped)
        lease = self.leases.get(message.token)
        if lease is None or lease.worker != peer:
            return []
        worker = self.workers[peer]
        worker.tokens.discard(lease.token)
        worker.cached_tokens.discard(lease.token)
        self._note_load(peer)
        lease.status = LeaseStatus.SENT
        lease.sent_at = now
        worker.work.steps += lease.stop - lease.first
        worker.work.busy_s += message.busy_s
        if worker.tokens:
            self.leases[min(worker.tokens)].begun_at = now
        record = self.sessions.get(lease.session_id)
        if record is None:
            self._forget(lease)
            return []
        record.keep_snapshot(message.snapshot_step, message.snapshot)
        if not lease.cached and not lease.trimmed:
            step_s = message.busy_s / (lease.stop - lease.first)
            record.step_s = _smooth(record.step_s, step_s)
            worker.step_s[lease.session_id] = _smooth(worker.step_s.get(lease.session_id, 0.0), step_s)
        if record.has_all(lease.first, lease.stop):
            self._forget(lease)
        else:
            record.sent.add(lease.token)
        return []

    def _end_of_shard(self, peer: str, message: EndOfShard, _: float) -> list[Instruction]:
        lease = self.leases.get(message.token)
        record = self.sessions.get(message.session_id)
        if lease is None or record is None or lease.worker != peer or lease.session_id != message.session_id:
            return []
        if isinstance(record.session.order, ShardOrder) and message.num_steps >= 0 > record.num_steps:
            record.end_at(message.num_steps)
            self._tell(events.SessionMeasured(session=message.session_id, num_steps=message.num_steps))
        return []

    def _fail_lease(self, peer: str, message: FailLease, now: float) -> list[Instruction]:
        lease = self.leases.get(message.token)
        if lease is None or lease.worker != peer:
            return []
        return self._mark_unreachable(lease, now, message.reason) + self._revoke(lease, message.reason)

    def _fail_step(self, peer: str, message: FailStep, now: float) -> list[Instruction]:
        lease = self.leases.get(message.token)
        if lease is None or lease.worker != peer or not lease.first <= message.step < lease.stop:
            return []
        record, end = self.sessions.get(lease.session_id), lease.stop
        self._trim(lease, message.step)
        if record is not None:
            self._requeue(record, range(message.step + 1, end))
        out = self._finish_lease(peer, FinishLease(message.token, 0.0), now)
        if record is not None:
            out += self._note_failure(record, message.step, message.token, peer, message.failure)
        return out

    def _note_failure(
        self, record: SessionRecord, step: int, token: int, worker: str, failure: Failure
    ) -> list[Instruction]:
        """Count a failure of a step that the loader may still need, and act on the verdict."""
        if record.has(step):
            return []
        session = record.session
        failures = record.failures.setdefault(step, StepFailures())
        late = token <= failures.last_token  # of a lease from before something was left out
        verdict = Verdict.TRY_AGAIN if late else failures.note(worker, failure, session.errors)
        self._tell(
            events.StepFailed(
                session=session.session_id,
                step=step,
                sample=failure.sample_index,
                host=failure.host,
                pid=failure.pid,
                verdict=verdict.value,
                traceback=failure.remote_traceback,
                cause=f"{failure.error_type[1]}: {_first_line(failure.text)}",
            )
        )
        out: list[Instruction] = []
        elsewhere = [one for token in record.tokens if (one := self.leases[token]).first <= step < one.stop]
        if verdict is not Verdict.TRY_AGAIN:
            # A process that dies is heard of late: its step may be with another one already.
            failures.last_token = self._token_base + self.leases_granted
            for lease in elsewhere:
                out += self._revoke(lease, f"its step {step} is {verdict.value}")
        elif elsewhere:
            return out
        record.requeued = [one for one in record.requeued if one != step]
        if verdict is not Verdict.RAISE:
            record.retries.add(step)
            return out
        record.lost.add(step)
        return [*out, Send(record.consumer, BatchFailed(session.session_id, step, failure))]

    def _grant_retries(self, now: float) -> list[Instruction]:
        """Lease steps that failed, each alone, to data workers that have not failed them where there are such."""
        out: list[Instruction] = []
        for record in self.sessions.values():
            for step in sorted(record.retries):
                tried = record.failures[step].workers
                able = [p for p, one in self.workers.items() if one.unreachable.get(record.consumer, 0.0) <= now]
                fresh = [peer for peer in able if peer not in tried] or able
                peer = next((p for free in self._free for p in free if p in fresh), None)
                if peer is not None:
                    record.retries.discard(step)
                    self._hold(record, peer)
                    out.append(self._grant_steps(peer, record, range(step, step + 1), now))
        return out

    def _fetch_definition(self, peer: str, message: FetchDefinition, _: float) -> list[Instruction]:
        definition = self.definitions.get(message.definition_id)
        if definition is not None:
            return [Send(peer, _definition_of(definition))]
        self._waiting_for_definition.setdefault(message.definition_id, set()).add(peer)
        return []

    def _draining(self, peer: str, message: Draining, _: float) -> list[Instruction]:
        worker = self.workers[peer]
        self._begin_drain(peer, "it was told to stop")
        stops = dict(message.leases)
        for token in sorted(worker.tokens):
            lease = self.leases[token]
            record = self.sessions.get(lease.session_id)
            stop, end = stops.get(token, lease.first), lease.stop
            if stop < end:
                self._trim(lease, stop)
                if record is not None:
                    self._requeue(record, range(max(stop, lease.first), end))
        return []

    def _begin_drain(self, peer: str, cause: str) -> None:
        worker = self.workers[peer]
        if not worker.draining:
            self._tell(events.DataWorkerDrains(data_worker=worker.number, cause=cause))
        worker.draining = True
        self._note_load(peer)
        self._shared.lose(peer)

    def _leave_worker(self, peer: str, _: LeaveWorker, now: float) -> list[Instruction]:
        return self._lose_worker(peer, now, "left", orderly=True)

    def _lose_worker(self, peer: str, now: float, reason: str, orderly: bool = False) -> list[Instruction]:
        """After an orderly end, what it said it sent is on its way and waited for as from a worker that is there."""
        worker = self.workers.pop(peer)
        self.workers_lost += not orderly
        self._note_load(peer)
        self._shared.lose(peer)
        number, host, pid = worker.number, worker.host, worker.pid
        self._tell(events.DataWorkerLost(data_worker=number, host=host, pid=pid, orderly=orderly, cause=reason))
        out: list[Instruction] = [ForgetWorker(peer)]
        for lease in [lease for lease in self.leases.values() if lease.worker == peer]:
            record = self.sessions.get(lease.session_id)
            if orderly and lease.status is LeaseStatus.SENT:
                continue
            if record is None or not record.has_all(lease.first, lease.stop):
                out += self._revoke(lease, f"its data worker was lost: {reason}", orderly=orderly)
            else:
                self._forget(lease)
        return out + self._announce(now)

    # --- leases -----------------------------------------------------------------------------------------------------

    def _assign(self, now: float) -> list[Instruction]:
        """Hand out leases while a worker has a free place and a session has steps to lease."""
        out: list[Instruction] = []
        if now < self._grant_from:
            return out
        if now >= self._next_steal:
            self._next_steal = now + STEAL_GAIN_S
            out += self._steal(now)
        out += self._grant_retries(now)
        out += self._grant_cached(now)
        # Fewest leases first, so that a window is spread before anyone gets a second lease.
        for free in self._free:
            for peer in list(free):
                if all(record.leasable() == 0 for record in self.sessions.values()):
                    return out
                worker = self.workers[peer]
                record = self._neediest_session(peer, worker, now)
                if record is not None:
                    out.append(self._grant(peer, worker, record, now))
                    if record.session.sharing is not None:
                        out += self._grant_cached(now)
        return out

    def _note_load(self, peer: str) -> None:
        """File a worker under the number of its leases, after each change of it: `_assign` looks at no busy one."""
        worker = self.workers.get(peer)
        load = LEASES_PER_WORKER if worker is None or worker.draining else worker.num_making
        for number, free in enumerate(self._free):
            if number == load:
                free[peer] = None
            else:
                free.pop(peer, None)

    def _grant_cached(self, now: float) -> list[Instruction]:
        """Lease steps that a worker made, or is making, for another session to that worker, also beyond its share."""
        out: list[Instruction] = []
        for record in self.sessions.values() if self._shared else ():
            group = self._group_of(record)
            while group is not None and record.leasable() > 0:
                self._follow(record, group)
                first = record.next_step()
                holder = group.holder(record.position(first))
                if holder is None or not self._may_serve(self.workers[holder], record, now):
                    break
                out.append(self._grant(holder, self.workers[holder], record, now, MAX_LEASE_STEPS))
        return out

    def _may_serve(self, worker: WorkerRecord, record: SessionRecord, now: float) -> bool:
        return not worker.draining and worker.unreachable.get(record.consumer, 0.0) <= now

    def _group_of(self, record: SessionRecord) -> ShareGroup | None:
        sharing = record.session.sharing
        return self._shared.get(sharing.key) if sharing is not None else None

    def _join_group(self, record: SessionRecord, message: OpenEpoch, held: list[Lease]) -> None:
        session = record.session
        if session.sharing is None:
            return
        group = self._shared.join(session.sharing.key, session.session_id)
        shift = message.shift
        if _follows_window(record) and not (message.consumed or message.received or held):
            position = record.position(0) + shift
            shift += group.enter(max(0, position)) - position
        record.shifts = [(0, shift)]
        for lease in held:
            self._note_place(lease, record)

    def _follow(self, record: SessionRecord, group: ShareGroup) -> None:
        """In window mode, move a session on whose next steps have left the caches."""
        if record.requeued or not _follows_window(record):
            return
        position = record.position(record.frontier)
        moved = group.follow(position) - position
        if moved:
            record.shifts.append((record.frontier, record.shift(record.frontier) + moved))

    def _note_place(self, lease: Lease, record: SessionRecord) -> None:
        """A worker still makes these steps of a session, says the worker: others of the group get them there too."""
        group = self._group_of(record)
        if group is not None:
            if lease.shift != record.shift(lease.first):
                record.shifts.append((lease.first, lease.shift))
                record.shifts.sort()
            group.lease(record.position(lease.first), record.position(lease.stop - 1) + 1, lease.worker)

    def _neediest_session(self, peer: str, worker: WorkerRecord, now: float) -> SessionRecord | None:
        candidates = [
            record
            for record in self.sessions.values()
            if record.leasable() > 0
            and worker.unreachable.get(record.consumer, 0.0) <= now
            and self._may_have(peer, record, now)
        ]
        # What another data worker holds together is taken from it last.
        return min(candidates, key=lambda record: (record.holder not in ("", peer), record.fill()), default=None)

    def _may_have(self, peer: str, record: SessionRecord, now: float) -> bool:
        """Whether a data worker may have a lease of the session, which another one may be keeping together."""
        holder = self.workers.get(record.holder)
        if not record.session.kept_together or record.holder == peer or holder is None:
            return True
        if holder.unreachable.get(record.consumer, 0.0) > now:
            return True
        # One that has nothing takes a shard of one that has several; it pays for it by reading up to the position.
        held: dict[str, set[Hashable]] = {peer: set(), record.holder: set()}
        for other in self.sessions.values():
            if other.holder in held and (other.leasable() > 0 or other.tokens):
                held[other.holder].add(other.shard)
        return not held[peer] and len(held[record.holder]) > 1

    def _hold(self, record: SessionRecord, peer: str) -> None:
        """A worker has a lease of a session that is kept together, and so of all ranks' that read the same rounds."""
        if not record.session.kept_together or record.holder == peer:
            return
        record.holder = peer
        for other in self.sessions.values() if record.reads_rounds else ():
            if other.shard == record.shard:
                other.holder = peer

    def _grant(self, peer: str, worker: WorkerRecord, record: SessionRecord, now: float, size: int = 0) -> Send:
        kept_together = record.session.kept_together
        # The holder's own reader is already there.
        goes_on = record.holder == peer and not record.requeued
        self._hold(record, peer)
        if size == 0:
            share = max(1, record.leasable() // (LEASES_PER_WORKER * (1 if kept_together else len(self.workers))))
            step_s = worker.step_s.get(record.session.session_id, record.step_s)
            wanted = int(TARGET_LEASE_S / step_s) if step_s > 0 else 1
            size = max(1, min(share, wanted, MAX_LEASE_STEPS))
        if record.requeued:
            first = record.requeued[0]
            stop = first + 1
            while stop - first < size and stop - first < len(record.requeued) and record.requeued[stop - first] == stop:
                stop += 1
        else:
            first = record.frontier
            stop = min(first + size, record.consumed + record.window, record.known_steps)
        stop, cached, again = self._place(peer, record, first, stop)
        if record.requeued:
            record.requeued = record.requeued[stop - first :]
        else:
            record.frontier = stop
        snapshot = b"" if goes_on or not kept_together else record.snapshot_at(first)
        return self._grant_steps(peer, record, range(first, stop), now, cached, again, snapshot)

    def _grant_steps(
        self,
        peer: str,
        record: SessionRecord,
        of: range,
        now: float,
        cached: bool = False,
        again: bool = False,
        snapshot: bytes = b"",
    ) -> Send:
        worker, first, stop = self.workers[peer], of.start, of.stop
        self.leases_granted += 1
        token = self._token_base + self.leases_granted
        session = record.session
        shift = record.shift(first)
        self.leases[token] = Lease(token, session.session_id, peer, first, stop, now, shift, cached, begun_at=now)
        record.tokens.add(token)
        worker.tokens.add(token)
        if cached:
            worker.cached_tokens.add(token)
        self._note_load(peer)
        steps = _join_steps(first, stop, record.lists) if isinstance(session.order, ListedOrder) else None
        left_out = {step: one.left_out for step, one in record.failures.items() if step in of}
        return Send(peer, GrantLease(token, session, first, stop, steps, shift, again, left_out, snapshot))

    def _place(self, peer: str, record: SessionRecord, first: int, stop: int) -> tuple[int, bool, bool]:
        """Fit a lease of steps [first, stop) into the stream that the session shares.

        Returns:
            Where the lease must stop, so that all of it is alike; whether the worker has it in its cache, or will have;
            whether it was leased before.
        """
        group = self._group_of(record)
        if group is None:
            return stop, False, False
        self._follow(record, group)
        alike = _what_is_known(group, record, first)
        at = first + 1
        while at < stop and _what_is_known(group, record, at) == alike:
            at += 1
        holder, again, _ = alike
        cached = holder == peer
        if not cached:
            group.lease(record.position(first), record.position(at - 1) + 1, peer)
        return at, cached, again

    def _steal(self, now: float) -> list[Instruction]:
        """Give workers that have nothing to do the end of leases that others have not come to.

        Only where the last step is then made earlier by `STEAL_GAIN_S`, as far as the speeds are known: so steps do not
        go back and forth, and a slow worker does not take them from a fast one.
        """
        out: list[Instruction] = []
        for peer in list(self._free[0]):
            worker = self.workers[peer]
            if worker.tokens or any(self._has_steps_for(worker, record, now) for record in self.sessions.values()):
                continue
            best = max(self._thefts(worker, now), key=lambda theft: theft.gain_s, default=None)
            if best is not None and best.gain_s >= STEAL_GAIN_S:
                lease, record, stop = best.lease, self.sessions[best.lease.session_id], best.lease.stop
                self._tell(
                    events.LeaseTrimmed(
                        **self._of_lease(lease, first_step=best.cut),
                        to_data_worker=worker.number,
                        cause=f"the last step is made {best.gain_s:.2f} s earlier",
                    )
                )
                self._trim(lease, best.cut)
                out.append(Send(lease.worker, TrimLease(lease.token, best.cut)))
                out.append(self._grant_steps(peer, record, range(best.cut, stop), now))
        return out

    def _has_steps_for(self, worker: WorkerRecord, record: SessionRecord, now: float) -> bool:
        return record.leasable() > 0 and worker.unreachable.get(record.consumer, 0.0) <= now

    def _thefts(self, thief: WorkerRecord, now: float) -> Iterable[_Theft]:
        for worker in self.workers.values():
            ahead_s = 0.0  # until the worker comes to the part of the lease that it has not begun
            slowest_s = 0.0
            for place, token in enumerate(sorted(worker.tokens)):
                lease = self.leases[token]
                record = self.sessions.get(lease.session_id)
                if record is None:
                    continue
                elapsed_s = now - lease.begun_at
                step_s = max(worker.step_s.get(lease.session_id, record.step_s), slowest_s)
                first = lease.first
                if place == 0:
                    made = len(range(lease.first, lease.stop)) - len(record.missing(range(lease.first, lease.stop)))
                    step_s = max(step_s, (elapsed_s - _REPORT_DELAY_S) / (made + 1))
                    first += 1 + max(made, int(elapsed_s / step_s) if step_s > 0 else 0)
                    ahead_s = slowest_s = step_s
                num_steps = max(0, lease.stop - first)
                if num_steps and self._may_steal(thief, lease, record, now):
                    thief_s = thief.step_s.get(lease.session_id, _UNKNOWN_STEP_S)
                    end_s = ahead_s + num_steps * step_s
                    stolen = min(num_steps, int(end_s / (thief_s + step_s)))
                    if stolen:
                        new_end_s = max(stolen * thief_s, ahead_s + (num_steps - stolen) * step_s)
                        yield _Theft(lease, lease.stop - stolen, end_s - new_end_s)
                ahead_s += num_steps * step_s

    def _may_steal(self, thief: WorkerRecord, lease: Lease, record: SessionRecord, now: float) -> bool:
        session = record.session
        chosen = any(lease.first <= step < lease.stop for step in record.failures)  # for who has not failed it
        any_worker_can = not session.kept_together and session.sharing is None and not chosen
        return any_worker_can and thief.unreachable.get(record.consumer, 0.0) <= now

    def _trim(self, lease: Lease, stop: int) -> None:
        """Take the steps at or above `stop` out of a lease; whoever calls says where they go."""
        if stop <= lease.first:
            self._forget(lease)
        else:
            lease.stop, lease.trimmed = stop, True

    def _requeue(self, record: SessionRecord, steps: range) -> None:
        """Put those of the steps that are neither there nor leased first in the queue of their session."""
        others = [range(self.leases[token].first, self.leases[token].stop) for token in record.tokens]
        free = [step for step in record.missing(steps) if not any(step in other for other in others)]
        record.requeued = sorted({*record.requeued, *free})

    def _revoke(self, lease: Lease, reason: str, reconnect: bool = False, orderly: bool = False) -> list[Instruction]:
        """Take a lease back and put its missing steps first in the queue of its session.

        In a session that is read at most once they are lost, unless the data worker left in an orderly way.
        """
        self._forget(lease)
        self.leases_revoked += 1
        self._tell(events.LeaseRevoked(**self._of_lease(lease, lease.first), cause=reason))
        out: list[Instruction] = []
        if lease.worker in self.workers:
            self.workers[lease.worker].work.leases_revoked += 1
            out.append(Send(lease.worker, RevokeLease(lease.token, lease.session_id, reconnect, reason)))
        record = self.sessions.get(lease.session_id)
        if record is not None:
            out.append(Send(record.consumer, LeaseRevoked(lease.session_id, lease.token)))
            missing = record.missing(range(lease.first, lease.stop))
            if missing and record.session.at_most_once and not orderly:
                return out + self._lose_steps(record, missing)
            self._requeue(record, range(lease.first, lease.stop))
        return out

    def _lose_steps(self, record: SessionRecord, missing: list[int]) -> list[Instruction]:
        """Give up steps of a session that is read at most once; of a shard all that follow, too."""
        session_id, cause = record.session.session_id, "a data worker held them, and the pass is read at most once"
        if isinstance(record.session.order, ShardOrder):
            self._tell(events.StepsGivenUp(session=session_id, ranges=[(missing[0], -1)], cause=cause))
            record.end_at(missing[0])
            return [Send(record.consumer, StepsLost(session_id, missing[0], -1))]
        self._tell(events.StepsGivenUp(session=session_id, ranges=as_ranges(missing), cause=cause))
        record.lost.update(missing)
        return [Send(record.consumer, StepsLost(session_id, first, stop)) for first, stop in as_ranges(missing)]

    def _forget(self, lease: Lease) -> None:
        del self.leases[lease.token]
        if lease.worker in self.workers:
            self.workers[lease.worker].tokens.discard(lease.token)
            self.workers[lease.worker].cached_tokens.discard(lease.token)
            self._note_load(lease.worker)
        if lease.session_id in self.sessions:
            self.sessions[lease.session_id].tokens.discard(lease.token)
            self.sessions[lease.session_id].sent.discard(lease.token)

    def _mark_unreachable(self, lease: Lease, now: float, reason: str) -> list[Instruction]:
        record = self.sessions.get(lease.session_id)
        if record is None or lease.worker not in self.workers:
            return []
        worker, rank = self.workers[lease.worker], self.consumers[record.consumer].registration.rank
        worker.unreachable[record.consumer] = now + UNREACHABLE_S
        self._tell(
            events.DataWorkerUnreachable(data_worker=worker.number, rank=rank, for_s=UNREACHABLE_S, cause=reason)
        )
        return self._announce(now)

    def refuse(self, peer: str, error: ProtocolError) -> list[Instruction]:
        """Answer what was no message, or none for a dispatcher."""
        return self._refuse(peer, "ProtocolError", str(error))

    def _refuse(self, peer: str, code: str, text: str) -> list[Instruction]:
        self._tell(events.MessageRefused(peer=peer, cause=text))
        return [Send(peer, Refused(code, text))]

    # --- membership -------------------------------------------------------------------------------------------------

    def _reachable_workers(self, consumer: str, now: float) -> int:
        return sum(worker.unreachable.get(consumer, 0.0) <= now for worker in self.workers.values())

    def _announce(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for peer, consumer in self.consumers.items():
            count = self._reachable_workers(peer, now)
            if count != consumer.announced_workers:
                consumer.announced_workers = count
                out.append(Send(peer, Membership(count)))
        return out

    def _tell(self, event: events.Event) -> None:
        self.story.append(event)
        self.events_told += 1

    def _of_lease(self, lease: Lease, first_step: int) -> dict[str, Any]:
        worker = self.workers.get(lease.worker)
        return {
            "lease": lease.token,
            "session": lease.session_id,
            "data_worker": worker.number if worker is not None else -1,
            "first_step": first_step,
            "stop_step": lease.stop,
        }

    def validate(self) -> None:
        """Check the invariants; tests call it after every event.

        Raises:
            AssertionError: with the story, when one does not hold.
        """
        story = "\n".join(event.render() for event in self.story)
        for load, free in enumerate(self._free):
            loads = {p for p, worker in self.workers.items() if worker.num_making == load and not worker.draining}
            assert set(free) == loads, f"workers with {load} leases are filed wrongly\n{story}"
        for token, lease in self.leases.items():
            active = lease.worker in self.workers and token in self.workers[lease.worker].tokens
            assert active == (lease.status is LeaseStatus.ACTIVE), f"lease {token} and its worker disagree\n{story}"
        for record in self.sessions.values():
            leased = [s for t in record.tokens for s in range(self.leases[t].first, self.leases[t].stop)]
            assert record.requeued == sorted(set(record.requeued)), f"requeued steps out of order\n{story}"
            assert not set(leased) & set(record.requeued), f"a step is leased and requeued\n{story}"
            assert not record.retries & {*leased, *record.requeued}, f"a step to be tried again is leased\n{story}"
            covered = {*leased, *record.requeued, *record.retries}
            lost = [s for s in record.missing(range(record.consumed, record.frontier)) if s not in covered]
            assert not lost, f"steps {lost} are neither there nor leased nor requeued\n{story}"


def _reason(message: RegisterWorker) -> str:
    return message.fate.reason if message.fate is not None else "ended"


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:200]


def _what_is_known(group: ShareGroup, record: SessionRecord, step: int) -> tuple[str | None, bool, int]:
    position = record.position(step)
    return group.holder(position), group.was_leased(position), record.shift(step)


def _follows_window(record: SessionRecord) -> bool:
    return record.session.sharing is not None and record.session.sharing.mode == "window"


@dataclass(frozen=True)
class _Theft:
    """Steps [cut, stop) of a lease could go to an idle worker; the last step would be made `gain_s` earlier."""

    lease: Lease
    cut: int
    gain_s: float


def _who(loader: RegisterConsumer) -> dict[str, Any]:
    return {"job": loader.job_name, "rank": loader.rank, "host": loader.host, "pid": loader.pid}


def _smooth(old_s: float, new_s: float) -> float:
    return new_s if old_s == 0 else 0.8 * old_s + 0.2 * new_s


def _conflict(theirs: RegisterConsumer, ours: RegisterConsumer) -> str:
    keys = sorted({*theirs.description, *ours.description})
    differences = [
        f"{key}: {theirs.description.get(key)} there, {ours.description.get(key)} here"
        for key in keys
        if theirs.description.get(key) != ours.description.get(key)
    ]
    return (
        f"job name {ours.job_name!r} is in use by process {theirs.pid} on {theirs.host} with another pipeline "
        f"({'; '.join(differences)}). Programs of one job name must read the same data; give this one another "
        "job_name (or HETSTREAM_JOB_NAME)."
    )


def _definition_of(provided: ProvideDefinition) -> Definition:
    return Definition(provided.definition_id, provided.sys_path, provided.working_dir, provided.blob)


def _split_steps(steps: StepList) -> Iterable[tuple[int, bytes]]:
    counts = memoryview(steps.counts).cast("i")
    offset = 0
    for number, count in enumerate(counts):
        yield steps.first_step + number, steps.indices[offset : offset + 8 * count]
        offset += 8 * count


def _join_steps(first: int, stop: int, lists: dict[int, bytes]) -> StepList:
    counts = array.array("i", (len(lists[step]) // 8 for step in range(first, stop)))
    return StepList(first, counts.tobytes(), b"".join(lists[step] for step in range(first, stop)))


_HANDLERS: dict[type[Message], Callable[[DispatcherState, str, Any, float], list[Instruction]]] = {
    ProvideDefinition: DispatcherState._provide_definition,
    OpenEpoch: DispatcherState._open_epoch,
    ExtendEpoch: DispatcherState._extend_epoch,
    LoaderHeartbeat: DispatcherState._loader_heartbeat,
    ReportProgress: DispatcherState._report_progress,
    CloseEpoch: DispatcherState._close_epoch,
    LeaveConsumer: DispatcherState._leave_consumer,
    WorkerHeartbeat: DispatcherState._worker_heartbeat,
    FinishLease: DispatcherState._finish_lease,
    FailLease: DispatcherState._fail_lease,
    FailStep: DispatcherState._fail_step,
    EndOfShard: DispatcherState._end_of_shard,
    FetchDefinition: DispatcherState._fetch_definition,
    Draining: DispatcherState._draining,
    LeaveWorker: DispatcherState._leave_worker,
}
