"""`make bench-partition`: what is gained if data workers run the stateless part of a forward, and are losses the same?

Each program (`benchmarks/partition_programs/`) is trained as it is written with torch's DataLoader, with data workers
for its dataset alone (`--offload off`), and with `--offload auto`: in turn, in rounds of which every second one has the
opposite order. A step's time is the median of the second half of a run's steps, since before the forward is captured,
checked and tried. Each program has its share of `--budget-s`, and begins no round that would take more. `--equality`
compares the losses of 300 steps instead, with and without data worker processes being killed.

EMULATED: there is no accelerator. The trainer's CPU does its work with one thread: from the beginning of the backward
pass to the end of the optimizer's step, and sleeps until the accelerator's time is over: `--accelerator-ms`, or, of a
program for which the paper has it, that one's. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from benchmarks import harness, machine
from benchmarks.harness import Row, row_of, say
from benchmarks.partition_programs.catalogue import PROGRAMS
from benchmarks.processes import children_of, command_line
from benchmarks.running import ROOT
from hetstream.mpi_dataworkers.partitioner.analysis import Offload, analyse
from hetstream.mpi_dataworkers.partitioner.capture import Tracer
from hetstream.mpi_dataworkers.partitioner.cut import Rates

# The programs have loaders without worker processes, which else stay local.
STREAMS = "--stream-in-process-loaders"
HETSTREAM = str(Path(sys.executable).with_name("hetstream"))
KILL_EVERY_S = 1.5
# The paper's figures for its models, against data workers for the dataset alone; and what no program may lose.
TARGETS = {"deepfm": 1.6, "wide_and_deep": 1.4}
LEAST_OF_ORIGINAL = 0.97
NUM_OPERATORS, MOST_SECONDS = 1000, 10.0
SYSTEMS = ORIGINAL, ONLY, AUTO = "original", "dataset only", "auto"
# What `hetstream run` says of the cut that it has chosen.
PREDICTED = re.compile(r"a step takes ([\d.]+) ms with nothing moved and ([\d.]+) ms with ")
# A cut is captured, checked and tried in the first 75 steps.
STEPS, QUICK_STEPS, EQUALITY_STEPS = 160, 100, 300
ROUNDS, RUN_TIMEOUT_S = 3, 200.0
# Of a step of a program for which the paper has none.
ACCELERATOR_MS = 2.0
GUARD_CALLS, GUARD_BLOCKS = 200, 7


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        step_ms: the median of the second half of the steps.
        losses: as exact numbers.
        num_killed: data worker processes that were killed meanwhile.
        moved_ms: what the moved operators take in the trainer when nothing is moved.
    """

    step_ms: float
    losses: tuple[str, ...]
    num_killed: int = 0
    moved_ms: float = 0.0


def accelerator_ms(name: str, args: argparse.Namespace) -> float:
    """Of a step of a program: what the user asks for, what the paper has, or that of all programs."""
    asked, own = args.accelerator_ms, PROGRAMS[name].paper_accelerator_ms
    return next(float(each) for each in (asked, own, ACCELERATOR_MS) if each is not None)


