"""The guaranteed job's last mini-batches, and how long they take when it is alone. Pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from hetstream.hetjob.gpu.orders import Statistics

_KEPT = 32
# A judgement is over so many mini-batches, or over fewer that took so long together.
_JUDGED = 8
_FEWEST = 2
_LONG_NS = 2_000_000_000
# What a pause of others changes is felt from the second mini-batch on.
_IN_BETWEEN = 1


@dataclass(frozen=True)
class MiniBatch:
    """One that was seen to end: its time, the idle gap before it, and the memory that it had in use at most."""

    duration_ns: int
    gap_ns: int
    peak_bytes: int


@dataclass(frozen=True)
class Pace:
    """How long mini-batches take: the mean, and how far the mean may be off by chance alone."""

    mean_ns: float
    error_ns: float


def merged(before: Pace, now: Pace) -> Pace:
    """One pace of two measurements that are worth the same: neither is taken only because it is the later one."""
    return Pace((before.mean_ns + now.mean_ns) / 2, math.hypot(before.error_ns, now.error_ns) / 2)


@dataclass(frozen=True)
class BatchHistory:
    """Mini-batches as they were seen, the last ones at the end.

    Attributes:
        seen: how many the job said it had made.
        recent: at most the last 32.
        fresh: how many of them are of the time since conditions changed last.
    """

    seen: int = 0
    recent: tuple[MiniBatch, ...] = ()
    fresh: int = -_IN_BETWEEN

    def after(self, record: Statistics) -> BatchHistory:
        """The history with the mini-batch of a record, if that is a new one. The first has no boundary before it."""
        if record.boundaries == self.seen:
            return self
        if record.boundaries < 2 or record.mini_batch_ns <= 0:
            return replace(self, seen=record.boundaries)
        batch = MiniBatch(record.mini_batch_ns, record.gap_ns, record.peak_bytes)
        return BatchHistory(record.boundaries, (*self.recent, batch)[-_KEPT:], min(self.fresh + 1, _KEPT))

    def changed(self) -> BatchHistory:
        """From here on, conditions are others: what comes is judged by itself."""
        return replace(self, fresh=-_IN_BETWEEN)

    def pace(self) -> Pace | None:
        """The pace since conditions changed; None while there is too little to judge it by."""
        durations = (
            [batch.duration_ns for batch in self.recent[len(self.recent) - self.fresh :]] if self.fresh > 0 else []
        )
        if len(durations) < _FEWEST or (len(durations) < _JUDGED and sum(durations) < _LONG_NS):
            return None
        return Pace(statistics.fmean(durations), statistics.stdev(durations) / math.sqrt(len(durations)))

    @property
    def lasted(self) -> int:
        """How many mini-batches conditions have been as they are."""
        return self.fresh + _IN_BETWEEN

    @property
    def peak_bytes(self) -> int:
        """Most memory that one of them had."""
        return max((batch.peak_bytes for batch in self.recent), default=0)

    @property
    def likely_gap_ns(self) -> int:
        """An idle gap is at least so long in three of four cases."""
        gaps = sorted(batch.gap_ns for batch in self.recent)
        return gaps[len(gaps) // 4] if gaps else 0

    @property
    def longest_gap_ns(self) -> int:
        """No idle gap of late was longer."""
        return max((batch.gap_ns for batch in self.recent), default=0)
