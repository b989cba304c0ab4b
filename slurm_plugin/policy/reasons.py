"""Why a job has as many data workers as it has: a code a row, and words for one row when somebody asks."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Pool


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
    """The reason of one row in words, for its user and for the admin."""
    workers, minimum, wanted, cpus = (
        int(column[row]) for column in (allocation.workers, table.minimum, table.wanted, table.cpus)
    )
    sharing = f"{pool.cpus} CPUs are shared by {len(table)} job(s)"
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
