"""DLRover-RM's setting as a fluid simulation: jobs with parameter servers start small, and every three minutes a
scheduler changes what they have. Its two baselines, and hetstream's model and plans in their place.

The true step time is the paper's own form with its published slopes; what the paper does not say is assumed, and said
in the report: the reference configuration that the slopes are seconds at, what jobs start with, what a change costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.resource_model.fit import Observations, fit
from benchmarks.resource_model.joint import Candidates, upgrades, weight
from benchmarks.resource_model.plan import Prices, grid, plans
from benchmarks.resource_model.step_time import Side, StepTimeModel
from benchmarks.resource_model.terms import PARAMETER_SERVERS, Array, Configurations, Workload

# 20 servers of 32 cores; batch 512, 200,000 steps; every three minutes (DLRover-RM, 6 and 6.2).
CORES, STEPS, EVERY_S = 640, 200_000, 180.0
WORKLOAD = Workload(batch=512, model_bytes=50e6, embedding_dim=16, bytes_per_s=1.25e9)
# gradient, update, synchronisation, lookup and the sum of constants, as published for the fit of figure 11.
PUBLISHED_SLOPES = np.array([3.48, 2.36, 0.68, 2.45, 2.45])
REFERENCE = Configurations.of(trainers=8, servers=4, trainer_cpus=8, server_cpus=8)
# Wide & Deep as published; xDeepFM computes more, DCN a little (assumed).
MODELS = {"X": (1.0, 1.0), "Y": (2.0, 1.0), "Z": (1.3, 1.2)}
START = Configurations.of(trainers=4, servers=2, trainer_cpus=8, server_cpus=8)
NOISE = 0.05
SECONDS_PER_UNIT = 0.012


@dataclass
class Job:
    """One job under way.

    Attributes:
        truth: how long its steps take.
        have: what it has, of length 1.
        left: steps that are missing.
        pause_s: in which it makes nothing, from now.
        seen: what its scheduler has measured.
        notes: of its scheduler.
    """

    truth: StepTimeModel
    have: Configurations = START
    left: float = STEPS
    pause_s: float = 0.0
    seen: Observations | None = None
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def steps_per_s(self) -> float:
        """Batches a second of all its workers."""
        return float(self.have.trainers[0] / self.truth.step_s(self.have)[0])


Scheduler = Callable[[Sequence[Job]], list[Configurations]]


def true_model(name: str, generator: np.random.Generator) -> StepTimeModel:
    """A job's true step time: its model's slopes, each off by a fifth or so from job to job."""
    gradient, lookup = MODELS[name]
    seconds = PUBLISHED_SLOPES * np.array([gradient, 1, 1, lookup, 1]) * SECONDS_PER_UNIT
    seconds = seconds * np.exp(generator.normal(0, 0.2, len(seconds)))
    terms = PARAMETER_SERVERS.compute
    slopes = seconds / PARAMETER_SERVERS.columns(terms, REFERENCE, WORKLOAD)[0]
    num = len(terms)
    return StepTimeModel(PARAMETER_SERVERS, WORKLOAD, Side(terms, slopes, np.zeros((num, num)), 0.0, 1, 1.0), None)


def completion_times_s(scheduler: Scheduler, change_s: float, seed: int) -> list[float]:
    """When each of the three jobs is done, which share the cluster."""
    generator = np.random.default_rng(seed)
    jobs = [Job(true_model(name, generator)) for name in MODELS]
    done: dict[int, float] = {}
    now = 0.0
    while len(done) < len(jobs):
        for number, job in enumerate(jobs):
            if number in done:
                continue
            rate, working = job.steps_per_s, max(0.0, EVERY_S - job.pause_s)
            if rate * working >= job.left:
                done[number] = now + min(job.pause_s, EVERY_S) + job.left / rate
                continue
            job.left -= rate * working
            job.pause_s = max(0.0, job.pause_s - EVERY_S)
            measured = job.have.trainers / rate * np.exp(generator.normal(0, NOISE, 1))
            new = Observations(job.have, measured)
            job.seen = new if job.seen is None else job.seen.joined(new)
        now += EVERY_S
        running = [job for number, job in enumerate(jobs) if number not in done]
        for job, wanted in zip(running, scheduler(running) if running else [], strict=True):
            if wanted != job.have and _differs(wanted, job.have):
                job.have, job.pause_s = wanted, job.pause_s + change_s
    return [done[number] for number in range(len(jobs))]


def _differs(one: Configurations, other: Configurations) -> bool:
    return any(getattr(one, name)[0] != getattr(other, name)[0] for name in one.__dataclass_fields__)


def cores_of(have: Configurations) -> float:
    """Without the one data worker that every configuration counts."""
    return float(have.cpus[0] - have.data_workers[0] * have.data_worker_cpus[0])


def with_more(have: Configurations, **more: float) -> Configurations:
    """So much more of some of it."""
    amounts = {name: getattr(have, name)[0] for name in have.__dataclass_fields__}
    return Configurations.of(**{name: value + more.get(name, 0.0) for name, value in amounts.items()})


def elastic_scheduler(num: int) -> Scheduler:
    """ES: so many workers more as long as that brings something, and back when it did not. Workers alone."""

    def act(jobs: Sequence[Job]) -> list[Configurations]:
        free = CORES - sum(cores_of(job.have) for job in jobs)
        found = []
        for job in jobs:
            assert job.seen is not None
            speeds = job.seen.configurations.trainers / job.seen.step_s
            if "settled" in job.notes:
                found.append(job.have)
                continue
            if len(speeds) > 1 and speeds[-1] < speeds[-2] * 1.03:
                job.notes["settled"] = 1.0
                found.append(job.seen.configurations[len(speeds) - 2])
                continue
            wanted = with_more(job.have, trainers=num)
            extra = cores_of(wanted) - cores_of(job.have)
            fits = extra <= free
            free -= extra if fits else 0
            found.append(wanted if fits else job.have)
        return found

    return act


def optimus(num: int) -> Scheduler:
    """Optimus: so many workers or servers more, whichever its model of a step promises more of for its cost.

    Its model has no lookups: a constant, workers over servers, workers, and servers (EuroSys'18, equation 3).
    """

    def columns(have: Configurations) -> Array:
        w, p = have.trainers, have.servers
        return np.stack([np.ones(len(have)), w / p, w, p], axis=1)

    def act(jobs: Sequence[Job]) -> list[Configurations]:
        free = CORES - sum(cores_of(job.have) for job in jobs)
        found = []
        for number, job in enumerate(jobs):
            assert job.seen is not None
            rows = columns(job.seen.configurations) / job.seen.step_s[:, None]
            slopes = _non_negative(rows)
            best, gain = job.have, 0.0
            for more in ({"trainers": num}, {"servers": num}):
                wanted = with_more(job.have, **more)
                if cores_of(wanted) - cores_of(job.have) > free:
                    continue
                speeds = [float(one.trainers[0] / (columns(one)[0] @ slopes)) for one in (job.have, wanted)]
                brought = (speeds[1] - speeds[0]) / (cores_of(wanted) - cores_of(job.have))
                # With too few observations it tries workers and servers in turn.
                if len(job.seen) <= 3:
                    brought = 1.0 + float((len(job.seen) + number) % 2 == ("servers" in more))
                if brought > gain:
                    best, gain = wanted, brought
            if len(job.seen) > 3 and gain * (cores_of(best) - cores_of(job.have)) < 0.01 * job.steps_per_s:
                best = job.have
            free -= cores_of(best) - cores_of(job.have)
            found.append(best)
        return found

    return act


def _non_negative(rows: Array) -> Array:
    from scipy.optimize import nnls

    return np.asarray(nnls(rows, np.ones(len(rows)))[0])


CANDIDATES = grid(
    trainers=[2, 4, 6, 8, 12, 16, 20, 24, 32, 40], servers=[1, 2, 3, 4, 6, 8, 12, 16], trainer_cpus=[2, 4, 8, 12, 16],
    server_cpus=[2, 4, 8, 16],
)  # fmt: skip
# What was never near what has been tried is not believed at once.
MOST_GROWTH = 4.0
# Equal parts for all terms until observations say otherwise; the weight of short jobs is the published one.
PRIOR, RHO = 0.1, 2.5


def planned(change_s: float, *, knows: bool = False) -> Scheduler:
    """hetstream's: fit, the exact front of each job, and upgrades over all of them, by the paper's weight.

    Args:
        change_s: what a change costs.
        knows: it is told the true step times, which nobody can be: a bound.
    """

    def act(jobs: Sequence[Job]) -> list[Configurations]:
        fronts, values = [], []
        for job in jobs:
            assert job.seen is not None
            model = job.truth if knows else fit(PARAMETER_SERVERS, WORKLOAD, job.seen, prior=PRIOR)
            most = np.inf if knows else MOST_GROWTH * job.seen.configurations.cpus.max()
            near = CANDIDATES[np.flatnonzero(CANDIDATES.cpus <= most)]
            remaining_s = job.left / job.steps_per_s
            front = plans(model, near, job.have, Prices(), change_s=change_s, horizon_s=remaining_s)
            fronts.append(front)
            values.append(np.maximum.accumulate(front.gains - front.gains[0]) * weight(remaining_s / 60, rho=RHO))
        least = [Candidates(front.costs - front.costs[0], value) for front, value in zip(fronts, values, strict=True)]
        capacity = CORES - sum(float(front.costs[0]) for front in fronts)
        choice = upgrades(least, capacity)
        return [front.configurations[at] for front, at in zip(fronts, choice.plans, strict=True)]

    return act
