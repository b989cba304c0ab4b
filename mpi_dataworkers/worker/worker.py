"""A data worker: takes leases from the dispatcher, makes their batches, sends them to the loaders.

One `DataWorker` is one process, forked by `supervisor.py`. Its main thread works on leases: `steps.py` makes each step,
with a pipeline of `pipelines.py`. A second thread (`control.py`) keeps the connection to the dispatcher. Both share
`leases.py` (what there is to do) and `pipelines.py` (what to do it with).
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

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.errors import ServiceEnded, ServiceError
from hetstream.mpi_dataworkers.ops.pipeline import use_one_thread
from hetstream.mpi_dataworkers.process.children import flush_output, stop_at_signals
from hetstream.mpi_dataworkers.process.config import slurm_job_from_environment
from hetstream.mpi_dataworkers.process.faults import reach
from hetstream.mpi_dataworkers.process.interpreter import keep_freed_memory, this_interpreter
from hetstream.mpi_dataworkers.transports.base import PeerUnreachable
from hetstream.mpi_dataworkers.transports.choice import Receivers, TransportSender
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, has_ended, wait_for_address_file
from hetstream.mpi_dataworkers.wire.codec import Leaf
from hetstream.mpi_dataworkers.wire.messages import Delivery, Device, FailLease, FailStep, GrantLease, RegisterWorker
from hetstream.mpi_dataworkers.wire.pipeline_transfer import HandoverFailed
from hetstream.mpi_dataworkers.worker.control import ControlThread
from hetstream.mpi_dataworkers.worker.fork_server import Exchange, LoadedProgram, OtherProgram
from hetstream.mpi_dataworkers.worker.leases import CONNECT_TIMEOUT_S, DispatcherConnection, HeldLeases, LeaseGone
from hetstream.mpi_dataworkers.worker.pipelines import ForkedAnew, PickledPipelines, Pipelines, StepFailed
from hetstream.mpi_dataworkers.worker.process import WorkerOptions, WorkerStart, WorkPage
from hetstream.mpi_dataworkers.worker.steps import Gatherer, StepMaker

_log = logging.getLogger(__name__)

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
