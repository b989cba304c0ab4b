"""`make bench-step_terms`: what does a step pay for telling T_upd and T_emb apart, and is the told T_emb true?

Two small models on one core, so that a microsecond shows: a DLRM with 26 tables, and 200 layers behind one table, each
of which a hook would make dearer. A few steps with and without the trainer's timers, in turn.
docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from benchmarks import harness, machine
from benchmarks.harness import Row
from hetstream.mpi_dataworkers.loader.step_times import EmbeddingTimer, OptimizerTimer

_TABLES, _ROWS, _LAYERS, _BATCH, _DIM = 26, 10_000, 200, 256, 16
_STEPS, _MOST_SHARE, _MOST_OFF = 20, 0.01, 0.1
_US_PER_S = 1e6


class Dlrm(torch.nn.Module):
    """26 tables and two small perceptrons; it times its own lookups, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(_ROWS, _DIM, mode="sum", sparse=True) for _ in range(_TABLES)
        )
        self.top = torch.nn.Sequential(torch.nn.Linear(_DIM * _TABLES, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self.lookup_s = 0.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        began = time.thread_time()
        rows = [table(ids[:, number : number + 1]) for number, table in enumerate(self.tables)]
        self.lookup_s += time.thread_time() - began
        found: torch.Tensor = self.top(torch.cat(rows, dim=1))
        return found


def deep() -> torch.nn.Module:
    """One table and 200 layers of next to nothing."""
    return torch.nn.Sequential(torch.nn.Embedding(_ROWS, 8), *(torch.nn.Linear(8, 8) for _ in range(_LAYERS)))


@contextmanager
def hooked(timer: OptimizerTimer) -> Iterator[None]:
    """The timer's hooks, as `optimizer_calls.watch` has them, for a while."""
    hooks = register_optimizer_step_pre_hook(timer.before), register_optimizer_step_post_hook(timer.after)
    yield
    for hook in hooks:
        hook.remove()


def steps(train: Callable[[], None]) -> float:
    """Some steps: CPU seconds each, which hardly feel other load."""
    began = time.thread_time()
    for _ in range(_STEPS):
        train()
    return (time.thread_time() - began) / _STEPS


def measured(case: str, model: torch.nn.Module, ids: torch.Tensor, repeats: int) -> list[Row]:
    """Some steps without the timers and some with them, in turn."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        optimizer.zero_grad()
        model(ids).sum().backward()
        optimizer.step()

    draw = Random(0).random
    embeddings = EmbeddingTimer(draw, time.thread_time)
    timer = OptimizerTimer(draw, time.thread_time, embeddings)
    harness.say(f"step_terms: {case}")
    steps(train)
    bare, with_timers, own_s = list[float](), list[float](), 0.0
    for _ in range(repeats):
        bare.append(steps(train))
        before_s = getattr(model, "lookup_s", 0.0)
        with hooked(timer):
            with_timers.append(steps(train))
        own_s += getattr(model, "lookup_s", 0.0) - before_s
        embeddings.pause()
    rows = _of_times(case, bare, with_timers)
    told = timer.calls().embeddings
    if own_s and told is not None and told.num_timed:
        share = told.timed_s / told.num_timed / (own_s / (repeats * _STEPS))
        goal = f"1 within {_MOST_OFF:.0%}"
        note = f"{told.num_timed} timed steps"
        is_near = abs(share - 1) <= _MOST_OFF
        rows.append(Row(case, "told T_emb / by the program's own clock", share, "x", None, goal, is_near, note))
    return rows


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("What a step pays for the timers of its parts.", repeats=150).parse_args()
    repeats = 2 if args.quick else args.repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [
        *measured(f"DLRM, {_TABLES} tables", Dlrm(), torch.randint(0, _ROWS, (_BATCH, _TABLES)), repeats),
        *measured(f"{_LAYERS} layers, 1 table", deep(), torch.randint(0, _ROWS, (1,)), repeats),
    ]
    context = {
        "machine": machine.describe(all=list(machine.two_cores())[:1]),
        "versions": machine.versions("torch"),
        "notes": [
            f"One thread; batches of {_BATCH} and of 1; {_STEPS} steps without and with the timers, in turn.",
            "All times are CPU time of the thread.",
            "Lookups are timed in one step of eight at most, and in one a CPU second; optimizers in one call of eight.",
            "On a CPU. On a GPU a timed lookup records two events, and no step waits for them.",
        ],
    }
    return harness.finish("step_terms", args.out, rows, {}, context)


def _of_times(case: str, bare: list[float], with_timers: list[float]) -> list[Row]:
    added = [after - before for before, after in zip(bare, with_timers, strict=True)]
    share = [after / before for before, after in zip(bare, with_timers, strict=True)]
    rows = [
        Row(case, name, _median(values) * _US_PER_S, "CPU-us/step",
            (min(values) * _US_PER_S, max(values) * _US_PER_S), samples=tuple(values))
        for name, values in (("without timers", bare), ("with timers", with_timers), ("with - without", added))
    ]  # fmt: skip
    middle = _median(share)
    goal = 1 + _MOST_SHARE
    return [
        *rows,
        Row(case, "with timers / without", middle, "x", (min(share), max(share)), f"<= {goal:g}", middle <= goal,
            samples=tuple(share)),
    ]  # fmt: skip


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    sys.exit(main())
