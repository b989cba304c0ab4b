"""The memory of slots that saves copy into, known once for each slot and layout, and kept while the slot is.

Called by `saving.py`. Views are made for what torch has to copy alone, and once: that takes longer than small copies.
"""

from __future__ import annotations

import weakref

import torch

from hetstream.checkpoint.flash.save.device import pin
from hetstream.checkpoint.memory.segment import Segment
from hetstream.checkpoint.tensors.copy_plan import Plan
from hetstream.checkpoint.tensors.views import bytes_as_tensor


class SlotViews:
    """The views of every slot in use."""

    def __init__(self) -> None:
        # A slot that is replaced is given up with its views, and so its memory is freed at once.
        self._of_slots: weakref.WeakKeyDictionary[Segment, Views] = weakref.WeakKeyDictionary()

    def of(self, segment: Segment, payload: memoryview, plan: Plan) -> Views:
        """Where the tensors of a plan are copied to.

        Args:
            segment: the slot.
            payload: its memory, for a payload of the plan's layout.
        """
        views = self._of_slots.get(segment)
        if views is None or (views.plan is not plan and not views.plan.is_like(plan)):
            views = self._of_slots[segment] = Views(payload, plan, views)
        return views

    def clear(self) -> None:
        """Let go of all slots."""
        self._of_slots.clear()


class Views:
    """The memory of one slot.

    Args:
        payload: it.
        plan: what is copied.
        former: what was known of the same slot for another plan.

    Attributes:
        plan: what is copied.
        begin: its address.
    """

    def __init__(self, payload: memoryview, plan: Plan, former: Views | None) -> None:
        self.plan = plan
        self._memory = bytes_as_tensor(payload)
        self.begin = self._memory.data_ptr()
        self._made: dict[int, torch.Tensor] = {}
        if former is not None:
            former.unpin()
        undo = pin(self._memory) if plan.layout.payload_bytes else None
        self._undo = weakref.finalize(self, undo) if undo else None

    def destination(self, entry: int) -> torch.Tensor:
        """Where torch copies an entry of the plan."""
        made = self._made.get(entry)
        if made is None:
            made = self._made[entry] = self.plan.destination(entry, self._memory)
        return made

    def unpin(self) -> None:
        """Give the memory back to be pinned anew, with another layout."""
        if self._undo:
            self._undo()
