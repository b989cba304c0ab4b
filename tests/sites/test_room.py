"""Where Slurm finds no room although resources are free, and what hetstream says of it: why, or that it does not know.

gpu0 has 2 sockets of 8 cores and 2 GPUs near each. so0 has 2 sockets of 4 cores, of a cloud that nobody boots.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.devcluster.sites import GPU_KINDS
from tests.devcluster.spec import ClusterShape

pytestmark = [pytest.mark.slurm, pytest.mark.every_release]
KINDS = (GPU_KINDS,)
SHAPE = ClusterShape(4, 4, 2, 16)
SETTINGS = (
    "PrivateData=cloud", "ResumeProgram=/bin/true", "SuspendProgram=/bin/true", "SuspendTime=-1", "ResumeTimeout=3600",
    "NodeName=so0 Port=19999 Sockets=2 CoresPerSocket=4 CPUs=8 RealMemory=64000 NodeAddr=127.0.0.1 State=CLOUD",
    "PartitionName=so Nodes=so0 State=UP",
    "PartitionName=force Nodes=cpu1 OverSubscribe=FORCE:2 State=UP",
    "PartitionName=own Nodes=cpu0 ExclusiveUser=YES State=UP",
    "MCSPlugin=mcs/user", "MCSParameters=ondemandselect",
    "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE",
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


def test_a_job_that_asks_for_cores_of_a_socket_has_room_beside_busy_ones(site: Any) -> None:
    """Of so0 one socket has 2 busy cores, and the other 4 free ones."""
    busy = site.submit("-pso", "-n1", "-c2", *SMALL)
    site.settle(**{busy: "CONFIGURING"})
    job = site.submit("-pso", "-wso0", "-n1", "-c4", "-B1:4:1", "--hold", *SMALL)
    site.settle(**{job: "PENDING JobHeld"})
    assert site.facts(job)["fits_on"] == ["so0"]
    site.run("scontrol", "release", job)
    site.settle(**{job: "CONFIGURING"})


def as_nobody(site: Any, *options: str) -> str:
    return str(site.submit(*SMALL, *options, nobody=True))


@pytest.mark.parametrize("how", ["--exclusive=user", "--partition=own"])
def test_nodes_that_one_user_has_alone_are_no_room_for_others(site: Any, how: str) -> None:
    owner = as_nobody(site, "-pcpu", "-wcpu0", "-c2", how)
    site.settle(**{owner: "RUNNING"})
    inside = as_nobody(site, "-pcpu", "-wcpu0", "-c2")
    site.settle(**{inside: "RUNNING"})
    outside = site.submit("-pcpu", "-wcpu0", "-c2", *SMALL)
    site.settle(**{outside: "PENDING Resources"})
    ((kind, text),) = site.blockers(outside)
    assert (kind, text) == (
        "other users", "jobs of another user share cpu0 with no others (--exclusive=user, ExclusiveUser=YES)"
    )  # fmt: skip
    assert site.facts(outside)["fits_on"] == []
    assert {row["job"]: row["waits_for"] for row in site.told("jobs")["jobs"]}[outside] == "other users"


@pytest.mark.parametrize("how", ["--exclusive=user", "--partition=own"])
def test_who_wants_nodes_alone_has_no_room_beside_others(site: Any, how: str) -> None:
    site.settle(**{as_nobody(site, "-pcpu", "-wcpu0", "-c2"): "RUNNING"})
    job = site.submit("-pcpu", "-wcpu0", "-c2", *SMALL, how)
    site.settle(**{job: "PENDING Resources"})
    assert site.blockers(job) == [
        ("other users", "it shares nodes with no job of another user, and such jobs are on cpu0")
    ]


def test_nodes_of_one_mcs_label_are_no_room_for_others(site: Any) -> None:
    site.settle(**{as_nobody(site, "-pcpu", "-wcpu0", "-c2", "--exclusive=mcs"): "RUNNING"})
    site.settle(**{as_nobody(site, "-pcpu", "-wcpu1", "-c2"): "RUNNING"})
    beside = site.submit("-pcpu", "-wcpu0", "-c2", *SMALL)
    site.settle(**{beside: "PENDING Resources"})
    assert site.blockers(beside) == [
        ("other users", "jobs of another MCS label share cpu0 with no others (--exclusive=mcs)")
    ]
    alone = site.submit("-pcpu", "-wcpu1", "-c2", "--exclusive=mcs", *SMALL)
    site.settle(**{alone: "PENDING Resources"})
    assert site.blockers(alone) == [
        ("other users", "it shares nodes with no job of another MCS label, and such jobs are on cpu1")
    ]


@pytest.mark.parametrize("how", ["--exclusive=user", "--exclusive=mcs"])
def test_frag_counts_gpus_beside_the_jobs_of_another_user_as_stranded(site: Any, how: str) -> None:
    """gpu0: one GPU of nobody's, who shares the node with no others. Until nobody waits for one of the other three."""
    site.settle(**{as_nobody(site, "-pgpu", "-wgpu0", "-c2", "--gres=gpu:1", how): "RUNNING"})
    job = site.submit("-pgpu", "-wgpu0", "-c2", "--gres=gpu:1", *SMALL)
    site.settle(**{job: "PENDING Resources"})

    def of_gpu0() -> tuple[int, str]:
        told = site.told("frag")
        assert "3 free GPUs and 14 free CPUs of gpu0 are for jobs of one user or MCS label alone" in told["notes"]
        ((gpus, lacking),) = [(row["stranded_gpus"], row["lacking"]) for row in told["nodes"] if row["node"] == "gpu0"]
        return gpus, lacking

    assert site.blockers(job)[0][0] == "other users"
    assert of_gpu0() == (3, "other users")
    his = as_nobody(site, "-pgpu", "-wgpu0", "-c15", "--gres=gpu:1", how)
    site.settle(**{his: "PENDING"})
    assert of_gpu0() == (3, "CPUs")


