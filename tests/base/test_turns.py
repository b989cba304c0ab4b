"""Turns of those who ask too often."""

from __future__ import annotations

import pytest

from hetstream.base.limits import RateLimit


def test_who_asks_too_often_waits_and_nobody_else() -> None:
    turns = RateLimit(per_s=10, at_once=3, longest_s=2)
    assert [turns.wait_s("a", 100.0) for _ in range(5)] == pytest.approx([0, 0, 0, 0.1, 0.2])
    assert turns.wait_s("b", 100.0) == 0
    # Half a second later five more have come.
    assert [turns.wait_s("a", 100.5) for _ in range(3)] == pytest.approx([0, 0, 0])
    assert turns.wait_s("a", 100.5) == pytest.approx(0.1)


def test_who_keeps_to_the_rate_never_waits() -> None:
    turns = RateLimit(per_s=10, at_once=1, longest_s=2)
    assert [turns.wait_s("a", number / 10) for number in range(100)] == pytest.approx([0.0] * 100, abs=1e-9)


def test_no_flood_makes_its_own_user_wait_for_ever_after() -> None:
    turns = RateLimit(per_s=10, at_once=3, longest_s=2)
    assert max(turns.wait_s("a", 100.0) for _ in range(1000)) == pytest.approx(2)
    assert turns.wait_s("a", 103.0) == 0


def test_those_who_ask_no_more_are_forgotten() -> None:
    turns = RateLimit(per_s=10, at_once=3, longest_s=2)
    for number in range(1000):
        turns.wait_s(number, 100.0 + number)
    assert len(turns) <= 2
