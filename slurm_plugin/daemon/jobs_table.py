"""The jobs that have reported, as the table that policies are told: (jobs, what Slurm says) -> `JobTable`. Pure.

Called by the registry at each round. The clock is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hetstream.slurm_plugin.daemon.claimed_work import Promises
from hetstream.slurm_plugin.daemon.known import Held, claim_of
from hetstream.slurm_plugin.daemon.policy_settings import PolicySettings
from hetstream.slurm_plugin.daemon.speed_curve import POINTS, Curve, assumed_curve, curve_of
from hetstream.slurm_plugin.policy.caps import caps_of
from hetstream.slurm_plugin.policy.curves import speed_at
from hetstream.slurm_plugin.policy.table import Floats, JobTable, Pool, job_table

if TYPE_CHECKING:
    from hetstream.slurm_plugin.daemon.registry import Registered

_NOTHING = Held()


class Times(NamedTuple):
    """Of one job, in seconds since the epoch; None where it is not so.

    Attributes:
        changed_s: since when its limit is what it is.
        starved_s: since when it is below the floor of speed.
    """

    changed_s: float | None = None
    starved_s: float | None = None


@dataclass
class Since:
    """What the daemon has seen of each job, and keeps for its next life.

    Attributes:
        changed, starved: by job; see `Times`.
        promises: what it has claimed of its remaining work until now.
        touched: gets the jobs whose times are others now.
    """

    changed: dict[str, float] = field(default_factory=dict)
    starved: dict[str, float] = field(default_factory=dict)
    promises: Promises = field(default_factory=Promises)
    touched: set[str] = field(default_factory=set)

    @classmethod
    def going_on(cls, times: Mapping[str, Times], promises: Promises, touched: set[str]) -> Since:
        """As an earlier life of the daemon has left it."""
        changed = {job: kept.changed_s for job, kept in times.items() if kept.changed_s is not None}
        starved = {job: kept.starved_s for job, kept in times.items() if kept.starved_s is not None}
        return cls(changed, starved, promises, touched)

    def times(self, jobs: Iterable[str]) -> dict[str, Times]:
        """Those of these jobs of which there are any."""
        found = {job: Times(self.changed.get(job), self.starved.get(job)) for job in jobs}
        return {job: times for job, times in found.items() if times != Times()}

    def forget(self, job: str) -> None:
        """It has ended."""
        self.changed.pop(job, None)
        self.starved.pop(job, None)
        self.promises.forget(job)


def table_of(
    jobs: Sequence[Registered],
    held: Mapping[str, Held],
    since: Since,
    settings: PolicySettings,
    now_s: float,
    silent_after_s: float,
) -> JobTable:
    """One row a job.

    Args:
        jobs: in ascending order of their ids.
        held: what Slurm says that each has.
        since: times that the table has ages of; those of starving, and what jobs have promised, are brought up to date.
        settings: of the policy.
        now_s: seconds since the epoch.
        silent_after_s: a job without a report for so long wants what it has.
    """
    claims = [claim_of(job.report, held.get(job.job, _NOTHING), now_s - job.seen_s > silent_after_s) for job in jobs]
    curves = [_curve(job, claim.wanted * claim.cpus, settings) for job, claim in zip(jobs, claims, strict=True)]
    remaining = [job.report.measured.remaining if job.report.measured else None for job in jobs]
    ideal = [job.report.measured.ideal_steps_per_s if job.report.measured else 1.0 for job in jobs]
    # What is on its way to its limit has not settled: there is nothing yet that could be held.
    settled = [job.limit == claim.current for job, claim in zip(jobs, claims, strict=True)]
    users, tenants = codes_of(jobs)
    table = job_table(
        job_id=[job.report.job_id for job in jobs],
        wanted=[claim.wanted for claim in claims],
        minimum=[claim.minimum for claim in claims],
        current=[claim.current for claim in claims],
        cpus=[claim.cpus for claim in claims],
        gpus=[job.weight for job in jobs],
        curve_cpus=np.array([curve[0] for curve in curves], np.float64).reshape(len(jobs), POINTS),
        curve_speed=np.array([curve[1] for curve in curves], np.float64).reshape(len(jobs), POINTS),
        remaining_s=[left.steps / rate if left else np.nan for left, rate in zip(remaining, ideal, strict=True)],
        remaining_sigma=[left.sigma if left else 0.0 for left in remaining],
        total_s=[
            left.total_steps / rate if left and left.total_steps else np.nan
            for left, rate in zip(remaining, ideal, strict=True)
        ],
        age_s=[max(0.0, now_s - job.submit_s) if job.submit_s else 0.0 for job in jobs],
        starved_s=[max(0.0, now_s - since.starved.get(job.job, now_s)) for job in jobs],
        held_s=[
            max(0.0, now_s - since.changed.get(job.job, -np.inf)) if is_settled else np.inf
            for job, is_settled in zip(jobs, settled, strict=True)
        ],
        stale_s=[max(0.0, now_s - job.seen_s) for job in jobs],
        user=[users[job.user] for job in jobs],
        tenant=[tenants[job.account] for job in jobs],
    )
    speed = speed_at(table, (table.current * table.cpus).astype(np.float64))
    _note_starving(jobs, speed, since, settings.floor, now_s)
    # One that runs beyond its time limit, which a site may allow, has none that says anything.
    left_s = np.array([job.end_s - now_s if job.end_s > now_s else np.inf for job in jobs], np.float64)
    return since.promises.believed(table, [job.job for job in jobs], speed, left_s, now_s)


def pool_of(jobs: Sequence[Registered], cpus: int, settings: PolicySettings) -> Pool:
    """The pool with the caps of the users and tenants of these jobs."""
    users, tenants = codes_of(jobs)
    return Pool(cpus, caps_of(tenants, settings.tenant_caps), caps_of(users, settings.user_caps))


def with_room(table: JobTable, num_workers: Sequence[int]) -> JobTable:
    """The table in which no job may have more than nodes have room for.

    Args:
        table: the jobs.
        num_workers: companions of each that all nodes hold.
    """
    room = np.array(num_workers, np.int64)
    return replace(table, cap=np.minimum(table.cap, np.maximum(table.minimum + room, table.current)))


def codes_of(jobs: Sequence[Registered]) -> tuple[dict[str, int], dict[str, int]]:
    """Numbers of the users and of the tenants, in the order of their names."""
    users = {name: code for code, name in enumerate(sorted({job.user for job in jobs}))}
    tenants = {name: code for code, name in enumerate(sorted({job.account for job in jobs}))}
    return users, tenants


def _curve(job: Registered, wanted_cpus: int, settings: PolicySettings) -> Curve:
    measured = job.report.measured
    if measured is None or not any(point.workers for point in measured.points):
        return assumed_curve(float(wanted_cpus), job.weight, settings.cpus_per_gpu)
    return curve_of(measured, job.weight)


def _note_starving(jobs: Sequence[Registered], speed: Floats, since: Since, floor: float, now_s: float) -> None:
    for job, is_starved in zip(jobs, (speed < floor).tolist(), strict=True):
        if is_starved == (job.job in since.starved):
            continue
        since.touched.add(job.job)
        if is_starved:
            since.starved[job.job] = now_s
        else:
            del since.starved[job.job]
