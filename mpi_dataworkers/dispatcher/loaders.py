"""What loaders say, and what follows from it: they come and go, and open, report and close sessions. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.instructions import (
    ForgetPipeline,
    Instruction,
    RememberPipeline,
    RememberStats,
    Send,
)
from hetstream.mpi_dataworkers.dispatcher.matching import cannot_be_one_job, conflict, key_of
from hetstream.mpi_dataworkers.dispatcher.notices import Notices
from hetstream.mpi_dataworkers.dispatcher.reachability import Reachability
from hetstream.mpi_dataworkers.dispatcher.records import LeaseStatus, LoaderRecord, Session
from hetstream.mpi_dataworkers.dispatcher.rooms import Rooms
from hetstream.mpi_dataworkers.dispatcher.shared_streams import SharedStreams
from hetstream.mpi_dataworkers.dispatcher.sharing import different_under_one_name
from hetstream.mpi_dataworkers.dispatcher.tables import Tables
from hetstream.mpi_dataworkers.rates import RecentRates
from hetstream.mpi_dataworkers.wire.messages import (
    Alive,
    CloseSession,
    DropPipeline,
    DropSession,
    EndProcesses,
    ExtendSession,
    LeaveLoader,
    ListedOrder,
    LoaderHeartbeat,
    LoaderRegistered,
    LoaderStats,
    Message,
    OpenSession,
    ProvidePipeline,
    Refused,
    RegisterLoader,
    ReportProgress,
    StepList,
    UnknownPeer,
)

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
        self, tables: Tables, reachability: Reachability, streams: SharedStreams, notices: Notices, rooms: Rooms
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
        """A loader introduces itself, or is back after a cut."""
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
        """A loader is not there any more: its sessions end."""
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
