"""Limits of a user's and of a tenant's data workers, in CPUs, under any policy.

A group that the policy would give more than its cap is divided by the same policy within its cap; what it leaves goes
to the others. A cap holds at every moment: a job of a capped group grows only as far as what its group still holds
leaves room. Minimums stay: they are parts of jobs that run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from hetstream.slurm_plugin.policy.filling import take
from hetstream.slurm_plugin.policy.reasons import Reason
from hetstream.slurm_plugin.policy.table import NO_CAP, Allocation, Codes, Ints, JobTable, Policy, Pool

# Stands for every user, or every tenant, that has no cap of its own.
EVERYBODY = "*"
# What one group leaves may bring the next above its cap; after so many rounds all that could come there are capped.
_MAX_ROUNDS = 4


def caps_of(names: Iterable[str], caps: Mapping[str, int]) -> Ints | None:
    """The caps of groups in the order of their codes; None if there are none at all.

    Args:
        names: of the groups.
        caps: in CPUs, by name; `EVERYBODY` for those that are not named.
    """
    if not caps:
        return None
    return np.array([caps.get(name, caps.get(EVERYBODY, NO_CAP)) for name in names], np.int64)


def with_caps(policy: Policy) -> Policy:
    """The policy within `Pool.user_caps` and `Pool.tenant_caps`."""

    def capped(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        caps = ((table.user, pool.user_caps, Reason.USER_CAP), (table.tenant, pool.tenant_caps, Reason.TENANT_CAP))
        if pool.user_caps is None and pool.tenant_caps is None:
            return policy(table, pool, now_s)
        limited, why = table, np.full(len(table), -1, np.int8)
        found = policy(table, pool, now_s)
        for turn in range(_MAX_ROUNDS + 1):
            is_changed = False
            for group, cap, reason in caps:
                size = found.workers if turn < _MAX_ROUNDS else np.minimum(limited.wanted, limited.cap)
                for code in _over(group, cap, np.maximum(size, 0) * table.cpus, found.workers > table.minimum):
                    limited = _within(policy, limited, group == code, int(cap[code]), now_s, why, reason)  # type: ignore[index]
                    is_changed = True
            if not is_changed:
                break
            found = policy(limited, pool, now_s)
        workers = found.workers.copy()
        for group, cap, reason in caps:
            _hold_back(table, workers, group, cap, why, reason)
        is_limit = (limited.cap < table.cap) & (found.workers >= limited.cap)
        is_capped = (why >= 0) & (is_limit | (workers < found.workers))
        return Allocation(workers, np.where(is_capped, why, found.reasons).astype(np.int8))

    return capped


def _over(group: Ints, cap: Ints | None, cpus: Ints, counts: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[int]:
    """Codes of the groups above their caps, as far as any of their jobs has more than its minimum."""
    if cap is None or not len(group):
        return []
    caps = np.full(max(len(cap), int(group.max()) + 1), NO_CAP * NO_CAP, np.int64)
    caps[: len(cap)] = np.where(cap < NO_CAP, cap, NO_CAP * NO_CAP)
    used = np.bincount(group, weights=cpus, minlength=len(caps))
    movable = np.bincount(group, weights=counts, minlength=len(caps)) > 0
    return [int(code) for code in np.flatnonzero((used > caps) & movable)]


def _within(
    policy: Policy,
    table: JobTable,
    members: np.ndarray[tuple[int], np.dtype[np.bool_]],
    cap: int,
    now_s: float,
    why: Codes,
    reason: Reason,
) -> JobTable:
    """The table in which these jobs may have what the policy gives them of their cap alone."""
    own = policy(table.rows(members), Pool(cap), now_s).workers
    caps = table.cap.copy()
    caps[members] = np.minimum(caps[members], own)
    why[members] = reason
    return replace(table, cap=caps)


def _hold_back(table: JobTable, workers: Ints, group: Ints, cap: Ints | None, why: Codes, reason: Reason) -> None:
    """Let nobody grow into what others of his group have not given back yet. Changes `workers` and `why`."""
    held = np.maximum(table.current, table.minimum)
    grown = np.maximum(workers, held) * table.cpus
    for code in _over(group, cap, grown, workers > held):
        members = np.flatnonzero((group == code) & (workers > held))
        room = int(cap[code]) - int((held * table.cpus)[group == code].sum())  # type: ignore[index]
        more = take((workers - held)[members], table.cpus[members], room)
        why[members] = np.where(more < (workers - held)[members], reason, why[members])
        workers[members] = held[members] + more
