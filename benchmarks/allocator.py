"""`make bench-allocator`: how long does a round of the allocator take on a large cluster?

Jobs with curves of eight points ask for data workers of 1 to 16 CPUs on nodes of 64; a tenth of them changes what it
wants between two rounds. A round is what the daemon does to arrays: count the room on nodes, let the policy divide
under all rules, check the answer, and find who has another number than before. Beside it is the limit of the machine:
one stable argsort of as many keys as the curves have pieces, which every exact allocation by slopes needs. Not part of
a round are the daemon's table, made of Python objects at most once a second, and the nodes for one job that grows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import machine
from hetstream.hetjob.ports import Measured, RemainingWork, SpeedPoint
from hetstream.hetjob.site.messages import ReportDemand
from hetstream.slurm_plugin.daemon.nodes import usable_cpus
from hetstream.slurm_plugin.daemon.registry import JobTimes, Registered, table_of
from hetstream.slurm_plugin.daemon.settings import PolicySettings
from hetstream.slurm_plugin.placement import Network, spread
from hetstream.slurm_plugin.policy.policies import POLICIES, under_all_rules
from hetstream.slurm_plugin.policy.table import JobTable, Pool, check_allocation, job_table

# Nodes, jobs, and the target of the 99th percentile in seconds.
SIZES = ((10_000, 5_000, 0.025), (50_000, 50_000, 0.250))
QUICK = ((100, 50, 0.025),)
POINTS = 8
NOW_S = 1_000_000.0


def jobs(count: int, draw: np.random.Generator) -> JobTable:
    """Jobs that together want about three times what the cluster has."""
    gpus = draw.choice([1.0, 2.0, 4.0, 8.0], count, p=[0.7, 0.1, 0.1, 0.1])
    knee = draw.uniform(4, 64, count) * gpus
    shape = np.linspace(0, 1, POINTS)
    cpus = draw.choice([1, 2, 4, 8, 16], count)
    return job_table(
        np.arange(1, count + 1),
        np.ceil(knee / cpus).astype(np.int64),
        cpus=cpus,
        gpus=gpus,
        curve_cpus=knee[:, None] * shape,
        # Concave, each in its own way.
        curve_speed=1 - (1 - shape) ** draw.uniform(1.0, 3.0, (count, 1)),
        remaining_s=draw.lognormal(7, 2, count),
        remaining_sigma=0.5,
        total_s=draw.lognormal(9, 1, count),
        age_s=draw.uniform(0, 1e5, count),
        held_s=draw.uniform(0, 7200, count),
        tenant=draw.integers(0, 50, count),
        user=draw.integers(0, 500, count),
    )


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def p99(seconds: list[float]) -> float:
    """The 99th percentile."""
    return float(np.quantile(seconds, 0.99))


def measure(name: str, num_nodes: int, num_jobs: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each part, a value a round."""
    draw = np.random.default_rng(1)
    table = jobs(num_jobs, draw)
    free = draw.integers(0, 65, num_nodes)
    policy, rules = POLICIES[name], under_all_rules(POLICIES[name])
    parts: dict[str, list[float]] = {part: [] for part in ("room", "policy", "rules", "difference", "round", "argsort")}
    keys = draw.random(num_jobs * 2 * POINTS)
    for _ in range(rounds):
        changed = draw.random(num_jobs) < 0.1
        wanted = np.where(changed, np.maximum(1, table.wanted + draw.integers(-2, 3, num_jobs)), table.wanted)
        table = replace(table, wanted=wanted)
        began = time.perf_counter()
        cpus = usable_cpus(free.tolist(), np.unique(table.cpus).tolist())
        pool = Pool(cpus)
        room_s = time.perf_counter() - began
        alone_s = timed(lambda table=table, pool=pool: policy(table, pool, NOW_S))  # type: ignore[misc]
        began = time.perf_counter()
        found = rules(table, pool, NOW_S)
        ruled_s = time.perf_counter() - began
        began = time.perf_counter()
        check_allocation(table, pool, found)
        moved = np.flatnonzero(found.workers != table.current)
        difference_s = time.perf_counter() - began
        parts["room"].append(room_s)
        parts["policy"].append(alone_s)
        parts["rules"].append(ruled_s - alone_s)
        parts["difference"].append(difference_s)
        parts["round"].append(room_s + ruled_s + difference_s)
        parts["argsort"].append(timed(lambda: np.argsort(keys, kind="stable")))
        held = table.held_s.copy()
        held[moved] = 0.0
        table = replace(table, current=found.workers, held_s=held + 30.0)
    return parts


