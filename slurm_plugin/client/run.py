"""Run Slurm's commands. Called by everything in `slurm_plugin` that talks to Slurm; the only place that starts them.

It never parses what a command prints, never retries, and never goes through a shell. Of a command that does not answer
it logs a line now and then.
"""

from __future__ import annotations

import enum
import errno
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from hetstream.hetjob.errors import SlurmCommandError

# slurmctld answers within milliseconds; a client gives up on a silent one after its own MessageTimeout (10 s) and
# retries, so a minute means that something is broken for good.
DEFAULT_TIMEOUT_S = 60.0

# sacct asks a slurmdbd that is gone for 40 seconds: whoever waits is told so.
_QUIET_S = 10.0
logger = logging.getLogger(__name__)

# What a shell reports for the same failures, so that callers can compare exit codes.
EXIT_TIMED_OUT = 124
EXIT_NOT_FOUND = 127


@dataclass(frozen=True)
class CompletedCommand:
    """A command that exited with 0.

    Attributes:
        argv: the command as it was run.
        stdout: what it printed.
        stderr: its warnings.
    """

    argv: tuple[str, ...]
    stdout: str
    stderr: str


def run_slurm(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    hint: str = "",
    cwd: str | None = None,
) -> CompletedCommand:
    """Run one Slurm command and return what it printed.

    Args:
        argv: the program and its arguments.
        env: the whole environment of the command; None means this process's own.
        stdin: text for its standard input (a script for `sbatch`).
        timeout_s: the command is killed after this many seconds.
        hint: the next command to run, shown to the user if this one fails.
        cwd: where the command runs; None means this process's own directory.

    Raises:
        SlurmCommandError: it exited with anything but 0, is not installed, or took longer than `timeout_s`.
    """
    try:
        done = _run(argv, env, stdin, timeout_s, cwd)
    except subprocess.TimeoutExpired as exc:
        raise SlurmCommandError(
            argv, EXIT_TIMED_OUT, _text(exc.stdout), f"no answer within {timeout_s:g} s", hint or "Check: scontrol ping"
        ) from exc
    except (OSError, ValueError) as exc:  # ValueError: a word with a zero byte, which no program can be given
        raise _cannot_start(argv, exc) from exc
    if done.returncode != 0:
        raise SlurmCommandError(argv, done.returncode, done.stdout, done.stderr, hint)
    return CompletedCommand(tuple(argv), done.stdout, done.stderr)


def _run(
    argv: Sequence[str], env: Mapping[str, str] | None, stdin: str, timeout_s: float, cwd: str | None
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, with a line about each further time in which nothing came."""
    began_s, piped = time.monotonic(), subprocess.PIPE
    with subprocess.Popen(
        list(argv), env=env, stdin=piped, stdout=piped, stderr=piped, text=True, errors="replace", cwd=cwd
    ) as process:
        data: str | None = stdin
        while True:
            waited_s = time.monotonic() - began_s
            try:
                stdout, stderr = process.communicate(data, timeout=max(0.0, min(_QUIET_S, timeout_s - waited_s)))
                return subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)
            except subprocess.TimeoutExpired:
                waited_s, data = time.monotonic() - began_s, None
                if waited_s >= timeout_s:
                    process.kill()
                    raise
                logger.info("%s has not answered for %.0f s; it is given %g s", argv[0], waited_s, timeout_s)
            except BaseException:
                process.kill()
                raise


def become(argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> NoReturn:
    """Turn this process into a command: its standard streams, signals, process id and exit code are the user's.

    For commands that the user sees as if they had typed them (`hetstream sbatch`).

    Raises:
        SlurmCommandError: the command could not be started; otherwise this never returns.
    """
    # Python ignores these two, and what is ignored stays ignored across exec: `exec -- yes | head` would not end.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], list(argv), os.environ if env is None else env)
    except OSError as exc:
        raise _cannot_start(argv, exc) from exc


def _cannot_start(argv: Sequence[str], exc: OSError | ValueError) -> SlurmCommandError:
    reason = str(exc)
    advice = "Run this where Slurm's commands are installed"
    if isinstance(exc, OSError):
        reason = exc.strerror or reason
        advice = "Its words are longer than the kernel takes" if exc.errno == errno.E2BIG else advice
    return SlurmCommandError(argv, EXIT_NOT_FOUND, "", reason, advice)


def _text(captured: str | bytes | None) -> str:
    """The output of a timed-out command: `subprocess` gives bytes there even in text mode."""
    return captured.decode(errors="replace") if isinstance(captured, bytes) else captured or ""


# Which failures of Slurm's commands pass by themselves, and how long to wait. Used by the client.
#
# slurmctld answers "Resource temporarily unavailable" to an update in the first seconds after a submission (24.11 and
# 26.05), and under load connections time out. A request refused so had no effect; after a lost answer nobody knows.

# Together 12.6 s: longer than the 1-3 s that an update is refused after a submission, and than one MessageTimeout.
DELAYS_S = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4)

_BUSY = re.compile(
    "Resource temporarily unavailable|try again|Unable to contact slurm controller|Connection refused|"
    "Slurm backup controller in standby mode|Transport endpoint is not connected",
    re.IGNORECASE,
)
_LOST = re.compile("Socket timed out|Connection reset|Zero Bytes were transmitted|Communication.*error", re.IGNORECASE)


class Failure(enum.Enum):
    """What a failed command means for trying again."""

    REFUSED = "refused"  # slurmctld has decided
    BUSY = "busy"  # nothing happened
    LOST = "lost"  # it may have happened


def failure_of(error: SlurmCommandError) -> Failure:
    """Judge a failure by what the command said."""
    if error.returncode == EXIT_TIMED_OUT or _LOST.search(error.stderr):
        return Failure.LOST
    return Failure.BUSY if _BUSY.search(error.stderr) else Failure.REFUSED


def is_denied(error: SlurmCommandError) -> bool:
    """Return whether Slurm keeps this from the user (ESLURM_ACCESS_DENIED in slurm_errno.c, 22.05 to 26.05)."""
    return "Access/permission denied" in error.stderr


def is_of_scrontab(error: SlurmCommandError) -> bool:
    """Return whether Slurm refused because of a job of scrontab, which nobody can change, hold or requeue
    (slurm_errno.c).
    """
    return "scrontab" in error.stderr


_T = TypeVar("_T")


def with_retries(
    act: Callable[[], _T],
    *,
    find: Callable[[], _T | None] | None = None,
    repeatable: bool = True,
    sleep: Callable[[float], object] = time.sleep,
) -> _T:
    """Do something until it succeeds, is refused, or has failed too often.

    Args:
        act: what to do.
        find: looks, after a lost answer, for what the attempt before has done.
        repeatable: doing it twice does no harm. What is neither repeatable nor to be found fails with a lost answer.
        sleep: waits between two attempts, in seconds.

    Raises:
        SlurmCommandError: the last failure.
    """
    in_doubt = False
    for delay_s in DELAYS_S:
        try:
            found = find() if in_doubt and find else None
            if found is not None:
                return found
            in_doubt = False
            return act()
        except SlurmCommandError as error:
            failure = failure_of(error)
            if failure is Failure.REFUSED or (failure is Failure.LOST and not repeatable and find is None):
                raise
            in_doubt = in_doubt or failure is Failure.LOST
            sleep(delay_s)
    found = find() if in_doubt and find else None
    return act() if found is None else found
