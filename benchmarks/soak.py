"""`make bench-soak`: a million small batches while data workers, the dispatcher and the trainer are killed at random.

Prints what was lost, given twice or wrong, and what leaked: memory of each kind of process, descriptors, files in
/dev/shm, processes. Ends with code 1 unless the ledger is exact, nothing is left, and neither descriptors nor memory
grow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import running
from benchmarks.processes import all_processes, children_of, command_line

EPOCHS = 10
SAMPLE_EVERY_S = 1.0
# A process may have so many more open at one sample than at another: peers come and go. One for each kill is a leak.
_MOST_DESCRIPTORS = 10
# How long a process must have lived for what it opens to mean anything.
_SETTLED_SAMPLES = 8
# Memory is judged in the second half of a life, when tables, buffers and caches have their size, and only where a
# process handled so many batches in it: a leak of 100 bytes a batch is 3.3 MiB then, far more than the 2 MiB that are
# allowed. What allocators keep, and connections of peers that are started again, stays below that however long the
# life.
_JUDGED_BATCHES = 35_000
_MOST_GROWTH_BYTES = 2 << 20
_WORKER = "data worker process"
_ROLES = (_WORKER, _WORKER, "whole data worker", "dispatcher", "trainer")


@dataclass
class Usage:
    """Memory and descriptors of one process over time.

    Attributes:
        role: what it is.
        batches: batches that the run had delivered at each sample.
        rss_bytes: resident memory at each sample.
        descriptors: open descriptors at each sample.
    """

    role: str
    batches: list[int] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def growth(self, share: float = 1.0) -> Growth:
        """What the second half of its life shows.

        Args:
            share: of the run's batches that went through this process.
        """
        # A trainer that was killed goes on some batches earlier.
        seen = np.maximum.accumulate(np.array(self.batches, dtype=np.float64))
        half = int(np.searchsorted(seen, (seen[0] + seen[-1]) / 2))
        done = seen[half:]
        held = np.array(self.rss_bytes[half:], dtype=np.float64)
        span = float(np.ptp(done))
        # A line through all samples: single ones that are high or low do not count for much.
        grown = float(np.polyfit(done, held, 1)[0]) * span if span else 0.0
        return Growth(int(span * share), int(grown))


@dataclass(frozen=True)
class Growth:
    """How the memory of a process grew in the second half of its life.

    Attributes:
        batches: that it handled in that time.
        grown_bytes: by how much.
    """

    batches: int
    grown_bytes: int

    @property
    def verdict(self) -> str:
        """Whether this is a leak, as a word or two."""
        if self.batches < _JUDGED_BATCHES:
            return "not judged"
        return "met" if self.grown_bytes <= _MOST_GROWTH_BYTES else "LEAKS"

    def row(self) -> dict[str, object]:
        """As plain values."""
        mib = self.grown_bytes / 2**20
        each = round(mib * 1e5 / self.batches, 2) if self.batches else 0.0
        return {
            "grown_mib": round(mib, 2),
            "batches": self.batches,
            "mib_per_100k_batches": each,
            "verdict": self.verdict,
        }


@dataclass
class Soak:
    """The processes of one run."""

    folder: Path
    batches: int
    workers: int
    chance: random.Random
    commands: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    usage: dict[int, Usage] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    starts: Counter[str] = field(default_factory=Counter)

    def start(self, name: str) -> None:
        """Start a process of the run, in the run's own session, with a log file."""
        address = self.folder / "address"
        work = ["--work-dir", f"{self.folder}/work", "--address-file", str(address)]
        words = {
            "dispatcher": ["internal", "dispatcher", "--bind", "tcp://127.0.0.1:0", *work],
            "trainer": [str(self.folder), f"file:{address}", str(self.batches // EPOCHS), str(EPOCHS)],
        }.get(name, ["internal", "worker", "--service", f"file:{address}", "--processes", "1"])
        program = ["-m", "benchmarks.clients.soak"] if name == "trainer" else ["-m", "hetstream.slurm_plugin.cli"]
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, *program, *words]
            self.commands[name] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.starts[name] += 1

    def keep_alive(self) -> None:
        """Start again what has died, as a job master does."""
        for name, process in list(self.commands.items()):
            if name != "trainer" and process.poll() is not None:
                self.start(name)

    def processes(self) -> Iterator[tuple[str, int]]:
        """The living processes that do the work: role and process id."""
        yield "dispatcher", self.commands["dispatcher"].pid
        for name, process in self.commands.items():
            if name.startswith("worker"):
                yield from ((_WORKER, pid) for pid in children_of(process.pid))
        yield from (("trainer", pid) for pid in children_of(self.commands["trainer"].pid))

    def kill_one(self) -> None:
        """Kill one process of a random role."""
        role = self.chance.choice(_ROLES)
        if role == "whole data worker":
            names = [name for name in self.commands if name.startswith("worker")]
            pids = [self.commands[self.chance.choice(names)].pid]
        else:
            pids = [pid for one, pid in self.processes() if one == role]
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.chance.choice(pids), signal.SIGKILL)
                self.kills[role] += 1

    def measure(self, done: int) -> None:
        """Note memory and descriptors of each process."""
        for role, pid in self.processes():
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                continue
            one = self.usage.setdefault(pid, Usage(role))
            one.batches.append(done)
            one.rss_bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))
            one.descriptors.append(descriptors)

    def end(self) -> None:
        """End what still runs, in order, then by force."""
        for pid in children_of(self.commands["trainer"].pid):  # of a run that was interrupted
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for process in self.commands.values():
            if process.poll() is None:
                process.terminate()
        for process in self.commands.values():
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        deadline = time.monotonic() + running.TEARDOWN_GRACE_S
        while _of_run(self.folder) and time.monotonic() < deadline:
            time.sleep(0.05)


