"""Facts of real configurations, against tables made by hand: whole nodes, MIG, reservations, power saving, limits.

The recorded clusters (`fixtures/*/site_*.txt`) have 4 nodes of 16 CPUs and 4 GPUs and 2 of 16 CPUs with CoreSpecCount=2
and MemSpecLimit=4000 (22.05 took only the first), gpu1 in reservation r1, and the partitions excl (gpu2 and gpu3,
OverSubscribe=EXCLUSIVE), few (gpu0 and gpu1, MaxCPUsPerNode=6), pergpu (the same, DefCpuPerGPU=3) and a hidden one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetstream.hetjob.ports import ClusterLimits, NodeSize, PartitionLimits
from hetstream.slurm_plugin.cli.cluster import frag_report
from hetstream.slurm_plugin.cli.why import report_of as why_report
from hetstream.slurm_plugin.client.accounting import from_queue
from hetstream.slurm_plugin.client.fake import FakeSlurm
from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Reservation, Snapshot, gpu_share
from hetstream.slurm_plugin.client.parse_text import (
    JOB_FIELDS,
    allocated_gres,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_reservations,
    with_reservations,
)
from hetstream.slurm_plugin.client.read import ended_on_whole_nodes, parse_held, with_held_gpus, with_told_gpus
from hetstream.slurm_plugin.client.slurm_units import moment
from hetstream.slurm_plugin.errors import UnreadableAnswer
from hetstream.slurm_plugin.insight.blockers import told_by_slurm
from hetstream.slurm_plugin.insight.fragmentation import measure
from hetstream.slurm_plugin.insight.node_table import shape_of
from hetstream.slurm_plugin.insight.why import Explainer
from hetstream.slurm_plugin.submit.conversion import convert_script

FIXTURES = Path(__file__).with_name("fixtures")
RELEASES = ("22.05", "24.11", "26.05")


def recorded(release: str) -> Snapshot:
    directory = FIXTURES / release
    nodes = parse_nodes((directory / "site_nodes.txt").read_text())
    head, *lines = (directory / "site_jobs.txt").read_text().splitlines()
    rows = []
    for line in lines:
        row = dict(zip(head.split("|"), [*line.split("|"), ""], strict=False)) | {
            "UserName": "root",
            "PriorityLong": "9",
        }
        row |= {"StartTime": "N/A", "TimeLimit": "UNLIMITED", "HetJobOffset": "N/A"}
        rows.append("\x1f".join(row.get(name, "N/A") for name in JOB_FIELDS) + "\x1e")
    jobs = with_held_gpus(parse_jobs("\n".join(rows)), nodes)
    partitions = parse_partitions((directory / "site_partitions.txt").read_text())
    return Snapshot(0.0, release, "test", jobs, nodes, partitions)


@pytest.mark.parametrize("release", RELEASES)
def test_what_jobs_hold(release: str) -> None:
    """Jobs 1 and 2 have --exclusive, the second with --gres=gpu:1: each holds all 4 GPUs. 7 asked for 2, 14 for 1."""
    gpus = {job.job_id: job.count("gpu") for job in recorded(release).jobs if job.is_running}
    others = {"22.05": {8: 4}, "24.11": {14: 1}, "26.05": {8: 4, 14: 1}}[release]
    assert {job_id: count for job_id, count in gpus.items() if job_id < 10 or count} == {
        1: 4,
        2: 4,
        4: 0,
        7: 2,
    } | others
    assert sum(gpus.values()) == sum(
        gres.count for node in recorded(release).nodes for gres in node.gres_used if gres.name == "gpu"
    )


@pytest.mark.parametrize("release", RELEASES)
def test_what_nodes_have(release: str) -> None:
    nodes = {node.name: node for node in recorded(release).nodes}
    memory_mb = 64000 if release == "22.05" else 60000
    assert [(nodes[name].cpus, nodes[name].memory_mb) for name in ("cpu0", "gpu0")] == [(14, memory_mb), (16, 64000)]
    assert [name for name, node in nodes.items() if node.is_reserved] == ["gpu1"]
    assert nodes["gpu1"].reservation == ("" if release == "22.05" else "r1")
    partitions = {one.name: one for one in recorded(release).partitions}
    assert [name for name, one in partitions.items() if one.is_exclusive] == ["excl"]
    assert partitions["few"].max_cpus_per_node == 6
    assert "secret" in partitions


@pytest.mark.parametrize(
    ("release", "cpus_reserved", "cpus_free", "gpus_reserved", "gpus_free", "stranded"),
    # Free: of cpu0, cpu1, gpu0.
    [
        ("22.05", 12, 13 + 13 + 6, 4, 2, 2), ("24.11", 2, 13 + 14 + 6, 1, 2, 2), ("26.05", 8, 13 + 14 + 0, 3, 0, 0),
    ],
)  # fmt: skip
def test_what_is_free_and_stranded(
    release: str, cpus_reserved: int, cpus_free: int, gpus_reserved: int, gpus_free: int, stranded: int
) -> None:
    """Job 9 needs 4 GPUs and 12 CPUs of a node in pergpu, so the 2 GPUs of gpu0 are of no use to it."""
    seen = recorded(release)
    found = measure(seen.nodes, seen.jobs, seen.partitions)
    totals = [found.total(name) for name in ("cpus", "cpus_free", "gpus", "gpus_free", "stranded_gpus")]
    # 14 + 14 + 3 * 16 CPUs, and of the reserved node what jobs hold.
    assert totals == [76 + cpus_reserved, cpus_free, 12 + gpus_reserved, gpus_free, stranded]
    (reserved,) = (node for node in seen.nodes if node.name == "gpu1")
    assert (reserved.cpus_allocated, reserved.gpus - reserved.gpus_free()) == (cpus_reserved, gpus_reserved)
    assert [node.name for node in found.left_out] == ["gpu1"]
    assert {shape.cpus for shape in found.shapes if shape.gpus == 4} == {12}


@pytest.mark.parametrize("release", RELEASES)
def test_why_jobs_wait(release: str) -> None:
    seen = recorded(release)
    explainer = Explainer(seen)
    by_id = {job.job_id: job for job in seen.jobs}
    waits = {job_id: explainer.waits_for(by_id[job_id]) for job_id in (3, 5, 9, 13)}
    assert waits == {3: "whole nodes", 5: "CPUs", 9: "nodes", 13: "licenses"}
    (whole,) = explainer.explain(by_id[3]).blockers
    assert whole.text == "it gets whole nodes (OverSubscribe=EXCLUSIVE), 1 of them: of 2 0 are idle"
    # 6 CPUs of a node are for few; its other job has 4 of gpu0, of which 0 are free on 26.05.
    free = 0 if release == "26.05" else 2
    assert f"the most free is {free} (gpu0)" in explainer.explain(by_id[5]).blockers[0].text
    nodes = explainer.explain(by_id[9]).blockers[0]
    assert "1 of 1 in use could give that, and gpu1 is reserved for others" in nodes.text
    assert nodes.next_step == "scontrol show reservation"
    assert (shape_of(by_id[9]).cpus, shape_of(by_id[9]).memory_mb) == (12, 4000)  # DefCpuPerGPU=3
    if release == "22.05":  # elsewhere it had room in its reservation
        assert explainer.waits_for(by_id[14]) == "GPUs"


def node(name: str, **more: Any) -> Node:
    return Node(name, more.pop("states", frozenset({"IDLE"})), ("gpu",), 16, more.pop("used", 0), 1000, 0, **more)


def pending(cpus: int = 1, gpus: int = 1, gpu_type: str = "", **more: Any) -> Job:
    gres = (Gres("gpu", gpu_type, gpus),) if gpus else ()
    job = Job(7, "train", "alice", ("gpu",), "PENDING", "Priority", 1, cpus, 1, cpus, 0, gres_per_node=gres)
    return replace(job, **more)


def test_types_and_parts_of_gpus_are_counted_apart() -> None:
    """2 whole GPUs of which 1 is free, and 7 sevenths of another one of which 3 are free: 10/7 of 3 GPUs."""
    had = (Gres("gpu", "a100", 2), Gres("gpu", "a100_1g.5gb", 7))
    one = node("m", gres=had, gres_used=(Gres("gpu", "a100", 1), Gres("gpu", "a100_1g.5gb", 4)), used=8)
    assert (one.gpus, one.gpus_free(), one.mig, one.mig_free()) == (2, 1, 7, 3)
    assert (one.devices_free("a100"), one.devices_free("a100_1g.5gb"), one.devices_free()) == (1, 3, 4)
    found = measure([one], [])
    assert [(kind.type, kind.is_mig, kind.num, kind.num_free) for kind in found.gpu_types] == [
        ("a100", False, 2, 1), ("a100_1g.5gb", True, 7, 3),
    ]  # fmt: skip
    report = frag_report(found, Snapshot(0.0, "24.11", "test", (), (one,), ()))
    kinds = next(section for section in report.sections if section.name == "gpu_types")
    assert [(line["type"], line["num_free"], line["num"]) for line in kinds.rows] == [
        ("a100", 1, 2), ("a100_1g.5gb", 3, 7),
    ]  # fmt: skip
    (row,) = found.nodes
    assert (row.gpus, row.gpus_free, row.mig, row.mig_free) == (2, 1, 7, 3)
    assert row.indicator == pytest.approx(8 / 16 - (10 / 7) / 3)
    # Who asks for a part strands no whole GPU, and is no use of one.
    found = measure([one], [pending(gpu_type="a100_1g.5gb")])
    assert (found.nodes[0].stranded_gpus, found.assumed) == (0, ("m",))
    assert measure([one], [pending(gpus=2, gpu_type="a100")]).nodes[0].stranded_gpus == 1


@pytest.mark.parametrize(
    ("name", "share"),
    [("a100", 1), ("", 1), ("h200", 1), ("rtx3g", 1), ("1g.5gb", 1 / 7), ("a100_3g.20gb", 3 / 7), ("h100-7g.80gb", 1),
     ("1g.10gb+me", 1 / 7)],
)  # fmt: skip
def test_profiles_of_mig(name: str, share: float) -> None:
    assert gpu_share(name) == pytest.approx(share)


def test_a_node_of_parts_alone_has_an_indicator() -> None:
    parts = node("p", gres=(Gres("gpu", "2g.10gb", 3),), gres_used=(Gres("gpu", "2g.10gb", 3),), used=4)
    found = measure([parts], [])
    assert [one.node for one in found.gpu_nodes] == ["p"]
    assert (found.total("gpus"), found.nodes[0].indicator) == (0, 0.75)


def test_nodes_that_slurm_starts_for_a_job_are_usable() -> None:
    usable = {
        "IDLE+CLOUD+POWERED_DOWN": True, "IDLE+POWERING_UP": True, "MIXED+CLOUD": True, "IDLE+POWERING_DOWN": False,
        "IDLE+POWER_DOWN": False, "DOWN+POWERED_DOWN": False, "IDLE+POWERED_DOWN+DRAIN": False,
    }  # fmt: skip
    for states, expected in usable.items():
        assert node("n", states=frozenset(states.split("+"))).is_usable is expected, states
    down = node("n", states=frozenset({"IDLE", "POWERED_DOWN"}), gres=(Gres("gpu", "", 4),))
    job = pending()
    snapshot = Snapshot(0.0, "24.11", "test", (job,), (down,), (Partition("gpu", ()),))
    assert Explainer(snapshot).explain(job).fits_on == ("n",)
    assert measure([down], [job]).total("gpus_free") == 4


def test_a_job_in_a_reservation_sees_its_nodes_and_nobody_else_does() -> None:
    theirs = node("r", states=frozenset({"IDLE", "RESERVED"}), gres=(Gres("gpu", "", 4),), reservation="r1")
    free = node("f", gres=(Gres("gpu", "", 4),), used=16)
    inside, outside = pending(reservation="r1"), pending(job_id=8)
    other = pending(reservation="r2", job_id=9)
    snapshot = Snapshot(0.0, "24.11", "test", (inside, outside, other), (theirs, free), (Partition("gpu", ()),))
    explainer = Explainer(snapshot)
    assert [explainer.waits_for(job) for job in (inside, outside, other)] == ["scheduler", "CPUs", "nodes"]


COMING = """\
ReservationName=course StartTime=2026-11-22T12:00:00 EndTime=2027-11-22T12:00:00 Duration=365-00:00:00 Nodes=r NodeCnt=1 State=ACTIVE
ReservationName=half StartTime=2026-11-22T12:00:00 EndTime=2027-11-22T12:00:00 Nodes=g CoreCnt=4 NodeName=g CoreIDs=0-3 State=ACTIVE
ReservationName=upkeep StartTime=2026-11-22T13:00:00 EndTime=2026-11-22T15:00:00 Nodes=c[0-1] NodeCnt=2 Flags=MAINT,SPEC_NODES
"""  # noqa: E501


def test_reservations_are_read_and_name_their_nodes() -> None:
    """At noon `course` has begun, `upkeep` begins in an hour; `half` leaves 12 of 16 CPUs to everybody."""
    now_s = moment("2026-11-22T12:00:00")
    assert now_s is not None
    found = parse_reservations(COMING)
    assert [(one.name, one.nodes, one.start_s - now_s, one.is_active) for one in found] == [
        ("course", ("r",), 0, True), ("half", (), 0, True), ("upkeep", ("c0", "c1"), 3600, False),
    ]  # fmt: skip
    assert parse_reservations("No reservations in the system\n") == ()
    with pytest.raises(UnreadableAnswer, match="StartTime"):
        parse_reservations("ReservationName=x Nodes=a")
    # 22.05 names none with a node; and the mark comes late.
    for states in ({"IDLE"}, {"IDLE", "RESERVED"}):
        nodes = with_reservations([node("r", states=frozenset(states)), node("c0"), node("g")], found)
        assert [(one.state, one.reservation) for one in nodes] == [
            ("idle+reserved", "course"),
            ("idle", ""),
            ("idle", ""),
        ]
        assert [one.cpus for one in nodes] == [16, 16, 12]


def test_a_reservation_to_come_keeps_its_nodes_from_jobs_that_would_not_have_ended() -> None:
    """c has 16 free CPUs and is reserved in an hour; b has 4 of 16. Who has more than an hour starts on neither."""
    free, busy = node("c"), node("b", used=12)
    coming = Reservation("upkeep", ("c",), 3600.0, 9999.0)

    def found(*nodes: Node, **more: Any) -> tuple[tuple[str, ...], str]:
        job = pending(cpus=8, gpus=0, **more)
        explainer = Explainer(Snapshot(0.0, "22.05", "t", (job,), nodes, (Partition("gpu", ()),), {}, (coming,)))
        blocker = explainer.explain(job).blockers[0]
        assert explainer.causes_of([job]) == [(blocker.kind,)]
        return explainer.explain(job).fits_on, blocker.text

    assert found(free, busy, time_limit_s=3600.0)[0] == ("c",)
    kept = ((), "c has room, but is reserved in 01:00:00 (upkeep), before its time limit would end it")
    assert found(free, busy, time_limit_s=3601.0) == found(free, busy) == found(free) == kept
    inside = found(free, busy, reservation="upkeep")[1]
    assert inside.endswith("0 of 0 in use could give that, and b,c is not in its reservation upkeep")
    assert found(node("c", used=12), busy)[1].startswith("it needs 8 CPUs on a node; of 1 node with enough")


def test_data_workers_of_a_job_in_a_reservation_are_told_to_stay_out_of_it() -> None:
    """r is the reservation's one node; beside a trainer of 2 CPUs it has room. 6 of 8 CPUs move: 2 data workers."""
    theirs = node("r", states=frozenset({"MIXED", "RESERVED"}), gres=(Gres("gpu", "", 4),), reservation="r1", used=12)
    others = Node("o", frozenset({"IDLE"}), ("cpu",), 16, 0, 1000, 0)
    job = pending(cpus=8, reservation="r1")
    snapshot = Snapshot(0.0, "24.11", "t", (job,), (theirs, others), (Partition("gpu", ()), Partition("cpu", ())))
    assert Explainer(snapshot).conversion(job).directive == (
        "#HETSTREAM --data-workers=2 --data-worker-partition=cpu --data-worker-reservation=none"
    )


