"""A second family of generators for `bench-model`, which no setting was ever chosen with.

The first family was looked at while settings were chosen. This one has other forms of the same questions: noise that
grows with the step and has outliers, true steps that are not of the model's own form, memory that grows along other
curves. What is found here changes no setting: then it would be held out no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.memory_traces import EVERY_S, GIB, MemoryTrace
from benchmarks.resource_model.fit import Observations
from benchmarks.resource_model.step_time import StepTimeModel
from benchmarks.resource_model.terms import Configurations

Floats = NDArray[np.float64]
_FIRST_SEED = 50_000


def bent(truth: StepTimeModel, candidates: Configurations, generator: np.random.Generator) -> Floats:
    """True steps that are not of the model's form: every step also waits for something that no term names.

    Up to 5 % of the median step, the same for all configurations, and up to 3 % more with each doubling of trainers.
    """
    step_s: Floats = truth.step_s(candidates)
    waits_s = generator.uniform(0.0, 0.05) * float(np.median(step_s))
    crowd = generator.uniform(0.0, 0.03) * np.log2(np.maximum(candidates.trainers, 1.0))
    return (step_s + waits_s) * (1.0 + crowd)


def sampled(
    true_s: Floats,
    candidates: Configurations,
    num: int,
    generator: np.random.Generator,
    wait_share: Floats | None = None,
) -> Observations:
    """Steps in random configurations: Student's t with three degrees, wider for slower steps; one in 20 is a straggler.

    A straggler takes 1.5 to 4 times as long. The middle half of the others is about as wide as with 5 % of log-normal
    noise. `wait_share`: of each step, as loaders measure it, the time in which it waited for data.
    """
    chosen = generator.choice(len(candidates), num, replace=False)
    step_s = true_s[chosen]
    width = 0.045 * np.clip(step_s / np.median(true_s), 0.5, 2.0) ** 0.5
    noise = np.clip(1.0 + width * generator.standard_t(3, num), 0.7, None)
    stragglers = np.where(generator.random(num) < 0.05, generator.uniform(1.5, 4.0, num), 1.0)
    waits = None if wait_share is None else wait_share[chosen]
    return Observations(candidates[chosen], step_s * noise * stragglers, waits)


def generator_of(seed: int) -> np.random.Generator:
    """Seeds of its own, too."""
    return np.random.default_rng([_FIRST_SEED, seed])


def _square_root(at: Floats, generator: np.random.Generator) -> Floats:
    return at ** generator.uniform(0.5, 0.8)


def _faster_and_faster(at: Floats, generator: np.random.Generator) -> Floats:
    rate = generator.uniform(1.0, 3.0)
    return np.expm1(rate * at) / np.expm1(rate)


def _once_an_epoch(at: Floats, generator: np.random.Generator) -> Floats:
    epochs = generator.integers(8, 30)
    return np.floor(at * epochs) / epochs


def _with_pauses(at: Floats, generator: np.random.Generator) -> Floats:
    period = generator.uniform(0.05, 0.15)
    return (np.floor(at / period) + np.clip(2 * (at / period % 1.0), 0.0, 1.0)) * period


def _saturates(at: Floats, generator: np.random.Generator) -> Floats:
    middle, width = generator.uniform(0.1, 0.4), generator.uniform(0.02, 0.08)
    return generator.uniform(0.1, 0.4) / (1.0 + np.exp(-(at - middle) / width))


def _swings(at: Floats, generator: np.random.Generator) -> Floats:
    return generator.uniform(0.05, 0.2) * (1.0 + np.sin(2 * np.pi * at * generator.uniform(3, 20)))


def _bursts(at: Floats, generator: np.random.Generator) -> Floats:
    found = np.zeros(len(at))
    for begin in generator.uniform(0.0, 1.0, 6):
        length, height = generator.uniform(0.005, 0.03), generator.pareto(3.0) * 0.08
        found += np.where((at >= begin) & (at < begin + length), min(height, 0.4), 0.0)
    return found


def _slower_and_slower(at: Floats, generator: np.random.Generator) -> Floats:
    return generator.uniform(0.05, 0.3) * np.log1p(at * 50) / np.log1p(50)


# Shares of the limit over shares of a time: those that reach it go from 0 to 1 while the time goes from 0 to 1.
GROWS: dict[str, Callable[[Floats, np.random.Generator], Floats]] = {
    "growth that slows down": _square_root, "growth that speeds up": _faster_and_faster,
    "growth once an epoch": _once_an_epoch, "growth with pauses": _with_pauses,
}  # fmt: skip
FITS: dict[str, Callable[[Floats, np.random.Generator], Floats]] = {
    "a table that is filled": _saturates, "swings": _swings, "bursts": _bursts, "logarithm": _slower_and_slower,
}  # fmt: skip
KINDS = (*GROWS, *FITS)


def memory_traces(num: int, seed: int) -> Iterator[MemoryTrace]:
    """So many processes, of all kinds alike; readings have steps of noise that hold for a while, as allocators have."""
    for number in range(num):
        generator = np.random.default_rng([_FIRST_SEED, seed, number])
        kind = KINDS[number % len(KINDS)]
        limit = float(generator.choice([12, 24, 48, 96])) * GIB
        length_s = generator.uniform(1.5, 6) * 3600
        times = np.arange(0, length_s, EVERY_S)
        begin = generator.uniform(0.1, 0.5)
        if kind in GROWS:
            hit_s = generator.uniform(0.35, 0.9) * length_s
            share = begin + (1.0 - begin) * GROWS[kind](times / hit_s, generator)
        else:
            share = begin + FITS[kind](times / length_s, generator)
        held = np.repeat(generator.standard_normal(len(times) // 5 + 1), 5)[: len(times)]
        share = share + generator.uniform(0.002, 0.01) * held
        over = np.flatnonzero(share >= 1.0)
        yield MemoryTrace(kind, limit, times, share * limit, int(over[0]) if len(over) else None)
