"""`make bench-opp`: AntMan's Figure 13, and opportunistic jobs on GPUs whose trainers wait for data; by simulation.

docs/benchmarks-cluster.md explains the rows, docs/simulate.md the model of sharing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks import harness, machine
from benchmarks.bound import lower_bound_s, most_effective_hours
from benchmarks.harness import Row
from benchmarks.job_lists import TRACES, JobLists
from benchmarks.shared_gpu_lists import all_share, antman_list, only_class, with_light_jobs
from benchmarks.shared_gpu_peers import by_packer, gandiva_options, preemptive_options
from benchmarks.simulated_pictures import PARTS, completion_bars, effective_points
from benchmarks.simulated_rows import figure, jct_minutes, ratio, standalone_svg
from hetstream.slurm_plugin.policy.policies import POLICIES
from hetstream.slurm_plugin.render.charts import Axis, Series, line_chart
from hetstream.slurm_plugin.simulate.engine import simulate
from hetstream.slurm_plugin.simulate.metrics import Compared, measure
from hetstream.slurm_plugin.simulate.scenario import Discipline, Request, Scenario
from hetstream.slurm_plugin.simulate.sharing import PackingOptions
from hetstream.slurm_plugin.simulate.workload import Cluster, Workload, build, of_groups, parse

CLUSTER = "8*gpus=8,cpus=64"
GPU_MEMORY_GIB = 32.0
JOBS, STARVING_JOBS, LIGHT_JOBS = 1000, (88, 130), 300
WINDOW_S = 500 * 60.0
FIFO_GOAL, EASY_GOAL, GUARANTEED_GOAL, EFFECTIVE_GOAL = 1.9, 1.3, 1.01, 1.6
# AntMan, section 5.3: how much better the paper's own is than the other two.
PAPER = {"fifo": 2.05, "gandiva": 1.84}
_MINUTE_S = 60.0
# Frameworks that take memory as it comes hold so many times what they need.
_GRABBED = 4.0


def main() -> int:
    """Run the benchmark."""
    parser = harness.parser("AntMan's Figure 13, and packing on GPUs whose trainers wait; simulated.", repeats=10)
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with the traces (default: %(default)s)")
    parser.add_argument("--bounds", type=int, default=3, help="lists of the bounds (default: 3)")
    args = parser.parse_args()
    num_lists, num_bounds, num_jobs = (1, 1, 150) if args.quick else (args.repeats, args.bounds, JOBS)
    lists, cluster = JobLists(args.traces), parse(CLUSTER)
    loads = [antman_list(lists, num_jobs, seed) for seed in range(num_lists)]
    found = _figure_13(loads, cluster)
    rows = [*_completion(found, loads, num_bounds), *_guaranteed(found, loads, cluster), *_sensitivity(loads, cluster)]
    starving: dict[str, Compared] = {}
    for count in STARVING_JOBS[:1] if args.quick else STARVING_JOBS:
        own = lists.lists(count, num_lists)
        runs = _starving(own, lists, cluster, count)
        rows += _effective(runs, own, lists, cluster, count)
        starving = starving or runs
    _plots(args.out, found, starving)
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("numpy", "scipy"),
        "notes": [
            lists.note(),
            f"Figure 13: {num_lists} lists of {num_jobs} jobs in 8 hours, {CLUSTER}, {GPU_MEMORY_GIB:g} GiB a GPU; "
            "half of the jobs are tenant A's and guaranteed, the others tenant B's and opportunistic. Values are means "
            "over the lists with their 95 % interval by bootstrap; ratios are ratios of means.",
            "How jobs that share a GPU slow each other down is a model, and not measured: docs/simulate.md has each "
            "number with its source. The guaranteed job's 1.005 is one of them; make bench-gpu_sharing measures it.",
            "The lower bound is a linear program that may stop, move and split jobs for free and knows no memory: a "
            "GPU is shared without any cost, so no schedule is below it.",
            f"Trainers that wait: GoldMiner's lists with {LIGHT_JOBS} light jobs besides (1 GPU that each could keep "
            "busy alone, 1 CPU). Without packing these are jobs as all others. From 0 to 500 minutes.",
            "The upper bound of effective GPUs is a linear program, too, of schedules that care for nothing else.",
        ],
    }
    return harness.finish("opp", args.out, rows, {}, context, ("mean", "95 %"))


def _scenario(name: str, discipline: Discipline, packing: PackingOptions | None = None) -> Scenario:
    return Scenario(name, Request.TUNED, discipline, packing=packing)


def _run(loads: Sequence[Workload], cluster: Cluster, scenario: Scenario, window_s: float | None = None) -> Compared:
    outcomes = [simulate(load, cluster, replace(scenario, seed=seed)) for seed, load in enumerate(loads)]
    stuck = [outcome.scenario.name for outcome in outcomes if outcome.num_unfinished or outcome.rejected]
    if stuck:
        raise SystemExit(f"jobs of these did not end: {stuck}")
    runs = tuple(measure(outcome, window_s) for outcome in outcomes)
    return Compared(scenario.name, scenario.discipline.value, runs, outcomes[0])


def _figure_13(loads: Sequence[Workload], cluster: Cluster) -> dict[str, Compared]:
    """Each scheduler on the same lists."""
    grabbing = [all_share(load, _GRABBED, GPU_MEMORY_GIB) for load in loads]
    sparing = [all_share(load, 1.0, GPU_MEMORY_GIB) for load in loads]
    own, gandiva = by_packer(GPU_MEMORY_GIB), gandiva_options(GPU_MEMORY_GIB)
    backfilled = gandiva_options(GPU_MEMORY_GIB, is_strict=False)
    systems: list[tuple[str, Discipline, PackingOptions | None, Sequence[Workload]]] = [
        ("fifo", Discipline.FIFO, None, loads),
        ("easy", Discipline.EASY, None, loads),
        ("greedy", Discipline.GREEDY, None, loads),
        ("preemptive, fifo", Discipline.FIFO, preemptive_options(), loads),
        ("gandiva, fifo", Discipline.FIFO, gandiva, grabbing),
        ("gandiva, fifo, memory as needed", Discipline.FIFO, gandiva, sparing),
        ("gandiva, backfill, memory as needed", Discipline.FIFO, backfilled, sparing),
        ("hetstream, fifo", Discipline.FIFO, own, loads),
        ("hetstream, easy", Discipline.EASY, own, loads),
        ("hetstream, greedy", Discipline.GREEDY, own, loads),
    ]
    found = {}
    for name, discipline, packing, own_loads in systems:
        harness.say(f"  figure 13: {name}, {len(loads)} lists")
        found[name] = _run(own_loads, cluster, _scenario(name, discipline, packing))
    return found


def _completion(found: Mapping[str, Compared], loads: Sequence[Workload], num_bounds: int) -> list[Row]:
    case = "figure 13"
    rows = [figure(case, name, one, "mean_jct_s", "min to completion", _MINUTE_S) for name, one in found.items()]
    rows += [figure(case, name, one, "makespan_s", "min makespan", _MINUTE_S) for name, one in found.items()]
    jct = {name: jct_minutes(one) for name, one in found.items()}
    rows += [
        replace(
            ratio(case, "fifo / hetstream, fifo", jct["fifo"], jct["hetstream, fifo"], FIFO_GOAL, False),
            note=f"paper {PAPER['fifo']}",
        ),
        ratio(case, "easy / hetstream, easy", jct["easy"], jct["hetstream, easy"], EASY_GOAL, False),
        ratio(case, "greedy / hetstream, greedy", jct["greedy"], jct["hetstream, greedy"], None, False),
        replace(
            ratio(case, "gandiva, fifo / hetstream, fifo", jct["gandiva, fifo"], jct["hetstream, fifo"], None, False),
            note=f"paper {PAPER['gandiva']}",
        ),
        ratio(
            case, "gandiva, backfill, memory as needed / hetstream, easy",
            jct["gandiva, backfill, memory as needed"], jct["hetstream, easy"], None, False,
        ),
    ]  # fmt: skip
    harness.say(f"  figure 13: lower bounds of {min(num_bounds, len(loads))} lists")
    bounds = [_lower_bound_s(load) / _MINUTE_S for load in loads[:num_bounds]]
    for name in ("fifo", "easy"):
        rows.append(
            ratio(
                case, f"{name} / lower bound: the most that is possible", jct[name][: len(bounds)], bounds, None, False
            )
        )
    rows.append(ratio(case, "hetstream, easy / lower bound", jct["hetstream, easy"][: len(bounds)], bounds, None, True))
    return rows


def _lower_bound_s(load: Workload) -> float:
    """Of the mean completion time, with GPUs as time that any number of jobs divide."""
    assert load.sharing is not None, "nothing is known of sharing"
    cluster = parse(CLUSTER)
    time_needed = build(
        load.names,
        {
            "submit_s": load.submit_s,
            "work_s": load.work_s,
            "ideal_cpus": load.sharing.gpu_use * load.num_gpus,
            "trainer_cpus": np.zeros(len(load)),
        },
    )
    return lower_bound_s(time_needed, of_groups([{"gpus": 1e6, "cpus": cluster.num_gpus}]))


def _guaranteed(found: Mapping[str, Compared], loads: Sequence[Workload], cluster: Cluster) -> list[Row]:
    """What the guaranteed jobs feel: of the model alone, and in their completion times, which it adds up to."""
    alone = {
        discipline.value: _run(
            [only_class(load, False) for load in loads], cluster, _scenario("guaranteed jobs alone", discipline)
        )
        for discipline in (Discipline.FIFO, Discipline.EASY)
    }
    case, rows = "figure 13, guaranteed jobs", []
    for discipline, without in alone.items():
        own = found[f"hetstream, {discipline}"]
        rows.append(
            figure(case, f"alone in the cluster, {discipline}", without, "mean_jct_s", "min to completion", 60.0)
        )
        rows.append(figure(case, own.policy, own, "guaranteed_mean_jct_s", "min to completion", _MINUTE_S))
        jct = [run.guaranteed_mean_jct_s / _MINUTE_S for run in own.runs if run.guaranteed_mean_jct_s is not None]
        rows.append(
            ratio(case, f"{own.policy} / alone in the cluster", jct, jct_minutes(without), GUARANTEED_GOAL, True)
        )
    preemptive = [run.guaranteed_mean_jct_s or 0.0 for run in found["preemptive, fifo"].runs]
    own_s = [run.guaranteed_mean_jct_s or 0.0 for run in found["hetstream, fifo"].runs]
    rows.append(ratio(case, "hetstream, fifo / preemptive, fifo", own_s, preemptive, None, True))
    for name in ("hetstream, fifo", "hetstream, easy"):
        row = figure(
            case, name, found[name], "guaranteed_p99_held_up", "x run time alone, p99", 1.0, "the model's number"
        )
        rows.append(replace(row, target=f"<= {GUARANTEED_GOAL:g}", met=(row.value or 0.0) <= GUARANTEED_GOAL))
    share = [(run.num_evictions or 0) / run.num_jobs * 100 for run in found["preemptive, fifo"].runs]
    rows.append(Row(case, "preemptive, fifo", fmean(share), "% of jobs driven away", None, note="paper 46"))
    opportunistic = [
        figure(
            "figure 13, opportunistic jobs", name, found[name], "opportunistic_mean_jct_s", "min to completion", 60.0
        )
        for name in ("preemptive, fifo", "hetstream, fifo", "hetstream, easy")
    ]
    return [*rows, *opportunistic]


def _sensitivity(loads: Sequence[Workload], cluster: Cluster) -> list[Row]:
    """The same with other numbers in the model."""
    rows = []
    some = loads[:3]
    easy = jct_minutes(_run(some, cluster, _scenario("easy", Discipline.EASY)))
    fifo = jct_minutes(_run(some, cluster, _scenario("fifo", Discipline.FIFO)))
    for text, cost, overhead in (
        ("guaranteed 1.00, opportunistic -2 %", 0.0, 0.02),
        ("guaranteed 1.01, opportunistic -10 %", 0.01, 0.10),
        ("guaranteed 1.05, opportunistic -30 %", 0.05, 0.30),
    ):
        packing = by_packer(GPU_MEMORY_GIB, cost, overhead)
        for name, before, discipline in (("fifo", fifo, Discipline.FIFO), ("easy", easy, Discipline.EASY)):
            own = jct_minutes(_run(some, cluster, _scenario("hetstream", discipline, packing)))
            rows.append(ratio(f"figure 13, {text}", f"{name} / hetstream, {name}", before, own, None, False))
    return rows


def _starving(loads: Sequence[Workload], lists: JobLists, cluster: Cluster, count: int) -> dict[str, Compared]:
    """GoldMiner's lists with light jobs besides, without and with packing."""
    both = [with_light_jobs(load, lists, LIGHT_JOBS, seed) for seed, load in enumerate(loads)]
    found: dict[str, Compared] = {}
    for discipline in (Discipline.FIFO, Discipline.EASY):
        harness.say(f"  {count} jobs that wait for data and {LIGHT_JOBS} light ones, {discipline.value}")
        tuned = Scenario("tuned", Request.TUNED, discipline)
        srtf = Scenario("srtf", Request.ELASTIC, discipline, POLICIES["srtf"])
        packed = replace(srtf, name="srtf, packing", packing=PackingOptions())
        for scenario in (tuned, srtf, packed):
            found[f"{scenario.name}, {discipline.value}"] = _run(both, cluster, scenario, WINDOW_S)
        for scenario in (tuned, srtf):
            name = f"{scenario.name} without light jobs, {discipline.value}"
            found[name] = _run(loads, cluster, replace(scenario, name=name), WINDOW_S)
    return found


