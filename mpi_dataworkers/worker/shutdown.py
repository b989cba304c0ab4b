"""How a data worker ends within 2 s of SIGTERM or Ctrl-C, whatever its user code and its peers do. Pure.

It is one budget: `supervisor.py` notes once when it was told to end, and hands that to its processes
(`watch.WorkPage`). Each wait of `worker.py` ends at a time that follows from it, so waits are never added up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# User code may finish the step that it is at; what takes longer is killed, and made again elsewhere.
_USER_CODE_S = 1.0
# Batches may leave for loaders until here. A process that still waits for one says goodbye to the dispatcher now.
_BATCHES_S = 1.5
# And messages for the dispatcher.
_MESSAGES_S = 1.7
# What is left is killed; the rest of the 2 s is for the kernel, and for the end of the supervisor.
_GONE_S = 1.8


@dataclass(frozen=True)
class ShutdownDeadlines:
    """Times by which a data worker is done with one thing after the other, on the monotonic clock, s.

    Attributes:
        told_at: when it was told to end; infinity, and so are the others, until it is.
    """

    told_at: float = math.inf

    @property
    def batches_by(self) -> float:
        """Batches have left for the loaders."""
        return self.told_at + _BATCHES_S

    @property
    def messages_by(self) -> float:
        """Messages have left for the dispatcher."""
        return self.told_at + _MESSAGES_S

    def is_overdue(self, now: float, runs_user_code: bool) -> bool:
        """Whether a process is to be killed."""
        return now >= self.told_at + (_USER_CODE_S if runs_user_code else _GONE_S)

    def next_look_s(self, now: float, most_s: float) -> float:
        """How soon to ask again, at most `most_s`."""
        due = (self.told_at + after_s - now for after_s in (_USER_CODE_S, _GONE_S))
        return min([most_s, *(left_s for left_s in due if left_s > 0)])
