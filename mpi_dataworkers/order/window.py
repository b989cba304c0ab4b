"""How many steps of a session may wait in the loader or be on their way, so that its memory stays bounded. Pure.

Used by `loader/session.py`. The bound is in bytes, and what a step has is known when it is there: the first
session begins with as many steps as the loader needs at least and opens the window as batches show their size, later
sessions begin with what the ones before have shown.
"""

from __future__ import annotations

import sys

# Steps in the window whatever their size: more would only lengthen the reports.
MAX_STEPS = 1024
# A step counts for the largest one of late: with each batch that comes, that is forgotten by so much.
_FORGET_SHARE = 0.02


class StepSize:
    """Bytes of a loader's steps, as far as it has seen them.

    Attributes:
        num_bytes: what the next step may have: the largest of late; 0 before the first.
    """

    def __init__(self) -> None:
        self.num_bytes = 0

    def note(self, num_bytes: int) -> None:
        """A step has come."""
        faded = int(self.num_bytes * (1 - _FORGET_SHARE))
        self.num_bytes = num_bytes if num_bytes > faded else faded or 1


class Window:
    """The window of one session.

    Args:
        buffer_bytes: to hold ahead of the training loop.
        min_steps: steps in the window even when they are larger than that.
        max_steps: steps in it however small they are.
        size: of the loader's steps.

    Attributes:
        most: no more than so many, whatever there is room for.
    """

    def __init__(self, buffer_bytes: int, min_steps: int, max_steps: int, size: StepSize) -> None:
        self._buffer_bytes = buffer_bytes
        self._min_steps = min_steps
        self._max_steps = max(min_steps, max_steps)
        self._size = size
        self.most = sys.maxsize
        # What has come says little of what comes where that is little: a window may be twice of it.
        self._num_seen = self._max_steps if size.num_bytes else 0
        self._steps = self._fitting(0, 0) if size.num_bytes else min_steps

    @property
    def steps(self) -> int:
        """How many may wait or be on their way."""
        return min(self._steps, self.most)

    def note(self, num_bytes: int, num_held: int, held_bytes: int) -> None:
        """A batch has come.

        Args:
            num_bytes: its size.
            num_held: batches that wait, with it.
            held_bytes: their size.
        """
        self._size.note(num_bytes)
        self._num_seen += 1
        steps = self._fitting(num_held, held_bytes)
        if steps > 2 * self._num_seen:
            steps = max(self._min_steps, 2 * self._num_seen)
        # Batches of slightly different size must not cause a report each.
        if abs(steps - self._steps) * 10 > self._steps:
            self._steps = steps

    def _fitting(self, num_held: int, held_bytes: int) -> int:
        """Those that wait, and as many of the largest size as there is room for beside them."""
        steps = num_held + (self._buffer_bytes - held_bytes) // self._size.num_bytes
        # Written out: it is asked at each step.
        if steps >= self._max_steps:
            return self._max_steps
        return steps if steps > self._min_steps else self._min_steps
