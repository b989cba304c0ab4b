"""What the dispatcher decides, (state, message, now) -> instructions, and what it knows of a service, -> Status. No
socket, no clock, no disk.

The loader is the authority on what it has: a step counts as done when the loader reports it received or consumed.
The dispatcher hands out the steps that are inside the loader's window and not yet there, as leases with a fencing
token; a lease whose worker is lost, silent or unable to deliver is revoked and its missing steps are leased again.
A batch is a pure function of its session and step, so making one twice is waste, never damage.

Here messages come in and time passes. `tables.py` has what is known; `peers.py` takes in the
messages, `leasing.py` decides who gets which steps, and `placement.py` which processes there should be. A status is
made when a peer asks (`hetstream job`) and for the metrics; between two questions it costs nothing but counters.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from statistics import fmean

import msgspec

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.leasing import Leasing
from hetstream.mpi_dataworkers.dispatcher.peers import Handler, LoaderMessages, Notices, WorkerMessages, refuse
from hetstream.mpi_dataworkers.dispatcher.placement import ProcessSlots, Reachability
from hetstream.mpi_dataworkers.dispatcher.sharing import key_of
from hetstream.mpi_dataworkers.dispatcher.tables import (
    ARRIVAL_TIMEOUT_S,
    LOADER_PAUSE_S,
    LOADER_TIMEOUT_S,
    RECOVERY_GRACE_S,
    WORKER_TIMEOUT_S,
    ForgetWorker,
    Instruction,
    Lease,
    LeaseStatus,
    LoaderRecord,
    Send,
    Session,
    Tables,
    WorkerRecord,
)
from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.order.rates import step_time_s
from hetstream.mpi_dataworkers.wire.messages import (
    HEARTBEAT_S,
    DataWorkerState,
    DataWorkerStatus,
    DrainWorker,
    LoaderStatus,
    Message,
    PastDecision,
    RegisterLoader,
    RegisterWorker,
    RequestStatus,
    Status,
    SteerDataWorkers,
    UnknownPeer,
)

# A data worker speaks every half second; one that missed three turns is called silent.
_SILENT_S = 1.5


def status_of(tables: Tables, now: float) -> Status:
    """Everything that `hetstream job` shows, at the time `now`."""
    (leases_per_s,) = tables.recent.per_s(now, tables.leases_granted)
    return Status(
        incarnation=tables.incarnation,
        uptime_s=now - tables.started_at,
        data_workers=[_worker_status(tables, worker, now) for worker in tables.workers.values()],
        loaders=sorted(
            _with_spread(
                [
                    (key_of(loader.registration), _loader_status(tables, peer, loader, now))
                    for peer, loader in tables.loaders.items()
                    if not loader.registration.feeds  # a data worker, which has a row of its own
                ]
            ),
            key=lambda row: (row.job, row.rank, row.ordinal),
        ),
        data_workers_seen=tables.workers_seen,
        data_workers_lost=tables.workers_lost,
        leases_granted=tables.leases_granted,
        leases_revoked=tables.leases_revoked,
        leases_per_s=leases_per_s,
        elastic=tables.elastic["cpu"],
        decisions=[
            PastDecision(now - when, said.action, said.count, said.reason, said.device)
            for when, said in tables.decisions
        ],
        elastic_gpu=tables.elastic["gpu"],
        elastic_embedding=tables.elastic["embedding"],
    )


def note_rates(tables: Tables, now: float) -> None:
    """Take note of all counters whose growth `status_of` shows; to be called several times a second."""
    tables.recent.note(now, tables.leases_granted)
    for worker in tables.workers.values():
        work = worker.work
        work.recent.note(now, work.steps, _busy_s(tables, worker, now), work.waited_s)
    for loader in tables.loaders.values():
        loader.recent.note(now, loader.stats.steps, loader.stats.bytes, loader.stats.wait_s)


def _busy_s(tables: Tables, worker: WorkerRecord, now: float) -> float:
    """Time in which the worker made steps, with that of the lease in work, without its waits for the stage before."""
    begun_at = tables.leases[min(worker.tokens)].begun_at if worker.tokens else now
    return worker.work.busy_s + now - begun_at - worker.work.waited_s


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _worker_status(tables: Tables, worker: WorkerRecord, now: float) -> DataWorkerStatus:
    work = worker.work
    steps_per_s, busy, waiting = work.recent.per_s(now, work.steps, _busy_s(tables, worker, now), work.waited_s)
    if now - worker.last_seen > _SILENT_S:
        doing: DataWorkerState = "silent"
    elif worker.draining:
        doing = "draining"
    elif any(until > now for until in worker.unreachable.values()):
        doing = "unreachable"
    else:
        doing = "working" if worker.tokens else "idle"
    return DataWorkerStatus(
        number=worker.number,
        host=worker.host,
        pid=worker.pid,
        state=doing,
        leases=len(worker.tokens),
        steps=work.steps,
        steps_per_s=steps_per_s,
        busy_share=_share(busy),
        leases_revoked=work.leases_revoked,
        up_s=now - work.registered_at,
        silent_s=now - worker.last_seen,
        slurm_job=worker.slurm_job,
        resident_bytes=worker.resident_bytes,
        device=worker.device,
        wait_share=_share(waiting),
    )


def _loader_status(tables: Tables, peer: str, loader: LoaderRecord, now: float) -> LoaderStatus:
    stats, who = loader.stats, loader.registration
    steps_per_s, bytes_per_s, waiting = loader.recent.per_s(now, stats.steps, stats.bytes, stats.wait_s)
    # Several at once for an iterable dataset: one for each shard.
    sessions: list[Session] = [session for session in tables.sessions.values() if session.loader == peer]
    ends_known = all(session.num_steps >= 0 for session in sessions)
    return LoaderStatus(
        job=who.job_name,
        ordinal=who.ordinal,
        rank=who.rank,
        world_size=who.world_size,
        host=who.host,
        pid=who.pid,
        epoch=max((session.spec.epoch for session in sessions), default=-1),
        step=sum(session.consumed for session in sessions),
        num_steps=sum(session.num_steps for session in sessions) if ends_known else -1,
        buffered=sum(stop - first for session in sessions for first, stop in session.received),
        window=sum(session.window for session in sessions),
        num_data_workers=max(0, loader.announced_workers),
        steps_per_s=steps_per_s,
        bytes_per_s=bytes_per_s,
        wait_share=_share(waiting),
        totals=stats,
        step_s=step_time_s(steps_per_s, waiting),
        title=who.title,
        training=loader.training,
        device=who.device,
        optimizer=loader.optimizer,
        features=loader.features,
    )


def _with_spread(rows: list[tuple[Hashable, LoaderStatus]]) -> Iterator[LoaderStatus]:
    """The rows with how much the ranks' step times differ; loaders of one key belong together."""
    times: dict[Hashable, list[float]] = {}
    for key, row in rows:
        if row.step_s > 0:
            times.setdefault(key, []).append(row.step_s)
    for key, row in rows:
        of_ranks = times.get(key, [])
        spread = (max(of_ranks) - min(of_ranks)) / fmean(of_ranks) if of_ranks else 0.0
        yield msgspec.structs.replace(row, step_time_spread=spread)


