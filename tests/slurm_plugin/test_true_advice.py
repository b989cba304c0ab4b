"""Every line of advice and every count of `why`, `jobs` and `advise` against the facts of a generated cluster.

What is true is worked out here once more, plainly: node by node and job by job, by backfill's own rule.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetstream.slurm_plugin.client.model import Gres, HetComponent, Job, Node, Partition, Reservation, Snapshot
from hetstream.slurm_plugin.client.slurm_units import expand
from hetstream.slurm_plugin.insight.advise import Advice, advise
from hetstream.slurm_plugin.insight.blockers import Blocker
from hetstream.slurm_plugin.insight.observation import observe
from hetstream.slurm_plugin.insight.why import Explainer, Explanation

NOW_S = 1_000_000.0
HOUR_S = 3600.0
INTERVAL_S, RESOLUTION_S = 30, 60
TRAINER_CPUS, WORKER_CPUS = 2, 4
NAMES = ("a", "b", "c")


def place(job: Job) -> tuple[int, int]:
    """The components of a heterogeneous job have one place."""
    return -job.priority, job.het.het_job_id if job.het else job.job_id


def seconds_of(text: str) -> float:
    days, _, clock = text.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


@dataclass
class Facts:
    """A cluster with one job in question."""

    snapshot: Snapshot
    job: Job

    def usable(self) -> list[Node]:
        return [node for node in self.snapshot.nodes if "DRAIN" not in node.states]

    @property
    def open(self) -> set[str]:
        return {partition.name for partition in self.snapshot.partitions if partition.is_up}

    def of_job(self) -> list[Node]:
        """The nodes that it may use at all, without a look at what they have."""
        job = self.job
        return [
            node
            for node in self.usable()
            if set(node.partitions) & set(job.partitions) & self.open
            and (not job.features or job.features in node.features)
            and node.name not in job.excluded_nodes
        ]

    def has(self, node: Node, cpus: int, *, empty: bool = False) -> bool:
        """Whether a node gives what the job asks of it with so many CPUs, now or if it were empty."""
        job = self.job
        gpus, memory_mb = job.count("gpu") // job.num_nodes, job.memory_mb // job.num_nodes
        if empty:
            return node.cpus >= cpus and node.gpus >= gpus and node.memory_mb >= memory_mb
        is_gone = "COMPLETING" in node.states
        has_gpus, has_memory = node.gpus_free() >= gpus, node.memory_free_mb >= memory_mb
        return not is_gone and node.cpus_free >= cpus and has_gpus and has_memory

    def with_room(self, cpus: int, *, empty: bool = False) -> set[str]:
        return {node.name for node in self.of_job() if self.has(node, cpus, empty=empty)}

    def are_enough(self, names: Collection[str]) -> bool:
        """Whether so many nodes of one partition are among these."""
        members = [
            {node.name for node in self.usable() if part in node.partitions}
            for part in self.job.partitions
            if part in self.open
        ]
        return any(len(there & set(names)) >= self.job.num_nodes for there in members)

    def reserved_before(self, end_s: float) -> set[str]:
        return {name for each in self.snapshot.reservations if each.start_s < end_s for name in each.nodes}

    def rivals(self) -> list[Job]:
        """Pending jobs on nodes of the same partitions that go first, the very first in front."""
        beside = set(self.job.partitions)
        for node in self.snapshot.nodes:
            if set(node.partitions) & set(self.job.partitions):
                beside |= set(node.partitions)
        mine = place(self.job)
        waiting = [one for one in self.snapshot.jobs if one.state == "PENDING" and beside & set(one.partitions)]
        return sorted(
            (one for one in waiting if place(one) < mine),
            key=lambda one: (*place(one), one.job_id),
        )

    def others(self) -> list[Facts]:
        """The other components of its job."""
        het = self.job.het
        parts = [one for one in self.snapshot.jobs if het and one.het and one.het.het_job_id == het.het_job_id]
        return [Facts(self.snapshot, one) for one in parts if one != self.job]

    def unplanned(self) -> list[Job]:
        return [one for one in self.rivals() if not (one.start_s and one.start_s > NOW_S)]

    def kept_by(self, plan: Job) -> set[str]:
        if plan.planned_nodes:
            return set(plan.planned_nodes)
        return {node.name for node in self.snapshot.nodes if set(node.partitions) & set(plan.partitions)}

    def kept_for_plans(self, limit_s: float | None, wait_s: float) -> set[str]:
        """What backfill keeps from the job with such a limit, if it looks at it after so long."""
        end_s = math.inf if limit_s is None else math.ceil((NOW_S + wait_s + limit_s) / RESOLUTION_S) * RESOLUTION_S
        kept = set[str]()
        for one in self.rivals():
            start_s = one.start_s or 0.0
            is_kept = NOW_S < start_s <= NOW_S + 86400
            if is_kept and math.floor(start_s / RESOLUTION_S) * RESOLUTION_S <= end_s:
                kept |= self.kept_by(one)
        return kept

    def room(self, cpus: int, limit_s: float | None, wait_s: float = 0.0, *, plans: bool = True) -> set[str]:
        """Where it could start with such a limit, beside what is reserved and kept."""
        end_s = math.inf if limit_s is None else NOW_S + wait_s + limit_s
        left = self.with_room(cpus) - self.reserved_before(end_s)
        return left - self.kept_for_plans(limit_s, wait_s) if plans else left

    @property
    def cpus(self) -> int:
        return self.job.num_cpus // self.job.num_nodes

    @property
    def limit_s(self) -> float | None:
        """Its own, or the longest of its partitions."""
        longest = [one.max_time_s for one in self.snapshot.partitions if one.name in self.job.partitions]
        if self.job.time_limit_s is not None or None in longest:
            return self.job.time_limit_s
        return max(limit_s for limit_s in longest if limit_s is not None)

    def would_start(self, limit_s: float) -> bool:
        """Whether such a limit would let it start at backfill's next look."""
        return self.has_turn(limit_s) and all(other.has_turn(other.limit_s) for other in self.others())

    def has_turn(self, limit_s: float | None) -> bool:
        return self.are_enough(self.room(self.cpus, limit_s, INTERVAL_S)) and not self.unplanned()


