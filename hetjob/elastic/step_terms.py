"""What is known of the parts of a training step while a job runs, and why the other parts are not. Pure.

A step computes gradients (T_grad), updates parameters (T_upd) and synchronises them (T_sync), as in DLRover-RM's model;
its data are loaded beside that (T_data). The trainers of a running job have one configuration: as many ranks, CPUs and
samples as when they began. So what is seen identifies the sum of the first three. T_upd is known besides where the
trainer has timed its optimizer, T_emb (looking up embeddings) where it has timed that, and T_sync with a single rank,
where it is zero; T_grad is what is left. Without embeddings there is no T_emb. Nothing is guessed.

Of a trainer whose feature graph is cut, T_features is the part of the first that it computes itself.

Called by `hetjob/master/elastic.py`; shown by `hetstream why` and `hetstream job`.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

import msgspec

from hetstream.base.text import printable
from hetstream.hetjob.elastic.snapshot import CompanionState, Snapshot
from hetstream.hetjob.ports import MAX_POINTS, MOST, Measured, RemainingSource, RemainingWork, SpeedPoint
from hetstream.mpi_dataworkers.wire.messages import FeatureCut, LoaderStatus

# A loader's times are those of its last five seconds: readings that are nearer to each other count some steps twice.
_EVERY_S = 6.0
_LEAST_READINGS, _MOST_READINGS = 8, 50
_Z95 = 1.96
# A trainer that nearly always waits says little of what it does in between.
_MOST_WAIT_SHARE = 0.95
# Where this many in a row are so far from the mean, another phase of the program has begun.
_OTHER, _OTHERS = 0.25, 3
GRADIENT, EMBEDDING, UPDATE, SYNCHRONISATION = "T_grad", "T_emb", "T_upd", "T_sync"
# What a reader of the names may not know.
_MEANINGS = {
    GRADIENT: "computing gradients",
    EMBEDDING: "looking up embeddings",
    UPDATE: "updating parameters",
    SYNCHRONISATION: "synchronising ranks",
    "T_features": "the trainer's part of the feature graph",
    "T_data": "loading data",
}


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
        name = f"{self.name} ({_MEANINGS[self.name]})" if self.name in _MEANINGS else self.name
        if self.seconds is None or self.error_s is None:
            return f"{name}: not identified: {self.reason}"
        return f"{name}: {1e3 * self.seconds:.3g} ms ± {1e3 * self.error_s:.2g} ms: {self.reason}"


class _TimedReadings:
    """What a trainer has timed, for a step of a loader, by what it has counted between two looks.

    Args:
        name: of the term.
        what: that is timed, in the plural.
    """

    def __init__(self, name: str, what: str) -> None:
        self.name, self._what = name, what
        self.seconds: deque[float] = deque(maxlen=_MOST_READINGS)
        self.num_timed = 0
        self._before: _Timed | None = None

    @property
    def is_seen(self) -> bool:
        """Whether the trainer has anything of the kind."""
        return self._before is not None

    def note(self, row: LoaderStatus, num_timed: int, timed_s: float) -> None:
        """Take in a look at a trainer; without anything timed since the one before, that one stays.

        Args:
            row: of the trainer; its optimizer has stepped.
            num_timed, timed_s: timed since it was started. An optimizer's call, or the time between two, is the unit.
        """
        assert row.optimizer is not None
        now = _Timed(row.pid, row.totals.steps, row.optimizer.num_calls, num_timed, timed_s)
        before = self._before
        if before is None or before.pid != now.pid or now.steps < before.steps:
            self._before = now
            return
        num_steps, num = now.steps - before.steps, now.num_timed - before.num_timed
        if num_steps <= 0 or num <= 0:
            return
        self._before = now
        each_s = (now.timed_s - before.timed_s) / num
        self.seconds.append(each_s * (now.num_calls - before.num_calls) / num_steps)
        self.num_timed += num

    def term(self) -> StepTerm:
        """Return the term, as far as it is known."""
        num = len(self.seconds)
        if num < _LEAST_READINGS:
            return StepTerm(self.name, None, None, f"{num} of {_LEAST_READINGS} readings of {self._what}")
        reason = f"{num} readings, {self.num_timed:,} {self._what}"
        return StepTerm(self.name, fmean(self.seconds), _error_s(self.seconds), reason)


class _Timed(NamedTuple):
    """A look: whose, steps of its loader, calls of its optimizers, and what was timed in all."""

    pid: int
    steps: int
    num_calls: int
    num_timed: int
    timed_s: float


class _Phase:
    """What was seen since the program last began to do something else.

    Args:
        num_ranks: that it has.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.readings: deque[float] = deque(maxlen=_MOST_READINGS)
        self.features: deque[float] = deque(maxlen=_MOST_READINGS)
        self.updates = _TimedReadings(UPDATE, "timed calls of the optimizer")
        self.lookups = _TimedReadings(EMBEDDING, "timed steps")
        self._num_others = 0

    def is_over(self, step_s: float) -> bool:
        """Return whether enough steps in a row are different enough for another phase to have begun."""
        is_other = bool(self.readings) and abs(step_s / fmean(self.readings) - 1) > _OTHER
        self._num_others = self._num_others + 1 if is_other else 0
        return self._num_others >= _OTHERS

    def note(self, row: LoaderStatus) -> None:
        """Take in what a rank has timed."""
        if (calls := row.optimizer) is not None:
            self.updates.note(row, calls.num_timed, calls.timed_s)
            if calls.embeddings is not None:
                self.lookups.note(row, calls.embeddings.num_timed, calls.embeddings.timed_s)


