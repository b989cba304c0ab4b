"""Which checkpoints to keep and which to delete, each with the reason. Pure; a function of the manifests alone.

Called after a commit, by whoever committed, and by nothing else; it remembers nothing, so a restart changes nothing. It
never deletes the newest good checkpoint, one that is being read, or one newer than the newest good: with that, a wrong
rule costs disk space and no training.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hetstream.base.errors import OptionsError


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


def judge(checkpoints: Iterable[Saved], rule: Retention, being_read: Collection[Saved] = ()) -> list[RetentionDecision]:
    """Decide on every checkpoint of a directory.

    Args:
        checkpoints: all committed ones, in any order.
        rule: what to keep.
        being_read: those that somebody holds open; they stay until the next time.

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
        elif saved in being_read:
            verdict = RetentionDecision(saved, True, "being read")
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
