"""How much of the GPU's time opportunistic jobs have beside a guaranteed one, by feedback on its mini-batches. Pure.

They use two kinds of time. *Gaps*, in which the guaranteed job has nothing on the GPU, cost it little, and about the
same however much of them is used: caches, and what is running when a gap ends. So where all gaps would cost it too
much, some are left out, and the others are used nearly to where they are likely to end; where it may lose more, all are
used, each to its end. A *share* of the rest costs it about as much as they get. So gaps come first, up to all that the
guaranteed job may lose. A share is raised in small steps while the job hardly loses anything, and halved when it has
lost what it may.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace

from hetstream.hetjob.gpu.orders import FULL_SHARE, Statistics
from hetstream.slurm_plugin.coordinator.batches import BatchHistory, Pace, merged

# A guaranteed job may lose so much of its speed, at most, for others to use its gaps, and for them to have a share of
# its busy time. The goal for users is 3 %; the rest is for what is not seen.
_GAP_TOLERANCE, TOLERANCE = 0.025, 0.02
_FIRST_GAP_USE = 500
_GAP_USE_STEP = 100
_LEAST_GAP_USE = 200
# Unless all gaps are used to their ends, so much of a likely gap is.
_LIKELY_USE = 900
_SHARE_STEP = 10
# Gaps below this part of a mini-batch are none. What is tried beside a job without gaps may cost it so much, at most.
_LEAST_GAP = _TRIAL_COST = 0.01
_MOST_SHARE = 950
# After so many judgements in a row that chance may explain, the pace alone was measured in a lucky moment.
_UNDECIDED = 10
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
        gap_use: how much of the likely gaps is used, in thousandths; all of them: each gap to its end.
        share: of the time outside of gaps, in thousandths.
        undecided: judgements in a row by which mini-batches are slower than they may be, unless that is chance.
        trial_at: of a job without gaps, the mini-batch at which a share of its busy time is tried again.
        reason: why this is so.
    """

    guaranteed: str = ""
    phase: Phase = Phase.VACANT
    history: BatchHistory = field(default_factory=BatchHistory)
    alone: Pace | None = None
    gap_use: int = _FIRST_GAP_USE
    share: int = 0
    undecided: int = 0
    trial_at: int = 0
    reason: str = "no guaranteed job is there"

    @property
    def has_no_gaps(self) -> bool:
        """Whether the guaranteed job keeps the GPU busy all the time, as far as its last mini-batches show."""
        return self.alone is not None and self.history.longest_gap_ns < _LEAST_GAP * self.alone.mean_ns


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
    pacing = replace(pacing, history=pacing.history.after(record))
    pace = pacing.history.pace()
    if pace is None:
        return pacing
    if pacing.phase is Phase.MEASURING or not others:
        gap_use = pacing.gap_use if others else _FIRST_GAP_USE
        reason = f"alone a mini-batch takes {_ms(pace.mean_ns)}"
        return Pacing(name, Phase.SHARING, pacing.history.changed(), pace, gap_use, reason=reason)
    return _judge(pacing, pace)


