"""A cluster whose GPUs are shared: who may start an opportunistic job where, and what it and its neighbour then see."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetstream.hetjob.gpu.config import settings_from_environment
from hetstream.hetjob.site.messages import GpuNow, NodeGpus, ShowGpus
from hetstream.slurm_plugin.client.packing_slurm import PackingSlurm
from hetstream.slurm_plugin.client.slurm_units import expand
from hetstream.slurm_plugin.packing.packer import Packer
from hetstream.slurm_plugin.packing.quota import Quotas
from hetstream.slurm_plugin.packing.state import PackingEvent
from tests.clusters import Devcluster, running_cluster
from tests.conftest import WaitUntil
from tests.devcluster.spec import ClusterShape

pytestmark = [pytest.mark.slurm, pytest.mark.every_release]
ROOT = Path(__file__).resolve().parents[2]
OWNER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
STRANGER = ("setpriv", "--reuid=65533", "--regid=65533", "--clear-groups")
SHOWN = ("CUDA_VISIBLE_DEVICES", "HETSTREAM_GPU", "HETSTREAM_JOB_CLASS", "HETSTREAM_GPU_SOCKET", "PYTHONPATH")
# Says what it sees, and so does a step; then it waits until the test lets it go.
SCRIPT = f"""#!/bin/bash
show() {{ for name in {" ".join(SHOWN)}; do echo "$name=${{!name}}"; done; }}
export -f show
show >$SLURM_JOB_ID.batch
srun --overlap bash -c show >$SLURM_JOB_ID.step
touch $SLURM_JOB_ID.$SLURM_RESTART_COUNT.runs
until [ -e end ]; do sleep 0.1; done
"""


class Cluster(Devcluster):
    """The cluster, where jobs of every user run."""

    @property
    def sharing(self) -> Path:
        return self.state_dir / "sharing" / "gpu0"

    def submit(self, *words: str, who: tuple[str, ...] = OWNER) -> str:
        return self.run(*who, "sbatch", "--parsable", "--time=5", "--mem=100", *words, "job.sh")

    def place(self, job: str, gpu: int) -> None:
        """As the packer does."""
        fields = ("ReqNodeList=gpu0", f"Gres=opp:p{gpu}:1", f"Comment=hetstream:gpu={gpu}")
        self.run("scontrol", "update", f"JobId={job}", *fields)
        self.run("scontrol", "release", job)

    def seen(self, job: str, where: str) -> dict[str, str]:
        lines = (self.out_dir / f"{job}.{where}").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def runs(self, job: str, restarts: str = "") -> bool:
        return (self.out_dir / f"{job}.{restarts}.runs").exists()

    def grants(self) -> dict[str, Any]:
        found = {}
        for path in (self.sharing / "grants").glob("*.json"):
            with contextlib.suppress(FileNotFoundError):  # its job has just ended
                found[path.stem] = json.loads(path.read_text())
        return found

    def cancel(self, *jobs: str) -> None:
        self.attempt("scancel", *jobs)


@pytest.fixture
def cluster(packing: Devcluster, request: pytest.FixtureRequest, wait_until: WaitUntil) -> Iterator[Cluster]:
    """The module's cluster without jobs."""
    cluster = Cluster(packing.record, packing.directory(request.node.name))
    (cluster.out_dir / "job.sh").write_text(SCRIPT)
    yield cluster
    cluster.clear(wait_until)
    wait_until(lambda: not list(cluster.sharing.glob("*/[0-9]*")), 10, "the end of all that the Prolog wrote")


