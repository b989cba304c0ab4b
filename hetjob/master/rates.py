"""How fast data workers are and how many CPUs trainers use, from one look to the next. Called by `elastic.py`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from hetstream.mpi_dataworkers.wire.messages import DataWorkerStatus, LoaderStatus

# A process that was idle for nearly all of the last seconds says little of how fast it is: what it was before counts.
_LEAST_BUSY_SHARE = 0.02


class WorkerRates:
    """Steps per second that data workers would make if never idle: as they were seen when they last worked."""

    def __init__(self) -> None:
        self._of_processes: dict[tuple[str, int], float] = {}

    def by_job(self, workers: Iterable[DataWorkerStatus]) -> dict[str, float]:
        """For each Slurm job with data worker processes what they make together; 0 while nothing was seen of them."""
        known, self._of_processes = self._of_processes, {}
        rates: dict[str, float] = {}
        for worker in workers:
            process = (worker.host, worker.pid)
            is_busy = worker.busy_share > _LEAST_BUSY_SHARE
            rate = worker.steps_per_s / worker.busy_share if is_busy else known.get(process, 0.0)
            self._of_processes[process] = rate
            rates[worker.slurm_job] = rates.get(worker.slurm_job, 0.0) + rate
        return rates


class TrainerCpus:
    """How many CPUs a trainer's process uses, as the kernel counts: of those on this host, the busiest."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, float]] = {}
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK")

    def used(self, loaders: Iterable[LoaderStatus], now: float) -> float | None:
        """CPUs in use since the last call; None on the first, or if no trainer is on this host."""
        here = {row.pid for row in loaders if row.host == socket.gethostname()}
        seconds = {pid: (now, used_s) for pid in here if (used_s := self._seconds(pid)) is not None}
        before, self._before = self._before, seconds
        shares = [
            (used_s - before[pid][1]) / (at - before[pid][0])
            for pid, (at, used_s) in seconds.items()
            if pid in before and at > before[pid][0]
        ]
        return max(shares, default=None)

    def _seconds(self, pid: int) -> float | None:
        """User and system time of a process, threads included (proc(5), fields 14 and 15 of stat)."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) * self._tick_s
