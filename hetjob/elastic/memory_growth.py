"""Whether a process will run out of memory, and when: resident memory over time -> a forecast. Pure.

The paper refers to a report for its formula. This one asks four things, and all must hold:

* *it grows*: the robust slope (Theil-Sen) of the highest memory so far is above zero with 95 % confidence (Kendall);
* *it goes on growing*: a program that fills its caches grows fast, and then less and less. What the newer half of the
  window grew less than the older half goes on as a geometric series, and that must reach the limit, too;
* *it arrives*: the limit is reached before the job ends, and within the time that is looked ahead;
* *it says so several times*: as many readings in a row as are asked for.

The highest memory so far counts: what is freed and taken again (garbage collection, epochs) has peaks that do
not grow. What does not count against the limit, such as page cache, must not be in the readings.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_NUM_BLOCKS = 12
# Between so many blocks there are enough pairs for 95 % confidence.
_LEAST_BLOCKS = 10
_Z95 = 1.645
# The newer half of a growth over the older half: above it the growth is taken for a line.
_LINE = 0.9
# Growth of less than this share of the limit over the window is none: allocators round, and pages come late.
_LEAST_SHARE = 0.01


@dataclass(frozen=True)
class GrowthOptions:
    """What a forecast is asked for.

    Attributes:
        window_s: readings that are looked at.
        ahead_s: how far ahead the limit must be reached for an alarm: the time that the remedy takes, with some to
            spare. Longer alarms earlier, and more often for nothing.
        full: share of the limit that counts as full.
        in_a_row: forecasts that must agree.
    """

    window_s: float = 600.0
    ahead_s: float = 480.0
    full: float = 0.95
    in_a_row: int = 5


@dataclass(frozen=True)
class Forecast:
    """When memory will be full.

    Attributes:
        full_in_s: seconds until the limit, by the slope.
        bytes_per_s: the slope.
        needed_bytes: at the end of the job, or of the time that was looked ahead.
        reason: for people.
    """

    full_in_s: float
    bytes_per_s: float
    needed_bytes: float
    reason: str


class MemoryGrowth:
    """Watches one process, or one job, of a given limit.

    Args:
        limit_bytes: what it may have.
        options: see there.
    """

    def __init__(self, limit_bytes: float, options: GrowthOptions | None = None) -> None:
        if not limit_bytes > 0:
            raise ValueError("the limit must be above 0 bytes")
        self.limit_bytes = limit_bytes
        self._options = options or GrowthOptions()
        self._readings: deque[tuple[float, float]] = deque()  # times, and the highest memory until then
        self._in_a_row = 0

    def reading(self, now_s: float, resident_bytes: float, remaining_s: float = math.inf) -> Forecast | None:
        """Take one in, and say whether it will run out; None as long as it will not.

        Args:
            now_s: on any clock that does not go back; an older reading than the last one is left out.
            resident_bytes: that count against the limit.
            remaining_s: of the job; infinite if that is not known.
        """
        if self._readings and now_s <= self._readings[-1][0]:
            return None
        highest = max(resident_bytes, self._readings[-1][1] if self._readings else 0.0)
        self._readings.append((now_s, highest))
        while self._readings[0][0] < now_s - self._options.window_s:
            self._readings.popleft()
        found = self._forecast(now_s, resident_bytes, remaining_s)
        self._in_a_row = self._in_a_row + 1 if found else 0
        return found if self._in_a_row >= self._options.in_a_row else None

    def _forecast(self, now_s: float, resident_bytes: float, remaining_s: float) -> Forecast | None:
        times, peaks = self._peaks()
        if len(times) < _LEAST_BLOCKS:
            return None
        slope, grows = theil_sen(times, peaks)
        if not grows or slope * (times[-1] - times[0]) < _LEAST_SHARE * self.limit_bytes:
            return None
        half = len(times) // 2
        older, newer = theil_sen(times[: half + 1], peaks[: half + 1])[0], theil_sen(times[half:], peaks[half:])[0]
        if newer <= 0:
            return None
        slope = min(slope, newer)
        level = max(resident_bytes, float(np.median(peaks + slope * (now_s - times))))
        missing = self._options.full * self.limit_bytes - level
        kept = newer / older if older > 0 else 1.0
        if kept < _LINE and newer * (times[-1] - times[half]) * kept / (1 - kept) < missing:
            return None
        full_in_s = max(0.0, missing / slope)
        if full_in_s > min(self._options.ahead_s, remaining_s):
            return None
        ahead_s = remaining_s if math.isfinite(remaining_s) else 2 * self._options.ahead_s
        needed = level + slope * ahead_s
        reason = (
            f"{level / 2**30:.1f} of {self.limit_bytes / 2**30:.1f} GiB and {slope * 60 / 2**20:.0f} MiB a minute "
            f"more: full in {full_in_s / 60:.0f} min"
        )
        return Forecast(full_in_s, slope, needed, reason)

    def _peaks(self) -> tuple[Array, Array]:
        """The highest memory at the end of each block of the window."""
        readings = np.array(self._readings)
        times, values = readings[:, 0], readings[:, 1]
        length = self._options.window_s / _NUM_BLOCKS
        blocks = np.floor((times[-1] - times) / length).astype(int)
        last = np.append(np.flatnonzero(np.diff(blocks)), len(blocks) - 1)
        return times[last], values[last]


def theil_sen(times: Array, values: Array) -> tuple[float, bool]:
    """The median slope between all pairs, and whether it is above zero with 95 % confidence (Kendall's test).

    Args:
        times: growing, shape (n,) with n at least 2.
        values: shape (n,).
    """
    num = len(times)
    first, second = np.triu_indices(num, 1)
    slopes = (values[second] - values[first]) / (times[second] - times[first])
    score = float(np.sign(slopes).sum())
    spread = math.sqrt(num * (num - 1) * (2 * num + 5) / 18)
    return float(np.median(slopes)), score > _Z95 * spread


def memory_to_ask_for(forecast: Forecast, limit_bytes: float, most_bytes: float = math.inf) -> float:
    """What a replacement needs, in bytes: what the forecast says with an eighth to spare, at least half as much again.

    Args:
        forecast: of the one that is replaced.
        limit_bytes: what it had.
        most_bytes: what a node of the partition gives.
    """
    return min(most_bytes, max(1.125 * forecast.needed_bytes, 1.5 * limit_bytes))
