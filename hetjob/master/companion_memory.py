"""How much memory companions have, and which one is to be replaced before it runs out. Pure; called by `elastic.py`.

A companion whose memory will be full soon is replaced by one with more: that one is submitted, and the other drains, so
nothing is made twice. Companions that are submitted later get as much. Without `--mem-per-cpu` among their options
their limit is the partition's, which is not known here: then memory is only noted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetstream.hetjob.elastic.first_pass import FirstPass
from hetstream.hetjob.elastic.memory_growth import Forecast, MemoryGrowth, memory_to_ask_for
from hetstream.hetjob.master.memory_warning import MemoryWarning
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
        """The companion that runs out of memory first; None if none does, or nothing more can be done for it."""
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
        """The companions that are about to run out of memory, the first one first.

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
        """The most memory that a companion of so many CPUs had, in MB; None if that was not measured."""
        return self._most_mb.get(cpus)


def _text(job_id: str, forecast: Forecast) -> str:
    return f"companion {job_id} runs out of memory: {forecast.reason}"