@pytest.mark.shows("an opportunistic job is held where the policy says so, and its owner cannot release it")
@pytest.mark.shows("texts of refusals reach the user, and name the rule and the way out")
def test_no_door_starts_an_opportunistic_job_but_the_packers(cluster: Cluster, release: str) -> None:
    refused = [
        ("sbatch", "-popp", "--gpus=1", "job.sh"),
        ("sbatch", "-popp", "--gres=gpu:1", "job.sh"),
        ("sbatch", "-popp", "--gres=opp:p0:1", "job.sh"),
        ("sbatch", "-pgpu", "--gres=opp:p0:1", "job.sh"),
        ("sbatch", "-pgpu", "--gres=gpu:1,opp:p0:1", "job.sh"),
        ("sbatch", "-pgpu,opp", "job.sh"),
        ("sbatch", "-popp", "--comment=hetstream:gpu=0", "job.sh"),
        ("srun", "-popp", "true"),
        ("salloc", "-popp", "true"),
    ]
    for argv in refused:
        done = cluster.attempt(*OWNER, *argv)
        assert done.returncode == 1, argv
        assert "(site rule: opportunistic)" in done.stderr, argv
    job = cluster.submit("-popp", "--priority=900", "--nice=3", "--no-requeue", "--comment=hetstream:gpu-memory=64M")
    held = r"Priority=0 .*JobState=PENDING Reason=JobHeldUser .*Requeue=1 .*Comment=hetstream:gpu-memory=64M"

    def is_held() -> bool:
        shown = cluster.show(job)
        return bool(re.search(held, shown, re.DOTALL)) and "opp" not in re.findall(r"(?:TresPer\w+|Gres)=(\S+)", shown)

    assert is_held(), cluster.show(job)
    # What its owner holds the packer sees in the Comment; Slurm's own word for both holds is the same.
    for door, word in (("uhold", " hetstream:hold"), ("release", ""), ("hold", " hetstream:hold"), ("release", "")):
        assert cluster.attempt(*OWNER, "scontrol", door, job).returncode == 0, door
        assert re.search(rf"Comment=hetstream:gpu-memory=64M{word} *$", cluster.show(job), re.MULTILINE), door
        assert is_held(), (door, cluster.show(job))
    # An operator's hold is told apart by Slurm, and is handed back by uhold.
    for who, door, reason in (
        ((), "hold", "Admin"),
        (OWNER, "uhold", "Admin"),
        (OWNER, "release", "Admin"),
        ((), "uhold", "User"),
    ):
        assert cluster.attempt(*who, "scontrol", door, job).returncode == 0, (who, door)
        assert f"Reason=JobHeld{reason} " in cluster.show(job), (who, door)
    own = cluster.submit("-popp", "--hold")
    assert "Comment=hetstream:hold" in cluster.show(own)
    assert cluster.attempt(*OWNER, "scontrol", "release", own).returncode == 0
    assert "hetstream:hold" not in cluster.show(own)
    assert "Priority=0 " in cluster.show(own)
    an_operator_holds(cluster)
    doors = [
        ("release", job),
        *(
            ("update", f"JobId={job}", change)
            for change in (
                "Priority=5", "Nice=0", "Nice=7", "Partition=gpu", "Partition=gpu,opp", "TresPerNode=gres:gpu:1",
                "Gres=opp:p0:1", "TresPerNode=gres:opp:p0:1", "Comment=hetstream:gpu=0", "Requeue=0",
            )
        ),
    ]  # fmt: skip
    for door in doors:
        done = cluster.attempt(*OWNER, "scontrol", *door)
        assert done.returncode == 1, door
        if release != "host":  # 22.05 shows no text of job_modify
            assert "(site rule: opportunistic)" in done.stderr, door
        assert is_held(), (door, cluster.show(job))
    assert cluster.attempt(*STRANGER, "scontrol", "release", job).returncode == 1
    assert is_held()
    for change in ("TimeLimit=3", "JobName=mine", "ReqNodeList=gpu0", "Comment=hetstream:gpu-memory=32M"):
        assert cluster.attempt(*OWNER, "scontrol", "update", f"JobId={job}", change).returncode == 0, change
    # Between the packer's two steps.
    fields = ("ReqNodeList=gpu0", "Gres=opp:p1:1", "Comment=hetstream:gpu=1")
    assert cluster.attempt("scontrol", "update", f"JobId={job}", *fields).returncode == 0
    for change in ("ReqNodeList=", "ExcNodeList=gpu0", "Comment=mine", "TresPerNode=", "Features=a", "Priority=5"):
        assert cluster.attempt(*OWNER, "scontrol", "update", f"JobId={job}", change).returncode == 1, change
    assert cluster.attempt(*OWNER, "scontrol", "update", f"JobId={job}", "TimeLimit=2").returncode == 0
    shown = cluster.show(job)
    assert all(text in shown for text in ("Priority=0 ", "opp:p1", "Comment=hetstream:gpu=1", "ReqNodeList=gpu0")), (
        shown
    )


def an_operator_holds(cluster: Cluster) -> None:
    """By `uhold`, a job that was let go: that is neither the packer's hold, nor the owner's to release."""
    job = cluster.submit("-popp", "--begin=now+1hour")

    def held(*words: str, who: tuple[str, ...] = ()) -> tuple[int, bool]:
        code = cluster.attempt(*who, "scontrol", *words).returncode
        return code, "hetstream:operators-hold" in cluster.show(job)

    assert held("release", job) == (0, False)
    assert "Priority=0 " not in cluster.show(job)
    assert held("uhold", job) == (0, True)
    assert held("release", job, who=OWNER) == (1, True)
    assert held("update", f"JobId={job}", "Comment=mine", who=OWNER) == (0, True)
    assert held("uhold", job) == (0, False)
    assert "Priority=0 " in cluster.show(job)
    assert held("release", job) == (0, False)
    assert held("update", f"JobId={job}", "AdminComment=hetstream:taking") == (0, False)
    assert held("uhold", job) == (0, False), "the packer has said that this hold is its own"
    cluster.cancel(job)


@contextlib.contextmanager
def policy_of(cluster: Cluster, rules: str, whole: str = "") -> Iterator[None]:
    """The guard with more rules, or with another policy."""
    state_dir = Path(cluster.record.state_dir)
    policy, hook = state_dir / "policy.lua", state_dir / "job_submit.lua"
    before = policy.read_text()

    def write(text: str) -> None:
        policy.write_text(text)
        # slurmctld compares whole seconds, and reads no script again that has the second in which it was read.
        later_s = max(time.time(), hook.stat().st_mtime) + 2
        os.utime(hook, (later_s, later_s))

    write(whole or before.replace("return {", f"return {{ {rules},"))
    try:
        yield
    finally:
        write(before)


def test_where_gpus_have_quotas_no_owner_starts_his_guaranteed_job(
    cluster: Cluster, wait_until: WaitUntil, release: str
) -> None:
    with policy_of(cluster, 'quota = { partitions = { "gpu" } }'):
        job = cluster.submit("-pgpu", "--gpus=1", "--account=a")
        assert re.search(r"Priority=0 .*JobState=PENDING Reason=JobHeldUser", cluster.show(job), re.DOTALL)
        for change in ("Priority=5", "Nice=0", "TresPerJob=gres:gpu:2", "Account=b", "Gres=gpu:0", "Gres=gpu: 0:0"):
            assert cluster.attempt(*OWNER, "scontrol", "update", f"JobId={job}", change).returncode == 1, change
        done = cluster.attempt(*OWNER, "scontrol", "release", job)
        assert done.returncode == 1
        if release != "host":  # 22.05 shows no text of job_modify
            assert "(site rule: quota)" in done.stderr
        done = cluster.attempt(*OWNER, "sbatch", "-pgpu", "--comment=hetstream:upgrade=1:0@9999999999", "job.sh")
        assert (done.returncode, "(site rule: opportunistic)" in done.stderr) == (1, True)
        assert re.search("Priority=0 ", cluster.show(job))
        assert (
            cluster.attempt(*OWNER, "sbatch", "--parsable", "-pgpu", "--mem=100", "job.sh").returncode == 0
        )  # without a GPU
        assert cluster.attempt("scontrol", "release", job).returncode == 0
        wait_until(lambda: cluster.runs(job), 30, "its start")


