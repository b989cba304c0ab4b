"""Train a small DLRM on Criteo-like rows, in one process, with data workers, and with an embedding server, too.

It compares the three: `make demo-dlrm`.

Uses the public commands as a user would; no Slurm is needed. Exit code 1 when a row was lost, came twice or in another
order, when the losses differ, or when a stage failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SAMPLE = HERE.parents[2] / "shared" / "data" / "criteo_sample.csv"  # beside a checkout; few machines have it
ROWS, EPOCHS, DATA_WORKERS = 40_000, 2, 2
TIMEOUT_S = 240.0  # a run takes some ten seconds on an idle machine
_START = time.monotonic()


@dataclass(frozen=True)
class Run:
    """What a training program wrote down: the rows and the loss of each batch, and what it printed."""

    batches: list[dict[str, Any]]
    output: str

    def loss(self, epoch: int) -> float:
        """The mean over an epoch."""
        losses = [batch["loss"] for batch in self.batches if batch["epoch"] == epoch]
        return sum(losses) / len(losses)

    def samples_per_s(self) -> float:
        """Of the last epoch: the first one has the start of the workers in it."""
        return float(self.output.strip().splitlines()[-1].split()[-2].replace(",", ""))


def say(text: str) -> None:
    """Print a line of the demo with its time."""
    print(f"[{time.monotonic() - _START:5.1f} s] {text}", flush=True)


def command(argv: list[str], folder: Path) -> str:
    """Run a command in a folder; its stdout.

    Raises:
        SystemExit: it failed; what it printed is on stderr.
    """
    try:
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        sys.exit(f"demo: {shlex.join(argv)}: no end after {TIMEOUT_S:.0f} s")
    if done.returncode != 0:
        sys.exit(f"demo: {shlex.join(argv)}: exit code {done.returncode}\n{done.stderr or done.stdout}")
    return done.stdout


def train(folder: Path, name: str, prefix: list[str]) -> Run:
    """Run the training program and read what it wrote down."""
    ledger = folder / f"{name}.jsonl"
    program = ["python", str(HERE / "train.py"), "--data", "criteo.csv", "--epochs", str(EPOCHS)]
    output = command([*prefix, *program, "--ledger", ledger.name], folder)
    for line in output.splitlines():
        if line.startswith("epoch "):
            say(f"  {line}")
    return Run([json.loads(line) for line in ledger.read_text().splitlines()], output)


def delivered(run: Run, rows: int) -> tuple[int, int]:
    """Rows that are missing in some epoch, and rows too many."""
    lost = twice = 0
    for epoch in range(EPOCHS):
        times = Counter(row for batch in run.batches if batch["epoch"] == epoch for row in batch["rows"])
        lost += sum(times[row] == 0 for row in range(rows))
        twice += sum(times.values()) - len(times)
    return lost, twice


def main() -> int:
    """All stages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work-dir", type=Path, default=Path("build/demo-dlrm"), help="of its files (%(default)s)")
    parser.add_argument("--rows", type=int, default=ROWS, help="%(default)s")
    parser.add_argument("--sample", type=Path, default=SAMPLE, help="rows to draw from, if the file is there")
    args = parser.parse_args()
    # The commands find `hetstream` and `python` where this Python is.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    load_before = os.getloadavg()[0]
    folder = args.work_dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    source = ["--sample", str(args.sample.absolute())] if args.sample.is_file() else []
    generated = "from a generator alone: no sample of Criteo's is here"
    where = f"drawn from those of {args.sample.name}" if source else generated
    say(f"writing {args.rows:,} rows, {where}")
    command(["python", str(HERE / "prepare.py"), "criteo.csv", "--rows", str(args.rows), *source], folder)
    say("first in one process, for comparison: it reads, computes the features and trains")
    alone = train(folder, "alone", [])
    say(f"now the same program with {DATA_WORKERS} data workers: they read and compute the features")
    prefix = ["hetstream", "run", "--data-workers", str(DATA_WORKERS), "--json", "summary.json", "--"]
    streamed = train(folder, "streamed", prefix)
    summary = json.loads((folder / "summary.json").read_text())
    say("and with an embedding server, too: it has the rows of the tables, less than half of which the trainer keeps")
    served = train(folder, "served", [*prefix[:4], "--embedding-servers", "1", "--"])
    is_same = alone.batches == streamed.batches == served.batches
    lost, twice = delivered(streamed, args.rows)
    learned = streamed.loss(EPOCHS - 1) < streamed.loss(0)
    waited_s = sum(loader["wait_s"] for loader in summary["loaders"])
    took_s = sum(loader["elapsed_s"] for loader in summary["loaders"])
    facts = {
        "rows": f"{args.rows:,} in each of {EPOCHS} epochs: {lost} lost, {twice} twice",
        "rows and losses": f"{'the same' if is_same else 'NOT the same'}, batch by batch, as in one process",
        "loss": f"{streamed.loss(0):.4f} in the first epoch, {streamed.loss(EPOCHS - 1):.4f} in the last",
        "samples/s": f"{streamed.samples_per_s():,.0f} with {DATA_WORKERS} data workers, "
        f"{served.samples_per_s():,.0f} with an embedding server, too, {alone.samples_per_s():,.0f} in one process "
        "(last epoch)",
        "trainer waited": f"{waited_s / max(took_s, 1e-9):.0%} of the time in its loop",
        "machine": f"{len(os.sched_getaffinity(0))} cores that all share; load {load_before:.1f} before",
    }
    print("\n" + "\n".join(f"{name:<16}{text}" for name, text in facts.items()) + "\n")
    return 0 if is_same and learned and (lost, twice) == (0, 0) else 1


if __name__ == "__main__":
    sys.exit(main())
