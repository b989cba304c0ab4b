"""How much of the GPU's time opportunistic jobs have beside a guaranteed one, by feedback on its mini-batches. Pure.

There is one rule: they get more while that costs the guaranteed job less than it may lose, and less when it costs more.
What it costs is the difference between mini-batches in which they may launch and others, spread evenly among them, in
which nobody may. So a job that becomes slower by itself, or a machine that does, is not taken for one that is held up.

More is, in this order: more of its *gaps*, in which it has nothing on the GPU, each nearly to where it is likely to
end; then all of them, later and later, at last each to its end; then a *share* of the rest of its time. What was too
much is tried again when the cost of the last trial is spread over so many mini-batches that it is hardly felt.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hetstream.hetjob.gpu.orders import FULL_SHARE, Statistics

# The guaranteed job's last mini-batches: how long they take, alone and beside others, and what others cost. Pure.
#
# In some gaps nobody else may launch. These mini-batches show the job's own pace, at the same time as the others show
# what sharing costs: a job that becomes slower by itself becomes so in both.

# Mini-batches beside others, and those without, that are kept.
_KEPT = 64
_KEPT_ALONE = 32
# Mini-batches without others that are kept once the older ones are seen to be out of date.
_KEPT_WHEN_FASTER = 4
# Latest mini-batches from which gaps and memory are estimated.
_LATE = 32
# Mini-batches of a judgement; fewer are enough if they took this time together.
_JUDGED = 8
_FEWEST = 2
_LONG_NS = 2_000_000_000
# What a pause of others changes is felt from the second mini-batch on.
_IN_BETWEEN = 1
# What takes longer than this many times the median counts as so long: a checkpoint or an evaluation in between says
# nothing about mini-batches.
_FAR = 1.5
# Standard errors from which on a difference is not by chance.
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
class BatchTime:
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
        """Return the history with the mini-batch of a record, if that is a new one. The first has no boundary before
        it.

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
        """Keep few mini-batches alone: nobody makes another job faster, so it has become so by itself since."""
        return replace(self, alone=self.alone[-_KEPT_WHEN_FASTER:], beside=(), fresh=0)

    def changed(self) -> BatchHistory:
        """From here on, others are told something else: what comes is judged by itself."""
        return replace(self, fresh=-_IN_BETWEEN, beside=())

    def undisturbed(self) -> BatchHistory:
        """Go on where nobody was there to be told something else: the next mini-batch counts as any other one alone."""
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

    def pace_alone(self) -> BatchTime | None:
        """Return the pace without others; None while there is too little to judge it by."""
        durations = [batch.duration_ns for batch in self.alone]
        if len(durations) < _FEWEST or (len(durations) < _JUDGED and sum(durations) < _LONG_NS):
            return None
        return _mean(durations, _FAR * statistics.median(durations))

    def cost(self) -> BatchTime | None:
        """Return how much longer a mini-batch takes beside others than alone; None while nothing is known.

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
        return BatchTime(busy.mean_ns + longer_ns, busy.error_ns)

    @property
    def lasted(self) -> int:
        """How many mini-batches conditions have been as they are."""
        return self.fresh + _IN_BETWEEN

    @property
    def peak_bytes(self) -> int:
        """Most memory that one of them had."""
        return max((batch.peak_bytes for batch in self.recent), default=0)

    def gap_quantile_ns(self, part: float) -> int:
        """Return the length that gaps stay below in this share of the cases."""
        gaps = sorted(batch.gap_ns for batch in self.recent)
        return gaps[min(len(gaps) - 1, int(part * len(gaps)))] if gaps else 0

    @property
    def longest_gap_ns(self) -> int:
        """No idle gap of late was longer."""
        return max((batch.gap_ns for batch in self.recent), default=0)


def _mean(values: Sequence[float], most: float) -> BatchTime:
    values = [min(value, most) for value in values]
    return BatchTime(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))


def _difference(beside: Sequence[float], alone: Sequence[float]) -> BatchTime:
    """By how much the one mean is above the other."""
    most = _FAR * max(statistics.median(beside), statistics.median(alone))
    pairs = [[min(value, most) for value in values] for values in (beside, alone)]
    means = [statistics.fmean(values) for values in pairs]
    # Few values say little of how far they are apart by chance, so both together say it.
    squares = sum((value - mean) ** 2 for values, mean in zip(pairs, means, strict=True) for value in values)
    deviation = math.sqrt(squares / (len(beside) + len(alone) - 2))
    return BatchTime(means[0] - means[1], deviation * math.sqrt(1 / len(beside) + 1 / len(alone)))


# A guaranteed job may lose so much of its speed, at most, for others to use its gaps. What brings them less, the ends
# of gaps and a share of its busy time, may cost this part of that. The goal for users is 3 %; the rest is for what is
# not seen.
TOLERANCE, _DEAR = 0.0225, 0.75
# Of what may be lost, trials of what turns out to be too much may cost so much more.
_TRIAL_PART = 0.42
# Of the mini-batches, others get nothing in this part, to see how long they take then.
_ALONE_PART = 1 / 20
# Up to `_ALL_GAPS`, the use of gaps is how many of them are used; from there on, how far each.
_FIRST_GAP_USE, _LEAST_GAP_USE, _ALL_GAPS = 500, 100, 900
_MORE_GAPS, _LONGER_GAPS = 200, 25
# Where a gap is likely to end: it is shorter in this part of the cases. So much of that is used.
_SHORTER_PART, _LIKELY_USE = 1 / 2, 0.98
_SHARE_STEP = 10
# Gaps below this part of a mini-batch are none.
_LEAST_GAP = 0.01
_MOST_SHARE = 950
_GOLDEN = (math.sqrt(5) - 1) / 2
# Time for which a gap is opened at once. A coordinator that is stopped closes gaps by saying nothing.
OPEN_NS = 30_000_000
# A gap this much longer than all recent ones is none between two mini-batches: the job decodes, saves or waits.
_LONG_IDLE_NS = 1_000_000_000
_LONG_IDLE_FACTOR = 4
# After this time without a boundary nobody knows what the guaranteed job does, nor how fast.
_SILENT_FACTOR = 3
_SILENT_NS = 200_000_000


class Phase(enum.Enum):
    """What goes on between a guaranteed job and the others on its GPU."""

    VACANT = "no guaranteed job is there"
    MEASURING = "the guaranteed job runs alone, to see how fast it is"
    SHARING = "the others use what it leaves"


@dataclass(frozen=True)
class Pacing:
    """The state of one GPU.

    Attributes:
        guaranteed: name of the guaranteed job's process; empty: none.
        phase: of `Phase`.
        history: of the guaranteed job's mini-batches.
        alone: its pace without others; None: not known.
        gap_use: how much of the gaps is used, in thousandths; all of them: each gap to its end.
        share: of the time outside of gaps, in thousandths.
        trial_at: the mini-batch from which on more is tried.
        reason: why this is so.
        is_by_itself: nobody else was there when its last mini-batch ended.
    """

    guaranteed: str = ""
    phase: Phase = Phase.VACANT
    history: BatchHistory = field(default_factory=BatchHistory)
    alone: BatchTime | None = None
    gap_use: int = _FIRST_GAP_USE
    share: int = 0
    trial_at: int = 0
    reason: str = "no guaranteed job is there"
    is_by_itself: bool = False

    @property
    def has_no_gaps(self) -> bool:
        """Whether the guaranteed job keeps the GPU busy all the time, as far as its last mini-batches show."""
        return self.alone is not None and self.history.longest_gap_ns < _LEAST_GAP * self.alone.mean_ns

    @property
    def part_beside(self) -> float:
        """In which part of the mini-batches others may launch."""
        if self.has_no_gaps:
            return 1 - _ALONE_PART if self.share else 0.0
        return min(1.0, self.gap_use / _ALL_GAPS) * (1 - _ALONE_PART)

    @property
    def tolerance(self) -> float:
        """What the others may cost as they are told now."""
        is_dear = (self.share or self.gap_use > _ALL_GAPS) and not self.has_no_gaps
        return _DEAR * TOLERANCE if is_dear else TOLERANCE

    def is_left_alone(self, number: int) -> bool:
        """Return whether nobody may launch after this boundary until the next one.

        Such boundaries are spread evenly, and have no period that the job's own mini-batches could have, too.
        """
        return self.phase is not Phase.SHARING or number * _GOLDEN % 1 >= self.part_beside


def advance(pacing: Pacing, name: str, record: Statistics, others: bool) -> Pacing:
    """Return the state after a record of the guaranteed job.

    Args:
        pacing: the state before.
        name: of the guaranteed job's process.
        record: what it says.
        others: whether opportunistic jobs are on the GPU.
    """
    if name != pacing.guaranteed:
        return Pacing(name, Phase.MEASURING, BatchHistory(seen=record.boundaries), reason="a guaranteed job has come")
    if record.boundaries == pacing.history.seen:
        return pacing
    is_by_itself = pacing.is_by_itself and not others  # who has just left was there in a part of it
    is_alone = is_by_itself or pacing.is_left_alone(record.boundaries - 1)
    known = len(pacing.history.alone)
    history = pacing.history.undisturbed() if is_by_itself else pacing.history
    pacing = replace(pacing, history=history.after(record, is_alone=is_alone), is_by_itself=False)
    if is_alone:
        # What was too much at another pace may not be at this one.
        trial_at = pacing.trial_at if len(pacing.history.alone) >= known else 0
        pacing = replace(pacing, alone=pacing.history.pace_alone() or pacing.alone, trial_at=trial_at)
    if pacing.alone is None:
        return pacing
    if pacing.phase is Phase.MEASURING or not others:
        reason = f"alone a mini-batch takes {_ms(pacing.alone.mean_ns)}"
        history = pacing.history.changed()
        return Pacing(name, Phase.SHARING, history, pacing.alone, reason=reason, is_by_itself=not others)
    if pacing.has_no_gaps and not pacing.share:
        return _try_share(pacing)
    cost = pacing.history.cost() if pacing.history.is_due and not is_alone else None
    return pacing if cost is None else _judge(pacing, pacing.alone, cost)


def measured_anew(pacing: Pacing, reason: str) -> Pacing:
    """From here on, nobody knows how fast the guaranteed job is alone."""
    history = replace(pacing.history.changed(), alone=())
    return replace(pacing, history=history, phase=Phase.MEASURING, alone=None, reason=reason)


def _judge(pacing: Pacing, alone: BatchTime, cost: BatchTime) -> Pacing:
    """Give others more or less of the guaranteed job's time, by what they cost it, or wait until that is clearer."""
    slowdown = cost.mean_ns * pacing.part_beside / alone.mean_ns
    by_chance = SURE * cost.error_ns * pacing.part_beside / alone.mean_ns
    seen = f"mini-batches take {_ms(alone.mean_ns)} alone and {slowdown:+.1%} beside others"
    most, is_full = pacing.tolerance, pacing.history.is_full
    if slowdown < -max(by_chance, TOLERANCE) and not pacing.has_no_gaps:
        return replace(pacing, history=pacing.history.become_faster(), reason=f"{seen}: it has become faster by itself")
    if slowdown - by_chance > most or (is_full and slowdown > most):
        return _less(pacing, slowdown, seen)
    is_little = slowdown + by_chance <= most or (is_full and slowdown <= most / 2)
    if is_little and pacing.history.seen >= pacing.trial_at:
        return _more(pacing, slowdown, by_chance, seen)
    return replace(pacing, reason=f"{seen}: left as it is")


