"""Programs under `hetstream run --offload auto`: several ranks, killed, at another world size, beside another one.

Their ledgers, a line with the loss and the batch of each step, are those of the same programs without hetstream.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import offload_trainer
import pytest

from hetstream.mpi_dataworkers.hook import environment

PROGRAM = Path(offload_trainer.__file__)
MOVED = "data workers run 5 operators of Clean's forward"
STEPS = offload_trainer.NUM_ROWS // offload_trainer.GLOBAL_BATCH_SIZE
DEADLINE_S = 150.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Program:
    """The training program in a directory of its own, run as often as a test says, and ended with the test."""

    def __init__(self, kind: str, directory: Path, service: str | None, offload: str = "auto") -> None:
        self.kind, self.directory = kind, directory
        directory.mkdir()
        plain = {key: value for key, value in os.environ.items() if not key.startswith(("HETSTREAM_", "SLURM_"))}
        self.environment = plain | {"OMP_NUM_THREADS": "1", "HETSTREAM_JOB_NAME": directory.name}
        if service is not None:
            self.environment |= environment(service, plain, offload, in_process_loaders=True) | {"EAGER": "1"}
        self.ranks: list[subprocess.Popen[bytes]] = []
        self._runs = count()

    def start(self, world_size: int = 1, epochs: int = 2, last_step: int = -1) -> Program:
        """Start all of its ranks."""
        variables = {"WORLD_SIZE": str(world_size), "STORE": f"file://{self.directory}/store.{next(self._runs)}"}
        argv = [sys.executable, str(PROGRAM), self.kind, str(self.directory), str(epochs), str(last_step)]
        with (self.directory / "log").open("ab") as log:
            self.ranks = [
                subprocess.Popen(argv, env=self.environment | variables | {"RANK": str(rank)}, stderr=log)
                for rank in range(world_size)
            ]
        return self

    def finish(self) -> Program:
        """Wait for its end."""
        for one in self.ranks:
            assert one.wait(DEADLINE_S) == 0, self.log()
        return self

    def kill(self) -> None:
        for one in self.ranks:
            one.send_signal(signal.SIGKILL)
            one.wait()

    def wait_for_lines(self, number: int, rank: int = 0) -> None:
        """Wait until a rank has taken so many steps."""
        deadline = time.monotonic() + DEADLINE_S
        while len(self.ledger(rank)) < number:
            assert time.monotonic() < deadline, self.log()
            assert self.ranks[rank].poll() is None, self.log()
            time.sleep(0.005)

    def ledger(self, rank: int = 0) -> list[str]:
        path = self.directory / f"ledger.{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def log(self) -> str:
        return (self.directory / "log").read_text()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Any]:
    """Make programs that are ended with the test."""
    made: list[Program] = []

    def make(kind: str, name: str, *arguments: Any) -> Program:
        made.append(Program(kind, tmp_path / name, *arguments))
        return made[-1]

    yield make
    for one in made:
        one.kill()


@pytest.mark.shows("partitioning works with evaluation, AMP, DDP, `torch.compile`, two models and two loaders")
@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_two_ranks_train_as_without(kind: str, service: Any, program: Any) -> None:
    service.start_workers(3)
    plain, moved = program(kind, "plain", None), program(kind, "moved", service.name)
    plain.start(2)
    moved.start(2)
    for one in (plain, moved):
        one.finish()
    for rank in range(2):
        assert len(plain.ledger(rank)) == 2 * STEPS
        assert moved.ledger(rank) == plain.ledger(rank)
    assert moved.log().count(MOVED) == 2, moved.log()


@pytest.mark.shows("partitioning works with evaluation, AMP, DDP, `torch.compile`, two models and two loaders")
def test_a_killed_program_goes_on_from_its_checkpoint(service: Any, program: Any) -> None:
    service.start_workers(3)
    plain, moved = program("ours", "plain", None), program("ours", "moved", service.name)
    plain.start()
    # Before a batch has been captured, while the cut is tried, and when it is in use: each once.
    for number in (2, 20, 90):
        moved.start()
        moved.wait_for_lines(number)
        moved.kill()
    moved.start().finish()
    plain.finish()
    lines, expected = moved.ledger(), plain.ledger()
    assert {*lines} == {*expected}, "a line that the plain program has not, or one less"
    assert len(lines) > len(expected), "no step was made again, so nothing was killed between two checkpoints"
    assert moved.log().count(MOVED) >= 2, moved.log()


@pytest.mark.shows("partitioning works with evaluation, AMP, DDP, `torch.compile`, two models and two loaders")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_it_goes_on_at_another_world_size(before: int, after: int, service: Any, program: Any) -> None:
    service.start_workers(3)
    both = [program("ours", "plain", None), program("ours", "moved", service.name)]
    for world_size, last_step in ((before, 27), (after, -1)):
        for one in both:
            one.start(world_size, 1, last_step)
        for one in both:
            one.finish()
    plain, moved = both
    for rank in range(2):
        assert moved.ledger(rank) == plain.ledger(rank)
    assert len(moved.ledger(0)) == STEPS
    assert moved.log().count(MOVED) == before + after, moved.log()


def test_two_programs_of_one_service_of_which_one_is_partitioned(service: Any, program: Any) -> None:
    service.start_workers(2)
    alone, moved = program("torch", "alone", service.name, "off"), program("torch", "moved", service.name)
    plain = program("torch", "plain", None)
    for one in (alone, moved, plain):
        one.start()
    for one in (alone, moved, plain):
        one.finish()
    assert alone.ledger() == moved.ledger() == plain.ledger()
    assert MOVED in moved.log()
    assert "operators" not in alone.log()


@pytest.mark.shows("`hetstream run --explain` has the table of a forward")
def test_a_program_with_our_loader_is_explained(tmp_path: Path) -> None:
    argv = [str(Path(sys.executable).with_name("hetstream")), "run", "--data-workers=4", "--explain"]
    argv += ["--json", str(tmp_path / "found.json"), sys.executable, str(PROGRAM), "ours"]
    done = subprocess.run(
        [*argv, str(tmp_path), "1", "-1"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"operator": "nan_to_num"' in (tmp_path / "found.json").read_text()
    assert len((tmp_path / "ledger.0").read_text().splitlines()) == 2, "it ends in the third step"
