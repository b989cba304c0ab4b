"""What a cut gains where it runs: some steps with it and some without, in turn. Pure; called by `partition.py`.

An operator's own time says what a cut should gain. What it does gain is measured by the trainer's own clock, in blocks
of steps with the cut and blocks without, so that a machine that becomes slower in mid-run makes both slower.
"""

from __future__ import annotations

import statistics

# The first step of a block is not counted: it pays for the change.
_BLOCK, _NUM_BLOCKS = 5, 8


class Trial:
    """Steps that are measured with the cut and without it, in turn.

    Attributes:
        uses_cut: whether the step that begins now is one with the cut.
        is_done: whether enough steps were measured.
    """

    def __init__(self) -> None:
        self.uses_cut, self.is_done = True, False
        self._times_s: dict[bool, list[float]] = {True: [], False: []}
        self._num_steps = 0
        self._before: tuple[float, float] | None = None

    def next_step(self, now_s: float, wait_s: float) -> None:
        """A step begins.

        Args:
            now_s: the time.
            wait_s: how long the trainer has waited for data in all, which is no part of a step's own time.
        """
        if self._before is not None and self._num_steps % _BLOCK != 1:
            self._times_s[self.uses_cut].append(now_s - self._before[0] - (wait_s - self._before[1]))
        self._before = now_s, wait_s
        self.is_done = self._num_steps >= _BLOCK * _NUM_BLOCKS
        self.uses_cut = self.is_done or self._num_steps // _BLOCK % 2 == 0
        self._num_steps += 1

    @property
    def step_s(self) -> tuple[float, float]:
        """The trainer's own time for a step with the cut, and without."""
        return statistics.median(self._times_s[True]), statistics.median(self._times_s[False])
