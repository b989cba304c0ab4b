"""How much memory companions have, and which one is to be replaced before it runs out. Pure; called by `elastic.py`.

A companion whose memory will be full soon is replaced by one with more: that one is submitted, and the other drains, so
nothing is made twice. Companions that are submitted later get as much. Without `--mem-per-cpu` among their options
their limit is the partition's, which is not known here: then memory is only noted.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hetstream.hetjob.elastic.memory import FirstPass, Forecast, GrowthOptions, MemoryGrowth, memory_to_ask_for
from hetstream.hetjob.master.controller_state_file import MemoryWarning
from hetstream.hetjob.ports import Child, Measured
from hetstream.mpi_dataworkers.wire.messages import DataWorkerStatus, LoaderStatus

_MB = 1 << 20
# Data worker processes count their memory this often.
_EVERY_S = 10.0


@dataclass(frozen=True)
class Replacement:
    """A companion that is to be replaced.

    Attributes:
        job_id: the one that drains.
        cpus: of both.
        mb_per_cpu: memory of the new one.
        reason: for people.
    """

    job_id: str
    cpus: int
    mb_per_cpu: int
    reason: str


class CompanionMemory:
    """The companions of one job.

    Args:
        mb_per_cpu: memory that they are submitted with, in MB; None if the partition decides.

    Attributes:
        mb_per_cpu: that the next one is to be submitted with; None for what the options say.
    """

    def __init__(self, mb_per_cpu: float | None) -> None:
        self.mb_per_cpu: int | None = None
        self._first_mb_per_cpu = mb_per_cpu
        self._limit_mb: dict[str, float] = {}
        self._watched: dict[str, MemoryGrowth] = {}
        self._passes: dict[str, FirstPass] = {}  # of those that are watched
        self._forecasts: dict[str, tuple[int, Forecast]] = {}
        self._answers: dict[str, str] = {}  # what was done about those for which nothing more is to be done
        self._most_mb: dict[int, int] = {}
        self._read_at = float("-inf")

    def submitted(self, job_id: str, cpus: int, mb_per_cpu: int | None) -> None:
        """Note what a companion was submitted with; of those that are not noted it is what the options say."""
        if mb_per_cpu is not None:
            self._limit_mb[job_id] = float(mb_per_cpu * cpus)

    def take_in(
        self,
        workers: Iterable[DataWorkerStatus],
        cpus_of: Mapping[str, int],
        now: float,
        loaders: Sequence[LoaderStatus] = (),
    ) -> None:
        """Take in what data worker processes say of their memory.

        Args:
            workers: processes.
            cpus_of: companions that work, and the CPUs of each.
            now: on any clock.
            loaders: as the dispatcher knows them.
        """
        if now - self._read_at < _EVERY_S:
            return
        self._read_at = now
        used: dict[str, int] = {}
        for worker in workers:
            if worker.slurm_job in cpus_of:
                used[worker.slurm_job] = used.get(worker.slurm_job, 0) + worker.resident_bytes
        for job_id in self._watched.keys() - cpus_of.keys():
            del self._watched[job_id], self._passes[job_id]
            self._forecasts.pop(job_id, None)
        for job_id, resident in used.items():
            if resident:
                self._note(job_id, cpus_of[job_id], resident, loaders, now)

    def _note(
        self, job_id: str, cpus: int, resident_bytes: int, loaders: Sequence[LoaderStatus], now: float
    ) -> None:  # fmt: skip
        self._most_mb[cpus] = max(self._most_mb.get(cpus, 0), math.ceil(resident_bytes / _MB))
        limit_mb = self._limit_mb.get(job_id) or (self._first_mb_per_cpu or 0.0) * cpus
        if not limit_mb:
            return
        growth = self._watched.get(job_id)
        if growth is None:
            growth = self._watched[job_id] = MemoryGrowth(limit_mb * _MB)
            self._passes[job_id] = FirstPass()
        forecast = growth.reading(now, resident_bytes, data_left_s=self._passes[job_id].left_s(loaders, now))
        self._forecasts.pop(job_id, None)
        if forecast is not None:
            self._forecasts[job_id] = cpus, forecast

    def replacement(self) -> Replacement | None:
        """Return the companion that runs out of memory first; None if none does, or nothing more can be done for it."""
        open_cases = {job_id: forecast for job_id, forecast in self._forecasts.items() if job_id not in self._answers}
        if not open_cases:
            return None
        job_id = min(open_cases, key=lambda case: (open_cases[case][1].full_in_s, case))
        cpus, forecast = open_cases[job_id]
        return Replacement(job_id, cpus, self._needed_mb_per_cpu(job_id), _text(job_id, forecast))

    def _needed_mb_per_cpu(self, job_id: str) -> int:
        cpus, forecast = self._forecasts[job_id]
        needed = memory_to_ask_for(forecast, self._watched[job_id].limit_bytes)
        return max(math.ceil(needed / _MB / cpus), self.mb_per_cpu or 0)

    def warnings(self, largest_cpus: int) -> list[MemoryWarning]:
        """Return the companions that are about to run out of memory, the first one first.

        Args:
            largest_cpus: CPUs of a data worker as the script says, to which `--data-worker-mem` belongs.
        """
        found = sorted(
            (self._read_at + forecast.full_in_s, job_id) for job_id, (_, forecast) in self._forecasts.items()
        )
        return [
            MemoryWarning(
                job_id,
                f"{_text(job_id, self._forecasts[job_id][1])}; {self._answers.get(job_id, 'it is to be replaced')}",
                f"#HETSTREAM --data-worker-mem={self._needed_mb_per_cpu(job_id) * largest_cpus}M",
                full_at_s,
            )
            for full_at_s, job_id in found
        ]

    def replaced(self, done: Replacement) -> None:
        """It was: later companions get as much."""
        self._answers[done.job_id] = f"one with {done.mb_per_cpu} MB a CPU takes its place when it works"
        self.mb_per_cpu = max(done.mb_per_cpu, self.mb_per_cpu or 0)

    def not_replaced(self, tried: Replacement) -> None:
        """Slurm refused the new one: it is not asked again for this companion."""
        self._answers[tried.job_id] = "Slurm takes none with more in its place"

    def most_mb(self, cpus: int) -> int | None:
        """Return the most memory that a companion with this number of CPUs had, in MB; None if that was not
        measured.
        """
        return self._most_mb.get(cpus)


def _text(job_id: str, forecast: Forecast) -> str:
    return f"companion {job_id} runs out of memory: {forecast.reason}"


# Whether the trainer of a job runs out of memory, and what to do. Pure, clock as an argument; for `elastic.py`.
#
# A companion is replaced by one with more memory; a trainer is its user's to move, unless the script says otherwise
# (`Migration`). So this says once, in good time, that it will run out, with the command that moves a training with
# checkpoints to more memory.

_GIB = 1 << 30
# A job that takes over must get through the queue first, and somebody must read the line.
TRAINER_OPTIONS = GrowthOptions(ahead_s=1800.0)
# Who says how much is left, and counts it. By others a job could seem to end before its memory does.
_COUNTED_SOURCES = ("directive", "loader", "integration")


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Of the job on one node.

    Attributes:
        used_bytes: that cannot be given back.
        limit_bytes: above 0.
    """

    used_bytes: int
    limit_bytes: int


