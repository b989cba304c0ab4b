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

from hetstream.hetjob.ports import Measured
from hetstream.hetjob.site.messages import MAX_NODES
from hetstream.slurm_plugin.client.model import Job, Node, Snapshot
from hetstream.slurm_plugin.daemon.settings import PolicySettings
from hetstream.slurm_plugin.placement import Network, room_of, spread
from hetstream.slurm_plugin.placement import room_of as room_on_nodes
from hetstream.slurm_plugin.policy.table import Floats

Ints = npt.NDArray[np.int64]
_UNCOUNTED_MB = 1 << 50


def pool_partitions(snapshot: Snapshot, chosen: Collection[str] | None) -> tuple[str, ...]:
    """Return the partitions whose CPUs are divided: those chosen that exist, else those without GPUs, else all."""
    with_gpus = {name for node in snapshot.nodes if node.gpu_types for name in node.partitions}
    names = {partition.name for partition in snapshot.partitions}
    return tuple(sorted(names & set(chosen) if chosen is not None else names - with_gpus or names))


class WorkerSize(NamedTuple):
    """What one data worker has.

    Attributes:
        cpus: at least 1.
        memory_mb: 0 where it is not known, or Slurm does not count memory.
    """

    cpus: int
    memory_mb: int = 0


@dataclass(frozen=True, eq=False)
class FreeCpus:
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

    def cpus(self, sizes: Collection[WorkerSize]) -> int:
        """CPUs that can be divided among jobs with data workers of these sizes; of any size, if there are none."""
        free = self.free
        least_mb = min((size.memory_mb / size.cpus for size in sizes), default=0.0)
        if least_mb > 0:
            free = np.minimum(free, (self.free_mb / least_mb).astype(np.int64))
        return usable_cpus(free.tolist(), {size.cpus for size in sizes}) + self.held

    def num_workers(self, size: WorkerSize) -> int:
        """Return how many companions of this size all nodes hold, were those that are there given back."""
        each = room_on_nodes(self.free + self.companions, self.free_mb + self.companions_mb, *size)
        return int(each.sum())


