"""The loader's reorder buffer: batches come in any order, more than once, from the living and the dead. Pure.

Used by `client.py`. A step is taken in once; a batch of a revoked lease, of a step that is already there, or outside
the pass is dropped and counted. The training loop takes steps strictly in order.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from mpi_dataworkers.messages import Ranges

# Revoked tokens worth remembering: batches of older leases are long gone or long consumed.
_TOKENS_KEPT = 4096


class ReorderBuffer:
    """Steps [position, ...) of one pass.

    Args:
        position: the first step that the training loop has not taken.

    Attributes:
        position: steps below it were taken.
        num_dropped: batches that came a second time or with a revoked token.
    """

    def __init__(self, position: int) -> None:
        self.position = position
        self.num_dropped = 0
        self._items: dict[int, Any] = {}
        self._revoked: OrderedDict[int, None] = OrderedDict()

    def revoke(self, token: int) -> None:
        """Refuse batches of this lease from now on."""
        self._revoked[token] = None
        if len(self._revoked) > _TOKENS_KEPT:
            self._revoked.popitem(last=False)

    def wants(self, step: int, token: int) -> bool:
        """Whether a batch is still needed; counts it as dropped when not."""
        wanted = step >= self.position and step not in self._items and token not in self._revoked
        self.num_dropped += not wanted
        return wanted

    def put(self, step: int, item: Any) -> None:
        """Take in a step that is wanted."""
        self._items[step] = item

    def has_next(self) -> bool:
        """Whether the step that the training loop needs is there."""
        return self.position in self._items

    def pop(self) -> Any:
        """Give out the next step and advance."""
        item = self._items.pop(self.position)
        self.position += 1
        return item

    def __len__(self) -> int:
        return len(self._items)

    def received(self) -> Ranges:
        """Steps that wait here, as ascending disjoint ranges [first, stop)."""
        ranges: Ranges = []
        for step in sorted(self._items):
            if ranges and ranges[-1][1] == step:
                ranges[-1] = (ranges[-1][0], step + 1)
            else:
                ranges.append((step, step + 1))
        return ranges
