"""slurmdbd with QOS and associations: limits are no lack of resources, and sacct says what jobs held and used.

The limits: QOS two-gpus gives a user 2 GPUs, ten-minutes a job 10 minutes; account eight-cpus has 8 CPUs for all its
jobs, one-job a user's one job. All others are free.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import pytest

from hetstream.slurm_plugin.client.slurm import CommandSlurm
from tests.devcluster.sites import ACCOUNTING

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = (ACCOUNTING,)
SMALL = ("--mem=1000", "--time=60")


def test_limits_strand_nothing_and_only_a_lack_of_cpus_is_advised_about(site: Any) -> None:
    """By hand, of 6 nodes with 16 CPUs, 2 of them with 4 GPUs:

    gpu0 has 4 CPUs and 2 GPUs in use, gpu1 14 and 3; cpu0 has 6 + 1 CPUs in use. Free: 12 + 2 + 9 + 3 * 16 = 71 CPUs
    and 2 + 1 GPUs. The one job that waits for resources needs 2 GPUs and 14 CPUs of a node: of no node can it use
    anything. So the 3 GPUs and, beside them, 12 + 2 CPUs are stranded. With 4 CPUs it would start on gpu0: 10 move to
    3 data workers of 4 CPUs.
    """
    running = site.submit("--qos=two-gpus", "--gpus=2", "-c4", *SMALL)
    site.settle(**{running: "RUNNING"})
    full = site.submit("--gpus=3", "-c14", *SMALL)
    site.settle(**{full: "RUNNING"})
    waiting = {
        site.submit("--qos=two-gpus", "--gpus=1", "-c2", *SMALL): ("QOSMaxGRESPerUser", "limit"),
        site.submit("--qos=ten-minutes", "--gpus=1", "-c2", *SMALL): ("QOSMaxWallDurationPerJobLimit", "time limit"),
    }
    for account, cpus, reason in (("eight-cpus", 6, "AssocGrpCpuLimit"), ("one-job", 1, "AssocMaxJobsLimit")):
        options = (f"--account={account}", "-pcpu", "-wcpu0", f"-c{cpus}", *SMALL)
        first, second = site.submit(*options), site.submit(*options)
        site.settle(**{first: "RUNNING"})
        waiting[second] = reason, "limit"
    starved = site.submit("--gpus=2", "-c14", *SMALL)
    site.settle(**{job: f"PENDING {reason}" for job, (reason, _) in waiting.items()})
    site.settle(**{starved: "PENDING Resources"})

    frag = site.told("frag")
    summary = frag["summary"]
    assert {name: summary[name] for name in ("cpus", "cpus_free", "gpus", "gpus_free", "num_left_out")} == {
        "cpus": 96, "cpus_free": 71, "gpus": 8, "gpus_free": 3, "num_left_out": 0,
    }  # fmt: skip
    assert (summary["stranded_gpus"], summary["stranded_cpus"]) == (3, 14)
    assert [(one["gpus"], one["cpus"], one["num_jobs"]) for one in frag["shapes"]] == [(2, 14, 1)]
    for job, (reason, kind) in waiting.items():
        ((told, text),) = site.blockers(job)
        assert (told, reason in text) == (kind, True)
        assert not site.facts(job)["conversion_helps"]
    assert site.blockers(starved) == [
        ("CPUs", "it needs 14 CPUs on a node; of 1 node with enough GPUs and memory the most free is 12 (gpu0)")
    ]
    directive = "#HETSTREAM --data-workers=3 --data-worker-partition=cpu"
    assert site.facts(starved)["directive"] == directive
    told = site.told("advise")
    (advice,) = told["advice"]
    (note,) = (one for one in told["notes"] if "were not looked at" in one)
    assert "scontrol show assoc_mgr" in note
    # Anybody may read there what the note leaves to be looked at.
    shown = site.run(str(site.as_nobody / "scontrol"), "show", "assoc_mgr", "flags=assoc", "accounts=eight-cpus")
    assert "GrpTRES=cpu=8(" in shown
    assert (advice["job"], advice["cpus_freed"], advice["gpus_unlocked"], advice["step"]) == (starved, 10, 2, directive)


def test_jobs_that_exceed_a_limit_alone_wait_for_nobody(site: Any) -> None:
    jobs = {
        site.submit("--qos=two-gpus", "--gpus=3", "-c2", *SMALL): "QOSMaxGRESPerUser",
        site.submit("--account=eight-cpus", "-pcpu", "-c9", *SMALL): "AssocGrpCpuLimit",
    }
    site.settle(**{job: f"PENDING {reason}" for job, reason in jobs.items()})
    for job in jobs:
        ((kind, text),) = site.blockers(job)
        assert (kind, "more than the limit by itself" in text) == ("limit", True)
        assert "hold all" not in text
    site.settle(**{site.submit("--qos=two-gpus", "--gpus=1", "-c2", *SMALL): "RUNNING"})
    for job in jobs:
        ((_, text),) = site.blockers(job)
        assert "or it asks for more than the limit by itself" in text


def test_utilisation_is_what_sacct_says(site: Any) -> None:
    """A job of 2 CPUs and 1 GPU that computes for 2 seconds, and one of 4 CPUs of another account, which sleeps."""
    begin_s = float(math.ceil(time.time()))
    # No earlier job is in the window, which begins with a whole second.
    site.wait_until(lambda: time.time() > begin_s, 2, "the next second")
    computing = "(ulimit -t 2; while :; do :; done); sleep 3"
    busy = site.submit("--account=free", "--gpus=1", "-c2", *SMALL, command=computing)
    idle = site.submit("--account=one-job", "-pcpu", "-c4", *SMALL, command="sleep 4")
    slurm = CommandSlurm(site.cluster.env)

    def ended() -> dict[str, Any]:
        usages = slurm.usages(slurm.snapshot(), begin_s, time.time())
        return {one.job: one for one in usages if one.end_s is not None}

    site.wait_until(lambda: {busy, idle} <= {*ended()}, 60, "both jobs in accounting")
    table = {one.job: (one.account, one.partition, one.cpus, one.gpus, one.user) for one in ended().values()}
    assert table[busy] == ("free", "gpu", 2, 1, "root")
    assert table[idle] == ("one-job", "cpu", 4, 0, "root")
    first = ended()[busy]
    # The kernel counts ticks for the limit and time for the sum.
    assert 1 < first.cpu_used_s < 3
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(begin_s))
    groups = {one["account"]: one for one in site.told("util", "--by", "account", f"--start={start}")["groups"]}
    for account, job, cpus, gpus in (("free", busy, 2, 1), ("one-job", idle, 4, 0)):
        hours = (ended()[job].end_s - ended()[job].start_s) / 3600
        assert groups[account]["cpu_hours"] == pytest.approx(cpus * hours, abs=1e-4)
        assert groups[account]["gpu_hours"] == pytest.approx(gpus * hours, abs=1e-4)
    used = first.cpu_used_s / (2 * (first.end_s - first.start_s))
    assert groups["free"]["cpu_effective_share"] == pytest.approx(used, abs=2e-4)
    assert groups["free"]["cpu_measured_share"] == 1


@pytest.mark.shows("`util` counts each run of a requeued job; `advise` lists the job once, by its last run")
def test_each_run_of_a_requeued_job_counts_and_a_running_one_is_not_measured(site: Any) -> None:
    """The times are compared with sacct's own sum."""
    begin_s = time.time() - 1
    job = site.submit("--account=free", "--requeue", "--gpus=1", "-c2", *SMALL, command="srun true; sleep 300")
    site.settle(**{job: "RUNNING"})
    step = ("sacct", "-nPj", f"{job}.0", "-o", "State")
    site.wait_until(lambda: "COMPLETED" in site.run(*step), 30, "the step's end")
    site.run("scontrol", "requeue", job)

    site.settle(**{job: "PENDING"})
    # Slurm lets a requeued job wait for two minutes; at once, what ends the first run can end the second.
    site.run("scontrol", "update", f"JobId={job}", "StartTime=now+5seconds")
    site.settle(**{job: "RUNNING"})
    slurm = CommandSlurm(site.cluster.env)

    def runs() -> list[Any]:
        return [run for run in slurm.usages(slurm.snapshot(), begin_s, time.time()) if run.job == job]

    site.wait_until(lambda: [run.end_s is None for run in runs()] == [False, True], 60, "both runs in accounting")
    first, second = runs()
    told = site.run("sacct", "-nDXPj", job, "-o", "State,ElapsedRaw").split()
    (elapsed,) = (line.split("|")[1] for line in told if line.startswith("REQUEUED"))
    assert (first.ran_s, first.gpus, second.cpu_used_s, second.gpu_share) == (float(elapsed), 1, None, None)
    site.run("scancel", job)