class StepTerms:
    """The parts of a job's step.

    Attributes:
        told: as they were last worked out; () while no step was seen.
    """

    def __init__(self) -> None:
        self.told: tuple[StepTerm, ...] = ()
        self._phase = _Phase(0)
        self._num_noted = 0
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
        if slowest.world_size != self._phase.num_ranks or self._phase.is_over(slowest.step_s):
            self._phase = _Phase(slowest.world_size)
        self._phase.readings.append(slowest.step_s)
        if slowest.features is not None and 0 <= slowest.features.share <= 1:
            self._phase.features.append(slowest.features.share * (slowest.step_s / (1 - slowest.wait_share)))
        # Each rank updates as much as any other, and looks up as much, so one of them says it.
        self._phase.note(min(ranks, key=lambda row: row.rank))
        # As they come in the beginning, later once in five minutes: what is told is written to a file.
        self._num_noted += 1
        if self._num_noted <= 2 * _LEAST_READINGS or self._num_noted % _MOST_READINGS == 0:
            self.told = (*self._terms(), *self._features_term(slowest.features), loading)

    def _features_term(self, cut: FeatureCut | None) -> tuple[StepTerm, ...]:
        """What the trainer computes of its feature graph, and why so much."""
        if cut is None:
            return ()
        num, reason = len(self._phase.features), printable(cut.reason)
        if num < _LEAST_READINGS:
            return (StepTerm("T_features", None, None, f"{num} of {_LEAST_READINGS} readings; {reason}"),)
        return (StepTerm("T_features", fmean(self._phase.features), _error_s(self._phase.features), reason),)

    def _terms(self) -> tuple[StepTerm, ...]:
        phase = self._phase
        num, has_embeddings, is_alone = len(phase.readings), phase.lookups.is_seen, phase.num_ranks == 1
        computing = [GRADIENT, EMBEDDING, UPDATE] if has_embeddings else [GRADIENT, UPDATE]
        names = computing if is_alone else [*computing, SYNCHRONISATION]
        name = " + ".join(names)
        if num < _LEAST_READINGS:
            return (StepTerm(name, None, None, f"{num} of {_LEAST_READINGS} readings"),)
        reason = f"{num} readings of the time between two batches"
        together = StepTerm(name, fmean(phase.readings), _error_s(phase.readings), reason)
        timed = [_update(phase.updates), *([phase.lookups.term()] if has_embeddings else [])]
        left = _without(together, timed, names)
        if is_alone:
            alone = StepTerm(SYNCHRONISATION, 0.0, 0.0, "one rank has nobody to synchronise with")
            return together, *timed, left, alone
        apart = f"ranks, their CPUs and batches do not vary while the job runs ({phase.num_ranks} ranks)"
        others = (StepTerm(each, None, None, apart) for each in (GRADIENT, SYNCHRONISATION))
        return together, *timed, left, *others


