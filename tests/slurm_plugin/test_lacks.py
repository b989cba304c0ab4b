"""LACKS: more of what would let a waiting job onto the stranded GPUs; against trying it with every job and node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.base.text import count_words
from hetstream.hetjob.convert.spec import DEFAULT_TRAINER_CPUS_PER_GPU
from hetstream.slurm_plugin.cli.report import report_report
from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.insight.advise import advise
from hetstream.slurm_plugin.insight.fragmentation import NodeFragmentation, measure
from hetstream.slurm_plugin.insight.observation import observe
from hetstream.slurm_plugin.render.page import page

MUCH = 10**6


@dataclass(frozen=True)
class Free:
    """What is left of a node."""

    cpus: int
    gpus: int
    memory_mb: int


def asked(job: Job) -> tuple[int, int, int]:
    return job.num_cpus, job.count("gpu"), job.memory_mb


def can_start(job: Job, free: Free) -> bool:
    cpus, gpus, memory_mb = asked(job)
    return cpus <= free.cpus and gpus <= free.gpus and memory_mb <= free.memory_mb


def left_of(node: Node, jobs: list[Job]) -> Free:
    """What is left when copies of that job are placed which uses most GPUs, and leaves most CPUs and memory."""
    free = Free(node.cpus_free, node.gpus_free(), node.memory_free_mb)
    best = (0, 0, 0)
    found = free
    for job in jobs:
        left, num = free, 0
        cpus, gpus, memory_mb = asked(job)
        while can_start(job, left):
            left = Free(left.cpus - cpus, left.gpus - gpus, left.memory_mb - memory_mb)
            num += 1
        if (num * gpus, left.cpus, left.memory_mb) > (best if best[0] else (0, MUCH, MUCH)):
            best, found = (num * gpus, left.cpus, left.memory_mb), left
    return found


def would_help(node: Node, jobs: list[Job]) -> list[str]:
    """More of which resource, of that alone, lets a waiting job start on what is left of a node."""
    left = left_of(node, jobs)
    tries = {
        "CPUs": replace(left, cpus=MUCH), "memory": replace(left, memory_mb=MUCH), "GPUs": replace(left, gpus=MUCH),
        "CPUs and memory": replace(left, cpus=MUCH, memory_mb=MUCH),
    }  # fmt: skip
    return [what for what, more in tries.items() if any(can_start(job, more) for job in jobs)]


def would_unlock(node: Node, row: NodeFragmentation, jobs: list[Job], snapshot: Snapshot) -> int:
    """How many stranded GPUs would be of use if the node's job gave back the CPUs that its trainer need not have."""
    gpus = node.gpus - node.gpus_free()
    freed = node.cpus_allocated - DEFAULT_TRAINER_CPUS_PER_GPU * gpus
    if row.lacking != "CPUs" or not row.stranded_gpus or not gpus or freed <= 0:
        return 0
    (lighter,) = measure([replace(node, cpus_allocated=node.cpus_allocated - freed)], jobs, snapshot.partitions).nodes
    return max(0, row.stranded_gpus - lighter.stranded_gpus)


sizes = st.tuples(st.integers(1, 16), st.integers(1, 4), st.sampled_from([100, 300, 500, 900]))
nodes_used = st.tuples(st.integers(0, 16), st.integers(0, 4), st.sampled_from([0, 200, 600, 1000]))


