"""What a loader counts: `stats()` shows it, the dispatcher is told it."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hetstream.base.files import Directory
from hetstream.base.text import printable
from hetstream.mpi_dataworkers.errors import PipelineError, StateError
from hetstream.mpi_dataworkers.order.rates import RecentRates, step_time_s
from hetstream.mpi_dataworkers.process.config import TrainerIdentity
from hetstream.mpi_dataworkers.wire.messages import ErrorPolicy, Failure, FeatureCut, LoaderStats


class LoaderStatistics:
    """Counters since the loader was made, and rates over the last seconds. One thread counts, any may read.

    Attributes:
        features: where the loader's feature graph is cut; None without one.
    """

    def __init__(self) -> None:
        self.features: FeatureCut | None = None
        # The counters, without the time of the iteration that is open, which is counted at its end; when that began,
        # and when its last step was taken.
        self._state: tuple[LoaderStats, float | None, float] = LoaderStats(), None, 0.0
        self._recent = RecentRates(time.monotonic(), 0, 0, 0)

    @property
    def counters(self) -> LoaderStats:
        """Their values; `elapsed_s` without the iteration that is open."""
        return self._state[0]

    def count(self, changes: dict[str, float], duplicates_dropped: int) -> None:
        """Add to the counters; `duplicates_dropped` is a total."""
        counters, began, last_step_at = self._state
        totals: dict[str, float] = {"duplicates_dropped": duplicates_dropped}
        for name, change in changes.items():
            totals[name] = getattr(counters, name) + change
        counters = msgspec.structs.replace(counters, **totals)
        if "steps" in changes:
            last_step_at = time.monotonic()
            if began is None:
                began = last_step_at - changes.get("wait_s", 0.0)
            self._recent.note(last_step_at, counters.steps, counters.bytes, counters.wait_s)
        elif "elapsed_s" in changes:
            began = None
        self._state = counters, began, last_step_at

    def now(self) -> LoaderStats:
        """The counters, with the iteration that is open: it may be the only one, and take weeks."""
        counters, began, _ = self._state
        return _with_open(counters, began, time.monotonic())

    def at_last_step(self) -> LoaderStats:
        """The same when the last step was taken: of the wait that goes on, `wait_s` has nothing yet."""
        return _with_open(*self._state)

    def rates(self) -> dict[str, float]:
        """Steps and bytes per second, the training loop's share of waiting and own time for a step lately."""
        counters = self.counters
        steps, num_bytes, waited = self._recent.per_s(time.monotonic(), counters.steps, counters.bytes, counters.wait_s)
        rates = {"steps_per_s": steps, "bytes_per_s": num_bytes, "recent_wait_share": min(1.0, waited)}
        return rates | {"step_s": step_time_s(steps, waited)}


def _with_open(counters: LoaderStats, began: float | None, until: float) -> LoaderStats:
    open_s = 0.0 if began is None else until - began
    return msgspec.structs.replace(counters, elapsed_s=counters.elapsed_s + open_s)


# How fast batches come to a loader: bytes, and the time in which some batch was on its way. Pure.

# Bytes after which an earlier measurement counts half.
_HALF_BYTES = 1 << 30
# Less than this says nothing: the time is that of a few system calls.
_LEAST_BYTES = 1 << 20


class WireMeter:
    """Counts batches whose beginning was seen before their end; smaller ones come at once, and say nothing.

    One thread counts, any may read.
    """

    def __init__(self) -> None:
        self._sums = 0.0, 0.0  # bytes, seconds
        self._last_s = 0.0

    def note(self, num_bytes: int, began_s: float, ended_s: float) -> None:
        """A batch has come.

        Args:
            num_bytes: of its tensors.
            began_s, ended_s: when its first and last bytes came. Two that come at the same time share that time.
        """
        seconds = max(0.0, ended_s - max(began_s, self._last_s))
        kept = 0.5 ** (num_bytes / _HALF_BYTES)
        self._sums = kept * self._sums[0] + num_bytes, kept * self._sums[1] + seconds
        self._last_s = max(self._last_s, ended_s)

    @property
    def bytes_per_s(self) -> float | None:
        """The rate; None as long as too little has come to say."""
        num_bytes, seconds = self._sums
        return num_bytes / seconds if num_bytes >= _LEAST_BYTES and seconds > 0 else None


# The samples that a loader goes on without: counted, told, and with `quarantine` kept from later epochs and runs.

_log = logging.getLogger(__name__)

