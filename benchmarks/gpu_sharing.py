"""`make bench-gpu_sharing`: a guaranteed and an opportunistic job on one GPU; AntMan's table 2 and figures 10 to 12.

On the first real GPU, or, with `--cpu`, on an emulated one: real processes that share one core and count their memory.
What the latter shows is whether decisions, orders and limits do what they should; it is no measure of a GPU.
docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import gpu_antman, gpu_interference, gpu_release, harness, machine
from benchmarks.allocator_trace import read_trace, replay
from benchmarks.gpu_laws import allotted_s
from benchmarks.gpu_machines import (
    CudaMachine,
    EmulatedMachine,
    Machine,
    OutOfTime,
    Run,
    Training,
    client,
    end_by,
    until,
    wait_for_steps,
    why_no_gpu,
)
from benchmarks.gpu_release import release
from benchmarks.harness import Row, System, row_of, say
from hetstream.base.errors import HetstreamError
from hetstream.hetjob.gpu.handshake import Connection, Introduction
from hetstream.hetjob.gpu.orders import VERSION, JobClass, Statistics
from hetstream.slurm_plugin.coordinator.table import look

# Pace and limits are found in this time, which is not measured.
SETTLE_S, MEASURE_S = 8.0, 6.0
# So many times, each beside what is measured alone just before and after it.
ROUNDS = 3
QUICK_S = 1.5
NOTES = [
    "EMULATION: no GPU. Kernels are operators of real processes on one core, memory is counted, and the host's is "
    "slowed down to 512 MiB/s. Ratios within a run mean something, seconds do not.",
    "Times of jobs count from the beginning of their first step, so imports are left out.",
]
# The whole run; what has not been measured then is reported as a failure.
_LIMIT_S = 540.0
# What the experiments that are run on a real GPU take there, as estimated: each has its part of the time.
_PLANNED_S = {
    "probe": 30.0,
    "real jobs": gpu_antman.PLANNED_S,
    "release": gpu_release.PLANNED_S,
    "interference": gpu_interference.PLANNED_S,
    "coordinator killed": gpu_interference.PLANNED_KILL_S,
    "allocator": 15.0,
}
_USUAL_PLAN_S = 60.0


def main() -> int:
    """Run the benchmark."""
    own = harness.parser("Several jobs on one GPU.", repeats=1)
    own.add_argument("--cpu", action="store_true", help="on an emulated GPU")
    own.add_argument("--seconds", type=float, default=_LIMIT_S, help="for all experiments (default: %(default)s)")
    args = own.parse_args()
    names = chosen_names(args.systems, on_cpu=args.cpu)
    context = {"machine": machine.describe(), "versions": machine.versions("torch"), "notes": NOTES if args.cpu else []}
    missing = "" if args.cpu else why_no_gpu()
    if missing:
        rows = [Row(name, "hetstream", None, "x", note=missing) for name in names]
        return harness.finish("gpu_sharing", args.out, rows, {}, context)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        node: Machine = EmulatedMachine(Path(folder)) if args.cpu else CudaMachine(Path(folder))
        if isinstance(node, EmulatedMachine):
            context["machine"]["pinned_cores"] = {"gpu": [node.core]}
        rows, failures = run_all(node, names, Run(args.quick, args.out), args.seconds)
    return harness.finish("gpu_sharing", args.out, rows, failures, context)


def chosen_names(words: str, *, on_cpu: bool) -> list[str]:
    """The experiments: those of the kind of GPU, or of all of them those that are named."""
    usual = [*EXPERIMENTS] if on_cpu else [*_PLANNED_S]
    known = [name for name in (*usual, *EXPERIMENTS, *ON_CUDA) if not on_cpu or name not in ON_CUDA_ALONE]
    systems = [System(name) for name in (dict.fromkeys(known) if words else usual)]
    return [system.name for system in harness.chosen(systems, words)]


def run_all(node: Machine, names: Sequence[str], run: Run, limit_s: float) -> tuple[list[Row], dict[str, str]]:
    """Run experiments one after the other, all together no longer than this.

    On a real GPU each has its part of the time, and is shorter where that is short.

    Returns:
        The rows of all, also of those that failed later, and why these failed.
    """
    rows: list[Row] = []
    failures: dict[str, str] = {}
    end_s = time.monotonic() + limit_s
    for number, name in enumerate(names):
        left_s = end_s - time.monotonic()
        planned = {later: _PLANNED_S.get(later, _USUAL_PLAN_S) for later in names[number:]}
        target_s, most_s = allotted_s(planned, left_s) if node.is_real else (math.inf, left_s)
        end_by(most_s)
        say(f"{name}: {(ALL[name].__doc__ or '').strip()}")
        try:
            for row in ALL[name](node, replace(run, seconds=target_s)):
                rows.append(row)  # what was measured before a failure is kept
        except OutOfTime:
            failures[name] = f"not done after {most_s:.0f} s, of {limit_s:.0f} s for all: the machine is too busy"
        except Exception as error:  # noqa: BLE001, whatever a GPU says: the others go on, and it is told at the end
            failures[name] = f"{type(error).__name__}: {error}"
        say(f"  {name} took {left_s - (end_s - time.monotonic()):.0f} s")
    return rows, failures


def table_2(node: Machine, run: Run) -> list[Row]:
    """A small opportunistic job A runs; a guaranteed B, which needs nearly the whole GPU, comes after a part of it."""
    sizes = node.sizes
    small = {**sizes.small, "wait_ms": 0, "steps": 100 if run.quick else 300}
    large = {**sizes.large, "wait_ms": 40, "steps": 4 if run.quick else 36}
    arrivals = 1 if run.quick else ROUNDS
    rows = []
    a_alone = _alone(node, small)
    b_before = _alone(node, large)
    for mode in ("UMem", "hetstream") if run.quick else ("pack", "UMem", "hetstream"):
        shared = mode == "hetstream"
        host_mib = 0 if mode == "pack" else sizes.host_mib
        ratios: dict[str, list[float]] = {"A": [], "B": []}
        for _ in range(arrivals if shared else 1):
            seen = _arrival(node, small, large, host_mib, shared)
            # B alone before and after each arrival, as a machine changes its speed.
            b_after = _alone(node, large) if seen["B"] else b_before
            alone = {"A": a_alone, "B": (b_before + b_after) / 2}
            b_before = b_after
            say(f"  table 2, {mode}: {seen}, alone {alone}")
            for name, took_s in seen.items():
                ratios[name] += [took_s / alone[name]] if took_s else []
            if not all(seen.values()):
                break
        for name in ("A", "B"):
            case = f"table 2: {name}, {'guaranteed' if name == 'B' else 'opportunistic'}"
            if len(ratios[name]) < (arrivals if shared else 1):
                rows.append(Row(case, f"{mode} / alone", None, "x time", note="out of memory"))
            else:
                goal = sizes.guaranteed_at_most if name == "B" else sizes.opportunistic_at_most
                goal = goal if shared and not (run.quick and sizes.opportunistic_at_most) else None
                rows.append(row_of(case, f"{mode} / alone", ratios[name], "x time", at_most=goal))
    return rows


def _alone(node: Machine, request: Mapping[str, Any]) -> float:
    """How long a job takes that has the GPU for itself."""
    with node.train(JobClass.GUARANTEED, request) as training:
        return training.finish() or 0.0


def _arrival(
    node: Machine, small: Mapping[str, Any], large: Mapping[str, Any], host_mib: int, shared: bool
) -> dict[str, float]:
    """How long A and B take if B comes while A runs; 0: it failed."""
    class_of_a = JobClass.OPPORTUNISTIC if shared else JobClass.GUARANTEED
    with contextlib.ExitStack() as stack:
        if shared:
            stack.enter_context(node.coordinator())
        first = stack.enter_context(node.train(class_of_a, small, host_mib))
        wait_for_steps(first, 30)
        second = stack.enter_context(node.train(JobClass.GUARANTEED, large, host_mib))
        return {"B": second.finish() or 0.0, "A": first.finish() or 0.0}


def figure_10(node: Machine, run: Run) -> list[Row]:
    """How much slower jobs become with less memory: each has its own answer, which trials of the coordinator find."""
    rows = []
    parts = (50,) if run.quick else (50, 10)
    sizes = node.sizes
    both = (("large activations", sizes.large, sizes.capacity_bytes), ("small", sizes.small, sizes.small_bytes))
    for name, request, need in both[:1] if run.quick else both:
        speeds: dict[int, float] = {}
        for percent in (100, *parts):
            node.resize(need * percent // 100)
            with node.train(JobClass.GUARANTEED, {**request, "wait_ms": 0, "steps": 4}) as training:
                if training.finish() is None:
                    raise HetstreamError(f"{name}, {percent} % of its memory: {training.last_words()}")
                speeds[percent] = 1e9 / statistics.median(busy for _, busy in training.steps())
        rows += [
            row_of(f"figure 10: {name}", f"{percent} % of its memory / all", [speeds[percent] / speeds[100]], "x speed")
            for percent in parts
        ]
    node.resize(sizes.capacity_bytes)
    return rows


def figure_11(node: Machine, run: Run) -> list[Row]:
    """How soon memory is free when a guaranteed job comes, and in use again when it has gone."""
    shrinks, grows, batches = [], [], []
    with node.coordinator(), node.train(JobClass.OPPORTUNISTIC, {**node.sizes.large, "wait_ms": 0}) as training:
        wait_for_steps(training, 3)
        pid = training.process.pid
        for _ in range(2 if run.quick else 5):
            full = node.held_bytes(pid)
            began_ns = time.monotonic_ns()
            guaranteed = Connection(str(node.socket), Introduction(VERSION, "bench", JobClass.GUARANTEED, node.gpu))
            guaranteed.report(Statistics(updated_ns=time.monotonic_ns()), news=True)
            until(lambda least=full // 3: node.held_bytes(pid) < least)
            shrinks.append((time.monotonic_ns() - began_ns) / 1e6)
            guaranteed.close()
            began_ns = time.monotonic_ns()
            until(lambda least=full * 9 // 10: node.held_bytes(pid) >= least)
            grows.append((time.monotonic_ns() - began_ns) / 1e6)
            wait_for_steps(training, len(training.steps()) + 2)
        batches = [busy / 1e6 for _, busy in training.steps()]
    case = "figure 11: from order to memory"
    note = f"a mini-batch takes {statistics.median(batches):.0f} ms"
    return [
        Row(case, name, statistics.median(values), "ms", (min(values), max(values)), note=note, samples=tuple(values))
        for name, values in (("shrink", shrinks), ("grow", grows))
    ]


def figure_12(node: Machine, run: Run) -> list[Row]:
    """A guaranteed job that waits for data, and an opportunistic one beside it, packed and coordinated."""
    settle_s, measure_s = (QUICK_S, QUICK_S) if run.quick else (SETTLE_S, MEASURE_S)
    beside = {**node.sizes.beside, "wait_ms": 0}
    with node.train(JobClass.GUARANTEED, beside) as training:
        bare_per_s = _per_s(training, measure_s / 2)
    with node.coordinator(), node.train(JobClass.OPPORTUNISTIC, beside) as training:
        solo_per_s = _per_s(training, measure_s / 2)
    rows = [row_of("figure 12: alone", "opportunistic, hetstream / no agent", [solo_per_s / bare_per_s], "x speed")]
    for wait_ms in node.sizes.waits_ms[:1] if run.quick else node.sizes.waits_ms:
        with node.train(JobClass.GUARANTEED, {**node.sizes.guaranteed, "wait_ms": wait_ms}) as guaranteed:
            # One process all the time: alone before and after each other one, as a machine changes its speed.
            alone = [_window(guaranteed, 1.0, measure_s / 2)]
            with node.train(JobClass.GUARANTEED, beside) as other:
                packed = _beside(guaranteed, other, 1.0, measure_s / 2)
                # The bound: the operating system has it run while the core is idle, and takes the core away at once.
                os.sched_setscheduler(other.process.pid, os.SCHED_IDLE, os.sched_param(0))
                idle = _beside(guaranteed, other, 0.5, measure_s / 2)
            alone.append(_window(guaranteed, 1.0, measure_s / 2))
            shared = []
            for _ in range(1 if run.quick else ROUNDS):
                with node.coordinator(), node.train(JobClass.OPPORTUNISTIC, beside) as other:
                    shared.append(_beside(guaranteed, other, settle_s, measure_s))
                    (row,) = look(str(node.socket)).gpus
                    given = next(process.reason for process in row.processes if process.job_class == "opportunistic")
                say(f"  the coordinator, waits {wait_ms} ms: {given}")
                alone.append(_window(guaranteed, 1.0, measure_s / 2))
        both = list(itertools.pairwise(alone))
        case = f"figure 12: waits {wait_ms} ms"
        modes = (
            ("packed", both[:1], [packed], bare_per_s),
            ("SCHED_IDLE", both[:1], [idle], bare_per_s),
            ("hetstream", both[1:], shared, solo_per_s),
        )
        for mode, around, measured, alone_per_s in modes:
            found = [_beside_alone(seen, *windows) for seen, windows in zip(measured, around, strict=True)]
            slowdowns = [slowdown for slowdown, _, _ in found]
            parts = [per_s / alone_per_s / left for _, per_s, left in found]
            left = statistics.fmean(left for _, _, left in found)
            drift = [_step_ns(after) / _step_ns(before) - 1 for before, after in around]
            note = f"alone {1 - left:.0%} busy; {min(drift):+.1%} .. {max(drift):+.1%} from before to after"
            say(f"  {case}, {mode}: {slowdowns} of alone, {parts} of what is left ({note})")
            goals = mode == "hetstream" and not run.quick  # in so short a time nothing has settled
            most, least = (1.03, 0.85) if goals else (None, None)
            rows += [
                replace(row_of(case, f"guaranteed, {mode} / alone", slowdowns, "x step", at_most=most), note=note),
                row_of(case, f"opportunistic, {mode} / what is left", parts, "x", at_least=least),
            ]
    return rows


def _beside_alone(
    seen: tuple[list[tuple[int, int]], float], before: list[tuple[int, int]], after: list[tuple[int, int]]
) -> tuple[float, float, float]:
    """What was seen beside another job, against the guaranteed one alone just before and just after.

    Returns:
        Its step against alone, steps a second of the other job, and the part of the time that is left alone.
    """
    steps, per_s = seen
    alone_ns = (_step_ns(before) + _step_ns(after)) / 2
    busy_ns = statistics.fmean(busy for _, busy in (*before, *after))
    return _step_ns(steps) / alone_ns, per_s, 1 - busy_ns / alone_ns


def _per_s(training: Training, measure_s: float) -> float:
    """Steps a second of a program that is alone."""
    return len(_window(training, 1.0, measure_s)) / measure_s


def _beside(
    guaranteed: Training, other: Training, settle_s: float, measure_s: float
) -> tuple[list[tuple[int, int]], float]:
    """The steps of the guaranteed job in some time, and how many steps a second the other one makes in it."""
    wait_for_steps(other, 1)
    seen = _window(guaranteed, settle_s, measure_s)
    began_ns, ended_ns = seen[0][0], seen[-1][0]
    made = sum(began_ns < end_ns <= ended_ns for end_ns, _ in other.steps())
    return seen, made / ((ended_ns - began_ns) / 1e9)


def probe(node: Machine, run: Run) -> list[Row]:  # noqa: ARG001
    """What the GPU, its driver and PyTorch can do of what sharing needs."""
    facts: dict[str, Any] = {}
    for line in client("gpu_probe.py", {}).splitlines():
        facts |= json.loads(line)
    return [
        Row("probe", name, None, "", note=fact) if isinstance(fact, str) else Row("probe", name, fact[0], fact[1])
        for name, fact in facts.items()
    ]


def allocator(node: Machine, run: Run) -> list[Row]:  # noqa: ARG001
    """What PyTorch's allocator does in some steps of training, recorded as JSON, and the model beside it."""
    path = run.out / "allocator_recorded.json"
    client("gpu_allocator.py", {"path": str(path), "steps": 3 if run.quick else 10})
    found = replay(read_trace(path.read_bytes()))
    say(f"  {path}: put it into tests/hetjob/gpu/fixtures, as allocator_NAME.json, and make test replays it")
    alike = found.num_alike / found.num_requests
    peaks = found.model_most_bytes / found.most_bytes
    note = f"{found.num_requests:,} requests, {found.most_bytes:,} bytes held at most"
    return [
        replace(row_of("allocator", "requests that the model serves alike", [alike], "share", at_least=1.0), note=note),
        row_of("allocator", "most memory held, model / PyTorch", [peaks], "x", at_most=1.0),
    ]


