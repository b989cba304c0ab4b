"""A site with accounting, a guard and a packer: by which ways a QOS or a partition comes that a job has not named."""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetstream.hetjob.site.messages import ShowGpus
from hetstream.slurm_plugin.client.packing_slurm import PackingSlurm
from hetstream.slurm_plugin.packing.packer import Packer
from hetstream.slurm_plugin.packing.state import PackingEvent
from tests.devcluster.sites import ACCOUNTING
from tests.devcluster.spec import ClusterShape
from tests.sites.conftest import Site

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = (ACCOUNTING,)
PACKING = True
SHAPE = ClusterShape(1, 4, 0, 16)
POLICY = (
    """return { opportunistic = { partitions = { "opp" }, qos = { "Ten-Minutes" }, hold = true, managers = { 1 } } }"""
)
USER = "games"  # to 26.05 nobody is nobody, as whom no job runs


@pytest.fixture
def guarded(site: Site) -> Iterator[Site]:
    """With a user who may use some accounts and QOS."""
    change = ("sacctmgr", "-i", "-Q")
    accounts = ("free", "eight-cpus", "one-job")
    site.run(
        *change, "add", "user", USER, f"account={','.join(accounts)}", "qos=normal,ten-minutes", "defaultaccount=free"
    )
    yield site
    site.run("scancel", f"--user={USER}", "--quiet")
    site.wait_until(lambda: not site.run("squeue", "--all", "--noheader"), 60, "an empty queue")
    site.run(*change, "delete", "user", USER)


def put(site: Site, name: str, text: str) -> None:
    """Write one of the guard's files, and have slurmctld read it; it compares whole seconds."""
    directory = Path(site.cluster.record.state_dir)
    hook = directory / "job_submit.lua"
    later_s = max(time.time(), hook.stat().st_mtime) + 2
    (directory / name).write_text(text)
    os.utime(hook, (later_s, later_s))


def submit(site: Site, *options: str) -> tuple[str, str]:
    """What a user hears: the job's number, and why it was refused."""
    owner = pwd.getpwnam(USER)
    who = ["setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups"]
    argv = [*who, "sbatch", "--parsable", "--output=/dev/null", "--mem=100", "--time=5", *options, "--wrap=sleep 600"]
    done = subprocess.run(
        argv, cwd="/tmp", env=site.cluster.env, capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout.strip(), done.stderr


def shown(site: Site, job: str) -> tuple[str, str]:
    """Its state, and its priority: 0 if it is held."""
    state, priority = site.run("squeue", "--noheader", f"--jobs={job}", "--Format=State:20,PriorityLong:20").split()
    return state, priority


def test_no_qos_or_partition_comes_by_another_way(guarded: Site) -> None:
    site = guarded
    site.run("sacctmgr", "-i", "-Q", "modify", "user", USER, "where", "account=one-job", "set", "qos=ten-minutes")
    site.run("sacctmgr", "-i", "-Q", "modify", "user", USER, "where", "account=eight-cpus", "set", "defaultqos=normal")
    for name, rest in (("limited", "QOS=ten-minutes State=UP"), ("first", "Alternate=second State=INACTIVE"),
                       ("second", "Alternate=opp State=DRAIN"), ("open", "Alternate=opp State=UP")):  # fmt: skip
        site.run("scontrol", "create", f"PartitionName={name}", "Nodes=gpu0", "MaxTime=60", *rest.split())
    put(site, "policy.lua", POLICY)
    for options in (
        ("--partition=limited", "--gpus=1", "--qos=normal"),
        ("--partition=limited", "--exclusive", "--qos=normal"),
        ("--partition=first", "--gpus=1", "--qos=normal"),
        ("--partition=second", "--gpus=1", "--qos=normal"),
        ("--partition=open", "--gpus=1", "--account=one-job"),
    ):
        job, said = submit(site, *options)
        assert (job, "(site rule: opportunistic)" in said) == ("", True), (options, said)
    for partition in ("limited", "first", "second"):
        job, said = submit(site, f"--partition={partition}", "--qos=normal")
        assert shown(site, job) == ("PENDING", "0"), (partition, said)
    for options in (("--account=eight-cpus",), ("--qos=normal",)):
        job, said = submit(site, "--partition=open", "--gpus=1", *options)
        assert shown(site, job)[1] != "0", (options, said)


def test_the_packer_holds_who_came_past_the_guard_into_an_opportunistic_qos(guarded: Site) -> None:
    site = guarded
    put(site, "job_submit.lua", "function slurm_job_submit() return 0 end\nfunction slurm_job_modify() return 0 end\n")
    by_qos, _ = submit(site, "--partition=gpu", "--gpus=1", "--qos=ten-minutes")
    other, _ = submit(site, "--partition=gpu", "--gpus=1", "--qos=normal")
    site.settle(**{by_qos: "RUNNING", other: "RUNNING"})
    events: list[PackingEvent] = []
    slurm = PackingSlurm(site.cluster.env)
    packer = Packer(slurm, lambda: ShowGpus((), {}), ["opp"], events.append, acting=True, qos=["TEN-MINUTES"])
    packer.step()
    assert [(event.event, event.job) for event in events] == [("held", by_qos)]
    site.wait_until(lambda: shown(site, by_qos) == ("PENDING", "0"), 60, "its hold")
    packer.step()
    assert [event.job for event in events if event.event == "held"] == [by_qos]
    assert shown(site, other)[0] == "RUNNING"
