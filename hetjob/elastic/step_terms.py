"""What is known of the parts of a training step while a job runs, and why the other parts are not. Pure.

A step computes gradients (T_grad), updates parameters (T_upd) and synchronises them (T_sync), as in DLRover-RM's model;
its data are loaded beside that (T_data). The trainers of a running job have one configuration: as many ranks, CPUs and
samples as when they began. So what is seen identifies the sum of the first three, and with a single rank T_sync, which
is zero. To tell T_grad and T_upd apart the program's own calls would have to be timed; on a GPU those return before the
work is done, so the time of the call says nothing. Nothing of that is guessed.

Called by `hetjob/master/elastic.py`; shown by `hetstream why` and `hetstream summary`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, stdev

import msgspec

from hetstream.mpi_dataworkers.wire.messages import LoaderStatus

# A loader's times are those of its last five seconds: readings that are nearer to each other count some steps twice.
_EVERY_S = 6.0
_LEAST_READINGS, _MOST_READINGS = 8, 50
_Z95 = 1.96
# A trainer that nearly always waits says little of what it does in between.
_MOST_WAIT_SHARE = 0.95
# Where this many in a row are so far from the mean, another phase of the program has begun.
_OTHER, _OTHERS = 0.25, 3


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


class StepTerms:
    """The parts of a job's step.

    Attributes:
        told: as they were last worked out; () while no step was seen.
    """

    def __init__(self) -> None:
        self.told: tuple[StepTerm, ...] = ()
        self._readings: deque[float] = deque(maxlen=_MOST_READINGS)
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
        # The others wait, while they synchronise, for the rank that waits longest for data: its own time is the step's.
        slowest = max((row for row in rows if row.ordinal == first), key=lambda row: row.wait_share)
        if slowest.wait_share > _MOST_WAIT_SHARE:
            return
        self._read_at = now
        if slowest.world_size != self._num_ranks:
            self._readings.clear()
            self._num_ranks = slowest.world_size
        is_other = bool(self._readings) and abs(slowest.step_s / fmean(self._readings) - 1) > _OTHER
        self._num_others = self._num_others + 1 if is_other else 0
        if self._num_others >= _OTHERS:
            self._readings.clear()
            self._num_others = 0
        self._readings.append(slowest.step_s)
        # As they come in the beginning, later once in five minutes: what is told is written to a file.
        self._num_noted += 1
        if self._num_noted <= _LEAST_READINGS or self._num_noted % _MOST_READINGS == 0:
            self.told = (*self._terms(), loading)

    def _terms(self) -> tuple[StepTerm, ...]:
        num = len(self._readings)
        names = ["T_grad", "T_upd"] if self._num_ranks == 1 else ["T_grad", "T_upd", "T_sync"]
        together = " + ".join(names)
        if num < _LEAST_READINGS:
            return (StepTerm(together, None, None, f"{num} of {_LEAST_READINGS} readings"),)
        error_s = _Z95 * stdev(self._readings) / math.sqrt(num)
        found = [StepTerm(together, fmean(self._readings), error_s, f"{num} readings of the time between two batches")]
        if self._num_ranks == 1:
            found.append(StepTerm("T_sync", 0.0, 0.0, "one rank has nobody to synchronise with"))
        apart = f"ranks, their CPUs and batches do not vary while the job runs ({self._num_ranks} ranks)"
        found += [StepTerm(name, None, None, apart) for name in names]
        return tuple(found)