def test_whole_nodes_are_used_whole() -> None:
    """A job of 1 GPU in a partition of whole nodes takes all of an idle node, and nothing of another one."""
    gres = (Gres("gpu", "", 4),)
    idle, busy = node("i", gres=gres), node("b", gres=gres, used=1)
    found = {
        one.node: one for one in measure([idle, busy], [pending()], [Partition("gpu", (), is_exclusive=True)]).nodes
    }
    assert (found["i"].stranded_gpus, found["i"].stranded_cpus) == (0, 0)
    assert (found["b"].stranded_gpus, found["b"].stranded_cpus) == (4, 15)


def test_who_had_whole_nodes_had_all_their_gpus() -> None:
    """Of 2 nodes with 4 GPUs: an ended job of `whole` had all 8, whatever it asked for; of `gpu` the 2 it asked for."""
    nodes = [node(name, gres=(Gres("gpu", "", 4),)) for name in ("a", "b")]
    partitions = [Partition("gpu", ()), Partition("whole", (), is_exclusive=True)]
    ended = pending(state="COMPLETED", nodes=("a", "b"), num_nodes=2)
    jobs = [replace(ended, partitions=("whole",)), ended, replace(ended, partitions=("whole",), nodes=("a", "gone"))]
    assert [job.count("gpu") for job in with_held_gpus(jobs, nodes, partitions)] == [8, 2, 2]
    assert [job.count("gpu") for job in with_held_gpus(jobs, nodes)] == [2, 2, 2]


