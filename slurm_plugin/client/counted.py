"""What counts: (nodes) -> what there is and what of it is held, (jobs) -> what they hold. Pure.

Every figure of a cluster is made of it: `frag`, `util`, `jobs`, the exporter, the page, the histories and `advise`. Of
a node on which jobs of everybody can start all counts that it has. Of any other one (drained, reserved, in maintenance,
not answering, ...) what jobs still hold there counts, and nothing else: nobody can have more of it. So whatever the
states of the nodes, no more is held than counts, and what is held is what the jobs hold together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from hetstream.slurm_plugin.client.model import Job, Node


@dataclass(frozen=True, slots=True)
class Counted:
    """Sums over nodes.

    Attributes:
        cpus, gpus, mig, memory_mb: those that jobs hold or can be given.
        gpus_with_mig: GPUs, where an instance of MIG counts as its share of one.
        cpus_held, gpus_held, mig_held, memory_held_mb: those that jobs hold; a GPU of which one has a shard is held.
    """

    cpus: int = 0
    gpus: int = 0
    mig: int = 0
    memory_mb: int = 0
    cpus_held: int = 0
    gpus_held: int = 0
    mig_held: int = 0
    memory_held_mb: int = 0
    gpus_with_mig: float = 0
    gpus_with_mig_held: float = 0


@dataclass(frozen=True, slots=True)
class HeldResources:
    """What jobs hold, on all their nodes together; an instance of MIG counts as its share of a GPU.

    So does a CPU that several jobs are given: it counts once.
    """

    cpus: float = 0
    gpus: float = 0
    memory_mb: int = 0


def counted(nodes: Iterable[Node]) -> Counted:
    """Return what counts of some nodes."""
    total: dict[str, Any] = dict.fromkeys((field.name for field in fields(Counted)), 0)
    for node in nodes:
        for name, all_of_it, free in (
            ("cpus", node.cpus, node.cpus_free),
            ("gpus", node.gpus, node.gpus_free()),
            ("mig", node.mig, node.mig_free()),
            ("memory_mb", node.memory_mb, node.memory_free_mb),
            ("gpus_with_mig", node.gpus_with_mig(), node.gpus_with_mig_free()),
        ):
            held = max(0, all_of_it - free)
            total[_HELD[name]] += held
            total[name] += all_of_it if node.starts_jobs else held
    return Counted(**total)


_HELD = {"cpus": "cpus_held", "gpus": "gpus_held", "mig": "mig_held", "memory_mb": "memory_held_mb",
         "gpus_with_mig": "gpus_with_mig_held"}  # fmt: skip


def cpus_asked(job: Job) -> int:
    """Return the CPUs of a job on all nodes together, of a pending one with those that come with its GPUs."""
    return max(job.num_cpus, job.cpus_per_gpu * job.count("gpu")) if job.is_pending else job.num_cpus


def memory_asked_mb(job: Job) -> int:
    """Return its memory, of a pending job with that of the CPUs that come with its GPUs."""
    cpus = cpus_asked(job)
    return max(job.memory_mb, (job.memory_per_cpu_mb or 0) * cpus) if cpus > job.num_cpus else job.memory_mb


def held_by(job: Job) -> HeldResources:
    """Return what a job keeps others from having: nothing before it starts, and nothing as soon as it completes.

    One that is suspended keeps its GPUs and its memory, and gives its CPUs away (job_res_rm_job with
    JOB_RES_ACTION_SUSPEND; seen on 22.05, 24.11 and 26.05).
    """
    if not job.holds_resources:
        return HeldResources()
    return HeldResources(0 if job.state == "SUSPENDED" else job.num_cpus * job.cpu_share, job.gpus, job.memory_mb)


def whole_if_near(number: float) -> float:
    """Return a number of GPUs or CPUs to be shown: parts that make up whole ones are whole."""
    return round(number) if abs(number - round(number)) < 1e-6 else round(number, 4)


def num_of_jobs(jobs: Iterable[Job]) -> int:
    """Return how many jobs these records are: tasks of an array count one by one, components of a heterogeneous job do
    not.
    """
    alone, together = 0, set()
    for job in jobs:
        if job.het is None:
            alone += job.num_records
        else:
            together.add(job.het.het_job_id)
    return alone + len(together)
