"""Which nodes a job asks for or excludes: --nodelist, --exclude, --constraint, --contiguous, --switches."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.client.slurm_units import alternatives, for_one_node, meets
from hetstream.slurm_plugin.insight.fragmentation import measure
from hetstream.slurm_plugin.insight.why import Explainer, Explanation
from hetstream.slurm_plugin.packing.jobs import _only_nodes


def node(name: str, cpus_free: int = 16, features: str = "", gpus: int = 0, states: str = "MIXED") -> Node:
    gres = (Gres("gpu", "", gpus),) if gpus else ()
    return Node(
        name, frozenset(states.split("+")), ("p",), 16, 16 - cpus_free, 1000, 0, gres,
        features=tuple(filter(None, features.split(","))),
    )  # fmt: skip


def pending(num_nodes: int = 1, **more: Any) -> Job:
    return replace(Job(7, "j", "u", ("p",), "PENDING", "Priority", num_nodes, num_nodes, 1, 1, 0), **more)


def explain(job: Job, *nodes: Node, **config: str) -> Explanation:
    snapshot = Snapshot(1.0, "24.11", "test", (job,), nodes, (Partition("p", ()),), config)
    found = Explainer(snapshot).explain(job)
    assert Explainer(snapshot).waits_for(job) == found.blockers[0].kind
    return found


def kinds(found: Explanation) -> list[str]:
    return [blocker.kind for blocker in found.blockers]


def test_excluded_nodes_are_no_room_and_their_gpus_are_stranded() -> None:
    job = pending(excluded_nodes=("a", "b"), gres_per_node=(Gres("gpu", "", 1),))
    nodes = (node("a", gpus=4), node("b", gpus=4), node("c", 0, gpus=4))
    found = explain(job, *nodes)
    assert (found.fits_on, kinds(found)) == ((), ["CPUs"])
    assert kinds(explain(job, *nodes[:2])) == ["size"]
    rows = {row.node: (row.stranded_gpus, row.lacking) for row in measure(nodes, [job]).nodes}
    # On nodes that no pending job may use one of 1 GPU and 1 CPU is assumed.
    assert rows == {"a": (0, ""), "b": (0, ""), "c": (4, "CPUs")}
    assert measure(nodes, [job]).assumed == ("a", "b")


def test_a_node_list_that_is_shorter_than_the_number_of_nodes_leaves_the_others_free() -> None:
    job = pending(2, required_nodes=("b",))
    assert kinds(explain(job, node("a"), node("b"), node("c"))) == ["scheduler"]
    found = explain(job, node("a"), node("b", 0), node("c"))
    assert kinds(found) == ["CPUs", "gang"]
    assert found.blockers[0].text.endswith("the most free is 0 (b)")
    assert "2 nodes at once, b among them" in found.blockers[1].text
    found = explain(job, node("a"), node("b", states="DOWN"), node("c"))
    assert kinds(found) == ["nodes"]
    assert "b is out of use" in found.blockers[0].text
    assert kinds(explain(pending(required_nodes=("b",)), node("a"), node("b", 0))) == ["CPUs"]
    # What the others could take is of use to it.
    assert [row.stranded_cpus for row in measure([node("a"), node("b")], [job]).nodes] == [0, 0]


@pytest.mark.parametrize(
    ("expression", "features", "is_met"),
    # Strictly from left to right, as sbatch(1) has it.
    [("a", "a", True), ("a", "ab", False), ("a&b", "a", False), ("a,b", "a,b", True), ("a|b", "b", True),
     ("a&b|c", "c", True), ("a|b&c", "a", False), ("a|b&c", "a,c", True), ("a&(b|c)", "a", False),
     ("a&(b|c)", "a,c", True), ("(a|b)&(c|d)", "b,d", True), ("(a|b)&(c|d)", "b", False),
     ("x&[a|b]", "x,b", True), ("x&[a|b]", "b", False), ("[(a&b)|c]", "a", False), ("[(a&b)|c]", "a,b", True),
     ("rack.1-2=x", "rack.1-2=x", True)],
)  # fmt: skip
def test_an_expression_of_features(expression: str, features: str, is_met: bool) -> None:
    found = [meets(choice, features.split(",")) for choice in alternatives(expression)]
    assert any(found) == is_met
    job = pending(features=expression)
    fits = explain(job, node("n", features=features)).fits_on
    assert fits == (("n",) if is_met else ())
    (row,) = measure([node("n", features=features)], [job]).nodes
    packed: Any = replace(job, priority=0)
    seen = Snapshot(1.0, "24.11", "test", (), (node("n", features=features),), ())
    only = _only_nodes(_Waiting(packed), seen)  # type: ignore[arg-type]
    assert only == ({"n"} if is_met else {"no node"})
    assert row.stranded_cpus == 0


class _Waiting:
    """As much of the packer's job as that looks at."""

    class record:
        placed = evicted = asked = frozenset[str]()
        nodelist = ()

    def __init__(self, job: Job) -> None:
        self.job = job


