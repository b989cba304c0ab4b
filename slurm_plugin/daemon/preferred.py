"""Where a job's next data workers would be best: (cluster, job) -> names of nodes. Pure; called by the registry.

By `placement/data_workers.py`: the trainer's nodes first, then where the fewest data workers are. The daemon does not
know how fast the links are, so it names no budget: it prefers, and Slurm has the last word.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from hetstream.hetjob.site.measured import MAX_NODES
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.placement.data_workers import Network, spread


class Preference:
    """The nodes of one reading.

    Args:
        snapshot: the cluster.
        partitions: whose CPUs are divided.
    """

    def __init__(self, snapshot: Snapshot, partitions: Collection[str]) -> None:
        names = set(partitions)
        self._names = [node.name for node in snapshot.nodes]
        self._rows = {name: row for row, name in enumerate(self._names)}
        self._free = np.array(
            [
                node.cpus_free if node.is_usable and not names.isdisjoint(node.partitions) else 0
                for node in snapshot.nodes
            ],
            np.int64,
        )
        self._num_data_workers = np.zeros(len(self._names), np.int64)
        for job in snapshot.jobs:
            if job.trainer and job.is_running:
                for name in job.nodes:
                    if name in self._rows:
                        self._num_data_workers[self._rows[name]] += 1

    def nodes(self, trainer_nodes: Collection[str], cpus: int, count: int) -> tuple[str, ...]:
        """One name for each data worker that finds a place.

        Args:
            trainer_nodes: where the job's trainers run.
            cpus: of a data worker.
            count: how many are to start.
        """
        trainers = [self._rows[name] for name in trainer_nodes if name in self._rows]
        if not trainers or count <= 0:
            return ()
        room = np.maximum(self._free, 0) // cpus
        unlimited = np.full(len(room), np.inf)
        found = spread(
            room, trainers, min(count, MAX_NODES), 0.0, Network(unlimited, room * 0.0, self._num_data_workers)
        )
        return tuple(self._names[row] for row, number in found.places for _ in range(number))
