"""`make bench-model`: the resource model (DLRover-RM, VLDB'24, 4.1 to 4.3), question by question.

How well a step's time is known from a few noisy measurements, what plans made from that are worth, how jobs fare beside
two other schedulers in the paper's setting, how near a job starts to where it ends, and whether running out of memory
is foreseen. All inputs are made with seeds; docs/benchmarks-cluster.md says what is assumed.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from benchmarks import adaptdl, harness, held_out, machine, memory_shapes, past_populations, schedulers
from benchmarks.harness import Row
from benchmarks.memory_traces import KINDS, MemoryTrace, memory_traces
from benchmarks.resource_model import nsga2
from benchmarks.resource_model.fit import Observations, fit
from benchmarks.resource_model.joint import Candidates, exact, joint_front, upgrades, weight
from benchmarks.resource_model.pareto import front, hypervolume
from benchmarks.resource_model.plan import Prices, fastest, grid, plans
from benchmarks.resource_model.step_time import Side, StepTimeModel
from benchmarks.resource_model.terms import (
    FED_PARAMETER_SERVERS,
    GPU_TRAINERS,
    PARAMETER_SERVERS,
    Array,
    Configurations,
    Family,
    ModelError,
)
from hetstream.hetjob.elastic.memory import GrowthOptions, MemoryGrowth
from hetstream.hetjob.master.memory import TRAINER_OPTIONS

WORKLOAD = schedulers.WORKLOAD
FAMILIES: dict[Family, Configurations] = {
    PARAMETER_SERVERS: grid(
        trainers=range(1, 33), servers=range(1, 9), trainer_cpus=[1, 2, 4, 8, 16], server_cpus=[1, 2, 4, 8, 16]
    ),
    FED_PARAMETER_SERVERS: grid(
        trainers=[1, 2, 4, 8, 16], servers=[1, 2, 4, 8], trainer_cpus=[1, 2, 4, 8, 16], server_cpus=[2, 8],
        data_workers=[1, 2, 4, 8, 16, 32], data_worker_cpus=[1, 2, 4, 8],
    ),
    GPU_TRAINERS: grid(trainers=[1, 2, 4, 8], data_workers=range(1, 65), data_worker_cpus=[1, 2, 4, 8, 16]),
}  # fmt: skip
REFERENCE = Configurations.of(
    trainers=8, servers=4, trainer_cpus=8, server_cpus=8, data_workers=8, data_worker_cpus=4
)  # fmt: skip
# Fixed numbers of nodes at a time: the paper does not say how many, so the baselines get the best of these.
NODES_AT_A_TIME = (1, 2, 4, 8)
PAPER_ES, PAPER_OPTIMUS = 0.177, 0.285
# Stop, checkpoint, start again; and with a flash checkpoint, while the old one goes on (assumed).
CHANGE_S, SEAMLESS_S = 30.0, 1.0
# An alarm helps if a job can be moved before memory is full.
LEAD_S = 300.0


def main() -> int:
    """Run the benchmark."""
    parser = harness.parser("The resource model: fit, plans, schedulers, warm start, memory.", repeats=60)
    args = parser.parse_args()
    repeats = 4 if args.quick else args.repeats
    parts: dict[str, Callable[[int], list[Row]]] = {
        "fit": fits, "plan": one_plan, "joint": joint_plans, "schedulers": completion, "warm start": warm_start,
        "memory": memory, "held out": held_out_rows,
    }  # fmt: skip
    rows: list[Row] = []
    for part in harness.chosen([harness.System(name) for name in parts], args.systems):
        harness.say(f"  {part.name}")
        rows += parts[part.name](repeats)
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("numpy", "scipy", "pymoo"),
        "notes": NOTES,
    }
    return harness.finish("model", args.out, rows, {}, context)


NOTES = [
    "No trace says what steps take in how many configurations: all inputs are made with seeds, by the paper's form of "
    "a step with its published slopes and factors around them.",
    "fit: samples in distinct random configurations, log-normal noise; error is the median over all configurations of "
    "the grid. Three families of jobs; plain: rows not divided by their time, as the paper names the method.",
    "plan: the throughput of the plan that the fit chooses, over the best that enumeration of the true model finds, "
    "within the same CPUs.",
    "schedulers: three jobs together on 20 servers of 32 cores, batch 512, 200,000 steps, a decision every 3 minutes, "
    "5 % noise. Assumed: the slopes are seconds at 8 workers and 4 servers of 8 cores each, times 0.012, and off by a "
    "fifth from job to job; jobs start with 4 and 2; a change costs 30 s; ES and Optimus add the best of 1, 2, 4 or 8 "
    "nodes at a time. AdaptDL changes workers alone, up to twice as many as a job ever had, by the formulas of Pollux "
    "(OSDI'21); the batch stays as it is set, so its goodput is throughput. hetstream starts cold, with no past job.",
    "warm start: accuracy is one less the relative error of the first configuration against the final one; the paper "
    "gives no formula, and its 92 and 85 % are of workers and parameter servers of production jobs. Here it is data "
    "workers and trainer CPUs, of 40 scripts that are submitted again and again with other GPUs, batches and changes.",
    "memory: an alarm counts when it comes 5 minutes before memory is full, from readings every 20 s. Memory that is "
    "collected has periods of up to 10 minutes and 35 % of the limit (assumed): a first rise that long is a leak's.",
    "deceiving shapes: readings every 10 s; nobody knows when the job ends. The bound is the share of processes that "
    "grow just like a leak which would be full within those 5 minutes.",
    "held out: the same targets on generators with which no setting was chosen: noise of Student's t, wider for slower "
    "steps, one step in 20 a straggler; true steps with a wait and a crowding that the model has no terms for; memory "
    "that grows along other curves, or seems to.",
]


def row(
    case: str, system: str, samples: Sequence[float], unit: str, *, at_least: float | None = None,
    at_most: float | None = None, mean: bool = False, note: str = "",
) -> Row:  # fmt: skip
    """The median, or the mean, with its verdict."""
    values = tuple(float(one) for one in samples)
    value = statistics.fmean(values) if mean else statistics.median(values)
    target = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}" if at_most is not None else None
    met = value >= at_least if at_least is not None else value <= at_most if at_most is not None else None
    unit = f"{unit}, mean" if mean else unit
    return Row(case, system, value, unit, (min(values), max(values)), target, met, note, values)


# ---------------------------------------------------------------------------------------------------------------- fit


def made(family: Family, generator: np.random.Generator) -> StepTimeModel:
    """A job's true model: the published slopes, and factors around them."""

    def side(terms: tuple[object, ...], seconds: Array) -> Side:
        columns = np.maximum(family.columns(terms, REFERENCE, WORKLOAD)[0], 1e-12)  # type: ignore[arg-type]
        slopes = seconds * np.exp(generator.normal(0, 0.5, len(seconds))) / columns
        num = len(seconds)
        return Side(terms, slopes, np.zeros((num, num)), 0.0, 1, 1.0)  # type: ignore[arg-type]

    with_servers = len(family.compute) == len(schedulers.PUBLISHED_SLOPES)
    compute = schedulers.PUBLISHED_SLOPES * 0.012 if with_servers else np.array([0.01, 0.05])
    loading = np.array([0.1 if with_servers else 0.06, 0.005])
    return StepTimeModel(
        family, WORKLOAD, side(family.compute, compute), side(family.loading, loading) if family.loading else None
    )


