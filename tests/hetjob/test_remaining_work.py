"""Each source of a job's remaining work, in their order, and what is no number. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest

from hetstream.base import process
from hetstream.base.process import TrainingProgress
from hetstream.hetjob.elastic.step_terms import UsualLength, Work, remaining
from hetstream.hetjob.ports import MOST, RemainingWork
from hetstream.mpi_dataworkers.wire.messages import LoaderStats, LoaderStatus

USUAL = UsualLength(0.25, 0.4, 3)


def loader(rank: int = 0, num_steps: int = 100, training: TrainingProgress | None = None) -> LoaderStatus:
    totals = LoaderStats(steps=7)
    return LoaderStatus(
        "j", 0, rank, 2, f"gpu{rank}", 1, 2, 50, num_steps, 0, 8, 2, 4.0, 2e6, 0.2, totals, training=training
    )


@pytest.mark.shows("a report to the daemon carries measured speeds, a grant a number, nodes and the reason")
def test_sources_come_in_their_order_each_with_its_own_uncertainty() -> None:
    told = TrainingProgress(30, 400)
    ranks = [loader(0, training=told), loader(1, training=told)]
    work = Work(total_steps=1000, total_epochs=5, end_s=4000.0, start_s=0.0, usual_length=lambda: USUAL)
    found = [remaining(work, ranks, 10.0, 500.0)]
    work = replace(work, total_steps=None)
    found.append(remaining(work, ranks, 10.0, 500.0))
    work = replace(work, total_epochs=None)
    found.append(remaining(work, ranks, 10.0, 500.0))
    ranks = [loader(0), loader(1)]
    found.append(remaining(work, ranks, 10.0, 500.0))
    found.append(remaining(replace(work, usual_length=lambda: None), ranks, 10.0, 500.0))
    assert found == [
        RemainingWork(1500.0, 0.0, "directive", 2000.0),
        RemainingWork(500.0, 0.1, "loader", 1000.0),
        RemainingWork(740.0, 0.2, "integration", 800.0),
        RemainingWork(5000.0, 0.4, "history"),  # 1000 s are usual, 500 s are over
        RemainingWork(17500.0, 1.4, "time_limit"),
    ]


def test_a_job_that_outlasts_its_like_goes_on_for_as_long_as_it_is_late() -> None:
    work = Work(end_s=4000.0, start_s=0.0, usual_length=lambda: USUAL)
    left = [remaining(work, [], 1.0, time_s) for time_s in (-5.0, 1000.0, 1500.0, 3000.0, 5000.0)]
    assert [one.steps for one in left if one] == [1000.0, 0.0, 500.0, 1000.0, 0.0], "the limit is at 4000 s"


def test_history_is_asked_only_where_nothing_better_is_known_and_no_start_means_no_history() -> None:
    def not_needed() -> UsualLength | None:
        raise AssertionError("a file was read for nothing")

    work = Work(total_steps=10, end_s=4000.0, start_s=0.0, usual_length=not_needed)
    assert remaining(work, [loader()], 1.0, 0.0) is not None
    work = Work(end_s=4000.0, usual_length=not_needed)
    assert remaining(work, [], 1.0, 0.0) == RemainingWork(2000.0, 1.4, "time_limit")


@pytest.mark.parametrize("total", [10**30, 1, 0])
def test_whatever_a_user_gives_is_a_message_that_the_daemon_takes(total: int) -> None:
    found = remaining(Work(total_steps=total), [loader()], 1.0, 0.0)
    assert found is not None
    assert 0 <= found.steps <= MOST
    assert msgspec.json.decode(msgspec.json.encode(found), type=RemainingWork) == found


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, math.nan, math.inf])
def test_a_usual_length_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="limit_share"):
        UsualLength(share, 0.4, 1)


@pytest.mark.parametrize(
    ("done", "total", "known"),
    [
        (3, 10, TrainingProgress(3, 10)),
        (11, 10, TrainingProgress(10, 10)),
        (0, math.inf, None),
        (0, math.nan, None),
        (0, -1, None),
        (-1, 10, None),
        (math.nan, 10, None),
        (0, 10**18, None),
    ],
)
def test_what_a_framework_says(done: float, total: float, known: TrainingProgress | None) -> None:
    process.tell(done, total)
    assert process.told() == known
    process.forget()
    assert process.told() is None
