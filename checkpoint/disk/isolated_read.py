"""Reading what others may have made in a process of its own: a library of C that a file leads astray ends that process
alone. Called by `hetstream ckpt convert`, which reads pickles.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar, cast

from hetstream.base.errors import HetstreamError
from hetstream.base.files import UntrustedFile
from hetstream.base.limits import lower
from hetstream.checkpoint.disk.rank_file import Bounds, explained
from hetstream.checkpoint.errors import DamagedCheckpoint, first_line

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# For what a conversion does when it is interrupted: it removes what it has written.
_GRACE_S = 3.0

T = TypeVar("T")


def read_apart(source: Path, read: Callable[[], T]) -> T:
    """Read a file or a directory in a forked process, within the bounds of its size on disk.

    The kernel ends a process that takes too long, in a loop of C too, where no handler of Python would run.

    Args:
        source: what is read.
        read: does so; what it gives, or raises, is pickled.

    Raises:
        DamagedCheckpoint: it takes more memory or time than what is right can take, or a library did not survive it.
    """
    bounds = Bounds.of(source)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_read, args=(bounds, read, sender, os.getpid()), daemon=True)
    with receiver:
        process.start()
        sender.close()
        try:
            outcome = receiver.recv()
        except EOFError:
            outcome = None
        finally:
            exit_code = _end_of(process)
    if outcome is None:
        raise _died(bounds, exit_code)
    result, error = outcome
    if error is not None:
        raise error
    return cast(T, result)


def _died(bounds: Bounds, exit_code: int) -> DamagedCheckpoint:
    if exit_code == -signal.SIGXCPU:
        return bounds.time_exceeded()
    how = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
    return DamagedCheckpoint(
        f"{bounds.source}: the process that read it has ended with {how}: it is damaged, or a trap"
    )


def _read(bounds: Bounds, read: Callable[[], Any], sender: Connection, parent: int) -> None:
    """What the process does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before that: the signal will never come
        os._exit(1)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # OpenMP's threads do not survive a fork
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    lower(bounds.memory_bytes, bounds.cpu_s)
    outcome: tuple[Any, BaseException | None]
    try:
        with explained(bounds):
            outcome = read(), None
    except BaseException as error:  # noqa: BLE001, it is raised in the other process
        _log.debug("%s cannot be read", bounds.source, exc_info=True)
        outcome = None, _reported(bounds, error)
    sender.send(outcome)


def _reported(bounds: Bounds, error: BaseException) -> BaseException:
    """What is raised in the other process: what is meant for the user, or what a library did not expect of a file."""
    if isinstance(error, HetstreamError | UntrustedFile | KeyboardInterrupt):
        return error
    if isinstance(error, OSError) and error.filename is not None:
        return error
    return DamagedCheckpoint(
        f"{bounds.source} cannot be converted: {first_line(error)}. It is damaged, or hetstream is: -v tells more"
    )


def _end_of(process: ForkProcess) -> int:
    """Wait for the end of a process, or bring it about when nobody waits for the result any more: after Ctrl-C, which
    it mostly has got as well. Its exit code."""
    process.join(_GRACE_S)
    if process.is_alive() and process.pid:
        os.kill(process.pid, signal.SIGINT)
        process.join(_GRACE_S)
    if process.is_alive():
        process.kill()
        process.join()
    exit_code = process.exitcode
    process.close()
    assert exit_code is not None
    return exit_code
