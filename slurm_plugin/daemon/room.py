"""How many CPUs data workers could have: (cluster, jobs) -> a number. Pure; called by the registry.

A CPU counts where a data worker of a size that some job asks for fits. Thirty free CPUs on nodes with three each are no
room for data workers of eight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from hetstream.slurm_plugin.client.model import Snapshot


def pool_partitions(snapshot: Snapshot, chosen: Collection[str] | None) -> tuple[str, ...]:
    """The partitions whose CPUs are divided: those chosen that exist, else those without GPUs, else all."""
    with_gpus = {name for node in snapshot.nodes if node.gpus for name in node.partitions}
    names = {partition.name for partition in snapshot.partitions}
    return tuple(sorted(names & set(chosen) if chosen is not None else names - with_gpus or names))


@dataclass(frozen=True)
class Room:
    """What data workers have and could have.

    Attributes:
        free: CPUs of each node on which nothing runs.
        companions: CPUs of each node on which companions of these jobs run: theirs, if they are given back.
        held: CPUs that data workers of these jobs hold, on all nodes.
    """

    free: tuple[int, ...]
    companions: tuple[int, ...]
    held: int

    def cpus(self, sizes: Collection[int]) -> int:
        """CPUs that can be divided among jobs with data workers of these sizes; of any size, if there are none."""
        return usable_cpus(self.free, sizes) + self.held

    def num_workers(self, size: int) -> int:
        """How many companions of so many CPUs all nodes hold, were those that are there given back."""
        return sum((free + theirs) // size for free, theirs in zip(self.free, self.companions, strict=True))


def room_of(snapshot: Snapshot, partitions: Collection[str], owners: Mapping[str, str]) -> Room:
    """The room in these partitions.

    Args:
        snapshot: the cluster.
        partitions: whose nodes count.
        owners: user of each job; a companion says itself whose it is, so it must be of the same user.
    """
    names = set(partitions)
    nodes = [node for node in snapshot.nodes if node.is_usable and not names.isdisjoint(node.partitions)]
    companions = dict.fromkeys((node.name for node in nodes), 0)
    held = 0
    for job in snapshot.jobs:
        if not job.is_running or names.isdisjoint(job.partitions):
            continue
        trainer = str(job.het.het_job_id) if job.het and job.het.offset else job.trainer
        if owners.get(trainer) != job.user:
            continue
        held += job.num_cpus
        if not job.het and len(job.nodes) == 1 and job.nodes[0] in companions:
            companions[job.nodes[0]] += job.num_cpus
    return Room(tuple(max(node.cpus_free, 0) for node in nodes), tuple(companions.values()), held)


def usable_cpus(free: Iterable[int], sizes: Collection[int]) -> int:
    """Of the free CPUs of each node, as many as data workers of these sizes can fill.

    Args:
        free: CPUs of each node.
        sizes: of data workers; without any, all count.
    """
    per_node = [max(cpus, 0) for cpus in free]
    if not sizes or not per_node:
        return sum(per_node)
    # Bit n says whether some data workers have n CPUs together; the highest bit within a node is what they can fill.
    most = max(per_node)
    mask, sums = (1 << (most + 1)) - 1, 1
    for size in sorted(set(sizes)):
        step = size
        while step <= most:
            sums |= (sums << step) & mask
            step *= 2
    best = {cpus: (sums & ((1 << (cpus + 1)) - 1)).bit_length() - 1 for cpus in set(per_node)}
    return sum(best[cpus] for cpus in per_node)
