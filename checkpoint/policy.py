"""When to save and what to keep: decisions, each with its reason. Pure: they read no clock, no file and no torch.

The checkpointer measures, asks before every save whether one is due, and tells the schedule what it cost. Ranks never
talk here: they exchange their decisions, and all of them take what `agree_on_interval` gives. The interval is Young's,
with Daly's higher-order terms, in the time that training loses to each save, or a fixed one:

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974
    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006

Two bounds can make it longer: the share of the time that saves may cost, and the time that a generation takes to
disk (a shorter interval would only make generations that never get there).

Retention is a function of the manifests alone, called after a commit, by whoever committed. It remembers nothing, so a
restart changes nothing. It never deletes the newest good checkpoint, one that is being read, or one newer than the
newest good: with that, a wrong rule costs disk space and no training.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from hetstream.base.errors import OptionsError
from hetstream.base.text import count_words

DEFAULT_MAX_OVERHEAD = 0.03
# The belief before anything is known, worth one failure: preemption, time limits, wrong programs and hardware together.
DEFAULT_MTBF_S = 24 * 3600.0
# Costs change with the state and the machine's load; the median of a few forgives a single slow save.
_NUM_REMEMBERED = 8


@dataclass(frozen=True)
class Every:
    """A fixed interval.

    Attributes:
        num_steps: training steps between two saves.
        seconds: or the time between them; with several ranks it is turned into steps by their measured speed.
    """

    num_steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.seconds is None):
            raise OptionsError("a fixed interval has either num_steps or seconds")
        if self.num_steps is not None and (not isinstance(self.num_steps, int) or self.num_steps < 1):
            raise OptionsError(f"num_steps={self.num_steps!r}: at least 1")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise OptionsError(f"seconds={self.seconds}: more than 0")


@dataclass(frozen=True)
class Adaptive:
    """An interval that follows measurements.

    Attributes:
        max_overhead: at most this share of the training time is spent blocked in saves.
        mtbf_s: what to believe about the time between failures before the job's own history says more.
    """

    max_overhead: float = DEFAULT_MAX_OVERHEAD
    mtbf_s: float = DEFAULT_MTBF_S

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.max_overhead < 1:
            problems.append(f"max_overhead={self.max_overhead}: a share between 0 and 1, such as 0.03")
        if not 0 < self.mtbf_s < math.inf:
            problems.append(f"mtbf_s={self.mtbf_s}: seconds, more than 0")
        if problems:
            raise OptionsError("; ".join(problems))


@dataclass(frozen=True)
class Attempt:
    """One start of the job, as far as the time between failures is concerned.

    Attributes:
        started_s: when it started, in seconds of any one clock.
        last_seen_s: its end, or the last moment at which it is known to have run.
        failed: it did not end by itself.
    """

    started_s: float
    last_seen_s: float
    failed: bool


@dataclass(frozen=True)
class FailureHistory:
    """What earlier attempts say about failures.

    Attributes:
        num_failures: attempts that did not end by themselves.
        observed_s: how long all of them ran.
    """

    num_failures: int = 0
    observed_s: float = 0.0

    @classmethod
    def of(cls, attempts: Iterable[Attempt]) -> FailureHistory:
        """Count the failures. A clock that went backwards counts as no time."""
        known = list(attempts)
        return cls(
            num_failures=sum(run.failed for run in known),
            observed_s=sum(max(0.0, run.last_seen_s - run.started_s) for run in known),
        )

    def mtbf_s(self, prior_s: float, running_s: float = 0.0) -> float:
        """Return the mean time between failures: a prior worth one failure in `prior_s`, and all that was observed.

        Args:
            prior_s: the belief before anything is observed.
            running_s: how long the present attempt has run without a failure.
        """
        return (prior_s + self.observed_s + running_s) / (1 + self.num_failures)


@dataclass(frozen=True)
class IntervalDecision:
    """How long to train until the next save.

    Attributes:
        num_steps: in steps, at least 1.
        interval_s: in seconds of training, as far as it is known.
        bound_by: what it follows from: `first`, `fixed`, `failures`, `overhead` or `persist`.
        reason: the same in words and figures.
    """

    num_steps: int
    interval_s: float | None
    bound_by: str
    reason: str


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Training time between two saves that loses the least to saves and failures together.

    Args:
        cost_s: how long a save blocks training.
        mtbf_s: mean time between failures.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def decide(rule: Adaptive, *, cost_s: float, persist_s: float, step_s: float, mtbf_s: float) -> IntervalDecision:
    """Choose the interval from measurements.

    Args:
        rule: the user's bounds.
        cost_s: how long a save blocks training.
        persist_s: how long a generation takes from memory to disk; 0 if none got there yet.
        step_s: how long a training step takes.
        mtbf_s: mean time between failures.
    """
    wanted = {
        "failures": daly_interval_s(cost_s, mtbf_s),
        "overhead": cost_s / rule.max_overhead,
        "persist": persist_s,
    }
    bound_by = max(wanted, key=lambda name: wanted[name])
    interval_s = wanted[bound_by]
    num_steps = max(1, math.ceil(interval_s / step_s)) if step_s > 0 else 1
    blocked = f"{rounded_duration(cost_s)} blocked by each save"
    because = {
        "failures": f"least loss at a failure every {rounded_duration(mtbf_s)} and {blocked}",
        "overhead": f"{blocked} may cost at most {rule.max_overhead:.3g} of the time",
        "persist": f"a generation takes {rounded_duration(persist_s)} to disk",
    }[bound_by]
    reason = (
        f"every {count_words(num_steps, 'step')} of {rounded_duration(step_s)}, {rounded_duration(interval_s)}: "
        f"{because}"
    )
    return IntervalDecision(num_steps, interval_s, bound_by, reason)


def agree_on_interval(decisions: Sequence[IntervalDecision]) -> IntervalDecision:
    """Return the one decision of all ranks: that of the rank which wants to save least often, the lowest of equals."""
    return max(decisions, key=lambda decision: decision.num_steps)


@dataclass
class Schedule:
    """When the next save is due. One per rank; every rank that is told the same decisions is due at the same steps.

    Attributes:
        rule: fixed or adaptive.
        step: of the last save, or that training started from.
        now_s: when training went on after it.
        history: earlier attempts.
        started_s: when this attempt began to train.
        decision: what holds until the next save. Before the first save nothing is measured, so an adaptive schedule
            has one after the first step: it costs one save, and the second one is chosen with knowledge.
    """

    rule: Every | Adaptive
    step: int
    now_s: float
    history: FailureHistory = FailureHistory()
    started_s: float = field(init=False)
    decision: IntervalDecision = field(init=False)
    _costs_s: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=_NUM_REMEMBERED))
    _persists_s: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=_NUM_REMEMBERED))

    def __post_init__(self) -> None:
        self.started_s = self.now_s
        self.decision = IntervalDecision(1, None, "first", "one step: what a save and a step cost is not known yet")
        if isinstance(self.rule, Every) and self.rule.num_steps:
            self.decision = _fixed(self.rule, 0.0)

    def is_due(self, step: int, now_s: float, *, alone: bool = False) -> bool:
        """Return whether to save after `step`.

        Args:
            step: steps done so far.
            now_s: the time now.
            alone: there is one rank, so the clock may decide too: a save is due after the interval even if steps have
                become slower than they were.
        """
        if step >= self.step + self.decision.num_steps:
            return True
        steps_rule = isinstance(self.rule, Every) and self.rule.num_steps is not None
        interval_s = self.decision.interval_s
        if steps_rule or not alone or interval_s is None or step <= self.step:
            return False
        return now_s >= self.now_s + interval_s

    def note_persist(self, persist_s: float) -> None:
        """A generation has got to disk, `persist_s` after the checkpoint writer took it up."""
        self._persists_s.append(persist_s)

    def propose(self, step: int, blocked_s: float, now_s: float, once_s: float = 0.0) -> IntervalDecision:
        """Return what this rank would do after a save.

        Args:
            step: that was saved.
            blocked_s: how long the save blocked training.
            now_s: the time after it.
            once_s: how much of that no later save will cost: its memory was allocated.
        """
        self._costs_s.append(max(0.0, blocked_s - once_s))
        num_steps = step - self.step
        step_s = max(0.0, now_s - blocked_s - self.now_s) / num_steps if num_steps > 0 else 0.0
        if isinstance(self.rule, Every):
            return _fixed(self.rule, step_s)
        return decide(
            self.rule,
            cost_s=median(self._costs_s),
            persist_s=median(self._persists_s) if self._persists_s else 0.0,
            step_s=step_s,
            mtbf_s=self.history.mtbf_s(self.rule.mtbf_s, now_s - self.started_s),
        )

    def adopt(self, decision: IntervalDecision, step: int, now_s: float) -> None:
        """Count from the save of `step` on, with the decision that all ranks share."""
        self.decision, self.step, self.now_s = decision, step, now_s


def _fixed(rule: Every, step_s: float) -> IntervalDecision:
    if rule.num_steps:
        return IntervalDecision(rule.num_steps, None, "fixed", f"every {count_words(rule.num_steps, 'step')}, as asked")
    assert rule.seconds
    num_steps = max(1, math.ceil(rule.seconds / step_s)) if step_s > 0 else 1
    reason = (
        f"every {rounded_duration(rule.seconds)}, as asked: {count_words(num_steps, 'step')} of "
        f"{rounded_duration(step_s)}"
    )
    return IntervalDecision(num_steps, rule.seconds, "fixed", reason)


def rounded_duration(seconds: float) -> str:
    """Return seconds as a person writes them, with three figures."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * size or (unit == "s" and seconds >= 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"


