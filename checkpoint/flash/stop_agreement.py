"""How all ranks agree to end after the same step: a rank was asked to, or another job goes on in place of this one.

Called by `FlashCheckpointer.should_save` after each step. A signal, or the request of a host's checkpoint writer,
reaches ranks at different steps. A rank that ended alone would leave the others in a collective operation for ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from hetstream.checkpoint.flash.distributed import Communicator, gather

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
# Several ranks count steps, as their clocks differ. The bound is for steps that become slower meanwhile.
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


class StopAgreement:
    """Whether to stop: the ranks look about once a second, and have the same answer at each step.

    All of them look after the same step, in one small exchange, which also says after how many steps they look again.

    Args:
        ranks: the ranks that have to agree.
        asked_here: why this rank was asked to end; "" if it was not.
        asked_by_successor: why to end for a job that goes on in place of this one; "" while none asks. For rank 0.

    Attributes:
        hands_over: whether another job goes on, on every rank.
        reason: why to stop, on every rank; "" to go on.
        has_looked: the program asks after its steps.
    """

    def __init__(
        self, ranks: Communicator, asked_here: Callable[[], str], asked_by_successor: Callable[[], str]
    ) -> None:
        self.hands_over = False
        self.reason = ""
        self.has_looked = False
        self._ranks = ranks
        self._asked_here = asked_here
        self._asked_by_successor = asked_by_successor
        self._look_s: float | None = None
        self._step = 0
        self._num_steps = 0

    def is_asked(self, step: int) -> bool:
        """Whether to stop after this step. Every rank calls it after each step."""
        self.has_looked = True
        if self.reason:
            return True
        now_s = time.monotonic()
        if self._ranks.world_size == 1:
            if self._look_s is None or now_s >= self._look_s + _LOOK_S:
                self._look_s, self.reason = now_s, self._asked_by_successor()
                self.hands_over = self.reason != ""
            self.reason = self.reason or self._asked_here()
        elif not self._step <= step < self._step + self._num_steps:
            self._agree(step, now_s)
        return bool(self.reason)

    def _agree(self, step: int, now_s: float) -> None:
        num_steps = 1
        if self._look_s is not None and step > self._step:
            num_steps = steps_until_next(step - self._step, now_s - self._look_s)
        reason = self._asked_by_successor() if self._ranks.rank == 0 else ""
        asked = self._asked_here()
        asked = asked and f"rank {self._ranks.rank}: {asked}"
        looks = gather(self._ranks, _Look(reason or asked, reason != "", num_steps))
        self._look_s, self._step, self._num_steps = now_s, step, looks[0].num_steps
        self.hands_over = looks[0].hands_over
        self.reason = next((look.reason for look in looks if look.reason), "")
        if self.reason and not self.hands_over:
            _log.info("all ranks are asked to stop after step %d: %s", step, self.reason)


def steps_until_next(num_steps: int, elapsed_s: float) -> int:
    """After how many steps to look again: about a second's, but at most twice as many as last time, as steps change.

    Args:
        num_steps: since the last look.
        elapsed_s: since then.
    """
    wanted = round(_LOOK_S * num_steps / elapsed_s) if elapsed_s > 0 else _MAX_STEPS
    return max(1, min(_MAX_STEPS, 2 * num_steps, wanted))
