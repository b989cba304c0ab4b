"""The owner's look at who asks for its checkpoint directory; see `handover.py` for the whole of a migration.

Called by `FlashCheckpointer.should_save` after each step.
"""

from __future__ import annotations

import logging
import time

import msgspec

from checkpoint.directory import CheckpointDirectory
from checkpoint.faults import reach
from checkpoint.flash.distributed import Communicator, gather
from checkpoint.handover import Request, living_request, read_request
from checkpoint.ownership import Identity
from checkpoint.policy.handover import Asked, answer

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
# A look in steps is for ranks that cannot go by their clocks; steps may become slower.
_MAX_STEPS = 100


class _Look(msgspec.Struct, frozen=True):
    """What rank 0 has seen, for all ranks.

    Attributes:
        reason: why to stop; "" to go on.
        num_steps: until the next look.
    """

    reason: str = ""
    num_steps: int = 1


class Watch:
    """The owner's look at who asks for the directory: about once a second, the same answer on all ranks at each step.

    Several ranks look after the same steps, and the number of steps until the next look is part of the answer: one
    small exchange each time.

    Args:
        directory: which.
        ranks: that have to agree.

    Attributes:
        taker: to whom to hand over, on rank 0, once somebody asks.
        reason: why to stop, on every rank; "" while nobody asks.
    """

    def __init__(self, directory: CheckpointDirectory, ranks: Communicator) -> None:
        self.taker: Identity | None = None
        self.reason = ""
        self._directory = directory
        self._ranks = ranks
        self._look_s: float | None = None
        self._step = 0
        self._num_steps = 0
        self._said = ""

    def is_asked(self, step: int) -> bool:
        """Whether to hand over after this step. Every rank calls it after each step."""
        if self.reason:
            return True
        now_s = time.monotonic()
        if self._ranks.world_size == 1:
            if self._look_s is not None and now_s < self._look_s + _LOOK_S:
                return False
            self._look_s, self.reason = now_s, self._look()
            return bool(self.reason)
        if self._step <= step < self._step + self._num_steps:
            return False
        look = _Look()
        if self._ranks.rank == 0:
            look = _Look(self._look(), self._steps_until_next(step, now_s))
        look = gather(self._ranks, look)[0]
        self._look_s, self._step, self._num_steps, self.reason = now_s, step, look.num_steps, look.reason
        return bool(self.reason)

    def _steps_until_next(self, step: int, now_s: float) -> int:
        if self._look_s is None or step <= self._step:
            return 1
        step_s = (now_s - self._look_s) / (step - self._step)
        return max(1, min(_MAX_STEPS, round(_LOOK_S / step_s) if step_s > 0 else _MAX_STEPS))

    def _look(self) -> str:
        path = self._directory.path
        request: Request | None = read_request(path)
        if request is None:
            return ""
        is_live = living_request(path) is not None
        found = answer(self._directory.attempt, Asked(request.attempt, str(request.taker), is_live))
        if found.hands_over:
            reach("handover.heard")
            self.taker = request.taker
            _log.info("%s: the next save is the last one here: %s", path, found.reason)
            return found.reason
        if found.reason != self._said:
            self._said = found.reason
            _log.info("%s is not handed over: %s", path, found.reason)
        return ""
