"""Processes that have loaded a large pipeline, and from which the processes of a data worker are forked.

Python's objects can be shared by processes only as the memory of the one that has forked them. So a process that comes
to a large pipeline asks its supervisor (`ask_to_be_forked`). That one forks a *fork server*, which loads the pipeline
and nothing else, and compares what it holds with what it held before (`ops/holdings.py`). Where nothing is in the way,
those who asked leave, and the fork server forks processes in their slots, now and whenever one of them dies. Else, or
when the fork server ends, hangs or is stopped, they load the pipeline for themselves.

The fork server makes no batch, has no thread and no connection. What it forks are children of the supervisor: of the
two forks that make one of them the first ends at once, and the supervisor adopts the second.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from hetstream.mpi_dataworkers.children import (
    FRESH_PROCESS,
    adopt_orphans,
    begin_child,
    end_group,
    fork_child,
    has_ended,
    is_signalled,
    is_stopped,
)
from hetstream.mpi_dataworkers.forks import ForksEndHere
from hetstream.mpi_dataworkers.ops.holdings import Holdings
from hetstream.mpi_dataworkers.ops.pipeline import use_one_thread
from hetstream.mpi_dataworkers.worker.exchange import Exchange
from hetstream.mpi_dataworkers.worker.loaded import LoadedProgram
from hetstream.mpi_dataworkers.worker.watch import Answer, StackFile, WorkPage

_log = logging.getLogger(__name__)

# Pickled objects below this are loaded by each process: to be forked anew takes longer than their memory is worth.
FORK_FROM_BYTES = 1 << 20
# A fork server that has not forked by then, nor after as long as it took to load, is of no use: page tables are copied
# twice, 0.1 s for a GB. A process that was not noticed by then is of none either.
_FORK_S = 5.0
_NOTICED_S = 5.0
_LOOK_AGAIN_S = 0.002
_ASK_AGAIN_S = 0.01
# Refusals that are remembered: a program may change its dataset at each epoch, and a service outlives its programs.
_MOST_REFUSED = 256
# Of a request: what a process is started with, with the stack of the one that it replaces.
_MOST_REQUEST_BYTES = 1 << 20
_LOADED, _REFUSED = b"1", b"0"
_MOST_ANSWER_BYTES = 1 << 10


def wish(page: WorkPage, pipeline_id: str, limit_s: float) -> None:
    """Ask the supervisor to have a pipeline loaded for processes that take this one's place; see `ask_to_be_forked`."""
    page.wish(pipeline_id, limit_s)
    os.kill(os.getppid(), signal.SIGCHLD)  # look here now


def ask_to_be_forked(page: WorkPage, pipeline_id: str, limit_s: float, is_wanted: Callable[[], bool]) -> bool:
    """Ask the supervisor to have a pipeline loaded once for all processes, and wait until it was, or will not be.

    Args:
        page: of this process.
        pipeline_id: of the pipeline; while a process of this host has its bytes, the fork server finds it.
        limit_s: how long loading may take.
        is_wanted: asked while it waits.

    Returns:
        Whether this process is to leave with `FRESH_PROCESS`; else it goes on by itself.
    """
    supervisor = os.getppid()
    if page.wished[0] != pipeline_id:
        wish(page, pipeline_id, limit_s)
    while page.answer is Answer.WAIT and is_wanted() and not is_stopped(supervisor):
        time.sleep(_ASK_AGAIN_S)
    if not is_wanted():
        return False  # the wish stands, so that a long load that nobody waits for now comes to its end
    if page.answer is Answer.LEAVE:
        return True
    page.wish("")
    return False


@dataclass
class _ForkServer:
    """One of them, as its supervisor sees it."""

    pid: int
    channel: socket.socket
    limit_s: float
    started: float
    is_loaded: bool = False
    load_s: float = 0.0


