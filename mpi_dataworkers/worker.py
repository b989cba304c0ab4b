"""A data worker: takes leases from the dispatcher, makes their batches, sends them to the loaders.

Called by `hetstream worker`. `run_data_workers` forks one process for each CPU, restarts one that dies, and ends when
the dispatcher says so. In each process the main thread runs user code and sends batches; a second thread keeps the
connection to the dispatcher, so that a long sample does not look like a dead worker.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import logging
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np

from mpi_dataworkers.address import ServiceAddress, read_address_file
from mpi_dataworkers.codec import fuse
from mpi_dataworkers.dispatcher.state import HEARTBEAT_S
from mpi_dataworkers.errors import HetstreamError, PipelineError, ServiceUnavailable
from mpi_dataworkers.memory import keep_freed_memory
from mpi_dataworkers.messages import (
    Alive,
    Batch,
    BatchFailed,
    CloseSession,
    FailLease,
    FetchDefinition,
    FinishLease,
    GrantLease,
    HeldLease,
    LeaveWorker,
    Message,
    PlannedOrder,
    Refused,
    RegisterWorker,
    RevokeLease,
    ShutDown,
    UnknownPeer,
    WorkerHeartbeat,
    WorkerRegistered,
)
from mpi_dataworkers.messages import Definition as DefinitionMessage
from mpi_dataworkers.ops.pipeline import (
    Definition,
    Pipeline,
    SampleError,
    enter_data_worker,
    load_pipeline,
    use_one_thread,
)
from mpi_dataworkers.ops.tree import flatten
from mpi_dataworkers.sharding import EpochPlan, Indices, SampleSeeds
from mpi_dataworkers.transports.base import PeerUnreachable, WorkerEndpoint
from mpi_dataworkers.transports.zmq import ZmqBatchSender, ZmqWorkerEndpoint

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
# A dispatcher may be away for as long as a restart takes; after this the data worker takes the job for ended.
GIVE_UP_S = 60.0
# Time for the last batches to leave at an orderly end.
_LINGER_S = 2.0
# A dispatcher that was restarted does not know who waits for a definition: ask again this often.
_ASK_AGAIN_S = 1.0
# A program may change its dataset for each epoch; the oldest forms are forgotten, and fetched again if need be.
_MAX_PIPELINES = 8
# A process that dies again and again this soon after its start has a cause that a restart does not cure.
_EARLY_DEATH_S = 10.0
_MAX_EARLY_DEATHS = 5
_PR_SET_PDEATHSIG = 1


def wait_for_address_file(path: Path, timeout_s: float) -> ServiceAddress:
    """Read the address file as soon as it is there.

    Raises:
        ServiceUnavailable: it did not appear in time.
        ServiceError: it is not usable.
    """
    deadline = time.monotonic() + timeout_s
    said = False
    while True:
        try:
            return read_address_file(path)
        except FileNotFoundError as error:
            if not said:
                _log.info("waiting up to %g s for the address file %s", timeout_s, path)
                said = True
            if time.monotonic() > deadline:
                raise ServiceUnavailable(
                    f"address file {path} did not appear within {timeout_s:g} s. Is the dispatcher running, and is the "
                    "directory on a file system that this host shares?"
                ) from error
            time.sleep(0.05)


class _LeaseGone(Exception):
    """The lease was revoked, or the worker is to stop, while it waited: nobody is to hear of it."""


class DataWorker:
    """One data worker process.

    Args:
        service: address and keys.
        worker_id: 32 hexadecimal digits.
        replaces: id of the dead process whose place this one takes, or "".
    """

    def __init__(self, service: ServiceAddress, worker_id: str, replaces: str = "") -> None:
        self._registration = RegisterWorker(socket.gethostname(), os.getpid(), replaces, [])
        self._endpoint: WorkerEndpoint = ZmqWorkerEndpoint(service, worker_id, CONNECT_TIMEOUT_S)
        self._sender = ZmqBatchSender(service.batch_key, worker_id)
        self._lock = threading.Lock()
        self._number = 0
        self._held: dict[int, GrantLease] = {}  # guarded by _lock: leases not finished and not revoked
        self._receivers: dict[str, str] = {}  # guarded by _lock: batch address of each session
        self._doubted: set[str] = set()  # guarded by _lock: receivers to connect to afresh
        self._definitions: dict[str, Definition] = {}  # guarded by _lock
        self._definition_came = threading.Condition(self._lock)
        self._outbox: collections.deque[Message] = collections.deque()
        self._leases: queue.SimpleQueue[GrantLease | None] = queue.SimpleQueue()
        self._pipelines: dict[str, Pipeline | Exception] = {}
        self._failure: BaseException | None = None
        # A plain flag, because `stop` runs in signal handlers, where a second signal may come inside the first:
        # the lock of an Event would then wait for itself.
        self._stopping = False
        self._control = threading.Thread(target=self._run_control, name="hetstream-control", daemon=True)

    def stop(self) -> None:
        """Ask the worker to leave after the step it is making; safe in a signal handler."""
        self._stopping = True
        self._leases.put(None)  # SimpleQueue.put may be interrupted by itself

    def run(self) -> None:
        """Work until the dispatcher ends the service or `stop` is called.

        Raises:
            HetstreamError: the dispatcher refused this worker, or was away for longer than `GIVE_UP_S`.
        """
        self._control.start()
        try:
            while (lease := self._leases.get()) is not None and not self._stopping:
                self._work_on(lease)
        finally:
            self._stopping = True
            self._endpoint.wake()
            self._control.join()
            self._endpoint.close()
            self._sender.close(_LINGER_S)
        if self._failure is not None:
            raise self._failure

    # --- main thread: user code -------------------------------------------------------------------------------------

    def _work_on(self, lease: GrantLease) -> None:
        session = lease.session
        with self._lock:
            doubted = session.receiver in self._doubted
            self._doubted.discard(session.receiver)
        if doubted:
            self._sender.drop(session.receiver)
        started = time.monotonic()
        for step in range(lease.first_step, lease.stop_step):
            with self._lock:
                if lease.token not in self._held or self._stopping:
                    return
            try:
                header, frames = self._make(lease, step)
                self._sender.send(session.receiver, header, frames)
            except PeerUnreachable as error:
                self._settle(lease.token, FailLease(lease.token, str(error)))
                return
            except _LeaseGone:
                return
        self._settle(lease.token, FinishLease(lease.token, time.monotonic() - started))

    def _settle(self, token: int, report: Message) -> None:
        with self._lock:
            if self._held.pop(token, None) is None:
                return
            self._outbox.append(report)
        self._endpoint.wake()

    def _make(self, lease: GrantLease, step: int) -> tuple[Batch | BatchFailed, list[bytes | bytearray | memoryview]]:
        session = lease.session
        try:
            pipeline = self._pipeline(lease)
            indices = indices_of(lease, step)
            listed_step = None if isinstance(session.order, PlannedOrder) else step
            batch = pipeline.make_batch(indices, SampleSeeds(indices, session.seed, session.epoch, listed_step))
            spec, buffers = flatten(batch)
        except _LeaseGone:
            raise
        except Exception as error:  # noqa: BLE001, user code may raise anything; it travels in the batch's place
            _log.info("session=%s step=%d failed: %r", session.session_id, step, error)
            return describe_failure(error, session.session_id, step, lease.token), []
        frames, places = fuse(buffers)
        return Batch(session.session_id, step, lease.token, len(indices), spec, places), frames

    def _pipeline(self, lease: GrantLease) -> Pipeline:
        definition_id = lease.session.definition_id
        if definition_id not in self._pipelines:
            definition = self._fetch(definition_id, lease.token)
            try:
                pipeline = load_pipeline(definition)
                self._pipelines[definition_id] = enter_data_worker(pipeline, self._number, self._number + 1)
            except Exception as error:  # noqa: BLE001, user code again; every step of this pipeline fails alike
                self._pipelines[definition_id] = error
            while len(self._pipelines) > _MAX_PIPELINES:
                del self._pipelines[next(iter(self._pipelines))]
        pipeline_or_error = self._pipelines[definition_id]
        if isinstance(pipeline_or_error, Exception):
            raise pipeline_or_error
        return pipeline_or_error

    def _fetch(self, definition_id: str, token: int) -> Definition:
        while True:
            self._outbox.append(FetchDefinition(definition_id))
            self._endpoint.wake()
            with self._definition_came:
                if self._definition_came.wait_for(lambda: definition_id in self._definitions, _ASK_AGAIN_S):
                    return self._definitions.pop(definition_id)
                if token not in self._held or self._stopping:
                    raise _LeaseGone

    # --- control thread: the dispatcher -----------------------------------------------------------------------------

    def _run_control(self) -> None:
        try:
            self._talk()
        except Exception as error:  # noqa: BLE001, the thread's boundary: the main thread raises it
            self._failure = error
        finally:
            self._leases.put(None)

    def _talk(self) -> None:
        self._endpoint.send(self._registration)
        next_heartbeat = time.monotonic() + HEARTBEAT_S
        last_heard = time.monotonic()
        while not self._stopping:
            messages = self._endpoint.poll(max(0.0, next_heartbeat - time.monotonic()))
            now = time.monotonic()
            for message in messages:
                last_heard = now
                self._handle(message)
            while self._outbox:
                self._endpoint.send(self._outbox.popleft())
            if now >= next_heartbeat:
                with self._lock:
                    held = sorted(self._held)
                self._endpoint.send(WorkerHeartbeat(held))
                next_heartbeat = now + HEARTBEAT_S
            if now - last_heard > GIVE_UP_S:
                raise ServiceUnavailable(f"the dispatcher was silent for {GIVE_UP_S:g} s; this data worker ends")
        while self._outbox:
            self._endpoint.send(self._outbox.popleft())
        self._endpoint.send(LeaveWorker())

    def _handle(self, message: Message) -> None:
        if isinstance(message, GrantLease):
            with self._lock:
                self._held[message.token] = message
                self._receivers[message.session.session_id] = message.session.receiver
            self._leases.put(message)
        elif isinstance(message, RevokeLease):
            with self._lock:
                self._held.pop(message.token, None)
                # A lease in doubt was sent, so it is no longer held: the session says where to.
                if message.reconnect and message.session_id in self._receivers:
                    self._doubted.add(self._receivers[message.session_id])
        elif isinstance(message, CloseSession):
            with self._lock:
                self._receivers.pop(message.session_id, None)
                ended = [t for t, lease in self._held.items() if lease.session.session_id == message.session_id]
                for token in ended:
                    del self._held[token]
        elif isinstance(message, DefinitionMessage):
            with self._definition_came:
                self._definitions[message.definition_id] = Definition(
                    message.definition_id, message.sys_path, message.working_dir, message.blob
                )
                self._definition_came.notify_all()
        elif isinstance(message, WorkerRegistered):
            self._number = message.number
            _log.info("data_worker=%d registered", message.number)
        elif isinstance(message, UnknownPeer):
            with self._lock:
                held = [
                    HeldLease(lease.token, lease.session.session_id, lease.first_step, lease.stop_step)
                    for lease in self._held.values()
                ]
            self._endpoint.send(RegisterWorker(self._registration.host, self._registration.pid, "", held))
        elif isinstance(message, ShutDown):
            self._stopping = True
        elif isinstance(message, Refused):
            raise HetstreamError(f"the dispatcher refused this data worker: {message.text}")
        elif not isinstance(message, Alive):
            raise HetstreamError(f"the dispatcher sent {type(message).__name__}, which is no message for a data worker")


@functools.lru_cache(maxsize=16)
def _plan(order: PlannedOrder, epoch: int) -> EpochPlan:
    return EpochPlan(
        order.num_samples,
        order.batch_size,
        order.world_size,
        order.drop_last,
        order.shuffle,
        order.order_seed,
        epoch,
    )


def indices_of(lease: GrantLease, step: int) -> Indices:
    """Sample indices of a leased step, int64."""
    order = lease.session.order
    if isinstance(order, PlannedOrder):
        return _plan(order, lease.session.epoch).indices(step, order.rank)
    if lease.steps is None:
        raise PipelineError(f"lease {lease.token} names no samples for step {step} of a listed order")
    counts = np.frombuffer(lease.steps.counts, dtype="<i4")
    number = step - lease.steps.first_step
    first = int(counts[:number].sum())
    return np.frombuffer(lease.steps.indices, dtype="<i8")[first : first + int(counts[number])]


def describe_failure(error: Exception, session_id: str, step: int, token: int) -> BatchFailed:
    """Put an exception of user code into a message: its type by name, its text, and where it happened."""
    sample_index = -1
    cause: BaseException = error
    if isinstance(error, SampleError):
        sample_index, cause = error.sample_index, error.user_error()
    kind = type(cause)
    remote = "".join(traceback.format_exception(kind, cause, cause.__traceback__))
    return BatchFailed(session_id, step, token, (kind.__module__, kind.__qualname__), str(cause), remote, sample_index)


# --- processes ------------------------------------------------------------------------------------------------------


def run_data_workers(address_file: Path, num_processes: int) -> int:
    """Fork data worker processes, restart those that die, and wait until the service ends.

    Args:
        address_file: the dispatcher's address file.
        num_processes: how many; one for each CPU of this data worker.

    Returns:
        Exit code: 0 after an orderly end, 1 when processes died too often or could not work.
    """
    service = wait_for_address_file(address_file, CONNECT_TIMEOUT_S)
    children: dict[int, tuple[str, float]] = {}
    stopping = False
    early_deaths = 0
    failed = False

    def on_signal(_: int, __: object) -> None:
        nonlocal stopping
        stopping = True
        for pid in children:
            os.kill(pid, signal.SIGTERM)

    signals = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # none between the fork and its entry in `children`
    for number in signals:
        signal.signal(number, on_signal)
    for _ in range(num_processes):
        _start_child(service, "", children)
    while children:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        pid, status = os.wait()
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        worker_id, started = children.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code == 0 or stopping:
            continue
        _log.warning("data worker process %d ended with %s", pid, f"signal {-code}" if code < 0 else f"code {code}")
        early_deaths = early_deaths + 1 if time.monotonic() - started < _EARLY_DEATH_S else 1
        if code == 1:
            failed = True  # it said why on stderr; the same would happen again
        elif early_deaths > _MAX_EARLY_DEATHS:
            _log.error("data worker processes died %d times in a row; this data worker gives up", early_deaths)
            failed = True
        else:
            _start_child(service, worker_id, children)
    return 1 if failed else 0


def _start_child(service: ServiceAddress, replaces: str, children: dict[int, tuple[str, float]]) -> None:
    worker_id = secrets.token_hex(16)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        children[pid] = (worker_id, time.monotonic())
        return
    code = 1
    try:
        code = _child_main(service, worker_id, replaces, parent)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _child_main(service: ServiceAddress, worker_id: str, replaces: str, parent: int) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    # Until it is connected a signal simply ends it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    use_one_thread()
    keep_freed_memory()
    try:
        worker = DataWorker(service, worker_id, replaces)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: worker.stop())
        worker.run()
    except HetstreamError as error:
        sys.stderr.write(f"hetstream worker: {type(error).__name__}: {error}\n")
        return 1
    except Exception:  # noqa: BLE001, the process's boundary: say it, and let the parent see the code
        traceback.print_exc()
        return 2
    return 0