def test_a_job_that_is_held_after_a_special_exit_waits_in_every_table(site: Any) -> None:
    job = site.submit("-pcpu", "-c2", "--requeue", *SMALL)
    site.settle(**{job: "RUNNING"})
    site.run("scontrol", "requeuehold", "State=SpecialExit", job)
    site.settle(**{job: "SPECIAL_EXIT"})
    for words in (("jobs",), ("jobs", "--details")):
        told = site.told(*words)
        assert [(row["job"], row["state"], row["waits_for"]) for row in told["jobs"]] == [(job, "SPECIAL_EXIT", "held")]
        assert told["summary"]["num_pending"] == 1
    ((kind, text),) = site.blockers(job)
    assert (kind, text[:30]) == ("held", "it was requeued to be held (sc") or "SPECIAL_EXIT" in text


def test_a_magnetic_reservation_of_a_group_is_room_for_its_members_alone(site: Any) -> None:
    """Both jobs ask alike; cpu0 is full, and cpu1 is for the group of nobody."""
    site.settle(**{site.submit("-pcpu", "-wcpu0", "-c16", *SMALL): "RUNNING"})
    name = "ReservationName=members"
    site.run("scontrol", "create", name, "Start=now", "Duration=60", "Nodes=cpu1", "Groups=nogroup", "Flags=MAGNETIC")
    try:
        stranger = site.submit("-pcpu", "-c2", *SMALL)
        site.wait_until(lambda: site.state(stranger) in ("PENDING Resources", "RUNNING None"), 60, "a look at it")
        if site.state(stranger) == "RUNNING None":
            return  # this slurmctld finds nobody in the group, and admits everybody then (seen on 24.11)
        ((kind, text),) = site.blockers(stranger)
        assert (kind, text.split(" of ")[1]) == ("CPUs", "1 node with enough memory the most free is 0 (cpu0)")
        member = as_nobody(site, "-pcpu", "-c2")
        assert site.state(member).startswith("RUNNING") or site.facts(member)["fits_on"] == ["cpu1"]
    finally:
        site.cluster.cancel_all()
        site.wait_until(lambda: not site.run("squeue", "--all", "--noheader"), 60, "an empty queue")
        site.run("scontrol", "delete", name)


def test_cpus_that_a_partition_gives_twice_are_free_twice(site: Any) -> None:
    """Of 2 times 16 CPUs 24 are given."""
    running = [site.submit("-pforce", "-n12", *SMALL) for _ in range(2)]
    site.settle(**dict.fromkeys(running, "RUNNING"))
    job = site.submit("-pforce", "-n12", *SMALL)
    site.settle(**{job: "PENDING Resources"})
    assert site.blockers(job) == [
        ("CPUs", "it needs 12 CPUs on a node; of 1 node with enough memory the most free is 8 (cpu1)")
    ]


def test_nodes_of_closed_partitions_alone_are_not_free(site: Any) -> None:
    names = ("cpus", "cpus_free")
    before = site.totals(*names)
    site.run("scontrol", "update", "PartitionName=so", "State=DOWN")
    try:
        assert site.totals(*names) == [total - 8 for total in before]
        (left_out,) = site.told("frag")["left_out"]
        assert left_out["state"] == "idle+partition_down"
    finally:
        site.run("scontrol", "update", "PartitionName=so", "State=UP")
    site.run("scontrol", "update", "PartitionName=own", "State=DOWN")  # cpu0 is in another one, too
    try:
        assert site.totals(*names) == before
    finally:
        site.run("scontrol", "update", "PartitionName=own", "State=UP")


def test_where_nothing_is_free_that_is_said_of_each_resource(site: Any) -> None:
    full = site.submit("-pgpu", "-wgpu0", "-n16", "--gres=gpu:4", *SMALL)
    site.settle(**{full: "RUNNING"})
    job = site.submit("-pgpu", "-wgpu0", "-n1", "-c4", "--gres=gpu:1", *SMALL)
    site.settle(**{job: "PENDING Resources"})
    assert site.blockers(job) == [
        ("GPUs", "it needs 1 GPU, 4 CPUs, 100 MB on a node; of 1 node that could give that, free in all: "
         "no GPUs, no CPUs, 63,900 MB on 1 (enough on 1)")
    ]  # fmt: skip
    told = site.told("jobs")
    assert {row["job"]: row["waits_for"] for row in told["jobs"]}[job] == "GPUs"
    note = "jobs that Slurm may preempt (preempt/partition_prio) are not looked at, and count as in the way"
    assert site.told("why", job)["notes"] == told["notes"] == [note]


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
        site.cluster.cancel_all()
        site.wait_until(lambda: not site.run("squeue", "--all", "--noheader"), 60, "an empty queue")
        site.run("scontrol", "delete", "PartitionName=over")
