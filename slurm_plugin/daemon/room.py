"""How many CPUs data workers could have: (cluster, jobs) -> a number. Pure; called by the registry.

A CPU counts where a data worker of a size that some job asks for fits, with its memory. Thirty free CPUs on nodes with
three each are no room for data workers of eight, nor are eight free CPUs beside 1 GB of free memory for those of 16 GB.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.client.model import Node, Snapshot
from hetstream.slurm_plugin.placement.data_workers import room_of as room_on_nodes

Ints = npt.NDArray[np.int64]
_UNCOUNTED_MB = 1 << 50


def pool_partitions(snapshot: Snapshot, chosen: Collection[str] | None) -> tuple[str, ...]:
    """The partitions whose CPUs are divided: those chosen that exist, else those without GPUs, else all."""
    with_gpus = {name for node in snapshot.nodes if node.gpu_types for name in node.partitions}
    names = {partition.name for partition in snapshot.partitions}
    return tuple(sorted(names & set(chosen) if chosen is not None else names - with_gpus or names))


class Size(NamedTuple):
    """What one data worker has.

    Attributes:
        cpus: at least 1.
        memory_mb: 0 where it is not known, or Slurm does not count memory.
    """

    cpus: int
    memory_mb: int = 0


@dataclass(frozen=True, eq=False)
class Room:
    """What data workers have and could have; arrays have one value for each usable node.

    Attributes:
        free, free_mb: CPUs and memory that no job has.
        companions, companions_mb: of companions of these jobs: theirs, if they are given back.
        held: CPUs that data workers of these jobs hold, on all nodes.
    """

    free: Ints
    free_mb: Ints
    companions: Ints
    companions_mb: Ints
    held: int

    def cpus(self, sizes: Collection[Size]) -> int:
        """CPUs that can be divided among jobs with data workers of these sizes; of any size, if there are none."""
        free = self.free
        least_mb = min((size.memory_mb / size.cpus for size in sizes), default=0.0)
        if least_mb > 0:
            free = np.minimum(free, (self.free_mb / least_mb).astype(np.int64))
        return usable_cpus(free.tolist(), {size.cpus for size in sizes}) + self.held

    def num_workers(self, size: Size) -> int:
        """How many companions of this size all nodes hold, were those that are there given back."""
        each = room_on_nodes(self.free + self.companions, self.free_mb + self.companions_mb, *size)
        return int(each.sum())


def room_of(snapshot: Snapshot, partitions: Collection[str], owners: Mapping[str, str]) -> Room:
    """The room in these partitions.

    Args:
        snapshot: the cluster.
        partitions: whose nodes count.
        owners: user of each job; a companion says itself whose it is, so it must be of the same user.
    """
    names, users = set(partitions), set(owners.values())
    theirs = [job for job in snapshot.jobs if job.user in users]
    # A node that a user or label has alone is room for these users' companions if it is one of theirs.
    users |= {"", *(str(job.uid) for job in theirs)}
    labels = {"", *(job.mcs_label for job in theirs)}
    nodes = [
        node
        for node in snapshot.nodes
        if node.starts_jobs
        and not names.isdisjoint(node.partitions)
        and node.owner in users
        and node.mcs_label in labels
    ]
    rows = {node.name: row for row, node in enumerate(nodes)}
    companions, companions_mb = np.zeros(len(nodes), np.int64), np.zeros(len(nodes), np.int64)
    held = 0
    for job in snapshot.jobs:
        if not job.is_running or names.isdisjoint(job.partitions):
            continue
        trainer = str(job.het.het_job_id) if job.het and job.het.offset else job.trainer
        if owners.get(trainer) != job.user:
            continue
        held += job.num_cpus
        if not job.het and len(job.nodes) == 1 and job.nodes[0] in rows:
            companions[rows[job.nodes[0]]] += job.num_cpus
            companions_mb[rows[job.nodes[0]]] += job.memory_mb
    return Room(
        np.array([max(node.cpus_free, 0) for node in nodes], np.int64),
        free_memory_mb(snapshot, nodes),
        companions,
        companions_mb,
        held,
    )


def free_memory_mb(snapshot: Snapshot, nodes: Sequence[Node]) -> Ints:
    """What jobs can still be given of each node; more than any node has, where Slurm does not count memory."""
    # Such a cluster may not even say how much its nodes have (RealMemory is 1 then).
    # 22.05 writes CR_Core_Memory, 24.11 CR_CORE_MEMORY.
    if "MEMORY" not in snapshot.config.get("SelectTypeParameters", "").upper():
        return np.full(len(nodes), _UNCOUNTED_MB, np.int64)
    return np.array([max(node.memory_mb - node.memory_allocated_mb, 0) for node in nodes], np.int64)


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
