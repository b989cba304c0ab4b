"""Jobs that Slurm finds no room for, where all that hetstream looks at has some, and what hetstream says of them.

gpu0 has 2 sockets of 8 cores and 2 GPUs near each. so0 has 2 sockets of 4 cores, of a cloud that nobody boots.
"""

from __future__ import annotations

from typing import Any

import pytest

from hetstream.slurm_plugin.devcluster.sites import GPU_KINDS
from hetstream.slurm_plugin.devcluster.spec import ClusterShape

pytestmark = [pytest.mark.slurm, pytest.mark.every_release]
KINDS = (GPU_KINDS,)
SHAPE = ClusterShape(4, 4, 2, 16)
SETTINGS = (
    "PrivateData=cloud", "ResumeProgram=/bin/true", "SuspendProgram=/bin/true", "SuspendTime=-1", "ResumeTimeout=3600",
    "NodeName=so0 Port=19999 Sockets=2 CoresPerSocket=4 CPUs=8 RealMemory=64000 NodeAddr=127.0.0.1 State=CLOUD",
    "PartitionName=so Nodes=so0 State=UP",
)  # fmt: skip
SMALL = ("--mem=100", "--time=60", "-N1")


def says_that_slurm_finds_none(site: Any, job: str, node: str) -> None:
    """`why` and `jobs` have a cause of its own, and nothing promises the next cycle."""
    site.settle(**{job: "PENDING Resources"})
    told = site.told("why", job)
    ((kind, text),) = [(found["kind"], found["text"]) for found in told["blockers"]]
    assert kind == "not looked at"
    assert "Slurm found none when it last looked, 00:00:" in text
    assert site.facts(job)["fits_on"] == [node]
    assert {row["job"]: row["waits_for"] for row in site.told("jobs")["jobs"]}[job] == "not looked at"


def test_gpus_that_are_bound_to_cores_in_use(site: Any) -> None:
    """Free are the GPUs of one socket and cores of the other."""
    cores = site.submit("-pgpu", "-wgpu0", "-n1", "-c8", *SMALL)
    site.settle(**{cores: "RUNNING"})
    gpus = site.submit("-pgpu", "-wgpu0", "-n1", "--gres=gpu:2", "--gres-flags=enforce-binding", *SMALL)
    site.settle(**{gpus: "RUNNING"})
    job = site.submit("-pgpu", "-wgpu0", "-n1", "--gres=gpu:1", "--gres-flags=enforce-binding", *SMALL)
    says_that_slurm_finds_none(site, job, "gpu0")


def test_tasks_that_go_to_sockets_of_their_own(site: Any) -> None:
    """One socket is full."""
    full = site.submit("-pso", "-n1", "-c4", *SMALL)
    site.settle(**{full: "CONFIGURING"})
    job = site.submit("-pso", "-wso0", "-n2", "--ntasks-per-socket=1", *SMALL)
    says_that_slurm_finds_none(site, job, "so0")


def test_a_job_that_is_behind_one_of_another_partition_waits_for_its_turn(site: Any) -> None:
    """Both partitions have cpu0. Slurm says Resources, or that nodes are reserved, of the one behind, too."""
    site.run("scontrol", "create", "PartitionName=over", "Nodes=cpu[0-1]", "State=UP", "PriorityTier=1")
    try:
        full = site.submit("-pcpu", "-wcpu1", "-n16", "--mem=100", "--time=60")
        site.settle(**{full: "RUNNING"})
        ahead = site.submit("-pcpu", "-N2", "-n32", "--mem=100", "--time=60")
        behind = site.submit("-pover", "-N1", "-n1", "--mem=100", "--time=120")
        site.settle(**{ahead: "PENDING Resources", behind: "PENDING"})
        ((kind, _),) = site.blockers(behind)
        assert kind in ("priority", "backfill")
    finally:
        site.run("scancel", "--user=root")
        site.wait_until(lambda: not site.run("squeue", "--all", "--noheader"), 60, "an empty queue")
        site.run("scontrol", "delete", "PartitionName=over")
