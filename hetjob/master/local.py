"""The local backend: a program with data workers as processes of this host. Called by `hetstream run`.

No Slurm and no root. The same state machine as the job master's keeps the dispatcher and the data workers alive; the
program gets its signals and gives its exit code. Nothing outlives this process, even when it is killed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetstream.base.errors import UsageError
from hetstream.base.files import make_private
from hetstream.hetjob.errors import MasterError, ProgramNotFound
from hetstream.hetjob.job.ended_job import read_summary
from hetstream.hetjob.job.processes import next_signal, signals_held, start_child, temporary_directory
from hetstream.hetjob.master.children import Service
from hetstream.hetjob.master.state import DISPATCHER, MasterState, Phase, data_worker, log_name
from hetstream.hetjob.ports import Child
from hetstream.mpi_dataworkers.process.config import environment_with_hash_seed

_READY_LIMIT_S = 30.0
_IDLE_S = 5.0  # the program's end wakes the wait at once
_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


@dataclass(frozen=True)
class LocalConfig:
    """One local run.

    Attributes:
        program: how hetstream is called: words, the first an absolute path.
        command: the user's program and its arguments.
        data_workers: how many; 0 makes the same batches in the program itself.
        worker_processes: processes of each data worker.
        worker_threads: threads of each of these processes.
        show_logs: let the dispatcher and the data workers write to this process's output.
    """

    program: tuple[str, ...]
    command: tuple[str, ...]
    data_workers: int
    worker_processes: int = 1
    worker_threads: int = 1
    show_logs: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.data_workers < 0:
            problems.append(f"--data-workers={self.data_workers}: at least 0")
        if self.worker_processes < 1:
            problems.append(f"--worker-processes={self.worker_processes}: at least 1")
        if self.worker_threads < 1:
            problems.append(f"--worker-threads={self.worker_threads}: at least 1")
        if not self.command:
            problems.append("no program: write hetstream run --data-workers=N python train.py")
        if problems:
            raise UsageError("; ".join(problems))

    def dispatcher_words(self, directory: Path) -> list[str]:
        """The dispatcher's command."""
        arguments = [
            "internal",
            "dispatcher",
            "--bind",
            "tcp://127.0.0.1:0",
            "--work-dir",
            str(directory / "dispatcher"),
        ]
        return [*self.program, *arguments, "--address-file", str(directory / "address")]

    def data_worker_words(self, directory: Path) -> list[str]:
        """A data worker's command."""
        service = f"file:{directory / 'address'}"
        threads = ["--threads", str(self.worker_threads)] if self.worker_threads > 1 else []
        arguments = [
            "internal",
            "worker",
            "--follow-program",
            "--service",
            service,
            "--processes",
            str(self.worker_processes),
        ]
        return [*self.program, *arguments, *threads]


@dataclass(frozen=True)
class LocalResult:
    """How a run ended.

    Attributes:
        returncode: the program's; 128 + N when signal N ended it, as in a shell.
        summary: the dispatcher's; empty without data workers.
    """

    returncode: int
    summary: dict[str, Any] = field(default_factory=dict)


def run_local(
    config: LocalConfig,
    environ: Mapping[str, str],
    hook_environment: Callable[[str | None, Mapping[str, str]], Mapping[str, str]],
) -> LocalResult:
    """Run a program to its end.

    Args:
        config: what to run.
        environ: the program's environment, to which the hook's variables are added.
        hook_environment: gives those variables for an address file, or for none.

    Raises:
        ProgramNotFound: there is no such program, or it is not executable.
        MasterError: the dispatcher did not start.
    """
    if shutil.which(config.command[0], path=environ.get("PATH")) is None:
        raise _not_found(config.command[0])
    with signals_held(_SIGNALS):
        if config.data_workers == 0:
            program = _start_program(config, dict(environ) | dict(hook_environment(None, environ)))
            return LocalResult(_attend(program, None))
        with temporary_directory() as directory:
            return _run_with_service(config, environ, hook_environment, directory)


