"""What an agent needs of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one process on a GPU.

    Attributes:
        held_bytes: of the GPU, in use or cached.
        peak_bytes: most in use since `begin_mini_batch`, on the GPU and on the host together.
        host_bytes: most of that on the host.
        host_capacity_bytes: of the host, that may stand in.
    """

    held_bytes: int
    peak_bytes: int
    host_bytes: int
    host_capacity_bytes: int


class Device(Protocol):
    """One GPU, in one process. All calls come from the threads that launch."""

    @property
    def name(self) -> str:
        """What the coordinator knows it by."""

    def memory(self) -> MemoryUse:
        """Return what the process holds now, and held at most in this mini-batch."""

    def begin_mini_batch(self) -> None:
        """Peaks are counted from here."""

    def set_limit(self, limit_bytes: int) -> None:
        """Hold no more than this, as far as it can be given back now. What is in use stays where it is."""

    def is_idle(self) -> bool:
        """Return whether all that this process has launched has ended."""

    def launched(self) -> int:
        """Called after a launch: waits until little enough of what was launched is still to be done.

        Returns:
            How long the GPU was busy with what has ended since the last call, in nanoseconds.
        """
