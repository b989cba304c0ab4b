"""Memory and CPUs that go with GPUs, and what Slurm does once there are CPUs: `why` says the same before.

gpu0 has 4 GPUs, 16 CPUs and 64000 MB. Partition `each` gives 6 CPUs and 8000 MB for each GPU to jobs that do not say.
"""

from __future__ import annotations

from typing import Any

import pytest

from hetstream.slurm_plugin.client.slurm import CommandSlurm
from tests.devcluster.sites import GPU_KINDS
from tests.devcluster.spec import ClusterShape

pytestmark = [pytest.mark.slurm, pytest.mark.every_release]
KINDS = (GPU_KINDS,)
SHAPE = ClusterShape(4, 4, 1, 16)
SETTINGS = ("PartitionName=each Nodes=gpu[0-3] DefCpuPerGPU=6 DefMemPerGPU=8000 State=UP",)
HOLD = ("-pgpu", "-wgpu0", "-n1", "--time=60")


@pytest.mark.parametrize("how", ["--gpus-per-node=1", "--gpus=1", "--gpus-per-task=1"])
def test_a_job_with_memory_for_each_gpu_waits_for_cpus_alone(site: Any, how: str) -> None:
    """And starts as soon as it has them: another job keeps most of the node's memory."""
    memory = site.submit(*HOLD, "-c1", "--mem=50000")
    cpus = site.submit(*HOLD, "-c12", "--mem=1000")
    site.settle(**{memory: "RUNNING", cpus: "RUNNING"})
    job = site.submit(*HOLD, how, "-c8", "--mem-per-gpu=8000")
    all_of_it = site.submit(*HOLD, how, "-c2", "--mem=0", "--nice=1000")
    site.settle(**{job: "PENDING Resources", all_of_it: "PENDING"})
    ((kind, text),) = site.blockers(job)
    assert (kind, text) == (
        "CPUs",
        "it needs 8 CPUs on a node; of 1 node with enough GPUs and memory the most free is 3 (gpu0)",
    )
    assert "for memory" not in site.facts(job)["conversion"]
    assert {row["job"]: row["waits_for"] for row in site.told("jobs")["jobs"]}[job] == "CPUs"
    ((stranded, lacking),) = [
        (row["stranded_gpus"], row["lacking"]) for row in site.told("frag")["nodes"] if row["node"] == "gpu0"
    ]
    assert (stranded, lacking) == (4, "CPUs")
    site.run("scancel", cpus)
    site.settle(**{job: "RUNNING", all_of_it: "PENDING"})
    assert [kind for kind, _ in site.blockers(all_of_it)] == ["memory"]


@pytest.mark.slow
@pytest.mark.parametrize("tried", [False, True])
def test_what_a_partition_gives_for_each_gpu_is_what_slurm_gives(site: Any, tried: bool) -> None:
    """Two GPUs bring 12 CPUs and 16000 MB, also to a job that Slurm has not tried yet."""
    full = site.submit(*HOLD, "-c16", "--mem=100")
    site.settle(**{full: "RUNNING"})
    asked = ("-peach", "-wgpu0", "--time=60", "--gpus=2")
    forms = {"": (12, 16000), "-c2": (2, 16000), "--cpus-per-gpu=3": (6, 16000), "--mem=20000": (12, 20000)}
    forms |= {"--mem=0": (12, 64000), "--mem-per-gpu=3000": (12, 6000)}
    for form, (cpus, memory_mb) in forms.items():
        job = site.submit(*([] if tried else ["--hold"]), *asked, *form.split())
        site.settle(**{job: "PENDING Resources" if tried else "PENDING JobHeld"})
        facts = site.facts(job)
        assert (facts["cpus_per_node"], facts["memory_mb_per_node"]) == (cpus, memory_mb), form
        (known,) = [each for each in CommandSlurm(site.cluster.env).snapshot().jobs if str(each.job_id) == job]
        (detailed,) = [
            each for each in CommandSlurm(site.cluster.env).snapshot(details=True).jobs if str(each.job_id) == job
        ]
        for name in ("memory_per_gpu_mb", "cpus_per_gpu", "all_memory", "own_memory"):
            assert getattr(known, name) == getattr(detailed, name), (form, name)
        site.run("scancel", full)
        if not tried:
            site.run("scontrol", "release", job)
        site.settle(**{job: "RUNNING"})
        given = dict(pair.split("=") for pair in site.run("squeue", f"-j{job}", "-hO", "tres-alloc:99").split(","))
        assert (int(given["cpu"]), mb(given["mem"])) == (cpus, memory_mb), form
        site.cluster.cancel_all()
        full = site.submit(*HOLD, "-c16", "--mem=100")
        site.settle(**{full: "RUNNING"})


def mb(text: str) -> int:
    return round(float(text[:-1]) * {"M": 1, "G": 1024}[text[-1]])
