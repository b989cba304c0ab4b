"""Thousands of shapes on thousands of nodes: the quick way is right, against the plain one, and it is quick."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.slurm_plugin.cli.cluster import MOST_SHAPES, frag_report
from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Reservation, Snapshot
from hetstream.slurm_plugin.client.slurm_units import parse_gres
from hetstream.slurm_plugin.insight.fragmentation import measure
from hetstream.slurm_plugin.insight.node_table import Shape, shape_of
from hetstream.slurm_plugin.insight.observation import observe
from hetstream.slurm_plugin.insight.why import Explainer
from hetstream.slurm_plugin.render.tables import as_json, as_table

NOW_S = 1_000_000.0


def plain_use(node: Node, shapes: Sequence[Shape], unit: str) -> int | None:
    """The most units that copies of one shape can take, shape by shape; None where none may run."""
    best = None
    for shape in shapes:
        if shape.cpus > node.cpus or shape.memory_mb > node.memory_mb or shape.gpus > node.gpus:
            continue
        rooms = [node.cpus_free // shape.cpus] if shape.cpus else []
        rooms += [node.gpus_free() // shape.gpus] if shape.gpus else []
        rooms += [node.memory_free_mb // shape.memory_mb] if shape.memory_mb else []
        best = max(best or 0, min(rooms, default=0) * getattr(shape, unit))
    return best


sizes = st.integers(0, 16)
nodes_drawn = st.lists(st.tuples(sizes, sizes, st.integers(0, 4), st.integers(0, 4), sizes, sizes), max_size=6)
jobs_drawn = st.lists(
    st.tuples(st.integers(1, 16), st.integers(0, 4), st.integers(0, 16), st.integers(1, 3), st.integers(0, 3)),
    min_size=1, max_size=12,
)  # fmt: skip


def made_node(number: int, row: tuple[int, ...]) -> Node:
    cpus, cpus_used, gpus, gpus_used, memory, memory_used = row
    return Node(
        f"n{number}", frozenset({"MIXED"}), ("gpu",), cpus, min(cpus, cpus_used), memory, min(memory, memory_used),
        (Gres("gpu", "", gpus),) if gpus else (), (Gres("gpu", "", min(gpus, gpus_used)),) if gpus else (),
    )  # fmt: skip


def made_job(number: int, row: tuple[int, ...]) -> Job:
    cpus, gpus, memory, num_nodes, priority = row
    return Job(
        number, "job", "alice", ("gpu",), "PENDING", "Priority", num_nodes, cpus * num_nodes, 1, cpus,
        memory * num_nodes, gres_per_node=(Gres("gpu", "", gpus),) if gpus else (), priority=priority,
        submit_s=NOW_S - number,
    )  # fmt: skip


@given(nodes_drawn, jobs_drawn)
@settings(max_examples=150, deadline=None)
def test_it_agrees_with_looking_at_each_node_and_shape(
    node_rows: list[tuple[int, ...]], job_rows: list[tuple[int, ...]]
) -> None:
    nodes = tuple(made_node(number, row) for number, row in enumerate(node_rows))
    jobs = tuple(made_job(number, row) for number, row in enumerate(job_rows, 1))
    shapes = [shape_of(job) for job in jobs]
    by_name = {one.node: one for one in measure(nodes, jobs).nodes}
    for node in nodes:
        of_gpus = plain_use(node, [shape for shape in shapes if shape.gpus], "gpus")
        if of_gpus is not None:
            assert by_name[node.name].stranded_gpus == node.gpus_free() - of_gpus
        of_cpus = plain_use(node, shapes, "cpus")
        if of_cpus is not None:
            assert by_name[node.name].stranded_cpus == node.cpus_free - of_cpus

    # What is counted is what is explained.
    snapshot = Snapshot(NOW_S, "22.05.8", "test", jobs, nodes, (Partition("gpu", ()),))
    seen = observe(snapshot, {})
    explainer = Explainer(snapshot)
    for one in seen.waiting:
        kinds = [blocker.kind for blocker in explainer.explain(one.job).blockers]
        assert kinds[0] in one.cause.split(" or ")
        assert explainer.waits_for(one.job) == kinds[0]
    assert [one.job.job_id for one in seen.waiting] == sorted(range(1, len(jobs) + 1), reverse=True)
    assert sum(one.cpus for one in seen.sample.waiting.values()) == sum(job.num_cpus for job in jobs)
    assert sum(one.gpus for one in seen.sample.waiting.values()) == sum(job.count("gpu") for job in jobs)


def large_cluster(num_nodes: int, num_jobs: int, num_shapes: int) -> Snapshot:
    """Nodes unlike each other, and jobs of so many shapes."""
    draw = random.Random(1)
    nodes = tuple(
        Node(
            f"n{number}", frozenset({"MIXED"}), ("gpu",) if number % 2 else ("cpu",), 128, draw.randrange(129),
            1_000_000, draw.randrange(1_000_000), parse_gres("gpu:h100:8") if number % 2 else (),
            parse_gres(f"gpu:h100:{draw.randrange(1, 9)}") if number % 2 else (), cpu_load=3.0,
        )
        for number in range(num_nodes)
    )  # fmt: skip
    shapes = [
        (draw.choice((1, 2, 4, 8, 16, 24, 32, 48, 64)), draw.choice((0, 1, 2, 4, 8)), 1000 + number)
        for number in range(num_shapes)
    ]
    jobs = tuple(
        Job(
            number + 1, "train", f"user{number % 300}", ("gpu",) if shapes[number % num_shapes][1] else ("cpu",),
            "PENDING", "Priority", 1, shapes[number % num_shapes][0], 1, 1, shapes[number % num_shapes][2],
            gres_per_node=parse_gres(f"gpu:{shapes[number % num_shapes][1]}") if shapes[number % num_shapes][1] else (),
            submit_s=draw.random() * 1e5, priority=draw.randrange(1_000_000), time_limit_s=3600.0 * (1 + number % 5),
        )
        for number in range(num_jobs)
    )  # fmt: skip
    return Snapshot(2e5, "24.05", "test", jobs, nodes, (Partition("gpu", ()), Partition("cpu", ())))


def test_frag_shows_the_most_frequent_shapes_and_says_how_many_there_are() -> None:
    snapshot = large_cluster(20, 500, 100)
    found = measure(snapshot.nodes, snapshot.jobs, snapshot.partitions)
    report = frag_report(found, snapshot)
    lines = as_table(report, color=False)
    num_shapes = len(found.shapes)
    assert num_shapes > 2 * MOST_SHAPES
    begin = lines.index("What pending jobs ask of a node")
    assert lines[begin + 2 + MOST_SHAPES] == f"and {num_shapes - MOST_SHAPES} more, all of them with --json"
    assert len(json.loads(as_json(report))["shapes"]) == num_shapes
    few = large_cluster(20, 50, 10)
    assert " more, all of them" not in "\n".join(
        as_table(frag_report(measure(few.nodes, few.jobs, few.partitions), few), color=False)
    )


@pytest.mark.parametrize("is_reserved", [False, True])
def test_five_thousand_shapes_cost_no_more_than_a_second_of_a_core(is_reserved: bool) -> None:
    """22 s of CPU were seen where each node was asked for each shape; see benchmarks/slurm_parse.py for the figure.

    Also with most nodes reserved for later, before some of the jobs would have ended.
    """
    snapshot = large_cluster(5_000, 20_000, 5_000)
    if is_reserved:
        names = tuple(node.name for node in snapshot.nodes[:4_000])
        coming = tuple(Reservation(f"r{hour}", names, 2e5 + 3600.0 * hour + 60, 9e9) for hour in range(1, 5))
        snapshot = replace(snapshot, reservations=coming)
    before_s = time.process_time()
    seen = observe(snapshot, {})
    assert time.process_time() - before_s < 3.0  # a machine that does much else counts too
    assert len(seen.fragmentation.shapes) == 5_000
    assert len(seen.waiting) == 20_000
