"""The jobs that run: their speeds and when they end. Pure; a struct of arrays with a row for each running job.

Between two events speeds are constant, so what is left of a job is a straight line: it is written down only when the
job's speed changes, and its end is exact.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.errors import SimulationFault
from hetstream.slurm_plugin.simulate.scenario import QueueOptions
from hetstream.slurm_plugin.simulate.workload import Cluster, Workload

# What is free on each node, and where a gang of units fits. Pure; the engine's book of resources.
#
# CPUs of data workers under a policy are not in it: they can be taken back at once, so that they are in nobody's way.

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
GPUS, CPUS, MEMORY = "GPUs", "CPUs", "memory"
# CPUs and GiB: what sums of fractions leave.
_ROUNDING = 1e-6
_MORE = 1e6  # CPUs: more than a node has, so that GPUs decide and CPUs break ties


class Shape(NamedTuple):
    """What a job asks for: units, each with its own resources on one node, and CPUs anywhere."""

    units: int
    gpus: float
    cpus: float
    memory_gib: float
    extra_cpus: float = 0.0


@dataclass(frozen=True, slots=True)
class StartPlace:
    """Where a job is.

    Attributes:
        nodes, units: how many units on which node.
        extra_nodes, extra_cpus: CPUs anywhere.
    """

    nodes: Ints
    units: Ints
    extra_nodes: Ints
    extra_cpus: Floats


_NOWHERE: Ints = np.empty(0, dtype=np.int64)
_NOTHING: Floats = np.empty(0)


class Nodes:
    """Free resources of every node.

    Attributes:
        gpus, cpus, memory_gib: free, by node.
        is_up: nodes that have not failed.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.gpus = cluster.gpus.copy()
        self.cpus = cluster.cpus.copy()
        self.memory_gib = cluster.memory_gib.copy()
        self.is_up = np.ones(cluster.num_nodes, dtype=bool)
        self._has_memory = bool(np.isfinite(cluster.memory_gib).any())
        self._most: list[tuple[float, float, float]] = list(
            zip(cluster.gpus.tolist(), cluster.cpus.tolist(), cluster.memory_gib.tolist(), strict=True)
        )
        # What is free of a node, GPUs first: least is best.
        self._rank = self.gpus * _MORE + self.cpus
        self._changed: set[int] | None = None

    def follow(self) -> set[int]:
        """Return the numbers of nodes that change from now on; whoever reads them takes them out."""
        self._changed = set()
        return self._changed

    def copy(self) -> Nodes:
        """Return the same state, for plans."""
        other = Nodes.__new__(Nodes)
        other.cluster, other._has_memory, other._most = self.cluster, self._has_memory, self._most
        other.gpus, other.cpus, other.memory_gib = self.gpus.copy(), self.cpus.copy(), self.memory_gib.copy()
        other.is_up, other._rank, other._changed = self.is_up.copy(), self._rank.copy(), None
        return other

    def with_fewer_gpus(self, taken: Floats) -> Nodes:
        """Return the same state, for plans, with more GPUs of each node taken."""
        other = self.copy()
        other.gpus -= taken
        other._rank = np.where(other.is_up, other.gpus * _MORE + other.cpus, np.inf)
        return other

    def find(self, shape: Shape) -> StartPlace | None:
        """Return where a shape fits: on one node if any has the room, the one with least free; else on the fewest
        nodes.
        """
        units, gpus, cpus, memory_gib, _ = shape
        fits = self.cpus >= units * cpus
        if gpus:
            fits &= self.gpus >= units * gpus
        if memory_gib and self._has_memory:
            fits &= self.memory_gib >= units * memory_gib
        rank = np.where(fits, self._rank, np.inf)
        best = int(rank.argmin())
        if rank[best] < np.inf:
            nodes, counts = np.array([best]), np.array([units])
        elif units == 1:
            return None
        else:
            room = self.room(gpus, cpus, memory_gib)
            if room.sum() < units:
                return None
            order = np.lexsort((self._rank, -room))
            filled = np.cumsum(room[order])
            num_nodes = int(np.searchsorted(filled, units)) + 1
            nodes = order[:num_nodes]
            counts = room[nodes]
            counts[-1] -= int(filled[num_nodes - 1]) - units
        return self.placed(shape, nodes, counts)

    def placed(self, shape: Shape, nodes: Ints, counts: Ints) -> StartPlace | None:
        """Return the placement by units on each of these nodes; None if the CPUs that it has anywhere are not there."""
        if not shape.extra_cpus:
            return StartPlace(nodes, counts, _NOWHERE, _NOTHING)
        return self._with_extra(nodes, counts, shape.cpus, shape.extra_cpus)

    def _with_extra(self, nodes: Ints, counts: Ints, cpus: float, extra: float) -> StartPlace | None:
        """CPUs anywhere come first from nodes that have the fewest free GPUs to strand."""
        free = np.where(self.is_up, self.cpus, 0.0)
        free[nodes] -= counts * cpus
        if free.sum() < extra:
            return None
        order = np.lexsort((free, self.gpus))
        given = np.diff(np.minimum(np.cumsum(free[order]), extra), prepend=0.0)
        places = np.flatnonzero(given > 0)
        return StartPlace(nodes, counts, order[places], given[places])

    def room(self, gpus: float, cpus: float, memory_gib: float) -> Ints:
        """Return how many units of a kind each node has room for."""
        room = np.full(len(self.cpus), np.inf)
        if gpus:
            room = np.floor(self.gpus / gpus)
        if cpus:
            room = np.minimum(room, np.floor(self.cpus / cpus))
        if memory_gib and self._has_memory:
            room = np.minimum(room, np.floor(self.memory_gib / memory_gib))
        room[~self.is_up] = 0
        whole: Ints = np.minimum(room, 1e9).astype(np.int64)
        return whole

    def why_not(self, shape: Shape) -> str:
        """Return which resource a shape that fits nowhere waits for."""
        units = shape.units
        if shape.gpus and self.room(shape.gpus, 0.0, 0.0).sum() < units:
            return GPUS
        if shape.memory_gib and self.room(shape.gpus, 0.0, shape.memory_gib).sum() < units:
            return MEMORY
        return CPUS

    def take(self, shape: Shape, placement: StartPlace) -> None:
        """Give a job what it asks for.

        Raises:
            SimulationFault: a node does not have it.
        """
        self._change(shape, placement, -1.0)

    def give_back(self, shape: Shape, placement: StartPlace) -> None:
        """Take it from the job.

        Raises:
            SimulationFault: a node would have more than it has.
        """
        self._change(shape, placement, 1.0)

    def give_back_all(self, held: Sequence[tuple[Shape, StartPlace]]) -> None:
        """Take from many jobs what they hold; for plans, which nobody checks."""
        if not held:
            return
        node = np.concatenate([placement.nodes for _, placement in held])
        row = np.repeat(np.arange(len(held)), [len(placement.nodes) for _, placement in held])
        units = np.concatenate([placement.units for _, placement in held])
        _, gpus, cpus, memory_gib, _ = np.array([shape for shape, _ in held]).T
        size = len(self.gpus)
        self.gpus += np.bincount(node, units * gpus[row], size)
        self.cpus += np.bincount(node, units * cpus[row], size)
        if self._has_memory:
            self.memory_gib += np.bincount(node, units * memory_gib[row], size)
        extra = [placement for _, placement in held if len(placement.extra_nodes)]
        if extra:
            node = np.concatenate([placement.extra_nodes for placement in extra])
            self.cpus += np.bincount(node, np.concatenate([placement.extra_cpus for placement in extra]), size)
        self._rank = np.where(self.is_up, self.gpus * _MORE + self.cpus, np.inf)

    def _change(self, shape: Shape, placement: StartPlace, sign: float) -> None:
        nodes, counts, own = placement.nodes, placement.units * sign, self.cluster
        if len(nodes) == 1 and not len(placement.extra_nodes):
            self._change_one(int(nodes[0]), float(counts[0]), shape)
            return
        self.gpus[nodes] += counts * shape.gpus
        self.cpus[nodes] += counts * shape.cpus
        if self._has_memory:
            self.memory_gib[nodes] += counts * shape.memory_gib
        if len(placement.extra_nodes):
            self.cpus[placement.extra_nodes] += sign * placement.extra_cpus
            nodes = np.concatenate((placement.nodes, placement.extra_nodes))
        self._rank[nodes] = self.gpus[nodes] * _MORE + self.cpus[nodes]
        if self._changed is not None:
            self._changed.update(nodes.tolist())
        for free, most in ((self.gpus, own.gpus), (self.cpus, own.cpus), (self.memory_gib, own.memory_gib)):
            if not ((free[nodes] >= -_ROUNDING) & (free[nodes] <= most[nodes] + _ROUNDING)).all():
                raise SimulationFault(f"nodes {nodes} would have {free[nodes]} free, of {most[nodes]}")

    def _change_one(self, node: int, count: float, shape: Shape) -> None:
        """The same for one node, which most jobs are on: plain numbers are far faster than arrays of one."""
        gpus = float(self.gpus[node]) + count * shape.gpus
        cpus = float(self.cpus[node]) + count * shape.cpus
        most_gpus, most_cpus, most_gib = self._most[node]
        is_right = 0 <= gpus <= most_gpus and -_ROUNDING <= cpus <= most_cpus + _ROUNDING
        if self._has_memory:
            memory_gib = float(self.memory_gib[node]) + count * shape.memory_gib
            is_right = is_right and -_ROUNDING <= memory_gib <= most_gib + _ROUNDING
            self.memory_gib[node] = memory_gib
        if not is_right:
            raise SimulationFault(f"node {node} would have {gpus:g} of {most_gpus:g} GPUs free, {cpus:g} CPUs")
        self.gpus[node], self.cpus[node], self._rank[node] = gpus, cpus, gpus * _MORE + cpus
        if self._changed is not None:
            self._changed.add(node)

    def fail(self, node: int) -> None:
        """A node without jobs is away."""
        self.is_up[node] = False
        self.gpus[node] = self.cpus[node] = self.memory_gib[node] = -1.0
        self._rank[node] = np.inf
        if self._changed is not None:
            self._changed.add(node)

    def repair(self, node: int) -> None:
        """It is back, whole."""
        own = self.cluster
        self.is_up[node] = True
        self.gpus[node], self.cpus[node], self.memory_gib[node] = own.gpus[node], own.cpus[node], own.memory_gib[node]
        self._rank[node] = self.gpus[node] * _MORE + self.cpus[node]
        if self._changed is not None:
            self._changed.add(node)

    def for_workers(self, cpus: int, memory_gib: float) -> Floats:
        """CPUs of each node that data workers can have: whole data workers, within the memory that is free.

        Args:
            cpus: of one data worker.
            memory_gib: of one of its CPUs.
        """
        free = self.cpus
        if memory_gib > 0 and self._has_memory:
            free = np.minimum(free, self.memory_gib / memory_gib)
        usable: Floats = np.maximum(0.0, np.floor(free / cpus) * cpus)
        return usable

    def check(self, held_gpus: float, held_cpus: float) -> None:
        """Free and used are together what there is.

        Args:
            held_gpus, held_cpus: by all running jobs, counted elsewhere.

        Raises:
            SimulationFault: they are not.
        """
        up, own = self.is_up, self.cluster
        there = (float(own.gpus[up].sum()), float(own.cpus[up].sum()))
        free = (float(self.gpus[up].sum()), float(self.cpus[up].sum()))
        for name, had, left, held in zip((GPUS, CPUS), there, free, (held_gpus, held_cpus), strict=True):
            if abs(left + held - had) > _ROUNDING * max(1.0, had):
                raise SimulationFault(f"{left:g} free and {held:g} used {name} are not the {had:g} that there are")


