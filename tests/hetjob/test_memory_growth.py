"""Running out of memory is foreseen in time, and seldom for nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetstream.hetjob.elastic.memory import Forecast, GrowthOptions, MemoryGrowth, memory_to_ask_for, theil_sen

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


@pytest.mark.shows("a companion that will run out of memory is replaced by one with more before")
@pytest.mark.shows("before memory runs out, a companion is replaced, and a trainer warned or migrated")
def test_a_gib_a_minute_below_16_is_said_five_minutes_before() -> None:
    found = watch(lambda now: 1 * GIB + now / 60 * GIB, 16 * GIB, 900, noise=0.05 * GIB)
    assert found is not None
    at, forecast = found
    assert at <= 900 - 300
    assert "GiB" in forecast.reason
    assert forecast.bytes_per_s * 60 == pytest.approx(GIB, rel=0.2)
    assert memory_to_ask_for(forecast, 16 * GIB) >= 24 * GIB


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


COMPANION, TRAINER = GrowthOptions(), GrowthOptions(ahead_s=1800.0)


def alarms(
    share: Callable[[float], float],
    options: GrowthOptions,
    minutes: float = 180.0,
    epoch: float | None = None,
    noise: float = 0.002,
) -> list[float]:
    """In which minutes there is an alarm, reading every 10 s until memory is full.

    Args:
        share: of the limit, over minutes.
        options: of the forecast.
        minutes: how long at the most.
        epoch: minutes of the first one; None where that is not known.
        noise: of each reading, as a share of the limit.
    """
    growth, random = MemoryGrowth(16 * GIB, options), np.random.default_rng(1)
    found = []
    for minute in np.arange(0.0, minutes, 1 / 6):
        used = share(float(minute)) + random.normal(0, noise)
        if used >= 1:
            break
        left_s = None if epoch is None else max(0.0, epoch - minute) * 60
        if growth.reading(float(minute) * 60, used * 16 * GIB, data_left_s=left_s):
            found.append(float(minute))
    return found


def slow(*values: float) -> list[Any]:
    """Values between others, which show the same."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("options", [COMPANION, TRAINER], ids=["companion", "trainer"])
@pytest.mark.parametrize("filling", [5, *slow(8), 10, *slow(12, 15), 20, *slow(30, 45), 60])
@pytest.mark.parametrize("plateau", [0.3, *slow(0.4), 0.5, *slow(0.6), 0.7, *slow(0.8), 0.9])
def test_a_first_epoch_that_fills_a_cache(options: GrowthOptions, filling: float, plateau: float) -> None:
    def share(minute: float) -> float:
        return 1 / 16 + (plateau - 1 / 16) * min(1.0, minute / filling)

    minutes = filling + 40
    assert alarms(share, options, minutes, epoch=filling) == [], "the loader says when its data was read"
    # Without that it is a leak until it ends: in time to do something, and not before.
    full_in = (0.95 - plateau) * filling / (plateau - 1 / 16)
    believed = min(options.ahead_s / 60, max(8.0, filling / 8))
    if full_in > believed + 2:
        assert alarms(share, options, minutes) == []
    if full_in < believed - 2 and filling > 12:
        assert alarms(share, options, minutes), "a leak of this rate would be foreseen"


@pytest.mark.parametrize("options", [COMPANION, TRAINER], ids=["companion", "trainer"])
@pytest.mark.parametrize(
    ("name", "share", "full"),
    [
        ("1 GiB every 3 minutes", lambda m: (4 + m // 3) / 16, 36),
        ("1 GiB every 7 minutes", lambda m: (4 + m // 7) / 16, 84),
        ("1 GiB every 15 minutes", lambda m: (4 + m // 15) / 16, 180),
        ("2 GiB every 30 minutes", lambda m: (4 + 2 * (m // 30)) / 16, 180),
        ("1.5 GiB each epoch of 20 minutes", lambda m: (4 + 1.5 * (m // 20)) / 16, 160),
        ("a leak", lambda m: 0.2 + 0.8 * m / 25, 25),
        ("a slow leak", lambda m: 0.2 + 0.8 * m / 300, 300),
        ("a leak under a sawtooth", lambda m: 0.2 + 0.25 * (m / 9 % 1) + 0.55 * m / 150, 150),
        ("a leak that begins late", lambda m: 0.5 + max(0.0, m - 60) * 0.02, 85),
    ],
)
def test_growth_is_foreseen_whether_steady_or_in_rare_steps(
    options: GrowthOptions, name: str, share: Callable[[float], float], full: float
) -> None:
    found = alarms(share, options, full)
    assert found, name
    assert full - found[0] >= 5, name
    assert full - found[0] <= 75, "and not at any growth"


@pytest.mark.parametrize("epoch", [10.0, 60.0, 100.0, 400.0])
@pytest.mark.parametrize("full", [40.0, 150.0])
def test_a_leak_is_foreseen_whenever_the_data_was_read(epoch: float, full: float) -> None:
    found = alarms(lambda minute: 0.1 + 0.9 * minute / full, TRAINER, full, epoch)
    assert found
    assert full - found[0] >= 5


@pytest.mark.parametrize("options", [COMPANION, TRAINER], ids=["companion", "trainer"])
@pytest.mark.parametrize("period", [4.0, 9.0, 20.0, 50.0])
@pytest.mark.parametrize("peak", [0.6, 0.8, 0.92])
def test_memory_that_is_freed_again_is_an_alarm_in_its_first_rise_at_most(
    options: GrowthOptions, period: float, peak: float
) -> None:
    def share(minute: float) -> float:
        return peak * (0.4 + 0.6 * (minute / period % 1))

    assert all(minute <= period for minute in alarms(share, options)), "it ends when memory is freed"
    assert alarms(share, options, epoch=period) == []


def test_what_is_asked_for_follows_what_was_seen() -> None:
    growth = MemoryGrowth(16 * GIB, TRAINER)
    forecast = None
    for second in range(0, 1200, 10):
        forecast = forecast or growth.reading(float(second), (1 + 14.2 * second / 900) * GIB)
    assert forecast is not None
    assert 24 <= memory_to_ask_for(forecast, 16 * GIB) / GIB <= 32, "not for hours at the rate of some minutes"


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
