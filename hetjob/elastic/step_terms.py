"""What is known of the parts of a training step while a job runs, and why the other parts are not. Pure.

A step computes gradients (T_grad), updates parameters (T_upd) and synchronises them (T_sync), as in DLRover-RM's model;
its data are loaded beside that (T_data). The trainers of a running job have one configuration: as many ranks, CPUs and
samples as when they began. So what is seen identifies the sum of the first three. T_upd is known besides where the
trainer has timed its optimizer, and T_sync with a single rank, where it is zero; T_grad is what is left. Embeddings
(T_emb) are looked up on the trainer in its forward pass: they are a part of T_grad. Nothing is guessed.

Called by `hetjob/master/elastic.py`; shown by `hetstream why` and `hetstream summary`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, stdev

import msgspec

from hetstream.mpi_dataworkers.wire.messages import LoaderStatus, OptimizerCalls

# A loader's times are those of its last five seconds: readings that are nearer to each other count some steps twice.
_EVERY_S = 6.0
_LEAST_READINGS, _MOST_READINGS = 8, 50
_Z95 = 1.96
# A trainer that nearly always waits says little of what it does in between.
_MOST_WAIT_SHARE = 0.95
# Where this many in a row are so far from the mean, another phase of the program has begun.
_OTHER, _OTHERS = 0.25, 3
GRADIENT, UPDATE, SYNCHRONISATION = "T_grad", "T_upd", "T_sync"


class StepTerm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a step's time.

    Attributes:
        name: such as `T_grad + T_upd`.
        seconds: None where it is not identified.
        error_s: half of the interval that holds it with 95 % confidence; None where `seconds` is.
        reason: what it rests on; or why it is not identified.
    """

    name: str
    seconds: float | None
    error_s: float | None
    reason: str

    def __str__(self) -> str:
        if self.seconds is None or self.error_s is None:
            return f"{self.name}: not identified: {self.reason}"
        return f"{self.name}: {1e3 * self.seconds:.3g} ms ± {1e3 * self.error_s:.2g} ms: {self.reason}"


