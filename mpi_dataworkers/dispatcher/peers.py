"""What data workers say, and what follows from it: they come, drain and go, and finish or fail leases. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.leasing import Leasing
from hetstream.mpi_dataworkers.dispatcher.placement import ProcessSlots, Reachability
from hetstream.mpi_dataworkers.dispatcher.sharing import (
    RanksSeen,
    Reader,
    SharedStreams,
    cannot_be_one_job,
    conflict,
    different_under_one_name,
    key_of,
    shares_with_nobody,
)
from hetstream.mpi_dataworkers.dispatcher.tables import (
    LONELY_AFTER_S,
    UNFIT_AFTER_S,
    Binding,
    ForgetPipeline,
    ForgetWorker,
    Instruction,
    Lease,
    LeaseStatus,
    LoaderRecord,
    RememberPipeline,
    RememberStats,
    RememberWorker,
    Send,
    Session,
    Tables,
    WorkDone,
    WorkerRecord,
)
from hetstream.mpi_dataworkers.errors import DataWorkerDied
from hetstream.mpi_dataworkers.order.rates import RecentRates
from hetstream.mpi_dataworkers.process.programs import why_unfit
from hetstream.mpi_dataworkers.wire.messages import (
    HEARTBEAT_S,
    Alive,
    CloseSession,
    Draining,
    DropPipeline,
    DropSession,
    EndOfShard,
    EndProcesses,
    ExtendSession,
    FailLease,
    FailStep,
    Failure,
    FetchPipeline,
    FinishLease,
    HeldLease,
    LeaveLoader,
    LeaveWorker,
    ListedOrder,
    LoaderHeartbeat,
    LoaderRegistered,
    LoaderStats,
    Message,
    NeedPipeline,
    Notice,
    OpenSession,
    ProvidePipeline,
    Refused,
    RegisterLoader,
    RegisterWorker,
    ReportProgress,
    RevokeLease,
    ShardOrder,
    StepList,
    UnknownPeer,
    WorkerHeartbeat,
    WorkerRegistered,
)

# What users are told about their loaders while the program goes on: each loader at most once. Pure.


class Notices:
    """Finds loaders whose users should know something.

    Attributes:
        ranks_seen: which ranks have, or had, a loader.
        _tables: what is known.
    """

    def __init__(self, tables: Tables) -> None:
        self.ranks_seen = RanksSeen()
        self._tables = tables

    def tell_due(self, now: float) -> list[Instruction]:
        """Return what the time has come to tell."""
        return self._tell_lonely(now) + self._tell_unfit(now)

    def tell_unshared(self, session: Session) -> list[Instruction]:
        """Tell a loader whose session is to be shared, and is not, though another job's looks the same."""
        loader = self._tables.loaders[session.loader]
        if session.spec.sharing is None or loader.warned_unshared:
            return []
        others = [self._reader(other) for other in self._tables.sessions.values() if other is not session]
        text = shares_with_nobody(self._reader(session), others)
        loader.warned_unshared = bool(text)
        return [Send(session.loader, Notice(text))] if text else []

    def _reader(self, session: Session) -> Reader:
        spec = session.spec
        key = spec.sharing.key if spec.sharing is not None else ""
        pipeline = self._tables.pipelines.get(spec.pipeline_id)
        return Reader(self._tables.loaders[session.loader].registration, key, pipeline)

    def _tell_lonely(self, now: float) -> list[Instruction]:
        """Tell loaders that have taken steps of a share of the data whose rest nobody reads."""
        out: list[Instruction] = []
        for peer, loader in self._tables.loaders.items():
            if self._is_too_early(loader, now) or loader.warned_alone:
                continue
            registration = loader.registration
            missing = self.ranks_seen.missing(registration)
            if not missing:
                continue
            loader.warned_alone = True
            cause = f"made at {registration.made_at or 'an unknown place'}"
            who = events.loader_fields(registration)
            out += self._tables.tell(events.LoaderAlone(**who, missing_ranks=missing, cause=cause))
            text = (
                f"the loader made at {registration.made_at or 'an unknown place'} reads rank {registration.rank}'s "
                f"share of its data, of {registration.world_size}; rank {missing[0]} has no such loader, so nobody "
                "reads the rest. If this rank is to read all of it, give the loader rank=0, world_size=1."
            )
            out.append(Send(peer, Notice(text)))
        return out

    def _is_too_early(self, loader: LoaderRecord, now: float) -> bool:
        """Whether other ranks may still make the loader, or had it before a restart, which nobody knows then."""
        tables = self._tables
        may_be_forgotten = tables.incarnation > 1 and loader.registered_at - tables.started_at < LONELY_AFTER_S
        return may_be_forgotten or now - loader.registered_at < LONELY_AFTER_S or loader.stats.steps == 0

    def _tell_unfit(self, now: float) -> list[Instruction]:
        """Tell loaders whose program runs another Python than all data workers: nobody makes their batches."""
        workers = self._tables.workers
        out: list[Instruction] = []
        for peer, loader in self._tables.loaders.items():
            registration = loader.registration
            if loader.warned_unfit or not workers or now - loader.registered_at < UNFIT_AFTER_S:
                continue
            reasons = [why_unfit(worker.interpreter, registration.interpreter) for worker in workers.values()]
            if not all(reasons):
                continue
            loader.warned_unfit = True
            worker = next(iter(workers.values()))
            who, interpreter = events.loader_fields(registration), str(registration.interpreter)
            out += self._tables.tell(events.LoaderUnfit(**who, interpreter=interpreter, cause=reasons[0]))
            text = (
                f"the data workers run {reasons[0]} than this program, so it makes its batches itself: "
                f"{worker.interpreter} on {worker.host}; this program runs {registration.interpreter} on "
                f"{registration.host}. Give the data workers its environment: #HETSTREAM --data-worker-python=PYTHON"
            )
            out.append(Send(peer, Notice(text)))
        return out


