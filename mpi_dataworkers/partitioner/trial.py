"""What a cut gains where it runs: blocks of steps with it and blocks without, in turn. Pure; called by `partition.py`.

An operator's own time says what a cut should gain. What it costs the trainer to take the values in, to hand them over
and to ask the guards, no operator says. So both are measured by the trainer's own clock. In a block without the cut
data workers compute nothing of it and the model has its own forward, as if there had never been a cut.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

# A cut must make a step at least this much faster.
LEAST_GAIN = 0.02
# The first steps of a block are not counted: they pay for the change, and have batches from before.
_NOT_COUNTED, _COUNTED = 4, 10
# A round is a block without the cut and one with it. What is not clear after these counts as no gain.
_MOST_ROUNDS = 2


@dataclass(frozen=True)
class Verdict:
    """Whether a cut pays.

    Attributes:
        pays: it does.
        with_cut_s, without_s: the trainer's own time for a step.
        is_clear: it is more, or less, than by how much blocks of the same kind differ.
        reason: in words, for the user.
    """

    pays: bool
    with_cut_s: float
    without_s: float
    is_clear: bool
    reason: str


def judged(with_cut_s: list[float], without_s: list[float]) -> Verdict:
    """Whether a cut pays, from a step's time in each block.

    Args:
        with_cut_s: in the blocks with the cut, at least one.
        without_s: in those without, at least one.
    """
    sides = with_cut_s, without_s
    with_s, own_s = (statistics.median(side) for side in sides)
    noise_s = statistics.median(abs(value - statistics.median(side)) for side in sides for value in side)
    over_s = own_s - with_s - LEAST_GAIN * own_s
    is_clear = abs(over_s) >= noise_s
    reason = f"with the cut a step takes {1e3 * with_s:.2f} ms, without {1e3 * own_s:.2f} ms"
    if not is_clear:
        reason += f", and steps of the same kind differ by {1e3 * noise_s:.2f} ms"
    return Verdict(is_clear and over_s >= 0, with_s, own_s, is_clear, reason)


class Trial:
    """Steps that are measured with the cut and without it, in turn.

    Attributes:
        uses_cut: whether the steps that begin now are to be ones with the cut.
        verdict: of the trial; None as long as it goes on.
    """

    def __init__(self) -> None:
        self.uses_cut = True
        self.verdict: Verdict | None = None
        self._blocks: dict[bool, list[float]] = {True: [], False: []}
        self._block: list[float] = []
        self._before: tuple[float, float] | None = None
        self._num_steps = 0  # of the block

    def next_step(self, now_s: float, wait_s: float) -> None:
        """A step begins.

        Args:
            now_s: the time.
            wait_s: how long the trainer has waited for data in all, which is no part of a step's own time.
        """
        if self._before is not None and self._num_steps >= _NOT_COUNTED:
            self._block.append(now_s - self._before[0] - (wait_s - self._before[1]))
        self._before = now_s, wait_s
        self._num_steps += 1
        if len(self._block) < _COUNTED:
            return
        self._blocks[self.uses_cut].append(statistics.median(self._block))
        if self.uses_cut and (rounds := len(self._blocks[False])):
            verdict = judged(self._blocks[True], self._blocks[False])
            if verdict.is_clear or rounds == _MOST_ROUNDS:
                self.verdict = verdict
                return
        self.uses_cut = not self.uses_cut
        self._block, self._num_steps = [], 0
