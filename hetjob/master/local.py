"""The local backend: a program, or a block of one, with data workers as processes of this host.

Called by `hetstream run`, and by `with hetstream.data_workers(2):`, as in a notebook.

No Slurm and no root. The same state machine as the job master's keeps the dispatcher and the data workers alive; the
program gets its signals and gives its exit code. Nothing outlives this process, even when it is killed. The service of
a block is kept in a thread, as the main thread runs the block.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetstream.base.errors import UsageError
from hetstream.base.files import make_private
from hetstream.base.limits import available_bytes
from hetstream.base.process import with_job
from hetstream.hetjob.elastic.controller import Controller, ControllerState, Stage
from hetstream.hetjob.elastic.snapshot import Limits
from hetstream.hetjob.errors import MasterError, ProgramNotFound
from hetstream.hetjob.job.embedding_servers import (
    EMBEDDING_DIR,
    EmbeddingServers,
    read_ends,
    remove_unneeded,
    summary_of,
)
from hetstream.hetjob.job.ended_job import read_summary
from hetstream.hetjob.job.processes import next_signal, signals_held, start_child, temporary_directory
from hetstream.hetjob.master.children import Service
from hetstream.hetjob.master.controller_state_file import CompanionTime, ControllerStateFile
from hetstream.hetjob.master.elastic import Elastic
from hetstream.hetjob.master.state import DISPATCHER, MasterState, Phase, data_worker, embedding_server, log_name
from hetstream.hetjob.ports import Child, MarkedJob
from hetstream.mpi_dataworkers.dispatcher.client import StatusClient, running_service
from hetstream.mpi_dataworkers.process.config import COMPANION, environment_with_hash_seed, service_from_environment
from hetstream.mpi_dataworkers.wire.messages import EMBEDDING_PARTS, Steered

READY_LIMIT_S = 30.0
_COOLDOWN_S = 7.0  # no queue is between a decision and a data worker; the rates show a change after 6 s
_MOST_AT_START = 8
_LAST_WORDS_BYTES = 2000
MOST_DATA_WORKERS = 1024  # of one host; more is a slip of the finger
_END_S, _LOOK_S = 5.0, 0.02  # a data worker that was told to ends within 2 s
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
        most_data_workers: that the elastic controller may have in their place, as many as are needed; 0 without one.
        embedding_servers: how many.
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
    most_data_workers: int = 0
    embedding_servers: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.data_workers <= MOST_DATA_WORKERS:
            problems.append(f"--data-workers={self.data_workers}: 0 to {MOST_DATA_WORKERS}")
        if not 0 <= self.embedding_servers <= EMBEDDING_PARTS:
            problems.append(f"--embedding-servers={self.embedding_servers}: 0 to {EMBEDDING_PARTS}")
        if self.worker_processes < 1:
            problems.append(f"worker_processes={self.worker_processes}: at least 1")
        if self.worker_threads < 1:
            problems.append(f"--worker-threads={self.worker_threads}: at least 1")
        if not self.command:
            problems.append("no program: write hetstream run --data-workers=N python train.py")
        if problems:
            raise UsageError("; ".join(problems))

    @property
    def has_service(self) -> bool:
        """Whether anything has to be started beside the program."""
        return self.data_workers > 0 or self.most_data_workers > 0 or self.embedding_servers > 0

    def embedding_of_run(self) -> EmbeddingServers:
        """The embedding servers of a run that begins now, in a folder of its own; it stays: checkpoints name it."""
        # The program and its data workers need memory, too.
        memory_bytes = available_bytes() // 2 // self.embedding_servers
        name = f"{time.strftime('run-%Y-%m-%d-%H%M%S')}-{secrets.token_hex(4)}"
        return EmbeddingServers(self.embedding_servers, memory_bytes, Path.cwd() / EMBEDDING_DIR / name)

    def dispatcher_words(self, directory: Path) -> list[str]:
        """Return the dispatcher's command."""
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
        """Return a data worker's command."""
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
        if not config.has_service:
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
    embedding = config.embedding_of_run() if config.embedding_servers else None
    with embedding.held() if embedding is not None else nullcontext():
        return _run_beside(config, environ, hook_environment, directory, embedding)


