"""Whether a process will run out of memory, and when: resident memory over time -> a forecast. Pure.

The paper refers to a report for its formula. This one asks, over windows of ten minutes and of more, for growth that
comes in rare steps:

* *it grows*: the robust slope (Theil-Sen) of the highest memory so far is above zero with 95 % confidence (Kendall),
  not by a single step, and memory was not freed since;
* *it goes on growing*: a program that fills its caches grows fast, and then less and less. What the newer half of the
  window grew less than the older half goes on as a geometric series, and that must reach the limit, too;
* *it arrives*: the limit is reached before the job ends, and within the time that is looked ahead;
* *it says so several times*: as many readings in a row as are asked for.

Nothing in the readings tells a cache that fills at a constant rate from a leak, before it is full: whoever alarms a
time `l` before memory is full also alarms for those caches that end within `l` of the limit. What tells them apart is
the data: a cache of samples is full when each was read once. So until then (`data_left_s`) there is an alarm only if
memory would be full before, and afterwards readings begin anew. Where that is not known, growth is believed to go on
for an eighth of the time that it has lasted, and for as long as the remedy takes at the least.

The highest memory so far counts: what is freed and taken again (garbage collection, epochs) has peaks that do
not grow. What does not count against the limit, such as page cache, must not be in the readings.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hetstream.mpi_dataworkers.wire.messages import LoaderStatus

Array = NDArray[np.float64]

_NUM_BLOCKS = 12
# Fewest blocks whose pairs give 95 % confidence.
_LEAST_BLOCKS = 10
_Z95 = 1.645
# The newer half of a growth over the older half: above it the growth is taken for a line.
_LINE = 0.9
# Growth of less than this share of the limit over the window is none: allocators round, and pages come late.
_LEAST_SHARE = 0.01
# Windows, as multiples of the first: steps that are rarer than it are steps of a longer one.
_WINDOWS = (1, 2, 4, 8, 16)
# After each sample was read once, growth is looked at in this part of the first window: what is left may be short.
_SHORT = 0.25
# Growth of which more than this share is a single step is no growth yet.
_MOST_OF_ONE_STEP = 0.6
# Growth counts from this share of the limit on. It is over after a pause of this many times its longest one.
_NOTED_SHARE, _LONGEST_PAUSE = 0.005, 1.5
# Fewer steps than this are no growth yet: two pauses between them say how long one lasts.
_LEAST_STEPS = 3
# Memory that is below its highest by this share of the limit was freed: it must first grow again.
_FREED_SHARE = 0.1
# Growth of which nothing else is known is believed for this share of the time that it has lasted.
_BELIEVED = 0.125
# A past reading is on the line of the growth if it is so near, as a share of the limit.
_ON_LINE_SHARE = 0.05


@dataclass(frozen=True)
class GrowthOptions:
    """What a forecast is asked for.

    Attributes:
        window_s: of the first window.
        ahead_s: how far ahead the limit may be reached for an alarm.
        least_ahead_s: how far ahead it must be looked: the time that the remedy takes, with some to spare. Longer
            alarms earlier, and more often for nothing.
        full: share of the limit that counts as full.
        in_a_row: forecasts that must agree.
    """

    window_s: float = 600.0
    ahead_s: float = 480.0
    least_ahead_s: float = 480.0
    full: float = 0.95
    in_a_row: int = 5


@dataclass(frozen=True)
class Forecast:
    """When memory will be full.

    Attributes:
        full_in_s: seconds until the limit, by the slope.
        bytes_per_s: the slope.
        needed_bytes: at the end of the job; where that is not known, if it grows for as long again as it has.
        reason: for people.
    """

    full_in_s: float
    bytes_per_s: float
    needed_bytes: float
    reason: str


class _Window:
    """The highest memory at the end of each of the last blocks of time."""

    def __init__(self, length_s: float) -> None:
        self._block_s = length_s / _NUM_BLOCKS
        self._blocks: deque[tuple[int, float, float]] = deque(maxlen=_NUM_BLOCKS)

    def note(self, now_s: float, highest: float) -> None:
        number = math.floor(now_s / self._block_s)
        if self._blocks and self._blocks[-1][0] == number:
            self._blocks.pop()
        self._blocks.append((number, now_s, highest))
        while self._blocks[0][0] <= number - _NUM_BLOCKS:
            self._blocks.popleft()

    def peaks(self) -> tuple[Array, Array] | None:
        """Times and values; None for too few."""
        if len(self._blocks) < _LEAST_BLOCKS:
            return None
        found = np.array(self._blocks)
        return found[:, 1], found[:, 2]


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
        self._highest = 0.0
        self._read_at = -math.inf
        self._grown = [(-math.inf, 0.0)]  # when it had grown by so much again, and to what
        self._past: list[tuple[float, float]] = []  # times and the highest memory, ever coarser
        self._past_every_s = 0.0
        self._is_data_read = False
        self._in_a_row = 0
        self._windows: list[_Window] = []
        self._begin()

    def _begin(self) -> None:
        shares = [_SHORT, *_WINDOWS] if self._is_data_read else _WINDOWS
        self._windows = [_Window(share * self._options.window_s) for share in shares]

    def reading(
        self,
        now_s: float,
        resident_bytes: float,
        remaining_s: float = math.inf,
        data_left_s: float | None = None,
    ) -> Forecast | None:
        """Take one in, and say whether it will run out; None as long as it will not.

        Args:
            now_s: on any clock that does not go back; an older reading than the last one is left out.
            resident_bytes: that count against the limit.
            remaining_s: of the job; infinite if that is not known.
            data_left_s: until each sample was read once, and what keeps samples is full; 0 from then on. None if that
                is not known.
        """
        if now_s <= self._read_at:
            return None
        self._read_at = now_s
        is_data_known = data_left_s is not None and data_left_s <= 0
        if is_data_known and not self._is_data_read:
            self._is_data_read = True
            self._begin()
        self._highest = max(resident_bytes, self._highest)
        for window in self._windows:
            window.note(now_s, self._highest)
        if self._highest - self._grown[-1][1] >= _NOTED_SHARE * self.limit_bytes:
            self._grown.append((now_s, self._highest))
        self._note_past(now_s)
        found: Forecast | None = None
        if resident_bytes >= self._highest - _FREED_SHARE * self.limit_bytes:
            forecasts = (self._forecast(window, now_s, remaining_s, data_left_s) for window in self._windows)
            found = min(
                (forecast for forecast in forecasts if forecast), key=lambda forecast: forecast.full_in_s, default=None
            )
        self._in_a_row = self._in_a_row + 1 if found else 0
        return found if self._in_a_row >= self._options.in_a_row else None

    def _forecast(
        self, window: _Window, now_s: float, remaining_s: float, data_left_s: float | None
    ) -> Forecast | None:
        found = window.peaks()
        if found is None:
            return None
        times, peaks = found
        total = float(peaks[-1] - peaks[0])
        if total < _LEAST_SHARE * self.limit_bytes or not self._goes_on(now_s, times, peaks):
            return None
        slope, grows = theil_sen(times, peaks)
        if not grows:
            return None
        half = len(times) // 2
        older, newer = theil_sen(times[: half + 1], peaks[: half + 1])[0], theil_sen(times[half:], peaks[half:])[0]
        slope = min(slope, newer)
        if slope <= 0:
            return None
        level = max(self._highest, float(np.max(peaks + slope * (now_s - times))))
        missing = self._options.full * self.limit_bytes - level
        kept = newer / older if older > 0 else 1.0
        if kept < _LINE and newer * (times[-1] - times[half]) * kept / (1 - kept) < missing:
            return None
        full_in_s = max(0.0, missing / slope)
        lasted_s = self._lasted_s(now_s, level, slope)
        if full_in_s > min(self._ahead_s(lasted_s, data_left_s), remaining_s):
            return None
        needed = level + slope * (remaining_s if math.isfinite(remaining_s) else lasted_s)
        reason = (
            f"{level / 2**30:.1f} of {self.limit_bytes / 2**30:.1f} GiB and {slope * 60 / 2**20:.0f} MiB a minute "
            f"more: full in {full_in_s / 60:.0f} min"
        )
        return Forecast(full_in_s, slope, needed, reason)

    def _ahead_s(self, lasted_s: float, data_left_s: float | None) -> float:
        """How far ahead a growth is believed."""
        options = self._options
        if data_left_s:
            return min(options.ahead_s, data_left_s)
        return min(options.ahead_s, max(options.least_ahead_s, _BELIEVED * lasted_s))

    def _goes_on(self, now_s: float, times: Array, peaks: Array) -> bool:
        """Whether a growth is more than a single step, and has not paused for much longer than it did before."""
        if float(np.diff(peaks).max()) > _MOST_OF_ONE_STEP * float(peaks[-1] - peaks[0]):
            return False
        grew_at = [at for at, _ in self._grown if at >= times[0]]
        longest_s = max((second - first for first, second in pairwise(grew_at)), default=0.0)
        return len(grew_at) >= _LEAST_STEPS and now_s - grew_at[-1] <= _LONGEST_PAUSE * longest_s

    def _note_past(self, now_s: float) -> None:
        if not self._past or now_s - self._past[-1][0] >= self._past_every_s:
            self._past.append((now_s, self._highest))
        if len(self._past) > 128:
            self._past = self._past[::2]
            self._past_every_s = 2 * (self._past[-1][0] - self._past[0][0]) / len(self._past)

    def _lasted_s(self, now_s: float, level: float, slope: float) -> float:
        """For how long memory has been on the line of its growth."""
        past = np.array(self._past)
        is_off = np.abs(past[:, 1] - (level - slope * (now_s - past[:, 0]))) > _ON_LINE_SHARE * self.limit_bytes
        return now_s - float(past[np.flatnonzero(is_off)[-1], 0] if is_off.any() else past[0, 0])


def theil_sen(times: Array, values: Array) -> tuple[float, bool]:
    """Return the median slope between all pairs, and whether it is above zero with 95 % confidence (Kendall's test).

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


def memory_to_ask_for(forecast: Forecast, limit_bytes: float) -> float:
    """Return what a replacement needs, in bytes: what the forecast says with an eighth to spare, at least half as much
    again.

    Args:
        forecast: of the one that is replaced.
        limit_bytes: what it had.
    """
    return max(1.125 * forecast.needed_bytes, 1.5 * limit_bytes)


# When a job has read each sample of its training data once: (moments of its loaders) -> seconds that are left. Pure.
#
# Until then memory grows by what keeps samples, such as a dataset that caches them; afterwards growth has another
# cause.

# A loader that is no further than this in an epoch when it is first seen has begun it.
_BEGUN_SHARE = 0.02


class FirstPass:
    """Counts the steps of all ranks together, from when it is made.

    Whoever begins in the middle of an epoch has read each sample when the next one is over. The first loader of the
    program counts; a program that makes one for each epoch goes on counting.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], int] | None = None
        self._num_taken = 0
        self._needed: int | None = None
        self._begun = (0.0, 0)

    def left_s(self, loaders: Sequence[LoaderStatus], now: float) -> float | None:
        """Until each sample was read once, as fast as up to now; 0 from then on.

        Args:
            loaders: as the dispatcher knows them.
            now: on any clock that does not go back.

        Returns:
            None while the length of an epoch is not known, or no step was taken.
        """
        self._count(loaders)
        if self._needed is None:
            first = min((row.ordinal for row in loaders if row.epoch >= 0), default=None)
            rows = [row for row in loaders if row.ordinal == first and row.epoch >= 0]
            if not rows or min(row.num_steps for row in rows) <= 0:
                return None
            left = sum(max(0, row.num_steps - row.step) for row in rows)
            if any(row.step > _BEGUN_SHARE * row.num_steps for row in rows):
                left += sum(row.num_steps for row in rows)
            self._needed, self._begun = self._num_taken + left, (now, self._num_taken)
        if self._num_taken >= self._needed:
            return 0.0
        passed_s, taken = now - self._begun[0], self._num_taken - self._begun[1]
        return (self._needed - self._num_taken) * passed_s / taken if passed_s > 0 and taken > 0 else None

    def _count(self, loaders: Sequence[LoaderStatus]) -> None:
        known = self._steps
        self._steps = {**(known or {}), **{(row.ordinal, row.rank): row.totals.steps for row in loaders}}
        if known is not None:
            self._num_taken += sum(max(0, steps - known.get(key, 0)) for key, steps in self._steps.items())
