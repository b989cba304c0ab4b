"""What the dispatcher decides: (state, message, now) -> instructions. No socket, no clock, no disk.

The loader is the authority on what it has: a step counts as done when the loader reports it received or consumed.
The dispatcher hands out the steps that are inside the loader's window and not yet there, as leases with a fencing
token; a lease whose worker is lost, silent or unable to deliver is revoked and its missing steps are leased again.
A batch is a pure function of its session and step, so making one twice is waste, never damage.

A lease goes ACTIVE -> SENT -> (gone). ACTIVE: a worker makes its steps. SENT: the worker has sent them all and the
loader has not reported all of them. From either it may be revoked.
"""

from __future__ import annotations

import array
import enum
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mpi_dataworkers.messages import (
    Alive,
    CloseEpoch,
    CloseSession,
    ConsumerRegistered,
    Definition,
    ExtendEpoch,
    FailLease,
    FetchDefinition,
    FinishLease,
    GrantLease,
    LeaseRevoked,
    LeaveConsumer,
    LeaveWorker,
    LoaderHeartbeat,
    LoaderStats,
    LoaderToDispatcher,
    Membership,
    Message,
    OpenEpoch,
    PlannedOrder,
    ProvideDefinition,
    Ranges,
    Refused,
    RegisterConsumer,
    RegisterWorker,
    ReportProgress,
    RevokeLease,
    Session,
    StepList,
    UnknownPeer,
    WorkerHeartbeat,
    WorkerRegistered,
    WorkerToDispatcher,
)

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
# After a restart, wait for workers to tell what they hold before leasing the same steps to others.
RECOVERY_GRACE_S = 3 * HEARTBEAT_S
# One lease in work and one waiting: the worker never idles for a round trip.
LEASES_PER_WORKER = 2
# Long enough that control costs nothing, short enough that the tail of a window is shared among workers.
TARGET_LEASE_S = 0.02
MAX_LEASE_STEPS = 64

# Long enough for one burst of messages, which is what the server logs at a time.
_STORY_LENGTH = 512


class LeaseStatus(enum.Enum):
    """Where a lease is."""

    ACTIVE = "ACTIVE"
    SENT = "SENT"


@dataclass(frozen=True)
class Send:
    """Instruction: send a message to a peer."""

    peer: str
    message: Message


@dataclass(frozen=True)
class RememberDefinition:
    """Instruction: journal a pipeline definition before anything that follows in the same batch of instructions."""

    definition: ProvideDefinition


@dataclass(frozen=True)
class RememberStats:
    """Instruction: journal what a loader has delivered."""

    consumer: RegisterConsumer
    stats: LoaderStats


@dataclass(frozen=True)
class ForgetDefinition:
    """Instruction: take a pipeline that no loader uses out of the journal."""

    definition_id: str


Instruction = Send | RememberDefinition | ForgetDefinition | RememberStats


@dataclass
class Lease:
    """Steps [first, stop) of a session in the hands of a worker."""

    token: int
    session_id: str
    worker: str
    first: int
    stop: int
    granted_at: float
    status: LeaseStatus = LeaseStatus.ACTIVE
    sent_at: float = 0.0


@dataclass
class WorkerRecord:
    """One data worker process.

    Attributes:
        number: its number in order of arrival, from 0.
        last_seen: time of its last message, s.
        tokens: leases it holds in status ACTIVE.
        unreachable: consumers it could not reach, with the time until which it is not tried again.
    """

    number: int
    host: str
    pid: int
    last_seen: float
    tokens: set[int] = field(default_factory=set)
    unreachable: dict[str, float] = field(default_factory=dict)


@dataclass
class ConsumerRecord:
    """One loader of one rank.

    Attributes:
        announced_workers: the number of data workers it was last told of.
        steady_since: it was never silent for longer than `LOADER_PAUSE_S` since then.
    """

    registration: RegisterConsumer
    last_seen: float
    stats: LoaderStats = field(default_factory=LoaderStats)
    announced_workers: int = -1
    steady_since: float = 0.0


