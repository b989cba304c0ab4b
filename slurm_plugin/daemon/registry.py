"""The jobs that report to the daemon, and what each may have. Pure; called by `server.py`; the clock is an argument.

A job is known from its first report until Slurm says that it is not running any more. What it says of itself counts as
far as Slurm bears it out (`WorkClaim`), and a job that has been silent for long wants no more than it has. A round of
the policy follows each reading of the cluster and each report that wants something else, at most one a second. While
Slurm does not answer, nobody is forgotten and nobody new is let in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from hetstream.hetjob.ports import Measured, SpeedPoint
from hetstream.hetjob.site.messages import CompanionSeen, GrantLimit, JobNow, JobStatus, RefuseReport, ReportDemand
from hetstream.slurm_plugin.client.model import Job, Snapshot
from hetstream.slurm_plugin.daemon.nodes import (
    Preference,
    WorkerSize,
    bytes_per_worker_s,
    pool_partitions,
    pool_room_of,
)
from hetstream.slurm_plugin.daemon.settings import PolicySettings, Promise, Promises, ReportIntervals, claim_s
from hetstream.slurm_plugin.errors import PolicyError
from hetstream.slurm_plugin.policy.filling import speed_at
from hetstream.slurm_plugin.policy.policies import FALL_BACK_AFTER_S, Rules, caps_of, policy_named, under_all_rules
from hetstream.slurm_plugin.policy.table import (
    Allocation,
    Floats,
    JobTable,
    Policy,
    Pool,
    check_allocation,
    check_table,
    explain,
    job_table,
)

# What Slurm knows of a job's data workers: (snapshot) -> CPUs by job, which no report can exceed. Pure.
#
# Called by the registry. A job says itself what it has and wants; a share that rests on that alone could be taken by
# whoever says the most.


@dataclass(frozen=True, slots=True)
class WorkersHeld:
    """What one job has of data workers, as Slurm says.

    Attributes:
        component_cpus: CPUs of its components without GPUs in the divided partitions, which it has in any case.
        companion_cpus: CPUs of its companions, those that wait in the queue among them.
        num_companions: how many those are.
        companion_memory_mb: memory of those.
    """

    component_cpus: int = 0
    companion_cpus: int = 0
    num_companions: int = 0
    companion_memory_mb: int = 0


def held_by_jobs(snapshot: Snapshot, owners: Mapping[str, Job], partitions: Collection[str]) -> dict[str, WorkersHeld]:
    """Return what each of these jobs has. A companion says itself whose it is, so it must be of the same user.

    Args:
        snapshot: the cluster.
        owners: the leaders, by number.
        partitions: whose CPUs are divided.
    """
    found: dict[str, WorkersHeld] = {}
    for job in snapshot.jobs:
        leader = str(job.het.het_job_id) if job.het and job.het.offset else job.trainer
        owner = owners.get(leader)
        if owner is None or (job.uid, job.user) != (owner.uid, owner.user):
            continue
        before = found.get(leader, WorkersHeld())
        if job.het:
            if job.is_running and not job.count("gpu") and set(job.partitions) & set(partitions):
                found[leader] = replace(before, component_cpus=before.component_cpus + job.num_cpus)
        elif not job.count("gpu"):  # those of a stage on GPUs are not divided
            found[leader] = replace(
                before,
                companion_cpus=before.companion_cpus + job.num_cpus,
                num_companions=before.num_companions + 1,
                companion_memory_mb=before.companion_memory_mb + job.memory_mb,
            )
    return found


def companions_of_jobs(snapshot: Snapshot, owners: Mapping[str, Job]) -> dict[str, tuple[CompanionSeen, ...]]:
    """Return the companions of each of these jobs, those that wait in the queue among them.

    Args:
        snapshot: the cluster.
        owners: the leaders, by number.
    """
    found: dict[str, list[CompanionSeen]] = {}
    for job in snapshot.jobs:
        owner = owners.get(job.trainer) if not job.het else None
        if owner is not None and (job.uid, job.user) == (owner.uid, owner.user):
            seen = CompanionSeen(str(job.job_id), job.mark, job.state, job.num_cpus)
            found.setdefault(job.trainer, []).append(seen)
    return {leader: tuple(seen) for leader, seen in found.items()}


class WorkClaim(NamedTuple):
    """What a policy is told that a job has and wants; see `JobTable`."""

    minimum: int
    wanted: int
    cpus: int
    current: int


def claim_of(report: ReportDemand, held: WorkersHeld, is_silent: bool) -> WorkClaim:
    """Return what a policy is told of a job: its report, as far as Slurm bears it out. To want much gives no right to
    it.

    Args:
        report: its last one.
        held: what Slurm says that it has.
        is_silent: it has not reported for long; it then wants what it has, and no more.
    """
    # Companions that are larger than it says count as large as they are.
    real_cpus = -(-held.companion_cpus // held.num_companions) if held.num_companions else 0
    cpus = max(report.cpus, real_cpus)
    minimum = min(report.minimum, held.component_cpus // cpus)
    have = minimum + held.num_companions
    if is_silent:
        return WorkClaim(minimum, have, cpus, have)
    return WorkClaim(minimum, max(minimum, report.wanted), cpus, min(report.current, have))


def memory_of(report: ReportDemand, held: WorkersHeld) -> int:
    """Return memory of one of a job's data workers in MB; 0 where neither it nor Slurm says how much that is."""
    said_mb = (report.measured.worker_memory_mb or 0) if report.measured else 0
    real_mb = -(-held.companion_memory_mb // held.num_companions) if held.num_companions else 0
    return max(said_mb, real_mb)


def own_minimum(report: ReportDemand, held: WorkersHeld) -> int:
    """Data workers of its components; telling it so takes nothing from others."""
    return min(report.minimum, held.component_cpus // report.cpus)


def first_grant(report: ReportDemand, held: WorkersHeld) -> int:
    """Return what a job may have until the shares are divided: what it says that it has, as far as Slurm knows
    of it.
    """
    minimum = own_minimum(report, held)
    return max(minimum, min(report.current, minimum + held.num_companions))


def silent_after_s(num_jobs: int, report_s: float, max_reports_per_s: float) -> float:
    """After how long without a report a job counts as silent: several reports were due."""
    return max(300.0, 6 * max(report_s, num_jobs / max_reports_per_s))


# A job's speed against CPUs of data workers, from what it has measured: (measurements) -> points. Pure.
#
# The curve is the least concave one above what was measured, so that noise makes no knee
# where there is none; beyond the last measurement it goes on as it did there with data workers, up to the speed of a
# trainer that never waits.

# Points of a curve: the beginning, bends, and the knee.
POINTS = 8
# No loading needs more: a job that says so says too much. The most that is published are 64 to 128.
MAX_CPUS_PER_GPU = 256.0
# A job that has measured nothing is taken to be so fast with the machines' own number of CPUs, and faster beyond.
_ASSUMED_SPEED = 0.5
# Of a speed as a share of the ideal. What a job reports may be as near to 0 as it likes; what is divided by it may not.
_DIGITS = 9

Curve = tuple[tuple[float, ...], tuple[float, ...]]


def curve_of(measured: Measured, gpus: float) -> Curve:
    """CPUs and speeds, `POINTS` each.

    Args:
        measured: with at least one point of one data worker or more.
        gpus: of the job, as Slurm says.
    """
    return _curve_of(measured.points, measured.ideal_steps_per_s, gpus)


# By what the curve depends on alone: the rest of a job's measurements is another one in each report.
@lru_cache(1 << 16)
def _curve_of(points: tuple[SpeedPoint, ...], ideal_steps_per_s: float, gpus: float) -> Curve:
    most = MAX_CPUS_PER_GPU * max(gpus, 1.0)
    known, local = {0.0: 0.0}, 0.0
    for point in points:
        cpus = float(point.cpus * point.workers)
        share = round(min(point.steps_per_s / ideal_steps_per_s, 1.0), _DIGITS)
        if not point.workers:
            local = max(local, share)
        elif cpus <= most:
            known[cpus] = max(known.get(cpus, 0.0), share)
    hull = _hull(sorted(known.items()))
    end_cpus, end_speed = hull[-1]
    if len(hull) > 1 and end_speed < 1.0:
        before_cpus, before_speed = hull[-2]
        slope = (end_speed - before_speed) / (end_cpus - before_cpus)
        reach = min(end_cpus + (1.0 - end_speed) / slope, most) if slope > 0 else end_cpus
        hull[-1:] = [(reach, min(end_speed + slope * (reach - end_cpus), 1.0))]
    # Data workers take the place of the job's own loading. One that is hardly faster than that is no bend: the second
    # brings as much as the first makes, not as little as the first gained.
    return _padded(_hull([(0.0, local), *hull[1:]]))


def assumed_curve(wanted_cpus: float, gpus: float, cpus_per_gpu: float) -> Curve:
    """Return the curve of a job that has measured nothing: by the machines' ratio, so that to want much gives no right
    to it.

    Args:
        wanted_cpus: of all data workers that it wants.
        gpus: of the job.
        cpus_per_gpu: of the site's machines.
    """
    knee = cpus_per_gpu * max(gpus, 1.0)
    if wanted_cpus * _ASSUMED_SPEED <= knee:
        return _padded([(0.0, 0.0), (wanted_cpus, 1.0)] if wanted_cpus > 0 else [(0.0, 0.0)])
    return _padded([(0.0, 0.0), (knee, _ASSUMED_SPEED), (wanted_cpus, 1.0)])


def _hull(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The upper hull from the left to the greatest speed."""
    hull: list[tuple[float, float]] = []
    for cpus, speed in points:
        if hull and speed <= hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], (cpus, speed)) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append((cpus, speed))
    return hull


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def _padded(points: list[tuple[float, float]]) -> Curve:
    # Of too many bends those in the middle go: what is left of a hull is one.
    while len(points) > POINTS:
        del points[len(points) // 2]
    points = points + [points[-1]] * (POINTS - len(points))
    return tuple(cpus for cpus, _ in points), tuple(speed for _, speed in points)


# The jobs that have reported, as the table that policies are told: (jobs, what Slurm says) -> `JobTable`. Pure.
#
# Called by the registry at each round. The clock is an argument.

_NOTHING = WorkersHeld()


class Times(NamedTuple):
    """Of one job, in seconds since the epoch; None where it is not so.

    Attributes:
        changed_s: since when its limit is what it is.
        starved_s: since when it is below the floor of speed.
    """

    changed_s: float | None = None
    starved_s: float | None = None


@dataclass
class JobTimes:
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
    def going_on(cls, times: Mapping[str, Times], promises: Promises, touched: set[str]) -> JobTimes:
        """As an earlier life of the daemon has left it."""
        changed = {job: kept.changed_s for job, kept in times.items() if kept.changed_s is not None}
        starved = {job: kept.starved_s for job, kept in times.items() if kept.starved_s is not None}
        return cls(changed, starved, promises, touched)

    def times(self, jobs: Iterable[str]) -> dict[str, Times]:
        """Return those of these jobs of which there are any."""
        found = {job: Times(self.changed.get(job), self.starved.get(job)) for job in jobs}
        return {job: times for job, times in found.items() if times != Times()}

    def forget(self, job: str) -> None:
        """It has ended."""
        self.changed.pop(job, None)
        self.starved.pop(job, None)
        self.promises.forget(job)


def table_of(
    jobs: Sequence[Registered],
    held: Mapping[str, WorkersHeld],
    since: JobTimes,
    settings: PolicySettings,
    now_s: float,
    silent_after_s: float,
) -> JobTable:
    """Return one row a job.

    Args:
        jobs: in ascending order of their ids.
        held: what Slurm says that each has.
        since: times that the table has ages of; those of starving, and what jobs have promised, are brought up to date.
        settings: of the policy.
        now_s: seconds since the epoch.
        silent_after_s: time without a report after which a job wants what it has.
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
    """Return the pool with the caps of the users and tenants of these jobs."""
    users, tenants = codes_of(jobs)
    return Pool(cpus, caps_of(tenants, settings.tenant_caps), caps_of(users, settings.user_caps))


def with_room(table: JobTable, num_workers: Sequence[int]) -> JobTable:
    """Return the table in which no job may have more than nodes have room for.

    Args:
        table: the jobs.
        num_workers: companions of each that all nodes hold.
    """
    room = np.array(num_workers, np.int64)
    return replace(table, cap=np.minimum(table.cap, np.maximum(table.minimum + room, table.current)))


def codes_of(jobs: Sequence[Registered]) -> tuple[dict[str, int], dict[str, int]]:
    """Return numbers of the users and of the tenants, in the order of their names."""
    users = {name: code for code, name in enumerate(sorted({job.user for job in jobs}))}
    tenants = {name: code for code, name in enumerate(sorted({job.account for job in jobs}))}
    return users, tenants


def _curve(job: Registered, wanted_cpus: int, settings: PolicySettings) -> Curve:
    measured = job.report.measured
    if measured is None or not any(point.workers for point in measured.points):
        return assumed_curve(float(wanted_cpus), job.weight, settings.cpus_per_gpu)
    return curve_of(measured, job.weight)


def _note_starving(jobs: Sequence[Registered], speed: Floats, since: JobTimes, floor: float, now_s: float) -> None:
    for job, is_starved in zip(jobs, (speed < floor).tolist(), strict=True):
        if is_starved == (job.job in since.starved):
            continue
        since.touched.add(job.job)
        if is_starved:
            since.starved[job.job] = now_s
        else:
            del since.starved[job.job]


@dataclass(frozen=True)
class Registered:
    """One job.

    Attributes:
        user: as Slurm names it.
        report: its last one.
        sent_ns: when that was sent, by the job's clock; what was sent before counts no more.
        seen_s: when it came, in seconds since the epoch.
        weight: see `JobStatus`.
        limit: what the policy says; None before the first round.
        reason: why.
        account: whom Slurm charges: the job's tenant.
        submit_s: when it was submitted; 0 where Slurm does not say.
        end_s: when its time limit ends it; infinite where Slurm does not say.
        code: `Reason` of the last round, in which `reason` was written.
    """

    user: str
    report: ReportDemand
    sent_ns: int
    seen_s: float
    weight: float = 1.0
    limit: int | None = None
    reason: str = "no decision yet"
    # Not in the store: the next reading and the next round say them again.
    account: str = field(default="", compare=False)
    submit_s: float = field(default=0.0, compare=False)
    end_s: float = field(default=math.inf, compare=False)
    code: int = field(default=-1, compare=False)

    @property
    def job(self) -> str:
        return str(self.report.job_id)


@dataclass(frozen=True)
class Change:
    """A limit that is another one now."""

    job: str
    before: int | None
    after: int | None
    reason: str
    user: str = ""


@dataclass(frozen=True)
class _Round:
    """What a policy was told, and what it said."""

    table: JobTable
    pool: Pool
    found: Allocation


class Registry:
    """All jobs.

    Attributes:
        jobs: by id.
        pool_cpus: what was divided in the last round.
        partitions: whose CPUs that is.
        settings: which policy divides, and within which limits.
        problem: why the last round kept the limits of the one before; empty if it did not.
        wants_reading: a job has reported that Slurm did not know when it was last read.
        touched: jobs that are not in the store as they are here, or not here as they are in the store.

    Args:
        known: what an earlier life of the daemon remembers.
        allocating: whether jobs are told their limits.
        partitions: whose CPUs are divided; None for those whose nodes have no GPUs.
        settings: see above.
        policy: divides in the place of the one that the settings name.
        pace: how often jobs report and the policy is asked.
        promises, times: what jobs have claimed of their remaining work, and since when they starve or have what they
            have, as an earlier life of the daemon remembers it.
    """

    def __init__(
        self,
        known: Iterable[Registered],
        *,
        allocating: bool,
        partitions: Collection[str] | None = None,
        settings: PolicySettings | None = None,
        policy: Policy | None = None,
        pace: ReportIntervals | None = None,
        promises: Mapping[str, Promise] | None = None,
        times: Mapping[str, Times] | None = None,
    ) -> None:
        self.jobs = {job.job: job for job in known}
        self.pool_cpus = 0
        self.partitions: tuple[str, ...] = tuple(sorted(partitions or ()))
        self.settings = settings or PolicySettings()
        self.problem = ""
        self.wants_reading = False
        self.touched: set[str] = set()
        self._allocating = allocating
        self._chosen = partitions
        self._policy = policy
        self._pace = pace or ReportIntervals()
        self._snapshot: Snapshot | None = None
        self._preference: Preference | None = None
        self._leaders: dict[str, Job] = {}
        self._held: dict[str, WorkersHeld] = {}
        self._companions: dict[str, tuple[CompanionSeen, ...]] = {}
        self._weights: dict[str, float] = {}
        self._since = JobTimes.going_on(times or {}, Promises(promises), self.touched)
        self._is_due = False
        self._round_s = -self._pace.round_s

    def report(
        self, names: Collection[str], report: ReportDemand, sent_ns: int, now_s: float
    ) -> tuple[GrantLimit | RefuseReport, tuple[Change, ...]]:
        """Take a job's report: the answer, and which limits are others now.

        Args:
            names: the reporting user's name and number.
            report: what it says.
            sent_ns: by the job's clock.
            now_s: seconds since the epoch.
        """
        job_id = str(report.job_id)
        known, running = self.jobs.get(job_id), self._leaders.get(job_id)
        owner = running.user if running else known.user if known else None
        if owner is None:
            self.wants_reading = True
            text = f"Slurm has not said yet that job {job_id} is running; it is asked again"
            return GrantLimit(None, text, self._pace.unknown_s), ()
        # By number where Slurm tells it: names are as each host's own list of users has them.
        if (str(running.uid) if running and running.uid is not None else owner) not in names:
            return RefuseReport(f"job {job_id} is not yours"), ()
        if known and sent_ns <= known.sent_ns:
            text = f"job {job_id} has reported later than that: a clock that was set back, or a replay"
            return RefuseReport(text), ()
        before = known or Registered(owner, report, sent_ns, now_s)
        self.jobs[job_id] = self._told_by_slurm(
            replace(before, user=owner, report=report, sent_ns=sent_ns, seen_s=now_s)
        )
        self.touched.add(job_id)
        if known is None or _wish(known.report) != _wish(report):
            self._is_due = True
        changes = self.decide(now_s)
        return self._with_companions(self._grant(self.jobs[job_id]), job_id, now_s), changes

    def observe(self, snapshot: Snapshot, now_s: float) -> tuple[Change, ...]:
        """Take a reading of the cluster: forget who has ended, and divide anew."""
        self._snapshot, self._preference = snapshot, None
        self.wants_reading = False
        self._leaders = {
            _leader(job): job for job in snapshot.jobs if job.is_running and not (job.het and job.het.offset)
        }
        self._held = held_by_jobs(snapshot, self._leaders, pool_partitions(snapshot, self._chosen))
        self._companions = companions_of_jobs(snapshot, self._leaders)
        self._weights = dict.fromkeys(self._leaders, 0.0)
        for job in snapshot.jobs:
            if _leader(job) in self._weights:
                self._weights[_leader(job)] += job.count("gpu")
        self._weights = {job_id: max(1.0, gpus) for job_id, gpus in self._weights.items()}
        for job_id in [job_id for job_id in self.jobs if job_id not in self._leaders]:
            del self.jobs[job_id]
            self._since.forget(job_id)
            self.touched.add(job_id)
        for job_id, known in self.jobs.items():
            self.jobs[job_id] = self._told_by_slurm(known)
        self._is_due = True
        self._round_s = now_s - self._pace.round_s
        return self.decide(now_s)

    def decide(self, now_s: float) -> tuple[Change, ...]:
        """Divide anew, if anything is new and the last round is long enough ago."""
        if not self._is_due or self._snapshot is None or 0 <= now_s - self._round_s < self._pace.round_s:
            return ()
        self._is_due = False
        if self.jobs:
            self._round_s = now_s
        self.partitions = pool_partitions(self._snapshot, self._chosen)
        jobs = self._in_order()
        try:
            result = self._divide(self.settings, now_s)
        except (PolicyError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            # A fault in a policy, the site's own perhaps: what was told last is true until it is gone.
            self.problem = f"policy {self.settings.policy}: {type(error).__name__}: {error}"
            return ()
        self.problem = ""
        self.pool_cpus = result.pool.cpus
        return self._take(jobs, result, now_s)

    def use(self, settings: PolicySettings, now_s: float) -> tuple[Change, ...]:
        """Divide by other settings from now on."""
        self.settings, self._preference = settings, None
        self._is_due, self._round_s = True, now_s - self._pace.round_s
        return self.decide(now_s)

    def would_change(self, settings: PolicySettings, now_s: float) -> tuple[Change, ...]:
        """Return what would follow from other settings, which are not taken.

        Raises:
            PolicyError: the policy gives out what it must not.
        """
        if self._snapshot is None:
            return ()
        jobs = self._in_order()
        result = self._divide(settings, now_s)
        return tuple(
            Change(job.job, job.limit, after, explain(result.table, result.pool, result.found, row), job.user)
            for row, (job, after) in enumerate(zip(jobs, result.found.workers.tolist(), strict=True))
            if job.limit != after
        )

    def now(self, names: Collection[str] | None, job: str, now_s: float) -> tuple[JobNow, ...]:
        """Return what the policy is told of the jobs of one user, or of all; of one job if it is named."""
        jobs = self._in_order()
        table = table_of(jobs, self._held, self._since, self.settings, now_s, self._silent_s())
        speeds = speed_at(table, (table.current * table.cpus).astype(float)).tolist()
        left = table.remaining_s.tolist()
        found = []
        for row, member in enumerate(jobs):
            if (names is not None and member.user not in names) or job not in ("", member.job):
                continue
            measured = member.report.measured
            remaining = measured.remaining if measured else None
            found.append(
                JobNow(
                    member.job, member.user, member.account, int(table.minimum[row]), int(table.wanted[row]),
                    int(table.current[row]), int(table.cpus[row]), member.weight, member.limit,
                    speeds[row] if measured else None, left[row] if remaining else None,
                    remaining.source if remaining else "", member.reason,
                    claim_s(measured.ideal_steps_per_s, remaining) if measured and remaining else None,
                    remaining.sigma if remaining else None,
                )
            )  # fmt: skip
        return tuple(found)

    def _in_order(self) -> list[Registered]:
        return sorted(self.jobs.values(), key=lambda job: job.report.job_id)

    def _silent_s(self) -> float:
        return silent_after_s(len(self.jobs), self._pace.report_s, self._pace.max_reports_per_s)

    def _divide(self, settings: PolicySettings, now_s: float) -> _Round:
        assert self._snapshot is not None
        jobs, silent_s = self._in_order(), self._silent_s()
        table = table_of(jobs, self._held, self._since, settings, now_s, silent_s)
        room = pool_room_of(self._snapshot, self.partitions, {job.job: job.user for job in jobs})
        sizes = [
            WorkerSize(cpus, memory_of(job.report, self._of(job)))
            for job, cpus in zip(jobs, table.cpus.tolist(), strict=True)
        ]
        # Only those of which somebody wants one.
        wished = {size for size, wanted in zip(sizes, table.wanted.tolist(), strict=True) if wanted > 0}
        num_workers = {size: room.num_workers(size) for size in wished}
        table = with_room(table, [num_workers.get(size, 0) for size in sizes])
        check_table(table)
        pool = pool_of(jobs, room.cpus(wished), settings)
        rules = Rules(
            floor=settings.floor,
            move=self._pace.move,
            freeze_after_s=silent_s,
            fall_back_after_s=max(FALL_BACK_AFTER_S, 2 * silent_s),
            cpus_per_gpu=settings.cpus_per_gpu,
        )
        found = under_all_rules(self._policy or policy_named(settings.policy), rules)(table, pool, now_s)
        check_allocation(table, pool, found)
        return _Round(table, pool, found)

    def _take(self, jobs: list[Registered], result: _Round, now_s: float) -> tuple[Change, ...]:
        """Note what is new. Reasons are put in words only where a number or a reason is another one."""
        changes = []
        for row, (job, limit, code) in enumerate(
            zip(jobs, result.found.workers.tolist(), result.found.reasons.tolist(), strict=True)
        ):
            if (job.limit, job.code) == (limit, code):
                continue
            reason = explain(result.table, result.pool, result.found, row)
            if job.limit != limit:
                changes.append(Change(job.job, job.limit, limit, reason, job.user))
                self._since.changed[job.job] = now_s
            self.jobs[job.job] = replace(job, limit=limit, reason=reason, code=code)
            self.touched.add(job.job)
        return tuple(changes)

    def _told_by_slurm(self, job: Registered) -> Registered:
        leader = self._leaders.get(job.job)
        weight = self._weights.get(job.job, job.weight)
        if leader is None:
            return replace(job, weight=weight)
        return replace(
            job, weight=weight, account=leader.account, submit_s=leader.submit_s or 0.0, end_s=leader.end_s or math.inf
        )

    def promises(self, jobs: Iterable[str]) -> dict[str, Promise]:
        """Return what those of these jobs have promised that have claimed anything."""
        return self._since.promises.of(jobs)

    def times(self, jobs: Iterable[str]) -> dict[str, Times]:
        """Since when those of these jobs starve or have what they have of which that is known."""
        return self._since.times(jobs)

    def wait_shares(self) -> Mapping[str, float]:
        """Job id -> share of time that its trainers waited for data, of the jobs that said so."""
        return {job.job: job.report.wait_share for job in self.jobs.values() if job.report.wait_share is not None}

    def status(self, names: Collection[str] | None, now_s: float) -> tuple[JobStatus, ...]:
        """Return the jobs of one user, or of all."""
        return tuple(
            JobStatus(
                job.job, job.user, job.report.minimum, job.report.current, job.report.wanted, job.report.cpus,
                job.weight, job.report.wait_share, job.limit, job.reason, max(0.0, now_s - job.seen_s),
            )
            for _, job in sorted(self.jobs.items(), key=lambda item: int(item[0]))
            if names is None or job.user in names
        )  # fmt: skip

    def _grant(self, job: Registered) -> GrantLimit:
        next_s = max(self._pace.report_s, len(self.jobs) / self._pace.max_reports_per_s)
        if not self._allocating:
            return GrantLimit(None, "the site daemon only observes", next_s)
        if job.limit is None:
            # Between two rounds: what it has is its own until everybody's share is reckoned.
            held = first_grant(job.report, self._of(job))
            return GrantLimit(held, "what it has, until the shares are divided anew", self._pace.round_s)
        limit = max(job.limit, own_minimum(job.report, self._of(job)))
        return GrantLimit(limit, job.reason, next_s, nodes=self._preferred(job, limit))

    def _preferred(self, job: Registered, limit: int) -> tuple[str, ...]:
        """Nodes on which the job should start its next data workers. A job of version 1 is told none."""
        leader, missing = self._leaders.get(job.job), min(limit, job.report.wanted) - job.report.current
        measured = job.report.measured
        if self._snapshot is None or leader is None or measured is None or missing <= 0:
            return ()
        if self._preference is None:
            senders = {other.job: other.report.measured for other in self.jobs.values() if other.report.measured}
            self._preference = Preference(self._snapshot, self.partitions, self._leaders, senders, self.settings)
        size = WorkerSize(job.report.cpus, memory_of(job.report, self._of(job)))
        return self._preference.nodes(leader.nodes, size, missing, bytes_per_worker_s(measured, size.cpus, limit))

    def _with_companions(self, grant: GrantLimit, job_id: str, now_s: float) -> GrantLimit:
        if self._snapshot is None:
            return grant
        age_s = max(0.0, now_s - self._snapshot.taken_s)
        return msgspec.structs.replace(grant, companions=self._companions.get(job_id, ()), read_age_s=age_s)

    def _of(self, job: Registered) -> WorkersHeld:
        return self._held.get(job.job, WorkersHeld())


def _leader(job: Job) -> str:
    return str(job.het.het_job_id if job.het else job.job_id)


def _wish(report: ReportDemand) -> tuple[object, ...]:
    return report.minimum, report.wanted, report.cpus, report.current, report.measured
