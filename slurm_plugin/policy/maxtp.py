"""GoldMiner's MaxTP: the greatest sum of speeds. Each CPU goes where it brings most; a job counts once for each GPU."""

from __future__ import annotations

from hetstream.slurm_plugin.policy.curves import pieces_of
from hetstream.slurm_plugin.policy.filling import fill_in_order
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Pool


def maxtp(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    return fill_in_order(table, pool, pieces, -pieces.slope * (table.gpus * table.weight)[:, None])