def _judge(pacing: Pacing, pace: Pace) -> Pacing:
    """Compare mini-batches of late with those alone."""
    assert pacing.alone is not None
    history = pacing.history.changed()
    slowdown = pace.mean_ns / pacing.alone.mean_ns - 1
    by_chance = (pace.error_ns + pacing.alone.error_ns) / pacing.alone.mean_ns
    tolerance = TOLERANCE if pacing.has_no_gaps or pacing.share else _GAP_TOLERANCE
    seen = f"mini-batches take {_ms(pace.mean_ns)}, {slowdown:+.1%} of alone"
    if pacing.has_no_gaps and pacing.share == 0:
        return _try_share(replace(pacing, history=history, alone=merged(pacing.alone, pace)), seen)
    undecided = pacing.undecided + 1 if tolerance < slowdown <= tolerance + by_chance else 0
    pacing = replace(pacing, undecided=undecided % _UNDECIDED)
    if undecided >= _UNDECIDED:
        return replace(pacing, history=history, phase=Phase.MEASURING, alone=None, reason=f"{seen}: measured anew")
    if slowdown > tolerance + by_chance:
        if pacing.share > 0:
            share = pacing.share // 2 if pacing.share >= 2 * _SHARE_STEP else 0
            # What this trial has cost is spread over so many mini-batches that it comes to the cost that is allowed.
            trial_at = history.seen + math.ceil(pacing.history.lasted * slowdown / _TRIAL_COST)
            return replace(
                pacing, history=history, share=share, trial_at=trial_at, reason=f"{seen}: less of its busy time"
            )
        if pacing.gap_use > _LEAST_GAP_USE:
            gap_use = max(_LEAST_GAP_USE, pacing.gap_use - 2 * _GAP_USE_STEP, _affordable(pacing.gap_use, slowdown))
            return replace(pacing, history=history, gap_use=gap_use, reason=f"{seen}: less of its gaps")
        return replace(
            pacing, history=history, phase=Phase.MEASURING, alone=None, gap_use=_FIRST_GAP_USE,
            reason=f"{seen}: measured anew",
        )  # fmt: skip
    if slowdown < -tolerance - by_chance:
        return replace(pacing, history=history, alone=pace, reason=f"{seen}: it has become faster")
    if slowdown <= tolerance and pacing.gap_use < FULL_SHARE and not pacing.has_no_gaps:
        gap_use = min(FULL_SHARE, pacing.gap_use + _GAP_USE_STEP, _affordable(pacing.gap_use, slowdown))
        return replace(pacing, history=history, gap_use=gap_use, reason=f"{seen}: more of its gaps")
    if slowdown > TOLERANCE / 2:
        return replace(pacing, history=history, reason=f"{seen}: left as it is")
    # Beside a job without gaps, a share costs as much as it is, also where chance hides that.
    hidden = pacing.has_no_gaps and by_chance > TOLERANCE
    most = int(TOLERANCE * FULL_SHARE) if hidden else _MOST_SHARE
    share = min(most, pacing.share + _SHARE_STEP)
    return replace(pacing, history=history, share=share, reason=f"{seen}: more of its busy time")


def _affordable(gap_use: int, slowdown: float) -> int:
    """The use of gaps that would cost what may be lost, if so much use has cost this slowdown."""
    return int(gap_use * _GAP_TOLERANCE / slowdown) if slowdown > 0 else FULL_SHARE


def _try_share(pacing: Pacing, seen: str) -> Pacing:
    """Nobody else was on the GPU: what was seen is the pace alone, however unlucky an earlier judgement was."""
    if pacing.history.seen < pacing.trial_at:
        return replace(pacing, reason=f"{seen}: nothing is left until mini-batch {pacing.trial_at}")
    return replace(pacing, share=_SHARE_STEP, reason=f"{seen}: a little of its busy time is tried")


def open_until_ns(pacing: Pacing, record: Statistics, now_ns: int) -> int:
    """Until when the guaranteed job leaves the GPU idle, as far as that may be used; 0: it is busy."""
    if not record.is_idle or not record.boundary_ns:
        return 0
    idle_ns = now_ns - record.boundary_ns
    if idle_ns > max(_LONG_IDLE_NS, _LONG_IDLE_FACTOR * pacing.history.longest_gap_ns):
        return now_ns + OPEN_NS
    if pacing.phase is not Phase.SHARING or pacing.has_no_gaps:
        return 0
    if pacing.gap_use >= FULL_SHARE:
        return now_ns + OPEN_NS
    if not _is_used(record.boundaries, pacing.gap_use):
        return 0
    end_ns = record.boundary_ns + _LIKELY_USE * pacing.history.likely_gap_ns // FULL_SHARE
    return min(end_ns, now_ns + OPEN_NS)


def _is_used(number: int, gap_use: int) -> bool:
    """Whether the gap with this number is among those that are used: as many as come to such a use, evenly spread."""
    return number * gap_use // _LIKELY_USE > (number - 1) * gap_use // _LIKELY_USE


def is_silent(pacing: Pacing, record: Statistics, now_ns: int) -> bool:
    """Whether the guaranteed job has been at one mini-batch for much longer than it takes."""
    usual_ns = pacing.alone.mean_ns if pacing.alone else 0
    return not record.is_idle and now_ns - record.updated_ns > _SILENT_FACTOR * usual_ns + _SILENT_NS


def _ms(duration_ns: float) -> str:
    return f"{duration_ns / 1e6:.1f} ms"
