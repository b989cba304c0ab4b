"""A data worker's talk with the dispatcher, in a thread of its own: a long sample does not look like a dead worker.

It hands leases and pickled pipelines to the main thread, and sends what that one has to say.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.errors import ServiceUnavailable
from hetstream.mpi_dataworkers.process.faults import reach
from hetstream.mpi_dataworkers.transports.base import Reconnected
from hetstream.mpi_dataworkers.wire.messages import (
    HEARTBEAT_S,
    AddProcess,
    Alive,
    DrainWorker,
    DropPipeline,
    DropSession,
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
from hetstream.mpi_dataworkers.worker.fork_server import LoadedProgram
from hetstream.mpi_dataworkers.worker.leases import DispatcherConnection, HeldLeases
from hetstream.mpi_dataworkers.worker.pipelines import PickledPipelines
from hetstream.mpi_dataworkers.worker.process import ShutdownDeadlines, WorkPage

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
        """What it is, read every ten seconds; 0 where the kernel does not say."""
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
