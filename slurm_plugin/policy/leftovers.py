"""What nobody wants stays with those that have it: the end of a job's wish is no reason to drain its data workers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetstream.slurm_plugin.policy.filling import fill_to_level
from hetstream.slurm_plugin.policy.reasons import Reason
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Policy, Pool


def with_leftovers(policy: Policy) -> Policy:
    """The policy, after which jobs keep what they have, as far as CPUs are left; the least for its weight first."""

    def kept(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        found = policy(table, pool, now_s)
        top = np.maximum(np.minimum(table.current, table.cap), found.workers)
        knots = np.stack([np.zeros_like(top), top], axis=1).astype(np.float64)
        levels = knots * (table.cpus / (table.weight * np.maximum(table.gpus, 1.0)))[:, None]
        workers = fill_to_level(replace(table, minimum=found.workers), pool, top, knots, levels)
        reasons = np.where(workers > found.workers, Reason.KEPT, found.reasons).astype(np.int8)
        return Allocation(workers, reasons)

    return kept
