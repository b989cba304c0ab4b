"""What a policy is told, and what it answers: a table of jobs, a pool of CPUs, and a number of data workers a job.

One row a job, in ascending order of job ids: so equal input gives equal output, and ties go to the lower id. Columns
are NumPy arrays; there is no object for a job. Used by the policies, the daemon and the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from hetstream.base.text import count_words
from hetstream.slurm_plugin.errors import PolicyError

# Why a job has as many data workers as it has: a code a row, and words for one row when somebody asks.


class Reason(IntEnum):
    """Kept in stores and logs by number: a number is never given a new meaning."""

    SHARED = 0
    """What its share comes to."""
    MINIMUM = 1
    """Nothing beyond its minimum fits its share."""
    ALL_WANTED = 2
    """All that it wants."""
    SATURATED = 3
    """More would not make it faster, as it has measured."""
    NO_NEED = 4
    """It is as fast without data workers."""
    JOB_CAP = 5
    """A limit of the job itself, or what nodes have room for."""
    USER_CAP = 6
    """The limit of its user's data workers."""
    TENANT_CAP = 7
    """The limit of its tenant's data workers."""
    FLOOR = 8
    """What keeps it above the floor of speed."""
    STEADY = 9
    """Another number would not pay for the move."""
    KEPT = 10
    """More than it wants, but nobody else wants them."""
    FROZEN = 11
    """What is known of its speed is too old to change anything."""
    MACHINE_RATIO = 12
    """Nothing has been known of its speed for long: as many CPUs for its GPUs as machines have."""


def explain(table: JobTable, pool: Pool, allocation: Allocation, row: int) -> str:
    """Return the reason of one row in words, for its user and for the admin."""
    workers, minimum, wanted, cpus = (
        int(column[row]) for column in (allocation.workers, table.minimum, table.wanted, table.cpus)
    )
    sharing = f"{pool.cpus} CPUs are shared by {count_words(len(table), 'job')}"
    match Reason(int(allocation.reasons[row])):
        case Reason.SHARED:
            weight = table.weight[row] * max(table.gpus[row], 1.0)
            return f"{workers} of {wanted}: {sharing}, its weight is {weight:g}"
        case Reason.MINIMUM:
            return f"its minimum {minimum} of {wanted}: {sharing}, and no more of {cpus} CPUs fit its share"
        case Reason.ALL_WANTED:
            return f"all that it wants: {wanted}"
        case Reason.SATURATED:
            return f"{workers} of {wanted}: more would not make it faster, as it has measured"
        case Reason.NO_NEED:
            return "none: it is as fast without data workers, as it has measured"
        case Reason.JOB_CAP:
            return (
                f"{workers} of {wanted}: nodes have room for {int(table.cap[row])} of its data workers of {cpus} CPUs"
            )
        case Reason.USER_CAP:
            return (
                f"{workers} of {wanted}: its user may have {_cap(pool.user_caps, table.user[row])} CPUs of data workers"
            )
        case Reason.TENANT_CAP:
            cap = _cap(pool.tenant_caps, table.tenant[row])
            return f"{workers} of {wanted}: its tenant may have {cap} CPUs of data workers"
        case Reason.FLOOR:
            return f"{workers} of {wanted}: what keeps it above the least speed of every job; {sharing}"
        case Reason.STEADY:
            return f"it keeps {workers} of {wanted}: another number would not pay for starting and draining"
        case Reason.KEPT:
            return f"it wants {wanted} and keeps {workers}: nobody wants their CPUs"
        case Reason.FROZEN:
            return f"it keeps {workers}: its last measurement is {table.stale_s[row]:.0f} s old"
        case Reason.MACHINE_RATIO:
            return (
                f"{workers} of {wanted}: its last measurement is {table.stale_s[row]:.0f} s old, so it counts by the "
                "machines' own number of CPUs for each GPU"
            )


def _cap(caps: object, code: object) -> int:
    return int(caps[int(code)]) if caps is not None else 0  # type: ignore[index,call-overload]


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int8]

# More data workers or CPUs than any cluster has, and small enough that products of two stay within 64 bits.
NO_CAP = 1 << 31


