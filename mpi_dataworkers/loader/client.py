"""A loader's side of the service.

Used by `remote_source.py`. The training thread opens a session for an epoch and takes its steps in order;
everything else (credits, heartbeats, registering again with a restarted dispatcher, dropping duplicates) happens in the
thread of the process's connection (`process_connection.py`), which all loaders share. So nothing here waits, and
batches whose rebuilding runs code of the program are rebuilt in a thread of the loader's own: if that hangs, other
loaders go on.

What a session knows is in `session.py`, what the dispatcher was told in `Registration`, whether data workers deliver
in `Availability`: all without I/O. `ServiceClient` has the lock that guards them and the messages.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import logging
import math
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import msgspec

import hetstream.mpi_dataworkers.errors
from hetstream.base.errors import HetstreamError
from hetstream.base.text import count_words
from hetstream.mpi_dataworkers.errors import ProtocolError, ServiceError, ServiceUnavailable
from hetstream.mpi_dataworkers.loader import step_times
from hetstream.mpi_dataworkers.loader.batches import Rebuilder, TorchBatches
from hetstream.mpi_dataworkers.loader.process_connection import (
    CONNECT_TIMEOUT_S,
    ConnectionOptions,
    ProcessConnection,
    join_service,
    service_at,
)
from hetstream.mpi_dataworkers.loader.session import (
    Delivered,
    Ended,
    LoaderSession,
    LocalFailure,
    LocalFallback,
    SessionRequest,
    Step,
)
from hetstream.mpi_dataworkers.loader.statistics import LoaderStatistics, WireMeter
from hetstream.mpi_dataworkers.order.reorder import MAX_STEPS, StepSize, Window
from hetstream.mpi_dataworkers.process.config import TrainerIdentity
from hetstream.mpi_dataworkers.process.faults import reach
from hetstream.mpi_dataworkers.process.interpreter import keep_freed_memory, this_interpreter
from hetstream.mpi_dataworkers.transports.base import ReceivedBatch, Reconnected
from hetstream.mpi_dataworkers.wire.codec import Buffer
from hetstream.mpi_dataworkers.wire.messages import (
    HEARTBEAT_S,
    Alive,
    Batch,
    Batches,
    BatchFailed,
    CloseSession,
    Delivery,
    Device,
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
    RegisterLoader,
    ShutDown,
    StepsLost,
    UnknownPeer,
)

# Whether data workers deliver to a loader, and when it stops waiting and makes a step itself. No I/O but the log.

_log = logging.getLogger(__name__)

# With no data worker, or no dispatcher, for this long, the loader makes the step it waits for itself.
LOCAL_AFTER_S = 1.0
DISPATCHER_SILENCE_S = 5.0
# Nor does a step that is merely late hold up the trainer for ever.
LATE_STEP_S = 60.0


class Availability:
    """What a loader knows of its data workers.

    Args:
        now: on the monotonic clock.
        device: what data workers make the loader's batches with.

    Attributes:
        num_workers: data worker processes that can reach this loader, as the dispatcher last said.
        is_local: steps are made in process, and the log says so.
    """

    def __init__(self, now: float, device: Device = "cpu") -> None:
        self._none_yet = "no data worker has come yet" if device == "cpu" else "no data worker with a GPU has come yet"
        who = "no data worker is there" if device == "cpu" else "no data worker with a GPU is there"
        self._nobody = f"{who}, or none reaches this process"
        self.num_workers = 0
        self.is_local = False
        self._no_workers_since = now
        self._has_had_workers = False
        self._was_at_start = False  # when it last began to work locally

    def set_workers(self, count: int, now: float) -> None:
        """Note how many data workers are there now."""
        if count == 0 and self.num_workers > 0:
            self._no_workers_since = now
        self.num_workers = count
        self._has_had_workers = self._has_had_workers or count > 0

    def reason_to_work_locally(self, now: float, waiting_since: float, last_heard: float) -> str:
        """Why the step that is waited for is to be made in process; "" to go on waiting.

        Args:
            now: on the monotonic clock.
            waiting_since: when the wait for the step began.
            last_heard: when the dispatcher last said something.
        """
        # Once it works locally it does not wait anew for each step.
        has_waited = self.is_local or now - max(self._no_workers_since, waiting_since) > LOCAL_AFTER_S
        if self.num_workers == 0 and has_waited:
            return self._nobody
        silent_s = now - last_heard
        if silent_s > DISPATCHER_SILENCE_S and has_waited:
            return f"the dispatcher has been silent for {silent_s:.0f} s"
        if now - waiting_since > LATE_STEP_S:
            return f"{self.num_workers} data workers did not deliver it within {LATE_STEP_S:g} s"
        return ""

    def say_local(self, reason: str) -> None:
        """Log, once for each change, that steps are made in process."""
        if not self.is_local:
            if reason == self._nobody and not self._has_had_workers:
                _log.warning(
                    "hetstream: %s, or none reaches this process; the program makes its batches itself until then",
                    self._none_yet,
                )
            else:
                _log.warning("hetstream: working locally, because %s", reason)
            self._was_at_start, self.is_local = not self._has_had_workers, True

    def say_streaming(self) -> None:
        """Log, once for each change, that data workers deliver again."""
        if self.is_local:
            how = "are now made by" if self._was_at_start else "come again from"
            _log.warning("hetstream: the batches %s %s", how, count_words(self.num_workers, "data worker process"))
            self.is_local = False


# How the connection's thread wakes the training thread.


class Notification:
    """Says that something changed. Made of C code alone where the training thread waits: a KeyboardInterrupt inside the
    Python methods of a `threading.Condition` would leave its lock held for ever."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def notify(self) -> None:
        """Something changed."""
        if self._queue.empty():
            self._queue.put(None)

    def wait(self, timeout_s: float) -> None:
        """Return when something has changed since the last wait, or after `timeout_s`."""
        with contextlib.suppress(queue.Empty):
            self._queue.get(timeout=timeout_s)