# What an ordinary user can write to get GPUs; the last of them by the environment, and by a line of the script.
WAYS_TO_GPUS = (
    ("-n1", "--gpus=1"), ("-n2", "--ntasks-per-gpu=1"), ("-n4", "--ntasks-per-gpu=4"), ("-N1", "--ntasks-per-gpu=2"),
    ("-n2", "--ntasks-per-gpu=1", "--gpus=2"), ("-n3", "--ntasks-per-gpu=2"), ("-n2", "--gpus-per-task=1"),
    ("-N1", "--gpus-per-node=1"), ("--gpus-per-socket=1", "--sockets-per-node=1"), ("--gres=gpu",),
    ("--gres=gpu:1,gpu:2",), ("--gres=gpu:2,gpu:0",), ("--gpus=2,0",), ("--gres=gpu:4,gpu:0,gpu: 0:0",),
    ("--gpus-per-node=1", "--gres=gpu:0"), ("--gres=gpu: 0:0",), ("--gres=gpu:2T",),
    ("--gpus=1", "--gpus-per-task=1", "-n4"), ("--gpus=1", "--gres=gpu:4"), ("--gres=gpu:-18446744073709551614",),
    ("--gres=gpu:1K",), ("--gres=xgres:gpu:1",),
    ("--gres=gres:gpu:1",), ("--gres=gpu:+1",),
    ("--exclusive",), ("--array=0-1", "-n2", "--ntasks-per-gpu=1"), ("--core-spec=1",),
    ("-n1", "--ntasks-per-node=2", "--gpus-per-task=1"), ("-n3", "-N2", "--ntasks-per-node=2", "--gpus-per-task=1"),
    ("-n1", "--gpus=1", ":", "-pgpu", "--mem=100", "-n2", "--ntasks-per-gpu=1"), ("--wrap", "sleep 60"),
    ("by_line.sh",),
)  # fmt: skip


@pytest.mark.shows("no way to ask for GPUs goes round quotas or `cpus_per_gpu`")
def test_no_way_to_gpus_goes_round_the_quotas(cluster: Cluster, release: str, wait_until: WaitUntil) -> None:
    by_task = [("--tres-per-task=gres/gpu:1", "-n2"), ("--tres-per-task=cpu=1,gres/gpu=1", "-n1")]
    (cluster.out_dir / "by_line.sh").write_text("#!/bin/sh\n#SBATCH -n2 --ntasks-per-gpu=1\nsleep 60\n")
    with policy_of(cluster, 'quota = { partitions = { "gpu" } }'):
        for words in (*WAYS_TO_GPUS, *(by_task if release != "host" else [])):
            script = [] if {"--wrap", "by_line.sh"} & {*words} else ["job.sh"]
            environ = ["env", "SBATCH_GRES=gpu:1"] if "--wrap" in words else []
            common = ("--parsable", "--time=5", "--mem=100", "--output=/dev/null", "-pgpu")
            done = cluster.attempt(*OWNER, *environ, "sbatch", *common, *words, *script)
            shown = cluster.attempt("scontrol", "--details", "--oneliner", "show", "job").stdout.splitlines()
            over = re.compile(r" JobState=(CANCELLED|COMPLETING) ")  # what was cancelled a moment ago may still end
            records = [line for line in shown if line.startswith("JobId=") and not over.search(line)]
            assert bool(records) == (done.returncode == 0), (words, done.stderr)
            for record in records:
                is_about_gpus = re.search(r"(?:TresPer\w+|Gres|GRES)=\S*gpu", record) or "NtasksPerTRES" in record
                assert is_about_gpus or words == ("--core-spec=1",), "whole nodes, where the site allows that"
                is_held = all(text in record for text in ("JobState=PENDING", " Priority=0 ", "hetstream:guarded"))
                assert is_held or not is_about_gpus, (words, record)
            if words == ("-n2", "--ntasks-per-gpu=1"):
                assert re.search(r"TresPerJob=gres[:/]gpu:2 ", records[0]), "the packer counts what is written there"
            if records:
                cluster.cancel(*{line.split()[0].removeprefix("JobId=") for line in records})
        job = cluster.submit("-pgpu", "--begin=now+1hour")
        assert "hetstream:guarded" not in cluster.show(job)
        for change in ("gres:gpu:1", "gres/gpu:1", "xgres:gpu:1", "gres:gpu: 1", "gpu"):
            for field in ("TresPerNode", "TresPerJob", "TresPerTask", "Gres"):
                cluster.attempt(*OWNER, "scontrol", "update", f"JobId={job}", f"{field}={change}")
                assert "gpu" not in "".join(re.findall(r"(?:TresPer\w+|Gres)=(\S+)", cluster.show(job))), (
                    field,
                    change,
                )
        assert cluster.attempt(*OWNER, "scontrol", "update", f"JobId={job}", "OverSubscribe=NO").returncode == 1
        of_tasks = cluster.submit("-pgpu", "-n2", "--ntasks-per-gpu=1")
        assert cluster.attempt("scontrol", "release", of_tasks).returncode == 0
        wait_until(lambda: cluster.runs(of_tasks), 30, "the start of a job whose GPUs the guard has written down")
        assert cluster.seen(of_tasks, "batch")["CUDA_VISIBLE_DEVICES"] == "0,1"
    with policy_of(cluster, 'cpus_per_gpu = { max = { gpu = 1 }, action = "refuse" }'):
        for words in (
            ("-n2", "--gpus=1"),
            ("-n4", "--ntasks-per-gpu=4"),
            ("--gres=gpu:1,gpu:1", "-n2"),
            ("by_line.sh", "-c2"),
            ("-n1", "--mincpus=2", "--gpus=1"),
            ("-n2", "-c1", "--gpus=1"),
        ):
            done = cluster.attempt(*OWNER, "sbatch", "--mem=100", "-pgpu", *words[1:], words[0], "job.sh")
            assert (done.returncode, "(site rule: cpus_per_gpu)" in done.stderr) == (1, True), (words, done.stderr)


