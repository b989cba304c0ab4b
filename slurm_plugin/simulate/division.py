"""Data workers under a policy: asks the daemon's policy, lets data workers start and leave, and sets speeds. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.errors import SimulationFault
from hetstream.slurm_plugin.policy.rules import caps_of
from hetstream.slurm_plugin.policy.table import NO_CAP, JobTable, Policy, Pool
from hetstream.slurm_plugin.simulate.running import Nodes, Running
from hetstream.slurm_plugin.simulate.scenario import Scenario
from hetstream.slurm_plugin.simulate.worker_nodes import (
    Homes,
    PlacedWorkers,
    Places,
    local_cpus,
    place_workers,
    used_cpus,
    within_network,
)
from hetstream.slurm_plugin.simulate.workload import Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Starting:
    """Data workers that start: CPUs of each row of the running jobs."""

    ready_s: float
    cpus: Floats


class Division:
    """Who has which CPUs of data workers.

    Attributes:
        is_content: every job has all that it wants: an end makes no difference to the others.
        num_moves: changes of a job's number of data workers.
        cpus_started, cpus_taken_back: CPUs of data workers that were started, and that had to leave.
    """

    def __init__(self, workload: Workload, scenario: Scenario, policy: Policy, running: Running) -> None:
        self._workload, self._options, self._running = workload, scenario.workers, running
        self._policy, self._name = policy, scenario.name
        self._starting: deque[_Starting] = deque()
        self._has_budget = bool(workload.network_gbps.max(initial=0.0) > 0)
        self._is_placed = scenario.placement is not None
        # Where the data workers of a job are, while it runs.
        self._places: dict[int, Places] = {}
        # One that must go elsewhere works for nobody for so long: as the daemon's policies reckon.
        self._move_s = replace(scenario.rules.move, start_s=self._options.start_s).idle_s
        self._knows_places = self._is_placed or self._options.fallback or self._has_budget
        needs = workload.worker_memory_gib[workload.demand > 0]
        self._memory_gib = float(needs.max(initial=0.0))
        self._user_caps = caps_of(workload.user_names, scenario.caps.user)
        self._tenant_caps = caps_of(workload.tenant_names, scenario.caps.tenant)
        sigma = self._options.estimate_sigma
        draw = np.random.default_rng([scenario.seed, 1])
        self._guess = np.exp(sigma * draw.standard_normal(len(workload))) if sigma else np.ones(len(workload))
        self.is_content = False
        self.num_moves = 0
        self.cpus_started = self.cpus_taken_back = 0.0

    def pool_cpus(self, nodes: Nodes) -> Floats:
        """CPUs of each node that data workers can have."""
        return nodes.for_workers(self._options.cpus, self._memory_gib)

    def next_ready_s(self) -> float:
        """When data workers that start are ready."""
        return self._starting[0].ready_s if self._starting else np.inf

    def forget(self, row: int) -> None:
        """The job of a row has ended, and its data workers with it."""
        self._places.pop(row, None)
        for batch in self._starting:
            if row < len(batch.cpus):
                batch.cpus[row] = 0.0

    def ready(self, nodes: Nodes, now_s: float) -> int:
        """Let data workers work that have started; how many speeds that changes."""
        running = self._running
        while self._starting and self._starting[0].ready_s <= now_s:
            cpus = self._starting.popleft().cpus
            running.active[: len(cpus)] += cpus
        return self.settle(nodes, now_s)

    def divide(self, nodes: Nodes, now_s: float) -> int:
        """Ask the policy; data workers that must leave do so at once, others start. How many speeds that changes.

        Raises:
            SimulationFault: the policy gave more than there is, or less than nothing.
        """
        running, size = self._running, self._options.cpus
        rows = running.rows()
        rows = rows[running.demand[rows] > 0]
        pool = Pool(int(self.pool_cpus(nodes).sum()), self._tenant_caps, self._user_caps)
        if not len(rows):
            return 0
        table = self._table(rows, now_s)
        workers = self._policy(table, pool, now_s).workers
        self._check(workers, table, pool)
        self.is_content = bool((workers >= table.wanted).all())
        target = (workers * size).astype(float)
        before = running.target[rows]
        more = np.maximum(0.0, target - before)
        less = np.maximum(0.0, before - target)
        running.target[rows] = target
        moved = (more > 0) | (less > 0)
        running.changed_s[rows[moved]] = now_s
        self.num_moves += int(moved.sum())
        self.cpus_started += float(more.sum())
        self.cpus_taken_back += float(less.sum())
        if less.any():
            self._cancel(rows, target)
        if more.any():
            wait_s = self._options.start_s + (self._options.take_back_s if less.any() else 0.0)
            self._start(rows, more, wait_s, now_s)
        return self.settle(nodes, now_s, rows, more)

    def _start(self, rows: Ints, more: Floats, wait_s: float, now_s: float) -> None:
        """Let a number of CPUs of data workers work after a while."""
        if not wait_s:
            self._running.active[rows] += more
            return
        cpus = np.zeros(len(self._running.job))
        cpus[rows] = more
        batch = _Starting(now_s + wait_s, cpus)
        # Those that wait for nobody to leave are ready before an earlier batch that does.
        place = len(self._starting)
        while place and self._starting[place - 1].ready_s > batch.ready_s:
            place -= 1
        self._starting.insert(place, batch)

    def _cancel(self, rows: Ints, target: Floats) -> None:
        """Data workers that have not started yet are the first to leave."""
        running = self._running
        starting = np.zeros(len(running.job))
        for batch in self._starting:
            starting[: len(batch.cpus)] += batch.cpus
        excess = np.zeros(len(running.job))
        excess[rows] = np.maximum(0.0, running.active[rows] + starting[rows] - target)
        for batch in reversed(self._starting):
            part = np.minimum(batch.cpus, excess[: len(batch.cpus)])
            batch.cpus -= part
            excess[: len(part)] -= part
        running.active[rows] = np.minimum(running.active[rows], target)

    def _check(self, workers: Ints, table: JobTable, pool: Pool) -> None:
        given = int(workers.sum()) * self._options.cpus
        if workers.shape != (len(table),) or workers.min(initial=0) < 0:
            raise SimulationFault(f"policy {self._name} gave a job less than no data worker, or left one out")
        if given > pool.cpus:
            raise SimulationFault(f"policy {self._name} gave {given:,} CPUs and there are {pool.cpus:,}")
        for group, caps, what in ((table.user, pool.user_caps, "user"), (table.tenant, pool.tenant_caps, "tenant")):
            if caps is None:
                continue
            held = np.bincount(group, weights=workers * table.cpus, minlength=len(caps))
            if (held > caps).any():
                code = int(np.argmax(held - caps))
                raise SimulationFault(
                    f"policy {self._name} gave a {what} {held[code]:,.0f} CPUs: at most {caps[code]:,} are allowed"
                )

    def settle(self, nodes: Nodes, now_s: float, grown: Ints | None = None, more: Floats | None = None) -> int:
        """Set speeds by what works now, and where; how many that changes.

        Args:
            nodes: what trainers have left of them.
            now_s: the time.
            grown, more: rows that were given data workers just now, and so many CPUs; of these the start is paid for.
        """
        running = self._running
        rows = np.flatnonzero(running.demand[: running.top] > 0)
        if self._is_placed and len(rows):
            started = np.zeros(len(running.job))
            if grown is not None and more is not None:
                started[grown] = more
            found = self._place(rows, nodes)
            new_cpus = np.maximum(0.0, found.num_new * self._options.cpus - started[rows])
            moved = np.minimum(running.active[rows], new_cpus)
            if moved.any():
                running.active[rows] -= moved
                self._start(rows, moved, self._move_s, now_s)
            active = np.minimum(running.active[rows], found.placed_cpus)
            speed = self._placed_speed(rows, nodes, active, found.near_cpus)
        elif self._knows_places and len(rows):
            local, _ = local_cpus(self._homes(rows), running.target[rows], self.pool_cpus(nodes))
            speed = self._placed_speed(rows, nodes, running.active[rows], local)
        else:
            speed = self._speed_with(rows, running.active[rows])
        changed = speed != running.base[rows]
        running.set_speed(rows[changed], speed[changed], now_s)
        return int(changed.sum())

    def _speed_with(self, rows: Ints, cpus: Floats) -> Floats:
        """Speeds with these CPUs of data workers, wherever they are."""
        running, curves = self._running, self._workload.curves
        if curves is not None:
            return curves.rows(running.job[rows]).speed_with(cpus)
        speed: Floats = (1.0 - running.overhead[rows]) * np.minimum(1.0, cpus / running.demand[rows])
        return speed

    def _placed_speed(self, rows: Ints, nodes: Nodes, active: Floats, local: Floats) -> Floats:
        """What depends on where data workers are: the network, and working without them on the trainer's nodes."""
        running = self._running
        local = np.minimum(local, active)
        speed = self._speed_with(rows, active)
        if self._options.fallback:
            alone = np.minimum(1.0, (running.held_cpus[rows] + local) / running.useful_cpus[rows])
            speed = np.where(running.overhead[rows] > 0, np.maximum(speed, np.where(local > 0, alone, 0.0)), speed)
        if self._is_placed:
            return speed  # a data worker for which there is no budget has no place
        share = np.divide(local, active, out=np.ones_like(local), where=active > 0)
        budget_gbps = nodes.cluster.network_gbps * self._options.network_share
        return within_network(self._homes(rows), speed, share, budget_gbps)

    def used_cpus(self, nodes: Nodes) -> Floats:
        """CPUs of each node that data workers hold."""
        if self._is_placed:
            used = np.zeros(nodes.cluster.num_nodes)
            for node, count in chain.from_iterable(self._places.values()):
                used[node] += count * self._options.cpus
            return used
        rows = np.flatnonzero(self._running.target[: self._running.top] > 0)
        return used_cpus(self._homes(rows), self._running.target[rows], self.pool_cpus(nodes))

    def _place(self, rows: Ints, nodes: Nodes) -> PlacedWorkers:
        """Where data workers are from now on: those of jobs that have run for longest choose first."""
        running, load, size = self._running, self._workload, self._options.cpus
        order = np.lexsort((running.job[rows], running.start_s[rows]))
        turn = np.argsort(order)
        homes = self._homes(rows)
        lines = np.argsort(turn[homes.row], kind="stable")
        own = Homes(turn[homes.row][lines], homes.node[lines], homes.share[lines], homes.gbps[lines])
        rows = rows[order]
        job = running.job[rows]
        found = place_workers(
            own,
            (running.target[rows] // size).astype(np.int64).tolist(),
            [self._places.get(row, ()) for row in rows.tolist()],
            size,
            load.network_gbps[job] * load.units[job] * size / running.demand[rows],
            (self.pool_cpus(nodes) // size).astype(np.int64),
            nodes.cluster.network_gbps,
            self._options.network_share,
        )
        self._places = dict(zip(rows.tolist(), found.places, strict=True))
        return PlacedWorkers(found.places, found.placed_cpus[turn], found.near_cpus[turn], found.num_new[turn])

    def _homes(self, rows: Ints) -> Homes:
        """Where the trainers of these rows are."""
        running = self._running
        held = [running.placements[row] for row in rows.tolist()]
        placed = [placement for _, placement in (home for home in held if home is not None)]
        counts = [len(placement.nodes) for placement in placed]
        row = np.repeat(np.arange(len(rows)), counts)
        units = np.concatenate([placement.units for placement in placed]) if placed else np.zeros(0)
        node = np.concatenate([placement.nodes for placement in placed]) if placed else np.zeros(0, dtype=np.int64)
        jobs = running.job[rows][row]
        return Homes(row, node, units / self._workload.units[jobs], units * self._workload.network_gbps[jobs])

    def _table(self, rows: Ints, now_s: float) -> JobTable:
        running, load, size = self._running, self._workload, self._options.cpus
        job, demand = running.job[rows], running.demand[rows]
        zeros, ones = np.zeros(len(rows)), np.ones(len(rows))
        none = np.zeros(len(rows), dtype=np.int64)
        if load.curves is None:
            curve_cpus = np.stack((zeros, demand), axis=1)
            curve_speed = np.stack((zeros, 1.0 - running.overhead[rows]), axis=1)
        else:
            curve_cpus, curve_speed = load.curves.cpus[job], load.curves.speed[job]
        return JobTable(
            job_id=job,
            minimum=none,
            wanted=np.ceil(demand / size).astype(np.int64),
            current=(running.target[rows] // size).astype(np.int64),
            cpus=np.full(len(rows), size, dtype=np.int64),
            cap=np.full(len(rows), NO_CAP, dtype=np.int64),
            gpus=running.gpus[rows],
            weight=ones,
            curve_cpus=curve_cpus,
            curve_speed=curve_speed,
            remaining_s=running.left_now(rows, now_s) * self._guess[job],
            remaining_sigma=np.full(len(rows), self._options.estimate_sigma),
            total_s=load.work_s[job],
            age_s=now_s - load.submit_s[job],
            starved_s=np.maximum(0.0, now_s - running.slow_since_s[rows]),
            held_s=now_s - running.changed_s[rows],
            stale_s=zeros,
            tenant=load.tenants[job],
            user=load.users[job],
        )
