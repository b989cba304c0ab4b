"""The jobs that wait, in the order of the queue, and what each of them has waited for. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.simulate.scenario import QueueOptions
from hetstream.slurm_plugin.simulate.workload import Workload

Floats = npt.NDArray[np.float64]


class Cause(IntEnum):
    """What a job waits for: a column of `Outcome.waited_s`."""

    GPUS = 0
    """No room for its GPUs."""
    CPUS = 1
    """Room for its GPUs, but not for its CPUs beside them: what data workers elsewhere save."""
    MEMORY = 2
    """Room for its GPUs, but not for its memory beside them."""
    QUEUE = 3
    """Others before it."""
    RESERVATION = 4
    """It fits, but would delay the first job of the queue."""
    CYCLE = 5
    """It has not been looked at: the next cycle of backfill, or one that looks as far."""


class Waiting:
    """Jobs by their place in the queue; places never change while a job waits.

    Attributes:
        waited_s: (jobs, causes), of jobs that wait: up to the last change of their cause.
    """

    def __init__(self, workload: Workload, options: QueueOptions) -> None:
        keys = workload.submit_s
        if options.shortest_first:
            # CPUs are what jobs compete for: a job of average width counts its work, a wider one more. Both sides of a
            # comparison age alike, so the order of two jobs is the same for ever.
            cpus = workload.ideal_cpus * workload.units
            keys = workload.work_s * cpus / max(float(cpus.mean()), 1e-9) + options.aging * workload.submit_s
        order = np.argsort(keys, kind="stable")
        self._rank: list[int] = np.argsort(order, kind="stable").tolist()
        self._job_of: list[int] = order.tolist()
        self._ranks: list[int] = []
        self._cause: list[int] = [int(Cause.QUEUE)] * len(workload)
        self._since_s: list[float] = [0.0] * len(workload)
        self.waited_s = np.zeros((len(workload), len(Cause)))

    def __len__(self) -> int:
        return len(self._ranks)

    def first(self) -> int:
        """The job at the head."""
        return self._job_of[self._ranks[0]]

    def look(self, most: int) -> list[int]:
        """So many jobs at most, from the head."""
        return [self._job_of[rank] for rank in self._ranks[:most]]

    def add(self, job: int, cause: Cause, now_s: float) -> None:
        """A job waits from now on."""
        insort(self._ranks, self._rank[job])
        self._cause[job], self._since_s[job] = int(cause), now_s

    def waits_for(self, job: int, cause: Cause, now_s: float) -> None:
        """What a job waits for, from now on."""
        before = self._cause[job]
        if before != cause:
            self.waited_s[job, before] += now_s - self._since_s[job]
            self._cause[job], self._since_s[job] = int(cause), now_s

    def remove(self, job: int, now_s: float) -> None:
        """A job waits no more."""
        self.waited_s[job, self._cause[job]] += now_s - self._since_s[job]
        del self._ranks[bisect_left(self._ranks, self._rank[job])]