def _run_beside(
    config: LocalConfig,
    environ: Mapping[str, str],
    hook_environment: Callable[[str | None, Mapping[str, str]], Mapping[str, str]],
    directory: Path,
    embedding: EmbeddingServers | None,
) -> LocalResult:
    launcher = LocalLauncher(config, directory, embedding)
    state = MasterState(config.data_workers, config.most_data_workers > 0, config.embedding_servers)
    service = Service(state, launcher, directory / "address")
    try:
        service.begin()
        interrupted = _await_dispatcher(service, launcher)
        if interrupted is not None:
            return LocalResult(128 + interrupted)
        variables = hook_environment(f"file:{directory / 'address'}", environ)
        returncode = _attend(_start_program(config, dict(environ) | dict(variables)), service)
    finally:
        service.finish("the program has ended")
        launcher.close()
        ends = read_ends(directory)
        if embedding is not None:
            remove_unneeded(embedding.directory, ends)
    return LocalResult(returncode, {**read_summary(directory / "dispatcher"), **launcher.summary(), **summary_of(ends)})


def not_ready(launcher: LocalLauncher) -> MasterError:
    """That the dispatcher does not come, with what it has said."""
    return MasterError(
        f"the dispatcher was not ready within {READY_LIMIT_S:g} s{launcher.last_words(DISPATCHER)}. "
        "Run it by hand: hetstream internal dispatcher --help"
    )


def _await_dispatcher(service: Service, launcher: LocalLauncher) -> int | None:
    """Wait until the dispatcher can be reached; return a signal's number if one came first."""
    deadline = time.monotonic() + READY_LIMIT_S
    while service.phase is Phase.STARTING:
        received = service.wait(_SIGNALS)
        if received is not None:
            return received.si_signo
        if time.monotonic() > deadline:
            raise not_ready(launcher)
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


class LocalCompanions:
    """Data workers of this host in the place of companion jobs; see `hetstream.hetjob.master.companions`.

    Args:
        command_of: from its number to the command of each.

    Attributes:
        device, job_id, mark, mb_per_cpu, time: as of companion jobs; nothing bounds their memory or time.
    """

    device: Steered = "cpu"
    job_id = mark = ""
    mb_per_cpu = None

    def __init__(self, command_of: Callable[[int], Sequence[str]]) -> None:
        self._command_of = command_of
        self._children: dict[str, Child] = {}
        self._num_submitted = 0
        self.time = CompanionTime(None)

    def submit(self, *_: object) -> str:
        """Start one, and return its name.

        Raises:
            MasterError: it cannot be started.
        """
        number, self._num_submitted = self._num_submitted, self._num_submitted + 1
        name = f"local-{number}"
        environ = environment_with_hash_seed() or os.environ
        try:
            self._children[name] = start_child(self._command_of(number), env={**environ, COMPANION: name})
        except OSError as error:
            raise MasterError(f"no data worker can be started: {error}") from error
        return name

    def listed(self, _: object = None) -> list[MarkedJob]:
        """Return those that have not ended."""
        self._children = {name: child for name, child in self._children.items() if child.poll() is None}
        return [MarkedJob(name, "RUNNING", 1) for name in self._children]

    def ask_for_less(self, *_: object) -> None:
        """None waits for a hole."""

    def cancel(self, name: str) -> None:
        """End one, and wait for it."""
        child = self._children.pop(name, None)
        if child is None:
            return
        for end in (child.terminate, child.kill):
            end()
            deadline = time.monotonic() + _END_S
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            if child.poll() is not None:
                return


