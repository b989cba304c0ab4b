"""What Slurm knows of a job's data workers: (snapshot) -> CPUs by job, which no report can exceed. Pure.

Called by the registry. A job says itself what it has and wants; a share that rests on that alone could be taken by
whoever says the most.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from hetstream.hetjob.site.messages import CompanionSeen, ReportDemand
from hetstream.slurm_plugin.client.model import Job, Snapshot


@dataclass(frozen=True, slots=True)
class Held:
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


def held_by_jobs(snapshot: Snapshot, owners: Mapping[str, Job], partitions: Collection[str]) -> dict[str, Held]:
    """What each of these jobs has. A companion says itself whose it is, so it must be of the same user.

    Args:
        snapshot: the cluster.
        owners: the leaders, by number.
        partitions: whose CPUs are divided.
    """
    found: dict[str, Held] = {}
    for job in snapshot.jobs:
        leader = str(job.het.het_job_id) if job.het and job.het.offset else job.trainer
        owner = owners.get(leader)
        if owner is None or (job.uid, job.user) != (owner.uid, owner.user):
            continue
        before = found.get(leader, Held())
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
    """The companions of each of these jobs, those that wait in the queue among them.

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


class Claim(NamedTuple):
    """What a policy is told that a job has and wants; see `JobTable`."""

    minimum: int
    wanted: int
    cpus: int
    current: int


def claim_of(report: ReportDemand, held: Held, is_silent: bool) -> Claim:
    """What a policy is told of a job: its report, as far as Slurm bears it out. To want much gives no right to it.

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
        return Claim(minimum, have, cpus, have)
    return Claim(minimum, max(minimum, report.wanted), cpus, min(report.current, have))


def memory_of(report: ReportDemand, held: Held) -> int:
    """Memory of one of a job's data workers in MB; 0 where neither it nor Slurm says how much that is."""
    said_mb = (report.measured.worker_memory_mb or 0) if report.measured else 0
    real_mb = -(-held.companion_memory_mb // held.num_companions) if held.num_companions else 0
    return max(said_mb, real_mb)


def own_minimum(report: ReportDemand, held: Held) -> int:
    """Data workers of its components; telling it so takes nothing from others."""
    return min(report.minimum, held.component_cpus // report.cpus)


def first_grant(report: ReportDemand, held: Held) -> int:
    """What a job may have until the shares are divided: what it says that it has, as far as Slurm knows of it."""
    minimum = own_minimum(report, held)
    return max(minimum, min(report.current, minimum + held.num_companions))


def silent_after_s(num_jobs: int, report_s: float, max_reports_per_s: float) -> float:
    """After how long without a report a job counts as silent: several reports were due."""
    return max(300.0, 6 * max(report_s, num_jobs / max_reports_per_s))