@pytest.mark.shows("LACKS is what would let a waiting job onto the stranded GPUs")
@settings(deadline=None)
@given(st.lists(nodes_used, min_size=1, max_size=4), st.lists(st.tuples(sizes, st.integers(1, 12)), max_size=6))
def test_lacks_is_what_lets_a_waiting_job_start(
    used: list[tuple[int, int, int]], wanted: list[tuple[tuple[int, int, int], int]]
) -> None:
    nodes = [
        Node(f"n{number}", frozenset({"MIXED"}), ("gpu",), 16, cpus, 1000, memory_mb,
             (Gres("gpu", "", 4),), (Gres("gpu", "", gpus),))
        for number, (cpus, gpus, memory_mb) in enumerate(used)
    ]  # fmt: skip
    jobs = [
        Job(1, "j", "u", ("gpu",), "PENDING", "Resources", 1, cpus, 1, 1, memory_mb,
            gres_per_node=(Gres("gpu", "", gpus),))
        for (cpus, gpus, memory_mb), count in wanted
        for _ in range(count)
    ]  # fmt: skip
    # Each node's own job has all that is in use there.
    holders = [
        replace(pending(node.cpus_allocated, node.gpus - node.gpus_free(), job_id=100 + number),
                state="RUNNING", reason="", start_s=0.0, nodes=(node.name,))
        for number, node in enumerate(nodes) if node.cpus_allocated
    ]  # fmt: skip
    snapshot = Snapshot(1.0, "24.11", "test", (*jobs, *holders), tuple(nodes), (Partition("gpu", ()),))
    seen = observe(snapshot, {})
    shown, text = {row.node: row.lacking for row in seen.fragmentation.nodes}, page(seen, [seen.sample])
    advised = {one.job: one.gpus_unlocked for one in advise(snapshot, {}) if one.basis == "shape"}
    for row in measure(nodes, jobs, snapshot.partitions).nodes:
        number = next(place for place, node in enumerate(nodes) if node.name == row.node)
        node = nodes[number]
        assert shown[row.node] == row.lacking
        wanted = f" for want of {row.lacking}" if row.lacking else ""
        assert f"{node.name}: {node.cpus_free} of 16 CPUs and {node.gpus_free()} of 4 GPUs free, " in text
        assert f", {count_words(row.stranded_gpus, 'GPU')} stranded{wanted}" in text
        assert advised.get(str(100 + number), 0) == would_unlock(node, row, jobs, snapshot)
        if not row.stranded_gpus:
            continue
        # Without a waiting job, one of a GPU and a CPU is assumed.
        waiting = jobs or [pending(1, 1, 0)]
        if any(can_start(job, left_of(node, waiting)) for job in waiting):
            assert row.lacking == "", "a job has room beside those of the shape that uses most"
        else:
            # Where nothing helps alone, nor CPUs and memory together: no job has enough of the GPUs that are left.
            assert row.lacking == (*would_help(node, waiting), "GPUs")[0]


def pending(cpus: int, gpus: int, memory_mb: int = 100, job_id: int = 1, **more: Any) -> Job:
    gres = (Gres("gpu", more.pop("gpu_type", ""), gpus),)
    return Job(job_id, "j", "u", more.pop("partitions", ("gpu",)), "PENDING", "Resources", 1, cpus, 1, 1, memory_mb,
               gres_per_node=gres, **more)  # fmt: skip


def node(cpus: str = "12/16", gpus: str = "2/4", memory: str = "0/1000", **more: Any) -> Node:
    """A node from `allocated/total` of each resource."""
    used_cpus, all_cpus = map(int, cpus.split("/"))
    used_gpus, all_gpus = map(int, gpus.split("/"))
    used_mb, all_mb = map(int, memory.split("/"))
    had, held = (Gres("gpu", "", all_gpus),), (Gres("gpu", "", used_gpus),)
    had, held = more.pop("gres", had), more.pop("gres_used", held)
    return Node("n", frozenset({"MIXED"}), ("gpu", "excl"), all_cpus, used_cpus, all_mb, used_mb, had, held)


MANY_LARGE = [pending(cpus, 4, job_id=number) for number, cpus in enumerate((14, 14, 14, 14, 15, 15, 15, 9, 11))]


@pytest.mark.parametrize(
    ("seen", "jobs", "lacking"),
    [
        # Nine larger jobs wait besides: it is CPUs that keep the last one from the two free GPUs.
        (node(), [*MANY_LARGE, pending(6, 2)], "CPUs"),
        (node(), MANY_LARGE, "GPUs"),
        (node(memory="950/1000"), [*MANY_LARGE, pending(4, 2, 100)], "memory"),
        (node(memory="950/1000"), [*MANY_LARGE, pending(6, 2, 100)], "CPUs and memory"),
        # More CPUs would let one of them start, and more memory the other: CPUs are what data workers give.
        (node(memory="800/1000"), [pending(4, 1, 300), pending(6, 1, 100)], "CPUs"),
        # A job that fits takes one of two; the next copy lacks CPUs, and not what stands in the way of others.
        (node(), [*MANY_LARGE, pending(3, 1)], "CPUs"),
        # Of the type that is left nobody wants more than there is.
        (node(gres=(Gres("gpu", "a", 2), Gres("gpu", "b", 2)), gres_used=()),
         [pending(6, 2, gpu_type="a"), pending(2, 2, gpu_type="b")], "CPUs"),
        # Who gets whole nodes waits for one, whatever is free.
        (node(), [pending(2, 2, partitions=("excl",))], "whole nodes"),
        (node("0/16", "4/4"), [pending(4, 1)], "GPUs"),  # stranded CPUs
        (node("0/16", "4/4", memory="1000/1000"), [pending(4, 1, 100)], "GPUs"),  # and no memory, either
        # Who asks for another node, or for a feature that this one has not, does not wait for this one.
        (node(), [pending(6, 2, required_nodes=("m",)), pending(6, 2, features="fast"), pending(2, 4)], "GPUs"),
        (node(), [pending(6, 2, required_nodes=("n",)), pending(2, 4)], "CPUs"),
        (node("16/16", "0/4"), [], "CPUs"),  # a job of a GPU and a CPU is assumed
    ],
)  # fmt: skip
def test_lacks_by_hand(seen: Node, jobs: list[Job], lacking: str) -> None:
    (row,) = measure([seen], jobs, [Partition("gpu", ("n",)), Partition("excl", ("n",), is_exclusive=True)]).nodes
    assert row.lacking == lacking


