"""What util counts of each kind of job, beside an independent count of sacct's lines.

Jobs that are suspended, resized, requeued, preempted, cancelled while suspended, arrays and heterogeneous ones.
"""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from hetstream.slurm_plugin.client.slurm import CommandSlurm
from tests.devcluster.sites import ACCOUNTING

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = (ACCOUNTING,)
SETTINGS = (
    "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE",
    "PartitionName=low Nodes=cpu3 PriorityTier=1 MaxTime=INFINITE", "PartitionName=high Nodes=cpu3 PriorityTier=2",
)  # fmt: skip
SMALL = ("--mem=100", "--time=60")


def counted(site: Any, begin_s: int, end_s: int) -> tuple[float, float]:
    """CPU and GPU hours by sacct's lines of jobs, those that `util` does not read among them: what slurmdbd itself has.

    A line of a size that a job got later begins, at the earliest, where the line before it ends.
    """
    fields = "JobIDRaw,Start,End,Suspended,AllocCPUS,AllocTRES"
    said = site.run("env", "SLURM_TIME_FORMAT=%s", "sacct", "-nXPDa", f"-Suts{begin_s}", f"-Euts{end_s}", f"-o{fields}")
    cpus = gpus = 0.0
    ends: dict[str, float] = {}
    for job, start, end, suspended, num_cpus, tres in (text.split("|") for text in said.splitlines()):
        if not start.isdecimal():
            continue
        first = max(float(start), ends.get(job, 0.0))
        ends[job] = last = float(end) if end.isdecimal() else float(end_s)
        hours, minutes, passed = map(int, suspended.split(":"))
        cpus += int(num_cpus) * max(0.0, last - first - (hours * 3600 + minutes * 60 + passed)) / 3600
        held = dict(item.split("=") for item in tres.split(",") if item)
        gpus += int(held.get("gres/gpu", 0)) * max(0.0, last - first) / 3600
    return cpus, gpus


def test_hours_of_every_kind_of_job_are_those_of_an_independent_count(site: Any) -> None:
    site.wait_until(lambda: time.time() % 1 < 0.1, 2, "a second's begin")
    begin_s = math.ceil(time.time())
    site.wait_until(lambda: time.time() > begin_s, 3, "the next second")
    stopped = site.submit("-wgpu0", "--gpus=2", "-c4", *SMALL)
    ended_stopped = site.submit("-wgpu0", "--gpus=1", "-c2", *SMALL)
    still = site.submit("-wgpu0", "--gpus=1", "-c2", *SMALL)
    resized = site.submit("-pcpu", "-wcpu[0-1]", "-N2", "-n2", "-c4", *SMALL)
    requeued = site.submit("-pcpu", "-wcpu2", "--requeue", "-c3", *SMALL)
    array = site.submit("-pcpu", "-wcpu2", "-c1", "--array=0-2", *SMALL)
    het = site.submit("-wgpu1", "--gpus=1", "-c2", *SMALL, ":", "-pcpu", "-wcpu2", "-c5", *SMALL)
    low = site.submit("-plow", "--requeue", "-c16", *SMALL)
    single = (stopped, ended_stopped, still, resized, requeued, low)
    site.settle(**dict.fromkeys((*single, f"{array}_1", f"{het}+1"), "RUNNING"))
    # slurmdbd keeps one record of a job for each second in which it was submitted, or got its size.
    running_s = time.time()
    site.wait_until(lambda: time.time() > running_s + 2, 10, "some seconds")
    for job in (stopped, ended_stopped, still):
        site.run("scontrol", "suspend", job)
    site.run("scontrol", "update", f"JobId={resized}", "NumNodes=1")
    site.run("scontrol", "requeue", requeued)
    high = site.submit("-phigh", "-c16", *SMALL)
    # GPUs of jobs that are suspended are nobody else's, and their CPUs are.
    gets_cpus = site.submit("-wgpu0", "-c14", *SMALL)
    site.settle(**{high: "RUNNING", gets_cpus: "RUNNING"})
    wants_gpu = site.submit("-wgpu0", "--gpus=1", "-c1", *SMALL)
    site.settle(**{wants_gpu: "PENDING Resources"})
    assert site.told("jobs", "-t", "SUSPENDED")["summary"]["gpus_held"] == 4
    suspended_s = time.time()
    site.wait_until(lambda: time.time() > suspended_s + 3, 10, "some seconds")
    site.run("scancel", ended_stopped)
    site.run("scontrol", "resume", stopped)
    site.run("scancel", wants_gpu, gets_cpus, high, array)
    slurm = CommandSlurm(site.cluster.env)

    def usages() -> list[Any]:
        return list(slurm.usages(slurm.snapshot(), begin_s, time.time()))

    def is_written() -> bool:
        """Whether slurmdbd has what just happened."""
        now = {usage.job: usage for usage in usages()}
        is_over = [now[job].end_s is not None for job in (high, ended_stopped, gets_cpus, array)]
        return all(is_over) and now[still].is_suspended and not now[stopped].is_suspended

    site.wait_until(is_written, 60, "all in accounting")
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(begin_s))
    told = site.told("util", f"--start={start}", "--by=partition")
    now_s = told["meta"]["taken_s"]
    cpu_hours, gpu_hours = counted(site, begin_s, math.ceil(now_s))
    held = sum(usage.cpus for usage in usages() if usage.end_s is None) / 3600  # in a second
    assert told["summary"]["cpu_hours"] == pytest.approx(cpu_hours, abs=2 * held + 1e-4)
    assert told["summary"]["gpu_hours"] == pytest.approx(gpu_hours, abs=2 * 4 / 3600 + 1e-4)
    # Of each alone, what its lines in accounting say: two runs of those that were resized, requeued or preempted.
    runs: dict[str, list[Any]] = {}
    for usage in usages():
        runs.setdefault(usage.job, []).append(usage)
    assert {job: len(runs[job]) for job in (resized, requeued, low, stopped, still)} == {
        resized: 2, requeued: 1, low: 1, stopped: 1, still: 1,
    }  # fmt: skip
    first, second = sorted(runs[resized], key=lambda usage: usage.start_s)
    assert (first.cpus, second.cpus, second.start_s) == (8, 4, first.end_s)
    # The last seconds alone: one runs again, one is suspended still.
    window_s = told["meta"]["taken_s"] - 2
    last = {usage.job: usage for usage in slurm.usages(slurm.snapshot(), window_s, time.time())}
    assert (last[still].is_suspended, last[stopped].is_suspended) == (True, False)
    tail = site.told("util", "--start=now-1second", "--by=partition")["summary"]
    assert tail["gpu_hours"] == pytest.approx((2 + 1 + 1) / 3600, abs=2e-4), "stopped, still, and the component"
    site.run("scontrol", "resume", still)
