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
        """Return each GPU, as node and number."""
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
    """Return the order of jobs that were submitted in the same second, such as the tasks of an array: 33_9 before
    33_10.
    """
    return [int(digits) for digits in re.findall("[0-9]{1,18}", name)], name


# The numbers by which the packer decides, each with its reason.


@dataclass(frozen=True, slots=True)
class PackingRules:
    """When a GPU takes an opportunistic job, and when one is taken away.

    Attributes:
        most_used: a GPU that is in use for this share of ten seconds, or more, takes nobody (AntMan's 80 %).
        oldest_s: an older reading counts as none. Nodes report every 5 s.
        most_jobs: opportunistic jobs of one GPU: what is left of it, divided by more, is hardly worth the memory.
        settle_s: a GPU that has just got a job gets no other before its use can be seen.
        most_paused_s: a job that was paused for so long would do better elsewhere.
        most_placements: in one call, so that commands to Slurm stay few; who is left comes next time.
        first_delay_s, longest_delay_s: how long an evicted job waits: twice as long each time. The GPU that it was on
            waits for the first of them. Slurm itself starts no job within two minutes after it was requeued.
        least_limit_s: Slurm may start a job with so short a time limit, so that it does not wait for others' planned
            starts. The packer gives it its own back when it runs, and may be away for so long before.
        start_s: a job that has not started so long after it was placed is taken back.
        keep_s: a placeholder that has not started so long after it was submitted finds no room.
        upgrade_s: nodes that do not call a job guaranteed so long after they were told to are told again.
        most_upgrade_trials: then that job stays what it is for a while.
        refused_s: so long, as one does that Slurm refused to place or to upgrade.
        busy_s: and so long where nothing was decided: 26.05 takes no other partition of a job that is new, at times
            for longer than the client tries.
    """

    most_used: float = 0.8
    oldest_s: float = 30.0
    most_jobs: int = 2
    settle_s: float = 20.0
    most_paused_s: float = 300.0
    most_placements: int = 50
    first_delay_s: float = 120.0
    longest_delay_s: float = 3600.0
    least_limit_s: float = 600.0
    start_s: float = 90.0
    keep_s: float = 20.0
    upgrade_s: float = 60.0  # longer than a reading counts
    most_upgrade_trials: int = 3
    refused_s: float = 300.0
    busy_s: float = 30.0

    def delay_s(self, num_evictions: int) -> float:
        """Return how long to wait after a number of evictions."""
        doublings = min(num_evictions - 1, 20)  # no longer than the longest, and no overflow
        return min(self.longest_delay_s, self.first_delay_s * 2**doublings) if num_evictions > 0 else 0.0


# What the packer says of what it does.


@dataclass(frozen=True)
class PackingEvent:
    """Something that the packer did, saw, or would have done.

    Attributes:
        event: `placed`, `started`, `evicted`, `taken back`, `refused`, `waits`; of guaranteed jobs `granted`, `moved`,
            `upgraded`, `not upgraded`, `held`; `would place`, `would evict` and others where it only observes.
        job: which.
        reason: why.
        place: where; None if that does not matter.
    """

    event: str
    job: str
    reason: str
    place: Place | None = None
