"""GoldMiner's MaxTP: a great sum of speeds. Each CPU goes where it brings most; a job counts once for each GPU.

The sum is the greatest where all data workers have one size. With several it may not be: what is left over after the
best ones may be too small for the next. It is never below half of the greatest, and 98 % of it on average over the
instances of `tests/slurm_plugin/policy/test_packing.py`, which are compared with all allocations.
"""

from __future__ import annotations

import numpy as np

from hetstream.slurm_plugin.policy.curves import pieces_of
from hetstream.slurm_plugin.policy.filling import fill_by_gain
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Pool


def maxtp(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    gain = pieces.slope * (table.gpus * table.weight)[:, None]
    return fill_by_gain(table, pool, pieces, np.log(np.maximum(gain, 1e-300)))