@given(st.text("ab&|()[]*,1x"), st.sets(st.sampled_from("ab")))
def test_no_expression_of_a_user_is_an_error(expression: str, features: set[str]) -> None:
    for text in (expression, for_one_node(expression)):
        for choice in alternatives(text):
            meets(choice, features)


def test_alternatives_in_brackets_are_for_all_nodes_of_a_job() -> None:
    nodes = (node("a1", features="a"), node("b1", features="b"), node("b2", 0, features="b"))
    found = explain(pending(2, features="[a|b]"), *nodes)
    assert kinds(found) == ["CPUs", "gang"]
    assert "alike in [a|b]" in found.blockers[1].text
    assert kinds(explain(pending(2, features="a|b"), *nodes)) == ["scheduler"]
    assert kinds(explain(pending(3, features="[a|b]"), *nodes)) == ["size"]


def test_what_nodes_are_to_have_together_and_is_not_looked_at_is_said() -> None:
    nodes = (node("a", features="x"), node("b"))
    found = explain(pending(2, features="x*2"), *nodes)
    assert kinds(found) == ["constraints"]
    assert "only Slurm weighs what --constraint=x*2 asks of all" in found.blockers[0].text
    assert explain(pending(1, features="x*1"), *nodes).fits_on == ("a",)
    assert kinds(explain(pending(2, num_switches=1), *nodes, TopologyPlugin="topology/tree")) == ["switches"]
    assert kinds(explain(pending(2, num_switches=1), *nodes, TopologyPlugin="topology/none")) == ["scheduler"]


def test_contiguous_nodes_are_side_by_side_among_all_nodes() -> None:
    job = pending(2, is_contiguous=True)
    assert kinds(explain(job, node("a"), node("b"), node("c", 0))) == ["scheduler"]
    found = explain(job, node("a"), node("b", 0), node("c"))
    assert (found.fits_on, kinds(found)) == (("a", "c"), ["CPUs", "gang"])
    assert "side by side" in found.blockers[1].text
    assert kinds(explain(job, node("a"), node("b", states="DOWN"), node("c"))) == ["nodes"]
    assert kinds(explain(pending(1, is_contiguous=True), node("a"), node("b", 0))) == ["scheduler"]