# Who a loader is among the loaders of its program, so that the dispatcher finds the same loader of another rank.
#
# A number in order of making does not say that: a loader that rank 0 alone makes would shift all that follow. So a
# loader is known by its description and by the how-many-th of that description it is; and where it was made says
# whether two ranks mean the same by it.

_SITE = {"site-packages", "dist-packages"}
_OWN_PACKAGE = "hetstream"


@dataclass(frozen=True)
class LoaderName:
    """What tells a loader from the others of its process, and what the other ranks' call the same.

    Attributes:
        ordinal: its number among all loaders of the process, in order of making.
        occurrence: its number among those of the same rank, job name and description.
        place: stands for the calls that led to it, and for how often they had before: alike in all ranks.
        made_at: the innermost of these calls that is the program's own, as `train.py:42`; not an installed package's.
        divides: each rank gets its share of the data, and the other ranks the rest.
    """

    ordinal: int
    occurrence: int
    place: str
    made_at: str
    divides: bool


class _Names:
    """Counts the loaders of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Hashable] = Counter()

    def name(self, identity: TrainerIdentity, description: Mapping[str, str], divides: bool) -> LoaderName:
        """Name a loader that the caller's caller makes now."""
        found = list(_calls())
        calls = [place for place, _ in found]
        own = [place for place, is_installed in found if not is_installed]
        rank = identity.job_name, identity.rank
        with self._lock:
            ordinal, occurrence, nth = (
                self._next(key) for key in ("all", (rank, frozenset(description.items())), (rank, tuple(calls)))
            )
        place = hashlib.blake2b(repr((calls, nth)).encode(errors="replace"), digest_size=8).hexdigest()
        return LoaderName(ordinal, occurrence, place, (own or calls or [""])[0], divides)

    def _next(self, key: Hashable) -> int:
        self._counts[key] += 1
        return self._counts[key] - 1


