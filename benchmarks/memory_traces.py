"""Made-up readings of resident memory: jobs that run out of it, and jobs that look as if they might. Seeded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GIB = float(1 << 30)
EVERY_S = 20.0
KINDS = (
    "leak", "leak under garbage collection", "leak that begins late",
    "caches that fill", "garbage collection", "steps", "level", "slow growth that fits",
)  # fmt: skip


@dataclass(frozen=True)
class MemoryTrace:
    """One process.

    Attributes:
        kind: how it was made.
        limit_bytes: that it may have.
        times_s, resident_bytes: readings, shape (n,).
        full: index of the first reading at the limit; None if there is none.
        epoch_s: how long an epoch takes; None for a process of which that is not known.
    """

    kind: str
    limit_bytes: float
    times_s: NDArray[np.float64]
    resident_bytes: NDArray[np.float64]
    full: int | None
    epoch_s: float | None = None


def memory_traces(num: int, seed: int) -> Iterator[MemoryTrace]:
    """So many processes, of all kinds alike."""
    generator = np.random.default_rng(seed)
    for number in range(num):
        kind = KINDS[number % len(KINDS)]
        limit = float(generator.choice([8, 16, 32, 64])) * GIB
        length_s = generator.uniform(1.5, 4) * 3600
        times = np.arange(0, length_s, EVERY_S)
        memory = generator.uniform(0.1, 0.5) * limit + _curve(kind, times, limit, generator)
        noise = generator.normal(0, generator.uniform(0.002, 0.02) * limit, len(times))
        memory = memory + np.convolve(noise, np.ones(3) / 3, "same")
        over = np.flatnonzero(memory >= limit)
        yield MemoryTrace(kind, limit, times, memory, int(over[0]) if len(over) else None)


def _curve(kind: str, times: NDArray[np.float64], limit: float, generator: np.random.Generator) -> NDArray[np.float64]:
    """What comes on top of the beginning."""
    found = np.zeros(len(times))
    length_s = times[-1]
    if kind.startswith("leak"):
        hit = generator.uniform(0.35, 0.9) * length_s
        start = generator.uniform(0.3, 0.5) * hit if kind.endswith("late") else 0.0
        found += np.maximum(0, times - start) / (hit - start) * 0.9 * limit
        if kind.endswith("collection"):
            period = generator.uniform(60, 300)
            found += 0.08 * limit * (times % period) / period
    elif kind == "caches that fill":
        found += generator.uniform(0.1, 0.45) * limit * (1 - np.exp(-times / generator.uniform(60, 600)))
    elif kind == "garbage collection":
        period = generator.uniform(60, 600)
        found += 0.35 * limit * (times % period) / period
    elif kind == "steps":
        for at in generator.uniform(0, length_s, 3):
            found += np.where(times > at, generator.uniform(0.02, 0.12) * limit, 0)
    elif kind == "slow growth that fits":
        found += times / length_s * generator.uniform(0, 0.35) * limit
    return found
