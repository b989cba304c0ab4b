"""Why a job waits, and whether data workers would let it start: (job, snapshot) -> explanation. Pure.

Called by `hetstream why` and `hetstream jobs`. It explains from what is free now; what Slurm's own scheduler weighs
beyond that (priorities in the making, licenses, topology, limits of accounts) it passes on in Slurm's words.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetstream.base.text import count_words, duration
from hetstream.hetjob.convert.spec import DEFAULT_DATA_WORKER_CPUS, DEFAULT_TRAINER_CPUS_PER_GPU, NO_RESERVATION
from hetstream.slurm_plugin.client.model import Job, Node, Reservation, Snapshot
from hetstream.slurm_plugin.client.parse_text import own_reservations, seen_from, why_closed
from hetstream.slurm_plugin.client.slurm_units import compress
from hetstream.slurm_plugin.insight.blockers import (
    COMPLETING,
    NOT_LOOKED_AT,
    OTHER_USERS,
    Blocker,
    FeasibleNodes,
    ReservedLater,
    at_once,
    count,
    found_none,
    kept_for_others,
    lack,
    lack_several,
    lack_together,
    out_of_use,
    running_in,
    still_completing,
    together,
    told_by_slurm,
    too_large,
)
from hetstream.slurm_plugin.insight.node_table import (
    RESOURCES,
    Hardware,
    Least,
    Mask,
    NodeTable,
    Shape,
    alike_jobs,
    gres_in_doubt,
    least_of,
    may_divide,
    most_nodes_of,
    request_of,
    shape_of,
)
from hetstream.slurm_plugin.insight.queue_order import Plan, QueueOrder

# There is room, as far as this user may see, and Slurm may hide what else it waits for.
HIDDEN = "hidden"
# There is room by CPUs, and only Slurm knows which sockets have them.
SOCKETS = "sockets"
# There is room on more nodes than are likely, and only Slurm knows whether it may have so many.
NODE_COUNT = "node count"


@dataclass(frozen=True)
class Remedy:
    """Whether data workers would let the job start now.

    Attributes:
        helps: False also where nothing is to be helped.
        text: the reason.
        directive: what to add to the script if it helps.
    """

    helps: bool
    text: str
    directive: str = ""


@dataclass(frozen=True)
class Explanation:
    """What is known about one record.

    Attributes:
        shape: what each of its nodes must give.
        fits_on: nodes that have room for it now, one by one.
        blockers: what it waits for, the most telling first; empty if it does not wait.
        is_room_known: False where Slurm tells who asks nothing of nodes.
    """

    job: Job
    shape: Shape
    fits_on: tuple[str, ...]
    blockers: tuple[Blocker, ...]
    conversion: Remedy
    is_room_known: bool = True


class Explainer:
    """Explains the jobs of one snapshot, and remembers what it found out about a shape.

    Args:
        snapshot: the cluster.
        alike: its pending jobs in groups, where those are known.
    """

    def __init__(self, snapshot: Snapshot, alike: Sequence[Sequence[Job]] | None = None) -> None:
        self._snapshot = snapshot
        self._hardware = Hardware(snapshot.nodes, snapshot.config, snapshot.partitions)
        self._shapes: dict[Hashable, Shape] = {}
        self._alike = alike_jobs(snapshot.jobs) if alike is None else alike
        self._running = running_in(snapshot)
        self._table = self._table_of(snapshot.nodes)
        self._unusable = NodeTable((node for node in snapshot.nodes if not node.is_usable), snapshot.partitions)
        self._turns = QueueOrder(snapshot, self._alike)
        self._longest_s = {partition.name: partition.max_time_s for partition in snapshot.partitions}
        self._beside_plans: dict[Hashable, bool] = {}
        self._of_plans: dict[Hashable, Mask] = {}
        self._up = {partition.name for partition in snapshot.partitions if partition.is_up}
        self._with_gpus = {name for node in self._table.nodes if node.gpu_types for name in node.partitions}
        self._has_switches = snapshot.config.get("TopologyPlugin", "").endswith(("/tree", "/block"))
        # Partitions of which not all nodes are shown: those of a cloud are not while they are powered down.
        shown = {node.name for node in snapshot.nodes}
        self._not_shown = {partition.name for partition in snapshot.partitions if not shown.issuperset(partition.nodes)}
        # In the order of their beginning: the jobs of others must have ended by then.
        self._upcoming = [reservation for reservation in snapshot.reservations if not reservation.is_active]
        self._found: dict[Hashable, tuple[list[Node], list[Blocker]]] = {}
        self._kinds: dict[Hashable, tuple[str, ...]] = {}
        self._components: dict[int, list[Job]] | None = None
        # By how many reservations begin before a job's end, and its own.
        self._kept_nodes: dict[tuple[int, str], ReservedLater] = {}
        # What jobs of reservations see that are not of whole nodes, or not of these alone.
        active = [reservation for reservation in snapshot.reservations if reservation.is_active]
        self._magnetic = [reservation for reservation in active if reservation.is_magnetic]
        self._in_part = frozenset(
            reservation.name
            for reservation in active
            if reservation.cpus or reservation.is_flexible or reservation.is_magnetic
        )
        self._tables: dict[str, NodeTable] = {}
        self._workers: dict[Hashable, dict[str, int]] = {}

    def _table_of(self, nodes: Iterable[Node]) -> NodeTable:
        snapshot = self._snapshot
        usable = (node for node in nodes if node.is_usable)
        return NodeTable(
            usable, snapshot.partitions, snapshot.jobs, snapshot.nodes, others_are_hidden=snapshot.hides_jobs
        )

    def _table_for(self, reservations: str) -> NodeTable:
        """The same nodes as jobs of these reservations see them."""
        names = reservations.split(",")
        if self._in_part.isdisjoint(names):
            return self._table
        if reservations not in self._tables:
            seen = seen_from(self._snapshot.nodes, self._snapshot.reservations, names)
            self._tables[reservations] = self._table_of(seen)
        return self._tables[reservations]

    def _in_reservations(self, job: Job) -> Job:
        """The job with the reservations that it may use, although it names none."""
        if not self._magnetic or job.reservation:
            return job
        return replace(job, reservation=",".join(own_reservations(job, self._magnetic)))

    def explain(self, job: Job) -> Explanation:
        """Explain one record."""
        shape = self._shape(job)
        if not job.is_pending:
            return Explanation(job, shape, (), (), Remedy(False, "it does not wait"))
        if self._snapshot.without_nodes:
            return Explanation(job, shape, (), (self._without_nodes(job),), self.conversion(job), False)
        fits, lacking = self._room(shape, job)
        blockers: list[Blocker] = []
        said = self._said_by_slurm(job)
        if said is None:
            blockers += self._with_shorter_limit(job, lacking) or [
                self._held_up_by_component(job) or self._in_line(job)
            ]
        elif too_large := self._too_large_for_partition(job):
            blockers += [too_large, said]
        else:
            # Which nodes those are, and what they lack, says more than Slurm's word.
            says_more = said.kind in ("nodes", "constraints") or job.reason.startswith("ReqNodeNotAvail")
            blockers += [said, *(lacking if says_more else ())]
        return Explanation(job, shape, tuple(node.name for node in fits), tuple(blockers), self.conversion(job))

    def _said_by_slurm(self, job: Job) -> Blocker | None:
        """What it waits for that is no resource."""
        reason = told_by_slurm(job, self._running)
        return Blocker(reason.kind, reason.text, reason.next_step) if reason else None

    def _without_nodes(self, job: Job) -> Blocker:
        """What is known of a pending job where nothing is of nodes: Slurm's own reason."""
        if said := self._said_by_slurm(job):
            return said
        text = f"Slurm says {job.reason or 'no reason yet'}, and tells you nothing of nodes ({self._snapshot.hidden})"
        return Blocker(HIDDEN, f"{text}: what it lacks is not known", "ask an operator, or look at: squeue --start")

    def _shape(self, job: Job) -> Shape:
        key = job.state, request_of(job)
        if key not in self._shapes:
            self._shapes[key] = shape_of(job, self._hardware)
        return self._shapes[key]

    def _too_large_for_partition(self, job: Job) -> Blocker | None:
        """What no node can hold, where Slurm only says that the partition's configuration does not allow it.

        It accepts such a component of a heterogeneous job, and would refuse it as a job.
        """
        if not job.reason.startswith("PartitionConfig"):
            return None
        return next((blocker for blocker in self._room(self._shape(job), job)[1] if blocker.kind == "size"), None)

    def _held_up_by_component(self, job: Job) -> Blocker | None:
        """The component that keeps one which has room from starting: all of them start together."""
        for other in self._other_components(job):
            _, lacking = self._room(self._shape(other), other)
            first = self._too_large_for_partition(other) or self._said_by_slurm(other) or next(iter(lacking), None)
            if first is not None:
                text = f"there is room now, but it starts together with {other.label}, and that waits: {first.text}"
                return Blocker("component", text, first.next_step or f"hetstream why {other.label}")
        return None

    def _other_components(self, job: Job) -> Iterable[Job]:
        """The other components of a heterogeneous job that are pending, too."""
        if job.het is None:
            return ()
        if self._components is None:
            self._components = {}
            for part in self._snapshot.jobs:
                if part.het is not None and part.is_pending:
                    self._components.setdefault(part.het.het_job_id, []).append(part)
        return (other for other in self._components.get(job.het.het_job_id, ()) if other.job_id != job.job_id)

    def conversion(self, job: Job) -> Remedy:
        """Return whether data workers would let a pending job start now."""
        said = self._said_by_slurm(job)
        if said:
            return Remedy(False, f"what it waits for is no resource: {said.text}")
        if self._snapshot.without_nodes:
            return Remedy(False, f"it cannot be known where there is room ({self._snapshot.hidden})")
        shape = self._shape(job)
        return self._conversion(job, shape, self._room(shape, job)[1])

    def waits_for(self, job: Job) -> str:
        """Return the kind of the first blocker; empty if it does not wait."""
        return next(iter(self._first_kinds(job)), "")

    def causes(self, job: Job) -> tuple[str, ...]:
        """Return the kind of the first blocker; several resources where more of any of them alone would let it start.

        Those are in one order always: they are the names under which histories and dashboards keep the counts.
        """
        found = self._first_kinds(job)
        return tuple(kind for kind in RESOURCES if kind in found) if found and found[0] in RESOURCES else found[:1]

    def causes_of(self, alike: Sequence[Job]) -> list[tuple[str, ...]]:
        """Return the same of each job of a group that asks alike: only their turns are different."""
        if not alike[0].waits_for_resources:
            return [self.causes(alike[0])] * len(alike)
        numbers = [self._surroundings(job) for job in alike]
        one_of = dict(zip(numbers, alike, strict=True))
        lacking = {number: self.causes(job) if self._lacking(job) else () for number, job in one_of.items()}
        return [lacking[number] or (self._turn(job),) for number, job in zip(numbers, alike, strict=True)]

    def not_looked_at(self, jobs: Iterable[Job]) -> list[str]:
        """Return lines on what could give room to those of these jobs that have none, and is not looked at."""
        if self._snapshot.without_nodes:
            return []
        names = {name for job in jobs if job.waits_for_resources and self._lacking(job) for name in job.partitions}
        by_wish = sorted(
            partition.name
            for partition in self._snapshot.partitions
            if partition.name in names and partition.jobs_per_cpu > 1 and not partition.all_share
        )
        kind = self._snapshot.config.get("PreemptType", "")
        preempts = bool(names) and kind.startswith("preempt/") and kind != "preempt/none"
        return [
            *([f"jobs that Slurm may preempt ({kind}) are not looked at, and count as in the way"] if preempts else []),
            *(f"CPUs of partition {name} that a job may share (--oversubscribe) count as in use" for name in by_wish),
        ]

    def _first_kinds(self, job: Job) -> tuple[str, ...]:
        """The kinds of what it waits for, found without any text."""
        if not job.is_pending:
            return ()
        if self._snapshot.without_nodes:
            return (self._without_nodes(job).kind,)
        if not job.waits_for_resources:
            said = self._too_large_for_partition(job) or self._said_by_slurm(job)
            return (said.kind,) if said else ()
        return self._lacking(job) or (self._turn(job),)

    def _is_held_up(self, job: Job) -> bool:
        """Whether another component of it waits for something."""
        return any(not other.waits_for_resources or self._lacking(other) for other in self._other_components(job))

    def _key(self, shape: Shape, job: Job) -> Hashable:
        """What decides where there is room."""
        return shape, request_of(job), *self._surroundings(job)

    def _surroundings(self, job: Job) -> tuple[Hashable, ...]:
        """What decides beside the request of a job: its reservations, its end, and who it is of."""
        return self._in_reservations(job).reservation, self._num_before_end(job), *self._who(job)

    def _who(self, job: Job) -> tuple[Hashable, ...]:
        return (job.uid, job.user, job.mcs_label) if self._table.is_kept_by_some else ()

    def _lacking(self, job: Job) -> tuple[str, ...]:
        """The kinds of what is lacking for it to have room now."""
        shape = self._shape(job)
        key = self._key(shape, job)
        if key not in self._kinds:
            self._kinds[key] = self._lacking_kinds(self._room_of(shape, job), job)
        return self._kinds[key]

    def _lacking_kinds(self, room: FeasibleNodes, job: Job) -> tuple[str, ...]:
        if room.is_enough(room.fits):
            return ()
        if self._in_the_way(job) and (now := self._room_of(room.shape, job, now=True)).is_enough(now.fits):
            return ("reservation",)
        if not room.is_enough(room.possible):
            return self._of_uneven_parts(room, job)
        if room.needs_whole_nodes:
            return ("whole nodes",)
        if may_divide(job, room.shape) and not self._short_in_parts(room, job):
            return ()
        return room.short_alone() or (room.scarcest,)

    def _of_uneven_parts(self, room: FeasibleNodes, job: Job) -> tuple[str, ...]:
        """The same where no even share of it has room, be the nodes empty: others may, and what none can it is told."""
        least, floor = self._least(job)
        out = FeasibleNodes(self._unusable, least.of_node, job, None)
        if not floor.is_enough(floor.possible) or floor.lacks_together(least):
            others = out.possible.any() or floor.reserved.any() or not self._not_shown.isdisjoint(job.partitions)
            return ("nodes",) if others else ("size",)
        lacking = self._short_in_parts(room, job)
        if lacking and (room.reserved.any() or FeasibleNodes(self._unusable, room.shape, job, None).possible.any()):
            return ("nodes",)
        return lacking

    def _least(self, job: Job, without: Sequence[Plan] = ()) -> tuple[Least, FeasibleNodes]:
        """What a job needs at least, and the nodes that can give it."""
        least = least_of(job, self._hardware)
        return least, self._room_of(least.of_node, job, without=without)

    def _short_in_parts(self, room: FeasibleNodes, job: Job, without: Sequence[Plan] = ()) -> tuple[str, ...]:
        """What is short however Slurm divides a job; nothing if it has room in some division."""
        least, floor = self._least(job, without)
        return floor.lacks_together_now(least, most_nodes_of(job, room.shape, room.is_enough(room.possible)))

    def _may_have_too_few_nodes(self, job: Job) -> bool:
        """Whether it has room only if the likely number of nodes is no limit of its own."""
        shape = self._shape(job)
        if job.max_nodes is not None or shape.num_nodes != job.likely_nodes:
            return False
        room = self._room_of(shape, job)
        if room.is_enough(room.fits) or not room.is_enough(room.possible):
            return False
        least, floor = self._least(job)
        return bool(floor.lacks_together_now(least, shape.num_nodes))

    def _in_the_way(self, job: Job) -> tuple[Reservation, ...]:
        """The reservations of others that begin before a job would have to end, if it started now."""
        return tuple(
            reservation
            for reservation in self._upcoming[: self._num_before_end(job)]
            if reservation.name not in job.reservations
        )

    def _num_before_end(self, job: Job) -> int:
        """How many reservations begin before that; with its own reservation they say which are in its way."""
        limit_s = self._limit_s(job)
        end_s = math.inf if limit_s is None else self._snapshot.taken_s + limit_s
        return bisect_left(self._upcoming, end_s, key=_start) if self._upcoming else 0

    def _limit_s(self, job: Job) -> float | None:
        """A job's time limit; of one without any the longest of its partitions, None where one of these has none."""
        if job.time_limit_s is not None:
            return job.time_limit_s
        longest = [self._longest_s.get(name) for name in job.partitions]
        known = [limit_s for limit_s in longest if limit_s is not None]
        return max(known) if known and len(known) == len(longest) else None

    def _room_of(self, shape: Shape, job: Job, *, now: bool = False, without: Sequence[Plan] = ()) -> FeasibleNodes:
        """Where there is room for it.

        Args:
            shape: what each node must give.
            job: who asks.
            now: look at no reservation to come.
            without: plans that keep nodes from it.
        """
        member = self._in_reservations(job)
        table = self._table_for(member.reservation)
        kept = self._kept(job) if self._upcoming and not now else None
        if without:
            nodes = self._kept_by(tuple(without), member.reservation)
            kept = (
                ReservedLater(nodes, np.zeros_like(table.cpus))
                if kept is None
                else ReservedLater(nodes | kept.nodes, kept.cpus)
            )
        return FeasibleNodes(table, shape, member, self._up, kept)

    def _has_room(self, shape: Shape, job: Job, plans: tuple[Plan, ...]) -> bool:
        """Whether there is room for a job, evenly divided or in another way, beside nodes that are kept for others."""
        key = self._key(shape, job), plans
        if key not in self._beside_plans:
            room = self._room_of(shape, job)
            left = ~self._kept_by(plans, self._in_reservations(job).reservation)
            found = room.is_enough(room.fits & left)
            if not found and (may_divide(job, shape) or not room.is_enough(room.possible & left)):
                least, floor = self._least(job, plans)
                is_possible = floor.is_enough(floor.possible) and not floor.lacks_together(least)
                found = is_possible and not self._short_in_parts(room, job, plans)
            self._beside_plans[key] = found
        return self._beside_plans[key]

    def _kept_by(self, plans: tuple[Plan, ...], reservation: str) -> Mask:
        """The nodes that plans keep, of those that jobs of these reservations see."""
        table = self._table_for(reservation)
        for plan in plans:
            if (reservation, plan) not in self._of_plans:
                self._of_plans[reservation, plan] = table.named(plan.nodes)
        if (reservation, plans) not in self._of_plans:
            masks = [self._of_plans[reservation, plan] for plan in plans]
            self._of_plans[reservation, plans] = np.logical_or.reduce([np.zeros_like(table.reserved), *masks])
        return self._of_plans[reservation, plans]

    def _plans_in_way(self, shape: Shape, job: Job, *, wait_s: float = 0.0) -> tuple[Plan, ...]:
        """The plans for jobs ahead that together leave too little of the room for a job, the earliest first.

        With a time limit by which it has ended then, those that begin later are not in its way.
        """
        limited = replace(job, time_limit_s=self._limit_s(job))
        plans = self._turns.plans_in_way(limited, wait_s=wait_s)
        return plans if plans and not self._has_room(shape, limited, plans) else ()

    def _first_in_way(self, shape: Shape, job: Job, plans: Iterable[Plan]) -> Plan:
        """Of such plans the first with which there is too little."""
        known = tuple(plans)
        places = range(1, len(known))
        return known[next((place - 1 for place in places if not self._has_room(shape, job, known[:place])), -1)]

    def _would_start(self, job: Job) -> bool:
        """Whether Slurm would start it at its next looks, by all that is known: what advice must come to."""
        wait_s = self._turns.backfill.interval_s
        return all(
            part.waits_for_resources
            and not self._lacking(part)
            and not self._turns.is_behind_unplanned(part)
            and not self._plans_in_way(self._shape(part), part, wait_s=wait_s)
            for part in (job, *self._other_components(job))
        ) and not (
            self._snapshot.hidden
            or self._kind_not_looked_at(job)
            or self._may_have_too_few_nodes(job)
            or self._sockets_in_doubt(job)
            or gres_in_doubt(self._shape(job))
        )

    def _shorter(self, job: Job) -> str:
        """The command that gives a job the longest time limit with which it would start; empty if none would do.

        It must have ended before some plan or reservation that is in its way now; the shorter, the less is in its way.
        """
        limited, now_s = replace(job, time_limit_s=self._limit_s(job)), self._limit_s(job)
        plans = self._turns.plans_in_way(limited, wait_s=self._turns.backfill.interval_s)
        starts = {plan.start_s for plan in plans} | {each.start_s for each in self._in_the_way(job)}
        limits = sorted({self._turns.longest_limit_s(start_s) for start_s in starts})
        limits = [limit_s for limit_s in limits if 0 < limit_s < (math.inf if now_s is None else now_s)]
        enough = bisect_left(
            limits, True, key=lambda limit_s: not self._would_start(replace(job, time_limit_s=limit_s))
        )
        if not enough:
            return ""
        limit_s = limits[enough - 1]
        command = f"scontrol update JobId={job.job_id} TimeLimit={round(limit_s / 60)}"
        return f"with a limit of {duration(limit_s)} it could go first: {command}"

    def _kept(self, job: Job) -> ReservedLater:
        """What the reservations in its way keep."""
        key = self._num_before_end(job), job.reservation
        if key not in self._kept_nodes:
            found = self._in_the_way(job)
            self._kept_nodes[key] = ReservedLater(
                self._table.named(name for reservation in found for name in reservation.nodes),
                self._table.amounts(part for reservation in found for part in reservation.cpus),
            )
        return self._kept_nodes[key]

    def _room(self, shape: Shape, job: Job) -> tuple[list[Node], list[Blocker]]:
        """The nodes with room for the job, and what is lacking if they are too few."""
        key = self._key(shape, job)
        if key not in self._found:
            self._found[key] = self._look(shape, job)
        return self._found[key]

    def _look(self, shape: Shape, job: Job) -> tuple[list[Node], list[Blocker]]:
        wanted = shape.num_nodes
        room = self._room_of(shape, job)
        fits, is_even = self._table.chosen(room.fits), room.is_enough(room.possible)
        kinds = self._lacking_kinds(room, job)
        if not kinds and not room.is_enough(room.fits):
            return self._table.chosen(self._least(job)[1].fits), []
        blockers: list[Blocker] = []
        for kind in kinds:
            if kind == "size":
                return fits, [too_large(*self._least(job), job)]
            if kind == "nodes":
                out = self._unusable.chosen(FeasibleNodes(self._unusable, shape, job, None).possible)
                return fits, [out_of_use(room, job, out, self._table.chosen(room.reserved))]
            if kind == "reservation":
                blockers.append(self._kept_for_later(self._room_of(shape, job, now=True), job))
            elif kind == "whole nodes":
                possible, idle = count(room.possible), count(room.possible & room.enough["CPUs"])
                why = "OverSubscribe=EXCLUSIVE" if self._table.takes_whole_nodes(job.partitions) else "--exclusive"
                text = f"it gets whole nodes ({why}), {wanted} of them: of {possible} {idle} are idle"
                blockers.append(Blocker(kind, text))
            elif kind == OTHER_USERS:
                blockers.append(kept_for_others(job, self._table.chosen(room.possible & ~room.enough[kind])))
            elif kind == COMPLETING:
                blockers.append(still_completing(self._table.chosen(room.enough_but(kind) & ~room.enough[kind])))
            elif not is_even:
                most = most_nodes_of(job, shape, False)
                blockers.append(lack_together(kind, shape, most, *self._least(job)))
            elif room.short_alone():
                blockers.append(lack(kind, room, at_once(job, room)))
            else:
                blockers.append(lack_several(room, at_once(job, room)))
        if blockers and wanted > 1:
            where = f" ({compress(node.name for node in fits)})" if fits else ""
            text = f"it needs {wanted} nodes at once{together(job)}; there is room now on {len(fits)}{where}"
            blockers.append(Blocker("gang", text))
        return fits, blockers

    def _kept_for_later(self, room: FeasibleNodes, job: Job) -> Blocker:
        """What to say of nodes with room that are reserved before the job would end.

        Args:
            room: without a look at what is to come.
            job: any with these reservations in its way.
        """
        nodes = [node.name for node in self._table.chosen(room.fits)]
        in_the_way = [
            reservation for reservation in self._in_the_way(job) if set(nodes).intersection(reservation.all_nodes)
        ]
        kept = compress(name for name in nodes if any(name in reservation.all_nodes for reservation in in_the_way))
        left = duration(in_the_way[0].start_s - self._snapshot.taken_s)
        names = ", ".join(reservation.name for reservation in in_the_way)
        return Blocker(
            "reservation",
            f"{kept} has room, but is reserved in {left} ({names}), before its time limit would end it",
            f"scontrol show reservation {in_the_way[0].name}",
        )

    def _with_shorter_limit(self, job: Job, blockers: list[Blocker]) -> list[Blocker]:
        """What it waits for; where nodes with room are reserved before it would have ended, with the limit that helps.

        That depends on whose turn it is, and the nodes do not.
        """
        if not blockers or blockers[0].kind != "reservation":
            return blockers
        if not (step := self._shorter(job)):
            return blockers
        return [replace(blockers[0], next_step=f"{step}; {blockers[0].next_step}"), *blockers[1:]]

    def _in_line(self, job: Job) -> Blocker:
        """There is room: who goes first?"""
        now_s, room = self._snapshot.taken_s, "there is room now"
        if in_doubt := gres_in_doubt(self._shape(job)):
            room = f"there is room now, but for its {in_doubt}, which is not counted GPU by GPU"
        if plans := self._plans_in_way(self._shape(job), job):
            return self._kept_for_plans(job, plans, room)
        if ahead := self._turns.ahead(job):
            text = f"{room}; {count_words(len(ahead), 'job')} ahead, first {ahead[0].label}"
            if self._would_start(job):
                text += ", and what Slurm plans for them leaves it room: backfill may start it when it looks next"
            return Blocker("priority", text, "squeue --start")
        if kind := self._kind_not_looked_at(job):
            what = f"--constraint={job.features}" if kind == "constraints" else f"--switches={job.num_switches}"
            text = f"each node alone has room now, and no job is ahead; only Slurm weighs what {what} asks of all"
            return Blocker(kind, text, f"scontrol show job {job.job_id}")
        if in_doubt:
            return Blocker("GRES", f"{room}; no job is ahead", "scontrol --details show node")
        if self._finds_none(job):
            return found_none(job, now_s)
        if self._may_have_too_few_nodes(job):
            text = (
                f"on more than the likely {count_words(job.likely_nodes, 'node')}; only Slurm knows whether it may have"
            )
            return Blocker(NODE_COUNT, f"{room} {text} them; no job is ahead", f"scontrol show job {job.job_id}")
        if option := self._sockets_in_doubt(job):
            text = f"by its CPUs; which sockets have them, as {option} asks, only Slurm weighs"
            return Blocker(SOCKETS, f"{room} {text}; no job is ahead", f"scontrol show job {job.job_id}")
        if hidden := self._snapshot.hidden:
            what = "jobs ahead of it" if self._snapshot.hides_jobs else "reservations in its way"
            text = f"{room}, as far as you may see: whether there are {what} cannot be known ({hidden})"
            return Blocker(HIDDEN, text, "ask an operator, or look at: squeue --start")
        if job.het is not None:
            cycle = "backfill starts it in its next cycle, if it finds room for all components"
            return Blocker("scheduler", f"{room}, and no job is ahead: {cycle}")
        if job.found_no_room and (looked_s := job.last_sched_eval_s) is not None:
            room += f", which was freed since Slurm last looked for it, {duration(now_s - looked_s)} ago"
        return Blocker("scheduler", f"{room}, and no job is ahead: the next scheduling cycle starts it")

    def _kept_for_plans(self, job: Job, plans: Sequence[Plan], room: str) -> Blocker:
        """There is room, and backfill keeps it for jobs ahead."""
        plan = self._first_in_way(self._shape(job), job, plans)
        limit_s = self._limit_s(job)
        limit = "no time limit" if limit_s is None else f"a limit of {duration(limit_s)}"
        left = duration(plan.start_s - self._snapshot.taken_s)
        wanted = self._table.chosen(self._room_of(self._shape(job), job).fits)
        kept = compress(node.name for node in wanted if node.name in plan.nodes)
        where = f"{kept} is kept for job {plan.job.label}, planned in {left}"
        if not plan.is_told:
            where = f"job {plan.job.label} is planned in {left}, on nodes that Slurm does not tell"
        step = self._shorter(job)
        return Blocker("backfill", f"{room}, but {where}, and this job has {limit}", step or "squeue --start")

    def _finds_none(self, job: Job) -> bool:
        """Whether Slurm finds no room for the first job in line, where there is some by all that is looked at here.

        Its own verdict decides, whatever led to it, as long as nothing shows that the room was freed since. Backfill
        alone looks at a component of a heterogeneous job, and says Resources before it does: its plan is its verdict.
        """
        planned = job.reason != "Priority" and job.start_s is not None and job.start_s > self._snapshot.taken_s
        if job.het is not None:
            return planned
        if not (job.found_no_room or planned):
            return False
        looked_s = job.last_sched_eval_s
        if looked_s is None:
            return True
        room = self._room_of(self._shape(job), job)
        ended = (
            name
            for other in self._snapshot.jobs
            if other.state == "COMPLETING" and other.end_s is not None and other.end_s >= looked_s
            for name in other.nodes
        )
        freed = self._table.named(ended) | (self._table.last_busy_s >= looked_s)
        # A job that spreads unevenly may have lacked whatever was freed.
        return not freed.any() if not room.is_enough(room.fits) else room.is_enough(room.fits & ~freed)

    def _kind_not_looked_at(self, job: Job) -> str:
        """The kind of what a job asks of its nodes together and only Slurm weighs; empty if there is nothing."""
        if job.num_nodes < 2:
            return ""
        if "*" in job.features:
            return "constraints"
        return "switches" if job.num_switches and self._has_switches else ""

    def _sockets_in_doubt(self, job: Job, shape: Shape | None = None) -> str:
        """The option by which a job with room asks for sockets of which only Slurm knows how busy they are, or none."""
        if job.tasks_per_socket:
            return "--ntasks-per-socket"
        shape = self._shape(job) if shape is None else shape
        if max(shape.layout[:2]) < 2:
            return ""
        room = self._room_of(shape, job)
        if room.is_enough(room.fits_for_certain):
            return ""
        return "--cores-per-socket" if shape.layout[1] > 1 else "--sockets-per-node"

    def _turn(self, job: Job) -> str:
        """The kind of what a job with room waits for, found without looking at all the jobs ahead."""
        if job.het is not None and self._is_held_up(job):
            return "component"
        if self._plans_in_way(self._shape(job), job):
            return "backfill"
        if self._turns.is_behind(job):
            return "priority"
        if kind := self._kind_not_looked_at(job):
            return kind
        if gres_in_doubt(self._shape(job)):
            return "GRES"
        if self._finds_none(job):
            return NOT_LOOKED_AT
        if self._may_have_too_few_nodes(job):
            return NODE_COUNT
        if self._sockets_in_doubt(job):
            return SOCKETS
        return HIDDEN if self._snapshot.hidden else "scheduler"

    def _conversion(self, job: Job, shape: Shape, lacking: Sequence[Blocker]) -> Remedy:
        if not shape.gpus:
            return Remedy(False, "it asks for no GPU")
        if job.het:
            return Remedy(False, "it is a heterogeneous job already")
        if not lacking:
            if self._turn(job) == NOT_LOOKED_AT:
                return Remedy(False, "what it waits for is not looked at here")
            return Remedy(False, "there is room for it as it is")
        kept = min(shape.cpus, DEFAULT_TRAINER_CPUS_PER_GPU * shape.gpus)
        if kept == shape.cpus:
            return Remedy(False, f"{count_words(shape.cpus, 'CPU')} a node is what a trainer keeps")
        # The trainer keeps the memory of all its CPUs (`step_demand.py`): conversion writes --mem-per-cpu for fewer.
        trainer = replace(shape, cpus=kept, min_cpus=min(kept, shape.min_cpus))
        fits, still = self._room(trainer, job)
        if still:
            kinds = " and ".join(dict.fromkeys(blocker.kind for blocker in still))
            return Remedy(False, f"with {kept} CPUs a node it would wait too, for {kinds}")
        if max(trainer.layout[:2]) > 1 and (option := self._sockets_in_doubt(job, trainer)):
            return Remedy(
                False, f"whether sockets have room for {kept} CPUs a node, as {option} asks, Slurm alone weighs"
            )
        limited = replace(job, time_limit_s=self._limit_s(job))
        if self._turns.is_behind_unplanned(job):
            first, where = self._turns.first_unplanned(job), compress(node.name for node in fits)
            text = f"with {kept} CPUs a node it would have room on {where}, behind job {first}"
            return Remedy(False, f"{text}, whose start is not planned")
        plans = self._turns.plans_in_way(limited)
        trainers = self._room_of(trainer, limited, without=plans)
        if not trainers.is_enough(trainers.fits) and not plans:
            return Remedy(False, f"with {kept} CPUs a node it would have room in uneven parts alone")
        if not trainers.is_enough(trainers.fits):
            plan, where = self._first_in_way(trainer, limited, plans), compress(node.name for node in fits)
            left = duration(plan.start_s - self._snapshot.taken_s)
            text = f"with {kept} CPUs a node it would have room on {where}, and wait for job {plan.job.label}"
            return Remedy(False, f"{text}, which is planned there in {left}, before it would have ended")
        chosen = self._table_for(self._in_reservations(job).reservation).chosen(trainers.chosen())
        moved = (shape.cpus - kept) * shape.num_nodes
        wanted = -(-moved // DEFAULT_DATA_WORKER_CPUS)
        place, room = self._data_workers(limited, chosen, kept, plans)
        # Components share a reservation, unless they are told not to.
        outside = f" --data-worker-reservation={NO_RESERVATION}" if job.reservation else ""
        where = compress(node.name for node in chosen)
        start = f"with {kept} CPUs a node it would start on {where}"
        if not room:
            return Remedy(
                True,
                f"{start}; no node has {DEFAULT_DATA_WORKER_CPUS} CPUs for a data worker now, they would join later",
                f"#HETSTREAM --data-workers=0-{wanted}{outside}",
            )
        # Slurm has no arrays of heterogeneous jobs: there they join as companions.
        least = 0 if job.array_job_id is not None else min(wanted, room)
        counts = f"{least}-{wanted}" if least < wanted else str(wanted)
        workers = f"{min(wanted, room)} of {count_words(wanted, 'data worker')} of {DEFAULT_DATA_WORKER_CPUS} CPUs"
        return Remedy(
            True,
            f"{start}, and {workers} in partition {place}",
            f"#HETSTREAM --data-workers={counts} --data-worker-partition={place}{outside}",
        )

    def _worker_room(self, job: Job, plans: tuple[Plan, ...]) -> dict[str, int]:
        """How many data workers of a job have room in each partition that admits it, outside of reservations.

        Args:
            job: whose they are: they have its time limit, account and QOS.
            plans: they keep nodes for others.
        """
        number = self._num_before_end(job), *self._who(job), plans
        if number not in self._workers:
            kept = self._kept(replace(job, reservation=""))
            others = kept.nodes | self._table.kept_from(replace(job, exclusive="")) | self._kept_by(plans, "")
            others = others | self._table.completing
            if self._hardware.counts_memory:
                others = others | (self._table.memory_free_mb <= 0)
            found = self._workers[number] = {}
            for name in sorted(self._up):
                _, free = self._table.cpus_for([name])
                here, free = self._table.eligible([name]) & ~others, np.maximum(0, free - kept.cpus)
                if self._table.takes_whole_nodes([name]):
                    found[name] = int((here & (free >= DEFAULT_DATA_WORKER_CPUS)).sum())
                else:
                    found[name] = int((free[here] // DEFAULT_DATA_WORKER_CPUS).sum())
        known = {partition.name: partition for partition in self._snapshot.partitions}
        return {name: room for name, room in self._workers[number].items() if not why_closed(known[name], job)}

    def _data_workers(self, job: Job, trainers: Iterable[Node], kept: int, plans: tuple[Plan, ...]) -> tuple[str, int]:
        """The partition with most room for a job's data workers beside its trainers, and for how many."""
        room = self._worker_room(job, plans)
        for node in trainers:
            lost = node.cpus_free // DEFAULT_DATA_WORKER_CPUS - (node.cpus_free - kept) // DEFAULT_DATA_WORKER_CPUS
            for name in room.keys() & (() if node.is_reserved else node.partitions):
                room[name] = max(0, room[name] - lost)
        # CPUs beside GPUs are for other trainers, as long as there are CPUs elsewhere.
        place = max(
            sorted(room), key=lambda name: (room[name] > 0, name not in self._with_gpus, room[name]), default=""
        )
        return place, room.get(place, 0)


def _start(reservation: Reservation) -> float:
    return reservation.start_s
