"""Several policies under several disciplines on the same jobs, over seeds: runs -> rows with intervals. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from hetstream.base.errors import UsageError
from hetstream.slurm_plugin.policy.choices import POLICIES, under_all_rules
from hetstream.slurm_plugin.prices import Prices
from hetstream.slurm_plugin.simulate.cluster import Cluster
from hetstream.slurm_plugin.simulate.engine import Progress, simulate
from hetstream.slurm_plugin.simulate.metrics import Metrics, interval, measure
from hetstream.slurm_plugin.simulate.outcome import Outcome
from hetstream.slurm_plugin.simulate.scenario import CapOptions, Discipline, Request, Scenario
from hetstream.slurm_plugin.simulate.sharing import PackingOptions
from hetstream.slurm_plugin.simulate.workload import Workload

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
        """The mean of a figure over the seeds; None if it is not known."""
        values = self._values(name)
        return sum(values) / len(values) if values else None

    def interval(self, name: str) -> tuple[float, float] | None:
        """Its 95 % interval."""
        values = self._values(name)
        return interval(values) if values else None

    def waiting_s(self) -> dict[str, float]:
        """Mean waiting by cause."""
        causes = self.runs[0].wait_by_cause_s
        return {cause: sum(run.wait_by_cause_s[cause] for run in self.runs) / len(self.runs) for cause in causes}

    def row(self) -> dict[str, Any]:
        """All figures, for JSON and CSV; those of more than one seed with `_low` and `_high`."""
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
    """The scenario of a policy or baseline, with all options of another one.

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
