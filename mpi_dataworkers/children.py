"""Child processes that run user code: of the supervisor of a data worker, and of a trainer; each leads a group."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

# From prctl(2).
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Those that a supervisor holds back while it forks, and those that tell it or a child to end.
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
HELD_SIGNALS = (*END_SIGNALS, signal.SIGCHLD)
# Exit codes: of whatever leaves a child without a word of its own, where another process may do better; and of one that
# makes room for a fresh process, because what Python has loaded stays loaded.
_NO_WORD = 2
FRESH_PROCESS = 4
_OOM_SCORE = Path("/proc/self/oom_score_adj")


def fork_child(run: Callable[[], int]) -> int:
    """Fork a process that ends with the code that `run` returns, and give its process id."""
    flush_output()  # what is in its buffers is written once
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of forks where threads are
        pid = os.fork()
    if pid:
        return pid
    code = _NO_WORD
    try:
        code = run()
    except BaseException:  # noqa: BLE001, the process's boundary: above it is a copy of the parent's work
        traceback.print_exc()
    finally:
        end_process(code)


def end_process(code: int) -> NoReturn:
    """End this process without a word to what its parent has set up, but for what user code has printed."""
    try:
        flush_output()
    finally:
        os._exit(code)


def flush_output() -> None:
    """Write what user code has printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # user code may have closed it, or put anything in its place
            stream.flush()


def begin_child(parent: int) -> bool:
    """Be a child that ends with its parent, leads a group with all that user code starts, and ends by a signal.

    Returns:
        Whether the parent is still there.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return False
    os.setpgid(0, 0)
    go_first()
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    return True


def stop_at_signals(stop: Callable[[], object]) -> None:
    """Call a function when this process is to end; what user code forks has Python's own handlers, and ends at once.

    So `multiprocessing`'s `terminate()` and `Pool` work in samples. While a process is forked the signals wait: Python
    forgets in the new one what has come for a handler of its parent.
    """
    held = threading.local()

    def handle(*_: object) -> None:
        stop()

    def before() -> None:
        held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held.mask)

    def after_in_child() -> None:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        after()

    for number in END_SIGNALS:
        signal.signal(number, handle)
    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


def go_first() -> None:
    """Be ended before all other processes where memory is short, with what user code starts in this one.

    The kernel ends the process with the most memory and points: 1000 points are as much as all memory of the control
    group or the host (proc(5), oom_score_adj). Anybody may raise his own. So a sample that takes too much ends the
    process that makes it, and not the supervisor, the dispatcher or the trainer beside it.
    """
    with contextlib.suppress(OSError):  # a container may not let it
        _OOM_SCORE.write_text("1000")


@contextlib.contextmanager
def going_first() -> Iterator[None]:
    """Be so for a while."""
    before = None
    with contextlib.suppress(OSError):
        before = _OOM_SCORE.read_text()
    go_first()
    yield
    with contextlib.suppress(OSError):
        if before is not None:
            _OOM_SCORE.write_text(before)


def adopt_orphans(adopts: bool) -> None:
    """Become the parent of the processes below this one whose own parent ends, or be it no longer."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts))


def is_signalled() -> bool:
    """Whether this process is to end, but holds the signal back."""
    return not signal.sigpending().isdisjoint(END_SIGNALS)


def end_group(pid: int) -> None:
    """End what a process has started and left behind: it is of the same group, unless it chose another."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Whether a process is there and does not run, by a signal or a debugger (proc(5))."""
    return _state_of(pid) in (b"T", b"t")


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits for its parent to hear of it."""
    return _state_of(pid) in (b"", b"Z", b"X")


def _state_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):  # there may be no descriptor left
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    return b""