def requests_for_gpus(number: int) -> Iterator[tuple[int, list[str]]]:
    """GPUs in all that requests name, and words on tasks, nodes and cores that have nothing to do with them."""
    choices = random.Random(7)
    options = {
        "-n": (2, 3, 4, 8, 12), "-N": (1, 2, "1-2"), "-c": (1, 2, 4), "--ntasks-per-node=": (1, 2, 4),
        "--ntasks-per-socket=": (1, 2), "--ntasks-per-core=": (1,), "--cpus-per-gpu=": (1, 4), "--mincpus=": (2, 4),
        "--sockets-per-node=": (1,), "--ntasks-per-gpu=": (1, 2),
    }  # fmt: skip
    known = [[], ["-n3", "--ntasks-per-node=1"], ["-n3", "--ntasks-per-socket=1"], ["-n12", "-c1"], ["-n6", "-c2"]]
    yield from ((1, words) for words in known)
    for _ in range(number - len(known)):
        chosen = choices.sample(list(options), choices.randint(0, 4))
        yield choices.choice((1, 1, 2, 3)), [f"{name}{choices.choice(options[name])}" for name in chosen]


@pytest.mark.slow
def test_no_request_that_is_accepted_gets_more_gpus_than_were_counted(release: str) -> None:
    """Slurm may give a job on more nodes than it has GPUs all of each: what it gave is compared."""
    counted = 0
    with running_cluster("wide", ClusterShape(3, 2, 0, 4), release, wrapper=Cluster, packing=True) as cluster:
        (cluster.out_dir / "job.sh").write_text("#!/bin/sh\ntouch $SLURM_JOB_ID..runs\nsleep 60\n")
        with policy_of(cluster, 'quota = { partitions = { "gpu" } }'):
            for gpus, words in requests_for_gpus(60):
                common = ("--parsable", "--time=5", "--mem-per-cpu=1", "--output=/dev/null", "-pgpu", f"--gpus={gpus}")
                job = cluster.attempt(*OWNER, "sbatch", *common, *words, "job.sh").stdout.strip()
                if not job:
                    continue
                cluster.attempt(*OWNER, "scontrol", "update", f"JobId={job}", "ReqNodeList=gpu0,gpu1,gpu2")
                cluster.attempt(*OWNER, "scontrol", "update", f"JobId={job}", "NumNodes=3")
                cluster.attempt("scontrol", "release", job)
                deadline = time.monotonic() + 3
                while not cluster.runs(job) and time.monotonic() < deadline:
                    time.sleep(0.1)
                given = re.findall(r"Nodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=\S*?gpu[^,()]*:(\d+)\(", cluster.show(job))
                assert sum(len(expand(hosts)) * int(each) for hosts, each in given) <= gpus, (gpus, words)
                counted += bool(given)
                cluster.cancel(job)
    assert counted >= 15


def test_what_one_node_suffices_for_is_counted(cluster: Cluster, release: str) -> None:
    """sbatch writes the product of tasks and their CPUs: more than one task has is a job that may spread."""
    del release  # the cluster is of it
    requests = (("-c2",), ("-c2", "--overcommit"), ("-n1", "--mincpus=2"), ("--cpus-per-gpu=2",), ("-n1", "-c2"), ())
    with policy_of(cluster, 'quota = { partitions = { "gpu" } }'):
        for words in requests:
            for gpus in ("--gpus-per-node=1", "--gres=gpu:1"):
                cluster.cancel(cluster.submit("-pgpu", gpus, *words))