def title_of(identity: TrainerIdentity, name: LoaderName, description: Mapping[str, str]) -> str:
    """What a person knows a loader by: the name that was given to it, the class of its dataset and where it is made."""
    dataset = description.get("dataset", "").rpartition(".")[2]
    parts = (identity.job_name if identity.is_named else "", dataset, name.made_at)
    return " ".join(part for part in parts if part)


def _calls() -> Iterator[tuple[str, bool]]:
    """Where the program is, innermost call first, without hetstream's own calls; and whether that is an installed
    package."""
    frame = sys._getframe(1)
    while frame is not None:
        # Code that a program executes by itself may have anything for a name, or none.
        if str(frame.f_globals.get("__name__")).partition(".")[0] != _OWN_PACKAGE:
            path = PurePath(frame.f_code.co_filename)
            yield f"{path.name}:{frame.f_lineno}", not _SITE.isdisjoint(path.parts)
        frame = frame.f_back  # type: ignore[assignment]


name_loader = _Names().name


# How a loader is known at its dispatcher, and what it still has to say there. No I/O.
#
# `ServiceClient` guards it with its lock. A dispatcher that was restarted knows nothing of a loader:
# it is told everything again, from the sessions as they are by then.

_REGISTER_AGAIN_S = 1.0


@dataclass(frozen=True)
class ClientOptions:
    """What a loader says of itself at its service, and what it does with batches.

    Attributes:
        address_file: the dispatcher's address file.
        identity: who this trainer is.
        name: who the loader is among those of its program.
        description: the pipeline in words, compared between programs of one job name.
        batches: builds them from headers and frames.
        statistics: what the dispatcher is told of the loader.
        buffer_bytes: finished batches to hold ahead of the training loop.
        transports: the ways on which batches may come.
        compress: ask data workers that come over TCP to compress.
        device: what data workers make its batches with.
        feeds: id of the data worker that this loader belongs to; "" for a trainer's.
    """

    address_file: Path
    identity: TrainerIdentity
    name: LoaderName
    description: dict[str, str]
    batches: TorchBatches
    statistics: LoaderStatistics
    buffer_bytes: int
    transports: frozenset[str]
    compress: bool = False
    device: Device = "cpu"
    feeds: str = ""


_trainer: tuple[int, str] = (0, "")


def _trainer_name() -> str:
    """A random name of this process; a forked one gets its own."""
    global _trainer
    if _trainer[0] != os.getpid():
        _trainer = os.getpid(), secrets.token_hex(8)
    return _trainer[1]


