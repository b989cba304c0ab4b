"""What a data worker process is started with: by its supervisor, or as a rank of an MPI world."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from hetstream.mpi_dataworkers.wire.messages import Device, Fate
from hetstream.mpi_dataworkers.worker.earlier import MakeEarlierStage


@dataclass(frozen=True)
class WorkerOptions:
    """What all processes of a data worker have in common.

    Attributes:
        cache_bytes: finished batches that each keeps for other loaders that share them.
        num_threads: that make the samples of a batch, where the dataset is thread-safe.
        over_mpi: it is a rank of an MPI world.
        forks_anew: the supervisor has a large pipeline loaded once for its processes, and forks them anew.
        make_earlier: makes the stage before, for a data worker that has a GPU; None for one without.
    """

    cache_bytes: int = 0
    num_threads: int = 1
    over_mpi: bool = False
    forks_anew: bool = False
    make_earlier: MakeEarlierStage | None = None

    @property
    def device(self) -> Device:
        """What it makes steps with."""
        return "cpu" if self.make_earlier is None else "gpu"


class WorkerStart(msgspec.Struct, frozen=True):
    """What one process is started with.

    Attributes:
        worker_id: its id for the dispatcher, 32 hexadecimal digits.
        slot: its place among its supervisor's processes; processes for several programs may be in one. "" where nobody
            can fork it anew.
        replaces: id of the dead process whose place it takes, or "".
        fate: how that one ended.
    """

    worker_id: str
    slot: str = ""
    replaces: str = ""
    fate: Fate | None = None
