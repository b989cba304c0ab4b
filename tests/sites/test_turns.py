"""Whose turn it is on real Slurm: plans that are in the way or are not, and limits that are proposed, once given."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.devcluster.spec import ClusterShape

pytestmark = [pytest.mark.slurm, pytest.mark.every_release]
KINDS: tuple[str, ...] = ()
SHAPE = ClusterShape(1, 4, 3, 16)
SETTINGS = ("KillWait=20", "PartitionName=own Nodes=cpu2 State=UP", "PartitionName=two Nodes=cpu[1-2] State=UP")
SMALL = ("--mem=100", "--output=/dev/null")


def planned_behind(site: Any, minutes: int) -> str:
    """A job that waits for cpu0, which is full for so long, and for cpu1; backfill has planned it."""
    site.settle(**{site.submit("-pcpu", "-wcpu0", "-n16", f"--time={minutes}", *SMALL): "RUNNING"})
    first = str(site.submit("-pcpu", "-N2", "-n32", "-wcpu[0-1]", "--time=60", *SMALL))
    site.wait_until(
        lambda: site.run("squeue", "--noheader", f"--jobs={first}", "-O", "SchedNodes:40").strip() == "cpu[0-1]",
        90, "its plan",
    )  # fmt: skip
    return first


def test_a_limit_that_is_proposed_lets_the_job_start(site: Any) -> None:
    first = planned_behind(site, 30)
    job = site.submit("-pcpu", "-wcpu1", "-n1", "--time=60", *SMALL)
    site.settle(**{job: "PENDING"})
    site.wait_until(lambda: site.blockers(job)[0][0] == "backfill", 60, "a look at it")
    (found,) = site.told("why", job)["blockers"]
    assert re.match(rf"there is room now, but cpu1 is kept for job {first}, planned in 00:2\d:\d\d, and", found["text"])
    command = found["next_step"].partition("it could go first: ")[2]
    assert re.fullmatch(rf"scontrol update JobId={job} TimeLimit=2\d", command)
    site.run(*command.split())
    site.settle(**{job: "RUNNING"})


def test_plans_for_nodes_that_a_job_does_not_need_are_not_in_its_way(site: Any) -> None:
    """cpu2 is in partition two as well, as cpu1 is: the main scheduler starts nothing behind, and backfill does."""
    planned_behind(site, 30)
    job = site.submit("-ptwo", "-n1", "--time=60", *SMALL)
    site.settle(**{job: "RUNNING"})
    assert site.run("squeue", "--noheader", f"--jobs={job}", "--format=%N") == "cpu2"


def test_a_short_limit_that_is_in_nobodys_way_needs_no_shorter_one(site: Any) -> None:
    planned_behind(site, 30)
    site.settle(**{site.submit("-pcpu", "-wcpu1", "-n1", "--time=5", *SMALL): "RUNNING"})


def test_who_may_not_begin_yet_is_not_told_of_a_turn(site: Any) -> None:
    """slurmctld keeps Priority as the reason until it next looks at the job."""
    planned_behind(site, 30)
    job = site.submit("-pcpu", "-wcpu1", "-n1", "--time=60", *SMALL)
    site.settle(**{job: "PENDING"})
    site.run("scontrol", "update", f"JobId={job}", "StartTime=now+2hours")
    ((kind, _),) = site.blockers(job)
    assert kind == "time"
    (row,) = [row for row in site.told("jobs")["jobs"] if row["job"] == job]
    assert row["waits_for"] == "time"


def test_nodes_on_which_a_job_completes_are_no_room_until_it_is_gone(site: Any) -> None:
    """Its processes ignore SIGTERM. What it held is free, and yet nothing starts there."""
    stays = "trap '' TERM; while :; do sleep 1; done"
    ends = site.submit("-pown", "-n1", "--time=60", *SMALL, command=stays)
    site.settle(**{ends: "RUNNING"})
    site.wait_until(lambda: site.run("squeue", "--noheader", f"--jobs={ends}", "--format=%M") != "0:00", 30, "a second")
    site.run("scancel", ends)
    job = site.submit("-pown", "-n1", "--time=60", *SMALL)
    site.settle(**{ends: "COMPLETING", job: "PENDING Resources"})
    assert site.blockers(job) == [
        ("completing",
         "cpu2 has room, and Slurm starts nothing there before jobs that have ended are gone (processes, Epilog)")
    ]  # fmt: skip
    assert site.facts(job)["fits_on"] == []
    assert any("16 free CPUs of cpu2 can be had when jobs that have ended are gone" in note
               for note in site.told("frag")["notes"])  # fmt: skip
    site.wait_until(lambda: site.state(job).startswith("RUNNING"), 120, "its start")


def test_who_is_suspended_does_not_run_and_who_is_held_is_told_how(site: Any) -> None:
    job = site.submit("-pown", "-n8", "--time=60", *SMALL)
    site.settle(**{job: "RUNNING"})
    site.run("scontrol", "suspend", job)
    told = site.told("jobs")["summary"]
    assert [told[name] for name in ("num_running", "num_suspended", "cpus_held")] == [0, 1, 0]
    site.run("scontrol", "resume", job)
    site.run("scontrol", "requeuehold", job)
    site.wait_until(lambda: re.search("requeued.in.held.state", site.state(job)), 60, "its hold")
    site.wait_until(lambda: site.blockers(job), 60, "the end of its processes")
    assert site.blockers(job)[0] == (
        "held", "it was requeued to be held (scontrol requeuehold, or RequeueExitHold of its exit code)"
    )  # fmt: skip
    site.run("scontrol", "release", job)
    site.wait_until(lambda: "held" not in [kind for kind, _ in site.blockers(job)], 60, "its release")
