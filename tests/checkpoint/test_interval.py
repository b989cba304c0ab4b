"""The save interval: Young/Daly against brute force, its two bounds, adaptation, and ranks that stay together."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.policy import (
    Adaptive,
    Attempt,
    Every,
    FailureHistory,
    Schedule,
    agree_on_interval,
    daly_interval_s,
    decide,
)


def lost_share(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Daly's own model of the run time: failures at random, half an interval and a save lost at each."""
    segments = math.exp((interval_s + cost_s) / mtbf_s) - 1
    return mtbf_s * segments / interval_s - 1


@pytest.mark.shows("the interval of saves is Young's and Daly's, from measured cost and failures")
@given(cost_s=st.floats(0.001, 60), mtbf_s=st.floats(600, 1e6))
def test_the_interval_loses_the_least(cost_s: float, mtbf_s: float) -> None:
    chosen = daly_interval_s(cost_s, mtbf_s)
    best = min(lost_share(chosen * factor / 100, cost_s, mtbf_s) for factor in range(20, 500, 5))
    assert lost_share(chosen, cost_s, mtbf_s) <= best * 1.01 + 1e-9


def test_young_first_order_and_daly_limit() -> None:
    assert daly_interval_s(1, 7200) == pytest.approx((2 * 7200) ** 0.5, rel=0.01)
    assert daly_interval_s(100, 40) == 40


@pytest.mark.shows("the interval of saves is Young's and Daly's, from measured cost and failures")
@given(
    cost_s=st.floats(0.0001, 1000),
    persist_s=st.floats(0, 10_000),
    step_s=st.floats(0.001, 100),
    mtbf_s=st.floats(1, 1e7),
    overhead=st.floats(0.001, 0.5),
)
def test_no_bound_is_broken(cost_s: float, persist_s: float, step_s: float, mtbf_s: float, overhead: float) -> None:
    chosen = decide(Adaptive(overhead, mtbf_s), cost_s=cost_s, persist_s=persist_s, step_s=step_s, mtbf_s=mtbf_s)
    interval_s = chosen.num_steps * step_s
    assert interval_s * (1 + 1e-9) >= persist_s
    assert cost_s / interval_s <= overhead * (1 + 1e-9)
    assert chosen.bound_by in ("failures", "overhead", "persist")
    assert f"{chosen.num_steps:,}" in chosen.reason


@pytest.mark.parametrize(
    ("cost_s", "persist_s", "bound_by", "words"),
    [
        (0.5, 1, "failures", "least loss at a failure every 24 h"),
        (20, 1, "failures", ""),
        (0.5, 3600, "persist", "takes 60 min to disk"),
        (400, 1, "overhead", "at most 0.03 of the time"),
    ],
)
def test_the_reason_names_what_bounds_it(cost_s: float, persist_s: float, bound_by: str, words: str) -> None:
    chosen = decide(Adaptive(), cost_s=cost_s, persist_s=persist_s, step_s=0.2, mtbf_s=86400)
    assert chosen.bound_by == bound_by
    assert words in chosen.reason


def test_failures_outweigh_the_belief_and_quiet_time_counts() -> None:
    history = FailureHistory.of([Attempt(0, 3600, True)] * 9 + [Attempt(100, 90, False)])
    assert history == FailureHistory(9, 9 * 3600)
    assert FailureHistory().mtbf_s(86400) == 86400
    assert history.mtbf_s(86400) == pytest.approx((86400 + 9 * 3600) / 10)
    assert history.mtbf_s(86400, running_s=10 * 86400) > history.mtbf_s(86400)


