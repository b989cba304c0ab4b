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
from dataclasses import dataclass, field, replace

from hetstream.hetjob.gpu.orders import FULL_SHARE, Statistics
from hetstream.slurm_plugin.coordinator.batches import SURE, BatchHistory, Pace

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
# Gaps are opened for so long at a time. A coordinator that is stopped closes them by saying nothing.
OPEN_NS = 30_000_000
# A gap that is so much longer than any of late is no gap between two mini-batches: the job decodes, saves, or waits.
_LONG_IDLE_NS = 1_000_000_000
_LONG_IDLE_FACTOR = 4
# Without a boundary for so long, nobody knows what the guaranteed job does, nor how fast.
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
    alone: Pace | None = None
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
        """Whether nobody may launch after this boundary until the next one.

        Such boundaries are spread evenly, and have no period that the job's own mini-batches could have, too.
        """
        return self.phase is not Phase.SHARING or number * _GOLDEN % 1 >= self.part_beside


def advance(pacing: Pacing, name: str, record: Statistics, others: bool) -> Pacing:
    """The state after a record of the guaranteed job.

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


def _judge(pacing: Pacing, alone: Pace, cost: Pace) -> Pacing:
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
    """The share of the guaranteed job's busy time that others have in this mini-batch."""
    return 0 if pacing.is_left_alone(record.boundaries) else pacing.share


def is_silent(pacing: Pacing, record: Statistics, now_ns: int) -> bool:
    """Whether the guaranteed job has been at one mini-batch for much longer than it takes."""
    usual_ns = pacing.alone.mean_ns if pacing.alone else 0
    return not record.is_idle and now_ns - record.updated_ns > _SILENT_FACTOR * usual_ns + _SILENT_NS


def _ms(duration_ns: float) -> str:
    return f"{duration_ns / 1e6:.1f} ms"
