"""The jobs that report to the daemon, and what each may have. Pure; called by `server.py`; the clock is an argument.

A job is known from its first report until Slurm says that it is not running any more. What it says of itself counts as
far as Slurm bears it out (`known.py`), and a job that has been silent for long wants no more than it has. A round of
the policy follows each reading of the cluster and each report that wants something else, at most one a second. While
Slurm does not answer, nobody is forgotten and nobody new is let in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from hetstream.hetjob.site.messages import CompanionSeen, GrantLimit, JobStatus, RefuseReport, ReportDemand
from hetstream.slurm_plugin.client.model import Job, Snapshot
from hetstream.slurm_plugin.daemon.known import (
    Held,
    companions_of_jobs,
    demand_of,
    first_grant,
    held_by_jobs,
    own_minimum,
    silent_after_s,
)
from hetstream.slurm_plugin.daemon.policy import Policy, Pool, allocate

# Jobs report this often, or less if there are so many that it would be more than so many reports a second.
REPORT_S = 10.0
MAX_REPORTS_PER_S = 50.0
ROUND_S = 1.0
# A job that Slurm did not know when it was last read; it is read again within a few seconds.
UNKNOWN_S = 5.0


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
    """

    user: str
    report: ReportDemand
    sent_ns: int
    seen_s: float
    weight: float = 1.0
    limit: int | None = None
    reason: str = "no decision yet"

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


class Registry:
    """All jobs.

    Attributes:
        jobs: by id.
        pool_cpus: what was divided in the last round.
        partitions: whose CPUs that is.
        wants_reading: a job has reported that Slurm did not know when it was last read.
        touched: jobs that are not in the store as they are here, or not here as they are in the store.

    Args:
        known: what an earlier life of the daemon remembers.
        allocating: whether jobs are told their limits.
        partitions: whose CPUs are divided; None for those whose nodes have no GPUs.
        policy: divides.
    """

    def __init__(
        self,
        known: Iterable[Registered],
        *,
        allocating: bool,
        partitions: Collection[str] | None = None,
        policy: Policy = allocate,
    ) -> None:
        self.jobs = {job.job: job for job in known}
        self.pool_cpus = 0
        self.partitions: tuple[str, ...] = tuple(sorted(partitions or ()))
        self.wants_reading = False
        self.touched: set[str] = set()
        self._allocating = allocating
        self._chosen = partitions
        self._policy = policy
        self._snapshot: Snapshot | None = None
        self._leaders: dict[str, Job] = {}
        self._held: dict[str, Held] = {}
        self._companions: dict[str, tuple[CompanionSeen, ...]] = {}
        self._weights: dict[str, float] = {}
        self._is_due = False
        self._round_s = -ROUND_S

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
            return GrantLimit(None, text, UNKNOWN_S), ()
        # By number where Slurm tells it: names are as each host's own list of users has them.
        if (str(running.uid) if running and running.uid is not None else owner) not in names:
            return RefuseReport(f"job {job_id} is not yours"), ()
        if known and sent_ns <= known.sent_ns:
            text = f"job {job_id} has reported later than that: a clock that was set back, or a replay"
            return RefuseReport(text), ()
        before = known or Registered(owner, report, sent_ns, now_s)
        weight = self._weights.get(job_id, before.weight)
        self.jobs[job_id] = replace(before, user=owner, report=report, sent_ns=sent_ns, seen_s=now_s, weight=weight)
        self.touched.add(job_id)
        if known is None or _wish(known.report) != _wish(report):
            self._is_due = True
        changes = self.decide(now_s)
        return self._with_companions(self._grant(self.jobs[job_id]), job_id, now_s), changes

    def observe(self, snapshot: Snapshot, now_s: float) -> tuple[Change, ...]:
        """Take a reading of the cluster: forget who has ended, and divide anew."""
        self._snapshot = snapshot
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
            self.touched.add(job_id)
        for job_id, known in self.jobs.items():
            self.jobs[job_id] = replace(known, weight=self._weights[job_id])
        self._is_due = True
        self._round_s = now_s - ROUND_S
        return self.decide(now_s)

    def decide(self, now_s: float) -> tuple[Change, ...]:
        """Divide anew, if anything is new and the last round is long enough ago."""
        if not self._is_due or self._snapshot is None or 0 <= now_s - self._round_s < ROUND_S:
            return ()
        self._is_due = False
        if self.jobs:
            self._round_s = now_s
        self.partitions = pool_partitions(self._snapshot, self._chosen)
        self.pool_cpus = pool_cpus(self._snapshot, self.partitions, {job.job: job.user for job in self.jobs.values()})
        silent_s = now_s - silent_after_s(len(self.jobs), REPORT_S, MAX_REPORTS_PER_S)
        demands = tuple(
            demand_of(job.report, self._of(job), job.weight, job.seen_s < silent_s) for job in self.jobs.values()
        )
        decisions = self._policy(Pool(self.pool_cpus, demands))
        changes = []
        for job_id, decision in decisions.items():
            job = self.jobs[job_id]
            if job.limit != decision.limit:
                changes.append(Change(job_id, job.limit, decision.limit, decision.reason))
            if (job.limit, job.reason) != (decision.limit, decision.reason):
                self.jobs[job_id] = replace(job, limit=decision.limit, reason=decision.reason)
                self.touched.add(job_id)
        return tuple(changes)

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
        next_s = max(REPORT_S, len(self.jobs) / MAX_REPORTS_PER_S)
        if not self._allocating:
            return GrantLimit(None, "the site daemon only observes", next_s)
        if job.limit is None:
            # Between two rounds: what it has is its own until everybody's share is reckoned.
            held = first_grant(job.report, self._of(job))
            return GrantLimit(held, "what it has, until the shares are divided anew", ROUND_S)
        return GrantLimit(max(job.limit, own_minimum(job.report, self._of(job))), job.reason, next_s)

    def _with_companions(self, grant: GrantLimit, job_id: str, now_s: float) -> GrantLimit:
        if self._snapshot is None:
            return grant
        age_s = max(0.0, now_s - self._snapshot.taken_s)
        return msgspec.structs.replace(grant, companions=self._companions.get(job_id, ()), read_age_s=age_s)

    def _of(self, job: Registered) -> Held:
        return self._held.get(job.job, Held())


