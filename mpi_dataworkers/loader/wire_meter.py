"""How fast batches come to a loader: bytes, and the time in which some batch was on its way. Pure."""

from __future__ import annotations

# What came long ago counts less: after so many bytes, half.
_HALF_BYTES = 1 << 30
# Less than this says nothing: the time is that of a few system calls.
_LEAST_BYTES = 1 << 20


class WireMeter:
    """Counts batches whose beginning was seen before their end; smaller ones come at once, and say nothing.

    One thread counts, any may read.
    """

    def __init__(self) -> None:
        self._sums = 0.0, 0.0  # bytes, seconds
        self._last_s = 0.0

    def note(self, num_bytes: int, began_s: float, ended_s: float) -> None:
        """A batch has come.

        Args:
            num_bytes: of its tensors.
            began_s, ended_s: when its first and last bytes came. Two that come at the same time share that time.
        """
        seconds = max(0.0, ended_s - max(began_s, self._last_s))
        kept = 0.5 ** (num_bytes / _HALF_BYTES)
        self._sums = kept * self._sums[0] + num_bytes, kept * self._sums[1] + seconds
        self._last_s = max(self._last_s, ended_s)

    @property
    def bytes_per_s(self) -> float | None:
        """The rate; None as long as too little has come to say."""
        num_bytes, seconds = self._sums
        return num_bytes / seconds if num_bytes >= _LEAST_BYTES and seconds > 0 else None