def test_a_job_whose_nodes_are_coming_up_is_told_so() -> None:
    job = pending(state="CONFIGURING", nodes=("n",), reason="")
    lines = why_report("7", [job], Snapshot(0.0, "22.05", "t", (job,), (), (Partition("gpu", ()),))).lines
    assert lines == [
        "job 7 (train) of alice in gpu: CONFIGURING on n: its nodes are being started or set up, for ResumeTimeout at "
        "the most: scontrol show config"
    ]


@pytest.mark.parametrize(
    ("time", "partition", "is_noted"),
    [
        ("1:00:00", "cpu", False),
        ("1:00:01", "cpu", True),
        ("61", "cpu", True),
        ("2-0", "cpu", True),
        ("INFINITE", "cpu", True),
        ("INFINITE", "free", False),
        ("61", "cpu,long", False),
        ("121", "cpu,long", True),
        ("61", "cpu,unknown", False),
        ("soon", "cpu", False),
        ("", "cpu", False),
    ],
)
def test_a_time_limit_that_the_data_workers_partition_refuses_is_noted(
    time: str, partition: str, is_noted: bool
) -> None:
    """cpu allows an hour, long two, free all."""
    nodes = (NodeSize(16, 64000, False, 4),)
    limits = {"cpu": 3600.0, "long": 7200.0, "free": None}
    known = {name: PartitionLimits(nodes, None, longest) for name, longest in limits.items()}
    client = FakeSlurm(Path(), {}, ClusterLimits(frozenset({*limits, "unknown"}), "cpu", "sched/backfill", known))
    script = f"#!/bin/bash\n#SBATCH --gpus=1{f' --time={time}' if time else ''}\n#HETSTREAM --data-workers=1 "
    script += f"--data-worker-partition={partition}\ntrue\n"
    notes = convert_script(script.encode(), "t.sbatch", [], {}, client, ["hetstream"]).notes
    assert [note.startswith(f"--time={time} is more than MaxTime=") for note in notes] == ([True] if is_noted else [])


