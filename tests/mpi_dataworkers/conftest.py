"""A real service for tests: the dispatcher and data workers as the commands that a user runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("programs")
HETSTREAM = str(Path(sys.executable).with_name("hetstream"))
if str(PROGRAMS) not in sys.path:
    sys.path.append(str(PROGRAMS))


class Service:
    """A dispatcher and its data workers, started and hurt by tests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address_file = directory / "work" / "address"
        self.dispatcher: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []

    @property
    def name(self) -> str:
        return f"file:{self.address_file}"

    def _start(self, log: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.directory / log).open("ab") as stream:
            return subprocess.Popen([HETSTREAM, *words], stderr=stream, stdout=stream, stdin=subprocess.DEVNULL)

    def start_dispatcher(self) -> None:
        work = str(self.directory / "work")
        arguments = ("--bind", "tcp://127.0.0.1:0", "--work-dir", work, "--address-file", str(self.address_file))
        self.dispatcher = self._start("dispatcher.log", "dispatcher", *arguments)

    def kill_dispatcher(self) -> None:
        assert self.dispatcher is not None
        self.dispatcher.kill()
        self.dispatcher.wait()

    def start_workers(self, processes: int = 1, *options: str) -> subprocess.Popen[bytes]:
        worker = self._start("worker.log", "worker", "--service", self.name, "--processes", str(processes), *options)
        self.workers.append(worker)
        registered = self.log("dispatcher").count("registered") + processes
        deadline = time.monotonic() + 30
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


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A running dispatcher without data workers; ended, with its data workers, after the test."""
    running = Service(tmp_path)
    running.start_dispatcher()
    yield running
    if running.dispatcher is not None and running.dispatcher.poll() is not None:
        for one in running.workers:
            one.send_signal(signal.SIGTERM)
    running.stop()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with three data workers, for a module's tests that hurt none of them."""
    running = Service(tmp_path_factory.mktemp("three"))
    running.start_dispatcher()
    running.start_workers(3)
    yield running
    running.stop()


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


@pytest.fixture(name="run_program")
def run_program_fixture() -> object:
    """See `run_program`."""
    return run_program
