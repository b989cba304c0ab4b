"""A store's slots as its checkpoint writer reads them: mapped once, and not for every generation anew.

Called by `store_writer.py`. To enter the pages of a generation and to unmap them again takes longer than its checksums.
What is mapped is no lock: a slot is locked as long as it is read, and a trainer that replaces one takes its memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hetstream.checkpoint.memory.segment import Segment
from hetstream.checkpoint.memory.store_files import SlotContent


class MappedSlots:
    """Slots that have been read and may be read again."""

    def __init__(self) -> None:
        self._segments: dict[Path, Segment] = {}

    @contextlib.contextmanager
    def open(self, content: SlotContent) -> Iterator[Segment]:
        """A generation, locked against being overwritten; it stays mapped.

        Raises:
            DamagedSegment: it is not there any more, or damaged.
        """
        with content.lock() as lock:
            self.drop_replaced()
            if content.path not in self._segments:
                self._segments[content.path] = Segment.open(content.path)
            segment = self._segments[content.path]
            content.check(lock, segment)
            yield segment

    def drop_replaced(self) -> None:
        """Unmap files that are no slots any more."""
        for path in [path for path, segment in self._segments.items() if not segment.is_of(path)]:
            self._segments.pop(path).close()

    def close(self) -> None:
        """Unmap all. It may be used again."""
        while self._segments:
            self._segments.popitem()[1].close()
