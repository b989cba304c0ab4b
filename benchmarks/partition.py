"""What it gains to move the stateless part of a forward to the data workers, and whether the losses stay the same.

    python -m benchmarks.partition [--programs dlrm,deepfm] [--accelerator-ms 3] [--budget-s 300] [--quick]
    python -m benchmarks.partition --equality [--programs dlrm,deepfm]

Each program (`benchmarks/partition_programs/`) is trained as it is written with torch's DataLoader, with data workers
for its dataset alone (`--offload off`), and with `--offload auto`: in turn, in rounds of which every second one has the
opposite order. A step's time is the median of the second half of a run's steps, since before the forward is captured,
checked and tried; of the rounds' times, it is the median. Each program has its share of `--budget-s`, and begins no
round that would take more. `--equality` compares the losses of 300 steps instead, with and without data worker
processes being killed.

EMULATED: this machine has no accelerator. A program's dense layers run on the trainer's CPU with one thread, and each
step sleeps for `--accelerator-ms` in addition, as if an accelerator worked.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness import say
from benchmarks.partition_programs.catalogue import PROGRAMS
from hetstream.mpi_dataworkers.partitioner.analysis import analyse
from hetstream.mpi_dataworkers.partitioner.classify import Offload
from hetstream.mpi_dataworkers.partitioner.cut import Rates
from hetstream.mpi_dataworkers.partitioner.provenance import Delivery
from hetstream.mpi_dataworkers.partitioner.side_effects import watch

ROOT = Path(__file__).resolve().parents[1]
HETSTREAM = str(Path(sys.executable).with_name("hetstream"))
KILL_EVERY_S = 1.5
# The paper's figures for its models, against data workers for the dataset alone; and what no program may lose.
TARGETS = {"deepfm": 1.6, "wide_and_deep": 1.4}
LEAST_OF_ORIGINAL = 0.97
NUM_OPERATORS, MOST_SECONDS = 1000, 10.0
SYSTEMS = ("original", "dataset only", "auto")
# A cut is captured, checked and tried in the first 46 steps.
STEPS, QUICK_STEPS, EQUALITY_STEPS = 160, 100, 300
ROUNDS, RUN_TIMEOUT_S = 3, 200.0


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        step_ms: the median of the second half of the steps.
        losses: as exact numbers.
        num_killed: data worker processes that were killed meanwhile.
    """

    step_ms: float
    losses: tuple[str, ...]
    num_killed: int = 0


def train(name: str, system: str, args: argparse.Namespace, kills: bool = False) -> Run:
    """Train a program in a process of its own."""
    offload = {"dataset only": "off", "auto": "auto"}.get(system)
    with tempfile.TemporaryDirectory() as directory:
        times, errors = Path(directory) / "times", Path(directory) / "errors"
        command = [sys.executable, "-m", "benchmarks.partition_programs", name, "--steps", str(args.steps)]
        command += ["--accelerator-ms", str(args.accelerator_ms), "--times", str(times)]
        if offload is None:
            command += ["--num-workers", str(args.data_workers)]
        else:
            command = [HETSTREAM, "run", "--data-workers", str(args.data_workers), "--offload", offload, *command]
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
        return Run(1e3 * statistics.median(steps[len(steps) // 2 :]), tuple(output.split()), killer.num_killed)


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
            workers = [pid for pid in below(self._pid) if b"worker" in words_of(pid) and not below(pid)]
            if workers:
                os.kill(workers[self.num_killed % len(workers)], signal.SIGKILL)
                self.num_killed += 1


def below(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [process for child in children for process in (child, *below(child))]


def words_of(pid: int) -> list[bytes]:
    """The command line of a process; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


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
    batch = Delivery().tag(torch.rand(256, 16))
    _, effects = watch(functools.partial(model, torch.rand(256, 16)))
    started = time.perf_counter()
    analysis = analyse(model, (batch,), {}, effects, Offload.AUTO)
    decision = analysis.decide(Offload.AUTO, Rates(0.1, 0.01, 4))
    assert len(analysis.graph.operators) >= NUM_OPERATORS, decision.reason
    return time.perf_counter() - started


def verdict(is_met: bool) -> str:
    """For the table."""
    return "met" if is_met else "NOT MET"


def times(args: argparse.Namespace) -> list[bool]:
    """Print each program's times; which targets are met."""
    met: list[bool] = []
    print("program          original  dataset only      auto   auto/only  auto/original  differences  rounds")
    for name in args.programs.split(","):
        runs = in_turn(name, args)
        original, only, auto = (statistics.median(run.step_ms for run in runs[system]) for system in SYSTEMS)
        gain, share = only / auto, original / auto
        differing = sum(differences(runs["original"][0], run) for run in runs["auto"])
        print(
            f"{name:15} {original:7.2f} ms {only:10.2f} ms {auto:7.2f} ms {gain:9.2f} x "
            f"{share:11.2f} x {differing:12d} {len(runs['auto']):7d}",
            flush=True,
        )
        found = [differing == 0, share >= LEAST_OF_ORIGINAL, gain >= TARGETS.get(name, 0.0)]
        for what, is_met in zip(("equal losses", "0.97 of the original", "the paper's gain"), found, strict=True):
            if not is_met:
                print(f"    {what}: {verdict(is_met)}")
        met += found
    seconds = long_forward_s()
    met.append(seconds <= MOST_SECONDS)
    limit = f"at most {MOST_SECONDS:g}: {verdict(met[-1])}"
    print(f"capture and decision for {NUM_OPERATORS} operators: {seconds:.1f} s, {limit}")
    return met


def equality(args: argparse.Namespace) -> list[bool]:
    """Print for each program how many losses differ; whether none do."""
    met: list[bool] = []
    print("program         differences  with kills  (killed)")
    for name in args.programs.split(","):
        original, auto = train(name, "original", args), train(name, "auto", args)
        hurt = train(name, "auto", args, kills=True)
        differing = differences(original, auto), differences(original, hurt)
        print(f"{name:15} {differing[0]:11d} {differing[1]:11d} {hurt.num_killed:9d}", flush=True)
        met.append(differing == (0, 0))
    return met


def main() -> int:
    """Measure, print, and say with the exit code whether all targets are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--steps", type=int, help=f"{STEPS}, or {EQUALITY_STEPS} with --equality")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--budget-s", type=float, default=300.0, help="time for all programs, about")
    parser.add_argument("--data-workers", type=int, default=2)
    parser.add_argument("--accelerator-ms", type=float, default=2.0)
    parser.add_argument("--quick", action="store_true", help=f"one round of {QUICK_STEPS} steps")
    parser.add_argument("--equality", action="store_true", help="compare losses instead of times, also under kills")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
    if args.steps is None:
        args.steps = QUICK_STEPS if args.quick else EQUALITY_STEPS if args.equality else STEPS
    text = "EMULATED accelerator: {0.accelerator_ms:g} ms a step; {0.data_workers} data workers; {0.steps} steps"
    print(text.format(args), flush=True)
    return 0 if all(equality(args) if args.equality else times(args)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
