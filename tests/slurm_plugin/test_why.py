"""Why jobs wait: each cause by itself, then `hetstream why` and `hetstream jobs` on a real cluster."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from hetstream.slurm_plugin.cli import cluster
from hetstream.slurm_plugin.cli.why import report_of
from hetstream.slurm_plugin.client.counted import num_of_jobs
from hetstream.slurm_plugin.client.model import Gres, HetComponent, Job, Node, Partition, Reservation, Snapshot
from hetstream.slurm_plugin.client.parse_text import with_open_partitions
from hetstream.slurm_plugin.client.read import with_times_to_come, with_turns
from hetstream.slurm_plugin.client.run import run_slurm
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.insight.het_job import find_jobs
from hetstream.slurm_plugin.insight.why import Explainer, Explanation
from hetstream.slurm_plugin.render.tables import as_table

NOW_S = 1_000_000.0


def node(name: str, cpus: int, gpus: int = 0, *, of: tuple[int, int] = (16, 4), memory_mb: int = 1000) -> Node:
    """A node with so many CPUs and GPUs free."""
    partition = "gpu" if of[1] else "cpu"
    return Node(
        name, frozenset({"MIXED"}), (partition,), of[0], of[0] - cpus, 1000, 1000 - memory_mb,
        (Gres("gpu", "", of[1]),) if of[1] else (), (Gres("gpu", "", of[1] - gpus),) if of[1] else (),
    )  # fmt: skip


def pending(cpus: int = 4, gpus: int = 1, **more: Any) -> Job:
    return replace(
        Job(
            7, "train", "alice", ("gpu",), "PENDING", "Priority", 1, cpus, 1, cpus, 100, submit_s=NOW_S - 60,
            gres_per_node=(Gres("gpu", "", gpus),) if gpus else (), priority=100,
        ),
        **more,
    )  # fmt: skip


def explain(job: Job, *nodes: Node, others: tuple[Job, ...] = ()) -> Explanation:
    partitions = (Partition("gpu", ()), Partition("cpu", ()), Partition("closed", (), is_up=False))
    return Explainer(Snapshot(NOW_S, "22.05.8", "test", (job, *others), nodes, partitions)).explain(job)


def kinds(found: Explanation) -> list[str]:
    return [blocker.kind for blocker in found.blockers]


def test_what_could_give_room_and_is_not_looked_at_is_said() -> None:
    """Preemption, and OverSubscribe=YES: of jobs without room alone, and only where the site has it."""
    both, full, free = pending(8, num_nodes=2), node("g0", 4, 4), node("g1", 16, 4)
    by_wish = Partition("gpu", (), jobs_per_cpu=4)

    def notes(config: Mapping[str, str], partition: Partition, *nodes: Node) -> str:
        seen = Snapshot(NOW_S, "22.05.8", "test", (both,), nodes, (partition, Partition("cpu", ())), config)
        said = report_of("7", [both], seen).notes
        assert cluster.jobs_report([both], seen, details=False).notes == said, "jobs says what why says"
        return "; ".join(said)

    preempt = {"PreemptType": "preempt/partition_prio"}
    assert "may preempt (preempt/partition_prio) are not looked at" in notes(preempt, Partition("gpu", ()), full, free)
    assert "partition gpu that a job may share (--oversubscribe)" in notes({}, by_wish, full, free)
    for config in ({}, {"PreemptType": "preempt/none"}, {"PreemptType": "(null)"}):
        assert notes(config, Partition("gpu", ()), full) == notes(config, replace(by_wish, all_share=True), full) == ""
    assert notes(preempt, by_wish, free, node("g2", 16, 4)) == ""
    ends = replace(both, state="RUNNING", nodes=("g0",))
    seen = Snapshot(NOW_S, "22.05.8", "test", (ends,), (full,), (by_wish,), preempt)
    assert cluster.jobs_report([ends], seen, details=False).notes == []


@pytest.mark.shows("`jobs` and `why` say what a job waits for, and whether data workers would let it start")
def test_one_resource_is_lacking() -> None:
    found = explain(pending(8), node("g0", 4, 4), node("g1", 16, 0))
    assert kinds(found) == ["CPUs", "GPUs"]  # either would do: g1 lacks GPUs alone, g0 CPUs alone
    found = explain(pending(8), node("g0", 4, 4), node("g1", 0, 0))
    assert kinds(found) == ["CPUs"]
    assert found.blockers[0].text == (
        "it needs 8 CPUs on a node; of 1 node with enough GPUs and memory the most free is 4 (g0)"
    )
    assert kinds(explain(pending(4), node("g0", 8, 4, memory_mb=50))) == ["memory"]
    assert kinds(explain(pending(4, 2), node("g0", 8, 1))) == ["GPUs"]


def test_causes_are_all_the_resources_of_which_more_would_do() -> None:
    def causes(job: Job, *nodes: Node, others: tuple[Job, ...] = ()) -> tuple[str, ...]:
        partitions = (Partition("gpu", ()), Partition("cpu", ()))
        return Explainer(Snapshot(NOW_S, "22.05.8", "test", (job, *others), nodes, partitions)).causes(job)

    assert causes(pending(8), node("g0", 4, 4), node("g1", 16, 0)) == ("GPUs", "CPUs")
    assert causes(pending(8), node("g0", 4, 4), node("g1", 0, 0)) == ("CPUs",)
    assert causes(pending(8, num_nodes=2), node("g0", 8, 4), node("g1", 2, 4)) == ("CPUs",)
    assert causes(pending(32), node("g0", 16, 4)) == ("size",)
    assert causes(pending(reason="JobHeldUser"), node("g0", 16, 4)) == ("held",)
    assert causes(pending(state="RUNNING"), node("g0", 16, 4)) == ()
    first = pending(8, job_id=8, priority=200)
    planned = pending(8, job_id=9, priority=300, start_s=NOW_S + 60)
    assert causes(pending(), node("g0", 16, 4)) == ("scheduler",)
    assert causes(pending(), node("g0", 16, 4), others=(first,)) == ("priority",)
    assert causes(pending(), node("g0", 16, 4), others=(first, planned)) == ("backfill",)
    assert causes(pending(priority=400), node("g0", 16, 4), others=(first, planned)) == ("scheduler",)


def test_no_resource_alone_would_do() -> None:
    found = explain(pending(8), node("g0", 4, 0))
    assert found.blockers[0].text == (
        "it needs 1 GPU, 8 CPUs, 100 MB on a node; of 1 node that could give that, free in all: "
        "no GPUs, 4 CPUs on 1 (enough on 0), 1,000 MB on 1 (enough on 1)"
    )


def test_what_is_free_of_each_is_told_and_the_scarcest_first() -> None:
    """Where some of it is free nowhere, that is the reason, and not where it is."""
    assert kinds(explain(pending(8), node("g0", 4, 0), node("g1", 4, 4, memory_mb=50))) == ["CPUs"]
    seen = explain(pending(8), node("g0", 4, 0), node("g1", 16, 0, memory_mb=50), node("g2", 2, 4, memory_mb=50))
    assert kinds(seen) == ["GPUs"]
    assert seen.blockers[0].text.endswith(
        "of 3 nodes that could give that, free in all: 4 GPUs on 1 (enough on 1), 22 CPUs on 3 (enough on 1), "
        "1,100 MB on 3 (enough on 1), but not enough of all on the same node"
    )
    none = explain(pending(8), node("g0", 0, 0), node("g1", 0, 0))
    assert kinds(none) == ["GPUs"]
    assert "free in all: no GPUs, no CPUs, 2,000 MB on 2 (enough on 2)" in none.blockers[0].text
    assert "same node" not in none.blockers[0].text
    nodes = (node("g0", 4, 0), node("g1", 16, 0, memory_mb=50), node("g2", 2, 4, memory_mb=50))
    pairs = [replace(one, name=f"{one.name}{letter}") for one in nodes for letter in "ab"]
    gang = explain(pending(16, num_nodes=2, memory_mb=200), *pairs)
    assert kinds(gang) == ["GPUs", "gang"]
    assert "on a node, on 2 at once; of 6 nodes" in gang.blockers[0].text
    assert gang.blockers[0].text.endswith("but not enough of all on the same node")


def test_what_is_free_of_types_and_of_nodes_for_others_is_told() -> None:
    typed = tuple(
        replace(one, gres=(Gres("gpu", "a100", 4),), gres_used=(Gres("gpu", "a100", 4),))
        for one in (node("g0", 4, 0), node("g1", 4, 0), node("g2", 16, 0))
    )
    mine = pending(8, user="eve", gres_per_node=(Gres("gpu", "a100", 1),))
    found = explain(mine, typed[0], typed[1], replace(typed[2], owner="bob"))
    assert kinds(found) == ["GPUs"]
    assert found.blockers[0].text.endswith(
        "of 3 nodes that could give that, and others have 1 for themselves, free in all: "
        "no a100 GPUs, 8 CPUs on 2 (enough on 0), 2,000 MB on 2 (enough on 2)"
    )


@pytest.mark.shows("`jobs` and `why` say what a job waits for, and whether data workers would let it start")
def test_a_gang_needs_its_nodes_at_once() -> None:
    found = explain(pending(8, 1, num_nodes=2), node("g0", 8, 4), node("g1", 2, 4))
    assert kinds(found) == ["CPUs", "gang"]
    assert found.blockers[1].text == "it needs 2 nodes at once; there is room now on 1 (g0)"
    assert found.fits_on == ("g0",)


@pytest.mark.shows("`jobs` and `why` say what a job waits for, and whether data workers would let it start")
def test_what_no_node_can_give() -> None:
    assert kinds(explain(pending(32), node("g0", 16, 4))) == ["size"]
    assert kinds(explain(pending(4, 8), node("g0", 16, 4))) == ["size"]
    assert kinds(explain(pending(4, partitions=("closed",)), node("g0", 16, 4))) == ["size"]
    drained = replace(node("g1", 16, 4), states=frozenset({"IDLE", "DRAIN"}))
    found = explain(pending(4, 1, num_nodes=2), node("g0", 16, 4), drained)
    assert kinds(found) == ["nodes"]
    assert "g1 is out of use" in found.blockers[0].text


def component(offset: int, cpus: int, reason: str, partition: str) -> Job:
    of = HetComponent(70, offset)
    return pending(cpus, 0, job_id=70 + offset, reason=reason, partitions=(partition,), het=of)


def test_a_component_that_no_node_can_hold_is_said_to_be_and_holds_up_the_others() -> None:
    """Slurm accepts it, and says no more than PartitionConfig."""
    trainer, workers = component(0, 2, "Resources", "gpu"), component(1, 64, "PartitionConfig", "cpu")
    nodes = (node("g0", 16, 4), replace(node("c0", 16, 0), partitions=("cpu",)))
    found = explain(workers, *nodes, others=(trainer,))
    assert kinds(found) == ["size", "limit"]
    assert "it needs 1 node with 64 CPUs" in found.blockers[0].text
    held_up = explain(trainer, *nodes, others=(workers,))
    assert kinds(held_up) == ["component"]
    assert "it starts together with 70+1, and that waits: it needs 1 node with 64 CPUs" in held_up.blockers[0].text
    small = replace(workers, num_cpus=4, cpus_per_task=4, memory_mb=4, reason="Resources")
    assert kinds(explain(trainer, *nodes, others=(small,))) != ["component"]


def test_beside_stranded_gpus_a_job_waits_for_what_strands_them() -> None:
    """One node has GPUs and no CPUs, the other CPUs and no GPUs."""
    found = explain(pending(8, 1), node("g0", 2, 4), node("g1", 16, 0))
    assert kinds(found) == ["CPUs", "GPUs"]
    assert "of 1 node with enough" in found.blockers[0].text


def test_after_a_requeue_nobody_is_told_of_a_begin_option() -> None:
    told = [
        explain(pending(reason="BeginTime", num_restarts=number), node("g0", 16, 4)).blockers[0].text
        for number in (0, 2)
    ]
    assert told == [
        "it may not begin yet: its --begin time has not come",
        "it may not begin yet: it was requeued (start 3), and Slurm waits two minutes then",
    ]


def test_node_lists_and_features_count() -> None:
    nodes = (node("g0", 16, 4), replace(node("g1", 2, 4), features=("fast",)))
    assert explain(pending(4), *nodes).fits_on == ("g0",)
    assert kinds(explain(pending(4, required_nodes=("g1",)), *nodes)) == ["CPUs"]
    assert kinds(explain(pending(4, features="fast"), *nodes)) == ["CPUs"]


@pytest.mark.shows("`jobs` and `why` say what a job waits for, and whether data workers would let it start")
def test_there_is_room_but_others_go_first() -> None:
    ahead = pending(4, job_id=5, priority=200)
    assert kinds(explain(pending(), node("g0", 16, 4))) == ["scheduler"]
    found = explain(pending(reason="Priority"), node("g0", 16, 4), others=(ahead,))
    assert (kinds(found), found.blockers[0].text) == (["priority"], "there is room now; 1 job ahead, first 5")
    planned = replace(ahead, start_s=NOW_S + 600, planned_nodes=("g0",))
    found = explain(pending(reason="Priority", time_limit_s=3600.0), node("g0", 16, 4), others=(planned,))
    assert kinds(found) == ["backfill"]
    assert found.blockers[0].text == (
        "there is room now, but g0 is kept for job 5, planned in 00:10:00, and this job has a limit of 01:00:00"
    )
    assert found.blockers[0].next_step == (
        "with a limit of 00:07:00 it could go first: scontrol update JobId=7 TimeLimit=7"
    )


def test_a_limit_is_proposed_only_where_it_would_let_the_job_start() -> None:
    """By the same figures: rounded as backfill rounds, set before it next looks, and nobody else ahead."""
    nodes = node("g0", 16, 4), node("g1", 16, 4)
    plan = pending(4, job_id=5, priority=200, start_s=NOW_S + 600, planned_nodes=("g0", "g1"))

    def step(job: Job, *others: Job, **config: str) -> tuple[str, str]:
        names = {"SchedulerType": "sched/backfill", **config}
        seen = Snapshot(NOW_S, "24.11", "t", (job, *others), nodes, (Partition("gpu", ()),), names)
        (found,) = Explainer(seen).explain(job).blockers
        assert Explainer(seen).waits_for(job) == found.kind
        return found.kind, found.next_step.rpartition(" ")[2]

    hour = pending(time_limit_s=3600.0)
    assert step(hour, plan) == ("backfill", "TimeLimit=7")
    assert step(hour, plan, SchedulerParameters="defer,bf_interval=120,bf_resolution=60") == ("backfill", "TimeLimit=6")
    assert step(hour, replace(plan, start_s=NOW_S + 100)) == ("backfill", "--start"), "no minute is left"
    assert step(hour, plan, pending(job_id=4, priority=300)) == ("backfill", "--start"), "who is ahead has no plan"
    assert step(pending(time_limit_s=300.0), plan) == ("priority", "--start"), "it has ended by then"
    assert step(hour, replace(plan, planned_nodes=("g0",))) == ("priority", "--start"), "g1 is kept for nobody"
    assert step(hour, replace(plan, planned_nodes=("c9",))) == ("priority", "--start")
    assert step(replace(hour, excluded_nodes=("g1",)), replace(plan, planned_nodes=("g1",)))[0] == "priority"
    far = replace(plan, start_s=NOW_S + 90_000)
    assert step(pending(), far) == ("priority", "--start"), "so far ahead nothing is kept"
    assert step(pending(), far, SchedulerParameters="bf_window=2000") == ("backfill", "TimeLimit=1497")
    assert step(hour, plan, SchedulerType="sched/builtin") == ("priority", "--start")
    strict = Snapshot(
        NOW_S, "24.11", "t", (hour, plan), nodes, (Partition("gpu", ()),), {"SchedulerType": "sched/builtin"}
    )
    assert Explainer(strict).explain(hour).blockers[0].text == "there is room now; 1 job ahead, first 5"
    starved, cpus = pending(14, time_limit_s=300.0), node("g0", 4, 2)
    beside = replace(plan, start_s=NOW_S + 600)
    for kind, helps in (("sched/backfill", True), ("sched/builtin", False)):
        seen = replace(strict, jobs=(starved, beside), nodes=(cpus,), config={"SchedulerType": kind})
        assert Explainer(seen).explain(starved).conversion.helps == helps
    short = Snapshot(NOW_S, "24.11", "t", (pending(), plan), nodes, (Partition("gpu", (), max_time_s=300.0),))
    assert kinds(Explainer(short).explain(pending())) == ["priority"], "without a limit it has its partition's"


def test_who_no_partition_admits_is_told_the_rule_and_no_turn() -> None:
    """Behind others slurmctld says Priority without a look at the rules."""
    plan = pending(4, job_id=5, priority=200, start_s=NOW_S + 600, planned_nodes=("g0",))
    mine = pending(time_limit_s=3600.0, account="free", qos="normal", uid=1001)

    def told(**rules: Any) -> list[tuple[str, str]]:
        partition = Partition("gpu", (), **rules)
        jobs_seen = with_open_partitions((mine, plan), (partition,))
        seen = Snapshot(NOW_S, "24.11", "t", jobs_seen, (node("g0", 16, 4),), (partition,))
        found = Explainer(seen).explain(seen.jobs[0])
        assert not found.conversion.helps
        assert Explainer(seen).waits_for(seen.jobs[0]) == found.blockers[0].kind
        return [(one.kind, one.text) for one in found.blockers]

    assert [kind for kind, _ in told()] == ["backfill"]
    begin = "none of its partitions admits it, and Slurm has not looked so far: gpu"
    assert told(allow_accounts=("lab",)) == [
        ("not allowed", f"{begin} allows accounts lab, and its account is free, unless one above that counts")
    ]
    assert told(deny_qos=("normal",)) == [("not allowed", f"{begin} denies QOS normal, and its QOS is normal")]
    assert told(allow_groups=("staff",))[0][1].startswith(f"{begin} allows groups staff, and alice is in none of these")
    assert told(allow_groups=("staff",), members=("alice",))[0][0] == "backfill"
    assert told(is_up=False) == [("not allowed", f"{begin} is not up")]
    looked = replace(mine, reason="Resources")
    assert with_open_partitions((looked,), (Partition("gpu", (), allow_accounts=("lab",)),)) == (looked,), "Slurm did"


def test_nodes_that_slurm_keeps_for_jobs_ahead_are_not_said_to_be_out_of_use() -> None:
    """Behind a blocked job it says so of each node that a job names."""
    plan = pending(4, job_id=5, priority=200, start_s=NOW_S + 600, planned_nodes=("g0",))
    mine = pending(time_limit_s=3600.0, required_nodes=("g0",), reason="ReqNodeNotAvail, UnavailableNodes:g0")
    here, drained = node("g0", 16, 4), replace(node("g0", 16, 4), states=frozenset({"IDLE", "DRAIN"}))
    for reason in (mine.reason, mine.reason.replace(" ", "_")):
        (found,) = with_turns((replace(mine, reason=reason),), (here,))
        assert kinds(explain(found, here, others=(plan,))) == ["backfill"]
        assert found.waits_for_resources
    for nodes in ((drained,), (replace(here, states=frozenset({"IDLE", "RESERVED"})),), ()):
        assert with_turns((mine,), nodes) == (mine,)
    assert kinds(explain(mine, drained, others=(plan,)))[0] == "nodes"
    broken = replace(mine, reason="ReqNodeNotAvail, UnavailableNodes:g[")
    assert with_turns((broken,), (here,)) == (broken,)
    may_be = replace(mine, reason="ReqNodeNotAvail, May be reserved for other job")
    kept = Reservation("r", ("g0",), NOW_S + 60, NOW_S + 120)
    assert kinds(explain(with_turns((may_be,), (here,))[0], here, others=(plan,))) == ["backfill"]
    for seen in (((here,), (kept,)), ((drained,), ()), ((here,), (), "PrivateData=reservations")):
        assert with_turns((may_be,), *seen) == (may_be,)


def test_who_may_not_begin_yet_waits_for_no_turn() -> None:
    job = pending(time_limit_s=3600.0, eligible_s=NOW_S + 7200)
    (found,) = with_times_to_come((job,), NOW_S)
    assert kinds(explain(found, node("g0", 16, 4))) == ["time"]
    assert not found.waits_for_resources
    assert with_times_to_come((job,), NOW_S + 7201) == (job,)


def test_nodes_on_which_jobs_complete_are_no_room() -> None:
    ending = replace(node("g0", 16, 4), states=frozenset({"IDLE", "COMPLETING"}))
    found = explain(pending(), ending)
    assert (kinds(found), found.fits_on) == (["completing"], ())
    assert found.blockers[0].next_step == "squeue --states=COMPLETING -w g0"
    assert explain(pending(), ending, node("g1", 16, 4)).fits_on == ("g1",)
    assert kinds(explain(pending(), ending, node("g1", 16, 0))) == ["completing", "GPUs"]
    assert kinds(explain(pending(16), replace(ending, cpus_allocated=8))) == ["CPUs"]
    assert not explain(pending(14), replace(node("g1", 4, 2), states=ending.states)).conversion.helps


def test_data_workers_are_not_promised_room_that_is_kept_or_closed() -> None:
    cpus = node("c0", 11, of=(16, 0))
    plan = pending(4, 0, job_id=5, priority=200, start_s=NOW_S + 600, planned_nodes=("c0",), partitions=("gpu", "cpu"))
    mine = pending(14, time_limit_s=3600.0)
    assert explain(mine, node("g0", 4, 2), cpus, others=(plan,)).conversion.directive == "#HETSTREAM --data-workers=0-3"
    ahead = replace(plan, planned_nodes=("g0",))
    text = explain(mine, node("g0", 4, 2), cpus, others=(ahead,)).conversion.text
    assert text == (
        "with 2 CPUs a node it would have room on g0, and wait for job 5, which is planned there in 00:10:00, before "
        "it would have ended"
    )
    unplanned = replace(plan, start_s=None, planned_nodes=())
    assert explain(mine, node("g0", 4, 2), cpus, others=(unplanned,)).conversion.text == (
        "with 2 CPUs a node it would have room on g0, behind job 5, whose start is not planned"
    )
    closed = (Partition("gpu", ()), Partition("cpu", (), max_time_s=60.0))
    seen = Snapshot(NOW_S, "24.11", "t", (mine,), (node("g0", 4, 2), cpus), closed)
    assert Explainer(seen).explain(mine).conversion.directive == "#HETSTREAM --data-workers=0-3"


def test_which_sockets_have_room_for_tasks_only_slurm_knows() -> None:
    """It divides them by rules of its own: two tasks of one socket each have started on a node with one socket."""

    def two_sockets(cpus: int) -> Node:
        return replace(node("g0", cpus, 4), layout=(2, 8, 1))

    spread = pending(4, 0, num_cpus=8, num_tasks=2, cpus_per_task=4, tasks_per_socket=1)
    found = explain(spread, two_sockets(8))
    assert kinds(found) == ["sockets"]
    assert found.blockers[0].text == (
        "there is room now by its CPUs; which sockets have them, as --ntasks-per-socket asks, only Slurm weighs; no "
        "job is ahead"
    )
    assert kinds(explain(replace(spread, num_cpus=12, num_tasks=3, max_nodes=1), two_sockets(16))) == ["sockets"]
    assert kinds(explain(spread, two_sockets(4))) == ["CPUs"]
    assert kinds(explain(replace(spread, reason="Resources"), two_sockets(8))) == ["not looked at"], "Slurm did"


def test_which_sockets_have_free_cores_only_slurm_knows() -> None:
    """-B 1:4 beside 10 busy cores of 16: 5 may be on each socket. Of 9 one socket has 4 at the most."""

    def two_sockets(cpus_free: int) -> Node:
        return replace(node("g0", cpus_free, 4), layout=(2, 8, 1))

    four = pending(4, 0, num_cpus=4, cpus_per_task=4, layout=(1, 4, 0))
    found = explain(four, two_sockets(6))
    assert (kinds(found), found.fits_on) == (["sockets"], ("g0",))
    assert "which sockets have them, as --cores-per-socket asks, only Slurm weighs" in found.blockers[0].text
    assert kinds(explain(four, two_sockets(7))) == ["scheduler"]
    assert kinds(explain(four, two_sockets(3))) == ["CPUs"]
    assert kinds(explain(replace(four, reason="Resources"), two_sockets(6))) == ["not looked at"], "Slurm did"
    two = replace(four, layout=(2, 1, 0))
    assert "as --sockets-per-node asks" in explain(two, two_sockets(8)).blockers[0].text
    assert kinds(explain(two, two_sockets(9))) == ["scheduler"]
    trainer = pending(12, 1, num_cpus=12, cpus_per_task=12, layout=(1, 4, 0))
    assert explain(trainer, two_sockets(7)).conversion.helps
    assert "Slurm alone weighs" in explain(trainer, two_sockets(6)).conversion.text


def test_many_partitions_of_a_job_take_the_room_of_a_few() -> None:
    names = tuple(f"partition{number}" for number in range(255))
    mine = pending(partitions=names)
    seen = Snapshot(NOW_S, "24.11", "t", (mine,), (), tuple(Partition(name, ()) for name in names))
    report = cluster.jobs_report([mine], seen, details=False)
    assert report.sections[0].rows[0]["partitions"] == list(names), "JSON has all"
    shown = as_table(report, color=False)
    assert max(len(line) for line in shown) < 200
    assert any(" partition0,partition1,+253 " in line for line in shown)
    assert "in partition0,partition1,+253: PENDING" in report_of("7", [mine], seen).lines[0]


@pytest.mark.shows("`jobs` and `why` say what a job waits for, and whether data workers would let it start")
@pytest.mark.parametrize(
    ("reason", "kind", "step"),
    [
        ("JobHeldUser", "held", "scontrol release 7"),
        ("JobHeldAdmin", "held", "ask an operator"),
        ("Dependency", "dependency", "hetstream jobs"),
        ("DependencyNeverSatisfied", "dependency", "scancel 7"),
        ("BeginTime", "time", "StartTime=now"),
        ("PartitionTimeLimit", "time limit", "TimeLimit=T"),
        ("PartitionDown", "partition", "scontrol show partition"),
        ("ReqNodeNotAvail, UnavailableNodes:g3", "nodes", "sinfo -R"),
        ("QOSMaxJobsPerUserLimit", "limit", "sacctmgr show qos"),
        ("AssocGrpCpuLimit", "limit", "sacctmgr show assoc"),
    ],
)
def test_what_slurm_says_comes_first(reason: str, kind: str, step: str) -> None:
    found = explain(pending(reason=reason), node("g0", 16, 4))
    assert found.blockers[0].kind == kind
    assert step in found.blockers[0].next_step


@pytest.mark.shows("`jobs` and `why` say what a job waits for, and whether data workers would let it start")
def test_data_workers_would_let_it_start() -> None:
    cpus = node("c0", 11, of=(16, 0))
    found = explain(pending(14), node("g0", 4, 2), cpus)
    assert found.conversion.helps
    assert found.conversion.directive == "#HETSTREAM --data-workers=2-3 --data-worker-partition=cpu"
    assert "with 2 CPUs a node it would start on g0" in found.conversion.text
    # Without a partition of its own they go where CPUs are, but for those that the trainer keeps.
    beside = explain(pending(14), node("g0", 11, 2)).conversion
    assert beside.directive == "#HETSTREAM --data-workers=2-3 --data-worker-partition=gpu"
    assert explain(pending(14), node("g0", 4, 2)).conversion.directive == "#HETSTREAM --data-workers=0-3"
    # The trainer keeps its memory, also where it asks for it by CPUs: these get more each.
    scarce, enough = node("g0", 4, 2, memory_mb=60), node("g0", 4, 2, memory_mb=420)
    for per_cpu_mb in (None, 30):
        job = pending(14, memory_mb=420, memory_per_cpu_mb=per_cpu_mb)
        assert not explain(job, scarce, cpus).conversion.helps
        assert explain(job, enough, cpus).conversion.helps
    array = explain(pending(14, array_job_id=7, array_tasks="1-3"), node("g0", 4, 2), cpus).conversion
    assert array.directive == "#HETSTREAM --data-workers=0-3 --data-worker-partition=cpu"


@pytest.mark.shows("`jobs` and `why` say what a job waits for, and whether data workers would let it start")
@pytest.mark.parametrize(
    ("job", "text"),
    [
        (pending(4, 0), "no GPU"),
        (pending(2, 3), "what a trainer keeps"),
        (pending(4), "room for it as it is"),
        (pending(32, 4), "would wait too, for GPUs"),
        (pending(14, het=HetComponent(7, 0)), "heterogeneous job already"),
        (pending(14, reason="JobHeldUser"), "no resource"),
    ],
)
def test_data_workers_would_not_help(job: Job, text: str) -> None:
    verdict = explain(job, node("g0", 8, 2, of=(64, 4))).conversion
    assert (verdict.helps, verdict.directive) == (False, "")
    assert text in verdict.text


def test_job_ids() -> None:
    jobs = [
        pending(),
        pending(job_id=31, het=HetComponent(31, 0)),
        pending(job_id=32, het=HetComponent(31, 1)),
        pending(job_id=40, array_job_id=33, array_tasks="3-9:2%3"),
        pending(job_id=41, array_job_id=33, array_tasks="1", state="RUNNING"),
    ]
    assert [job.label for job in find_jobs(jobs[::-1], "31")] == ["31+0", "31+1"], "Slurm lists the last one first"
    assert [job.label for job in find_jobs(jobs[::-1], "31")] == ["31+0", "31+1"], "Slurm lists the last one first"
    named = {name: [job.job_id for job in find_jobs(jobs, name)] for name in ("7", "31", "31+1", "33", "33_5", "33_4")}
    assert named == {"7": [7], "31": [31, 32], "31+1": [32], "33": [40, 41], "33_5": [40], "33_4": []}
    for wrong in ("", "x", "7+", "7_1-2", "7 8"):
        with pytest.raises(ValueError, match="job id"):
            find_jobs(jobs, wrong)


def test_a_heterogeneous_job_is_one_job_and_an_array_as_many_as_its_tasks() -> None:
    het = [pending(job_id=31 + offset, het=HetComponent(31, offset)) for offset in (0, 1)]
    assert num_of_jobs(het) == 1
    assert num_of_jobs([*het, pending(job_id=40, array_job_id=40, array_tasks="0-4"), pending()]) == 7


def run(env: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", *words]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


@pytest.mark.shows("`jobs` and `why` say what a job waits for, and whether data workers would let it start")
@pytest.mark.slurm
@pytest.mark.every_release
def test_why_and_jobs_on_a_real_cluster(devcluster: Any, wait_until: Callable[..., None]) -> None:
    """Nodes: 2 with 16 CPUs and 4 GPUs, 4 with 16 CPUs."""
    slurm = CommandSlurm(devcluster.env)

    def submit(*options: str) -> str:
        return slurm.submit("#!/bin/sh\nsleep 600\n", ["--output=/dev/null", "--mem=1000", *options])

    first = submit("-p", "gpu", "-N2", "--ntasks-per-node=1", "-c14", "--gres=gpu:1", "-t60")
    submitted = [first]
    try:
        wait_until(lambda: [job.state for job in slurm.snapshot().jobs] == ["RUNNING"], 60)
        cpus = submit("-p", "gpu", "-c8", "--gres=gpu:1", "-t60")
        gpus = submit("-p", "gpu", "-c1", "--gres=gpu:4", "-t60")
        held = submit("-p", "gpu", "-c1", "-H")
        het = submit("-p", "gpu", "-c8", "--gres=gpu:1", ":", "-p", "cpu", "-c4", "--mem=100")
        later = submit("-p", "cpu", "-w", "cpu3", "-c1", "--begin=now+1hour")
        again = submit("-p", "cpu", "-w", "cpu3", "-c1")
        submitted += [cpus, gpus, held, het, later, again]
        document = json.loads(run(devcluster.env, "why", cpus, "--json").stdout)
        facts = document["summary"]["jobs"][0]
        assert [blocker["kind"] for blocker in document["blockers"]] == ["CPUs"]
        assert (facts["conversion_helps"], facts["fits_on"]) == (True, [])
        assert facts["directive"] == "#HETSTREAM --data-workers=2 --data-worker-partition=cpu"
        text = run(devcluster.env, "why", gpus).stdout
        assert "of 2 nodes with enough CPUs and memory the most free is 3" in text
        assert "scontrol release" in run(devcluster.env, "why", held).stdout
        both = run(devcluster.env, "why", het).stdout
        assert "all components start together" in both
        assert f"job {het}+1" in both
        assert "room now  cpu[0-3]" in run(devcluster.env, "why", f"{het}+1").stdout
        assert "it does not wait" in run(devcluster.env, "why", first).stdout
        newest = json.loads(run(devcluster.env, "why", "--json").stdout)["summary"]
        assert newest["job"] in (again, later), "whichever of them waits, as the other may have room"
        assert "its --begin time has not come" in run(devcluster.env, "why", later).stdout
        wait_until(lambda: slurm.end_s(again), 60, "the job that is requeued")
        run_slurm(["scontrol", "requeue", again], env=devcluster.env)
        wait_until(lambda: "(start 2)" in run(devcluster.env, "why", again).stdout, 60, "what is said of a requeue")

        advice = json.loads(run(devcluster.env, "advise", "--json").stdout)["advice"]
        assert {row["job"]: row["basis"] for row in advice}[cpus] == "free now"
        rows = {row["job"]: row for row in json.loads(run(devcluster.env, "jobs", "--json").stdout)["jobs"]}
        assert (rows[first]["cpus"], rows[first]["gpus"], rows[first]["nodes"]) == (28, 2, ["gpu0", "gpu1"])
        waits = {name: rows[name]["waits_for"] for name in (first, cpus, gpus, held, f"{het}+0")}
        assert waits == {first: "", cpus: "CPUs", gpus: "GPUs", held: "held", f"{het}+0": "CPUs"}
        table = run(devcluster.env, "jobs", "--state", "running", "--details").stdout
        assert "gpu[0-1]" in table
        assert "gpu:1(0)" in table
        chosen = list(csv.DictReader(io.StringIO(run(devcluster.env, "jobs", "--csv", cpus, het).stdout)))
        assert [row["job"] for row in chosen] == [cpus, f"{het}+0", f"{het}+1"]
    finally:
        for job_id in submitted:
            slurm.cancel(job_id)
    wait_until(lambda: not slurm.snapshot().jobs, 60)