@dataclass
class SessionRecord:
    """One pass over an epoch.

    Attributes:
        consumer: peer id of the loader.
        num_steps: total, or -1 while unknown.
        known_steps: steps [0, known_steps) may be leased; all of them for a planned order.
        lists: indices of listed steps not yet consumed, by step.
        consumed: steps below it reached the training loop.
        received: ranges at or above `consumed` in the loader's buffer.
        window: steps at or above `consumed + window` are not leased yet.
        frontier: steps at or above it were never leased.
        requeued: steps below `frontier` that have to be leased again, ascending.
        tokens: its leases.
        step_s: smoothed time a worker needs for a step, 0 while unknown.
    """

    session: Session
    consumer: str
    num_steps: int
    known_steps: int
    consumed: int
    received: Ranges
    window: int
    frontier: int
    lists: dict[int, bytes] = field(default_factory=dict)
    requeued: list[int] = field(default_factory=list)
    tokens: set[int] = field(default_factory=set)
    step_s: float = 0.0

    def has(self, step: int) -> bool:
        """Whether the loader has this step."""
        return step < self.consumed or any(first <= step < stop for first, stop in self.received)

    def missing(self, steps: Iterable[int]) -> list[int]:
        """Those of the steps that the loader does not have."""
        return [step for step in steps if not self.has(step)]

    def leasable(self) -> int:
        """How many steps may be leased now."""
        limit = min(self.consumed + self.window, self.known_steps)
        return len(self.requeued) + max(0, limit - self.frontier)

    def fill(self) -> float:
        """How full the loader's window is with steps that are there or on their way, 0 to 1."""
        return 1 - self.leasable() / max(1, self.window)


