"""What the packer knows of the cluster at one moment. Pure data; made by `observe.py` and by the simulator."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job is, or is to be: the GPUs with these numbers on each of these nodes.

    A Slurm job asks the same of all of its nodes, so the numbers are the same everywhere.
    """

    nodes: tuple[str, ...]
    indices: tuple[int, ...]

    def gpus(self) -> list[tuple[str, int]]:
        """Each GPU, as node and number."""
        return [(node, index) for node in self.nodes for index in self.indices]


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What a node said of one of its GPUs.

    Attributes:
        read_s: when, in seconds since the epoch.
        used_share: of the last ten seconds, in which something ran on it.
        free_bytes: of its memory, without the most that the guaranteed job has needed, and what processes without an
            agent hold. What others declare is in it.
        wait_share: share of time in which the guaranteed job's trainers waited for data; None if nobody said so.
        closed: why an opportunistic job could do nothing there; empty if it could.
    """

    read_s: float
    used_share: float
    free_bytes: int
    wait_share: float | None = None
    closed: str = ""


@dataclass(frozen=True, slots=True)
class SharedGpu:
    """One GPU that may have opportunistic jobs.

    Attributes:
        index: its number on the node; Slurm's GRES `opp:pN` is GPU N.
        slots: opportunistic jobs that Slurm lets onto it at once.
        has_guaranteed: a guaranteed job has it.
        use: None where nobody has told.
        not_before_s: nobody is placed there before, because somebody was evicted or has just come.
        closed: why nobody is placed there at all; empty if somebody may be.
    """

    index: int
    slots: int = 1
    has_guaranteed: bool = False
    use: GpuUse | None = None
    not_before_s: float = 0.0
    closed: str = ""


@dataclass(frozen=True, slots=True)
class GpuNode:
    """One node with such GPUs.

    Attributes:
        cpus_free, memory_free_mb: what a job could get now.
        switches: above it, from the highest to its own; nodes have more in common, the more of these they share.
        closed: why nobody is placed there; empty if somebody may be.
        reservation: whose jobs alone start there now; empty: nobody's.
    """

    name: str
    cpus_free: int
    memory_free_mb: int
    gpus: tuple[SharedGpu, ...]
    switches: tuple[str, ...] = ()
    closed: str = ""
    reservation: str = ""


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job that is to be placed.

    Attributes:
        job: its id.
        submit_s: who waits longest comes first.
        num_nodes: that it needs at once.
        gpus: on each of them.
        gpu_bytes: of the memory of each GPU, as it declares.
        cpus, memory_mb: on each node.
        is_guaranteed: it has quota by now, so it takes no GPU that a guaranteed job has.
        not_before_s: it was evicted, and is not placed again before.
        only_nodes: it runs on no others; empty: on all.
        closed: why it is not placed at all; empty if it may be.
        reservations: it runs in one of these alone; empty: it asks for none.
    """

    job: str
    submit_s: float
    num_nodes: int = 1
    gpus: int = 1
    gpu_bytes: int = 0
    cpus: int = 1
    memory_mb: int = 0
    is_guaranteed: bool = False
    not_before_s: float = 0.0
    only_nodes: Collection[str] = ()
    closed: str = ""
    reservations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedJob:
    """An opportunistic job that runs, or starts.

    Attributes:
        job: its id.
        place: where.
        gpu_bytes: of the memory of each GPU, as it declared.
        is_guaranteed: it has quota by now.
        paused_s: for how long its node has not let it run at all.
        complaint: what its node says that it does against its orders; empty if nothing.
    """

    job: str
    place: Place
    gpu_bytes: int = 0
    is_guaranteed: bool = False
    paused_s: float = 0.0
    complaint: str = ""


@dataclass(frozen=True, slots=True)
class PackingState:
    """The cluster, as far as it matters for packing."""

    nodes: tuple[GpuNode, ...] = ()
    waiting: tuple[WaitingJob, ...] = ()
    placed: tuple[PlacedJob, ...] = ()


def by_number(name: str) -> tuple[list[int], str]:
    """The order of jobs that were submitted in the same second, such as the tasks of an array: 33_9 before 33_10."""
    return [int(digits) for digits in re.findall("[0-9]{1,18}", name)], name
