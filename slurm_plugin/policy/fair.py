"""GoldMiner's Fair: all jobs at one speed, as a share of the speed that each would have if it never waited for data.

Water-filling: each data worker goes to the job with the lowest speed for its weight. It believes what jobs measure.
"""

from __future__ import annotations

import numpy as np

from hetstream.slurm_plugin.policy.curves import pieces_of
from hetstream.slurm_plugin.policy.filling import fill_to_level, with_reasons
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Pool


def fair(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    knots = np.cumsum(np.concatenate([table.minimum[:, None], pieces.count], axis=1), axis=1)
    level = pieces.speed / table.weight[:, None]
    return with_reasons(table, pool, pieces, fill_to_level(table, pool, knots, level))
