"""How near a policy is to the best order of the jobs that are there: a search over orders, as a policy of its own.

It knows all present jobs to the end and no later one, as any policy. It starts from SRTF's order, and moves jobs while
that lowers the sum of their completion times. Tens of milliseconds a round: for comparison alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.policy.filling import fill_in_order, pieces_of
from hetstream.slurm_plugin.policy.policies import expected_remaining_s
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Pool

Floats = npt.NDArray[np.float64]
Order = npt.NDArray[np.intp]

# Jobs far behind in the order get nothing now, so their places among each other say nothing yet.
_LOOKED_AT, _FARTHEST, _MOST_TURNS = 12, 3, 3
_DONE, _LEAST_GAIN_S = 1e-6, 1.0


def best_order(table: JobTable, pool: Pool, now_s: float) -> Allocation:  # noqa: ARG001, the form of a policy
    """See the module."""
    pieces = pieces_of(table)
    most_cpus = np.maximum(pieces.end[:, -1] * table.cpus, 1.0).astype(float)
    left_s = np.maximum(expected_remaining_s(table), 1.0)
    work = left_s / np.maximum(pieces.speed[:, -1], 1e-12) * most_cpus
    order = np.argsort(work, kind="stable")
    least_s = _completion_s(order, work, most_cpus, pool.cpus)
    for _ in range(_MOST_TURNS):
        before_s = least_s
        for place in range(min(len(order) - 1, _LOOKED_AT)):
            for further in range(1, min(_FARTHEST, len(order) - 1 - place) + 1):
                moved = order.copy()
                moved[place : place + further], moved[place + further] = (
                    order[place + 1 : place + further + 1],
                    order[place],
                )
                found_s = _completion_s(moved, work, most_cpus, pool.cpus)
                if found_s < least_s - _LEAST_GAIN_S:
                    least_s, order = found_s, moved
        if least_s == before_s:
            break
    rank = np.empty(len(order))
    rank[order] = np.arange(len(order))
    return fill_in_order(table, pool, pieces, np.repeat(rank[:, None], pieces.count.shape[1], axis=1))


def _completion_s(order: Order, work: Floats, most_cpus: Floats, cpus: float) -> float:
    """The sum of the completion times if the jobs have CPUs in this order; work is in CPU seconds."""
    left, wanted = work[order].tolist(), most_cpus[order].tolist()
    now_s = total_s = 0.0
    while left:
        free, rates = float(cpus), []
        for want in wanted:
            rates.append(min(want, free))
            free -= rates[-1]
        ends_s = [amount / rate for amount, rate in zip(left, rates, strict=True) if rate > 0]
        if not ends_s:
            return float("inf")
        step_s = min(ends_s)
        now_s += step_s
        left = [amount - rate * step_s for amount, rate in zip(left, rates, strict=True)]
        goes_on = [amount > _DONE for amount in left]
        total_s += now_s * (len(left) - sum(goes_on))
        left = [amount for amount, more in zip(left, goes_on, strict=True) if more]
        wanted = [want for want, more in zip(wanted, goes_on, strict=True) if more]
    return total_s
