"""`make bench-simulate`: how long does a replay of Philly's 82,247 jobs take on one core, and how many events a second?

docs/benchmarks-cluster.md explains the rows.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

from benchmarks import harness, machine
from benchmarks.harness import Goal, Row
from benchmarks.job_lists import TRACES, JobLists
from hetstream.slurm_plugin.policy.policies import POLICIES
from hetstream.slurm_plugin.simulate.engine import simulate
from hetstream.slurm_plugin.simulate.metrics import measure
from hetstream.slurm_plugin.simulate.scenario import Discipline, Request, Scenario
from hetstream.slurm_plugin.simulate.workload import parse

# About as many GPUs as the Philly paper gives its cluster; and so few that jobs wait.
LARGE, SMALL = "312*gpus=8,cpus=96", "128*gpus=8,cpus=96"
GOAL_S, GOAL_EVENTS = 60.0, 100_000.0
RUNS = {
    "fixed CPUs": Scenario("hardware", Request.HARDWARE, Discipline.EASY),
    "srtf": Scenario("srtf", Request.ELASTIC, Discipline.EASY, POLICIES["srtf"]),
}


def main() -> int:
    """Run the benchmark."""
    parser = harness.parser("A replay of the whole Philly trace.", repeats=1)
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with the traces (default: %(default)s)")
    args = parser.parse_args()
    core = machine.two_cores()[0]
    os.sched_setaffinity(0, {core})
    lists = JobLists(args.traces)
    workload = lists.whole(2000 if args.quick else 10**9)
    rows: list[Row] = []
    said = []
    for text, size in ((LARGE, "2,496 GPUs"), (SMALL, "1,024 GPUs")):
        for name, scenario in RUNS.items():
            case = f"{len(workload):,} jobs, {size}"
            times, rates, clock_rates = [], [], []
            for _ in range(args.repeats):
                cpu_s = time.process_time()
                outcome = simulate(workload, parse(text), scenario)
                cpu_s = time.process_time() - cpu_s
                times.append(cpu_s)
                rates.append(outcome.num_job_events / cpu_s)
                clock_rates.append(outcome.num_events / cpu_s)
                harness.say(f"  {case}, {name}: {cpu_s:.1f} s of CPU, {outcome.num_job_events:,} events")
            figures = measure(outcome)
            said.append(
                f"{case}, {name}: {outcome.num_job_events:,} events of jobs at {outcome.num_events:,} times; mean "
                f"completion {figures.mean_jct_s / 60:.0f} min, waiting {figures.mean_wait_s / 60:.1f} min; GPUs held "
                f"{figures.gpu_allocated:.0%}, effective {figures.gpu_effective:.0%}; {figures.num_rejected} jobs are "
                "larger than the cluster."
            )
            rows += [
                _row(case, name, "CPU-s", times),
                _row(case, name, "events of jobs / CPU-s", rates),
                _row(case, name, "times / CPU-s", clock_rates),
            ]
    goals = [Goal(row.case, row.system, "CPU-s", at_most=GOAL_S) for row in rows if row.unit == "CPU-s"]
    goals += [Goal(rows[0].case, name, "events of jobs / CPU-s", at_least=GOAL_EVENTS) for name in RUNS]
    for goal in goals:
        rows = [goal.judge(row) for row in rows]
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    context = {
        "machine": machine.describe(core=[core]),
        "versions": machine.versions("numpy"),
        "notes": [
            lists.note(),
            "Events of jobs: submissions, starts, ends, and changes of a running job's speed. Times: moments at which "
            "something happens. Under srtf most of the time is the policy's, which is asked anew at most of them.",
            *said,
            f"Models are drawn for the jobs, as the trace says nothing of CPUs. Most memory: {peak_mib:.0f} MiB.",
        ],
    }
    return harness.finish("simulate", args.out, rows, {}, context)


def _row(case: str, name: str, unit: str, values: list[float]) -> Row:
    middle = sorted(values)[len(values) // 2]
    return Row(case, name, middle, unit, (min(values), max(values)), samples=tuple(values))


if __name__ == "__main__":
    sys.exit(main())
