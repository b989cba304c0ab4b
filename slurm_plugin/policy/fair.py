"""GoldMiner's Fair: all jobs at one speed, as a share of the speed that each would have if it never waited for data.

Water-filling: each data worker goes to the job with the lowest speed for its weight. The lowest of all speeds is the
greatest that there can be. Where not all can have a data worker, those with the smallest come first, so that as many as
can be are raised. Above the lowest, the speeds are near the best (leximin) and not always the best. It believes what
jobs measure.
"""

from __future__ import annotations

import numpy as np

from hetstream.slurm_plugin.policy.curves import pieces_of, saturation_of
from hetstream.slurm_plugin.policy.filling import fill_to_level, with_reasons
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Pool


def fair(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    top = saturation_of(table, pieces)
    # Speed grows with the CPUs, so a curve that is cut at its ends is cut at their speeds.
    knots = np.clip(table.curve_cpus / table.cpus[:, None], table.minimum[:, None], top[:, None])
    speed = np.clip(table.curve_speed, pieces.speed[:, :1], pieces.speed[:, -1:])
    return with_reasons(table, pool, pieces, fill_to_level(table, pool, top, knots, speed / table.weight[:, None]))
