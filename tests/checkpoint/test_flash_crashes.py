"""Trainers that are killed, and what the next ones make of it: the run that would have been, bit by bit."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hetstream.checkpoint.memory.view import find_stores
from tests.checkpoint.trainers import SIGKILL, Trainers, forget_memory, wait_for_disk

# What a trainer passes while it trains; the checkpoint writer's points are `test_writer.py`'s.
POINTS = ("save.copied",)
OTHER_POINTS = (
    *("store.created", "slot.allocated", "slot.placed", "slot.begun", "slot.described", "slot.before_complete"),
    *("slot.complete", "slot.published", "store.closing", "store.closed", "owner.written"),
)


@pytest.fixture(scope="module")
def undisturbed(zygote: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Trainers:
    """A run of which nobody was killed."""
    trainers = Trainers(zygote, tmp_path_factory.mktemp("undisturbed"), Path("/dev/shm"))
    assert trainers.one("run") == 0
    return trainers


def test_a_normal_end_leaves_nothing_in_memory_and_the_last_generation_on_disk(trainers: Trainers) -> None:
    assert trainers.one("run", "--steps", "6") == 0
    assert find_stores([trainers.memory]) == []
    assert (trainers.path / "run" / "latest").readlink() == Path("step-0000000006.1")


@pytest.mark.shows("killed at any time, the run is the undisturbed one bit by bit, with the same samples in each step")
def test_a_killed_trainer_goes_on_from_memory_bit_by_bit(trainers: Trainers, undisturbed: Trainers) -> None:
    assert trainers.one("run", "--kill-at", "17") == SIGKILL
    assert trainers.one("run") == 0
    assert trainers.starts("run") == [0, 16]
    assert trainers.done("run") == undisturbed.done("run")
    assert trainers.ledger("run") == undisturbed.ledger("run")


@pytest.mark.shows("killed at any time, the run is the undisturbed one bit by bit, with the same samples in each step")
def test_without_its_memory_it_goes_on_from_disk_bit_by_bit(
    trainers: Trainers, undisturbed: Trainers, wait_until: Any
) -> None:
    assert trainers.one("run", "--kill-at", "17") == SIGKILL
    forget_memory(trainers, wait_until)
    assert trainers.one("run") == 0
    assert trainers.starts("run") == [0, 16]
    assert trainers.done("run") == undisturbed.done("run")
    assert trainers.ledger("run") == undisturbed.ledger("run")


@pytest.mark.shows("`save_async` copies beside the program, and what is changed too early is found")
def test_saves_beside_training_are_the_same(trainers: Trainers, undisturbed: Trainers) -> None:
    assert trainers.one("run", "--asynchronous", "--kill-at", "9") == SIGKILL
    assert trainers.one("run", "--asynchronous") == 0
    assert trainers.done("run") == undisturbed.done("run")


@pytest.mark.shows("SIGKILL at any point of a save leaves the newest generation whole")
@pytest.mark.parametrize("point", [*POINTS, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHER_POINTS)])
def test_death_at_any_point_of_a_save_loses_at_most_one_interval(
    trainers: Trainers, undisturbed: Trainers, point: str
) -> None:
    count = 1 if point.startswith(("store", "owner")) else 3
    fault = f"{point}:{count}:kill:{trainers.path / 'marker'}"
    assert trainers.one("run", HETSTREAM_CKPT_FAULT=fault) == SIGKILL
    written = trainers.path / "run-out.0.steps"
    lines = written.read_text().splitlines() if written.exists() else []
    steps = [json.loads(line)[0] for line in lines if not line.startswith("start")]
    assert trainers.one("run") == 0
    assert trainers.starts("run")[-1] >= max(steps, default=0) // 2 * 2 - 2
    assert trainers.done("run")["digest"] == undisturbed.done("run")["digest"]


@pytest.mark.shows("killed at any time, the run is the undisturbed one bit by bit, with the same samples in each step")
def test_kills_at_random_times(trainers: Trainers, undisturbed: Trainers) -> None:
    _kill_at_random(trainers, undisturbed, 4)


@pytest.mark.shows("SIGKILL at any point of a save leaves the newest generation whole")
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_kills_at_random_times(trainers: Trainers, undisturbed: Trainers) -> None:
    _kill_at_random(trainers, undisturbed, 150)


def _kill_at_random(trainers: Trainers, undisturbed: Trainers, num_kills: int) -> None:
    chance = random.Random(5)
    for number in range(num_kills):
        name = f"run{number // 4}"
        code = trainers.one(name, "--every", "1", HETSTREAM_TEST_KILL_AFTER_S=str(chance.uniform(0.02, 0.6)))
        assert code in (0, SIGKILL)
        if number % 4 == 3:
            assert trainers.one(name, "--every", "1") == 0
            starts = trainers.starts(name)
            assert starts == sorted(starts)
            assert trainers.done(name)["digest"] == undisturbed.done("run")["digest"]
            assert trainers.ledger(name) == undisturbed.ledger("run")


# Several ranks


@pytest.fixture(scope="module")
def undisturbed_pair(zygote: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Trainers:
    trainers = Trainers(zygote, tmp_path_factory.mktemp("pair"), Path("/dev/shm"))
    assert trainers.group("run", 2, "--steps", "14") == [0, 0]
    return trainers


@pytest.mark.shows("the newest generation that all ranks have is restored, memory and disk mixed")
def test_ranks_that_died_at_different_saves_go_on_from_one(trainers: Trainers, undisturbed_pair: Trainers) -> None:
    faults = {1: f"slot.begun:4:kill:{trainers.path / 'marker'}"}
    # The other fails in its next step, having saved once more; its checkpoint writer waits for the dead one's part.
    assert trainers.group("run", 2, "--steps", "14", "--close-timeout", "0", faults=faults)[1] == SIGKILL
    assert trainers.group("run", 2, "--steps", "14") == [0, 0]
    for rank in range(2):
        assert trainers.starts("run", rank)[-1] == 6
        assert trainers.done("run", rank) == undisturbed_pair.done("run", rank)
        assert trainers.ledger("run", rank) == undisturbed_pair.ledger("run", rank)


@pytest.mark.shows("the newest generation that all ranks have is restored, memory and disk mixed")
def test_a_rank_that_lost_its_memory_goes_on_from_disk_with_the_other_from_memory(
    trainers: Trainers, undisturbed_pair: Trainers, wait_until: Any
) -> None:
    assert trainers.group("run", 2, "--steps", "14", "--kill-at", "9") == [SIGKILL, SIGKILL]

    forget_memory(trainers, wait_until, [1])
    assert trainers.group("run", 2, "--steps", "14") == [0, 0]
    for rank in range(2):
        assert trainers.starts("run", rank)[-1] == 8
        assert trainers.done("run", rank) == undisturbed_pair.done("run", rank)


@pytest.mark.shows("a DistributedDataParallel model, killed and begun again from disk, ends with the same weights")
def test_a_model_of_distributed_data_parallel_goes_on_from_disk(trainers: Trainers, wait_until: Any) -> None:
    same = ["--steps", "14", "--ddp"]
    assert trainers.group("whole", 2, *same) == [0, 0]
    assert trainers.group("run", 2, *same, "--kill-at", "9") == [SIGKILL, SIGKILL]
    forget_memory(trainers, wait_until, [0, 1])
    assert trainers.group("run", 2, *same) == [0, 0]
    for rank in range(2):
        assert trainers.starts("run", rank) == [0, 8]
        assert trainers.done("run", rank)["draws"] == trainers.done("whole", rank)["draws"]
        assert trainers.ledger("run", rank) == trainers.ledger("whole", rank)
    assert trainers.done("run", 0) == trainers.done("whole", 0)


@pytest.mark.shows("N ranks saved, M ranks loaded: FSDP2, tensor parallel, meshes, plain values")
@pytest.mark.shows("the place in the data is right after a resize within an epoch")
@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_ranks_goes_on_with_the_same_samples(trainers: Trainers, wait_until: Any, size: int) -> None:
    same = ["--steps", "14", "--resizes"]
    assert trainers.group("whole", 2, *same) == [0, 0]
    assert trainers.group("run", 2, *same, "--kill-at", "9") == [SIGKILL, SIGKILL]
    wait_for_disk(trainers, wait_until)
    for rank in range(size):
        (trainers.path / f"run-out.{rank}.steps").write_text("")
    assert trainers.group("run", size, *same) == [0] * size
    for rank in range(size):
        assert trainers.starts("run", rank) == [8]

    def samples(name: str, num_ranks: int) -> list[list[int]]:
        each = [trainers.ledger(name, rank)[-6:] for rank in range(num_ranks)]
        return [sorted(index for samples in step for index in samples) for step in zip(*each, strict=True)]

    assert samples("run", size) == samples("whole", 2)