def _effective(
    found: Mapping[str, Compared], loads: Sequence[Workload], lists: JobLists, cluster: Cluster, count: int
) -> list[Row]:
    case = f"{count} trainers and {LIGHT_JOBS} light jobs"
    rows = [figure(case, name, one, "gpu_effective", "% of GPUs effective", 0.01) for name, one in found.items()]
    share = {name: [run.gpu_effective for run in one.runs] for name, one in found.items()}
    for discipline in ("fifo", "easy"):
        tuned, packed = share[f"tuned, {discipline}"], share[f"srtf, packing, {discipline}"]
        goal = EFFECTIVE_GOAL if count == STARVING_JOBS[0] else None
        rows.append(ratio(case, f"srtf, packing / tuned, {discipline}", packed, tuned, goal, False))
        rows.append(
            ratio(case, f"srtf, packing / srtf, {discipline}", packed, share[f"srtf, {discipline}"], None, False)
        )
        without = share[f"tuned without light jobs, {discipline}"]
        rows.append(
            ratio(case, f"srtf, packing / tuned without light jobs, {discipline}", packed, without, None, False)
        )
        before = found[f"srtf without light jobs, {discipline}"]
        jct = [(run.guaranteed_mean_jct_s or 0.0) / _MINUTE_S for run in found[f"srtf, packing, {discipline}"].runs]
        rows.append(
            ratio(case, f"trainers' completion, srtf, packing / without light jobs, {discipline}", jct,
                  jct_minutes(before), None, True)
        )  # fmt: skip
    some = [with_light_jobs(load, lists, LIGHT_JOBS, seed) for seed, load in enumerate(loads[:3])]
    harness.say(f"  {case}: upper bounds of {len(some)} lists")
    all_hours = cluster.num_gpus * WINDOW_S / 3600
    bounds = [most_effective_hours(load, cluster, WINDOW_S) / all_hours for load in some]
    for discipline in ("fifo", "easy"):
        name = f"upper bound / tuned, {discipline}: the most that is possible"
        rows.append(ratio(case, name, bounds, share[f"tuned, {discipline}"][: len(bounds)], None, False))
    return rows


