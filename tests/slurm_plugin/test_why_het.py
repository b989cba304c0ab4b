"""`hetstream why` of a heterogeneous job: the true reason first, once, in four lines; and what `jobs` says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from hetstream.slurm_plugin.cli.cluster import jobs_report as jobs_report
from hetstream.slurm_plugin.cli.why import report_of
from hetstream.slurm_plugin.client.model import Gres, HetComponent, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.insight.why import Explainer
from hetstream.slurm_plugin.render.tables import as_json, as_table

NOW_S = 1e6


def node(name: str, cpus_free: int, gpus_free: int = 0) -> Node:
    """A node of 16 CPUs; of partition gpu it has 4 GPUs."""
    gpus = 4 if name.startswith("g") else 0
    return Node(
        name, frozenset({"MIXED"}), ("gpu",) if gpus else ("cpu",), 16, 16 - cpus_free, 1000, 0,
        gres=(Gres("gpu", "", gpus),) if gpus else (), gres_used=(Gres("gpu", "", gpus - gpus_free),) if gpus else (),
    )  # fmt: skip


def part(offset: int, cpus: int, gpus: int = 0, reason: str = "Resources", **more: Any) -> Job:
    gres = (Gres("gpu", "", gpus),) if gpus else ()
    job = Job(70 + offset, "train", "ann", ("gpu" if gpus else "cpu",), "PENDING", reason, 1, cpus, 1, cpus, 10,
              gres_per_node=gres, het=HetComponent(70, offset), submit_s=NOW_S - 60)  # fmt: skip
    return replace(job, **more)


def told(parts: list[Job], *nodes: Node, others: tuple[Job, ...] = ()) -> tuple[list[str], list[tuple[str, str]]]:
    """The lines that are shown, and the reasons in JSON."""
    partitions = (Partition("gpu", ()), Partition("cpu", ()))
    snapshot = Snapshot(NOW_S, "24.11", "test", (*reversed(parts), *others), nodes, partitions)
    report = report_of("70", list(reversed(parts)), snapshot)
    blockers = json.loads(as_json(report))["blockers"]
    return as_table(report, color=False), [(blocker["job"], blocker["kind"]) for blocker in blockers]


ROOMY = node("g0", 16, 4), node("c0", 16)


@pytest.mark.shows("`why` of a heterogeneous job has its reason first and once: four lines for two components")
@pytest.mark.parametrize(
    ("parts", "nodes", "reasons"),
    [
        ([part(0, 2, 2), part(1, 4)], (node("g0", 16, 1), node("c0", 16)), [("70+0", "GPUs")]),
        ([part(0, 8, 1), part(1, 4)], (node("g0", 2, 4), node("c0", 16)), [("70+0", "CPUs")]),
        # Component 0 has room, and Slurm says Resources of it.
        ([part(0, 2, 1), part(1, 12, reason="None")], (node("g0", 16, 4), node("c0", 6)), [("70+1", "CPUs")]),
        ([part(0, 2, 2), part(1, 12)], (node("g0", 16, 1), node("c0", 6)), [("70+0", "GPUs"), ("70+1", "CPUs")]),
        # What somebody must do or end comes before what is not free; said of both, it is told once.
        ([part(0, 2, 4, "Dependency", dependency="afterok:5"), part(1, 4, reason="Dependency", dependency="afterok:5")],
         (node("g0", 16, 0), node("c0", 16)), [("70+0", "dependency")]),
        ([part(0, 2, 1, "JobHeldUser"), part(1, 4, reason="JobHeldUser")], ROOMY, [("70+0", "held")]),
        ([part(0, 2, 1, "BeginTime"), part(1, 4, reason="BeginTime")], ROOMY, [("70+0", "time")]),
        ([part(0, 2, 4), part(1, 4, reason="QOSMaxCpuPerUserLimit")],
         (node("g0", 16, 1), node("c0", 16)), [("70+1", "limit"), ("70+0", "GPUs")]),
        # What can never start comes before all.
        ([part(0, 2, 4), part(1, 64, reason="PartitionConfig")],
         (node("g0", 16, 1), node("c0", 16)), [("70+1", "size"), ("70+1", "limit"), ("70+0", "GPUs")]),
        ([part(0, 2, 1), part(1, 4, reason="Priority")], ROOMY, [("70+0", "scheduler")]),
        # Each has room, and all at once have not: 10 and 10 of 16 CPUs.
        ([part(0, 10), part(1, 10)], (*ROOMY, node("c1", 2)), [("70+1", "CPUs")]),
        ([part(0, 10), part(1, 10)], (node("c0", 16), node("c1", 10)), [("70+0", "scheduler")]),
        ([part(0, 1, 3), part(1, 1, 3), part(2, 1)], (*ROOMY, node("g1", 16, 2)), [("70+1", "GPUs")]),
        # Each could run on empty nodes, and all together never.
        ([part(0, 1, 3), part(1, 1, 3), part(2, 1)], ROOMY, [("70+1", "size")]),
        ([part(0, 1, 3), part(1, 1, 3)], (node("g0", 16, 0), node("c0", 16)), [("70+1", "size"), ("70+0", "GPUs")]),
        ([part(0, 10), part(1, 10)], ROOMY, [("70+1", "size")]),
        ([part(0, 1, exclusive="NODE"), part(1, 1)], ROOMY, [("70+1", "size")]),
        ([part(0, 1, all_memory=True), part(1, 1)], ROOMY, [("70+1", "size")]),
        ([part(0, 1, exclusive="NODE"), part(1, 1)], (node("c0", 16), node("c1", 0)), [("70+1", "CPUs")]),
    ],
)  # fmt: skip
def test_the_true_reason_comes_first_and_once(
    parts: list[Job], nodes: tuple[Node, ...], reasons: list[tuple[str, str]]
) -> None:
    lines, found = told(parts, *nodes)
    assert found == reasons
    assert len(lines) == 2 + len(parts), "four of a job with two components"
    assert lines[0].startswith("job 70 (train) of ann: PENDING (")
    assert lines[1].startswith(f"waits for {reasons[0][1]} (job {reasons[0][0]}): ")
    assert [line.split()[1] for line in lines[2:]] == [part.label for part in parts]
    assert lines[-1].endswith("; all components start together, and only when the backfill scheduler has a turn")


def test_who_is_ahead_and_what_to_do_are_in_the_line_of_the_reason() -> None:
    ahead = Job(5, "j", "bob", ("gpu",), "PENDING", "Resources", 1, 16, 1, 16, 0, priority=9, start_s=NOW_S + 600)
    parts = [part(0, 2, 1, "Priority", start_s=NOW_S + 1200), part(1, 4)]
    lines, found = told(parts, *ROOMY, others=(ahead,))
    assert found == [("70+0", "backfill")]
    assert lines[0].endswith("PENDING (Priority, Resources), for 00:01:00, planned by Slurm to start in 00:20:00")
    assert (
        "on nodes that Slurm does not tell, and this job has no time limit; next: with a limit of 00:07:00 it"
        in lines[1]
    )
    assert lines[1].endswith("it could go first: scontrol update JobId=70 TimeLimit=7")
    # All start together: where another component is in the way of a plan, a shorter limit of one helps nobody.
    other = Job(6, "j", "bob", ("cpu",), "PENDING", "Resources", 1, 16, 1, 16, 0, priority=9, start_s=NOW_S + 600)
    lines, found = told(parts, *ROOMY, others=(ahead, other))
    assert found == [("70+0", "backfill")]
    assert lines[1].endswith("next: squeue --start")


def test_jobs_and_histories_say_that_a_component_waits_for_another() -> None:
    parts = (part(0, 2, 1), part(1, 12))
    snapshot = Snapshot(NOW_S, "24.11", "t", parts, (node("g0", 16, 4), node("c0", 6)), (Partition("gpu", ()),))
    snapshot = replace(snapshot, partitions=(Partition("gpu", ()), Partition("cpu", ())))
    explainer = Explainer(snapshot)
    assert [explainer.waits_for(job) for job in parts] == ["component", "CPUs"]
    assert explainer.causes_of([parts[0]]) == [("component",)]
    assert [row["waits_for"] for row in jobs_report(list(parts), snapshot, False).sections[0].rows] == [
        "component", "CPUs",
    ]  # fmt: skip
    assert explainer.explain(parts[0]).blockers[0].kind == "component"


def run(env: Mapping[str, str], *words: str) -> str:
    command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", *words]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.shows("`why` of a heterogeneous job has its reason first and once: four lines for two components")
@pytest.mark.slurm
@pytest.mark.every_release
def test_why_a_heterogeneous_job_waits_on_slurm(devcluster: Any, wait_until: Callable[..., None]) -> None:
    """2 GPU nodes with 1 GPU and 2 CPUs free, 4 CPU nodes of which one has 6 CPUs free and the others none."""
    slurm = CommandSlurm(devcluster.env)
    submitted: list[str] = []

    def submit(*options: str) -> str:
        words = ["--output=/dev/null", "--mem=1000", "--time=60", *options]
        submitted.append(slurm.submit("#!/bin/sh\nexec sleep 600\n", words))
        return submitted[-1]

    try:
        first = submit("-p", "gpu", "-w", "gpu0", "-c14", "--gres=gpu:3")
        submit("-p", "gpu", "-w", "gpu1", "-c14", "--gres=gpu:3")
        for number in range(4):
            submit("-p", "cpu", "-w", f"cpu{number}", "-c10" if number == 3 else "-c16")
        wait_until(lambda: [job.state for job in slurm.snapshot().jobs] == ["RUNNING"] * 6, 60)
        workers = (":", "-p", "cpu", "--mem=100")
        trainer = ("-p", "gpu", "--gres=gpu:1", "-c1")
        jobs = {
            submit("-p", "gpu", "--gres=gpu:2", "-c1", *workers, "-c2"): ("+0", "GPUs"),
            submit("-p", "gpu", "--gres=gpu:1", "-c4", *workers, "-c2"): ("+0", "CPUs"),
            submit(*trainer, *workers, "-c12"): ("+1", "CPUs"),
            submit("-p", "cpu", "-c4", *workers, "-c4"): ("+1", "CPUs"),  # not both at once
            # Never: 9 GPUs of 8, and 5 nodes of 4.
            submit("-p", "gpu", "--gpus=5", "-c1", ":", "-p", "gpu", "--mem=100", "--gpus=4"): ("+1", "size"),
            submit("-p", "cpu", "-N3", "--exclusive", *workers, "-N2"): ("+1", "size"),
            submit("-d", f"afterany:{first}", *trainer, *workers, "-c2"): ("+0", "dependency"),
            submit("-H", *trainer, *workers, "-c2"): ("+0", "held"),
            submit("--begin=now+1hour", *trainer, *workers, "-c2"): ("+0", "time"),
        }
        wait_until(lambda: all(job.reason not in ("", "None") for job in slurm.snapshot().jobs if job.is_pending), 90)
        for job_id, (component, kind) in jobs.items():
            lines = run(devcluster.env, "why", job_id).splitlines()
            assert len(lines) == 4, lines
            assert lines[1].startswith(f"waits for {kind} (job {job_id}{component}): "), lines
            assert (f"job {job_id}+0 in" in lines[2], f"job {job_id}+1 in" in lines[3]) == (True, True)
        limited = submit(*trainer, *workers, "-c2")
        devcluster.run("scontrol", "update", "PartitionName=cpu", "MaxTime=30")
        try:
            wait_until(
                lambda: "waits for time limit" in run(devcluster.env, "why", limited), 90, "the partition's limit"
            )
            lines = run(devcluster.env, "why", limited).splitlines()
            assert (len(lines), lines[1].split("(")[1].split(")")[0]) == (4, f"job {limited}+1")
        finally:
            devcluster.run("scontrol", "update", "PartitionName=cpu", "MaxTime=UNLIMITED")
    finally:
        for job_id in submitted:
            slurm.cancel(job_id)
    wait_until(lambda: not slurm.snapshot().jobs, 60)
