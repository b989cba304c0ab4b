"""Memory and CPUs that go with GPUs: asked for, or given by the site to jobs that do not say.

The records are those that Slurm told of the requests named beside them; tests/sites/test_gpu_defaults.py asks it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from recorded import job as record

from hetstream.slurm_plugin.client import parse_json, pyslurm_backend
from hetstream.slurm_plugin.client.gpu_defaults import GpuDefaults
from hetstream.slurm_plugin.client.model import Gres, Job, Node
from hetstream.slurm_plugin.client.parse_text import parse_config, parse_jobs, parse_partitions
from hetstream.slurm_plugin.insight.node_table import Hardware, Shape, shape_of

GPU_NODE = Node("g0", frozenset({"IDLE"}), ("dg",), 16, 0, 64000, 0, (Gres("gpu", "", 4),))
PARTITION = "PartitionName={} Nodes=g0 State=UP JobDefaults={} {}"
BY_GPUS = PARTITION.format("dg", "DefCpuPerGPU=6,DefMemPerGPU=8000", "DefMemPerNode=UNLIMITED")
OLD, NEW = (22, 5), (26, 5)
SHOWN = {  # what squeue shows of jobs with two GPUs: MinMemory, mem-per-tres, cpus-per-tres, cpus-per-task, TRES mem
    OLD: {
        "held": ("1000M", "N/A", "N/A", "1", "1000M"),
        "held, --mem=0": ("0", "N/A", "N/A", "1", "62.50G"),
        "held, --mem-per-cpu=500": ("500M", "N/A", "N/A", "1", "500M"),
        "tried": ("0", "gpu:8000", "gpu:6", "1", "1000M"),
        "tried, --mem=0": ("0", "gpu:8000", "gpu:6", "1", "62.50G"),
        "tried, --mem=20000": ("20000M", "gpu:8000", "gpu:6", "1", "20000M"),
        "tried, -c1": ("0", "gpu:8000", "N/A", "1", "1000M"),
        "--mem-per-gpu=3000": ("0", "gres:gpu:3000", "gpu:6", "1", "6000M"),
    },
    NEW: {
        "held": ("1000M", "N/A", "N/A", "1", "16000M"),
        "held, --mem=0": ("0", "N/A", "N/A", "1", "62.50G"),
        "held, --mem-per-cpu=500": ("500M", "N/A", "N/A", "1", "500M"),
        "tried": ("8000M", "gpu:8000", "gpu:6", "1", "16000M"),
        "tried, --mem=0": ("8000M", "gpu:8000", "gpu:6", "1", "62.50G"),
        "tried, --mem=20000": ("8000M", "gpu:8000", "gpu:6", "1", "20000M"),
        "tried, -c1": ("8000M", "gpu:8000", "N/A", "1", "16000M"),
        "--mem-per-gpu=3000": ("3000M", "gres/gpu:3000", "gpu:6", "1", "6000M"),
    },
}
WANTED = {  # CPUs, MB and whether it is all memory, of the node that has both GPUs
    "held": (12, 16000, False),
    "held, --mem=0": (12, 64000, True),
    "held, --mem-per-cpu=500": (12, 16000, False),
    "tried": (12, 16000, False),
    "tried, --mem=0": (12, 64000, True),
    "tried, --mem=20000": (12, 20000, False),
    "tried, -c1": (1, 16000, False),
    "--mem-per-gpu=3000": (12, 6000, False),
}


def shown(least: str, per_gpu: str, cpus_per_gpu: str, cpus_per_task: str, memory: str, **more: str) -> Job:
    fields = {
        "Partition": "dg", "NumCPUs": "1", "MinCPUs": "1", "NumTasks": "1", "MinMemory": least, "mem-per-tres": per_gpu,
        "cpus-per-tres": cpus_per_gpu, "cpus-per-task": cpus_per_task, "tres-per-job": "gres:gpu:2",
        "tres-alloc": f"cpu=1,mem={memory},node=1,billing=1",
    }  # fmt: skip
    return parse_jobs(record("7", "PENDING", **fields | {"Reason": "JobHeldUser"} | more))[0]


def wanted(job: Job, partition: str = BY_GPUS, config: str = "DefMemPerCPU = 1000", release: Any = OLD,
           asks_itself: bool | None = None) -> Shape:  # fmt: skip
    defaults = GpuDefaults(parse_partitions(partition), (GPU_NODE,), parse_config(config), release)
    (found,) = defaults.with_defaults((job,), {7: asks_itself})
    return shape_of(found, Hardware((GPU_NODE,), {"SelectTypeParameters": "CR_CORE_MEMORY"}))


@pytest.mark.parametrize("release", [OLD, NEW])
@pytest.mark.parametrize("how", WANTED)
def test_what_a_site_gives_for_each_gpu_is_wanted_before_slurm_has_tried_a_job_too(how: str, release: Any) -> None:
    shape = wanted(shown(*SHOWN[release][how]), release=release)
    assert (shape.cpus, shape.memory_mb, shape.all_memory) == WANTED[how]


def test_memory_for_each_gpu_is_not_all_memory_in_any_reader() -> None:
    """--gpus-per-node=1 -c 8 --mem-per-gpu=8000; and --mem=0, which is."""
    told = [("gres:gpu:8000", False), ("gres/gpu:8000", False), ("", True)]
    for per_gpu, is_all in told:
        assert shown("0", per_gpu or "N/A", "N/A", "8", "8000M").all_memory is is_all
        old = {"job_id": 7, "job_state": "PENDING", "memory_per_node": None, "memory_per_cpu": None,
               "memory_per_tres": per_gpu, "flags": ["JOB_MEM_SET"] if is_all else []}  # fmt: skip
        number = {"set": True, "infinite": False, "number": 0 if is_all else 8000}
        new = old | {"memory_per_node": number, "memory_per_cpu": number | {"set": False},
                     "flags": ["EXACT_MEMORY_REQUESTED"] if is_all else []}  # fmt: skip
        for row in (old, new):
            (job,) = parse_json.parse_jobs(msgspec.json.encode({"jobs": [row]}))
            assert (job.all_memory, job.own_memory) == (is_all, is_all)
        assert pyslurm_job(mem_per_tres=per_gpu or None, min_memory_node=0).all_memory is is_all


def pyslurm_job(**more: Any) -> Job:
    nothing = ("name", "tres_alloc_str", "min_memory_cpu", "array_task_str", "array_task_id", "array_job_id", "account",
               "het_job_id", "qos", "tres_per_node", "tres_per_task", "tres_per_job", "nodes", "dependency", "comment",
               "sched_nodes", "resv_name", "work_dir", "submit_time", "eligible_time", "start_time")  # fmt: skip
    row = dict.fromkeys(nothing) | {
        "job_id": 7, "tres_req_str": "cpu=8,mem=8000M,node=1", "num_cpus": 8, "num_nodes": 1, "time_limit": 30,
        "user_id": 0, "partition": "dg", "job_state": "PENDING", "num_tasks": 1, "cpus_per_task": 8, "end_time": 0,
        "priority": 1, "req_nodes": [], "features": [],
    }  # fmt: skip
    return pyslurm_backend.job_of(row | more, "Resources")


def test_only_a_flag_tells_all_memory_from_the_default_where_no_other_memory_is_set() -> None:
    """Before 25.05 Slurm counts all memory of a node for both, as long as there is no DefMemPerCPU."""
    for least, per_gpu, per_cpu in (("0", "N/A", "N/A"), ("0", "gpu:8000", "gpu:6")):
        job = shown(least, per_gpu, per_cpu, "1", "62.50G")
        defaults = GpuDefaults(parse_partitions(BY_GPUS), (GPU_NODE,), {}, OLD)
        assert defaults.in_doubt((job,)) == {7}
        assert wanted(job, config="", asks_itself=True).all_memory
        assert wanted(job, config="", asks_itself=False).memory_mb == wanted(job, config="").memory_mb == 16000
        assert wanted(job, config="", release=NEW).all_memory
        assert not GpuDefaults(parse_partitions(BY_GPUS), (GPU_NODE,), {}, NEW).in_doubt((job,))
    other = shown("20000M", "N/A", "N/A", "1", "20000M")
    assert wanted(other, config="").memory_mb == 20000


def test_the_clusters_defaults_hold_where_a_partition_has_none() -> None:
    plain, own = PARTITION.format("dg", "(null)", ""), PARTITION.format("dg", "(null)", "DefMemPerCPU=500")
    config = "JobDefaults = DefCpuPerGPU=4,DefMemPerGPU=9000\nDefMemPerCPU = 1000"
    job = shown("1000M", "N/A", "N/A", "1", "1000M")
    assert (wanted(job, plain, config).cpus, wanted(job, plain, config).memory_mb) == (8, 18000)
    # A partition's DefMemPerCPU comes before the cluster's DefMemPerGPU, from 25.05 on.
    of_partition = shown("500M", "N/A", "N/A", "1", "500M")
    assert wanted(of_partition, own, config).memory_mb == 18000
    assert wanted(of_partition, own, config, NEW).memory_mb == 8 * 500
    assert wanted(job, BY_GPUS, config).memory_mb == 16000
    assert wanted(job, plain, "JobDefaults = (null)").memory_mb == 1000


def test_jobs_that_say_it_themselves_and_jobs_without_gpus_get_no_default() -> None:
    assert wanted(shown("1000M", "N/A", "gres:gpu:2", "1", "1000M")).cpus == 4
    tried = shown("1000M", "N/A", "N/A", "1", "1000M", Reason="Resources")
    assert wanted(tried, PARTITION.format("dg", "DefCpuPerGPU=6", "")).cpus == 1  # -c1, and Slurm has looked at it
    four = shown("1000M", "N/A", "N/A", "4", "4000M", NumCPUs="4", MinCPUs="4")
    assert wanted(four).cpus == 4
    none = shown("0", "N/A", "N/A", "1", "62.50G", **{"tres-per-job": "N/A"})
    assert (wanted(none).cpus, wanted(none).all_memory) == (1, True)


def test_memory_of_cpus_that_come_with_gpus_is_counted_with_them() -> None:
    """--gpus=2 --cpus-per-gpu=8: Slurm shows one CPU and its memory, and gives 16 of them."""
    job = shown("1000M", "N/A", "gres:gpu:8", "1", "1000M")
    plain = PARTITION.format("dg", "(null)", "")
    assert (wanted(job, plain).cpus, wanted(job, plain).memory_mb) == (16, 16000)