def measured(truth: StepTimeModel, candidates: Configurations, num: int, noise: float, seed: int) -> Observations:
    """Noisy steps in random configurations."""
    generator = np.random.default_rng(seed)
    chosen = candidates[generator.choice(len(candidates), num, replace=False)]
    return Observations(chosen, truth.step_s(chosen) * np.exp(generator.normal(0, noise, num)))


def error(found: Array, true: Array) -> float:
    """Median relative error, in percent."""
    return float(100 * np.median(np.abs(found / true - 1)))


def fits(repeats: int) -> list[Row]:
    """How well a step's time is known."""
    rows = []
    for family, candidates in FAMILIES.items():
        for num, noise in ((10, 0.05), (20, 0.05), (40, 0.05), (20, 0.02), (20, 0.10), (20, 0.20)):
            is_goal = (num, noise) == (20, 0.05)
            ours, plain, mean = [], [], []
            for seed in range(repeats):
                truth = made(family, np.random.default_rng(seed))
                seen = measured(truth, candidates, num, noise, seed)
                true = truth.step_s(candidates)
                ours.append(error(fit(family, WORKLOAD, seen).step_s(candidates), true))
                mean.append(error(np.full(len(true), seen.step_s.mean()), true))
                if not family.loading:
                    plain.append(error(_plain(family, seen, candidates), true))
            case = f"fit, {num} samples, {noise:.0%} noise"
            rows.append(row(case, family.name, ours, "% error", at_most=3.0 if is_goal else None))
            if is_goal:
                if plain:
                    rows.append(row(case, f"{family.name}, plain", plain, "% error"))
                rows.append(row(case, f"{family.name}, mean step", mean, "% error"))
    return rows