class DispatcherState:
    """All that the dispatcher knows.

    Args:
        incarnation: number of this start of the dispatcher, from 1; the high half of every fencing token, so that
            tokens grow across restarts without journaling each one.
        now: time of the start, s, on the clock of all later calls.
    """

    def __init__(self, incarnation: int, now: float) -> None:
        self.workers: dict[str, WorkerRecord] = {}
        self.consumers: dict[str, ConsumerRecord] = {}
        self.sessions: dict[str, SessionRecord] = {}
        self.leases: dict[int, Lease] = {}
        self.definitions: dict[str, ProvideDefinition] = {}
        self.workers_seen = 0
        self.leases_granted = 0
        self.leases_revoked = 0
        self.story: deque[str] = deque(maxlen=_STORY_LENGTH)
        self.lines_told = 0
        self._waiting_for_definition: dict[str, set[str]] = {}
        self._token_base = incarnation << 32
        self._grant_from = now + (RECOVERY_GRACE_S if incarnation > 1 else 0.0)

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
            return [Send(peer, Refused("ProtocolError", f"{type(message).__name__} is no message of a {role}"))]
        return _HANDLERS[type(message)](self, peer, message, now) + self._assign(now)

    def peer_gone(self, peer: str, now: float) -> list[Instruction]:
        """A peer's connection closed. If only the network blinked, the peer registers again and says what it has."""
        out: list[Instruction] = []
        if peer in self.workers:
            out = self._lose_worker(peer, now, "its connection closed")
        elif peer in self.consumers:
            self._tell(f"loader rank={self.consumers[peer].registration.rank} lost: its connection closed")
            out = self._drop_consumer(peer)
        return out + self._assign(now)

    def tick(self, now: float) -> list[Instruction]:
        """Let time pass: find the silent and the undelivered, lease their steps again."""
        out: list[Instruction] = []
        for peer, worker in list(self.workers.items()):
            if now - worker.last_seen > WORKER_TIMEOUT_S:
                out += self._lose_worker(peer, now, f"silent for {now - worker.last_seen:.1f} s")
        for peer, consumer in list(self.consumers.items()):
            if now - consumer.last_seen > CONSUMER_TIMEOUT_S:
                silence_s = now - consumer.last_seen
                self._tell(f"loader rank={consumer.registration.rank} lost: silent for {silence_s:.1f} s")
                out += self._drop_consumer(peer)
        for lease in list(self.leases.values()):
            if lease.status is LeaseStatus.SENT and self._unreported_s(lease, now) > ARRIVAL_TIMEOUT_S:
                out += self._mark_unreachable(lease, now)
                out += self._revoke(lease, f"sent {now - lease.sent_at:.1f} s ago and not received", reconnect=True)
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

    # --- loaders ----------------------------------------------------------------------------------------------------

    def _register_consumer(self, peer: str, message: RegisterConsumer, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for other_peer, other in list(self.consumers.items()):
            theirs = other.registration
            if other_peer == peer or (theirs.job_name, theirs.ordinal) != (message.job_name, message.ordinal):
                continue
            if theirs.description != message.description:
                return [Send(peer, Refused("JobNameConflict", _conflict(theirs, message)))]
            if theirs.rank == message.rank:
                text = (
                    f"rank {message.rank} of job {message.job_name!r} was registered again by process {message.pid} on "
                    f"{message.host}; this process ({theirs.pid} on {theirs.host}) no longer receives batches."
                )
                self._tell(text)
                out.append(Send(other_peer, Refused("Superseded", text)))
                out += self._drop_consumer(other_peer)
        known = self.consumers.get(peer)
        self.consumers[peer] = ConsumerRecord(message, now, known.stats if known else LoaderStats())
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
        for worker in sorted(self._waiting_for_definition.pop(message.definition_id, ())):
            out.append(Send(worker, _definition_of(message)))
        return out

    def _open_epoch(self, peer: str, message: OpenEpoch, _: float) -> list[Instruction]:
        session = message.session
        known = message.num_steps if isinstance(session.order, PlannedOrder) else message.consumed
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
        self.sessions[session.session_id] = record
        if message.steps is not None:
            self._take_steps(record, message.steps)
        # A pass that is declared again after this dispatcher's restart: workers may hold leases of it.
        held = [lease for lease in self.leases.values() if lease.session_id == session.session_id]
        record.tokens = {lease.token for lease in held}
        reached = max([stop for _, stop in message.received] + [lease.stop for lease in held], default=message.consumed)
        record.frontier = max(message.consumed, reached)
        leased = {step for lease in held for step in range(lease.first, lease.stop)}
        record.requeued = [s for s in record.missing(range(message.consumed, record.frontier)) if s not in leased]
        self._tell(f"session={session.session_id} epoch={session.epoch} opened at step {message.consumed}")
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
        for step in range(record.consumed, message.consumed):
            record.lists.pop(step, None)
        record.consumed = max(record.consumed, message.consumed)
        record.received = message.received
        record.window = message.window
        record.frontier = max(record.frontier, record.consumed)
        record.requeued = record.missing(record.requeued)
        for token in list(record.tokens):
            lease = self.leases[token]
            if lease.status is LeaseStatus.SENT and not record.missing(range(lease.first, lease.stop)):
                self._forget(lease)
        return []

    def _close_epoch(self, peer: str, message: CloseEpoch, _: float) -> list[Instruction]:
        consumer = self.consumers[peer]
        consumer.stats = message.stats
        if message.session_id in self.sessions:
            self.sessions[message.session_id].consumed = message.consumed
        return [RememberStats(consumer.registration, message.stats), *self._end_session(message.session_id)]

    def _leave_consumer(self, peer: str, message: LeaveConsumer, _: float) -> list[Instruction]:
        self.consumers[peer].stats = message.stats
        return self._drop_consumer(peer)

    def _drop_consumer(self, peer: str) -> list[Instruction]:
        consumer = self.consumers.pop(peer)
        out: list[Instruction] = [RememberStats(consumer.registration, consumer.stats)]
        for worker in self.workers.values():
            worker.unreachable.pop(peer, None)
        ended = [key for key, record in self.sessions.items() if record.consumer == peer]
        return out + [instruction for key in ended for instruction in self._end_session(key)]

    def _end_session(self, session_id: str) -> list[Instruction]:
        record = self.sessions.pop(session_id, None)
        if record is None:
            return []
        for token in list(record.tokens):
            self._forget(self.leases[token])
        self._tell(f"session={session_id} closed at step {record.consumed} of {record.num_steps}")
        return [Send(worker, CloseSession(session_id)) for worker in self.workers]

    # --- data workers -----------------------------------------------------------------------------------------------

    def _register_worker(self, peer: str, message: RegisterWorker, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        if message.replaces in self.workers:
            out += self._lose_worker(message.replaces, now, "its process ended")
        if peer in self.workers:
            number = self.workers[peer].number
        else:
            number, self.workers_seen = self.workers_seen, self.workers_seen + 1
        old_tokens = self.workers[peer].tokens if peer in self.workers else set()
        self.workers[peer] = WorkerRecord(number, message.host, message.pid, now)
        self._tell(f"data_worker={number} host={message.host} pid={message.pid} registered")
        out.append(Send(peer, WorkerRegistered(number)))
        held_tokens = {held.token for held in message.held}
        for token in old_tokens - held_tokens:
            out += self._revoke(self.leases[token], "the data worker registered again without it")
        for held in message.held:
            # A token of this start of the dispatcher that is not known any more was revoked: it stays revoked.
            if held.token in self.leases:
                self.workers[peer].tokens.add(held.token)
            elif held.token < self._token_base and now < self._grant_from:
                lease = Lease(held.token, held.session_id, peer, held.first_step, held.stop_step, now)
                self._adopt(lease)
            else:
                out.append(Send(peer, RevokeLease(held.token, held.session_id, False, "leased to another data worker")))
        return out + self._announce(now)

    def _adopt(self, lease: Lease) -> None:
        self.leases[lease.token] = lease
        self.workers[lease.worker].tokens.add(lease.token)
        record = self.sessions.get(lease.session_id)
        if record is not None:
            steps = range(lease.first, lease.stop)
            record.tokens.add(lease.token)
            record.requeued = [step for step in record.requeued if step not in steps]
            if lease.stop > record.frontier:
                skipped = record.missing(range(record.frontier, lease.first))
                record.requeued = sorted({*record.requeued, *skipped})
                record.frontier = lease.stop

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
        lease = self.leases.get(message.token)
        if lease is None or lease.worker != peer:
            return []
        self.workers[peer].tokens.discard(lease.token)
        lease.status = LeaseStatus.SENT
        lease.sent_at = now
        record = self.sessions.get(lease.session_id)
        if record is None:
            self._forget(lease)
            return []
        step_s = message.busy_s / (lease.stop - lease.first)
        record.step_s = step_s if record.step_s == 0 else 0.8 * record.step_s + 0.2 * step_s
        if not record.missing(range(lease.first, lease.stop)):
            self._forget(lease)
        return []

    def _fail_lease(self, peer: str, message: FailLease, now: float) -> list[Instruction]:
        lease = self.leases.get(message.token)
        if lease is None or lease.worker != peer:
            return []
        return self._mark_unreachable(lease, now) + self._revoke(lease, message.reason)

    def _fetch_definition(self, peer: str, message: FetchDefinition, _: float) -> list[Instruction]:
        definition = self.definitions.get(message.definition_id)
        if definition is not None:
            return [Send(peer, _definition_of(definition))]
        self._waiting_for_definition.setdefault(message.definition_id, set()).add(peer)
        return []

    def _leave_worker(self, peer: str, _: LeaveWorker, now: float) -> list[Instruction]:
        return self._lose_worker(peer, now, "left")

    def _lose_worker(self, peer: str, now: float, reason: str) -> list[Instruction]:
        worker = self.workers.pop(peer)
        self._tell(f"data_worker={worker.number} host={worker.host} pid={worker.pid} lost: {reason}")
        out: list[Instruction] = []
        for lease in [lease for lease in self.leases.values() if lease.worker == peer]:
            record = self.sessions.get(lease.session_id)
            if record is None or record.missing(range(lease.first, lease.stop)):
                out += self._revoke(lease, f"its data worker was lost: {reason}")
            else:
                self._forget(lease)
        return out + self._announce(now)

    # --- leases -----------------------------------------------------------------------------------------------------

    def _assign(self, now: float) -> list[Instruction]:
        """Hand out leases while a worker has a free place and a session has steps to lease."""
        out: list[Instruction] = []
        if now < self._grant_from:
            return out
        progress = True
        while progress:
            progress = False
            # Fewest leases first, so that a window is spread before anyone gets a second lease.
            for peer, worker in sorted(self.workers.items(), key=lambda item: len(item[1].tokens)):
                if len(worker.tokens) >= LEASES_PER_WORKER:
                    break
                record = self._neediest_session(worker, now)
                if record is not None:
                    out.append(self._grant(peer, worker, record, now))
                    progress = True
        return out

    def _neediest_session(self, worker: WorkerRecord, now: float) -> SessionRecord | None:
        candidates = [
            record
            for record in self.sessions.values()
            if record.leasable() > 0 and worker.unreachable.get(record.consumer, 0.0) <= now
        ]
        return min(candidates, key=lambda record: record.fill(), default=None)

    def _grant(self, peer: str, worker: WorkerRecord, record: SessionRecord, now: float) -> Send:
        share = max(1, record.leasable() // (LEASES_PER_WORKER * len(self.workers)))
        wanted = int(TARGET_LEASE_S / record.step_s) if record.step_s > 0 else 1
        size = max(1, min(share, wanted, MAX_LEASE_STEPS))
        if record.requeued:
            first = record.requeued[0]
            stop = first + 1
            while stop - first < size and stop - first < len(record.requeued) and record.requeued[stop - first] == stop:
                stop += 1
            record.requeued = record.requeued[stop - first :]
        else:
            first = record.frontier
            stop = min(first + size, record.consumed + record.window, record.known_steps)
            record.frontier = stop
        self.leases_granted += 1
        token = self._token_base + self.leases_granted
        session = record.session
        self.leases[token] = Lease(token, session.session_id, peer, first, stop, now)
        record.tokens.add(token)
        worker.tokens.add(token)
        steps = None if isinstance(session.order, PlannedOrder) else _join_steps(first, stop, record.lists)
        return Send(peer, GrantLease(token, session, first, stop, steps))

    def _revoke(self, lease: Lease, reason: str, reconnect: bool = False) -> list[Instruction]:
        """Take a lease back and put its missing steps first in the queue of its session."""
        self._forget(lease)
        self.leases_revoked += 1
        self._tell(f"lease={lease.token} steps={lease.first}-{lease.stop} revoked: {reason}")
        out: list[Instruction] = []
        if lease.worker in self.workers:
            out.append(Send(lease.worker, RevokeLease(lease.token, lease.session_id, reconnect, reason)))
        record = self.sessions.get(lease.session_id)
        if record is not None:
            out.append(Send(record.consumer, LeaseRevoked(lease.session_id, lease.token)))
            record.requeued = sorted({*record.requeued, *record.missing(range(lease.first, lease.stop))})
        return out

    def _forget(self, lease: Lease) -> None:
        del self.leases[lease.token]
        if lease.worker in self.workers:
            self.workers[lease.worker].tokens.discard(lease.token)
        if lease.session_id in self.sessions:
            self.sessions[lease.session_id].tokens.discard(lease.token)

    def _mark_unreachable(self, lease: Lease, now: float) -> list[Instruction]:
        record = self.sessions.get(lease.session_id)
        if record is None or lease.worker not in self.workers:
            return []
        self.workers[lease.worker].unreachable[record.consumer] = now + UNREACHABLE_S
        return self._announce(now)

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

    def _tell(self, line: str) -> None:
        self.story.append(line)
        self.lines_told += 1

    def validate(self) -> None:
        """Check the invariants; tests call it after every event.

        Raises:
            AssertionError: with the story, when one does not hold.
        """
        story = "\n".join(self.story)
        for token, lease in self.leases.items():
            active = lease.worker in self.workers and token in self.workers[lease.worker].tokens
            assert active == (lease.status is LeaseStatus.ACTIVE), f"lease {token} and its worker disagree\n{story}"
        for record in self.sessions.values():
            leased = [s for t in record.tokens for s in range(self.leases[t].first, self.leases[t].stop)]
            assert record.requeued == sorted(set(record.requeued)), f"requeued steps out of order\n{story}"
            assert not set(leased) & set(record.requeued), f"a step is leased and requeued\n{story}"
            covered = {*leased, *record.requeued}
            lost = [s for s in record.missing(range(record.consumed, record.frontier)) if s not in covered]
            assert not lost, f"steps {lost} are neither there nor leased nor requeued\n{story}"


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
    FetchDefinition: DispatcherState._fetch_definition,
    LeaveWorker: DispatcherState._leave_worker,
}
