"""What the elastic controller has found out, for the next job master of the same job: one that was killed. Pure data.

Made and taken by `controller.py`, kept by `hetstream.hetjob.master.controller_state_file`. Without it a controller that
finds companions could not measure local loading any more, and would never know that they do not pay.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hetstream.hetjob.elastic.tuning import LocalLoading, SizeProgress


class Stage(Enum):
    """What the controller is finding out."""

    BASELINE = "measuring local loading"
    LOCAL = "loading locally"
    SIZE = "finding the size of a data worker"
    COUNT = "finding the number of data workers"


@dataclass(frozen=True, slots=True)
class ControllerState:
    """What was found out. Times are on the host's monotonic clock, which goes on when a process ends.

    Attributes:
        stage: see the drawing in `controller.py`.
        local: what local loading was seen to cost; None if it was not measured.
        size: of a data worker, as far as it was searched; None before that.
        changed_at: when companions were last submitted, drained or cancelled; None if never.
        retry_at: what did not pay is not tried again before.
        ceiling: data workers beyond which more did not pay; None if that was not seen.
        num_disappointments: how often something did not pay.
    """

    stage: Stage = Stage.BASELINE
    local: LocalLoading | None = None
    size: SizeProgress | None = None
    changed_at: float | None = None
    retry_at: float = 0.0
    ceiling: int | None = None
    num_disappointments: int = 0
