"""What the coordinator knows of one GPU and its jobs at one moment. Pure."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    name: str
    job_class: JobClass
    since_ns: int
    statistics: Statistics | None = None
    measured_bytes: int | None = None

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
    """

    capacity_bytes: int
    jobs: tuple[SharingJob, ...] = ()
    is_reserved: bool = False
    is_lost: bool = False

    @property
    def guaranteed(self) -> SharingJob | None:
        """The job that has the GPU."""
        return next((job for job in self.jobs if job.job_class is JobClass.GUARANTEED), None)

    @property
    def opportunistic(self) -> tuple[SharingJob, ...]:
        """The others."""
        return tuple(job for job in self.jobs if job.job_class is JobClass.OPPORTUNISTIC)
