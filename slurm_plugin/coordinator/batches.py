"""The guaranteed job's last mini-batches: how long they take, alone and beside others, and what others cost. Pure.

Some of its gaps are left to nobody. The mini-batches with such gaps are its pace alone, seen at the same time as what
others cost: a job that becomes slower by itself becomes so in both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetstream.hetjob.gpu.orders import Statistics

# Mini-batches beside others, and those without, that are kept.
_KEPT = 64
_KEPT_ALONE = 32
# Of the latter, so many are kept when the others are seen to be out of date.
_KEPT_WHEN_FASTER = 4
# What gaps are likely to be, and how much memory is needed, so many of the last ones say.
_LATE = 32
# A judgement is over so many mini-batches, or over fewer that took so long together.
_JUDGED = 8
_FEWEST = 2
_LONG_NS = 2_000_000_000
# What a pause of others changes is felt from the second mini-batch on.
_IN_BETWEEN = 1
# What takes longer than this many times the median counts as so long: a checkpoint or an evaluation in between says
# nothing about mini-batches.
_FAR = 1.5
# So many standard errors are not by chance.
SURE = 2.0
# A job has another pace by itself if mini-batches alone are off by so many standard deviations, and by this part.
_OTHER_PACE, _LEAST_CHANGE = 3.0, 0.02


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


@dataclass(frozen=True)
class BatchHistory:
    """Mini-batches as they were seen, the last ones at the end.

    Attributes:
        seen: how many the job said it had made.
        recent: at most the last 32.
        fresh: how many were seen beside others since conditions changed last, up to 64.
        alone: at most the last 32 in which nobody else might launch.
        beside: those since conditions changed last in which others might, at most the last 64.
    """

    seen: int = 0
    recent: tuple[MiniBatch, ...] = ()
    fresh: int = -_IN_BETWEEN
    alone: tuple[MiniBatch, ...] = ()
    beside: tuple[MiniBatch, ...] = ()

    def after(self, record: Statistics, *, is_alone: bool = False) -> BatchHistory:
        """The history with the mini-batch of a record, if that is a new one. The first has no boundary before it.

        Args:
            record: what the job says.
            is_alone: nobody else might launch in this mini-batch.
        """
        if record.boundaries == self.seen:
            return self
        if record.boundaries < 2 or record.mini_batch_ns <= 0:
            return replace(self, seen=record.boundaries)
        batch = MiniBatch(record.mini_batch_ns, record.gap_ns, record.peak_bytes)
        history = replace(self, seen=record.boundaries, recent=(*self.recent, batch)[-_LATE:])
        if self.fresh < 0:
            return replace(history, fresh=self.fresh + 1)
        if is_alone:
            return history._after_alone(batch)
        fresh = self.fresh + 1 if self.fresh < _KEPT else _KEPT - _JUDGED + 1
        return replace(history, beside=(*self.beside, batch)[-_KEPT:], fresh=fresh)

    def _after_alone(self, batch: MiniBatch) -> BatchHistory:
        """Two in a row that are far from all others on the same side are the first ones of another pace."""
        if len(self.alone) > _JUDGED:
            durations = [before.duration_ns for before in self.alone[:-1]]
            others = [min(duration, _FAR * statistics.median(durations)) for duration in durations]
            far_ns = max(_OTHER_PACE * statistics.stdev(others), _LEAST_CHANGE * statistics.fmean(others))
            off_ns = [late.duration_ns - statistics.fmean(others) for late in (self.alone[-1], batch)]
            if min(off_ns) > far_ns or max(off_ns) < -far_ns:
                return replace(self, alone=(self.alone[-1], batch), beside=(), fresh=0)
        return replace(self, alone=(*self.alone, batch)[-_KEPT_ALONE:])

    def become_faster(self) -> BatchHistory:
        """Nobody makes another job faster: it has become so by itself since most of its mini-batches alone."""
        return replace(self, alone=self.alone[-_KEPT_WHEN_FASTER:], beside=(), fresh=0)

    def changed(self) -> BatchHistory:
        """From here on, others are told something else: what comes is judged by itself."""
        return replace(self, fresh=-_IN_BETWEEN, beside=())

    def undisturbed(self) -> BatchHistory:
        """Nobody was there to be told something else: the next mini-batch counts as any other one alone."""
        return replace(self, fresh=max(0, self.fresh))

    @property
    def is_due(self) -> bool:
        """Whether it is time for a judgement: after every 8 mini-batches beside others, or every 2 s."""
        return len(self.beside) >= _FEWEST and self.fresh % self._judged == 0

    @property
    def is_full(self) -> bool:
        """Whether longer waiting would show little more."""
        return len(self.beside) >= min(_KEPT, _JUDGED * self._judged)

    @property
    def _judged(self) -> int:
        return max(1, min(_JUDGED, _LONG_NS // max(1, self.recent[-1].duration_ns))) if self.recent else _JUDGED

    def pace_alone(self) -> Pace | None:
        """The pace without others; None while there is too little to judge it by."""
        durations = [batch.duration_ns for batch in self.alone]
        if len(durations) < _FEWEST or (len(durations) < _JUDGED and sum(durations) < _LONG_NS):
            return None
        return _mean(durations, _FAR * statistics.median(durations))

    def cost(self) -> Pace | None:
        """How much longer a mini-batch takes beside others than alone; None while nothing is known.

        Both parts of it are compared: the busy one, and the gap. Gaps differ by themselves, and on a GPU others do not
        make them longer; so they count only where chance does not explain it.
        """
        if min(len(self.beside), len(self.alone)) < _FEWEST:
            return None
        busy = _difference(
            *([batch.duration_ns - batch.gap_ns for batch in seen] for seen in (self.beside, self.alone))
        )
        gap = _difference(*([batch.gap_ns for batch in seen] for seen in (self.beside, self.alone)))
        longer_ns = gap.mean_ns if gap.mean_ns > SURE * gap.error_ns else 0.0
        return Pace(busy.mean_ns + longer_ns, busy.error_ns)

    @property
    def lasted(self) -> int:
        """How many mini-batches conditions have been as they are."""
        return self.fresh + _IN_BETWEEN

    @property
    def peak_bytes(self) -> int:
        """Most memory that one of them had."""
        return max((batch.peak_bytes for batch in self.recent), default=0)

    def gap_quantile_ns(self, part: float) -> int:
        """A gap is shorter than this in so many of the cases."""
        gaps = sorted(batch.gap_ns for batch in self.recent)
        return gaps[min(len(gaps) - 1, int(part * len(gaps)))] if gaps else 0

    @property
    def longest_gap_ns(self) -> int:
        """No idle gap of late was longer."""
        return max((batch.gap_ns for batch in self.recent), default=0)


def _mean(values: Sequence[float], most: float) -> Pace:
    values = [min(value, most) for value in values]
    return Pace(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))


def _difference(beside: Sequence[float], alone: Sequence[float]) -> Pace:
    """By how much the one mean is above the other."""
    most = _FAR * max(statistics.median(beside), statistics.median(alone))
    pairs = [[min(value, most) for value in values] for values in (beside, alone)]
    means = [statistics.fmean(values) for values in pairs]
    # Few values say little of how far they are apart by chance, so both together say it.
    squares = sum((value - mean) ** 2 for values, mean in zip(pairs, means, strict=True) for value in values)
    deviation = math.sqrt(squares / (len(beside) + len(alone) - 2))
    return Pace(means[0] - means[1], deviation * math.sqrt(1 / len(beside) + 1 / len(alone)))
