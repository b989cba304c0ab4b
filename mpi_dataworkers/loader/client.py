"""A loader's side of the service. Knows no torch.

Used by `remote_source.py`. The training thread opens a session for an epoch and takes its steps in order;
everything else (credits, heartbeats, registering again with a restarted dispatcher, dropping duplicates) happens in the
thread of the process's connection (`process_connection.py`), which all loaders share. So nothing here waits, and
batches whose rebuilding runs code of the program are rebuilt in a thread of the loader's own: if that hangs, other
loaders go on.

What a session knows is in `session.py`, what the dispatcher was told in `registration.py`, whether data workers deliver
in `availability.py`: all without I/O. Here are the lock that guards them and the messages.
"""

from __future__ import annotations

import collections
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import hetstream.mpi_dataworkers.errors
from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.errors import ProtocolError, ServiceError, ServiceUnavailable
from hetstream.mpi_dataworkers.faults import reach
from hetstream.mpi_dataworkers.loader import optimizer_calls
from hetstream.mpi_dataworkers.loader.availability import DISPATCHER_SILENCE_S, LATE_STEP_S, Availability
from hetstream.mpi_dataworkers.loader.delivered import Delivered, Ended, LocalFailure, LocalFallback, Step
from hetstream.mpi_dataworkers.loader.notification import Notification
from hetstream.mpi_dataworkers.loader.process_connection import (
    CONNECT_TIMEOUT_S,
    ConnectionOptions,
    ProcessConnection,
    join_service,
    service_at,
)
from hetstream.mpi_dataworkers.loader.rebuilding import Rebuilder, rebuild
from hetstream.mpi_dataworkers.loader.registration import ClientOptions, Registration
from hetstream.mpi_dataworkers.loader.session import LoaderSession, SessionRequest
from hetstream.mpi_dataworkers.loader.wire_meter import WireMeter
from hetstream.mpi_dataworkers.memory import keep_freed_memory
from hetstream.mpi_dataworkers.order.window import MAX_STEPS, StepSize, Window
from hetstream.mpi_dataworkers.transports.base import ReceivedBatch, Reconnected
from hetstream.mpi_dataworkers.wire.codec import Buffer
from hetstream.mpi_dataworkers.wire.messages import (
    Alive,
    Batch,
    Batches,
    BatchFailed,
    EndOfShard,
    EndProcesses,
    LeaseRevoked,
    LeaveLoader,
    LoaderHeartbeat,
    LoaderRegistered,
    Membership,
    Message,
    NeedPipeline,
    Notice,
    ProcessesEnded,
    ProvidePipeline,
    Refused,
    ShutDown,
    StepsLost,
    UnknownPeer,
)
from hetstream.mpi_dataworkers.wire.work import HEARTBEAT_S

_log = logging.getLogger(__name__)

# Rebuilding a batch may run user code; leaving does not wait for it for ever.
_CLOSE_S = 5.0
# The training thread looks at the clock this often while it waits.
_LOOK_AGAIN_S = 0.1


