"""auth/slurm: no munged, a key beside slurm.conf."""

from __future__ import annotations

from typing import Any

import pytest

from hetstream.slurm_plugin.devcluster.sites import AUTH_SLURM
from hetstream.slurm_plugin.devcluster.status import observe

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.parametrize("release", ["24.11", "26.05"], indirect=True, scope="module"),
]
KINDS = (AUTH_SLURM,)
SMALL = ("--mem=1000", "--time=60")


def test_without_munge_everything_is_told(site: Any) -> None:
    """By hand: gpu0 has 4 CPUs and 3 GPUs in use, gpu1 14 and 4. The job that waits needs 1 GPU and 14 CPUs: with 2 it
    would start on gpu0, and 12 CPUs move to 3 data workers. Stranded are the GPU of gpu0 and the CPUs of both, 12 + 2.
    """
    assert "auth/slurm" in site.run("scontrol", "show", "config")
    assert "munged" not in [daemon.name for daemon in observe(site.cluster.record).daemons]
    jobs = [site.submit("-wgpu0", "--gpus=3", "-c4", *SMALL), site.submit("-wgpu1", "--gpus=4", "-c14", *SMALL)]
    site.settle(**dict.fromkeys(jobs, "RUNNING"))
    starved = site.submit("--gpus=1", "-c14", *SMALL)
    site.settle(**{starved: "PENDING Resources"})
    names = ("cpus", "cpus_free", "gpus", "gpus_free", "stranded_gpus", "stranded_cpus")
    assert site.totals(*names) == [96, 78, 8, 1, 1, 14]
    assert site.blockers(starved) == [
        ("CPUs", "it needs 14 CPUs on a node; of 1 node(s) with enough GPUs and memory the most free is 12 (gpu0)")
    ]
    (advice,) = site.told("advise")["advice"]
    assert (advice["job"], advice["step"]) == (starved, "#HETSTREAM --data-workers=3 --data-worker-partition=cpu")
    assert {one["partition"]: one["num_jobs"] for one in site.told("util")["groups"]} == {"gpu": 2}


def test_an_unmodified_job_streams(site: Any) -> None:
    site.streams()
