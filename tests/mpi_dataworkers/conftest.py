"""A real service for tests: dispatcher and data workers, forked from a process that has loaded what they import.

With the fixture `commands` they are the commands that a user runs; tests of their start, end and memory have that.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).with_name("programs")
HETSTREAM = str(Path(sys.executable).with_name("hetstream"))
if str(PROGRAMS) not in sys.path:
    sys.path.append(str(PROGRAMS))


class Zygote:
    """A process that has loaded torch and forks the processes of services; see `programs/zygote.py`."""

    def __init__(self) -> None:
        argv = [sys.executable, str(PROGRAMS / "zygote.py")]
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def ask(self, *question: Any) -> int:
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def children(self) -> set[str]:
        pid = self.process.pid
        return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


class Forked:
    """What a zygote has forked, with what tests ask of a `Popen`."""

    def __init__(self, zygote: Zygote, words: tuple[str, ...], log: Path) -> None:
        self.returncode: int | None = None
        self.verb = words[0]
        self._zygote = zygote
        environment = os.environ | {
            "PYTHONHASHSEED": "0"
        }  # as `hetstream internal worker` would have it, and start anew for it
        self.pid = zygote.ask("start", words, str(log), environment, os.getcwd())

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            # Nobody else gets its process id before the zygote has taken its exit code.
            descriptor = os.pidfd_open(self.pid)
            try:
                ended, _, _ = select.select([descriptor], [], [], timeout)
            finally:
                os.close(descriptor)
            if not ended:
                raise subprocess.TimeoutExpired(f"hetstream {self.verb}", timeout or 0)
            self.returncode = self._zygote.ask("reap", self.pid)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Service:
    """A dispatcher and its data workers, started and hurt by tests.

    Attributes:
        zygote: that forks its processes; None to start commands.
    """

    zygote: Zygote | None = None

    def __init__(self, directory: Path, work: str = "work") -> None:
        self.directory = directory
        self.address_file = directory / work / "address"
        self.dispatcher: subprocess.Popen[bytes] | Forked | None = None
        self.workers: list[subprocess.Popen[bytes] | Forked] = []

    @property
    def name(self) -> str:
        return f"file:{self.address_file}"

    def _start(self, log: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.directory / log).open("ab") as stream:
            return subprocess.Popen([HETSTREAM, *words], stderr=stream, stdout=stream, stdin=subprocess.DEVNULL)

    def _begin(self, log: str, *words: str) -> subprocess.Popen[bytes] | Forked:
        return self._start(log, *words) if self.zygote is None else Forked(self.zygote, words, self.directory / log)

    def start_dispatcher(self) -> None:
        work = str(self.address_file.parent)
        arguments = ("--bind", "tcp://127.0.0.1:0", "--work-dir", work, "--address-file", str(self.address_file))
        self.dispatcher = self._begin("dispatcher.log", "internal", "dispatcher", *arguments)

    def kill_dispatcher(self) -> None:
        assert self.dispatcher is not None
        self.dispatcher.kill()
        self.dispatcher.wait()

    def start_workers(self, processes: int = 1, *options: str) -> subprocess.Popen[bytes] | Forked:
        words = ("internal", "worker", "--service", self.name, "--processes", str(processes), *options)
        registered = self.log("dispatcher").count("registered") + processes
        worker = self._begin("worker.log", *words)
        self.workers.append(worker)
        deadline = time.monotonic() + 120
        while self.log("dispatcher").count("registered") < registered:
            assert time.monotonic() < deadline, f"data workers did not register: {self.log('worker')}"
            time.sleep(0.02)
        return worker

    def log(self, name: str) -> str:
        path = self.directory / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def stop(self) -> None:
        """End the service in order, and fail if a process does not end with it."""
        everything = [one for one in (self.dispatcher, *self.workers) if one is not None]
        if self.dispatcher is not None and self.dispatcher.poll() is None:
            self.dispatcher.send_signal(signal.SIGTERM)
        try:
            if self.dispatcher is not None:
                self.dispatcher.wait(timeout=15)
            for one in self.workers:
                one.wait(timeout=15)
        finally:
            for one in everything:
                one.kill()
                one.wait()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The zygote of all services, from the first one on."""
    Service.zygote = one = Zygote()
    with one.process:
        yield one
        Service.zygote = None
        # Not by the end of its input alone: what a failed test has left running may hold that open.
        one.process.terminate()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatcher and data workers are the commands that a user starts, not forks of the zygote."""
    monkeypatch.setattr(Service, "zygote", None)


@pytest.fixture
def _nothing_left(zygote: Zygote) -> Iterator[None]:
    """As `_no_leaks`, for the children of the zygote."""
    before = zygote.children()
    yield
    assert zygote.children() - before == set(), "the test left processes of a service behind"


@pytest.fixture
def service_in(_nothing_left: None) -> type[Service]:
    """From a directory to a service that is not started, for a test that ends it."""
    return Service


@pytest.fixture
def service(tmp_path: Path, _nothing_left: None) -> Iterator[Service]:
    """A running dispatcher without data workers; ended, with its data workers, after the test."""
    running = Service(tmp_path)
    running.start_dispatcher()
    yield running
    if running.dispatcher is not None and running.dispatcher.poll() is not None:
        for one in running.workers:
            one.send_signal(signal.SIGTERM)
    running.stop()


@pytest.fixture(scope="module")
def three(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with three data workers, for a module's tests that hurt none of them.

    Its journal is in memory: a disk that others write gigabytes to holds a dispatcher up for longer than loaders wait.
    """
    running = Service(tmp_path_factory.mktemp("three"))
    with tempfile.TemporaryDirectory(prefix="three-", dir="/dev/shm") as memory:
        (running.directory / "work").symlink_to(memory)
        running.start_dispatcher()
        running.start_workers(3)
        yield running
        running.stop()


@pytest.fixture(scope="module")
def staged(three: Service) -> Service:
    """Three data workers without a GPU, and two with."""
    for _ in range(2):
        three.start_workers(1, "--device", "gpu")
    return three


def run_program(source: str, directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a training program as a user would, with the sample datasets importable beside it."""
    script = directory / "train.py"
    script.write_text(source)
    (directory / "sample_datasets.py").write_text((PROGRAMS / "sample_datasets.py").read_text())
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HETSTREAM_", "SLURM_"))}
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment | variables,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(name="run_program", scope="session")
def run_program_fixture() -> object:
    """See `run_program`."""
    return run_program


@pytest.fixture
def loaders(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Make loaders that are closed after the test, with the LOADER_OPTIONS of the test's module."""
    from hetstream.mpi_dataworkers.loader.data_loader import DataLoader  # torch, which few tests need

    made: list[DataLoader[Any]] = []

    def make(dataset: Any, **options: Any) -> DataLoader[Any]:
        made.append(DataLoader(dataset, **request.module.LOADER_OPTIONS | options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()
