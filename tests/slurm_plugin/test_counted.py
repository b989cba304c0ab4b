"""What counts: over nodes in every state and jobs in every state the figures of all commands are the same."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.slurm_plugin.cli.cluster import frag_report as frag_report
from hetstream.slurm_plugin.cli.cluster import jobs_report as jobs_report
from hetstream.slurm_plugin.cli.util import report_of as util_report
from hetstream.slurm_plugin.cli.why import report_of as why_report
from hetstream.slurm_plugin.client import parse_json, parse_text
from hetstream.slurm_plugin.client.accounting import Times, from_queue
from hetstream.slurm_plugin.client.counted import counted
from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.client.parse_text import node_states
from hetstream.slurm_plugin.client.read import ended_on_whole_nodes, with_held_gpus
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.daemon.nodes import WorkerSize, pool_room_of
from hetstream.slurm_plugin.insight.fragmentation import measure
from hetstream.slurm_plugin.insight.observation import Reading, observe
from hetstream.slurm_plugin.insight.utilisation import Window
from hetstream.slurm_plugin.insight.why import Explainer
from hetstream.slurm_plugin.render.metrics import ClusterCollector
from tests.devcluster.record import read_daemons

NOW_S = 1e9
# Every word that slurmctld can say of a node, base states and flags (22.05 to 26.05), and whether a job of anybody can
# start beside it. `UNHEARD_OF` stands for a word of a release to come.
STATES = {
    "IDLE": True, "MIXED": True, "ALLOCATED": True, "DOWN": False, "ERROR": False, "FUTURE": False, "UNKNOWN": False,
    "INVALID": False, "BLOCKED": False, "CLOUD": True, "COMPLETING": True, "DRAIN": False, "DYNAMIC_FUTURE": True,
    "DYNAMIC_NORM": True, "EXTERNAL": True, "INVALID_REG": False, "FAIL": False, "MAINTENANCE": False,
    "POWER_DOWN": False, "POWER_UP": True, "POWER_DRAIN": False, "PERFCTRS": True, "POWERED_DOWN": True,
    "REBOOT_REQUESTED": True, "REBOOT_ISSUED": False, "REBOOT_CANCELED": True, "RESERVED": False, "RESUME": True,
    "UNDRAIN": True, "NOT_RESPONDING": False, "PLANNED": True, "POWERING_UP": True, "POWERING_DOWN": False,
    "UNHEARD_OF": False,
}  # fmt: skip
# Every word for a job that has nodes, and what it keeps of its CPUs and of its GPUs.
KEEPS = {
    "RUNNING": (1, 1), "CONFIGURING": (1, 1), "STOPPED": (1, 1), "RESIZING": (1, 1), "SIGNALING": (1, 1),
    "SUSPENDED": (0, 1), "COMPLETING": (0, 0),
}  # fmt: skip


@pytest.mark.parametrize(("word", "starts"), STATES.items())
def test_each_word_of_a_node(word: str, starts: bool) -> None:
    states = {word} if word in ("IDLE", "MIXED", "ALLOCATED") else {"IDLE", word}
    one = Node("n", frozenset(states), ("gpu",), 16, 4, 1000, 200, (Gres("gpu", "", 4),), (Gres("gpu", "", 1),))
    there = counted([one])
    assert one.starts_jobs == starts
    assert (there.cpus, there.gpus, there.memory_mb) == ((16, 4, 1000) if starts else (4, 1, 200))
    assert (there.cpus_held, there.gpus_held, there.memory_held_mb) == (4, 1, 200)
    job = Job(1, "j", "u", ("gpu",), "PENDING", "Resources", 1, 1, 1, 1, 0)
    snapshot = Snapshot(NOW_S, "26.05", "test", (job,), (one,), (Partition("gpu", ("n",)),))
    assert Explainer(snapshot).explain(job).fits_on == (("n",) if starts and word != "COMPLETING" else ())


def test_a_node_that_is_coming_up_need_not_answer_yet() -> None:
    for states, starts in (({"MIXED", "POWERING_UP", "NOT_RESPONDING"}, True), ({"MIXED", "NOT_RESPONDING"}, False)):
        node = Node("n", frozenset(states), ("gpu",), 16, 4, 1000, 200, (Gres("gpu", "", 4),), (Gres("gpu", "", 1),))
        assert node.starts_jobs == starts


def test_marks_behind_a_state_are_words() -> None:
    """As the compact forms of Slurm write them."""
    marks = {"IDLE*": False, "IDLE~": True, "IDLE#": True, "IDLE%": False, "IDLE$": False, "MIXED@": True,
             "IDLE^": False, "IDLE!": False, "IDLE-": True}  # fmt: skip
    for word, starts in marks.items():
        assert Node("n", node_states([word]), (), 1, 0, 1, 0).starts_jobs == starts, word


@st.composite
def clusters(draw: st.DrawFn) -> Snapshot:
    """Nodes in any state, and jobs in any state which hold, in the books, exactly what the nodes say."""
    nodes, jobs = [], []
    for number in range(draw(st.integers(1, 6))):
        name, gpus = f"n{number}", draw(st.sampled_from([0, 0, 2, 4]))
        node = Node(
            name, frozenset(draw(st.sets(st.sampled_from(sorted(STATES)), min_size=1, max_size=3))),
            tuple(draw(st.sets(st.sampled_from(["gpu", "all"]), min_size=1))), 16, 0, 64000, 0,
            gres=(Gres("gpu", "", gpus),) if gpus else (), reservation=draw(st.sampled_from(["", "", "r1"])),
            cpu_load=draw(st.sampled_from([None, 0.0, 40.0])),
        )  # fmt: skip
        for _ in range(draw(st.integers(0, 3))):
            state = draw(st.sampled_from(sorted(KEEPS)))
            keeps_cpus, keeps_gpus = KEEPS[state]
            cpus = draw(st.integers(1, 8))
            num_gpus = draw(st.integers(0, gpus))
            used = sum(gres.count for gres in node.gres_used)
            if keeps_cpus * cpus > node.cpus_free or keeps_gpus * num_gpus > gpus - used:
                continue
            jobs.append(
                Job(
                    len(jobs) + 1,
                    "j",
                    "u",
                    (node.partitions[0],),
                    state,
                    "",
                    1,
                    cpus,
                    1,
                    cpus,
                    1000,
                    nodes=(name,),
                    gres_per_node=(Gres("gpu", "", num_gpus),) if num_gpus else (),
                    start_s=NOW_S - 7200,
                    end_s=NOW_S - 3600 if state == "COMPLETING" else None,
                )
            )
            node = replace(
                node,
                cpus_allocated=node.cpus_allocated + keeps_cpus * cpus,
                memory_allocated_mb=node.memory_allocated_mb + 1000 * keeps_gpus,
                gres_used=(Gres("gpu", "", used + keeps_gpus * num_gpus),) if gpus else (),
            )
        nodes.append(node)
    waiting = Job(99, "j", "u", ("gpu", "all"), "PENDING", "Resources", 1, 2, 1, 2, 0)
    names = {name: tuple(node.name for node in nodes if name in node.partitions) for name in ("gpu", "all")}
    partitions = tuple(Partition(name, members) for name, members in names.items())
    return Snapshot(NOW_S, "26.05", "test", (*jobs, waiting), tuple(nodes), partitions)


def metrics_of(snapshot: Snapshot) -> dict[str, float]:
    """What the exporter says; of nodes and partitions by their names."""
    collector = ClusterCollector()
    collector.reading = Reading(observe(snapshot, {}), success_s=NOW_S, read_s=0.1)
    return {
        "/".join([sample.name.removeprefix("hetstream_"), *sample.labels.values()]): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def check_figures(snapshot: Snapshot) -> None:
    """All commands say the same of a snapshot."""
    there = counted(snapshot.nodes)
    assert there.cpus_held <= there.cpus
    assert there.gpus_held <= there.gpus

    frag = frag_report(measure(snapshot.nodes, snapshot.jobs, snapshot.partitions), snapshot).summary
    cpus, gpus = (frag["cpus"], frag["cpus"] - frag["cpus_free"]), (frag["gpus"], frag["gpus"] - frag["gpus_free"])
    assert (cpus, gpus) == ((there.cpus, there.cpus_held), (there.gpus, there.gpus_held))
    assert (frag["memory_mb"], frag["memory_mb"] - frag["memory_free_mb"]) == (there.memory_mb, there.memory_held_mb)

    seen = observe(snapshot, {})
    sample = seen.sample
    assert (sample.cpus, sample.cpus_allocated, sample.gpus, sample.gpus_allocated) == (*cpus, *gpus)
    metrics = metrics_of(snapshot)
    assert (metrics["cluster_cpus"], metrics["cluster_cpus_allocated"]) == cpus
    assert (metrics["cluster_gpus"], metrics["cluster_gpus_allocated"]) == gpus
    for what, (num, held) in (("cpus", cpus), ("gpus", gpus)):
        of_nodes = {name: sum(value for key, value in metrics.items() if key.startswith(f"node_{name}/"))
                    for name in (what, f"{what}_free")}  # fmt: skip
        assert (of_nodes[what], of_nodes[what] - of_nodes[f"{what}_free"]) == (num, held)
    for partition in snapshot.partitions:
        here = counted(node for node in snapshot.nodes if partition.name in node.partitions)
        said = [metrics[f"partition_{what}/{partition.name}"] for what in ("cpus", "cpus_allocated", "gpus")]
        assert said == [here.cpus, here.cpus_held, here.gpus]

    # Jobs: what they hold together is what is held on the nodes, whatever state either is in.
    jobs = jobs_report(list(snapshot.jobs), snapshot, False)
    assert (jobs.summary["cpus_held"], jobs.summary["gpus_held"]) == (there.cpus_held, there.gpus_held)
    rows = [row for row in jobs.sections[0].rows if row["state"] != "PENDING"]
    assert sum(row["cpus"] for row in rows) == there.cpus_held
    assert sample.num_running == jobs.summary["num_running"] == metrics["cluster_running_jobs"]

    # Utilisation of a moment is what is held of what counts; nobody holds more than there is.
    window = Window(snapshot.taken_s, snapshot.taken_s + 1)
    times = {job.job_id: Times(0.0) for job in snapshot.jobs if job.state == "SUSPENDED"}
    usages = [usage for usage in from_queue(snapshot.jobs, times=times, now_s=snapshot.taken_s) if usage.end_s is None]
    util = util_report(usages, window, "user", snapshot, None).summary
    for what, num, held in (("gpu", there.gpus, there.gpus_held), ("cpu", there.cpus, there.cpus_held)):
        share = util[f"{what}_allocated_share"]
        assert (share is None) == (num == 0)
        assert share is None or share == pytest.approx(held / num, abs=1e-3)


@pytest.mark.shows("jobs that complete or are suspended, and drained nodes, count alike everywhere")
@settings(deadline=None)
@given(clusters())
def test_all_commands_count_alike(snapshot: Snapshot) -> None:
    check_figures(snapshot)


def test_a_job_that_completes_has_ended_and_holds_nothing() -> None:
    job = Job(1, "j", "u", ("gpu",), "COMPLETING", "", 1, 4, 1, 4, 1000, nodes=("n",), start_s=0.0, end_s=3600.0)
    (usage,) = from_queue((job,))
    assert usage.end_s == 3600.0
    snapshot = Snapshot(NOW_S, "26.05", "test", (job,), (), ())
    report = jobs_report([job], snapshot, False)
    assert report.lines == ["0 running with 0 CPUs and 0 GPUs, 1 completing, 0 pending"]


def test_what_a_job_that_completes_had_is_what_an_ended_job_had() -> None:
    """All GPUs of its node, in a partition of whole nodes; on others its record is asked for."""
    node = Node("n", frozenset({"IDLE", "COMPLETING"}), ("excl",), 16, 0, 1000, 0, (Gres("gpu", "", 4),))
    for state in ("COMPLETED", "COMPLETING"):
        job = Job(1, "j", "u", ("excl",), state, "", 1, 16, 1, 1, 0, nodes=("n",), start_s=0.0, end_s=60.0)
        (whole,) = with_held_gpus([job], [node], [Partition("excl", ("n",), is_exclusive=True)])
        assert whole.count("gpu") == 4
        assert ended_on_whole_nodes([job], [node]) == {1}


def test_reserved_nodes_are_no_room_for_companions() -> None:
    """They have no reservation, so slurmctld would not start them there."""
    free = Node("f", frozenset({"IDLE"}), ("cpu",), 16, 12, 64000, 0)
    theirs = replace(free, name="r", states=frozenset({"IDLE", "RESERVED"}), reservation="r1", cpus_allocated=0)
    snapshot = Snapshot(NOW_S, "26.05", "test", (), (free, theirs), ())
    assert pool_room_of(snapshot, ("cpu",), {}).num_workers(WorkerSize(4, 0)) == 1


def test_nodes_of_others_are_no_room_for_companions() -> None:
    """By name or number, as Slurm says it, or by label; those of the companions' own user are."""
    free = Node("f", frozenset({"MIXED"}), ("cpu",), 16, 12, 64000, 0)
    nodes = (free, replace(free, owner="eve"), replace(free, owner="1001"), replace(free, mcs_label="red"))
    hers = Job(1, "j", "eve", ("cpu",), "RUNNING", "", 1, 4, 1, 4, 0, uid=1001, mcs_label="red")
    snapshot = Snapshot(NOW_S, "26.05", "test", (hers,), nodes, ())
    assert pool_room_of(snapshot, ("cpu",), {"1": "eve"}).num_workers(WorkerSize(4, 0)) == 4
    assert pool_room_of(snapshot, ("cpu",), {"2": "bob"}).num_workers(WorkerSize(4, 0)) == 1


