"""`make bench-fidelity`: how far is the simulator from real Slurm, for one list of jobs on 8 nodes of 8 GPUs?

Each list runs on a throw-away Slurm cluster with the site daemon that divides data workers, and in the simulator with
the daemon's policy and with what was measured of that cluster's latencies before. Time is compressed and GPUs are
virtual: training and data workers are waits. docs/benchmarks-cluster.md explains the rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import msgspec
import numpy as np

from benchmarks import harness, machine
from benchmarks.cluster import throw_away_cluster, why_no_cluster
from benchmarks.fidelity_picture import Points, picture
from benchmarks.harness import Row
from benchmarks.job_lists import FROZEN_JOBS, NUM_FROZEN, TRACES, JobLists
from benchmarks.processes import wait
from benchmarks.running import background
from benchmarks.stub_jobs import Plan, Site, StubJobs, StubsFailed
from benchmarks.waiting_jobs import TRAINERS, WORKERS, WaitingJob, WaitingJobs
from hetstream.base.errors import HetstreamError
from hetstream.hetjob.site.client import SiteSettings, UnixAddress, ask
from hetstream.hetjob.site.messages import SetPolicy, ShowPolicy
from hetstream.slurm_plugin.client.run import run_slurm
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.daemon.settings import PolicySettings, ReportIntervals
from hetstream.slurm_plugin.policy.policies import MoveCost, Rules
from hetstream.slurm_plugin.simulate import metrics
from hetstream.slurm_plugin.simulate.engine import simulate
from hetstream.slurm_plugin.simulate.scenario import Discipline, QueueOptions, Request, Scenario, WorkerOptions
from hetstream.slurm_plugin.simulate.traces import error_of, same_order
from hetstream.slurm_plugin.simulate.usage_log import Outcome
from hetstream.slurm_plugin.simulate.workload import Recorded, Workload, parse
from tests.devcluster.spec import ClusterShape

# With twice the GPUs for each task jobs wait in Slurm's queue while data workers come and go.
CROWDED = "srtf crowded"
# The same where data workers do not say that a short time will do: what the simulator does not have.
NO_TIME_MIN = "srtf crowded without time-min"
SYSTEMS = ("tuned", "share", "srtf", CROWDED, NO_TIME_MIN)
# Minutes: Slurm knows no shorter time. So data workers fit in front of the planned start of a job that waits.
WORKER_TIMES = ("--time=30", "--time-min=1")
NODES = 8
CLUSTER = parse(f"{NODES}*gpus=8,cpus=64")
# Seconds of the list in a second here. Its eight hours of submissions count as four, so that CPUs are short although
# long jobs are left out.
COMPRESSION, DENSITY, NUM_JOBS, LONGEST_S = 320.0, 2.0, 60, 6 * 3600.0
QUICK_JOBS, QUICK_COMPRESSION = 3, 4800.0
WORKER_CPUS = 8
# The site's times, compressed as far as Slurm's own allow: reports every 10 s become 1 s, readings every 60 s too.
INTERVAL_S, BACKFILL_S = 1.0, 1.0
MOVE = MoveCost(report_s=1.0, cooldown_s=1.0, drain_s=0.5, start_s=1.5, disturbance_s=1.0, hold_s=15.0)
PACE = ReportIntervals(report_s=1.0, round_s=0.25, unknown_s=0.5, least_interval_s=0.5, move=MOVE)
# Slurm plans with time limits in whole minutes; nobody is killed at one.
LIMIT_FACTORS = {"tuned": 1.5}
ELASTIC_LIMIT_FACTOR = 10.0
JCT, REAL, SIMULATED = "mean completion time", "real Slurm", "simulated"
GOALS = {JCT: 5.0, "makespan": 3.0, "order of starts": 95.0}
# Data workers share the trainers' nodes and give way to them, as the simulator has it.
SETTINGS = (
    f"SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval={BACKFILL_S:g},bf_resolution=1,bf_continue",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=CANCEL",
    "OverTimeLimit=UNLIMITED",
    f"PartitionName={TRAINERS} Nodes=gpu[0-{NODES - 1}] PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP",
    f"PartitionName={WORKERS} Nodes=gpu[0-{NODES - 1}] PriorityTier=1 MaxTime=INFINITE State=UP",
)
_MOST_S = 600.0
_TRIES = 8


@dataclass(frozen=True)
class Latencies:
    """What Slurm and the machine take, measured on the empty cluster.

    Attributes:
        submit_s: from the submission of a job to its first line.
        workers_s: the same for eight data workers, on average.
        next_s: from the cancellation of eight data workers to the first line of eight that waited for their CPUs.
    """

    submit_s: float
    workers_s: float
    next_s: float


@dataclass(frozen=True)
class Compared:
    """One list under one system, both ways."""

    seed: int
    system: str
    stubs: StubJobs
    outcome: Outcome


def main() -> int:
    """Run the benchmark."""
    parser = harness.parser("The same jobs on real Slurm and in the simulator.", repeats=1)
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with the traces (default: %(default)s)")
    parser.add_argument("--seeds", type=_seeds, default=[2, 3], metavar="A,B", help="which lists (default: 2,3)")
    parser.add_argument("--add", action="store_true", help="to the report that --out has, if any: for runs in parts")
    parser.add_argument("--logs", type=Path, help="keep the daemon's logs and what was measured there")
    args = parser.parse_args()
    if reason := why_no_cluster():
        harness.say(reason)
        return 2
    lists = JobLists(args.traces)
    seeds = args.seeds[: 1 if args.quick else None]
    words = [word.strip() for word in args.systems.split(",") if word.strip()]
    # The name of one system is a part of others'.
    systems = [one for one in SYSTEMS if not words or one in words or any(w in one for w in words if w not in SYSTEMS)]
    found: list[Compared] = []
    failures: dict[str, str] = {}
    with throw_away_cluster(ClusterShape(NODES, 8, 0, 64), tuned=False, settings=SETTINGS) as (directory, environ):
        latencies = measure_latencies(directory, environ)
        release = CommandSlurm(environ).client_version()
        harness.say(f"  {latencies}")
        for seed in seeds:
            workload = drawn(lists, seed, *((QUICK_JOBS, QUICK_COMPRESSION) if args.quick else (NUM_JOBS, COMPRESSION)))
            for system in systems:
                if system == NO_TIME_MIN and (args.quick or seed != seeds[0]):
                    continue
                limited, scenario = asked_for(workload, system), scenario_of(system, latencies)
                try:
                    stubs = run_real(directory, environ, limited, scenario, args.logs)
                except (StubsFailed, HetstreamError, TimeoutError) as error:
                    failures[f"{system}, list {seed}"] = f"{type(error).__name__}: {error}"
                    continue
                found.append(Compared(seed, system, stubs, simulate(with_recorded(limited, stubs), CLUSTER, scenario)))
                harness.say(f"  list {seed}, {system}: {error_of(found[-1].outcome)}")
                if args.logs:
                    _keep(args.logs, found[-1], latencies)
    rows = [row for one in found for row in rows_of(one)]
    told = notes(lists, latencies, args.quick, found)
    if args.add:
        rows, told = harness.added("fidelity", args.out, rows, told)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "fidelity.svg").write_text(picture(points_of(rows)))
    context = {
        "machine": machine.describe(),
        "versions": {**machine.versions("numpy"), "slurm": release},
        "notes": told,
    }
    return harness.finish("fidelity", args.out, rows, failures, context, ("value", "a job's, min .. max"))


def _seeds(text: str) -> list[int]:
    seeds = [int(word) if word.isdigit() else NUM_FROZEN for word in text.split(",")]
    if max(seeds) >= NUM_FROZEN:
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers of lists, 0 to {NUM_FROZEN - 1}, with commas")
    return seeds


# --- the jobs ---------------------------------------------------------------------------------------------------------


def drawn(lists: JobLists, seed: int, num_jobs: int, compression: float) -> Workload:
    """So many jobs of a frozen list, those that are not too long, with time compressed."""
    whole = lists.lists(FROZEN_JOBS, NUM_FROZEN)[seed]
    short = np.flatnonzero(whole.work_s <= LONGEST_S)
    chosen = np.sort(np.random.default_rng([seed, num_jobs]).choice(short, num_jobs, replace=False))
    kept = whole.only(chosen)
    submit_s = (kept.submit_s - kept.submit_s[0]) / (compression * DENSITY)
    return dataclasses.replace(kept, submit_s=submit_s, work_s=kept.work_s / compression)


def asked_for(workload: Workload, system: str) -> Workload:
    """With the GPUs that jobs ask for, and with time limits of whole minutes, as Slurm has them."""
    factor = LIMIT_FACTORS.get(system, ELASTIC_LIMIT_FACTOR)
    return dataclasses.replace(
        workload,
        gpus=workload.gpus * (2 if CROWDED in system else 1),
        limit_s=60.0 * np.ceil(workload.work_s * factor / 60.0),
    )


def scenario_of(system: str, latencies: Latencies) -> Scenario:
    """How the simulator runs it."""
    queue = QueueOptions(interval_s=BACKFILL_S, submit_s=latencies.submit_s, free_s=latencies.next_s)
    if system == "tuned":
        return Scenario(system, Request.TUNED, Discipline.EASY, queue=queue)
    # The daemon sees in its next reading what has changed, and a job hears of it at its next report.
    workers = WorkerOptions(
        cpus=WORKER_CPUS,
        round_s=INTERVAL_S,
        start_s=PACE.report_s / 2 + latencies.workers_s,
        take_back_s=latencies.next_s,
    )
    base = Scenario(system, Request.TUNED, Discipline.EASY, queue=queue, workers=workers, rules=Rules(move=MOVE))
    return dataclasses.replace(
        metrics.scenario_of(policy_of(system) + metrics.RULES, base.discipline, base), name=system
    )


def with_recorded(workload: Workload, stubs: StubJobs) -> Workload:
    """With what really happened."""
    starts_s, ends_s = (np.array([getattr(one, name) for one in stubs.ran]) for name in ("start_s", "end_s"))
    no_cpus = np.zeros(len(stubs.ran))  # they are not compared
    return dataclasses.replace(workload, recorded=Recorded(starts_s, ends_s, no_cpus, no_cpus))


def policy_of(system: str) -> str:
    """Its name."""
    return system.partition(" ")[0]


def plans_of(workload: Workload, scenario: Scenario) -> list[Plan]:
    """The same jobs for the cluster."""
    cpus, speeds = scenario.unit_cpus(workload, CLUSTER), scenario.fixed_speed(workload, CLUSTER)
    is_elastic = scenario.policy is not None
    return [
        Plan(
            workload.names[job].replace(":", "-"),
            float(workload.submit_s[job]),
            float(workload.work_s[job]),
            int(workload.units[job]),
            int(workload.gpus[job]),
            math.ceil(cpus[job]),
            round(workload.limit_s[job] / 60),
            float(speeds[job]),
            float(workload.demand[job]) if is_elastic else 0.0,
            1.0 - float(workload.overhead[job]),
        )
        for job in range(len(workload))
    ]


# --- the cluster ------------------------------------------------------------------------------------------------------


def measure_latencies(directory: Path, environ: dict[str, str]) -> Latencies:
    """Of the empty cluster: means of some tries.

    slurmctld looks at submissions once a second, so they come at random moments: one that follows a start at once
    always waits for the whole second.
    """
    trainer = [f"--partition={TRAINERS}", "--ntasks=1", "--gpus-per-task=1", "--cpus-per-task=4", "--time=5"]
    worker = [f"--partition={WORKERS}", "--ntasks=1", f"--cpus-per-task={WORKER_CPUS}", "--time=5"]
    moments = random.Random(0)
    with (
        tempfile.TemporaryDirectory(dir=directory) as pipes,
        WaitingJobs(Path(pipes), environ) as queue,
        ExitStack() as undo,
    ):

        def submitted(options: list[str], count: int) -> list[WaitingJob]:
            time.sleep(moments.random())
            jobs = [queue.submit(options) for _ in range(count)]
            for one in jobs:
                undo.callback(one.close)
            return jobs

        def waits_s(options: list[str], count: int) -> float:
            jobs = submitted(options, count)
            found = fmean(at_s - one.since_s for at_s, one in zip(queue.started(jobs), jobs, strict=True))
            for one in jobs:
                one.close()
            return found

        submit_s = fmean(waits_s(trainer, 1) for _ in range(_TRIES))
        workers_s = fmean(waits_s(worker, 8) for _ in range(_TRIES))
        _wait_until_empty(environ)
        several = submitted(worker, 8)
        queue.started([*several, *submitted(worker, NODES * 64 // WORKER_CPUS - 8)])
        next_s = []
        for _ in range(_TRIES):
            later = submitted(worker, 8)
            time.sleep(1.2 + moments.random())  # so that all of them wait
            began_s = time.monotonic()
            queue.cancel(several)
            next_s.append(fmean(queue.started(later)) - began_s)
            several = later
    _wait_until_empty(environ)
    return Latencies(submit_s, workers_s, fmean(next_s))


def run_real(
    directory: Path, environ: dict[str, str], workload: Workload, scenario: Scenario, logs: Path | None
) -> StubJobs:
    """The list on the cluster.

    Raises:
        StubsFailed: it did not go to its end.
    """
    plans = plans_of(workload, scenario)
    with ExitStack() as undo:
        home = Path(undo.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        daemon = None
        if scenario.policy is not None:
            daemon = SiteSettings(UnixAddress(home / "daemon.sock"), None)
            request = {
                "socket": str(home / "daemon.sock"), "state_dir": str(home / "state"), "partition": WORKERS,
                "interval_s": INTERVAL_S, "pace": dataclasses.asdict(PACE),
            }  # fmt: skip
            argv = [sys.executable, "-m", "benchmarks.clients.fidelity_daemon", json.dumps(request)]
            log = (logs or home) / f"daemon-{scenario.name.replace(', ', '-')}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            undo.enter_context(background(argv, environ, log))
            wait(lambda: (home / "daemon.sock").exists(), "the daemon", 60)
            settings = msgspec.json.encode(PolicySettings(policy=policy_of(scenario.name))).decode()
            answer = ask(daemon, SetPolicy(settings))
            if not isinstance(answer, ShowPolicy):
                raise StubsFailed(f"the daemon does not take the policy: {answer}")
        times = () if scenario.name == NO_TIME_MIN else WORKER_TIMES
        stubs = StubJobs(plans, Site(home, environ, daemon, WORKER_CPUS, times))
        stubs.run(_MOST_S, lambda done, of: harness.say(f"    {scenario.name}: {done} of {of} jobs have ended"))
        _wait_until_empty(environ)
        return stubs


def _wait_until_empty(environ: dict[str, str]) -> None:
    wait(lambda: not run_slurm(["squeue", "--noheader"], env=environ).stdout, "an empty queue", 60)


# --- the report -------------------------------------------------------------------------------------------------------


def rows_of(one: Compared) -> list[Row]:
    """Both ways, and the errors with their targets."""
    case, error = f"list {one.seed}, {one.system}", error_of(one.outcome)
    simulated, load = one.outcome, one.outcome.workload
    real = load.recorded
    assert real is not None
    rows = []
    figures: list[tuple[str, tuple[float, ...], tuple[float, ...], float]] = [
        (JCT, _real_jct(one), _simulated_jct(one), error.mean_jct),
        ("makespan", (float(real.end_s.max()),), (float(simulated.end_s.max()),), error.makespan),
    ]
    for name, real_s, simulated_s, relative in figures:
        percent = 100 * relative
        rows += [
            _measured(case, f"{name}, {REAL}", real_s),
            _measured(case, f"{name}, {SIMULATED}", simulated_s),
            _judged(one, f"{name}, error", percent, GOALS[name], abs(percent) <= GOALS[name]),
        ]
    order = 100 * error.order
    ends = 100 * same_order(simulated.end_s, real.end_s)
    rows += [
        Row(case, f"mean waiting, {REAL}", error.real_mean_wait_s, "s"),
        Row(case, f"mean waiting, {SIMULATED}", error.mean_wait_s, "s"),
        _judged(one, "order of starts", order, GOALS["order of starts"], order >= GOALS["order of starts"]),
        Row(case, "order of ends", ends, "% of pairs"),
        Row(case, "a job's completion time, median error", 100 * median(
            abs(other / own - 1) for own, other in zip(_real_jct(one), _simulated_jct(one), strict=True)
        ), "%"),
    ]  # fmt: skip
    return rows


def _measured(case: str, name: str, values: tuple[float, ...]) -> Row:
    spread = (min(values), max(values)) if len(values) > 1 else None
    return Row(case, name, fmean(values), "s", spread, samples=values)


def _judged(one: Compared, name: str, value: float, goal: float, is_met: bool) -> Row:
    is_error = name.endswith("error")
    unit, target = ("%", f"+-{goal:g}") if is_error else ("% of pairs", f">= {goal:g}")
    case = f"list {one.seed}, {one.system}"
    if one.system == NO_TIME_MIN:
        return Row(case, name, value, unit, note="no target: shows what the simulator takes for granted")
    return Row(case, name, value, unit, target=target, met=is_met)


def points_of(rows: Sequence[Row]) -> list[Points]:
    """Completion times of each job, both ways, by case."""
    real = {row.case: row.samples for row in rows if row.system == f"{JCT}, {REAL}"}
    simulated = {row.case: row.samples for row in rows if row.system == f"{JCT}, {SIMULATED}"}
    return [(case, real[case], simulated[case]) for case in real]


def _real_jct(one: Compared) -> tuple[float, ...]:
    submits = one.outcome.workload.submit_s.tolist()
    return tuple(ran.end_s - submit_s for ran, submit_s in zip(one.stubs.ran, submits, strict=True))


def _simulated_jct(one: Compared) -> tuple[float, ...]:
    return tuple((one.outcome.end_s - one.outcome.workload.submit_s).tolist())


def notes(lists: JobLists, latencies: Latencies, is_quick: bool, found: Sequence[Compared]) -> list[str]:
    """What a reader must know."""
    num_jobs, compression = (QUICK_JOBS, QUICK_COMPRESSION) if is_quick else (NUM_JOBS, COMPRESSION)
    ran = ", ".join(f"list {one.seed} {one.system}" for one in found)
    counted = "; ".join(
        f"list {one.seed}, {one.system}: {one.stubs.num_submitted} submitted, {one.stubs.num_cancelled} cancelled, "
        f"{one.stubs.num_lost} preempted or at their limit"
        for one in found
    )
    return [
        lists.note(),
        f"EMULATED: GPUs are virtual, and training and data workers are waits. COMPRESSED: a second stands for "
        f"{compression:g} s of the list; {num_jobs} jobs of each list, none longer than {LONGEST_S / 3600:g} h.",
        f"Real: slurmctld with {NODES} slurmd, sbatch and scancel, backfill every {BACKFILL_S:g} s, preemption of data "
        f"workers by trainers, the site daemon with all its rules, its protocol. Its times are compressed less than "
        f"the jobs': a reading every {INTERVAL_S:g} s, reports every {PACE.report_s:g} s.",
        "tuned: all CPUs from the start, no data workers. crowded: twice the GPUs for each task, so that jobs wait.",
        "Order: pairs of jobs that start (end) in the same order; what starts at one time in the simulator agrees with "
        "any order.",
        "Lists 0 and 1 were used while the two were compared and the simulator was changed; others were not.",
        f"{ran}: latencies of Slurm, measured before and given to the simulator: submission to start "
        f"{latencies.submit_s:.2f} s, of eight data workers {latencies.workers_s:.2f} s, cancellation to the start of "
        f"who waited {latencies.next_s:.2f} s. Load average afterwards {os.getloadavg()[0]:.1f}.",
        f"Jobs in Slurm: {counted}.",
    ]


def _keep(folder: Path, one: Compared, latencies: Latencies) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    load, outcome = one.outcome.workload, one.outcome
    table = [
        {
            "name": load.names[job], "submit_s": load.submit_s[job], "work_s": load.work_s[job],
            "units": int(load.units[job]), "start_s": ran.start_s, "end_s": ran.end_s,
            "simulated_start_s": outcome.start_s[job], "simulated_end_s": outcome.end_s[job], "changes": ran.changes,
            "demand": float(load.demand[job]),
        }
        for job, ran in enumerate(one.stubs.ran)
    ]  # fmt: skip
    document = {"latencies": dataclasses.asdict(latencies), "jobs": table}
    (folder / f"jobs-{one.seed}-{one.system.replace(', ', '-')}.json").write_text(json.dumps(document))


if __name__ == "__main__":
    sys.exit(main())