@dataclass(frozen=True)
class Best:
    """Keep the best by a metric.

    Attributes:
        metric: its name in what `save` was given.
        mode: whether less or more is better.
        num: how many to keep.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    num: int = 1

    def __post_init__(self) -> None:
        problems = []
        if not self.metric:
            problems.append("metric='': the name of a metric that save() is given")
        if self.mode not in ("min", "max"):
            problems.append(f"mode={self.mode!r}: 'min' or 'max'")
        if not isinstance(self.num, int) or self.num < 1:
            problems.append(f"num={self.num!r}: at least 1")
        if problems:
            raise OptionsError("; ".join(problems))


@dataclass(frozen=True)
class Retention:
    """What the user wants to keep; a checkpoint stays if any part says so.

    Attributes:
        keep_last: the newest good ones; None keeps everything.
        keep_every: the first checkpoint of each interval of this many steps as well.
        keep_best: the best as well.
    """

    keep_last: int | None = 2
    keep_every: int | None = None
    keep_best: Best | None = None

    def __post_init__(self) -> None:
        given = {"keep_last": self.keep_last, "keep_every": self.keep_every}
        problems = [
            f"{name}={value!r}: at least 1"
            for name, value in given.items()
            if value is not None and (not isinstance(value, int) or value < 1)
        ]
        if not isinstance(self.keep_best, Best | None):
            problems.append(f"keep_best={self.keep_best!r}: such as Best('loss')")
        if problems:
            raise OptionsError("; ".join(problems))


@dataclass(frozen=True, order=True)
class Saved:
    """A committed checkpoint as its manifests describe it; ordered from the oldest to the newest.

    Attributes:
        attempt: number of the start of the job that saved it; a later attempt is newer at any step.
        step: of training.
        good: nothing is known against it; False once a checksum or a missing file said otherwise.
        metrics: what `save` was given.
        repeat: how often the attempt had saved this step before.
    """

    attempt: int
    step: int
    good: bool = field(default=True, compare=False)
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)
    repeat: int = 0


@dataclass(frozen=True)
class RetentionDecision:
    """What becomes of one checkpoint.

    Attributes:
        saved: the checkpoint.
        keep: whether it stays.
        reason: why.
    """

    saved: Saved
    keep: bool
    reason: str


def judge(checkpoints: Iterable[Saved], rule: Retention) -> list[RetentionDecision]:
    """Decide on every checkpoint of a directory.

    Args:
        checkpoints: all committed ones, in any order.
        rule: what to keep.

    Returns:
        One verdict each, oldest first.
    """
    ordered = sorted(checkpoints)
    good = [saved for saved in ordered if saved.good]
    newest = good[-1] if good else None
    wanted = _wanted(good, rule)
    verdicts = []
    for saved in ordered:
        if saved == newest:
            verdict = RetentionDecision(saved, True, "the newest good one")
        elif newest is None or saved > newest:
            verdict = RetentionDecision(saved, True, "damaged, but there is no good one as new")
        elif saved in wanted:
            verdict = RetentionDecision(saved, True, wanted[saved])
        elif rule.keep_last is None:
            verdict = RetentionDecision(saved, True, "nothing is deleted without keep_last")
        else:
            state = "" if saved.good else "damaged, "
            verdict = RetentionDecision(
                saved, False, f"{state}older than the last {rule.keep_last} good, and nothing else keeps it"
            )
        verdicts.append(verdict)
    return verdicts


def _wanted(good: list[Saved], rule: Retention) -> dict[Saved, str]:
    """The good ones that the rule names, with the reason; of two reasons the first."""
    wanted: dict[Saved, str] = {}
    for saved in good[-(rule.keep_last or len(good)) :] if good else []:
        wanted[saved] = f"one of the last {rule.keep_last or len(good)}"
    if rule.keep_best:
        best, sign = rule.keep_best, 1 if rule.keep_best.mode == "min" else -1
        # Of equals the older: a later tie takes nothing's place.
        ranked = sorted(
            (sign * saved.metrics[best.metric], saved)
            for saved in good
            if math.isfinite(saved.metrics.get(best.metric, math.nan))
        )
        for _, saved in ranked[: best.num]:
            wanted.setdefault(saved, f"{best.mode} {best.metric}={saved.metrics[best.metric]:g}")
    if rule.keep_every:
        # The first of each span stays the first for good. Of several attempts' the newest counts: it is the history
        # that training went on from.
        first: dict[int, Saved] = {}
        for saved in good:
            span = saved.step // rule.keep_every
            if span and (span not in first or saved.attempt > first[span].attempt):
                first[span] = saved
        for span, saved in first.items():
            wanted.setdefault(saved, f"the first from step {span * rule.keep_every} on")
    return wanted
