"""Running out of memory is foreseen in time, and seldom for nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetstream.hetjob.elastic.memory_growth import (
    Forecast,
    MemoryGrowth,
    memory_to_ask_for,
    theil_sen,
)

GIB = float(1 << 30)


def watch(
    curve: Callable[[float], float], limit: float, until_s: float, remaining: bool = False, noise: float = 0.0
) -> tuple[float, Forecast] | None:
    """When the first alarm comes, reading every 15 s."""
    growth, rng = MemoryGrowth(limit), np.random.default_rng(0)
    for now in np.arange(0.0, until_s, 15.0):
        found = growth.reading(
            float(now), curve(float(now)) + rng.normal(0, noise), until_s - now if remaining else math.inf
        )
        if found:
            return float(now), found
    return None


def test_a_gib_a_minute_below_16_is_said_five_minutes_before() -> None:
    found = watch(lambda now: 1 * GIB + now / 60 * GIB, 16 * GIB, 900, noise=0.05 * GIB)
    assert found is not None
    at, forecast = found
    assert at <= 900 - 300
    assert "GiB" in forecast.reason
    assert forecast.bytes_per_s * 60 == pytest.approx(GIB, rel=0.2)
    assert memory_to_ask_for(forecast, 16 * GIB) >= 24 * GIB
    assert memory_to_ask_for(forecast, 16 * GIB, most_bytes=20 * GIB) == 20 * GIB


@pytest.mark.parametrize(
    "curve",
    [
        lambda _: 12 * GIB,
        lambda now: 4 * GIB + 8 * GIB * (1 - math.exp(-now / 300)),
        lambda now: 6 * GIB + 5 * GIB * ((now % 240) / 240),
        lambda now: 6 * GIB + (3 * GIB if now > 2000 else 0) + (3 * GIB if now > 4000 else 0),
        lambda now: 14 * GIB - now / 100 * GIB,
    ],
    ids=["level", "warms up", "sawtooth", "steps", "shrinks"],
)
def test_what_does_not_run_out_raises_no_alarm(curve: Callable[[float], float]) -> None:
    assert watch(curve, 16 * GIB, 7200, noise=0.05 * GIB) is None


def test_a_job_that_ends_before_needs_nothing() -> None:
    slow = lambda now: 4 * GIB + now / 600 * GIB  # noqa: E731
    assert watch(slow, 16 * GIB, 6600, remaining=True) is None
    assert watch(slow, 16 * GIB, 9000, remaining=True) is not None


def test_clocks_that_go_back_and_limits_of_nothing() -> None:
    growth = MemoryGrowth(GIB)
    growth.reading(10.0, 1.0)
    assert growth.reading(5.0, GIB) is None
    with pytest.raises(ValueError, match="above 0"):
        MemoryGrowth(0.0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.floats(-5, 5), st.floats(-5, 5), st.integers(8, 20))
def test_the_slope_of_a_line_is_its_slope(slope: float, level: float, num: int) -> None:
    times = np.arange(num, dtype=np.float64)
    found, grows = theil_sen(times, level + slope * times)
    assert found == pytest.approx(slope, abs=1e-9)
    if abs(slope) > 1e-6:
        assert grows == (slope > 0)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.floats(0, 100), min_size=1, max_size=80))
def test_any_readings_below_the_limit_are_survived(values: list[float]) -> None:
    growth = MemoryGrowth(101.0)
    for now, value in enumerate(values):
        found = growth.reading(now * 20.0, value)
        assert found is None or found.full_in_s >= 0
