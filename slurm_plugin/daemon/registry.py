"""The jobs that report to the daemon, and what each may have. Pure; called by `server.py`; the clock is an argument.

A job is known from its first report until Slurm says that it is not running any more. What it says of itself counts as
far as Slurm bears it out (`known.py`), and a job that has been silent for long wants no more than it has. A round of
the policy follows each reading of the cluster and each report that wants something else, at most one a second. While
Slurm does not answer, nobody is forgotten and nobody new is let in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from hetstream.hetjob.site.messages import CompanionSeen, GrantLimit, JobNow, JobStatus, RefuseReport, ReportDemand
from hetstream.slurm_plugin.client.model import Job, Snapshot
from hetstream.slurm_plugin.daemon.claimed_work import Promise, Promises, claim_s
from hetstream.slurm_plugin.daemon.jobs_table import Since, Times, pool_of, table_of, with_room
from hetstream.slurm_plugin.daemon.known import (
    Held,
    companions_of_jobs,
    first_grant,
    held_by_jobs,
    memory_of,
    own_minimum,
    silent_after_s,
)
from hetstream.slurm_plugin.daemon.pace import Pace
from hetstream.slurm_plugin.daemon.policy_settings import PolicySettings
from hetstream.slurm_plugin.daemon.preferred import Preference
from hetstream.slurm_plugin.daemon.room import Size, pool_partitions, room_of
from hetstream.slurm_plugin.daemon.traffic import bytes_per_worker_s
from hetstream.slurm_plugin.errors import PolicyError
from hetstream.slurm_plugin.policy.check import check_allocation, check_table
from hetstream.slurm_plugin.policy.choices import Rules, policy_named, under_all_rules
from hetstream.slurm_plugin.policy.curves import speed_at
from hetstream.slurm_plugin.policy.reasons import explain
from hetstream.slurm_plugin.policy.staleness import FALL_BACK_AFTER_S
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Policy, Pool


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
        pace: Pace | None = None,
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
        self._pace = pace or Pace()
        self._snapshot: Snapshot | None = None
        self._preference: Preference | None = None
        self._leaders: dict[str, Job] = {}
        self._held: dict[str, Held] = {}
        self._companions: dict[str, tuple[CompanionSeen, ...]] = {}
        self._weights: dict[str, float] = {}
        self._since = Since.going_on(times or {}, Promises(promises), self.touched)
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
        """What would follow from other settings, which are not taken.

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
        """What the policy is told of the jobs of one user, or of all; of one job if it is named."""
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
        room = room_of(self._snapshot, self.partitions, {job.job: job.user for job in jobs})
        sizes = [
            Size(cpus, memory_of(job.report, self._of(job)))
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
        """What those of these jobs have promised that have claimed anything."""
        return self._since.promises.of(jobs)

    def times(self, jobs: Iterable[str]) -> dict[str, Times]:
        """Since when those of these jobs starve or have what they have of which that is known."""
        return self._since.times(jobs)

    def wait_shares(self) -> Mapping[str, float]:
        """Job id -> share of time that its trainers waited for data, of the jobs that said so."""
        return {job.job: job.report.wait_share for job in self.jobs.values() if job.report.wait_share is not None}

    def status(self, names: Collection[str] | None, now_s: float) -> tuple[JobStatus, ...]:
        """The jobs of one user, or of all."""
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
        """Where the data workers that it may still start would be best; else where those would that it has elsewhere.

        A job of version 1 is told none.
        """
        leader, missing = self._leaders.get(job.job), min(limit, job.report.wanted) - job.report.current
        measured = job.report.measured
        if self._snapshot is None or leader is None or measured is None:
            return ()
        if self._preference is None:
            senders = {other.job: other.report.measured for other in self.jobs.values() if other.report.measured}
            self._preference = Preference(self._snapshot, self.partitions, self._leaders, senders, self.settings)
        size = Size(job.report.cpus, memory_of(job.report, self._of(job)))
        if missing <= 0:
            return self._preference.beside(leader.nodes, size, self._of(job).num_companions)
        return self._preference.nodes(leader.nodes, size, missing, bytes_per_worker_s(measured, size.cpus, limit))

    def _with_companions(self, grant: GrantLimit, job_id: str, now_s: float) -> GrantLimit:
        if self._snapshot is None:
            return grant
        age_s = max(0.0, now_s - self._snapshot.taken_s)
        return msgspec.structs.replace(grant, companions=self._companions.get(job_id, ()), read_age_s=age_s)

    def _of(self, job: Registered) -> Held:
        return self._held.get(job.job, Held())


def _leader(job: Job) -> str:
    return str(job.het.het_job_id if job.het else job.job_id)


def _wish(report: ReportDemand) -> tuple[object, ...]:
    return report.minimum, report.wanted, report.cpus, report.current, report.measured
