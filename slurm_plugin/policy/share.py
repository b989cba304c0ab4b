"""Weighted max-min fairness of CPUs: the next data worker goes to the job with the fewest CPUs for its weight.

The weight counts once for each GPU. The daemon's own choice where an admin makes none: nothing that a job says of its
speed gives it a right to more, so it needs no trust and no measurement.
"""

from __future__ import annotations

import numpy as np

from hetstream.slurm_plugin.policy.curves import pieces_of, saturation_of
from hetstream.slurm_plugin.policy.filling import fill_to_level, with_reasons
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Pool


def share(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    top = saturation_of(table, pieces)
    knots = np.stack([np.zeros_like(top), top], axis=1).astype(np.float64)
    levels = knots * (table.cpus / (table.weight * np.maximum(table.gpus, 1.0)))[:, None]
    return with_reasons(table, pool, pieces, fill_to_level(table, pool, top, knots, levels))