def _not_found(name: str) -> ProgramNotFound:
    if not Path(name).is_file() or os.access(name, os.X_OK):
        return ProgramNotFound(f"{name!r} is not a program on PATH. Check: command -v {name}")
    path = shlex.quote(name)
    way = f"Put its interpreter in front: python {path}" if name.endswith(".py") else f"Run: chmod +x {path}"
    return ProgramNotFound(f"{name!r} is a file that is not executable. {way}")


def _run_with_service(
    config: LocalConfig,
    environ: Mapping[str, str],
    hook_environment: Callable[[str | None, Mapping[str, str]], Mapping[str, str]],
    directory: Path,
) -> LocalResult:
    make_private(directory)
    service = Service(MasterState(config.data_workers), LocalLauncher(config, directory), directory / "address")
    try:
        service.begin()
        interrupted = _await_dispatcher(service, directory)
        if interrupted is not None:
            return LocalResult(128 + interrupted)
        variables = hook_environment(f"file:{directory / 'address'}", environ)
        returncode = _attend(_start_program(config, dict(environ) | dict(variables)), service)
    finally:
        service.finish("the program has ended")
    return LocalResult(returncode, read_summary(directory / "dispatcher"))


def _await_dispatcher(service: Service, directory: Path) -> int | None:
    """Wait until the dispatcher can be reached; return a signal's number if one came first."""
    deadline = time.monotonic() + _READY_LIMIT_S
    while service.phase is Phase.STARTING:
        received = service.wait(_SIGNALS)
        if received is not None:
            return received.si_signo
        if time.monotonic() > deadline:
            said = (directory / "dispatcher.log").read_text(errors="replace").strip()[-2000:]
            raise MasterError(
                f"the dispatcher was not ready within {_READY_LIMIT_S:g} s. It said: {said or 'nothing'}. "
                "Run it by hand: hetstream internal dispatcher --help"
            )
    return None


def _start_program(config: LocalConfig, environ: Mapping[str, str]) -> Child:
    try:
        return start_child(config.command, env=environ, foreground=True, death_signal=signal.SIGKILL)
    except OSError as error:
        raise ProgramNotFound(f"{config.command[0]!r} cannot be started: {error.strerror}") from error


def _attend(program: Child, service: Service | None) -> int:
    """Wait for the program, hand it the signals that only this process got, and keep the service going."""
    while True:
        returncode = program.poll()
        if returncode is not None:
            return returncode if returncode >= 0 else 128 - returncode
        received = service.wait(_SIGNALS) if service else next_signal(_SIGNALS, _IDLE_S)
        # si_code above 0: from the kernel, that is from the terminal, which has told the program too.
        if received is not None and received.si_code <= 0:
            program.send_signal(received.si_signo)


class LocalLauncher:
    """Starts everything as processes of this host.

    Args:
        config: what to run.
        directory: private to this run.
    """

    def __init__(self, config: LocalConfig, directory: Path) -> None:
        self._config = config
        self._directory = directory

    def dispatcher(self) -> Child:
        """Start the dispatcher."""
        return start_child(self._config.dispatcher_words(self._directory), log=self.log_of(DISPATCHER))

    def data_worker(self, index: int) -> Child:
        """Start one data worker."""
        arguments, log = self._config.data_worker_words(self._directory), self.log_of(data_worker(index))
        arguments += [] if log is None else ["--log", str(log)]
        # The seed, else it would start itself anew. What samples write is the program's output.
        return start_child(arguments, env=environment_with_hash_seed())

    def begin_elastic(self) -> None:
        """A local run has no companions."""
        raise NotImplementedError("companions without Slurm")

    def end_elastic(self) -> None:
        """There is no controller."""

    def log_of(self, name: str) -> Path | None:
        """The file that a child's output goes to, for as long as the run lasts."""
        return None if self._config.show_logs else self._directory / log_name(name)
