"""What the coordinator and the agents of a GPU's jobs tell each other while the jobs run. Pure.

Both are flat records of whole numbers, because they lie in pages of shared memory (`pages.py`). Times are nanoseconds
of CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

FULL_SHARE = 1000
NO_LIMIT = 2**62


class JobClass(enum.Enum):
    """What a job may expect of its GPU."""

    GUARANTEED = "guaranteed"
    OPPORTUNISTIC = "opportunistic"


class Verdict(enum.IntEnum):
    """Whether a job may use the GPU now."""

    PAUSE = 0  # no launch, wherever the job is
    FINISH = 1  # go on to the next boundary, or to `meet_at`, and pause there: memory is given back at boundaries
    RUN = 2


@dataclass(frozen=True)
class Order:
    """What one job is to do; the coordinator writes it, the job can only read it.

    Attributes:
        valid_until_ns: when it lapses. An opportunistic job pauses then, a guaranteed one is bound by nothing.
        verdict: of `Verdict`.
        limit_bytes: most memory of the GPU that the job may hold; `NO_LIMIT`: all that there is.
        share: of the time in which it may launch while the GPU is in use by others, in thousandths.
        open_until_ns: others leave the GPU idle, which may be used without regard to the share until then.
        idle_since_ns: since when they leave it idle; what the guaranteed job has begun since then closes it.
        meet_at: number of the boundary at which all processes of the job wait for each other: none begins another
            mini-batch there, and who has ended fewer goes on. 0: there is none.
    """

    valid_until_ns: int = 0
    verdict: int = Verdict.PAUSE
    limit_bytes: int = NO_LIMIT
    share: int = 0
    open_until_ns: int = 0
    idle_since_ns: int = 0
    meet_at: int = 0


@dataclass(frozen=True)
class Work:
    """That the guaranteed job has work for the GPU; its agent writes it, and the agents of the others read it.

    The coordinator says the same, a moment later: it has to wake up for it. What stands here can only end what an order
    allows, so whoever writes nonsense keeps others from a GPU that is his own. When it is his no more, nobody reads his
    page any longer.

    Attributes:
        since_ns: when it launched first after its last boundary.
    """

    since_ns: int = 0


@dataclass(frozen=True)
class Statistics:
    """What one job says of itself; its agent writes it.

    Attributes:
        updated_ns: when.
        boundaries: mini-batches that have ended.
        boundary_ns: when the last of them ended; 0: none has.
        mini_batch_ns: how long the last one took, from boundary to boundary.
        gap_ns: how long the GPU was idle after the boundary before it, until the first launch.
        is_idle: 1 from a boundary to the first launch after it.
        held_bytes: memory of the GPU that the process holds, cached or in use.
        peak_bytes: most that was in use in the last mini-batch, on the GPU and on the host together.
        host_bytes: most that the last mini-batch had on the host for want of memory of the GPU.
        host_capacity_bytes: memory of the host that may stand in; 0: none, so too low a limit would end the job.
        limit_bytes: the limit that the process keeps to.
        paused_ns: how long it was held up in all.
    """

    updated_ns: int = 0
    boundaries: int = 0
    boundary_ns: int = 0
    mini_batch_ns: int = 0
    gap_ns: int = 0
    is_idle: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0
    host_capacity_bytes: int = 0
    limit_bytes: int = NO_LIMIT
    paused_ns: int = 0