def one_place(num_nodes: int, rounds: int) -> list[float]:
    """Seconds to find nodes for the data workers of one job that grows."""
    draw = np.random.default_rng(1)
    room = draw.integers(0, 9, num_nodes)
    links = np.full(num_nodes, 2.5e9)
    network = Network(links, draw.uniform(0, 1e9, num_nodes), draw.integers(0, 5, num_nodes))
    return [timed(lambda: spread(room, [0, 1], 16, 1e8, network)) for _ in range(rounds)]


def daemon_table(num_jobs: int, rounds: int) -> list[float]:
    """Seconds to make the table of the jobs that have reported."""
    points = tuple(SpeedPoint(4, count, 2.0 * count) for count in range(1, 8))
    known = [
        Registered(
            f"user{number % 97}",
            ReportDemand(number, 0, 4, 16, 4, 0.1, Measured(5.0, 16.0, points, 1e6, 1, 4000, left)),
            number,
            NOW_S,
        )
        for number in range(1, num_jobs + 1)
        for left in (RemainingWork(1000.0, 0.1, "directive", 5000.0),)
    ]
    since = JobTimes()
    return [timed(lambda: table_of(known, {}, since, PolicySettings(), NOW_S, 300.0)) for _ in range(rounds)]


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Time rounds of the allocator.")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder of the report (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, measures nothing")
    parser.add_argument("--repeats", type=int, default=100, help="rounds (%(default)s)")
    args = parser.parse_args()
    rounds, sizes = (2, QUICK) if args.quick else (args.repeats, SIZES)
    about = machine.describe()
    where = f"{about['cores']} cores, {about['cpu']}, {about['memory_gib']} GiB"
    lines = ["python -m benchmarks.allocator", f"{where}; load {about['load_average_at_start']} at the start", ""]
    lines += [f"99th percentile of {rounds} rounds, ms; one process"]
    head = ("nodes", "jobs", "policy", "room", "policy alone", "rules", "difference", "round", "target", "", "argsort")
    lines.append("".join(f"{word:>13}" for word in head))
    for num_nodes, num_jobs, target_s in sizes:
        for name in POLICIES:
            parts = measure(name, num_nodes, num_jobs, rounds)
            round_s = p99(parts["round"])
            shown = [f"{1e3 * p99(parts[part]):.2f}" for part in ("room", "policy", "rules", "difference", "round")]
            verdict = "met" if round_s <= target_s else f"LOST {round_s / target_s:.1f}x"
            cells = [f"{num_nodes:,}", f"{num_jobs:,}", name, *shown, f"{1e3 * target_s:.0f}", verdict]
            lines.append("".join(f"{cell:>13}" for cell in [*cells, f"{1e3 * p99(parts['argsort']):.2f}"]))
            print(lines[-1], file=sys.stderr)
        table_s = daemon_table(num_jobs, max(2, rounds // 10))
        lines.append(f"{num_nodes:>13,}{num_jobs:>13,}  the daemon's table from reports: {1e3 * p99(table_s):.1f} ms")
        place_s = p99(one_place(num_nodes, rounds))
        lines.append(f"{num_nodes:>13,}{num_jobs:>13,}  nodes for one job that grows: {1e3 * place_s:.2f} ms")
    text = "\n".join(lines) + "\n"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "allocator.txt").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
