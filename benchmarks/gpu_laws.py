"""What `benchmarks.gpu_sharing` computes and does not measure: peers' laws, shapes of jobs, shares of time. Pure.

AntMan's law is that of its public code, its coordinator's is the paper's (section 3.3), which has no numbers. The other
one is like TGS's, whose rates count thread blocks: here they are launches a second.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# A guaranteed job that is slower than this is held up, for both.
TOLERANCE = 0.03
# AntMan: what it leaves out of each sleep, and the coordinator's step upwards, in percent.
_ANTMAN_LESS_S = 50e-6
_ANTMAN_STEP = 10
ANTMAN_FIRST_PERCENT = 10
# TGS: factors of a rate, and from where on a job is held up very much.
_FASTER, _SLOWER, _MUCH_SLOWER = 1.5, 0.92, 0.1
_MUCH = 3 * TOLERANCE
_ADDED_PART = 0.01
TGS_FIRST_PER_S = 500.0
_TGS_LEAST_PER_S = 10.0
# Gaps of the shape with many of them are between these, as far as the duty allows.
_LEAST_GAP_S, _MOST_GAP_S = 0.001, 0.005


def antman_idle_s(run_s: float, percent: int) -> float:
    """How long AntMan's job sleeps for a mini-batch.

    Args:
        run_s: how long the one before ran, without sleeping.
        percent: of the GPU's time that it may have (`perfControl`), above 0.
    """
    return max(0.0, run_s * 100 / percent - run_s - _ANTMAN_LESS_S)


def antman_percent(percent: int, slowdown: float) -> int:
    """What AntMan's coordinator writes next: step by step more, and half if the guaranteed job is held up.

    Args:
        percent: that it wrote before.
        slowdown: of the guaranteed job, against alone.
    """
    return min(100, percent + _ANTMAN_STEP) if slowdown <= 1 + TOLERANCE else max(1, percent // 2)


@dataclass(frozen=True)
class LaunchRate:
    """Launches a second that a TGS-like coordinator lets a job have.

    Attributes:
        per_s: so many.
        added_per_s: that it gets more each time; 0: the rate still grows by a factor.
    """

    per_s: float = TGS_FIRST_PER_S
    added_per_s: float = 0.0


def tgs_rate(rate: LaunchRate, slowdown: float) -> LaunchRate:
    """The next rate: additive increase, multiplicative decrease, after a start with multiplicative increase.

    Args:
        rate: the one before.
        slowdown: of the guaranteed job, against alone.
    """
    is_held_up = slowdown > 1 + TOLERANCE
    if not rate.added_per_s:
        if not is_held_up:
            return LaunchRate(rate.per_s * _FASTER)
        per_s = max(_TGS_LEAST_PER_S, rate.per_s / _FASTER)
        return LaunchRate(per_s, per_s * _ADDED_PART)
    if slowdown > 1 + _MUCH:
        return LaunchRate(max(_TGS_LEAST_PER_S, rate.per_s * _MUCH_SLOWER))
    if is_held_up:
        return LaunchRate(max(_TGS_LEAST_PER_S, rate.per_s * _SLOWER), rate.added_per_s)
    return LaunchRate(rate.per_s + rate.added_per_s, rate.added_per_s)


def gaps_of(busy_s: float, duty: float, bursts: int, *, is_long: bool) -> tuple[float, ...]:
    """How long a guaranteed job waits after each burst of a step, so that it is busy in a given part of the time.

    Args:
        busy_s: of a whole step.
        duty: that part.
        bursts: of a step.
        is_long: one gap at the end of the step; else as many as there are bursts, as far as they are not too short.
    """
    idle_s = busy_s * (1 - duty) / duty
    if is_long:
        return (*[0.0] * (bursts - 1), idle_s)
    count = max(1, min(bursts, int(idle_s / ((_LEAST_GAP_S + _MOST_GAP_S) / 2))))
    draw = random.Random(1)
    lengths = [draw.uniform(_LEAST_GAP_S, _MOST_GAP_S) for _ in range(count)]
    gaps = [0.0] * bursts
    for number, length in enumerate(lengths):
        gaps[(number + 1) * bursts // count - 1] = length * idle_s / sum(lengths)
    return tuple(gaps)


def extrapolated_s(took_s: float, done: int, steps: int) -> float:
    """How long all steps would take, if a job was stopped after some of them; it made at least one."""
    return took_s * steps / done


def least_s(left_s: float, beside_s: float, left_part: float) -> float:
    """How long the rest of a job takes at least, if another one comes that leaves it a part of the GPU.

    Args:
        left_s: of work that it has still to do.
        beside_s: how long the other one is there.
        left_part: of the time, that the other one leaves.
    """
    return left_s / left_part if left_s <= beside_s * left_part else beside_s + left_s - beside_s * left_part


def size_that_fills(sizes: tuple[int, int], peaks: tuple[int, int], fill_bytes: int) -> int:
    """How large a batch is that needs so much memory: two smaller ones tell, and memory grows evenly.

    Raises:
        ValueError: not even one sample fits, or memory does not grow.
    """
    each = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    if each <= 0:
        raise ValueError(f"batches of {sizes[0]} and {sizes[1]} need {peaks[0]:,} and {peaks[1]:,} bytes")
    size = int((fill_bytes - peaks[0]) / each + sizes[0])
    if size < 1:
        raise ValueError(f"no batch fits into {fill_bytes:,} bytes: one of {sizes[0]} needs {peaks[0]:,}")
    return size


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that this part of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-part * len(ordered) // 1) - 1))]


def largest_difference(losses: Sequence[float], alone: Sequence[float]) -> float:
    """By how much losses differ from those of a run alone, at most, as a part of them.

    Raises:
        ValueError: they are not as many.
    """
    return max(abs(one - other) / max(abs(other), 1e-12) for one, other in zip(losses, alone, strict=True))


def allotted_s(planned_s: Mapping[str, float], left_s: float) -> tuple[float, float]:
    """How long the first of some experiments is to take, and may take at most.

    Each has its part of what is left. Who takes longer takes it from the others, which keep at least half of theirs.

    Args:
        planned_s: of all experiments that are still to be run, in their order.
        left_s: of the whole run.
    """
    target_s = max(0.0, left_s) * next(iter(planned_s.values())) / sum(planned_s.values())
    return target_s, target_s + (max(0.0, left_s) - target_s) / 2
