"""A loader's side of the service. Knows no torch.

Used by `loader/stream.py`. The training thread opens a pass over an epoch and takes its steps in order; everything else
(credits, heartbeats, registering again with a restarted dispatcher, dropping duplicates) happens in the thread of the
process's connection (`connection.py`), which all loaders share. So nothing here waits, and batches whose rebuilding
runs code of the program are rebuilt in a thread of the loader's own: if that hangs, other loaders go on.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import hetstream.mpi_dataworkers.errors
from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.config import Identity
from hetstream.mpi_dataworkers.dispatcher.state import HEARTBEAT_S
from hetstream.mpi_dataworkers.errors import ProtocolError, RemoteError, ServiceError
from hetstream.mpi_dataworkers.faults import reach
from hetstream.mpi_dataworkers.interpreter import this_interpreter
from hetstream.mpi_dataworkers.loader.connection import (
    CONNECT_TIMEOUT_S,
    REPORT_S,
    Connection,
    ConnectionOptions,
    join_service,
)
from hetstream.mpi_dataworkers.loader.naming import LoaderName, title_of
from hetstream.mpi_dataworkers.order.reorder import ReorderBuffer
from hetstream.mpi_dataworkers.order.window import MAX_STEPS, StepSize, Window
from hetstream.mpi_dataworkers.transports.base import ReceivedBatch, Reconnected
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, wait_for_address_file
from hetstream.mpi_dataworkers.wire.codec import Buffer
from hetstream.mpi_dataworkers.wire.messages import (
    Alive,
    Batch,
    Batches,
    BatchFailed,
    CloseSession,
    EndOfShard,
    ErrorPolicy,
    ExtendSession,
    Failure,
    LeaseRevoked,
    LeaveLoader,
    ListedOrder,
    LoaderHeartbeat,
    LoaderRegistered,
    LoaderStats,
    Membership,
    Message,
    NeedDefinition,
    Notice,
    OpenSession,
    PlannedOrder,
    ProvideDefinition,
    Ranges,
    Refused,
    RegisterLoader,
    ReportProgress,
    SessionSpec,
    ShardOrder,
    Sharing,
    ShutDown,
    StepList,
    StepsLost,
    UnknownPeer,
)
from hetstream.mpi_dataworkers.worker.memory import keep_freed_memory

_log = logging.getLogger(__name__)

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

    The fields after the first are the batch's; `origin` is `local` when it was made in process. `num_bytes` are of its
    tensors, `held_bytes` all that came for it. Without samples it is a step to go on without.
    """

    payload: Any
    num_samples: int
    num_bytes: int
    origin: str = "made"
    shift: int = 0
    num_skipped: int = 0
    left_out: Sequence[Failure] = ()
    snapshot: bytes = b""
    held_bytes: int = 0


