"""The fitted time that data workers take for a step, and what it spares the elastic controller. Pure."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.hetjob.elastic.snapshot import Action, Limits
from hetstream.hetjob.elastic.tuning import LoadingPoints, fitted
from tests.hetjob.test_elastic_controller import History, Job, run

SHARED_S, BY_NUMBER_S = 0.004, 0.1


def curve(*numbers: int, noise: float = 0.0) -> list[tuple[int, float]]:
    return [
        (number, (1 + noise * (-1) ** place) / (SHARED_S + BY_NUMBER_S / number))
        for place, number in enumerate(numbers)
    ]


def test_both_parts_are_found_and_say_how_many_are_needed() -> None:
    model = fitted(curve(1, 4, 9))
    assert model is not None
    assert (model.shared_s, model.by_number_s) == pytest.approx((SHARED_S, BY_NUMBER_S))
    assert [model.needed(per_s) for per_s in (9.0, 100.0, 240.0)] == [1, 17, 600]
    assert [model.needed(per_s) for per_s in (250.0, 1e9)] == [None, None], "what is shared alone takes longer"
    assert model.per_s(17) >= 100.0 > model.per_s(16)


@pytest.mark.parametrize(
    "points",
    [
        [],
        curve(1, 4),  # any two points lie on such a curve
        curve(8, 9, 10),  # too near each other
        [(1, 10.0), (8, 50.0), (18, 50.0)],  # a disk that is full, not a link that is shared
        [(1, 10.0), (2, 30.0), (4, 90.0)],  # faster and faster
        curve(1, 4, 9, noise=0.2),
        [(1, 1e-200), (2, 1e-200), (4, 1e-200)],
        [(1, 1e200), (2, 1e200), (4, 1e200)],
    ],
)
def test_what_does_not_identify_both_parts_is_no_model(points: list[tuple[int, float]]) -> None:
    assert fitted(points) is None


def test_points_of_another_size_and_old_ones_do_not_count() -> None:
    points = LoadingPoints()
    for number, per_s in curve(1, 4, 9):
        points.note(4, number, per_s, 0.0)
    assert points.model() is not None
    for nothing in (0.0, -1.0, math.nan, math.inf):
        points.note(4, 30, nothing, 0.0)
    points.note(4, 0, 5.0, 0.0)
    assert points.model() is not None
    points.note(4, 9, curve(9)[0][1], 3600.0)
    assert points.model() is None, "an hour later"
    for number, per_s in curve(1, 4, 9):
        points.note(8, number, per_s, 3600.0)
    assert points.model() is not None
    points.note(4, 4, 1.0, 3600.0)
    assert points.model() is None


def with_and_without(job: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> tuple[History, History]:
    def history() -> History:
        step_s = job["step_s"]
        return run(Job(step_s=lambda _: step_s, make_s=job["make_s"], shared_s=job["shared_s"]), Limits(0, 200), 400)

    with_model = history()
    with monkeypatch.context() as patch:
        patch.setattr("hetstream.hetjob.elastic.tuning.fitted", lambda points: None)
        return with_model, history()


@pytest.mark.shows("a step's time is fitted by terms with intervals, and what cannot be told apart is said")
def test_a_job_whose_data_workers_share_a_link_is_fed_in_fewer_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link takes 7 of the 10 ms that a step takes the trainer."""
    now, before = with_and_without({"step_s": 0.010, "make_s": 0.05, "shared_s": 0.007}, monkeypatch)
    for history in (now, before):
        assert all(decision.action is Action.GROW for _, decision in history.changes)
        assert history.job.snapshot(400).wait_share <= 0.05
    assert len(now.changes) < len(before.changes)
    assert now.working <= before.working + 1
    assert now.changes[-1][0] < before.changes[-1][0], "sooner, too"
    assert "ms that data workers share" in now.changes[-1][1].reason


@pytest.mark.shows("a step's time is fitted by terms with intervals, and what cannot be told apart is said")
@settings(max_examples=30, deadline=None)
@given(share=st.floats(0.0, 1.5), make_s=st.floats(0.02, 0.3))
def test_it_takes_no_more_changes_and_at_most_one_more_data_worker(share: float, make_s: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        now, before = with_and_without({"step_s": 0.010, "make_s": make_s, "shared_s": 0.010 * share}, patch)
    assert len(now.changes) <= len(before.changes)
    assert now.working <= before.working + 1
    assert max(now.counts) <= max(before.counts) + 1
