"""What to do with jobs of whose speed nothing has been heard for a while: leave them as they are, and then guess.

A frozen job keeps what it has, as far as the pool goes: neither a policy nor a broken measurement moves it. After a
longer time it counts as one that needs as many CPUs for a GPU as the site's machines have.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetstream.slurm_plugin.policy.filling import take
from hetstream.slurm_plugin.policy.reasons import Reason
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Policy, Pool

FREEZE_AFTER_S = 300.0
FALL_BACK_AFTER_S = 3600.0
# Of the machines of the published traces 8 to 12.
MACHINE_CPUS_PER_GPU = 8.0


def with_staleness(
    policy: Policy,
    freeze_after_s: float = FREEZE_AFTER_S,
    fall_back_after_s: float = FALL_BACK_AFTER_S,
    cpus_per_gpu: float = MACHINE_CPUS_PER_GPU,
) -> Policy:
    """The policy, for the jobs of which something is known.

    Args:
        policy: divides.
        freeze_after_s: what is known is older: the job stays as it is.
        fall_back_after_s: older still: the machine's ratio.
        cpus_per_gpu: of the site's machines.
    """

    def patient(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        is_old = table.stale_s >= freeze_after_s
        if not is_old.any():
            return policy(table, pool, now_s)
        is_lost = table.stale_s >= fall_back_after_s
        is_frozen = is_old & ~is_lost
        guessed = _by_ratio(table, is_lost, cpus_per_gpu)
        extra = np.where(is_frozen, np.maximum(table.current - table.minimum, 0), 0)
        kept = take(extra, table.cpus, pool.cpus - int((table.minimum * table.cpus).sum()))
        frozen = guessed.minimum + kept
        guessed = replace(
            guessed,
            minimum=frozen,
            wanted=np.where(is_frozen, frozen, guessed.wanted),
        )
        found = policy(guessed, pool, now_s)
        reasons = np.select([is_frozen, is_lost], [Reason.FROZEN, Reason.MACHINE_RATIO], found.reasons)
        return Allocation(found.workers, reasons.astype(np.int8))

    return patient


def _by_ratio(table: JobTable, is_lost: np.ndarray[tuple[int], np.dtype[np.bool_]], cpus_per_gpu: float) -> JobTable:
    knee = cpus_per_gpu * np.maximum(table.gpus, 1.0)
    wanted = np.maximum(np.minimum(table.wanted, np.ceil(knee / table.cpus).astype(np.int64)), table.minimum)
    cpus, speed = table.curve_cpus.copy(), table.curve_speed.copy()
    cpus[is_lost, 1:], speed[is_lost, 1:] = knee[is_lost, None], 1.0
    cpus[is_lost, 0], speed[is_lost, 0] = 0.0, 0.0
    return replace(table, wanted=np.where(is_lost, wanted, table.wanted), curve_cpus=cpus, curve_speed=speed)
