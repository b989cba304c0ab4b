"""Licenses of pending jobs: who is short of them waits for them, whatever word Slurm has for it so far."""

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

from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.client.read import parse_licenses, with_short_licenses
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.insight.fragmentation import measure
from hetstream.slurm_plugin.insight.why import Explainer

# As 22.05.8 prints it; later releases print more behind it.
SHOWN = """\
LicenseName=bar Total=2 Used=0 Free=2 Reserved=1 Remote=no
LicenseName=foo Total=3 Used=2 Free=1 Reserved=0 Remote=no LastConsumed=0 LastDeficit=0 LastUpdate=Unknown
LicenseName=matlab@db Total=9 Used=9 Free=0 Reserved=0 Remote=yes
"""
JOB = Job(7, "j", "u", ("p",), "PENDING", "Priority", 1, 1, 1, 1, 0, gres_per_node=(Gres("gpu", "", 1),))


@pytest.mark.parametrize(
    ("asked", "short"),
    [("foo", ()), ("foo:2", ("foo",)), ("foo=2", ("foo",)), ("bar", ()), ("bar:2", ("bar",)), ("foo:1,bar:2", ("bar",)),
     ("foo:2;bar:2", ("foo", "bar")), ("foo:2|bar:1", ()), ("foo:2|bar:2", ("foo", "bar")),
     ("matlab@db:1", ("matlab@db",)), ("unheard:4", ()), ("power(cpu0):3", ()), ("", ())],
)  # fmt: skip
def test_which_licenses_are_too_few(asked: str, short: tuple[str, ...]) -> None:
    licenses = parse_licenses(SHOWN)
    (job,) = with_short_licenses([replace(JOB, licenses=asked)], licenses)
    assert (job.short_licenses, job.waits_for_resources) == (short, not short)
    (running,) = with_short_licenses([replace(JOB, state="RUNNING", licenses=asked)], licenses)
    assert running.short_licenses == ()


def test_of_reserved_licenses_a_job_in_a_reservation_may_have_some() -> None:
    (job,) = with_short_licenses([replace(JOB, licenses="bar:2", reservation="r")], parse_licenses(SHOWN))
    assert job.short_licenses == ()
    assert parse_licenses("No licenses configured in Slurm.\n") == {}


def test_who_is_short_of_licenses_is_no_turn_and_makes_no_gpu_of_use() -> None:
    node = Node("n", frozenset({"IDLE"}), ("p",), 16, 0, 1000, 0, (Gres("gpu", "", 4),))
    first = replace(JOB, job_id=1, priority=9, reason="Resources", start_s=9e9, num_cpus=99)
    short = replace(JOB, licenses="foo:2", short_licenses=("foo",))
    snapshot = Snapshot(1.0, "22.05", "t", (first, short), (node,), (Partition("p", ("n",)),))
    found = Explainer(snapshot).explain(short)
    assert [(blocker.kind, blocker.text) for blocker in found.blockers] == [("licenses", "its licenses are taken: foo")]
    assert Explainer(snapshot).waits_for(short) == "licenses"
    assert not found.conversion.helps
    assert measure([node], [short]).shapes == ()
    assert len(measure([node], [JOB]).shapes) == 1


@pytest.mark.slurm
@pytest.mark.every_release
def test_a_job_behind_others_and_short_of_licenses_on_slurm(devcluster: Any, wait_until: Callable[..., None]) -> None:
    """cpu0 is full, a job for it is ahead, and two of three licenses are in use; the cluster has room elsewhere."""
    slurm = CommandSlurm(devcluster.env)
    submitted: list[str] = []

    def submit(*options: str) -> str:
        words = ["--output=/dev/null", "--mem=100", "--time=60", "-p", "cpu", *options]
        submitted.append(slurm.submit("#!/bin/sh\nexec sleep 600\n", words))
        return submitted[-1]

    def reasons() -> dict[str, str]:
        said = devcluster.run("squeue", "--noheader", "--format=%A %r")
        return dict(line.split(None, 1) for line in said.splitlines())

    def told(*words: str) -> Any:
        command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", *words, "--json"]
        env = {**os.environ, **devcluster.env}
        return json.loads(subprocess.run(command, env=env, capture_output=True, text=True, timeout=120).stdout)

    conf = Path(devcluster.env["SLURM_CONF"])
    before = conf.read_text()
    conf.write_text(f"{before}Licenses=hetstream-a:3,hetstream-b:1\n")
    devcluster.run("scontrol", "reconfigure")
    try:
        wait_until(lambda: "hetstream-a" in devcluster.run("scontrol", "show", "licenses"), 60)
        submit("-w", "cpu0", "-c16", "-L", "hetstream-a:2")
        wait_until(lambda: list(reasons().values()) == ["None"], 60, "the first job's start")
        ahead = submit("-w", "cpu0", "-c16")
        wait_until(lambda: reasons()[ahead] == "Resources", 60, "Slurm's reason")
        short = submit("-w", "cpu1", "-c1", "-L", "hetstream-a:2,hetstream-b:1", "--nice=100")
        # Whatever Slurm says of it so far: Priority, or Licenses.
        jobs = {row["job"]: row["waits_for"] for row in told("jobs")["jobs"]}
        assert (jobs[ahead], jobs[short]) == ("CPUs", "licenses")
        assert [blocker["kind"] for blocker in told("why", short)["blockers"]] == ["licenses"]
        wait_until(lambda: reasons()[short] == "Licenses", 60, "Slurm's own word")
        jobs = {row["job"]: row["waits_for"] for row in told("jobs")["jobs"]}
        assert jobs[short] == "licenses"
    finally:
        for job_id in submitted:
            slurm.cancel(job_id)
        wait_until(lambda: not slurm.snapshot().jobs, 60)
        conf.write_text(before)
        devcluster.run("scontrol", "reconfigure")
