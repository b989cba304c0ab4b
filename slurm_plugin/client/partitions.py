"""What one job can get on the nodes of each partition, from sinfo's and scontrol's text. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from hetstream.hetjob.ports import NodeSize, PartitionLimits
from hetstream.slurm_plugin.client.gres import parse_gres
from hetstream.slurm_plugin.client.model import Job, Partition, total
from hetstream.slurm_plugin.client.values import seconds

# Of sinfo, one line for each kind of node of a partition: name (the default one with `*`), CPUs, MB, nodes, GRES,
# threads of a core.
SINFO_FORMAT = "--format=%P|%c|%m|%D|%G|%Z"

# A job has whole nodes, or those of its user or its part of the topology; 26.05 has one word for all (slurm.conf(5)).
_ALONE = re.compile(r"\s(OverSubscribe=EXCLUSIVE|Exclusive(?:User|Topo)=YES|Exclusive=(?:NODE|USER|TOPO))(?=\s|$)")
# Why slurmctld does not start a job in a partition, which it names (part_policy_valid_acct and part_policy_valid_qos in
# partition_mgr.c, _get_req_features in node_scheduler.c). squeue writes blanks, scontrol underscores.
_NOT_ADMITTED = re.compile(r"permitted[ _]to[ _]use[ _]this[ _]partition[ _]\((\S+?)(?:\)|[ _](?:allows|denies)[ _])")


# Reasons that name no partition, and are of one alone; 24.11 and 26.05 tell no more of accounts.
_OF_ONE = frozenset({"PartitionDown", "PartitionInactive", "PartitionTimeLimit"})
# Of a job that slurmctld has not looked at, or not since a rule was changed.
_NOT_LOOKED = frozenset({"", "None", "Priority", "SchedDefer"})
_OF_ACCOUNT = frozenset({"AccountNotAllowed", "InvalidAccount"})


def with_open_partitions(jobs: Iterable[Job], partitions: Iterable[Partition]) -> tuple[Job, ...]:
    """The jobs; pending ones in several partitions without those that do not admit them, as long as others are left.

    slurmctld looks at a job once for each partition, and shows the reason of the last (seen on 22.05, 24.11 and 26.05).
    Accounts count with those above them, of which nothing is known here: a rule of accounts is looked at where Slurm's
    reason says that one keeps the job away. Behind others slurmctld says Priority without a look at any rule; where all
    partitions have one that is against such a job, they are noted in `barred`.
    """
    known = {partition.name: partition for partition in partitions}
    return tuple(_in_open_partitions(job, known) if job.is_pending else job for job in jobs)


def _in_open_partitions(job: Job, known: Mapping[str, Partition]) -> Job:
    found = _NOT_ADMITTED.search(job.reason)
    named = found[1] if found else ""
    by_account = {name for name in job.partitions if job.reason in _OF_ACCOUNT and _keeps_account(known.get(name), job)}
    closed = tuple(
        name for name in job.partitions if name == named or name in by_account or _is_closed(known.get(name), job)
    )
    left = tuple(name for name in job.partitions if name not in closed)
    against = [_rule_against(known.get(name), job) for name in job.partitions] if job.reason in _NOT_LOOKED else []
    if against and all(against):
        return replace(job, barred="; ".join(against))
    if not closed or not left:
        return job
    is_of_closed = named in closed or bool(by_account) or job.reason in _OF_ONE
    return replace(job, partitions=left, closed_partitions=closed, reason_is_of_closed=is_of_closed)


def _rule_against(partition: Partition | None, job: Job) -> str:
    """The rule of a partition that keeps a job away, in words; empty if there is none."""
    if partition is None:
        return ""
    name = partition.name
    if not partition.is_up:
        return f"{name} is not up"
    if _is_against(job.qos, partition.allow_qos, partition.deny_qos):
        return f"{name} {_words('QOS', partition.allow_qos, partition.deny_qos)}, and its QOS is {job.qos}"
    if _keeps_account(partition, job):
        rule = _words("accounts", partition.allow_accounts, partition.deny_accounts)
        return f"{name} {rule}, and its account is {job.account}, unless one above that counts"
    if partition.allow_groups and job.uid != 0 and job.user not in (*partition.members, "root"):
        groups = ",".join(partition.allow_groups)
        return f"{name} allows groups {groups}, and {job.user} is in none of these, as far as this host knows"
    return ""


def _words(what: str, allowed: Collection[str], denied: Collection[str]) -> str:
    return f"allows {what} {','.join(allowed)}" if allowed else f"denies {what} {','.join(denied)}"


def why_closed(partition: Partition, job: Job) -> str:
    """What keeps a job, or one that comes with it, from a partition, by all rules known here; empty if none."""
    longest_s = partition.max_time_s
    if longest_s is not None and job.time_limit_s is not None and job.time_limit_s > longest_s:
        return f"{partition.name} has a shorter MaxTime"
    return _rule_against(partition, job)


def _is_closed(partition: Partition | None, job: Job) -> bool:
    if partition is None:
        return False
    longest_s, limit_s = partition.max_time_s, job.time_limit_s
    is_too_long = longest_s is not None and limit_s is not None and limit_s > longest_s
    return not partition.is_up or is_too_long or _is_against(job.qos, partition.allow_qos, partition.deny_qos)


def _keeps_account(partition: Partition | None, job: Job) -> bool:
    return partition is not None and _is_against(job.account, partition.allow_accounts, partition.deny_accounts)


def _is_against(name: str, allowed: Collection[str], denied: Collection[str]) -> bool:
    """Whether a rule keeps this name away; where some are allowed nobody looks at who is denied."""
    return bool(name) and (name not in allowed if allowed else name in denied)


def names_of(partitions: str) -> list[str]:
    """The names in `scontrol --oneliner show partition` as sinfo writes them: the default one with `*`."""
    found = re.findall(r"^PartitionName=(\S+)(.*)$", partitions, re.MULTILINE)
    return [f"{name}*" if " Default=YES" in more else name for name, more in found]


def parse_limits(sinfo: Iterable[str], partitions: str, config: str) -> dict[str, PartitionLimits]:
    """The limits of each partition, with the nodes that sinfo shows there.

    Args:
        sinfo: its lines, in `SINFO_FORMAT`. Where nodes of several sizes share a line, `+` follows the smallest: the
            partition's nodes are then left out, as nobody knows the largest.
        partitions: `scontrol --oneliner show partition`.
        config: `scontrol show config`.
    """
    nodes: dict[str, list[NodeSize]] = {}
    unknown: set[str] = set()
    threads: dict[str, int] = {}
    for line in sinfo:
        name, *fields = line.strip().split("|")
        name = name.rstrip("*")
        of_core = re.match(r"\d+", fields[-1], re.ASCII) if len(fields) == 5 else None
        threads[name] = max(threads.get(name, 1), int(of_core[0]) if of_core else 1)
        if of_core and all(field.isdigit() for field in fields[:3]):
            has_gpus = total(parse_gres(fields[3]), "gpu") > 0
            nodes.setdefault(name, []).append(NodeSize(int(fields[0]), int(fields[1]), has_gpus, int(fields[2])))
        else:
            unknown.add(name)
    everywhere = _number("MaxMemPerCPU", config)
    is_linear = re.search(r"^SelectType\s*=\s*select/linear\s*$", config, re.MULTILINE)
    found = {}
    for name in dict.fromkeys((*nodes, *unknown)):
        line = next(
            (entry for entry in partitions.splitlines() if re.match(rf"PartitionName={re.escape(name)}\s", entry)), ""
        )
        if name in unknown and not line:
            continue
        kinds = [] if name in unknown else nodes[name]
        most = _number("MaxCPUsPerNode", line)
        sizes = tuple(replace(kind, cpus=min(kind.cpus, most)) if most else kind for kind in kinds)
        longest = re.search(r"\sMaxTime=(\S+)", line)
        max_time_s = seconds(longest[1]) if longest else None
        setting = _ALONE.search(line)
        alone = setting[1] if setting else "SelectType=select/linear" if is_linear else ""
        max_mb_per_cpu = _number("MaxMemPerCPU", line) or everywhere
        found[name] = PartitionLimits(
            sizes, max_mb_per_cpu, max_time_s, alone, _allocates_memory(line, config), threads[name]
        )
    return found


def parse_default_memory(partitions: str, config: str) -> dict[str, int]:
    """MB for each CPU of a job that asks for no memory, of each partition where Slurm counts it by CPUs.

    A partition's own DefMemPerCPU or DefMemPerNode comes before the cluster's, and DefMemPerGPU, which only jobs with
    GPUs have, before both (slurm.conf(5), JobDefaults).

    Args:
        partitions: `scontrol --oneliner show partition`.
        config: `scontrol show config`.
    """
    found: dict[str, int] = {}
    if re.search(r"^JobDefaults\s*=.*DefMemPerGPU", config, re.MULTILINE):
        return found
    for line in partitions.splitlines():
        name = re.match(r"PartitionName=(\S+)", line)
        by_gpu = re.search(r"\sJobDefaults=\S*DefMemPerGPU", line)
        own = _number("DefMemPerCPU", line)
        if own is None and _number("DefMemPerNode", line) is None:
            own = _number("DefMemPerCPU", config)
        if name and own and not by_gpu:
            found[name[1]] = own
    return found


def _allocates_memory(partition: str, config: str) -> bool:
    """Whether memory is among what jobs are allocated; a partition's own word comes before the cluster's."""
    own = re.search(r"\sSelectTypeParameters=(?!NONE)(\S+)", partition)
    everywhere = re.search(r"^SelectTypeParameters\s*=\s*(\S+)", config, re.MULTILINE)
    said = own or everywhere
    return said is not None and "MEMORY" in said[1].upper()


def _number(key: str, text: str) -> int | None:
    match = re.search(rf"(?:^|\s){key}\s*=\s*(\d+)", text, re.MULTILINE)
    return int(match[1]) if match and int(match[1]) > 0 else None
