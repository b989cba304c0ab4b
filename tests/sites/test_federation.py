"""Two clusters in one federation, of which Slurm's commands show both (fed_display): figures are of one cluster."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from hetstream.slurm_plugin.devcluster.sites import ACCOUNTING
from tests.sites.conftest import HETSTREAM

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = (ACCOUNTING,)
SETTINGS = ("FederationParameters=fed_display",)
SMALL = ("--mem=100", "--time=60")


@pytest.fixture(scope="module")
def federation(cluster: Any, other: str, wait_until: Any) -> str:
    """The name of the other cluster, when both know each other."""
    names = f"{cluster.record.cluster_name},{other}"
    cluster.run(("sacctmgr", "--immediate", "--quiet", "add", "federation", "fed", f"clusters={names}"))

    def is_known() -> bool:
        said = str(cluster.run(("scontrol", "show", "federation")).stdout)
        return f"Sibling:    {other}" in said and said.count("ACTIVE") == 2

    wait_until(is_known, 60, "the federation")
    return other


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
        assert {group["partition"] for group in site.told("util")["groups"]} == {"gpu"}
        printed = subprocess.run(
            [HETSTREAM, "exporter", "--print", "--fresh"], env=site.cluster.env, capture_output=True, text=True,
            timeout=60, check=True,
        ).stdout  # fmt: skip
        assert "hetstream_cluster_nodes 6.0" in printed
    finally:
        site.run("scancel", f"--clusters={federation}", foreign)


def test_a_job_of_a_federation_streams(site: Any, federation: str) -> None:
    site.streams()
