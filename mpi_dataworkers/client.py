"""A loader's side of the service: one thread that talks to the dispatcher and receives batches. Knows no torch.

Used by `loader.py`. The training thread opens a pass over an epoch and takes its steps in order; everything else
(credits, heartbeats, registering again with a restarted dispatcher, dropping duplicates) happens here.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import queue
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import mpi_dataworkers.errors
from mpi_dataworkers.codec import Buffer
from mpi_dataworkers.config import Identity
from mpi_dataworkers.dispatcher.state import HEARTBEAT_S
from mpi_dataworkers.errors import HetstreamError, ProtocolError, RemoteError, ServiceError
from mpi_dataworkers.memory import keep_freed_memory
from mpi_dataworkers.messages import (
    Alive,
    Batch,
    BatchFailed,
    CloseEpoch,
    ConsumerRegistered,
    ExtendEpoch,
    LeaseRevoked,
    LeaveConsumer,
    ListedOrder,
    LoaderHeartbeat,
    LoaderStats,
    Membership,
    Message,
    OpenEpoch,
    PlannedOrder,
    ProvideDefinition,
    Refused,
    RegisterConsumer,
    ReportProgress,
    Session,
    ShutDown,
    StepList,
    UnknownPeer,
)
from mpi_dataworkers.reorder import ReorderBuffer
from mpi_dataworkers.transports.base import LoaderEndpoint, ReceivedBatch
from mpi_dataworkers.transports.zmq import ZmqLoaderEndpoint
from mpi_dataworkers.worker import wait_for_address_file

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
# Steps in the window whatever their size: more would only lengthen the reports.
MAX_WINDOW_STEPS = 256
# The window before the first batch has shown its size.
_FIRST_WINDOW_STEPS = 8
# The steps that are there are reported at least this often, so that sent leases are settled in time.
_REPORT_S = 0.1
# With no data worker, or no dispatcher, for this long, the loader makes the step it waits for itself.
LOCAL_AFTER_S = 1.0
DISPATCHER_SILENCE_S = 5.0
# Nor does a step that is merely late hold up the trainer for ever.
LATE_STEP_S = 60.0
_REGISTER_AGAIN_S = 1.0
# The training thread looks at the clock this often while it waits.
_LOOK_AGAIN_S = 0.1


@dataclass(frozen=True)
class Delivered:
    """One step as the training loop gets it: a batch, or the failure to make it."""

    payload: Any
    num_samples: int
    num_bytes: int


@dataclass(frozen=True)
class MakeItYourself:
    """No batch will come for this step soon: the loader is to make it in process."""

    step: int
    reason: str


class Pass:
    """One pass over one epoch; made by `ServiceClient.open_pass`. Its state is guarded by the client's lock."""

    def __init__(
        self, session: Session, definition: ProvideDefinition, first_step: int, num_steps: int, min_window: int
    ) -> None:
        self.session = session
        self.definition = definition
        self.num_steps = num_steps
        self.min_window = min_window
        self.window = max(min_window, _FIRST_WINDOW_STEPS)
        self.buffer = ReorderBuffer(first_step)
        self.lists: collections.OrderedDict[int, bytes] = collections.OrderedDict()
        self.known_steps = num_steps if isinstance(session.order, PlannedOrder) else first_step
        self.reported = (first_step, first_step, 0)  # consumed, received up to, window
        self.reported_at = 0.0

    def step_list(self) -> StepList | None:
        """The listed steps that the training loop has not taken."""
        if not self.lists:
            return None
        return pack_steps(next(iter(self.lists)), list(self.lists.values()))


