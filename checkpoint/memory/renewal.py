"""A store that somebody deletes below its living trainer, and what is done to make it anew. Called by `store.py`.

Not every deletion is a mistake of somebody's: systemd-logind removes all that a user has in /dev/shm when he logs out
of a host, and sites clean up /dev/shm after jobs. The trainer still has the memory mapped, with all that is in it, but
no other process can reach it any more.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path

from hetstream.checkpoint.faults import reach
from hetstream.checkpoint.locks import FileLock
from hetstream.checkpoint.memory.adoption import give_up
from hetstream.checkpoint.memory.segment import Segment
from hetstream.checkpoint.memory.slot import Slot, SlotMemory
from hetstream.checkpoint.memory.store_files import StoreFiles

_log = logging.getLogger(__name__)

# Other threads go on between two of these.
_STRIDE_BYTES = 64 << 20


def is_whole(files: StoreFiles, lock: FileLock, slots: Iterable[Slot]) -> bool:
    """Whether all files of a store are there that its trainer has open: a few microseconds."""
    return (
        lock.is_of(files.trainer_lock)
        and files.wake.exists()
        and all(slot.segment is None or slot.is_busy or slot.segment.is_of(slot.path) for slot in slots)
    )


def warn_of_deletion(path: Path) -> None:
    """Say what has happened, why it happens, and what can be done about it."""
    _log.warning(
        "%s: somebody has deleted this checkpoint store, or files of it, while it was in use. It is made anew, and "
        "training goes on. systemd-logind does so when a user logs out of a host (RemoveIPC), and so do jobs that "
        "clean up /dev/shm. To have it stay: loginctl enable-linger USER, or RemoveIPC=no in /etc/systemd/logind.conf",
        path,
    )


def copy_generation(former: Segment, slot: Slot, memory: SlotMemory) -> None:
    """Bring a complete generation from a slot whose file is gone into one of the new store.

    Raises:
        SharedMemoryFull: there is no room.
        DamagedSegment: it is not complete.
    """
    former.check_complete()
    header, source = former.header, former.payload
    memory.replace(slot, header.payload_bytes, header.metadata_bytes)
    assert slot.segment is not None
    slot.segment.begin(header.payload_bytes)
    with source, slot.segment.payload as target:
        for begin in range(0, header.payload_bytes, _STRIDE_BYTES):
            target[begin : begin + _STRIDE_BYTES] = source[begin : begin + _STRIDE_BYTES]
    reach("store.copied")
    slot.segment.publish(header.generation, header.serial, header.layout_digest, former.metadata)


def clear_away(files: StoreFiles) -> None:
    """Give up what the deletion has left of a store: nobody will look for it. For who had its trainer's lock."""
    with contextlib.suppress(OSError):
        if files.path.exists():
            give_up(files)
