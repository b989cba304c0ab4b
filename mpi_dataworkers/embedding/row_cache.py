"""Which rows of a table are at hand in this process, and which leave when room is needed. Pure.

A row that a known step needs stays (BagPipe's rule: arXiv 2202.12429, section 3). Of the others those leave first whose
last use is longest ago, as long as there is room nothing does. A row that was changed is written back when it leaves.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int64]

_BLOCK_BITS = 6
_IN_BLOCK = (1 << _BLOCK_BITS) - 1


class _SlotIndex:
    """The slot of each id; -1 where it has none.

    Memory comes with use, by blocks of neighbouring ids that lie in the order in which they were first used: so ids
    that are far from each other do not take a page each.
    """

    def __init__(self, num_ids: int) -> None:
        num_blocks = (num_ids >> _BLOCK_BITS) + 1
        self._blocks = np.zeros(num_blocks, dtype=np.int32)
        # One more than the slot; the first block is of ids that have none.
        self._slots = np.zeros((num_blocks + 1) << _BLOCK_BITS, dtype=np.int32)
        self._num_used = 1

    def _places(self, ids: Ids) -> Ids:
        return (self._blocks.take(ids >> _BLOCK_BITS).astype(np.int64) << _BLOCK_BITS) | (ids & _IN_BLOCK)

    def __getitem__(self, ids: Ids) -> Slots:
        return self._slots.take(self._places(ids)).astype(np.int64) - 1

    def __setitem__(self, ids: Ids, slots: Slots | int) -> None:
        blocks = ids >> _BLOCK_BITS
        if len(new := blocks[self._blocks.take(blocks) == 0]):
            new = np.unique(new)
            self._blocks[new] = np.arange(self._num_used, self._num_used + len(new))
            self._num_used += len(new)
        self._slots[self._places(ids)] = np.add(slots, 1)


class RowCache:
    """The places of rows in this process.

    Args:
        num_rows: ids are 0 to `num_rows` - 1.
        capacity: places that there are.

    Attributes:
        num_free: places without a row.
        coming: whether the row of each place is asked for, and not there yet.
    """

    def __init__(self, num_rows: int, capacity: int) -> None:
        self._num_rows = num_rows
        self._slot_of = _SlotIndex(num_rows)
        self._id_of = np.full(capacity, -1, dtype=np.int64)
        self._last_use = np.zeros(capacity, dtype=np.int64)
        self._is_dirty, self.coming = np.zeros((2, capacity), dtype=bool)
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int64)
        self.num_free = capacity
        # Steps and the slots that they use, a heap: the smallest step first, and of one step what was noted first.
        self._uses: list[tuple[int, int, Slots]] = []
        self._num_uses = self._num_noted = 0

    @property
    def capacity(self) -> int:
        """Rows that may be here at once."""
        return len(self._id_of)

    def claim(self, ids: Ids, step: int) -> tuple[Slots, npt.NDArray[np.bool_]] | None:
        """Make sure that rows have a place until a step is over.

        Args:
            ids: each once.
            step: that needs them.

        Returns:
            Their slots, and which of them had none before; None where that many are not free.
        """
        slots = self._slot_of[ids]
        is_new = slots < 0
        num_new = int(np.count_nonzero(is_new))
        if num_new > self.num_free:
            return None
        if num_new:
            self.num_free -= num_new
            new_slots = self._free[self.num_free : self.num_free + num_new].copy()
            slots[is_new] = new_slots
            self._id_of[new_slots] = ids[is_new]
            self._slot_of[ids[is_new]] = new_slots
            self.coming[new_slots] = True
            self._last_use[new_slots] = step
        self._last_use[slots] = np.maximum(self._last_use[slots], step)
        self._note(slots, step)
        return slots, is_new

    def _note(self, slots: Slots, step: int) -> None:
        self._num_uses += 1
        self._num_noted += len(slots)
        heapq.heappush(self._uses, (step, self._num_uses, slots))
        if self._num_noted > 4 * self.capacity + 2 * len(slots):  # where nothing leaves, nobody takes uses away
            self._note_anew()

    def _note_anew(self) -> None:
        """Keep of all uses the last one of each row."""
        slots = np.flatnonzero(self._id_of >= 0)
        slots = slots[np.argsort(self._last_use[slots], kind="stable")]
        of_steps = np.split(slots, np.flatnonzero(np.diff(self._last_use[slots])) + 1)
        self._uses = [(int(self._last_use[slots[0]]), index, slots) for index, slots in enumerate(of_steps)]
        self._num_noted = len(slots)

    def evict(
        self, num_rows: int, before_step: int, waiting: Sequence[Slots]
    ) -> tuple[Ids, Slots, npt.NDArray[np.bool_]]:
        """Let rows leave that no step from `before_step` on is known to need, the longest unused first.

        One that is asked for stays until it is here.

        Args:
            num_rows: leave at least; fewer where no more may, some more where they were used together.
            before_step: the first step that is not over.
            waiting: slots of rows that stay nevertheless.

        Returns:
            Their ids, the slots that they had, and which of them were changed.
        """
        leaving, staying = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        count = 0
        stays = np.zeros(self.capacity, dtype=bool)
        for slots in waiting:
            stays[slots] = True
        while count < num_rows and self._uses and self._uses[0][0] < before_step:
            step, _, slots = heapq.heappop(self._uses)
            self._num_noted -= len(slots)
            unused = slots[(self._last_use[slots] == step) & (self._id_of[slots] >= 0)]
            self._last_use[unused] = -1  # a step may have named them twice
            may_leave = ~(stays[unused] | self.coming[unused])
            staying.append(unused[~may_leave])
            leaving.append(unused[may_leave])
            count += len(leaving[-1])
        if len(stayed := np.concatenate(staying)):
            self._last_use[stayed] = before_step - 1
            self._note(stayed, before_step - 1)
        slots = np.concatenate(leaving)
        ids, was_dirty = self._id_of[slots], self._is_dirty[slots]
        self._slot_of[ids] = -1
        self._id_of[slots] = -1
        self._is_dirty[slots] = False
        self._free[self.num_free : self.num_free + len(slots)] = slots
        self.num_free += len(slots)
        return ids, slots, was_dirty

    def release(self, from_step: int, as_of: int) -> None:
        """Take back the claims of steps from `from_step` on, as if step `as_of` had been the last to use their rows."""
        self._uses = sorted((as_of if step >= from_step else step, number, slots) for step, number, slots in self._uses)
        for step, _, slots in self._uses:
            self._last_use[slots] = step

    def ids_at(self, slots: Slots) -> Ids:
        """Return whose rows are there."""
        return self._id_of[slots]

    def changed(self, slots: Slots) -> None:
        """Note that rows differ from what the servers have."""
        self._is_dirty[slots] = True

    def written(self) -> tuple[Ids, Slots]:
        """Return all rows that differ from what the servers have, and count them as written back."""
        slots = np.flatnonzero(self._is_dirty)
        self._is_dirty[slots] = False
        return self._id_of[slots], slots

    def clear(self) -> None:
        """Forget all rows."""
        self.__init__(self._num_rows, len(self._id_of))  # type: ignore[misc]
