"""Where a job's next data workers would be best: (cluster, job) -> names of nodes. Pure; called by the registry.

By `placement/data_workers.py`: the trainer's nodes first, then where the fewest data workers are, and only where CPUs,
memory and, if the site says how fast its links are, the network's budget suffice. The daemon prefers, and Slurm has the
last word.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from hetstream.hetjob.site.measured import MAX_NODES, Measured
from hetstream.slurm_plugin.client.model import Job, Snapshot
from hetstream.slurm_plugin.daemon.policy_settings import PolicySettings
from hetstream.slurm_plugin.daemon.room import Size, free_memory_mb
from hetstream.slurm_plugin.daemon.traffic import sent_bytes_per_s, traffic
from hetstream.slurm_plugin.placement.data_workers import Network, room_of, spread

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

    def nodes(self, trainer_nodes: Collection[str], size: Size, count: int, bytes_per_s: float) -> tuple[str, ...]:
        """One name for each data worker that finds a place.

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

    def beside(self, trainer_nodes: Collection[str], size: Size, count: int) -> tuple[str, ...]:
        """The nodes of trainers alone, one name for each of so many data workers that finds a place there."""
        rows = [self._rows[name] for name in trainer_nodes if name in self._rows]
        room = room_of(self._free[rows], self._free_mb[rows], *size).tolist()
        names = [self._names[row] for row, number in zip(rows, room, strict=True) for _ in range(min(number, count))]
        return tuple(names[: min(count, MAX_NODES)])
