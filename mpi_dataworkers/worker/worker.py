"""A data worker: takes leases from the dispatcher, makes their batches, sends them to the loaders.

One `DataWorker` is one process, forked by `supervisor.py`. Its main thread works on leases: `steps.py` makes each step,
with a pipeline of `pipelines.py`. A second thread, `Control`, keeps the connection to the dispatcher, so that a long
sample does not look like a dead worker: it hands leases and pickled pipelines to the main thread, and sends what that
one has to say. Both share `leases.py` (what there is to do) and `pipelines.py` (what to do it with).
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.errors import ServiceEnded, ServiceError, ServiceUnavailable
from hetstream.mpi_dataworkers.ops.pipeline import use_one_thread
from hetstream.mpi_dataworkers.process.children import flush_output, stop_at_signals
from hetstream.mpi_dataworkers.process.config import slurm_job_from_environment
from hetstream.mpi_dataworkers.process.faults import reach
from hetstream.mpi_dataworkers.process.interpreter import keep_freed_memory, this_interpreter
from hetstream.mpi_dataworkers.transports.base import PeerUnreachable, Reconnected
from hetstream.mpi_dataworkers.transports.choice import Receivers, TransportSender
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, has_ended, wait_for_address_file
from hetstream.mpi_dataworkers.wire.codec import Leaf
from hetstream.mpi_dataworkers.wire.messages import (
    HEARTBEAT_S,
    AddProcess,
    Alive,
    Delivery,
    Device,
    DrainWorker,
    DropPipeline,
    DropSession,
    FailLease,
    FailStep,
    GrantLease,
    LeaveWorker,
    Message,
    ProvidePipeline,
    Refused,
    RegisterWorker,
    RenewWorker,
    RevokeLease,
    ShutDown,
    TrimLease,
    UnknownPeer,
    WorkerHeartbeat,
    WorkerRegistered,
)
from hetstream.mpi_dataworkers.wire.pipeline_transfer import HandoverFailed
from hetstream.mpi_dataworkers.worker.fork_server import Exchange, LoadedProgram, OtherProgram
from hetstream.mpi_dataworkers.worker.leases import CONNECT_TIMEOUT_S, DispatcherConnection, HeldLeases, LeaseGone
from hetstream.mpi_dataworkers.worker.pipelines import ForkedAnew, PickledPipelines, Pipelines, StepFailed
from hetstream.mpi_dataworkers.worker.process import ShutdownDeadlines, WorkerOptions, WorkerStart, WorkPage
from hetstream.mpi_dataworkers.worker.steps import Gatherer, StepMaker

# The memory that counts for this process, for its heartbeats. Called by the control thread.

# Counting takes the kernel some milliseconds for each GB, in which the process can map nothing.
_EVERY_S = 10.0


class OwnMemory:
    """Memory of this process that a limit of Slurm counts: its own pages and shared ones, no file's.

    What several processes share, such as pages from before a fork, counts in parts (proc_pid_smaps(5), Pss): the sum
    over the processes of a data worker is what they have together.
    """

    def __init__(self, rollup: Path = Path("/proc/self/smaps_rollup")) -> None:
        self._rollup = rollup
        self._read_at = float("-inf")
        self._bytes = 0

    def resident_bytes(self, now: float) -> int:
        """Return what it is, read every ten seconds; 0 where the kernel does not say."""
        if now - self._read_at >= _EVERY_S:
            self._read_at, self._bytes = now, self._read()
        return self._bytes

    def _read(self) -> int:
        try:
            lines = self._rollup.read_text().splitlines()
        except OSError:
            return 0
        counted = ("Pss_Anon:", "Pss_Shmem:")
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(counted))


_log = logging.getLogger(__name__)

# A dispatcher may be away for as long as a restart takes; after this the data worker takes the job for ended.
GIVE_UP_S = 60.0
# The thread looks several times a second; a longer gap means that it was held up.
_HELD_UP_S = 2.0
# A silent dispatcher may have come to its end; the address file says so.
_ASK_FILE_S = 2.0
# A registration that got no answer (the dispatcher died before it gave one) is sent again after this.
_REGISTER_AGAIN_S = 1.0


class ControlThread:
    """The thread that keeps the connection to the dispatcher.

    Args:
        dispatcher: the connection to it.
        registration: of this data worker.
        leases, pickled_pipelines: where what comes is put.
        page: where its supervisor is told and read.
        loaded: the program that the process serves, for registrations.

    Attributes:
        number: what the dispatcher calls this data worker.
        failure: what ended the thread too early.
    """

    def __init__(
        self,
        dispatcher: DispatcherConnection,
        registration: RegisterWorker,
        leases: HeldLeases,
        pickled_pipelines: PickledPipelines,
        page: WorkPage,
        loaded: LoadedProgram,
    ) -> None:
        self.number = 0
        self.failure: BaseException | None = None
        self._dispatcher, self._registration = dispatcher, registration
        self._leases, self._pickled_pipelines, self._page, self._loaded = leases, pickled_pipelines, page, loaded
        self._memory = OwnMemory()
        # When the registration that is under way was sent; None while there is none.
        self._asked_at: float | None = None
        self._done = False  # the main thread makes no more batches
        self._thread = threading.Thread(target=self._run, name="hetstream-control", daemon=True)

    def start(self) -> None:
        """Register, and talk until `finish`."""
        self._thread.start()

    def finish(self) -> None:
        """Send what there is to be said, say goodbye, and end."""
        self._done = True
        self._dispatcher.wake()
        self._thread.join()

    def stop(self) -> None:
        """Have the data worker leave after the step that it is making; safe in a signal handler."""
        self._leases.stop()
        self._dispatcher.wake()

    def _run(self) -> None:
        try:
            self._talk()
        except Exception as error:  # noqa: BLE001, the thread's boundary: the main thread raises it
            self.failure = error
        finally:
            self._leases.release()

    def _talk(self) -> None:
        self._register()
        next_heartbeat = time.monotonic() + HEARTBEAT_S
        last_heard = looked_at = time.monotonic()
        # The main thread may wait for a loader; the dispatcher is to know in any case that this data worker leaves.
        while not self._done and (now := time.monotonic()) < (leave_by := self._page.deadlines.batches_by):
            messages = self._dispatcher.poll(max(0.0, min(next_heartbeat, leave_by) - now))
            now = time.monotonic()
            if now - looked_at > _HELD_UP_S:
                last_heard = now  # user code held the GIL: nobody was asked, so nobody could answer
            looked_at = now
            for message in messages:
                last_heard = now
                self._handle(message)
            if self._leases.is_stopping:
                self._leases.drain()
            self._dispatcher.flush()
            if now >= next_heartbeat:
                self._dispatcher.send(WorkerHeartbeat(self._leases.tokens(), self._memory.resident_bytes(now)))
                next_heartbeat = now + HEARTBEAT_S
                if now - last_heard > _ASK_FILE_S and not self._leases.is_stopping and self._dispatcher.has_ended():
                    _log.info("the service has ended")
                    self.stop()
            if now - last_heard > GIVE_UP_S:
                raise ServiceUnavailable(
                    f"the dispatcher at {self._dispatcher.address} was silent for {GIVE_UP_S:g} s; this data worker "
                    "ends. Is its host up, and reachable from this one?"
                )
        self._dispatcher.flush()
        if self._leases.renews:  # it may have been there for less than a heartbeat
            self._dispatcher.send(WorkerHeartbeat(self._leases.tokens(), self._memory.resident_bytes(time.monotonic())))
        self._dispatcher.send(LeaveWorker())

    def _register(self) -> None:
        self._asked_at = time.monotonic()
        held = self._leases.described()
        self._dispatcher.send(msgspec.structs.replace(self._registration, held=held, program=self._loaded.program))

    def _handle(self, message: Message | Reconnected) -> None:
        handler = _HANDLERS.get(type(message))
        if handler is None:
            raise HetstreamError(f"the dispatcher sent {type(message).__name__}, which is no message for a data worker")
        handler(self, message)

    def _registered(self, message: WorkerRegistered) -> None:
        self.number, self._asked_at = message.number, None
        self._registration = msgspec.structs.replace(self._registration, replaces="", fate=None)
        _log.info("data_worker=%d registered", message.number)
        reach("worker.registered")
        self._pickled_pipelines.ask_again()
        self._leases.drain_again()

    def _register_again(self, _: UnknownPeer) -> None:
        if self._asked_at is None or time.monotonic() - self._asked_at > _REGISTER_AGAIN_S:
            self._register()

    def _leave(self, message: ShutDown | DrainWorker | RenewWorker) -> None:
        self._leases.renews = isinstance(message, RenewWorker)
        self._page.wish("")  # who takes its place serves another program
        self.stop()
        self._leases.drain()
        if self._leases.renews and not self._leases.tokens():
            # Nobody waits for the step in work, which may wait for what another process holds.
            self._page.deadlines = ShutdownDeadlines(time.monotonic())

    def _drop_session(self, message: DropSession) -> None:
        if in_work := self._leases.drop_session(message.session_id):
            self._page.unwanted = in_work

    def _refused(self, message: Refused) -> None:
        raise HetstreamError(f"the dispatcher refused this data worker: {message.text}")


_HANDLERS: dict[type[Message | Reconnected], Callable[[ControlThread, Any], None]] = {
    GrantLease: lambda control, message: control._leases.take(message),
    TrimLease: lambda control, message: control._leases.trim(message.token, message.stop_step),
    RevokeLease: lambda control, message: control._leases.revoke(message),
    DropSession: ControlThread._drop_session,
    ProvidePipeline: lambda control, message: control._pickled_pipelines.take(message),
    DropPipeline: lambda control, message: control._pickled_pipelines.drop(message.pipeline_id),
    WorkerRegistered: ControlThread._registered,
    Reconnected: lambda control, _: control._register(),
    UnknownPeer: ControlThread._register_again,
    ShutDown: ControlThread._leave,
    DrainWorker: ControlThread._leave,
    RenewWorker: ControlThread._leave,
    AddProcess: lambda control, _: control._page.ask_for_another(),
    Refused: ControlThread._refused,
    Alive: lambda _, __: None,
}


# Time for the last batches to leave at an orderly end; after a signal `process.py` says until when.
_LINGER_S = 2.0
# A loader between two epochs keeps its connections; a dead one's are closed after this.
_KEEP_CONNECTION_S = 5.0


class DataWorker:
    """One data worker process.

    Args:
        service: address and keys.
        start: what this process is started with.
        options: of the data worker.
        has_ended: whether the service is over, for when there is no connection on which to be told.
        page: where it says what it is doing.
        exchange: pickled pipelines that this host has; None for a process that shares them with no other.
        loaded: what was loaded before this process was forked.
    """

    def __init__(
        self,
        service: ServiceAddress,
        start: WorkerStart,
        options: WorkerOptions,
        has_ended: Callable[[], bool],
        page: WorkPage | None = None,
        exchange: Exchange | None = None,
        loaded: LoadedProgram | None = None,
    ) -> None:
        self._page = page or WorkPage()
        loaded = loaded or LoadedProgram()
        self._dispatcher = DispatcherConnection(service, start.worker_id, has_ended)
        self._leases = HeldLeases(self._dispatcher)
        self._pickled_pipelines = PickledPipelines(exchange, service.pipelines_dir, self._dispatcher)
        registration = _registration(start, options.device)
        self._control = control = ControlThread(
            self._dispatcher, registration, self._leases, self._pickled_pipelines, self._page, loaded
        )
        pipelines = Pipelines(
            self._pickled_pipelines,
            loaded,
            self._leases,
            self._page,
            options.forks_anew,
            bool(start.slot),
            options.device,
            lambda: control.number,
        )
        self._leases.is_spent = pipelines.is_spent
        earlier = None
        if options.make_earlier is not None:
            earlier = options.make_earlier(start.worker_id, self._leases, self._pickled_pipelines.fetch)
        self._steps = StepMaker(
            pipelines, self._leases, self._dispatcher, self._page, options.cache_bytes, options.num_threads, earlier
        )
        self._sender = TransportSender(service.batch_key, start.worker_id, options.over_mpi)
        self._used: dict[Receivers, float] = {}  # when a lease for them was begun
        self._next_look = 0.0

    def stop(self) -> None:
        """Ask the worker to leave after the step it is making; safe in a signal handler."""
        self._control.stop()

    @property
    def wants_renewal(self) -> bool:
        """Whether it has left so that its supervisor forks a fresh process in its slot."""
        return self._leases.renews

    def run(self) -> None:
        """Work until the dispatcher ends the service or `stop` is called.

        Raises:
            HetstreamError: the dispatcher refused this worker, or was away for longer than `control.GIVE_UP_S`.
        """
        self._control.start()
        try:
            while (lease := self._next_lease()) is not None and not self._leases.is_stopping:
                self._work_on(lease)
                flush_output()  # what samples have printed is not lost if the process is killed later
                self._drop_unused(time.monotonic())
        finally:
            self._leases.stop()
            self._leases.drain()
            self._control.finish()
            self._close()
        if self._control.failure is not None:
            raise self._control.failure

    def _close(self) -> None:
        deadlines = self._page.deadlines
        self._sender.close(min(deadlines.batches_by, time.monotonic() + _LINGER_S))
        self._steps.close()
        self._dispatcher.close(deadlines.messages_by)
        self._pickled_pipelines.close()

    def _next_lease(self) -> GrantLease | None:
        while True:
            try:
                return self._leases.next(_KEEP_CONNECTION_S)
            except queue.Empty:
                self._drop_unused(time.monotonic())

    def _drop_unused(self, now: float) -> None:
        """Close connections to loaders that read nothing, some time after: a dead loader's memory hangs on them."""
        if now < self._next_look:
            return
        self._next_look = now + _KEEP_CONNECTION_S
        in_use = set(self._leases.sessions.values())
        if not in_use:
            self._steps.rest()
        for receivers, used_at in list(self._used.items()):
            if receivers not in in_use and now - used_at > _KEEP_CONNECTION_S:
                self._sender.drop(receivers)
                del self._used[receivers]

    def _work_on(self, lease: GrantLease) -> None:
        receivers = tuple(lease.session.receivers)
        self._used[receivers] = time.monotonic()
        if self._leases.take_doubt(receivers):
            self._sender.drop(receivers)
        started, waited_s = time.monotonic(), 0.0
        gathered = Gatherer(functools.partial(self._sender.room, receivers))
        try:
            for step in range(lease.first_step, lease.stop_step):
                if not self._leases.begin(lease.token, step):
                    break
                begun = time.monotonic()  # without what sending took: that may have waited for the network
                reach("worker.before_make")
                self._page.begin(lease.session.session_id, lease.token, step, lease.session.errors.sample_timeout_s)
                try:
                    goes_on = self._steps.make(lease, step, gathered)
                except StepFailed as failed:
                    # The dispatcher leases what is left: the failed step to someone else where there is one.
                    self._send(receivers, gathered.rest())
                    self._leases.settle(lease.token, FailStep(lease.token, step, failed.failure))
                    return
                finally:
                    self._page.rest()
                now = time.monotonic()
                self._page.note_made(now)
                reach("worker.after_make")
                waited_s += self._send(receivers, gathered.due(now, now - begun))
                if not goes_on:
                    break
            waited_s += self._send(receivers, gathered.rest())
        except (PeerUnreachable, HandoverFailed) as error:
            _log.warning("session=%s gave a lease back: %s", lease.session.session_id, error)
            self._leases.settle(lease.token, FailLease(lease.token, str(error)))
        except OtherProgram:
            self._leases.settle(lease.token, FailLease(lease.token, "its process serves another program"))
            self._page.wish("")
            self._leases.renew()
        except ForkedAnew:
            self._leases.give_up(lease.token)
            self._leases.renew()
        except LeaseGone:
            return
        else:
            reach("worker.before_finish")
            report = self._steps.finished(lease, time.monotonic() - started - waited_s, waited_s)
            self._leases.settle(lease.token, report)
            reach("worker.after_finish")

    def _send(self, receivers: Receivers, deliveries: Sequence[tuple[Delivery, Sequence[Leaf]]]) -> float:
        """Send what is ready; how long that waited for the loader or the network."""
        waited_s = 0.0
        for header, frames in deliveries:
            waited_s += self._sender.send(receivers, header, frames)
            reach("worker.batch_sent")
        return waited_s


