"""Whose turn it is: (jobs that wait, what Slurm plans for them) -> who is ahead, and which nodes are kept. Pure.

Called by `why.py`. Backfill looks at jobs in their order. For one that cannot start now it keeps the nodes on which it
plans its start, as wholes, from everybody behind whose time limit reaches into that (node_space in backfill.c).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetstream.slurm_plugin.client.model import Job, Node, Snapshot

# Who goes first in one partition, the smallest: see `turn_of`.
Place = tuple[int, int, int]
# Slurm's own values (BACKFILL_INTERVAL, BACKFILL_RESOLUTION and BACKFILL_WINDOW in backfill.c), in its units.
_INTERVAL_S, _RESOLUTION_S, _WINDOW_MIN = 30, 60, 24 * 60


@dataclass(frozen=True)
class Backfill:
    """How backfill plans.

    Attributes:
        plans: whether it does: other schedulers start jobs strictly in their order.
        interval_s: how often it looks.
        resolution_s: planned starts are rounded down to this, and ends of jobs up.
        window_s: how far ahead it keeps nodes.
    """

    plans: bool = True
    interval_s: int = _INTERVAL_S
    resolution_s: int = _RESOLUTION_S
    window_s: int = _WINDOW_MIN * 60

    def is_before(self, end_s: float, start_s: float) -> bool:
        """Return whether a job that ends then has ended for a planned start."""
        unit = self.resolution_s
        return math.ceil(end_s / unit) * unit < math.floor(start_s / unit) * unit


def backfill_of(kind: str, parameters: str) -> Backfill:
    """Return what SchedulerType and SchedulerParameters say of it; Slurm's own values where they say nothing."""

    def number(name: str, usual: int) -> int:
        found = re.search(rf"(?:^|,)\s*{name}=(\d+)", parameters, re.IGNORECASE)
        return int(found[1]) or usual if found else usual

    return Backfill(
        kind in ("", "sched/backfill"),
        number("bf_interval", _INTERVAL_S),
        number("bf_resolution", _RESOLUTION_S),
        number("bf_window", _WINDOW_MIN) * 60,
    )


@dataclass(frozen=True, eq=False)
class Plan:
    """Nodes that are kept for a job from a planned start on.

    Attributes:
        place: of the job.
        nodes: their names; all of its partitions where Slurm does not tell which.
        is_told: whether it does.
    """

    job: Job
    place: Place
    start_s: float
    nodes: frozenset[str]
    is_told: bool


