"""Opportunistic jobs in a simulation: who shares which GPU, asked of the packer's own decision, and how fast. Pure.

Guaranteed jobs come and go as without them; they get numbers of GPUs here, since sharing is between two jobs on one
GPU. A job whose GPUs lack the memory for it is paused there, the newest first, as by the coordinator of a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.packing.decide import PackingPlan
from hetstream.slurm_plugin.packing.state import GpuNode, GpuUse, PackingState, Place, PlacedJob, SharedGpu, WaitingJob
from hetstream.slurm_plugin.simulate.running import Nodes, Running, Shape, StartPlace
from hetstream.slurm_plugin.simulate.scenario import Scenario
from hetstream.slurm_plugin.simulate.sharing import Felt, GpuLoad, PackingOptions
from hetstream.slurm_plugin.simulate.workload import Cluster, Workload

# What each job of a workload holds from its start to its end in one scenario. Pure; used by the engine.

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Asked:
    """Of each job.

    Attributes:
        is_opportunistic: it holds no GPU, shares those that the packer finds, and loads its data itself.
        speed: with what it holds, as a share of the ideal.
        demand: CPUs of data workers with which it is at its best.
        shapes: the different shapes.
        shape_of: the number of its shape.
    """

    is_opportunistic: Bools
    speed: Floats
    demand: Floats
    shapes: list[Shape]
    shape_of: list[int]


def asked_of(workload: Workload, cluster: Cluster, scenario: Scenario) -> Asked:
    """Return what the jobs hold under this scenario."""
    packed = np.zeros(len(workload), dtype=bool)
    if scenario.packing is not None and workload.sharing is not None:
        packed = workload.sharing.is_opportunistic & (workload.num_gpus > 0)
    columns = (
        workload.units,
        np.where(packed, 0, workload.gpus),
        np.where(packed, workload.ideal_cpus, scenario.unit_cpus(workload, cluster)),
        workload.memory_gib,
        np.where(packed, 0.0, scenario.extra_cpus(workload)),
    )
    table = np.stack([np.asarray(column, dtype=float) for column in columns], axis=1)
    unique, inverse = np.unique(table, axis=0, return_inverse=True)
    return Asked(
        is_opportunistic=packed,
        speed=np.where(packed, 1.0, scenario.fixed_speed(workload, cluster)),
        demand=np.where(packed, 0.0, workload.demand),
        shapes=[Shape(int(units), *shape) for units, *shape in unique.tolist()],
        shape_of=inverse.reshape(-1).tolist(),
    )


Ints = npt.NDArray[np.int64]

_GIB, _MB_PER_GIB = 1 << 30, 1024
_NO_LIMIT_BYTES = 1 << 60
# Most waiting jobs that the packer is shown.
_MOST_SHOWN = 200
_TOO_LARGE = "too large: an opportunistic job asks the same of each of its nodes, and they have not enough GPUs or CPUs"
# CPUs and GiB: what sums of fractions leave.
_ROUNDING = 1e-6
_NONE: Ints = np.zeros(0, dtype=np.int64)
_NO_CPUS: Floats = np.zeros(0)


class Packing:
    """GPUs with their guaranteed jobs and those that share them.

    Attributes:
        felt: so far.
    """

    def __init__(
        self, workload: Workload, asked: Asked, options: PackingOptions, nodes: Nodes, running: Running
    ) -> None:
        assert workload.sharing is not None, "nothing is known of sharing"
        self._load, self._sharing, self._asked = workload, workload.sharing, asked
        self._options, self._nodes, self._running = options, nodes, running
        counts = nodes.cluster.gpus.astype(np.int64)
        # GPUs of all nodes, in the order of the nodes.
        self._first: Ints = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._node: Ints = np.repeat(np.arange(len(counts)), counts)
        self._host: Ints = np.full(int(counts.sum()), -1, dtype=np.int64)
        self._not_before_s = np.zeros(len(self._host))
        self._gpus_of: dict[int, Ints] = {}  # of a guaranteed job's row
        self._shared: dict[int, Ints] = {}  # of an opportunistic job's row, in the order in which they came
        self._paused_s: dict[int, float] = {}
        self._waiting: dict[int, float] = {}  # job -> since when
        self._delayed_s: dict[int, float] = {}
        self._used = np.zeros(len(self._host))
        self._is_due = False
        self._look_s = math.inf
        self.felt = Felt(asked.is_opportunistic, np.zeros(len(workload)), np.zeros(len(workload), dtype=np.int64))
        self._since_s = 0.0

    def next_s(self) -> float:
        """Return when the packer looks next."""
        return self._look_s

    @property
    def keeps_progress(self) -> bool:
        """Whether a job that is taken away goes on from where it was."""
        return self._options.keeps_progress

    def num_idle_used(self) -> int:
        """GPUs that opportunistic jobs alone are on."""
        used = np.unique(self._line_gpus())
        return int((self._host[used] < 0).sum())

    # Jobs come and go

    def submit(self, job: int, now_s: float) -> None:
        """An opportunistic job waits from now on."""
        self._waiting[job] = now_s
        self._is_due = True

    def waited_s(self, job: int, now_s: float) -> float:
        """Note that an opportunistic job starts. Return how long it has waited."""
        return now_s - self._waiting.pop(job)

    def hosts(self, row: int) -> list[int]:
        """Note that a guaranteed job has started: it gets GPUs. Return the rows of jobs that must leave them."""
        held = self._running.placements[row]
        assert held is not None, f"row {row} is free"
        shape, placement = held
        chosen: list[int] = []
        for node, units in zip(placement.nodes.tolist(), placement.units.tolist(), strict=True):
            chosen += self._least_shared(node, round(units * shape.gpus))
        gpus = np.array(chosen, dtype=np.int64)
        self._gpus_of[row] = gpus
        self._host[gpus] = row
        self._is_due = True
        if not self._options.takes_over:
            return []
        return [other for other, on in self._shared.items() if np.isin(on, gpus).any()]

    def shares(self, row: int, gpus: Ints, now_s: float) -> None:
        """An opportunistic job has started on these GPUs."""
        self._shared[row] = gpus
        self._not_before_s[gpus] = now_s + self._options.rules.settle_s

    def left(self, row: int) -> None:
        """The job of a row runs no more."""
        if row in self._gpus_of:
            self._host[self._gpus_of.pop(row)] = -1
            self._is_due = True
        elif row in self._shared:
            self._shared.pop(row)
            self._paused_s.pop(row, None)
            self._is_due = True

    def evicted(self, row: int, now_s: float) -> None:
        """The job of a row is taken away, and waits again."""
        job = int(self._running.job[row])
        self.felt.evictions[job] += 1
        self._delayed_s[job] = now_s + self._options.rules.delay_s(int(self.felt.evictions[job]))
        self.left(row)
        self.submit(job, now_s)

    def too_large(self) -> dict[int, str]:
        """Return jobs that no GPUs of this cluster would suffice for."""
        parts = {job: self._parts(job) for job in np.flatnonzero(self._asked.is_opportunistic).tolist()}
        return {job: _TOO_LARGE for job, part in parts.items() if part is None}

    def find(self, shape: Shape, find: Callable[[Shape], StartPlace | None]) -> StartPlace | None:
        """Return where a guaranteed job fits: opportunistic jobs are in nobody's way.

        Args:
            shape: of the job.
            find: says so for the nodes as they are.
        """
        alone = self._unshared().find(shape) if self._options.takes_over else None
        if not self._shared or alone is not None:
            return alone or find(shape)
        without = self.without_them()[0].find
        return without(shape) if find == self._nodes.find else find(shape) or without(shape)

    def in_the_way(self, shape: Shape, placement: StartPlace) -> list[int]:
        """Return rows of opportunistic jobs that must leave so that a guaranteed one has its CPUs and memory: the
        newest.
        """
        found: list[int] = []
        nodes = [*placement.nodes.tolist(), *placement.extra_nodes.tolist()]
        cpus = [*(placement.units * shape.cpus).tolist(), *placement.extra_cpus.tolist()]
        memory = [*(placement.units * shape.memory_gib).tolist(), *[0.0] * len(placement.extra_nodes)]
        for node in sorted(set(nodes)):
            need = sum(amount for at, amount in zip(nodes, cpus, strict=True) if at == node)
            need_gib = sum(amount for at, amount in zip(nodes, memory, strict=True) if at == node)
            need, need_gib = need - float(self._nodes.cpus[node]), need_gib - float(self._nodes.memory_gib[node])
            for row in reversed(self._shared):
                if need <= _ROUNDING and need_gib <= _ROUNDING:
                    break
                own, place = self._held(row)
                mine = int(place.units[place.nodes == node].sum())
                if mine:
                    found += [] if row in found else [row]
                    need, need_gib = need - mine * own.cpus, need_gib - mine * own.memory_gib
        return found

    def without_them(self) -> tuple[Nodes, Set[int]]:
        """Return the nodes as they would be if all opportunistic jobs left, and the rows of these."""
        nodes = self._nodes.copy()
        nodes.give_back_all([self._held(row) for row in self._shared])
        return nodes, self._shared.keys()

    def _unshared(self) -> Nodes:
        """The nodes as if GPUs with opportunistic jobs were taken."""
        used = np.unique(self._line_gpus())
        taken = np.bincount(self._node[used[self._host[used] < 0]], minlength=len(self._nodes.gpus))
        return self._nodes.with_fewer_gpus(taken.astype(float))

    # The packer

    def look(self, now_s: float) -> tuple[list[int], list[tuple[int, StartPlace, Ints]]]:
        """Ask the packer, if it is time: rows of jobs to take away, and jobs to start, where."""
        if now_s < self._look_s:
            return [], []
        self._look_s, self._is_due = math.inf, False
        plan = self._options.decide(self._state(now_s), now_s, self._options.rules)
        rows = {str(int(self._running.job[row])): row for row in self._shared}
        return [rows[eviction.job] for eviction in plan.evictions], self._placements(plan)

    def plan_look(self, now_s: float) -> None:
        """Say when it looks next: only when something has changed that may make room, or a delay ends."""
        if not self._waiting and not self._paused_s:
            return
        step_s = self._options.interval_s
        due_s = [now_s] if self._is_due else []
        if self._waiting:
            due_s += [float(at) for at in self._not_before_s[self._not_before_s > now_s]]
            due_s += [at for job, at in self._delayed_s.items() if job in self._waiting and at > now_s]
        due_s += [since_s + self._options.rules.most_paused_s for since_s in self._paused_s.values()]
        if due_s:
            at_s = step_s * math.ceil(min(due_s) / step_s)
            self._look_s = min(self._look_s, at_s if at_s > now_s else at_s + step_s)

    def _placements(self, plan: PackingPlan) -> list[tuple[int, StartPlace, Ints]]:
        found = []
        for placement in plan.placements:
            job = int(placement.job)
            nodes = np.array([int(name) for name in placement.place.nodes], dtype=np.int64)
            indices = np.array(placement.place.indices, dtype=np.int64)
            units = np.full(len(nodes), int(self._load.units[job]) // len(nodes), dtype=np.int64)
            gpus = (self._first[nodes][:, None] + indices).reshape(-1)
            found.append((job, StartPlace(nodes, units, _NONE, _NO_CPUS), gpus))
        return found

    def _state(self, now_s: float) -> PackingState:
        """The cluster as the packer sees it."""
        waiting = sorted(self._waiting, key=lambda job: (float(self._load.submit_s[job]), job))[:_MOST_SHOWN]
        return PackingState(
            tuple(self._node_now(node, now_s) for node in range(len(self._nodes.gpus)) if self._count(node)),
            tuple(shown for job in waiting if (shown := self._waiting_job(job)) is not None),
            tuple(self._placed_job(row, now_s) for row in self._shared),
        )

    def _count(self, node: int) -> int:
        return int(self._first[node + 1] - self._first[node])

    def _node_now(self, node: int, now_s: float) -> GpuNode:
        nodes, running = self._nodes, self._running
        gpus = []
        for gpu in range(int(self._first[node]), int(self._first[node + 1])):
            row = int(self._host[gpu])
            wait = None if row < 0 else max(0.0, 1.0 - float(running.base[row]))
            use = GpuUse(now_s, min(1.0, float(self._used[gpu])), self._free_bytes(row), wait)
            gpus.append(
                SharedGpu(
                    gpu - int(self._first[node]), self._options.rules.most_jobs, row >= 0, use,
                    float(self._not_before_s[gpu]),
                )
            )  # fmt: skip
        memory_gib = float(nodes.memory_gib[node])
        memory_mb = int(min(memory_gib, 1e9) * _MB_PER_GIB)
        closed = "" if nodes.is_up[node] else "down"
        return GpuNode(str(node), int(max(0.0, nodes.cpus[node])), memory_mb, tuple(gpus), closed=closed)

    def _free_bytes(self, row: int) -> int:
        """Of the memory of a GPU, what its guaranteed job leaves."""
        if math.isinf(self._options.gpu_memory_gib):
            return _NO_LIMIT_BYTES
        own_gib = 0.0 if row < 0 else float(self._sharing.gpu_memory_gib[self._running.job[row]])
        return max(0, int((self._options.gpu_memory_gib - own_gib) * _GIB))

    def _parts(self, job: int) -> tuple[int, int] | None:
        """On how many nodes an opportunistic job runs, and with how many GPUs on each; None if it fits on none."""
        units, gpus = int(self._load.units[job]), int(self._load.gpus[job])
        counts = self._nodes.cluster.gpus
        cpus = self._asked.shapes[self._asked.shape_of[job]].cpus
        for num_nodes in range(1, units + 1):
            if units % num_nodes == 0:
                each = units // num_nodes
                fits = (counts >= each * gpus) & (self._nodes.cluster.cpus >= each * cpus)
                if fits.sum() >= num_nodes:
                    return num_nodes, each * gpus
        return None

    def _waiting_job(self, job: int) -> WaitingJob | None:
        parts = self._parts(job)
        if parts is None:
            return None
        shape = self._asked.shapes[self._asked.shape_of[job]]
        each = shape.units // parts[0]
        return WaitingJob(
            str(job), float(self._load.submit_s[job]), parts[0], parts[1],
            int(self._sharing.gpu_memory_gib[job] * _GIB), math.ceil(each * shape.cpus),
            math.ceil(each * shape.memory_gib * _MB_PER_GIB), not_before_s=self._delayed_s.get(job, 0.0),
        )  # fmt: skip

    def _placed_job(self, row: int, now_s: float) -> PlacedJob:
        job, gpus = int(self._running.job[row]), self._shared[row]
        nodes = sorted({int(self._node[gpu]) for gpu in gpus})
        indices = sorted({int(gpu - self._first[self._node[gpu]]) for gpu in gpus})
        place = Place(tuple(map(str, nodes)), tuple(indices))
        paused_s = now_s - self._paused_s[row] if row in self._paused_s else 0.0
        return PlacedJob(str(job), place, int(self._sharing.gpu_memory_gib[job] * _GIB), paused_s=paused_s)

    # Speeds

    def set_speeds(self, now_s: float) -> bool:
        """Give all jobs that share a GPU their speeds; whether any has changed."""
        running, load = self._running, self._gpu_load()
        lines, hosts = self._options.law(load, self._options)
        factor = np.ones(running.top)
        rows = np.concatenate([np.full(len(gpus), row) for row, gpus in self._shared.items()] or [_NONE])
        np.minimum.at(factor, rows, lines)
        hosted = np.flatnonzero(self._host >= 0)
        np.minimum.at(factor, self._host[hosted], hosts[hosted])
        for row in self._paused(now_s):
            factor[row] = 0.0
        changed = np.flatnonzero(factor != running.factor[: running.top])
        changed = changed[running.job[changed] >= 0]
        if len(changed):
            running.set_factor(changed, factor[changed], now_s)
        used = self._used_now()
        if self._waiting and not np.array_equal(used, self._used):
            self._is_due = True
        self._used = used
        return bool(len(changed))

    def _gpu_load(self) -> GpuLoad:
        running, host = self._running, self._host
        has_host = host >= 0
        use = np.where(has_host, self._sharing.gpu_use[running.job[host]] * running.base[host], 0.0)
        rows = [row for row, gpus in self._shared.items() for _ in gpus]
        jobs = running.job[np.array(rows, dtype=np.int64)]
        return GpuLoad(has_host, use, self._line_gpus(), self._sharing.gpu_use[jobs])

    def _used_now(self) -> Floats:
        """Share of each GPU's time in which something runs on it."""
        running, load = self._running, self._gpu_load()
        rows = np.array([row for row, gpus in self._shared.items() for _ in gpus], dtype=np.int64)
        return load.host_use + np.bincount(load.gpu, load.use * running.speed[rows], minlength=len(self._host))

    def _paused(self, now_s: float) -> Iterable[int]:
        """Rows of jobs for which there is not the memory; who came last is the first of them."""
        if math.isinf(self._options.gpu_memory_gib):
            return ()
        running, memory_gib = self._running, self._sharing.gpu_memory_gib
        free = np.full(len(self._host), self._options.gpu_memory_gib)
        hosted = np.flatnonzero(self._host >= 0)
        free[hosted] -= memory_gib[running.job[self._host[hosted]]]
        paused = {}
        for row, gpus in self._shared.items():
            own_gib = memory_gib[running.job[row]]
            if (free[gpus] >= own_gib).all():
                free[gpus] -= own_gib
            else:
                paused[row] = self._paused_s.get(row, now_s)
        self._paused_s = paused
        return paused

    def count_until(self, now_s: float) -> None:
        """Of each guaranteed job, count the time that sharing has cost it up to now."""
        rows = np.array(list(self._gpus_of), dtype=np.int64)
        if len(rows):
            self.felt.held_up_s[self._running.job[rows]] += (now_s - self._since_s) * (1.0 - self._running.factor[rows])
        self._since_s = now_s

    def _line_gpus(self) -> Ints:
        return np.concatenate([*self._shared.values(), _NONE])

    def _held(self, row: int) -> tuple[Shape, StartPlace]:
        held = self._running.placements[row]
        assert held is not None, f"row {row} is free"
        return held

    def _least_shared(self, node: int, count: int) -> list[int]:
        """GPUs of a node for a guaranteed job: those with the fewest other jobs, of these the ones with the newest."""
        newest = {int(gpu): place for place, gpus in enumerate(self._shared.values()) for gpu in gpus}
        shared = np.bincount(self._line_gpus(), minlength=len(self._host))
        free = [gpu for gpu in range(int(self._first[node]), int(self._first[node + 1])) if self._host[gpu] < 0]
        return sorted(free, key=lambda gpu: (int(shared[gpu]), -newest.get(gpu, -1), gpu))[:count]