@pytest.mark.shows("the packer holds what has GPUs of a quota partition without the guard's mark")
def test_the_packer_holds_what_runs_with_gpus_past_the_guard(cluster: Cluster, wait_until: WaitUntil) -> None:
    """The guard's policy names no partition with quotas, or it has a hole: what Slurm gave is what counts."""
    quotas = Quotas({"a": 1}, partitions=("gpu",))
    events: list[PackingEvent] = []

    def packer_of() -> Packer:
        slurm = PackingSlurm(cluster.env)
        readings = ShowGpus((), {})
        return Packer(slurm, lambda: readings, ["opp"], events.append, acting=True, quotas=lambda _: quotas)

    packer = packer_of()

    def step() -> set[tuple[str, str]]:
        events.clear()
        packer.step()
        return {(event.event, event.job) for event in events}

    def is_held(job: str) -> bool:
        shown = cluster.show(job)
        return all(text in shown for text in ("JobState=PENDING", "Priority=0 ", "AdminComment=hetstream:guarded"))

    without = cluster.submit("-pgpu")
    waits = cluster.submit("-pgpu", "--gpus=1", "--begin=now+1hour")
    tasks = cluster.submit("-pgpu", "--gpus=1", "--begin=now+1hour", "--array=3-4")
    het = cluster.submit("-pgpu", "--begin=now+1hour", ":", "-pgpu", "--gpus=1", "--mem=100")
    of_tasks = cluster.submit("-pgpu", "-n1", "--ntasks-per-gpu=1", "--no-requeue", f"--comment={'x' * 1024}")
    wait_until(lambda: cluster.runs(without) and cluster.runs(of_tasks), 30, "the starts")
    argv = [*OWNER, "salloc", "-pgpu", "-Jinteractive", "--kill-command=KILL", "--mem=100", "-n1", "--ntasks-per-gpu=1"]
    argv += ["sleep", "300"]
    environ = cluster.env
    with subprocess.Popen(argv, cwd=cluster.out_dir, env=environ, stderr=subprocess.DEVNULL) as allocation:
        try:
            running = ("squeue", "-h", "-tR", "-ninteractive", "-o%A")
            wait_until(lambda: cluster.attempt(*running).stdout, 30, "the allocation")
            interactive = cluster.attempt(*running).stdout.strip()
            found = step()
            assert ("cancelled", interactive) in found
            allocation.wait(60)
        finally:
            allocation.kill()
    assert found >= {("held", job) for job in (waits, f"{tasks}_[3-4]", het, of_tasks)}
    for job in (waits, f"{tasks}_3", f"{tasks}_4", het, of_tasks):
        wait_until(functools.partial(is_held, job), 60, f"the hold of {job}")
        assert not re.search(r" Comment=.*hetstream:hold(?!-)", cluster.show(job)), "its owner does not hold it"
    assert "JobState=RUNNING" in cluster.show(without)
    named = cluster.submit("-pgpu", "--gpus=1", "--job-name=a\nJobId=1 JOB_GRES=(null)\nJobId=2 JOB_GRES=")
    wait_until(lambda: cluster.runs(named), 60, "the start of a job whose name looks like records")
    assert {job for event, job in step() if event in ("held", "cancelled")} == {named}
    wait_until(lambda: is_held(named), 60, "its hold")
    assert not {event for event, _ in step()} & {"held", "cancelled"}
    packer = packer_of()
    step()
    (reason,) = [event.reason for event in events if event.job == of_tasks]
    assert reason.startswith("its record does not say how many GPUs it asks for"), "slurmctld made them of its tasks"


def test_who_holds_more_gpus_than_were_granted_is_taken_back(cluster: Cluster, wait_until: WaitUntil) -> None:
    """What Slurm gave is compared with what the packer counted; what can never start keeps no quota."""
    quotas = [Quotas({"a": 1}, partitions=("gpu",))]
    events: list[PackingEvent] = []
    slurm = PackingSlurm(cluster.env)
    packer = Packer(
        slurm, lambda: ShowGpus((), {}), ["opp"], events.append, acting=True, quotas=lambda _: quotas[0]
    )  # fmt: skip

    def step() -> dict[str, str]:
        events.clear()
        packer.step()
        return {f"{event.event} {event.job}": event.reason for event in events}

    with policy_of(cluster, 'quota = { partitions = { "gpu" } }'):
        never = cluster.submit("-pgpu", "--gpus=1", "--account=a", "--cpus-per-task=64")
        job = cluster.submit("-pgpu", "--gpus=2", "--account=a", "--comment=mine")
        # Slurm refuses to release what has no place, or holds it then, and the next in its line has the quota.
        assert {f"granted {never}", f"refused {never}"} & step().keys()
        other = cluster.submit("-pgpu", "--gpus=1", "--account=a")
        wait_until(lambda: f"granted {other}" in step(), 60, "the grant of the next one")
        wait_until(lambda: cluster.runs(other), 30, "its start")
        assert not {f"granted {never}", f"refused {never}"} & step().keys()
        cluster.cancel(other)
        assert cluster.attempt("scontrol", "release", job).returncode == 0  # by an operator, whatever the quota
        wait_until(lambda: cluster.runs(job), 60, "the job")
        assert not [event for event in step() if event.startswith(("taken back", "granted"))]
        note = "AdminComment=hetstream:guarded hetstream:granted=1"  # as if its request had been counted so
        assert cluster.attempt("scontrol", "update", f"JobId={job}", note).returncode == 0
        assert f"taken back {job}" not in step(), "one look is no proof"
        reason = step()[f"taken back {job}"]
        assert reason.startswith("it holds 2 GPUs, and 1 were granted: tenant a has 0 of its 1 GPU left. Submit it")
        wait_until(lambda: "JobState=PENDING" in cluster.show(job), 60, "its end")
        shown = cluster.show(job)
        assert "Priority=0 " in shown
        assert "hetstream:taken-back=it-held-2-GPUs-and-1-were-granted" in shown
        assert "hetstream:took=2" in shown
        # Two minutes after it was requeued, it stands in its line again; here an administrator has it do so at once.
        assert cluster.attempt("scontrol", "update", f"JobId={job}", "StartTime=now").returncode == 0
        assert "it took 2 GPUs when it was started" in step()[f"offered {job}"]
        quotas[0] = Quotas({"a": 2}, partitions=("gpu",))
        assert f"granted {job}" in step()
        assert "hetstream:granted=2" in cluster.show(job)


NO_GUARD = """
function slurm_job_submit() return slurm.SUCCESS end
function slurm_job_modify() return slurm.SUCCESS end
return slurm.SUCCESS
"""


@contextlib.contextmanager
def without_guard(cluster: Cluster) -> Iterator[None]:
    """slurmctld runs a file that lets everything through."""
    hook = Path(cluster.record.state_dir) / "job_submit.lua"
    before = hook.read_text()

    def write(text: str) -> None:
        later_s = max(time.time(), hook.stat().st_mtime) + 2
        hook.write_text(text)
        os.utime(hook, (later_s, later_s))

    write(NO_GUARD)
    try:
        yield
    finally:
        write(before)


