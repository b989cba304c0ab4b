"""A floor of speed: no running job is starved for the sake of the others, as far as the pool goes.

Each job has, before the policy divides the rest, as many data workers as bring it to the floor. Where the pool is too
small even for that, who has been below the floor for longest is first, so that in the end everybody's turn comes: age
beats every priority. Put `steady` around it, so that whoever had his turn keeps it for a while.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetstream.slurm_plugin.policy.curves import Pieces, pieces_of
from hetstream.slurm_plugin.policy.filling import take
from hetstream.slurm_plugin.policy.reasons import Reason
from hetstream.slurm_plugin.policy.table import Allocation, Ints, JobTable, Policy, Pool

# 5 % of the greatest speed: costs the mean completion time a percent where the cluster is not overloaded.
FLOOR = 0.05


def with_floor(policy: Policy, floor: float = FLOOR) -> Policy:
    """The policy above this floor.

    Args:
        policy: divides what is above the floor.
        floor: share of the speed of a trainer that never waits for data; 0 for none.
    """

    def floored(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        lifted = _lifted(table, pool, floor)
        found = policy(replace(table, minimum=lifted), pool, now_s)
        is_floor = (lifted > table.minimum) & (found.workers == lifted) & (found.reasons == Reason.MINIMUM)
        return Allocation(found.workers, np.where(is_floor, Reason.FLOOR, found.reasons).astype(np.int8))

    return floored


def workers_for(table: JobTable, pieces: Pieces, speed: float) -> Ints:
    """Data workers, at least the minimum, with which each job has this speed, or the greatest that it can have."""
    per_worker = pieces.slope * table.cpus[:, None]
    short = np.maximum(speed - pieces.speed[:, :-1], 0.0)
    needed = np.ceil(np.divide(short, per_worker, out=np.zeros_like(short), where=per_worker > 0) - 1e-9)
    workers: Ints = table.minimum + np.minimum(needed, pieces.count).astype(np.int64).sum(axis=1)
    return workers


def _lifted(table: JobTable, pool: Pool, floor: float) -> Ints:
    more = workers_for(table, pieces_of(table), floor) - table.minimum
    # Of those that starve for as long, the least need first: so more of them are brought to the floor.
    order = np.lexsort((more * table.cpus, -table.starved_s))
    budget = pool.cpus - int((table.minimum * table.cpus).sum())
    lifted: Ints = table.minimum.copy()
    lifted[order] += take(more[order], table.cpus[order], budget)
    return lifted
