"""Two clusters in one federation, of which Slurm's commands show both (fed_display): figures are of one cluster."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.error
import urllib.request
from typing import Any

import pytest

from hetstream.hetjob.errors import SlurmCommandError
from tests.devcluster.sites import ACCOUNTING
from tests.sites.conftest import HETSTREAM

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = (ACCOUNTING,)
SETTINGS = ("FederationParameters=fed_display",)
SMALL = ("--mem=100", "--time=60")


@pytest.fixture(scope="module")
def federation(cluster: Any, other: str, wait_until: Any) -> str:
    """The name of the other cluster, when both know each other."""
    names = f"{cluster.record.cluster_name},{other}"
    cluster.run("sacctmgr", "--immediate", "--quiet", "add", "federation", "fed", f"clusters={names}")

    def is_known() -> bool:
        said = cluster.run("scontrol", "show", "federation")
        return f"Sibling:    {other}" in said and said.count("ACTIVE") == 2

    wait_until(is_known, 60, "the federation")
    return other


def data_of(site: Any) -> dict[str, Any]:
    """What `serve` shows of the cluster, as data."""
    argv = [HETSTREAM, "serve", "--listen=127.0.0.1:0", "--interval=5", "--fresh"]
    with subprocess.Popen(argv, env=site.cluster.env, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = server.stderr.readline().split()[-1]
            found: dict[str, Any] = {}

            def has_read() -> bool:
                with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{url}data.json") as answer:
                    found.update(json.load(answer))
                return "summary" in found

            site.wait_until(has_read, 60, "a reading")
            return found
        finally:
            server.terminate()


def test_figures_are_of_one_cluster(site: Any, federation: str) -> None:
    own = f"--clusters={site.cluster.record.cluster_name}"
    running = site.submit(own, "-pgpu", "-wgpu0", "--gpus=3", "-c8", *SMALL).split(";")[0]
    waits = site.submit(own, "-pgpu", "-wgpu0", "-N1", "--gpus=2", "-c8", *SMALL).split(";")[0]
    site.settle(**{running: "RUNNING", waits: "PENDING Resources"})
    foreign = site.submit(f"--clusters={federation}", "-pqq", "--hold", *SMALL).split(";")[0]
    try:
        site.wait_until(lambda: foreign in site.run("squeue", "--all", "--noheader", "--format=%A"), 60, "both queues")
        assert "q1" in site.run("sinfo", "--noheader", "--Node", "--format=%N").split(), "Slurm's commands show both"
        for words in (("jobs",), ("jobs", "--details")):
            told = site.told(*words)
            assert {row["job"] for row in told["jobs"]} == {running, waits}
            assert told["summary"]["cpus_held"] == 8
        frag = site.told("frag")
        assert not {row["node"] for row in frag["nodes"]} & {"q1", "q2"}
        assert (frag["summary"]["cpus"], frag["summary"]["cpus_free"], frag["summary"]["gpus_free"]) == (96, 88, 5)
        assert site.blockers(waits)[0][0] == "GPUs"
        # slurmctld tells slurmdbd of a start later.
        site.wait_until(lambda: site.told("util")["groups"], 60, "the running job in accounting")
        assert {group["partition"] for group in site.told("util")["groups"]} == {"gpu"}
        printed = subprocess.run(
            [HETSTREAM, "exporter", "--print", "--fresh"], env=site.cluster.env, capture_output=True, text=True,
            timeout=60, check=True,
        ).stdout  # fmt: skip
        assert "hetstream_cluster_nodes 6.0" in printed
    finally:
        site.run("scancel", f"--clusters={federation}", foreign)


def test_a_job_that_another_cluster_has_is_told_as_such(site: Any, federation: str) -> None:
    """Its sibling here is revoked: squeue lists it, and it neither waits nor runs."""
    here = str(site.cluster.record.cluster_name)
    job = site.submit(f"--clusters={here},{federation}", "--hold", *SMALL).split(";")[0]
    try:
        site.run("scancel", f"--sibling={here}", job)
        site.settle(**{job: "REVOKED"})
        for words in (("jobs",), ("jobs", "--details")):
            told = site.told(*words)
            assert [(row["job"], row["state"], row["time_s"]) for row in told["jobs"]] == [(job, "REVOKED", None)]
            summary = told["summary"]
            assert [summary[name] for name in ("num_running", "num_pending", "num_revoked")] == [0, 0, 1]
        why = subprocess.run(
            [HETSTREAM, "why", job], env=site.cluster.env, capture_output=True, text=True, timeout=60, check=True
        )
        assert f"another cluster of its federation has it: squeue --federation --jobs={job}" in why.stdout
        served = data_of(site)
        assert served["meta"]["cluster"] == here
        assert [served["summary"][name] for name in ("cpus", "gpus", "num_running")] == [96, 8, 0]
        assert not served["waiting"]
    finally:
        for name in (here, federation):
            with contextlib.suppress(SlurmCommandError):  # of the other cluster, which may have refused it
                site.run("scancel", f"--clusters={name}", job)


def test_a_job_of_a_federation_streams(site: Any, federation: str) -> None:
    site.streams()
