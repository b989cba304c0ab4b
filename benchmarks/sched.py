"""`make bench-sched`: GoldMiner's Table 5, the same under Slurm's backfill, and how far from the best possible.

docs/benchmarks-cluster.md explains the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from benchmarks import harness, machine
from benchmarks.best_order import best_order
from benchmarks.bound import lower_bound_s, most_effective_hours
from benchmarks.harness import Row
from benchmarks.job_lists import TRACES, JobLists
from benchmarks.simulated_pictures import PARTS, completion_bars, effective_points
from benchmarks.simulated_rows import figure, jct_minutes, ratio, standalone_svg
from hetstream.slurm_plugin.render.charts import Axis, Series, count_axis, line_chart
from hetstream.slurm_plugin.simulate.engine import simulate
from hetstream.slurm_plugin.simulate.metrics import Compared, compare, interval, measure
from hetstream.slurm_plugin.simulate.scenario import Discipline, QueueOptions, Request, Scenario, WorkerOptions
from hetstream.slurm_plugin.simulate.workload import Cluster, Workload, parse

CLUSTER = "8*gpus=8,cpus=64,memory_gib=256,network_gbps=20"
# GoldMiner's Table 5: mean completion time and queueing in minutes, in its order from the worst to the best.
PAPER = {
    "tuned": (540, 338),
    "hardware": (495, 4),
    "fixed": (356, 160),
    "fair": (352, 14),
    "maxtp": (231, 0),
    "srtf": (213, 0),
}
OWN = "stretch"
WINDOW_S = 500 * 60.0
EASY_GOALS = {88: 1.25, 130: 1.5}
GAP_GOALS = {88: (1.10, 3.0), 120: (1.18, 4.0), 150: (1.25, 7.0)}
BASE = Scenario("", Request.TUNED, Discipline.FIFO)
# What hetstream would run: its own policy, jobs of less CPU work first in the queue of GPUs, and no data workers where
# they cost more than they bring.
BEST = Scenario(
    "", Request.TUNED, Discipline.GREEDY, queue=QueueOptions(shortest_first=True), workers=WorkerOptions(fallback=True)
)
_MINUTE_S = 60.0
# Lists on which orders are searched for, which takes seconds for each.
_SEARCHED = 10


def main() -> int:
    """Run the benchmark."""
    parser = harness.parser("GoldMiner's Table 5, backfill, and the distance from a lower bound.", repeats=20)
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with the traces (default: %(default)s)")
    parser.add_argument("--bounds", type=int, default=10, help="lists for each load of the lower bound (default: 10)")
    parser.add_argument(
        "--lists",
        type=int,
        default=200,
        help=f"lists of 120 and of 150 jobs on which {OWN} and srtf are compared list by list (default: 200)",
    )
    args = parser.parse_args()
    num_lists, num_bounds = (2, 1) if args.quick else (args.repeats, args.bounds)
    lists, cluster = JobLists(args.traces), parse(CLUSTER)
    rows: list[Row] = []
    table5 = _run(lists.lists(88, num_lists), cluster, [*PAPER, "dlrover", OWN], list(Discipline), BASE, "88 jobs")
    rows += _table5(table5)
    rows += _possible(lists.lists(88, num_lists), cluster, table5)
    loaded = _run(lists.lists(130, num_lists), cluster, ["tuned", "srtf", OWN], list(Discipline), BASE, "130 jobs")
    for num_jobs, found in ((88, table5), (130, loaded)):
        best = _run(
            lists.lists(num_jobs, num_lists), cluster, ["tuned", OWN], [Discipline.EASY], BEST, f"{num_jobs}, own"
        )
        rows += _easy(num_jobs, found, best)
    rows += _effective(table5)
    for num_jobs in (88,) if args.quick else tuple(GAP_GOALS):
        # Lists that are drawn can be many more: a few decide over the mean where jobs wait for GPUs.
        rows += _beside_srtf(lists.lists(num_jobs, num_lists if num_jobs == 88 else args.lists), cluster, num_jobs)
    gaps = {load: _gap(lists.lists(load, num_bounds), cluster, load) for load in GAP_GOALS}
    rows += [row for found, _ in gaps.values() for row in found]
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("numpy", "scipy"),
        "notes": [
            *who_meets(rows),
            lists.note(),
            f"{num_lists} lists ({num_bounds} for the lower bound; of 120 and 150 jobs {args.lists} for {OWN} less "
            "srtf, list by list); 8 nodes of 8 GPUs and 64 CPUs. Values are means "
            "over the lists; the range is the 95 % interval by bootstrap; ratios are ratios of means.",
            "Data workers start in 20 s and leave in 5; the policy is asked, and backfill acts, every 30 s.",
            f"Utilisation: from 0 to 500 minutes. `own` is {OWN}, with less CPU work first in the GPU queue and no "
            "data workers for a job whose own node has all its CPUs.",
            "The lower bound is a linear program that may stop, move and split jobs for free: no schedule is below it, "
            "so `tuned / lower bound` is the most that any policy could win. The upper bound of effective GPUs is such "
            "a program, too, of schedules that care for nothing else; MaxTP is near it, at a worse completion time.",
            "The best order is searched for among orders of the jobs that are there, in every round: what SRTF and "
            f"{OWN} could still gain by another order.",
        ],
    }
    _plots(args.out, table5, gaps)
    return harness.finish("sched", args.out, rows, {}, context, ("mean", "95 %"))


def _run(
    workloads: Sequence[Workload],
    cluster: Cluster,
    policies: Sequence[str],
    disciplines: Sequence[Discipline],
    base: Scenario,
    label: str,
) -> dict[tuple[str, str], Compared]:
    harness.say(
        f"  {label}: {len(workloads)} lists, {', '.join(policies)}; {', '.join(one.value for one in disciplines)}"
    )
    found = compare(workloads, cluster, policies, disciplines, base, WINDOW_S)
    unfinished = [one.policy for one in found for run in one.runs if run.num_unfinished or run.num_rejected]
    if unfinished:
        raise SystemExit(f"jobs of these did not end: {unfinished}")
    return {(one.policy, one.discipline): one for one in found}


def _table5(found: dict[tuple[str, str], Compared]) -> list[Row]:
    rows = []
    for discipline in ("fifo", "easy", "greedy"):
        case = f"88 jobs, {discipline}"
        for policy in (*PAPER, "dlrover", OWN):
            one = found[policy, discipline]
            paper = f"paper {PAPER[policy][0]}" if policy in PAPER and discipline == "fifo" else ""
            rows.append(figure(case, policy, one, "mean_jct_s", "min to completion", _MINUTE_S, paper))
        for policy in (*PAPER, OWN):
            one = found[policy, discipline]
            paper = f"paper {PAPER[policy][1]}" if policy in PAPER and discipline == "fifo" else ""
            rows.append(figure(case, policy, one, "mean_wait_s", "min waiting", _MINUTE_S, paper))
        for policy in ("srtf", "dlrover", OWN):
            rows.append(figure(case, policy, found[policy, discipline], "max_slowdown", "x worst slowdown", 1.0))
        rows.append(
            ratio(
                case, "tuned / srtf", *(jct_minutes(found[name, discipline]) for name in ("tuned", "srtf")), None, False
            )
        )
    means = [found[policy, "fifo"].mean("mean_jct_s") or 0.0 for policy in PAPER]
    in_order = sum(worse > better for worse, better in pairwise(means))
    rows.append(Row("88 jobs, fifo", "the paper's order", in_order, "of 5 pairs", None, ">= 5", in_order == 5))
    jct = [jct_minutes(found[name, "fifo"]) for name in ("tuned", "srtf")]
    rows.append(ratio("88 jobs, fifo", "tuned / srtf, target", *jct, 2.3, False))
    return rows


def _possible(workloads: Sequence[Workload], cluster: Cluster, found: dict[tuple[str, str], Compared]) -> list[Row]:
    """What is possible at all, on the same lists: beside it stands what a target asks for."""
    harness.say(f"  88 jobs: what is possible, {len(workloads)} lists")
    bounds = [lower_bound_s(workload, cluster) / _MINUTE_S for workload in workloads]
    tuned = found["tuned", "easy"]
    hours = [most_effective_hours(workload, cluster, WINDOW_S) for workload in workloads]
    all_hours = cluster.num_gpus * WINDOW_S / 3600
    effective = [run.gpu_effective for run in found["tuned", "fifo"].runs]
    scenario = replace(BASE, name="best order", request=Request.ELASTIC, discipline=Discipline.EASY, policy=best_order)
    searched = [measure(simulate(load, cluster, scenario)).mean_jct_s / _MINUTE_S for load in workloads[:_SEARCHED]]
    srtf = jct_minutes(found["srtf", "easy"])[:_SEARCHED]
    own = jct_minutes(found[OWN, "easy"])[:_SEARCHED]
    return [
        ratio(
            "88 jobs, easy", "tuned / lower bound: the most that is possible", jct_minutes(tuned), bounds, None, False
        ),
        ratio("88 jobs, easy", "srtf / best order found by search", srtf, searched, None, False),
        ratio("88 jobs, easy", f"{OWN} / best order found by search", own, searched, None, False),
        ratio(
            "88 jobs, fifo",
            "effective GPUs, upper bound / tuned: the most that is possible",
            [share / all_hours for share in hours],
            effective,
            None,
            False,
        ),
    ]


def _easy(num_jobs: int, found: dict[tuple[str, str], Compared], best: dict[tuple[str, str], Compared]) -> list[Row]:
    case, goal = f"{num_jobs} jobs, easy", EASY_GOALS[num_jobs]
    tuned = jct_minutes(found["tuned", "easy"])
    rows = [
        figure(f"{num_jobs} jobs, {one.discipline}", one.policy, one, "mean_jct_s", "min to completion", _MINUTE_S)
        for one in (found.values() if num_jobs != 88 else ())
    ]
    own = best[OWN, "easy"]
    rows += [
        figure(case, "own", own, "mean_jct_s", "min to completion", _MINUTE_S),
        figure(case, "tuned, shorter first", best["tuned", "easy"], "mean_jct_s", "min to completion", _MINUTE_S),
        ratio(case, "tuned / srtf", tuned, jct_minutes(found["srtf", "easy"]), goal, False),
        ratio(case, "tuned / own", tuned, jct_minutes(own), goal, False),
        ratio(case, "tuned, shorter first / own", jct_minutes(best["tuned", "easy"]), jct_minutes(own), None, False),
        ratio(
            f"{num_jobs} jobs, greedy",
            "tuned / srtf",
            *(jct_minutes(found[name, "greedy"]) for name in ("tuned", "srtf")),
            None,
            False,
        ),
    ]
    return rows


def _beside_srtf(workloads: Sequence[Workload], cluster: Cluster, num_jobs: int) -> list[Row]:
    """The own policy less SRTF, list by list: in the mean below 0 with its interval, and no later in the worst case."""
    disciplines = [Discipline.FIFO, Discipline.EASY]
    found = _run(workloads, cluster, ["srtf", OWN], disciplines, BASE, f"{num_jobs} jobs, {OWN} beside srtf")
    rows = []
    for discipline in ("fifo", "easy"):
        case, own, srtf = f"{num_jobs} jobs, {discipline}", found[OWN, discipline], found["srtf", discipline]
        less = [one - other for one, other in zip(jct_minutes(own), jct_minutes(srtf), strict=True)]
        share, (low, high) = fmean(less) / fmean(jct_minutes(srtf)), interval(less)
        note = f"{share:+.2%}" if high < 0 else f"{share:+.2%}, the interval reaches {high:+.2f}"
        rows.append(
            Row(case, f"{OWN} less srtf", fmean(less), "min to completion", (low, high), "< 0", high < 0, note,
                tuple(less))
        )  # fmt: skip
        later = [one.max_slowdown - other.max_slowdown for one, other in zip(own.runs, srtf.runs, strict=True)]
        met = fmean(later) <= 0
        note = "" if met else f"by {fmean(later) / (srtf.mean('max_slowdown') or 1.0):.2%}"
        rows.append(
            Row(case, f"{OWN} less srtf", fmean(later), "x worst slowdown", interval(later), "<= 0", met, note,
                tuple(later))
        )  # fmt: skip
    return rows


def _effective(found: dict[tuple[str, str], Compared]) -> list[Row]:
    rows = []
    for metric, unit in (("gpu_allocated", "% of GPUs held"), ("gpu_effective", "% of GPUs effective")):
        rows += [figure("88 jobs, fifo", policy, found[policy, "fifo"], metric, unit, 0.01) for policy in (*PAPER, OWN)]
    for policy in ("maxtp", "srtf", OWN):
        values = [[run.gpu_effective for run in found[name, "fifo"].runs] for name in (policy, "tuned")]
        rows.append(ratio("88 jobs, fifo", f"effective GPUs, {policy} / tuned", *values, 1.35, False))
    return rows


def who_meets(rows: Sequence[Row]) -> list[str]:
    """Of the targets that several policies are held to, which of them meets which."""
    targets: dict[tuple[str, str, str], list[tuple[str, Row]]] = {}
    for row in rows:
        for policy in (*PAPER, "own", OWN):
            ratio = row.system.replace(f"/ {policy}", "/ POLICY").replace(f", {policy} /", ", POLICY /")
            if row.target is not None and row.unit == "x" and ratio.endswith(("/ POLICY", "POLICY / tuned")):
                targets.setdefault((row.case, ratio, row.target), []).append((policy, row))
    said = []
    for (case, ratio, target), found in targets.items():
        each = [f"{policy} {'meets' if row.met else 'misses'} it with {row.value:.3f}" for policy, row in found]
        if len(each) > 1:
            said.append(f"{case}, {ratio.replace('POLICY', 'policy')} {target}: {', '.join(each)}.")
    return said


def _gap(workloads: Sequence[Workload], cluster: Cluster, num_jobs: int) -> tuple[list[Row], dict[str, float]]:
    """How far the best schedule is from the bound; and the means, in minutes, for a plot."""
    harness.say(f"  {num_jobs} jobs: lower bounds of {len(workloads)} lists")
    bounds = [lower_bound_s(workload, cluster) / _MINUTE_S for workload in workloads]
    own = _run(workloads, cluster, ["srtf", OWN], [Discipline.GREEDY], BEST, f"{num_jobs} jobs, own")
    plain = _run(workloads, cluster, ["tuned", "srtf"], [Discipline.EASY], BASE, f"{num_jobs} jobs, EASY")
    goal, slowdown_goal = GAP_GOALS[num_jobs]
    case, best = f"{num_jobs} jobs, bound", own[OWN, "greedy"]
    worst = figure(case, "own", best, "max_slowdown", "x worst slowdown", 1.0)
    is_met = (worst.value or 0.0) <= slowdown_goal
    rows = [
        Row(case, "lower bound", fmean(bounds), "min to completion", interval(bounds), samples=tuple(bounds)),
        figure(case, "own", best, "mean_jct_s", "min to completion", _MINUTE_S),
        figure(case, "srtf, same queue", own["srtf", "greedy"], "mean_jct_s", "min to completion", _MINUTE_S),
        ratio(case, "own / lower bound", jct_minutes(best), bounds, goal, True),
        ratio(case, "srtf, same queue / lower bound", jct_minutes(own["srtf", "greedy"]), bounds, None, True),
        ratio(case, "srtf, easy / lower bound", jct_minutes(plain["srtf", "easy"]), bounds, None, True),
        ratio(case, "tuned, easy / lower bound", jct_minutes(plain["tuned", "easy"]), bounds, None, True),
        Row(
            case, "own", worst.value, "x worst slowdown", worst.spread, f"<= {slowdown_goal:g}", is_met,
            f"worst list {max(worst.samples):.1f}", worst.samples,
        ),
        figure(case, "srtf, same queue", own["srtf", "greedy"], "max_slowdown", "x worst slowdown", 1.0),
    ]  # fmt: skip
    means = {
        "bound": fmean(bounds),
        "own": fmean(jct_minutes(best)),
        "srtf, easy": fmean(jct_minutes(plain["srtf", "easy"])),
        "tuned, easy": fmean(jct_minutes(plain["tuned", "easy"])),
    }
    return rows, means


def _plots(
    out: Path, table5: dict[tuple[str, str], Compared], gaps: dict[int, tuple[list[Row], dict[str, float]]]
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for discipline in ("fifo", "easy", "greedy"):
        own = [table5[policy, discipline] for policy in (*PAPER, OWN)]
        bars = completion_bars(own, 640, 260, f"mean completion time in hours, 88 jobs, {discipline}")
        (out / f"sched_{discipline}.svg").write_text(
            standalone_svg(bars, f"Mean completion time in hours, {discipline}", PARTS)
        )
    end_s = 24 * 3600.0
    shown = {
        policy: effective_points(table5[policy, "fifo"].first) for policy in ("tuned", "fair", "maxtp", "srtf", OWN)
    }
    curves = [
        Series(policy, style, [(at_s, share) for at_s, share in points if at_s <= end_s], steps=True)
        for style, (policy, points) in enumerate(shown.items())
    ]
    x = Axis(0.0, end_s, [(at * 3600.0, f"{at} h") for at in range(0, 25, 6)])
    y = Axis(0.0, 0.6, [(share / 10, f"{share * 10} %") for share in range(0, 7, 2)])
    chart = line_chart(curves, x, y, 640, 260, "effective GPUs over time, first list, strict FIFO")
    (out / "sched_effective.svg").write_text(standalone_svg(chart, "GPUs in effective use, first list, fifo"))
    names = list(next(iter(gaps.values()))[1])
    lines = [
        Series(name, style, [(float(load), means[name]) for load, (_, means) in gaps.items()])
        for style, name in enumerate(names)
    ]
    highest = max(value for _, means in gaps.values() for value in means.values())
    loads = Axis(80.0, 160.0, [(float(load), f"{load} jobs") for load in gaps])
    chart = line_chart(lines, loads, count_axis(highest), 640, 260, "mean completion time in minutes, by load")
    (out / "sched_bound.svg").write_text(standalone_svg(chart, "Mean completion time in minutes, and its lower bound"))


if __name__ == "__main__":
    sys.exit(main())
