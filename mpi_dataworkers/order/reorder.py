"""The loader's reorder buffer: batches come in any order, more than once, from the living and the dead. Pure.

Used by `loader/session.py`. A step is taken in once; a batch of a revoked lease, of a step that is already there,
or outside the session is dropped and counted. The training loop takes steps strictly in order, or, if it
asks for that, as they come.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from hetstream.mpi_dataworkers.wire.messages import Ranges

# Revoked tokens worth remembering: batches of older leases are long gone or long consumed.
_TOKENS_KEPT = 4096


class ReorderBuffer:
    """Steps [position, ...) of one session.

    Args:
        position: the first step that the training loop has not taken.
        in_order: give out steps in order only.
        taken_out_of_order: steps beyond the position that it has taken already.

    Attributes:
        position: steps below it were taken.
        num_dropped: batches that came a second time or with a revoked token.
    """

    def __init__(self, position: int, in_order: bool = True, taken_out_of_order: Ranges | None = None) -> None:
        self.position = position
        self._in_order = in_order
        self._taken_out_of_order = {step for first, stop in taken_out_of_order or () for step in range(first, stop)}
        self.num_dropped = 0
        self._items: dict[int, Any] = {}
        self._expected: set[int] = set()
        self._revoked: OrderedDict[int, None] = OrderedDict()

    def revoke(self, token: int) -> None:
        """Refuse batches of this lease from now on."""
        self._revoked[token] = None
        if len(self._revoked) > _TOKENS_KEPT:
            self._revoked.popitem(last=False)

    def wants(self, step: int, token: int) -> bool:
        """Return whether a batch is still needed; counts it as dropped when not."""
        wanted = not self.has(step) and step not in self._expected and token not in self._revoked
        self.num_dropped += not wanted
        return wanted

    def expect(self, step: int) -> None:
        """A step that is wanted has come and will be put in: it counts as received."""
        self._expected.add(step)

    def expect_no_more(self, step: int) -> None:
        """It will not."""
        self._expected.discard(step)

    def put(self, step: int, item: Any) -> None:
        """Take in a step that is wanted."""
        self._expected.discard(step)
        self._items[step] = item

    def has_next(self) -> bool:
        """Return whether a step that the training loop may take is there."""
        return bool(self._items) and (not self._in_order or self.position in self._items)

    def has(self, step: int) -> bool:
        """Return whether a step was taken or waits here."""
        return step < self.position or step in self._items or step in self._taken_out_of_order

    def is_revoked(self, token: int) -> bool:
        """Return whether a lease was revoked."""
        return token in self._revoked

    def peek(self) -> Any | None:
        """Return the next step, which stays; None while it is not there."""
        if self._in_order:
            return self._items.get(self.position)
        return self._items[self.next_step()] if self._items else None

    def pop(self) -> Any:
        """Give out the next step and advance."""
        step = self.next_step()
        item = self._items[step]
        self.advance(step)
        return item

    def advance(self, step: int) -> None:
        """Move past a step that was taken. To do so once more, also after a part of it, changes nothing."""
        self._items.pop(step, None)
        if step < self.position:
            return
        if step == self.position and not self._taken_out_of_order:  # as with all steps in order
            self.position = step + 1
            return
        self._taken_out_of_order.add(step)
        while self.position in self._taken_out_of_order:
            self.position += 1
            self._taken_out_of_order.discard(self.position - 1)

    def item(self, step: int) -> Any | None:
        """Return what waits for a step; None if it is not there."""
        return self._items.get(step)

    def next_step(self) -> int:
        """Number of the step that `peek` gives."""
        return self.position if self._in_order else min(self._items)

    def taken_out_of_order(self) -> Ranges:
        """Return steps beyond the position that the training loop has taken."""
        return as_ranges(sorted(self._taken_out_of_order))

    def __len__(self) -> int:
        return len(self._items)

    def num_ready(self) -> int:
        """Return steps that wait here and that the training loop can take without waiting for others."""
        step = self.position
        while step in self._items:
            step += 1
        return step - self.position

    def num_come(self) -> int:
        """Return steps that wait here or will be put in."""
        return len(self._items) + len(self._expected)

    def received(self) -> Ranges:
        """Return steps beyond the position that have come or were taken, as ascending disjoint ranges [first, stop)."""
        come = [step for step in self._expected if step >= self.position and step not in self._items]
        return as_ranges(sorted([*self._items, *self._taken_out_of_order, *come]))


def as_ranges(steps: Iterable[int]) -> Ranges:
    """Ascending steps as disjoint ranges [first, stop)."""
    ranges: Ranges = []
    for step in steps:
        if ranges and ranges[-1][1] == step:
            ranges[-1] = (ranges[-1][0], step + 1)
        else:
            ranges.append((step, step + 1))
    return ranges


# How many steps of a session may wait in the loader or be on their way, so that its memory stays bounded. Pure.
#
# Used by `loader/session.py`. The bound is in bytes, and what a step has is known when it is there: the first
# session begins with as many steps as the loader needs at least and opens the window as batches show their size, later
# sessions begin with what the ones before have shown.

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
        most: an upper bound, whatever there is room for.
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