def _less(pacing: Pacing, slowdown: float, seen: str) -> Pacing:
    history = pacing.history
    excess = slowdown if pacing.has_no_gaps else slowdown - pacing.tolerance
    trial_at = history.seen + math.ceil(history.lasted * excess / (_TRIAL_PART * pacing.tolerance))
    pacing = replace(pacing, history=history.changed(), trial_at=trial_at)
    if pacing.share:
        share = pacing.share // 2 if pacing.share >= 2 * _SHARE_STEP else 0
        return replace(pacing, share=share, reason=f"{seen}: less of its busy time")
    if pacing.gap_use > _ALL_GAPS:
        return replace(pacing, gap_use=pacing.gap_use - _LONGER_GAPS, reason=f"{seen}: shorter gaps")
    gap_use = max(_LEAST_GAP_USE, pacing.gap_use // 2, int(pacing.gap_use * TOLERANCE / slowdown))
    return replace(pacing, gap_use=gap_use, reason=f"{seen}: less of its gaps")


def _more(pacing: Pacing, slowdown: float, by_chance: float, seen: str) -> Pacing:
    history = pacing.history.changed()
    if not pacing.has_no_gaps and pacing.gap_use < _ALL_GAPS:
        affordable = int(pacing.gap_use * TOLERANCE / slowdown) if slowdown > 0 else FULL_SHARE
        gap_use = min(_ALL_GAPS, pacing.gap_use + _MORE_GAPS, max(affordable, pacing.gap_use))
        return replace(pacing, history=history, gap_use=gap_use, reason=f"{seen}: more of its gaps")
    if not pacing.has_no_gaps and pacing.gap_use < FULL_SHARE and slowdown <= _DEAR * TOLERANCE:
        gap_use = pacing.gap_use + _LONGER_GAPS
        return replace(pacing, history=history, gap_use=gap_use, reason=f"{seen}: longer gaps")
    if slowdown > TOLERANCE / 2:
        return replace(pacing, reason=f"{seen}: left as it is")
    # Beside a job without gaps, a share costs as much as it is, also where chance hides that.
    hidden = pacing.has_no_gaps and by_chance > TOLERANCE
    most = int(TOLERANCE * FULL_SHARE) // _SHARE_STEP * _SHARE_STEP if hidden else _MOST_SHARE
    share = min(most, pacing.share + _SHARE_STEP)
    return replace(pacing, history=history, share=share, reason=f"{seen}: more of its busy time")


def _try_share(pacing: Pacing) -> Pacing:
    """Nobody else is on a GPU whose guaranteed job has no gaps, until it is time for a trial."""
    if pacing.history.seen < pacing.trial_at:
        return replace(pacing, reason=f"it has no gaps: nothing is left until mini-batch {pacing.trial_at}")
    history = pacing.history.changed()
    return replace(pacing, history=history, share=_SHARE_STEP, reason="it has no gaps: a little of its time is tried")


def open_until_ns(pacing: Pacing, record: Statistics, now_ns: int) -> int:
    """Until when the guaranteed job leaves the GPU idle, as far as that may be used; 0: it is busy."""
    if not record.is_idle or not record.boundary_ns:
        return 0
    idle_ns = now_ns - record.boundary_ns
    if idle_ns > max(_LONG_IDLE_NS, _LONG_IDLE_FACTOR * pacing.history.longest_gap_ns):
        return now_ns + OPEN_NS
    if pacing.has_no_gaps or pacing.is_left_alone(record.boundaries):
        return 0
    if pacing.gap_use >= FULL_SHARE:
        return now_ns + OPEN_NS
    longer = max(0, pacing.gap_use - _ALL_GAPS) / (FULL_SHARE - _ALL_GAPS)
    likely_ns = pacing.history.gap_quantile_ns(_SHORTER_PART + (1 - _SHORTER_PART) * longer)
    return min(record.boundary_ns + int(_LIKELY_USE * likely_ns), now_ns + OPEN_NS)


def share_now(pacing: Pacing, record: Statistics) -> int:
    """Return the share of the guaranteed job's busy time that others have in this mini-batch."""
    return 0 if pacing.is_left_alone(record.boundaries) else pacing.share


def is_silent(pacing: Pacing, record: Statistics, now_ns: int) -> bool:
    """Return whether the guaranteed job has been at one mini-batch for much longer than it takes."""
    usual_ns = pacing.alone.mean_ns if pacing.alone else 0
    return not record.is_idle and now_ns - record.updated_ns > _SILENT_FACTOR * usual_ns + _SILENT_NS


def _ms(duration_ns: float) -> str:
    return f"{duration_ns / 1e6:.1f} ms"
