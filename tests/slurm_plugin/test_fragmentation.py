"""Fragmentation: the formulas by hand, then `hetstream frag` on a cluster whose layout is known."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.slurm_plugin.client import parse_json
from hetstream.slurm_plugin.client.model import Gres, Job, Node
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.insight.fragmentation import Fragmentation, NodeFragmentation, measure
from hetstream.slurm_plugin.insight.node_table import alike_jobs, pending_shapes
from tests.devcluster.boot import BootRequest, boot
from tests.devcluster.roots import DEFAULT_CACHE_DIR, HOST, choose_programs
from tests.devcluster.spec import DEFAULT_STATE_ROOT, ClusterShape
from tests.devcluster.teardown import tear_down

FIXTURES = Path(__file__).with_name("fixtures")


def node(name: str, cpus: str, gpus: str = "", memory: str = "0/1000", **more: Any) -> Node:
    """A node from `allocated/total` of each resource."""
    used_cpus, total_cpus = map(int, cpus.split("/"))
    used_mb, total_mb = map(int, memory.split("/"))
    used_gpus, total_gpus = map(int, gpus.split("/")) if gpus else (0, 0)
    return Node(
        name, more.pop("states", frozenset({"MIXED"})), ("gpu",), total_cpus, used_cpus, total_mb, used_mb,
        gres=(Gres("gpu", "", total_gpus),) if gpus else (), gres_used=(Gres("gpu", "", used_gpus),) if gpus else (),
        **more,
    )  # fmt: skip


def pending(cpus: int, gpus: int = 0, memory_mb: int = 0, num_nodes: int = 1, **more: Any) -> Job:
    return Job(
        1, "job", "user", ("gpu",), "PENDING", more.pop("reason", "Resources"), num_nodes, cpus, 1, 1, memory_mb,
        gres_per_node=(Gres("gpu", more.pop("gpu_type", ""), gpus),) if gpus else (), **more,
    )  # fmt: skip


def by_name(found: Fragmentation) -> Mapping[str, NodeFragmentation]:
    return {one.node: one for one in found.nodes}


@pytest.mark.shows("`frag` counts free and stranded resources; totals are those of scontrol")
def test_the_indicator_and_the_two_shares_of_the_paper() -> None:
    found = measure(
        [
            node("cpus-gone", "16/16", "1/4"),
            node("gpus-gone", "4/16", "4/4"),
            node("full", "16/16", "4/4"),
            node("empty", "0/16", "0/4"),
            node("just-a-quarter", "16/16", "3/4"),
            node("no-gpus", "2/8"),
            node("drained", "0/16", "0/4", states=frozenset({"IDLE", "DRAIN"})),
        ],
        [],
    )
    indicator = {name: one.indicator for name, one in by_name(found).items()}
    assert indicator == {
        "cpus-gone": -0.75, "gpus-gone": 0.75, "full": 0, "empty": 0, "just-a-quarter": -0.25, "no-gpus": None,
    }  # fmt: skip
    assert (found.mean_abs_indicator, found.mean_indicator) == (0.35, -0.05)
    assert (found.share_without_cpus, found.share_without_gpus) == (0.2, 0.2)
    assert [one.name for one in found.left_out] == ["drained"]
    assert by_name(found)["empty"].memory_indicator == 0


def test_memory_strands_too() -> None:
    found = measure([node("m", "0/16", "0/4", "900/1000")], [pending(2, 1, 60)])
    one = by_name(found)["m"]
    assert (one.stranded_gpus, one.lacking, one.memory_indicator) == (3, "memory", pytest.approx(-0.9))


@pytest.mark.shows("`frag` counts free and stranded resources; totals are those of scontrol")
@pytest.mark.parametrize(
    ("jobs", "gpus", "cpus", "lacking"),
    [
        # 6 CPUs and 3 GPUs are free.
        ([pending(4, 1)], 2, 2, "CPUs"),
        ([pending(2, 1)], 0, 0, ""),
        ([pending(2, 4)], 3, 6, "GPUs"),
        ([pending(1, 1), pending(6, 0)], 0, 0, ""),
        ([pending(7, 1)], 3, 6, "CPUs"),
        ([pending(8, 2, num_nodes=2)], 1, 2, "GPUs"),
        ([pending(7, 1, reason="Dependency")], 0, 0, ""),
        ([pending(7, 1, reason="JobHeldUser")], 0, 0, ""),
    ],
)
def test_stranded_is_what_no_pending_shape_can_use(jobs: list[Job], gpus: int, cpus: int, lacking: str) -> None:
    one = by_name(measure([node("n", "10/16", "1/4")], jobs))["n"]
    assert (one.stranded_gpus, one.stranded_cpus, one.lacking) == (gpus, cpus, lacking)


@pytest.mark.parametrize(
    ("jobs", "stranded"),
    [
        ([], 0),  # 16 jobs of one CPU fill 32 CPUs
        ([pending(3)], 0),  # each takes two cores
        ([pending(5)], 2),  # each three
    ],
)
def test_copies_of_a_shape_take_whole_cores_of_two_threads(jobs: list[Job], stranded: int) -> None:
    threads = node("n", "0/32", cpus_per_core=2, layout=(2, 8, 2))
    assert by_name(measure([threads], jobs))["n"].stranded_cpus == stranded


def test_a_shape_counts_where_it_may_run() -> None:
    typed = Node("t", frozenset({"IDLE"}), ("gpu",), 16, 0, 1000, 0, (Gres("gpu", "h200", 2), Gres("gpu", "a100", 2)))
    elsewhere = replace(pending(1, 1), partitions=("cpu",))
    for cannot in (pending(99, 1), pending(1, 3, gpu_type="h200"), elsewhere):
        found = measure([typed], [cannot])
        assert (found.assumed, by_name(found)["t"].stranded_gpus) == (("t",), 0)
    found = measure([typed], [pending(1, 2, gpu_type="h200")])
    assert (found.assumed, by_name(found)["t"].stranded_gpus) == ((), 2)
    # Both types have somebody who can use them.
    both = measure([typed], [pending(1, 2, gpu_type="h200"), pending(1, 1, gpu_type="a100")])
    assert by_name(both)["t"].stranded_gpus == 0


@pytest.mark.shows("`frag` counts free and stranded resources; totals are those of scontrol")
def test_gpus_in_shards_are_not_free_and_drained_ones_do_not_exist() -> None:
    gres = (Gres("gpu", "h200", 4), Gres("shard", "h200", 16))
    used = (Gres("gpu", "h200", 1, (1,)), Gres("shard", "h200", 3, (0,)))
    shared = Node("s", frozenset({"MIXED"}), ("gpu",), 16, 2, 1000, 0, gres, used)
    assert (shared.gpus, shared.gpus_free(), shared.gpus_free("h200")) == (4, 2, 2)
    broken = Node("b", frozenset({"MIXED"}), ("gpu",), 16, 2, 1000, 0, gres, (), (Gres("gpu", "h200", 1),))
    assert (broken.gpus, broken.gpus_free()) == (3, 3)


def test_pending_array_tasks_count_one_by_one() -> None:
    shapes = pending_shapes(alike_jobs([pending(2, 1, array_job_id=5, array_tasks="3-5,9%2"), pending(1)]))
    assert [(shape.gpus, shape.num_jobs) for shape in shapes] == [(1, 4), (0, 1)]


@pytest.mark.shows("`frag` counts free and stranded resources; totals are those of scontrol")
@pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])
def test_totals_of_the_recorded_clusters(version: str) -> None:
    name = "sinfo.json" if version == "22.05" else "scontrol_show_node.json"
    nodes = parse_json.parse_nodes((FIXTURES / version / name).read_text())
    found = measure(nodes, parse_json.parse_jobs((FIXTURES / version / "squeue.json").read_text()))
    assert (found.total("gpus"), found.total("gpus_free"), len(found.gpu_nodes)) == (16, 13, 4)
    assert found.total("cpus") == sum(one.cpus for one in nodes)
    assert found.total("cpus_free") == found.total("cpus") - 8
    assert by_name(found)["g1"].indicator == pytest.approx(1 - 4 / by_name(found)["g1"].cpus - 0.5)


sizes = st.integers(0, 64)


@settings(deadline=None)
@given(st.lists(st.tuples(sizes, sizes, sizes, sizes, st.integers(1, 64), st.integers(0, 8)), min_size=1, max_size=20))
def test_nothing_is_more_than_what_is_free(rows: list[tuple[int, int, int, int, int, int]]) -> None:
    nodes, jobs = [], []
    for number, (cpus, used_cpus, gpus, used_gpus, job_cpus, job_gpus) in enumerate(rows):
        nodes.append(node(f"n{number}", f"{min(cpus, used_cpus)}/{cpus}", f"{min(gpus, used_gpus)}/{gpus}"))
        jobs.append(pending(job_cpus, job_gpus))
    for one in measure(nodes, jobs).nodes:
        assert 0 <= one.stranded_gpus <= one.gpus_free <= one.gpus
        assert 0 <= one.stranded_cpus <= one.cpus_free <= one.cpus
        assert one.indicator is None or -1 <= one.indicator <= 1


def run(env: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", *words]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


@pytest.mark.shows("JSON, table and CSV are made from the same rows; hostlist compression round-trips")
@pytest.mark.shows("`frag` counts free and stranded resources; totals are those of scontrol")
@pytest.mark.slurm
@pytest.mark.every_release
def test_a_known_layout_gives_the_table_made_by_hand(devcluster: Any, wait_until: Callable[..., None]) -> None:
    """Nodes: 2 with 16 CPUs, 4 GPUs and 64,000 MB, 4 with 16 CPUs. Four jobs, one of them pending, one node drained."""
    slurm = CommandSlurm(devcluster.env)

    def submit(*options: str) -> str:
        return slurm.submit("#!/bin/sh\nsleep 600\n", ["--output=/dev/null", *options])

    submitted = [
        submit("-p", "gpu", "-w", "gpu0", "-c16", "--gres=gpu:1", "--mem=16000"),
        submit("-p", "gpu", "-w", "gpu1", "-c4", "--gres=gpu:4", "--mem=48000"),
        submit("-p", "cpu", "-w", "cpu0", "-c8", "--mem=32000"),
        submit("-p", "gpu", "-c4", "--gres=gpu:1", "--mem=1000"),
    ]
    devcluster.run("scontrol", "update", "NodeName=cpu3", "State=DRAIN", "Reason=new disk")
    try:
        wait_until(lambda: [job.state for job in slurm.snapshot().jobs].count("RUNNING") == 3, 60)
        document = json.loads(run(devcluster.env, "frag", "--json").stdout)
        #         free CPUs   free GPUs   free memory    CPU-GPU        memory-GPU     stranded GPUs, CPUs
        by_hand = {
            "gpu0": (0, 3, 48000, 0 / 16 - 3 / 4, 48 / 64 - 3 / 4, 3, 0, "CPUs"),
            "gpu1": (12, 0, 16000, 12 / 16 - 0 / 4, 16 / 64 - 0 / 4, 0, 12, "GPUs"),
            "cpu0": (8, 0, 32000, None, None, 0, 0, ""),
            "cpu1": (16, 0, 64000, None, None, 0, 0, ""),
            "cpu2": (16, 0, 64000, None, None, 0, 0, ""),
        }
        keys = ("cpus_free", "gpus_free", "memory_free_mb", "indicator", "memory_indicator", "stranded_gpus",
                "stranded_cpus", "lacking")  # fmt: skip
        assert {row["node"]: tuple(row[key] for key in keys) for row in document["nodes"]} == by_hand
        assert document["nodes"][0]["node"] == "gpu0"
        summary = document["summary"]
        assert (summary["cpus_free"], summary["cpus"], summary["gpus_free"], summary["gpus"]) == (52, 80, 3, 8)
        assert (summary["mean_abs_indicator"], summary["mean_indicator"]) == (0.75, 0)
        assert summary["share_all_cpus_taken_gpus_free"] == summary["share_all_gpus_taken_cpus_free"] == 0.5
        assert document["left_out"] == [{"node": "cpu3", "state": "idle+drain", "reason": "new disk"}]
        assert document["shapes"][0] | {"num_jobs": 1} == document["shapes"][0]
        assert document["meta"]["version"] == 1
        rows = list(csv.DictReader(io.StringIO(run(devcluster.env, "frag", "--csv").stdout)))
        assert [(row["node"], row["indicator"]) for row in rows[:3]] == [
            ("gpu0", "-0.75"),
            ("gpu1", "0.75"),
            ("cpu0", ""),
        ]
        table = run(devcluster.env, "frag").stdout
        assert [line.split()[0] for line in table.splitlines()[6:10]] == ["gpu0", "gpu1", "cpu0", "cpu[1-2]"]
        assert "50 % no GPU left for their CPUs" in " ".join(table.split())
        assert "\x1b" not in table
        only = json.loads(run(devcluster.env, "frag", "--json", "-w", "cpu[0-1]").stdout)
        assert (only["summary"]["num_nodes"], only["summary"]["mean_indicator"]) == (2, None)
    finally:
        devcluster.run("scontrol", "update", "NodeName=cpu3", "State=RESUME")
        for job_id in submitted:
            slurm.cancel(job_id)
    wait_until(lambda: not slurm.snapshot().jobs, 60)


@pytest.mark.shows("`frag` counts free and stranded resources; totals are those of scontrol")
@pytest.mark.slurm
@pytest.mark.slow
def test_64_nodes_are_one_short_answer() -> None:
    """The answer takes less than 1 s on an idle machine; here its CPU time must."""
    name = f"pytest-{os.getpid()}-64"
    directory = DEFAULT_STATE_ROOT / name
    programs = choose_programs(HOST, DEFAULT_CACHE_DIR, print)
    record = boot(BootRequest(name, directory, ClusterShape(32, 8, 32, 64)), programs, print)
    try:
        before = os.times()
        done = run(record.environment(os.environ), "frag")
        after = os.times()
        assert done.returncode == 0, done.stderr
        assert "on 64 nodes" in done.stdout
        assert "gpu[0-31]" in done.stdout
        used = after.children_user + after.children_system - before.children_user - before.children_system
        print(f"CPU {used:.3f} s, wall {after.elapsed - before.elapsed:.3f} s")
        assert used < 1.0
    finally:
        tear_down(directory)
