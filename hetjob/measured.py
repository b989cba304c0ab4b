"""What a job has measured of itself, for the site daemon's policies: a part of `ReportDemand` since version 2. Pure.

Made by the job master (`hetjob/elastic/step_terms.py`), read by the daemon. What is not known is None or empty: nothing
is guessed on this side.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
# No step takes 30 years. Ratios of what is far below are no numbers any more.
MOST = 1e15
_Positive = Annotated[float, msgspec.Meta(ge=1e-9, le=MOST)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0, le=MOST)]

MAX_POINTS = 16

# Who says how much work is left, the best first.
RemainingSource = Literal["directive", "loader", "integration", "history", "time_limit"]


class SpeedPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measurement.

    Attributes:
        cpus: of each data worker.
        workers: how many there were; 0 is the job's own loading.
        steps_per_s: that they could make for all trainers together, if nobody else held them up.
    """

    cpus: Annotated[int, msgspec.Meta(ge=1, le=100_000)]
    workers: _Count
    steps_per_s: _NotNegative


class RemainingWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much is left to do.

    Attributes:
        steps: until the job's end, as the median of what is expected.
        total_steps: of the whole job; None where not known.
        sigma: of the logarithm of `steps`: 0 for a number that the user gave.
        source: who says so.
    """

    steps: _NotNegative
    sigma: Annotated[float, msgspec.Meta(ge=0, le=10)]
    source: RemainingSource
    total_steps: _Positive | None = None


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a job has measured.

    Attributes:
        steps_per_s: taken by the trainers now.
        ideal_steps_per_s: that they would take if they never waited for data.
        points: speeds by size and number of data workers, at most `MAX_POINTS`.
        step_bytes: of a step on its way from data workers to trainers.
        gpus: that the trainers use.
        worker_memory_mb: that one data worker is submitted with.
        remaining: None where nothing says how much is left.
    """

    steps_per_s: _NotNegative
    ideal_steps_per_s: _Positive
    points: Annotated[tuple[SpeedPoint, ...], msgspec.Meta(max_length=MAX_POINTS)] = ()
    step_bytes: _NotNegative | None = None
    gpus: _Count = 0
    worker_memory_mb: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] | None = None
    remaining: RemainingWork | None = None