def _plain(family: Family, seen: Observations, candidates: Configurations) -> Array:
    from scipy.optimize import nnls

    columns = family.columns(family.compute, seen.configurations, WORKLOAD)
    scale = np.maximum(np.linalg.norm(columns, axis=0), 1e-12)
    slopes = nnls(columns / scale, seen.step_s)[0] / scale
    found: Array = family.columns(family.compute, candidates, WORKLOAD) @ slopes
    return found


# --------------------------------------------------------------------------------------------------------------- plans


def one_plan(repeats: int) -> list[Row]:
    """What the plan is worth that a fit makes, and how long the exact front takes."""
    rows = []
    for family, candidates in FAMILIES.items():
        shares = []
        for seed in range(repeats):
            truth = made(family, np.random.default_rng(seed))
            model = fit(family, WORKLOAD, measured(truth, candidates, 20, 0.05, seed))
            budget = float(np.quantile(candidates.cpus, 0.6))
            found = plans(model, candidates, candidates[[0]], Prices(), most_cost=budget)
            allowed = candidates[np.flatnonzero(candidates.cpus <= budget)]
            best = truth.samples_per_s(allowed).max()
            chosen = found.configurations[fastest(found, enough=1.0)]
            shares.append(float(truth.samples_per_s(chosen)[0] / best))
        rows.append(row("plan, 20 samples, 5 % noise", family.name, shares, "of the best", at_least=0.99))
    generator = np.random.default_rng(0)
    costs, gains = generator.random(1 << 20), generator.random(1 << 20)
    times = []
    for _ in range(3):
        began = time.process_time()
        front(costs, gains)
        times.append(time.process_time() - began)
    rows.append(row("exact front", "1,048,576 plans", times, "CPU s", at_most=0.5))
    return rows


def some_jobs(generator: np.random.Generator, num: int, most: int = 8) -> list[Candidates]:
    """Fronts of made-up jobs, of long and short ones."""
    found = []
    for _ in range(num):
        costs = np.cumsum(generator.integers(1, 8, generator.integers(2, most + 1))).astype(np.float64)
        values = np.sort(generator.random(len(costs))) * weight(generator.uniform(1, 60), rho=1.0)
        found.append(Candidates(costs, values))
    return found


