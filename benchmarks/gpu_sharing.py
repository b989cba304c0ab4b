"""`make bench-gpu_sharing`: a guaranteed and an opportunistic job on one GPU; AntMan's table 2 and figures 10 to 12.

With `--cpu` on an emulated GPU: real processes that share one core and count their memory. What that shows is whether
decisions, orders and limits do what they should; it is no measure of a GPU. docs/benchmarks.md explains the rows.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import harness, machine
from benchmarks.harness import Row, System, row_of, say
from benchmarks.running import ROOT
from hetstream.hetjob.gpu import environment
from hetstream.hetjob.gpu.devices.emulated_file import EmulatedGpuFile
from hetstream.hetjob.gpu.introduction import Connection, Introduction
from hetstream.hetjob.gpu.orders import JobClass, Statistics
from hetstream.hetjob.gpu.pages import VERSION
from hetstream.slurm_plugin.coordinator.look import look

MIB = 2**20
CAPACITY_BYTES = 64 * MIB
# Of the GPU's memory the one needs about 90 %, most of it activations, and the other 13 %: both do not fit.
LARGE = {"width": 512, "rows": 2700, "layers": 5}
SMALL = {"width": 384, "rows": 256, "layers": 4}
# Parts of a kernel's length are what a guaranteed job can lose at the end of a gap.
BESIDE = {"width": 256, "rows": 64, "layers": 4}
WAITS_MS = (70, 30, 13)
GUARANTEED = {"width": 512, "rows": 128, "layers": 6}
# Pace and limits are found in this time, which is not measured.
SETTLE_S, MEASURE_S = 8.0, 6.0
QUICK_S = 1.5
NO_GPU = "the GPU variant is not there yet; --cpu runs on an emulated one"
NOTES = [
    "EMULATION: no GPU. Kernels are operators of real processes on one core, memory is counted, and the host's is "
    "slowed down to 512 MiB/s. Ratios within a run mean something, seconds do not.",
    "Times of jobs count from the beginning of their first step, so imports are left out.",
]
# The whole run; what has not been measured then is reported as a failure.
_LIMIT_S = 290.0
_end_s = math.inf


class OutOfTime(Exception):
    """The run has taken as long as it may."""


@dataclass
class Training:
    """A training program that runs, or has run."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def steps(self) -> list[tuple[int, int]]:
        """When each step ended, and how long it computed."""
        whole_lines = self.out.read_text().split("\n")[:-1]
        return [(int(ended_ns), int(busy_ns)) for ended_ns, busy_ns in map(str.split, whole_lines)]

    def finish(self) -> float | None:
        """Wait for its end. How long it took from its first step on; None if it failed."""
        _until(lambda: self.process.poll() is not None)
        steps = self.steps()
        return (steps[-1][0] - steps[0][0] + steps[0][1]) / 1e9 if self.process.returncode == 0 and steps else None


