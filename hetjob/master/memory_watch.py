"""The memory of a job's trainer and companions together: says what is about to be full, and moves the trainer where its
script wants that. Called by `elastic.py`; `trainer_memory.py` and `companion_memory.py` decide.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from hetstream.hetjob.elastic.first_pass import FirstPass
from hetstream.hetjob.master.companion_memory import CompanionMemory
from hetstream.hetjob.master.memory_warning import MemoryWarning
from hetstream.hetjob.master.migration import Migration
from hetstream.hetjob.master.trainer_memory import TrainerMemory, counted_left_s
from hetstream.hetjob.site.measured import Measured
from hetstream.mpi_dataworkers.wire.messages import LoaderStatus

log = logging.getLogger(__name__)


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
        """What is warned of now, in seconds since the epoch to the nearest ten.

        Args:
            largest_cpus: CPUs of a data worker as the script says.
            now: on the clock of the looks.
        """
        found = [*([self.trainer.open_warning] if self.trainer.open_warning else [])]
        found += self._companions.warnings(largest_cpus)
        shift_s = time.time() - now
        return [msgspec.structs.replace(warning, full_at_s=round(warning.full_at_s + shift_s, -1)) for warning in found]