class TrainerMemory:
    """Watches the job on the job master's node.

    Args:
        job_id: of the job.
        read: says what it has; None where that is not known, or not limited.

    Attributes:
        open_warning: while memory is about to run out; else None.
        needed: memory that the job should have instead, as sbatch writes sizes; of the last warning.
        first_warning: the first warning's line for people; empty while there was none.
    """

    def __init__(self, job_id: str, read: Callable[[], MemoryReading | None]) -> None:
        self._job_id = job_id
        self._read = read
        self._growth: MemoryGrowth | None = None
        self._read_at = float("-inf")
        self.open_warning: MemoryWarning | None = None
        self.needed = ""
        self.first_warning = ""

    @property
    def warning(self) -> str:
        """The line for people, while memory is about to run out; else empty."""
        found = self.open_warning
        return f"{found.text}. If it has checkpoints, move it to more: {found.command}" if found else ""

    def look(self, now: float, remaining_s: float = math.inf, data_left_s: float | None = None) -> bool:
        """Read memory if it is time to; whether there is a first warning now.

        Args:
            now: on any clock that does not go back.
            remaining_s: of the job; infinite if that is not known.
            data_left_s: until each sample was read once; None if that is not known.
        """
        if now - self._read_at < _EVERY_S:
            return False
        self._read_at = now
        reading = self._read()
        if reading is None:
            self._growth = self.open_warning = None
            return False
        if self._growth is None or self._growth.limit_bytes != reading.limit_bytes:
            self._growth = MemoryGrowth(reading.limit_bytes, TRAINER_OPTIONS)
        forecast = self._growth.reading(now, reading.used_bytes, remaining_s, data_left_s)
        self.open_warning = None
        if forecast is not None:
            self.needed = f"{math.ceil(memory_to_ask_for(forecast, reading.limit_bytes) / _GIB)}G"
            text = f"the trainer runs out of memory: {forecast.reason}"
            command = f"hetstream migrate {self._job_id} --mem={self.needed}"
            self.open_warning = MemoryWarning(self._job_id, text, command, now + forecast.full_in_s)
        is_first = bool(self.warning and not self.first_warning)
        self.first_warning = self.first_warning or self.warning
        return is_first