def train(name: str, system: str, args: argparse.Namespace, kills: bool = False) -> Run:
    """Train a program in a process of its own."""
    offload = {ONLY: "off", AUTO: "auto"}.get(system)
    with tempfile.TemporaryDirectory() as directory:
        times, errors = Path(directory) / "times", Path(directory) / "errors"
        command = [sys.executable, "-m", "benchmarks.partition_programs", name, "--steps", str(args.steps)]
        command += ["--accelerator-ms", str(accelerator_ms(name, args)), "--times", str(times)]
        if offload is None:
            command += ["--num-workers", str(args.data_workers)]
        else:
            command = [
                HETSTREAM,
                "run",
                "--data-workers",
                str(args.data_workers),
                "--offload",
                offload,
                STREAMS,
                *command,
            ]
        with errors.open("w") as stream:
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stream, text=True)
            killer = Killer(process.pid)
            if kills:
                killer.start()
            try:
                output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
            finally:
                killer.stop()
                process.kill()
        if process.returncode != 0:
            raise SystemExit(f"{name}: exit code {process.returncode}\n{errors.read_text()[-2000:]}")
        ends = [float(line) for line in times.read_text().split()]
        steps = [after - at for at, after in itertools.pairwise(ends)]
        predicted = PREDICTED.findall(errors.read_text())
        moved_ms = float(predicted[-1][0]) - float(predicted[-1][1]) if predicted else 0.0
        step_ms = 1e3 * statistics.median(steps[len(steps) // 2 :])
        return Run(step_ms, tuple(output.split()), killer.num_killed, moved_ms)


def in_turn(name: str, args: argparse.Namespace) -> dict[str, list[Run]]:
    """The runs of a program, in rounds, as many as its share of the time allows and at least one."""
    runs: dict[str, list[Run]] = {system: [] for system in SYSTEMS}
    began, longest_s = time.monotonic(), 0.0
    share_s = args.budget_s / len(args.programs.split(","))
    for number in range(args.rounds):
        at = time.monotonic()
        if number and at - began + longest_s > share_s:
            break
        for system in SYSTEMS if number % 2 == 0 else SYSTEMS[::-1]:
            runs[system].append(train(name, system, args))
            say(f"{name}, round {number + 1}: {system} {runs[system][-1].step_ms:.2f} ms a step")
        longest_s = max(longest_s, time.monotonic() - at)
    return runs


def differences(one: Run, other: Run) -> int:
    """Steps whose losses differ in any bit, or that only one run has."""
    return sum(loss != expected for loss, expected in itertools.zip_longest(one.losses, other.losses))


class Killer:
    """Kills one process of the data workers below a process now and then."""

    def __init__(self, pid: int) -> None:
        self.num_killed = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(KILL_EVERY_S):
            workers = [
                pid for pid in below(self._pid) if b"worker" in command_line(pid).split(b"\0") and not below(pid)
            ]
            if workers:
                os.kill(workers[self.num_killed % len(workers)], signal.SIGKILL)
                self.num_killed += 1


def below(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    return [process for child in children_of(pid) for process in (child, *below(child))]


class Long(torch.nn.Module):
    """A forward of 1,000 operators before its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Logits."""
        for number in range(NUM_OPERATORS // 2):
            values = (values + number % 7).sin()
        return self.layer(values)


def long_forward_s() -> float:
    """Seconds to capture a forward of 1,000 operators and to decide."""
    model = Long()
    batch = torch.rand(256, 16)
    started = time.perf_counter()
    analysis = analyse(model, (batch,), {}, [batch], Offload.AUTO)
    decision = analysis.decide(Offload.AUTO, Rates(0.1, 0.01, 4))
    assert len(analysis.graph.operators) >= NUM_OPERATORS, decision.reason
    return time.perf_counter() - started


class _Reached(Exception):
    """Ends a forward where its graph would be called."""


def _reached(*_: object) -> None:
    raise _Reached


def guards_us(name: str) -> list[float]:
    """What it takes in each step to ask torch.compile's guards and to look at what it does not guard.

    Returns:
        Microseconds of CPU time, of several blocks of calls.
    """
    program = PROGRAMS[name]
    model = program.model()
    dataset = program.dataset(program.batch_size)
    arguments = tuple(next(iter(DataLoader(dataset, batch_size=program.batch_size)))[: program.num_inputs])
    tracer = Tracer(model, analyse(model, arguments, {}, arguments, Offload.AUTO).way, _reached)

    def block_us() -> float:
        began = time.thread_time()
        for _ in range(GUARD_CALLS):
            with contextlib.suppress(_Reached):
                assert not tracer.change(arguments, {})
                tracer(arguments, {})
        return 1e6 * (time.thread_time() - began) / GUARD_CALLS

    block_us()
    return [block_us() for _ in range(GUARD_BLOCKS)]


def guards(name: str, step_ms: float) -> list[Row]:
    """What the guards of a program's graph take, beside its step."""
    row = row_of(name, "guards of the graph", guards_us(name), "CPU-us a step")
    share = 100 * (row.value or 0.0) / (1e3 * step_ms)
    return [row, Row(name, "guards of the graph", share, "% of a step")]


def times(args: argparse.Namespace) -> list[Row]:
    """Each program's times and gains, and how long it takes to capture a long forward."""
    rows: list[Row] = []
    for name in args.programs.split(","):
        runs = in_turn(name, args)
        steps_ms = {system: [run.step_ms for run in runs[system]] for system in SYSTEMS}
        rows += [row_of(name, system, steps_ms[system], "ms a step") for system in SYSTEMS]
        rows.append(_gain(name, ONLY, steps_ms, TARGETS.get(name)))
        only_ms, moved_ms = (
            statistics.median(values) for values in (steps_ms[ONLY], [run.moved_ms for run in runs[AUTO]])
        )
        least = Row(
            name, f"{ONLY} / without what moved", only_ms / (only_ms - moved_ms), "x", note="by their measured times"
        )
        rows += [least, _gain(name, ORIGINAL, steps_ms, LEAST_OF_ORIGINAL)]
        differing = [float(differences(runs[ORIGINAL][0], run)) for run in runs[AUTO]]
        rows.append(row_of(name, AUTO, differing, "losses that differ", at_most=0.0))
        rows += guards(name, statistics.median(steps_ms[AUTO]))
    seconds = [long_forward_s()]
    rows.append(row_of(f"{NUM_OPERATORS:,} operators", "capture and decision", seconds, "s", at_most=MOST_SECONDS))
    return rows


def _gain(name: str, against: str, steps_ms: dict[str, list[float]], at_least: float | None) -> Row:
    """How many times as fast the trainer is with `--offload auto`, by the medians."""
    ratio = statistics.median(steps_ms[against]) / statistics.median(steps_ms[AUTO])
    ratios = [other / own for other, own in zip(steps_ms[against], steps_ms[AUTO], strict=True)]
    row = Row(name, f"{against} / {AUTO}", ratio, "x", (min(ratios), max(ratios)), samples=tuple(ratios))
    if at_least is None:
        return row
    return replace(row, target=f">= {at_least:g}", met=ratio >= at_least)


def equality(args: argparse.Namespace) -> list[Row]:
    """For each program how many losses differ."""
    rows: list[Row] = []
    for name in args.programs.split(","):
        original, auto = train(name, ORIGINAL, args), train(name, AUTO, args)
        hurt = train(name, AUTO, args, kills=True)
        say(f"{name}: {differences(original, auto)} and {differences(original, hurt)} differ, {hurt.num_killed} killed")
        for system, run in ((AUTO, auto), (f"{AUTO}, data workers killed", hurt)):
            row = row_of(name, system, [float(differences(original, run))], "losses that differ", at_most=0.0)
            rows.append(replace(row, note=f"{run.num_killed} killed" if run.num_killed else ""))
    return rows


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, help=f"{STEPS}, or {EQUALITY_STEPS} with --equality")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at the most (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=300.0, help="time for all programs, about (%(default)s)")
    parser.add_argument("--data-workers", type=int, default=2, help="(default: %(default)s)")
    ours = f"of a step (default: {ACCELERATOR_MS:g}, or what the paper has)"
    parser.add_argument("--accelerator-ms", type=float, help=ours)
    parser.add_argument("--quick", action="store_true", help=f"one round of {QUICK_STEPS} steps")
    parser.add_argument("--equality", action="store_true", help="compare losses instead of times, also under kills")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the report")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
    if args.steps is None:
        args.steps = QUICK_STEPS if args.quick else EQUALITY_STEPS if args.equality else STEPS
    emulated = ", ".join(f"{name} {accelerator_ms(name, args):.3g}" for name in args.programs.split(","))
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("torch"),
        "notes": [
            f"EMULATED accelerator, ms of a step: {emulated}; {args.data_workers} data workers; {args.steps} steps.",
            "Without what moved: what a step with data workers for the dataset alone would take if the moved operators "
            "took no time, by their measured times.",
        ],
    }
    rows = equality(args) if args.equality else times(args)
    return harness.finish("partition", args.out, rows, {}, context)


if __name__ == "__main__":
    raise SystemExit(main())
