"""The simulator: a workload, a cluster and a scenario give an outcome. Pure; the same input gives the same bytes.

Time jumps from event to event: a submission, an end, a node that fails or comes back, data workers that are ready, a
round of the policy, a cycle of backfill. Between two of them all speeds are constant, so nothing is approximated.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Set

import numpy as np

from hetstream.slurm_plugin.errors import SimulationFault
from hetstream.slurm_plugin.simulate.division import Division, JobPlaces, typical_shapes
from hetstream.slurm_plugin.simulate.packing import Packing, asked_of
from hetstream.slurm_plugin.simulate.running import (
    CPUS,
    GPUS,
    LEAST_SPEED,
    MEMORY,
    Cause,
    Nodes,
    Running,
    Shape,
    StartPlace,
    Waiting,
)
from hetstream.slurm_plugin.simulate.scenario import Discipline, FailureOptions, Scenario
from hetstream.slurm_plugin.simulate.usage_log import FragmentationSampler, Outcome, UsageTotals, Use
from hetstream.slurm_plugin.simulate.workload import Cluster, Workload

# Nodes that fail and come back, drawn from a seed. Pure.


class Failures:
    """The next failure or repair of any node."""

    def __init__(self, options: FailureOptions, num_nodes: int, seed: int) -> None:
        self._options = options
        self._draw = np.random.default_rng([seed, 2])
        self._queue: list[tuple[float, int, bool]] = []
        self.num_down = 0
        if math.isfinite(options.node_mtbf_s):
            first_s = self._draw.exponential(options.node_mtbf_s, num_nodes).tolist()
            self._queue = [(at_s, node, True) for node, at_s in enumerate(first_s)]
            heapq.heapify(self._queue)

    def next_s(self) -> float:
        """Return when it is."""
        return self._queue[0][0] if self._queue else math.inf

    def due(self, now_s: float) -> list[tuple[int, bool]]:
        """Return nodes that change now, and whether they fail."""
        found = []
        while self._queue and self._queue[0][0] <= now_s:
            _, node, fails = heapq.heappop(self._queue)
            self.num_down += 1 if fails else -1
            then_s = self._options.repair_s if fails else float(self._draw.exponential(self._options.node_mtbf_s))
            heapq.heappush(self._queue, (now_s + then_s, node, not fails))
            found.append((node, fails))
        return found


# What jobs held that have ended, until Slurm has cleaned up behind them and gives it to others. Pure.


class Freeing:
    """Resources on their way from one job to another.

    Attributes:
        gpus, cpus: how many.

    Args:
        free_s: how long that takes.
    """

    def __init__(self, free_s: float) -> None:
        self._free_s = free_s
        self._held: deque[tuple[float, Shape, StartPlace]] = deque()
        self.gpus = self.cpus = 0.0

    @property
    def held(self) -> list[tuple[Shape, StartPlace]]:
        """By whom it was."""
        return [(shape, placement) for _, shape, placement in self._held]

    def add(self, shape: Shape, placement: StartPlace, now_s: float) -> None:
        """A job has ended."""
        self._held.append((now_s + self._free_s, shape, placement))
        self._count(shape, 1)

    def next_s(self) -> float:
        """Return when something is free next."""
        return self._held[0][0] if self._held else float("inf")

    def give_back(self, nodes: Nodes, now_s: float) -> bool:
        """Give to the nodes what is free now; whether that is anything."""
        found = False
        while self._held and self._held[0][0] <= now_s:
            _, shape, placement = self._held.popleft()
            nodes.give_back(shape, placement)
            self._count(shape, -1)
            found = True
        return found

    def _count(self, shape: Shape, sign: int) -> None:
        self.gpus += sign * shape.units * shape.gpus
        self.cpus += sign * (shape.units * shape.cpus + shape.extra_cpus)


# EASY's reservation: when the first job of the queue can start, and which others may start before it. Pure.


class Reservation:
    """The earliest start of one job, if those that run end when they are planned to.

    Attributes:
        start_s: that; infinite if even the empty cluster has no room, with nodes that are away.

    Args:
        shape: of the job.
        nodes: as they are, without jobs that are in nobody's way.
        running: all jobs.
        leaving: rows of the jobs that are in nobody's way.
        freeing: what jobs held that have ended.
        now_s: the time.
        limit_factor: see `Running.planned_ends_s`.
    """

    def __init__(
        self,
        shape: Shape,
        nodes: Nodes,
        running: Running,
        leaving: Set[int],
        freeing: Freeing,
        now_s: float,
        limit_factor: float,
    ) -> None:
        self._shape = shape
        self._now_s = now_s
        ends_s = running.planned_ends_s(now_s, limit_factor)
        rows = [
            row
            for row in np.argsort(ends_s, kind="stable").tolist()
            if running.placements[row] is not None and row not in leaving
        ]
        nodes = nodes.copy()
        nodes.give_back_all(freeing.held)
        held = [placement for placement in (running.placements[row] for row in rows) if placement is not None]
        # The fewest ends with which it fits: that it fits never becomes untrue with one end more.
        low, high = 1, len(rows)
        self.start_s = np.inf
        self._then = nodes.copy()
        while low <= high:
            middle = (low + high) // 2
            then = nodes.copy()
            then.give_back_all(held[:middle])
            if then.find(shape) is None:
                low = middle + 1
            else:
                high = middle - 1
                self.start_s, self._then = float(ends_s[rows[middle - 1]]), then

    def allows(self, shape: Shape, placement: StartPlace, end_s: float) -> bool:
        """Return whether another job may start now there, which is planned to end then."""
        if end_s <= self.start_s:
            return True
        self._then.take(shape, placement)
        fits = self._then.find(self._shape) is not None
        self._then.give_back(shape, placement)
        return fits

    def started(self, shape: Shape, placement: StartPlace, end_s: float) -> None:
        """It has started: if it is still there at the reserved time, its resources are not."""
        if end_s > self.start_s:
            self._then.take(shape, placement)


# (jobs that are done, jobs)
Progress = Callable[[int, int], None]

_CAUSES = {GPUS: Cause.GPUS, CPUS: Cause.CPUS, MEMORY: Cause.MEMORY}
_PROGRESS_EVENTS = 2000
# The nodes that an event touches are checked at that event; the sums over all nodes so often, and at the end.
_CHECK_EVENTS = 64
# A job that nodes have failed under so often is given up: it makes no way between two failures.
_MOST_RESTARTS = 1000
# A policy that holds to its answers is asked again so often without a move; after that time alone changes nothing.
_CALM_ROUNDS = 2
# Between two questions that follow from each other, where a policy is otherwise asked at once.
_LEAST_ROUND_S = 1.0
# Relative error of the work that was done against the integral of speeds.
_TOLERANCE = 1e-6


def simulate(workload: Workload, cluster: Cluster, scenario: Scenario, progress: Progress | None = None) -> Outcome:
    """Run one scenario to its end.

    Args:
        workload: the jobs.
        cluster: where they run.
        scenario: how.
        progress: called now and then.

    Raises:
        SimulationFault: a policy gave more than there is, or the books do not balance.
    """
    return _Engine(workload, cluster, scenario).run(progress)


class _Engine:
    def __init__(self, workload: Workload, cluster: Cluster, scenario: Scenario) -> None:
        self._workload, self._cluster, self._scenario = workload, cluster, scenario
        size = len(workload)
        self._nodes = Nodes(cluster)
        self._freeing = Freeing(scenario.queue.free_s)
        self._running = Running()
        self._waiting = Waiting(workload, scenario.queue)
        self._failures = Failures(scenario.failures, cluster.num_nodes, scenario.seed)
        self._division: Division | None = None
        if scenario.policy is not None:
            self._division = Division(workload, scenario, scenario.policy, self._running)
        self._asked = asked_of(workload, cluster, scenario)
        self._shapes, self._shape_of = self._asked.shapes, self._asked.shape_of
        self._speed_of: list[float] = self._asked.speed.tolist()
        self._shares: list[bool] = self._asked.is_opportunistic.tolist()
        self._packing: Packing | None = None
        if scenario.packing is not None and workload.sharing is not None:
            self._packing = Packing(workload, self._asked, scenario.packing, self._nodes, self._running)
        self._rejected = self._too_large()
        expected = [self._shapes[number] for number in self._shape_of]
        self._find = self._nodes.find
        if scenario.placement is not None:
            self._find = JobPlaces(scenario.placement, self._nodes, expected, scenario.seed).find
        self._looks = FragmentationSampler(
            typical_shapes(self._nodes, expected if scenario.sample_s else ()), scenario.sample_s
        )
        self._start_s = np.full(size, np.nan)
        self._end_s = np.full(size, np.nan)
        self._left_s = workload.work_s.copy()
        self._lost_s = np.zeros(size)
        self._restarts = np.zeros(size, dtype=np.int64)
        self._node_of = np.full(size, -1, dtype=np.int64)
        # When the scheduler sees them.
        self._submit_s: list[float] = (workload.submit_s + scenario.queue.submit_s).tolist()
        self._next_job = 0
        self._end_row = -1
        self._now_s = 0.0
        self._cycle_s = self._divide_s = math.inf
        self._num_calm = 0
        # Why shapes do not fit, as far as that was tried since something came free.
        self._no_room: dict[int, Cause] = {}
        self._has_het = bool(workload.is_het.any())
        self._has_backfill = self._has_het or scenario.discipline is not Discipline.FIFO
        # In this event jobs started or left, or speeds changed; since the last cycle a job came or something came free.
        self._is_changed = self._is_faster = self._is_due = False
        self._books = UsageTotals(self._running, self._packing)
        self._num_events = self._num_job_events = self._num_done = 0

    def run(self, progress: Progress | None) -> Outcome:
        """Return the loop."""
        while self._num_done + len(self._rejected) < len(self._workload):
            then_s = self._next_s()
            if then_s == math.inf:
                break
            if then_s < self._now_s:
                raise SimulationFault(f"an event at {then_s} s lies in the past: it is {self._now_s} s")
            self._now_s = then_s
            self._step()
            self._num_events += 1
            if progress and self._num_events % _PROGRESS_EVENTS == 0:
                progress(self._num_done + len(self._rejected), len(self._workload))
        return self._outcome()

    def _next_s(self) -> float:
        """When something happens next; infinite if nothing can any more."""
        submit_s = self._submit_s[self._next_job] if self._next_job < len(self._submit_s) else math.inf
        ready_s = self._division.next_ready_s() if self._division else math.inf
        end_s, self._end_row = self._running.next_end()
        look_s = self._packing.next_s() if self._packing else math.inf
        then_s = min(submit_s, end_s, ready_s, look_s, self._divide_s, self._cycle_s, self._freeing.next_s())
        if then_s == math.inf and not self._failures.num_down:
            return then_s
        return min(then_s, self._failures.next_s(), self._looks.next_s)

    def _step(self) -> None:
        now_s = self._now_s
        self._is_changed = self._is_faster = False
        running = self._running
        if self._packing is not None:
            self._packing.count_until(now_s)
        if self._end_row >= 0 and running.end_s[self._end_row] <= now_s:
            end_s, row = float(running.end_s[self._end_row]), self._end_row
            while end_s <= now_s:
                self._end(row)
                end_s, row = running.next_end()
        self._free(now_s)
        for node, fails in self._failures.due(now_s):
            if fails:
                self._fail(node)
            else:
                self._nodes.repair(node)
                self._no_room.clear()
                self._is_changed = self._is_due = True
        while self._next_job < len(self._submit_s) and self._submit_s[self._next_job] <= now_s:
            self._submit(self._next_job)
            self._next_job += 1
        self._schedule()
        if self._packing is not None:
            self._pack(self._packing)
        if self._division is not None:
            self._data_workers(self._division)
        if self._packing is not None:
            self._packing.set_speeds(now_s)
            self._packing.plan_look(now_s)
        if self._num_events % _CHECK_EVENTS == 0:
            self._check()
        self._books.record(now_s, not self._is_faster)
        if self._looks.next_s <= now_s:
            used = self._division.used_cpus(self._nodes) if self._division and running.count else None
            self._looks.look(self._nodes, used, now_s)

    # Jobs

    def _submit(self, job: int) -> None:
        self._num_job_events += 1
        if job not in self._rejected:
            at_once = self._scenario.discipline is Discipline.FIFO
            self._wait(job, Cause.QUEUE if at_once else Cause.CYCLE, self._now_s - self._scenario.queue.submit_s)

    def _wait(self, job: int, cause: Cause, since_s: float) -> None:
        """A job waits for a place from now on: in the queue, or for the packer."""
        if self._packing is not None and self._shares[job]:
            self._packing.submit(job, since_s)
        else:
            self._waiting.add(job, cause, since_s)
            self._is_due = True

    def _start(self, job: int, placement: StartPlace) -> int:
        load, now_s, packing = self._workload, self._now_s, self._packing
        shape, shares = self._shapes[self._shape_of[job]], self._shares[job]
        if packing is not None and shares:
            self._waiting.waited_s[job, Cause.GPUS] += packing.waited_s(job, now_s)
        else:
            self._waiting.remove(job, now_s)
            self._evict(packing.in_the_way(shape, placement) if packing else ())
        self._nodes.take(shape, placement)
        demand = float(self._asked.demand[job]) if self._division else 0.0
        units = shape.units
        left_s, speed = float(self._left_s[job]), self._speed_of[job]
        held_cpus = units * shape.cpus + shape.extra_cpus
        row = self._running.add(
            job,
            shape,
            placement,
            {
                "left_s": left_s,
                "since_s": now_s,
                "speed": speed,
                "end_s": now_s + left_s / speed if speed > 0 else math.inf,
                "start_s": now_s,
                "gpus": units * shape.gpus,
                "held_cpus": held_cpus,
                "useful_cpus": units * load.ideal_cpus[job],
                "demand": demand,
                "overhead": load.overhead[job],
                "changed_s": -math.inf,
                "limit_s": load.limit_s[job],
                "slow_since_s": now_s if speed < LEAST_SPEED else math.inf,
                "base": speed,
                "factor": 1.0,
                "shared_gpus": load.num_gpus[job] if shares else 0.0,
            },
        )
        if packing is not None and not shares:
            self._evict(packing.hosts(row))
        self._books.count(units * shape.gpus, speed, held_cpus, units * float(load.ideal_cpus[job]))
        if math.isnan(self._start_s[job]):
            self._start_s[job] = now_s
            self._node_of[job] = placement.nodes[0]
        self._num_job_events += 1
        self._is_changed = True
        return row

    def _end(self, row: int) -> None:
        job = int(self._running.job[row])
        self._end_s[job] = self._now_s
        self._left_s[job] = 0.0
        self._leave(row)
        self._num_done += 1

    def _leave(self, row: int) -> None:
        """A job runs no more; its resources are free."""
        running = self._running
        gpus, speed, useful = float(running.gpus[row]), float(running.speed[row]), float(running.useful_cpus[row])
        self._books.count(-gpus, speed, -float(running.held_cpus[row] + running.target[row]), -useful)
        if self._packing is not None:
            self._packing.left(row)
        self._freeing.add(*running.remove(row), self._now_s)
        if self._division:
            self._division.forget(row)
        self._num_job_events += 1
        self._is_changed |= not self._is_content()

    def _free(self, until_s: float) -> None:
        """What jobs held that have ended is others' now."""
        if self._freeing.give_back(self._nodes, until_s):
            self._no_room.clear()
            self._is_due = True
            self._is_changed |= not self._is_content()

    def _is_content(self) -> bool:
        """Whether no policy could give anybody more, so that it need not be asked when something comes free."""
        return self._division is not None and self._division.is_content and self._scenario.hold_s == math.inf

    # Nodes

    def _fail(self, node: int) -> None:
        running, now_s = self._running, self._now_s
        for row, held in enumerate(running.placements[: running.top]):
            if held is None or not (node in held[1].nodes or node in held[1].extra_nodes):
                continue
            job = int(running.job[row])
            left_s = float(running.left_now(np.array([row]), now_s)[0])
            ran_s = now_s - float(running.start_s[row])
            done_s = float(self._left_s[job]) - left_s
            # Its speed may have changed; what it did since its last checkpoint is taken at its mean speed.
            lost_s = done_s * (ran_s % self._scenario.failures.checkpoint_s) / ran_s if ran_s > 0 else 0.0
            self._left_s[job] = left_s + lost_s
            self._lost_s[job] += lost_s
            self._restarts[job] += 1
            self._leave(row)
            if self._restarts[job] <= _MOST_RESTARTS:
                self._wait(job, Cause.QUEUE, now_s)
            else:
                self._rejected[job] = f"given up after {_MOST_RESTARTS:,} restarts: nodes fail under it too often"
        self._free(math.inf)
        self._nodes.fail(node)
        self._no_room.clear()
        self._is_changed = True

    # The queue

    def _schedule(self) -> None:
        waiting = self._waiting
        if len(waiting):
            self._main_pass()
        if not len(waiting):
            self._cycle_s = math.inf
            return
        if self._has_backfill and self._is_due and self._cycle_s == math.inf:
            step_s = self._scenario.queue.interval_s
            # Rounding must not put a cycle into the past.
            next_s = step_s * math.ceil(self._now_s / step_s) if step_s else self._now_s
            self._cycle_s = max(self._now_s, next_s)
        if self._cycle_s <= self._now_s:
            self._cycle_s = math.inf
            self._backfill()

    def _main_pass(self) -> None:
        """Slurm's main scheduler: jobs in order, up to the first that does not fit; no heterogeneous jobs."""
        waiting = self._waiting
        if self._has_het:
            for job in waiting.look(self._scenario.queue.max_job_test):
                if not self._workload.is_het[job] and not self._try(job):
                    return
        else:
            while len(waiting) and self._try(waiting.first()):
                pass

    def _try(self, job: int) -> bool:
        """Start a job if it fits."""
        placement = self._place(job)
        if placement is not None:
            self._start(job, placement)
        return placement is not None

    def _backfill(self) -> None:
        """One cycle: the first that does not fit gets a reservation, or none if the discipline is greedy."""
        waiting, queue, now_s = self._waiting, self._scenario.queue, self._now_s
        self._is_due = False
        discipline = self._scenario.discipline
        reservation: Reservation | None = None
        blocked: int | None = None
        no_room, shape_of = self._no_room, self._shape_of
        # Shapes that fit now and would take what is reserved: a job of one may start only if it ends before.
        in_the_way: set[int] = set()
        for job in waiting.look(queue.max_job_test):
            number = shape_of[job]
            cause = no_room.get(number)  # a long queue is mostly this
            if cause is not None:
                waiting.waits_for(job, cause, now_s)
            elif number in in_the_way and reservation and now_s + self._limit_s(job) > reservation.start_s:
                waiting.waits_for(job, Cause.RESERVATION, now_s)
                continue
            placement = None if cause is not None else self._place(job)
            if placement is None:
                if discipline is Discipline.FIFO:
                    return
                blocked = job if blocked is None else blocked
                continue
            if blocked is None or discipline is not Discipline.EASY:
                self._start(job, placement)
                continue
            if reservation is None:
                nodes, leaving = self._packing.without_them() if self._packing else (self._nodes, frozenset[int]())
                first, factor = self._shapes[shape_of[blocked]], queue.limit_factor
                reservation = Reservation(first, nodes, self._running, leaving, self._freeing, now_s, factor)
            shape, end_s = self._shapes[number], now_s + self._limit_s(job)
            if reservation.allows(shape, placement, end_s):
                self._start(job, placement)
                reservation.started(shape, placement, end_s)
            else:
                in_the_way.add(number)
                waiting.waits_for(job, Cause.RESERVATION, now_s)

    def _place(self, job: int) -> StartPlace | None:
        """Where a job fits now; if nowhere, it is known what it waits for."""
        number = self._shape_of[job]
        cause = self._no_room.get(number)
        if cause is None:
            shape = self._shapes[number]
            placement = self._packing.find(shape, self._find) if self._packing else self._find(shape)
            if placement is not None:
                return placement
            cause = self._no_room[number] = _CAUSES[self._nodes.why_not(self._shapes[number])]
        self._waiting.waits_for(job, cause, self._now_s)
        return None

    def _limit_s(self, job: int) -> float:
        """When a job that starts now is planned to have ended."""
        limit_s = float(self._workload.limit_s[job])
        if math.isfinite(limit_s):
            return limit_s
        speed = self._speed_of[job] or 1.0
        return self._scenario.queue.limit_factor * float(self._left_s[job]) / speed

    # Opportunistic jobs

    def _pack(self, packing: Packing) -> None:
        """The packer takes away and places."""
        rows, placements = packing.look(self._now_s)
        self._evict(rows)
        for job, placement, gpus in placements:
            packing.shares(self._start(job, placement), gpus, self._now_s)

    def _evict(self, rows: Iterable[int]) -> None:
        """Opportunistic jobs leave, and wait again."""
        for row in rows:
            assert self._packing is not None, "nobody shares a GPU"
            job = int(self._running.job[row])
            left_s = float(self._running.left_now(np.array([row]), self._now_s)[0])
            if self._packing.keeps_progress:
                self._left_s[job] = left_s
            else:
                self._lost_s[job] += self._left_s[job] - left_s
            self._packing.evicted(row, self._now_s)
            self._leave(row)
            self._free(math.inf)

    # Data workers

    def _data_workers(self, division: Division) -> None:
        now_s, running = self._now_s, self._running
        if division.next_ready_s() <= now_s:
            self._num_job_events += division.ready(self._nodes, now_s)
            self._is_faster = True
        if self._is_changed:
            held = float(running.target[: running.top].sum())
            step_s = self._scenario.workers.round_s
            self._num_calm = 0
            if step_s == 0 or held > division.pool_cpus(self._nodes).sum():
                self._divide_s = now_s
            else:
                self._divide_s = min(self._divide_s, max(now_s, step_s * math.ceil(now_s / step_s)))
        if self._divide_s <= now_s:
            num_moves = division.num_moves
            self._num_job_events += division.divide(self._nodes, now_s)
            self._is_faster = True
            self._divide_s = self._ask_again_s(division.num_moves > num_moves)
        elif self._is_changed and self._scenario.placement is not None:
            # A trainer that has started takes CPUs of its node from data workers at once.
            self._num_job_events += division.settle(self._nodes, now_s)
            self._is_faster = True

    def _ask_again_s(self, has_moved: bool) -> float:
        """When the policy is asked again though nothing else has changed."""
        hold_s = self._scenario.hold_s
        if hold_s == math.inf:
            return math.inf
        self._num_calm = 0 if has_moved else self._num_calm + 1
        if has_moved:
            return self._now_s + max(self._scenario.workers.round_s, _LEAST_ROUND_S)
        return self._now_s + hold_s if self._num_calm <= _CALM_ROUNDS else math.inf

    # Books

    def _check(self) -> None:
        running = self._running
        top = running.top
        self._books.add_up()
        gpus, cpus = float(running.gpus[:top].sum()), float(running.held_cpus[:top].sum())
        self._nodes.check(gpus + self._freeing.gpus, cpus + self._freeing.cpus)

    def _outcome(self) -> Outcome:
        use = self._books.use()
        self._check()
        self._check_work(use)
        division = self._division
        return Outcome(
            workload=self._workload,
            cluster=self._cluster,
            scenario=self._scenario,
            start_s=self._start_s,
            end_s=self._end_s,
            waited_s=self._waiting.waited_s,
            node_of=self._node_of,
            rejected=self._rejected,
            restarts=self._restarts,
            lost_s=self._lost_s,
            use=use,
            fragmentation=self._looks.samples(),
            num_events=self._num_events,
            num_job_events=self._num_job_events,
            num_moves=division.num_moves if division else 0,
            cpus_started=division.cpus_started if division else 0.0,
            cpus_taken_back=division.cpus_taken_back if division else 0.0,
            felt=self._packing.felt if self._packing else None,
        )

    def _check_work(self, use: Use) -> None:
        """The work of all jobs, from their own records, is the integral of the speeds, from the cluster's."""
        running = self._running
        left_s = self._left_s.copy()
        rows = running.rows()
        left_s[running.job[rows]] = running.left_now(rows, self._now_s)
        done = float(((self._workload.work_s - left_s + self._lost_s) * self._workload.num_gpus).sum())
        seen = use.total(use.effective_gpus, 0.0, self._now_s)
        if abs(done - seen) > _TOLERANCE * max(1.0, done):
            raise SimulationFault(f"jobs did {done} GPU-seconds of work and their speeds say {seen}")

    def _too_large(self) -> dict[int, str]:
        """Jobs that do not fit the empty cluster: they are reported, and nobody waits for them."""
        wrong: dict[int, str] = {}
        for index, shape in enumerate(self._shapes):
            if self._nodes.find(shape) is None:
                wrong[index] = f"larger than the cluster: not enough {self._nodes.why_not(shape)}"
        found = {job: wrong[number] for job, number in enumerate(self._shape_of) if number in wrong}
        return found | (self._packing.too_large() if self._packing else {})