def joint_plans(repeats: int) -> list[Row]:
    """Plans of several jobs: upgrades and NSGA-II beside the best, and two hundred jobs from fit to choice."""
    generator = np.random.default_rng(1)
    shares, ratios = [], []
    for _ in range(repeats):
        jobs = some_jobs(generator, 12)
        capacity = sum(float(one.costs[0]) for one in jobs) + 60
        best = exact(jobs, capacity).value
        shares.append(upgrades(jobs, capacity).value / best)
        ratios.append(_by_ratio(jobs, capacity) / best)
    rows = [
        row("12 jobs, one capacity", "marginal upgrades", shares, "of the best", at_least=0.99, mean=True),
        row("12 jobs, one capacity", "gain over cost, read literally", ratios, "of the best", mean=True),
    ]
    rows += _evolved()
    times = []
    for _ in range(3):
        began = time.process_time()
        _two_hundred()
        times.append(time.process_time() - began)
    rows.append(row("200 jobs, fit, front and choice", "hetstream", times, "CPU s", at_most=1.0))
    return rows


def _by_ratio(jobs: Sequence[Candidates], capacity: float) -> float:
    """The paper's equation 12 as it reads: whole plans by gain over cost, the best first, one for each job."""
    order = sorted(
        (-value / cost, job, at)
        for job, one in enumerate(jobs)
        for at, (cost, value) in enumerate(zip(one.costs.tolist(), one.values.tolist(), strict=True))
    )
    plan, left = [0] * len(jobs), capacity - sum(float(one.costs[0]) for one in jobs)
    chosen: set[int] = set()
    for _, job, at in order:
        extra = float(jobs[job].costs[at] - jobs[job].costs[0])
        if job not in chosen and extra <= left:
            plan[job], left = at, left - extra
            chosen.add(job)
    return sum(float(one.values[at]) for one, at in zip(jobs, plan, strict=True))


def _evolved() -> list[Row]:
    shares, times, exact_times = [], [], []
    for seed in range(3):
        jobs = some_jobs(np.random.default_rng(seed + 10), 8)
        capacity = 0.6 * sum(float(one.costs[-1]) for one in jobs)
        began = time.process_time()
        best = hypervolume(*joint_front(jobs, capacity), capacity * 1.01, 0.0)
        exact_times.append(time.process_time() - began)
        began = time.process_time()
        try:
            found = nsga2.joint_front(jobs, capacity, seed=seed)
        except ModelError as missing:
            note = str(missing).partition(",")[0]
            return [Row("8 jobs, joint front", "NSGA-II (pymoo)", None, "of the exact hypervolume", None, ">= 0.99",
                        note=f"not compared: {note}")]  # fmt: skip
        times.append(time.process_time() - began)
        shares.append(hypervolume(*found, capacity * 1.01, 0.0) / best)
    case = "8 jobs, joint front"
    return [
        row(case, "NSGA-II (pymoo)", shares, "of the exact hypervolume", at_least=0.99),
        row(case, "NSGA-II (pymoo)", times, "CPU s"),
        row(case, "exact", exact_times, "CPU s"),
    ]


def _two_hundred() -> None:
    candidates = grid(trainers=[1], data_workers=range(1, 65), data_worker_cpus=range(1, 17))
    jobs = []
    for seed in range(200):
        truth = made(GPU_TRAINERS, np.random.default_rng(seed % 20))
        model = fit(GPU_TRAINERS, WORKLOAD, measured(truth, candidates, 20, 0.05, seed))
        found = plans(model, candidates, candidates[[0]], Prices())
        jobs.append(Candidates(found.costs, found.gains))
    upgrades(jobs, 200 * 40)


# ---------------------------------------------------------------------------------------------------------- schedulers


