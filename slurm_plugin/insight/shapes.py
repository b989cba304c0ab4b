"""What pending jobs ask of a node, and which of them ask alike. Pure; used by all that explain or measure a cluster.

Tens of thousands of pending jobs ask for a few thousand different things, and what is true of one that asks so is true
of all: who asks thousands of nodes, asks once for each group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from hetstream.slurm_plugin.client.constraint import for_one_node
from hetstream.slurm_plugin.client.model import Job

RESOURCES = ("GPUs", "CPUs", "memory")


@dataclass(frozen=True, slots=True)
class Shape:
    """What one node must give to one pending job.

    Attributes:
        gpu_type: the type that it insists on; empty if any will do.
        partitions: where it may run; empty means everywhere.
        num_jobs: how many pending jobs have this shape.
        whole_nodes: it gets whole nodes alone (`--exclusive`).
        required_nodes: `--nodelist`, where it names as many nodes as it wants: it then runs on no other.
        features, excluded_nodes: `--constraint` and `--exclude`.
    """

    cpus: int
    gpus: int
    memory_mb: int
    gpu_type: str = ""
    partitions: tuple[str, ...] = ()
    num_jobs: int = 0
    whole_nodes: bool = False
    required_nodes: tuple[str, ...] = ()
    features: str = ""
    excluded_nodes: tuple[str, ...] = ()


def alike_jobs(jobs: Iterable[Job]) -> list[list[Job]]:
    """The pending jobs in groups: those of a group ask alike, in the same places, and have the same reason."""
    groups: dict[Hashable, list[Job]] = {}
    for job in jobs:
        if job.state == "PENDING":
            # GRES by identity: those parsed of equal text are one object, and hashing them would cost more than all.
            key = (
                job.reason, job.partitions, job.num_nodes, job.num_cpus, job.memory_mb, job.num_tasks, job.cpus_per_gpu,
                id(job.gres_per_node), id(job.gres_per_task), id(job.gres_per_job), id(job.gres_per_socket),
                job.gpus_requested, job.required_nodes, job.features, job.excluded_nodes, job.is_contiguous,
                job.num_switches, job.short_licenses, job.reservation, job.exclusive,
                job.user if job.exclusive == "USER" else "",
            )  # fmt: skip
            group = groups.get(key)
            if group is None:
                groups[key] = [job]
            else:
                group.append(job)
    return list(groups.values())


def pending_shapes(alike: Iterable[Sequence[Job]]) -> tuple[Shape, ...]:
    """The shapes of the jobs that free resources could start, the most frequent first. Without reservations.

    Args:
        alike: the pending jobs in groups; see `alike_jobs`.
    """
    counts: Counter[Shape] = Counter()
    for group in alike:
        if group[0].waits_for_resources and not group[0].reservation:
            counts[shape_of(group[0])] += sum(job.num_records for job in group)
    return tuple(replace(shape, num_jobs=count) for shape, count in counts.most_common())


def shape_of(job: Job) -> Shape:
    """What a job asks of each of its nodes, when it spreads evenly."""
    nodes = max(1, job.num_nodes)
    gpus = -(-job.count("gpu") // nodes)
    return Shape(
        cpus=max(-(-job.num_cpus // nodes), job.cpus_per_gpu * gpus),
        gpus=gpus,
        memory_mb=-(-job.memory_mb // nodes),
        gpu_type=job.type_of("gpu"),
        partitions=tuple(sorted(job.partitions)),
        whole_nodes=job.exclusive == "NODE",
        required_nodes=job.required_nodes if len(set(job.required_nodes)) >= nodes else (),
        features=job.features if nodes > 1 else for_one_node(job.features),
        excluded_nodes=job.excluded_nodes,
    )
