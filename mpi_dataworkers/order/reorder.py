"""The loader's reorder buffer: batches come in any order, more than once, from the living and the dead. Pure.

Used by `loader/session.py`. A step is taken in once; a batch of a revoked lease, of a step that is already there,
or outside the session is dropped and counted. The training loop takes steps strictly in order, or, if it
asks for that, as they come.
"""

from __future__ import annotations

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
        """Whether a batch is still needed; counts it as dropped when not."""
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
        """Whether a step that the training loop may take is there."""
        return bool(self._items) and (not self._in_order or self.position in self._items)

    def has(self, step: int) -> bool:
        """Whether a step was taken or waits here."""
        return step < self.position or step in self._items or step in self._taken_out_of_order

    def is_revoked(self, token: int) -> bool:
        """Whether a lease was revoked."""
        return token in self._revoked

    def peek(self) -> Any | None:
        """The next step, which stays; None while it is not there."""
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
        """What waits for a step; None if it is not there."""
        return self._items.get(step)

    def next_step(self) -> int:
        """Number of the step that `peek` gives."""
        return self.position if self._in_order else min(self._items)

    def taken_out_of_order(self) -> Ranges:
        """Steps beyond the position that the training loop has taken."""
        return as_ranges(sorted(self._taken_out_of_order))

    def __len__(self) -> int:
        return len(self._items)

    def num_ready(self) -> int:
        """Steps that wait here and that the training loop can take without waiting for others."""
        step = self.position
        while step in self._items:
            step += 1
        return step - self.position

    def num_come(self) -> int:
        """Steps that wait here or will be put in."""
        return len(self._items) + len(self._expected)

    def received(self) -> Ranges:
        """Steps beyond the position that have come or were taken, as ascending disjoint ranges [first, stop)."""
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
