"""The ledger: what a training program got, written down, while everything around it and itself is killed and stopped.

At the end the ledger is exact: each step of each epoch once and in order, save those between the last saved state and
a death of the trainer, which are given again; and every byte as a loader in process gives it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ledger_trainer
import pytest

from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.process.faults import FAULTS, POINTS

PROGRAM = Path(ledger_trainer.__file__)
DEADLINE_S = 120.0


@functools.cache
def expected(samples: int, epochs: int) -> list[str]:
    """The ledger of a run in process that nothing happens to."""
    lines: list[str] = []
    with ledger_trainer.make_loader(samples, None) as loader:
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            lines += [ledger_trainer.line(epoch, step, batch).strip() for step, batch in enumerate(loader)]
    return lines


class Run:
    """A service with a training program; kept alive, hurt and judged."""

    def __init__(self, service: Any, samples: int, epochs: int) -> None:
        self.service = service
        self.samples, self.epochs = samples, epochs
        self.directory: Path = service.directory
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("HETSTREAM_")}
        self.trainer: subprocess.Popen[bytes] | None = None
        self.stopped: list[int] = []

    def start_trainer(self, faults: str = "") -> None:
        words = (str(self.directory), self.service.name, str(self.samples), str(self.epochs))
        environment = self.environment | {"HETSTREAM_FAULT": faults, "HETSTREAM_BUFFER_BYTES": "20000"}
        with (self.directory / "trainer.log").open("ab") as log:
            self.trainer = subprocess.Popen([sys.executable, str(PROGRAM), *words], env=environment, stderr=log)

    def ledger(self) -> list[str]:
        path = self.directory / "ledger"
        return path.read_text().splitlines() if path.exists() else []

    def keep_up(self, until: Callable[[], object], what: str) -> None:
        """Wait; meanwhile start the dispatcher again when it has died, as its job master would."""
        deadline = time.monotonic() + DEADLINE_S
        while not until():
            assert self.trainer is not None
            assert self.trainer.poll() in (None, 0), (self.directory / "trainer.log").read_text()
            assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S:g} s\n{self.service.log('dispatcher')}"
            if self.service.dispatcher.poll() is not None:
                self.service.start_dispatcher()
            time.sleep(0.01)

    def finish(self) -> None:
        """Wait for the end of the program and judge its ledger."""
        assert self.trainer is not None
        trainer = self.trainer
        self.keep_up(lambda: trainer.poll() is not None, "the end of the training program")
        assert trainer.wait() == 0
        assert_exact(self.ledger(), expected(self.samples, self.epochs))

    def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        for pid in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if self.trainer is not None and self.trainer.poll() is None:
            children = children_of(self.trainer.pid)
            self.trainer.kill()
            self.trainer.wait()
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """Child processes of a process with one thread."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def assert_exact(ledger: list[str], want: list[str]) -> None:
    """Each line of `want` once and in order; after a `resume` the lines since that position may come again."""
    places = {tuple(map(int, one.split()[:2])): number for number, one in enumerate(want)}
    at = 0
    for one in ledger:
        words = one.split()
        if words[0] == "resume":
            epoch, step = int(words[1]), int(words[2])
            back = places.get((epoch, step), len(want) if (epoch, step) not in places and at == len(want) else None)
            if back is None:  # saved after the last batch of an epoch
                back = places[(epoch, step - 1)] + 1
            assert back <= at, f"resumed at {words[1:]}, after a gap"
            assert at - back <= ledger_trainer.SAVE_EVERY + 1, f"resumed at {words[1:]}, more than a state ago"
            at = back
        else:
            assert one == want[at], f"line {at}: got {one}, expected {want[at]}"
            at += 1
    assert at == len(want), f"{len(want) - at} batches are missing"


@pytest.fixture
def start(service: Any) -> Iterator[Callable[..., Run]]:
    """Make runs that are ended after the test."""
    runs: list[Run] = []

    def make(samples: int, epochs: int) -> Run:
        runs.append(Run(service, samples, epochs))
        return runs[-1]

    yield make
    for run in runs:
        run.end()


def requests(directory: Path, role: str, counts: tuple[int, ...] = (1,)) -> str:
    """A request to kill at each point of a role, the first times it is passed."""
    return ",".join(
        f"{point}:{count}:kill:{directory / f'{point}.{count}'}"
        for point in POINTS
        for count in counts
        if point.startswith(f"{role}.") and point != "worker.draining"
    )


def struck(directory: Path, role: str) -> set[str]:
    return {path.name.rpartition(".")[0] for path in directory.glob(f"{role}.*.*")}


def points_of(role: str) -> set[str]:
    return {point for point in POINTS if point.startswith(f"{role}.")}


