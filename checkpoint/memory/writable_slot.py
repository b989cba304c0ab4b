"""A slot while a save writes to it: `Store.begin` gives it, and it ends with `publish` or `abandon`."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.errors import DamagedSegment
from hetstream.checkpoint.faults import reach
from hetstream.checkpoint.memory.segment import State
from hetstream.checkpoint.memory.slot import Slot
from hetstream.checkpoint.record.generation import Generation

if TYPE_CHECKING:
    from hetstream.checkpoint.memory.store import Store

_log = logging.getLogger(__name__)


class WritableSlot:
    """A slot that is being written; `Store.begin` makes it. As a context manager it abandons what was not published.

    Attributes:
        payload: the memory to copy into, in bytes.
        segment: the slot: the same object as long as its memory is the same.
        waited_s: how long the save waited for a free slot, in seconds.
        allocated_s: how long memory for it was allocated, by this save or by a thread that it waited for; later saves
            find it there.
    """

    def __init__(self, store: Store, slot: Slot, waited_s: float, allocated_s: float) -> None:
        assert slot.segment is not None
        self._store = store
        self._slot = slot
        self.segment = slot.segment
        self._is_open = True
        self.payload = self.segment.payload
        self.waited_s = waited_s
        self.allocated_s = allocated_s

    def publish(self, generation: Generation, metadata: bytes, layout_digest: str) -> None:
        """Make what was copied the newest generation, and wake the checkpoint writer.

        Args:
            generation: not older than the newest.
            metadata: see `segment.join_metadata`.
            layout_digest: `Layout.digest` of the payload.

        Raises:
            OptionsError: the generation is older, or the metadata is larger than was said to `begin`.
        """
        self._check_open()
        self._store._check_newest(generation)
        self.segment.publish(generation, self._store._next_serial(), layout_digest, metadata)
        reach("slot.complete")
        self._end()
        self._store.wake()
        reach("slot.published")
        self._store.renew_if_deleted()

    def abandon(self) -> None:
        """Give up what was copied: the slot is empty, and the other generations are as they were."""
        self._check_open()
        self.give_up()

    def give_up(self) -> None:
        """End it wherever it is: what is complete stays, anything else is given up. It may be called again."""
        try:
            if self._is_open and self.segment.header.state != State.COMPLETE:
                self.segment.abandon()
        except DamagedSegment as error:
            # An interrupt came while the header was written: the slot gets a new file before it is used again.
            _log.debug("a slot is given up: %s", error)
        self._end()

    def _check_open(self) -> None:
        if not self._is_open:
            raise OptionsError("this slot has been published or abandoned")

    def _end(self) -> None:
        self._is_open = False
        # An array over it keeps it; then the program must not write to it any more.
        with contextlib.suppress(BufferError):
            self.payload.release()
        self._store._end_writing(self._slot)

    def __enter__(self) -> WritableSlot:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_open:
            self.abandon()
