"""What the dispatcher decides: (state, message, now) -> instructions. No socket, no clock, no disk.

The loader is the authority on what it has: a step counts as done when the loader reports it received or consumed.
The dispatcher hands out the steps that are inside the loader's window and not yet there, as leases with a fencing
token; a lease whose worker is lost, silent or unable to deliver is revoked and its missing steps are leased again.
A batch is a pure function of its session and step, so making one twice is waste, never damage.

Here messages are taken in, and peers come and go; which worker gets which steps is decided in `leasing.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.leasing import first_line
from hetstream.mpi_dataworkers.dispatcher.matching import RanksSeen, cannot_be_one_job, conflict, key_of
from hetstream.mpi_dataworkers.dispatcher.records import (
    Binding,
    ForgetDefinition,
    ForgetWorker,
    Instruction,
    Lease,
    LeaseStatus,
    LoaderRecord,
    RememberDefinition,
    RememberStats,
    RememberWorker,
    Send,
    SessionRecord,
    WorkDone,
    WorkerRecord,
)
from hetstream.mpi_dataworkers.dispatcher.rooms import Rooms
from hetstream.mpi_dataworkers.dispatcher.sharing import Reader, different_under_one_name, shares_with_nobody
from hetstream.mpi_dataworkers.dispatcher.status import note_rates, status_of
from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.rates import RecentRates
from hetstream.mpi_dataworkers.wire.messages import (
    Alive,
    BatchFailed,
    CloseSession,
    Draining,
    DrainWorker,
    DropDefinition,
    DropSession,
    EndOfShard,
    ExtendSession,
    FailLease,
    FailStep,
    Failure,
    FetchDefinition,
    FinishLease,
    LeaveLoader,
    LeaveWorker,
    ListedOrder,
    LoaderHeartbeat,
    LoaderRegistered,
    LoaderStats,
    LoaderToDispatcher,
    Message,
    NeedDefinition,
    Notice,
    OpenSession,
    ProvideDefinition,
    Refused,
    RegisterLoader,
    RegisterWorker,
    ReportProgress,
    RequestStatus,
    RevokeLease,
    ShardOrder,
    Status,
    SteerDataWorkers,
    StepList,
    UnknownPeer,
    WorkerHeartbeat,
    WorkerRegistered,
    WorkerToDispatcher,
)
from hetstream.mpi_dataworkers.worker.failures import StepFailures, Verdict
from hetstream.mpi_dataworkers.worker.programs import why_unfit

# A worker is lost when it was silent this long and has no work; it sends a heartbeat every HEARTBEAT_S. One that works
# may hold the GIL: while its connection is alive, its sample has the time that the program gives a sample.
HEARTBEAT_S = 0.5
WORKER_TIMEOUT_S = 4.0
# A trainer may hold the GIL in a long call; taking it for dead only pauses its prefetch, it registers again by itself.
LOADER_TIMEOUT_S = 15.0
# A sent lease that the loader does not report within this time went to a broken connection.
ARRIVAL_TIMEOUT_S = 5.0
# A loader silent for longer is held up (the GIL in a long call): its reports are late, not its batches.
LOADER_PAUSE_S = ARRIVAL_TIMEOUT_S / 2
# A loader that divides its data, and that another rank has not made by then, is told.
LONELY_AFTER_S = 60.0
# One whose program runs another Python than the data workers is told; they may be about to start in its own.
UNFIT_AFTER_S = 5.0
# After a restart, wait at most this long for the workers of before to tell what they hold, so that the same steps are
# not leased to others. They register as soon as their connection is back; who is later loses only what it held.
RECOVERY_GRACE_S = 0.7

# Decisions of the elastic controller that `Status` shows; the event log has all.
_DECISIONS_SHOWN = 5
# Steps of a session whose end is not known: more than anybody reads.
_ENDLESS = 1 << 62


class DispatcherState(Rooms):
    """All that the dispatcher knows.

    Args:
        incarnation: number of this start of the dispatcher, from 1; the high half of every fencing token, so that
            tokens grow across restarts without journaling each one.
        now: time of the start, s, on the clock of all later calls.
        expected: peer ids of the data workers that were registered when the last dispatcher ended: nothing is leased
            until they have told what they hold, or `RECOVERY_GRACE_S` has passed.
    """

    def __init__(self, incarnation: int, now: float, expected: Collection[str] = ()) -> None:
        super().__init__(incarnation, now, now + (RECOVERY_GRACE_S if expected else 0.0))
        self.incarnation = incarnation
        self.started_at = now
        self.workers_seen = 0
        self.workers_replaced = 0  # of them, those that came in the place of one that had died
        self.workers_lost = 0
        self.elastic = ""  # what the elastic controller said last of itself
        self.decisions: deque[tuple[float, SteerDataWorkers]] = deque(maxlen=_DECISIONS_SHOWN)
        self._waiting_for_definition: dict[str, set[str]] = {}
        self._expected = set(expected)
        self._ranks_seen = RanksSeen()

    # --- entry points -----------------------------------------------------------------------------------------------

    def handle(self, peer: str, message: Message, now: float) -> list[Instruction]:
        """Take in one message of an authenticated peer.

        Raises:
            KeyError: the message is of a type that no peer sends to a dispatcher; the server refuses those first.
        """
        if isinstance(message, RegisterWorker):
            return self._register_worker(peer, message, now) + self._assign(now) + self._make_room(now)
        if isinstance(message, RegisterLoader):
            return self._register_loader(peer, message, now)
        if isinstance(message, RequestStatus):
            return [Send(peer, self.status(now))]
        if isinstance(message, SteerDataWorkers):
            return [*self._steer(message, now), Send(peer, self.status(now))]
        if peer in self.workers:
            self.workers[peer].last_seen = now
        elif peer in self.loaders:
            loader = self.loaders[peer]
            if now - loader.last_seen > LOADER_PAUSE_S:
                loader.steady_since = now
            loader.last_seen = now
        else:
            return [Send(peer, UnknownPeer())]
        if not isinstance(message, WorkerToDispatcher if peer in self.workers else LoaderToDispatcher):
            role = "data worker" if peer in self.workers else "loader"
            return self._refuse(peer, "ProtocolError", f"{type(message).__name__} is no message of a {role}")
        return _HANDLERS[type(message)](self, peer, message, now) + self._assign(now) + self._make_room(now)

    def peer_gone(self, peer: str, now: float) -> list[Instruction]:
        """A peer's connection closed. If only the network blinked, the peer registers again and says what it has."""
        out: list[Instruction] = []
        if peer in self.workers:
            silent_s = now - self.workers[peer].last_seen
            # libzmq closes the connection of a process that is stopped or cut off; one that ends was heard of just now.
            cause = f"silent for {silent_s:.1f} s" if silent_s > WORKER_TIMEOUT_S / 2 else "its connection closed"
            out = self._lose_worker(peer, now, cause)
        elif peer in self.loaders:
            out = self._drop_loader(peer, "its connection closed")
        return out + self._assign(now) + self._make_room(now)

    def tick(self, now: float) -> list[Instruction]:
        """Let time pass: find the silent and the undelivered, lease their steps again."""
        note_rates(self, now)
        out: list[Instruction] = []
        for peer, worker in list(self.workers.items()):
            if now - worker.last_seen > WORKER_TIMEOUT_S + self._may_hold_gil_s(worker):
                out += self._lose_worker(peer, now, f"silent for {now - worker.last_seen:.1f} s")
        for peer, loader in list(self.loaders.items()):
            if now - loader.last_seen > LOADER_TIMEOUT_S:
                silence_s = now - loader.last_seen
                out += [Send(peer, UnknownPeer()), *self._drop_loader(peer, f"silent for {silence_s:.1f} s")]
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
        out += self._tell_lonely(now) + self._tell_unfit(now)
        # Announced here too, because workers that were unreachable become reachable by time alone.
        return out + self._announce(now) + self._assign(now) + self._make_room(now)

    def _tell_lonely(self, now: float) -> list[Instruction]:
        """Tell loaders that have taken steps of a share of the data whose rest nobody reads."""
        out: list[Instruction] = []
        for peer, loader in self.loaders.items():
            registration = loader.registration
            # After a restart nobody knows which ranks had it, and closed it.
            forgotten = self.incarnation > 1 and loader.registered_at - self.started_at < LONELY_AFTER_S
            is_early = now - loader.registered_at < LONELY_AFTER_S or loader.stats.steps == 0
            if forgotten or is_early or loader.told_alone or not (missing := self._ranks_seen.missing(registration)):
                continue
            loader.told_alone = True
            cause = f"made at {registration.made_at or 'an unknown place'}"
            self._tell(events.LoaderAlone(**_who(registration), missing_ranks=missing, cause=cause))
            text = (
                f"the loader made at {registration.made_at or 'an unknown place'} reads rank {registration.rank}'s "
                f"share of its data, of {registration.world_size}; rank {missing[0]} has no such loader, so nobody "
                "reads the rest. If this rank is to read all of it, give the loader rank=0, world_size=1."
            )
            out.append(Send(peer, Notice(text)))
        return out

    def _tell_unfit(self, now: float) -> list[Instruction]:
        """Tell loaders whose program runs another Python than all data workers: nobody makes their batches."""
        out: list[Instruction] = []
        for peer, loader in self.loaders.items():
            registration = loader.registration
            if loader.told_unfit or not self.workers or now - loader.registered_at < UNFIT_AFTER_S:
                continue
            reasons = [why_unfit(worker.interpreter, registration.interpreter) for worker in self.workers.values()]
            if not all(reasons):
                continue
            loader.told_unfit = True
            worker = next(iter(self.workers.values()))
            self._tell(
                events.LoaderUnfit(**_who(registration), interpreter=str(registration.interpreter), cause=reasons[0])
            )
            text = (
                f"the data workers run {reasons[0]} than this program, so it makes its batches itself: "
                f"{worker.interpreter} on {worker.host}; this program runs {registration.interpreter} on "
                f"{registration.host}. Give the data workers its environment: #HETSTREAM --data-worker-python=PYTHON"
            )
            out.append(Send(peer, Notice(text)))
        return out

    def _may_hold_gil_s(self, worker: WorkerRecord) -> float:
        """How long user code may keep a data worker from saying anything; its connection says that it is alive."""
        sessions = [self.sessions.get(self.leases[token].session_id) for token in worker.tokens]
        return max((one.session.errors.sample_timeout_s for one in sessions if one is not None), default=0.0)

    def _unreported_s(self, lease: Lease, now: float) -> float:
        """How long a sent lease could have been reported; a loader that is held up says nothing of its connections."""
        record = self.sessions.get(lease.session_id)
        if record is None:
            return now - lease.sent_at
        loader = self.loaders[record.loader]
        paused = now - loader.last_seen > LOADER_PAUSE_S
        return 0.0 if paused else now - max(lease.sent_at, loader.steady_since)

    def next_deadline(self) -> float:
        """Seconds after which `tick` should be called at the latest."""
        return HEARTBEAT_S / 2

    def status(self, now: float) -> Status:
        """What goes on."""
        return status_of(self, now)

    def _steer(self, message: SteerDataWorkers, now: float) -> list[Instruction]:
        self.elastic = message.elastic
        if message.action:
            self.decisions.append((now, message))
            self._tell(events.DataWorkersChanged(action=message.action, count=message.count, cause=message.reason))
        leaving = [peer for peer, worker in self.workers.items() if worker.slurm_job in message.drain]
        return [instruction for peer in leaving for instruction in self.drain(peer, now)]

    def drain(self, peer: str, now: float) -> list[Instruction]:
        """Let a data worker leave without losing what it is making: no more leases, and it ends by itself."""
        if peer not in self.workers or self.workers[peer].draining:
            return []
        self._begin_drain(peer, "the service wants it to")
        return [Send(peer, DrainWorker()), *self._assign(now)]

    # --- loaders ----------------------------------------------------------------------------------------------------

    def _register_loader(self, peer: str, message: RegisterLoader, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for other_peer, other in list(self.loaders.items()):
            theirs = other.registration
            if differs := different_under_one_name(theirs.description, message.description):
                return self._refuse(peer, "PipelineError", differs)
            if other_peer == peer:
                continue
            if cannot_be_one_job(message, theirs, [one.registration for one in self.loaders.values()]):
                return self._refuse(peer, "JobNameConflict", conflict(message, theirs))
            if key_of(theirs) == key_of(message) and theirs.rank == message.rank:
                text = (
                    f"rank {message.rank} of job {message.job_name!r} was registered again by process {message.pid} on "
                    f"{message.host}; this process ({theirs.pid} on {theirs.host}) no longer receives batches. "
                    "If these are two programs, give each a job_name (or HETSTREAM_JOB_NAME) of its own."
                )
                out.append(Send(other_peer, Refused("Superseded", text)))
                out += self._drop_loader(other_peer, text)
        known = self.loaders.get(peer)
        cause = "its connection is back" if known else ""
        self._tell(events.LoaderConnected(**_who(message), cause=cause))
        stats = known.stats if known else LoaderStats()
        recent = RecentRates(now, stats.steps, stats.bytes, stats.wait_s)
        self.loaders[peer] = LoaderRecord(message, now, recent, known.registered_at if known else now, stats)
        self.loaders[peer].told_alone = known is not None and known.told_alone
        self.loaders[peer].told_unshared = known is not None and known.told_unshared
        self.loaders[peer].told_unfit = known is not None and known.told_unfit
        self._ranks_seen.note(message)
        self._rooms_changed = True
        count = self._reachable_workers(peer, now)
        self.loaders[peer].announced_workers = count
        definition_id = message.definition_id
        out.append(Send(peer, LoaderRegistered(definition_id not in self.definitions, count, definition_id)))
        return out

    def _provide_definition(self, peer: str, message: ProvideDefinition, _: float) -> list[Instruction]:
        out: list[Instruction] = []
        loader = self.loaders[peer]
        loader.registration = msgspec.structs.replace(loader.registration, definition_id=message.definition_id)
        used = {record.session.definition_id for record in self.sessions.values()}
        used |= {loader.registration.definition_id for loader in self.loaders.values()}
        for old in sorted(self.definitions.keys() - used - {message.definition_id}):
            del self.definitions[old]
            for worker in self.workers.values():
                worker.standings.pop(old, None)
            out += [ForgetDefinition(old), *(Send(worker, DropDefinition(old)) for worker in self.workers)]
        if self.definitions.get(message.definition_id) != message:
            self.definitions[message.definition_id] = message
            self._rooms_changed = True
            out.append(RememberDefinition(message))
            num_bytes = len(message.blob) + sum(message.contents.sizes)
            self._tell(events.DefinitionRemembered(definition_id=message.definition_id, num_bytes=num_bytes))
        waiting = self._waiting_for_definition.pop(message.definition_id, set())
        return out + [Send(worker, message) for worker in sorted(waiting) if worker in self.workers]

    def _open_epoch(self, peer: str, message: OpenSession, _: float) -> list[Instruction]:
        session = message.session
        ahead = message.num_steps if message.num_steps >= 0 else _ENDLESS
        known = message.consumed if isinstance(session.order, ListedOrder) else ahead
        record = SessionRecord(
            session=session,
            loader=peer,
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
        self._rooms_changed = True
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
                job=self.loaders[peer].registration.job_name,
                rank=self.loaders[peer].registration.rank,
                epoch=session.epoch,
                first_step=message.consumed,
                num_steps=message.num_steps,
            )
        )
        return self._tell_unshared(record)

    def _tell_unshared(self, record: SessionRecord) -> list[Instruction]:
        loader = self.loaders[record.loader]
        if record.session.sharing is None or loader.told_unshared:
            return []
        others = [self._reader(one) for one in self.sessions.values() if one is not record]
        text = shares_with_nobody(self._reader(record), others)
        loader.told_unshared = bool(text)
        return [Send(record.loader, Notice(text))] if text else []

    def _reader(self, record: SessionRecord) -> Reader:
        session = record.session
        key = session.sharing.key if session.sharing is not None else ""
        definition = self.definitions.get(session.definition_id)
        return Reader(self.loaders[record.loader].registration, key, definition)

    def _extend_epoch(self, _: str, message: ExtendSession, __: float) -> list[Instruction]:
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
        self.loaders[peer].stats = message.stats
        return [Send(peer, Alive())]

    def _report_progress(self, peer: str, message: ReportProgress, _: float) -> list[Instruction]:
        self.loaders[peer].stats = message.stats
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

    def _close_epoch(self, peer: str, message: CloseSession, _: float) -> list[Instruction]:
        loader = self.loaders[peer]
        loader.stats = message.stats
        if message.session_id in self.sessions:
            self.sessions[message.session_id].consumed = message.consumed
        cause = "the program left the loop or reached its end"
        return [RememberStats(loader.registration, message.stats), *self._end_session(message.session_id, cause)]

    def _leave_loader(self, peer: str, message: LeaveLoader, _: float) -> list[Instruction]:
        self.loaders[peer].stats = message.stats
        return self._drop_loader(peer, "it was closed", orderly=True)

    def _drop_loader(self, peer: str, cause: str, orderly: bool = False) -> list[Instruction]:
        loader = self.loaders.pop(peer)
        self._rooms_changed = True
        who, job_name = _who(loader.registration), loader.registration.job_name
        if not any(one.registration.job_name == job_name for one in self.loaders.values()):
            self._ranks_seen.forget(job_name)
        self._tell(events.LoaderLost(**who, steps=loader.stats.steps, orderly=orderly, cause=cause))
        out: list[Instruction] = [RememberStats(loader.registration, loader.stats)]
        for worker in self.workers.values():
            worker.unreachable.pop(peer, None)
        ended = [key for key, record in self.sessions.items() if record.loader == peer]
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
        return [Send(worker, DropSession(session_id)) for worker in self.workers]

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
        standings = self.workers[peer].standings if peer in self.workers else {}
        binding = Binding(message.program, None) if message.program is not None else None
        if peer in self.workers:
            binding = self.workers[peer].binding
        of = number, message.host, message.pid, now, work
        self.workers[peer] = WorkerRecord(
            *of,
            standings=standings,
            slurm_job=message.slurm_job,
            slot=message.slot,
            binding=binding,
            interpreter=message.interpreter,
        )
        self._rooms_changed = True
        if message.slot:
            self._slots.setdefault(message.slot, set()).add(peer)
            self._asked_at.pop(message.slot, None)
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
            out += self._note_failure(record, fate.step, fate.token, peer, fate.failure, now)
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
        if not lease.cached:
            self._note_made(peer, record, range(lease.first, lease.stop), now)
        if not lease.cached and not lease.trimmed:
            # With what it waits for a slow network: there a step comes no sooner, however fast it is made.
            step_s = (message.busy_s + message.waited_s) / (lease.stop - lease.first)
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
            out += self._note_failure(record, message.step, message.token, peer, message.failure, now)
        return out

    def _note_failure(
        self, record: SessionRecord, step: int, token: int, peer: str, failure: Failure, now: float
    ) -> list[Instruction]:
        """Count a failure of a step that the loader may still need, and act on the verdict."""
        if record.has(step):
            return []
        session = record.session
        failures = record.failures.setdefault(step, StepFailures())
        late = token <= failures.last_token  # of a lease from before something was left out
        verdict = Verdict.TRY_AGAIN if late else self._note_verdict(peer, record, step, failure, now)
        self._tell(
            events.StepFailed(
                session=session.session_id,
                step=step,
                sample=failure.sample_index,
                host=failure.host,
                pid=failure.pid,
                verdict=verdict.value,
                traceback=failure.remote_traceback,
                cause=f"{failure.error_type[1]}: {first_line(failure.text)}",
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
        return [*out, Send(record.loader, BatchFailed(session.session_id, step, failure))]

    def _fetch_definition(self, peer: str, message: FetchDefinition, _: float) -> list[Instruction]:
        definition = self.definitions.get(message.definition_id)
        if definition is not None:
            return [Send(peer, definition)]
        # It is on its way, or was lost: its loaders say it again.
        self._waiting_for_definition.setdefault(message.definition_id, set()).add(peer)
        sessions = [one for one in self.sessions.values() if one.session.definition_id == message.definition_id]
        return [Send(loader, NeedDefinition(message.definition_id)) for loader in sorted({s.loader for s in sessions})]

    def _draining(self, peer: str, message: Draining, now: float) -> list[Instruction]:
        worker = self.workers[peer]
        self._begin_drain(peer, "a fresh process takes its place" if message.renews else "it was told to stop")
        if message.renews and worker.slot:
            worker.renews = True
            self._asked_at[worker.slot] = now
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

    def _leave_worker(self, peer: str, _: LeaveWorker, now: float) -> list[Instruction]:
        return self._lose_worker(peer, now, "left", orderly=True)

    def _lose_worker(self, peer: str, now: float, reason: str, orderly: bool = False) -> list[Instruction]:
        """After an orderly end, what it said it sent is on its way and waited for as from a worker that is there."""
        worker = self.workers.pop(peer)
        self._rooms_changed = True
        if worker.slot:
            self._slots[worker.slot].discard(peer)
            if not self._slots[worker.slot]:
                del self._slots[worker.slot]
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

    def refuse(self, peer: str, error: ProtocolError) -> list[Instruction]:
        """Answer what was no message, or none for a dispatcher."""
        return self._refuse(peer, "ProtocolError", str(error))

    def _refuse(self, peer: str, code: str, text: str) -> list[Instruction]:
        self._tell(events.MessageRefused(peer=peer, cause=text))
        return [Send(peer, Refused(code, text))]


def _reason(message: RegisterWorker) -> str:
    return message.fate.reason if message.fate is not None else "ended"


def _who(loader: RegisterLoader) -> dict[str, Any]:
    who = {"job": loader.job_name, "rank": loader.rank, "host": loader.host, "pid": loader.pid}
    return who | {"title": loader.title}


def _smooth(old_s: float, new_s: float) -> float:
    return new_s if old_s == 0 else 0.8 * old_s + 0.2 * new_s


def _split_steps(steps: StepList) -> Iterable[tuple[int, bytes]]:
    counts = memoryview(steps.counts).cast("i")
    offset = 0
    for number, count in enumerate(counts):
        yield steps.first_step + number, steps.indices[offset : offset + 8 * count]
        offset += 8 * count


_HANDLERS: dict[type[Message], Callable[[DispatcherState, str, Any, float], list[Instruction]]] = {
    ProvideDefinition: DispatcherState._provide_definition,
    OpenSession: DispatcherState._open_epoch,
    ExtendSession: DispatcherState._extend_epoch,
    LoaderHeartbeat: DispatcherState._loader_heartbeat,
    ReportProgress: DispatcherState._report_progress,
    CloseSession: DispatcherState._close_epoch,
    LeaveLoader: DispatcherState._leave_loader,
    WorkerHeartbeat: DispatcherState._worker_heartbeat,
    FinishLease: DispatcherState._finish_lease,
    FailLease: DispatcherState._fail_lease,
    FailStep: DispatcherState._fail_step,
    EndOfShard: DispatcherState._end_of_shard,
    FetchDefinition: DispatcherState._fetch_definition,
    Draining: DispatcherState._draining,
    LeaveWorker: DispatcherState._leave_worker,
}
