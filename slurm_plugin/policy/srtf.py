"""GoldMiner's SRTF: the job whose remaining work needs the least CPU time comes first.

The cost of a piece is remaining work x CPUs / speed at its end. A job whose remaining work is not known counts as the
median of the others, which one wrong estimate does not move. One whose estimate is uncertain counts as long as it is on
average, which is longer than its median.
"""

from __future__ import annotations

import numpy as np

from hetstream.slurm_plugin.policy.curves import pieces_of
from hetstream.slurm_plugin.policy.filling import fill_in_order
from hetstream.slurm_plugin.policy.table import Allocation, Floats, JobTable, Pool

# Beyond this the mean of a log-normal is all tail: an estimate that says nothing counts 7 times its median.
_LARGEST_SIGMA = 2.0


def srtf(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    cost = pieces.end * table.cpus[:, None] / np.maximum(pieces.speed[:, 1:], 1e-12)
    return fill_in_order(table, pool, pieces, cost * (expected_remaining_s(table) / table.weight)[:, None])


def expected_remaining_s(table: JobTable) -> Floats:
    """Work left on average, in seconds at speed 1."""
    mean = table.remaining_s * np.exp(np.minimum(table.remaining_sigma, _LARGEST_SIGMA) ** 2 / 2)
    is_known = np.isfinite(mean)
    usual_s = float(np.median(mean[is_known])) if is_known.any() else 1.0
    return np.where(is_known, np.maximum(mean, 0.0), usual_s)