@pytest.mark.parametrize(
    ("allocated", "gpus"),
    [
        ("cpu=16,mem=1000M,node=1,billing=16", None),
        ("cpu=16,gres/gpu=4,node=1", 4),
        ("cpu=16,gres/gpu=4,gres/gpu:h200=4", 4),
        ("cpu=16,gres/gpu=4,gres/gpu:h200=1", 4),
    ],
)
def test_allocated_tres_say_what_is_held(allocated: str, gpus: int | None) -> None:
    held = allocated_gres("RUNNING", allocated)
    assert allocated_gres("PENDING", allocated) is None
    assert (held and sum(gres.count for gres in held)) == gpus


def test_what_ended_jobs_held_by_their_own_records() -> None:
    """As 22.05 says of ended jobs. Job 3 says more than its node has; somebody's name of a job says that 4 held 1."""
    node = Node("g0", frozenset({"IDLE"}), ("gpu",), 16, 0, 1, 0, (Gres("gpu", "h200", 4),))
    jobs = [
        replace(pending(), job_id=number, state="COMPLETED", nodes=("g0",), num_cpus=cpus, gres_per_node=())
        for number, cpus in ((1, 16), (2, 16), (3, 16), (4, 16), (5, 15), (6, 16), (7, 16))
    ]
    text = (
        "JobId=1 JobName=a TRES=cpu=16,node=1 JOB_GRES=gpu:h200:4 Nodes=g0 CPU_IDs=0-15 GRES= MinCPUsNode=1\n"
        "JobId=2 JobName=b TRES=cpu=16,node=1 Nodes=g0 CPU_IDs=0-15\n"
        "JobId=3 JobName=c JOB_GRES=gpu:5 Nodes=g0\n"
        "JobId=4 JobName=d JOB_GRES=gpu:4 Nodes=g0\n"
        "JobId=9 JobName=e\nJobId=4 JobName=f JOB_GRES=gpu:1 Nodes=g0\n"
        "JobId=7 JobName=g JOB_GRES=gpu:1 JOB_GRES=gpu:4 Nodes=g0\n"
    )
    asked = ended_on_whole_nodes(jobs, [node])
    assert asked == {1, 2, 3, 4, 6, 7}, "with 15 of 16 CPUs it had not the whole node"
    found, unknown = with_told_gpus(jobs, asked, parse_held(text), [node])
    assert {job.job_id: job.count("gpu") for job in found} == {1: 4, 2: 0, 3: 0, 4: 0, 5: 0, 6: 0, 7: 0}
    assert unknown == {3, 4, 6, 7}
    timed = tuple(replace(job, start_s=0.0, end_s=3600.0) for job in found)
    assert [one.job for one in from_queue(timed, unknown) if not one.gpus_known] == ["3", "4", "6", "7"]