def test_json_of_a_job_has_the_state_that_squeue_shows() -> None:
    """A list there: the base state first, then the flags. squeue shows a flag where there is one."""
    for words, expected in (
        (["CANCELLED", "COMPLETING"], "COMPLETING"), (["RUNNING", "CONFIGURING"], "CONFIGURING"),
        (["RUNNING"], "RUNNING"), (["RUNNING", "STOPPED"], "STOPPED"),
        (["PENDING", "REQUEUED", "COMPLETING"], "COMPLETING"),
    ):  # fmt: skip
        (job,) = parse_json.parse_jobs(json.dumps({"jobs": [{"job_id": 1, "job_state": words}]}))
        assert job.state == expected


@pytest.mark.parametrize("state", ["SPECIAL_EXIT", "REQUEUE_HOLD", "RESV_DEL_HOLD"])
def test_a_job_that_is_held_for_a_reason_of_its_own_is_pending(state: str) -> None:
    """squeue shows a flag in the place of PENDING. What such a job asks for is nothing that it holds."""
    assert parse_text.allocated_gres(state, "cpu=4,gres/gpu=2") is None
    assert parse_text.requested_gpus(state, "cpu=4,gres/gpu=2") == 2
    job = Job(1, "j", "u", ("gpu",), state, "job requeued in held state", 1, 4, 1, 4, 100, submit_s=NOW_S - 60)
    job = replace(job, start_s=NOW_S + 120)
    snapshot = Snapshot(NOW_S, "26.05", "test", (job,), (), ())
    report = jobs_report([job], snapshot, False)
    assert report.lines == ["0 running with 0 CPUs and 0 GPUs, 1 pending"]
    row = report.sections[0].rows[0]
    assert [row[key] for key in ("state", "cpus", "time_s", "waits_for")] == [state, 4, 60, "held"]
    assert observe(snapshot, {}).sample.waiting.keys() == {"held"}