@dataclass(frozen=True)
class LocalFallback:
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
        snapshot: where the reader of a shard was at or before the position, "" for its beginning.
        num_lost: steps that were lost and passed over.
        rest_lost: the steps after `num_steps` were lost.
        held_bytes: of the batches that wait in the buffer.
    """

    def __init__(
        self,
        session: SessionSpec,
        definition: ProvideDefinition,
        first_step: int,
        num_steps: int,
        window: Window,
        shift: int = 0,
        in_order: bool = True,
        ahead: Ranges | None = None,
        snapshot: bytes = b"",
    ) -> None:
        self.session = session
        self.shift = shift  # in a shared stream: how far the newest batch is from the session's own numbering
        self._placed = False
        self.definition = definition
        self.num_steps = num_steps
        self.snapshot = snapshot
        self.num_lost = 0
        self.rest_lost = False
        self.held_bytes = 0
        self._window = window
        self.buffer = ReorderBuffer(first_step, in_order, ahead)
        self.lists: collections.OrderedDict[int, bytes] = collections.OrderedDict()
        self.known_steps = num_steps if isinstance(session.order, PlannedOrder) else first_step
        self.reported = (first_step, first_step, 0)  # consumed, received up to, window
        self.reported_at = 0.0

    @property
    def window(self) -> int:
        """Steps beyond the position that may wait or be on their way."""
        return self._window.steps

    def put(self, step: int, item: Delivered | BatchFailed | _Lost) -> bool:
        """Take in a step, unless it is there already; whether it was not."""
        if self.buffer.has(step):
            self.buffer.expect_no_more(step)
            return False
        self.buffer.put(step, item)
        if isinstance(item, Delivered) and item.held_bytes:
            self.held_bytes += item.held_bytes
            self._window.note(item.held_bytes, len(self.buffer), self.held_bytes)
        return True

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

    def pop(self) -> Any:
        """Give out the next step."""
        item = self.buffer.pop()
        if isinstance(item, Delivered):
            self.held_bytes -= item.held_bytes
            self.snapshot = item.snapshot or self.snapshot
        if self.lists:
            self.lists.pop(self.buffer.position - 1, None)
        return item

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


class _Rebuilder:
    """Rebuilds batches of one loader in a thread of its own, because that runs code of the program.

    Args:
        rebuild: rebuilds one and puts it where it belongs; does not raise.

    Attributes:
        is_ending: it was told to end.
    """

    def __init__(self, rebuild: Callable[[Pass, Batch, Sequence[Buffer]], None]) -> None:
        self._rebuild = rebuild
        self.is_ending = False
        self._work: queue.SimpleQueue[tuple[Pass, Batch, Sequence[Buffer]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hetstream-rebuild", daemon=True)
        self._thread.start()

    def put(self, one: Pass, header: Batch, frames: Sequence[Buffer]) -> None:
        """Rebuild this batch after those before it."""
        self._work.put((one, header, frames))

    def end(self) -> None:
        """End when all that was put in is done."""
        self.is_ending = True
        self._work.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._rebuild(*work)
            del work  # the memory of the batch belongs to the training loop


@dataclass(frozen=True)
class ClientOptions:
    """What a loader says of itself at its service, and what it does with batches.

    Attributes:
        address_file: the dispatcher's address file.
        identity: who this trainer is.
        name: who the loader is among those of its program.
        description: the pipeline in words, compared between programs of one job name.
        prepare: builds the batch from its header and frames; runs in the connection's thread, or in the loader's own.
        runs_program: whether `prepare` runs code of the program for this batch, which may hang.
        buffer_bytes: finished batches to hold ahead of the training loop.
        transports: the ways on which batches may come.
        compress: ask data workers that come over TCP to compress.
    """

    address_file: Path
    identity: Identity
    name: LoaderName
    description: dict[str, str]
    prepare: Callable[[Batch, Sequence[Buffer]], Any]
    runs_program: Callable[[Batch], bool]
    buffer_bytes: int
    transports: frozenset[str]
    compress: bool = False


def service_at(address_file: Path) -> ServiceAddress:
    """Wait for a service's address file.

    Raises:
        ServiceUnavailable, ServiceError: as they say.
    """
    return wait_for_address_file(address_file, CONNECT_TIMEOUT_S)


_trainer: tuple[int, str] = (0, "")


def _trainer_name() -> str:
    """A random name of this process; a forked one gets its own."""
    global _trainer
    if _trainer[0] != os.getpid():
        _trainer = os.getpid(), secrets.token_hex(8)
    return _trainer[1]


class ServiceClient:
    """One loader at its service, over the connection of its process.

    Args:
        options: who the loader is, and where.
        definition: the pipeline in pickled form.

    Raises:
        ServiceUnavailable, AuthenticationError, JobNameConflict: as they say.
    """

    def __init__(self, options: ClientOptions, definition: ProvideDefinition) -> None:
        keep_freed_memory()
        service = service_at(options.address_file)
        self._options = options
        self._definition = definition
        self._step_size = StepSize()
        identity, name = options.identity, options.name
        self._registration = RegisterLoader(
            job_name=identity.job_name,
            ordinal=name.ordinal,
            rank=identity.rank,
            world_size=identity.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            definition_id=definition.definition_id,
            description=options.description,
            occurrence=name.occurrence,
            place=name.place,
            made_at=name.made_at,
            divides=name.divides,
            trainer=_trainer_name(),
            interpreter=this_interpreter(),
            title=title_of(identity, name, options.description),
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
        # Held until this loader has left the connection. A lock, because waiting for it is C code alone, as in _News.
        self._left = threading.Lock()
        self._left.acquire()
        self._rebuilder: _Rebuilder | None = None  # guarded by _lock; the last one, which may have been told to end
        # Passes whose iterator was dropped. Its finaliser may run in any thread, also inside one of our locks.
        self._abandoned: collections.deque[Pass] = collections.deque()
        self._num_workers = 0
        self._no_workers_since = time.monotonic()
        self._next_heartbeat = 0.0
        self._local = False
        self.stats = LoaderStats()
        self.duplicates_dropped = 0
        # Batches that came by each transport, also those that were not wanted.
        self.batches_by_transport: collections.Counter[str] = collections.Counter()
        self._connection: Connection
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
        return ServiceClient(replace(self._options, identity=child, name=name), self._definition)

    @property
    def receivers(self) -> list[str]:
        """Where data workers deliver, the best transport first."""
        return self._connection.receivers

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
        receivers = self._connection.receivers
        together = sharers > 1 or isinstance(order, ShardOrder)
        session = SessionSpec(
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
            limits = self._options.buffer_bytes // sharers, -(-min_window // sharers), MAX_STEPS // sharers
            window = Window(*limits, self._step_size)
            one = Pass(session, definition, first_step, num_steps, window, shift, in_order, ahead, snapshot)
            self._passes[session.session_id] = one
            self._connection.read(session.session_id, self._number)
            self._outbox.append(self._open_message(one))
        self._wake()
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
            self._outbox.append(ExtendSession(one.session.session_id, pack_steps(first, steps), one.num_steps))
        self._wake()

    def take(self, one: Pass, deadline: float | None) -> Delivered | BatchFailed | LocalFallback:
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
    ) -> tuple[int, Delivered | BatchFailed | LocalFallback | Ended]:
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
        return (0, found) if isinstance(found, LocalFallback) else found

    def _wait_for(self, look: Callable[[], _Found | None], one: Pass, deadline: float | None) -> _Found | LocalFallback:
        """Wait until `look`, called with the lock, finds something, or the pass's next step is to be made here."""
        if self.is_inherited:
            raise ServiceError(
                f"process {os.getpid()} was forked from the one that began this iteration; only that one gets its "
                "batches. Iterate the DataLoader anew in the forked process."
            )
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
                    return LocalFallback(one.buffer.position, reason)
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
                one.put(one.buffer.position, item)
            taken: Delivered | BatchFailed = self._pop(one)
        return taken

    def _pop(self, one: Pass) -> Any:
        reach("loader.step_taken")
        item = one.pop()
        # Once for each quarter of the window: the client's thread needs the GIL to wake.
        unreported, quarter = one.buffer.position - one.reported[0], max(1, one.window // 4)
        if unreported >= quarter and unreported % quarter == 0:
            self._wake()
        return item

    def _reason_to_work_locally(self, now: float, waiting_since: float) -> str:
        if self._closing:
            return "it was closed"
        # Once it works locally it does not wait anew for each step.
        patient = now - max(self._no_workers_since, waiting_since) > LOCAL_AFTER_S
        if self._num_workers == 0 and (patient or self._local):
            return "no data worker is there, or none reaches this process"
        silent_s = now - self._connection.last_heard
        if silent_s > DISPATCHER_SILENCE_S and (patient or self._local):
            return f"the dispatcher has been silent for {silent_s:.0f} s"
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
        if not self._local or self._num_workers == 0 or self._closing:
            return
        if time.monotonic() - self._connection.last_heard < DISPATCHER_SILENCE_S:
            _log.warning("hetstream: %d data workers deliver again", self._num_workers)
            self._local = False

    def close_pass(self, one: Pass) -> None:
        """End a pass, finished or not."""
        if self.is_inherited:
            return  # the parent's, as the pass is; another thread of it may have held the lock when this was forked
        with self._lock:
            if self._passes.pop(one.session.session_id, None) is None:
                return
            self._connection.stop_reading(one.session.session_id)
            self.duplicates_dropped += one.buffer.num_dropped
            if not self._passes:
                self._end_rebuilding()
            if not self._closing:
                self._outbox.append(CloseSession(one.session.session_id, one.buffer.position, self.stats))
        if not self._closing:
            self._wake()

    def abandon(self, one: Pass) -> None:
        """End a pass from a finaliser: takes no lock, the connection's thread does the rest."""
        self._abandoned.append(one)
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
        if self._rebuilder is not None and not self._rebuilder.join(_CLOSE_S):
            _log.warning("hetstream: the loader did not close within %g s: a batch is being rebuilt", _CLOSE_S)

    def _wake(self) -> None:
        self._connection.call(self._number)

    def _wait_until_registered(self) -> None:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while not self._registered and self._failure is None and time.monotonic() < deadline:
            self._news.wait(_LOOK_AGAIN_S)
        if self._failure is not None:
            raise self._failure
        if not self._registered:
            raise hetstream.mpi_dataworkers.errors.ServiceUnavailable(
                f"the dispatcher let this loader in but did not answer within {CONNECT_TIMEOUT_S:g} s; "
                "see the dispatcher's log"
            )

    # --- the connection's thread ------------------------------------------------------------------------------------

    def joined(self, connection: Connection, number: int) -> None:
        """See `connection.ConnectedLoader`, as for what follows."""
        self._connection, self._number = connection, number

    def begin(self, now: float) -> None:
        self._register(now)
        self._next_heartbeat = now + HEARTBEAT_S

    def attend(self, now: float) -> bool:
        while self._abandoned:
            self.close_pass(self._abandoned.popleft())
        if self._closing:
            return False
        self._send_reports(now)
        if now >= self._next_heartbeat:
            self._send(LoaderHeartbeat(self.stats))
            self._next_heartbeat = now + HEARTBEAT_S
        return True

    def leave(self) -> None:
        self._flush()
        self._send(LeaveLoader(self.stats))

    def has_left(self, failure: HetstreamError | None) -> None:
        with self._lock:
            for session_id in self._passes:
                self._connection.stop_reading(session_id)
            self._end_rebuilding()
            self._failure = failure
            self._news.tell()
        self._left.release()

    def _send(self, message: Message) -> None:
        self._connection.send(self._number, message)

    def _register(self, now: float) -> None:
        self._asked_at = now
        self._send(self._registration)

    def handle(self, message: Message | Reconnected, now: float) -> None:
        if isinstance(message, LoaderRegistered):
            reach("loader.registered")
        if isinstance(message, Reconnected):
            _log.info("the connection to the dispatcher is back: registering again")
            self._register(now)
        elif isinstance(message, LoaderRegistered):
            with self._lock:
                self._say_all("" if message.need_definition else message.definition_id)
                self._set_workers(message.num_data_workers, now)
                self._registered, self._asked_at = True, None
                self._news.tell()
        elif isinstance(message, NeedDefinition):
            with self._lock:
                definitions = [self._definition, *(one.definition for one in self._passes.values())]
            asked = [one for one in definitions if one.definition_id == message.definition_id]
            if asked:
                self._send(asked[0])
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
                if failing is not None:
                    failing.put(message.step, message)
                self._news.tell()
        elif isinstance(message, UnknownPeer):
            # It may have died before it answered: a registration that got no answer is sent again.
            if self._asked_at is None or now - self._asked_at > _REGISTER_AGAIN_S:
                _log.info("the dispatcher does not know this loader (restarted?): registering again")
                self._register(now)
        elif isinstance(message, Refused):
            kind = getattr(hetstream.mpi_dataworkers.errors, message.code, ServiceError)
            raise kind(message.text)
        elif isinstance(message, Notice):
            _log.warning("hetstream: %s", message.text)
        elif isinstance(message, ShutDown):
            with self._lock:
                self._set_workers(0, now)
                self._news.tell()
        elif not isinstance(message, Alive):
            raise ProtocolError(f"the dispatcher sent {type(message).__name__}, which is no message for a loader")

    def _say_all(self, known: str) -> None:
        """Queue what a dispatcher that has just let this loader in is to know. Call it with the lock.

        Args:
            known: id of the definition that it has, "" for none.
        """
        # The rest is said again, from the passes as they are now; the end of one would be lost.
        self._outbox = collections.deque(one for one in self._outbox if isinstance(one, CloseSession))
        # Passes of what is known come first: the dispatcher forgets what no pass uses when another one comes.
        current = self._definition.definition_id
        passes = {one: one.definition.definition_id for one in self._passes.values()}
        for one in sorted(passes, key=lambda one: (passes[one] != known, passes[one] == current, passes[one])):
            if passes[one] != known:
                known = passes[one]
                self._outbox.append(one.definition)
            self._outbox.append(self._open_message(one))
        if current != known:
            self._outbox.append(self._definition)

    def _lose(self, one: Pass, lost: StepsLost) -> None:
        if lost.stop_step < 0:
            one.rest_lost = one.num_steps < 0 or lost.first_step < one.num_steps
            one.end_at(lost.first_step)
            return
        for step in range(lost.first_step, lost.stop_step):
            one.put(step, _Lost())

    def _set_workers(self, count: int, now: float) -> None:
        if count == 0 and self._num_workers > 0:
            self._no_workers_since = now
        self._num_workers = count

    def take_in(self, received: ReceivedBatch) -> None:
        if isinstance(received.header, EndOfShard):
            self._end_shard(received.header)
            return
        came = received.header.batches if isinstance(received.header, Batches) else [received.header]
        self.batches_by_transport[received.transport] += len(came)
        wanted: list[tuple[Pass, Batch]] = []
        with self._lock:
            for header in came:
                one = self._who_wants(header)
                if one is not None and self._options.runs_program(header):
                    one.buffer.expect(header.step)
                    self._open_rebuilder().put(one, header, received.frames)
                elif one is not None:
                    wanted.append((one, header))
        self._put_all([(one, header, self._rebuild(header, received.frames)) for one, header in wanted])

    def _open_rebuilder(self) -> _Rebuilder:
        if self._rebuilder is None or self._rebuilder.is_ending:
            self._rebuilder = _Rebuilder(self._rebuild_into)
        return self._rebuilder

    def _end_rebuilding(self) -> None:
        """No pass is open any more. Call it with the lock."""
        if self._rebuilder is not None:
            self._rebuilder.end()

    def _rebuild_into(self, one: Pass, header: Batch, frames: Sequence[Buffer]) -> None:
        """Rebuild a batch that is wanted, and put it into the pass."""
        self._put_all([(one, header, self._rebuild(header, frames))])

    def _put_all(self, items: Sequence[tuple[Pass, Batch, Delivered | BatchFailed | None]]) -> None:
        with self._lock:
            for one, header, item in items:
                if item is None:
                    one.buffer.expect_no_more(header.step)
                elif one.put(header.step, item) and isinstance(item, Delivered):
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
            payload = self._options.prepare(header, frames)
        except ProtocolError as error:
            _log.warning("refused step %d: %s; it will be leased again", header.step, error)
            return None
        except BaseException as error:  # noqa: BLE001, user classes are rebuilt here; the same would happen again
            text = f"the batch cannot be rebuilt in the trainer: {error}"
            kind = (RemoteError.__module__, RemoteError.__qualname__)
            return BatchFailed(header.session_id, header.step, Failure(-1, kind, text, traceback.format_exc()))
        num_bytes = sum(length for _, _, length in header.buffers)
        held_bytes = num_bytes + len(header.spec) if header.num_samples > 0 else 0
        rest = header.num_skipped, header.left_out, header.snapshot, held_bytes
        return Delivered(payload, header.num_samples, num_bytes, header.origin, header.shift, *rest)

    def _send_reports(self, now: float) -> None:
        # To a dispatcher that is away, what is said now would only be said again when it is back.
        is_away = now - self._connection.last_heard > DISPATCHER_SILENCE_S
        if not self._registered or self._asked_at is not None or is_away:
            return
        with self._lock:
            self._flush()  # inside the lock: no report of a pass may overtake its OpenSession
            for one in self._passes.values():
                position = one.buffer.position
                current = (position, position + one.buffer.num_come(), one.window)
                due = now - one.reported_at >= REPORT_S or position - one.reported[0] >= max(1, one.window // 4)
                if current != one.reported and (due or one.window != one.reported[2]):
                    reach("loader.before_report")
                    self._send(
                        ReportProgress(one.session.session_id, position, one.buffer.received(), one.window, self.stats)
                    )
                    one.reported, one.reported_at = current, now
                    reach("loader.after_report")

    def _flush(self) -> None:
        if self._registered and self._asked_at is None:
            while self._outbox:
                self._send(self._outbox.popleft())

    def _open_message(self, one: Pass) -> OpenSession:
        buffer = one.buffer
        places = buffer.position, buffer.received()
        return OpenSession(one.session, one.num_steps, *places, one.window, one.step_list(), one.shift, one.snapshot)
