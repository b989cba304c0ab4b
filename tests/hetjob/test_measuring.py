"""What a job tells the site of its speed and of the work that is left. Pure."""

from __future__ import annotations

import pytest

from hetstream.hetjob.elastic.snapshot import Companion, CompanionState, Snapshot
from hetstream.hetjob.elastic.step_terms import Measuring, WaitsByDataWorkers, Work, remaining, worker_memory_mb
from hetstream.hetjob.ports import MAX_POINTS, RemainingWork, SpeedPoint
from hetstream.mpi_dataworkers.wire.messages import LoaderStats, LoaderStatus

WORKING = CompanionState.WORKING


def loader(rank: int = 0, ordinal: int = 0, epoch: int = 2, step: int = 50, num_steps: int = 100) -> LoaderStatus:
    totals = LoaderStats(steps=7)
    return LoaderStatus(
        "j", ordinal, rank, 2, f"gpu{rank}", 1, epoch, step, num_steps, 0, 8, 2, 4.0, 2e6, 0.2, totals
    )  # fmt: skip


def moment(*companions: Companion, wait_share: float = 0.2, steps_per_s: float = 8.0, fixed: int = 0) -> Snapshot:
    return Snapshot(True, steps_per_s, wait_share, companions, fixed, 3.0 if fixed else 0.0)


def companion(name: str, rate: float, cpus: int = 4, state: CompanionState = WORKING) -> Companion:
    return Companion(name, cpus, state, 0.0, rate)


@pytest.mark.shows("a job that waited much never lowers the next range; data workers that never came do not count")
def test_only_data_workers_that_work_count() -> None:
    waits = WaitsByDataWorkers()
    queued = [companion(str(number), 0.0, state=CompanionState.PENDING) for number in range(3)]
    starting = companion("3", 0.0, state=CompanionState.STARTING)
    for second in range(11):
        waits.note(moment(*queued, starting, wait_share=0.9), float(second))
    for second in range(11, 31):
        waits.note(moment(*queued[1:], companion("0", 3.0), wait_share=0.1, fixed=1), float(second))
    assert waits.rows == [
        {"data_workers": 0, "seconds": 10.0, "wait_share": 0.9},
        {"data_workers": 2, "seconds": 20.0, "wait_share": 0.1},
    ]


def test_a_pause_of_the_loaders_counts_for_no_number() -> None:
    waits = WaitsByDataWorkers()
    for second, steps_per_s in ((0, 8.0), (1, 8.0), (2, 0.0), (500, 8.0), (502, 8.0)):
        waits.note(moment(companion("0", 3.0), steps_per_s=steps_per_s), float(second))
    assert waits.rows == [{"data_workers": 1, "seconds": 3.0, "wait_share": 0.2}]
    assert WaitsByDataWorkers().rows == []


def test_speeds_are_kept_by_size_and_number() -> None:
    measuring = Measuring(Work(total_epochs=3), ["--partition=cpu", "--mem-per-cpu=2000M"])
    found = measuring.measured(moment(companion("1", 3.0)), 4, 2.0, [loader(0), loader(1)], 0.0)
    assert found is not None
    assert found.points == (SpeedPoint(1, 0, 2.0), SpeedPoint(4, 1, 3.0))
    assert (found.steps_per_s, found.ideal_steps_per_s) == (8.0, 10.0)
    assert (found.step_bytes, found.gpus) == (5e5, 2)
    assert found.worker_memory_mb == 8000
    assert found.remaining == RemainingWork(100.0, 0.1, "loader", 600.0)
    # One that has shown no rate yet, or is of another size, bends nothing.
    for other in (companion("2", 0.0), companion("2", 3.0, cpus=8)):
        again = measuring.measured(moment(companion("1", 3.0), other), 4, 2.0, [loader()], 0.0)
        assert again is not None
        assert again.points == found.points
    two = measuring.measured(moment(companion("1", 3.0), companion("2", 2.5), fixed=1), 4, None, [loader()], 0.0)
    assert two is not None
    assert two.points == (*found.points, SpeedPoint(4, 3, 8.5))
    for number in range(1, 40):
        many = measuring.measured(
            moment(*(companion(str(one), 1.0) for one in range(number))), 4, None, [loader()], 0.0
        )
        assert many is not None
        assert len(many.points) <= MAX_POINTS
    assert many.points[-1] == SpeedPoint(4, 39, 39.0)


def test_nothing_is_said_while_no_step_is_taken() -> None:
    measuring = Measuring(Work())
    assert measuring.measured(moment(steps_per_s=0.0), 4, None, [], 0.0) is None
    assert measuring.measured(moment(wait_share=1.0), 4, None, [], 0.0) is None
    assert measuring.measured(Snapshot(False, 8.0, 0.1), 4, None, [], 0.0) is None
    found = measuring.measured(moment(), 4, None, [], 0.0)
    assert found is not None
    assert (found.points, found.remaining, found.step_bytes) == ((), None, None)


def test_the_best_word_on_what_is_left_counts() -> None:
    ranks = [loader(0), loader(1), loader(0, ordinal=1, epoch=0)]
    everything = Work(total_steps=1000, total_epochs=5, end_s=3600.0)
    assert remaining(everything, ranks, 10.0, 0.0) == RemainingWork(1500.0, 0.0, "directive", 2000.0)
    unknown = [loader(0, num_steps=-1)]
    assert remaining(everything, unknown, 10.0, 0.0) == RemainingWork(993.0, 0.0, "directive", 1000.0)
    epochs = Work(total_epochs=5, end_s=3600.0)
    assert remaining(epochs, ranks, 10.0, 0.0) == RemainingWork(500.0, 0.1, "loader", 1000.0)
    assert remaining(epochs, unknown, 10.0, 0.0) == RemainingWork(18000.0, 1.4, "time_limit")
    assert remaining(epochs, [], 10.0, 7200.0) == RemainingWork(0.0, 1.4, "time_limit")
    assert remaining(Work(), ranks, 10.0, 0.0) is None
    late = remaining(Work(total_epochs=1), ranks, 10.0, 0.0)
    assert late is not None
    assert late.steps == 0.0


@pytest.mark.parametrize(
    ("option", "memory_mb"),
    [("--mem=16G", 16384), ("--mem-per-cpu=500", 2000), ("--mem=1K", 1), ("--mem=x", None), ("--memory=1G", None)],
)
def test_memory_is_read_from_sbatchs_options(option: str, memory_mb: int | None) -> None:
    assert worker_memory_mb(["--partition=cpu", option], 4) == memory_mb