def test_a_job_that_another_cluster_has_is_no_job_of_this_one() -> None:
    """A sibling of a federation that was revoked neither waits nor runs here; its start is one there."""
    job = Job(1, "j", "u", ("gpu",), "REVOKED", "", 1, 4, 1, 4, 100, submit_s=NOW_S - 60, start_s=NOW_S - 30)
    snapshot = Snapshot(NOW_S, "26.05", "test", (job,), (), ())
    report = jobs_report([job], snapshot, False)
    assert report.lines == ["0 running with 0 CPUs and 0 GPUs, 0 pending, 1 in other clusters of the federation"]
    row = report.sections[0].rows[0]
    assert [row[key] for key in ("cpus", "time_s", "waits_for")] == [0, None, ""]
    (line,) = why_report("1", [job], snapshot).lines
    assert line == (
        "job 1 (j) of u in gpu: REVOKED: another cluster of its federation has it: squeue --federation --jobs=1"
    )
    assert not observe(snapshot, {}).sample.waiting


@pytest.mark.shows("jobs that complete or are suspended, and drained nodes, count alike everywhere")
@pytest.mark.slurm
@pytest.mark.every_release
def test_slurm_decides_what_counts(release: str, devcluster: Any, wait_until: Callable[..., None]) -> None:
    """Jobs that run, are suspended, and complete on a node that does not answer; nodes drained and in maintenance."""
    slurm = CommandSlurm(devcluster.env)

    def submit(*options: str) -> str:
        return slurm.submit("#!/bin/sh\nexec sleep 600\n", ["--output=/dev/null", *options])

    submitted = [
        submit("-p", "gpu", "-w", "gpu0", "-c4", "--gres=gpu:2", "--mem=1000"),
        submit("-p", "gpu", "-w", "gpu1", "-c6", "--gres=gpu:3", "--mem=2000"),
        submit("-p", "cpu", "-w", "cpu0", "-c5", "--mem=1000"),
        submit("-p", "cpu", "-w", "cpu1", "-c7", "--mem=3000"),
    ]
    (slurmd,) = (daemon for daemon in read_daemons(devcluster.state_dir) if daemon.name == "slurmd cpu0")
    try:
        wait_until(lambda: [job.state for job in slurm.snapshot().jobs].count("RUNNING") == 4, 60)
        os.kill(slurmd.pid, signal.SIGSTOP)
        slurm.cancel(submitted[2])
        devcluster.run("scontrol", "suspend", submitted[1])
        devcluster.run("scontrol", "update", "NodeName=gpu0,cpu1", "State=DRAIN", "Reason=test")
        devcluster.run(
            "scontrol", "create", "reservation", "ReservationName=counted", "Nodes=cpu2", "StartTime=now",
             "Duration=60", "Users=root", "Flags=MAINT"
        )  # fmt: skip

        def is_all_there() -> bool:
            seen = slurm.snapshot()
            states = sorted(job.state for job in seen.jobs)
            kept = [node for node in seen.nodes if "MAINTENANCE" in node.states]
            return states == ["COMPLETING", "RUNNING", "RUNNING", "SUSPENDED"] and len(kept) == 1

        wait_until(is_all_there, 90)
        seen = slurm.snapshot()
        check_figures(seen)
        there = counted(seen.nodes)
        # gpu1, cpu3, and cpu0 for as long as Slurm has not noticed; held on the drained ones: 4 and 7 CPUs, 2 GPUs.
        answering = {node.name for node in seen.nodes if node.starts_jobs}
        assert answering in ({"gpu1", "cpu0", "cpu3"}, {"gpu1", "cpu3"})
        assert (there.cpus, there.gpus) == (16 * len(answering) + 4 + 7, 4 + 2)
        # Of the suspended job 3 GPUs; of the one that completes nothing.
        assert (there.cpus_held, there.gpus_held) == (4 + 7, 2 + 3)
        details = slurm.snapshot(details=True)
        assert sorted(job.state for job in details.jobs) == sorted(job.state for job in seen.jobs)
    finally:
        os.kill(slurmd.pid, signal.SIGCONT)
        for job_id in submitted:
            slurm.cancel(job_id)
        devcluster.run("scontrol", "delete", "reservation", "counted")
        devcluster.run("scontrol", "update", "NodeName=gpu0,cpu1", "State=RESUME")
    wait_until(lambda: not slurm.snapshot().jobs and all(node.starts_jobs for node in slurm.snapshot().nodes), 120)
