"""Where the frames of a message lie in one piece of memory, and which parts of a pool are free. Pure.

Used by `shm.py`, and by `sockets.py` for messages on the wire.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Sequence

from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.wire.codec import ALIGN_BYTES

# Extents begin on pages.
PAGE_BYTES = 4096
_COUNTS = struct.Struct("<IQ")  # frames, bytes of frame 0
_LENGTH = struct.Struct("<Q")


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


class Extents:
    """The free parts of a pool. The lowest place that fits is taken, so that memory in use is used again first: it is
    in the processor's cache, and a pool that is hardly used hardly takes memory.

    Args:
        capacity_bytes: size of the pool.
    """

    def __init__(self, capacity_bytes: int) -> None:
        # (offset, bytes), in order of offset, no two adjacent.
        self._free = [(0, capacity_bytes // PAGE_BYTES * PAGE_BYTES)] if capacity_bytes >= PAGE_BYTES else []
        self._taken: dict[int, int] = {}

    def take(self, num_bytes: int) -> int | None:
        """Offset of a new extent, or None while no part is large enough."""
        wanted = max(PAGE_BYTES, _rounded(num_bytes, PAGE_BYTES))
        for index, (offset, size) in enumerate(self._free):
            if size >= wanted:
                self._free[index : index + 1] = [(offset + wanted, size - wanted)] if size > wanted else []
                self._taken[offset] = wanted
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Free an extent.

        Raises:
            ProtocolError: there is none at this offset.
        """
        size = self._taken.pop(offset, None)
        if size is None:
            raise ProtocolError(f"an extent at {offset} was given back, but none begins there")
        at = bisect.bisect(self._free, (offset, 0))
        if at < len(self._free) and self._free[at][0] == offset + size:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            offset, before = self._free.pop(at - 1)
            at, size = at - 1, size + before
        self._free.insert(at, (offset, size))

    def shorten(self, offset: int, num_bytes: int) -> None:
        """Free what an extent has beyond its first bytes.

        Raises:
            ProtocolError: there is none at this offset.
        """
        kept = max(PAGE_BYTES, _rounded(num_bytes, PAGE_BYTES))
        size = self._taken.get(offset)
        if size is None:
            raise ProtocolError(f"the extent at {offset} was given back before it was sent")
        if kept < size:
            self._taken[offset] = kept
            self._taken[offset + kept] = size - kept
            self.give_back(offset + kept)

    def num_taken(self) -> int:
        """Extents in use."""
        return len(self._taken)


def lay_out(sizes: Sequence[int]) -> tuple[bytes, list[int], int]:
    """Lay the frames of a message out in one piece of memory: a table of their sizes, then the frames.

    Args:
        sizes: bytes of each frame, frame 0 first.

    Returns:
        The table, which lies at offset 0; the offset of each frame; the size of the whole.
    """
    table = _COUNTS.pack(len(sizes), sizes[0]) + b"".join(_LENGTH.pack(size) for size in sizes[1:])
    return table, *_places(sizes, len(table))


def _places(sizes: Sequence[int], table_bytes: int) -> tuple[list[int], int]:
    # Frame 0 is read once; only tensors need alignment.
    offsets, end = [table_bytes], table_bytes + sizes[0]
    for size in sizes[1:]:
        offsets.append(_rounded(end, ALIGN_BYTES))
        end = offsets[-1] + size
    return offsets, end


def find_frames(whole: memoryview) -> list[memoryview]:
    """Views of the frames that `lay_out` described.

    Raises:
        ProtocolError: the table does not fit the memory.
    """
    try:
        count, first = _COUNTS.unpack_from(whole)
        table_bytes = _COUNTS.size + _LENGTH.size * (count - 1)
        if count < 1 or table_bytes > whole.nbytes:
            raise ProtocolError(f"a message of {whole.nbytes} bytes names {count} frames")
        sizes = [first, *(size for (size,) in _LENGTH.iter_unpack(whole[_COUNTS.size : table_bytes]))]
    except struct.error as error:
        raise ProtocolError(f"a message of {whole.nbytes} bytes is truncated: {error}") from error
    offsets, end = _places(sizes, table_bytes)
    if end != whole.nbytes:
        raise ProtocolError(f"a message has {whole.nbytes} bytes, but its frames need {end}")
    return [whole[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