class Registration:
    """A loader's registration, its newest pipeline and its messages that wait.

    Args:
        options: who the loader is.
        pipeline: the pipeline in pickled form.

    Attributes:
        pipeline: the newest one.
        message: what the dispatcher is told first.
        was_answered: the dispatcher has let the loader in, at some time.
    """

    def __init__(self, options: ClientOptions, pipeline: ProvidePipeline) -> None:
        identity, name = options.identity, options.name
        self.pipeline = pipeline
        self.was_answered = False
        # When the registration that is under way was sent; None while there is none.
        self._asked_at: float | None = None
        self._outbox: collections.deque[Message] = collections.deque()
        self.message = RegisterLoader(
            job_name=identity.job_name,
            ordinal=name.ordinal,
            rank=identity.rank,
            world_size=identity.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            pipeline_id=pipeline.pipeline_id,
            description=options.description,
            occurrence=name.occurrence,
            place=name.place,
            made_at=name.made_at,
            divides=name.divides,
            trainer=_trainer_name(),
            interpreter=this_interpreter(),
            title=title_of(identity, name, options.description),
            device=options.device,
            feeds=options.feeds,
        )

    @property
    def is_known(self) -> bool:
        """Whether the dispatcher knows the loader, and no registration is under way."""
        return self.was_answered and self._asked_at is None

    def begin(self, now: float) -> RegisterLoader:
        """The message with which a registration begins."""
        self._asked_at = now
        return self.message

    def is_to_begin_again(self, now: float) -> bool:
        """Whether to register with a dispatcher that does not know the loader.

        It may have died before it answered: a registration that got no answer is sent again.
        """
        return self._asked_at is None or now - self._asked_at > _REGISTER_AGAIN_S

    def answered(self) -> None:
        """The dispatcher has let the loader in."""
        self.was_answered, self._asked_at = True, None

    def use(self, pipeline: ProvidePipeline) -> ProvidePipeline:
        """Say which pipeline the next session has, unless it is the same; returns the one to keep."""
        if pipeline.pipeline_id != self.pipeline.pipeline_id:
            self.pipeline = pipeline
            self.message = msgspec.structs.replace(self.message, pipeline_id=pipeline.pipeline_id)
            self._outbox.append(pipeline)
        return self.pipeline

    def say(self, message: Message) -> None:
        """Send this after what waits already."""
        self._outbox.append(message)

    def say_all(self, sessions: Iterable[LoaderSession], known_id: str) -> None:
        """Queue what a dispatcher that has just let this loader in is to know.

        Args:
            sessions: those that are open.
            known_id: id of the pipeline that it has, "" for none.
        """
        # All else is said again, from the sessions as they are now; the end of one would be lost.
        self._outbox = collections.deque(message for message in self._outbox if isinstance(message, CloseSession))
        # Sessions of what is known come first: the dispatcher forgets what no session uses when another one comes.
        current = self.pipeline.pipeline_id

        def rank(session: LoaderSession) -> tuple[bool, bool, str]:
            pipeline_id = session.pipeline.pipeline_id
            return pipeline_id != known_id, pipeline_id == current, pipeline_id

        last = known_id
        for session in sorted(sessions, key=rank):
            if session.pipeline.pipeline_id != last:
                last = session.pipeline.pipeline_id
                self._outbox.append(session.pipeline)
            self._outbox.append(session.opening())
        if current != last:
            self._outbox.append(self.pipeline)

    def take_waiting(self) -> Iterable[Message]:
        """Messages that can be sent now; each is forgotten when it is taken."""
        while self.is_known and self._outbox:
            yield self._outbox.popleft()


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
        self._rebuilder = Rebuilder(self._rebuild)
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

    # --- the connection's thread: see `process_connection.ConnectedLoader` ------------------------------------------

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
                    report = session.report(statistics.at_last_step(), step_times.calls(), statistics.features)
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

    def batches_received(self, carried: Delivery, received: ReceivedBatch) -> None:
        if isinstance(carried, EndOfShard):
            self._on_end_of_shard(carried)
            return
        headers = carried.batches if isinstance(carried, Batches) else [carried]
        self.batches_by_transport[received.transport] += len(headers)
        if received.began_s is not None:
            self.wire.note(sum(map(len, received.frames)), received.began_s, time.monotonic())
        wanted: list[tuple[LoaderSession, Batch]] = []
        batches = self._options.batches
        with self._lock:
            for header in headers:
                session = self._sessions.get(header.session_id)
                if session is None or not session.wants(header.step, header.token):
                    continue
                if batches.runs_program(header):
                    session.buffer.expect(header.step)
                    self._rebuilder.put(session, header, received.frames)
                else:
                    wanted.append((session, header))
        steps = [(session, header.step, batches.step_of(header, received.frames)) for session, header in wanted]
        with self._lock:
            for session, number, step in steps:
                session.put_delivered(number, step)
            self._changed.notify()

    def _on_end_of_shard(self, header: EndOfShard) -> None:
        with self._lock:
            session = self._sessions.get(header.session_id)
            if session is not None and not session.buffer.is_revoked(header.token):
                session.end_at(header.num_steps)
                session.kept = header.kept
                self._changed.notify()

    def _rebuild(self, session: LoaderSession, header: Batch, frames: Sequence[Buffer]) -> None:
        """As at the end of `batches_received`, in the thread of this loader's own."""
        step = self._options.batches.step_of(header, frames)
        with self._lock:
            session.put_delivered(header.step, step)
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
