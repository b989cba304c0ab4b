"""Hetstream's own: SRTF's order, changed where that saves time, as long as nobody is later by it than SRTF's latest.

SRTF orders jobs by remaining time x CPUs. Three things make a better order for the mean completion time:

* Of two jobs with equal CPU work, one that needs fewer CPUs for longer is first: it takes little from the other, and
  cannot make up for lost time by more CPUs later. So CPUs count with an exponent above 1.
* A job that holds many GPUs is first: while it waits for data, they are held for nothing, and others may wait for them.
* A job that has data workers is before another of nearly the same work: moving them leaves CPUs idle for a while.

Jobs that need many CPUs pay for that. So the policy foresees when each job would end if CPUs were given in an order:
when the CPU work of all up to it is done, and not before it could be alone. The time from its submission to then, by
the time that it needs alone, is its stretch. A job whose stretch would come near the greatest in SRTF's own order moves
forward.
"""

from __future__ import annotations

import numpy as np

from hetstream.slurm_plugin.policy.curves import pieces_of
from hetstream.slurm_plugin.policy.filling import ascending, fill_in_order
from hetstream.slurm_plugin.policy.srtf import expected_remaining_s
from hetstream.slurm_plugin.policy.table import Allocation, Floats, JobTable, Pool

# Exponents. Chosen on lists of 88, 120 and 150 jobs from seeds 5000 on of `make bench-sched`'s generator: a mean
# below SRTF's and a worst slowdown not above it at all three loads. `make bench-sched` judges them on other lists.
WIDTH_POWER, GPU_POWER, STAY_POWER, LATE_POWER = 1.35, 0.2, 0.2, 2.0
# A job is late from this far below the greatest stretch in SRTF's order on, and never below this stretch.
LATE_MARGIN, LATE_FROM = 0.5, 1.3
_LEAST = 1e-12


def stretch(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    if not len(table) or not pieces.count.shape[1]:
        return fill_in_order(table, pool, pieces, np.zeros(pieces.count.shape))
    left_s = np.maximum(expected_remaining_s(table), 1.0)
    cpus = np.maximum(pieces.end * table.cpus[:, None], 1.0)
    need = np.log(cpus) - np.log(np.maximum(pieces.speed[:, 1:], _LEAST))
    alone_s = left_s / np.maximum(pieces.speed[:, -1], _LEAST)
    # A job whose whole length is not known is never late: its age says nothing then.
    is_known = np.isfinite(table.total_s)
    total_s = np.maximum(np.where(is_known, table.total_s, 0.0), left_s)

    def stretches(rank: Floats) -> Floats:
        order = ascending(rank + need[:, -1], np.arange(len(table)))
        ends_s = np.empty(len(table))
        ends_s[order] = np.cumsum((alone_s * cpus[:, -1])[order]) / max(pool.cpus, 1)
        return np.where(is_known, (table.age_s + np.maximum(ends_s, alone_s)) / total_s, 1.0)

    srtf = np.log(left_s) - np.log(table.weight)
    rank = srtf + (WIDTH_POWER - 1) * np.log(cpus[:, -1]) - GPU_POWER * np.log(np.maximum(table.gpus, 1.0))
    rank -= STAY_POWER * np.minimum(table.current * table.cpus / cpus[:, -1], 1.0)
    late = max(LATE_FROM, float(stretches(srtf).max()) - LATE_MARGIN)
    rank -= LATE_POWER * np.log(np.maximum(stretches(rank) / late, 1.0))
    return fill_in_order(table, pool, pieces, need + rank[:, None])