def pack_steps(first_step: int, steps: Sequence[bytes]) -> StepList:
    """Pack the int64 index bytes of consecutive steps."""
    counts = b"".join((len(indices) // 8).to_bytes(4, "little") for indices in steps)
    return StepList(first_step, counts, b"".join(steps))


class _News:
    """Wakes the training thread. Made of C code alone where that thread waits: a KeyboardInterrupt inside the Python
    methods of a `threading.Condition` would leave its lock held for ever."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def tell(self) -> None:
        """Something changed."""
        if self._queue.empty():
            self._queue.put(None)

    def wait(self, timeout_s: float) -> None:
        """Return when something has changed since the last wait, or after `timeout_s`."""
        with contextlib.suppress(queue.Empty):
            self._queue.get(timeout=timeout_s)


class ServiceClient:
    """The connection of one loader to its service.

    Args:
        address_file: the dispatcher's address file.
        identity: who this trainer is.
        ordinal: number of the loader in its program, the same in every rank.
        definition: the pipeline in pickled form.
        description: the pipeline in words, compared between programs of one job name.
        prepare: builds the batch from its header and frames; runs in the client's thread.
        buffer_bytes: finished batches to hold ahead of the training loop.

    Raises:
        ServiceUnavailable, AuthenticationError, JobNameConflict: as they say.
    """

    def __init__(
        self,
        address_file: Path,
        identity: Identity,
        ordinal: int,
        definition: ProvideDefinition,
        description: dict[str, str],
        prepare: Callable[[Batch, Sequence[Buffer]], Any],
        buffer_bytes: int,
    ) -> None:
        keep_freed_memory()
        service = wait_for_address_file(address_file, CONNECT_TIMEOUT_S)
        self._definition = definition
        self._prepare = prepare
        self._buffer_bytes = buffer_bytes
        self._registration = RegisterConsumer(
            job_name=identity.job_name,
            ordinal=ordinal,
            rank=identity.rank,
            world_size=identity.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            definition_id=definition.definition_id,
            description=description,
        )
        self._endpoint: LoaderEndpoint = ZmqLoaderEndpoint(service, secrets.token_hex(16), CONNECT_TIMEOUT_S)
        self._lock = threading.Lock()
        self._news = _News()
        self._passes: dict[str, Pass] = {}
        self._outbox: collections.deque[Message] = collections.deque()
        self._failure: HetstreamError | None = None
        self._registered = False
        # When the registration that is under way was sent; None while there is none.
        self._asked_at: float | None = None
        self._closing = False
        # Passes whose iterator was dropped. Its finaliser may run in any thread, also inside one of our locks.
        self._abandoned: collections.deque[Pass] = collections.deque()
        self._num_workers = 0
        self._no_workers_since = time.monotonic()
        self._last_heard = time.monotonic()
        self._local = False
        self.stats = LoaderStats()
        self.duplicates_dropped = 0
        self._thread = threading.Thread(target=self._run, name="hetstream-loader", daemon=True)
        self._thread.start()
        try:
            self._wait_until_registered()
        except BaseException:
            self.close()
            raise

    @property
    def receiver(self) -> str:
        """Address of the batch socket."""
        return self._endpoint.receiver

    @property
    def num_data_workers(self) -> int:
        """Data worker processes that can reach this loader, as the dispatcher last said."""
        return self._num_workers

    def num_waiting(self) -> int:
        """Finished batches that wait for the training loop."""
        with self._lock:
            return sum(len(one.buffer) for one in self._passes.values())

    # --- training thread --------------------------------------------------------------------------------------------

    def open_pass(
        self,
        definition: ProvideDefinition,
        epoch: int,
        seed: int,
        order: PlannedOrder | ListedOrder,
        first_step: int,
        num_steps: int,
        min_window: int,
    ) -> Pass:
        """Begin a pass; batches start to come at once.

        Args:
            definition: the pipeline as it is now; sent when it is not the one that the dispatcher has.
            epoch: the epoch.
            seed: base of the random state of samples.
            order: who knows the order.
            first_step: where to begin.
            num_steps: total, or -1 when the sampler's end is unknown.
            min_window: steps in the window even when they are larger than the buffer.
        """
        receiver = self._endpoint.receiver
        session = Session(secrets.token_hex(8), definition.definition_id, epoch, seed, order, receiver)
        with self._lock:
            if definition.definition_id == self._definition.definition_id:
                definition = self._definition
            else:
                self._definition = definition
                self._registration = msgspec.structs.replace(self._registration, definition_id=definition.definition_id)
                self._outbox.append(definition)
            one = Pass(session, definition, first_step, num_steps, min_window)
            self._passes[session.session_id] = one
            self._outbox.append(self._open_message(one))
        self._endpoint.wake()
        return one

    def extend(self, one: Pass, steps: Sequence[bytes], ended: bool) -> None:
        """Add steps of a listed order: int64 index bytes each; `ended` when the sampler has no more."""
        with self._lock:
            first = one.known_steps
            for number, indices in enumerate(steps):
                one.lists[first + number] = indices
            one.known_steps += len(steps)
            if ended:
                one.num_steps = one.known_steps
            self._outbox.append(ExtendEpoch(one.session.session_id, pack_steps(first, steps), one.num_steps))
        self._endpoint.wake()

    def take(self, one: Pass, deadline: float | None) -> Delivered | BatchFailed | MakeItYourself:
        """Wait for the pass's next step.

        Args:
            one: the pass.
            deadline: on the monotonic clock; None waits until the step is there or has to be made in process.

        Raises:
            TimeoutError: the deadline passed.
            HetstreamError: the service failed for good.
        """
        started = time.monotonic()
        while True:
            with self._lock:
                if one.buffer.has_next():
                    item: Delivered | BatchFailed = self._pop(one)
                    return item
                if self._failure is not None:
                    raise self._failure
                now = time.monotonic()
                reason = self._reason_to_work_locally(now, started)
                if reason:
                    return MakeItYourself(one.buffer.position, reason)
            if deadline is not None and now >= deadline:
                raise TimeoutError
            self._news.wait(_LOOK_AGAIN_S if deadline is None else min(_LOOK_AGAIN_S, deadline - now))

    def put_local(self, one: Pass, item: Delivered) -> Delivered | BatchFailed:
        """Give in the step that `take` asked to be made in process, and take it; a batch that came meanwhile wins."""
        with self._lock:
            if not one.buffer.has_next():
                one.buffer.put(one.buffer.position, item)
            taken: Delivered | BatchFailed = self._pop(one)
        return taken

    def _pop(self, one: Pass) -> Any:
        item = one.buffer.pop()
        one.lists.pop(one.buffer.position - 1, None)
        if one.buffer.position - one.reported[0] >= max(1, one.window // 4):
            self._endpoint.wake()
        return item

    def _reason_to_work_locally(self, now: float, waiting_since: float) -> str:
        # Once it works locally it does not wait anew for each step.
        patient = now - max(self._no_workers_since, waiting_since) > LOCAL_AFTER_S
        if self._num_workers == 0 and (patient or self._local):
            return "no data worker is there"
        if now - self._last_heard > DISPATCHER_SILENCE_S and (patient or self._local):
            return f"the dispatcher has been silent for {now - self._last_heard:.0f} s"
        if now - waiting_since > LATE_STEP_S:
            return f"{self._num_workers} data workers did not deliver it within {LATE_STEP_S:g} s"
        return ""

    def say_local(self, reason: str) -> None:
        """Log, once for each change, that steps are made in process."""
        if not self._local:
            _log.warning("hetstream: working locally, because %s", reason)
            self._local = True

    def say_streaming(self) -> None:
        """Log, once for each change, that data workers deliver again."""
        heard = time.monotonic() - self._last_heard < DISPATCHER_SILENCE_S
        if self._local and heard and self._num_workers > 0:
            _log.warning("hetstream: %d data workers deliver again", self._num_workers)
            self._local = False

    def close_pass(self, one: Pass) -> None:
        """End a pass, finished or not."""
        with self._lock:
            if self._passes.pop(one.session.session_id, None) is None:
                return
            self.duplicates_dropped += one.buffer.num_dropped
            if not self._closing:
                self._outbox.append(CloseEpoch(one.session.session_id, one.buffer.position, self.stats))
        if not self._closing:
            self._endpoint.wake()

    def abandon(self, one: Pass) -> None:
        """End a pass from a finaliser: takes no lock, the client's thread does the rest."""
        self._abandoned.append(one)
        self._endpoint.wake()

    def request_close(self) -> None:
        """Leave the service soon; may be called from a finaliser."""
        self._closing = True
        self._endpoint.wake()

    def close(self) -> None:
        """Leave the service, and return when it is done; safe to call twice."""
        self.request_close()
        self._thread.join()

    def _wait_until_registered(self) -> None:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while not self._registered and self._failure is None and time.monotonic() < deadline:
            self._news.wait(_LOOK_AGAIN_S)
        if self._failure is not None:
            raise self._failure
        if not self._registered:
            raise mpi_dataworkers.errors.ServiceUnavailable(
                f"the dispatcher let this loader in but did not answer within {CONNECT_TIMEOUT_S:g} s; "
                "see the dispatcher's log"
            )

    # --- the client's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._talk()
        except Exception as error:  # noqa: BLE001, the thread's boundary: the training thread raises it
            failure = error if isinstance(error, HetstreamError) else ServiceError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error.__cause__
            with self._lock:
                self._failure = failure
                self._news.tell()
        finally:
            self._endpoint.close()

    def _talk(self) -> None:
        self._register(time.monotonic())
        next_heartbeat = time.monotonic() + HEARTBEAT_S
        while not self._closing:
            timeout_s = min(next_heartbeat - time.monotonic(), _REPORT_S if self._passes else HEARTBEAT_S)
            messages, batches = self._endpoint.poll(max(0.0, timeout_s))
            now = time.monotonic()
            for message in messages:
                self._last_heard = now
                self._handle(message, now)
            if batches:
                self._take_in(batches)
            while self._abandoned:
                self.close_pass(self._abandoned.popleft())
            self._send_reports(now)
            if now >= next_heartbeat:
                self._endpoint.send(LoaderHeartbeat(self.stats))
                next_heartbeat = now + HEARTBEAT_S
        self._flush()
        self._endpoint.send(LeaveConsumer(self.stats))

    def _register(self, now: float) -> None:
        self._asked_at = now
        self._endpoint.send(self._registration)

    def _handle(self, message: Message, now: float) -> None:
        if isinstance(message, ConsumerRegistered):
            if message.need_definition:
                self._endpoint.send(self._definition)
            with self._lock:
                # The rest is said again, from the passes as they are now; the end of one would be lost.
                self._outbox = collections.deque(one for one in self._outbox if isinstance(one, CloseEpoch))
                for one in self._passes.values():
                    if one.definition is not self._definition:
                        self._outbox.append(one.definition)
                    self._outbox.append(self._open_message(one))
                self._set_workers(message.num_data_workers, now)
                self._registered, self._asked_at = True, None
                self._news.tell()
        elif isinstance(message, Membership):
            with self._lock:
                self._set_workers(message.num_data_workers, now)
                self._news.tell()
        elif isinstance(message, LeaseRevoked):
            with self._lock:
                if message.session_id in self._passes:
                    self._passes[message.session_id].buffer.revoke(message.token)
        elif isinstance(message, UnknownPeer):
            # It may have died before it answered: a registration that got no answer is sent again.
            if self._asked_at is None or now - self._asked_at > _REGISTER_AGAIN_S:
                _log.info("the dispatcher does not know this loader (restarted?): registering again")
                self._register(now)
        elif isinstance(message, Refused):
            kind = getattr(mpi_dataworkers.errors, message.code, ServiceError)
            raise kind(message.text)
        elif isinstance(message, ShutDown):
            with self._lock:
                self._set_workers(0, now)
                self._news.tell()
        elif not isinstance(message, Alive):
            raise ProtocolError(f"the dispatcher sent {type(message).__name__}, which is no message for a loader")

    def _set_workers(self, count: int, now: float) -> None:
        if count == 0 and self._num_workers > 0:
            self._no_workers_since = now
        self._num_workers = count

    def _take_in(self, batches: Sequence[ReceivedBatch | ProtocolError]) -> None:
        prepared: list[tuple[Pass, int, int, Any]] = []
        for received in batches:
            if isinstance(received, ProtocolError):
                _log.warning("refused a batch: %s; its step will be leased again", received)
                continue
            header = received.header
            with self._lock:
                one = self._passes.get(header.session_id)
                if one is None or not one.buffer.wants(header.step, header.token):
                    continue
            if isinstance(header, BatchFailed):
                prepared.append((one, header.step, header.token, header))
                continue
            num_bytes = sum(length for _, _, length in header.buffers)
            item: Delivered | BatchFailed
            try:
                item = Delivered(self._prepare(header, received.frames), header.num_samples, num_bytes)
            except ProtocolError as error:
                _log.warning("refused step %d: %s; it will be leased again", header.step, error)
                continue
            except Exception as error:  # noqa: BLE001, user classes are rebuilt here; the same would happen again
                item = BatchFailed(
                    header.session_id,
                    header.step,
                    header.token,
                    (RemoteError.__module__, RemoteError.__qualname__),
                    f"the batch cannot be rebuilt in the trainer: {error}",
                    traceback.format_exc(),
                    -1,
                )
            one.window = self._window(one, num_bytes)
            prepared.append((one, header.step, header.token, item))
        with self._lock:
            for one, step, token, item in prepared:
                if one.buffer.wants(step, token):
                    one.buffer.put(step, item)
            self._news.tell()

    def _window(self, one: Pass, num_bytes: int) -> int:
        """Steps that fit the byte budget, judged by the newest batch."""
        fitting = self._buffer_bytes // max(1, num_bytes)
        window = max(one.min_window, min(MAX_WINDOW_STEPS, fitting))
        # Batches of slightly different size must not cause a report each.
        return window if abs(window - one.window) * 10 > one.window else one.window

    def _send_reports(self, now: float) -> None:
        # To a dispatcher that is away, what is said now would only be said again when it is back.
        if not self._registered or self._asked_at is not None or now - self._last_heard > DISPATCHER_SILENCE_S:
            return
        with self._lock:
            self._flush()  # inside the lock: no report of a pass may overtake its OpenEpoch
            for one in self._passes.values():
                position, waiting = one.buffer.position, len(one.buffer)
                current = (position, position + waiting, one.window)
                due = now - one.reported_at >= _REPORT_S or position - one.reported[0] >= max(1, one.window // 4)
                if current != one.reported and (due or one.window != one.reported[2]):
                    self._endpoint.send(
                        ReportProgress(one.session.session_id, position, one.buffer.received(), one.window, self.stats)
                    )
                    one.reported, one.reported_at = current, now

    def _flush(self) -> None:
        if self._registered and self._asked_at is None:
            while self._outbox:
                self._endpoint.send(self._outbox.popleft())

    def _open_message(self, one: Pass) -> OpenEpoch:
        buffer = one.buffer
        return OpenEpoch(one.session, one.num_steps, buffer.position, buffer.received(), one.window, one.step_list())
