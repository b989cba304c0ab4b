"""DLRover-RM's weighted selection, as upgrades: RE x WG, gain for its cost times a weight for jobs that end soon.

RE is speed (once for each GPU) for each CPU; WG is 1 / (time that is left + 1 s)^rho, with the time that is left if the
job has all that makes it faster. What is maximised is the sum of gain x WG over all jobs: with data workers of one size
it is the greatest, with several at least half of that. It is not the paper's equation 12 as printed, the sum of
gain / cost x WG of one plan for each job, which favours plans of a single CPU: of that the result is seldom the
greatest, and some four fifths on average in the small cases that a test enumerates.
"""

from __future__ import annotations

import numpy as np

from hetstream.slurm_plugin.policy.curves import pieces_of
from hetstream.slurm_plugin.policy.filling import fill_by_gain
from hetstream.slurm_plugin.policy.srtf import expected_remaining_s
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Pool

# The paper's: a large one favours short jobs, with 0 all count alike.
RHO = 2.5
_EPSILON_S = 1.0


def dlrover(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    best_speed = np.maximum(pieces.speed[:, -1], 1e-12)
    # Logarithms: the ratio of the greatest and the least weight has more digits than a float.
    weight = -RHO * np.log(expected_remaining_s(table) / best_speed + _EPSILON_S) + np.log(table.weight)
    gain = np.log(np.maximum(pieces.slope, 1e-300)) + np.log(np.maximum(table.gpus, 1.0))[:, None]
    return fill_by_gain(table, pool, pieces, gain + weight[:, None])
