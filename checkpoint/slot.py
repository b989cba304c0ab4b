"""A place for a generation in a rank's store, as its trainer has it mapped. Used by `store.py` alone."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from checkpoint.errors import DamagedSegment
from checkpoint.locks import FileLock
from checkpoint.segment import Segment, State
from checkpoint.store_files import SlotContent, StoreFiles

_log = logging.getLogger(__name__)


class Slot:
    """A place for a generation.

    Attributes:
        path: the slot file, which may be missing.
        segment: it, mapped for writing; None if there is no usable file.
        is_busy: a save writes to it, or a thread prepares it.
        is_given_up: there was no memory for it, and the others have to do.
        lock: of its file, held by the save that writes to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.segment: Segment | None = None
        self.is_busy = False
        self.is_given_up = False
        self.lock: FileLock | None = None
        if os.path.lexists(path):
            try:
                self.segment = Segment.open(path, writable=True)
            except DamagedSegment as error:
                _log.warning("a generation in memory cannot be used: %s", error)

    def content(self) -> SlotContent | None:
        """The complete generation in it."""
        if self.segment:
            with contextlib.suppress(DamagedSegment):
                header = self.segment.header
                if header.state == State.COMPLETE:
                    return SlotContent(self.path, header)
        return None

    def fits(self, payload_bytes: int, metadata_bytes: int) -> bool:
        """Whether there is room for so much."""
        if self.segment:
            with contextlib.suppress(DamagedSegment):
                header = self.segment.header
                return (
                    header.payload_capacity_bytes >= payload_bytes and header.metadata_capacity_bytes >= metadata_bytes
                )
        return False

    def age(self, payload_bytes: int, metadata_bytes: int) -> tuple[object, ...]:
        """What to overwrite first is the smallest: an empty slot, one with room before others; then the oldest."""
        content = self.content()
        return (1, *content.age) if content else (0, not self.fits(payload_bytes, metadata_bytes))

    def discard(self) -> None:
        """Delete its file. Its memory is free then, unless somebody reads it just now: savers keep slots mapped."""
        lock = FileLock.try_exclusive(self.path) if self.segment else None
        try:
            unlink_with_target(self.path)
            if lock and self.segment:
                self.segment.give_back()
        finally:
            if lock:
                lock.release()
            self.close()

    def forget(self) -> None:
        """Give up the generation in it. Its memory stays, unless somebody reads it just now."""
        lock = FileLock.try_exclusive(self.path) if self.segment else None
        if lock is None:
            self.discard()
            return
        with lock:
            assert self.segment is not None
            self.segment.abandon()

    def unlock(self) -> None:
        """Let others have its file."""
        if self.lock:
            self.lock.release()
            self.lock = None

    def close(self) -> None:
        """Unmap it."""
        if self.segment:
            self.segment.close()
            self.segment = None


def take_slots(files: StoreFiles, num_slots: int) -> list[Slot]:
    """The slots of a store, those that are there first; the oldest beyond `num_slots` are deleted."""
    for left_over in files.path.glob("new-*"):
        unlink_with_target(left_over)
    there = [content.path for content in files.complete()]
    there += [path for path in files.slots() if path not in there]
    for path in there[num_slots:]:
        unlink_with_target(path)
    unused = (path for number in range(num_slots) if (path := files.slot(number)) not in there[:num_slots])
    return [Slot(path) for path in sorted([*there[:num_slots], *unused][:num_slots])]


def size_in(path: Path) -> int:
    """Bytes that a file takes where it is; a link takes none."""
    try:
        return 0 if path.is_symlink() else path.stat().st_size
    except FileNotFoundError:
        return 0


def unlink_with_target(path: Path) -> None:
    """Delete a slot file, and where it is a link what it points to."""
    if path.is_symlink():
        Path(os.readlink(path)).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
