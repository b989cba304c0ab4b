"""What the clients of the coordinated-reads benchmark have in common: lengths, emulated ranks and what they measured.

Needs NumPy and nothing else. A rank is a thread; a training step is a sleep as long as its batch's longest sample asks
for, and ends for all ranks when it ends for the last, as a step with an all-reduce does.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WORLD_SIZE = 4
BATCH_SIZE = 16
WARMUP_STEPS = 4
BOUNDARIES = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# A batch hung up in a service is an error and not a measurement.
STEP_DEADLINE_S = 60.0

Batch = tuple[int, int, int]
"""Samples, sum of their lengths, longest."""


@dataclass(frozen=True)
class Emulation:
    """How long a step takes: `unit_s` for each element of the longest sample, to the power of `power` per 256."""

    unit_s: float
    power: float

    def step_s(self, longest: int) -> float:
        """Length of a step, s."""
        return float(self.unit_s * 256 * (longest / 256) ** self.power)


def skewed_lengths(num_samples: int) -> npt.NDArray[np.int64]:
    """Draw lengths as texts have them: log-normal, median 100, at most 2048."""
    drawn = np.random.default_rng(0).lognormal(np.log(100), 1.0, num_samples)
    return np.clip(drawn, 4, 2048).astype(np.int64)


def train(case: str, emulation: Emulation, ranks: Sequence[Callable[[], Iterator[Batch]]], num_steps: int) -> None:
    """Run the ranks for so many steps and print the sample; the first few steps, with the start of all, do not count.

    Raises:
        RuntimeError: a rank failed or ended early.
    """
    barrier = threading.Barrier(len(ranks))
    started = 0.0
    taken: list[list[Batch]] = [[] for _ in ranks]
    failures: list[BaseException] = []

    def rank(number: int) -> None:
        nonlocal started
        try:
            batches = ranks[number]()
            for step in range(num_steps):
                batch = next(batches)
                time.sleep(emulation.step_s(batch[2]))
                if step >= WARMUP_STEPS:
                    taken[number].append(batch)
                barrier.wait(STEP_DEADLINE_S)
                if number == 0 and step == WARMUP_STEPS - 1:
                    started = time.perf_counter()
        except BaseException as error:  # noqa: BLE001, the thread's boundary: the main thread raises it
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(ranks))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    seconds = time.perf_counter() - started
    if failures:
        raise RuntimeError(f"a rank failed: {failures[0]!r}") from failures[0]
    batches = [one for of_rank in taken for one in of_rank]
    longest = np.array([[batch[2] for batch in of_rank] for of_rank in taken])
    sample = {
        "case": case,
        "elements_per_s": sum(real for _, real, _ in batches) / seconds,
        "padding_waste": 1 - sum(real for _, real, _ in batches) / sum(number * most for number, _, most in batches),
        "step_spread": float(1 - longest.mean(axis=0).sum() / longest.max(axis=0).sum()),
    }
    print(json.dumps(sample), flush=True)
