"""What a policy is told, and what it answers: a table of jobs, a pool of CPUs, and a number of data workers a job.

One row a job, in ascending order of job ids: so equal input gives equal output, and ties go to the lower id. Columns
are NumPy arrays; there is no object for a job. Used by the policies, the daemon and the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.policy.reasons import Reason

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
        """The table of these rows alone.

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
        reasons: why, as `Reason`; `reasons.explain` has the words.
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
    """A table of jobs in any order, with the usual values for what is left out.

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
    """An allocation with one reason for all rows, or one for each."""
    return Allocation(workers, np.broadcast_to(np.asarray(reasons, np.int8), workers.shape).copy())
