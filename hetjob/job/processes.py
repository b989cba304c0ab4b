"""Child processes that cannot outlive their parent, and waiting for signals.

Used by the job master and the local backend. It never decides when a child starts or stops; `service.py` does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hetstream.base.files import Directory, temporary_place
from hetstream.base.process import FATAL, STOP_OF_PARENT, is_in_step

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: a child between fork and exec must not load libraries


class _ToldTwice(subprocess.Popen[bytes]):
    """A child that asks whether a SIGTERM is Slurm's or its parent's: its parent sends another signal beside it."""

    def terminate(self) -> None:
        super().terminate()
        self.send_signal(STOP_OF_PARENT)


def start_child(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    foreground: bool = False,
    death_signal: signal.Signals | None = signal.SIGTERM,
    ignored: Collection[int] = (),
    is_told_twice: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program that, unless told otherwise, gets a signal when this process dies, however it dies.

    Args:
        argv: the program and its arguments.
        env: its environment; None means this process's own.
        log: file that its output is appended to; None shares this process's output.
        foreground: keep the terminal, so that Ctrl-C reaches it. Otherwise it gets a session of its own and no input.
        death_signal: what it gets when this process dies; None lets it live on.
        ignored: signals that it ignores, unless it says otherwise.
        is_told_twice: in a step, `terminate` sends it STOP_OF_PARENT, too.

    Raises:
        OSError: the program could not be started.
    """
    output = None if log is None else log.open("ab")
    try:
        return (_ToldTwice if is_told_twice and is_in_step() else subprocess.Popen)(
            list(argv),
            env=None if env is None else dict(env),
            stdin=None if foreground else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=not foreground,
            preexec_fn=before_exec(os.getpid(), death_signal, ignored),
        )
    finally:
        if output is not None:
            output.close()


def before_exec(
    parent: int, death_signal: signal.Signals | None, ignored: Collection[int] = ()
) -> Callable[[], None]:  # fmt: skip
    """Return what a child does between fork and exec, so that it gets a signal when its parent dies, and blocks none.

    Args:
        parent: process that starts it.
        death_signal: as of `start_child`.
        ignored: as of `start_child`.
    """

    def prepare() -> None:
        if death_signal is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
            if os.getppid() != parent:  # the parent died before prctl: the signal will never come
                os._exit(1)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent blocks what it waits for; a program expects none

    return prepare


@contextmanager
def signals_held(signals: Collection[signal.Signals], *, and_all_others: bool = False) -> Iterator[None]:
    """Hold these signals, and SIGCHLD, for `next_signal` instead of acting on them. Main thread only.

    Args:
        signals: for `next_signal`.
        and_all_others: hold every signal that would end this process, too; nobody acts on those.
    """
    held = {*signals, signal.SIGCHLD, *(FATAL if and_all_others else ())}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        if and_all_others:
            while signal.sigtimedwait(FATAL, 0) is not None:
                pass  # what has come meanwhile is not to end this process now
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def next_signal(signals: Collection[int], timeout_s: float) -> signal.struct_siginfo | None:
    """Wait for one of the held signals, or for a child that ends, or until the time is over.

    Returns:
        The signal, or None for a child or the end of the time.
    """
    received = signal.sigtimedwait({*signals, signal.SIGCHLD}, max(0.0, timeout_s))
    return None if received is None or received.si_signo == signal.SIGCHLD else received


# Directories that live only as long as a command of this user, and what commands that were killed have left of them.
#
# Each has a file that its process holds locked, so the next command finds out which of them are nobody's any more. What
# is removed is looked at through descriptors: anybody can make names in /tmp.

log = logging.getLogger(__name__)

PREFIX = "hetstream-"
_LOCK_FILE = ".in-use"


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory of this user alone, removed at the end; first goes what killed commands have left."""
    place = temporary_place()
    remove_leftovers(place)
    unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=place))
    with Directory.open(unlocked) as directory:
        lock = directory.open_file(_LOCK_FILE, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)  # in a directory of mode 0700, which nobody else can enter
    path = unlocked.rename(place / unlocked.name.removeprefix("."))  # only now others would look at its lock
    try:
        yield path
    finally:
        try:
            with Directory.open(place) as outer:
                remove_tree(outer, path.name)
        finally:
            os.close(lock)


def remove_leftovers(place: Path) -> list[Path]:
    """Remove the directories there that killed commands of this user have left; returns them.

    One that is in use, is another user's, or is of something else is left alone.
    """
    removed = []
    for path in sorted(place.glob(f"{PREFIX}*")):
        try:
            if path.lstat().st_uid == os.geteuid() and _is_nobodys(path):
                with Directory.open(place) as outer:
                    remove_tree(outer, path.name)
                removed.append(path)
        except OSError as error:
            log.debug("%s stays: %s", path, error)
    if removed:
        log.info("removed what killed commands had left: %s", ", ".join(map(str, removed)))
    return removed


def _is_nobodys(path: Path) -> bool:
    """Whether its lock file is there and no process holds it."""
    with Directory.open(path) as directory:
        directory.check_own()
        try:
            lock = directory.open_file(_LOCK_FILE, os.O_RDWR)
        except FileNotFoundError:
            return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def remove_tree(outer: Directory, name: str) -> None:
    """Remove a directory of this user with all that is in it; links are removed, not followed.

    Raises:
        UntrustedFile: a directory in it is another user's, or others can write to it.
        OSError: something cannot be removed.
    """
    with outer.enter(name) as inner:
        for entry in inner.names():
            if inner.has_directory(entry):
                remove_tree(inner, entry)
            else:
                inner.unlink(entry, missing_ok=True)
    os.rmdir(name, dir_fd=outer.descriptor)
