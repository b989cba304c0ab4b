"""What data workers say, and what follows from it: they come, drain and go, and finish or fail leases. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.instructions import ForgetWorker, Instruction, RememberWorker, Send
from hetstream.mpi_dataworkers.dispatcher.leasing import Leasing
from hetstream.mpi_dataworkers.dispatcher.loaders import Handler
from hetstream.mpi_dataworkers.dispatcher.reachability import Reachability
from hetstream.mpi_dataworkers.dispatcher.records import (
    Binding,
    Lease,
    LeaseStatus,
    Session,
    WorkDone,
    WorkerRecord,
)
from hetstream.mpi_dataworkers.dispatcher.rooms import Rooms
from hetstream.mpi_dataworkers.dispatcher.tables import Tables
from hetstream.mpi_dataworkers.errors import DataWorkerDied
from hetstream.mpi_dataworkers.rates import RecentRates
from hetstream.mpi_dataworkers.wire.messages import (
    Alive,
    Draining,
    EndOfShard,
    FailLease,
    FailStep,
    Failure,
    FetchPipeline,
    FinishLease,
    HeldLease,
    LeaveWorker,
    Message,
    NeedPipeline,
    RegisterWorker,
    RevokeLease,
    ShardOrder,
    WorkerHeartbeat,
    WorkerRegistered,
)
from hetstream.mpi_dataworkers.wire.work import HEARTBEAT_S


class WorkerMessages:
    """Takes in the messages of data workers.

    Attributes:
        handlers: what takes in each type of message of a data worker that is registered.
        _tables: what is known.
        _leasing: makes, changes and ends leases.
        _reachability: tells loaders how many data workers they have.
        _rooms: lets data workers drain.
        _drop_loader: ends a loader, with the reason.
    """

    def __init__(
        self,
        tables: Tables,
        leasing: Leasing,
        reachability: Reachability,
        rooms: Rooms,
        drop_loader: Callable[[str, str], list[Instruction]],
    ) -> None:
        self._tables = tables
        self._drop_loader = drop_loader
        self._leasing = leasing
        self._reachability = reachability
        self._rooms = rooms
        self.handlers: Mapping[type[Message], Handler] = {
            WorkerHeartbeat: self._heartbeat,
            FinishLease: self._finish_lease,
            FailLease: self._fail_lease,
            FailStep: self._fail_step,
            EndOfShard: self._end_of_shard,
            FetchPipeline: self._fetch_pipeline,
            Draining: self._draining,
            LeaveWorker: self._leave,
        }

    def register(self, peer: str, message: RegisterWorker, now: float) -> list[Instruction]:
        """A data worker process offers itself, or is back after a cut or a restart of the dispatcher."""
        tables = self._tables
        out: list[Instruction] = []
        if message.replaces in tables.workers:
            fate = message.fate
            at = {(fate.session_id, fate.step)} if fate is not None and fate.failure is not None else set()
            out += self.lose(message.replaces, now, f"its process {_how_it_ended(message)}", at=at)
        known = tables.workers.get(peer)
        number, cause = self._number_of(known, message)
        worker = tables.workers[peer] = _registered(number, known, message, now)
        # Of the process in whose place it is, until it says so itself: it may leave with its pass before it has.
        worker.resident_bytes = tables.slot_bytes.pop(message.slot, 0)
        tables.rooms_changed = True
        if message.slot:
            tables.slots.setdefault(message.slot, set()).add(peer)
            tables.asked_at.pop(message.slot, None)
            out += self._rooms.has_ended(slot=message.slot)
        host, pid, num_held = message.host, message.pid, len(message.held)
        event = events.DataWorkerRegistered(data_worker=number, host=host, pid=pid, num_held=num_held, cause=cause)
        out += [*tables.tell(event), RememberWorker(peer), Send(peer, WorkerRegistered(number))]
        held_tokens = {held.token for held in message.held}
        for token in (known.tokens if known is not None else set()) - held_tokens:
            out += self._leasing.lifecycle.revoke(tables.leases[token], "the data worker registered again without it")
        for held in message.held:
            out += self._take_back(peer, held, now)
        tables.note_load(peer)
        tables.expected -= {peer, message.replaces}
        if not tables.expected:
            tables.grant_from = min(tables.grant_from, now)
        fate = message.fate
        if message.replaces:
            self._leasing.retries.explain(message.replaces)
        if fate is not None and fate.failure is not None and fate.session_id in tables.sessions:
            session = tables.sessions[fate.session_id]
            out += self._leasing.retries.note_failure(session, fate.step, fate.token, peer, fate.failure, now)
        return out + self._reachability.announce(now)

    def _number_of(self, known: WorkerRecord | None, message: RegisterWorker) -> tuple[int, str]:
        """The number of a data worker that registers, and why it does where that is not plain."""
        if known is not None:
            return known.number, "its connection is back"
        number = self._tables.workers_seen
        self._tables.workers_seen += 1
        self._tables.workers_replaced += bool(message.replaces)
        return number, f"in the place of a process that {_how_it_ended(message)}" if message.replaces else ""

    def _take_back(self, peer: str, held: HeldLease, now: float) -> list[Instruction]:
        """A data worker that registers holds a lease: of this dispatcher, of the one before it, or one revoked."""
        tables = self._tables
        # A token of this start of the dispatcher that is not known any more was revoked: it stays revoked.
        if held.token in tables.leases:
            tables.workers[peer].tokens.add(held.token)
        elif held.token < tables.token_base and now < tables.grant_from:
            lease = Lease(held.token, held.session_id, peer, held.first_step, held.stop_step, now, held.shift)
            self._leasing.lifecycle.adopt(lease)
        else:
            return [Send(peer, RevokeLease(held.token, held.session_id, False, "leased to another data worker"))]
        return []

    def _heartbeat(self, peer: str, message: WorkerHeartbeat, now: float) -> list[Instruction]:
        tables = self._tables
        out: list[Instruction] = [Send(peer, Alive())]
        worker = tables.workers[peer]
        worker.resident_bytes = message.resident_bytes
        for token in worker.tokens - set(message.tokens):
            lease = tables.leases[token]
            if now - lease.granted_at > 2 * HEARTBEAT_S:
                out += self._leasing.lifecycle.revoke(lease, "the data worker does not know of it")
        for token in set(message.tokens) - worker.tokens:
            if token not in tables.leases:
                out.append(Send(peer, RevokeLease(token, "", False, "leased to another data worker")))
        return out

    def _finish_lease(self, peer: str, message: FinishLease, now: float) -> list[Instruction]:
        tables = self._tables
        self._leasing.streams.groups.drop(peer, message.dropped)
        lease = tables.leases.get(message.token)
        if lease is None or lease.worker != peer:
            return []
        worker = tables.workers[peer]
        worker.tokens.discard(lease.token)
        worker.cached_tokens.discard(lease.token)
        tables.note_load(peer)
        lease.status = LeaseStatus.SENT
        lease.sent_at = now
        worker.work.steps += lease.stop - lease.first
        worker.work.busy_s += message.busy_s
        if worker.tokens:
            tables.leases[min(worker.tokens)].begun_at = now
        session = tables.sessions.get(lease.session_id)
        if session is None:
            tables.forget(lease)
            return []
        session.keep_snapshot(message.snapshot_step, message.snapshot)
        out: list[Instruction] = []
        if not lease.cached:
            out = self._leasing.retries.note_made(peer, session, range(lease.first, lease.stop), now)
        if not lease.cached and not lease.trimmed:
            # With what it waits for a slow network: there a step comes no sooner, however fast it is made.
            step_s = (message.busy_s + message.waited_s) / (lease.stop - lease.first)
            session.step_s = _smooth(session.step_s, step_s)
            worker.step_s[lease.session_id] = _smooth(worker.step_s.get(lease.session_id, 0.0), step_s)
        if session.has_all(lease.first, lease.stop):
            tables.forget(lease)
        else:
            session.sent.add(lease.token)
        return out

    def _end_of_shard(self, peer: str, message: EndOfShard, _: float) -> list[Instruction]:
        lease = self._tables.leases.get(message.token)
        session = self._tables.sessions.get(message.session_id)
        if lease is None or session is None or lease.worker != peer or lease.session_id != message.session_id:
            return []
        if isinstance(session.spec.order, ShardOrder) and message.num_steps >= 0 > session.num_steps:
            session.end_at(message.num_steps)
            event = events.SessionMeasured(session=message.session_id, num_steps=message.num_steps)
            return self._tables.tell(event)
        return []

    def _fail_lease(self, peer: str, message: FailLease, now: float) -> list[Instruction]:
        lease = self._tables.leases.get(message.token)
        if lease is None or lease.worker != peer:
            return []
        out = self._reachability.mark_unreachable(lease, now, message.reason)
        return out + self._leasing.lifecycle.revoke(lease, message.reason)

    def _fail_step(self, peer: str, message: FailStep, now: float) -> list[Instruction]:
        lease = self._tables.leases.get(message.token)
        if lease is None or lease.worker != peer or not lease.first <= message.step < lease.stop:
            return []
        session, end = self._tables.sessions.get(lease.session_id), lease.stop
        self._leasing.lifecycle.trim(lease, message.step)
        if session is not None:
            self._leasing.lifecycle.requeue(session, range(message.step + 1, end))
        out = self._finish_lease(peer, FinishLease(message.token, 0.0), now)
        if session is not None:
            note_failure = self._leasing.retries.note_failure
            out += note_failure(session, message.step, message.token, peer, message.failure, now)
        return out

    def _fetch_pipeline(self, peer: str, message: FetchPipeline, _: float) -> list[Instruction]:
        tables = self._tables
        pipeline = tables.pipelines.get(message.pipeline_id)
        if pipeline is not None:
            return [Send(peer, pipeline)]
        # It is on its way, or was lost: its loaders say it again.
        tables.waiting_for_pipeline.setdefault(message.pipeline_id, set()).add(peer)
        sessions = tables.sessions.values()
        loaders = {session.loader for session in sessions if session.spec.pipeline_id == message.pipeline_id}
        return [Send(loader, NeedPipeline(message.pipeline_id)) for loader in sorted(loaders)]

    def _draining(self, peer: str, message: Draining, now: float) -> list[Instruction]:
        tables = self._tables
        worker = tables.workers[peer]
        cause = "a fresh process takes its place" if message.renews else "it was told to stop"
        out = self._rooms.begin_drain(peer, cause)
        if message.renews and worker.slot:
            worker.renews = True
            tables.workers_renewed += 1
            tables.asked_at[worker.slot] = now
        stops = dict(message.leases)
        for token in sorted(worker.tokens):
            lease = tables.leases[token]
            session = tables.sessions.get(lease.session_id)
            stop, end = stops.get(token, lease.first), lease.stop
            if stop < end:
                self._leasing.lifecycle.trim(lease, stop)
                if session is not None:
                    self._leasing.lifecycle.requeue(session, range(max(stop, lease.first), end))
        return out

    def _leave(self, peer: str, _: LeaveWorker, now: float) -> list[Instruction]:
        return self.lose(peer, now, "left", orderly=True)

    def lose(
        self, peer: str, now: float, reason: str, orderly: bool = False, at: set[tuple[str, int]] | None = None
    ) -> list[Instruction]:
        """A data worker is not there any more: what it held is leased again.

        After an orderly end, what it said it sent is on its way and waited for as from a worker that is there. `at` are
        session and step that it was at when it ended; None where nobody knows.
        """
        tables = self._tables
        worker = tables.workers.pop(peer)
        tables.rooms_changed = True
        if worker.slot:
            tables.slots[worker.slot].discard(peer)
            if not tables.slots[worker.slot]:
                del tables.slots[worker.slot]
            if worker.renews:
                tables.slot_bytes[worker.slot] = worker.resident_bytes
        tables.workers_lost += not orderly
        tables.note_load(peer)
        self._leasing.streams.groups.lose(peer)
        number, host, pid = worker.number, worker.host, worker.pid
        event = events.DataWorkerLost(data_worker=number, host=host, pid=pid, orderly=orderly, cause=reason)
        out: list[Instruction] = [*tables.tell(event), ForgetWorker(peer)]
        if not (orderly and worker.renews):
            out += self._rooms.has_ended(peer)
        for lease in [lease for lease in tables.leases.values() if lease.worker == peer]:
            session = tables.sessions.get(lease.session_id)
            if orderly and lease.status is LeaseStatus.SENT:
                continue
            if session is None or not session.has_all(lease.first, lease.stop):
                suspects = [] if orderly or session is None else _suspects(lease, session, at)
                why = f"its data worker was lost: {reason}"
                out += self._leasing.lifecycle.revoke(lease, why, orderly=orderly, suspects=suspects)
                if session is not None and at is None:
                    failure = _failure_of(worker, suspects, reason)
                    self._leasing.retries.note_lost(session, suspects, lease.token, peer, failure, now)
            else:
                tables.forget(lease)
        # What was made for it, nobody needs.
        for loader in [name for name, record in tables.loaders.items() if record.registration.feeds == peer]:
            out += self._drop_loader(loader, f"the data worker that it feeds was lost: {reason}")
        return out + self._reachability.announce(now)


def _registered(number: int, known: WorkerRecord | None, message: RegisterWorker, now: float) -> WorkerRecord:
    """The record of a data worker, with what is known of it where it was there before."""
    binding = Binding(message.program, None) if message.program is not None else None
    return WorkerRecord(
        number=number,
        host=message.host,
        pid=message.pid,
        last_seen=now,
        work=known.work if known is not None else WorkDone(now, RecentRates(now, 0, 0, 0)),
        standings=known.standings if known is not None else {},
        slurm_job=message.slurm_job,
        slot=message.slot,
        binding=known.binding if known is not None else binding,
        interpreter=message.interpreter,
        device=message.device,
    )


def _suspects(lease: Lease, session: Session, at: set[tuple[str, int]] | None) -> list[int]:
    """The steps of a lease that may have ended its data worker."""
    if lease.status is LeaseStatus.SENT:
        return []  # it made them all
    missing = session.missing(range(lease.first, lease.stop))
    return missing if at is None else [step for step in missing if (lease.session_id, step) in at]


def _failure_of(worker: WorkerRecord, suspects: Sequence[int], reason: str) -> Failure:
    """Of the step that a data worker was at when it was lost, where that is one."""
    name = f"data worker {worker.number} on {worker.host}"
    text = f"{name} was lost while it made step {min(suspects, default=-1)}: {reason}"
    kind = (DataWorkerDied.__module__, DataWorkerDied.__qualname__)
    return Failure(-1, kind, text, "(it left no stack)", worker.host, worker.pid)


def _how_it_ended(message: RegisterWorker) -> str:
    return message.fate.reason if message.fate is not None else "ended"


def _smooth(old_s: float, new_s: float) -> float:
    return new_s if old_s == 0 else 0.8 * old_s + 0.2 * new_s