class LocalLauncher:
    """Starts everything as processes of this host.

    Args:
        config: what to run.
        directory: private to this run.
        embedding: of this run; None without embedding servers.
    """

    def __init__(self, config: LocalConfig, directory: Path, embedding: EmbeddingServers | None = None) -> None:
        self._config = config
        self._directory = directory
        self._embedding = embedding
        self._elastic: Elastic | None = None

    def dispatcher(self) -> Child:
        """Start the dispatcher."""
        return start_child(self._config.dispatcher_words(self._directory), log=self.log_of(DISPATCHER))

    def data_worker(self, index: int) -> Child:
        """Start one data worker."""
        # The seed, else it would start itself anew. What samples write is the program's output.
        return start_child(self._data_worker_words(index), env=environment_with_hash_seed())

    def embedding_server(self, index: int) -> Child:
        """Start one embedding server."""
        assert self._embedding is not None
        log = self.log_of(embedding_server(index))
        argv = self._embedding.words(self._config.program, self._directory / "address", str(index))
        return start_child(argv, log=log)

    def _data_worker_words(self, index: int) -> list[str]:
        log = self.log_of(data_worker(index))
        return [*self._config.data_worker_words(self._directory), *([] if log is None else ["--log", str(log)])]

    def begin_elastic(self) -> None:
        """Begin with a data worker for each CPU, and let the controller find how many are needed.

        The program would have had worker processes of its own from the start, too.
        """
        limits = Limits(1, self._config.most_data_workers, cooldown_s=_COOLDOWN_S)
        companions = LocalCompanions(self._data_worker_words)
        for _ in range(min(self._config.most_data_workers, _MOST_AT_START)):
            companions.submit()  # the controller finds them as it finds those of a job master of before
        self._elastic = Elastic(
            Controller(limits, ControllerState(stage=Stage.COUNT)),
            companions,
            fixed=0,
            connect=lambda: StatusClient(running_service(self._directory / "address")),
            controller_state_file=ControllerStateFile(self._directory / "controller.json"),
        )
        self._elastic.begin()

    def end_elastic(self) -> None:
        """Ask the controller to end."""
        if self._elastic is not None:
            self._elastic.stop()

    def close(self) -> None:
        """Wait until the controller and its data workers have ended."""
        if self._elastic is not None:
            self._elastic.join()

    def summary(self) -> dict[str, Any]:
        """Return what the controller found out, as in the summary of a job."""
        if self._elastic is None:
            return {}
        of_jobs = ("companions", "companion_cpu_s", "companion_cpu_s_in_holes")
        return {"elastic": {name: value for name, value in self._elastic.summary().items() if name not in of_jobs}}

    def last_words(self, name: str) -> str:
        """Return the end of a child's log, which is gone when somebody wants to read it."""
        path = self.log_of(name)
        try:
            if path is None:
                return ""
            with path.open("rb") as log:
                log.seek(max(0, path.stat().st_size - _LAST_WORDS_BYTES))
                text = log.read(_LAST_WORDS_BYTES).decode(errors="replace").strip()
        except OSError:
            return ""
        return f"; the end of its log ({path}):\n{text}" if text else ""

    def log_of(self, name: str) -> Path | None:
        """Return the file that a child's output goes to, for as long as the run lasts."""
        return None if self._config.show_logs else self._directory / log_name(name)


# How long the thread may be late to see the end of the block; a child that ends wakes nobody here.
_BLOCK_LOOK_S = 0.2


@contextmanager
def data_workers(count: int, processes: int = 1) -> Iterator[None]:
    """Have data workers on this host make the batches of `hetstream.DataLoader`s that are made in a block.

        with hetstream.data_workers(2):
            for batch in DataLoader(dataset, batch_size=64): ...

    Batches are the same as without. Nothing is left running behind the block, nor when the process is killed.

    Args:
        count: data workers, at least 1.
        processes: of each.

    Raises:
        UsageError: the numbers cannot be meant.
        MasterError: the service did not start, or there is one already.
    """
    if service_from_environment() is not None:
        raise MasterError("this program has data workers already (HETSTREAM_SERVICE is set): leave out `data_workers`")
    for name, number in (("count", count), ("processes", processes)):
        if type(number) is not int or not 1 <= number <= MOST_DATA_WORKERS:
            raise UsageError(f"data_workers({name}={number!r}): a whole number from 1 to {MOST_DATA_WORKERS}")
    config = LocalConfig((sys.executable, "-m", "hetstream"), (sys.executable,), count, processes)
    with temporary_directory() as directory:
        make_private(directory)
        launcher = LocalLauncher(config, directory)
        service = Service(MasterState(config.data_workers), launcher, directory / "address")
        is_over, is_ready = threading.Event(), threading.Event()
        thread = threading.Thread(target=_keep, args=(service, is_over, is_ready), name="hetstream-service")
        try:
            thread.start()
            if not is_ready.wait(READY_LIMIT_S) or service.phase is not Phase.RUNNING:
                raise not_ready(launcher)
            with _variables(with_job({"HETSTREAM_SERVICE": f"file:{directory / 'address'}"}, os.environ)):
                yield
        finally:
            is_over.set()
            if thread.ident is not None:
                thread.join()


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Have variables in the environment, and then those of before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _keep(service: Service, is_over: threading.Event, is_ready: threading.Event) -> None:
    """Start the children, replace those that die, and end them all. They die with this thread, should it ever end."""
    with signals_held(()):
        service.begin()
        while not is_over.is_set():
            service.wait((), _BLOCK_LOOK_S)
            if service.phase is not Phase.STARTING:
                is_ready.set()
        service.finish("the block is over")
