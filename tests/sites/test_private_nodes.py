"""A site that hides its nodes from plain users (PrivateData=nodes): their jobs stream, and what is told is told."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from hetstream.slurm_plugin.client.slurm import CommandSlurm
from tests.sites.conftest import HETSTREAM

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = ()
SETTINGS = ("PrivateData=nodes",)


def test_a_job_streams_where_slurm_does_not_tell_its_user_of_nodes(site: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The job has this PATH too: all that asks Slurm there asks as a plain user.
        patch.setitem(site.cluster.env, "PATH", f"{site.as_nobody}:{site.cluster.env.get('PATH', os.environ['PATH'])}")
        site.streams()


def test_what_plain_users_may_know_of_the_cluster_is_known(site: Any) -> None:
    environ = {**os.environ, **site.cluster.env}
    told = CommandSlurm(environ).cluster()
    hidden = CommandSlurm({**environ, "PATH": f"{site.as_nobody}:{environ['PATH']}"}).cluster()
    assert (hidden.partitions, hidden.default_partition) == (told.partitions, told.default_partition)
    assert (hidden.scheduler, hidden.release) == (told.scheduler, told.release)
    assert hidden.default_mb_per_cpu == told.default_mb_per_cpu


def test_who_may_know_of_no_node_is_told_so(site: Any) -> None:
    """What serves the cluster ends, too: the next reading would say no more."""
    environ = {**os.environ, **site.cluster.env}
    environ["PATH"] = f"{site.as_nobody}:{environ['PATH']}"
    for words in (
        ["frag"],
        ["util"],
        ["advise"],
        ["exporter", "--listen=127.0.0.1:0"],
        ["serve", "--listen=127.0.0.1:0"],
    ):
        done = subprocess.run([HETSTREAM, *words], env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        said = [line for line in done.stderr.splitlines() if not line.startswith(("metrics at", "the cluster at"))]
        assert len(said) == 1, said
        assert "Slurm tells this user nothing of nodes (PrivateData=nodes)" in said[0]


def test_what_may_be_known_of_jobs_is_told_without_nodes(site: Any) -> None:
    """squeue shows them. Where there is room, and what a job lacks, is said not to be known, and nothing is guessed."""
    small = ("--mem=1000", "--time=60")
    whole = site.submit("-wgpu0", "--exclusive", "-c2", *small, nobody=True)
    other = site.submit("-wgpu1", "--gpus=3", "-c4", *small)
    site.settle(**dict.fromkeys((whole, other), "RUNNING"))
    waits = site.submit("--gpus=4", "-c2", *small, nobody=True)
    later = site.submit("--gpus=1", "-c2", "--begin=now+1hour", *small, nobody=True)
    site.settle(**{waits: "PENDING Resources", later: "PENDING BeginTime"})

    known = {row["job"]: row for row in site.told("jobs")["jobs"]}
    told = site.told("jobs", nobody=True)
    found = {row["job"]: row for row in told["jobs"]}
    for job in (whole, other):
        assert [found[job][key] for key in ("state", "cpus", "gpus", "nodes")] == [
            known[job][key] for key in ("state", "cpus", "gpus", "nodes")
        ]
    assert found[whole]["gpus"] == 4, "its own record says it"
    assert (found[waits]["waits_for"], found[waits]["reason"]) == ("hidden", "Resources")
    assert found[later]["waits_for"] == known[later]["waits_for"] == "time"
    (note,) = told["notes"]
    assert note.startswith("PrivateData=nodes: Slurm tells this user of no node")
    assert {row["node"] for row in site.told("jobs", whole, "--details", nobody=True)["shares"]} == {"gpu0"}

    why = site.told("why", waits, nobody=True)
    (blocker,), (job,) = why["blockers"], why["summary"]["jobs"]
    assert blocker["kind"] == "hidden"
    assert blocker["text"].startswith("Slurm says Resources, and tells you nothing of nodes (PrivateData=nodes)")
    assert (job["fits_on"], job["conversion_helps"]) == (None, False)
    assert why["notes"] == [note]
    assert site.blockers(later, nobody=True) == site.blockers(later)
    assert site.told("why", whole, nobody=True)["blockers"] == []


def test_a_heterogeneous_job_is_explained_without_nodes(site: Any) -> None:
    blocking = site.submit("-wgpu0", "--exclusive", "--mem=1000", "--time=60")
    site.settle(**{blocking: "RUNNING"})
    job = site.submit("-wgpu0", "--gpus=1", "--mem=1000", ":", "-pcpu", "-c1", "--mem=1000", nobody=True)
    site.settle(**{f"{job}+0": "PENDING"})
    why = site.told("why", job, nobody=True)
    assert {blocker["kind"] for blocker in why["blockers"]} <= {"hidden", "backfill"}
    assert [part["fits_on"] for part in why["summary"]["jobs"]] == [None, None]


def test_doctor_looks_at_what_is_not_hidden(site: Any) -> None:
    environ = {**os.environ, **site.cluster.env}
    environ["PATH"] = f"{site.as_nobody}:{environ['PATH']}"
    done = subprocess.run([HETSTREAM, "doctor", "--json"], env=environ, capture_output=True, text=True, timeout=60)
    told = json.loads(done.stdout)
    seen = {finding["check"]: finding for finding in told["findings"]}
    assert "no node was looked at" in seen["PrivateData"]["text"]
    assert seen.keys().isdisjoint({"Gres", "GresTypes", "nodes", "RealMemory"})
    assert len(told["notes"]) == 1
