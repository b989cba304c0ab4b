"""`make bench-frag`: how much of a cluster's GPUs is given out when as many have been asked for as there are.

Jobs of openb (Alibaba, 2023) come one by one and stay; what does not fit is turned away. Placements of hetstream beside
the published figures of FGD (ATC'23) with the same cluster and the same tuning of the workload; then what is left when
data workers may be split from their trainers. docs/benchmarks-cluster.md explains the rows.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import harness, machine, openb
from benchmarks.harness import Row
from hetstream.slurm_plugin.placement import CHOICES, WHOLE, Network, Nodes, Shape, Spot, TypicalShapes, room_of, spread

WORKLOADS = {"default": 95.0, "cpu250": 93.0}
PUBLISHED_NAMES = {"fgd": "FGD", "best-fit": "BestFit", "dot-product": "DotProd", "random": "Random"}
# FGD's experiments draw more jobs until these ask for so many times the GPUs, and shuffle them.
DEMAND = 1.3
FIRST_SEED = 42
# What a trainer keeps for each GPU, and the CPUs of a data worker; what a data worker sends, and a link (assumed).
TRAINER_CPUS, WORKER_CPUS = 2000, 4000
WORKER_BYTES_PER_S, LINK_BYTES_PER_S = 40e6, 12.5e9
# CPUs that data workers leave for each free GPU: what openb's commonest node has. Jobs with parts of a GPU ask for 11
# in the mean; with a trainer's 2 alone, three points of the GPUs find no CPUs.
KEPT_CPUS = 12_000


# openb's jobs leave a third of its CPUs free. Jobs that load more data are made of them by more CPUs for each GPU, up
# to what its commonest node has.
CPU_FACTORS, MOST_CPUS = (1.0, 1.5, 2.0), 96_000


@dataclass(frozen=True)
class Trace:
    """A cluster and jobs."""

    cluster: openb.Cluster
    codes: dict[str, int]
    jobs: dict[str, list[Shape]]
    published: dict[tuple[str, str], float]
    origin: str


def read(traces: Path) -> Trace:
    """openb, or what stands in for it."""
    if not (traces / "openb_node_list_all_node.csv").is_file():
        cluster, codes = openb.made_up_cluster()
        jobs = {name: openb.made_up_jobs(name) for name in WORKLOADS}
        return Trace(
            cluster, codes, jobs, {}, f"made up with a seed, as {traces} has no openb files: nothing is compared"
        )
    cluster, codes = openb.read_cluster(traces)
    jobs = {name: openb.read_jobs(traces, name, codes) for name in WORKLOADS}
    with (traces / "fgd_expected_alloc_pct.csv").open(newline="") as file:
        published = {
            (row["workload"], row["policy"]): float(row["gpu_alloc_pct_at_100pct_arrived"])
            for row in csv.DictReader(file)
        }
    return Trace(cluster, codes, jobs, published, "openb of Alibaba's cluster-trace-gpu-v2023")


def with_gpus(cluster: openb.Cluster) -> openb.Cluster:
    """The nodes with GPUs: FGD's experiments have no others."""
    kept = [place for place, gpus in enumerate(cluster.num_gpus) if gpus]
    return openb.Cluster(
        *(
            tuple(values[place] for place in kept)
            for values in (cluster.cpus, cluster.memory_mb, cluster.num_gpus, cluster.gpu_type)
        )
    )


def arrivals(jobs: Sequence[Shape], num_gpus: int, seed: int) -> list[Shape]:
    """Jobs in the order in which they come: the workload, more of it up to the demand, shuffled."""
    generator = np.random.default_rng(seed)
    found, demand = list(jobs), sum(one.gpu_total for one in jobs)
    while True:
        one = jobs[int(generator.integers(len(jobs)))]
        if demand + one.gpu_total > DEMAND * num_gpus * WHOLE:
            break
        demand += one.gpu_total
        found.append(one)
    generator.shuffle(found)  # type: ignore[arg-type]
    return found


@dataclass(frozen=True)
class Outcome:
    """At 100 % of arrived demand.

    Attributes:
        gpus, cpus_free: given out, and free, in percent of all.
        indicator: mean absolute value of GoldMiner's indicator over the nodes with GPUs.
        starved: share of the CPUs for data workers that were asked for and found no place, in percent.
        decisions_per_s: of the placement.
    """

    gpus: float
    cpus_free: float
    indicator: float
    starved: float
    decisions_per_s: float


