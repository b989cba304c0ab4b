"""Which memory of this process its other processes see when it is written to.

A dataset can hold such memory: a tensor after `share_memory_()`, an array over `multiprocessing.shared_memory`, a
`numpy.memmap`. Torch's worker processes, which are forked, see what the trainer writes there later; of all else they
keep what it was when they began.
"""

from __future__ import annotations

import bisect
from pathlib import Path

import numpy as np

from mpi_dataworkers.codec import Buffer

_MAPS = Path("/proc/self/maps")


class SharedMappings:
    """The shared mappings of this process, as they are now (proc(5))."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for line in _MAPS.read_text(errors="surrogateescape").splitlines():
            place, permissions, _ = line.split(maxsplit=2)
            if permissions.endswith("s"):
                start, stop = place.split("-")
                self._starts.append(int(start, 16))
                self._stops.append(int(stop, 16))

    def __contains__(self, buffer: Buffer) -> bool:
        address = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
        number = bisect.bisect_right(self._starts, address) - 1
        return number >= 0 and address < self._stops[number]