def _update(updates: _TimedReadings) -> StepTerm:
    if not updates.is_seen:
        return StepTerm(UPDATE, None, None, "no call of an optimizer was seen: none of torch's, or a compiled one")
    return updates.term()


def _without(together: StepTerm, timed: Sequence[StepTerm], names: Sequence[str]) -> StepTerm:
    """What the sum leaves for the others; errors of readings add up as those of independent ones do.

    Args:
        together: the sum, which is known.
        timed: parts of it that may be known.
        names: of all its parts.
    """
    known = {term.name: term for term in timed if term.seconds is not None}
    name = " + ".join(each for each in names if each not in known)
    if not known:
        name = " + ".join(each for each in names if each not in {term.name for term in timed})
        missing = " and ".join(term.name for term in timed)
        return StepTerm(name, None, None, f"{together.name} is known, and {missing} is not")
    seconds = (together.seconds or 0.0) - sum(term.seconds or 0.0 for term in known.values())
    parts = " and ".join(known)
    if seconds <= 0:
        # Where the host runs ahead of the device, the time between two batches is not the device's.
        return StepTerm(name, None, None, f"{parts} alone is as long as the time between two batches")
    error_s = math.hypot(together.error_s or 0.0, *(term.error_s or 0.0 for term in known.values()))
    return StepTerm(name, seconds, error_s, f"{together.name} without {parts}")


def _error_s(readings: Sequence[float]) -> float:
    return _Z95 * stdev(readings) / math.sqrt(len(readings))


# How much work a job has left, by the best that says so: (what is known, loaders) -> `RemainingWork`. Pure.
#
# In this order, each with its own uncertainty:
#
# 1. `directive`: steps in all, as the script says (`--total-steps`), less those that were taken;
# 2. `loader`: epochs in all, as the script says (`--total-epochs`), by the length of an epoch, which the loader knows;
# 3. `integration`: what Lightning or the Hugging Face Trainer plans, as its callback tells;
# 4. `history`: the share of their time limit that similar jobs used, of this job's time limit;
# 5. `time_limit`: half of what is left of it.
#
# The site daemon takes none of these at its word (`slurm_plugin/daemon/settings.py`).

# Of the logarithm of what is left. The number of a user is exact; an epoch may be cut short, and the loader of another
# phase may come; a framework's number is the most, and early stopping ends before it.
_DIRECTIVE_SIGMA, _EPOCHS_SIGMA, _INTEGRATION_SIGMA = 0.0, 0.1, 0.2
# Of a time limit nobody knows how much is used: half of it, give or take a factor of four.
_LIMIT_SHARE, _LIMIT_SIGMA = 0.5, 1.4


@dataclass(frozen=True)
class UsualLength:
    """How long similar jobs ran.

    Attributes:
        limit_share: of their time limit, as the median.
        sigma: of its logarithm.
        num_jobs: how many jobs that rests on.
    """

    limit_share: float
    sigma: float
    num_jobs: int

    def __post_init__(self) -> None:
        if not (0 < self.limit_share <= 1 and 0 <= self.sigma <= 10):
            raise ValueError(f"{self}: 0 < limit_share <= 1, 0 <= sigma <= 10")


def nothing_usual() -> UsualLength | None:
    """Return where nobody remembers similar jobs."""
    return None