def counted_left_s(measured: Measured | None) -> float:
    """For how long the job goes on, where somebody counts its steps; infinite else."""
    if measured is None or measured.remaining is None or measured.remaining.source not in _COUNTED_SOURCES:
        return math.inf
    return measured.remaining.steps / measured.steps_per_s if measured.steps_per_s > 0 else math.inf


# Moves a training that runs out of memory to a job with more, by `hetstream migrate`. Called by `elastic.py`.
#
# Only where the script says `--on-memory-warning=migrate`, and once: the command's log, which is made first, says that
# it was begun, also to a job master that was started again. What the command does is its own; a failure is said, and is
# the user's again.

log = logging.getLogger(__name__)

LOG_FILE = "migrate.log"
# What describes this job or this step. sbatch would hand it on to the new job, which has its own.
_OF_THIS_JOB = re.compile(r"(SLURM|PMI)(?!_CONF$)|(CUDA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ROCR_VISIBLE_DEVICES)$")


class Migration:
    """Moves one job.

    Args:
        program: how hetstream is called: words.
        job_id: of the job.
        log_file: for what the command says.
        environ: of the job master.
        start: starts a command with an environment; its output goes to a file.
    """

    def __init__(
        self,
        program: Sequence[str],
        job_id: str,
        log_file: Path,
        environ: Mapping[str, str],
        start: Callable[[Sequence[str], Mapping[str, str], Path], Child],
    ) -> None:
        self._program = program
        self._job_id = job_id
        self._log_file = log_file
        self._environ = outside_of_job(environ)
        self._start = start
        self._child: Child | None = None

    def begin(self, memory: str) -> None:
        """Submit the job that takes over.

        Args:
            memory: of it, as sbatch writes sizes.
        """
        argv = [*self._program, "migrate", self._job_id, f"--mem={memory}", "--no-wait"]
        try:
            os.close(os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self._child = self._start(argv, self._environ, self._log_file)
        except FileExistsError:
            log.info("the training is not moved again: %s says what came of it", self._log_file)
        except OSError as error:
            log.error("the training is not moved to more memory: %s", error)
        else:
            log.info("the training moves to a job with --mem=%s: see %s", memory, self._log_file)

    def look(self) -> None:
        """Say how the command ended, once it has."""
        code = self._child.poll() if self._child is not None else None
        if code is None:
            return
        self._child = None
        if code:
            log.error("hetstream migrate ended with exit code %d, nothing has moved: see %s", code, self._log_file)
        else:
            log.info("the job that takes over is submitted: see %s", self._log_file)


def outside_of_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what Slurm has said of this job and step."""
    return {name: value for name, value in environ.items() if not _OF_THIS_JOB.match(name)}


# The memory of a job's trainer and companions together: says what is about to be full, and moves the trainer where its
# script wants that. Called by `elastic.py`; what is above decides.


class MemoryWatch:
    """What one job warns of.

    Args:
        trainer: see there.
        companions: see there.

    Attributes:
        trainer: see above.
        migration: moves the trainer; None: its warning is only said.
    """

    def __init__(self, trainer: TrainerMemory, companions: CompanionMemory) -> None:
        self.trainer = trainer
        self.migration: Migration | None = None
        self._companions = companions
        self._first_pass = FirstPass()

    def look_at_trainer(
        self, measured: Measured | None, now: float, loaders: Sequence[LoaderStatus] = ()
    ) -> None:  # fmt: skip
        """Read its memory if it is time to; say and do what follows.

        Args:
            measured: of the job's speed and its remaining work; None if nothing was.
            now: on any clock that does not go back.
            loaders: as the dispatcher knows them.
        """
        is_first = self.trainer.look(now, counted_left_s(measured), self._first_pass.left_s(loaders, now))
        if is_first:
            log.warning("%s", self.trainer.warning)
        if self.migration is not None:
            if is_first:
                self.migration.begin(self.trainer.needed)
            self.migration.look()

    def warnings(self, largest_cpus: int, now: float) -> list[MemoryWarning]:
        """Return what is warned of now, in seconds since the epoch to the nearest ten.

        Args:
            largest_cpus: CPUs of a data worker as the script says.
            now: on the clock of the looks.
        """
        found = [*([self.trainer.open_warning] if self.trainer.open_warning else [])]
        found += self._companions.warnings(largest_cpus)
        shift_s = time.time() - now
        return [msgspec.structs.replace(warning, full_at_s=round(warning.full_at_s + shift_s, -1)) for warning in found]


# The memory of this job on this node and its limit, as the kernel counts them in the job's cgroup. For `elastic.py`.
#
# Slurm's steps live in cgroups below one of the job (`job_ID`), in version 1 and version 2 of cgroups. Where Slurm
# limits no memory (`ConstrainRAMSpace`) there is no such limit, and nothing is read.

# Version 1 writes the largest number of pages for "no limit", version 2 the word `max`.
_NO_LIMIT_BYTES = 1 << 60
# What counts against the limit and cannot be given back: page cache is not among it.
_COUNTED = {"memory.max": ("anon", "shmem"), "memory.limit_in_bytes": ("total_rss", "total_shmem")}


def read_job_memory(
    job_id: str, own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> MemoryReading | None:
    """Return what the job has of memory on this node; None where no cgroup of this job limits it.

    Args:
        job_id: of component 0.
        own: the cgroups of this process, see cgroups(7).
        root: where they are mounted.
    """
    try:
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            head, found, _ = f"{path}/".partition(f"/job_{job_id}/")
            if not found or controllers not in ("", "memory"):
                continue
            place = root / controllers / f"{head}/job_{job_id}".lstrip("/")
            for limit_file, counted in _COUNTED.items():
                if (place / limit_file).exists():
                    return _read(place, limit_file, counted)
    except (OSError, ValueError):
        return None  # it is of another form, or goes away: then nobody knows
    return None


def _read(place: Path, limit_file: str, counted: tuple[str, ...]) -> MemoryReading | None:
    text = (place / limit_file).read_text().strip()
    if text == "max" or not 0 < int(text) < _NO_LIMIT_BYTES:
        return None
    lines = (line.split() for line in (place / "memory.stat").read_text().splitlines())
    values = {name: int(value) for name, value in lines}
    return MemoryReading(sum(values.get(name, 0) for name in counted), int(text))