# job: its place in the workload; -1 for a free row. left_s: work at since_s, in seconds at the ideal speed.
# held_cpus: of trainers and of fixed data workers. useful_cpus: with which the job is at its ideal speed.
# demand: CPUs of data workers with which it is at its best. target: those it was given; active: of them, those that
# already work. changed_s: when its target last did. slow_since_s: since when it has been below LEAST_SPEED.
# limit_s: its time limit, as far as the scheduler knows one. base: the speed that it has by its CPUs; its speed is that
# times factor, which is below 1 for a job that shares a GPU. shared_gpus: those that it is on and does not hold.
_FLOATS = (
    "left_s", "since_s", "speed", "end_s", "start_s", "gpus", "held_cpus", "useful_cpus", "demand", "overhead",
    "target", "active", "changed_s", "slow_since_s", "limit_s",
    "base", "factor", "shared_gpus",
)  # fmt: skip
# Below this share of its ideal speed a job counts as starved.
LEAST_SPEED = 0.05


class Running:
    """Rows of running jobs; `top` rows are in use, some of them free.

    A free row has no work, no speed, no resources and never ends, so that whole columns can be summed.
    """

    def __init__(self, size: int = 64) -> None:
        self.job: Ints = np.full(size, -1, dtype=np.int64)
        self.left_s = self.since_s = self.speed = self.end_s = self.start_s = self.gpus = np.zeros(0)
        self.held_cpus = self.useful_cpus = self.demand = self.overhead = np.zeros(0)
        self.target = self.active = self.changed_s = self.slow_since_s = self.limit_s = np.zeros(0)
        self.base = self.factor = self.shared_gpus = np.zeros(0)
        for name in _FLOATS:
            setattr(self, name, np.zeros(size))
        self.end_s.fill(np.inf)
        self.top = 0
        self.count = 0
        self.placements: list[tuple[Shape, StartPlace] | None] = [None] * size
        self._free: list[int] = []

    def add(self, job: int, shape: Shape, placement: StartPlace, values: dict[str, Any]) -> int:
        """Note that a job starts. Return its row."""
        if self._free:
            row = heapq.heappop(self._free)
        else:
            row = self.top
            if row == len(self.job):
                self._grow()
            self.top += 1
        self.job[row] = job
        self.placements[row] = (shape, placement)
        for name, value in values.items():
            getattr(self, name)[row] = value
        self.count += 1
        return row

    def remove(self, row: int) -> tuple[Shape, StartPlace]:
        """Note that a job runs no more. Return what it held."""
        held = self.placements[row]
        assert held is not None, f"row {row} is free"
        self.job[row] = -1
        self.placements[row] = None
        for name in _FLOATS:
            getattr(self, name)[row] = 0.0
        self.end_s[row] = np.inf
        self.count -= 1
        heapq.heappush(self._free, row)
        return held

    def set_speed(self, rows: Ints, speed: Floats, now_s: float) -> None:
        """From now on these jobs run at these speeds, less what sharing a GPU costs them."""
        self.base[rows] = speed
        self._run_at(rows, speed * self.factor[rows], now_s)

    def set_factor(self, rows: Ints, factor: Floats, now_s: float) -> None:
        """From now on these jobs run at this share of the speed that their CPUs give them."""
        self.factor[rows] = factor
        self._run_at(rows, self.base[rows] * factor, now_s)

    def _run_at(self, rows: Ints, speed: Floats, now_s: float) -> None:
        left_s = self.left_now(rows, now_s)
        self.left_s[rows] = left_s
        self.since_s[rows] = now_s
        self.speed[rows] = speed
        is_slow, was_slow = speed < LEAST_SPEED, np.isfinite(self.slow_since_s[rows])
        self.slow_since_s[rows] = np.where(is_slow, np.where(was_slow, self.slow_since_s[rows], now_s), np.inf)
        runs = speed > 0
        self.end_s[rows] = np.where(runs, now_s + left_s / np.where(runs, speed, 1.0), np.inf)

    def left_now(self, rows: Ints, now_s: float) -> Floats:
        """Work left of these jobs."""
        left: Floats = np.maximum(0.0, self.left_s[rows] - self.speed[rows] * (now_s - self.since_s[rows]))
        return left

    def next_end(self) -> tuple[float, int]:
        """Return when the next job ends if no speed changes, and its row; of several the first."""
        if not self.count:
            return np.inf, -1
        row = int(self.end_s[: self.top].argmin())
        return float(self.end_s[row]), row

    def rows(self) -> Ints:
        """Return rows in use, by the number of their job."""
        rows = np.flatnonzero(self.job[: self.top] >= 0)
        return rows[np.argsort(self.job[rows], kind="stable")]

    def planned_ends_s(self, now_s: float, limit_factor: float) -> Floats:
        """Return when each row's job ends as far as a scheduler can tell: by its time limit, from now on at the
        earliest.

        Of a job without one, by its present speed, times an error of limits.
        """
        rows, start_s, limit_s = np.arange(self.top), self.start_s[: self.top], self.limit_s[: self.top]
        speed = np.maximum(self.speed[: self.top], LEAST_SPEED)
        ends = now_s + self.left_now(rows, now_s) / speed
        guessed = start_s + limit_factor * (ends - start_s)
        planned: Floats = np.where(np.isfinite(limit_s), np.maximum(start_s + limit_s, now_s), guessed)
        return planned

    def _grow(self) -> None:
        size = len(self.job)
        self.job = np.concatenate([self.job, np.full(size, -1, dtype=np.int64)])
        for name in _FLOATS:
            fresh = np.full(size, np.inf) if name == "end_s" else np.zeros(size)
            setattr(self, name, np.concatenate([getattr(self, name), fresh]))
        self.placements += [None] * size


# The jobs that wait, in the order of the queue, and what each of them has waited for. Pure.


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
        """Return the job at the head."""
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