def _of_run(folder: Path) -> list[str]:
    """Living processes whose command line names a file of the run's folder."""
    return [str(pid) for pid in all_processes() if f"{folder}/".encode() in command_line(pid)]


def run(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run the soak; what it found, as plain values."""
    total = args.batches // EPOCHS * EPOCHS
    counts = np.memmap(folder / "counts", dtype=np.uint8, mode="w+", shape=(total,))
    position = np.memmap(folder / "position", dtype=np.int64, mode="w+", shape=(1,))
    soak = Soak(folder, args.batches, args.workers, random.Random(args.seed))
    started = time.monotonic()
    for name in ("dispatcher", "trainer", *(f"worker{number}" for number in range(args.workers))):
        soak.start(name)
    due = sorted(soak.chance.randrange(total // 50, total - total // 50) for _ in range(args.kills))
    next_sample, stuck_at, stuck_since = started, -1, started
    try:
        while soak.commands["trainer"].poll() is None:
            now, done = time.monotonic(), int(position[0])
            soak.keep_alive()
            if now >= next_sample:
                soak.measure(done)
                next_sample = now + SAMPLE_EVERY_S
            if due and done >= due[0]:
                due.pop(0)
                soak.kill_one()
            if done != stuck_at:
                stuck_at, stuck_since = done, now
            elif now - stuck_since > args.patience:
                raise RuntimeError(f"no batch for {args.patience:g} s at step {done}: see the logs in {folder}")
            time.sleep(0.01)
        seconds = time.monotonic() - started
    finally:
        soak.end()
    (folder / "usage.json").write_text(json.dumps([asdict(one) for one in soak.usage.values()]))
    errors = (folder / "errors").read_text().splitlines() if (folder / "errors").exists() else []
    memory: dict[str, dict[str, object]] = {}
    growth: dict[str, int] = {}
    # Of the process of each role that lived longest: the others are still warming up.
    for one in sorted(soak.usage.values(), key=lambda one: one.batches[-1] - one.batches[0]):
        memory[one.role] = one.growth(1 / args.workers if one.role == _WORKER else 1.0).row()
        if len(one.batches) >= _SETTLED_SAMPLES:
            half = one.descriptors[len(one.descriptors) // 2 :]
            growth[one.role] = half[-1] - half[0]
    return {
        "batches": total,
        "seconds": round(seconds, 1),
        "batches_per_s": round(total / seconds),
        "kills": dict(soak.kills),
        "trainer_exit_code": soak.commands["trainer"].returncode,
        "lost": int(np.count_nonzero(counts == 0)),
        "given_twice": int(np.count_nonzero(counts > 1)),
        "wrong_or_misplaced": errors[:10],
        "memory": memory,
        "descriptor_growth": growth,
        # Stores of checkpoints are other programs': nothing here makes one.
        "shared_memory_left": [name for name in os.listdir("/dev/shm") if "hetstream" in name and "-ckpt-" not in name],
        "processes_left": _of_run(folder),
    }


def is_clean(found: dict[str, Any]) -> bool:
    """Whether the ledger is exact, nothing was left behind, and no process opens ever more files or leaks memory."""
    if max(found["descriptor_growth"].values(), default=0) > _MOST_DESCRIPTORS:
        return False
    if any(row["verdict"] == "LEAKS" for row in found["memory"].values()):
        return False
    empty = ("lost", "given_twice", "wrong_or_misplaced", "shared_memory_left", "processes_left", "trainer_exit_code")
    return not any(found[key] for key in empty)


def main() -> int:
    """Run the soak from the command line."""
    parser = argparse.ArgumentParser(description="Soak: small batches under random kills; ledger and leaks.")
    parser.add_argument("--batches", type=int, default=1_000_000, help=f"in all, over {EPOCHS} epochs")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2, help="data workers of one process each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds without a batch that end the run")
    parser.add_argument("--folder", type=Path, help="for the logs and the ledger; a temporary one is removed")
    parser.add_argument("--out", type=Path, default=running.ROOT / "build" / "bench" / "soak.json")
    parser.add_argument("--quick", action="store_true", help="shows that it runs; too short to judge memory")
    args = parser.parse_args()
    if args.quick:
        args.batches, args.kills = 20_000, 8
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hetstream-soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        found = run(folder, args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    rows = {key: value for key, value in found.items() if key != "memory"}
    for key, value in rows.items():
        sys.stdout.write(f"{key:32} {value}\n")
    for role, row in sorted(found["memory"].items()):
        sys.stdout.write(
            f"{'memory of ' + role:32} {row['grown_mib']:+.2f} MiB in {row['batches']:,} batches, the second half of "
            f"its life ({row['mib_per_100k_batches']:+.2f} in 100,000): {row['verdict']}\n"
        )
    sys.stdout.write("exact and clean\n" if is_clean(found) else "FAILED\n")
    return 0 if is_clean(found) else 1


if __name__ == "__main__":
    sys.exit(main())
