"""The processes of one data worker: one for each CPU, forked here, watched, replaced when they die or hang.

Called by `hetstream internal worker`. Each child runs a `worker.DataWorker` and ends when the dispatcher says so. A
child that is at one sample for longer than the loader's `sample_timeout_s` has its stack taken and is killed. What
became of a child goes to the dispatcher with its replacement's registration.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import gc
import logging
import math
import os
import resource
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.errors import ServiceEnded
from hetstream.mpi_dataworkers.ops.cache_store import remove_from_memory
from hetstream.mpi_dataworkers.ops.pipeline import seed_generators, use_one_thread
from hetstream.mpi_dataworkers.process.children import (
    END_SIGNALS,
    FRESH_PROCESS,
    HELD_SIGNALS,
    adopt_orphans,
    begin_child,
    end_group,
    fork_child,
    is_signalled,
    stop_at_signals,
)
from hetstream.mpi_dataworkers.process.interpreter import keep_freed_memory
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, has_ended, wait_for_address_file
from hetstream.mpi_dataworkers.wire.messages import Fate
from hetstream.mpi_dataworkers.worker.fork_server import Exchange, ForkServers, LoadedProgram
from hetstream.mpi_dataworkers.worker.leases import CONNECT_TIMEOUT_S
from hetstream.mpi_dataworkers.worker.process import (
    LoadAnswer,
    MakeEarlierStage,
    ShutdownDeadlines,
    StackFile,
    Work,
    WorkerOptions,
    WorkerStart,
    WorkPage,
    count_oom_kills,
    fate_of,
    how_it_ended,
)
from hetstream.mpi_dataworkers.worker.worker import DataWorker

_log = logging.getLogger(__name__)

# A process that dies again and again this soon after its start, before it came to user code, has a cause that a restart
# does not cure. (What dies of user code, the dispatcher counts for its step.)
_EARLY_DEATH_S = 10.0
_MAX_EARLY_DEATHS = 5
# How often hung processes are looked for, and how long a stack may take.
_WATCH_S = 0.25
_MOST_BETWEEN_LOOKS_S = 0.5
_STACK_S = 1.0
# Time that a sample has left when its loader's pass has ended. torch gives its own worker processes as much:
# MP_STATUS_CHECK_INTERVAL in torch/utils/data/_utils/__init__.py.
_UNWANTED_S = 5.0
# Idle time after which a data worker may start anew in another Python environment.
_IDLE_S = 30.0
_STACK_SIGNAL = signal.SIGRTMAX - 1
# What `run_data_workers` returns when its caller is to go on in another Python environment.
CHANGE = -1


@dataclass
class _Child:
    """One data worker process.

    Attributes:
        start: what it was started with.
        num_asked: how often it has asked for another process in its slot, as far as was looked.
        seen, seen_at: what it was at when it was looked at last, and since when, in time in which the supervisor ran;
            of a lease whose step nobody waits for, the token.
    """

    start: WorkerStart
    page: WorkPage
    stacks: StackFile
    started: float = field(default_factory=time.monotonic)
    hung: Work | None = None
    num_asked: int = 0
    seen: Work | int | None = None
    seen_at: float = 0.0

    def close(self) -> None:
        self.page.close()
        self.stacks.close()


class _RunningClock:
    """Time in which this process and its children ran: a job may be suspended for longer than any sample may take.

    Attributes:
        now: s.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._before = time.monotonic()

    def advance(self, monotonic: float) -> None:
        """Go on to a time of the monotonic clock; what comes much later than the next look is due does not count."""
        self.now += min(monotonic - self._before, _MOST_BETWEEN_LOOKS_S)
        self._before = monotonic


def run_data_workers(
    address_file: Path,
    num_processes: int,
    cache_bytes: int,
    num_threads: int = 1,
    wants_change: Callable[[], bool] = lambda: False,
    make_earlier: MakeEarlierStage | None = None,
) -> int:
    """Fork data worker processes, restart those that die, and wait until the service ends.

    Args:
        address_file: the dispatcher's address file.
        num_processes: how many; one for each CPU of this data worker.
        cache_bytes: finished batches that each process keeps for other loaders that share them.
        num_threads: that make the samples of a batch in each process, where the dataset is thread-safe.
        wants_change: asked about once a second whether to end, in order, while nothing is made.
        make_earlier: as in `WorkerOptions`.

    Returns:
        Exit code: 0 after an orderly end, 1 when processes died too often or could not work. `CHANGE` when it ended
        because of `wants_change`, and nobody wants it to end for good: signals then do what they do by default.
    """
    service = wait_for_address_file(address_file, CONNECT_TIMEOUT_S)
    ended = partial(has_ended, address_file)
    # One alone shares with nobody.
    options = WorkerOptions(cache_bytes, num_threads, forks_anew=num_processes > 1, make_earlier=make_earlier)
    return _Supervisor(service, ended, options, Exchange(), wants_change).run(num_processes)