class _UpdateReadings:
    """The optimizer's time for a step of a loader, by what a trainer has counted between two looks."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=_MOST_READINGS)
        self.num_timed = 0
        self._before: tuple[int, int, OptimizerCalls] | None = None  # pid, steps

    def note(self, row: LoaderStatus) -> None:
        """Take in a look at a trainer; without a timed call since the one before, that one stays."""
        if row.optimizer is None:
            return
        now = row.pid, row.totals.steps, row.optimizer
        if self._before is None or self._before[0] != row.pid or now[1] < self._before[1]:
            self._before = now
            return
        _, steps, calls = self._before
        num_steps, num_timed = row.totals.steps - steps, row.optimizer.num_timed - calls.num_timed
        if num_steps <= 0 or num_timed <= 0:
            return
        self._before = now
        each_s = (row.optimizer.timed_s - calls.timed_s) / num_timed
        self.seconds.append(each_s * (row.optimizer.num_calls - calls.num_calls) / num_steps)
        self.num_timed += num_timed

    def term(self) -> StepTerm:
        """T_upd, as far as it is known."""
        num = len(self.seconds)
        if self._before is None:
            return StepTerm(UPDATE, None, None, "no call of an optimizer was seen: none of torch's, or a compiled one")
        if num < _LEAST_READINGS:
            return StepTerm(UPDATE, None, None, f"{num} of {_LEAST_READINGS} readings of timed calls of the optimizer")
        reason = f"{num} readings, {self.num_timed} timed calls of the optimizer"
        return StepTerm(UPDATE, fmean(self.seconds), _error_s(self.seconds), reason)


class StepTerms:
    """The parts of a job's step.

    Attributes:
        told: as they were last worked out; () while no step was seen.
    """

    def __init__(self) -> None:
        self.told: tuple[StepTerm, ...] = ()
        self._readings: deque[float] = deque(maxlen=_MOST_READINGS)
        self._updates = _UpdateReadings()
        self._num_others = 0
        self._num_noted = 0
        self._num_ranks = 0
        self._read_at = -math.inf

    def note(self, loaders: Sequence[LoaderStatus], loading: StepTerm, now: float) -> None:
        """Take in a moment, if the last one is long enough ago.

        Args:
            loaders: as the dispatcher knows them; the first of the program that takes steps counts.
            loading: T_data, as far as it is known.
            now: on any clock.
        """
        rows = [row for row in loaders if row.epoch >= 0 and row.step_s > 0 and math.isfinite(row.step_s)]
        if now - self._read_at < _EVERY_S or not rows:
            return
        first = min(row.ordinal for row in rows)
        ranks = [row for row in rows if row.ordinal == first]
        # The others wait, while they synchronise, for the rank that waits longest for data: its own time is the step's.
        slowest = max(ranks, key=lambda row: row.wait_share)
        if slowest.wait_share > _MOST_WAIT_SHARE:
            return
        self._read_at = now
        if slowest.world_size != self._num_ranks:
            self._begin_anew()
            self._num_ranks = slowest.world_size
        is_other = bool(self._readings) and abs(slowest.step_s / fmean(self._readings) - 1) > _OTHER
        self._num_others = self._num_others + 1 if is_other else 0
        if self._num_others >= _OTHERS:
            self._begin_anew()
        self._readings.append(slowest.step_s)
        # Each rank updates as much as any other, so one of them says it.
        self._updates.note(min(ranks, key=lambda row: row.rank))
        # As they come in the beginning, later once in five minutes: what is told is written to a file.
        self._num_noted += 1
        if self._num_noted <= 2 * _LEAST_READINGS or self._num_noted % _MOST_READINGS == 0:
            self.told = (*self._terms(), loading)

    def _begin_anew(self) -> None:
        self._readings.clear()
        self._updates = _UpdateReadings()
        self._num_others = 0

    def _terms(self) -> tuple[StepTerm, ...]:
        num = len(self._readings)
        names = [GRADIENT, UPDATE] if self._num_ranks == 1 else [GRADIENT, UPDATE, SYNCHRONISATION]
        name = " + ".join(names)
        if num < _LEAST_READINGS:
            return (StepTerm(name, None, None, f"{num} of {_LEAST_READINGS} readings"),)
        reason = f"{num} readings of the time between two batches"
        together = StepTerm(name, fmean(self._readings), _error_s(self._readings), reason)
        update = self._updates.term()
        apart = f"ranks, their CPUs and batches do not vary while the job runs ({self._num_ranks} ranks)"
        if self._num_ranks == 1:
            alone = StepTerm(SYNCHRONISATION, 0.0, 0.0, "one rank has nobody to synchronise with")
            return together, update, _without(together, update, GRADIENT), alone
        others = (StepTerm(each, None, None, apart) for each in names if each != UPDATE)
        return together, update, _without(together, update, f"{GRADIENT} + {SYNCHRONISATION}"), *others


def _without(together: StepTerm, update: StepTerm, name: str) -> StepTerm:
    """What the sum leaves for the others; errors of both readings add up as those of independent ones do."""
    if update.seconds is None or update.error_s is None or together.seconds is None or together.error_s is None:
        return StepTerm(name, None, None, f"{together.name} is known, and {UPDATE} is not")
    seconds = together.seconds - update.seconds
    if seconds <= 0:
        # Where the host runs ahead of the device, the time between two batches is not the device's.
        return StepTerm(name, None, None, f"{UPDATE} alone is as long as the time between two batches")
    return StepTerm(name, seconds, math.hypot(together.error_s, update.error_s), f"{together.name} without {UPDATE}")


def _error_s(readings: Sequence[float]) -> float:
    return _Z95 * stdev(readings) / math.sqrt(len(readings))
