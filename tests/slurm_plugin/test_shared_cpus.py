"""Partitions whose jobs are given the same CPUs (OverSubscribe=FORCE:N, YES:N): no more is held than there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.slurm_plugin.cli.cluster import jobs_report as jobs_report
from hetstream.slurm_plugin.client.accounting import Usage
from hetstream.slurm_plugin.client.counted import held_by
from hetstream.slurm_plugin.client.model import Gres, Job, Node, NodeShare, Partition, Reservation, Snapshot
from hetstream.slurm_plugin.client.parse_text import parse_partitions
from hetstream.slurm_plugin.client.read import knows_held_cpus, spread_in_question, with_shared_cpus, with_shares
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.insight import utilisation
from hetstream.slurm_plugin.insight.utilisation import Window, together

SHARED = (Partition("p", ("n", "m"), jobs_per_cpu=2),)


def running(job_id: int, cpus: int, *nodes: str, state: str = "RUNNING") -> Job:
    return Job(job_id, "j", "u", ("p",), state, "", len(nodes), cpus, 1, 1, 0, nodes=nodes)


def usage(cpus: int, start_s: float, end_s: float | None, partition: str = "p", **more: Any) -> Usage:
    return replace(Usage("1", "j", "u", "", partition, cpus, 0, start_s, end_s), **more)


@pytest.mark.parametrize(
    ("written", "number"), [("FORCE:2", 2), ("YES:4", 4), ("NO", 1), ("EXCLUSIVE", 1), ("FORCE:1", 1)]
)
def test_what_scontrol_shows_of_a_partition(written: str, number: int) -> None:
    (found,) = parse_partitions(f"PartitionName=p Nodes=n State=UP OverSubscribe={written} Default=NO\n")
    assert (found.jobs_per_cpu, found.is_exclusive) == (number, written == "EXCLUSIVE")


def test_what_jobs_hold_together_is_what_their_node_says() -> None:
    """Seen on 22.05, 24.11 and 26.05: jobs of 10, 10 and 4 CPUs have 14 of a node of 16."""
    nodes = [
        Node("n", frozenset({"MIXED"}), ("p",), 16, 14, 1, 0),
        Node("m", frozenset({"MIXED"}), ("p",), 16, 8, 1, 0),
    ]
    jobs = [running(1, 10, "n"), running(2, 10, "n"), running(3, 8, "n", "m"), running(4, 4, "m"),
            running(5, 9, "n", state="SUSPENDED")]  # fmt: skip
    found = with_shared_cpus(jobs, nodes, SHARED)
    assert sum(held_by(job).cpus for job in found) == pytest.approx(14 + 8)
    assert held_by(found[3]).cpus == 4, "on its node no CPU is given twice"
    assert with_shared_cpus(jobs, nodes, [Partition("p", ())]) == tuple(jobs)


def test_each_job_has_one_number_whoever_looks() -> None:
    """Of jobs that share CPUs, and where the jobs or nodes of others are hidden: what Slurm allocated, and no guess."""
    nodes = (Node("n", frozenset({"MIXED"}), ("p",), 16, 14, 1, 0),)
    jobs = with_shared_cpus([running(1, 10, "n"), running(2, 10, "n")], nodes, SHARED)
    all_of_it = Snapshot(1.0, "22.05", "t", jobs, nodes, SHARED)
    mine = replace(all_of_it, jobs=(running(1, 10, "n"),), hidden="PrivateData=jobs")
    blind = replace(all_of_it, jobs=(running(1, 10, "n"),), nodes=(), hidden="PrivateData=nodes", without_nodes=True)
    told = [jobs_report(list(seen.jobs), seen, details=False) for seen in (all_of_it, mine, blind)]
    assert [[row["cpus"] for row in report.sections[0].rows] for report in told] == [[10, 10], [10], [10]]
    assert [report.summary["cpus_allocated"] for report in told] == [20, 10, 10]
    assert [report.summary["cpus_held"] for report in told] == [14, None, None]
    assert [report.lines[0].partition(" and ")[0] for report in told] == [
        "2 running with 20 CPUs (14 in use on their nodes)", "1 running with 10 CPUs", "1 running with 10 CPUs",
    ]  # fmt: skip
    parts = replace(blind, partitions=(), config={"SelectTypeParameters": "CR_CPU_MEMORY"})
    assert not knows_held_cpus(parts)
    assert knows_held_cpus(replace(parts, without_nodes=False))
    assert knows_held_cpus(replace(parts, config={"SelectTypeParameters": "CR_CORE_MEMORY"}))


def on(job: Job, *cpus: int) -> Job:
    """The job, with as many CPUs on each of its nodes."""
    return replace(job, shares=tuple(NodeShare(name, num, 0, ()) for name, num in zip(job.nodes, cpus, strict=True)))


def test_cpus_that_nobody_shares_count_as_they_are_though_a_job_has_them_unevenly() -> None:
    """34 CPUs on three nodes of 16, as 16, 16 and 2, in a partition that shares none, and beside one that does."""
    nodes = [Node(name, frozenset({"MIXED"}), ("p",), 16, num, 1, 0) for name, num in (("a", 16), ("b", 16), ("c", 2))]
    plain = running(1, 34, "a", "b", "c")
    (found,) = with_shared_cpus([plain], nodes, [*SHARED, Partition("q", ("z",), jobs_per_cpu=4)])
    assert held_by(found).cpus == 34, "no other job is there, whatever its own spread is"
    beside = [plain, running(2, 4, "c")]
    nodes[2] = replace(nodes[2], cpus_allocated=6, partitions=("q",))
    assert [held_by(job).cpus for job in with_shared_cpus(beside, nodes, SHARED)] == [34, 4], "q shares none"
    nodes[2] = replace(nodes[2], cpus_allocated=6, partitions=("p",))
    assert [held_by(job).cpus for job in with_shared_cpus([on(plain, 16, 16, 2), beside[1]], nodes, SHARED)] == [34, 4]


@given(st.data())
def test_whatever_the_spread_jobs_hold_what_their_nodes_say(data: st.DataObject) -> None:
    """Together jobs have the CPUs that are in use, and who is alone on all of its nodes has all that it was given."""
    names = "abcd"
    spreads = data.draw(st.lists(st.dictionaries(st.sampled_from(names), st.integers(1, 16), min_size=1), max_size=6))
    jobs = [on(running(place, sum(one.values()), *one), *one.values()) for place, one in enumerate(spreads)]
    given_cpus = {name: [one[name] for one in spreads if name in one] for name in names}
    in_use = {
        name: data.draw(st.integers(max(num), min(16, sum(num)))) if num else 0 for name, num in given_cpus.items()
    }
    nodes = [Node(name, frozenset({"MIXED"}), ("p",), 16, in_use[name], 1, 0) for name in names]
    found = with_shared_cpus(jobs, nodes, SHARED)
    assert sum(held_by(job).cpus for job in found) == pytest.approx(sum(in_use.values()))
    for job in found:
        if all(len(given_cpus[name]) == 1 for name in job.nodes):
            assert held_by(job).cpus == job.num_cpus


def test_what_a_job_has_on_each_node_by_its_record() -> None:
    """Of `scontrol --details --oneliner show job`; what a user may have written beside it is in doubt."""
    job = running(7, 34, "a0", "a1", "b")
    groups = "Nodes=a[0-1] CPU_IDs=0-15 Mem=100 GRES=gpu:2(IDX:0-1)  Nodes=b CPU_IDs=0,3 Mem=50 GRES= "
    record = f"JobId=7 JobName=j NumNodes=3 NumCPUs=34 JOB_GRES=gpu:4   {groups} MinCPUsNode=1"
    (found,) = with_shares([job], {7}, record)
    assert list(found.cpus_on_nodes()) == [("a0", 16), ("a1", 16), ("b", 2)]
    assert found.shares[1] == NodeShare("a1", 16, 100, (Gres("gpu", "", 2, (0, 1)),))
    # Where cores count as CPUs, both threads of each are shown.
    (found,) = with_shares([replace(job, num_cpus=17)], {7}, record)
    assert list(found.cpus_on_nodes()) == [("a0", 8), ("a1", 8), ("b", 1)]
    cut = f"CPU_IDs={','.join(map(str, range(0, 100, 2)))}"[:135]
    for doubtful in (
        record.replace("JobName=j", "JobName=x Nodes=a0 CPU_IDs=0 Mem=1 GRES="),
        record.replace("Nodes=b ", "Nodes=c "),
        record.replace("CPU_IDs=0,3", "CPU_IDs=0,x"),
        record.replace("CPU_IDs=0,3", cut),
        f"{record}\n{record}",
        "",
    ):
        (found,) = with_shares([job], {7}, doubtful)
        assert list(found.cpus_on_nodes()) == [(name, 34 / 3) for name in job.nodes]
    assert with_shares([job], set(), record) == (job,)


def test_of_which_jobs_the_spread_is_asked() -> None:
    nodes = [Node(name, frozenset({"MIXED"}), (of,), 16, 9, 1, 0) for name, of in (("n", "p"), ("m", "q"), ("o", "q"))]
    wide = replace(running(1, 9, "m", "o"), partitions=("q",))
    cases = [
        (wide, {}, (), False),
        (replace(wide, nodes=("n", "m")), {}, (), True),  # one of its nodes shares CPUs
        (replace(wide, nodes=("n",)), {}, (), False),  # of one node it has all there
        (replace(wide, nodes=("n", "m"), num_cpus=2), {}, (), False),  # one on each
        (replace(on(wide, 4, 5), nodes=("n", "m")), {}, (), False),  # known
        (wide, {"max_cpus_per_node": 8}, (), True),
        (replace(wide, reservation="r"), {}, (Reservation("r", (), 0, 9, True, cpus=(("m", 4),)),), True),
        (replace(wide, reservation="r"), {}, (Reservation("r", ("m", "o"), 0, 9, True),), False),
    ]
    for job, limits, reservations, is_asked in cases:
        partitions = (*SHARED, Partition("q", ("m", "o"), **limits))
        assert spread_in_question([job], nodes, partitions, reservations) == ({1} if is_asked else set()), (job, limits)


def test_hours_of_shared_cpus_count_once() -> None:
    """16 CPUs: two jobs of 16 side by side for an hour, then one of them alone for another."""
    window = Window(0, 7200)
    pair = [usage(16, 0, 3600), usage(16, -900, None), usage(64, 0, 3600, "other")]
    found = utilisation.with_shared_cpus(pair, window, {"p": 16})
    assert [one.cpu_share for one in found] == [0.5, 0.75, 1.0]
    assert together(found[:2], window).cpu_hours == pytest.approx(32)
    assert utilisation.with_shared_cpus(pair, window, {}) == pair
    # What was used of it is what the processes used.
    (measured,) = utilisation.with_shared_cpus([usage(16, 0, 3600, cpu_used_s=8 * 3600.0)], window, {"p": 8})
    sums = together([measured], window)
    assert (sums.cpu_hours, sums.cpu_hours_used) == (8, 8)


def test_jobs_that_take_turns_hold_their_cpus_once() -> None:
    """Gang scheduling: two jobs of 16 CPUs on 16, each suspended for half of the time; a third is suspended now."""
    window = Window(0, 7200)
    turns = [usage(16, 0, 7200, elapsed_s=3600.0, suspended_s=3600.0) for _ in range(2)]
    assert together(utilisation.with_shared_cpus(turns, window, {"p": 16}), window).cpu_hours == pytest.approx(32)
    stopped = usage(16, 0, None, elapsed_s=3600.0, suspended_s=3600.0, is_suspended=True)
    pair = utilisation.with_shared_cpus([stopped, usage(16, 3600, None)], window, {"p": 16})
    assert [one.cpu_share for one in pair] == [1, 1]
    assert together(pair, window).cpu_hours == pytest.approx(32)


@given(st.lists(st.tuples(st.integers(1, 32), st.integers(-50, 120), st.integers(1, 100), st.booleans()), max_size=12))
def test_never_more_hours_than_there_are(runs: list[tuple[int, int, int, bool]]) -> None:
    window = Window(0, 100)
    usages = [usage(cpus, start_s, None if is_on else start_s + length_s) for cpus, start_s, length_s, is_on in runs]
    sums = together(utilisation.with_shared_cpus(usages, window, {"p": 16}), window)
    assert sums.cpu_hours <= 16 * 100 / 3600 + 1e-9
    by_second = sum(
        min(16, sum(one.cpus for one in usages if one.start_s <= second < (one.end_s or 100))) for second in range(100)
    )
    assert sums.cpu_hours * 3600 == pytest.approx(by_second)


@pytest.mark.slurm
@pytest.mark.every_release
def test_figures_of_a_partition_that_shares_cpus_on_slurm(devcluster: Any, wait_until: Callable[..., None]) -> None:
    slurm = CommandSlurm(devcluster.env)
    submitted: list[str] = []

    def told(*words: str) -> Any:
        command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", *words, "--json"]
        env = {**os.environ, **devcluster.env}
        return json.loads(subprocess.run(command, env=env, capture_output=True, text=True, timeout=120).stdout)

    def in_use() -> int:
        shown = devcluster.run("sinfo", "--noheader", "--nodes=cpu0", "--partition=twice", "--format=%C")
        return int(shown.split("/")[0])

    conf = Path(devcluster.env["SLURM_CONF"])
    before = conf.read_text()
    conf.write_text(f"{before}PartitionName=twice Nodes=cpu0 OverSubscribe=FORCE:2 MaxTime=INFINITE State=UP\n")
    devcluster.run("scontrol", "reconfigure")
    try:
        wait_until(lambda: "twice" in devcluster.run("sinfo", "--noheader", "--format=%P"), 60)
        for cpus in (10, 10, 4):
            options = ["--output=/dev/null", "--mem=100", "--time=60", "-p", "twice", f"-c{cpus}"]
            submitted.append(slurm.submit("#!/bin/sh\nexec sleep 600\n", options))
            # One after the other: in another order Slurm gives them other CPUs.
            states = ["RUNNING"] * len(submitted)
            wait_until(lambda states=states: [one.state for one in slurm.snapshot().jobs] == states, 60, "it to run")
        wait_until(lambda: in_use() == 14, 60, "sinfo to count them")
        jobs = told("jobs")
        assert jobs["summary"]["cpus_held"] == 14
        assert [row["cpus"] for row in jobs["jobs"]] == [10, 10, 4], "what each was given, whoever looks"
        frag = told("frag")["summary"]
        assert frag["cpus"] - frag["cpus_free"] == 14
        # Uneven over nodes of which one shares CPUs, and beside nobody: 34 are 34, and 38 with its neighbours'.
        options = ["--output=/dev/null", "--mem=100", "--time=60", "-p", "cpu", "-w", "cpu[0-2]", "-N3", "-n34"]
        for job_id in submitted:
            slurm.cancel(job_id)
        wait_until(lambda: not slurm.snapshot().jobs, 60)
        submitted.append(slurm.submit("#!/bin/sh\nexec sleep 600\n", options))
        wait_until(lambda: [one.state for one in slurm.snapshot().jobs] == ["RUNNING"], 60, "the uneven one to run")
        assert told("jobs")["summary"]["cpus_held"] == 34
        (in_json,) = slurm.snapshot(details=True).jobs
        (plain,) = slurm.snapshot().jobs
        assert list(plain.cpus_on_nodes()) == list(in_json.cpus_on_nodes())
        assert sum(num for _, num in plain.cpus_on_nodes()) == 34
        util = told("util", "--start=now-1second", "--partition=twice")
        assert util["summary"]["cpu_allocated_share"] <= 1.0
        assert any("may be given the same CPUs" in note for note in util["notes"])
    finally:
        for job_id in submitted:
            slurm.cancel(job_id)
        wait_until(lambda: not slurm.snapshot().jobs, 60)
        conf.write_text(before)
        devcluster.run("scontrol", "reconfigure")
    wait_until(lambda: "twice" not in devcluster.run("sinfo", "--noheader", "--format=%P"), 60)