class Machine:
    """One emulated GPU on the last core; all else runs on the others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.gpu = folder / "gpu0"
        self.socket = folder / "gpu.sock"
        self._count = 0
        cores = sorted(os.sched_getaffinity(0))
        self.core = cores[-1]
        os.sched_setaffinity(0, cores[:-1] or cores)
        self.emulate(CAPACITY_BYTES)

    def emulate(self, capacity_bytes: int) -> None:
        EmulatedGpuFile.create(
            self.gpu, capacity_bytes=capacity_bytes, core=self.core, segment_bytes=MIB, bus_bytes_per_s=512 * MIB
        )

    @contextlib.contextmanager
    def coordinator(self) -> Iterator[None]:
        argv = [sys.executable, "-m", "hetstream", "gpu", "coordinator", "--own-jobs"]
        argv += ["--gpu", f"emulation:{self.gpu}", "--socket", str(self.socket)]
        with subprocess.Popen(argv, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            process.stderr.readline()
            try:
                yield
            finally:
                process.terminate()

    @contextlib.contextmanager
    def train(self, job_class: JobClass, request: Mapping[str, Any], host_mib: int = 1024) -> Iterator[Training]:
        """A training program, as long as the context."""
        self._count += 1
        out, err = self._folder / f"{self._count}.out", self._folder / f"{self._count}.err"
        settings = {
            "HETSTREAM_GPU": f"emulation:{self.gpu}",
            "HETSTREAM_JOB_CLASS": job_class.value,
            "HETSTREAM_GPU_SOCKET": str(self.socket),
            "HETSTREAM_GPU_HOST_BYTES": str(host_mib * MIB),
        }
        argv = [sys.executable, str(ROOT / "benchmarks/clients/gpu_training.py"), json.dumps(request)]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(argv, stdout=stdout, stderr=stderr, env={**os.environ, **environment(settings)})
        try:
            yield Training(process, out, err)
        finally:
            process.kill()
            process.wait()


def main() -> int:
    """Run the benchmark."""
    own = harness.parser("Several jobs on one GPU.", repeats=1)
    own.add_argument("--cpu", action="store_true", help="on an emulated GPU, the only one that there is")
    args = own.parse_args()
    names = [system.name for system in harness.chosen([System(name) for name in EXPERIMENTS], args.systems)]
    context = {"machine": machine.describe(), "versions": machine.versions("torch"), "notes": NOTES if args.cpu else []}
    if not args.cpu:
        rows = [Row(name, "hetstream", None, "x", note=NO_GPU) for name in names]
        return harness.finish("gpu_sharing", args.out, rows, {}, context)
    rows = []
    failures: dict[str, str] = {}
    _end_by(_LIMIT_S)
    with tempfile.TemporaryDirectory() as folder:
        node = Machine(Path(folder))
        context["machine"]["pinned_cores"] = {"gpu": [node.core]}
        for name in names:
            say(f"{name}: {(EXPERIMENTS[name].__doc__ or '').strip()}")
            try:
                rows += EXPERIMENTS[name](node, args.quick)
            except OutOfTime:
                failures[name] = f"not done when the whole run had taken {_LIMIT_S:.0f} s: the machine is too busy"
    return harness.finish("gpu_sharing", args.out, rows, failures, context)


def table_2(node: Machine, quick: bool) -> list[Row]:
    """A small opportunistic job A runs; a guaranteed B, which needs nearly the whole GPU, comes after a part of it."""
    small = {**SMALL, "wait_ms": 0, "steps": 100 if quick else 300}
    large = {**LARGE, "wait_ms": 40, "steps": 4 if quick else 12}
    rows = []
    alone: dict[str, float] = {}
    for name, request in (("A", small), ("B", large)):
        with node.train(JobClass.GUARANTEED, request) as training:
            alone[name] = training.finish() or 0.0
    say(f"  table 2, alone: {alone}")
    for mode in ("UMem", "hetstream") if quick else ("pack", "UMem", "hetstream"):
        shared = mode == "hetstream"
        host_mib = 0 if mode == "pack" else 1024
        class_of_a = JobClass.OPPORTUNISTIC if shared else JobClass.GUARANTEED
        with contextlib.ExitStack() as stack:
            if shared:
                stack.enter_context(node.coordinator())
            first = stack.enter_context(node.train(class_of_a, small, host_mib))
            _wait_for_steps(first, 30)
            second = stack.enter_context(node.train(JobClass.GUARANTEED, large, host_mib))
            times = {"B": second.finish(), "A": first.finish()}
        say(f"  table 2, {mode}: {times}")
        for name in ("A", "B"):
            taken = times[name]
            case = f"table 2: {name}, {'guaranteed' if name == 'B' else 'opportunistic'}"
            ratio = taken / alone[name] if taken else None
            if ratio is None:
                rows.append(Row(case, f"{mode} / alone", None, "x time", note="out of memory"))
            elif shared and name == "B":
                rows.append(row_of(case, f"{mode} / alone", [ratio], "x time", at_most=1.03))
            else:
                rows.append(row_of(case, f"{mode} / alone", [ratio], "x time"))
    return rows


def figure_10(node: Machine, quick: bool) -> list[Row]:
    """How much slower jobs become with less memory: each has its own answer, which trials of the coordinator find."""
    rows = []
    parts = (50,) if quick else (50, 10)
    for name, request in (("large activations", LARGE),) if quick else (("large activations", LARGE), ("small", SMALL)):
        speeds: dict[int, float] = {}
        for percent in (100, *parts):
            need = CAPACITY_BYTES if request is LARGE else 12 * MIB
            node.emulate(need * percent // 100)
            with node.train(JobClass.GUARANTEED, {**request, "wait_ms": 0, "steps": 4}) as training:
                training.finish()
                speeds[percent] = 1e9 / statistics.median(busy for _, busy in training.steps())
        rows += [
            row_of(f"figure 10: {name}", f"{percent} % of its memory / all", [speeds[percent] / speeds[100]], "x speed")
            for percent in parts
        ]
    node.emulate(CAPACITY_BYTES)
    return rows


def figure_11(node: Machine, quick: bool) -> list[Row]:
    """How soon memory is free when a guaranteed job comes, and in use again when it has gone."""
    shrinks, grows, batches = [], [], []
    gpu = f"emulation:{node.gpu}"
    with node.coordinator(), node.train(JobClass.OPPORTUNISTIC, {**LARGE, "wait_ms": 0}) as training:
        _wait_for_steps(training, 3)
        seen = EmulatedGpuFile(node.gpu)
        pid = training.process.pid
        for _ in range(2 if quick else 5):
            full = seen.held_by(pid)
            began_ns = time.monotonic_ns()
            guaranteed = Connection(str(node.socket), Introduction(VERSION, "bench", JobClass.GUARANTEED, gpu))
            guaranteed.report(Statistics(updated_ns=time.monotonic_ns()), news=True)
            _until(lambda least=full // 3: seen.held_by(pid) < least)
            shrinks.append((time.monotonic_ns() - began_ns) / 1e6)
            guaranteed.close()
            began_ns = time.monotonic_ns()
            _until(lambda least=full * 9 // 10: seen.held_by(pid) >= least)
            grows.append((time.monotonic_ns() - began_ns) / 1e6)
            _wait_for_steps(training, len(training.steps()) + 2)
        batches = [busy / 1e6 for _, busy in training.steps()]
        seen.close()
    case = "figure 11: from order to memory"
    note = f"a mini-batch takes {statistics.median(batches):.0f} ms"
    return [
        Row(case, name, statistics.median(values), "ms", (min(values), max(values)), note=note, samples=tuple(values))
        for name, values in (("shrink", shrinks), ("grow", grows))
    ]


def figure_12(node: Machine, quick: bool) -> list[Row]:
    """A guaranteed job that waits for data, and an opportunistic one beside it, packed and coordinated."""
    settle_s, measure_s = (QUICK_S, QUICK_S) if quick else (SETTLE_S, MEASURE_S)
    beside = {**BESIDE, "wait_ms": 0}
    with node.train(JobClass.GUARANTEED, beside) as training:
        bare_per_s = _per_s(training, measure_s / 2)
    with node.coordinator(), node.train(JobClass.OPPORTUNISTIC, beside) as training:
        solo_per_s = _per_s(training, measure_s / 2)
    rows = [row_of("figure 12: alone", "opportunistic, hetstream / no agent", [solo_per_s / bare_per_s], "x speed")]
    for wait_ms in WAITS_MS[:1] if quick else WAITS_MS:
        with node.train(JobClass.GUARANTEED, {**GUARANTEED, "wait_ms": wait_ms}) as guaranteed:
            # One process all the time: alone before and after, so that a machine that changes its speed shows.
            alone = [_window(guaranteed, 1.0, measure_s / 2)]
            with node.train(JobClass.GUARANTEED, beside) as other:
                packed = _beside(guaranteed, other, 1.0, measure_s / 2)
                # The bound: the operating system has it run while the core is idle, and takes the core away at once.
                os.sched_setscheduler(other.process.pid, os.SCHED_IDLE, os.sched_param(0))
                idle = _beside(guaranteed, other, 0.5, measure_s / 2)
            with node.coordinator(), node.train(JobClass.OPPORTUNISTIC, beside) as other:
                shared = _beside(guaranteed, other, settle_s, measure_s)
                (row,) = look(str(node.socket)).gpus
                given = next(process.reason for process in row.processes if process.job_class == "opportunistic")
            alone.append(_window(guaranteed, 1.0, measure_s / 2))
        before_ns, after_ns = map(_step_ns, alone)
        alone_ns = (before_ns + after_ns) / 2
        busy_ns = statistics.fmean(busy for window in alone for _, busy in window)
        left = 1 - busy_ns / alone_ns
        say(f"  the coordinator, waits {wait_ms} ms: {given}")
        note = f"alone {1 - left:.0%} busy; {after_ns / before_ns - 1:+.1%} from before to after"
        case = f"figure 12: waits {wait_ms} ms"
        modes = (("packed", packed, bare_per_s), ("SCHED_IDLE", idle, bare_per_s), ("hetstream", shared, solo_per_s))
        for mode, (step_ns, per_s), alone_per_s in modes:
            goals = mode == "hetstream" and not quick  # in so short a time nothing has settled
            slowdown, part = step_ns / alone_ns, per_s / alone_per_s / left
            say(f"  {case}, {mode}: {slowdown:.3f} of alone, {part:.2f} of what is left ({note})")
            rows += [
                replace(
                    row_of(case, f"guaranteed, {mode} / alone", [slowdown], "x step", at_most=1.03 if goals else None),
                    note=note,
                ),
                row_of(case, f"opportunistic, {mode} / what is left", [part], "x", at_least=0.85 if goals else None),
            ]
    return rows


def _per_s(training: Training, measure_s: float) -> float:
    """Steps a second of a program that is alone."""
    return len(_window(training, 1.0, measure_s)) / measure_s


def _beside(guaranteed: Training, other: Training, settle_s: float, measure_s: float) -> tuple[float, float]:
    """How long a step of the guaranteed job takes, and how many steps a second the other one makes in that time."""
    _wait_for_steps(other, 1)
    seen = _window(guaranteed, settle_s, measure_s)
    began_ns, ended_ns = seen[0][0], seen[-1][0]
    made = sum(began_ns < end_ns <= ended_ns for end_ns, _ in other.steps())
    return _step_ns(seen), made / ((ended_ns - began_ns) / 1e9)


EXPERIMENTS = {"table 2": table_2, "figure 10": figure_10, "figure 11": figure_11, "figure 12": figure_12}


def _wait_for_steps(training: Training, steps: int) -> None:
    _until(lambda: len(training.steps()) >= steps or training.process.poll() is not None)
    if len(training.steps()) < steps:
        raise SystemExit(f"a training program ended early: {training.err.read_text()}")


def _window(training: Training, settle_s: float, measure_s: float) -> list[tuple[int, int]]:
    """The steps of some time that begins a while from now, or from its first step."""
    _wait_for_steps(training, 2)
    began_ns = time.monotonic_ns() + int(settle_s * 1e9)
    ended_ns = began_ns + int(measure_s * 1e9)
    _until(lambda: time.monotonic_ns() >= ended_ns)
    return [step for step in training.steps() if began_ns <= step[0] < ended_ns]


def _step_ns(steps: list[tuple[int, int]]) -> float:
    return (steps[-1][0] - steps[0][0]) / (len(steps) - 1)


def _until(condition: Callable[[], object]) -> None:
    while not condition():
        if time.monotonic() > _end_s:
            raise OutOfTime
        time.sleep(0.001)


def _end_by(limit_s: float) -> None:
    global _end_s
    _end_s = time.monotonic() + limit_s


if __name__ == "__main__":
    sys.exit(main())
