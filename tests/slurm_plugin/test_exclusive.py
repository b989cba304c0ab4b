"""Pending jobs that want whole nodes: what each release says of them, and what `why`, `jobs` and `frag` make of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hetstream.slurm_plugin.cli.cluster import frag_report
from hetstream.slurm_plugin.client import parse_json, parse_text
from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.client.parse_text import exclusive_of, parse_exclusive
from hetstream.slurm_plugin.client.read import with_closed_partitions, with_labels
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.insight.fragmentation import measure
from hetstream.slurm_plugin.insight.observation import observe
from hetstream.slurm_plugin.insight.why import Explainer


@pytest.mark.shows("a job that waits for whole nodes (`--exclusive`) is said to")
@pytest.mark.parametrize(
    ("squeue", "json_22_05", "json_24_11", "exclusive"),
    # Recorded: of --exclusive, of nothing, of --exclusive=user and of --oversubscribe.
    [("NO", "none", ["none"], "NODE"), ("OK", None, [], ""), ("USER", "user", ["user"], "USER"),
     ("YES", "shared", ["oversubscribe"], ""), ("N/A", "", None, ""), ("TOPO", "topo", ["topo"], "TOPO")],
)  # fmt: skip
def test_words_of_a_release(squeue: str, json_22_05: str | None, json_24_11: list[str] | None, exclusive: str) -> None:
    assert exclusive_of(squeue) == exclusive
    for shared in (json_22_05, json_24_11):
        row = {"job_id": 1, "job_state": "PENDING", "shared": shared}
        (job,) = parse_json.parse_jobs(json.dumps({"jobs": [row]}))
        assert job.exclusive == exclusive


def test_what_26_05_says_and_what_users_write_into_names() -> None:
    text = (
        "JobId=2 JobName=wrap Partition=cpu OverSubscribe=NO Exclusive=NODE Contiguous=0\n"
        "JobId=3 JobName=wrap Partition=cpu OverSubscribe=NO Exclusive=NO Contiguous=0\n"
        "JobId=4 JobName=a Exclusive=NODE b Partition=cpu OverSubscribe=NO Exclusive=NO Contiguous=0\n"
        "JobId=5 JobName=x OverSubscribe=NO Exclusive=USER Contiguous=0\n"
        "JobId=5 JobName=forged Exclusive=NODE\n"
    )
    assert parse_exclusive(text) == {2: "NODE", 3: "", 4: "", 5: ""}


def node(name: str, cpus: int, jobs: int = 0) -> Node:
    held = (Gres("gpu", "", jobs),)
    return Node(name, frozenset({"MIXED"}), ("gpu",), 16, cpus, 1000, 0, (Gres("gpu", "", 4),), held)


def job(job_id: int, state: str = "PENDING", user: str = "ann", **more: Any) -> Job:
    made = Job(job_id, "j", user, ("gpu",), state, "Resources" if state == "PENDING" else "", 1, 2, 1, 2, 0)
    return replace(made, **more)


def test_whoever_wants_whole_nodes_has_room_on_idle_ones_alone() -> None:
    nodes = (node("idle", 0), node("busy", 1), node("mine", 2), node("theirs", 2))
    running = (
        job(1, "RUNNING", nodes=("busy",), num_cpus=1, user="bob"),
        job(2, "RUNNING", nodes=("mine",)),
        job(3, "RUNNING", nodes=("theirs",), user="bob"),
        job(4, "COMPLETING", nodes=("idle",), user="bob"),
    )
    waiting = {word: job(10 + place, exclusive=word) for place, word in enumerate(("", "NODE", "USER"))}
    seven = job(20, exclusive="NODE", num_nodes=7, num_cpus=7)
    snapshot = Snapshot(1.0, "22.05", "t", (*running, *waiting.values(), seven), nodes, (Partition("gpu", ()),))
    explainer = Explainer(snapshot)
    fits = {word: explainer.explain(one).fits_on for word, one in waiting.items()}
    assert fits == {"": ("idle", "busy", "mine", "theirs"), "NODE": ("idle",), "USER": ("mine",)}
    two = replace(waiting["NODE"], num_nodes=2)
    blockers = Explainer(replace(snapshot, jobs=(*running, two))).explain(two).blockers
    assert [blocker.kind for blocker in blockers] == ["whole nodes", "gang"]
    assert blockers[0].text == "it gets whole nodes (--exclusive), 2 of them: of 4 1 are idle"
    assert explainer.waits_for(seven) == "size", "there are four nodes"


def test_stranded_gpus_that_wait_for_jobs_with_whole_nodes_lack_a_whole_node() -> None:
    wanted = job(9, exclusive="NODE", gres_per_node=(Gres("gpu", "", 2),))
    (row,) = measure([node("busy", 4, 1)], [wanted]).nodes
    assert (row.stranded_gpus, row.lacking) == (3, "whole nodes")
    (row,) = measure([node("idle", 0)], [wanted]).nodes
    assert (row.stranded_gpus, row.lacking) == (0, "")


@pytest.mark.shows("a job that waits for whole nodes (`--exclusive`) is said to")
@pytest.mark.slurm
@pytest.mark.every_release
def test_why_of_exclusive_jobs_on_slurm(devcluster: Any, wait_until: Callable[..., None]) -> None:
    """One CPU of each of the four CPU nodes is in use; the cluster has four."""
    slurm = CommandSlurm(devcluster.env)
    submitted: list[str] = []

    def submit(*options: str) -> str:
        words = ["--output=/dev/null", "--mem=1000", "--time=60", "-p", "cpu", *options]
        submitted.append(slurm.submit("#!/bin/sh\nexec sleep 600\n", words))
        return submitted[-1]

    def told(*words: str) -> str:
        command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", *words]
        env = {**os.environ, **devcluster.env}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120).stdout

    try:
        for number in range(4):
            submit("-w", f"cpu{number}", "-c1")
        wait_until(lambda: [one.state for one in slurm.snapshot().jobs] == ["RUNNING"] * 4, 60)
        exclusive, usual = submit("-N2", "--exclusive"), submit("-c16", "--begin=now+1hour")
        wait_until(lambda: "(Resources)" in told("why", exclusive), 60, "Slurm's reason")
        text = told("why", exclusive)
        assert "room now  on no node" in text
        assert "it gets whole nodes (--exclusive), 2 of them: of 4 0 are idle" in text
        assert "the next scheduling cycle starts it" not in text
        found = {str(one.job_id): one.exclusive for one in slurm.snapshot().jobs}
        assert (found[exclusive], found[usual], found[submitted[0]]) == ("NODE", "", "")
        rows = {row["job"]: row["waits_for"] for row in json.loads(told("jobs", "--json"))["jobs"]}
        assert (rows[exclusive], rows[usual]) == ("whole nodes", "time")
    finally:
        for job_id in submitted:
            slurm.cancel(job_id)
    wait_until(lambda: not slurm.snapshot().jobs, 60)


def owned(name: str, owner: str = "", label: str = "", cpus_used: int = 4) -> Node:
    return Node(name, frozenset({"MIXED"}), ("gpu",), 16, cpus_used, 1000, 0, owner=owner, mcs_label=label)


def test_nodes_of_one_user_are_room_for_that_user_alone() -> None:
    """By number or name, as Slurm says it; jobs that ask alike are of different users."""
    nodes = (owned("named", "bob"), owned("numbered", "1002"), owned("free"))
    hers, his = job(1, uid=1001, user="alice"), job(2, uid=1002, user="bob")
    snapshot = Snapshot(1.0, "22.05", "t", (hers, his), nodes, (Partition("gpu", ()),))
    explainer = Explainer(snapshot)
    fits = {one.user: explainer.explain(one).fits_on for one in (hers, his)}
    assert fits == {"alice": ("free",), "bob": ("named", "numbered", "free")}
    kept = Explainer(replace(snapshot, nodes=nodes[:2]))
    assert kept.explain(hers).blockers[0].text == (
        "jobs of another user share named,numbered with no others (--exclusive=user, ExclusiveUser=YES)"
    )
    assert kept.causes_of([hers, his])[0] == ("other users",)
    assert kept.causes_of([hers, his])[1] != ("other users",)
    # More CPUs elsewhere would do as well, and are named first.
    full = replace(snapshot, nodes=(nodes[0], owned("full", cpus_used=16)))
    assert [blocker.kind for blocker in Explainer(full).explain(hers).blockers] == ["CPUs", "other users"]


def test_nodes_of_one_label_are_room_for_who_shares_with_that_label_alone() -> None:
    nodes = (owned("red", label="red"), owned("plain"), owned("idle", cpus_used=0))
    asked = {
        "": job(1),
        "has it, and does not ask": job(2, mcs_label="red"),
        "red": job(3, mcs_label="red", exclusive="MCS"),
        "blue": job(4, mcs_label="blue", exclusive="MCS"),
        "no plugin": job(5, exclusive="MCS"),
    }
    explainer = Explainer(Snapshot(1.0, "22.05", "t", tuple(asked.values()), nodes, (Partition("gpu", ()),)))
    assert {how: explainer.explain(one).fits_on for how, one in asked.items()} == {
        "": ("plain", "idle"), "has it, and does not ask": ("plain", "idle"), "red": ("red", "idle"),
        "blue": ("idle",), "no plugin": ("plain", "idle"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "exclusive"),
    [("(null)", ["", "MCS", "USER", ""]), ("ondemandselect:a|b", ["", "MCS", "USER", ""]),
     ("enforced,select,privatedata:a|b", ["MCS", "MCS", "USER", ""]), ("noselect", ["", "", "USER", ""])],
)  # fmt: skip
def test_which_jobs_share_with_their_label_alone_is_as_the_site_says(parameters: str, exclusive: list[str]) -> None:
    jobs = (job(1, mcs_label="a"), job(2, mcs_label="a", exclusive="MCS"), job(3, mcs_label="a", exclusive="USER"))
    found = with_labels((*jobs, job(4)), {"MCSParameters": parameters})
    assert [one.exclusive for one in found] == exclusive


def test_who_has_a_node_and_its_label_are_read() -> None:
    record = (
        "NodeName=n CPUAlloc=1 CPUTot=4 Gres=(null) RealMemory=10 AllocMem=0 State=MIXED "
        "Owner={} MCS_label={} Partitions=p LastBusyTime=1795000000"
    )
    (node,) = parse_text.parse_nodes(record.format("alice(1001)", "red"))
    assert (node.owner, node.mcs_label, node.last_busy_s) == ("1001", "red", 1795000000.0)
    (node,) = parse_text.parse_nodes(record.format("N/A", "N/A"))
    assert (node.owner, node.mcs_label) == ("", "")
    row = {"name": "n", "state": ["MIXED"], "cpus": 4, "alloc_cpus": 1, "real_memory": 10, "alloc_memory": 0}
    row |= {"owner": "alice", "mcs_label": "red", "last_busy": {"set": True, "number": 1795000000}}
    (node,) = parse_json.parse_nodes(json.dumps({"nodes": [row]}))
    assert (node.owner, node.mcs_label, node.last_busy_s) == ("alice", "red", 1795000000.0)


def test_nodes_whose_partitions_start_no_jobs_are_no_room() -> None:
    nodes = [replace(owned(name), partitions=names) for name, names in (("a", ("up", "down")), ("b", ("down",)),
             ("c", ()), ("d", ("down", "hidden")))]  # fmt: skip
    found = with_closed_partitions(nodes, (Partition("up", ()), Partition("down", (), is_up=False)))
    assert [node.name for node in found if node.is_usable] == ["a", "c", "d"]
    assert found[1].state == "mixed+partition_down"


def gpu_node(name: str, gpus_used: int, owner: str = "", label: str = "") -> Node:
    return replace(node(name, 4, gpus_used), owner=owner, mcs_label=label)


def test_gpus_beside_jobs_of_another_owner_are_stranded_unless_the_owner_waits() -> None:
    """frag counts as why does: by name, by number, by label, and for who wants no others beside him."""
    seen = [gpu_node("bobs", 1, "bob"), gpu_node("red", 2, label="red"), gpu_node("free", 4)]
    hers = job(1, uid=1001, user="alice", gres_per_node=(Gres("gpu", "", 1),))
    his = replace(hers, job_id=2, uid=1002, user="bob")
    red = replace(hers, job_id=3, mcs_label="red", exclusive="MCS")

    def stranded(*jobs: Job, nodes: list[Node] = seen) -> dict[str, tuple[int, str]]:
        found = measure(nodes, jobs)
        assert sum(shape.num_jobs for shape in found.shapes) == len(jobs)
        assert found.total("gpus_free") == sum(node.gpus_free() for node in nodes)
        return {row.node: (row.stranded_gpus, row.lacking) for row in found.nodes if row.stranded_gpus}

    bobs, reds = {"bobs": (3, "other users")}, {"red": (2, "other users")}
    assert stranded(hers) == {**bobs, **reds}
    assert stranded(hers, his) == reds
    assert stranded(hers, red) == bobs
    assert stranded(hers, his, red) == stranded() == {}
    numbered = [replace(seen[0], owner="1002"), *seen[1:]]
    assert stranded(hers, nodes=numbered) == {**bobs, **reds}
    assert stranded(hers, his, nodes=numbered) == reds
    # One that lacks GPUs says so: of that somebody may have more.
    large = replace(his, gres_per_node=(Gres("gpu", "", 4),))
    assert stranded(hers, large) == {"bobs": (3, "GPUs"), **reds}
    # alice wants nodes alone: where bob runs, there is no room for her.
    alone = replace(hers, exclusive="USER")
    running = job(9, state="RUNNING", user="bob", uid=1002, nodes=("mixed",))
    assert stranded(alone, nodes=[gpu_node("mixed", 3)]) == {}
    assert measure([gpu_node("mixed", 3)], [alone, running]).nodes[0].lacking == "other users"


def test_frag_and_the_page_say_what_is_for_one_user_alone() -> None:
    nodes = (gpu_node("bobs", 1, "bob"), gpu_node("free", 4))
    hers = job(1, uid=1001, user="alice", gres_per_node=(Gres("gpu", "", 1),), submit_s=0.5)
    snapshot = Snapshot(1.0, "22.05", "t", (hers,), nodes, (Partition("gpu", ()),))
    report = frag_report(measure(nodes, snapshot.jobs), snapshot)
    assert "3 free GPUs and 12 free CPUs of bobs are for jobs of one user or MCS label alone" in report.notes
    assert "whose" not in report.sections[1].rows[0]
    seen = observe(snapshot, {})
    assert (seen.sample.stranded_gpus, seen.waiting[0].cause) == (3, "other users")
