"""Shapes that deceive whoever sees memory alone, with seeds that the benchmark does not use."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.memory_shapes import FITS, GROWS, looks_like_a_leak, memory_shapes
from hetstream.hetjob.elastic.memory_growth import GrowthOptions, MemoryGrowth
from hetstream.hetjob.master.trainer_memory import TRAINER_OPTIONS

LEAD_S = 300.0


def test_traces_are_what_they_are_called() -> None:
    for trace in memory_shapes(18, 7):
        assert (trace.full is None) == (trace.kind in FITS) != (trace.kind in GROWS)
        assert trace.epoch_s is not None
        if trace.full is not None:
            assert trace.times_s[trace.full] > 900, "what is full sooner is foreseen by nobody"
        if looks_like_a_leak(trace, LEAD_S):
            assert trace.kind in ("first epoch fills a cache", "freed after each epoch")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(GrowthOptions(), id="companions", marks=pytest.mark.slow),
        pytest.param(TRAINER_OPTIONS, id="trainers"),
    ],
)
def test_with_what_the_loader_says_they_deceive_nobody(options: GrowthOptions) -> None:
    in_time, false = [], []
    for trace in memory_shapes(45, 7):
        assert trace.epoch_s is not None
        growth, at = MemoryGrowth(trace.limit_bytes, options), math.inf
        for now, value in zip(trace.times_s[: trace.full], trace.resident_bytes[: trace.full], strict=True):
            if growth.reading(float(now), float(value), data_left_s=max(0.0, trace.epoch_s - float(now))):
                at = float(now)
                break
        if trace.full is None:
            false.append(at < math.inf)
        else:
            in_time.append(float(trace.times_s[trace.full]) - at >= LEAD_S)
    assert np.mean(in_time) >= 0.95
    assert np.mean(false) <= 0.05, "3 of 100; of these 20 it may be one"
