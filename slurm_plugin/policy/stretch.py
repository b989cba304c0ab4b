"""Hetstream's own: shortest remaining CPU work first, where narrow jobs count less and delayed ones more.

SRTF orders jobs by remaining time x CPUs. Two things are better known than that. Of two jobs with equal CPU work the
one that needs fewer CPUs for longer should be first: it takes little from the other meanwhile, and cannot make up for
lost time by more CPUs later. So the CPUs count with an exponent above 1. And a job that is already late for its length
(its stretch: the time from submission to where it could end, by the time that it needs alone) moves forward by as much,
so that no job pays for the mean of the others without bound.
"""

from __future__ import annotations

import numpy as np

from hetstream.slurm_plugin.policy.curves import pieces_of
from hetstream.slurm_plugin.policy.filling import fill_in_order
from hetstream.slurm_plugin.policy.srtf import expected_remaining_s
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Pool

# Of the CPUs at the end of a job's curve. 1 is SRTF, a large one MaxTP; the mean completion time is flat around this.
WIDTH_POWER = 1.5
# Of the stretch: as much as keeps the greatest slowdown below SRTF's on the reference lists, at no worse a mean
# (`make bench-sched`): 1.5 takes another 5 % from the slowdown and gives back what the mean had gained.
STRETCH_POWER = 1.2
_LEAST = 1e-12


def stretch(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    left_s = np.maximum(expected_remaining_s(table), 1.0)
    cpus = np.maximum(pieces.end * table.cpus[:, None], 1.0)
    need = np.log(cpus) - np.log(np.maximum(pieces.speed[:, 1:], _LEAST))
    # A job whose whole length is not known has at least what is left of it.
    total_s = np.maximum(np.where(np.isfinite(table.total_s), table.total_s, 0.0), left_s)
    late = np.log(np.maximum((table.age_s + left_s) / total_s, 1.0))
    rank = np.log(left_s) + (WIDTH_POWER - 1) * np.log(cpus[:, -1]) - STRETCH_POWER * late - np.log(table.weight)
    return fill_in_order(table, pool, pieces, need + rank[:, None])
