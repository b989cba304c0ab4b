"""Reservations of some cores of a node, and flags of reservations: what they keep, and from whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hetstream.slurm_plugin.client.counted import counted
from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Reservation, Snapshot, with_members
from hetstream.slurm_plugin.client.parse_text import own_reservations, parse_reservations, with_reservations
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.insight.fragmentation import measure
from hetstream.slurm_plugin.insight.why import Explainer, Explanation

# As 22.05.8 and 26.05 print them.
CORES = (
    "ReservationName=r1 StartTime=1000000100 EndTime=1000007300 Nodes=gpu[0-1] NodeCnt=2 CoreCnt=20 "
    "Features=(null) PartitionName=gpu Flags=   NodeName=gpu0 CoreIDs=0-15   NodeName=gpu1 CoreIDs=0-1,8-9 TRES=cpu=20 "
    "Users=ann Groups=(null) Accounts=(null) Licenses=(null) State=ACTIVE BurstBuffer=(null) Watts=n/a "
    "MaxStartDelay=(null)\n"
)
GRES = (
    "ReservationName=r2 StartTime=1000000100 EndTime=1000007300 Nodes=gpu0 NodeCnt=1 CoreCnt=4 Features=(null) "
    "PartitionName=gpu Flags=MAGNETIC   NodeName=gpu0 CoreIDs=0-3 TRES=cpu=8,gres/gpu=2 AllowedPartitions=(null) "
    "QOS=(null) Users=-bob Groups=(null) Accounts=(null) Licenses=(null) State=ACTIVE BurstBuffer=(null) "
    "MaxStartDelay=(null) Comment=TRES=cpu=9 NodeName=gpu7 CoreIDs=0\n"
)
LICENSES = (
    "ReservationName=r3 StartTime=1000000100 EndTime=1000007300 Nodes=(null) NodeCnt=0 CoreCnt=0 Features=(null) "
    "PartitionName=(null) Flags=ANY_NODES TRES=(null) Users=ann Groups=(null) Accounts=(null) Licenses=foo:2 "
    "State=ACTIVE BurstBuffer=(null) MaxStartDelay=(null)\n"
)


def node(name: str, allocated: int = 0, gpus: int = 4, used: int = 0, states: str = "MIXED+RESERVED") -> Node:
    gres = (Gres("gpu", "", gpus),) if gpus else ()
    held = (Gres("gpu", "", used),) if used else ()
    return Node(name, frozenset(states.split("+")), ("gpu",), 16, allocated, 1000, 0, gres, held)


def pending(cpus: int, gpus: int = 0, **more: Any) -> Job:
    asked = (Gres("gpu", "", gpus),) if gpus else ()
    made = Job(7, "j", "bob", ("gpu",), "PENDING", "Resources", 1, cpus, 1, cpus, 0, gres_per_node=asked)
    return replace(made, **more)


def explain(job: Job, nodes: tuple[Node, ...], reservations: tuple[Reservation, ...], *running: Job) -> Explanation:
    seen = with_reservations(nodes, reservations, running)
    partitions = (Partition("gpu", tuple(one.name for one in nodes)),)
    snapshot = Snapshot(1000000200.0, "26.05", "test", (job, *running), seen, partitions, {}, reservations)
    found = Explainer(snapshot).explain(job)
    assert Explainer(snapshot).waits_for(job) == found.blockers[0].kind
    return found


def test_what_scontrol_shows_of_cores_gpus_and_licenses() -> None:
    (first,) = parse_reservations(CORES)
    assert (first.nodes, first.cpus, first.gpus_on_node) == ((), (("gpu0", 16), ("gpu1", 4)), 0)
    assert (first.is_active, first.users, first.accounts, first.all_nodes) == (True, ("ann",), (), ("gpu0", "gpu1"))
    (second,) = parse_reservations(GRES)
    assert (second.cpus, second.gpus_on_node, second.is_magnetic) == ((("gpu0", 8),), 2, True)
    assert parse_reservations(LICENSES) == ()


def test_of_a_node_with_reserved_cores_the_others_are_for_everybody() -> None:
    reservations = parse_reservations(CORES)
    nodes = with_reservations((node("gpu0"), node("gpu1")), reservations)
    assert [(one.cpus, one.starts_jobs, one.state) for one in nodes] == [(0, True, "mixed"), (12, True, "mixed")]
    there = counted(nodes)
    assert (there.cpus, there.cpus_held, there.gpus) == (12, 0, 8)
    assert measure(nodes, ()).left_out == ()
    pair = (node("gpu0"), node("gpu1"))
    assert explain(pending(12), pair, reservations).fits_on == ("gpu1",)
    assert explain(pending(13), pair, reservations).fits_on == ()
    inside = {"reservation": "r1", "user": "ann"}
    assert explain(pending(4, **inside), pair, reservations).fits_on == ("gpu0", "gpu1")
    assert explain(pending(5, **inside), pair, reservations).fits_on == ("gpu0",)
    # It keeps whole nodes from others, although the node is idle.
    assert explain(pending(1, exclusive="NODE"), pair, reservations).blockers[0].kind == "whole nodes"


def test_what_the_jobs_of_a_reservation_hold_is_theirs() -> None:
    reservations = parse_reservations(CORES)
    inside = {"reservation": "r1", "user": "ann"}
    running = replace(pending(3, **inside), job_id=1, state="RUNNING", nodes=("gpu1",))
    nodes = (node("gpu0", 0), node("gpu1", 3))
    (_, seen) = with_reservations(nodes, reservations, [running])
    assert (seen.cpus, seen.cpus_free) == (15, 12), "12 for others, 3 held"
    assert explain(pending(12), nodes, reservations, running).fits_on == ("gpu1",)
    found = explain(pending(13, required_nodes=("gpu1",)), nodes, reservations, running)
    assert found.blockers[0].kind == "size", "12 are all that it can have there while the reservation lasts"
    assert explain(pending(1, required_nodes=("gpu1",), **inside), nodes, reservations, running).fits_on == ("gpu1",)
    assert explain(pending(2, required_nodes=("gpu1",), **inside), nodes, reservations, running).fits_on == ()


def test_a_flag_of_which_no_reservation_is_known_is_believed() -> None:
    """With PrivateData=reservations a user sees those of others as flags of nodes alone."""
    (one,) = with_reservations([node("gpu0")], ())
    assert not one.starts_jobs
    whole = Reservation("w", ("gpu0",), 100, 7300, is_active=True)
    (one,) = with_reservations([node("gpu0")], (*parse_reservations(CORES), whole))
    assert (one.starts_jobs, one.reservation, one.cpus) == (False, "w", 16)
    (one,) = with_reservations([node("gpu1", states="IDLE+DRAIN+RESERVED")], parse_reservations(CORES))
    assert not one.starts_jobs


def test_gpus_of_a_reservation_and_who_is_taken_in_without_naming_it() -> None:
    reservations = parse_reservations(GRES)
    nodes = (node("gpu0", states="IDLE+MAINTENANCE+RESERVED"),)
    (seen,) = with_reservations(nodes, reservations)
    assert (seen.cpus, seen.gpus, seen.gpus_free(), seen.starts_jobs) == (8, 2, 2, True)
    assert explain(pending(1, 2), nodes, reservations).fits_on == ("gpu0",)
    assert explain(pending(1, 3), nodes, reservations).fits_on == ()
    assert explain(pending(9, 3, user="ann"), nodes, reservations).fits_on == ("gpu0",), "bob alone is kept out"
    assert explain(pending(1, 2, reservation="r2"), nodes, reservations).fits_on == ("gpu0",)
    assert explain(pending(9, 2, reservation="r2"), nodes, reservations).fits_on == ()


def test_a_job_of_a_flexible_reservation_goes_beyond_it() -> None:
    flexible = parse_reservations(CORES.replace("Flags= ", "Flags=FLEX "))
    nodes = (node("gpu1"), node("gpu2", states="IDLE"), replace(node("gpu3"), reservation="w"))
    assert explain(pending(16, reservation="r1"), nodes, flexible).fits_on == ("gpu1", "gpu2")
    assert explain(pending(16, reservation="r1"), nodes, parse_reservations(CORES)).fits_on == ()


def test_cores_reserved_for_later_are_kept_from_who_would_not_have_ended() -> None:
    later = parse_reservations(
        CORES.replace("StartTime=1000000100", "StartTime=1000002000").replace("ACTIVE", "INACTIVE")
    )
    nodes = (node("gpu1", states="IDLE"),)
    long, short = {"time_limit_s": 3600.0}, {"time_limit_s": 600.0}
    assert explain(pending(12, **long), nodes, later).fits_on == ("gpu1",)
    found = explain(pending(13, **long), nodes, later)
    assert (found.fits_on, found.blockers[0].kind) == ((), "reservation")
    assert "gpu1 has room, but is reserved in" in found.blockers[0].text
    assert explain(pending(13, **short), nodes, later).fits_on == ("gpu1",)
    assert explain(pending(1, exclusive="NODE", **long), nodes, later).fits_on == ()


@pytest.mark.slurm
@pytest.mark.every_release
@pytest.mark.parametrize("flags", ["", *(pytest.param(flags, marks=pytest.mark.slow) for flags in ("MAINT", "FLEX"))])
def test_cores_in_a_reservation_on_slurm(devcluster: Any, wait_until: Callable[..., None], flags: str) -> None:
    """4 of the 16 cores of gpu1 are reserved: Slurm starts there who needs 12, and keeps waiting who needs 13."""
    slurm = CommandSlurm(devcluster.env)
    submitted: list[str] = []

    def submit(*options: str) -> str:
        words = ["--output=/dev/null", "--mem=100", "--time=60", "-p", "gpu", "-w", "gpu1", *options]
        submitted.append(slurm.submit("#!/bin/sh\nexec sleep 600\n", words))
        return submitted[-1]

    def state(job_id: str) -> str:
        return str(devcluster.run("squeue", "--noheader", f"--jobs={job_id}", "--format=%T %r")).strip()

    def told(*words: str) -> Any:
        command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", *words, "--json"]
        env = {**os.environ, **devcluster.env}
        return json.loads(subprocess.run(command, env=env, capture_output=True, text=True, timeout=120).stdout)

    create = ["ReservationName=hetstream-r1", "StartTime=now", "Duration=120", "Users=root", "Nodes=gpu1", "CoreCnt=4"]
    devcluster.run("scontrol", "create", "reservation", *create, *([f"Flags={flags}"] if flags else []))

    def has_cores() -> bool:
        return " CoreIDs=" in devcluster.run("scontrol", "--oneliner", "show", "reservation")

    try:
        wait_until(has_cores, 60, "the cores of the reservation, which 22.05 shows some seconds late")
        too_large = submit("-c13")
        wait_until(lambda: state(too_large) == "PENDING Resources", 60, "Slurm's reason")
        assert told("why", too_large)["summary"]["jobs"][0]["fits_on"] == []
        frag = told("frag")
        assert frag["left_out"] == []
        assert [row["cpus"] for row in frag["nodes"] if row["node"] == "gpu1"] == [12]
        assert any("kept by reservations, and not counted: 4 CPUs of gpu1" in note for note in frag["notes"])
        slurm.cancel(too_large)
        probe = submit("-c12", "--hold")
        found = {row["job"]: row for row in told("jobs")["jobs"]}
        assert found[probe]["waits_for"] == "held"
        slurm.cancel(probe)
        fits = submit("-c12")
        wait_until(lambda: state(fits).startswith("RUNNING"), 60, "the start of who needs 12")
        inside = submit("-c4", "--reservation=hetstream-r1")
        wait_until(lambda: state(inside).startswith("RUNNING"), 60, "the start of who is in the reservation")
        (row,) = [row for row in told("frag")["nodes"] if row["node"] == "gpu1"]
        assert (row["cpus"], row["cpus_free"]) == (16, 0)
        for job_id in (fits, inside):
            slurm.cancel(job_id)
        wait_until(lambda: not slurm.snapshot().jobs, 60)
        more = submit("-c13", "--reservation=hetstream-r1")
        if flags == "FLEX":
            wait_until(lambda: state(more).startswith("RUNNING"), 60, "the start of who goes beyond")
        else:
            wait_until(lambda: state(more).startswith("PENDING Re"), 60, "Slurm's reason")
            assert told("why", more)["summary"]["jobs"][0]["fits_on"] == []
    finally:
        for job_id in submitted:
            slurm.cancel(job_id)
        wait_until(lambda: not slurm.snapshot().jobs, 60)
        devcluster.run("scontrol", "delete", "ReservationName=hetstream-r1")
    wait_until(lambda: all(one.starts_jobs for one in slurm.snapshot().nodes), 60, "nodes without reservations")


def test_whom_a_magnetic_reservation_admits() -> None:
    """Users, members of groups, accounts, and what later releases have: partitions and QOS; `-NAME` are left out."""
    line = (
        "ReservationName=r StartTime=1795000000 EndTime=1795000900 Nodes=n State=ACTIVE Flags=MAGNETIC "
        "TRES=cpu=1 Users={0} Groups={1} Accounts={2} AllowedPartitions={3} QOS={4}"
    )
    job = Job(1, "j", "root", ("p", "q"), "PENDING", "", 1, 1, 1, 1, 0, account="sub", qos="high")
    other = replace(job, job_id=2, user="daemon")
    for said, admitted in (
        (("root", "", "", "", ""), "root"),
        (("-root", "", "", "", ""), "daemon"),
        (("", "root", "", "", ""), "root"),
        (("", "nogroup,0", "", "", ""), "root"),
        (("", "nosuchgroup", "", "", ""), ""),
        (("", "", "sub", "", ""), "root daemon"),
        (("", "", "-sub", "", ""), ""),
        (("-root", "", "sub", "", ""), "daemon"),
        (("", "", "", "x,q", "high"), "root daemon"),
        (("", "", "", "x", ""), ""),
        (("", "", "", "", "-high"), ""),
        (("", "root", "", "", "low"), ""),
    ):
        (found,) = with_members(parse_reservations(line.format(*(word or "(null)" for word in said))), (job, other))
        names = [each.user for each in (job, other) if "r" in own_reservations(each, [found])]
        assert " ".join(names) == admitted, said
