"""One client for the benchmark of slow samples: an epoch of a trainer, or the same by list scheduling."""

from __future__ import annotations

import heapq
import json
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.clients.service import running, wait_for_data_workers

BOUND, HETSTREAM, TORCH = "list scheduling", "hetstream", "torch DataLoader"
WORKERS, BATCH_SIZE, NUM_STEPS = 4, 4, 400
_SAMPLE_S, _SLOWER, _ONE_OF = 0.01, 50, 100
_SLOW = set(torch.randperm(NUM_STEPS * BATCH_SIZE, generator=torch.Generator().manual_seed(1)).tolist()[::_ONE_OF])


def sample_s(index: int) -> float:
    """How long a sample takes."""
    return _SAMPLE_S * (_SLOWER if index in _SLOW else 1)


def step_costs_s() -> list[float]:
    """How long each step takes, in the order of the samples."""
    return [
        sum(map(sample_s, range(first, first + BATCH_SIZE))) for first in range(0, NUM_STEPS * BATCH_SIZE, BATCH_SIZE)
    ]


def trainer_s() -> float:
    """A trainer's time for a step, with which it takes as much as the processes make."""
    return sum(step_costs_s()) / NUM_STEPS / WORKERS


def oversleep_s() -> float:
    """How much longer than asked for this machine sleeps."""
    began = time.monotonic()
    for _ in range(100):
        time.sleep(_SAMPLE_S)
    return (time.monotonic() - began) / 100 - _SAMPLE_S


class Samples(torch.utils.data.Dataset[Any]):
    """Samples that sleep."""

    def __len__(self) -> int:
        return NUM_STEPS * BATCH_SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(sample_s(index))
        return torch.zeros(16)


def epoch(loader: Any) -> tuple[float, float]:
    """Time of the second epoch, and what the trainer waits in it."""
    for _ in range(2):
        began = time.monotonic()
        waited_s, steps = 0.0, iter(loader)
        for _ in range(NUM_STEPS):
            asked = time.monotonic()
            next(steps)
            waited_s += time.monotonic() - asked
            time.sleep(trainer_s())
        epoch_s = time.monotonic() - began
        for _ in steps:
            raise AssertionError("more steps than there are")
    return epoch_s, waited_s


def bound_s(costs_s: list[float], workers: int, window: int, step_s: float, in_order: bool) -> tuple[float, float]:
    """Time of an epoch and what the trainer waits, where the next step always goes to the first free worker.

    Args:
        costs_s: time that each step takes, in the order of the steps.
        workers: who make them.
        window: a step is begun when at most so many lie between it and what the trainer has taken.
        step_s: the trainer's own time for a step.
        in_order: it takes them in their order; else as they come.
    """
    free_s = [0.0] * workers
    made_s: list[float] = []
    taken_s: list[float] = []
    now_s = waited_s = 0.0
    waiting: list[float] = []
    for step in range(len(costs_s) + window):
        if step < len(costs_s):
            begins_s = max(heapq.heappop(free_s), taken_s[step - window] if step >= window else 0.0)
            made_s.append(begins_s + costs_s[step])
            heapq.heappush(free_s, made_s[-1])
            heapq.heappush(waiting, made_s[-1])
        if step >= window - 1 and len(taken_s) < len(costs_s):
            there_s = made_s[len(taken_s)] if in_order else heapq.heappop(waiting)
            waited_s += max(0.0, there_s - now_s)
            now_s = max(now_s, there_s)
            taken_s.append(now_s)
            now_s += step_s
    return now_s, waited_s


def hetstream(in_order: bool) -> tuple[float, float]:
    """hetstream's dispatcher, data worker and loader."""
    from hetstream import DataLoader

    with ExitStack() as stack:
        service = stack.enter_context(running(WORKERS, os.sched_getaffinity(0)))
        loader = DataLoader(Samples(), BATCH_SIZE, seed=0, service=service, job_name="slow", in_order=in_order)
        stack.enter_context(loader)
        iter(loader)
        wait_for_data_workers(loader, WORKERS)
        return epoch(loader)


def main() -> None:
    """Measure every case of the request with the system that comes first."""
    torch.set_num_threads(1)
    system, request = sys.argv[1], json.loads(sys.argv[-1])
    for case, options in request["cases"].items():
        in_order = options["in_order"]
        if system == BOUND:
            late_s = oversleep_s()
            costs_s = [cost_s + BATCH_SIZE * late_s for cost_s in step_costs_s()]
            epoch_s, wait_s = bound_s(costs_s, WORKERS, NUM_STEPS, trainer_s() + late_s, in_order)
        elif system == HETSTREAM:
            epoch_s, wait_s = hetstream(in_order)
        else:
            loader: Any = torch.utils.data.DataLoader(
                Samples(), BATCH_SIZE, num_workers=WORKERS, persistent_workers=True, in_order=in_order
            )
            epoch_s, wait_s = epoch(loader)
        print(json.dumps({"case": case, "epoch_s": epoch_s, "wait_s": wait_s}), flush=True)


if __name__ == "__main__":
    main()
