"""The processes of one data worker: one for each CPU, forked here, watched, replaced when they die or hang.

Called by `hetstream worker`. Each child runs a `worker.DataWorker` and ends when the dispatcher says so. A child that
is at one sample for longer than the loader's `sample_timeout_s` has its stack taken and is killed. What became of a
child goes to the dispatcher with its replacement's registration.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
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

from mpi_dataworkers.address import ServiceAddress, has_ended, wait_for_address_file
from mpi_dataworkers.ending import Ending
from mpi_dataworkers.errors import HetstreamError, ServiceEnded
from mpi_dataworkers.exchange import Exchange
from mpi_dataworkers.memory import keep_freed_memory
from mpi_dataworkers.messages import Fate
from mpi_dataworkers.ops.pipeline import seed_generators, use_one_thread
from mpi_dataworkers.watch import StackFile, Work, WorkPage, count_oom_kills, fate_of, how_it_ended
from mpi_dataworkers.worker import CONNECT_TIMEOUT_S, DataWorker

_log = logging.getLogger(__name__)

# A process that dies again and again this soon after its start, before it came to user code, has a cause that a restart
# does not cure. (What dies of user code, the dispatcher counts for its step.)
_EARLY_DEATH_S = 10.0
_MAX_EARLY_DEATHS = 5
# How often hung processes are looked for, and how long a stack may take.
_WATCH_S = 0.25
_STACK_S = 1.0
# A data worker that has made nothing for so long may start anew in another Python environment.
_IDLE_S = 30.0
_STACK_SIGNAL = signal.SIGRTMAX - 1
_PR_SET_PDEATHSIG = 1
# Exit code of a process that makes room for a fresh one: what Python has loaded stays loaded.
FRESH_PROCESS = 4
# What `run_data_workers` returns when its caller is to go on in another Python environment.
CHANGE = -1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class _Child:
    """One data worker process.

    Attributes:
        slot: its place; processes for several programs may be in one.
        num_asked: how often it has asked for another process there, as far as was looked.
    """

    worker_id: str
    slot: str
    page: WorkPage = field(default_factory=WorkPage)
    stacks: StackFile = field(default_factory=StackFile)
    started: float = field(default_factory=time.monotonic)
    hung: Work | None = None
    num_asked: int = 0

    def close(self) -> None:
        self.page.close()
        self.stacks.close()


def _is_signalled() -> bool:
    """Whether this process is to end, but holds the signal back."""
    return not signal.sigpending().isdisjoint(_SIGNALS)


def _end_group(pid: int) -> None:
    """End what a process has started and left behind: it is of the same group, unless it chose another."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def run_data_workers(
    address_file: Path,
    num_processes: int,
    cache_bytes: int,
    num_threads: int = 1,
    wants_change: Callable[[], bool] = lambda: False,
) -> int:
    """Fork data worker processes, restart those that die, and wait until the service ends.

    Args:
        address_file: the dispatcher's address file.
        num_processes: how many; one for each CPU of this data worker.
        cache_bytes: finished batches that each process keeps for other loaders that share them.
        num_threads: that make the samples of a batch in each process, where the dataset is thread-safe.
        wants_change: asked about once a second whether to end, in order, while nothing is made.

    Returns:
        Exit code: 0 after an orderly end, 1 when processes died too often or could not work. `CHANGE` when it ended
        because of `wants_change`, and nobody wants it to end for good: signals then do what they do by default.
    """
    service = wait_for_address_file(address_file, CONNECT_TIMEOUT_S)
    ended = partial(has_ended, address_file)
    return _Supervisor(service, ended, cache_bytes, Exchange(), num_threads, wants_change).run(num_processes)


