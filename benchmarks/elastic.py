"""`make bench-elastic`: how a job finds its number of data workers on a throw-away Slurm cluster. CPU work is sleeps.

Four questions, one job or more for each: does a starving trainer get what it needs, does a job that gains nothing give
everything back, how long do eight data workers take, and does a load that alternates make it flap? Beside a fixed
number of data workers and the ideal. Writes a picture for each. docs/benchmarks-cluster.md explains the rows.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks import harness, machine
from benchmarks.clients.elastic_job import ElasticJob
from benchmarks.clients.elastic_picture import Sample, picture
from benchmarks.cluster import throw_away_cluster, why_no_cluster
from benchmarks.harness import Row
from benchmarks.processes import wait
from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.dispatcher.client import StatusClient, running_service
from hetstream.mpi_dataworkers.wire.messages import Status

MAKE_S, STEP_S = 0.1, 0.025  # of a batch on one CPU, and of the trainer: four data workers make as much as it takes
COOLDOWN_S = 5
_EVERY_S = 0.5
_LAST_S = 10.0  # rates are those of so many last seconds
_TIMEOUT_S = 120.0


@dataclass
class Bench:
    """A cluster, and what was measured on it.

    Attributes:
        directory: of the jobs.
        environ: in which Slurm's commands reach the cluster.
        out: where pictures go.
        short: measure nothing, only show that it runs.
    """

    directory: Path
    environ: dict[str, str]
    out: Path
    short: bool
    rows: list[Row] = field(default_factory=list)

    def job(self, name: str, directives: str, *arguments: str) -> ElasticJob:
        """Submit one."""
        harness.say(f"{name}: {directives} {' '.join(arguments)}")
        return ElasticJob(self.directory / name, self.environ, directives, *arguments)

    @contextmanager
    def running(self, job: ElasticJob) -> Iterator[StatusClient]:
        """A connection to its dispatcher; the job ends with it."""
        try:
            wait(lambda: (job.home / "address").exists(), "the job's dispatcher")
            with StatusClient(running_service(job.home / "address")) as client:
                yield client
        finally:
            job.cancel()
            wait(job.has_ended, "the end of the job")

    def watch(self, job: ElasticJob, client: StatusClient, done: Callable[[list[Sample]], bool]) -> list[Sample]:
        """Look twice a second until `done`, or for two minutes; seconds count from the first step."""
        samples: list[Sample] = []
        wait(lambda: job.steps(), "the first step")
        began, first_s = time.monotonic(), job.steps()[0][0]
        while time.monotonic() - began < (8 if self.short else _TIMEOUT_S) and not done(samples):
            with suppress(HetstreamError):
                samples.append(_sample(client.fetch(), time.time() - first_s, len(job.companions())))
            time.sleep(_EVERY_S)
        return samples

    def row(
        self, case: str, system: str, value: float | None, unit: str, goal: float | None = None, note: str = "",
        *, at_least: bool = False,
    ) -> None:  # fmt: skip
        """Add a line of the table."""
        met = None if goal is None or value is None else (value >= goal if at_least else value <= goal)
        target = None if goal is None else f"{'>=' if at_least else '<='} {goal:g}"
        self.rows.append(Row(case, system, value, unit, target=target, met=met, note=note))

    def draw(self, name: str, title: str, samples: list[Sample], job: ElasticJob, ideal_per_s: float) -> None:
        """Write the picture of one job."""
        first_s = job.steps()[0][0]
        changes = [
            (one["time"] - first_s, f"{one['action']} {one['count']}") for one in job.events("DataWorkersChanged")
        ]
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / f"elastic-{name}.svg"
        path.write_text(picture(title, samples, changes, ideal_per_s))
        harness.say(f"wrote {path}")


def main() -> int:
    """Run the benchmark."""
    own = harness.parser("Let jobs find their number of data workers on a throw-away Slurm cluster.", repeats=1)
    args = own.parse_args()
    if reason := why_no_cluster():
        harness.say(reason)
        return 2
    words = [word.strip() for word in args.systems.split(",") if word.strip()]
    parts = {name: part for name, part in PARTS.items() if not words or any(word in name for word in words)}
    rows: list[Row] = []
    failures: dict[str, str] = {}
    for tuned in (True, False):
        chosen = {name: part for name, part in parts.items() if ("default" in name) != tuned}
        if chosen:
            with throw_away_cluster(tuned=tuned) as (directory, environ):
                for name, part in chosen.items():
                    bench = Bench(directory, environ, args.out, args.quick)
                    try:
                        part(bench)
                    except (TimeoutError, HetstreamError, ZeroDivisionError, IndexError) as error:
                        failures[name] = f"{type(error).__name__}: {error}"
                    rows += bench.rows
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("torch"),
        "notes": [
            f"Emulated CPU cost: a batch is {MAKE_S:g} s of sleep on one CPU, a training step {STEP_S:g} s of sleep: so"
            " eight data workers work at once on any machine, and this measures the controller, not the data path.",
            f"Data workers of 1 CPU, --data-workers=0-8, --data-worker-cooldown={COOLDOWN_S}.",
            "Started is from the decision to the last of seven new jobs in state RUNNING; registered is until the "
            "dispatcher knows it, which holds seven imports of torch, here on the cores of one machine.",
            "Pictures: elastic-*.svg beside the JSON file.",
        ],
    }
    return harness.finish("elastic", args.out, rows, failures, context)


# --- the questions ----------------------------------------------------------------------------------------------------


def starving(bench: Bench) -> None:
    """Does a trainer that waits get what it needs, and no more?"""
    case, ideal = "starving trainer", 1 / STEP_S
    job = bench.job("starving", _directives("0-8"), *_costs(STEP_S))
    with bench.running(job) as client:
        samples = bench.watch(job, client, lambda seen: _fed_for(seen, _LAST_S) or len(seen) > 180)
        before = samples[min(len(samples) - 1, int(5 / _EVERY_S))]
        fed_s = next((one.at_s for one in samples if one.working > 1 and one.wait_share < 0.05), None)
        wait_share, speed, workers = job.wait_share(_LAST_S), job.steps_per_s(_LAST_S), samples[-1].working
        bench.draw(
            "starving", "A starving job finds its data workers (CPU work emulated by sleeping)", samples, job, ideal
        )
    bench.row(case, "waited at the start", before.wait_share, "share", 0.5, at_least=True)
    bench.row(case, "waited at the end", wait_share, "share", 0.05)
    bench.row(case, "first below 5 %", fed_s, "s", note="after the first step")
    bench.row(
        case, "data workers at the end", workers, "", note=f"{MAKE_S / STEP_S:g} make just what the trainer takes"
    )
    bench.row(case, "ideal", ideal, "steps/s")
    bench.row(case, "elastic, at the end", speed, "steps/s", note=f"{speed / ideal:.0%} of the ideal")
    for count in (1, 8):
        fixed = bench.job(f"fixed-{count}", _directives(str(count)), *_costs(STEP_S))
        with bench.running(fixed) as client:
            least = 6 if bench.short else _LAST_S + 15
            bench.watch(fixed, client, lambda seen, least=least: len(seen) > 0 and seen[-1].at_s > least)  # type: ignore[misc]
            speed = fixed.steps_per_s(_LAST_S)
            note = f"{speed / ideal:.0%} of the ideal, waits {fixed.wait_share(_LAST_S):.0%}"
            bench.row(case, f"fixed {count}", speed, "steps/s", note=note)


def useless(bench: Bench) -> None:
    """Does a job that data workers make no faster give them all back? Its samples come one at a time on the cluster."""
    case = "nothing to gain"
    job = bench.job("useless", _directives("0-8"), *_costs(0.001), "--num-steps=200", f"--lock={bench.directory}/lock")
    with bench.running(job) as client:
        samples = bench.watch(job, client, lambda seen: bool(job.changes()) and _gone_for(seen, 8.0))
        local = samples[min(len(samples) - 1, int(6 / _EVERY_S))].steps_per_s
        most = max(one.working for one in samples)
        bench.draw(
            "useless", "A job that gains nothing (one sample at a time on the whole cluster)", samples, job, 10.0
        )
        bench.row(case, "data workers at the end", samples[-1].requested, "", 0, note=f"at most {most} on the way")
        bench.row(case, "local loading, before", local, "steps/s")
        bench.row(case, "local loading, at the end", samples[-1].steps_per_s, "steps/s")
        bench.row(
            case, "given back", samples[-1].at_s, "s", note="after the first step, with 8 s in which nothing came back"
        )
    ledger = job.ledger_problems(800)
    bench.row(case, "epochs with a sample lost or twice", float(len(ledger)), "", 0)


def alternating(bench: Bench) -> None:
    """Does a load that alternates make the number of data workers go up and down?"""
    case, period_s = "alternating load", 8.0
    job = bench.job("alternating", _directives("0-8"), *_costs(STEP_S, 8 * STEP_S), f"--period={period_s:g}")
    with bench.running(job) as client:
        samples = bench.watch(job, client, lambda seen: len(seen) > 0 and seen[-1].at_s > 100)
        title = f"The trainer's step is {STEP_S:g} s and {8 * STEP_S:g} s in turn, {period_s:g} s each"
        bench.draw("alternating", title, samples, job, 1 / STEP_S)
        times = [one["time"] for one in job.events("DataWorkersChanged")]
        least_s = min((later - earlier for earlier, later in pairwise(times)), default=None)
        late = [at for at in times if at - job.steps()[0][0] > 50]
    bench.row(case, "changes in 100 s", float(len(times)), "", note=f"{100 / period_s:.0f} changes of the load")
    bench.row(case, "of them in the last 50 s", float(len(late)), "", 1)
    bench.row(case, "shortest time between two", least_s, "s", COOLDOWN_S, at_least=True)


def grow_tuned(bench: Bench) -> None:
    """How long do eight data workers take, with scheduler parameters for short waits?"""
    _grow(bench, "1 to 8, tuned scheduler", 2.0)


def grow_default(bench: Bench) -> None:
    """How long with Slurm's own parameters?"""
    _grow(bench, "1 to 8, default scheduler", 5.0)