@dataclass(frozen=True)
class Work:
    """What is known of the work before it begins.

    Attributes:
        total_steps: of the training loop, by the directive; None where not given.
        total_epochs: the same in epochs.
        end_s: when Slurm ends the job, in seconds since the epoch; None where not known.
        start_s: when Slurm started it; None where not known.
        usual_length: says how long similar jobs ran; asked only where nothing better is known.
    """

    total_steps: int | None = None
    total_epochs: int | None = None
    end_s: float | None = None
    start_s: float | None = None
    usual_length: Callable[[], UsualLength | None] = nothing_usual


def remaining(work: Work, loaders: Sequence[LoaderStatus], ideal: float, time_s: float) -> RemainingWork | None:
    """Return how many steps of all ranks together are left, by the best that says so; None where nothing does.

    Args:
        work: what is known of it.
        loaders: as the dispatcher knows them; the first of the program is the one that counts.
        ideal: steps a second of a trainer that never waits.
        time_s: seconds since the epoch.
    """
    first = min((row.ordinal for row in loaders if row.epoch >= 0), default=None)
    rows = [row for row in loaders if row.ordinal == first and row.epoch >= 0]
    lengths = [row.num_steps for row in rows]
    knows_length = bool(rows) and min(lengths) > 0
    if work.total_steps is not None and rows:
        done = [row.epoch * row.num_steps + row.step if knows_length else row.totals.steps for row in rows]
        return _counted(work.total_steps * len(rows), sum(done), _DIRECTIVE_SIGMA, "directive")
    if work.total_epochs is not None and knows_length:
        done_steps = sum(row.epoch * row.num_steps + row.step for row in rows)
        return _counted(work.total_epochs * sum(lengths), done_steps, _EPOCHS_SIGMA, "loader")
    plans = [row.training for row in rows if row.training is not None]
    if plans:
        total, done_steps = sum(plan.total for plan in plans), sum(plan.done for plan in plans)
        return _counted(total, done_steps, _INTEGRATION_SIGMA, "integration")
    return _by_time(work, ideal, time_s)


def _counted(total: int, done: int, sigma: float, source: RemainingSource) -> RemainingWork:
    return RemainingWork(min(float(max(0, total - done)), MOST), sigma, source, min(float(max(total, 1)), MOST))


def _by_time(work: Work, ideal: float, time_s: float) -> RemainingWork | None:
    """What the time limit and, where they are known, similar jobs say."""
    if work.end_s is None:
        return None
    left_s = max(0.0, work.end_s - time_s)
    usual = work.usual_length() if work.start_s is not None and work.start_s < work.end_s else None
    if usual is None or work.start_s is None:
        return RemainingWork(min(left_s * _LIMIT_SHARE * ideal, MOST), _LIMIT_SIGMA, "time_limit")
    usual_s = usual.limit_share * (work.end_s - work.start_s)
    # A job that is still there after its usual length goes on for as long again as it is late: nothing else is known.
    expected_s = min(left_s, math.fabs(usual_s - max(0.0, time_s - work.start_s)))
    return RemainingWork(min(expected_s * ideal, MOST), usual.sigma, "history")


# What a job has measured of itself: for the site daemon `Measured`, for its record `WaitsByDataWorkers`. Pure.
#
# Called by `hetstream.hetjob.master.elastic` once a second. How much work is left: `Work`.

# A trainer that only waits says nothing of how fast it could be.
_MEASURING_MOST_WAIT_SHARE = 0.99
_SIZE = re.compile(r"--mem(-per-cpu)?=(\d+)([KMGT]?)", re.ASCII)
_MB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


