"""On which nodes the CPUs of data workers are: on their trainer's own first. Pure, for all jobs at once.

The daemon places whole data workers; here CPUs are cut where a node ends, which changes no sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Homes:
    """Where the trainers of some jobs are: a line for each job and node.

    Attributes:
        row: of the job, as an index of its target.
        node: of the line.
        share: of the job's units that are on the node.
        gbps: that these units take in at the ideal speed.
    """

    row: Ints
    node: Ints
    share: Floats
    gbps: Floats


def local_cpus(homes: Homes, target: Floats, free: Floats) -> tuple[Floats, Floats]:
    """CPUs of data workers that are on their trainer's nodes.

    Args:
        homes: of the jobs.
        target: CPUs of each job.
        free: CPUs of each node that data workers can have.

    Returns:
        Of each job, and of each node.
    """
    order = np.argsort(homes.node, kind="stable")
    node, row = homes.node[order], homes.row[order]
    wanted = target[row] * homes.share[order]
    before = np.cumsum(wanted) - wanted
    first = np.searchsorted(node, node)
    before -= before[first] if len(before) else 0.0
    given = np.clip(free[node] - before, 0.0, wanted)
    of_job: Floats = np.bincount(row, weights=given, minlength=len(target)).astype(np.float64)
    of_node: Floats = np.bincount(node, weights=given, minlength=len(free)).astype(np.float64)
    return of_job, of_node


def used_cpus(homes: Homes, target: Floats, free: Floats) -> Floats:
    """CPUs that data workers hold of each node: local ones, and the others where most is free."""
    local_of_job, used = local_cpus(homes, target, free)
    remote = float((target - local_of_job).sum())
    left = free - used
    order = np.argsort(-left, kind="stable")
    used[order] += np.diff(np.minimum(np.cumsum(left[order]), remote), prepend=0.0)
    return used


def within_network(homes: Homes, speed: Floats, local_share: Floats, budget_gbps: Floats) -> Floats:
    """Speeds that keep what each node takes in from data workers elsewhere within its budget.

    Args:
        homes: of the jobs.
        speed: of each job with all of its data workers.
        local_share: of the job's data workers that are on its own nodes.
        budget_gbps: of each node.
    """
    remote_speed = speed * (1.0 - local_share)
    taken = np.bincount(homes.node, weights=homes.gbps * remote_speed[homes.row], minlength=len(budget_gbps))
    allowed = np.where(taken > budget_gbps, budget_gbps / np.maximum(taken, 1e-12), 1.0)
    # The trainers of a job step together: the tightest of its nodes sets the speed.
    factor = np.ones_like(speed)
    np.minimum.at(factor, homes.row, allowed[homes.node])
    return speed * local_share + remote_speed * factor