@pytest.mark.shows("LACKS is what would let a waiting job onto the stranded GPUs")
def test_advise_and_the_page_say_the_same() -> None:
    """The running job that holds 12 CPUs for 2 GPUs is advised for the sake of the one that waits for CPUs alone."""
    holder = replace(pending(12, 2, job_id=99), state="RUNNING", nodes=("n",), reason="", start_s=0.0)
    snapshot = Snapshot(
        1.0, "24.11", "test", (holder, *MANY_LARGE, pending(6, 2, job_id=11)), (node(),), (Partition("gpu", ("n",)),)
    )
    (row,) = measure(snapshot.nodes, snapshot.jobs, snapshot.partitions).nodes
    assert (row.stranded_gpus, row.lacking) == (2, "CPUs")
    shape = next(advice for advice in advise(snapshot, {}) if advice.basis == "shape")
    assert (shape.job, shape.gpus_unlocked) == ("99", 2)
    seen = observe(snapshot, {})
    text = page(seen, [seen.sample])
    sentence = report_report(seen, ()).lines[0]
    assert f"<h1>{sentence}</h1>" in text, "the command begins with the page's sentence"
    assert "2 GPUs stranded for want of CPUs" in text
    assert '<td data-label="Lacks"><span>CPUs</span></td>' in text.split("Worst nodes")[1].split("</table>")[0]


@pytest.mark.shows("LACKS is what would let a waiting job onto the stranded GPUs")
@pytest.mark.slurm
@pytest.mark.every_release
def test_more_of_what_lacks_lets_a_job_start_on_slurm(devcluster: Any, wait_until: Callable[..., None]) -> None:
    """The job of 12 CPUs gives back 8 of them, as LACKS says, and Slurm starts the waiting job of 2 GPUs and 6 CPUs."""
    slurm = CommandSlurm(devcluster.env)

    def submit(*options: str) -> str:
        return slurm.submit("#!/bin/sh\nexec sleep 600\n", ["--output=/dev/null", "-p", "gpu", "--time=30", *options])

    def state_of(job_id: str) -> str:
        return next(job.state for job in slurm.snapshot().jobs if str(job.job_id) == job_id)

    def told() -> dict[str, Any]:
        command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", "frag", "--json"]
        done = subprocess.run(
            command, env={**os.environ, **devcluster.env}, capture_output=True, text=True, timeout=120
        )
        row: dict[str, Any] = next(row for row in json.loads(done.stdout)["nodes"] if row["node"] == "gpu0")
        return row

    large = submit("-w", "gpu1", "--gres=gpu:4", "-c16", "--mem=1000")
    holder = submit("-w", "gpu0", "--gres=gpu:2", "-c12", "--mem=1000")
    submitted = [large, holder]
    try:
        wait_until(lambda: [job.state for job in slurm.snapshot().jobs] == ["RUNNING"] * 2, 60)
        submitted += [submit("--gres=gpu:4", f"-c{cpus}", "--mem=1000") for cpus in (14, 14, 15, 9)]
        small = submit("-w", "gpu0", "--gres=gpu:2", "-c6", "--mem=1000", "--time=10")
        submitted.append(small)
        assert (told()["stranded_gpus"], told()["lacking"]) == (2, "CPUs")
        for job_id in submitted[2:-1]:
            slurm.cancel(job_id)  # that they are ahead is another matter
        assert state_of(small) == "PENDING"
        slurm.cancel(holder)
        submitted.append(submit("-w", "gpu0", "--gres=gpu:2", "-c4", "--mem=1000"))
        wait_until(lambda: state_of(small) == "RUNNING", 60)
    finally:
        for job_id in submitted:
            slurm.cancel(job_id)
    wait_until(lambda: not slurm.snapshot().jobs, 60)