class DispatcherState:
    """All that the dispatcher knows, and what it does about it.

    Args:
        incarnation: number of this start of the dispatcher, from 1.
        now: time of the start, s, on the clock of all later calls.
        expected: peer ids of the data workers that were registered when the last dispatcher ended: nothing is leased
            until they have told what they hold, or `RECOVERY_GRACE_S` has passed.

    Attributes:
        tables: what it knows: peers, sessions, leases, pipelines.
        leasing: who gets which steps.
        _reachability: how many data workers each loader can count on.
        _rooms: which processes there should be in each slot.
        _notices: what users should know.
        _loaders: takes in the messages of loaders.
        _workers: takes in the messages of data workers.
        _from_anybody: what takes in each type of message that a peer may send without being registered.
    """

    def __init__(self, incarnation: int, now: float, expected: Collection[str] = ()) -> None:
        self.tables = Tables(incarnation, now, expected)
        self.leasing = Leasing(self.tables, now)
        placement, streams = self.leasing.placement, self.leasing.streams
        self._reachability = Reachability(self.tables, placement)
        self._rooms = ProcessSlots(self.tables, placement, self._reachability, streams)
        self._notices = Notices(self.tables)
        self._loaders = LoaderMessages(self.tables, self._reachability, streams, self._notices, self._rooms)
        self._workers = WorkerMessages(self.tables, self.leasing, self._reachability, self._rooms, self._loaders.drop)
        self._from_anybody: dict[type[Message], Handler] = {
            RegisterWorker: self._register_worker,
            RegisterLoader: self._loaders.register,
            RequestStatus: self._request_status,
            SteerDataWorkers: self._steer,
        }

    # --- entry points -----------------------------------------------------------------------------------------------

    def handle(self, peer: str, message: Message, now: float) -> list[Instruction]:
        """Take in one message of an authenticated peer."""
        tables, kind = self.tables, type(message)
        if kind in self._from_anybody:
            return self._from_anybody[kind](peer, message, now)
        if peer in tables.workers:
            tables.workers[peer].last_seen = now
            role, handler = "data worker", self._workers.handlers.get(kind)
        elif peer in tables.loaders:
            loader = tables.loaders[peer]
            if now - loader.last_seen > LOADER_PAUSE_S:
                loader.steady_since = now
            loader.last_seen = now
            role, handler = "loader", self._loaders.handlers.get(kind)
        else:
            return [Send(peer, UnknownPeer())]
        if handler is None:
            return refuse(tables, peer, "ProtocolError", f"{kind.__name__} is no message of a {role}")
        return handler(peer, message, now) + self._hand_out(now)

    def peer_gone(self, peer: str, now: float) -> list[Instruction]:
        """Note that a peer's connection closed. If only the network blinked, the peer registers again and says what it
        has.
        """
        out: list[Instruction] = []
        if peer in self.tables.workers:
            silent_s = now - self.tables.workers[peer].last_seen
            # libzmq closes the connection of a process that is stopped or cut off; one that ends was heard of just now.
            cause = f"silent for {silent_s:.1f} s" if silent_s > WORKER_TIMEOUT_S / 2 else "its connection closed"
            out = self._workers.lose(peer, now, cause)
        elif peer in self.tables.loaders:
            out = self._loaders.drop(peer, "its connection closed")
        return out + self._hand_out(now)

    def tick(self, now: float) -> list[Instruction]:
        """Let time pass: find the silent and the undelivered, lease their steps again."""
        note_rates(self.tables, now)
        out = self._drop_silent(now) + self._give_up_expected(now) + self._revoke_undelivered(now)
        out += self._notices.tell_due(now)
        # Announced here too, because workers that were unreachable become reachable by time alone.
        return out + self._reachability.announce(now) + self._hand_out(now)

    def next_deadline(self) -> float:
        """Return seconds after which `tick` should be called at the latest."""
        return HEARTBEAT_S / 2

    def status(self, now: float) -> Status:
        """Return what goes on."""
        return status_of(self.tables, now)

    def drain(self, peer: str, now: float) -> list[Instruction]:
        """Let a data worker leave without losing what it is making: no more leases, and it ends by itself."""
        if peer not in self.tables.workers or self.tables.workers[peer].draining:
            return []
        out = self._rooms.begin_drain(peer, "the service wants it to")
        return [*out, Send(peer, DrainWorker()), *self.leasing.assign(now)]

    def refuse(self, peer: str, error: ProtocolError) -> list[Instruction]:
        """Answer what was no message, or none for a dispatcher."""
        return refuse(self.tables, peer, "ProtocolError", str(error))

    def validate(self) -> None:
        """Check the invariants; tests call it after every event.

        Raises:
            AssertionError: with the story, when one does not hold.
        """
        self.tables.validate()

    # --- messages that need no registration -------------------------------------------------------------------------

    def _register_worker(self, peer: str, message: RegisterWorker, now: float) -> list[Instruction]:
        return self._workers.register(peer, message, now) + self._hand_out(now)

    def _request_status(self, peer: str, _: RequestStatus, now: float) -> list[Instruction]:
        return [Send(peer, self.status(now))]

    def _steer(self, peer: str, message: SteerDataWorkers, now: float) -> list[Instruction]:
        """Note what the elastic controller says, and let the data workers of its Slurm jobs drain."""
        tables = self.tables
        tables.elastic[message.device] = message.elastic
        out: list[Instruction] = []
        if message.action:
            tables.decisions.append((now, message))
            event = events.DataWorkersChanged(
                action=message.action, count=message.count, cause=message.reason, device=message.device
            )
            out += tables.tell(event)
        for leaving in [peer for peer, worker in tables.workers.items() if worker.slurm_job in message.drain]:
            out += self.drain(leaving, now)
        return [*out, Send(peer, self.status(now))]

    # --- what time brings -------------------------------------------------------------------------------------------

    def _hand_out(self, now: float) -> list[Instruction]:
        """Lease what can be leased, and ask for processes where programs lack them."""
        return self.leasing.assign(now) + self._rooms.make_room(now)

    def _drop_silent(self, now: float) -> list[Instruction]:
        """Take peers that were silent for too long for gone."""
        out: list[Instruction] = []
        for peer, worker in list(self.tables.workers.items()):
            silence_s = now - worker.last_seen
            if silence_s > WORKER_TIMEOUT_S + self._may_hold_gil_s(worker):
                out += self._workers.lose(peer, now, f"silent for {silence_s:.1f} s")
        for peer, loader in list(self.tables.loaders.items()):
            silence_s = now - loader.last_seen
            if silence_s > LOADER_TIMEOUT_S:
                out += [Send(peer, UnknownPeer()), *self._loaders.drop(peer, f"silent for {silence_s:.1f} s")]
        return out

    def _may_hold_gil_s(self, worker: WorkerRecord) -> float:
        """How long user code may keep a data worker from saying anything; its connection says that it is alive."""
        tables = self.tables
        sessions = [tables.sessions.get(tables.leases[token].session_id) for token in worker.tokens]
        timeouts_s = [session.spec.errors.sample_timeout_s for session in sessions if session is not None]
        return max(timeouts_s, default=0.0)

    def _give_up_expected(self, now: float) -> list[Instruction]:
        """Wait no longer for data workers of before the restart."""
        expected = self.tables.expected
        if not expected or now < self.tables.grant_from:
            return []
        cause = f"they did not register within {RECOVERY_GRACE_S:g} s"
        out = self.tables.tell(events.DataWorkersMissing(num_missing=len(expected), cause=cause))
        out += [ForgetWorker(peer) for peer in sorted(expected)]
        expected.clear()
        return out

    def _revoke_undelivered(self, now: float) -> list[Instruction]:
        """Take back leases that were sent and did not arrive."""
        out: list[Instruction] = []
        for lease in list(self.tables.leases.values()):
            if lease.status is LeaseStatus.SENT and self._unreported_s(lease, now) > ARRIVAL_TIMEOUT_S:
                reason = f"sent {now - lease.sent_at:.1f} s ago and not received"
                out += self._reachability.mark_unreachable(lease, now, reason)
                out += self.leasing.lifecycle.revoke(lease, reason, reconnect=True)
        return out

    def _unreported_s(self, lease: Lease, now: float) -> float:
        """How long a sent lease could have been reported; a loader that is held up says nothing of its connections."""
        session = self.tables.sessions.get(lease.session_id)
        if session is None:
            return now - lease.sent_at
        loader = self.tables.loaders[session.loader]
        paused = now - loader.last_seen > LOADER_PAUSE_S
        return 0.0 if paused else now - max(lease.sent_at, loader.steady_since)