class Measuring:
    """Collects speeds by size and number of data workers.

    Args:
        work: see `Work`.
        companion_options: of sbatch; they say how much memory a data worker has.
    """

    def __init__(self, work: Work, companion_options: Sequence[str] = ()) -> None:
        self._work = work
        self._options = companion_options
        self._points: dict[tuple[int, int], float] = {}

    def measured(
        self,
        snapshot: Snapshot,
        cpus: int,
        local_steps_per_s: float | None,
        loaders: Sequence[LoaderStatus],
        time_s: float,
    ) -> Measured | None:
        """Return what is known now; None while no step was taken.

        Args:
            snapshot: of this moment.
            cpus: of a data worker.
            local_steps_per_s: with the job's own loading; None if that was not measured.
            loaders: as the dispatcher knows them.
            time_s: seconds since the epoch.
        """
        if not snapshot.reading or snapshot.steps_per_s <= 0 or snapshot.wait_share > _MEASURING_MOST_WAIT_SHARE:
            return None
        self._look(snapshot, cpus, local_steps_per_s)
        ideal = snapshot.steps_per_s / (1 - snapshot.wait_share)
        bytes_per_s = sum(row.bytes_per_s for row in loaders)
        return Measured(
            snapshot.steps_per_s,
            ideal,
            tuple(SpeedPoint(*size, speed) for size, speed in sorted(self._points.items())),
            bytes_per_s / snapshot.steps_per_s if bytes_per_s > 0 else None,
            max((row.world_size for row in loaders), default=0),
            worker_memory_mb(self._options, cpus),
            remaining(self._work, loaders, ideal, time_s),
        )

    def _look(self, snapshot: Snapshot, cpus: int, local_steps_per_s: float | None) -> None:
        working = snapshot.of(CompanionState.WORKING)
        number = snapshot.fixed + len(working)
        rates = [companion.rate_per_s for companion in working] + (
            [snapshot.fixed_rate_per_s] if snapshot.fixed else []
        )
        # One of another size, or one that has just come, would be taken for a bend of the curve.
        if number and all(rate > 0 for rate in rates) and all(companion.cpus == cpus for companion in working):
            self._note((cpus, number), sum(rates))
        if local_steps_per_s is not None and math.isfinite(local_steps_per_s):
            self._note((1, 0), local_steps_per_s)

    def _note(self, size: tuple[int, int], speed: float) -> None:
        self._points.pop(size, None)
        self._points[size] = speed
        while len(self._points) > MAX_POINTS:
            del self._points[next(iter(self._points))]  # the oldest


class WaitsByDataWorkers:
    """For how long how many data workers worked, and how long the trainer waited for data meanwhile.

    A companion that is in the queue, or starts, makes no batch: it does not count.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[float, float]] = {}
        self._noted_at: float | None = None

    def note(self, snapshot: Snapshot, now: float) -> None:
        """Take in a moment; the time since the last one counts if steps were taken in both.

        Args:
            snapshot: of this moment.
            now: on any clock that does not go back.
        """
        before, self._noted_at = self._noted_at, None
        if not snapshot.reading or snapshot.steps_per_s <= 0:
            return
        self._noted_at = now
        if before is not None:
            number = snapshot.fixed + len(snapshot.of(CompanionState.WORKING))
            seconds, waited_s = self._seconds.get(number, (0.0, 0.0))
            passed_s = now - before
            self._seconds[number] = seconds + passed_s, waited_s + passed_s * min(1.0, snapshot.wait_share)

    @property
    def rows(self) -> list[dict[str, float]]:
        """For the job's summary, by number."""
        return [
            {"data_workers": number, "seconds": round(seconds, 1), "wait_share": round(waited_s / seconds, 4)}
            for number, (seconds, waited_s) in sorted(self._seconds.items())
            if seconds > 0
        ]


def worker_memory_mb(options: Sequence[str], cpus: int) -> int | None:
    """Return memory of a data worker by sbatch's options; None where they do not say."""
    for option in options:
        if found := _SIZE.fullmatch(option):
            memory_mb = int(found[2]) * _MB[found[3]] * (cpus if found[1] else 1)
            return max(1, math.ceil(memory_mb))
    return None