def pool_partitions(snapshot: Snapshot, chosen: Collection[str] | None) -> tuple[str, ...]:
    """The partitions whose CPUs are divided: those chosen that exist, else those without GPUs, else all."""
    with_gpus = {name for node in snapshot.nodes if node.gpus for name in node.partitions}
    names = {partition.name for partition in snapshot.partitions}
    return tuple(sorted(names & set(chosen) if chosen is not None else names - with_gpus or names))


def pool_cpus(snapshot: Snapshot, partitions: Collection[str], owners: Mapping[str, str]) -> int:
    """CPUs in these partitions that are free, or held by data workers of these jobs.

    Args:
        snapshot: the cluster.
        partitions: whose nodes count.
        owners: user of each job; a companion says itself whose it is, so it must be of the same user.
    """
    free = sum(node.cpus_free for node in snapshot.nodes if node.is_usable and set(node.partitions) & set(partitions))
    held = 0
    for job in snapshot.jobs:
        if job.is_running and set(job.partitions) & set(partitions):
            trainer = str(job.het.het_job_id) if job.het and job.het.offset else job.trainer
            held += job.num_cpus if owners.get(trainer) == job.user else 0
    return free + held


def _leader(job: Job) -> str:
    return str(job.het.het_job_id if job.het else job.job_id)


def _wish(report: ReportDemand) -> tuple[int, int, int, int]:
    return report.minimum, report.wanted, report.cpus, report.current