def test_without_a_guard_nobody_stays_in_an_opportunistic_partition_but_by_the_packer(
    cluster: Cluster, wait_until: WaitUntil
) -> None:
    """Slurm's own word is what counts: the partition, what was allocated, and the AdminComment."""
    environ = cluster.env
    events: list[PackingEvent] = []

    def packer_of() -> Packer:
        now = GpuNow(0, "GPU-0", 0.1, 1 << 40)
        told = ShowGpus((NodeGpus("gpu0", 0.0, (now,)),), {})
        return Packer(PackingSlurm(environ), lambda: told, ["opp"], events.append, acting=True)

    packer = packer_of()

    def step() -> set[tuple[str, str]]:
        events.clear()
        packer.step()
        return {(event.event, event.job) for event in events}

    def is_held(job: str, others: str = "") -> bool:
        shown = cluster.show(job)
        return all(text in shown for text in ("JobState=PENDING", "Priority=0 ", "hetstream:guarded"))

    with without_guard(cluster):
        plain = cluster.submit("-popp", "--comment=mine")
        gpu = cluster.submit("-popp", "--gres=gpu:1")
        marked = cluster.submit("-popp", "--gres=opp:p1:1", "--comment=hetstream:gpu=1", "--no-requeue")
        either = cluster.submit("-popp,gpu", "--begin=now+1hour")
        array = cluster.submit("-popp", "--array=1-40%1", "--begin=now+1hour")
        het = cluster.submit("-popp", "--begin=now+1hour", ":", "-pgpu", "--mem=100")
        running = [plain, gpu, marked]
        wait_until(lambda: all(cluster.runs(job) for job in running), 60, "the starts")
        argv = [*OWNER, "salloc", "-popp", "-Jinteractive", "--kill-command=KILL", "--mem=100", "sleep", "300"]
        with subprocess.Popen(argv, cwd=cluster.out_dir, env=environ, stderr=subprocess.DEVNULL) as allocation:
            try:
                asked = ("squeue", "-h", "-tR", "-ninteractive", "-o%A")
                wait_until(lambda: cluster.attempt(*asked).stdout, 30, "the allocation")
                interactive = cluster.attempt(*asked).stdout.strip()
                found = step()
                allocation.wait(60)
            finally:
                allocation.kill()
        assert ("cancelled", interactive) in found
        assert {("taken back", name) for name in (*running, either, f"{array}_[1-40]", f"{het}+0")} <= found, found
        for job in (*running, either, f"{array}_1", f"{array}_40", het):
            wait_until(functools.partial(is_held, job), 60, f"the hold of {job}")
        assert re.search(r" Comment=mine hetstream:taken-back=it-ran-without-a-place *$", cluster.show(plain), re.M)
        assert " Comment=hetstream:taken-back=" in cluster.show(marked)
        assert "hetstream:hold" not in cluster.show(plain), "its owner does not hold it"
        packer = packer_of()
        again = step()
        assert not [event for event, _ in again if event in ("taken back", "cancelled", "evicted")], again
        reasons = {event.job: event.reason for event in events if event.event == "waits"}
        assert "it asks for GPUs of Slurm's own" in reasons[gpu]
        assert "it names partition gpu, too" in reasons[either]
        # Its owner lets it go, which no guard refuses: it is taken back again.
        assert cluster.attempt(*OWNER, "scontrol", "release", gpu).returncode == 0
        wait_until(lambda: ("taken back", gpu) in step(), 60, "the end of that")
        assert is_held(gpu)
        # Two minutes after it was requeued, the first one is placed as all are; here an administrator does it at once.
        placed = cluster.submit("-popp", "--begin=now+1hour")
        step()
        fields = ("ReqNodeList=gpu0", "Gres=opp:p1:1", "Comment=hetstream:gpu=1", "StartTime=now")
        note = f"AdminComment=hetstream:placed=gpu0:1@{time.time():.0f}@0"
        assert cluster.attempt("scontrol", "update", f"JobId={placed}", *fields, note).returncode == 0
        assert cluster.attempt("scontrol", "release", placed).returncode == 0
        wait_until(lambda: cluster.runs(placed), 60, "its start")
        assert ("started", placed) in step()
        packer = packer_of()
        assert ("started", placed) in step(), "what the packer, or an administrator, has placed stays"
        assert "JobState=RUNNING" in cluster.show(placed)


@pytest.mark.shows("each call of the job_submit hook takes less than 50 ms, whatever stands in its fields")
def test_no_text_of_a_user_holds_up_others_submissions(cluster: Cluster) -> None:
    """Both hooks read it inside slurmctld, which answers nobody meanwhile."""
    held = cluster.submit("-popp", "--hold")
    for field in ("comment", "partition", "gres", "account", "reservation", "constraint"):
        # (sbatch itself takes the square of a list of GRES.)
        num = 50_000 if field == "gres" else 1_500_000
        for flood in (" ", "x", ",", "("):
            (cluster.out_dir / "flood.sh").write_text(f"#!/bin/sh\n#SBATCH --{field}='{flood * num}x'\ntrue\n")
            began_s = time.monotonic()
            done = cluster.attempt(*STRANGER, "sbatch", "flood.sh")
            assert time.monotonic() - began_s < 20, (field, flood, "the hook alone took more than a minute")
            assert done.returncode != 0, (field, flood)
            assert "Socket timed out" not in done.stderr, (field, flood)
    assert cluster.attempt(*OWNER, "scontrol", "update", f"JobId={held}", f"Comment={' ' * 100_000}x").returncode == 1
    assert cluster.submit("-popp", "--hold")


