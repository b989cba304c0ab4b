"""What each node of a job must have, besides CPUs and memory: a GPU of a job's --gpus, and disk for --tmp.

so0 and so1 are of a cloud that nobody boots: the first has disk, the second has none.
"""

from __future__ import annotations

from typing import Any

import pytest

from hetstream.hetjob.errors import SlurmCommandError
from tests.devcluster.spec import ClusterShape

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = ()
SHAPE = ClusterShape(2, 4, 2, 16)
CLOUD = "CPUs=8 RealMemory=64000 NodeAddr=127.0.0.1 State=CLOUD"
SETTINGS = (
    "PrivateData=cloud", "ResumeProgram=/bin/true", "SuspendProgram=/bin/true", "SuspendTime=-1", "ResumeTimeout=3600",
    f"NodeName=so0 Port=19998 TmpDisk=5000 {CLOUD}",
    f"NodeName=so1 Port=19999 {CLOUD}",
    "PartitionName=so Nodes=so[0-1] State=UP",
    "PartitionName=mixed Nodes=gpu[0-1],cpu[0-1] State=UP",
)  # fmt: skip
SMALL = ("--mem=100", "--time=60")


def test_each_node_of_a_job_with_gpus_has_one(site: Any) -> None:
    """However Slurm divides --gpus: a node without any is no room."""
    site.settle(**{site.submit("-pgpu", "-wgpu0", "--gpus=4", *SMALL): "RUNNING"})
    for gpus in ("2", "3", "4"):
        job = site.submit("-pmixed", "-N2", f"--gpus={gpus}", *SMALL)
        site.settle(**{job: "PENDING Resources"})
        assert site.facts(job)["fits_on"] == ["gpu1"], gpus
        assert {kind for kind, _ in site.blockers(job)} <= {"GPUs", "gang"}
        site.run("scancel", job)
    with pytest.raises(SlurmCommandError, match="configuration is not available"):
        site.submit("-pmixed", "-N3", "--gpus=4", *SMALL)


def test_nodes_with_too_little_disk_are_no_room(site: Any) -> None:
    site.settle(**{site.submit("-pso", "-wso0", "-c8", *SMALL): "CONFIGURING"})
    job = site.submit("-pso", "-c2", "--tmp=1000", *SMALL)
    site.settle(**{job: "PENDING Resources"})
    assert site.facts(job)["fits_on"] == []
    ((kind, text),) = site.blockers(job)
    assert (kind, text) == (
        "CPUs",
        "it needs 2 CPUs on a node; of 1 node with enough memory the most free is 0 (so0)",
    )
    with pytest.raises(SlurmCommandError, match="configuration is not available"):
        site.submit("-pso", "-c2", "--tmp=4G", "-N2", *SMALL)