def test_a_job_may_name_several_reservations() -> None:
    """It may run in either; of those to come its own are not in its way."""
    first, second, third = (
        node(name, states=frozenset({"IDLE", "RESERVED"}), reservation=name) for name in ("r1", "r2", "r3")
    )
    job = pending(gpus=0, num_nodes=2, reservation="r1,r2")
    coming = Reservation("r2", ("r1",), 60.0, 99.0)
    snapshot = Snapshot(0.0, "24.11", "t", (job,), (first, second, third), (Partition("gpu", ()),), {}, (coming,))
    explained = Explainer(snapshot).explain(job)
    assert (explained.fits_on, explained.blockers[0].kind) == (("r1", "r2"), "scheduler")
    told = told_by_slurm(replace(job, reason="Reservation"))
    assert told is not None
    assert told.next_step == "scontrol show reservation r1; scontrol show reservation r2"


def test_in_an_active_maintenance_its_own_jobs_start() -> None:
    """As 22.05 and later say of such nodes; `course` has the node, too, and gives way."""
    active = COMING.replace(
        "Nodes=c[0-1] NodeCnt=2 Flags=MAINT,SPEC_NODES", "Nodes=r NodeCnt=1 Flags=MAINT State=ACTIVE"
    )
    reservations = parse_reservations(active)
    states = frozenset({"IDLE", "MAINTENANCE", "RESERVED"})
    (theirs,) = with_reservations([node("r", states=states)], reservations)
    assert (theirs.reservation, theirs.is_usable, theirs.state) == ("upkeep", True, "idle+maintenance")
    assert not node("r", states=states).is_usable, "whose it is is not known"
    assert not replace(theirs, states=states | {"DRAIN"}).is_usable
    inside, outside = pending(gpus=0, reservation="upkeep"), pending(gpus=0, job_id=8)
    snapshot = Snapshot(0.0, "24.11", "t", (inside, outside), (theirs,), (Partition("gpu", ()),), {}, reservations)
    assert [Explainer(snapshot).waits_for(job) for job in (inside, outside)] == ["scheduler", "nodes"]
    found = measure([theirs], [outside])
    assert ([one.name for one in found.left_out], found.nodes) == (["r"], ())


