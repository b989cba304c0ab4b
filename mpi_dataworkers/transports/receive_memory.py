"""The memory into which a loader receives messages. Used by `sockets.py`."""

from __future__ import annotations

import collections
import weakref

import numpy as np
import numpy.typing as npt

from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.wire.codec import aligned

# Memory that is kept for later messages although messages of other sizes come now.
_KEEP_BYTES = 128 << 20

_Bytes = npt.NDArray[np.uint8]


class ReceiveMemory:
    """Memory for messages, used again when the program has dropped all that lies in it: new memory costs a page fault
    for each 4 KiB, and what was dropped last may still be in the processor's cache."""

    def __init__(self) -> None:
        self._free: dict[int, collections.deque[_Bytes]] = {}  # by size

    def take(self, num_bytes: int) -> memoryview:
        """Memory of this size, given back when no view of it is left.

        Raises:
            ProtocolError: there is none.
        """
        # An eighth more at most, so that sizes that differ a little share.
        unit = 1 << max(0, num_bytes.bit_length() - 4)
        size = -(-num_bytes // unit) * unit
        free = self._free.setdefault(size, collections.deque())
        try:
            whole = free.pop()
        except IndexError:
            if sum(size * len(unused) for size, unused in self._free.items()) > _KEEP_BYTES:
                self._free = {size: free}
            whole = _aligned(size)
        part = whole[:num_bytes]
        # Runs where the last view is dropped, in any thread; it takes no lock.
        weakref.finalize(part, free.append, whole).atexit = False
        return part.data


def _aligned(num_bytes: int) -> _Bytes:
    try:
        return aligned(num_bytes)
    except MemoryError as error:
        raise ProtocolError(f"there is no memory for a message of {num_bytes} bytes: {error}") from error