@pytest.mark.slurm
@pytest.mark.every_release
def test_which_nodes_jobs_ask_for_on_slurm(devcluster: Any, wait_until: Callable[..., None]) -> None:
    """gpu0 is full, and so are cpu1 and cpu3: what Slurm starts has room, and what it keeps waiting has none."""
    slurm = CommandSlurm(devcluster.env)
    submitted: list[str] = []

    def submit(*options: str) -> str:
        words = ["--output=/dev/null", "--mem=1000", "--time=60", *options]
        submitted.append(slurm.submit("#!/bin/sh\nexec sleep 600\n", words))
        return submitted[-1]

    def told(*words: str) -> Any:
        command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", *words, "--json"]
        env = {**os.environ, **devcluster.env}
        return json.loads(subprocess.run(command, env=env, capture_output=True, text=True, timeout=120).stdout)

    def state(job_id: str) -> tuple[str, str]:
        shown = devcluster.run("squeue", "--noheader", f"--jobs={job_id}", "--format=%T %r").split()
        return shown[0], shown[1]

    try:
        for name, feature in (("cpu0", "n-a,n-x"), ("cpu2", "n-b,n-x")):
            devcluster.run("scontrol", "update", f"NodeName={name}", f"AvailableFeatures={feature}")
        for name in ("gpu0", "cpu1", "cpu3"):
            submit("-p", name[:3], "-w", name, "-c16")
        wait_until(lambda: [one.state for one in slurm.snapshot().jobs] == ["RUNNING"] * 3, 60)
        # On the two CPU nodes with room all of these have all they ask for.
        start = ("-N2 -w cpu0", "-N2 -C n-a|n-b", "-N2 -C n-x", "-N1 -x cpu0", "-N1 -C (n-a|n-b)&n-x")
        waits = {
            "-N2 -x cpu0": "CPUs", "-N2 -w cpu1": "CPUs", "-N2 --contiguous": "CPUs", "-N2 -C [n-a|n-b]": "size",
            "-N1 -x cpu[0,2]": "CPUs", "-p gpu --gres=gpu:1 -x gpu1": "CPUs",
        }  # fmt: skip
        running = [submit("-p", "cpu", "-c1", *options.split()) for options in start]
        wait_until(lambda: {state(one)[0] for one in running} == {"RUNNING"}, 60, "the start of what has room")
        pending = {}
        for options in waits:
            with contextlib.suppress(Exception):  # 24.11 and 26.05 refuse what no nodes can meet together
                pending[options] = submit("-p", "cpu", "-c1", *options.split())
        assert set(waits) - set(pending) <= {"-N2 -C [n-a|n-b]"}
        wait_until(lambda: all(state(one)[1] != "None" for one in pending.values()), 60, "Slurm's reasons")
        jobs = {row["job"]: row["waits_for"] for row in told("jobs")["jobs"]}
        for options, job_id in pending.items():
            assert state(job_id)[0] == "PENDING", options
            if state(job_id)[1] in ("Resources", "Priority", "None"):
                assert jobs[job_id] == waits[options], options
        gpu = pending["-p gpu --gres=gpu:1 -x gpu1"]
        assert {one.job_id: one.excluded_nodes for one in slurm.snapshot().jobs}[int(gpu)] == ("gpu1",)
        assert {one.job_id: one.excluded_nodes for one in slurm.snapshot(details=True).jobs}[int(gpu)] == ("gpu1",)
        assert told("why", gpu)["summary"]["jobs"][0]["fits_on"] == []
        assert not [row for row in told("advise")["advice"] if row["job"] == gpu]
        frag = told("frag")
        assert [row["stranded_gpus"] for row in frag["nodes"] if row["node"] == "gpu0"] == [4]
        assert any("assumed" in note and "gpu1" in note for note in frag["notes"])
    finally:
        for job_id in submitted:
            slurm.cancel(job_id)
        for name in ("cpu0", "cpu2"):
            devcluster.run("scontrol", "update", f"NodeName={name}", "AvailableFeatures=", "ActiveFeatures=")
    wait_until(lambda: not slurm.snapshot().jobs, 60)


def test_each_node_of_a_job_with_gpus_has_one_of_them() -> None:
    """Divided unevenly there is room, and it waits for its turn: the nodes without GPUs are no part of that room."""
    job = pending(2, gres_per_job=(Gres("gpu", "", 6),), num_tasks=2)
    nodes = (node("a", gpus=4), node("b", gpus=2), node("c"), node("d"))
    assert explain(job, *nodes).fits_on == ("a", "b")
    assert kinds(explain(replace(job, num_nodes=3), *nodes)) == ["size"]
    shards = pending(2, gres_per_job=(Gres("shard", "", 6),), num_tasks=2)
    assert kinds(explain(shards, *nodes)) == ["size"]


def test_disk_that_a_job_asks_for_is_of_the_node_whoever_uses_it() -> None:
    job = pending(tmp_disk_mb=1000)
    small, large = replace(node("a"), tmp_disk_mb=999), replace(node("b"), tmp_disk_mb=1000)
    assert explain(job, node("n"), small, large).fits_on == ("b",)
    found = explain(job, node("n"), small)
    assert (found.fits_on, kinds(found)) == ((), ["size"])
    assert found.blockers[0].text == (
        "it needs 1 node with 1 CPU, 0 MB, 1,000 MB of disk (--tmp); 0 of 2 that it may use have that at all"
    )
    assert kinds(explain(job, small, replace(large, states=frozenset({"DOWN"})))) == ["nodes"]
