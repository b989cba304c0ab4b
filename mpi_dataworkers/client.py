"""A loader's side of the service: one thread that talks to the dispatcher and receives batches. Knows no torch.

Used by `loader.py`. The training thread opens a pass over an epoch and takes its steps in order; everything else
(credits, heartbeats, registering again with a restarted dispatcher, dropping duplicates) happens here.
"""

from __future__ import annotations

import collections
import contextlib
import enum
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
from typing import Any, TypeVar

import msgspec

import mpi_dataworkers.errors
from mpi_dataworkers.codec import Buffer
from mpi_dataworkers.config import Identity
from mpi_dataworkers.dispatcher.state import HEARTBEAT_S
from mpi_dataworkers.errors import HetstreamError, ProtocolError, RemoteError, ServiceError
from mpi_dataworkers.faults import reach
from mpi_dataworkers.memory import keep_freed_memory
from mpi_dataworkers.messages import (
    Alive,
    Batch,
    Batches,
    BatchFailed,
    CloseEpoch,
    ConsumerRegistered,
    EndOfShard,
    ErrorPolicy,
    ExtendEpoch,
    Failure,
    LeaseRevoked,
    LeaveConsumer,
    ListedOrder,
    LoaderHeartbeat,
    LoaderStats,
    Membership,
    Message,
    Notice,
    OpenEpoch,
    PlannedOrder,
    ProvideDefinition,
    Ranges,
    Refused,
    RegisterConsumer,
    ReportProgress,
    Session,
    ShardOrder,
    Sharing,
    ShutDown,
    StepList,
    StepsLost,
    UnknownPeer,
)
from mpi_dataworkers.naming import LoaderName
from mpi_dataworkers.reorder import ReorderBuffer
from mpi_dataworkers.transports.base import LoaderEndpoint, ReceivedBatch, Reconnected
from mpi_dataworkers.transports.rails import open_loader_endpoint
from mpi_dataworkers.worker import wait_for_address_file

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
# Steps in the window whatever their size: more would only lengthen the reports.
MAX_WINDOW_STEPS = 1024
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
# Rebuilding a batch may run user code; leaving does not wait for it for ever.
_CLOSE_S = 5.0
# The training thread looks at the clock this often while it waits.
_LOOK_AGAIN_S = 0.1

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Delivered:
    """One step as the training loop gets it: a batch, or the failure to make it.

    The fields after the first are the batch's; `origin` is `local` when it was made in process. Without samples it is a
    step to go on without.
    """

    payload: Any
    num_samples: int
    num_bytes: int
    origin: str = "made"
    shift: int = 0
    num_skipped: int = 0
    left_out: Sequence[Failure] = ()
    snapshot: bytes = b""


@dataclass(frozen=True)
class MakeItYourself:
    """No batch will come for this step soon: the loader is to make it in process."""

    step: int
    reason: str


class Ended(enum.Enum):
    """Instead of a step."""

    ENDED = "the pass has no more steps"
    LOST = "the pass has no more steps, because a data worker was lost"


class _Lost:
    """In the place of a step that a lost data worker held, in a pass that is read at most once."""