def completion(repeats: int) -> list[Row]:
    """Mean completion times beside the paper's two baselines."""
    seeds = range(max(2, repeats // 5))
    made_by: dict[str, tuple[schedulers.Scheduler, float]] = {
        "hetstream": (schedulers.planned(CHANGE_S), CHANGE_S),
        "hetstream, changes that hold nothing up": (schedulers.planned(SEAMLESS_S), SEAMLESS_S),
        "told the truth (bound)": (schedulers.planned(CHANGE_S, knows=True), CHANGE_S),
    }
    made_by["AdaptDL"] = (adaptdl.goodput_scheduler(CHANGE_S), CHANGE_S)
    for num in NODES_AT_A_TIME:
        made_by[f"ES, {num} at a time"] = (schedulers.elastic_scheduler(num), CHANGE_S)
        made_by[f"Optimus, {num} at a time"] = (schedulers.optimus(num), CHANGE_S)
    means = {
        name: [float(np.mean(schedulers.completion_times_s(scheduler, change_s, seed))) / 60 for seed in seeds]
        for name, (scheduler, change_s) in made_by.items()
    }
    case = "DLRover-RM's setting"
    rows = [row(case, name, values, "min of JCT", mean=True) for name, values in means.items()]
    for name, paper in (("ES", PAPER_ES), ("Optimus", PAPER_OPTIMUS)):
        best = min((one for one in means if one.startswith(name)), key=lambda one: statistics.fmean(means[one]))
        less = [1 - ours / theirs for ours, theirs in zip(means["hetstream"], means[best], strict=True)]
        rows.append(row(case, f"hetstream, less than {best}", less, "of JCT", at_least=paper, mean=True))
    less = [1 - ours / theirs for ours, theirs in zip(means["hetstream"], means["AdaptDL"], strict=True)]
    rows.append(row(case, "hetstream, less than AdaptDL", less, "of JCT", mean=True))
    return rows


# ---------------------------------------------------------------------------------------------------------- warm start


def warm_start(repeats: int) -> list[Row]:
    """How near the first configuration is to the final one."""
    found = [past_populations.accuracies(seed) for seed in range(max(2, repeats // 6))]
    case = "warm start"
    return [
        row(case, "data workers", [one.data_workers for one in found], "% accuracy", at_least=92.0, mean=True),
        row(case, "trainer CPUs", [one.trainer_cpus for one in found], "% accuracy", at_least=85.0, mean=True),
        row(case, "data workers, one default for all", [one.default for one in found], "% accuracy", mean=True),
        row(case, "data workers, the last job of the name", [one.last for one in found], "% accuracy", mean=True),
        row(case, "data workers, told the script's true need (bound)", [one.bound for one in found], "% accuracy",
            mean=True),
        row(case, "submissions with a past job alike", [one.known for one in found], "%", mean=True),
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- memory


WATCHES = {"companions": GrowthOptions(), "trainers": TRAINER_OPTIONS}


def memory(repeats: int) -> list[Row]:
    """Running out of memory, foreseen or not: with the options of companions and of trainers."""
    traces = list(memory_traces(max(16, 10 * repeats), 0))
    rows = [made for who in WATCHES for made in _foreseen(f"memory, {who}", who, KINDS, traces)]
    return rows + _deceiving(repeats)


def _deceiving(repeats: int) -> list[Row]:
    """Shapes that memory alone does not tell apart, with and without what the loader says of the data."""
    traces = list(memory_shapes.memory_shapes(max(18, 6 * repeats), 0))
    rows = []
    for who in WATCHES:
        case = f"deceiving shapes, {who}"
        rows += _foreseen(f"{case}, data known", who, memory_shapes.KINDS, traces, is_data_known=True)
        rows += _foreseen(f"{case}, data not known", who, memory_shapes.KINDS, traces)
    bound = [100.0 * memory_shapes.looks_like_a_leak(trace, LEAD_S) for trace in traces if trace.full is None]
    rows.append(row("deceiving shapes, data not known", "bound for who sees memory alone", bound, "% false alarms",
                    mean=True))  # fmt: skip
    return rows


def _foreseen(
    case: str, who: str, kinds: Sequence[str], traces: Iterable[MemoryTrace], is_data_known: bool = False
) -> list[Row]:  # fmt: skip
    in_time: dict[str, list[float]] = {kind: [] for kind in kinds}
    alarms: dict[str, list[float]] = {kind: [] for kind in kinds}
    leads = []
    for trace in traces:
        at = _first_alarm(trace, WATCHES[who], is_data_known)
        if trace.full is None:
            alarms[trace.kind].append(float(at is not None))
            continue
        lead_s = float(trace.times_s[trace.full]) - at if at is not None else 0.0
        in_time[trace.kind].append(float(lead_s >= LEAD_S))
        leads.append(lead_s / 60)
    rows = [row(case, kind, [100 * one for one in values], "% in time", mean=True)
            for kind, values in in_time.items() if values]  # fmt: skip
    rows += [row(case, kind, [100 * one for one in values], "% false alarms", mean=True)
             for kind, values in alarms.items() if values]  # fmt: skip
    every = [100 * one for values in in_time.values() for one in values]
    false = [100 * one for values in alarms.values() for one in values]
    rows.append(row(case, "all that run out", every, "% in time", at_least=95.0, mean=True))
    rows.append(row(case, "all that run out", leads, "min lead, median"))
    rows.append(row(case, "all that do not", false, "% false alarms", at_most=3.0, mean=True))
    return rows


# ------------------------------------------------------------------------------------------------------------ held out


def held_out_rows(repeats: int) -> list[Row]:
    """Fit, plan and memory again, on jobs of another make than those that settings were chosen with."""
    rows = []
    for family, candidates in FAMILIES.items():
        fitted, measured_waits, planned = [], [], []
        for seed in range(repeats):
            generator = held_out.generator_of(seed)
            truth = made(family, generator)
            true_s = held_out.bent(truth, candidates, generator)
            compute_s, loading_s = truth.sides(candidates)
            waits = np.maximum(0.0, 1 - compute_s / np.maximum(compute_s, loading_s))
            before = copy.deepcopy(generator)
            told = held_out.sampled(true_s, candidates, 20, before, waits)
            measured_waits.append(error(fit(family, WORKLOAD, told).step_s(candidates), true_s))
            found = fit(family, WORKLOAD, held_out.sampled(true_s, candidates, 20, generator)).step_s(candidates)
            fitted.append(error(found, true_s))
            affordable = np.flatnonzero(candidates.cpus <= np.quantile(candidates.cpus, 0.5))
            chosen = affordable[np.argmax(candidates.trainers[affordable] / found[affordable])]
            best = (candidates.trainers[affordable] / true_s[affordable]).max()
            planned.append(float(candidates.trainers[chosen] / true_s[chosen] / best))
        rows.append(row("held out: fit, 20 samples", family.name, fitted, "% error", at_most=3.0))
        if family.loading:
            rows.append(
                row("held out: fit, 20 samples", f"{family.name}, loaders measure waits", measured_waits, "% error")
            )
        rows.append(row("held out: plan, 20 samples", family.name, planned, "of the best", at_least=0.99))
    traces = list(held_out.memory_traces(max(16, 10 * repeats), 0))
    return rows + [
        made for who in WATCHES for made in _foreseen(f"held out: memory, {who}", who, held_out.KINDS, traces)
    ]


def _first_alarm(trace: MemoryTrace, options: GrowthOptions, is_data_known: bool) -> float | None:
    growth = MemoryGrowth(trace.limit_bytes, options)
    # Of the deceiving shapes nobody knows when the job ends.
    end_s = float(trace.times_s[-1]) if trace.epoch_s is None else math.inf
    times_s, resident_bytes = trace.times_s[: trace.full].tolist(), trace.resident_bytes[: trace.full].tolist()
    for now, value in zip(times_s, resident_bytes, strict=True):
        data_left_s = max(0.0, trace.epoch_s - now) if is_data_known and trace.epoch_s is not None else None
        if growth.reading(now, value, end_s - now, data_left_s):
            return float(now)
    return None


if __name__ == "__main__":
    sys.exit(main())