def _registration(start: WorkerStart, device: Device) -> RegisterWorker:
    return RegisterWorker(
        socket.gethostname(),
        os.getpid(),
        start.replaces,
        [],
        start.fate,
        slurm_job_from_environment(),
        start.slot,
        interpreter=this_interpreter(),
        device=device,
    )


# A data worker that a launcher started as a rank of an MPI world. Called by `hetstream internal worker --mpi`.
#
# One process: what has called MPI_Init must not fork. When it dies, the launcher ends the whole step; so when it only
# cannot work, it stays until the trainers have ended, and they load their own data.


def run_mpi_data_worker(address_file: Path, cache_bytes: int, num_threads: int = 1) -> int:
    """Work until the service ends or all trainers of this MPI world have; then wait for them.

    Args:
        address_file: the dispatcher's address file.
        cache_bytes: finished batches to keep for other loaders that share them.
        num_threads: that make the samples of a batch, where the dataset is thread-safe.

    Returns:
        Exit code: 0 after an orderly end, 1 when it could not work, 2 for an error inside.

    Raises:
        ServiceError: there is no MPI here, or no other rank.
    """
    from hetstream.mpi_dataworkers.transports.mpi import ONE_LAUNCH, enter_world, is_alone

    if is_alone():
        raise ServiceError(
            f"hetstream internal worker --mpi: this data worker is alone in its MPI world, so no trainer is in it. "
            f"{ONE_LAUNCH}"
        )

    trainers = _Trainers()
    watcher = threading.Thread(
        target=enter_world(is_trainer=False).wait_for_end,
        args=(trainers.have_ended,),
        name="hetstream-world",
        daemon=True,
    )
    watcher.start()
    code = 0
    try:
        _work(address_file, cache_bytes, num_threads, trainers)
    except ServiceEnded as ended:
        _log.info("%s", ended)
    except HetstreamError as error:
        sys.stderr.write(f"hetstream internal worker: {error}\n")
        code = 1
    except Exception:  # noqa: BLE001, the process's boundary: say it, but do not end the step
        traceback.print_exc()
        code = 2
    watcher.join()
    return code


class _Trainers:
    """Whether they have ended, and the data worker that is to be told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: DataWorker | None = None
        self._have_ended = False

    def have_ended(self) -> None:
        with self._lock:
            self._have_ended = True
            if self._worker is not None:
                self._worker.stop()

    def tell(self, worker: DataWorker) -> None:
        with self._lock:
            self._worker = worker
            if self._have_ended:
                worker.stop()


def _work(address_file: Path, cache_bytes: int, num_threads: int, trainers: _Trainers) -> None:
    use_one_thread()
    keep_freed_memory()
    service = wait_for_address_file(address_file, CONNECT_TIMEOUT_S)
    options = WorkerOptions(cache_bytes, num_threads, over_mpi=True)
    worker = DataWorker(service, WorkerStart(secrets.token_hex(16)), options, partial(has_ended, address_file))
    stop_at_signals(worker.stop)
    trainers.tell(worker)
    worker.run()
