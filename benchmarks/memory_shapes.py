"""A third family of memory traces for `bench-model`: the shapes that deceive whoever sees memory alone. Seeded.

A first epoch that fills a cache at a constant rate, memory that is freed at the end of each epoch, steps that are rare,
a leak that begins beside them. Each trace has an epoch, so that the watch can be told how far the data is, or not.
What is found here changes no setting: then it would be held out no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.memory_traces import GIB, MemoryTrace

Floats = NDArray[np.float64]
# As the job master reads them.
EVERY_S = 10.0
_FIRST_SEED = 90_000
_LIMITS_GIB = (16, 48, 128)


def _leak(minutes: Floats, epoch: float, random: np.random.Generator) -> Floats:  # noqa: ARG001, the form of a shape
    begin = random.uniform(0.1, 0.5)
    return begin + (1 - begin) * minutes / random.uniform(20, 300)


def _leak_beside_a_cache(minutes: Floats, epoch: float, random: np.random.Generator) -> Floats:
    filled = random.uniform(0.1, 0.4)
    leak = (1 - 0.1 - filled) * minutes / random.uniform(60, 300)
    return 0.1 + filled * np.minimum(1, minutes / epoch) + leak


def _step_an_epoch(minutes: Floats, epoch: float, random: np.random.Generator) -> Floats:
    return random.uniform(0.1, 0.4) + random.uniform(0.04, 0.1) * np.floor(minutes / epoch)


def _rare_steps(minutes: Floats, epoch: float, random: np.random.Generator) -> Floats:  # noqa: ARG001
    return random.uniform(0.1, 0.4) + random.uniform(0.04, 0.12) * np.floor(minutes / random.uniform(12, 40))


def _leak_under_a_sawtooth(minutes: Floats, epoch: float, random: np.random.Generator) -> Floats:
    height, leak = random.uniform(0.1, 0.25), random.uniform(90, 300)
    return 0.2 + height * (minutes / epoch % 1) + (0.8 - height) * minutes / leak


def _fill(minutes: Floats, epoch: float, random: np.random.Generator) -> Floats:
    begin = random.uniform(0.05, 0.2)
    return begin + (random.uniform(0.3, 0.93) - begin) * np.minimum(1, minutes / epoch)


def _sawtooth(minutes: Floats, epoch: float, random: np.random.Generator) -> Floats:
    peak = random.uniform(0.5, 0.93)
    low = peak * random.uniform(0.3, 0.7)
    return low + (peak - low) * (minutes / epoch % 1)


def _steps_that_end(minutes: Floats, epoch: float, random: np.random.Generator) -> Floats:  # noqa: ARG001
    found = np.full(len(minutes), random.uniform(0.1, 0.4))
    for at in random.uniform(0, minutes[-1], 4):
        found += np.where(minutes > at, random.uniform(0.03, 0.12), 0)
    return found


def _noisy_level(minutes: Floats, epoch: float, random: np.random.Generator) -> Floats:  # noqa: ARG001
    return random.uniform(0.5, 0.85) * (1 + random.normal(0, 0.02, len(minutes)))


Shape = Callable[[Floats, float, np.random.Generator], Floats]
GROWS: dict[str, Shape] = {
    "leak": _leak, "leak beside a cache": _leak_beside_a_cache, "a step each epoch": _step_an_epoch,
    "rare steps": _rare_steps, "leak under a sawtooth": _leak_under_a_sawtooth,
}  # fmt: skip
FITS: dict[str, Shape] = {
    "first epoch fills a cache": _fill, "freed after each epoch": _sawtooth, "steps that end": _steps_that_end,
    "noisy level": _noisy_level,
}  # fmt: skip
KINDS = (*GROWS, *FITS)


def memory_shapes(num: int, seed: int) -> Iterator[MemoryTrace]:
    """So many processes, of all kinds alike. None runs full within 20 minutes: nobody foresees that in time."""
    for number in range(num):
        random = np.random.default_rng([_FIRST_SEED, seed, number])
        kind = KINDS[number % len(KINDS)]
        limit = float(random.choice(_LIMITS_GIB)) * GIB
        full: int | None = None
        minutes = share = np.zeros(0)
        while not len(share) or (full is not None) != (kind in GROWS):
            epoch = float(np.exp(random.uniform(np.log(8), np.log(120))))
            minutes = np.arange(0, random.uniform(3, 6) * 60, EVERY_S / 60)
            share = (GROWS | FITS)[kind](minutes, epoch, random) + random.normal(0, 0.002, len(minutes))
            over = np.flatnonzero(share >= 1.0)
            full = int(over[0]) if len(over) else None
        yield MemoryTrace(kind, limit, minutes * 60, share * limit, full, epoch * 60)


def looks_like_a_leak(trace: MemoryTrace, lead_s: float) -> bool:
    """Whether memory alone cannot tell this process, which never fills its memory, from one that will.

    It grows at a constant rate from its beginning, until it is so near the limit that a leak of this rate would be full
    within `lead_s`. Whoever is to foresee that leak in time must alarm for this process, too.
    """
    if trace.kind not in ("first epoch fills a cache", "freed after each epoch") or trace.epoch_s is None:
        return False
    peak = int(np.argmax(trace.resident_bytes[: round(trace.epoch_s / EVERY_S) + 1]))
    grown = trace.resident_bytes[peak] - trace.resident_bytes[0]
    return bool((trace.limit_bytes - trace.resident_bytes[peak]) * trace.times_s[peak] <= lead_s * grown)
