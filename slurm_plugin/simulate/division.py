"""Data workers under a policy, and where they are. Pure.

It asks the daemon's policy, lets data workers start and leave, and sets speeds. Their CPUs are on their trainer's own
node first. The daemon places whole data workers; here CPUs are cut where a node ends, which changes no sum.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin import placement as places
from hetstream.slurm_plugin.errors import SimulationFault
from hetstream.slurm_plugin.placement import CHOICES, Network, TypicalShapes, place_gang, spread, traffic_of
from hetstream.slurm_plugin.policy.policies import caps_of
from hetstream.slurm_plugin.policy.table import NO_CAP, JobTable, Policy, Pool
from hetstream.slurm_plugin.simulate.running import Nodes, Running, Shape, StartPlace
from hetstream.slurm_plugin.simulate.scenario import Scenario
from hetstream.slurm_plugin.simulate.workload import Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Homes:
    """Where the trainers of some jobs are: a line for each job and node.

    Attributes:
        row: of the job, as an index of its target.
        node: of the line.
        share: of the job's units that are on the node.
        gbps: that these units take in at the ideal speed.
    """

    row: Ints
    node: Ints
    share: Floats
    gbps: Floats


def local_cpus(homes: Homes, target: Floats, free: Floats) -> tuple[Floats, Floats]:
    """CPUs of data workers that are on their trainer's nodes.

    Args:
        homes: of the jobs.
        target: CPUs of each job.
        free: CPUs of each node that data workers can have.

    Returns:
        Of each job, and of each node.
    """
    order = np.argsort(homes.node, kind="stable")
    node, row = homes.node[order], homes.row[order]
    wanted = target[row] * homes.share[order]
    before = np.cumsum(wanted) - wanted
    first = np.searchsorted(node, node)
    before -= before[first] if len(before) else 0.0
    given = np.clip(free[node] - before, 0.0, wanted)
    of_job: Floats = np.bincount(row, weights=given, minlength=len(target)).astype(np.float64)
    of_node: Floats = np.bincount(node, weights=given, minlength=len(free)).astype(np.float64)
    return of_job, of_node


def used_cpus(homes: Homes, target: Floats, free: Floats) -> Floats:
    """CPUs that data workers hold of each node: local ones, and the others where most is free."""
    local_of_job, used = local_cpus(homes, target, free)
    remote = float((target - local_of_job).sum())
    left = free - used
    order = np.argsort(-left, kind="stable")
    used[order] += np.diff(np.minimum(np.cumsum(left[order]), remote), prepend=0.0)
    return used


def within_network(homes: Homes, speed: Floats, local_share: Floats, budget_gbps: Floats) -> Floats:
    """Speeds that keep what each node takes in from data workers elsewhere within its budget.

    Args:
        homes: of the jobs.
        speed: of each job with all of its data workers.
        local_share: of the job's data workers that are on its own nodes.
        budget_gbps: of each node.
    """
    remote_speed = speed * (1.0 - local_share)
    taken = np.bincount(homes.node, weights=homes.gbps * remote_speed[homes.row], minlength=len(budget_gbps))
    allowed = np.where(taken > budget_gbps, budget_gbps / np.maximum(taken, 1e-12), 1.0)
    # The trainers of a job step together: the tightest of its nodes sets the speed.
    factor = np.ones_like(speed)
    np.minimum.at(factor, homes.row, allowed[homes.node])
    return speed * local_share + remote_speed * factor


# Nodes as places: whole jobs go where a placement puts them, data workers where the daemon would prefer them. Pure.
#
# The placements and the rule for data workers are the objects that the daemon and `make bench-frag` use
# (`hetstream.slurm_plugin.placement`). They count in thousandths of a CPU; what jobs hold is counted by `running.py`
# alone.

_MB_PER_GIB = 1024
# Of a node whose memory, or whose link, is no limit.
_NO_LIMIT_MB, _NO_LIMIT_BYTES_PER_S = 1 << 40, 1e15
_BYTES_PER_GBIT = 1e9 / 8
# Of a thousandth: what sums of fractions leave.
_ROUNDING = 1e-3


class JobPlaces:
    """Where whole jobs go.

    Args:
        name: of the placement, of `placement.choices`.
        nodes: what is free; followed from now on.
        expected: the shape of each job that will come, for placements that look ahead.
        seed: for placements that draw.
    """

    def __init__(self, name: str, nodes: Nodes, expected: Iterable[Shape], seed: int) -> None:
        own = nodes.cluster
        self._nodes = nodes
        self._seen = places.Nodes(_thousandths(own.cpus), _memory_mb(own.memory_gib), own.gpus.astype(np.int64))
        self._placement = CHOICES[name].make(self._seen, typical_shapes(nodes, expected), seed)
        self._changed = nodes.follow()

    def find(self, shape: Shape) -> StartPlace | None:
        """Return where a job fits: on the node that the placement chooses, else on the fewest; None if nowhere."""
        self._look()
        if shape.gpus == 1:
            parts = place_gang(self._seen, _asked(shape, 1), shape.units, self._placement)
            found = [(spot.node, part.gpus) for spot, part in parts or ()]
        else:
            spot = self._placement.choose(_asked(shape, shape.units))
            found = [] if spot is None else [(spot.node, shape.units)]
        if not found:
            return self._nodes.find(shape)
        nodes, units = np.array(found, dtype=np.int64).T
        return self._nodes.placed(shape, nodes, units)

    def _look(self) -> None:
        """What is free of the nodes that have changed."""
        free = self._nodes
        for node in sorted(self._changed):
            memory_mb = int(_memory_mb(free.memory_gib[node : node + 1])[0])
            cpus = int(_thousandths(free.cpus[node : node + 1])[0])
            self._seen.set_free(node, cpus, memory_mb, max(0, int(free.gpus[node])))
        self._changed.clear()


def typical_shapes(nodes: Nodes, expected: Iterable[Shape]) -> TypicalShapes:
    """Return what jobs with GPUs ask of one node; those that no node can hold, of each of several.

    To a job without GPUs all free GPUs are of no use, wherever they are: it says nothing of places.
    """
    own = nodes.cluster
    known: dict[Shape, places.Shape] = {}
    found = []
    for shape in expected:
        if not shape.gpus:
            continue
        if shape not in known:
            fits = ((own.gpus >= shape.units * shape.gpus) & (own.cpus >= shape.units * shape.cpus)).any()
            known[shape] = _asked(shape, shape.units if fits else 1)
        found.append(known[shape])
    return TypicalShapes(found)


def unusable_gpus(typical: TypicalShapes, nodes: Nodes) -> float:
    """GPUs that are free and that typical jobs could not use: FGD's measure of fragmentation, as a share of all."""
    up = nodes.is_up & (nodes.cluster.gpus > 0)
    states = np.stack([_thousandths(nodes.cpus[up]), nodes.gpus[up].astype(np.int64)], axis=1)
    states, counts = np.unique(states, axis=0, return_counts=True)
    devices = np.arange(int(states[:, 1].max(initial=1)))
    gpus = np.where(devices < states[:, 1:], places.WHOLE, 0)
    lost = typical.fragments(states[:, 0], gpus, np.zeros(len(states), np.int64))
    return float(lost @ counts) / (places.WHOLE * max(1.0, nodes.cluster.num_gpus))


