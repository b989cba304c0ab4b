"""The views of a slot that a save copies into: made once for each slot and layout, and kept while the slot is.

Called by the checkpointer. Making ten thousand of them takes longer than copying into them.
"""

from __future__ import annotations

import weakref

import torch

from checkpoint.flash.device import pin
from checkpoint.flash.tensors import Plan, bytes_as_tensor, entry_views
from checkpoint.segment import Segment


class SlotViews:
    """The views of every slot in use."""

    def __init__(self) -> None:
        # A slot that is replaced is given up with its views, and so its memory is freed at once.
        self._of_slots: weakref.WeakKeyDictionary[Segment, _Views] = weakref.WeakKeyDictionary()

    def destinations(self, segment: Segment, payload: memoryview, plan: Plan) -> list[torch.Tensor]:
        """Where the tensors of a plan are copied to.

        Args:
            segment: the slot.
            payload: its memory, for a payload of the plan's layout.
        """
        views = self._of_slots.get(segment)
        if views is None or views.digest != plan.layout.digest or views.refs != plan.encoded_refs:
            views = self._of_slots[segment] = _Views(payload, plan, views)
        return views.destinations

    def clear(self) -> None:
        """Let go of all slots."""
        self._of_slots.clear()


class _Views:
    def __init__(self, payload: memoryview, plan: Plan, former: _Views | None) -> None:
        self.digest = plan.layout.digest
        self.refs = plan.encoded_refs
        self.destinations = plan.destinations(entry_views(plan.layout, payload))
        self._memory = bytes_as_tensor(payload) if plan.layout.payload_bytes else None
        if former is not None:
            former.unpin()
        undo = pin(self._memory) if self._memory is not None else None
        self._undo = weakref.finalize(self, undo) if undo else None

    def unpin(self) -> None:
        """Give the memory back to be pinned anew, with another layout."""
        if self._undo:
            self._undo()
