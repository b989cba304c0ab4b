"""Hetstream's own: shortest remaining CPU work first, corrected by what a job's width, length and GPUs say.

SRTF orders jobs by remaining time x CPUs, which is nearly the best that any order does for the mean (`make bench-sched`
compares it with a search over orders). It leaves room in who pays for that, so four things correct it:

* Of two jobs with equal CPU work, one that needs fewer CPUs for longer is first: it takes little from the other, and
  cannot make up for lost time by more CPUs later. So CPUs count with an exponent above 1.
* A minute is more to a short job than to a long one: the whole length of a job counts beside what is left of it.
* A job that holds many GPUs is first: while it waits for data, they are held for nothing.
* A job that is late for its length (its stretch: the time from submission to where it could end, by the time that it
  needs alone) moves forward, so that no job pays for the mean of the others without bound.
"""

from __future__ import annotations

import numpy as np

from hetstream.slurm_plugin.policy.curves import pieces_of
from hetstream.slurm_plugin.policy.filling import fill_in_order
from hetstream.slurm_plugin.policy.srtf import expected_remaining_s
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Pool

# Exponents, and the stretch from which on a job is late. Chosen from 130 random settings on lists of 88, 130 and 150
# jobs from seeds 1000 to 1059 of `make bench-sched`'s generator, and checked on seeds from 3000 on. The mean completion
# time is SRTF's, more of the GPUs are effective, and in a full cluster the greatest slowdown is below SRTF's.
WIDTH_POWER, LENGTH_POWER, GPU_POWER = 1.5, 0.2, 0.4
LATE_POWER, LATE_FROM = 1.5, 2.5
_LEAST = 1e-12


def stretch(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    left_s = np.maximum(expected_remaining_s(table), 1.0)
    cpus = np.maximum(pieces.end * table.cpus[:, None], 1.0)
    need = np.log(cpus) - np.log(np.maximum(pieces.speed[:, 1:], _LEAST))
    # A job whose whole length is not known has at least what is left of it.
    total_s = np.maximum(np.where(np.isfinite(table.total_s), table.total_s, 0.0), left_s)
    late = np.log(np.maximum((table.age_s + left_s) / (total_s * LATE_FROM), 1.0))
    rank = np.log(left_s) + LENGTH_POWER * np.log(total_s) + (WIDTH_POWER - 1) * np.log(cpus[:, -1])
    rank -= GPU_POWER * np.log(np.maximum(table.gpus, 1.0)) + LATE_POWER * late + np.log(table.weight)
    return fill_in_order(table, pool, pieces, need + rank[:, None])