@pytest.mark.parametrize("closed", ["DenyQos=normal", "State=DOWN", "MaxTime=10"])
def test_a_partition_that_admits_no_job_of_its_owner_hides_no_reason_of_another(site: Any, closed: str) -> None:
    """All nodes of cpu are full. Those of the other partition are idle, and no room; Slurm tells of it alone."""
    site.run("scontrol", "create", "PartitionName=other", "Nodes=gpu[0-1]", "State=UP")
    try:
        site.settle(**{site.submit("-pcpu", "-N4", "-n64", *SMALL): "RUNNING"})
        site.run("scontrol", "update", "PartitionName=other", closed)
        job = site.submit("-pcpu,other", "-n16", "-N1", *SMALL)
        site.settle(**{job: "PENDING"})
        site.wait_until(lambda: site.state(job) != "PENDING None", 60, "a reason")
        assert site.blockers(job)[0][0] == "CPUs"
        assert site.facts(job)["fits_on"] == []
        ((waits_for, partitions),) = [
            (row["waits_for"], row["partitions"]) for row in site.told("jobs")["jobs"] if row["job"] == job
        ]
        assert (waits_for, sorted(partitions)) == ("CPUs", ["cpu", "other"])
        assert [shape["partitions"] for shape in site.told("frag")["shapes"]] == [["cpu"]]
    finally:
        site.cluster.cancel_all()
        site.wait_until(lambda: not site.run("squeue", "--all", "--noheader"), 60, "an empty queue")
        site.run("scontrol", "delete", "PartitionName=other")


def test_nothing_of_the_database_is_left_to_others(site: Any) -> None:
    """The database listens on its socket alone, in a directory of root's own."""
    directory = site.cluster.state_dir / "database"
    assert directory.stat().st_mode & 0o077 == 0
    assert (site.cluster.state_dir / "slurmdbd.conf").stat().st_mode & 0o077 == 0
    assert (directory / "socket").is_socket()
    assert not os.path.exists("/var/lib/mysql")
