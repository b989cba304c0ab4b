"""Conversion: what changes, why, and the Slurm limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hetstream.base.errors import UsageError
from hetstream.hetjob.convert import convert as limits
from hetstream.hetjob.convert.convert import check_cluster, convert
from hetstream.hetjob.convert.directives import WITH_VALUE, read_directives
from hetstream.hetjob.convert.plan import HetPlan
from hetstream.hetjob.convert.render import render
from hetstream.hetjob.convert.sbatch_options import parse_words
from hetstream.hetjob.convert.spec import JobSpec, read_spec
from hetstream.hetjob.errors import ConversionError, DirectiveError
from hetstream.hetjob.ports import ClusterLimits, NodeSize, PartitionLimits

SPEC = JobSpec(2, 2, data_worker_partition="cpu")
# Each node has room for all tasks of the scripts here.
LARGE_NODES = ClusterLimits(frozenset({"gpu"}), "gpu", None, {"gpu": PartitionLimits((NodeSize(1024, 1 << 22, True),))})


def plan_of(sbatch: str, *command_line: str, spec: JobSpec = SPEC, body: str = "srun python train.py") -> HetPlan:
    outside, _ = parse_words(command_line, "command line", extra=WITH_VALUE)
    text = f"#!/bin/bash\n#SBATCH {sbatch}\n{body}\n"
    return convert(spec, text, "train.sbatch", cluster=LARGE_NODES, command_line=outside)


@pytest.mark.parametrize(
    ("sbatch", "kept"),
    [
        # The trainer keeps 2 CPUs per GPU of its task ...
        ("--gres=gpu:1 -c 16", ("--cpus-per-task=2",)),
        ("--gres=gpu:4 -c 16", ("--cpus-per-task=8",)),
        ("--gres=gpu:h200:2 --cpus-per-task 16", ("--cpus-per-task=4",)),
        ("--gres=gres/gpu:2,shard:1 -c16", ("--cpus-per-task=4",)),
        ("--gres=gpu=2 -c16", ("--cpus-per-task=4",)),
        ("--gres=gpu:h200=2,shard=1 -c16", ("--cpus-per-task=4",)),
        ("--tres-per-task=cpu=8,gres/gpu=2", ("--tres-per-task=cpu=4,gres/gpu=2",)),
        ("-N1 --gpus=4 -n4 -c8", ("--cpus-per-task=2",)),
        ("-N2 --ntasks-per-node=4 --gpus-per-node=a100:4 -c8", ("--cpus-per-task=2",)),
        ("-N 2 --gpus-per-node=4 -c 48", ("--cpus-per-task=8",)),
        ("-N1 -n8 --gpus-per-task=2 -c8", ("--cpus-per-task=4",)),
        ("-N1 --gpus=2 --ntasks-per-gpu=2 -c8", ("--cpus-per-task=2",)),
        ("-N1 -G 2 --cpus-per-gpu=8", ("--cpus-per-gpu=2",)),
        ("--gres=shard:4 -c 8", ("--cpus-per-task=2",)),
        ("--tres-per-task=cpu:8,gres/gpu:2", ("--tres-per-task=cpu:4,gres/gpu:2",)),
        ("--tres-per-task=gres/gpu:h200:1,cpu=16", ("--tres-per-task=gres/gpu:h200:1,cpu=2",)),
        # A script without GPUs computes on its CPUs.
        ("-c 8", ()),
        ("-n 4 -c 8 --mem-per-cpu=2G", ()),
        ("--tres-per-task=cpu:8", ()),
        # ... and its memory, when that was said per CPU ...
        ("--gres=gpu:1 -c16 --mem-per-cpu=4G", ("--cpus-per-task=2", "--mem-per-cpu=32G")),
        ("--gres=gpu:1 -c16 --mem=64G", ("--cpus-per-task=2",)),
        # ... without a rest, and whole cores of two threads have the memory of both ...
        ("--gres=gpu:3 -c16 --mem-per-cpu=4000", ("--cpus-per-task=8", "--mem-per-cpu=8000M")),
        ("--gres=gpu:1 -c7 --mem-per-cpu=1500", ()),
        ("--gres=gpu:1 -c14 --mem-per-cpu=1501", ("--cpus-per-task=2", "--mem-per-cpu=10507M")),
        ("-N1 --gres=gpu:2 -c8 --mincpus=16", ()),
        # ... but never gets more than the script asked for, and whole nodes stay whole.
        ("--gres=gpu:4 -c 4", ()),
        ("--gres=gpu:1", ()),
        ("--gres=gpu:1 -c 64 --exclusive", ()),
        ("--gres=gpu:1 -c many", ()),
    ],
)
def test_cpus_of_the_trainer(sbatch: str, kept: tuple[str, ...]) -> None:
    plan = plan_of(sbatch)
    assert plan.components[0].options == kept
    assert all(change.change and change.why for change in plan.changes)


@pytest.mark.parametrize(
    ("sbatch", "kept"),
    [
        ("-n4 -c8 --gpus-per-node=2", ()),
        ("-n4 -c8 --gres=gpu:2", ()),
        ("-n4 -c8 --gpus=4 --mem=10G", ()),
        ("-n4 -c8 --gpus=4 -N1-4 --mem=10G", ()),
        ("-n4 -c8 --gpus=4", ()),
        ("--gpus=4 --cpus-per-gpu=8", ()),
        ("-n4 -c8 --gpus-per-task=1 --mem-per-cpu=1G", ()),
        ("--gpus=1 -c8", ("--cpus-per-task=2",)),
        ("--gres=gpu:2 -c8", ("--cpus-per-task=4",)),
        ("--gpus=4 --ntasks-per-gpu=1 --cpus-per-gpu=8 --mem=10G", ()),
        ("-n4 -c8 --gpus=4 --mem-per-gpu=10G", ()),
        ("-n4 -c8 -N2 --gpus-per-node=2", ()),
        ("-n4 -c8 -N2 --ntasks-per-node=2 --gpus-per-node=2", ("--cpus-per-task=2",)),
        ("-n2 -c8 -N2 --gpus-per-node=2", ("--cpus-per-task=4",)),
        ("-n3 -c8 -N2 --ntasks-per-node=2 --gpus-per-node=2", ()),
        ("-N2 --gpus-per-node=2 --cpus-per-gpu=8", ("--cpus-per-gpu=2",)),
        ("-n2 -c8 --gpus-per-node=2", ()),
        ("--ntasks-per-node=2 -c8 --gpus-per-node=2", ("--cpus-per-task=2",)),
        ("-n4 -c8 --gpus-per-node=2 --hint=nomultithread", ()),
        ("-n4 -c4 --gpus-per-socket=1 --sockets-per-node=2", ()),
        ("-n4 -c4 --gres=gpu:2 --ntasks-per-socket=1", ()),
        ("-n4 -c8 --gpus-per-node=2 -p elsewhere", ()),
    ],
)
def test_a_script_that_names_no_number_of_nodes_gets_as_many(sbatch: str, kept: tuple[str, ...]) -> None:
    nodes = PartitionLimits((NodeSize(16, 64000, True), NodeSize(64, 64000, False)))
    cluster = ClusterLimits(frozenset({"gpu", "cpu"}), "gpu", None, {"gpu": nodes})
    text = f"#!/bin/bash\n#SBATCH {sbatch}\nsrun python train.py\n"
    assert convert(SPEC, text, "train.sbatch", cluster=cluster).components[0].options == kept


def test_tasks_that_slurm_divides_itself_keep_their_cpus() -> None:
    """Of 16 CPUs a node takes 2 tasks of 8 CPUs, and 3 of 4 tasks of 2 CPUs."""
    plan = plan_of("-N2 -n4 -c8 --gpus-per-node=2")
    assert plan.components[0].options == ()
    assert "--ntasks-per-node=N" in str(plan.changes)


def test_trainer_cpus_can_be_asked_for() -> None:
    spec = JobSpec(2, 2, data_worker_partition="cpu", trainer_cpus=6)
    assert plan_of("--gres=gpu:1 -c16", spec=spec).components[0].options == ("--cpus-per-task=6",)
    assert plan_of("--gres=gpu:2 --cpus-per-gpu=8", spec=spec).components[0].options == ("--cpus-per-gpu=3",)


def test_a_script_without_gpus_gives_cpus_away_only_when_told() -> None:
    plan = plan_of("-c 16 --mem-per-cpu=2G")
    assert plan.changes[0].change == "trainer: CPUs unchanged"
    assert "asks for no GPUs" in plan.changes[0].why
    spec = JobSpec(2, 2, data_worker_partition="cpu", trainer_cpus=4)
    assert plan_of("-c 16 --mem-per-cpu=2G", spec=spec).components[0].options == (
        "--cpus-per-task=4", "--mem-per-cpu=8G",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sbatch", "limit", "kept"),
    [
        # Slurm adds CPUs to a job whose memory for each CPU is above the limit: 2 of 32G would become 16 of 4G.
        ("--gres=gpu:1 -c16 --mem-per-cpu=4G", 4096, ()),
        ("--gres=gpu:1 -c16 --mem-per-cpu=4G", 8192, ("--cpus-per-task=8", "--mem-per-cpu=8G")),
        ("--gres=gpu:1 -c12 --mem-per-cpu=1000", 4000, ("--cpus-per-task=4", "--mem-per-cpu=3000M")),
        ("--gres=gpu:1 -c16 --mem-per-cpu=100", 4096, ("--cpus-per-task=2", "--mem-per-cpu=800M")),
        # ... and to one whose memory of a node is above that of its CPUs there.
        ("--gres=gpu:1 -c16 --mem=64G", 4096, ()),
        ("--gres=gpu:1 -c16 --mem=96G", 4096, ()),
        ("--gres=gpu:1 -c16 --mem=20G", 4096, ("--cpus-per-task=5",)),
        ("-N2 --ntasks-per-node=2 --gres=gpu:2 -c16 --mem=40G", 4096, ("--cpus-per-task=5",)),
        ("-N1 -n1 --gres=gpu:4 --cpus-per-gpu=16 --mem=64G", 4096, ("--cpus-per-gpu=4",)),
        ("--gres=gpu:1 -c16 --mem=8G", 4096, ("--cpus-per-task=2",)),
        ("--gres=gpu:1 -c16 --mem=0", 4096, ("--cpus-per-task=2",)),
        ("--gres=gpu:1 -c16 --mem-per-gpu=64G", 4096, ("--cpus-per-task=2",)),
    ],
)
def test_memory_for_each_cpu_stays_below_the_partitions_limit(sbatch: str, limit: int, kept: tuple[str, ...]) -> None:
    of_gpu = PartitionLimits((NodeSize(64, 256_000, True),), limit)
    cluster = ClusterLimits(frozenset({"gpu", "cpu"}), "gpu", None, {"gpu": of_gpu})
    plan = convert(SPEC, f"#!/bin/bash\n#SBATCH {sbatch}\n", "train.sbatch", cluster=cluster)
    assert plan.components[0].options == kept
    assert limit > 4096 or kept or "MaxMemPerCPU" in plan.changes[0].why


@pytest.mark.parametrize(
    ("sbatch", "threads", "kept"),
    [
        # Of 4 threads per core Slurm makes 2 CPUs 4, with the memory of as many.
        ("--gres=gpu:1 -c8 --mem-per-cpu=4000", 4, ("--cpus-per-task=4", "--mem-per-cpu=8000M")),
        ("--gres=gpu:1 -c8 --mem-per-cpu=4000", 2, ("--cpus-per-task=2", "--mem-per-cpu=16000M")),
        ("--gres=gpu:1 -c8 --mem-per-cpu=4000", 1, ("--cpus-per-task=2", "--mem-per-cpu=16000M")),
        ("--gres=gpu:1 -c8 --mem-per-cpu=4000", 8, ()),
        ("--gres=gpu:1 -c6 --mem-per-cpu=4000", 4, ()),
        ("--gres=gpu:1 -c12 --mem-per-cpu=1001", 4, ("--cpus-per-task=4", "--mem-per-cpu=3003M")),
        ("--gres=gpu:3 -c16 --mem-per-cpu=1001", 4, ("--cpus-per-task=8", "--mem-per-cpu=2002M")),
        ("-N1 --gpus=2 --cpus-per-gpu=8 --mem-per-cpu=1000", 4, ("--cpus-per-gpu=4", "--mem-per-cpu=2000M")),
        ("--gres=gpu:1 -c8 -p gpu,other --mem-per-cpu=4000", 4, ("--cpus-per-task=4", "--mem-per-cpu=8000M")),
        ("--gres=gpu:1 -c8 -p other,gpu --mem-per-cpu=4000", 4, ("--cpus-per-task=4", "--mem-per-cpu=8000M")),
        ("--gres=gpu:1 -c8 -p other --mem-per-cpu=4000", 4, ("--cpus-per-task=2", "--mem-per-cpu=16000M")),
        ("--gres=gpu:1 -c8", 4, ("--cpus-per-task=4", "--mem-per-cpu=2000M")),
        ("--gres=gpu:1 -c8 --mem=8G", 4, ("--cpus-per-task=2",)),
    ],
)
def test_memory_by_cpus_goes_by_whole_cores(sbatch: str, threads: int, kept: tuple[str, ...]) -> None:
    limits = {"gpu": PartitionLimits((), threads_per_core=threads), "other": PartitionLimits(())}
    cluster = ClusterLimits(frozenset(limits), "gpu", None, limits, default_mb_per_cpu={"gpu": 1000})
    plan = convert(SPEC, f"#!/bin/bash\n#SBATCH {sbatch}\nsrun python train.py\n", "train.sbatch", cluster=cluster)
    assert plan.components[0].options == kept
    assert kept or "the script's memory goes by its CPUs" in plan.changes[0].why


@pytest.mark.parametrize(
    ("sbatch", "kept"),
    [
        ("--gres=gpu:1 -c16", ("--cpus-per-task=2", "--mem-per-cpu=32000M")),
        ("--gres=gpu:1 -c16 -p other,gpu", ("--cpus-per-task=2", "--mem-per-cpu=32000M")),
        ("-N1 --gpus=2 --cpus-per-gpu=8", ("--cpus-per-gpu=2", "--mem-per-cpu=16000M")),
        ("--gres=gpu:1 -c16 -p other", ("--cpus-per-task=2",)),
        ("--gres=gpu:1 -c16 --mem=8G", ("--cpus-per-task=2",)),
        ("--gres=gpu:1 -c16 --mem-per-gpu=8G", ("--cpus-per-task=2",)),
        ("--gres=gpu:1 -c16 --exclusive", ()),
    ],
)
def test_a_trainer_that_asks_for_no_memory_keeps_what_its_cpus_bring(sbatch: str, kept: tuple[str, ...]) -> None:
    cluster = ClusterLimits(frozenset({"gpu", "other"}), "gpu", None, default_mb_per_cpu={"gpu": 4000})
    plan = convert(SPEC, f"#!/bin/bash\n#SBATCH {sbatch}\n", "train.sbatch", cluster=cluster)
    assert plan.components[0].options == kept
    assert not [word for word in plan.components[1].options if "mem" in word] or "--mem" in sbatch


@pytest.mark.parametrize(("partitions", "keeps"), [("gpu,whole", True), ("gpu", False), ("gpu,unknown", False)])
def test_a_trainer_that_has_its_nodes_alone_keeps_its_cpus(partitions: str, keeps: bool) -> None:
    """One of several partitions is enough: nobody knows in which the job will run."""
    limits = {"gpu": PartitionLimits(()), "whole": PartitionLimits((), alone="OverSubscribe=EXCLUSIVE")}
    cluster = ClusterLimits(frozenset(limits), "whole", None, limits)
    for partition in (f" -p {partitions}", "") if keeps else (f" -p {partitions}",):
        script = f"#!/bin/bash\n#SBATCH --gres=gpu:1 -c16 --mem=8G{partition}\nsrun python train.py\n"
        plan = convert(SPEC, script, "train.sbatch", cluster=cluster)
        assert plan.components[0].options == (() if keeps else ("--cpus-per-task=2",))
        assert not keeps or "OverSubscribe=EXCLUSIVE" in plan.changes[0].why


@pytest.mark.parametrize(
    ("mem", "allocates_memory", "keeps"),
    [("0", True, True), ("0G", True, True), ("0", False, False), ("1G", True, False), ("all", True, False)],
)
def test_a_trainer_with_all_memory_of_its_nodes_keeps_its_cpus(mem: str, allocates_memory: bool, keeps: bool) -> None:
    limits = {"gpu": PartitionLimits((), allocates_memory=allocates_memory)}
    script = f"#!/bin/bash\n#SBATCH --gres=gpu:1 -c16 --mem={mem}\nsrun python train.py\n"
    plan = convert(SPEC, script, "train.sbatch", cluster=ClusterLimits(frozenset(limits), "gpu", None, limits))
    assert plan.components[0].options == (() if keeps else ("--cpus-per-task=2",))
    assert not keeps or "--mem=0:" in plan.changes[0].why


@pytest.mark.parametrize(
    "option", ["exclusive", "exclusive=user", "exclusive=topo", "exclusive=mcs", "core-spec=2", "thread-spec=2"]
)
def test_a_trainer_that_wants_its_nodes_alone_keeps_its_cpus(option: str) -> None:
    plan = plan_of(f"--gres=gpu:1 -c 64 --{option}")
    assert plan.components[0].options == ()
    assert f"--{option}:" in plan.changes[0].why


def test_cpus_of_tasks_that_share_them_are_not_cut() -> None:
    """Slurm allocates a CPU for each node: four times the memory for each would be four times the memory."""
    plan = convert(SPEC, "#!/bin/bash\n#SBATCH --gres=gpu:1 -O -c8 --mem-per-cpu=4G\n", "train.sbatch")
    assert plan.components[0].options == ()
    assert "--overcommit" in plan.changes[0].why


@pytest.mark.parametrize("option", ["prefer", "container", "container-id", "container-type"])
def test_what_sbatch_carries_and_is_the_trainers_is_taken_back(option: str) -> None:
    plan = convert(SPEC, f"#!/bin/bash\n#SBATCH --gres=gpu:1 --{option}=x\n", "train.sbatch")
    assert f"--{option}=" in plan.components[1].options


@pytest.mark.parametrize("option", ["--hint=nomultithread", "--hint compute_bound"])
def test_the_trainers_hint_is_not_the_data_workers(option: str) -> None:
    plan = convert(SPEC, f"#!/bin/bash\n#SBATCH --gres=gpu:1 {option}\n", "train.sbatch")
    assert "--extra-node-info=*" in plan.components[1].options
    plan = convert(SPEC, "#!/bin/bash\n#SBATCH --gres=gpu:1\n", "train.sbatch")
    assert "--extra-node-info=*" not in plan.components[1].options


def test_what_no_node_can_hold_is_refused() -> None:
    def converted(partition: str, **of_spec: Any) -> HetPlan:
        spec = JobSpec(2, 2, data_worker_partition=partition, **of_spec)
        limits = {
            "cpu": PartitionLimits((NodeSize(32, 64_000, False, 2), NodeSize(64, 32_000, False, 2))),
            "small": PartitionLimits((NodeSize(8, 16_000, False, 2),)),
        }
        cluster = ClusterLimits(frozenset({"cpu", "small", "other"}), "cpu", None, limits)
        return convert(spec, "#!/bin/bash\n#SBATCH --mem=8G\n", "train.sbatch", cluster=cluster)

    for partition, of_spec in (
        ("cpu", {"data_worker_cpus": 64, "data_worker_mem": "16G"}),
        ("cpu", {"data_worker_cpus": 32, "data_worker_mem": "60G"}),
        ("small,cpu", {"data_worker_cpus": 32, "data_worker_mem": "60G"}),
        ("other", {"data_worker_cpus": 999}),
        ("small,other", {"data_worker_cpus": 999}),
    ):
        assert len(converted(partition, **of_spec).components) == 2
    with pytest.raises(
        limits.NoSuchNode, match=r"65 CPUs and 130G fits no node of partition cpu: .* 64 CPUs and 32000M"
    ):
        converted("cpu", data_worker_cpus=65)
    with pytest.raises(limits.NoSuchNode, match="64 CPUs and 60G fits no node"):
        converted("cpu", data_worker_cpus=64, data_worker_mem="60G")
    with pytest.raises(limits.NoSuchNode, match="of partition small"):
        converted("small", data_worker_cpus=16, data_worker_mem="1G")
    many = PartitionLimits((NodeSize(8, 16_000, False, 3), NodeSize(4, 64_000, False)))
    cluster = ClusterLimits(frozenset({"cpu"}), "cpu", None, {"cpu": many})
    for number in (7, 8):
        spec = JobSpec(number, number, data_worker_cpus=4)
        if number == 7:
            convert(spec, "#!/bin/bash\n", "train.sbatch", cluster=cluster)
        else:
            with pytest.raises(limits.NoSuchNode, match=r"8 data workers of 4 CPUs do not fit .* holds 7"):
                convert(spec, "#!/bin/bash\n", "train.sbatch", cluster=cluster)
    # Groups of data workers fit the nodes, too.
    assert "--ntasks-per-node=1" in converted("small", data_worker_cpus=5).components[1].options
    assert "--ntasks-per-node=2" in converted("small", data_worker_cpus=4).components[1].options


def test_the_python_of_data_workers_reaches_the_job_master() -> None:
    spec = JobSpec(2, 2, data_worker_partition="cpu", data_worker_python="apptainer exec 'my image' python")
    assert "--data-worker-python=apptainer exec 'my image' python" in (plan_of("-c4", spec=spec).master_options or ())
    for wrong in ("", "'", "a\nb"):
        with pytest.raises(DirectiveError, match="data-worker-python"):
            dataclasses.replace(SPEC, data_worker_python=wrong)


def test_an_srun_line_with_its_own_cpus_keeps_them() -> None:
    plan = plan_of("--gres=gpu:1 -c16", body="srun -n1 hostname\nsrun --cpus-per-task=12 python train.py")
    assert plan.components[0].options == ("--cpus-per-task=12",)
    assert "line 4 runs srun with 12 CPUs per task" in plan.changes[0].why


def test_data_workers_get_memory_when_the_script_talks_of_memory() -> None:
    assert plan_of("-c4").components[1].options == ("--partition=cpu", "--cpus-per-task=4", "--ntasks=2")
    assert plan_of("-c4 --mem-per-cpu=1G").components[1].options[-1] == "--mem-per-cpu=2G"
    spec = JobSpec(2, 2, data_worker_cpus=3, data_worker_partition="cpu", data_worker_mem="10G")
    assert plan_of("-c4 --mem-per-gpu=1G", spec=spec).components[1].options[-1] == "--mem-per-cpu=3414M"


@pytest.mark.parametrize(
    ("workers", "cpus", "memory"),
    [
        (2, 4, ("--ntasks-per-node=2", "--mem=16G")),
        (9, 4, ("--ntasks-per-node=3", "--mem=24G")),
        (3, 40, ("--ntasks-per-node=1", "--mem=80G")),
    ],
)
def test_memory_per_node_of_the_script_is_not_copied_to_data_workers(
    workers: int, cpus: int, memory: tuple[str, ...]
) -> None:
    spec = JobSpec(workers, workers + 1, data_worker_cpus=cpus, data_worker_partition="cpu")
    plan = plan_of("-c4 --mem=200G", spec=spec)
    assert plan.components[1].options[-2:] == memory
    assert plan.master_options[-1] == "--mem-per-cpu=2G"


def test_constraint_account_and_qos_of_data_workers() -> None:
    spec = JobSpec(
        1, 1, 4, "cpu", data_worker_constraint="a&b", data_worker_account="x", data_worker_qos="normal", trainer_cpus=1
    )
    assert plan_of("-A gpu -q gpu", spec=spec).components[1].options[2:5] == (
        "--constraint=a&b", "--account=x", "--qos=normal",
    )  # fmt: skip


@pytest.mark.parametrize(("name", "word"), [("none", "--reservation="), ("cpus", "--reservation=cpus")])
def test_data_workers_have_a_reservation_of_their_own(name: str, word: str) -> None:
    spec = JobSpec(1, 2, 4, "cpu", data_worker_reservation=name)
    plan = plan_of("--gres=gpu:1 --reservation=gpus", spec=spec)
    assert word in plan.components[1].options
    assert plan.master_options.count(word) == 1
    assert not any(option == "--reservation=gpus" for option in plan.master_options)
    # Said outside the script it is the trainer's alone: sbatch would give it to both.
    outside = plan_of("--gres=gpu:1", "--reservation=gpus", spec=spec)
    assert "--reservation=gpus" in outside.components[0].options
    assert outside.sbatch_options == ()
    inherited = plan_of("--gres=gpu:1 --reservation=gpus", spec=JobSpec(1, 2, 4, "cpu"))
    assert "--reservation=gpus" in inherited.master_options


def test_the_command_line_counts_and_is_overridden_where_it_must() -> None:
    plan = plan_of("--gres=gpu:1 -c 16", "-c", "12", "--time=5", "--data-workers=2", "-Jx")
    assert plan.sbatch_options == ("--time=5", "--job-name=x")
    assert "--cpus-per-task=2" in plan.components[0].options
    assert plan.changes[0].change == "trainer: --cpus-per-task=2 (was 12, command line)"
    assert plan_of("--gres=gpu:1 -c 16", "--time=5").sbatch_options == ("--time=5",)


def test_what_the_command_line_says_of_one_component_is_the_trainers() -> None:
    """sbatch would apply it to the data workers as well."""
    plan = plan_of("--gres=gpu:1", "-Hpgpu", "-w", "gpu1", "--exclusive", "--account=x")
    assert plan.sbatch_options == ("--hold", "--account=x")
    assert plan.components[0].options[:3] == ("--partition=gpu", "--nodelist=gpu1", "--exclusive")
    assert not any("gpu" in word for word in plan.components[1].options)


def test_companions_are_jobs_with_the_options_that_slurm_would_have_copied() -> None:
    plan = plan_of("-c4 -t 1-0 -A lab", "--reservation=r", spec=JobSpec(0, 3, data_worker_partition="cpu"))
    assert [component.role for component in plan.components] == ["trainer"]
    assert plan.master_options == (
        "--data-workers=0", "--data-worker-cpus=4", "--companions=3", "--", "--partition=cpu", "--cpus-per-task=4",
        "--account=lab", "--time=1-0", "--reservation=r",
    )  # fmt: skip


def test_licences_stay_with_the_trainer() -> None:
    plan = plan_of("-c4 -L ansys:2")
    assert not any("licenses" in word for component in plan.components for word in component.options)


@pytest.mark.parametrize(
    ("error", "sbatch", "command_line", "said"),
    [
        (limits.JobArrayNotSupported, "-a 0-5", (), "line 2: --array=0-5 is not supported with a heterogeneous job"),
        (limits.JobArrayNotSupported, "-c4", ("--array=3",), "use --data-workers=0-2"),
        (limits.AlreadyHeterogeneous, "hetjob", (), "line 2: '#SBATCH hetjob' starts a component"),
        (limits.AlreadyHeterogeneous, " packjob", (), "Remove the components"),
        (limits.BurstBufferNotShared, "--bb=x", (), "Read from the shared file system"),
        (limits.WrappedCommand, "-c4", ("--wrap=hostname",), "Put the command into a script file"),
        (UsageError, "-c4 train", (), "line 2: 'train' is not an sbatch option"),
        (UsageError, "-J 'x", (), "No closing quotation"),
        (UsageError, "-J", (), "line 2: option -J needs a value"),
    ],
)
def test_limits_are_named_with_the_way_out(
    error: type[UsageError], sbatch: str, command_line: tuple[str, ...], said: str
) -> None:
    with pytest.raises(error) as caught:
        plan_of(sbatch, *command_line)
    assert said in str(caught.value)


def test_burst_buffer_lines() -> None:
    with pytest.raises(limits.BurstBufferNotShared, match="line 2"):
        convert(SPEC, "#!/bin/sh\n#DW jobdw type=scratch\nhostname\n", "train.sbatch")


@pytest.mark.parametrize(
    "first", ["#!/usr/bin/python3", "#!/usr/bin/env -S python3 -u", "#!/bin/tcsh", "#!/usr/bin/perl -w"]
)
def test_other_interpreters_are_refused(first: str) -> None:
    with pytest.raises(limits.NotAShellScript, match="starts with #!/bin/bash"):
        convert(SPEC, f"{first}\nprint()\n", "train.py")


@pytest.mark.parametrize(
    "first", ["#!/bin/bash -l", "#!/usr/bin/env bash", "#! /bin/sh", "#!/bin/zsh", "no interpreter"]
)
def test_shells_are_converted(first: str) -> None:
    assert len(convert(SPEC, f"{first}\nhostname\n", "train.sbatch").components) == 2


def test_a_partition_must_come_from_somewhere() -> None:
    with pytest.raises(limits.MissingPartition, match="--data-worker-partition=NAME"):
        convert(JobSpec(1, 1), "#!/bin/sh\n", "train.sbatch")
    plan = convert(JobSpec(1, 1), "#!/bin/sh\n", "train.sbatch", cluster=ClusterLimits(frozenset(), "batch", None))
    assert "--partition=batch" in plan.components[1].options


def test_the_cluster_is_checked() -> None:
    cluster = ClusterLimits(frozenset({"cpu", "gpu"}), "gpu", "sched/backfill")
    check_cluster(JobSpec(1, 1, data_worker_partition="cpu,gpu"), cluster)
    check_cluster(JobSpec(1, 1), cluster)
    check_cluster(JobSpec(1, 1, data_worker_partition="anything"), ClusterLimits(frozenset(), None, None))
    with pytest.raises(limits.MissingPartition, match=r"'bigmem' does not exist\. This cluster has cpu, gpu"):
        check_cluster(JobSpec(0, 1, data_worker_partition="cpu,bigmem"), cluster)
    builtin = ClusterLimits(frozenset({"cpu"}), "cpu", "sched/builtin")
    with pytest.raises(limits.NeedsBackfill, match="0-3"):
        check_cluster(JobSpec(1, 3), builtin)
    check_cluster(JobSpec(0, 3), builtin)


def hole_words(sbatch: str, time_min: str, cluster: ClusterLimits = limits.UNKNOWN_CLUSTER) -> list[str]:
    spec = JobSpec(0, 2, data_worker_partition="cpu", data_worker_time_min=time_min)
    plan = convert(spec, f"#!/bin/bash\n#SBATCH {sbatch}\ntrue\n", "train.sbatch", cluster=cluster)
    assert f"in backfill holes of {time_min} or more" in plan.changes[-2].change
    return [word for word in plan.master_options or () if word.startswith(("--time-min", "--longest"))]


def test_companions_in_holes_run_no_longer_than_the_job_and_the_partition_let_them() -> None:
    assert hole_words("--gres=gpu:1", "2:00") == ["--time-min=120"]
    assert hole_words("--time=5", "2:00") == ["--time-min=120", "--longest=300"]
    short = PartitionLimits((NodeSize(8, 8000, False),), max_time_s=1800.0)
    cluster = ClusterLimits(frozenset({"cpu"}), "cpu", "sched/backfill", {"cpu": short})
    assert hole_words("--time=1-0", "1:30:0".removeprefix("1:"), cluster) == ["--time-min=1800", "--longest=1800"]
    assert hole_words("--gres=gpu:1", "1-0") == ["--time-min=86400"]
    assert hole_words("--time=UNLIMITED", "10", cluster) == ["--time-min=600", "--longest=1800"]
    with pytest.raises(limits.TimeMinTooLong, match="is above MaxTime of 30 minutes of partition cpu, so no data"):
        hole_words("--time=1-0", "31", cluster)
    with pytest.raises(limits.TimeMinTooLong, match="--data-worker-time-min=2:01 is above --time=2 of the job"):
        hole_words("--time=2", "2:01")


def test_holes_need_a_scheduler_that_looks_for_them() -> None:
    builtin = ClusterLimits(frozenset({"cpu"}), "cpu", "sched/builtin")
    with pytest.raises(limits.NeedsBackfill, match="only sched/backfill starts jobs in holes"):
        check_cluster(JobSpec(0, 3, data_worker_time_min="2"), builtin)


@pytest.mark.parametrize("text", ["soon", "0", "0:00", "", "-1", "UNLIMITED", "1:2:3:4", "1-0:0:1", "9" * 400])
def test_a_least_time_is_a_time(text: str) -> None:
    with pytest.raises(DirectiveError, match=r"a time above 0, such as 2:00 .* and at most a day"):
        JobSpec(0, 2, data_worker_time_min=text)
    with pytest.raises(
        DirectiveError, match=r"only data workers that join later run in holes\. Use --data-workers=2-MAX"
    ):
        JobSpec(2, 2, data_worker_time_min="2:00")


def test_arrays_work_with_companions_only() -> None:
    assert len(plan_of("-a 0-5", spec=JobSpec(0, 2, data_worker_partition="cpu")).components) == 1


def test_all_limits_are_conversion_errors() -> None:
    named = [value for value in vars(limits).values() if isinstance(value, type) and issubclass(value, ConversionError)]
    assert len(named) == 11
    assert all(f" {error.__name__} " in (limits.__doc__ or "") for error in named if error is not ConversionError)


CHECKPOINT = JobSpec(checkpoint="ckpt", checkpoint_size="8G")


@pytest.mark.shows("the memory of slots and replicas counts into the job's request")
@pytest.mark.parametrize(
    ("sbatch", "kept"),
    [
        # Three slots of 8G for each trainer task of a node, in whatever form the script asks for memory.
        ("--mem=64G", "--mem=88G"),
        ("--mem=64G -N2 --ntasks-per-node=4", "--mem=160G"),
        ("--mem=64G -N2 -n7", "--mem=160G"),
        ("--mem=64G -N2 --gpus-per-node=4 --ntasks-per-gpu=1", "--mem=160G"),
        ("--mem=64G --gpus=h200:2 --ntasks-per-gpu=2", "--mem=160G"),
        ("--mem=65536 -N 2-4 -n 2", "--mem=88G"),
        ("--mem-per-cpu=2G -c 8", "--mem-per-cpu=5G"),
        ("--mem-per-cpu=2G", "--mem-per-cpu=26G"),
        ("--mem-per-cpu=2G --cpus-per-gpu=4 --gpus=2", "--mem-per-cpu=5G"),
        ("--mem-per-gpu=16G --gpus-per-task=2", "--mem-per-gpu=28G"),
        ("--mem-per-gpu=16G --gpus=1 -n 2", "--mem-per-gpu=64G"),
        ("--mem=10G --mem-per-cpu=1G", "--mem-per-cpu=25G"),
    ],
)
def test_the_memory_of_checkpoints_counts(sbatch: str, kept: str) -> None:
    plan = plan_of(sbatch, spec=CHECKPOINT)
    assert [component.options for component in plan.components] == [(kept, "--requeue")]
    assert "3 slots of 8G in /dev/shm" in plan.changes[0].why
    assert plan.master_options is None
    assert plan.writer_options == ("--checkpoint=ckpt",)


@pytest.mark.shows("the memory of slots and replicas counts into the job's request")
def test_the_memory_of_replicas_counts_too() -> None:
    plan = plan_of("--mem=64G -N2 --ntasks-per-node=2", spec=dataclasses.replace(CHECKPOINT, checkpoint_replicas=1))
    assert plan.components[0].options == ("--mem=144G", "--requeue")
    assert "5 slots of 8G in /dev/shm" in plan.changes[0].why
    assert "2 of them for another host's replicas" in plan.changes[0].why


@pytest.mark.parametrize(
    ("sbatch", "kept"),
    [
        # A node holds three slots of 7G, and of 1G for each task.
        ("--mem=64G", "--mem=88G"),
        ("--mem=64G -N2 --ntasks-per-node=8", "--mem=109G"),
        ("--mem-per-cpu=2G -N2 --ntasks-per-node=8 -c 3", "--mem-per-cpu=3968M"),
        ("--mem-per-gpu=16G --ntasks-per-node=8 --gpus-per-task=1", "--mem-per-gpu=22144M"),
    ],
)
def test_what_all_ranks_share_counts_once_for_a_node(sbatch: str, kept: str) -> None:
    plan = plan_of(sbatch, spec=dataclasses.replace(CHECKPOINT, checkpoint_shared="7G"))
    assert plan.components[0].options == (kept, "--requeue")
    assert "; the 7G that all share once" in plan.changes[0].why


@pytest.mark.parametrize(
    ("sbatch", "why"), [("--mem=0", "--mem=0 is all memory of the node"), ("-c4", "the script asks for none")]
)
def test_memory_that_cannot_be_counted_is_said(sbatch: str, why: str) -> None:
    plan = plan_of(sbatch, spec=CHECKPOINT)
    assert plan.components[0].options == ("--requeue",)
    assert plan.changes[0].change == "trainer: memory unchanged"
    assert why in plan.changes[0].why


def test_the_memory_of_checkpoints_comes_on_top_of_what_fewer_cpus_need() -> None:
    spec = JobSpec(2, 2, data_worker_partition="cpu", checkpoint="ckpt", checkpoint_size="2G")
    plan = plan_of("--gres=gpu:1 -c16 --mem-per-cpu=4G", spec=spec)
    assert plan.components[0].options == ("--cpus-per-task=2", "--mem-per-cpu=35G", "--requeue")


def test_what_the_script_says_about_requeueing_holds() -> None:
    assert plan_of("--no-requeue", spec=CHECKPOINT).components[0].options == ()
    assert plan_of("--requeue", spec=CHECKPOINT).components[0].options == ()


def test_a_checkpoint_directory_belongs_to_one_job() -> None:
    with pytest.raises(limits.CheckpointNotShared, match="line 2: all tasks of --array=0-3"):
        plan_of("--array=0-3", spec=CHECKPOINT)


def test_options_of_the_command_line_lose_against_the_memory_of_checkpoints() -> None:
    plan = plan_of("-c2", "--mem=8G", spec=JobSpec(checkpoint="ckpt", checkpoint_size="1G"))
    assert plan.sbatch_options == ()
    assert plan.components[0].options == ("--mem=11G", "--requeue")


def test_checkpoints_need_no_backfill_and_share_burst_buffers() -> None:
    check_cluster(CHECKPOINT, ClusterLimits(frozenset({"gpu"}), "gpu", "sched/builtin"))
    assert plan_of("--bb=x", spec=CHECKPOINT).writer_options


@pytest.mark.parametrize("line_break", ["\n", "\r", "\0"])
@pytest.mark.parametrize("option", ["--comment=a{}#SBATCH --exclusive", "-Ja{}b", "--wckey=a{}b", "--gres=gpu:1{}x"])
def test_an_option_is_one_line(option: str, line_break: str) -> None:
    """Of the trainer or of the whole job; from SBATCH_* variables they come the same way."""
    with pytest.raises(UsageError, match=r"command line: --[a-z-]+='.*a value with a line break cannot be a line"):
        plan_of("--gres=gpu:1 -c 16", option.format(line_break))


@pytest.mark.parametrize("count", [(2, 2), (0, 3)])
def test_what_of_the_forward_may_move_is_told_to_the_job_master(count: tuple[int, int]) -> None:
    directive = "#HETSTREAM --data-workers={}-{} --offload=auto"
    script = f"#!/bin/bash\n#SBATCH --gres=gpu:1 -c 8\n{directive}\nsrun python train.py\n"
    spec = read_spec(read_directives(script.format(*count), "train.sbatch"), "train.sbatch")
    assert spec is not None
    plan = plan_of("--gres=gpu:1 -c 8", spec=dataclasses.replace(spec, data_worker_partition="cpu"))
    assert plan.master_options is not None
    assert "--offload=auto" in plan.master_options
    assert "master start" in (text := render(script, plan, ["/opt/hetstream"]))
    assert " --offload=auto " in text.split("master start")[1].replace("\n", " ").replace(")", " ")
    assert not any("--offload" in word for word in plan_of("--gres=gpu:1").master_options or ())


@pytest.mark.shows("`--dependency=singleton`: of two jobs with one name the second starts when the first has ended")
@pytest.mark.parametrize(
    ("dependency", "of_data_workers"),
    [
        ("singleton", ("--dependency=",)),
        ("SINGLETON", ("--dependency=",)),
        ("afterok:1:2,singleton", ("--dependency=afterok:1:2",)),
        ("singleton,afterany:3+5", ("--dependency=afterany:3+5",)),
        ("afterok:1?singleton", ("--dependency=",)),
        ("afterok:1", ()),
        ("afterok:1?afterany:2", ()),
    ],
)
@pytest.mark.parametrize("place", ["script", "command line"])
def test_data_workers_do_not_wait_for_their_own_trainer(
    dependency: str, of_data_workers: tuple[str, ...], place: str
) -> None:
    words = f"--dependency={dependency}"
    plan = plan_of(words) if place == "script" else plan_of("-c2", words)
    trainer, data_workers = plan.components
    assert tuple(word for word in data_workers.options if "dependency" in word) == of_data_workers
    # On the command line it would hold for all components.
    is_apart = place == "command line" and bool(of_data_workers)
    assert (words in trainer.options) == is_apart
    assert (words in plan.sbatch_options) == (place == "command line" and not of_data_workers)


def test_a_release_that_has_repaired_singleton_is_left_alone() -> None:
    cluster = ClusterLimits(frozenset({"cpu"}), "cpu", None, release=(23, 11))
    plan = convert(SPEC, "#!/bin/bash\n#SBATCH -d singleton\n", "train.sbatch", cluster=cluster)
    assert not any("dependency" in word for word in plan.components[1].options)


@pytest.mark.parametrize(
    ("signal", "of_data_workers"),
    [("USR1@90", ["--signal=B:USR1@90"]), ("R:TERM@60", ["--signal=B:TERM@60"]), ("B:USR1", []), ("rb:USR1", [])],
)
def test_a_signal_before_the_end_is_not_for_data_workers(signal: str, of_data_workers: list[str]) -> None:
    plan = plan_of(f"--signal={signal}")
    assert [word for word in plan.components[1].options if "signal" in word] == of_data_workers


@pytest.mark.shows("`#PBS` lines, `SBATCH_MEM_PER_CPU` beside `--mem`, `--reboot`: the trainer is the plain job")
def test_lines_of_another_batch_system_are_the_trainers_alone() -> None:
    script = "#!/bin/bash\n#SBATCH --gpus=1 -c 8\n#PBS -l nodes=1:ppn=8,mem=4gb\n"
    plan = convert(SPEC, script, "train.sbatch")
    # Memory per node, because the line may ask for it; and who knows what else it asks for.
    assert plan.components[1].options[-3:] == ("--ntasks-per-node=2", "--mem=16G", "--ignore-pbs")
    ignoring = convert(SPEC, script.replace("-c 8", "-c 8 --ignore-pbs"), "train.sbatch")
    assert "--ignore-pbs" not in ignoring.components[1].options


def test_what_a_component_consists_of_leaves_the_command_line() -> None:
    plan = plan_of("-c2", "--account=a", "--network=x", "--mail-type=END", "--wait", "--reboot", "--partition=gpu")
    assert plan.components[0].options == ("--network=x", "--mail-type=END", "--partition=gpu")
    assert plan.sbatch_options == ("--account=a", "--wait", "--reboot")
    assert any("rebooted" in change.change for change in plan.changes)
    apart = plan_of("-c2", "--account=a", spec=dataclasses.replace(SPEC, data_worker_account="b"))
    assert (apart.components[0].options, apart.sbatch_options) == (("--account=a",), ())