@pytest.mark.shows("the interval of saves is Young's and Daly's, from measured cost and failures")
def test_a_schedule_adapts_to_what_it_measures() -> None:
    schedule = Schedule(Adaptive(mtbf_s=3600), step=0, now_s=0.0)
    now_s, step, saves = 0.0, 0, []

    def train(num_steps: int, step_s: float, blocked_s: float) -> None:
        nonlocal now_s, step
        for _ in range(num_steps):
            step, now_s = step + 1, now_s + step_s
            if schedule.is_due(step, now_s):
                now_s += blocked_s
                saves.append(step)
                schedule.adopt(schedule.propose(step, blocked_s, now_s), step, now_s)

    train(1, step_s=30, blocked_s=0.05)  # the first step compiles
    assert saves == [1]
    assert schedule.decision.num_steps == 1
    train(3000, step_s=0.1, blocked_s=0.05)
    assert schedule.decision.num_steps == pytest.approx((2 * 0.05 * 3600) ** 0.5 / 0.1, rel=0.05)
    before = schedule.decision.num_steps
    train(10_000, step_s=0.1, blocked_s=0.8)
    assert schedule.decision.num_steps > 2 * before
    for _ in range(9):
        schedule.note_persist(500)
    train(10_000, step_s=0.1, blocked_s=0.05)
    assert schedule.decision.bound_by == "persist"
    assert schedule.decision.num_steps == pytest.approx(5000, rel=0.01)


def test_memory_that_the_first_save_allocates_is_no_cost_of_the_next_ones() -> None:
    schedule = Schedule(Adaptive(max_overhead=0.01), 0, 0.0)
    decision = schedule.propose(1, blocked_s=10.0, now_s=11.0, once_s=9.9)
    assert decision.num_steps == Schedule(Adaptive(max_overhead=0.01), 0, 0.0).propose(1, 0.1, 1.1).num_steps
    assert "100 ms blocked" in decision.reason


def test_alone_the_clock_decides_too() -> None:
    schedule = Schedule(Every(seconds=60), step=0, now_s=0.0)
    schedule.adopt(schedule.propose(1, 0.1, 1.1), 1, 1.1)
    assert schedule.decision.num_steps == 60
    assert not schedule.is_due(10, 61)
    assert schedule.is_due(10, 62, alone=True)
    assert not schedule.is_due(1, 62, alone=True), "a step is saved once"


def test_a_fixed_number_of_steps_is_exact() -> None:
    schedule = Schedule(Every(num_steps=10), step=40, now_s=0.0)
    assert [step for step in range(40, 52) if schedule.is_due(step, 1e9, alone=True)] == [50, 51]
    schedule.adopt(schedule.propose(50, 5.0, 9.0), 50, 9.0)
    assert schedule.decision.reason == "every 10 steps, as asked"
    assert not schedule.is_due(59, 1e9, alone=True)


@pytest.mark.shows("the interval of saves is Young's and Daly's, from measured cost and failures")
@given(seed=st.integers(0, 2**32))
def test_ranks_that_agree_save_at_the_same_steps(seed: int) -> None:
    dice = random.Random(seed)
    ranks = [Schedule(Adaptive(), step=0, now_s=dice.random()) for _ in range(3)]
    clocks = [dice.random() * 100 for _ in ranks]
    for step in range(1, 200):
        clocks = [now + dice.random() for now in clocks]
        due = {rank.is_due(step, now) for rank, now in zip(ranks, clocks, strict=True)}
        assert len(due) == 1
        if due.pop():
            proposals = [rank.propose(step, dice.random(), now) for rank, now in zip(ranks, clocks, strict=True)]
            for rank, now in zip(ranks, clocks, strict=True):
                rank.adopt(agree_on_interval(proposals), step, now)


@pytest.mark.shows("arguments that break a rule are refused, all at once")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Every(), "either num_steps or seconds"),
        (lambda: Every(num_steps=1, seconds=1), "either num_steps or seconds"),
        (lambda: Every(num_steps=0), "num_steps=0: at least 1"),
        (lambda: Every(num_steps=1.5), r"num_steps=1\.5: at least 1"),  # type: ignore[arg-type]
        (lambda: Every(seconds=float("inf")), "seconds=inf: more than 0"),
        (lambda: Adaptive(max_overhead=3, mtbf_s=0), r"max_overhead=3: .*; mtbf_s=0: seconds"),
    ],
)
def test_wrong_options(make: object, text: str) -> None:
    with pytest.raises(OptionsError, match=text):
        make()  # type: ignore[operator]