class ServiceClient:
    """One loader at its service, over the connection of its process.

    Args:
        options: who the loader is, and where.
        pipeline: the pipeline in pickled form.

    Attributes:
        duplicates_dropped: batches that came a second time, in sessions that are closed.
        batches_by_transport: batches that came by each transport, also those that were not wanted.
        wire: how fast they came.

    Raises:
        ServiceUnavailable, AuthenticationError, JobNameConflict: as they say.
    """

    def __init__(self, options: ClientOptions, pipeline: ProvidePipeline) -> None:
        keep_freed_memory()
        service = service_at(options.address_file)
        self._options = options
        self._step_size = StepSize()
        self._lock = threading.Lock()  # guards the sessions, the registration and the rebuilder
        self._registration = Registration(options, pipeline)
        self._sessions: dict[str, LoaderSession] = {}
        self._rebuilder = Rebuilder(self)
        self._changed = Notification()
        self._availability = Availability(time.monotonic(), options.device)
        self._failure: HetstreamError | None = None
        self._closing = self._processes_ended = False
        # Held until this loader has left the connection. A lock, because waiting for it is C code alone, as in
        # Notification.
        self._left = threading.Lock()
        self._left.acquire()
        # Sessions whose iterator was dropped. Its finaliser may run in any thread, also inside one of our locks.
        self._abandoned: collections.deque[LoaderSession] = collections.deque()
        self._next_heartbeat = 0.0
        self.duplicates_dropped = 0
        self.batches_by_transport: collections.Counter[str] = collections.Counter()
        self.wire = WireMeter()
        # Both come by `joined`, before the connection's thread first asks this loader for anything.
        self._connection: ProcessConnection
        self._number: int
        join_service(ConnectionOptions(service, options.transports, options.compress), self, options.buffer_bytes)
        try:
            self._wait_until_registered()
        except BaseException:
            self.close()
            raise

    @property
    def is_inherited(self) -> bool:
        """Whether it is that of the process which this one was forked from: it must not be used here."""
        return self._connection.is_inherited

    def in_this_process(self) -> ServiceClient:
        """This client; in a process that was forked since, another one for the same loader.

        It is a loader of its own to the dispatcher: the parent goes on with what it has.

        Raises:
            ServiceUnavailable, AuthenticationError: as for a new one.
        """
        if not self.is_inherited:
            return self
        identity = self._options.identity
        child = replace(identity, job_name=f"{identity.job_name}.{os.getpid()}")
        # Nobody can know whether the other ranks have forked, too: it is not told that they have no such loader.
        name = replace(self._options.name, divides=False)
        return ServiceClient(replace(self._options, identity=child, name=name), self._registration.pipeline)

    @property
    def receivers(self) -> list[str]:
        """Where data workers deliver, the best transport first."""
        return self._connection.receivers

    @property
    def num_data_workers(self) -> int:
        """Data worker processes that can reach this loader, as the dispatcher last said."""
        return self._availability.num_workers

    def num_waiting(self) -> tuple[int, int]:
        """Finished batches that wait for the training loop, and those of them that wait for an earlier one to come."""
        with self._lock:
            buffers = [session.buffer for session in self._sessions.values()]
            return sum(map(len, buffers)), sum(len(buffer) - buffer.num_ready() for buffer in buffers)

    # --- training thread --------------------------------------------------------------------------------------------

    def open_session(self, request: SessionRequest) -> LoaderSession:
        """Open a session; batches start to come at once."""
        sharers = request.sharers
        with self._lock:
            request = replace(request, pipeline=self._registration.use(request.pipeline))
            window = Window(
                self._options.buffer_bytes // sharers,
                -(-request.min_window // sharers),
                MAX_STEPS // sharers,
                self._step_size,
            )
            session = LoaderSession(request.spec(self._connection.receivers), request, window)
            self._sessions[session.session_id] = session
            self._connection.read(session.session_id, self._number)
            self._registration.say(session.opening())
        self._wake()
        return session

    def extend(self, session: LoaderSession, steps: Sequence[bytes], ended: bool) -> None:
        """Add steps of a listed order: int64 index bytes each; `ended` when the sampler has no more."""
        with self._lock:
            self._registration.say(session.extend(steps, ended))
            session.was_extended(len(steps))
        self._wake()

    def take(
        self, sessions: Sequence[LoaderSession], deadline: float | None, waiting_since: float = math.inf
    ) -> tuple[int, Step | LocalFallback | Ended]:
        """Wait for the next step, or the end, of whichever of the sessions has it first. It stays until `advance`.

        Args:
            sessions: one for the order to be kept, several for the order of arrival.
            deadline: on the monotonic clock; None waits until a step is there or has to be made in process.
            waiting_since: when the wait for this step began, if not with this call.

        Returns:
            The number of the session in `sessions`, and its step.

        Raises:
            TimeoutError: the deadline passed.
            HetstreamError: the service failed for good.
        """
        if self.is_inherited:
            raise ServiceError(
                f"process {os.getpid()} was forked from the one that began this iteration; only that one gets its "
                "batches. Iterate the DataLoader anew in the forked process."
            )
        while True:
            with self._lock:
                for index, session in enumerate(sessions):
                    found = session.next_or_end()
                    if found is not None:
                        return index, found
                if self._failure is not None:
                    raise self._failure
                now = time.monotonic()
                waiting_since = min(waiting_since, now)
                reason = self._reason_to_work_locally(now, waiting_since)
                if reason:
                    is_late = now - waiting_since > LATE_STEP_S
                    return 0, LocalFallback(sessions[0].buffer.position, reason, is_late)
            if deadline is not None and now >= deadline:
                raise TimeoutError
            self._changed.wait(_LOOK_AGAIN_S if deadline is None else min(_LOOK_AGAIN_S, deadline - now))

    def _reason_to_work_locally(self, now: float, waiting_since: float) -> str:
        if self._closing:
            return "it was closed"
        return self._availability.reason_to_work_locally(now, waiting_since, self._connection.last_heard)

    def end_session_at(self, session: LoaderSession, num_steps: int) -> None:
        """The loader itself found out how many steps a session has."""
        with self._lock:
            session.end_at(num_steps)

    def put_local(self, session: LoaderSession, item: Delivered | LocalFailure) -> Step:
        """Give in the step that `take` asked to be made in process; a batch that came meanwhile wins. Either stays."""
        with self._lock:
            if not session.has_next():
                session.put(session.buffer.position, item)
            return session.next_step()

    def advance(self, session: LoaderSession, step: int) -> None:
        """Move past a step that was taken. To do so once more changes nothing, also where an exception of the program's
        handlers of signals came in between."""
        reach("loader.step_taken")
        with self._lock:
            session.advance(step)
            wakes = session.reaches_a_quarter()  # of the window: the connection's thread needs the GIL to wake
        if wakes:
            self._wake()

    def say_local(self, reason: str) -> None:
        """Log, once for each change, that steps are made in process."""
        self._availability.say_local(reason)

    def say_streaming(self) -> None:
        """Log, once for each change, that data workers deliver again."""
        known = self._availability
        if not known.is_local or known.num_workers == 0 or self._closing:
            return
        if time.monotonic() - self._connection.last_heard < DISPATCHER_SILENCE_S:
            known.say_streaming()

    def close_session(self, session: LoaderSession) -> None:
        """End a session, finished or not."""
        if self.is_inherited:
            return  # the parent's, as the session is; another thread of it may have held the lock when this was forked
        with self._lock:
            if self._sessions.pop(session.session_id, None) is None:
                return
            self._connection.stop_reading(session.session_id)
            self.duplicates_dropped += session.buffer.num_dropped
            if not self._sessions:
                self._rebuilder.end()
            if not self._closing:
                self._registration.say(session.closing(self._options.statistics.at_last_step()))
        if not self._closing:
            self._wake()

    def end_processes(self, timeout_s: float) -> bool:
        """End the processes that have made steps of this loader, and wait for their end: the program needs what they
        hold. Its sessions are closed, or others get them.

        Returns:
            Whether they have ended in time.
        """
        if self.is_inherited:
            return True
        deadline = time.monotonic() + timeout_s
        self._processes_ended = False
        with self._lock:
            self._registration.say(EndProcesses())
        self._wake()
        while not self._processes_ended and self._failure is None and not self._closing:
            now = time.monotonic()
            if now > deadline or now - self._connection.last_heard > DISPATCHER_SILENCE_S:
                break
            self._changed.wait(_LOOK_AGAIN_S)
        return self._processes_ended

    def abandon(self, session: LoaderSession) -> None:
        """End a session from a finaliser: takes no lock, the connection's thread does the rest."""
        self._abandoned.append(session)
        self._wake()

    def request_close(self) -> None:
        """Leave the service soon; may be called from a finaliser."""
        self._closing = True
        self._wake()

    def close(self) -> None:
        """Leave the service, and return when it is done; safe to call twice."""
        self.request_close()
        if self.is_inherited or not self._left.acquire(timeout=_CLOSE_S):
            return
        self._left.release()
        self._connection.wait_for_end(_CLOSE_S)
        if not self._rebuilder.join(_CLOSE_S):
            _log.warning("hetstream: the loader did not close within %g s: a batch is being rebuilt", _CLOSE_S)

    def _wake(self) -> None:
        self._connection.call(self._number)

    def _wait_until_registered(self) -> None:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while not self._registration.was_answered and self._failure is None and time.monotonic() < deadline:
            self._changed.wait(_LOOK_AGAIN_S)
        if self._failure is not None:
            raise self._failure
        if not self._registration.was_answered:
            raise ServiceUnavailable(
                f"the dispatcher let this loader in but did not answer within {CONNECT_TIMEOUT_S:g} s; "
                "see the dispatcher's log"
            )

    # --- the connection's thread: see `connection.ConnectedLoader` --------------------------------------------------

    def joined(self, connection: ProcessConnection, number: int) -> None:
        self._connection, self._number = connection, number

    def begin(self, now: float) -> None:
        self._register(now)
        self._next_heartbeat = now + HEARTBEAT_S

    def attend(self, now: float) -> bool:
        while self._abandoned:
            self.close_session(self._abandoned.popleft())
        if self._closing:
            return False
        self._send_reports(now)
        if now >= self._next_heartbeat:
            self._send(LoaderHeartbeat(self._options.statistics.at_last_step()))
            self._next_heartbeat = now + HEARTBEAT_S
        return True

    def leave(self) -> None:
        self._send_waiting()
        self._send(LeaveLoader(self._options.statistics.at_last_step()))

    def has_left(self, failure: HetstreamError | None) -> None:
        with self._lock:
            for session_id in self._sessions:
                self._connection.stop_reading(session_id)
            self._rebuilder.end()
            self._failure = failure
            self._changed.notify()
        self._left.release()

    def _send(self, message: Message) -> None:
        self._connection.send(self._number, message)

    def _send_waiting(self) -> None:
        for message in self._registration.take_waiting():
            self._send(message)

    def _send_reports(self, now: float) -> None:
        # To a dispatcher that is away, what is said now would only be said again when it is back.
        is_away = now - self._connection.last_heard > DISPATCHER_SILENCE_S
        if not self._registration.is_known or is_away:
            return
        with self._lock:
            self._send_waiting()  # inside the lock: no report of a session may overtake its OpenSession
            for session in self._sessions.values():
                progress = session.progress()
                if session.is_report_due(progress, now):
                    reach("loader.before_report")
                    statistics = self._options.statistics
                    report = session.report(statistics.at_last_step(), optimizer_calls.calls(), statistics.features)
                    self._send(report)
                    session.has_reported(progress, now)
                    reach("loader.after_report")

    def _register(self, now: float) -> None:
        self._send(self._registration.begin(now))

    # --- messages of the dispatcher; _HANDLERS is at the end of the file ---------------------------------------------

    def message_received(self, message: Message | Reconnected, now: float) -> None:
        handler = _HANDLERS.get(type(message))
        if handler is None:
            raise ProtocolError(f"the dispatcher sent {type(message).__name__}, which is no message for a loader")
        handler(self, message, now)

    def _on_reconnected(self, _: Reconnected, now: float) -> None:
        _log.info("the connection to the dispatcher is back: registering again")
        self._register(now)

    def _on_registered(self, message: LoaderRegistered, now: float) -> None:
        reach("loader.registered")
        with self._lock:
            known_id = "" if message.need_pipeline else message.pipeline_id
            self._registration.say_all(self._sessions.values(), known_id)
            self._availability.set_workers(message.num_data_workers, now)
            self._registration.answered()
            self._changed.notify()

    def _on_unknown_peer(self, _: UnknownPeer, now: float) -> None:
        if self._registration.is_to_begin_again(now):
            _log.info("the dispatcher does not know this loader (restarted?): registering again")
            self._register(now)

    def _on_need_pipeline(self, message: NeedPipeline, _: float) -> None:
        with self._lock:
            sessions = [session.pipeline for session in self._sessions.values()]
            pipelines = [self._registration.pipeline, *sessions]
        for pipeline in pipelines:
            if pipeline.pipeline_id == message.pipeline_id:
                self._send(pipeline)
                return

    def _on_membership(self, message: Membership, now: float) -> None:
        with self._lock:
            self._availability.set_workers(message.num_data_workers, now)
            self._changed.notify()

    def _on_shut_down(self, _: ShutDown, now: float) -> None:
        with self._lock:
            self._availability.set_workers(0, now)
            self._changed.notify()

    def _on_lease_revoked(self, message: LeaseRevoked, _: float) -> None:
        with self._lock:
            if message.session_id in self._sessions:
                self._sessions[message.session_id].revoke(message)

    def _on_steps_lost(self, message: StepsLost, _: float) -> None:
        with self._lock:
            if message.session_id in self._sessions:
                self._sessions[message.session_id].lose(message)
            self._changed.notify()

    def _on_batch_failed(self, message: BatchFailed, _: float) -> None:
        with self._lock:
            if message.session_id in self._sessions:
                self._sessions[message.session_id].put(message.step, message)
            self._changed.notify()

    def _on_processes_ended(self, _: ProcessesEnded, __: float) -> None:
        self._processes_ended = True
        self._changed.notify()

    def _on_refused(self, message: Refused, _: float) -> None:
        kind = getattr(hetstream.mpi_dataworkers.errors, message.code, ServiceError)
        raise kind(message.text)

    def _on_notice(self, message: Notice, _: float) -> None:
        _log.warning("hetstream: %s", message.text)

    def _on_alive(self, _: Alive, __: float) -> None:
        """The connection has noted that the dispatcher was heard."""

    # --- batches ----------------------------------------------------------------------------------------------------

    def batches_received(self, received: ReceivedBatch) -> None:
        if isinstance(received.header, EndOfShard):
            self._on_end_of_shard(received.header)
            return
        headers = received.header.batches if isinstance(received.header, Batches) else [received.header]
        self.batches_by_transport[received.transport] += len(headers)
        if received.began_s is not None:
            self.wire.note(sum(map(len, received.frames)), received.began_s, time.monotonic())
        wanted: list[tuple[LoaderSession, Batch]] = []
        with self._lock:
            for header in headers:
                session = self._sessions.get(header.session_id)
                if session is None or not session.wants(header.step, header.token):
                    continue
                if self._options.batches.runs_program(header):
                    session.buffer.expect(header.step)
                    self._rebuilder.put(session, header, received.frames)
                else:
                    wanted.append((session, header))
        self.rebuild(wanted, received.frames)

    def _on_end_of_shard(self, header: EndOfShard) -> None:
        with self._lock:
            session = self._sessions.get(header.session_id)
            if session is not None and not session.buffer.is_revoked(header.token):
                session.end_at(header.num_steps)
                self._changed.notify()

    def rebuild(self, wanted: Sequence[tuple[LoaderSession, Batch]], frames: Sequence[Buffer]) -> None:
        """Rebuild batches and put each into its session. Also called in the thread of this loader's own."""
        items = [(session, header.step, rebuild(self._options.batches, header, frames)) for session, header in wanted]
        with self._lock:
            for session, step, item in items:
                session.put_delivered(step, item)
            self._changed.notify()


_HANDLERS: dict[type[Message] | type[Reconnected], Callable[[ServiceClient, Any, float], None]] = {
    Reconnected: ServiceClient._on_reconnected,
    LoaderRegistered: ServiceClient._on_registered,
    UnknownPeer: ServiceClient._on_unknown_peer,
    NeedPipeline: ServiceClient._on_need_pipeline,
    Membership: ServiceClient._on_membership,
    ShutDown: ServiceClient._on_shut_down,
    LeaseRevoked: ServiceClient._on_lease_revoked,
    StepsLost: ServiceClient._on_steps_lost,
    BatchFailed: ServiceClient._on_batch_failed,
    ProcessesEnded: ServiceClient._on_processes_ended,
    Refused: ServiceClient._on_refused,
    Notice: ServiceClient._on_notice,
    Alive: ServiceClient._on_alive,
}
