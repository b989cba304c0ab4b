"""Where tensors go: a model of PyTorch's caching allocator with a limit and memory of the host that stands in. Pure.

As in PyTorch (CUDACachingAllocator.cpp, 2.9 and later), the limit counts only when a new segment is needed: what is
cached is used without asking. Blocks are not modelled, so nothing is fragmented.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from hetstream.hetjob.gpu.devices.base import MemoryUse
from hetstream.hetjob.gpu.orders import NO_LIMIT


class Place(enum.Enum):
    """Where a tensor is."""

    DEVICE = "device"
    HOST = "host"


class Allocator:
    """One process's memory.

    Args:
        take: asks the GPU for so many bytes; says whether they are this process's now.
        give: returns so many bytes to the GPU.
        segment_bytes: what is taken is a multiple of this.
        host_capacity_bytes: memory of the host that stands in when the GPU has none.
    """

    def __init__(
        self, take: Callable[[int], bool], give: Callable[[int], None], segment_bytes: int, host_capacity_bytes: int
    ) -> None:
        self._take, self._give = take, give
        self._segment_bytes = segment_bytes
        self._host_capacity_bytes = host_capacity_bytes
        self._limit_bytes = NO_LIMIT
        self._held_bytes = 0
        self._used = {Place.DEVICE: 0, Place.HOST: 0}
        self._peak_bytes = self._host_peak_bytes = 0

    def allocate(self, num_bytes: int) -> Place:
        """Find a place for a tensor.

        Raises:
            MemoryError: there is none.
        """
        place = Place.DEVICE if self._fits_device(num_bytes) else Place.HOST
        if place is Place.HOST and self._used[Place.HOST] + num_bytes > self._host_capacity_bytes:
            raise MemoryError(
                f"GPU out of memory: {num_bytes:,} bytes asked for, {self._held_bytes:,} held, limit "
                f"{self._limit_bytes:,}, on the host {self._used[Place.HOST]:,} of {self._host_capacity_bytes:,}"
            )
        self._used[place] += num_bytes
        self._peak_bytes = max(self._peak_bytes, sum(self._used.values()))
        self._host_peak_bytes = max(self._host_peak_bytes, self._used[Place.HOST])
        return place

    def free(self, num_bytes: int, place: Place) -> None:
        """A tensor is gone. Its memory of the GPU stays cached."""
        self._used[place] -= num_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """From now on hold no more than this; what is cached beyond is given back."""
        self._limit_bytes = limit_bytes
        if self._held_bytes > limit_bytes:
            kept = max(
                self._segments(self._used[Place.DEVICE]), limit_bytes // self._segment_bytes * self._segment_bytes
            )
            if kept < self._held_bytes:
                self._give(self._held_bytes - kept)
                self._held_bytes = kept

    def begin_mini_batch(self) -> None:
        """Peaks are counted from here."""
        self._peak_bytes, self._host_peak_bytes = sum(self._used.values()), self._used[Place.HOST]

    def memory(self) -> MemoryUse:
        """What is held now, and was at most."""
        return MemoryUse(self._held_bytes, self._peak_bytes, self._host_peak_bytes, self._host_capacity_bytes)

    def _fits_device(self, num_bytes: int) -> bool:
        more = self._segments(self._used[Place.DEVICE] + num_bytes) - self._held_bytes
        if more <= 0:
            return True
        if self._held_bytes + more > self._limit_bytes or not self._take(more):
            return False
        self._held_bytes += more
        return True

    def _segments(self, num_bytes: int) -> int:
        return -(-num_bytes // self._segment_bytes) * self._segment_bytes