Experiment = Callable[[Machine, Run], Iterable[Row]]
EXPERIMENTS: Mapping[str, Experiment] = {
    "table 2": table_2,
    "figure 10": figure_10,
    "figure 11": figure_11,
    "release": release,
    "figure 12": figure_12,
}
ON_CUDA_ALONE: Mapping[str, Experiment] = {"probe": probe, "allocator": allocator}
# On an emulated GPU if they are named, to see that they run.
ON_CUDA: Mapping[str, Experiment] = {
    **ON_CUDA_ALONE,
    "real jobs": gpu_antman.real_jobs,
    "interference": gpu_interference.interference,
    "coordinator killed": gpu_interference.coordinator_killed,
}
ALL: Mapping[str, Experiment] = {**EXPERIMENTS, **ON_CUDA}


def _window(training: Training, settle_s: float, measure_s: float) -> list[tuple[int, int]]:
    """The steps of some time that begins a while from now, or from its first step."""
    wait_for_steps(training, 2)
    began_ns = time.monotonic_ns() + int(settle_s * 1e9)
    ended_ns = began_ns + int(measure_s * 1e9)
    until(lambda: time.monotonic_ns() >= ended_ns)
    return [step for step in training.steps() if began_ns <= step[0] < ended_ns]


def _step_ns(steps: list[tuple[int, int]]) -> float:
    return (steps[-1][0] - steps[0][0]) / (len(steps) - 1)


if __name__ == "__main__":
    sys.exit(main())