def replay(
    cluster: openb.Cluster, coming: Sequence[Shape], placement: str, seed: int, *, split: bool = False
) -> Outcome:
    """Place jobs until as many GPUs have been asked for as there are."""
    nodes = cluster.nodes()
    capacity = int(nodes.num_gpus.sum()) * WHOLE
    trainers = [_trainer(one) for one in coming] if split else list(coming)
    chosen = CHOICES[placement].make(nodes, TypicalShapes(trainers), seed)
    link = np.full(len(nodes), LINK_BYTES_PER_S)
    used, remote = np.zeros(len(nodes)), np.zeros(len(nodes), np.int64)
    arrived = num = wanted = unplaced = 0
    began = time.perf_counter()
    for asked, shape in zip(coming, trainers, strict=True):
        arrived += asked.gpu_total
        num += 1
        spot = chosen.choose(shape)
        if spot is not None:
            nodes.take(spot, shape)
            missing = asked.cpus - shape.cpus
            if missing:
                wanted += missing
                unplaced += _data_workers(nodes, spot, missing, Network(link, used, remote))
        if arrived >= capacity:
            break
    took = time.perf_counter() - began
    return Outcome(
        100 * nodes.gpu_allocation,
        100 * float(nodes.cpus_free.sum() / nodes.cpus.sum()),
        float(np.abs(nodes.indicator()).mean()),
        100 * unplaced / wanted if wanted else 0.0,
        num / took,
    )


def _trainer(job: Shape) -> Shape:
    """What stays beside the GPUs of a job with whole GPUs; a part of a GPU keeps all: its job is small."""
    kept = TRAINER_CPUS * job.gpus
    if not job.gpus or job.share < WHOLE or job.cpus <= kept:
        return job
    return Shape(kept, job.memory_mb, job.gpus, job.share, job.gpu_types)


def _data_workers(nodes: Nodes, spot: Spot, cpus: int, network: Network) -> int:
    """Place the data workers of a job, and return the CPUs that found no place."""
    whole, rest = divmod(cpus, WORKER_CPUS)
    # What jobs on the node's free GPUs would need stays free.
    kept = KEPT_CPUS * nodes.gpus_free.sum(axis=1) // WHOLE
    left = 0
    for size, num in ((WORKER_CPUS, whole), (rest, 1 if rest else 0)):
        if not num:
            continue
        room = room_of(nodes.cpus_free, nodes.memory_free_mb, size, reserved_cpus=kept)
        found = spread(room, [spot.node], num, WORKER_BYTES_PER_S * size / WORKER_CPUS, network)
        for node, count in found.places:
            nodes.take(Spot(node), Shape(size * count))
            if node != spot.node:
                network.num_remote[node] += count
        network.used_bytes_per_s[:] += found.traffic_bytes_per_s
        left += size * found.num_left
    return left


def row(
    case: str,
    system: str,
    samples: Sequence[float],
    unit: str,
    *,
    target: str | None = None,
    met: bool | None = None,
    note: str = "",
) -> Row:
    """The mean over the seeds, as the published figures are means."""
    values = tuple(samples)
    return Row(case, system, statistics.fmean(values), unit, (min(values), max(values)), target, met, note, values)


