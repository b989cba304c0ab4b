"""The look of all ranks whether to end: for a job that goes on in place of this one, or because a rank was asked to.

Called by `FlashCheckpointer.should_save` after each step. A signal, or the word of a host's checkpoint writer, reaches
ranks at different steps, and a rank that leaves alone would leave the others in a collective operation for ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.handover_request import Request, living_request, read_request
from hetstream.checkpoint.disk.ownership import Identity
from hetstream.checkpoint.faults import reach
from hetstream.checkpoint.flash.distributed import Communicator, gather
from hetstream.checkpoint.policy.handover import Asked, answer

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
# A look in steps is for ranks that cannot go by their clocks; steps may become slower.
_MAX_STEPS = 100


class _Look(msgspec.Struct, frozen=True):
    """What a rank has seen.

    Attributes:
        reason: why to stop; "" to go on.
        hands_over: another job goes on; rank 0's counts.
        num_steps: until the next look; rank 0's counts.
    """

    reason: str = ""
    hands_over: bool = False
    num_steps: int = 1


class Watch:
    """Whether to stop: looked at about once a second, the same answer on all ranks at each step.

    Several ranks look after the same steps, and the number of steps until the next look is part of the answer: one
    small exchange each time.

    Args:
        directory: which another job may ask for.
        ranks: that have to agree.
        asked_here: why this rank was asked to end; "" if it was not.

    Attributes:
        successor: to whom to hand over, on rank 0, once somebody asks.
        hands_over: whether another job goes on, on every rank.
        reason: why to stop, on every rank; "" to go on.
        has_looked: the program asks after its steps.
    """

    def __init__(self, directory: CheckpointDirectory, ranks: Communicator, asked_here: Callable[[], str]) -> None:
        self.successor: Identity | None = None
        self.hands_over = False
        self.reason = ""
        self.has_looked = False
        self._directory = directory
        self._ranks = ranks
        self._asked_here = asked_here
        self._look_s: float | None = None
        self._step = 0
        self._num_steps = 0
        self._said = ""

    def is_asked(self, step: int) -> bool:
        """Whether to stop after this step. Every rank calls it after each step."""
        self.has_looked = True
        if self.reason:
            return True
        now_s = time.monotonic()
        if self._ranks.world_size == 1:
            if self._look_s is None or now_s >= self._look_s + _LOOK_S:
                self._look_s, self.reason = now_s, self._look_for_successor()
                self.hands_over = self.successor is not None
            self.reason = self.reason or self._asked_here()
        elif not self._step <= step < self._step + self._num_steps:
            self._agree(step, now_s)
        return bool(self.reason)

    def _agree(self, step: int, now_s: float) -> None:
        num_steps = 1
        if self._look_s is not None and step > self._step:
            num_steps = steps_until_next(step - self._step, now_s - self._look_s)
        reason = self._look_for_successor() if self._ranks.rank == 0 else ""
        asked = self._asked_here()
        asked = asked and f"rank {self._ranks.rank}: {asked}"
        looks = gather(self._ranks, _Look(reason or asked, self.successor is not None, num_steps))
        self._look_s, self._step, self._num_steps = now_s, step, looks[0].num_steps
        self.hands_over = looks[0].hands_over
        self.reason = next((look.reason for look in looks if look.reason), "")
        if self.reason and not self.hands_over:
            _log.info("all ranks are asked to stop after step %d: %s", step, self.reason)

    def _look_for_successor(self) -> str:
        path = self._directory.path
        request: Request | None = read_request(path)
        if request is None:
            return ""
        is_live = living_request(path) is not None
        found = answer(self._directory.attempt, Asked(request.attempt, str(request.successor), is_live))
        if found.hands_over:
            reach("handover.heard")
            self.successor = request.successor
            _log.info("%s: the next save is the last one here: %s", path, found.reason)
            return found.reason
        if found.reason != self._said:
            self._said = found.reason
            _log.info("%s is not handed over: %s", path, found.reason)
        return ""


def steps_until_next(num_steps: int, elapsed_s: float) -> int:
    """In how many steps to look again: in about a second, and at most twice as many as it was, as steps change.

    Args:
        num_steps: since the last look.
        elapsed_s: since then.
    """
    wanted = round(_LOOK_S * num_steps / elapsed_s) if elapsed_s > 0 else _MAX_STEPS
    return max(1, min(_MAX_STEPS, 2 * num_steps, wanted))
