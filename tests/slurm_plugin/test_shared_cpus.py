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

from hetstream.slurm_plugin.client.accounting import Usage
from hetstream.slurm_plugin.client.counted import held_by
from hetstream.slurm_plugin.client.held import with_shared_cpus
from hetstream.slurm_plugin.client.model import Job, Node, Partition
from hetstream.slurm_plugin.client.parse_text import parse_partitions
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
        shown = devcluster.run(["sinfo", "--noheader", "--nodes=cpu0", "--partition=twice", "--format=%C"]).stdout
        return int(shown.split("/")[0])

    conf = Path(devcluster.env["SLURM_CONF"])
    before = conf.read_text()
    conf.write_text(f"{before}PartitionName=twice Nodes=cpu0 OverSubscribe=FORCE:2 MaxTime=INFINITE State=UP\n")
    devcluster.run(["scontrol", "reconfigure"])
    try:
        wait_until(lambda: "twice" in devcluster.run(["sinfo", "--noheader", "--format=%P"]).stdout, 60)
        for cpus in (10, 10, 4):
            options = ["--output=/dev/null", "--mem=100", "--time=60", "-p", "twice", f"-c{cpus}"]
            submitted.append(slurm.submit("#!/bin/sh\nexec sleep 600\n", options))
        wait_until(lambda: [one.state for one in slurm.snapshot().jobs] == ["RUNNING"] * 3, 60, "all three to run")
        assert in_use() == 14
        jobs = told("jobs")
        assert jobs["summary"]["cpus_held"] == 14
        assert sum(row["cpus"] for row in jobs["jobs"]) == pytest.approx(14, abs=1e-3)
        frag = told("frag")["summary"]
        assert frag["cpus"] - frag["cpus_free"] == 14
        util = told("util", "--start=now-1second", "--partition=twice")
        assert util["summary"]["cpu_allocated_share"] <= 1.0
        assert any("may be given the same CPUs" in note for note in util["notes"])
    finally:
        for job_id in submitted:
            slurm.cancel(job_id)
        wait_until(lambda: not slurm.snapshot().jobs, 60)
        conf.write_text(before)
        devcluster.run(["scontrol", "reconfigure"])
    wait_until(lambda: "twice" not in devcluster.run(["sinfo", "--noheader", "--format=%P"]).stdout, 60)