class Pass:
    """One pass over one epoch, or a shard of it; made by `ServiceClient.open_pass`. Guarded by the client's lock.

    Attributes:
        num_steps: total, -1 while it is not known.
        sharers: passes that are open at the same time and share the loader's buffer.
        snapshot: where the reader of a shard was at or before the position, "" for its beginning.
        num_lost: steps that were lost and passed over.
        rest_lost: the steps after `num_steps` were lost.
    """

    def __init__(
        self,
        session: Session,
        definition: ProvideDefinition,
        first_step: int,
        num_steps: int,
        min_window: int,
        shift: int = 0,
        sharers: int = 1,
        in_order: bool = True,
        ahead: Ranges | None = None,
        snapshot: bytes = b"",
    ) -> None:
        self.session = session
        self.shift = shift  # in a shared stream: how far the newest batch is from the session's own numbering
        self._placed = False
        self.definition = definition
        self.num_steps = num_steps
        self.min_window = -(-min_window // sharers)
        self.sharers = sharers
        self.snapshot = snapshot
        self.num_lost = 0
        self.rest_lost = False
        self.window = max(self.min_window, _FIRST_WINDOW_STEPS // sharers)
        self.buffer = ReorderBuffer(first_step, in_order, ahead)
        self.lists: collections.OrderedDict[int, bytes] = collections.OrderedDict()
        self.known_steps = num_steps if isinstance(session.order, PlannedOrder) else first_step
        self.reported = (first_step, first_step, 0)  # consumed, received up to, window
        self.reported_at = 0.0

    def place(self, shift: int) -> None:
        """Take note of where a batch is in a shared stream; after the first one a session only moves on."""
        self.shift = max(self.shift, shift) if self._placed else shift
        self._placed = True

    def end_at(self, num_steps: int) -> None:
        """The pass turned out to have so many steps."""
        self.num_steps = min(num_steps, self.num_steps) if self.num_steps >= 0 else num_steps

    def pass_over_lost(self) -> None:
        """Move past lost steps at the position."""
        while self.buffer.has_next() and isinstance(self.buffer.peek(), _Lost):
            self.buffer.pop()
            self.num_lost += 1

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
        name: who the loader is among those of its program.
        definition: the pipeline in pickled form.
        description: the pipeline in words, compared between programs of one job name.
        prepare: builds the batch from its header and frames; runs in the client's thread.
        buffer_bytes: finished batches to hold ahead of the training loop.
        rails: the ways on which batches may come.
        compress: ask data workers that come over TCP to compress.

    Raises:
        ServiceUnavailable, AuthenticationError, JobNameConflict: as they say.
    """

    def __init__(
        self,
        address_file: Path,
        identity: Identity,
        name: LoaderName,
        definition: ProvideDefinition,
        description: dict[str, str],
        prepare: Callable[[Batch, Sequence[Buffer]], Any],
        buffer_bytes: int,
        rails: frozenset[str],
        compress: bool = False,
    ) -> None:
        keep_freed_memory()
        service = wait_for_address_file(address_file, CONNECT_TIMEOUT_S)
        self._definition = definition
        self._prepare = prepare
        self._buffer_bytes = buffer_bytes
        self._registration = RegisterConsumer(
            job_name=identity.job_name,
            ordinal=name.ordinal,
            rank=identity.rank,
            world_size=identity.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            definition_id=definition.definition_id,
            description=description,
            occurrence=name.occurrence,
            place=name.place,
            made_at=name.made_at,
            divides=name.divides,
        )
        self._endpoint: LoaderEndpoint = open_loader_endpoint(
            service, secrets.token_hex(16), CONNECT_TIMEOUT_S, rails, buffer_bytes, compress
        )
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
        # Batches that came by each rail, also those that were not wanted.
        self.batches_by_rail: collections.Counter[str] = collections.Counter()
        self._thread = threading.Thread(target=self._run, name="hetstream-loader", daemon=True)
        self._thread.start()
        try:
            self._wait_until_registered()
        except BaseException:
            self.close()
            raise

    @property
    def receivers(self) -> list[str]:
        """Where data workers deliver, the best rail first."""
        return self._endpoint.receivers

    @property
    def num_data_workers(self) -> int:
        """Data worker processes that can reach this loader, as the dispatcher last said."""
        return self._num_workers

    def num_waiting(self) -> tuple[int, int]:
        """Finished batches that wait for the training loop, and those of them that wait for an earlier one to come."""
        with self._lock:
            buffers = [one.buffer for one in self._passes.values()]
            return sum(map(len, buffers)), sum(len(buffer) - buffer.num_ready() for buffer in buffers)

    # --- training thread --------------------------------------------------------------------------------------------

    def open_pass(
        self,
        definition: ProvideDefinition,
        epoch: int,
        seed: int,
        order: PlannedOrder | ListedOrder | ShardOrder,
        first_step: int,
        num_steps: int,
        min_window: int,
        sharing: Sharing | None = None,
        shift: int = 0,
        *,
        sharers: int = 1,
        at_most_once: bool = False,
        in_order: bool = True,
        ahead: Ranges | None = None,
        errors: ErrorPolicy | None = None,
        snapshot: bytes = b"",
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
            sharing: with whom to share the batches.
            shift: how far the loader is from its own numbering in the stream that it shares.
            sharers: passes that share the buffer and the window; each is kept with one data worker if there are more.
            at_most_once: go on without the steps of a data worker that is lost.
            in_order: give the steps in order; else as they come.
            ahead: steps beyond `first_step` that were taken before.
            errors: what becomes of a step that cannot be made.
            snapshot: where the reader of a shard was at or before `first_step`.
        """
        receivers = self._endpoint.receivers
        together = sharers > 1 or isinstance(order, ShardOrder)
        session = Session(
            secrets.token_hex(8),
            definition.definition_id,
            epoch,
            seed,
            order,
            receivers,
            sharing,
            together,
            at_most_once,
            errors or ErrorPolicy(),
        )
        with self._lock:
            if definition.definition_id == self._definition.definition_id:
                definition = self._definition
            else:
                self._definition = definition
                self._registration = msgspec.structs.replace(self._registration, definition_id=definition.definition_id)
                self._outbox.append(definition)
            one = Pass(
                session, definition, first_step, num_steps, min_window, shift, sharers, in_order, ahead, snapshot
            )
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

        def look() -> Delivered | BatchFailed | None:
            return self._pop(one) if one.buffer.has_next() else None

        return self._wait_for(look, one, deadline)

    def take_of(
        self, passes: Sequence[Pass], deadline: float | None
    ) -> tuple[int, Delivered | BatchFailed | MakeItYourself | Ended]:
        """Wait for the next step, or the end, of whichever of the passes has it first.

        Args:
            passes: one for the order to be kept, several for the order of arrival.
            deadline: as for `take`.

        Returns:
            The number of the pass in `passes`, and its step.

        Raises:
            TimeoutError: the deadline passed.
            HetstreamError: the service failed for good.
        """

        def look() -> tuple[int, Delivered | BatchFailed | Ended] | None:
            for number, one in enumerate(passes):
                one.pass_over_lost()
                if 0 <= one.num_steps <= one.buffer.position:
                    return number, Ended.LOST if one.rest_lost else Ended.ENDED
                if one.buffer.has_next():
                    return number, self._pop(one)
            return None

        found = self._wait_for(look, passes[0], deadline)
        return (0, found) if isinstance(found, MakeItYourself) else found

    def _wait_for(
        self, look: Callable[[], _Found | None], one: Pass, deadline: float | None
    ) -> _Found | MakeItYourself:
        """Wait until `look`, called with the lock, finds something, or the pass's next step is to be made here."""
        started = time.monotonic()
        while True:
            with self._lock:
                found = look()
                if found is not None:
                    return found
                if self._failure is not None:
                    raise self._failure
                now = time.monotonic()
                reason = self._reason_to_work_locally(now, started)
                if reason:
                    return MakeItYourself(one.buffer.position, reason)
            if deadline is not None and now >= deadline:
                raise TimeoutError
            self._news.wait(_LOOK_AGAIN_S if deadline is None else min(_LOOK_AGAIN_S, deadline - now))

    def end_pass_at(self, one: Pass, num_steps: int) -> None:
        """The loader itself found out how many steps a pass has."""
        with self._lock:
            one.end_at(num_steps)

    def put_local(self, one: Pass, item: Delivered) -> Delivered | BatchFailed:
        """Give in the step that `take` asked to be made in process, and take it; a batch that came meanwhile wins."""
        with self._lock:
            if not one.buffer.has_next():
                one.buffer.put(one.buffer.position, item)
            taken: Delivered | BatchFailed = self._pop(one)
        return taken

    def _pop(self, one: Pass) -> Any:
        reach("loader.step_taken")
        item = one.buffer.pop()
        one.snapshot = getattr(item, "snapshot", b"") or one.snapshot
        one.lists.pop(one.buffer.position - 1, None)
        # Once for each quarter of the window: the client's thread needs the GIL to wake.
        unreported, quarter = one.buffer.position - one.reported[0], max(1, one.window // 4)
        if unreported >= quarter and unreported % quarter == 0:
            self._endpoint.wake()
        return item

    def _reason_to_work_locally(self, now: float, waiting_since: float) -> str:
        # Once it works locally it does not wait anew for each step.
        patient = now - max(self._no_workers_since, waiting_since) > LOCAL_AFTER_S
        if self._num_workers == 0 and (patient or self._local):
            return "no data worker is there, or none reaches this process"
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
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.warning("hetstream: the loader did not close within %g s: a batch is being rebuilt", _CLOSE_S)

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
                reach("loader.batches_received")
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

    def _handle(self, message: Message | Reconnected, now: float) -> None:
        if isinstance(message, ConsumerRegistered):
            reach("loader.registered")
        if isinstance(message, Reconnected):
            _log.info("the connection to the dispatcher is back: registering again")
            self._register(now)
        elif isinstance(message, ConsumerRegistered):
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
        elif isinstance(message, StepsLost):
            with self._lock:
                if message.session_id in self._passes:
                    self._lose(self._passes[message.session_id], message)
                self._news.tell()
        elif isinstance(message, BatchFailed):
            with self._lock:
                failing = self._passes.get(message.session_id)
                if failing is not None and not failing.buffer.has(message.step):
                    failing.buffer.put(message.step, message)
                self._news.tell()
        elif isinstance(message, UnknownPeer):
            # It may have died before it answered: a registration that got no answer is sent again.
            if self._asked_at is None or now - self._asked_at > _REGISTER_AGAIN_S:
                _log.info("the dispatcher does not know this loader (restarted?): registering again")
                self._register(now)
        elif isinstance(message, Refused):
            kind = getattr(mpi_dataworkers.errors, message.code, ServiceError)
            raise kind(message.text)
        elif isinstance(message, Notice):
            _log.warning("hetstream: %s", message.text)
        elif isinstance(message, ShutDown):
            with self._lock:
                self._set_workers(0, now)
                self._news.tell()
        elif not isinstance(message, Alive):
            raise ProtocolError(f"the dispatcher sent {type(message).__name__}, which is no message for a loader")

    def _lose(self, one: Pass, lost: StepsLost) -> None:
        if lost.stop_step < 0:
            one.rest_lost = one.num_steps < 0 or lost.first_step < one.num_steps
            one.end_at(lost.first_step)
            return
        for step in range(lost.first_step, lost.stop_step):
            if not one.buffer.has(step):
                one.buffer.put(step, _Lost())

    def _set_workers(self, count: int, now: float) -> None:
        if count == 0 and self._num_workers > 0:
            self._no_workers_since = now
        self._num_workers = count

    def _take_in(self, batches: Sequence[ReceivedBatch | ProtocolError]) -> None:
        items: list[tuple[Pass, int, int, Delivered | BatchFailed]] = []
        for received in batches:
            if isinstance(received, ProtocolError):
                _log.warning("refused a batch: %s; its step will be leased again", received)
                continue
            if isinstance(received.header, EndOfShard):
                self._end_shard(received.header)
                continue
            came = received.header.batches if isinstance(received.header, Batches) else [received.header]
            self.batches_by_rail[received.rail] += len(came)
            with self._lock:
                wanted = [(one, header) for header in came if (one := self._who_wants(header)) is not None]
            for one, header in wanted:
                item = self._rebuild(header, received.frames)
                if item is None:
                    continue
                if isinstance(item, Delivered) and item.num_samples > 0:
                    one.window = self._window(one, item.num_bytes)
                items.append((one, header.step, header.token, item))
        with self._lock:
            for one, step, token, item in items:
                if one.buffer.wants(step, token):
                    one.buffer.put(step, item)
                    if isinstance(item, Delivered):
                        one.place(item.shift)
            self._news.tell()

    def _end_shard(self, header: EndOfShard) -> None:
        with self._lock:
            one = self._passes.get(header.session_id)
            if one is not None and not one.buffer.is_revoked(header.token):
                one.end_at(header.num_steps)
                self._news.tell()

    def _who_wants(self, header: Batch) -> Pass | None:
        """The pass that needs this step. Call it with the lock."""
        one = self._passes.get(header.session_id)
        return one if one is not None and one.buffer.wants(header.step, header.token) else None

    def _rebuild(self, header: Batch, frames: Sequence[Buffer]) -> Delivered | BatchFailed | None:
        try:
            payload = self._prepare(header, frames)
        except ProtocolError as error:
            _log.warning("refused step %d: %s; it will be leased again", header.step, error)
            return None
        except Exception as error:  # noqa: BLE001, user classes are rebuilt here; the same would happen again
            text = f"the batch cannot be rebuilt in the trainer: {error}"
            kind = (RemoteError.__module__, RemoteError.__qualname__)
            return BatchFailed(header.session_id, header.step, Failure(-1, kind, text, traceback.format_exc()))
        num_bytes = sum(length for _, _, length in header.buffers)
        rest = header.num_skipped, header.left_out, header.snapshot
        return Delivered(payload, header.num_samples, num_bytes, header.origin, header.shift, *rest)

    def _window(self, one: Pass, num_bytes: int) -> int:
        """Steps that fit the byte budget, judged by the newest batch."""
        fitting = self._buffer_bytes // (max(1, num_bytes) * one.sharers)
        window = max(one.min_window, min(MAX_WINDOW_STEPS // one.sharers, fitting))
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
                    reach("loader.before_report")
                    self._endpoint.send(
                        ReportProgress(one.session.session_id, position, one.buffer.received(), one.window, self.stats)
                    )
                    one.reported, one.reported_at = current, now
                    reach("loader.after_report")

    def _flush(self) -> None:
        if self._registered and self._asked_at is None:
            while self._outbox:
                self._endpoint.send(self._outbox.popleft())

    def _open_message(self, one: Pass) -> OpenEpoch:
        buffer = one.buffer
        places = buffer.position, buffer.received()
        return OpenEpoch(one.session, one.num_steps, *places, one.window, one.step_list(), one.shift, one.snapshot)
