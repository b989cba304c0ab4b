"""A site that gives threads as CPUs (CR_CPU): a job with an odd number of them keeps others from the last one's core.

Its nodes are hidden from plain users: only who sees them knows what is in use, and all know what each job was given.

ht0 and ht1 have 2 sockets of 4 cores with 2 threads; they are of a cloud that nobody boots.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.devcluster.spec import ClusterShape

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = ()
SHAPE = ClusterShape(1, 2, 1, 8)
SETTINGS = (
    "SelectTypeParameters=CR_CPU_Memory",
    "PrivateData=cloud,nodes",
    "ResumeProgram=/bin/true", "SuspendProgram=/bin/true", "SuspendTime=-1", "ResumeTimeout=3600",
    "NodeName=ht[0-1] Port=[19998-19999] CPUs=16 Sockets=2 CoresPerSocket=4 ThreadsPerCore=2 RealMemory=64000 "
    "NodeAddr=127.0.0.1 State=CLOUD",
    "PartitionName=ht Nodes=ht[0-1] State=UP",
)  # fmt: skip
SMALL = ("--mem=100", "--time=60", "-pht")
# What jobs have, and what they hold: seen on 22.05, 24.11 and 26.05.
HELD = {
    ("-n3",): 4,
    ("-n1", "-c3"): 4,
    ("-n2", "--hint=nomultithread"): 4,
    ("-n3", "--ntasks-per-core=1"): 6,
    ("-N2", "-n5"): 6,
    ("-n4",): 4,
}


def allocated(site: Any) -> dict[str, int]:
    return {job: int(cpus) for job, cpus in map(str.split, site.run("squeue", "-h", "-a", "-o%A %C").splitlines())}


def test_jobs_hold_what_their_nodes_say_is_in_use(site: Any) -> None:
    """Together; of each job all who may see it are told the CPUs that Slurm allocated to it."""
    whole = site.submit("-pcpu", "-c3", "--mem=100", "--time=60")
    jobs = {site.submit(*options, *SMALL): held for options, held in HELD.items()}
    site.settle(**{whole: "RUNNING"}, **dict.fromkeys(jobs, "CONFIGURING"))
    in_use = sum(HELD.values()) + 3
    cpus, free = site.totals("cpus", "cpus_free")
    assert cpus - free == in_use
    given = allocated(site)
    assert given != {**jobs, whole: 3}, "otherwise all numbers are the same"
    for words in (("jobs",), ("jobs", "--details")):
        for nobody in (False, True):
            told = site.told(*words, nobody=nobody)
            assert {row["job"]: row["cpus"] for row in told["jobs"]} == given
            assert told["summary"]["cpus_allocated"] == sum(given.values())
            assert told["summary"]["cpus_held"] == (None if nobody else in_use)
            shares = [(share["job"], share["cpus"]) for share in told.get("shares", ())]
            sums = {job: sum(cpus for name, cpus in shares if name == job) for job in given}
            assert sums == given or words == ("jobs",)
