"""What the coordinator knows of one GPU and its jobs at one moment. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetstream.hetjob.gpu.orders import JobClass, Statistics


@dataclass(frozen=True)
class SharingJob:
    """One process on the GPU.

    Attributes:
        name: of the process among those on the GPU.
        job_class: what it was admitted as; never what its statistics say.
        since_ns: when it was admitted.
        statistics: what it said last; None: nothing yet, or nothing whole.
        measured_bytes: memory of the GPU that it holds by the GPU's own count; None where nobody counts.
        gang: text that the processes have in common which train together, on this GPU and on others; empty: it has no
            other process.
        meet_at: boundary at which these wait for each other if one of them is held up; 0: there is only this one.
    """

    name: str
    job_class: JobClass
    since_ns: int
    statistics: Statistics | None = None
    measured_bytes: int | None = None
    gang: str = ""
    meet_at: int = 0

    @property
    def held_bytes(self) -> int:
        """Memory of the GPU that it holds: the larger of the GPU's count and its own."""
        said_bytes = self.statistics.held_bytes if self.statistics else 0
        return max(said_bytes, self.measured_bytes or 0)


@dataclass(frozen=True)
class Measurements:
    """One GPU.

    Attributes:
        capacity_bytes: memory that its jobs may hold together.
        jobs: those with an agent.
        is_reserved: a guaranteed job has the GPU, with or without an agent.
        is_lost: the GPU answers no more.
        is_awaited: the guaranteed job was there before the coordinator, and its agent has not come back.
        agentless_bytes: of its memory that processes without an agent hold.
        is_hogged: an opportunistic job has some of that.
    """

    capacity_bytes: int
    jobs: tuple[SharingJob, ...] = ()
    is_reserved: bool = False
    is_lost: bool = False
    is_awaited: bool = False
    agentless_bytes: int = 0
    is_hogged: bool = False

    @property
    def guaranteed(self) -> SharingJob | None:
        """The job that has the GPU. Several processes of it count as one, which has the name of the one that trains."""
        return _as_one(self.all_guaranteed)

    @property
    def all_guaranteed(self) -> tuple[SharingJob, ...]:
        """Its processes."""
        return tuple(job for job in self.jobs if job.job_class is JobClass.GUARANTEED)

    @property
    def opportunistic(self) -> tuple[SharingJob, ...]:
        """The others."""
        return tuple(job for job in self.jobs if job.job_class is JobClass.OPPORTUNISTIC)


def _as_one(jobs: tuple[SharingJob, ...]) -> SharingJob | None:
    """Several processes of a guaranteed job on one GPU: it is idle while all are, and their memory adds up.

    The pace is that of the first one that makes mini-batches. If one has said nothing, nothing is known.
    """
    if len(jobs) < 2:
        return jobs[0] if jobs else None
    records = [job.statistics for job in jobs if job.statistics]
    first = next((job for job in jobs if job.statistics and job.statistics.boundaries), jobs[0])
    measured = [job.measured_bytes for job in jobs if job.measured_bytes is not None]
    whole = replace(first, measured_bytes=sum(measured) if measured else None)
    if len(records) < len(jobs) or first.statistics is None:
        return replace(whole, statistics=None)
    busy = [record.updated_ns for record in records if not record.is_idle]
    return replace(
        whole,
        statistics=replace(
            first.statistics,
            updated_ns=min(busy, default=first.statistics.updated_ns),
            boundary_ns=max(record.boundary_ns for record in records),
            is_idle=int(not busy),
            held_bytes=sum(record.held_bytes for record in records),
            peak_bytes=sum(record.peak_bytes for record in records),
            host_bytes=sum(record.host_bytes for record in records),
        ),
    )
