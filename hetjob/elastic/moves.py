"""Whether a remote data worker should move to its trainer's node: when what it gains until the end pays the move. Pure.

A move is a new data worker there, then a drain here: nothing is made twice, but the new one makes nothing while it
starts, and the old one nothing beyond the step that it is at. Asked by `hetjob/master/companion_moves.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What a move gains must be so many times what it costs: the time that is left is an estimate.
MARGIN = 1.5


@dataclass(frozen=True)
class RemoteWorker:
    """A data worker that is not on a node of its trainer.

    Attributes:
        job: its own id.
        node: name of where it is.
        steps_per_s: that it makes there.
        bytes_per_s: that it sends.
    """

    job: str
    node: str
    steps_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Move:
    """One move.

    Attributes:
        job: of the data worker that leaves.
        source, target: names of nodes.
        gain_steps: more steps until the job's end.
        cost_steps: fewer steps by the move.
        reason: for people.
    """

    job: str
    source: str
    target: str
    gain_steps: float
    cost_steps: float
    reason: str


def moves(
    workers: Sequence[RemoteWorker],
    room: Sequence[tuple[str, int]],
    near_speed: float,
    remaining_s: float,
    change_s: float,
) -> list[Move]:
    """The moves that pay, the one that takes most off the network first.

    Args:
        workers: of one job.
        room: node of a trainer of the job, and how many data workers it could hold now.
        near_speed: how much faster a data worker is beside its trainer, as a factor: what sending costs it.
        remaining_s: of the job.
        change_s: in which the new data worker makes nothing: report, start, drain.
    """
    free = [node for node, num in room for _ in range(max(0, num))]
    found: list[Move] = []
    for worker in sorted(workers, key=lambda worker: (-worker.bytes_per_s, worker.job)):
        if not free:
            break
        gain = worker.steps_per_s * (near_speed - 1) * max(0.0, remaining_s - change_s)
        cost = worker.steps_per_s * change_s
        if gain <= MARGIN * cost:
            continue
        target = free.pop(0)
        reason = (
            f"{gain:,.0f} steps more until the end in {remaining_s / 60:.0f} min, for {cost:,.0f} that the move costs; "
            f"{worker.bytes_per_s / 1e6:,.0f} MB/s less on the network"
        )
        found.append(Move(worker.job, worker.node, target, gain, cost, reason))
    return found