class ForkServers:
    """The fork servers of one supervisor, by the pipeline that each has loaded.

    Args:
        exchange: where they find it.
        leave_supervisor: called in a child of the supervisor, to give up what is the supervisor's alone.
        run: be a data worker process, with what the supervisor wrote for it, and return its exit code.
        clock: seconds in which the supervisor ran.
    """

    def __init__(
        self,
        exchange: Exchange,
        leave_supervisor: Callable[[], None],
        run: Callable[[bytes, WorkPage, StackFile, LoadedProgram], int],
        clock: Callable[[], float],
    ) -> None:
        self._exchange, self._leave_supervisor, self._run, self._clock = exchange, leave_supervisor, run, clock
        self._servers: dict[str, _ForkServer] = {}
        self._refused: dict[str, str] = {}  # with the reason; the oldest first
        self._ended: set[int] = set()  # processes that are not reaped yet

    def answer(self, pipeline_id: str, limit_s: float) -> Answer:
        """What to tell a process that wants a pipeline to be loaded once for all; begin to load it, if nobody has."""
        server = self._servers.get(pipeline_id)
        if server is None and pipeline_id not in self._refused:
            try:
                self._servers[pipeline_id] = self._begin(pipeline_id, limit_s)
            except OSError as error:  # no process or descriptor to spare
                self._refuse(pipeline_id, f"a fork server cannot be started: {error}")
                return Answer.LOAD
            return Answer.WAIT
        if server is not None and not server.is_loaded:
            self._hear(pipeline_id, server)
        if pipeline_id in self._refused:
            return Answer.LOAD
        return Answer.LEAVE if server is not None and server.is_loaded else Answer.WAIT

    def fork(self, pipeline_id: str, start_bytes: bytes, page: WorkPage, stacks: StackFile) -> int | None:
        """Have a data worker process forked that has a pipeline.

        Args:
            pipeline_id: of the pipeline.
            start_bytes: for `run`.
            page: of the process.
            stacks: of the process.

        Returns:
            Its process id; None when there is no fork server for it, or none that works.
        """
        server = self._servers.get(pipeline_id)
        if server is None or not server.is_loaded:
            return None
        deadline = time.monotonic() + max(_FORK_S, server.load_s)
        try:
            socket.send_fds(server.channel, [start_bytes], [page.descriptor, stacks.descriptor])
            while not page.pid:
                if time.monotonic() > deadline or is_signalled() or is_stopped(server.pid) or has_ended(server.pid):
                    raise TimeoutError("it does not answer")
                time.sleep(_LOOK_AGAIN_S)
        except OSError as error:
            self._refuse(pipeline_id, f"its fork server {server.pid} failed: {error}")
            return None
        page.note_known()
        return page.pid

    def end_unused(self, in_use: Collection[str]) -> None:
        """End those that no process was forked from, and that none waits for."""
        for pipeline_id in self._servers.keys() - in_use:
            self._end(pipeline_id)

    def forget(self, pid: int, how: str) -> bool:
        """Take note that a process has ended, before it is waited for.

        If it is a fork server that has ended by itself, its pipeline is loaded by each process from now on.

        Args:
            pid: of any process.
            how: it ended, in words.

        Returns:
            Whether it is one of them.
        """
        if pid in self._ended:
            self._ended.remove(pid)
            return True
        for pipeline_id, server in self._servers.items():
            if server.pid == pid:
                self._refuse(pipeline_id, f"its fork server {pid} {how}")
                self._ended.remove(pid)
                return True
        return False

    def leave(self) -> None:
        """In a child of the supervisor: they are not its own."""
        for server in self._servers.values():
            server.channel.close()
        self._servers.clear()

    def close(self) -> None:
        """End them all, and wait for them."""
        self.end_unused(())
        for pid in self._ended:
            end_group(pid)
            os.waitpid(pid, 0)
        self._ended.clear()

    def _begin(self, pipeline_id: str, limit_s: float) -> _ForkServer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        supervisor = os.getpid()

        def run() -> int:
            if not begin_child(supervisor):
                return 0
            ours.close()
            self._leave_supervisor()
            return self._serve(pipeline_id, theirs, supervisor)

        try:
            pid = fork_child(run)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return _ForkServer(pid, ours, limit_s, self._clock())

    def _hear(self, pipeline_id: str, server: _ForkServer) -> None:
        """Take note of what a fork server says that is loading."""
        said = b""
        with contextlib.suppress(OSError):  # it has said nothing yet, or has ended, which `forget` is told
            said = server.channel.recv(_MOST_ANSWER_BYTES)
        load_s = self._clock() - server.started
        if said == _LOADED:
            server.is_loaded, server.load_s = True, load_s
        elif said.startswith(_REFUSED):
            self._refuse(pipeline_id, f"loading it {said.removeprefix(_REFUSED).decode(errors='replace')}")
        elif is_stopped(server.pid):
            self._refuse(pipeline_id, "its fork server is stopped")
        elif load_s > server.limit_s:
            self._refuse(pipeline_id, f"its fork server has not loaded it in {server.limit_s:g} s")

    def _refuse(self, pipeline_id: str, reason: str) -> None:
        """Have each process load a pipeline. Of a program with one for each epoch a reason is a warning once."""
        level = logging.INFO if reason in self._refused.values() else logging.WARNING
        _log.log(level, "pipeline=%s is loaded in each process, and in each pass: %s", pipeline_id[:8], reason)
        self._refused[pipeline_id] = reason
        if len(self._refused) > _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        if pipeline_id in self._servers:
            self._end(pipeline_id)

    def _end(self, pipeline_id: str) -> None:
        server = self._servers.pop(pipeline_id)
        server.channel.close()
        self._ended.add(server.pid)
        os.kill(server.pid, signal.SIGKILL)

    # --- in the fork server -----------------------------------------------------------------------------------------

    def _serve(self, pipeline_id: str, channel: socket.socket, supervisor: int) -> int:
        """Load a pipeline, and fork whatever the supervisor asks for."""
        use_one_thread()
        loaded, reason = self._load(pipeline_id)
        if reason:
            channel.send(_REFUSED + reason.encode()[: _MOST_ANSWER_BYTES - 1])
        else:
            channel.send(_LOADED)
            of = pipeline_id[:8], os.getpid(), loaded.kept_bytes
            _log.info("pipeline=%s loaded once for this host, in process %d: %d bytes", *of)
        os.kill(supervisor, signal.SIGCHLD)  # look here now
        if reason:
            return 0
        gc.freeze()  # what is here is shared with the children until they write to it
        while True:
            start_bytes, descriptors, _, _ = socket.recv_fds(channel, _MOST_REQUEST_BYTES, 2)
            if not start_bytes:
                return 0
            start = partial(self._start, channel, start_bytes, descriptors, loaded, supervisor)
            between = fork_child(start)
            with contextlib.suppress(ChildProcessError):  # loading has taken SIGCHLD: who ends is waited for there
                os.waitpid(between, 0)
            for descriptor in descriptors:
                os.close(descriptor)
            # Who was forked needs the bytes no more. Those that left for it had them mapped; the last one is gone now.
            self._exchange.give_back(pipeline_id)

    def _load(self, pipeline_id: str) -> tuple[LoadedProgram, str]:
        """Load a pipeline, and say why processes cannot be forked with it."""
        loaded = LoadedProgram()
        pickled = self._exchange.find(pipeline_id)
        if pickled is None:
            return loaded, "failed: its bytes are not shared"
        adopt_orphans(True)  # what loading has started is then a child, whoever of them started it
        before = Holdings.now()
        try:
            with ForksEndHere():
                loaded.keep(pickled)
        except Exception as error:  # noqa: BLE001, user code: each process will see for itself
            return loaded, f"failed: {error}"
        holdings = Holdings.now()
        if holdings.threads - before.threads:
            _end_threads_that_forks_end()
            holdings = Holdings.now()
        reason = holdings.why_not_fork(before)
        adopt_orphans(False)
        return loaded, reason

    # --- in what it forks -------------------------------------------------------------------------------------------

    def _start(
        self, channel: socket.socket, start_bytes: bytes, descriptors: list[int], loaded: LoadedProgram, supervisor: int
    ) -> int:
        """Fork the process, which is the supervisor's child as soon as this one has ended."""
        channel.close()
        page, stacks, between = WorkPage(descriptors[0]), StackFile(descriptors[1]), os.getpid()

        def run() -> int:
            while os.getppid() == between:
                time.sleep(_LOOK_AGAIN_S)
            if not begin_child(supervisor):
                return 0
            page.pid = os.getpid()
            deadline = time.monotonic() + _NOTICED_S
            while not page.is_known:
                if time.monotonic() > deadline:
                    return FRESH_PROCESS
                time.sleep(_LOOK_AGAIN_S)
            return self._run(start_bytes, page, stacks, loaded)

        fork_child(run)
        return 0


def _end_threads_that_forks_end() -> None:
    """Fork once: libraries with handlers of forks (pthread_atfork(3)), such as OpenBLAS, end their threads before it.

    They begin them anew when they are next used. scipy has such a thread as soon as it is imported.
    """
    pid = fork_child(lambda: 0)
    with contextlib.suppress(ChildProcessError):  # loading has taken SIGCHLD: who ends is waited for there
        os.waitpid(pid, 0)
