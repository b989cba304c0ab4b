"""Retention: what the rules name stays, the newest good one always does, and restarts change nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.policy import Best, Retention, Saved, judge

rules = st.builds(
    Retention,
    keep_last=st.none() | st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 60),
    keep_best=st.none()
    | st.builds(Best, metric=st.just("loss"), mode=st.sampled_from(["min", "max"]), num=st.integers(1, 3)),
)
saved = st.builds(
    Saved,
    attempt=st.integers(1, 3),
    step=st.integers(0, 200),
    good=st.booleans(),
    metrics=st.just({}) | st.fixed_dictionaries({"loss": st.floats()}),
)
directories = st.lists(saved, unique_by=lambda one: (one.attempt, one.step), max_size=25)


def kept(checkpoints: list[Saved], rule: Retention) -> list[Saved]:
    return [verdict.saved for verdict in judge(checkpoints, rule) if verdict.keep]


@pytest.mark.shows("retention is a function of what is in the directory, and spares what is read")
@given(directories, rules)
def test_what_must_never_go_stays(checkpoints: list[Saved], rule: Retention) -> None:
    verdicts = judge(checkpoints, rule)
    assert [verdict.saved for verdict in verdicts] == sorted(checkpoints)
    gone = {verdict.saved for verdict in verdicts if not verdict.keep}
    assert all(verdict.reason for verdict in verdicts)
    good = sorted(one for one in checkpoints if one.good)
    if good:
        assert all(one < good[-1] for one in gone)
        assert not gone & set(good[-(rule.keep_last or len(good)) :])
    else:
        assert not gone


@given(directories, rules)
def test_a_second_look_deletes_nothing_more(checkpoints: list[Saved], rule: Retention) -> None:
    left = kept(checkpoints, rule)
    assert kept(left, rule) == left


@pytest.mark.shows("retention is a function of what is in the directory, and spares what is read")
@given(directories, rules)
def test_deleting_as_they_come_keeps_what_deleting_at_the_end_keeps(checkpoints: list[Saved], rule: Retention) -> None:
    """Restarts, and so the moments at which the rule is applied, change nothing in what it names."""
    present: list[Saved] = []
    for one in sorted(one for one in checkpoints if one.good):
        present = kept([*present, one], rule)
    assert present == kept([one for one in checkpoints if one.good], rule)


def test_each_rule_and_its_reason() -> None:
    losses = {10: 0.5, 20: 0.1, 30: math.nan, 40: 0.1, 55: 0.7, 60: 0.9, 70: 0.8}
    checkpoints = [Saved(1, step, metrics={"loss": loss}) for step, loss in losses.items()]
    rule = Retention(keep_last=2, keep_every=50, keep_best=Best("loss"))
    assert [(verdict.saved.step, verdict.keep, verdict.reason) for verdict in judge(checkpoints, rule)] == [
        (10, False, "older than the last 2 good, and nothing else keeps it"),
        (20, True, "min loss=0.1"),
        (30, False, "older than the last 2 good, and nothing else keeps it"),
        (40, False, "older than the last 2 good, and nothing else keeps it"),
        (55, True, "the first from step 50 on"),
        (60, True, "one of the last 2"),
        (70, True, "the newest good one"),
    ]


def test_damaged_ones_take_no_place_and_a_later_attempt_is_newer() -> None:
    checkpoints = [Saved(1, 90), Saved(1, 100), Saved(2, 60), Saved(2, 70, good=False), Saved(3, 65, good=False)]
    verdicts = {(one.saved.attempt, one.saved.step): one for one in judge(checkpoints, Retention(keep_last=2))}
    assert [key for key, verdict in verdicts.items() if not verdict.keep] == [(1, 90)]
    assert verdicts[2, 60].reason == "the newest good one"
    assert verdicts[3, 65].reason == "damaged, but there is no good one as new"
    more = judge([*checkpoints, Saved(3, 70), Saved(3, 80)], Retention(keep_last=1))
    assert [one.reason for one in more if not one.keep and not one.saved.good] == [
        "damaged, older than the last 1 good, and nothing else keeps it"
    ] * 2


@pytest.mark.shows("arguments that break a rule are refused, all at once")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Retention(keep_last=0, keep_every=-1), "keep_last=0: at least 1; keep_every=-1: at least 1"),
        (lambda: Retention(keep_best="loss"), r"keep_best='loss': such as Best"),  # type: ignore[arg-type]
        (lambda: Best("", mode="least", num=0), "metric='': .*; mode='least': 'min' or 'max'; num=0: at least 1"),
    ],
)
def test_wrong_options(make: object, text: str) -> None:
    with pytest.raises(OptionsError, match=text):
        make()  # type: ignore[operator]
