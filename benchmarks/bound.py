"""A lower bound of the mean completion time of any schedule, by a linear program (HiGHS, through scipy).

Time is cut into slots; a job does some work in each, at most as fast as alone. All jobs together hold no more GPUs and
CPUs than there are, a job's in proportion to its speed. The objective is the mean busy time of the jobs plus half of
their work, which no schedule's completion times are below: jobs may be stopped, moved and run in part, for free. So the
bound is loose, most of all where GPUs are short.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, vstack

from hetstream.slurm_plugin.simulate.workload import Cluster, Workload

_MINUTE_S = 60.0
_HOUR_S = 3600.0
# Slots of 15 minutes up to 900, then of 60 and of 300: late slots hold few jobs.
_EDGES_MIN = np.concatenate([np.arange(0, 900, 15), np.arange(900, 3000, 60), np.arange(3000, 30001, 300)])
# Where the square of the work in a slot has its tangents, as shares of the slot.
_TANGENTS = (0.5, 1.0)


def lower_bound_s(workload: Workload, cluster: Cluster) -> float:
    """A mean completion time that no schedule is below.

    Args:
        workload: the jobs; a job is not faster than its trainers, and its data workers cost no overhead.
        cluster: GPUs and CPUs, wherever they are.

    Raises:
        RuntimeError: HiGHS found no optimum.
    """
    edges_s = _EDGES_MIN * _MINUTE_S
    start_s, length_s = edges_s[:-1], np.diff(edges_s)
    gpus = workload.num_gpus.astype(float)
    cpus = workload.ideal_cpus * workload.units
    # Seconds of work of job j in slot k: from its submission on, so the first slot may be a part.
    free_s = np.minimum(length_s, np.maximum(0.0, edges_s[1:] - workload.submit_s[:, None]))
    job, slot = np.nonzero(free_s > 0)
    # Work w in a slot that begins at b is done at b + w / 2 on average at the earliest, which costs w b + w^2 / 2. The
    # square is replaced by a variable above some of its tangents, so that the program's optimum stays below.
    begin_s = np.maximum(start_s[slot], workload.submit_s[job])
    width_s = free_s[job, slot]
    own, work_s = len(job), workload.work_s[job]
    cost = np.concatenate([begin_s / work_s, 1.0 / work_s])
    columns = np.arange(own)
    shape = (len(start_s), 2 * own)
    limits = [
        coo_array((gpus[job] / length_s[slot], (slot, columns)), shape=shape),
        coo_array((cpus[job] / length_s[slot], (slot, columns)), shape=shape),
    ]
    bounds = [np.full(len(start_s), cluster.num_gpus), np.full(len(start_s), cluster.num_cpus)]
    for part in _TANGENTS:
        at_s = part * width_s
        # square >= w at - at^2 / 2
        values = np.concatenate([at_s, -np.ones(own)])
        places = (np.concatenate([columns, columns]), np.concatenate([columns, columns + own]))
        limits.append(coo_array((values, places), shape=(own, 2 * own)))
        bounds.append(at_s**2 / 2)
    does = coo_array((np.ones(own), (job, columns)), shape=(len(workload), 2 * own))
    found = linprog(
        cost,
        A_ub=vstack(limits, format="csr"),
        b_ub=np.concatenate(bounds),
        A_eq=does.tocsr(),
        b_eq=workload.work_s,
        bounds=np.stack([np.zeros(2 * own), np.concatenate([width_s, np.full(own, np.inf)])], axis=1),
        method="highs",
    )
    if found.status != 0:
        raise RuntimeError(f"HiGHS found no optimum: {found.message}")
    busy_s = float(found.fun) / len(workload)
    return busy_s + float((workload.work_s / 2 - workload.submit_s).mean())


def most_effective_hours(workload: Workload, cluster: Cluster, window_s: float) -> float:
    """GPU-hours at the ideal speed that no schedule exceeds within a window.

    Args:
        workload: the jobs.
        cluster: GPUs and CPUs, wherever they are.
        window_s: from the first submission on.

    Raises:
        RuntimeError: HiGHS found no optimum.
    """
    edges_s = np.unique(np.minimum(_EDGES_MIN * _MINUTE_S, window_s))
    length_s = np.diff(edges_s)
    gpus = workload.num_gpus.astype(float)
    cpus = workload.ideal_cpus * workload.units
    free_s = np.minimum(length_s, np.maximum(0.0, edges_s[1:] - workload.submit_s[:, None]))
    job, slot = np.nonzero(free_s > 0)
    columns = np.arange(len(job))
    shape = (len(length_s), len(job))
    limits = [
        coo_array((of_job[job] / length_s[slot], (slot, columns)), shape=shape) for of_job in (gpus, cpus)
    ]  # fmt: skip
    limits.append(coo_array((np.ones(len(job)), (job, columns)), shape=(len(workload), len(job))))
    there = [np.full(len(length_s), cluster.num_gpus), np.full(len(length_s), cluster.num_cpus), workload.work_s]
    found = linprog(
        -gpus[job],
        A_ub=vstack(limits, format="csr"),
        b_ub=np.concatenate(there),
        bounds=np.stack([np.zeros(len(job)), free_s[job, slot]], axis=1),
        method="highs",
    )
    if found.status != 0:
        raise RuntimeError(f"HiGHS found no optimum: {found.message}")
    return -float(found.fun) / _HOUR_S