def _plots(out: Path, found: Mapping[str, Compared], starving: Mapping[str, Compared]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    shown = ("fifo", "easy", "preemptive, fifo", "gandiva, fifo", "hetstream, fifo", "hetstream, easy")
    title = "Mean completion time in hours, AntMan's Figure 13, simulated"
    bars = completion_bars([replace(found[name], policy=name) for name in shown], 640, 260, title)
    (out / "opp_completion.svg").write_text(standalone_svg(bars, title, PARTS))
    end_s = 16 * 3600.0
    curves = [
        Series(
            name,
            style,
            [(at_s, part) for at_s, part in effective_points(starving[name].first) if at_s <= end_s],
            steps=True,
        )
        for style, name in enumerate(
            ("tuned, easy", "srtf, easy", "srtf, packing, easy", "srtf without light jobs, easy")
        )
    ]
    x = Axis(0.0, end_s, [(at * 3600.0, f"{at} h") for at in range(0, 17, 4)])
    y = Axis(0.0, 1.0, [(part / 4, f"{part * 25} %") for part in range(5)])
    title = "GPUs in effective use, trainers that wait for data and light jobs, first list, easy"
    chart = line_chart(curves, x, y, 640, 260, title)
    (out / "opp_effective.svg").write_text(standalone_svg(chart, title))


if __name__ == "__main__":
    sys.exit(main())