# What loaders say, and what follows from it: they come and go, and open, report and close sessions. Pure.

Handler = Callable[[str, Any, float], list[Instruction]]

# Steps of a session whose end is not known: more than anybody reads.
_ENDLESS = 1 << 62


class LoaderMessages:
    """Takes in the messages of loaders.

    Attributes:
        handlers: what takes in each type of message of a loader that is registered.
        _tables: what is known.
        _reachability: tells loaders how many data workers they have.
        _streams: the streams that sessions share.
        _notices: tells users what they should know.
        _rooms: ends processes.
    """

    def __init__(
        self, tables: Tables, reachability: Reachability, streams: SharedStreams, notices: Notices, rooms: ProcessSlots
    ) -> None:
        self._tables = tables
        self._rooms = rooms
        self._reachability = reachability
        self._streams = streams
        self._notices = notices
        self.handlers: Mapping[type[Message], Handler] = {
            ProvidePipeline: self._provide_pipeline,
            OpenSession: self._open_session,
            ExtendSession: self._extend_session,
            LoaderHeartbeat: self._heartbeat,
            ReportProgress: self._report_progress,
            CloseSession: self._close_session,
            EndProcesses: lambda peer, _, __: self._rooms.end_processes(peer),
            LeaveLoader: self._leave,
        }

    def register(self, peer: str, message: RegisterLoader, now: float) -> list[Instruction]:
        """Note that a loader introduces itself, or is back after a cut."""
        tables = self._tables
        message = self._for_whom_it_feeds(message)
        out: list[Instruction] = []
        for other_peer, other in list(tables.loaders.items()):
            theirs = other.registration
            if differs := different_under_one_name(theirs.description, message.description):
                return refuse(tables, peer, "PipelineError", differs)
            if other_peer == peer:
                continue
            if cannot_be_one_job(message, theirs, [loader.registration for loader in tables.loaders.values()]):
                return refuse(tables, peer, "JobNameConflict", conflict(message, theirs))
            if key_of(theirs) == key_of(message) and theirs.rank == message.rank:
                out += self._supersede(other_peer, theirs, message)
        known = tables.loaders.get(peer)
        cause = "its connection is back" if known else ""
        out += tables.tell(events.LoaderConnected(**events.loader_fields(message), cause=cause))
        stats = known.stats if known else LoaderStats()
        recent = RecentRates(now, stats.steps, stats.bytes, stats.wait_s)
        loader = tables.loaders[peer] = LoaderRecord(message, now, recent, now, stats)
        if known is not None:
            loader.go_on_from(known)
        count = loader.announced_workers = self._reachability.num_workers(peer, now)
        self._notices.ranks_seen.note(message)
        tables.rooms_changed = True
        pipeline_id = message.pipeline_id
        out.append(Send(peer, LoaderRegistered(pipeline_id not in tables.pipelines, count, pipeline_id)))
        return out

    def _for_whom_it_feeds(self, message: RegisterLoader) -> RegisterLoader:
        """A data worker's loader works for the trainer that the data worker serves: it is of the same run."""
        worker = self._tables.workers.get(message.feeds)
        if worker is None or worker.binding is None or not worker.binding.trainers:
            return message
        there = {loader.registration.trainer for loader in self._tables.loaders.values()}
        served = worker.binding.trainers
        return msgspec.structs.replace(message, trainer=min(served & there or served))

    def _supersede(self, old_peer: str, old: RegisterLoader, new: RegisterLoader) -> list[Instruction]:
        """The same rank registered its loader again: the process that had it is told."""
        text = (
            f"rank {new.rank} of job {new.job_name!r} was registered again by process {new.pid} on "
            f"{new.host}; this process ({old.pid} on {old.host}) no longer receives batches. "
            "If these are two programs, give each a job_name (or HETSTREAM_JOB_NAME) of its own."
        )
        return [Send(old_peer, Refused("Superseded", text)), *self.drop(old_peer, text)]

    def _provide_pipeline(self, peer: str, message: ProvidePipeline, _: float) -> list[Instruction]:
        tables = self._tables
        loader = tables.loaders[peer]
        loader.registration = msgspec.structs.replace(loader.registration, pipeline_id=message.pipeline_id)
        out = self._forget_pipelines(but=message.pipeline_id)
        if tables.pipelines.get(message.pipeline_id) != message:
            tables.pipelines[message.pipeline_id] = message
            tables.rooms_changed = True
            out.append(RememberPipeline(message))
            num_bytes = len(message.blob) + sum(message.contents.sizes)
            out += tables.tell(events.PipelineRemembered(pipeline_id=message.pipeline_id, num_bytes=num_bytes))
        waiting = tables.waiting_for_pipeline.pop(message.pipeline_id, set())
        return out + [Send(worker, message) for worker in sorted(waiting) if worker in tables.workers]

    def _forget_pipelines(self, but: str) -> list[Instruction]:
        """Forget the pipelines that no loader and no session uses."""
        tables = self._tables
        used = {session.spec.pipeline_id for session in tables.sessions.values()}
        used |= {loader.registration.pipeline_id for loader in tables.loaders.values()}
        out: list[Instruction] = []
        for old in sorted(tables.pipelines.keys() - used - {but}):
            del tables.pipelines[old]
            for worker in tables.workers.values():
                worker.standings.pop(old, None)
            out += [ForgetPipeline(old), *(Send(worker, DropPipeline(old)) for worker in tables.workers)]
        return out

    def _open_session(self, peer: str, message: OpenSession, _: float) -> list[Instruction]:
        tables, spec = self._tables, message.session
        session = _opened(peer, message)
        if session.reads_rounds:
            others = tables.sessions.values()
            session.holder = next((other.holder for other in others if other.shard == session.shard), "")
        tables.sessions[spec.session_id] = session
        tables.rooms_changed = True
        if message.steps is not None:
            _take_steps(session, message.steps)
        # A session that is declared again after this dispatcher's restart: workers may hold leases of it.
        held = [lease for lease in tables.leases.values() if lease.session_id == spec.session_id]
        session.tokens = {lease.token for lease in held}
        session.sent = {lease.token for lease in held if lease.status is LeaseStatus.SENT}
        self._streams.join(session, message, held)
        reached = max([stop for _, stop in message.received] + [lease.stop for lease in held], default=message.consumed)
        session.frontier = max(message.consumed, reached)
        leased = {step for lease in held for step in range(lease.first, lease.stop)}
        session.requeued = [s for s in session.missing(range(message.consumed, session.frontier)) if s not in leased]
        event = events.SessionOpened(
            session=spec.session_id,
            job=tables.loaders[peer].registration.job_name,
            rank=tables.loaders[peer].registration.rank,
            epoch=spec.epoch,
            first_step=message.consumed,
            num_steps=message.num_steps,
        )
        return tables.tell(event) + self._notices.tell_unshared(session)

    def _extend_session(self, _: str, message: ExtendSession, __: float) -> list[Instruction]:
        session = self._tables.sessions.get(message.session_id)
        if session is not None:
            _take_steps(session, message.steps)
            session.num_steps = message.num_steps
        return []

    def _heartbeat(self, peer: str, message: LoaderHeartbeat, _: float) -> list[Instruction]:
        self._note_stats(self._tables.loaders[peer], message.stats)
        return [Send(peer, Alive())]

    def _note_stats(self, loader: LoaderRecord, stats: LoaderStats) -> None:
        """Take in what a loader has counted. What a data worker's own loader waited, the data worker waited."""
        loader.stats = stats
        holder = self._tables.workers.get(loader.registration.feeds)
        if holder is not None:
            holder.work.waited_s = stats.wait_s

    def _report_progress(self, peer: str, message: ReportProgress, _: float) -> list[Instruction]:
        tables = self._tables
        self._note_stats(tables.loaders[peer], message.stats)
        tables.loaders[peer].training = message.training
        tables.loaders[peer].optimizer = message.optimizer
        tables.loaders[peer].features = message.features
        session = tables.sessions.get(message.session_id)
        if session is None:
            return [Send(peer, UnknownPeer())]
        for step in range(session.consumed, message.consumed) if session.lists else ():
            session.lists.pop(step, None)
        session.consumed = max(session.consumed, message.consumed)
        session.lost = {step for step in session.lost if step >= session.consumed}
        session.received = message.received
        session.window = message.window
        session.frontier = max(session.frontier, session.consumed)
        session.requeued = session.missing(session.requeued)
        if session.failures:
            session.retries = set(session.missing(session.retries))
            failures = session.failures.items()
            session.failures = {step: failed for step, failed in failures if step >= session.consumed}
            session.unexplained = {step: loss for step, loss in session.unexplained.items() if step in session.retries}
        if session.losses:
            session.losses = {step: peers for step, peers in session.losses.items() if step >= session.consumed}
        for token in list(session.sent):
            lease = tables.leases[token]
            if session.has_all(lease.first, lease.stop):
                tables.forget(lease)
        return []

    def _close_session(self, peer: str, message: CloseSession, _: float) -> list[Instruction]:
        loader = self._tables.loaders[peer]
        self._note_stats(loader, message.stats)
        if message.session_id in self._tables.sessions:
            self._tables.sessions[message.session_id].consumed = message.consumed
        cause = "the program left the loop or reached its end"
        return [*_remember(loader), *self._end_session(message.session_id, cause)]

    def _leave(self, peer: str, message: LeaveLoader, _: float) -> list[Instruction]:
        self._note_stats(self._tables.loaders[peer], message.stats)
        return self.drop(peer, "it was closed", orderly=True)

    def drop(self, peer: str, cause: str, orderly: bool = False) -> list[Instruction]:
        """Note that a loader is not there any more: its sessions end."""
        tables = self._tables
        loader = tables.loaders.pop(peer)
        tables.rooms_changed = True
        who, job_name = events.loader_fields(loader.registration), loader.registration.job_name
        if not any(other.registration.job_name == job_name for other in tables.loaders.values()):
            self._notices.ranks_seen.forget(job_name)
        out = tables.tell(events.LoaderLost(**who, steps=loader.stats.steps, orderly=orderly, cause=cause))
        out += _remember(loader)
        for worker in tables.workers.values():
            worker.unreachable.pop(peer, None)
        ended = [key for key, session in tables.sessions.items() if session.loader == peer]
        cause = "its loader is gone"
        return out + [instruction for key in ended for instruction in self._end_session(key, cause)]

    def _end_session(self, session_id: str, cause: str) -> list[Instruction]:
        tables = self._tables
        session = tables.sessions.pop(session_id, None)
        if session is None:
            return []
        self._streams.leave(session)
        for token in list(session.tokens):
            tables.forget(tables.leases[token])
        for worker in tables.workers.values():
            worker.step_s.pop(session_id, None)
        cause = "all steps were taken" if session.consumed == session.num_steps else cause
        step, num_steps = session.consumed, session.num_steps
        out = tables.tell(events.SessionClosed(session=session_id, step=step, num_steps=num_steps, cause=cause))
        return out + [Send(worker, DropSession(session_id)) for worker in tables.workers]