def main() -> int:
    """Run the benchmark."""
    parser = harness.parser("Placement: GPUs given out on openb, and CPUs that strand.", repeats=10)
    parser.add_argument(
        "--traces", type=Path, default=openb.TRACES, help="folder with the traces (default: %(default)s)"
    )
    args = parser.parse_args()
    trace, repeats = read(args.traces), 1 if args.quick else args.repeats
    seeds = range(FIRST_SEED, FIRST_SEED + repeats)
    systems = [one.name for one in harness.chosen([harness.System(name) for name in CHOICES], args.systems)]
    cluster, rows = with_gpus(trace.cluster), []
    num_gpus = sum(cluster.num_gpus)
    for workload, goal in WORKLOADS.items():
        for name in systems:
            found = [replay(cluster, arrivals(trace.jobs[workload], num_gpus, seed), name, seed) for seed in seeds]
            allocated = [one.gpus for one in found]
            mean = statistics.fmean(allocated)
            harness.say(f"  {workload}, {name}: {mean:.2f} % of the GPUs")
            is_ours = name == "fgd" and bool(trace.published)
            rows.append(
                row(workload, name, allocated, "% of GPUs", target=f">= {goal:g}" if is_ours else None,
                    met=mean >= goal if is_ours else None)
            )  # fmt: skip
            published = trace.published.get((workload, PUBLISHED_NAMES[name]))
            if published is not None:
                away = [one - published for one in allocated]
                off = statistics.fmean(away)
                rows.append(row(workload, f"{name}, published", [published], "% of GPUs"))
                rows.append(
                    row(workload, f"{name} less published", away, "points", target="-1 .. 1" if is_ours else None,
                        met=abs(off) <= 1 if is_ours else None)
                )  # fmt: skip
            rows.append(row(workload, name, [one.decisions_per_s for one in found], "decisions/s"))
    rows += splits(trace, list(seeds), systems)
    notes = [
        f"Cluster and jobs: {trace.origin}; {len(cluster.cpus):,} nodes with {num_gpus:,} GPUs.",
        f"Jobs are drawn again up to {DEMAND:g} times the GPUs and shuffled (seeds {seeds[0]} to {seeds[-1]}), as in "
        "FGD's experiments; taken when all that have come ask for 100 % of the GPUs. Means over the seeds.",
        "fgd: the published rule, and a little best fit among nodes that it makes nearly alike.",
        f"split: a job with whole GPUs keeps {TRAINER_CPUS // WHOLE} CPUs for each, the others are data workers of "
        f"{WORKER_CPUS // WHOLE} CPUs anywhere, each sending {WORKER_BYTES_PER_S / 1e6:.0f} MB/s (assumed) within half "
        f"of a link of {LINK_BYTES_PER_S / 1.25e8:.0f} Gb/s (assumed); each free GPU keeps "
        f"{KEPT_CPUS // WHOLE} CPUs. What a "
        "job asks for is the same in all.",
        "stranded: free while jobs are turned away. openb's own jobs (1 x) are turned away for want of GPUs, hardly "
        "ever of CPUs, so there is nothing for split ones to gain.",
        "bound: what would be free if every job that has come had a place. Nothing can strand less.",
    ]
    context = {"machine": machine.describe(), "versions": machine.versions("numpy"), "notes": notes}
    return harness.finish("frag", args.out, rows, {}, context, ("mean", "min .. max"))


def splits(trace: Trace, seeds: Sequence[int], systems: Sequence[str]) -> list[Row]:
    """What is left free when data workers may be elsewhere than their trainers, on all nodes."""
    if "fgd" not in systems:
        return []
    rows: list[Row] = []
    num_gpus = sum(trace.cluster.num_gpus)
    for factor in CPU_FACTORS:
        jobs = [_heavier(one, factor) for one in trace.jobs["default"]]
        coming = [arrivals(jobs, num_gpus, seed) for seed in seeds]
        whole = [replay(trace.cluster, one, "fgd", seed) for one, seed in zip(coming, seeds, strict=True)]
        split = [replay(trace.cluster, one, "fgd", seed, split=True) for one, seed in zip(coming, seeds, strict=True)]
        case = f"all nodes, {factor:g} x CPUs for a GPU"
        harness.say(f"  {case}: {whole[0].gpus:.1f} and {split[0].gpus:.1f} % of the GPUs")
        for system, found in (("whole jobs", whole), ("split", split)):
            rows.append(row(case, system, [one.gpus for one in found], "% of GPUs"))
            rows.append(row(case, system, [one.cpus_free for one in found], "% of CPUs stranded"))
            rows.append(row(case, system, [one.indicator for one in found], "mean |indicator|"))
        rows.append(row(case, "split", [one.starved for one in split], "% of their CPUs without a place"))
        least = [
            _least_free(trace.cluster, one, num_gpus) / two.cpus_free for one, two in zip(coming, whole, strict=True)
        ]
        rows.append(row(case, "all that have come fit (bound) / whole jobs", least, "x stranded"))
        ratios = [two.cpus_free / one.cpus_free for one, two in zip(whole, split, strict=True)]
        compared = bool(trace.published)
        rows.append(
            row(case, "split / whole jobs", ratios, "x stranded", target="<= 0.5" if compared else None,
                met=statistics.fmean(ratios) <= 0.5 if compared else None)
        )  # fmt: skip
    return rows


def _least_free(cluster: openb.Cluster, coming: Sequence[Shape], num_gpus: int) -> float:
    """CPUs that stay free, in percent of all, if every job that has come by 100 % of demand had a place."""
    demand = np.cumsum([one.gpu_total for one in coming])
    num = int(np.searchsorted(demand, num_gpus * WHOLE)) + 1
    asked = sum(one.cpus for one in coming[:num])
    return max(0.0, 100 * (1 - asked / sum(cluster.cpus)))


def _heavier(job: Shape, factor: float) -> Shape:
    """The same job with more CPUs for its GPUs, whole ones, and no more than a node has."""
    if not job.gpus or job.share < WHOLE or factor == 1:
        return job
    return replace(job, cpus=min(MOST_CPUS, round(job.cpus * factor / WHOLE) * WHOLE))


if __name__ == "__main__":
    sys.exit(main())
