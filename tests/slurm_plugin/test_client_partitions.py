"""What one job can get in each partition, from sinfo's and scontrol's text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetstream.hetjob.ports import NodeSize, PartitionLimits
from hetstream.slurm_plugin.client.model import Job, Partition
from hetstream.slurm_plugin.client.parse_text import parse_default_memory, parse_limits, with_open_partitions
from hetstream.slurm_plugin.insight.blockers import told_by_slurm

SINFO = [
    "gpu*|64|512000|8|gpu:h200:8,shard:32|4",
    "cpu|128|256000|20|(null)|2",
    "cpu|32|64000|4|(null)|1",
    "mixed|32+|64000+|3|(null)|2+",
    "small|16|64000|2|gpuless:1,gpu:0|1",
]
SHOWN = """\
PartitionName=gpu AllowGroups=ALL MaxTime=2-00:00:00 MaxCPUsPerNode=UNLIMITED DefMemPerNode=UNLIMITED MaxMemPerCPU=8000
PartitionName=cpu AllowGroups=ALL MaxTime=UNLIMITED MaxCPUsPerNode=96 MaxMemPerNode=UNLIMITED
PartitionName=small AllowGroups=ALL MaxCPUsPerNode=0 MaxMemPerNode=UNLIMITED
PartitionName=mixed AllowGroups=ALL MaxTime=01:00:00 MaxMemPerNode=UNLIMITED
"""


@pytest.mark.parametrize(
    "reason",
    [
        "Job's account not permitted to use this partition (b_c allows one-job not free)",
        "Job's_QOS_not_permitted_to_use_this_partition_(b_c_denies_normal_including_normal)",
        "uid 65534 not in group permitted to use this partition (b_c). groups allowed: staff",
        "PartitionDown", "PartitionInactive", "PartitionTimeLimit", "Resources", "AssocGrpCpuLimit",
        "Job's account not permitted to use this partition (x allows y not z)",
    ],
)  # fmt: skip
def test_a_partition_that_does_not_admit_a_job_keeps_it_from_no_other(reason: str) -> None:
    partitions = (Partition("a", ()), Partition("b_c", ()), Partition("down", (), is_up=False),
                  Partition("short", (), max_time_s=60.0))  # fmt: skip
    job = Job(1, "j", "u", tuple(each.name for each in partitions), "PENDING", reason, 1, 1, 1, 1, 0, time_limit_s=90.0)
    (found,) = with_open_partitions([job], partitions)
    assert found.closed_partitions == (*(["b_c"] if "b_c" in reason else []), "down", "short")
    assert {*found.partitions, *found.closed_partitions} == {*job.partitions}
    others = reason.startswith("Assoc") or "(x" in reason
    assert found.waits_for_resources == (told_by_slurm(found) is None) == (not others)
    for only in ("a", "b_c", "down", "short"):
        alone = replace(job, partitions=(only,))
        assert with_open_partitions([alone], partitions) == (alone,), "there is no other"
    rules = (Partition("a", ()), Partition("qos", (), deny_qos=("normal",)), Partition("high", (), allow_qos=("high",)),
             Partition("accounts", (), allow_accounts=("other",)))  # fmt: skip
    job_of_rules = replace(job, partitions=tuple(each.name for each in rules), qos="normal", account="free")
    (found,) = with_open_partitions([replace(job_of_rules, reason="Resources")], rules)
    assert (found.partitions, found.closed_partitions) == (("a", "accounts"), ("qos", "high"))
    (found,) = with_open_partitions([replace(job_of_rules, reason="AccountNotAllowed")], rules)
    assert (found.partitions, found.waits_for_resources) == (("a",), True)
    (found,) = with_open_partitions([replace(job_of_rules, reason="AccountNotAllowed")], rules[:3])
    assert not found.waits_for_resources, "no rule of these partitions is about accounts"
    shorter = replace(job, time_limit_s=None)
    assert "short" in with_open_partitions([shorter], partitions)[0].partitions, "it takes what the partition gives"


def test_the_limits_of_partitions() -> None:
    limits = parse_limits(SINFO, SHOWN, "MaxMemPerNode           = UNLIMITED\n")
    assert limits == {
        "gpu": PartitionLimits((NodeSize(64, 512000, True, 8),), 8000, 172800.0, threads_per_core=4),
        "cpu": PartitionLimits((NodeSize(96, 256000, False, 20), NodeSize(32, 64000, False, 4)), threads_per_core=2),
        "small": PartitionLimits((NodeSize(16, 64000, False, 2),)),
        "mixed": PartitionLimits((), None, 3600.0, threads_per_core=2),
    }
    everywhere = parse_limits(SINFO, SHOWN, "MaxMemPerCPU            = 4000\n")
    assert {name: one.max_mb_per_cpu for name, one in everywhere.items()} == {"gpu": 8000} | dict.fromkeys(
        ("cpu", "small", "mixed"), 4000
    )


@pytest.mark.parametrize(
    ("written", "alone"),
    [
        ("ExclusiveUser=NO OverSubscribe=EXCLUSIVE PreemptMode=OFF", "OverSubscribe=EXCLUSIVE"),
        ("ExclusiveUser=YES GraceTime=0 OverSubscribe=NO", "ExclusiveUser=YES"),
        ("ExclusiveUser=NO ExclusiveTopo=YES OverSubscribe=FORCE:4", "ExclusiveTopo=YES"),
        ("Exclusive=NODE OverSubscribe=NO", "Exclusive=NODE"),
        ("Exclusive=USER OverSubscribe=NO", "Exclusive=USER"),
        ("Exclusive=TOPO OverSubscribe=NO", "Exclusive=TOPO"),
        ("Exclusive=NO OverSubscribe=NO", ""),
        ("ExclusiveUser=NO ExclusiveTopo=NO OverSubscribe=YES:4", ""),
    ],
)
def test_whose_jobs_have_their_nodes_alone(written: str, alone: str) -> None:
    """As 22.05, 24.11 and 26.05 say it of a partition, and select/linear of the whole cluster."""
    shown = f"PartitionName=gpu AllowGroups=ALL {written} State=UP\n"
    assert parse_limits(["gpu*|8|8000|1|(null)|1"], shown, "")["gpu"].alone == alone
    assert parse_limits(["gpu*"], shown, "SelectType              = select/cons_tres\n")["gpu"].alone == alone
    linear = parse_limits(["gpu*|8|8000|1|(null)|1"], shown, "SelectType              = select/linear\n")
    assert linear["gpu"].alone == (alone or "SelectType=select/linear")


@pytest.mark.parametrize(
    ("of_partition", "of_cluster", "allocates"),
    [
        ("NONE", "CR_CORE_MEMORY", True),
        ("NONE", "CR_CPU", False),
        ("CR_Socket_Memory", "CR_CORE", True),
        ("CR_CORE", "CR_CORE_MEMORY,CR_ONE_TASK_PER_CORE", False),
        ("NONE", "CR_SOCKET_MEMORY,CR_LLN", True),
    ],
)
def test_where_memory_is_allocated(of_partition: str, of_cluster: str, allocates: bool) -> None:
    shown = f"PartitionName=gpu AllowGroups=ALL SelectTypeParameters={of_partition} State=UP\n"
    limits = parse_limits(["gpu*|8|8000|1|(null)|1"], shown, f"SelectTypeParameters    = {of_cluster}\n")
    assert limits["gpu"].allocates_memory is allocates
    assert not parse_limits(["gpu*|8|8000|1|(null)|1"], "", "")["gpu"].allocates_memory


def test_what_is_in_another_form_is_not_known() -> None:
    assert parse_limits(["gpu*", "cpu|x|y|z|w", ""], "", "") == {}


def test_memory_of_jobs_that_ask_for_none() -> None:
    shown = """\
PartitionName=own JobDefaults=(null) DefMemPerCPU=2000 MaxMemPerNode=UNLIMITED
PartitionName=node JobDefaults=(null) DefMemPerNode=16000 MaxMemPerNode=UNLIMITED
PartitionName=gpus JobDefaults=DefCpuPerGPU=8,DefMemPerGPU=20000 DefMemPerCPU=2000 MaxMemPerNode=UNLIMITED
PartitionName=cluster JobDefaults=DefCpuPerGPU=8 DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED
"""
    config = "DefMemPerCPU            = 4000\nJobDefaults             = (null)\n"
    assert parse_default_memory(shown, config) == {"own": 2000, "cluster": 4000}
    assert parse_default_memory(shown, "DefMemPerNode           = UNLIMITED\n") == {"own": 2000}
    assert parse_default_memory(shown, config.replace("(null)", "DefMemPerGPU=20000")) == {}
