"""A site that gives threads as CPUs (CR_CPU): a job with an odd number of them keeps others from the last one's core.

ht0 and ht1 have 2 sockets of 4 cores with 2 threads; they are of a cloud that nobody boots.
"""

from __future__ import annotations

from typing import Any

import pytest

from hetstream.slurm_plugin.devcluster.spec import ClusterShape

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = ()
SHAPE = ClusterShape(1, 2, 1, 8)
SETTINGS = (
    "SelectTypeParameters=CR_CPU_Memory",
    "PrivateData=cloud", "ResumeProgram=/bin/true", "SuspendProgram=/bin/true", "SuspendTime=-1", "ResumeTimeout=3600",
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


def test_jobs_hold_what_their_nodes_say_is_in_use(site: Any) -> None:
    whole = site.submit("-pcpu", "-c3", "--mem=100", "--time=60")
    jobs = {site.submit(*options, *SMALL): held for options, held in HELD.items()}
    site.settle(**{whole: "RUNNING"}, **dict.fromkeys(jobs, "CONFIGURING"))
    in_use = sum(HELD.values()) + 3
    cpus, free = site.totals("cpus", "cpus_free")
    assert cpus - free == in_use
    for words in (("jobs",), ("jobs", "--details")):
        told = site.told(*words)
        assert told["summary"]["cpus_held"] == in_use
        assert {row["job"]: row["cpus"] for row in told["jobs"]} == {**jobs, whole: 3}
    shares = [(share["job"], share["cpus"]) for share in told["shares"]]
    assert {job: sum(cpus for name, cpus in shares if name == job) for job in jobs} == jobs
