"""Which companion should run beside its trainer instead of where it is. Pure, clock as an argument; for `elastic.py`.

The site daemon says where there is room, this job's own companions how much faster one is beside the trainer, and
`hetjob/elastic/moves.py` whether that pays until the end. Without one of them nothing moves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetstream.hetjob.elastic.moves import Move, RemoteWorker, moves
from hetstream.hetjob.site.measured import Measured
from hetstream.mpi_dataworkers.wire.messages import DataWorkerStatus

# Until a new companion makes steps: Slurm starts it, and Python and torch load.
_CHANGE_S = 40.0
# A node that had no room after all is not tried again for so long.
AGAIN_S = 600.0
# The site daemon reads once a minute: for so long it may say that there is room which a move has just taken.
READ_AGAIN_S = 90.0


@dataclass(frozen=True, slots=True)
class Placed:
    """A companion that works.

    Attributes:
        job_id: its own.
        cpus: of it.
        host: where it runs.
        rate_per_s: steps that it would make per second if it were never idle; 0 while that is not known.
    """

    job_id: str
    cpus: int
    host: str
    rate_per_s: float


def hosts_of(workers: Iterable[DataWorkerStatus]) -> dict[str, str]:
    """Where the data workers of each Slurm job run."""
    return {worker.slurm_job: worker.host for worker in workers}


class CompanionMoves:
    """The wishes of one job."""

    def __init__(self) -> None:
        self._not_before: dict[str, float] = {}

    def move(
        self, companions: Sequence[Placed], nodes: Sequence[str], measured: Measured | None, now: float
    ) -> Move | None:
        """The move that takes most off the network; None if none pays.

        Args:
            companions: that work.
            nodes: where the site has room, one name for each companion.
            measured: of the job.
            now: on any clock.
        """
        if measured is None or measured.remaining is None:
            return None
        trainers = {_node_of(host) for host in measured.trainer_nodes}
        free = [node for node in nodes if _node_of(node) in trainers and now >= self._not_before.get(node, -math.inf)]
        known = [placed for placed in companions if placed.rate_per_s > 0]
        far = [placed for placed in known if _node_of(placed.host) not in trainers]
        if not free or not far:
            return None
        cpus = far[0].cpus
        far_rates = [placed.rate_per_s for placed in far if placed.cpus == cpus]
        near_rates = [placed.rate_per_s for placed in known if placed.cpus == cpus and placed not in far]
        if not near_rates:
            return None
        near_speed = (sum(near_rates) / len(near_rates)) / (sum(far_rates) / len(far_rates))
        # As short as it may well be: one standard deviation less.
        remaining_s = measured.remaining.steps / measured.ideal_steps_per_s * math.exp(-measured.remaining.sigma)
        step_bytes = measured.step_bytes or 0.0
        workers = [
            RemoteWorker(placed.job_id, placed.host, placed.rate_per_s, placed.rate_per_s * step_bytes)
            for placed in far
            if placed.cpus == cpus
        ]
        found = moves(workers, list(Counter(free).items()), near_speed, remaining_s, _CHANGE_S)
        return found[0] if found else None

    def begun(self, node: str, now: float) -> None:
        """One moves there."""
        self._not_before[node] = now + READ_AGAIN_S

    def not_possible(self, node: str, now: float) -> None:
        """Slurm has no room there."""
        self._not_before[node] = now + AGAIN_S


def _node_of(host: str) -> str:
    """Slurm's name of a node, where it is the first part of the name that the host gives itself, as nearly everywhere.

    Where it is another name, nothing is near, and nothing moves.
    """
    return host.partition(".")[0]
