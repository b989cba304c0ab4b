"""What pending jobs ask of a node: bounds that no choice of Slurm's can undercut, and guesses that are told as such.

The fields of jobs are those that Slurm told of the requests named beside them; see `tests/sites/test_request_forms.py`,
which asks Slurm itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.client.parse_text import JOB_FIELDS, parse_jobs, parse_nodes
from hetstream.slurm_plugin.insight.advise import advise
from hetstream.slurm_plugin.insight.fragmentation import measure
from hetstream.slurm_plugin.insight.node_table import Hardware, shape_of
from hetstream.slurm_plugin.insight.why import Explainer, Explanation

CORES = {"SelectType": "select/cons_tres", "SelectTypeParameters": "CR_CORE_MEMORY"}
RANGE = {"num_cpus": 30, "num_tasks": 30, "likely_nodes": 2, "max_nodes": 2}


def node(name: str = "n", used: int = 0, cpus: int = 16, gpus: int = 4, **more: Any) -> Node:
    found = Node(name, frozenset({"MIXED"}), ("gpu",), cpus, used, 64000, 0, (Gres("gpu", "", gpus),) if gpus else ())
    return replace(found, **more)


def threads(name: str = "n", used: int = 0, **more: Any) -> Node:
    """2 sockets with 4 cores of 2 threads."""
    return node(name, used, **{"layout": (2, 4, 2), "cpus_per_core": 2} | more)


def pending(**more: Any) -> Job:
    job = Job(7, "train", "alice", ("gpu",), "PENDING", "Priority", 1, 1, 1, 1, 100)
    return replace(job, **{"likely_nodes": 1} | more)


def explain(job: Job, *nodes: Node, config: dict[str, str] | None = None, members: tuple[str, ...] = ()) -> Explanation:
    partitions = (Partition("gpu", members or tuple(each.name for each in nodes)),)
    return Explainer(Snapshot(0.0, "24.11", "test", (job,), nodes, partitions, CORES | (config or {}))).explain(job)


def kind(job: Job, *nodes: Node, **how: Any) -> str:
    return explain(job, *nodes, **how).blockers[0].kind


FOUR = tuple(node(f"n{number}") for number in range(4))
SPREAD = {
    "-N1-2 -n30": pending(**RANGE),
    "-N2-4 -n62": pending(num_nodes=2, num_cpus=62, num_tasks=62, likely_nodes=4),
    "-n9 --gpus=9": pending(num_cpus=9, num_tasks=9, gres_per_job=(Gres("gpu", "", 9),)),
    "--gpus=9": pending(gres_per_job=(Gres("gpu", "", 9),)),
    "-n2 --gpus-per-task=4": pending(num_cpus=2, num_tasks=2, gres_per_task=(Gres("gpu", "", 4),)),
    "-n8 -c12": pending(num_cpus=96, num_tasks=8, cpus_per_task=12, likely_nodes=4),
}


@pytest.mark.parametrize("request_form", [*SPREAD][:5])
def test_what_slurm_spreads_can_start(request_form: str) -> None:
    job = SPREAD[request_form]
    assert kind(job, *FOUR) == "scheduler"
    full = tuple(replace(each, cpus_allocated=16) for each in FOUR)
    assert kind(job, *full) == "CPUs"


def test_a_guess_is_said_to_be_one_and_strands_nothing() -> None:
    """Nine GPUs are on three nodes of four at the least, and any three that are free are of use."""
    job = SPREAD["-n9 --gpus=9"]
    shape = explain(job, *FOUR).shape
    assert (shape.num_nodes, shape.gpus, shape.cpus, shape.is_guess) == (3, 3, 3, True)
    assert measure(FOUR, [job], config=CORES).total("stranded_gpus") == 4 * 4 - 4 * 3
    per_task = SPREAD["-n2 --gpus-per-task=4"]
    assert measure(FOUR, [per_task], config=CORES).total("stranded_gpus") == 0
    assert not advise(Snapshot(0.0, "24.11", "test", (job, per_task), FOUR, (), CORES), {})


def test_what_no_division_can_give_is_told_with_its_proof() -> None:
    """Three nodes have 48 CPUs, and it may have two of them."""
    found = explain(pending(**RANGE | {"num_cpus": 40, "num_tasks": 40, "likely_nodes": 1}), *FOUR[:3])
    assert (found.blockers[0].kind, found.blockers[0].text) == (
        "size", "it needs 40 CPUs; of 3 nodes that it may use 2 of them together have less"
    )  # fmt: skip
    # Of 8 tasks of 12 CPUs each of 4 nodes has one, though together they have enough CPUs for 5.
    assert kind(SPREAD["-n8 -c12"], *FOUR) == "size"
    assert kind(pending(num_cpus=20, cpus_per_task=20), *FOUR) == "size"
    assert kind(pending(num_nodes=2, gres_per_node=(Gres("gpu", "", 4),)), FOUR[0], node("small", gpus=2)) == "size"


def test_nodes_of_different_sizes_share_unevenly() -> None:
    """-N2 -n24: the even share of 12 CPUs is on one of them alone."""
    job = pending(num_nodes=2, num_cpus=24, num_tasks=24, likely_nodes=2)
    large, small = node("large"), node("small", cpus=8)
    assert explain(job, large, small).fits_on == ("large", "small")
    assert kind(job, large, small) == "scheduler"
    busy = explain(job, replace(large, cpus_allocated=2), small)
    assert (busy.blockers[0].kind, busy.blockers[0].text) == (
        "CPUs", "it needs 24 CPUs on 2 nodes, divided as Slurm likes; so much is not free on so many: of 2 nodes "
        "that could give a part, free in all: 22 CPUs on 2, 128,000 MB on 2"
    )  # fmt: skip
    # Slurm takes no job of 16 tasks on one node where none has more than 8 CPUs: this one may have two.
    assert kind(pending(num_cpus=16, num_tasks=16), small, replace(small, name="other")) == "scheduler"


def test_nodes_that_are_not_shown_are_nodes() -> None:
    """slurmctld hides nodes of a cloud that are powered down: nobody can say that none of them would do."""
    found = explain(pending(**RANGE), members=("n0", "n1"))
    assert found.blockers[0].kind == "nodes"
    assert "other nodes of its partitions are not shown" in found.blockers[0].text


def test_each_of_two_types_is_counted() -> None:
    two = (Gres("gpu", "a100", 2), Gres("gpu", "v100", 2))
    mixed, plain = node("mixed", gres=two), node("plain", gres=(Gres("gpu", "a100", 4),))
    job = pending(gres_per_node=two)
    assert explain(job, mixed, plain).fits_on == ("mixed",)
    assert kind(job, plain) == "size"
    taken = replace(mixed, gres_used=(Gres("gpu", "v100", 1),))
    found = explain(job, taken, plain)
    assert (found.blockers[0].kind, found.blockers[0].text) == (
        "GPUs", "it needs gpu:a100:2, gpu:v100:2 on a node; of 1 node with enough CPUs and memory too few have "
        "them free"
    )  # fmt: skip
    over_nodes = pending(gres_per_job=(Gres("gpu", "a100", 3), Gres("gpu", "v100", 3)))
    assert kind(over_nodes, mixed, replace(mixed, name="other")) == "scheduler"
    assert kind(over_nodes, mixed) == "size"


@pytest.mark.parametrize(
    ("job", "free", "has_room"),
    [
        (pending(num_cpus=6, cpus_per_task=6, layout=(0, 0, 1)), 10, False),  # --hint=nomultithread
        (pending(num_cpus=6, cpus_per_task=6, layout=(0, 0, 1)), 12, True),
        (pending(num_cpus=5, cpus_per_task=5, layout=(0, 0, 2)), 6, True),
        (pending(num_cpus=3, num_tasks=3, tasks_per_core=1), 4, False),
        (pending(num_cpus=3, num_tasks=3, tasks_per_core=1), 6, True),
        (pending(min_cpus_per_node=8), 6, False),  # --mincpus
        (pending(layout=(2, 4, 0)), 14, False),  # sockets of which cores are taken
        (pending(layout=(2, 1, 0)), 8, False),  # all of it may be on one of two sockets
        (pending(layout=(2, 1, 0)), 10, True),
    ],
)
def test_cores_are_whole(job: Job, free: int, has_room: bool) -> None:
    assert (kind(job, threads(used=16 - free)) == "scheduler") is has_room


def test_cpus_that_memory_needs_are_those_of_whole_tasks_in_later_releases() -> None:
    """-c4 --mem=20000 with MaxMemPerCPU=2000: 22.05 looks for 10 free CPUs, and gives 8."""
    job = pending(num_cpus=4, cpus_per_task=4, min_cpus_per_node=10)
    for version, free, found in (("22.05.8", 10, "scheduler"), ("22.05.8", 9, "CPUs"), ("24.11.5", 10, "CPUs")):
        assert kind(job, node(used=16 - free), config={"SLURM_VERSION": version}) == found


def test_what_a_core_is_depends_on_the_site() -> None:
    wanted = pending(num_cpus=1)
    assert kind(wanted, threads(used=15)) == "CPUs"
    assert kind(wanted, threads(used=15), config={"SelectTypeParameters": "CR_CPU_MEMORY"}) == "scheduler"
    assert kind(wanted, threads(used=12), config={"SelectTypeParameters": "CR_SOCKET_MEMORY"}) == "CPUs"
    assert kind(wanted, threads(used=2), config={"SelectType": "select/linear"}) == "CPUs"
    # Where the site counts cores as CPUs, one thread of each is a CPU.
    cores = node(cpus=8, used=2, layout=(1, 8, 2), cpus_per_core=1)
    assert kind(pending(num_cpus=6, cpus_per_task=6, layout=(0, 0, 1)), cores) == "scheduler"


def test_memory_goes_with_the_cpus_of_a_core() -> None:
    """Three CPUs of 4000 MB take four; with one thread of each core no more than they asked for."""
    three = pending(num_cpus=3, cpus_per_task=3, memory_mb=12000, memory_per_cpu_mb=4000)
    scarce = threads(memory_allocated_mb=64000 - 13000)
    assert kind(three, scarce) == "memory"
    assert kind(replace(three, layout=(0, 0, 1)), scarce) == "scheduler"
    everything = pending(memory_mb=32000, all_memory=True)
    assert kind(everything, node(memory_allocated_mb=1)) == "memory"
    # It is counted with that of its partition's first node, and gets what its own node has.
    large, small = node("large", memory_mb=256000, memory_allocated_mb=1), node("small", memory_mb=16000)
    everything = pending(memory_mb=256000, all_memory=True)
    assert explain(everything, large, small).fits_on == ("small",)
    found = explain(everything, large, replace(small, memory_allocated_mb=1)).blockers[0]
    assert found.text == ("it needs all memory of a node (--mem=0); of 2 nodes with enough CPUs 0 have all of it free")
    assert kind(pending(memory_mb=640000, num_cpus=16, num_tasks=16, memory_per_cpu_mb=40000), FOUR[0],
                config={"SelectTypeParameters": "CR_CORE"}) == "scheduler"  # fmt: skip


def test_gres_that_are_no_gpus_are_asked_of_a_node() -> None:
    shards, plain = node("shards", gres=(Gres("gpu", "", 4), Gres("shard", "", 16))), node("plain", gpus=0)
    job = pending(gres_per_node=(Gres("shard", "", 3),))
    assert explain(job, shards, plain).fits_on == ("shards",)
    found = explain(job, shards, plain).blockers[0]
    assert found.kind == "GRES"
    assert "there is room now, but for its shard:3, which is not counted GPU by GPU" in found.text
    assert kind(job, plain) == "size"
    taken = replace(shards, gres_used=(Gres("shard", "", 14),))
    assert kind(job, taken, plain) == "GRES"
    # A GPU that a job has as a whole has no shards.
    assert explain(job, replace(shards, gres_used=(Gres("gpu", "", 4),)), plain).fits_on == ()
    fpga = pending(gres_per_node=(Gres("fpga", "x", 2),))
    assert kind(fpga, plain) == "size"
    assert kind(fpga, node(gres=(Gres("fpga", "x", 2),))) == "scheduler"
    assert kind(fpga, node(gres=(Gres("fpga", "x", 2),), gres_used=(Gres("fpga", "x", 1),))) == "GRES"


def test_a_job_in_two_partitions_runs_in_one() -> None:
    """Two nodes, each in a partition of its own, are not two nodes for it."""
    first, second = replace(FOUR[0], partitions=("a",)), replace(FOUR[1], partitions=("b",))
    job = pending(num_nodes=2, likely_nodes=2, num_cpus=2, num_tasks=2, partitions=("a", "b"))
    partitions = (Partition("a", ("n0",)), Partition("b", ("n1",)))
    found = Explainer(Snapshot(0.0, "24.11", "t", (job,), (first, second), partitions, CORES)).explain(job)
    assert found.blockers[0].kind == "size"


def test_what_a_partition_gives_of_a_node_decides_on_how_many_a_job_is_likely() -> None:
    """MaxCPUsPerNode=6, MaxCPUsPerSocket=3 of two sockets, or 10 of 16 CPUs for GPUs: 33 tasks are on six nodes."""
    job = pending(num_nodes=1, likely_nodes=1, num_cpus=33, num_tasks=33)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"max_cpus_per_node": 6}, {}),
        ({"max_cpus_per_socket": 3}, {"layout": (2, 8, 1)}),
        ({}, {"gpu_cores": 10}),
    ]
    for limits, keeps in cases:
        nodes = tuple(replace(node(f"n{number}"), **keeps) for number in range(7))
        names = tuple(each.name for each in nodes)
        partitions = (Partition("gpu", names, **limits),)
        found = Explainer(Snapshot(0.0, "24.11", "t", (job,), nodes, partitions, CORES)).explain(job)
        assert (found.shape.num_nodes, found.shape.cpus, found.fits_on) == (6, 6, names), limits
        assert found.blockers[0].kind == "scheduler"
        (shape,) = measure(nodes, [job], partitions, config=CORES).shapes
        assert (shape.num_nodes, shape.cpus) == (6, 6), limits


def test_an_even_division_is_no_fact_where_slurm_may_divide_otherwise() -> None:
    """-N3 -n40 with 8, 8 and 16 CPUs free of 16: Slurm gives 16 to each node as long as it has them."""
    nodes = tuple(node(f"n{number}", used=used) for number, used in enumerate((8, 8, 0)))
    job = pending(num_nodes=3, num_cpus=40, num_tasks=40, likely_nodes=3, max_nodes=3)
    text = explain(job, *nodes).blockers[0].text
    assert "it needs 14 CPUs on a node, on 3 at once if it is divided evenly, which Slurm need not do;" in text
    for each in (
        replace(job, num_cpus=42, num_tasks=3, cpus_per_task=14),
        replace(job, num_cpus=42, num_tasks=42, min_cpus_per_node=14),  # --ntasks-per-node=14
    ):
        assert "it needs 14 CPUs on a node, on 3 at once;" in explain(each, *nodes).blockers[0].text


def test_room_in_uneven_parts_is_room() -> None:
    """Of 16 CPUs of each node 3, 8, 1 and none are in use, as in `test_there_is_room_where_slurm_would_start_it`."""
    nodes = tuple(node(f"n{number}", used=used) for number, used in enumerate((3, 8, 1, 0)))
    twenty = pending(num_cpus=40, num_tasks=20, cpus_per_task=2, min_cpus_per_node=2, likely_nodes=2)
    nine = pending(num_cpus=33, num_tasks=33, gres_per_job=(Gres("gpu", "", 9),))
    some = pending(num_cpus=48, num_tasks=48, max_nodes=4, likely_nodes=3)
    for job in (twenty, nine, some):
        assert kind(job, *nodes) == "scheduler"
        assert kind(job, *(replace(each, cpus_allocated=14) for each in nodes)) == "CPUs"
    # Of three nodes of these four Slurm tells both of a job that says no number and of one that may have three.
    found = explain(replace(some, max_nodes=None), *nodes).blockers[0]
    assert (found.kind, found.text) == (
        "node count", "there is room now on more than the likely 3 nodes; only Slurm knows whether it may "
        "have them; no job is ahead"
    )  # fmt: skip
    assert kind(replace(some, num_nodes=3, max_nodes=None), *nodes) == "CPUs"
    # No part of it is where none of its GPUs is.
    typed = pending(num_cpus=30, num_tasks=30, gres_per_job=(Gres("gpu", "a100", 2),))
    assert (
        kind(typed, *nodes[:2], *(replace(each, gres=(Gres("gpu", "a100", 2),)) for each in nodes[2:])) == "scheduler"
    )
    assert kind(typed, *nodes[:2], replace(nodes[2], gres=(Gres("gpu", "a100", 2),))) != "scheduler"
    # GPUs with their CPUs, and tasks of which each node has as many, are no parts that can be had anywhere.
    assert kind(replace(some, cpus_per_gpu=4), *nodes) == "CPUs"
    assert kind(replace(some, min_cpus_per_node=12), *nodes) == "CPUs"


def test_four_gpus_for_four_tasks_need_not_be_on_one_node() -> None:
    job = pending(num_cpus=4, num_tasks=4, gres_per_job=(Gres("gpu", "", 4),))
    taken = (Gres("gpu", "", 2),)
    found = explain(job, *(replace(each, gres_used=taken) for each in FOUR))
    assert found.shape.is_guess
    assert found.blockers[0].text == (
        "it needs 4 GPUs on a node if it gets one alone; of 4 nodes with enough CPUs and memory the most free is 2 (n0)"
    )
    alone = explain(replace(job, num_tasks=1, cpus_per_task=4), *(replace(each, gres_used=taken) for each in FOUR))
    assert not alone.shape.is_guess
    assert "it needs 4 GPUs on a node; of 4" in alone.blockers[0].text


def test_tasks_of_a_node_need_their_memory() -> None:
    """--ntasks-per-node=4 -c2 --mem-per-cpu=8000."""
    four = pending(num_cpus=18, num_tasks=9, cpus_per_task=2, min_cpus_per_node=8, likely_nodes=3,
                   memory_per_cpu_mb=8000, memory_mb=144000)  # fmt: skip
    assert kind(four, *FOUR) == "scheduler"
    assert kind(four, *FOUR[:2], *(replace(each, memory_allocated_mb=8000) for each in FOUR[2:])) == "memory"
    assert kind(replace(four, likely_nodes=2), *FOUR[:2], replace(FOUR[2], memory_allocated_mb=8000)) != "scheduler"


def test_no_more_nodes_have_too_little_than_there_are() -> None:
    job = pending(num_nodes=1, likely_nodes=1, max_nodes=4, num_cpus=40, num_tasks=40)
    (found,) = explain(job, *FOUR[:2]).blockers
    assert (found.kind, found.text) == (
        "size", "it needs 40 CPUs; of 2 nodes that it may use 2 of them together have less",
    )  # fmt: skip


def test_memory_of_a_gpu_goes_with_it() -> None:
    job = pending(gres_per_job=(Gres("gpu", "", 2),), memory_per_gpu_mb=3000, memory_mb=6000)
    assert shape_of(job).memory_mb == 6000
    two = (Gres("gpu", "a100", 2), Gres("gpu", "v100", 2))
    # Slurm looks at the memory of each type alone: 40000 of the node's 64000.
    several = pending(gres_per_node=two, memory_per_gpu_mb=20000, memory_mb=80000)
    assert kind(several, node(gres=two)) == "scheduler"
    assert kind(replace(several, memory_per_gpu_mb=40000), node(gres=two)) == "size"
    wide = pending(**RANGE, memory_mb=1000)
    assert shape_of(wide, Hardware(FOUR, CORES)).memory_mb == 1000  # --mem is of each node, however many they are


def test_fields_of_squeue() -> None:
    """-N1-4 -n3 -c6 -B2:4:1 --ntasks-per-core=1 --mem-per-gpu=3000, of 24.11; then one with nothing of this."""
    row = {
        "JobID": "5", "UserName": "a", "Partition": "ht", "State": "PENDING", "Reason": "Resources", "NumNodes": "2",
        "MaxNodes": "4", "NumCPUs": "18", "MinCPUs": "6", "SCT": "2:4:1", "NTPerCore": "1", "NumTasks": "3",
        "NTPerSocket": "2",
        "cpus-per-task": "6", "MinTmpDisk": "4G", "MinMemory": "3000M", "tres-alloc": "cpu=18,mem=6000M,node=1",
        "tres-per-job": "gres/gpu:2", "mem-per-tres": "gres/gpu:3000", "TimeLimit": "1:00", "PriorityLong": "9",
    }  # fmt: skip
    plain = row | {"JobID": "6", "MaxNodes": "2", "SCT": "*:*:*", "NTPerCore": "N/A", "mem-per-tres": "N/A",
                   "MinMemory": "0", "MinTmpDisk": "0"}  # fmt: skip
    text = "".join("\x1f".join(each.get(name, "N/A") for name in JOB_FIELDS) + "\x1e\n" for each in (row, plain))
    job, other = parse_jobs(text)
    assert (job.num_nodes, job.likely_nodes, job.max_nodes, job.min_cpus_per_node) == (1, 2, 4, 6)
    assert (job.layout, job.tasks_per_core, job.tasks_per_socket, job.all_memory) == ((2, 4, 1), 1, 2, False)
    assert job.memory_per_gpu_mb == 3000
    assert (job.tmp_disk_mb, other.tmp_disk_mb) == (4096, 0)
    # As many again as are likely: it may have set no limit.
    assert (other.max_nodes, other.layout, other.tasks_per_core, other.all_memory) == (None, (0, 0, 0), 0, True)


def test_fields_of_nodes() -> None:
    line = "NodeName=n CPUTot={} CPUAlloc=0 RealMemory=1 AllocMem=0 State=IDLE Gres=(null) TmpDisk=99 "
    line += "Sockets=2 CoresPerSocket=4 ThreadsPerCore=2"
    first, second = (parse_nodes(line.format(cpus))[0] for cpus in (16, 8))
    assert (first.layout, first.cpus_per_core, second.cpus_per_core) == ((2, 4, 2), 2, 1)
    assert first.tmp_disk_mb == 99