def some(draw: random.Random, names: Iterable[str], least: int = 1) -> tuple[str, ...]:
    known = list(names)
    return tuple(sorted(draw.sample(known, draw.randint(min(least, len(known)), len(known)))))


def made_node(draw: random.Random, number: int) -> Node:
    cpus, gpus, memory_mb = draw.choice([8, 16]), draw.choice([0, 2, 4]), draw.choice([1000, 4000, 4000])
    states = draw.choices([{"MIXED"}, {"IDLE", "COMPLETING"}, {"IDLE", "DRAIN"}], [8, 1, 1])[0]
    return Node(
        f"n{number}", frozenset(states), some(draw, NAMES), cpus, draw.choice([0, 0, cpus // 2, cpus - 2]),
        memory_mb, draw.choice([0, 0, memory_mb // 2, memory_mb]),
        (Gres("gpu", "", gpus),) if gpus else (), (Gres("gpu", "", draw.randint(0, gpus)),) if gpus else (),
        features=some(draw, ("x", "y"), 0), cpus_per_core=1,
    )  # fmt: skip


def made_job(draw: random.Random, number: int, nodes: Iterable[Node]) -> Job:
    num_nodes, cpus, gpus = draw.choice([1, 1, 1, 1, 2, 3]), draw.choice([1, 2, 4, 8, 12]), draw.choice([0, 1, 1, 2])
    partitions = some(draw, NAMES) if draw.random() < 0.3 else (draw.choice(NAMES),)
    is_planned = draw.random() < 0.6
    there = [node.name for node in nodes if set(node.partitions) & set(partitions)]
    return Job(
        number, "j", "u", partitions, "PENDING", draw.choice(["Priority", "Resources", "None"]), num_nodes,
        cpus * num_nodes, num_nodes, cpus, draw.choice([0, 0, 500, 2000]) * num_nodes, max_nodes=num_nodes,
        gres_per_node=(Gres("gpu", "", gpus),) if gpus else (), priority=draw.randint(1, 4), submit_s=NOW_S - 60,
        start_s=NOW_S + draw.choice([5, 70, 130, 600, 3600, 50000, 100000]) if is_planned else None,
        planned_nodes=some(draw, there) if is_planned and there and draw.random() < 0.8 else (),
        time_limit_s=draw.choice([None, 60.0, 120.0, 540.0, HOUR_S, 2 * HOUR_S]),
        features=draw.choice([*[""] * 7, "x"]), excluded_nodes=some(draw, there, 0) if draw.random() < 0.2 else (),
    )  # fmt: skip


def made_holder(draw: random.Random, number: int, node: Node) -> list[Job]:
    """One job that has all that is in use on a node, now and then."""
    gpus = node.gpus_in_use()
    if not (gpus and node.cpus_allocated) or draw.random() < 0.3:
        return []
    return [Job(
        number, "j", "v", node.partitions[:1], "RUNNING", "", 1, node.cpus_allocated, 1, node.cpus_allocated,
        node.memory_allocated_mb, gres_per_node=(Gres("gpu", "", gpus),), nodes=(node.name,), start_s=NOW_S - 60,
    )]  # fmt: skip


def made_cluster(draw: random.Random) -> Snapshot:
    nodes = tuple(made_node(draw, number) for number in range(draw.randint(2, 6)))
    jobs = [made_job(draw, number, nodes) for number in range(1, draw.randint(2, 7))]
    if len(jobs) > 2 and draw.random() < 0.3:
        first = draw.randrange(len(jobs) - 1)
        for offset in (0, 1):
            jobs[first + offset] = replace(
                jobs[first + offset], het=HetComponent(first + 1, offset), priority=jobs[first].priority
            )
    reservations = [
        Reservation(f"r{number}", some(draw, [node.name for node in nodes]), start_s, start_s + HOUR_S)
        for number, start_s in enumerate(sorted(NOW_S + draw.choice([30, 400, 7000]) for _ in range(2)))
        if draw.random() < 0.3
    ]
    partitions = tuple(
        Partition(
            name,
            tuple(node.name for node in nodes if name in node.partitions),
            is_up=draw.random() < 0.9,
            max_time_s=draw.choice([None, None, HOUR_S]),
        )
        for name in NAMES
    )
    holders = tuple(job for number, node in enumerate(nodes, 100) for job in made_holder(draw, number, node))
    return Snapshot(NOW_S, "24.11", "test", (*jobs, *holders), nodes, partitions, {}, tuple(reservations))


def check_limit(facts: Facts, blocker: Blocker) -> None:
    """A limit that is proposed lets it start, and where none is proposed none would."""
    limit_s = facts.limit_s
    if found := re.search(r"with a limit of (\S+) it could go first: scontrol update JobId=(\d+) TimeLimit=(\d+)",
                          blocker.next_step):  # fmt: skip
        proposed_s = int(found[3]) * 60.0
        assert seconds_of(found[1]) == proposed_s
        assert int(found[2]) == facts.job.job_id
        assert limit_s is None or proposed_s < limit_s, "it has a shorter one already"
        assert facts.would_start(proposed_s)
        assert not facts.are_enough(facts.room(facts.cpus, limit_s)), "its own limit would do"
        return
    assert "TimeLimit" not in blocker.next_step
    shorter = [minutes * 60.0 for minutes in range(1, 60) if limit_s is None or minutes * 60.0 < limit_s]
    assert not any(facts.would_start(each) for each in shorter)


def check_turn(facts: Facts, blocker: Blocker) -> None:
    """There is room, and what is told of others is so."""
    room = facts.room(facts.cpus, facts.limit_s, plans=False)
    is_kept = not facts.are_enough(facts.room(facts.cpus, facts.limit_s))
    assert facts.are_enough(room)
    assert is_kept == (blocker.kind == "backfill")
    by_label = {one.label: one for one in facts.rivals()}
    if blocker.kind == "backfill":
        told = re.search(r"but (\S+) is kept for job (\S+), planned in (\S+), and", blocker.text)
        untold = re.search(r"but job (\S+) is planned in (\S+), on nodes that Slurm does not tell", blocker.text)
        label, left = (told[2], told[3]) if told else (untold[1], untold[2]) if untold else ("", "")
        plan = by_label[label]
        assert plan.start_s == NOW_S + seconds_of(left)
        assert bool(plan.planned_nodes) == bool(told)
        if told:
            assert set(expand(told[1])) == room & set(plan.planned_nodes)
        check_limit(facts, blocker)
    elif blocker.kind == "priority":
        counted = re.search(r"there is room now; (\d+) jobs? ahead, first ([\d+]+)", blocker.text)
        assert counted is not None
        assert int(counted[1]) == len(by_label)
        assert place(by_label[counted[2]]) == place(facts.rivals()[0])
        assert ("leaves it room" in blocker.text) == (
            facts.has_turn(facts.limit_s) and all(other.has_turn(other.limit_s) for other in facts.others())
        )
    else:
        assert not by_label


def check_lack(facts: Facts, found: Explanation) -> None:
    """There is no room; the figures of each line are the cluster's."""
    room = facts.room(facts.cpus, facts.limit_s, plans=False)
    assert not facts.are_enough(room)
    nodes = {node.name: node for node in facts.snapshot.nodes}
    could = facts.with_room(facts.cpus, empty=True)
    for blocker in found.blockers:
        text = blocker.text
        if blocker.kind == "size":
            assert not facts.are_enough(could - facts.reserved_before(end_of(facts)))
        elif blocker.kind == "reservation":
            assert facts.are_enough(facts.with_room(facts.cpus))
            check_limit(facts, blocker)
        elif blocker.kind == "completing":
            names = re.match(r"(\S+) has room, and Slurm starts nothing there", text)
            assert names is not None
            assert all("COMPLETING" in nodes[name].states for name in expand(names[1]))
            assert facts.are_enough(room | set(expand(names[1])))
        elif one := re.search(r"needs [\d,]+ (CPUs|GPUs|MB of memory) on .* the most free is ([\d,]+) \((\w+)\)", text):
            number, node = int(one[2].replace(",", "")), nodes[one[3]]
            assert not facts.has(node, facts.cpus)
            free = {"CPUs": node.cpus_free, "GPUs": node.gpus_free(), "MB of memory": node.memory_free_mb}
            assert free[one[1]] == number
        elif some_have := re.search(r"with enough .*? so much is free on (\d+)", text):
            assert 0 < int(some_have[1]) < facts.job.num_nodes or len(facts.job.partitions) > 1
        elif all_free := re.search(r"free in all: (.*?)(, but not enough|$)", text):
            there = [
                nodes[name]
                for name in could - facts.reserved_before(end_of(facts))
                if "COMPLETING" not in nodes[name].states
            ]
            sums = {"CPUs": sum(node.cpus_free for node in there), "GPUs": sum(node.gpus_free() for node in there),
                    "MB": sum(node.memory_free_mb for node in there)}  # fmt: skip
            for number, unit in re.findall(r"(?:^|, )([\d,]+|no) (CPUs|GPUs|MB|memory)", all_free[1]):
                expected = sums["MB" if unit == "memory" else unit]
                assert expected == (0 if number == "no" else int(number.replace(",", "")))


def end_of(facts: Facts) -> float:
    return math.inf if facts.limit_s is None else NOW_S + facts.limit_s


def check_conversion(facts: Facts, found: Explanation) -> None:
    """Where data workers are said to let it start now, trainers and data workers have room on the same figures."""
    verdict, job = found.conversion, facts.job
    if not verdict.helps:
        assert not verdict.directive
        return
    kept = TRAINER_CPUS * (job.count("gpu") // job.num_nodes)
    start = re.match(r"with (\d+) CPUs a node it would start on (\S+?)[;,]? ", verdict.text)
    assert start is not None
    trainers = set(expand(start[2].rstrip(",;")))
    assert int(start[1]) == kept < facts.cpus
    assert len(trainers) == job.num_nodes
    room = facts.room(kept, facts.limit_s)
    assert trainers <= room
    assert facts.are_enough(trainers)
    assert not facts.unplanned(), "whoever is ahead may take it"
    assert not facts.are_enough(facts.room(facts.cpus, facts.limit_s, plans=False)), "it has room as it is"
    least = re.search(r"--data-workers=(\d+)(?:-(\d+))?(?: --data-worker-partition=(\w+))?", verdict.directive)
    assert least is not None
    taken = dict.fromkeys(trainers, kept)
    gone = facts.reserved_before(end_of(facts)) | facts.kept_for_plans(facts.limit_s, 0.0)
    places = [
        (node.cpus_free - taken.get(node.name, 0)) // WORKER_CPUS
        for node in facts.usable()
        if least[3] in node.partitions and node.name not in gone and "COMPLETING" not in node.states
        and node.memory_free_mb > 0
    ]  # fmt: skip
    assert sum(places) >= int(least[1])
    assert int(least[2] or least[1]) == -(-(facts.cpus - kept) * job.num_nodes // WORKER_CPUS)


def gpus_of_use(snapshot: Snapshot, node: Node, cpus_free: int) -> int:
    """How many free GPUs of a node copies of one pending job could have, with so many CPUs free."""
    best = None
    for job in snapshot.jobs:
        if job.state != "PENDING" or not job.count("gpu"):
            continue
        facts = Facts(snapshot, job)
        is_wanted = not job.features or job.features in node.features
        if not (is_wanted and node.name not in job.excluded_nodes and set(node.partitions) & set(job.partitions)):
            continue
        if facts.has(node, facts.cpus, empty=True):
            gpus, memory_mb = job.count("gpu") // job.num_nodes, job.memory_mb // job.num_nodes
            copies = [cpus_free // facts.cpus, node.gpus_free() // gpus]
            copies += [node.memory_free_mb // memory_mb] if memory_mb else []
            best = max(best or 0, min(copies) * gpus)
    return min(cpus_free, node.gpus_free()) if best is None else best


def check_holder(snapshot: Snapshot, line: Advice) -> None:
    """A running job is said to keep GPUs beside it from use."""
    (job,) = [job for job in snapshot.jobs if job.label == line.job]
    (node,) = [node for node in snapshot.nodes if node.name == job.nodes[0]]
    said = re.match(r"it holds (\d+) CPUs? for (\d+) GPUs? a node, beside (\d+) free GPU", line.text)
    assert said is not None
    freed = job.num_cpus - TRAINER_CPUS * job.count("gpu")
    gained = gpus_of_use(snapshot, node, node.cpus_free + freed) - gpus_of_use(snapshot, node, node.cpus_free)
    assert (int(said[1]), int(said[2])) == (job.num_cpus, job.count("gpu"))
    assert int(said[3]) == line.gpus_unlocked == gained > 0
    assert line.cpus_freed == freed


def check(snapshot: Snapshot) -> None:
    explainer = Explainer(snapshot)
    causes = {row.job.job_id: row.cause for row in observe(snapshot, {}).waiting}
    lines = advise(snapshot, {})
    helped = {line.job for line in lines if line.basis == "free now"}
    for line in lines:
        if line.basis == "shape":
            check_holder(snapshot, line)
    for job in snapshot.jobs:
        if job.state != "PENDING":
            continue
        facts, found = Facts(snapshot, job), explainer.explain(job)
        first = found.blockers[0]
        assert explainer.waits_for(job) == first.kind
        assert first.kind in causes[job.job_id].split(" or ")
        if first.kind == "component":
            held_up = [other for other in facts.others() if other.job.label in first.text]
            assert held_up
            assert not held_up[0].are_enough(held_up[0].room(held_up[0].cpus, held_up[0].limit_s, plans=False))
        elif first.kind in ("backfill", "priority", "scheduler", "not looked at"):
            assert len(found.blockers) == 1
            check_turn(facts, first)
        else:
            check_lack(facts, found)
        if facts.are_enough(facts.room(facts.cpus, facts.limit_s, plans=False)):
            assert set(found.fits_on) == facts.room(facts.cpus, facts.limit_s, plans=False)
        check_conversion(facts, found)
        assert (job.label in helped) == (found.conversion.helps and job.count("gpu") > 0)


@given(st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_told_and_advised_is_true_of_the_cluster(draw: random.Random) -> None:
    check(made_cluster(draw))


@pytest.mark.parametrize("seed", range(40))
def test_the_same_of_clusters_that_are_drawn_evenly(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        check(made_cluster(draw))
