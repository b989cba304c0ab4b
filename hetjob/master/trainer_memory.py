"""Whether the trainer of a job runs out of memory, and what to do. Pure, clock as an argument; for `elastic.py`.

A companion is replaced by one with more memory; a trainer is its user's to move, unless the script says otherwise
(`migration.py`). So this says once, in good time, that it will run out, with the command that moves a training with
checkpoints to more memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hetstream.hetjob.elastic.memory_growth import GrowthOptions, MemoryGrowth, memory_to_ask_for
from hetstream.hetjob.master.memory_warning import MemoryWarning
from hetstream.hetjob.site.measured import Measured

_GIB = 1 << 30
# Memory is read this often.
_EVERY_S = 10.0
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