class QueueOrder:
    """The order in which Slurm looks at the jobs of one snapshot.

    Args:
        snapshot: the cluster.
        alike: its pending jobs in groups.
    """

    def __init__(self, snapshot: Snapshot, alike: Sequence[Sequence[Job]]) -> None:
        self._alike = alike
        self._tiers = {partition.name: partition.priority_tier for partition in snapshot.partitions}
        self._best_tiers: dict[tuple[str, ...], int] = {}
        self._beside = _sharing_nodes(snapshot.nodes)
        self._beside_all: dict[tuple[str, ...], frozenset[str]] = {}
        self.backfill = backfill_of(
            snapshot.config.get("SchedulerType", ""), snapshot.config.get("SchedulerParameters", "")
        )
        self._now_s = snapshot.taken_s
        self._queue: list[Job] | None = None
        # Of each partition the place of whoever is first in line, and of the first whose start is not planned.
        self._first: dict[str, Place] = {}
        self._first_unplanned: dict[str, Place] = {}
        planned: list[Job] = []
        for group in alike:
            waits = group[0].waits_for_resources
            planned += (job for job in group if self._is_planned(job) and (waits or job.planned_nodes))
            if waits:
                _note_first(self._first, group[0].partitions, self.place(min(group, key=turn_of)))
                others = [job for job in group if not self._is_planned(job)]
                if others:
                    _note_first(self._first_unplanned, group[0].partitions, self.place(min(others, key=turn_of)))
        self._plans = self._plans_for(planned, snapshot.nodes) if self.backfill.plans else []
        self._starts = [plan.start_s for plan in self._plans]
        self._places = sorted(plan.place for plan in self._plans)
        self._in_way: dict[tuple[int, int, tuple[str, ...]], tuple[Plan, ...]] = {}

    def _is_planned(self, job: Job) -> bool:
        # Without backfill a start is a guess, and nobody passes the jobs ahead.
        return self.backfill.plans and job.start_s is not None and job.start_s > self._now_s

    def _plans_for(self, jobs: Iterable[Job], nodes: Iterable[Node]) -> list[Plan]:
        """What is kept, in the order of the starts. Beyond its window backfill tells a start, and keeps nothing."""
        members: dict[str, set[str]] = {}
        for node in nodes:
            for name in node.partitions:
                members.setdefault(name, set()).add(node.name)
        found = []
        for job in jobs:
            start_s = job.start_s or 0.0
            if start_s <= self._now_s + self.backfill.window_s:
                kept = job.planned_nodes or [name for part in job.partitions for name in members.get(part, ())]
                found.append(Plan(job, self.place(job), start_s, frozenset(kept), bool(job.planned_nodes)))
        return sorted(found, key=lambda plan: (plan.start_s, plan.place))

    def is_behind(self, job: Job) -> bool:
        """Return whether others go first that want nodes of its partitions."""
        return self._is_behind(job, self._first)

    def is_behind_unplanned(self, job: Job) -> bool:
        """Return whether some of these have no planned start: what they will take is not known."""
        return self._is_behind(job, self._first_unplanned)

    def first_unplanned(self, job: Job) -> int:
        """Return the number of the first of these."""
        return min(self._first_unplanned[name] for name in self.rivals(job) if name in self._first_unplanned)[-1]

    def _is_behind(self, job: Job, first: Mapping[str, Place]) -> bool:
        place = self.place(job)
        return any(first.get(name, place) < place for name in self.rivals(job))

    def plans_in_way(self, job: Job, *, wait_s: float = 0.0) -> tuple[Plan, ...]:
        """Return what is kept for others and begins before the job would have ended, the earliest first.

        Args:
            job: who would start.
            wait_s: how long it takes until it does.
        """
        if not self._plans:
            return ()
        last = len(self._plans)
        if job.time_limit_s is not None:
            end_s = self._now_s + wait_s + job.time_limit_s
            # The first of which it has ended: rounding moves neither by more than a unit.
            last = bisect_right(self._starts, end_s + 3 * self.backfill.resolution_s)
            while last and self.backfill.is_before(end_s, self._starts[last - 1]):
                last -= 1
        place = self.place(job)
        key = last, bisect_left(self._places, place), job.partitions
        if key not in self._in_way:
            rivals = self.rivals(job)
            self._in_way[key] = tuple(
                plan for plan in self._plans[:last] if plan.place < place and not rivals.isdisjoint(plan.job.partitions)
            )
        return self._in_way[key]

    def longest_limit_s(self, start_s: float) -> float:
        """Return the longest time limit, in whole minutes, with which a job has ended before then; none if it is not
        above 0.

        Backfill looks at it one interval from now, and the limit must be set before.
        """
        now_s, unit = self._now_s + self.backfill.interval_s, self.backfill.resolution_s
        return math.floor((math.floor(start_s / unit) * unit - unit - now_s) / 60) * 60.0

    def ahead(self, job: Job) -> list[Job]:
        """Return the jobs that wait for resources, on nodes of the same partitions, and go first; the very first in
        front.
        """
        if self._queue is None:
            waiting = (job for group in self._alike if group[0].waits_for_resources for job in group)
            self._queue = sorted(waiting, key=self.place)
        places = bisect_left(self._queue, self.place(job), key=self.place)
        return [other for other in self._queue[:places] if not self.rivals(job).isdisjoint(other.partitions)]

    def rivals(self, job: Job) -> frozenset[str]:
        """Return the partitions whose jobs may be ahead of it: its own, and those that share nodes with them.

        Where the first job of a partition finds no room, the main scheduler starts nothing behind it on any node of
        that partition (schedule in job_scheduler.c), and backfill plans nodes, whatever partition asks for them.
        """
        found = self._beside_all.get(job.partitions)
        if found is None:
            found = frozenset(job.partitions).union(*(self._beside.get(name, ()) for name in job.partitions))
            self._beside_all[job.partitions] = found
        return found

    def place(self, job: Job) -> Place:
        """Return its place in line, the smallest first."""
        return (-self._tier(job), *turn_of(job))

    def _tier(self, job: Job) -> int:
        found = self._best_tiers.get(job.partitions)
        if found is None:
            found = max((self._tiers.get(name, 1) for name in job.partitions), default=1)
            self._best_tiers[job.partitions] = found
        return found


def turn_of(job: Job) -> tuple[int, int]:
    """Of jobs of one tier who goes first, the smallest: of equal priorities the one with the smaller number.

    So does slurmctld (sort_job_queue2 in job_scheduler.c). The components of a heterogeneous job have one place.
    """
    return -job.priority, job.job_id if job.het is None else job.het.het_job_id


def _sharing_nodes(nodes: Iterable[Node]) -> dict[str, set[str]]:
    """Of each partition those that have some of its nodes."""
    found: dict[str, set[str]] = {}
    for names in {node.partitions for node in nodes}:
        for name in names:
            found.setdefault(name, set()).update(names)
    return found


def _note_first(first: dict[str, Place], partitions: Iterable[str], place: Place) -> None:
    for name in partitions:
        first[name] = min(first.get(name, place), place)