MARKS = (
    "hetstream:gpu=0,1", " hetstream:gpu=0,1", "hetstream:hold hetstream:gpu=0,1", "a\thetstream:holds=1@0",
    "mine;hetstream:upgrade=1:0@9999999999",
)  # fmt: skip
POLICIES_WITHOUT_THE_PACKER = ("return {}", 'return { quota = { partitions = { "gpu" } } }', "return { quota = {{ }")


@pytest.mark.shows("the packer's marks are refused in any word of a Comment, whatever the policy")
def test_nobody_writes_the_packers_marks_whatever_the_policy(cluster: Cluster, wait_until: WaitUntil) -> None:
    for whole in ("", *POLICIES_WITHOUT_THE_PACKER):
        with policy_of(cluster, "timeout_s = 9", whole):
            for partition in ("gpu", "opp"):
                job = cluster.submit(f"-p{partition}", "--hold", "--comment=mine")
                for mark in MARKS:
                    done = cluster.attempt(*OWNER, "sbatch", f"-p{partition}", f"--comment={mark}", "job.sh")
                    assert (done.returncode, "(site rule: opportunistic)" in done.stderr) == (1, True), (whole, mark)
                    done = cluster.attempt(*OWNER, "scontrol", "update", f"JobId={job}", f"Comment={mark}")
                    assert done.returncode == 1, (whole, mark)
                for change in (
                    ("update", f"JobId={job}", "Comment=hetstream:gpu=0  "),
                    ("hold", job),
                    ("release", job),
                ):
                    cluster.attempt(*OWNER, "scontrol", *change)
                    assert "hetstream:gpu=" not in cluster.show(job), (whole, change)
                cluster.cancel(job)


@pytest.mark.shows("the packer's marks are refused in any word of a Comment, whatever the policy")
def test_a_mark_gives_no_gpu_outside_of_opportunistic_partitions(cluster: Cluster, wait_until: WaitUntil) -> None:
    """Root writes it here; a user could where no guard was in place."""
    job = cluster.submit("-pgpu", "--hold")
    assert cluster.attempt("scontrol", "update", f"JobId={job}", "Comment=hetstream:gpu=0,1").returncode == 0
    assert cluster.attempt("scontrol", "release", job).returncode == 0
    wait_until(lambda: cluster.runs(job), 30, "the job")
    assert cluster.grants() == {}
    for where in ("batch", "step"):
        assert cluster.seen(job, where)["CUDA_VISIBLE_DEVICES"] == ""
        assert cluster.seen(job, where)["HETSTREAM_JOB_CLASS"] == ""


@pytest.mark.shows("a GPU may have two slots, by a link to the device file")
@pytest.mark.shows("opportunistic jobs have CUDA_VISIBLE_DEVICES by UUID; a job without a place sees no GPU")
def test_two_jobs_on_one_gpu_see_it_and_nothing_stays_of_them(cluster: Cluster, wait_until: WaitUntil) -> None:
    guaranteed = cluster.submit("-pgpu", "--gpus=1")
    wait_until(lambda: cluster.runs(guaranteed), 30, "the guaranteed job")
    number = cluster.seen(guaranteed, "batch")["CUDA_VISIBLE_DEVICES"]
    gpu = f"emulation:{cluster.sharing}/gpu{number}"
    job = cluster.submit("-popp")
    cluster.place(job, int(number))
    wait_until(lambda: cluster.runs(job), 30, "the opportunistic job")
    assert re.search(rf"JOB_GRES=opp:p{number}:1|GRES=opp:p{number}:1", cluster.show(job)), cluster.show(job)
    for where in ("batch", "step"):
        for shown, job_class in ((guaranteed, "guaranteed"), (job, "opportunistic")):
            seen = cluster.seen(shown, where)
            assert seen["CUDA_VISIBLE_DEVICES"] == number, (where, job_class)
            assert (seen["HETSTREAM_GPU"], seen["HETSTREAM_JOB_CLASS"]) == (gpu, job_class)
            assert seen["HETSTREAM_GPU_SOCKET"] == str(cluster.sharing / "gpu.sock")
            assert seen["PYTHONPATH"].split(":")[0].endswith("hetjob/gpu/startup")
            assert seen["PYTHONPATH"].count("hetjob/gpu/startup") == 1
    assert cluster.grants() == {
        guaranteed: {"uid": 65534, "job_class": "guaranteed", "gpus": [gpu]},
        job: {"uid": 65534, "job_class": "opportunistic", "gpus": [gpu]},
    }
    (cluster.out_dir / "end").touch()
    wait_until(lambda: cluster.grants() == {}, 30, "the Epilogs")


def test_a_job_that_is_submitted_from_one_with_a_gpu_shares_none(cluster: Cluster, wait_until: WaitUntil) -> None:
    """sbatch hands on the whole environment of the job that it is called in."""
    (cluster.out_dir / "child.sh").write_text("#!/bin/bash\nenv -0 >child.new && mv child.new child.env\n")
    child = "sbatch -pgpu --mem=100 --time=5 --output=/dev/null child.sh"
    (cluster.out_dir / "job.sh").write_text(f"#!/bin/bash\nenv -0 >parent.env\n{child}\n")
    cluster.submit("-pgpu", "--gpus=1")
    wait_until((cluster.out_dir / "child.env").exists, 60, "both jobs")
    settings = {}
    for name in ("parent", "child"):
        text = (cluster.out_dir / f"{name}.env").read_text()
        environ = dict(entry.partition("=")[::2] for entry in text.split("\0"))
        assert environ["HETSTREAM_GPU"].startswith("emulation:")
        settings[name] = settings_from_environment(environ)
    parent = settings["parent"]
    assert parent is not None
    assert parent.gpu.startswith("emulation:")
    assert settings["child"] is None


