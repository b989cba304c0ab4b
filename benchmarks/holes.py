"""`make bench-holes`: data workers in backfill holes on throw-away Slurm clusters. CPU work is sleeps, time is short.

Fourteen of sixteen CPUs are held by jobs that end in four minutes; a job that wants all sixteen waits with a planned
start, and one that is submitted later waits behind it. A hetstream job wants two data workers meanwhile. Does it get
them from the idle CPUs, and does anybody's planned start move? The same without it, and with companions that run as
long as their job. The three clusters run at the same time. docs/benchmarks-cluster.md explains the rows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from benchmarks import harness, machine
from benchmarks.clients.elastic_job import ElasticJob
from benchmarks.cluster import throw_away_cluster, why_no_cluster
from benchmarks.harness import Row
from benchmarks.processes import wait
from hetstream.base.errors import HetstreamError
from tests.devcluster.spec import ClusterShape

ALONE, IN_HOLES = "no data workers", "in holes"
SYSTEMS = {ALONE: None, "as long as the job": "", IN_HOLES: " --data-worker-time-min=1"}
LIMIT_MIN, SLEEP_S, IDLE_CPUS = 4, 238, 2
_LATER_S = 75.0  # by then companions run
_TIMEOUT_S = 420.0


@dataclass
class Seen:
    """What one cluster showed; times in seconds since 1970.

    Attributes:
        planned: planned starts of each waiting job, as they were told.
        started: when each started.
        submitted_at: the hetstream job.
        summary: of the elastic controller.
        problems: of the ledger of samples.
    """

    planned: dict[str, list[float]] = field(default_factory=lambda: {"large": [], "later": []})
    started: dict[str, float] = field(default_factory=dict)
    submitted_at: float = 0.0
    summary: Mapping[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Scene:
    """One cluster and its jobs."""

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        self.directory, self.environ, self.seen = directory, dict(environ), Seen()

    def play(self, directives: str | None) -> Seen:
        """Submit all jobs, and look until the large one has started."""
        for cpus in (8, 8 - IDLE_CPUS):
            self._submit("-N1", f"-c{cpus}", f"-t{LIMIT_MIN}", f"--wrap=exec sleep {SLEEP_S}")
        waiting = {"large": self._submit("-N2", "-n2", "-c8", "-t10", "--wrap=sleep 5")}
        wait(lambda: self._start(waiting["large"]), "a planned start", 60)
        self.seen.submitted_at, job = time.time(), None
        if directives is not None:
            words = f"--data-workers=0-2 --data-worker-cpus=1 --data-worker-cooldown=2{directives}"
            job = ElasticJob(
                self.directory / "job", self.environ, words, "--make-s=0.1", "--step-s=0.03", "--num-steps=60"
            )
        deadline = time.monotonic() + _TIMEOUT_S
        while "large" not in self.seen.started and time.monotonic() < deadline:
            if "later" not in waiting and time.time() - self.seen.submitted_at > _LATER_S:
                waiting["later"] = self._submit("-N1", "-c8", "-t5", "--wrap=sleep 5")
            for name, job_id in waiting.items():
                if name not in self.seen.started and (start := self._start(job_id)) is not None:
                    self._note(name, *start)
            time.sleep(1)
        if job is not None:
            job.stop()
            wait((job.home / "summary.json").exists, "the summary", 90)
            self.seen.summary = json.loads((job.home / "summary.json").read_text())["elastic"]
            self.seen.problems = job.ledger_problems(240)
        return self.seen

    def _note(self, name: str, state: str, start_s: float) -> None:
        if state == "PENDING":
            self.seen.planned[name].append(start_s)
        else:
            self.seen.started[name] = start_s

    def _submit(self, *options: str) -> str:
        return self._run("sbatch", "--parsable", "-pcpu", "--mem-per-cpu=1", "--output=/dev/null", *options).strip()

    def _start(self, job_id: str) -> tuple[str, float] | None:
        """State and start, planned or real; None while Slurm says none."""
        words = self._run("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T %S").split()
        return (words[0], datetime.fromisoformat(words[1]).timestamp()) if words[1:] and words[1] != "N/A" else None

    def _run(self, *argv: str) -> str:
        return subprocess.run(
            argv, env=self.environ, cwd=self.directory, capture_output=True, text=True, check=True, timeout=60
        ).stdout


def main() -> int:
    """Run the benchmark."""
    own = harness.parser("Data workers in backfill holes on throw-away Slurm clusters.", repeats=1)
    args = own.parse_args()
    if reason := why_no_cluster():
        harness.say(reason)
        return 2
    rows: list[Row] = []
    failures: dict[str, str] = {}
    chosen = {name: words for name, words in SYSTEMS.items() if not args.systems or args.systems in name}
    shape = ClusterShape(gpu_nodes=1, cpu_nodes=2, cpus_per_node=8)
    with ExitStack() as clusters, ThreadPoolExecutor(len(SYSTEMS)) as pool:
        scenes = {
            name: Scene(*clusters.enter_context(throw_away_cluster(shape, label=name.replace(" ", "-"))))
            for name in chosen
        }
        running = {name: pool.submit(scenes[name].play, words) for name, words in chosen.items()}
        moved_alone: dict[str, float] = {}  # what Slurm's own planning moves, without any companion
        for name, playing in running.items():
            try:
                seen = playing.result()
                if name == ALONE:
                    moved_alone = {job: _moved_s(planned) for job, planned in seen.planned.items() if planned}
                rows += _rows(name, seen, moved_alone if name == IN_HOLES else {})
            except (TimeoutError, HetstreamError, subprocess.SubprocessError, LookupError) as error:
                failures[name] = f"{type(error).__name__}: {error}"
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("torch"),
        "notes": [
            "Emulated CPU cost: batches and training steps are sleeps. Time is short: holes of four minutes, a least "
            "time of one minute, a cycle of backfill each second.",
            "Planned starts are read each second; moved is the latest one that was told less the first one. Slurm "
            "moves some by itself, so the goal is what it moves without data workers.",
            "The job that is submitted later waits behind companions that run as long as their job.",
        ],
    }
    return harness.finish("holes", args.out, rows, failures, context)


def _moved_s(planned: Sequence[float]) -> float:
    """How much later than first told a job was planned at most, s."""
    return max(planned) - planned[0]


def _rows(name: str, seen: Seen, moved_alone: Mapping[str, float]) -> list[Row]:
    rows = []
    for job, planned in seen.planned.items():
        if planned:
            moved_s, goal = _moved_s(planned), moved_alone.get(job)
            met = None if goal is None else moved_s <= goal
            target = None if goal is None else f"<= {goal:g}, as without data workers"
            rows.append(Row(f"{job} job: planned start moved", name, moved_s, "s", target=target, met=met))
    if "large" in seen.started:
        late_s = seen.started["large"] - seen.planned["large"][0]
        rows.append(Row("large job: real start after the first planned one", name, late_s, "s"))
    if seen.summary:
        cpu_s, hole_s = seen.summary["companion_cpu_s"], seen.summary["companion_cpu_s_in_holes"]
        room_s = IDLE_CPUS * (seen.planned["large"][0] - seen.submitted_at)
        rows += [
            Row("data workers: CPU time", name, cpu_s, "s", note=f"{seen.summary['companions']:.0f} companion(s)"),
            Row("data workers: share from holes", name, hole_s / cpu_s if cpu_s else None, "share"),
            Row("data workers: share of the idle CPU time", name, hole_s / room_s, "share"),
            Row("epochs with a sample lost or twice", name, float(len(seen.problems)), "", target="<= 0",
                met=not seen.problems),
        ]  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(main())