@dataclass(frozen=True, eq=False)
class JobTable:
    """The jobs among which data workers are divided; make one with `job_table`.

    Attributes:
        job_id: ascending, without doubles.
        minimum: data workers that a job has in any case; no policy goes below.
        wanted: data workers that it would have if nobody else wanted any, at least `minimum`.
        current: data workers that it has now.
        cpus: of each of its data workers, at least 1.
        cap: data workers at most, by a limit of the job itself; `NO_CAP` for none. The minimum stays.
        gpus: of its trainers.
        weight: above 0; a job of twice the weight has a right to twice as much.
        curve_cpus: (jobs, points): CPUs of data workers, ascending from 0; rows are padded with their last value.
        curve_speed: (jobs, points): speed with so many, as a share of the speed of a trainer that never waits for data.
            Concave; padded like `curve_cpus`.
        remaining_s: work left, as seconds at speed 1; NaN where not known.
        remaining_sigma: of the logarithm of that estimate; 0 where it is exact.
        total_s: all work of the job, as seconds at speed 1; NaN where not known.
        age_s: since the job was submitted.
        starved_s: for how long it has been below the floor of speed without a break.
        held_s: since its number of data workers was last changed; infinite if it never was.
        stale_s: age of what is known of its speed.
        tenant: code of its tenant (Slurm's account); an index of `Pool.tenant_caps`.
        user: code of its user; an index of `Pool.user_caps`.
    """

    job_id: Ints
    minimum: Ints
    wanted: Ints
    current: Ints
    cpus: Ints
    cap: Ints
    gpus: Floats
    weight: Floats
    curve_cpus: Floats
    curve_speed: Floats
    remaining_s: Floats
    remaining_sigma: Floats
    total_s: Floats
    age_s: Floats
    starved_s: Floats
    held_s: Floats
    stale_s: Floats
    tenant: Ints
    user: Ints

    def __len__(self) -> int:
        return len(self.job_id)

    def rows(self, chosen: npt.NDArray[Any]) -> JobTable:
        """Return the table of these rows alone.

        Args:
            chosen: a mask, or ascending numbers of rows.
        """
        return JobTable(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


@dataclass(frozen=True, eq=False)
class Pool:
    """What is divided.

    Attributes:
        cpus: on which data workers of these jobs run, or could run now.
        tenant_caps: CPUs of data workers at most, by code of the tenant; codes beyond its end have no cap.
        user_caps: the same by code of the user.
    """

    cpus: int
    tenant_caps: Ints | None = None
    user_caps: Ints | None = None


@dataclass(frozen=True, eq=False)
class Allocation:
    """What the jobs may have.

    Attributes:
        workers: data workers of each row, the minimum among them.
        reasons: why, as `Reason`; `explain` has the words.
    """

    workers: Ints
    reasons: Codes


# (jobs, pool, now in seconds since the epoch) -> allocation. Pure: the same input gives the same bytes.
Policy = Callable[[JobTable, Pool, float], Allocation]

_DEFAULTS: dict[str, float] = {
    "minimum": 0,
    "current": 0,
    "cpus": 1,
    "cap": NO_CAP,
    "gpus": 1.0,
    "weight": 1.0,
    "remaining_s": np.nan,
    "remaining_sigma": 0.0,
    "total_s": np.nan,
    "age_s": 0.0,
    "starved_s": 0.0,
    "held_s": np.inf,
    "stale_s": 0.0,
    "tenant": 0,
    "user": 0,
}
_INTS = frozenset({"job_id", "minimum", "wanted", "current", "cpus", "cap", "tenant", "user"})


def job_table(job_id: npt.ArrayLike, wanted: npt.ArrayLike, **columns: npt.ArrayLike) -> JobTable:
    """Return a table of jobs in any order, with the usual values for what is left out.

    Without a curve, speed grows in proportion to the CPUs and is 1 with all that a job wants.

    Args:
        job_id: without doubles.
        wanted: see `JobTable`.
        **columns: any others of `JobTable`, one value a job or one for all.
    """
    ids = np.asarray(job_id, np.int64)
    order = np.argsort(ids, kind="stable")
    given: dict[str, npt.ArrayLike] = {**_DEFAULTS, **columns, "job_id": ids, "wanted": wanted}
    made: dict[str, npt.NDArray[Any]] = {}
    for field in fields(JobTable):
        if field.name.startswith("curve_"):
            continue
        kind = np.int64 if field.name in _INTS else np.float64
        made[field.name] = np.ascontiguousarray(np.broadcast_to(np.asarray(given[field.name], kind), ids.shape)[order])
    if "curve_cpus" in given:
        for name in ("curve_cpus", "curve_speed"):
            curve = np.atleast_2d(np.asarray(given[name], np.float64))
            made[name] = np.ascontiguousarray(np.broadcast_to(curve, (len(ids), curve.shape[1]))[order])
    else:
        made["curve_cpus"] = np.stack([np.zeros(len(ids)), (made["wanted"] * made["cpus"]).astype(np.float64)], axis=1)
        made["curve_speed"] = np.broadcast_to(np.array([0.0, 1.0]), (len(ids), 2)).copy()
    for name in ("curve_cpus", "curve_speed", "cpus"):
        made[name].setflags(write=False)  # so that what is made of them can be kept
    return JobTable(**made)


def allocation(workers: Ints, reasons: npt.ArrayLike = Reason.SHARED) -> Allocation:
    """Return an allocation with one reason for all rows, or one for each."""
    return Allocation(workers, np.broadcast_to(np.asarray(reasons, np.int8), workers.shape).copy())


# What must be true of any table and any allocation, whoever wrote the policy. Raised at the edge, never repaired.

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
    """Return the policy, whose every answer is checked."""

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
            f"{list(found.reasons.shape)} reasons for {count_words(len(table), 'job')}: must be one int64 and one "
            "reason a job"
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