def test_what_a_partition_and_gpus_keep_of_a_node_is_no_room() -> None:
    """Of 16 CPUs on 2 sockets: 6 a socket, or those that GPUs leave, or each twice."""
    node = Node("n", frozenset({"MIXED"}), ("p",), 16, 10, 1000, 0, layout=(2, 8, 1))
    running = replace(_cpus_of(1, 10), state="RUNNING", nodes=("n",), job_id=1)

    def free(partition: Partition, wanted: int, *, gpus: int = 0, on: Node = node) -> str:
        job = replace(_cpus_of(7, wanted), gres_per_node=(Gres("gpu", "", gpus),) if gpus else ())
        snapshot = Snapshot(1.0, "24.11", "t", (running, job), (on,), (partition,))
        return Explainer(snapshot).waits_for(job)

    plain = Partition("p", ())
    assert [free(plain, wanted) for wanted in (6, 7)] == ["scheduler", "CPUs"]
    sockets = replace(plain, max_cpus_per_socket=6)
    assert [free(sockets, wanted) for wanted in (6, 7, 12, 13)] == ["scheduler", "CPUs", "CPUs", "size"]
    # 10 of the first row are given, and all 16 of the second are not; with whom it shares is not its own choice.
    forced = replace(plain, jobs_per_cpu=2, all_share=True)
    assert [free(forced, wanted) for wanted in (6, 16, 17)] == ["scheduler", "scheduler", "size"]
    assert free(replace(plain, jobs_per_cpu=2), 16) == "CPUs"
    elsewhere = replace(running, partitions=("other",))
    job = _cpus_of(7, 7)
    snapshot = Snapshot(1.0, "24.11", "t", (elsewhere, job), (replace(node, partitions=("p", "other")),), (forced,))
    assert Explainer(snapshot).waits_for(job) == "CPUs"
    # 4 cores are for jobs with GPUs: of the other 12 the running job has 10.
    for_gpus = replace(node, gpu_cores=4, gres=(Gres("gpu", "", 4),))
    assert [free(plain, wanted, on=for_gpus) for wanted in (2, 3, 13)] == ["scheduler", "CPUs", "size"]
    assert free(plain, 3, gpus=1, on=for_gpus) == "scheduler"


def _cpus_of(job_id: int, cpus: int) -> Job:
    return Job(job_id, "j", "alice", ("p",), "PENDING", "Priority", 1, cpus, 1, cpus, 0)
