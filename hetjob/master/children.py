"""Run a dispatcher, data workers and embedding servers: carry out what `state.py` decides, and say what happened.

Shared by the job master (children are job steps) and the local backend (children are processes). All processes and
clocks of both are here; no decision is.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from hetstream.base.errors import HetstreamError
from hetstream.hetjob.job.processes import next_signal
from hetstream.hetjob.master.state import (
    DISPATCHER,
    Begin,
    BeginElastic,
    ChildEnded,
    ClockReached,
    DispatcherReady,
    Event,
    Finish,
    Instruction,
    MasterState,
    Phase,
    StartDataWorker,
    StartDispatcher,
    StartEmbeddingServer,
    StopAll,
    StopRequested,
    data_worker,
    embedding_server,
)
from hetstream.hetjob.ports import Child

log = logging.getLogger(__name__)

_READY_POLL_S = 0.05  # the address file is looked for this often, only until it is there
_LONGEST_WAIT_S = 5.0  # children wake the loop at once; this only bounds the cost of a missed wake-up
_GRACE_S = 10.0  # a dispatcher writes its summary and data workers finish their batch; then SIGKILL


class Launcher(Protocol):
    """How the children of one service are started."""

    def dispatcher(self) -> Child:
        """Start the dispatcher."""

    def data_worker(self, index: int) -> Child:
        """Start one data worker."""

    def embedding_server(self, index: int) -> Child:
        """Start one embedding server, in the place of one that has died."""

    def begin_elastic(self) -> None:
        """Let the elastic controller begin; it goes on beside this service."""

    def end_elastic(self) -> None:
        """Ask it to end, and its companions with it; returns at once."""

    def last_words(self, name: str) -> str:
        """Return what is to be said of a child's output, behind that it has died; "" where its log stays to be read."""


class Service:
    """The running service of one job.

    Args:
        state: decides.
        launcher: starts.
        address_file: what the dispatcher writes when it is ready.
    """

    def __init__(self, state: MasterState, launcher: Launcher, address_file: Path) -> None:
        self._state = state
        self._launcher = launcher
        self._address_file = address_file
        self._children: dict[str, Child] = {}
        self._ended: list[ChildEnded] = []
        self._kill_at: float | None = None
        self._act: dict[type[Instruction], Callable[[Any], None]] = {
            StartDispatcher: self._start_dispatcher,
            StartDataWorker: self._start_data_worker,
            StartEmbeddingServer: self._start_embedding_server,
            BeginElastic: self._begin_elastic,
            StopAll: self._stop_all,
            Finish: lambda _: None,
        }

    @property
    def phase(self) -> Phase:
        """Where the service is in its life."""
        return self._state.phase

    def begin(self) -> None:
        """Start the dispatcher; the rest follows in `wait`."""
        self._handle(Begin())

    def stop(self, reason: str) -> None:
        """Ask everything to end; keep calling `wait` until the phase is ENDED."""
        self._handle(StopRequested(reason))

    def finish(self, reason: str) -> None:
        """Stop, and return when nothing is left running. Children that ignore SIGTERM are killed after the grace."""
        self.stop(reason)
        while self.phase is not Phase.ENDED:
            self.wait(())

    def wait(self, signals: Collection[int], limit_s: float = _LONGEST_WAIT_S) -> signal.struct_siginfo | None:
        """Wait until something happens and see to it.

        Args:
            signals: held signals to report to the caller.
            limit_s: return after this long at the latest.

        Returns:
            The signal that came, or None.
        """
        received = next_signal(signals, self._timeout_s(limit_s))
        if self.phase is Phase.STARTING and self._address_file.exists():
            self._handle(DispatcherReady())
        self._reap()
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            for name, child in self._children.items():
                log.warning("%s pid=%d did not end within %g s of SIGTERM: killing it", name, child.pid, _GRACE_S)
                child.kill()
        due = self._state.next_due()
        if due is not None and now >= due:
            self._handle(ClockReached())
        return received

    def _timeout_s(self, limit_s: float) -> float:
        times = [time_s for time_s in (self._state.next_due(), self._kill_at) if time_s is not None]
        timeout_s = min([limit_s, *(time_s - time.monotonic() for time_s in times)])
        if self.phase is Phase.STARTING:
            timeout_s = min(timeout_s, _READY_POLL_S)
        return 0.0 if self._ended else timeout_s

    def _handle(self, event: Event) -> None:
        for instruction in self._state.handle(event, time.monotonic()):
            log.debug("%s -> %s", event, instruction)
            self._act[type(instruction)](instruction)

    def _reap(self) -> None:
        for name, child in list(self._children.items()):
            returncode = child.poll()
            if returncode is not None:
                del self._children[name]
                self._ended.append(ChildEnded(name, returncode))
        ended, self._ended = self._ended, []
        for event in ended:
            expected = self.phase is Phase.STOPPING
            if expected:
                log.debug("%s ended with %d", event.name, event.returncode)
            else:
                log.warning("%s ended with %d%s", event.name, event.returncode, self._launcher.last_words(event.name))
            self._handle(event)

    def _start_dispatcher(self, instruction: StartDispatcher) -> None:
        self._start(DISPATCHER, instruction.reason, self._launcher.dispatcher)

    def _start_data_worker(self, instruction: StartDataWorker) -> None:
        index = instruction.index
        self._start(data_worker(index), instruction.reason, lambda: self._launcher.data_worker(index))

    def _start_embedding_server(self, instruction: StartEmbeddingServer) -> None:
        index = instruction.index
        self._start(embedding_server(index), instruction.reason, lambda: self._launcher.embedding_server(index))

    def _start(self, name: str, reason: str, start: Callable[[], Child]) -> None:
        try:
            child = start()
        except (HetstreamError, OSError) as error:
            # Handled like an end: the state machine tries again later, and the log says why.
            log.error("%s could not be started: %s", name, error)
            self._ended.append(ChildEnded(name, 1))
            return
        self._children[name] = child
        log.info("%s pid=%d started: %s", name, child.pid, reason)

    def _begin_elastic(self, instruction: BeginElastic) -> None:
        log.info("the elastic controller begins: %s", instruction.reason)
        self._launcher.begin_elastic()

    def _stop_all(self, instruction: StopAll) -> None:
        log.info("stopping: %s", instruction.reason)
        self._kill_at = time.monotonic() + _GRACE_S
        for child in self._children.values():
            child.terminate()
        self._launcher.end_elastic()