def pool_room_of(snapshot: Snapshot, partitions: Collection[str], owners: Mapping[str, str]) -> FreeCpus:
    """Return the room in these partitions.

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
    return FreeCpus(
        np.array([max(node.cpus_free, 0) for node in nodes], np.int64),
        free_memory_mb(snapshot, nodes),
        companions,
        companions_mb,
        held,
    )


def free_memory_mb(snapshot: Snapshot, nodes: Sequence[Node]) -> Ints:
    """Return what jobs can still be given of each node; more than any node has, where Slurm does not count memory."""
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


# What data workers send through the nodes' links: (cluster, what jobs measure) -> bytes a second by node. Pure.
#
# Of a data worker beside its trainer nothing crosses a link; a remote one sends through its
# own node's link and through those of its trainers, of which each takes an equal part.

# More crosses no link, whatever a job says of itself.
_MOST_BYTES_PER_S = 1e13


def sent_bytes_per_s(measured: Measured) -> float:
    """Return what all data workers of a job send now."""
    return min((measured.step_bytes or 0.0) * measured.steps_per_s, _MOST_BYTES_PER_S)


def bytes_per_worker_s(measured: Measured, cpus: int, num_workers: int) -> float:
    """Return what each of a number of data workers would send: as much as it makes, but together no more than trainers
    take.

    Args:
        measured: of the job.
        cpus: of each data worker.
        num_workers: in all, at least 1.
    """
    rates = [point.steps_per_s / point.workers for point in measured.points if point.workers and point.cpus == cpus]
    taken = measured.ideal_steps_per_s / num_workers
    return min((measured.step_bytes or 0.0) * min([*rates, taken]), _MOST_BYTES_PER_S)


def traffic(
    snapshot: Snapshot, rows: Mapping[str, int], leaders: Mapping[str, Job], bytes_per_s: Mapping[str, float]
) -> Floats:
    """Return what crosses each node's link, in and out, shape (nodes,).

    Args:
        snapshot: the cluster.
        rows: of the nodes, by name.
        leaders: running jobs by number.
        bytes_per_s: what all data workers of a job send, by its number; what is not known is nothing.
    """
    where: dict[str, list[tuple[int, float]]] = {}  # by trainer: row of the node, CPUs there
    for job in snapshot.jobs:
        name = str(job.het.het_job_id) if job.het and job.het.offset else job.trainer
        owner = leaders.get(name)
        if owner is None or not job.is_running or not bytes_per_s.get(name) or job.count("gpu"):
            continue
        if (job.uid, job.user) == (owner.uid, owner.user):
            here = [(rows[node], cpus) for node, cpus in job.cpus_on_nodes() if node in rows]
            where.setdefault(name, []).extend(here)
    used = np.zeros(len(rows))
    for name, places in where.items():
        trainers = [rows[node] for node in leaders[name].nodes if node in rows]
        total_cpus = sum(cpus for _, cpus in places)
        if not trainers or not total_cpus:
            continue
        for row, cpus in places:
            part = bytes_per_s[name] * cpus / total_cpus / len(trainers)
            for trainer in trainers:
                if trainer != row:
                    used[row] += part
                    used[trainer] += part
    return used


# Where a job's next data workers would be best: (cluster, job) -> names of nodes. Pure; called by the registry.
#
# By `placement.py`: the trainer's nodes first, then where the fewest data workers are, and only where
# CPUs, memory and, if the site says how fast its links are, the network's budget suffice. The daemon prefers, and Slurm
# has the last word.

_BYTES_PER_GBIT = 1e9 / 8


class Preference:
    """The nodes of one reading.

    Args:
        snapshot: the cluster.
        partitions: whose CPUs are divided.
        leaders: running jobs, by number.
        measured: what they have measured, as far as they have.
        settings: say what links carry.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        partitions: Collection[str],
        leaders: Mapping[str, Job],
        measured: Mapping[str, Measured],
        settings: PolicySettings,
    ) -> None:
        names = set(partitions)
        self._names = [node.name for node in snapshot.nodes]
        self._rows = {name: row for row, name in enumerate(self._names)}
        self._free = np.array(
            [
                node.cpus_free if node.starts_jobs and not names.isdisjoint(node.partitions) else 0
                for node in snapshot.nodes
            ],
            np.int64,
        )
        self._free_mb = free_memory_mb(snapshot, snapshot.nodes)
        # Those that some user or label has alone: the job's own are those of its trainers.
        self._kept = np.array([bool(node.owner or node.mcs_label) for node in snapshot.nodes], np.bool_)
        num_data_workers = np.zeros(len(self._names), np.int64)
        for job in snapshot.jobs:
            if job.trainer and job.is_running:
                for name in job.nodes:
                    if name in self._rows:
                        num_data_workers[self._rows[name]] += 1
        self._knows_links = settings.network_gbps > 0
        link = settings.network_gbps * _BYTES_PER_GBIT if self._knows_links else np.inf
        sent = {name: sent_bytes_per_s(said) for name, said in measured.items()} if self._knows_links else {}
        self._network = Network(
            np.full(len(self._names), link),
            traffic(snapshot, self._rows, leaders, sent),
            num_data_workers,
            settings.network_share,
        )

    def nodes(
        self, trainer_nodes: Collection[str], size: WorkerSize, count: int, bytes_per_s: float
    ) -> tuple[str, ...]:
        """Return one name for each data worker that finds a place.

        Args:
            trainer_nodes: where the job's trainers run.
            size: of a data worker.
            count: how many are to start.
            bytes_per_s: that each will send.
        """
        trainers = [self._rows[name] for name in trainer_nodes if name in self._rows]
        if not trainers or count <= 0:
            return ()
        of_others = self._kept.copy()
        of_others[trainers] = False
        room = np.where(of_others, 0, room_of(self._free, self._free_mb, *size))
        sent = bytes_per_s if self._knows_links else 0.0
        found = spread(room, trainers, min(count, MAX_NODES), sent, self._network)
        return tuple(self._names[row] for row, number in found.places for _ in range(number))
