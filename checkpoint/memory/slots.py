"""A place for a generation in a rank's store, as its trainer has it mapped. Used by `store.py` alone."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from hetstream.checkpoint.errors import DamagedSegment, SharedMemoryFull, reach
from hetstream.checkpoint.locks import FileLock
from hetstream.checkpoint.memory.segment import (
    MAX_METADATA_BYTES,
    PAGE_BYTES,
    Segment,
    State,
    check_memory,
    check_room,
    file_bytes,
)
from hetstream.checkpoint.memory.store_files import SlotContent, StoreFiles

_log = logging.getLogger(__name__)

# Numbers and paths in the structure grow from save to save, and the slot need not.
_METADATA_SLACK = 1.25


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
        """Return the complete generation in it."""
        if self.segment:
            with contextlib.suppress(DamagedSegment):
                header = self.segment.header
                if header.state == State.COMPLETE:
                    return SlotContent(self.path, header)
        return None

    def fits(self, payload_bytes: int, metadata_bytes: int) -> bool:
        """Return whether there is room for so much."""
        if self.segment:
            with contextlib.suppress(DamagedSegment):
                header = self.segment.header
                return (
                    header.payload_capacity_bytes >= payload_bytes and header.metadata_capacity_bytes >= metadata_bytes
                )
        return False

    def age(self, payload_bytes: int, metadata_bytes: int) -> tuple[object, ...]:
        """Return what to overwrite first, the smallest: an empty slot, one with room before others; then the
        oldest.
        """
        content = self.content()
        return (1, *content.age) if content else (0, not self.fits(payload_bytes, metadata_bytes))

    def discard(self) -> None:
        """Delete its file. Its memory is free then, unless somebody reads it just now: writers keep slots mapped."""
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


class SlotMemory:
    """Where the slots of a store get their memory: files in its directory, or elsewhere when that is full.

    Args:
        files: the store's.
        fallback: a directory for what does not fit there; None: there is none.
    """

    def __init__(self, files: StoreFiles, fallback: Path | None) -> None:
        self._files = files
        self._path = files.path
        self._fallback = fallback
        self._has_said_full = False
        self._reserved_bytes = 0

    def renewed(self, files: StoreFiles) -> SlotMemory:
        """Return the same for a store that takes the place of this one, with what was said about it."""
        made = SlotMemory(files, self._fallback)
        made._has_said_full = self._has_said_full
        made.reserve(self._reserved_bytes)
        return made

    def reserve(self, num_bytes: int) -> None:
        """Say to other ranks of the host how much memory the slots will take all in all, at least."""
        self._reserved_bytes = max(num_bytes, self._reserved_bytes)
        self._files.reserve(self._reserved_bytes)

    def replace(self, slot: Slot, payload_bytes: int, metadata_bytes: int) -> None:
        """Give a slot a new file that is large enough; what it held is given up."""
        metadata_bytes = min(int(metadata_bytes * _METADATA_SLACK) + PAGE_BYTES, MAX_METADATA_BYTES)
        made = self._path / f"new-{slot.path.name}"
        try:
            # The memory of the old file is used again.
            slot_bytes = file_bytes(payload_bytes, metadata_bytes)
            needed_bytes = slot_bytes - size_in(slot.path)
            # First said, then compared with what others say: of two that want the same memory at least one sees it.
            self.reserve(slot_bytes + self._taken_bytes(without=slot))
            check_room(self._path, needed_bytes)
            check_memory(self._path, needed_bytes, self._files.promised_bytes())
            slot.discard()
            segment = Segment.create(made, payload_bytes, metadata_bytes)
        except SharedMemoryFull as error:
            self._reserved_bytes = self._taken_bytes()
            self._files.reserve(self._reserved_bytes)
            if self._fallback is None:
                raise
            slot.discard()
            segment = self._create_in_fallback(self._fallback, slot.path.name, payload_bytes, metadata_bytes, error)
            try:
                made.symlink_to(segment.path)
            except OSError as no_link:  # tmpfs needs a page for a link of 128 bytes and more
                segment.close()
                segment.path.unlink(missing_ok=True)
                raise SharedMemoryFull(f"{error}. Nor is there room for a link to {segment.path}") from no_link
        reach("slot.allocated")
        made.rename(slot.path)
        reach("slot.placed")
        segment.path = slot.path
        slot.segment = segment
        slot.is_given_up = False
        # Also for a save that waits for it: faults in the copy would take longer.
        segment.populate()

    def _taken_bytes(self, without: Slot | None = None) -> int:
        return sum(size_in(path) for path in self._files.slots() if without is None or path != without.path)

    def _create_in_fallback(
        self, fallback: Path, name: str, payload_bytes: int, metadata_bytes: int, full: SharedMemoryFull
    ) -> Segment:
        target = (fallback / f"{self._path.name}-{name}").absolute()
        target.unlink(missing_ok=True)
        try:
            segment = Segment.create(target, payload_bytes, metadata_bytes)
        except (SharedMemoryFull, OSError) as error:
            raise SharedMemoryFull(f"{full}. The fallback does not help: {error}") from error
        if not self._has_said_full:  # it holds for the next slots, too
            self._has_said_full = True
            _log.warning(
                "checkpoints leave shared memory: %s. Slots are now files in %s; saves are slower", full, fallback
            )
        return segment


def take_slots(files: StoreFiles, num_slots: int) -> list[Slot]:
    """Return the slots of a store, those that are there first; the oldest beyond `num_slots` are deleted."""
    for left_over in files.path.glob("new-*"):
        unlink_with_target(left_over)
    there = [content.path for content in files.complete()]
    there += [path for path in files.slots() if path not in there]
    for path in there[num_slots:]:
        unlink_with_target(path)
    unused = (path for number in range(num_slots) if (path := files.slot(number)) not in there[:num_slots])
    return [Slot(path) for path in sorted([*there[:num_slots], *unused][:num_slots])]


def size_in(path: Path) -> int:
    """Return bytes that a file takes where it is; a link takes none."""
    try:
        return 0 if path.is_symlink() else path.stat().st_size
    except FileNotFoundError:
        return 0


def unlink_with_target(path: Path) -> None:
    """Delete a slot file, and where it is a link what it points to."""
    if path.is_symlink():
        Path(os.readlink(path)).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


# A store's slots as its checkpoint writer reads them: mapped once, and not for every generation anew.
#
# Called by `store_writer.py`. To enter the pages of a generation and to unmap them again takes longer than its
# checksums. What is mapped is no lock: a slot is locked as long as it is read, and a trainer that replaces one takes
# its memory.


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
