"""What a job has measured of itself: for the site daemon `Measured`, for its record `WaitsByDataWorkers`. Pure.

Called by `hetstream.hetjob.master.elastic` once a second. How much work is left: `remaining_work.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from hetstream.hetjob.elastic.remaining_work import Work, remaining
from hetstream.hetjob.elastic.snapshot import CompanionState, Snapshot
from hetstream.hetjob.site.measured import MAX_NODES, MAX_POINTS, Measured, SpeedPoint
from hetstream.mpi_dataworkers.wire.messages import LoaderStatus

# A trainer that only waits says nothing of how fast it could be.
_MOST_WAIT_SHARE = 0.99
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
        """What is known now; None while no step was taken.

        Args:
            snapshot: of this moment.
            cpus: of a data worker.
            local_steps_per_s: with the job's own loading; None if that was not measured.
            loaders: as the dispatcher knows them.
            time_s: seconds since the epoch.
        """
        if not snapshot.reading or snapshot.steps_per_s <= 0 or snapshot.wait_share > _MOST_WAIT_SHARE:
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
            tuple(sorted({row.host for row in loaders if len(row.host) <= 64}))[:MAX_NODES],
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
    """Memory of a data worker by sbatch's options; None where they do not say."""
    for option in options:
        if found := _SIZE.fullmatch(option):
            memory_mb = int(found[2]) * _MB[found[3]] * (cpus if found[1] else 1)
            return max(1, math.ceil(memory_mb))
    return None