def test_a_job_that_is_submitted_from_an_opportunistic_one_does_not_see_its_gpu(
    cluster: Cluster, wait_until: WaitUntil
) -> None:
    """Slurm takes it away from a job without GPUs: it sees what it sees when it is submitted from outside."""
    child = "sbatch -pgpu --mem=100 --time=5 --output=/dev/null {0}.sh"
    for name in ("child", "alone"):
        text = f"#!/bin/bash\nenv -0 >{name}.new && mv {name}.new {name}.env\n"
        (cluster.out_dir / f"{name}.sh").write_text(text)
    (cluster.out_dir / "job.sh").write_text(
        f"#!/bin/bash\nenv -0 >parent.env\n{child.format('child')}\n"
        f"env -u CUDA_VISIBLE_DEVICES {child.format('alone')}\n"
    )
    cluster.place(cluster.submit("-popp"), 1)
    wait_until(lambda: all((cluster.out_dir / f"{name}.env").exists() for name in ("child", "alone")), 60, "all jobs")
    seen = {}
    for name in ("parent", "child", "alone"):
        text = (cluster.out_dir / f"{name}.env").read_text()
        seen[name] = dict(entry.partition("=")[::2] for entry in text.split("\0")).get("CUDA_VISIBLE_DEVICES")
    assert seen["parent"] == "1"
    assert seen["child"] == seen["alone"] != "1"


@pytest.mark.shows("opportunistic jobs have CUDA_VISIBLE_DEVICES by UUID; a job without a place sees no GPU")
def test_a_job_without_a_place_sees_no_gpu(cluster: Cluster, wait_until: WaitUntil) -> None:
    job = cluster.submit("-popp")
    assert cluster.attempt("scontrol", "release", job).returncode == 0  # by hand, as root
    wait_until(lambda: cluster.runs(job), 30, "the job")
    for where in ("batch", "step"):
        assert cluster.seen(job, where)["CUDA_VISIBLE_DEVICES"] == "NoDevFiles"
        assert cluster.seen(job, where)["HETSTREAM_GPU"] == ""
    assert cluster.grants() == {}


@pytest.mark.shows("a regular job that needs an opportunistic job's CPUs has them at once")
def test_a_guaranteed_job_that_needs_the_cpus_has_them_at_once(cluster: Cluster, wait_until: WaitUntil) -> None:
    job = cluster.submit("-popp", "--cpus-per-task=3")
    cluster.place(job, 0)
    wait_until(lambda: cluster.runs(job), 30, "the opportunistic job")
    guaranteed = cluster.submit("-pgpu", "--gpus=2", "--cpus-per-task=2")
    wait_until(lambda: cluster.runs(guaranteed), 30, "the guaranteed job")
    assert re.search(r"JobState=PENDING", cluster.show(job))
    assert re.search(r"Restarts=1", cluster.show(job))
    # It has two GPUs, and shares both: each of its processes takes its own.
    gpus = [f"emulation:{cluster.sharing}/gpu{number}" for number in (0, 1)]
    assert cluster.seen(guaranteed, "batch")["HETSTREAM_GPU"] == ",".join(gpus)
    assert cluster.grants() == {guaranteed: {"uid": 65534, "job_class": "guaranteed", "gpus": gpus}}


@pytest.mark.shows("`opp`, `gpu top`, doctor, metrics and page show shared GPUs")
def test_the_admin_guide_sets_up_this_cluster(cluster: Cluster) -> None:
    """Its lines are those that the cluster runs with, but for paths, nodes, and slots; its commands work."""
    guide = (ROOT / "docs" / "admin-gpus.md").read_text()
    blocks = [(kind, textwrap.dedent(text)) for kind, text in re.findall(r"```(\w+)\n(.*?)```", guide, re.DOTALL)]
    state_dir = Path(cluster.record.state_dir)
    places = {
        "/usr/local/share/hetstream/prolog": str(state_dir), "/dev/nvidia": f"{state_dir}/dev/gpu", "gpu[0-1]": "gpu0",
        "opp:p0:1": "opp:p0:2", "opp:p1:1": "opp:p1:2",
    }  # fmt: skip
    files = {"ini": ["slurm.conf", "gres.conf"], "lua": ["policy.lua"], "sh": ["packing.env"]}
    for kind, text in blocks:
        if kind == "console":
            continue
        name = files[kind].pop(0)
        present = [set(line.split()) for line in (state_dir / name).read_text().splitlines()]
        for ours, theirs in places.items():
            text = text.replace(ours, theirs)
        for line in text.splitlines():
            words = {word for word in line.split() if word != "..."}
            assert any(words <= words_of_line for words_of_line in present), (name, line)
    assert files == {"ini": [], "lua": [], "sh": []}
    (commands,) = (text for kind, text in blocks if kind == "console")
    for line in commands.splitlines():
        # What a site's packing.env says, the cluster's own environment says here.
        done = cluster.attempt(str(Path(sys.executable).with_name("hetstream")), *line.split()[2:])
        assert done.returncode == 0, (line, done.stdout, done.stderr)


@pytest.mark.shows("`opp`, `gpu top`, doctor, metrics and page show shared GPUs")
def test_the_doctor_finds_nothing_amiss(cluster: Cluster) -> None:
    environ = {
        **cluster.env, "SLURMD_NODENAME": "gpu0",
        "HETSTREAM_GPU_SOCKET": str(cluster.sharing / "gpu.sock"),
    }  # fmt: skip
    command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", "doctor", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    findings = json.loads(done.stdout)["findings"]
    assert [finding for finding in findings if finding["level"] == "problem"] == []
    about = {"packing", "Gres=opp", "JobSubmitPlugins", "PreemptMode", "Prolog", "Epilog", "TaskProlog", "coordinator"}
    assert about.isdisjoint(finding["check"] for finding in findings), findings
