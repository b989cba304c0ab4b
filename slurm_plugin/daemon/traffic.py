"""What data workers send through the nodes' links: (cluster, what jobs measure) -> bytes a second by node. Pure.

Called by `preferred.py`. Of a data worker beside its trainer nothing crosses a link; a remote one sends through its own
node's link and through those of its trainers, of which each takes an equal part.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hetstream.hetjob.site.measured import Measured
from hetstream.slurm_plugin.client.model import Job, Snapshot
from hetstream.slurm_plugin.policy.table import Floats

# More crosses no link, whatever a job says of itself.
_MOST_BYTES_PER_S = 1e13


def sent_bytes_per_s(measured: Measured) -> float:
    """What all data workers of a job send now."""
    return min((measured.step_bytes or 0.0) * measured.steps_per_s, _MOST_BYTES_PER_S)


def bytes_per_worker_s(measured: Measured, cpus: int, num_workers: int) -> float:
    """What one of so many data workers would send: as much as it makes, but together no more than trainers take.

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
    """What crosses each node's link, in and out, shape (nodes,).

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
