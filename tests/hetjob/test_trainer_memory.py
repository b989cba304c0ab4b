"""A trainer that runs out of memory is told of in good time, with the command that moves it. Pure, and files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetstream.hetjob.master.memory import MemoryReading, TrainerMemory, counted_left_s, read_job_memory
from hetstream.hetjob.ports import Measured, RemainingSource, RemainingWork

GIB = 1 << 30


def warnings(
    used: Iterator[float], limit_gib: float = 64.0, remaining_s: float = math.inf, until_s: int = 7200
) -> list[tuple[float, str]]:  # fmt: skip
    """When it is said for the first time, and how it is at the end."""
    now = [0.0]
    memory = TrainerMemory("8123", lambda: MemoryReading(int(next(used) * GIB), int(limit_gib * GIB)))
    said = []
    for second in range(0, until_s, 5):
        now[0] = float(second)
        if memory.look(now[0], remaining_s):
            said.append((now[0], memory.warning))
    return said


def growing(gib_per_minute: float, until: float = math.inf) -> Iterator[float]:
    for number in range(10_000):
        yield min(10.0 + gib_per_minute * number * 10 / 60, until)


def test_a_trainer_that_grows_is_told_of_once_with_the_ready_command() -> None:
    assert len(warnings(growing(0.4))) == 1
    ((when, line),) = warnings(growing(0.5))
    full = (0.95 * 64 - 10) / 0.5 * 60
    assert 600 < full - when <= 1800, "long before it is full"
    assert line.startswith("the trainer runs out of memory: ")
    command = line.rpartition(": ")[2]
    assert command.startswith("hetstream migrate 8123 --mem=")
    assert 96 <= int(command.partition("--mem=")[2].removesuffix("G")) <= 128


@pytest.mark.parametrize(
    ("used", "remaining_s"),
    [
        (growing(0.0), math.inf),
        (growing(0.5, until=30.0), math.inf),  # its caches are full then
        (growing(0.001), math.inf),
        (growing(0.4), 60.0),  # it ends before that
    ],
)
def test_no_other_trainer_is_told_of(used: Iterator[float], remaining_s: float) -> None:
    assert warnings(used, remaining_s=remaining_s) == []


@pytest.mark.shows("no alarm for a first epoch that fills a cache; growth once an epoch is foreseen")
def test_a_first_epoch_that_fills_half_of_the_memory_is_not_told_of() -> None:
    filling = (2 + 6 * min(1.0, second / 1200) for second in range(0, 100_000, 10))
    assert warnings(filling, limit_gib=16.0) == []


@pytest.mark.shows("no alarm for a first epoch that fills a cache; growth once an epoch is foreseen")
def test_steps_of_each_epoch_are_told_of_before_memory_is_full() -> None:
    steps = (4 + 1.5 * (second // 1200) for second in range(0, 100_000, 10))
    ((when, _),) = warnings(steps, limit_gib=16.0, until_s=9600)
    assert 9600 - when >= 300


def test_where_nothing_is_known_nothing_is_said_and_a_new_limit_begins_anew() -> None:
    readings: list[MemoryReading | None] = [None] * 100
    memory = TrainerMemory("1", lambda: readings.pop())
    assert not any(memory.look(float(second)) for second in range(0, 500, 10))
    assert (memory.warning, memory.first_warning) == ("", "")
    used, limits = growing(0.5), iter([64 * GIB] * 571 + [640 * GIB] * 2)
    memory = TrainerMemory("1", lambda: MemoryReading(int(next(used) * GIB), next(limits)))
    for second in range(0, 5710, 10):
        memory.look(float(second))
    assert memory.warning
    assert memory.first_warning
    memory.look(5710.0)
    assert memory.warning == "", "there is room again"
    assert memory.first_warning


@pytest.mark.parametrize(
    ("source", "left_s"), [("directive", 50.0), ("loader", 50.0), ("integration", 50.0), ("time_limit", math.inf)]
)
def test_only_counted_steps_say_that_a_job_is_soon_over(source: RemainingSource, left_s: float) -> None:
    assert counted_left_s(Measured(2.0, 10.0, remaining=RemainingWork(100.0, 0.1, source))) == left_s
    assert counted_left_s(Measured(0.0, 10.0, remaining=RemainingWork(100.0, 0.1, source))) == math.inf
    assert counted_left_s(Measured(2.0, 10.0)) == counted_left_s(None) == math.inf


def cgroup(place: Path, limit_file: str, limit: str, stat: str) -> None:
    place.mkdir(parents=True)
    (place / limit_file).write_text(f"{limit}\n")
    (place / "memory.stat").write_text(stat)


def test_both_versions_of_cgroups_are_read(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n")
    place = tmp_path / "system.slice/slurmstepd.scope/job_7"
    cgroup(place, "memory.max", str(4 * GIB), f"anon {GIB}\nfile {2 * GIB}\nshmem {GIB // 2}\n")
    assert read_job_memory("7", own, tmp_path) == MemoryReading(GIB + GIB // 2, 4 * GIB)
    own.write_text("9:name=systemd:/\n4:memory:/slurm/uid_0/job_7/step_0/task_0\n0::/\n")
    place = tmp_path / "memory/slurm/uid_0/job_7"
    stat = f"cache {GIB}\nrss 5\ntotal_rss {GIB}\ntotal_shmem 4096\n"
    cgroup(place, "memory.limit_in_bytes", str(2 * GIB), stat)
    assert read_job_memory("7", own, tmp_path) == MemoryReading(GIB + 4096, 2 * GIB)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", "0", "-1", "x", ""])
def test_without_a_limit_nothing_is_read(tmp_path: Path, limit: str) -> None:
    own = tmp_path / "own"
    own.write_text("0::/slurm/job_7/step_0\n")
    cgroup(tmp_path / "slurm/job_7", "memory.max", limit, f"anon {GIB}\n")
    assert read_job_memory("7", own, tmp_path) is None


@pytest.mark.parametrize(
    "text", ["", "0::/\n", "0::/slurm/job_77/step_0\n", "nonsense\n", "0::/slurm/job_7/step_0\n", "4:cpu:/job_7/step\n"]
)
def test_a_process_that_is_in_no_cgroup_of_the_job_reads_nothing(tmp_path: Path, text: str) -> None:
    own = tmp_path / "own"
    own.write_text(text)
    assert read_job_memory("7", own, tmp_path) is None
    assert read_job_memory("7", tmp_path / "away", tmp_path) is None