def _grow(bench: Bench, case: str, goal_s: float) -> None:
    name = case.split()[3]
    job = bench.job(f"grow-{name}", _directives("0-8"), *_costs(MAKE_S / 16))
    with bench.running(job) as client:
        wait(lambda: len(job.changes()) >= 2 and job.changes()[1][1] == 7, "the decision for seven more")
        decided_s = job.events("DataWorkersChanged")[1]["time"]
        wait(lambda: len(job.companions("R")) == 8, "eight running jobs")
        started_s = time.time() - decided_s
        wait(lambda: len(client.fetch().data_workers) == 8, "eight data workers")
        registered = sorted(one["time"] for one in job.events("DataWorkerRegistered"))[7] - decided_s
    bench.row(case, "started", started_s, "s", goal_s)
    bench.row(case, "registered", registered, "s", note=f"{os.cpu_count()} cores import torch seven times")


PARTS: dict[str, Callable[[Bench], None]] = {
    "starving": starving,
    "useless": useless,
    "alternating": alternating,
    "grow tuned": grow_tuned,
    "grow default": grow_default,
}


def _directives(data_workers: str) -> str:
    return f"--data-workers={data_workers} --data-worker-cpus=1 --data-worker-cooldown={COOLDOWN_S}"


def _costs(*steps_s: float) -> tuple[str, ...]:
    """Epochs are long: at the start of each, every loader waits for its first batch."""
    return (f"--make-s={MAKE_S}", f"--step-s={','.join(f'{one:g}' for one in steps_s)}", "--num-steps=8000")


def _sample(status: Status, at_s: float, requested: int) -> Sample:
    rows = [row for row in status.loaders if row.epoch >= 0]
    waits = max((row.wait_share for row in rows), default=0.0)
    return Sample(at_s, len(status.data_workers), requested, waits, sum(row.steps_per_s for row in rows))


def _fed_for(samples: list[Sample], seconds: float) -> bool:
    recent = [one for one in samples if one.at_s > samples[-1].at_s - seconds] if samples else []
    fed = all(one.working > 1 and one.wait_share < 0.05 for one in recent)
    return bool(recent) and samples[-1].at_s - samples[0].at_s > seconds and fed


def _gone_for(samples: list[Sample], seconds: float) -> bool:
    recent = [one for one in samples if one.at_s > samples[-1].at_s - seconds] if samples else []
    return any(one.requested for one in samples) and all(not one.requested for one in recent)


if __name__ == "__main__":
    sys.exit(main())