class _Supervisor:
    """Keeps the processes going."""

    def __init__(
        self,
        service: ServiceAddress,
        ended: Callable[[], bool],
        cache_bytes: int,
        exchange: Exchange,
        num_threads: int,
        wants_change: Callable[[], bool],
    ) -> None:
        self._wants_change = wants_change
        self._changes = False
        self._exchange = exchange
        self._num_threads = num_threads
        self._service, self._has_ended = service, ended
        self._cache_bytes = cache_bytes
        self._children: dict[int, _Child] = {}
        self._stopping = False
        self._ending = Ending()
        self._early_deaths = 0
        self._failed = False
        self._oom_kills = count_oom_kills()

    def run(self, num_processes: int) -> int:
        seed_generators(0)  # NumPy loads its generators at the first use; the children have them then
        gc.freeze()  # what is here is shared with the children until they write to it
        # Blocked but where it waits: none comes between a fork and its entry in `_children`.
        signal.pthread_sigmask(signal.SIG_BLOCK, (*_SIGNALS, signal.SIGCHLD))
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        for _ in range(num_processes):
            self._start("", None, secrets.token_hex(8))
        while self._children:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            signal.sigtimedwait([signal.SIGCHLD], self._ending.next_look_s(time.monotonic(), _WATCH_S))
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            if not self._stopping and self._is_idle() and self._wants_change():
                self._changes = True
                self._stop()
            for pid, child in list(self._children.items()):
                if not self._stopping:
                    self._look_at(pid, child)
                elif self._ending.is_overdue(time.monotonic(), child.page.read() is not None):
                    os.kill(pid, signal.SIGKILL)
            # Looked at before it is reaped: until then no other process gets its id.
            while self._children and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
                if (ended.si_code, ended.si_status) != (os.CLD_EXITED, 0) or self._is_at_work(ended.si_pid):
                    _end_group(ended.si_pid)
                pid, status = os.waitpid(ended.si_pid, 0)
                self._reap(pid, os.waitstatus_to_exitcode(status))
        self._exchange.close()
        if self._changes:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_SIGNALS, signal.SIGCHLD))
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
            self._ending = Ending(time.monotonic())
        self._stopping = True
        for pid, child in self._children.items():
            child.page.ending = self._ending
            os.kill(pid, signal.SIGTERM)

    def _look_at(self, pid: int, child: _Child) -> None:
        """Fork another process where one asks for it; end one that hangs, with its stack in hand."""
        if (num_asked := child.page.num_asked) > child.num_asked:
            child.num_asked = num_asked
            self._start("", None, child.slot)
        work = child.page.read()
        if work is None or child.hung or time.monotonic() - work.since < work.limit_s:
            return
        child.hung = work
        # `faulthandler` writes in the signal handler itself, so it needs no GIL.
        os.kill(pid, _STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_S
        before = ""
        while time.monotonic() < deadline and not _is_signalled() and (not before or child.stacks.read() != before):
            before = child.stacks.read()
            time.sleep(0.02)
        if child.page.read() == work:
            os.kill(pid, signal.SIGKILL)
        else:
            child.hung = None  # the signal has ended the system call that it waited in

    def _is_at_work(self, pid: int) -> bool:
        child = self._children.get(pid)
        return child is not None and child.page.read() is not None

    def _reap(self, pid: int, code: int) -> None:
        child = self._children.pop(pid, None)
        if child is None:
            return
        page, stack = child.page, child.stacks.read()
        work, num_steps = page.read(), page.num_steps
        child.close()
        oom_kills, self._oom_kills = self._oom_kills, count_oom_kills()
        # User code may end the process with any code; only where none ran does the code say what we meant by it.
        own_code = code if work is None else None
        if own_code == FRESH_PROCESS and not self._stopping:
            self._start("", None, child.slot)
            return
        if own_code in (0, FRESH_PROCESS) or (self._stopping and not child.hung):
            return
        if child.hung:
            reason = f"hung: it was at one sample for longer than sample_timeout_s={child.hung.limit_s:g}"
        else:
            reason = how_it_ended(code, self._oom_kills > oom_kills)
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
            self._start(child.worker_id, fate, child.slot)

    def _start(self, replaces: str, fate: Fate | None, slot: str) -> None:
        child = _Child(secrets.token_hex(16), slot)
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._children[pid] = child
            return
        code = 2  # of whatever leaves it without a word of its own: another process may do better
        try:
            code = self._child_main(child, replaces, fate, parent)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _child_main(self, child: _Child, replaces: str, fate: Fate | None, parent: int) -> int:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return 1
        os.setpgid(0, 0)  # a group of its own, with all that user code starts
        # Until it is connected a signal simply ends it.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_SIGNALS, signal.SIGCHLD))
        faulthandler.register(_STACK_SIGNAL, file=child.stacks.descriptor, all_threads=True)
        for other in self._children.values():
            other.close()
        use_one_thread()
        keep_freed_memory()
        try:
            options = self._cache_bytes, child.page, fate, False, self._exchange, self._num_threads, self._has_ended
            worker = DataWorker(self._service, child.worker_id, replaces, *options, child.slot)
            for number in _SIGNALS:
                signal.signal(number, lambda *_: worker.stop())
            worker.run()
            if worker.wants_renewal:
                return FRESH_PROCESS
        except ServiceEnded as ended:
            _log.info("%s", ended)
        except HetstreamError as error:
            sys.stderr.write(f"hetstream worker: {type(error).__name__}: {error}\n")
            return 1
        except Exception:  # noqa: BLE001, the process's boundary: say it, and let the parent see the code
            traceback.print_exc()
            return 2
        return 0