# More broken samples than these are a broken dataset; they travel with each lease and in each state.
MAX_QUARANTINED = 1000
# What is remembered and what is logged one by one; all are counted.
MAX_REMEMBERED = 1000
_MAX_WARNINGS = 20
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


class SkippedSample(NamedTuple):
    """A sample that was left out; index -1 stands for a whole step whose samples could not be told apart."""

    epoch: int
    sample_index: int
    error: str


def quarantine_file(directory: Path, identity: TrainerIdentity) -> Path:
    """Where one loader's quarantine is written down."""
    job = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in identity.job_name)
    return directory / f"{job}.rank{identity.rank}.jsonl"


def writing_problem(file: Path) -> str:
    """Why a file could not be appended to, found out by trying, and "" where it can; leaves no file behind."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with Directory.open(file.parent) as directory:
            if directory.has(file.name):
                os.close(directory.open_file(file.name, _APPEND))
            else:
                tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


class SkippedSamples:
    """What one loader left out.

    Args:
        policy: what becomes of errors.
        file: which `quarantine` appends to, of this loader alone, or None.
        keeps_away: whether `quarantine` can keep samples from being tried again: elements of a stream it cannot.
    """

    def __init__(self, policy: ErrorPolicy, file: Path | None, keeps_away: bool = True) -> None:
        self.policy = policy
        self.samples: list[SkippedSample] = []
        self._file = file
        self._keeps_away = keeps_away
        self._num_told = 0

    def note(self, epoch: int, step: int, failures: Sequence[Failure]) -> None:
        """Take in what a step that the training loop reached was made without.

        Raises:
            PipelineError: more samples are broken than can be kept from later epochs, or the file cannot be written.
        """
        for failure in failures:
            error = f"{failure.error_type[1]}: {failure.text}"
            if len(self.samples) < MAX_REMEMBERED:
                self.samples.append(SkippedSample(epoch, failure.sample_index, error))
            self._tell(epoch, step, failure, error)
            if self.policy.on_error == "quarantine":
                self._keep_away(epoch, step, failure)

    def _tell(self, epoch: int, step: int, failure: Failure, error: str) -> None:
        self._num_told += 1
        what = f"sample {failure.sample_index}" if failure.sample_index >= 0 else "all samples"
        if self._num_told <= _MAX_WARNINGS:
            line = printable(error.partition("\n")[0])
            _log.warning("hetstream: skipped %s of step %d, epoch %d: %s", what, step, epoch, line)
        if self._num_told == _MAX_WARNINGS:
            _log.warning("hetstream: further skipped samples are only counted: loader.stats()['skipped']")

    def _keep_away(self, epoch: int, step: int, failure: Failure) -> None:
        if self._file is not None:
            line = {
                "epoch": epoch,
                "step": step,
                "index": failure.sample_index,
                "type": ".".join(failure.error_type),
                "text": failure.text,
                "traceback": failure.remote_traceback,
                "host": failure.host,
                "pid": failure.pid,
            }
            self._write(self._file, line)
        if failure.sample_index >= 0 and self._keeps_away:
            self._quarantine({*self.policy.quarantined, failure.sample_index})

    def _write(self, file: Path, line: dict[str, Any]) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with Directory.open(file.parent) as directory:
                descriptor = directory.open_file(file.name, _APPEND)
            with open(descriptor, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            raise PipelineError(
                f"sample {line['index']} is to be put in quarantine, and {file} cannot be written: "
                f"{error.strerror or error}. "
                "Make room or choose another quarantine_dir"
            ) from error

    def _quarantine(self, samples: set[int]) -> None:
        if len(samples) > MAX_QUARANTINED:
            where = f"; see {self._file}" if self._file is not None else ""
            raise PipelineError(
                f"{len(samples)} samples of the dataset are broken, more than the {MAX_QUARANTINED} that can be in "
                f"quarantine{where}. Repair the dataset, or use on_error='skip'."
            )
        self.policy = msgspec.structs.replace(self.policy, quarantined=sorted(samples))

    def state(self) -> list[int]:
        """The quarantined samples, ascending."""
        return list(self.policy.quarantined)

    def load_state(self, samples: Any) -> None:
        """Take quarantined samples from a saved state.

        Raises:
            StateError: it is no list of sample indices, or too long.
        """
        fit = isinstance(samples, list) and all(type(sample) is int and sample >= 0 for sample in samples)
        if not fit or len(samples) > MAX_QUARANTINED:
            raise StateError(
                f"the state has no list of at most {MAX_QUARANTINED} quarantined sample indices: {samples!r:.200}"
            )
        self.policy = msgspec.structs.replace(self.policy, quarantined=sorted(set(samples)))