# Of one job: node and number of its data workers there.
Places = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PlacedWorkers:
    """Where data workers are.

    Attributes:
        places: of each job.
        placed_cpus, near_cpus: of each job's data workers that have a place, and of those beside its trainers.
        num_new: of each job's data workers that were not there before.
    """

    places: tuple[Places, ...]
    placed_cpus: Floats
    near_cpus: Floats
    num_new: Ints


def place_workers(
    homes: Homes,
    workers: Sequence[int],
    before: Sequence[Places],
    cpus: int,
    gbps: Floats,
    room: Ints,
    link_gbps: Floats,
    link_share: float,
) -> PlacedWorkers:
    """Give data workers places, job by job: who has one stays there while there is room, the others get one.

    Args:
        homes: where the trainers of the jobs are; jobs choose in the order of their rows.
        workers: data workers of each job.
        before: where they were.
        cpus: of one.
        gbps: that one of each job sends.
        room: data workers that each node could hold if there were none.
        link_gbps: of each node.
        link_share: of a link that data workers may use.
    """
    link = np.minimum(link_gbps * _BYTES_PER_GBIT, _NO_LIMIT_BYTES_PER_S)
    taken, num_remote = np.zeros(len(room)), np.zeros(len(room), np.int64)
    room, sent = room.copy(), (gbps * _BYTES_PER_GBIT).tolist()
    firsts = np.searchsorted(homes.row, np.arange(len(workers) + 1))
    trainers = [homes.node[firsts[row] : firsts[row + 1]].tolist() for row in range(len(workers))]
    kept = [_kept(own, num if nodes else 0, room) for own, num, nodes in zip(before, workers, trainers, strict=True)]
    num_kept = np.array([sum(own.values()) for own in kept], dtype=np.int64)
    for row in np.flatnonzero(num_kept).tolist():
        taken += traffic_of(kept[row].items(), trainers[row], sent[row], len(room))
        num_remote += _num_remote(kept[row], trainers[row], len(room))
    places = [dict(own) for own in kept]
    for row, num in enumerate(workers):
        missing = num - int(num_kept[row])
        if missing <= 0 or not trainers[row]:
            continue
        found = spread(room, trainers[row], missing, sent[row], Network(link, taken, num_remote, link_share))
        taken = taken + found.traffic_bytes_per_s
        num_remote -= _num_remote(places[row], trainers[row], len(room))
        for node, count in found.places:
            room[node] -= count
            places[row][node] = places[row].get(node, 0) + count
        num_remote += _num_remote(places[row], trainers[row], len(room))
    placed = np.array([sum(own.values()) for own in places], dtype=np.int64)
    near = [sum(own.get(node, 0) for node in nodes) for own, nodes in zip(places, trainers, strict=True)]
    placed_cpus, near_cpus = placed.astype(np.float64) * cpus, np.array(near, dtype=np.float64) * cpus
    return PlacedWorkers(tuple(tuple(own.items()) for own in places), placed_cpus, near_cpus, placed - num_kept)


