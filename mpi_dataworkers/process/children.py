"""Child processes that run user code: of the supervisor of a data worker, and of a trainer; each leads a group."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TextIO

from hetstream.base.posix import register_at_fork, signals
from hetstream.base.process import generation

# From prctl(2).
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Those that a supervisor holds back while it forks, and those that tell it or a child to end.
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
HELD_SIGNALS = (*END_SIGNALS, *signals("SIGCHLD"))
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
    register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


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
    """Return whether this process is to end, but holds the signal back."""
    return not signal.sigpending().isdisjoint(END_SIGNALS)


def end_group(pid: int) -> None:
    """End what a process has started and left behind: it is of the same group, unless it chose another."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Return whether a process is there and does not run, by a signal or a debugger (proc(5))."""
    return _state_of(pid) in (b"T", b"t")


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or waits for its parent to hear of it."""
    return _state_of(pid) in (b"", b"Z", b"X")


def _state_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):  # there may be no descriptor left
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    return b""


# Around user code: what it forks does not go on as a second copy of the process that called it.


class ForksEndHere:
    """A process that was forked inside, and comes out, ends: with the code of a `sys.exit`, with 1 after another
    exception. Torch's worker processes let such processes end in the same way."""

    __slots__ = ("_generation",)

    def __enter__(self) -> None:
        self._generation = generation()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if generation() != self._generation:
            _end(error)


def _end(error: BaseException | None) -> None:
    code = 1
    try:
        met: set[int] = set()
        while error is not None and error.__cause__ is not None and id(error) not in met:  # `raise error from error`
            met.add(id(error))
            error = error.__cause__
        if error is None or (isinstance(error, SystemExit) and error.code is None):
            code = 0
        elif isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
        elif isinstance(error, SystemExit):
            sys.stderr.write(f"{error.code}\n")
        else:
            traceback.print_exception(error)
    finally:
        end_process(code & 0xFF)


# hetstream's own log lines in a data worker, apart from what the program's code writes and logs there.

_STANDARD_OUTPUTS = (1, 2)
_log_file: TextIO | None = None


def keep_apart(path: Path | None) -> None:
    """Leave the root logger to the program, as it is in torch's worker processes.

    Args:
        path: file that hetstream's lines are appended to; None where they go on to standard error.
    """
    global _log_file
    root, ours = logging.getLogger(), logging.getLogger("hetstream")
    if path is not None:
        _log_file = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    for handler in list(root.handlers):
        root.removeHandler(handler)
        ours.addHandler(handler)
        if _log_file is not None and isinstance(handler, logging.StreamHandler):
            handler.setStream(_log_file)
    ours.setLevel(root.level)
    ours.propagate = False
    root.setLevel(logging.WARNING)


@contextlib.contextmanager
def imported_again() -> Iterator[None]:
    """Put what modules write while they are imported, and objects while they are unpickled, into the log file: of the
    program's own imports it has been shown, and torch's worker processes import nothing again."""
    if _log_file is None:
        yield
        return
    flush_output()
    kept = [os.dup(descriptor) for descriptor in _STANDARD_OUTPUTS]
    try:
        for descriptor in _STANDARD_OUTPUTS:
            os.dup2(_log_file.fileno(), descriptor)
        yield
    finally:
        flush_output()
        for descriptor, before in zip(_STANDARD_OUTPUTS, kept, strict=True):
            os.dup2(before, descriptor)
            os.close(before)