class _Supervisor:
    """Keeps the processes going."""

    def __init__(
        self,
        service: ServiceAddress,
        ended: Callable[[], bool],
        options: WorkerOptions,
        exchange: Exchange,
        wants_change: Callable[[], bool],
    ) -> None:
        self._wants_change = wants_change
        self._changes = False
        self._exchange = exchange
        self._service, self._has_ended = service, ended
        self._options = options
        self._children: dict[int, _Child] = {}
        self._clock = _RunningClock()
        self._fork_servers = ForkServers(exchange, self._leave, self._be_data_worker, lambda: self._clock.now)
        self._stopping = False
        self._deadlines = ShutdownDeadlines()
        self._early_deaths = 0
        self._to_start: collections.deque[tuple[WorkerStart, str]] = collections.deque()  # with which pipeline
        self._said_full = False
        self._files_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._failed = False
        self._oom_kills = count_oom_kills()

    def run(self, num_processes: int) -> int:
        seed_generators(0)  # NumPy loads its generators at the first use; the children have them then
        gc.freeze()  # what is here is shared with the children until they write to it
        # Blocked but where it waits: none comes between a fork and its entry in `_children`.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
        for number in END_SIGNALS:
            signal.signal(number, self._on_signal)
        # Three descriptors for each process; those have what the user has set.
        most = self._files_limit[1]
        with contextlib.suppress(ValueError, OSError):  # beyond what the system gives anybody
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        adopt_orphans(True)
        for _ in range(num_processes):
            self._start(secrets.token_hex(8))
        while self._children or (self._to_start and not self._stopping):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
            signal.sigtimedwait([signal.SIGCHLD], self._deadlines.next_look_s(time.monotonic(), _WATCH_S))
            signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
            self._clock.advance(time.monotonic())
            if not self._stopping and self._is_idle() and self._wants_change():
                self._changes = True
                self._stop()
            for pid, child in list(self._children.items()):
                if not self._stopping:
                    self._look_at(pid, child)
                elif self._deadlines.is_overdue(time.monotonic(), child.page.read() is not None):
                    os.kill(pid, signal.SIGKILL)
            # Looked at before it is reaped: until then no other process gets its id.
            while self._children and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                oom_kills, self._oom_kills = self._oom_kills, count_oom_kills()
                how = how_it_ended(code, self._oom_kills > oom_kills)
                if self._leaves_something(ended.si_pid, how):
                    end_group(ended.si_pid)
                os.waitpid(ended.si_pid, 0)
                self._reap(ended.si_pid, code, how)
            self._fork_servers.end_unused(self._wanted())
            if not self._stopping:
                self._start_all()
        self._fork_servers.close()
        self._exchange.close()
        remove_from_memory()
        resource.setrlimit(resource.RLIMIT_NOFILE, self._files_limit)
        if self._changes:
            for number in END_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
            return CHANGE
        return 1 if self._failed else 0

    def _is_idle(self) -> bool:
        """Whether none of its processes has made a step for a while, or ever."""
        made_at = max((child.page.made_at for child in self._children.values()), default=0.0)
        return not made_at or time.monotonic() - made_at > _IDLE_S

    def _on_signal(self, _: int, __: object) -> None:
        self._changes = False
        self._stop()

    def _stop(self) -> None:
        if not self._stopping:
            self._deadlines = ShutdownDeadlines(time.monotonic())
        self._stopping = True
        for pid, child in self._children.items():
            child.page.deadlines = self._deadlines
            os.kill(pid, signal.SIGTERM)

    def _look_at(self, pid: int, child: _Child) -> None:
        """Fork another process where one asks for it; end one that hangs, with its stack in hand."""
        if (num_asked := child.page.num_asked) > child.num_asked:
            child.num_asked = num_asked
            self._start(child.start.slot)
        pipeline_id, limit_s = child.page.wished
        if pipeline_id and child.page.answer is LoadAnswer.WAIT:
            child.page.answer = self._fork_servers.answer(pipeline_id, limit_s)
        work = child.page.read()
        if work is not None and child.page.deadlines.is_overdue(time.monotonic(), True):
            os.kill(pid, signal.SIGKILL)  # it was told to leave for a fresh one, and user code does not let it
            return
        is_unwanted = work is not None and work.token == child.page.unwanted
        at = work.token if work is not None and is_unwanted else work
        if at != child.seen:
            child.seen, child.seen_at = at, self._clock.now
        if work is None or child.hung:
            return
        if self._clock.now - child.seen_at < (_UNWANTED_S if is_unwanted else work.limit_s):
            return
        child.hung = work
        # `faulthandler` writes in the signal handler itself, so it needs no GIL.
        os.kill(pid, _STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_S
        before = ""
        while time.monotonic() < deadline and not is_signalled() and (not before or child.stacks.read() != before):
            before = child.stacks.read()
            time.sleep(0.02)
        now_at = child.page.read()
        if now_at == work or (is_unwanted and now_at is not None and now_at.token == work.token):
            os.kill(pid, signal.SIGKILL)
        else:
            child.hung = None  # the signal has ended the system call that it waited in

    def _leaves_something(self, pid: int, how: str) -> bool:
        """Whether what an ended process has started may be left: a sample's pool outlives an orderly end, too."""
        # What has lost its parent comes here, and is no process of ours.
        return pid in self._children or self._fork_servers.forget(pid, how)

    def _wanted(self) -> set[str]:
        """Pipelines that processes were forked with, or want to be forked with."""
        if self._stopping:
            return set()
        children = self._children.values()
        return {child.page.shares for child in children} | {child.page.wished[0] for child in children}

    def _reap(self, pid: int, code: int, how: str) -> None:
        child = self._children.pop(pid, None)
        if child is None:
            return
        page, stack = child.page, child.stacks.read()
        work, num_steps, wished, shares = page.read(), page.num_steps, page.wished[0], page.shares
        was_told = page.deadlines.told_at < math.inf
        child.close()
        # User code may end the process with any code; only where none ran does the code say what we meant by it.
        own_code = code if work is None else None
        if (own_code == FRESH_PROCESS or was_told) and not self._stopping:
            self._start(child.start.slot, wished)
            return
        if own_code in (0, FRESH_PROCESS) or (self._stopping and not child.hung):
            return
        if child.hung and child.seen == child.hung.token:
            reason = f"was still at a step {_UNWANTED_S:g} s after its loader's pass had ended"
        elif child.hung:
            reason = f"hung: it was at one sample for longer than sample_timeout_s={child.hung.limit_s:g}"
        else:
            reason = how
        fate = fate_of(reason, child.hung or work, stack, socket.gethostname(), pid)
        _log.warning("data worker process %d %s%s", pid, reason, f"; its stack:\n{stack}" if stack else "")
        early = num_steps == 0 and time.monotonic() - child.started < _EARLY_DEATH_S
        self._early_deaths = self._early_deaths + 1 if early else 0
        if self._stopping:
            return
        if own_code == 1:
            self._failed = True  # it said why on stderr; the same would happen again
        elif self._early_deaths > _MAX_EARLY_DEATHS:
            _log.error("data worker processes died %d times in a row; this data worker gives up", self._early_deaths)
            self._failed = True
        else:
            self._start(child.start.slot, wished or shares, child.start.worker_id, fate)

    def _start(self, slot: str, pipeline_id: str = "", replaces: str = "", fate: Fate | None = None) -> None:
        """Start a process, with a pipeline if a fork server has loaded it."""
        self._to_start.append((WorkerStart(secrets.token_hex(16), slot, replaces, fate), pipeline_id))
        self._start_all()

    def _start_all(self) -> None:
        """Start what is to be started; later, where the system has no process or descriptor to spare."""
        while self._to_start:
            try:
                self._fork(*self._to_start[0])
            except OSError as error:
                if not self._said_full:
                    _log.warning("no data worker process can be started now, it is tried again: %s", error)
                self._said_full = True
                return
            self._said_full = False
            self._to_start.popleft()

    def _fork(self, start: WorkerStart, pipeline_id: str) -> None:
        with contextlib.ExitStack() as undo:
            page = undo.enter_context(contextlib.closing(WorkPage()))
            stacks = undo.enter_context(contextlib.closing(StackFile()))
            start_bytes, page.shares = msgspec.msgpack.encode(start), pipeline_id
            pid = self._fork_servers.fork(pipeline_id, start_bytes, page, stacks)
            if pid is None:
                page.shares = ""
                supervisor = os.getpid()

                def run() -> int:
                    if not begin_child(supervisor):
                        return 1
                    self._leave()
                    return self._be_data_worker(start_bytes, page, stacks, LoadedProgram())

                pid = fork_child(run)
            self._children[pid] = _Child(start, page, stacks)
            undo.pop_all()

    def _leave(self) -> None:
        """In a child: give up what is for others."""
        for other in self._children.values():
            other.close()
        self._fork_servers.leave()
        resource.setrlimit(resource.RLIMIT_NOFILE, self._files_limit)

    def _be_data_worker(self, start_bytes: bytes, page: WorkPage, stacks: StackFile, loaded: LoadedProgram) -> int:
        start = msgspec.msgpack.decode(start_bytes, type=WorkerStart)
        faulthandler.register(_STACK_SIGNAL, file=stacks.descriptor, all_threads=True)
        if loaded.program is None:  # else what the program has set since then holds
            use_one_thread()
        keep_freed_memory()
        try:
            worker = DataWorker(self._service, start, self._options, self._has_ended, page, self._exchange, loaded)
            stop_at_signals(worker.stop)
            worker.run()
            if worker.wants_renewal:
                return FRESH_PROCESS
        except ServiceEnded as ended:
            _log.info("%s", ended)
        except HetstreamError as error:
            sys.stderr.write(f"hetstream internal worker: {error}\n")
            return 1
        except Exception:  # noqa: BLE001, the process's boundary: say it, and let the parent see the code
            traceback.print_exc()
            return 2
        return 0