def _remember(loader: LoaderRecord) -> list[Instruction]:
    """Keep what a trainer's loader has delivered; what data workers hand to each other is no batch of the job."""
    return [] if loader.registration.feeds else [RememberStats(loader.registration, loader.stats)]


def refuse(tables: Tables, peer: str, code: str, text: str) -> list[Instruction]:
    """Refuse what a peer said; `code` names the error class that it raises."""
    return [*tables.tell(events.MessageRefused(peer=peer, cause=text)), Send(peer, Refused(code, text))]


def _opened(peer: str, message: OpenSession) -> Session:
    """The record of a session, before anything of it is leased."""
    ahead = message.num_steps if message.num_steps >= 0 else _ENDLESS
    session = Session(
        spec=message.session,
        loader=peer,
        num_steps=message.num_steps,
        known_steps=message.consumed if isinstance(message.session.order, ListedOrder) else ahead,
        consumed=message.consumed,
        received=message.received,
        window=message.window,
        frontier=message.consumed,
    )
    session.keep_snapshot(message.consumed, message.snapshot)
    return session


def _take_steps(session: Session, steps: StepList) -> None:
    for step, indices in _split_steps(steps):
        if step >= session.consumed:
            session.lists[step] = indices
    session.known_steps = max(session.known_steps, steps.first_step + len(steps.counts) // 4)


def _split_steps(steps: StepList) -> Iterator[tuple[int, bytes]]:
    counts = memoryview(steps.counts).cast("i")
    offset = 0
    for index, count in enumerate(counts):
        yield steps.first_step + index, steps.indices[offset : offset + 8 * count]
        offset += 8 * count


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
        rooms: ProcessSlots,
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
        """Note that a data worker process offers itself, or is back after a cut or a restart of the dispatcher."""
        tables = self._tables
        out: list[Instruction] = []
        if message.replaces in tables.workers:
            fate = message.fate
            tables.workers[message.replaces].renews = False  # it has died before it left
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
        tables.used_slots.add(worker.slot or peer)
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
        """Note that a data worker is not there any more: what it held is leased again.

        After an orderly end, what it said it sent is on its way and waited for as from a worker that is there. `at` are
        session and step that it was at when it ended; None where nobody knows.
        """
        tables = self._tables
        worker = tables.workers.pop(peer)
        tables.workers_renewed += worker.renews
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