def _kept(places: Places, num: int, room: Ints) -> dict[int, int]:
    """Of a job's data workers, those that can stay where they are; `room` gets less."""
    found: dict[int, int] = {}
    for node, had in places:
        if count := min(had, num, int(room[node])):
            found[node] = count
            num -= count
            room[node] -= count
    return found


def _num_remote(places: Mapping[int, int], trainers: Sequence[int], num_nodes: int) -> Ints:
    """What a job adds to `Network.num_remote`: data workers away from its trainers, and distributed trainers."""
    found = np.zeros(num_nodes, np.int64)
    if len(trainers) > 1 and places:
        found[list(trainers)] = 1
    for node, count in places.items():
        if node not in trainers:
            found[node] += count
    return found


def _asked(shape: Shape, units: int) -> places.Shape:
    """What a number of units asks of one node."""
    cpus = math.ceil(units * shape.cpus * places.WHOLE - _ROUNDING)
    return places.Shape(cpus, math.ceil(units * shape.memory_gib * _MB_PER_GIB - _ROUNDING), int(units * shape.gpus))


def _thousandths(cpus: Floats) -> Ints:
    found: Ints = np.floor(cpus * places.WHOLE + _ROUNDING).astype(np.int64)
    return found


def _memory_mb(memory_gib: Floats) -> Ints:
    found: Ints = np.floor(np.minimum(memory_gib * _MB_PER_GIB, _NO_LIMIT_MB) + _ROUNDING).astype(np.int64)
    return found


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
        """Return when data workers that start are ready."""
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
