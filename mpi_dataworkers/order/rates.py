"""How fast counters grow now: their growth over the last seconds. Pure; the clock is an argument.

Used by loaders for `stats()` and by the dispatcher for `Status`.
"""

from __future__ import annotations

from collections import deque

# Long enough to smooth leases and epochs' ends, short enough to see a change at once.
WINDOW_S = 5.0
_EVERY_S = 0.5


def step_time_s(steps_per_s: float, wait_share: float) -> float:
    """Time for a step without the waits for data; 0 when there were no steps."""
    return max(0.0, 1.0 - wait_share) / steps_per_s if steps_per_s > 0 else 0.0


class RecentRates:
    """Growth per second of several counters over about the last `WINDOW_S` seconds.

    Args:
        now: time, s.
        totals: the counters' values then.
    """

    def __init__(self, now: float, *totals: float) -> None:
        self._noted: deque[tuple[float, tuple[float, ...]]] = deque([(now, totals)])

    def note(self, now: float, *totals: float) -> None:
        """Take note of the counters; does nothing if it was done less than half a second ago."""
        if now - self._noted[-1][0] < _EVERY_S:
            return
        self._noted.append((now, totals))
        while len(self._noted) > 1 and self._noted[1][0] <= now - WINDOW_S:
            self._noted.popleft()

    def per_s(self, now: float, *totals: float) -> tuple[float, ...]:
        """Growth of each counter per second, since the oldest note in the window."""
        since, before = self._noted[0]
        elapsed_s = now - since
        if elapsed_s <= 0:
            return tuple(0.0 for _ in totals)
        return tuple((new - old) / elapsed_s for new, old in zip(totals, before, strict=True))
