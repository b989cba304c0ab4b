"""What must be true of any table and any allocation, whoever wrote the policy. Raised at the edge, never repaired."""

from __future__ import annotations

import numpy as np

from hetstream.slurm_plugin.errors import PolicyError
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Policy, Pool

# Of a speed; measured curves come as floats.
_ROUNDING = 1e-6


def check_table(table: JobTable) -> None:
    """Refuse a table that no policy is written for.

    Raises:
        PolicyError: all that is wrong with it, with the first job of each kind.
    """
    width, rise = np.diff(table.curve_cpus, axis=1), np.diff(table.curve_speed, axis=1)
    slope = np.divide(rise, width, out=np.zeros_like(rise), where=width > 0)
    curve = np.concatenate([table.curve_cpus, table.curve_speed], axis=1)
    _refuse(
        table,
        {
            "its id is not above the one before": np.diff(table.job_id, prepend=-1) <= 0,
            "its data workers have no CPUs": table.cpus < 1,
            "its minimum is negative or above what it wants": (table.minimum < 0) | (table.minimum > table.wanted),
            "its weight is not above 0": ~((table.weight > 0) & np.isfinite(table.weight)),
            "its curve is not finite": ~np.isfinite(curve).all(axis=1),
            "its curve does not begin at 0 CPUs": table.curve_cpus[:, 0] != 0,
            "its curve falls or goes back": ((width < 0) | (rise < 0) | ((width == 0) & (rise > 0))).any(axis=1),
            "its curve is not concave": _rises_again(slope, width),
            "its remaining work is negative": table.remaining_s < 0,
        },
    )


def checked(policy: Policy) -> Policy:
    """The policy, whose every answer is checked."""

    def careful(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        found = policy(table, pool, now_s)
        check_allocation(table, pool, found)
        return found

    return careful


def check_allocation(table: JobTable, pool: Pool, found: Allocation) -> None:
    """Refuse an allocation that gives a CPU twice, or a job what it must not have.

    Raises:
        PolicyError: all that is wrong with it.
    """
    shape = (len(table),)
    if found.workers.shape != shape or found.workers.dtype != np.int64 or found.reasons.shape != shape:
        raise PolicyError(
            f"a policy answers {found.workers.dtype}{list(found.workers.shape)} data workers and "
            f"{list(found.reasons.shape)} reasons for {len(table)} job(s): must be one int64 and one reason a job"
        )
    used, least = int((found.workers * table.cpus).sum()), int((table.minimum * table.cpus).sum())
    if used > max(pool.cpus, least):
        raise PolicyError(f"a policy gives out {used} CPUs: the pool has {pool.cpus}, the minimums of all need {least}")
    most = np.maximum(np.maximum(np.minimum(table.wanted, table.cap), table.current), table.minimum)
    _refuse(
        table,
        {
            "it is given less than its minimum": found.workers < table.minimum,
            "it is given more than it wants and has": found.workers > most,
        },
    )


def _rises_again(
    slope: np.ndarray[tuple[int, int], np.dtype[np.float64]], width: np.ndarray[tuple[int, int], np.dtype[np.float64]]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether a piece is steeper than one before it."""
    least = np.minimum.accumulate(np.where(width > 0, slope, np.inf), axis=1)
    is_steeper = (width > 0) & (slope > least + _ROUNDING / np.maximum(width, 1.0))
    return np.asarray(is_steeper.any(axis=1))


def _refuse(table: JobTable, problems: dict[str, np.ndarray[tuple[int], np.dtype[np.bool_]]]) -> None:
    said = [
        f"job {int(table.job_id[rows[0]])}: {what}" + (f" (and {len(rows) - 1} more)" if len(rows) > 1 else "")
        for what, is_so in problems.items()
        if len(rows := np.flatnonzero(is_so))
    ]
    if said:
        raise PolicyError("; ".join(said))