@pytest.mark.shows("the dispatcher may be killed at each point at which it writes")
@pytest.mark.shows("the dispatcher may restart many times, with several datasets, and data workers may, too")
def test_the_dispatcher_may_die_at_every_point(
    start: Any, service: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service.start_workers(2)
    run = start(samples=160, epochs=60)
    # Every commit of a start: the number of starts and the port; later ones: pipelines, data workers, statistics.
    faults = requests(tmp_path, "dispatcher", (1, 12)) + f",dispatcher.before_commit:2:kill:{tmp_path}/dispatcher.x.2"
    monkeypatch.setenv("HETSTREAM_FAULT", faults)
    service.kill_dispatcher()
    service.start_dispatcher()
    run.start_trainer()
    run.finish()
    assert points_of("dispatcher") <= struck(tmp_path, "dispatcher")
    assert service.log("dispatcher").count("dispatcher ready") >= len(points_of("dispatcher")), "starts"


def test_a_data_worker_may_die_at_every_point(
    start: Any, service: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = start(samples=160, epochs=60)
    # Two data workers, because one that loses six processes in a row gives up.
    halves = requests(tmp_path, "worker").split(",")
    for half in (halves[::2], halves[1::2]):
        monkeypatch.setenv("HETSTREAM_FAULT", ",".join(half))
        service.start_workers(1)
    run.start_trainer()
    everywhere = points_of("worker") - {"worker.draining"}
    run.keep_up(lambda: struck(tmp_path, "worker") == everywhere or run.trainer.poll() == 0, "deaths")
    monkeypatch.setenv("HETSTREAM_FAULT", f"worker.draining:1:kill:{tmp_path}/worker.draining.1")
    leaving = service.start_workers(1)

    def is_registered() -> bool:
        return any(f"pid={pid} registered" in service.log("dispatcher") for pid in children_of(leaving.pid))

    run.keep_up(is_registered, "its registration")
    leaving.send_signal(signal.SIGTERM)
    run.keep_up(lambda: leaving.poll() is not None, "the end of the data worker")
    run.finish()
    assert struck(tmp_path, "worker") == points_of("worker")


@pytest.mark.shows("a trainer continues at its checkpoint: batches behind it come again, others never do")
def test_a_trainer_may_die_at_every_point_and_continues_from_its_state(
    start: Any, service: Any, tmp_path: Path
) -> None:
    service.start_workers(2)
    run = start(samples=160, epochs=20)
    run.start_trainer(requests(tmp_path, "loader", (1, 40)))
    run.finish()
    assert struck(tmp_path, "loader") == points_of("loader")
    assert sum(line.startswith("resume") for line in run.ledger()) > len(points_of("loader"))


def one_schedule(run: Run, seed: int, events: int) -> None:
    """Hurt a run `events` times, each time after a random number of batches."""
    chance = random.Random(seed)
    service = run.service
    service.start_workers(chance.randint(1, 2))
    run.start_trainer()

    def kill_a_process() -> None:
        pids = [pid for worker in service.workers for pid in children_of(worker.pid)]
        if pids:
            os.kill(chance.choice(pids), signal.SIGKILL)

    def stop_a_process() -> None:
        pids = [pid for worker in service.workers for pid in children_of(worker.pid) if pid not in run.stopped]
        if pids:
            run.stopped.append(chance.choice(pids))
            os.kill(run.stopped[-1], signal.SIGSTOP)

    def continue_processes() -> None:
        while run.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.stopped.pop(), signal.SIGCONT)

    def join() -> None:
        if sum(worker.poll() is None for worker in service.workers) < 3:
            service.workers.append(
                service._start("worker.log", "internal", "worker", "--service", service.name, "--processes", "1")
            )

    def end_a_worker(number: signal.Signals) -> None:
        living = [worker for worker in service.workers if worker.poll() is None]
        if living:
            chance.choice(living).send_signal(number)

    def kill_the_trainer() -> None:
        pid = run.directory / "trainer.pid"
        if pid.exists():
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(pid.read_text()), signal.SIGKILL)

    happenings: list[Callable[[], None]] = [
        kill_a_process,
        kill_a_process,
        stop_a_process,
        continue_processes,
        join,
        join,
        lambda: end_a_worker(signal.SIGTERM),
        lambda: end_a_worker(signal.SIGKILL),
        service.kill_dispatcher,
        kill_the_trainer,
    ]
    for _ in range(events):
        goal = len(run.ledger()) + chance.randint(1, 60)
        run.keep_up(lambda goal=goal: len(run.ledger()) >= goal or run.trainer.poll() == 0, f"seed {seed}: batches")
        chance.choice(happenings)()
    continue_processes()
    run.finish()


@pytest.mark.shows("each element comes once under random schedules of faults")
@pytest.mark.parametrize("seed", [1])
def test_the_ledger_is_exact_under_a_random_schedule(start: Any, seed: int) -> None:
    one_schedule(start(samples=160, epochs=30), seed, events=12)


@pytest.mark.shows("each element comes once under random schedules of faults")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_the_ledger_is_exact_under_hundreds_of_random_schedules(start: Any, seed: int) -> None:
    one_schedule(start(samples=160, epochs=60), seed, events=25)


def test_a_fault_that_is_not_understood_is_refused() -> None:
    for text in ("worker.nowhere:1:kill:/m", "worker.before_make:0:kill:/m", "worker.before_make:1:kill", "x"):
        with pytest.raises(ConfigError, match=r"HETSTREAM_FAULT: .* is not POINT:COUNT:ACTION:FILE"):
            FAULTS.request(text)
