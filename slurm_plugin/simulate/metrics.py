"""Figures of a run: completion times, waiting by cause, use of GPUs and CPUs, fragmentation, cost. Pure.

docs/simulate.md defines each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hetstream.base.errors import UsageError
from hetstream.slurm_plugin.insight.prices import Prices
from hetstream.slurm_plugin.policy.policies import POLICIES, under_all_rules
from hetstream.slurm_plugin.simulate.engine import Progress, simulate
from hetstream.slurm_plugin.simulate.running import Cause
from hetstream.slurm_plugin.simulate.scenario import CapOptions, Discipline, Request, Scenario
from hetstream.slurm_plugin.simulate.sharing import PackingOptions
from hetstream.slurm_plugin.simulate.usage_log import Outcome
from hetstream.slurm_plugin.simulate.workload import Cluster, Workload

Floats = npt.NDArray[np.float64]
_HOUR_S = 3600.0
_BOOTSTRAPS = 2000


@dataclass(frozen=True)
class Metrics:
    """Figures of one run; times in seconds, shares from 0 to 1.

    Attributes:
        num_jobs: in the workload. num_finished: that ended. num_rejected: larger than the cluster, or given up.
        num_unfinished: that waited or stood still when nothing more could happen.
        mean_jct_s, median_jct_s, p95_jct_s, p99_jct_s: end - submission, of the jobs that ended.
        mean_wait_s, p50_wait_s, p95_wait_s, p99_wait_s: first start - submission.
        wait_by_cause_s: mean, by the name of the cause; a job that was restarted has waited again.
        mean_stretch: (end - start) / work.
        mean_slowdown, p99_slowdown, max_slowdown: (end - submission) / work.
        makespan_s: last end - first submission.
        window_s: over which shares are taken, from the first submission on.
        gpu_allocated, gpu_effective: share of all GPUs that jobs held, and the same times their speeds.
        cpu_allocated, cpu_productive: share of all CPUs that were held, and that the speeds needed.
        fragmentation: mean of |freeCPU/CPU - freeGPU/GPU| over nodes and time; None if it was not sampled.
        cpus_gone, gpus_gone: share of nodes without a free CPU but with more than a quarter of the GPUs free, and
            without a free GPU but with more than a quarter of the CPUs free.
        unusable_gpus: share of all GPUs that are free where typical jobs of the workload cannot use them.
        gpu_hours, cpu_hours: that jobs held. cost: of them; None without prices.
        cost_per_work_hour: cost of an hour of work of one GPU at its ideal speed.
        jain: fairness over the jobs' speeds (work / time that they ran), 1 if all are alike.
        num_restarts, lost_hours: by failures of nodes.
        moves_per_job_hour: changes of the number of data workers for each hour that jobs ran.
        gpu_effective_shared: of gpu_effective, what opportunistic jobs on shared GPUs did; this and the following are
            None without packing.
        guaranteed_mean_jct_s, opportunistic_mean_jct_s: end - submission, of each class.
        guaranteed_p99_held_up: run time of a guaranteed job / what it would have been without others on its GPUs.
        num_evictions: of opportunistic jobs.
    """

    num_jobs: int
    num_finished: int
    num_rejected: int
    num_unfinished: int
    mean_jct_s: float
    median_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    mean_wait_s: float
    p50_wait_s: float
    p95_wait_s: float
    p99_wait_s: float
    wait_by_cause_s: dict[str, float]
    mean_stretch: float
    mean_slowdown: float
    p99_slowdown: float
    max_slowdown: float
    makespan_s: float
    window_s: float
    gpu_allocated: float
    gpu_effective: float
    cpu_allocated: float
    cpu_productive: float
    fragmentation: float | None
    cpus_gone: float | None
    gpus_gone: float | None
    unusable_gpus: float | None
    gpu_hours: float
    cpu_hours: float
    cost: float | None
    cost_per_work_hour: float | None
    jain: float
    num_restarts: int
    lost_hours: float
    moves_per_job_hour: float
    gpu_effective_shared: float | None = None
    guaranteed_mean_jct_s: float | None = None
    opportunistic_mean_jct_s: float | None = None
    guaranteed_p99_held_up: float | None = None
    num_evictions: int | None = None


def measure(outcome: Outcome, window_s: float | None = None, prices: Prices | None = None) -> Metrics:
    """Return the figures of a run.

    Args:
        outcome: of it.
        window_s: for shares; the makespan if it is None.
        prices: None if there are none.
    """
    load, done = outcome.workload, outcome.finished
    end_s = float(np.nanmax(outcome.end_s)) if done.any() else 0.0
    window = window_s or end_s or 1.0
    return Metrics(
        num_jobs=len(load),
        num_finished=int(done.sum()),
        num_rejected=len(outcome.rejected),
        num_unfinished=outcome.num_unfinished,
        makespan_s=end_s,
        window_s=window,
        num_restarts=int(outcome.restarts.sum()),
        lost_hours=float(outcome.lost_s.sum()) / _HOUR_S,
        **_of_jobs(outcome),
        **_of_waiting(outcome),
        **_of_resources(outcome, window),
        **_of_nodes(outcome, window),
        **_spent(outcome, prices),
        **_of_packing(outcome, window),
    )


def _of_jobs(outcome: Outcome) -> dict[str, Any]:
    """What the jobs that ended had of it."""
    load, done = outcome.workload, outcome.finished
    jct_s = (outcome.end_s - load.submit_s)[done]
    ran_s = (outcome.end_s - outcome.start_s)[done]
    work_s = load.work_s[done]
    slowdown = jct_s / work_s
    speeds = work_s / np.maximum(ran_s, 1e-9)
    return {
        "mean_jct_s": _mean(jct_s),
        "median_jct_s": _at(jct_s, 50),
        "p95_jct_s": _at(jct_s, 95),
        "p99_jct_s": _at(jct_s, 99),
        "mean_stretch": _mean(ran_s / work_s),
        "mean_slowdown": _mean(slowdown),
        "p99_slowdown": _at(slowdown, 99),
        "max_slowdown": float(slowdown.max(initial=0.0)),
        "jain": float(speeds.sum() ** 2 / (len(speeds) * (speeds**2).sum())) if len(speeds) else 1.0,
    }


def _of_waiting(outcome: Outcome) -> dict[str, Any]:
    """How long jobs waited, and for what."""
    wait_s = (outcome.start_s - outcome.workload.submit_s)[np.isfinite(outcome.start_s)]
    taken = np.ones(len(outcome.workload), dtype=bool)
    taken[list(outcome.rejected)] = False
    by_cause = outcome.waited_s[taken].mean(axis=0) if taken.any() else np.zeros(len(Cause))
    return {
        "mean_wait_s": _mean(wait_s),
        "p50_wait_s": _at(wait_s, 50),
        "p95_wait_s": _at(wait_s, 95),
        "p99_wait_s": _at(wait_s, 99),
        "wait_by_cause_s": {cause.name.lower(): float(by_cause[cause]) for cause in Cause},
    }


def _of_resources(outcome: Outcome, window_s: float) -> dict[str, Any]:
    """Shares of the cluster until the end of the window."""
    use, own = outcome.use, outcome.cluster
    gpu_s, cpu_s = own.num_gpus * window_s, own.num_cpus * window_s
    return {
        "gpu_allocated": _share(use.total(use.gpus, 0.0, window_s), gpu_s),
        "gpu_effective": _share(use.total(use.effective_gpus, 0.0, window_s), gpu_s),
        "cpu_allocated": _share(use.total(use.cpus, 0.0, window_s), cpu_s),
        "cpu_productive": _share(use.total(use.productive_cpus, 0.0, window_s), cpu_s),
    }


def _of_nodes(outcome: Outcome, window_s: float) -> dict[str, Any]:
    """Fragmentation until the end of the window, where it was sampled."""
    seen = outcome.fragmentation
    if seen is None:
        return dict.fromkeys(("fragmentation", "cpus_gone", "gpus_gone", "unusable_gpus"))
    within = seen.at_s < window_s
    return {
        "fragmentation": _mean(seen.indicator[within]),
        "cpus_gone": _mean(seen.cpus_gone[within]),
        "gpus_gone": _mean(seen.gpus_gone[within]),
        "unusable_gpus": _mean(seen.unusable_gpus[within]),
    }


def _spent(outcome: Outcome, prices: Prices | None) -> dict[str, Any]:
    """What the whole run took, and cost."""
    use = outcome.use
    all_s = float(use.at_s[-1]) if len(use.at_s) else 0.0
    gpu_hours, cpu_hours, work_hours, job_hours = (
        use.total(amounts, 0.0, all_s) / _HOUR_S
        for amounts in (use.gpus, use.cpus, use.effective_gpus, use.num_running)
    )
    cost = prices.of(gpu_hours, cpu_hours) if prices else None
    return {
        "gpu_hours": gpu_hours,
        "cpu_hours": cpu_hours,
        "cost": cost,
        "cost_per_work_hour": cost / work_hours if cost is not None and work_hours else None,
        "moves_per_job_hour": outcome.num_moves / job_hours if job_hours else 0.0,
    }


def _of_packing(outcome: Outcome, window_s: float) -> dict[str, Any]:
    """The figures of sharing GPUs; empty without."""
    felt, load = outcome.felt, outcome.workload
    if felt is None:
        return {}
    jct_s, ran_s = outcome.end_s - load.submit_s, outcome.end_s - outcome.start_s
    guaranteed = outcome.finished & ~felt.is_opportunistic & (load.num_gpus > 0)
    held_up = ran_s / np.maximum(ran_s - felt.held_up_s, 1e-9)
    shared = outcome.use.total(outcome.use.shared_gpus, 0.0, window_s)
    return {
        "gpu_effective_shared": _share(shared, outcome.cluster.num_gpus * window_s),
        "guaranteed_mean_jct_s": _mean(jct_s[guaranteed]),
        "opportunistic_mean_jct_s": _mean(jct_s[outcome.finished & felt.is_opportunistic]),
        "guaranteed_p99_held_up": _at(held_up[guaranteed], 99) if guaranteed.any() else 1.0,
        "num_evictions": int(felt.evictions.sum()),
    }


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return a 95 % interval of the mean, by bootstrap over runs; the value itself, twice, if there is one run."""
    sample = np.asarray(values, dtype=float)
    if len(sample) < 2:
        return float(sample[0]), float(sample[0])
    draw = np.random.default_rng([seed, len(sample)])
    means = sample[draw.integers(0, len(sample), (_BOOTSTRAPS, len(sample)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def _at(values: Floats, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# Several policies under several disciplines on the same jobs, over seeds: runs -> rows with intervals. Pure.

# Requests that need no policy, by the names that the command takes.
BASELINES: Mapping[str, Request] = {
    "tuned": Request.TUNED,
    "hardware": Request.HARDWARE,
    "fixed": Request.FIXED,
    "recorded": Request.RECORDED,
}
# After a policy's name: as the site daemon runs it, with floors, caps and moves that must pay.
RULES = "+rules"
# After a policy's or baseline's name, last: opportunistic jobs share GPUs.
PACKED = "+packing"
# (name of the run, jobs that are done, jobs)
RunProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Compared:
    """One policy under one discipline.

    Attributes:
        policy, discipline: their names.
        runs: figures of each seed.
        first: the outcome of the first seed, for plots.
    """

    policy: str
    discipline: str
    runs: tuple[Metrics, ...]
    first: Outcome

    def mean(self, name: str) -> float | None:
        """Return the mean of a figure over the seeds; None if it is not known."""
        values = self._values(name)
        return sum(values) / len(values) if values else None

    def interval(self, name: str) -> tuple[float, float] | None:
        """Return its 95 % interval."""
        values = self._values(name)
        return interval(values) if values else None

    def waiting_s(self) -> dict[str, float]:
        """Mean waiting by cause."""
        causes = self.runs[0].wait_by_cause_s
        return {cause: sum(run.wait_by_cause_s[cause] for run in self.runs) / len(self.runs) for cause in causes}

    def row(self) -> dict[str, Any]:
        """Return all figures, for JSON and CSV; those of more than one seed with `_low` and `_high`."""
        found: dict[str, Any] = {"policy": self.policy, "discipline": self.discipline, "num_seeds": len(self.runs)}
        for field in fields(Metrics):
            if field.name == "wait_by_cause_s":
                found |= {f"wait_{cause}_s": round(value, 3) for cause, value in self.waiting_s().items()}
                continue
            value = self.mean(field.name)
            found[field.name] = value if value is None else round(value, 6)
            bounds = self.interval(field.name) if len(self.runs) > 1 else None
            if bounds and bounds[0] != bounds[1]:
                found |= {f"{field.name}_low": round(bounds[0], 6), f"{field.name}_high": round(bounds[1], 6)}
        return found

    def _values(self, name: str) -> list[float]:
        return [float(value) for value in (getattr(run, name) for run in self.runs) if value is not None]


def scenario_of(policy: str, discipline: Discipline, base: Scenario) -> Scenario:
    """Return the scenario of a policy or baseline, with all options of another one.

    Args:
        policy: its name.
        discipline: of the queue.
        base: has the options; its rules and caps hold for policies with rules alone, its packing for those with that.

    Raises:
        UsageError: there is no such policy.
    """
    if policy.endswith(PACKED):
        packed = scenario_of(policy.removesuffix(PACKED), discipline, base)
        return replace(packed, name=policy, packing=base.packing or PackingOptions())
    base = replace(base, packing=None)
    if policy in BASELINES:
        request = BASELINES[policy]
        return replace(base, name=policy, request=request, discipline=discipline, policy=None, caps=CapOptions())
    plain = policy.removesuffix(RULES)
    if plain not in POLICIES:
        raise UsageError(
            f"--policies: no policy {plain!r}: there are {', '.join((*BASELINES, *POLICIES))}; the last ones also with "
            f"{RULES}, as the site daemon runs them; all also with {PACKED}"
        )
    named = replace(base, name=policy, request=Request.ELASTIC, discipline=discipline, policy=POLICIES[plain])
    if policy == plain:
        return replace(named, caps=CapOptions())
    return replace(named, policy=under_all_rules(POLICIES[plain], base.rules), hold_s=base.rules.move.hold_s)


def compare(
    workloads: Sequence[Workload],
    cluster: Cluster,
    policies: Iterable[str],
    disciplines: Sequence[Discipline],
    base: Scenario,
    window_s: float | None = None,
    prices: Prices | None = None,
    progress: RunProgress | None = None,
) -> list[Compared]:
    """Run everything.

    Args:
        workloads: one for each seed.
        cluster: where they run.
        policies: names, of policies with `+rules` or without.
        disciplines: all of them with every policy.
        base: has the options, and the first seed.
        window_s, prices: see `measure`.
        progress: called now and then.

    Raises:
        UsageError: a policy does not exist.
        SimulationFault: a run broke a rule.
    """
    names = list(policies)
    scenarios = [scenario_of(name, discipline, base) for discipline in disciplines for name in names]
    found = []
    for scenario in scenarios:
        runs, first = [], None
        for place, workload in enumerate(workloads):
            report = _told(progress, scenario, place, len(workloads))
            outcome = simulate(workload, cluster, replace(scenario, seed=base.seed + place), report)
            runs.append(measure(outcome, window_s, prices))
            first = first or outcome
        if first is not None:
            found.append(Compared(scenario.name, scenario.discipline.value, tuple(runs), first))
    return found


def as_plain(prices: Prices | None) -> dict[str, float] | None:
    """Prices for JSON."""
    return asdict(prices) if prices else None


def _told(progress: RunProgress | None, scenario: Scenario, place: int, num_seeds: int) -> Progress | None:
    if progress is None:
        return None
    seed = f", seed {place + 1} of {num_seeds}" if num_seeds > 1 else ""
    name = f"{scenario.name}, {scenario.discipline.value}{seed}"
    return lambda done, whole: progress(name, done, whole)
