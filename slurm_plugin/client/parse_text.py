"""Text that Slurm's commands print, as the model. Pure; called by `read.py`.

`squeue -O` with separators of our own, and the one-line records of `scontrol show`. Both are alike from 22.05 to 26.05;
fields that a version does not know are left out of the record, and unknown ones are ignored.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from hetstream.hetjob.ports import NodeSize, PartitionLimits
from hetstream.slurm_plugin.client.model import (
    MAINTENANCE,
    PENDING_STATES,
    RESERVED,
    Gres,
    HetComponent,
    Job,
    Node,
    Partition,
    Reservation,
    ReservedPart,
    total,
)
from hetstream.slurm_plugin.client.slurm_units import (
    Reading,
    expand,
    known_gres,
    megabytes,
    moment,
    note_doubts,
    parse_gres,
    seconds,
    text_or_empty,
    tres,
    whole,
)
from hetstream.slurm_plugin.errors import UnreadableAnswer

# What separates by default; `new_separators` makes those that no user can write into a name.
FIELD_END, RECORD_END = "\x1f", "\x1e"
# Fields of squeue, least for what the model holds; the last one ends the record.
JOB_FIELDS = (
    "JobID", "ArrayJobID", "ArrayTaskID", "HetJobID", "HetJobOffset", "UserID", "UserName", "Account", "QOS",
    "Partition", "State", "Reason", "NumNodes", "MaxNodes", "NumCPUs", "MinCPUs", "MinTmpDisk", "SCT", "NTPerCore",
    "NTPerSocket", "NumTasks", "cpus-per-task", "MinMemory", "tres-alloc", "tres-per-node", "tres-per-task",
    "tres-per-job", "tres-per-socket", "cpus-per-tres", "mem-per-tres", "NodeList", "SubmitTime",
    "EligibleTime", "StartTime", "EndTime", "TimeLimit", "PriorityLong", "Dependency", "ReqNodes", "SchedNodes",
    "ExcNodes", "Contiguous", "ReqSwitch", "Feature", "Reservation", "RestartCnt", "OverSubscribe", "Licenses",
    "LastSchedEval", "MCSLabel", "Name", "WorkDir", "Comment",
)  # fmt: skip
# What slurmctld writes into a running job that has no time limit.
NO_LIMIT_S = 365 * 24 * 3600.0
logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_R = TypeVar("_R")
_EXCLUSIVE = frozenset({"NODE", "USER", "MCS", "TOPO"})
_JOB_ID = re.compile(r"JobId=(\d+) ")
_OWNER = re.compile(r"\((\d+)\)$")
# A pattern begins where the blanks do, and not at each of them.
_KEY = re.compile(r"(?:^|(?<!\s)\s+)([A-Za-z][A-Za-z:/_]*)=")
# What people write stands at the end of a record, in this order (slurm_sprint_node_table in Slurm's source).
_WRITTEN = re.compile(r"(?<!\s)\s+(?=(?:Reason|Comment|Extra)=)")
# Behind the first line of a reason stand who gave it and when, if that is known; before each further one ten blanks.
_BEHIND = r"(?: (?:Comment|Extra)=.*)?"
_REASON = re.compile(rf"Reason=(?:(.*?) \[[^\s@\[\]]+@[^\s\[\]]+\]( {{10}}.*?)?{_BEHIND}|(.*?){_BEHIND})")


def new_separators() -> tuple[str, str]:
    """Return what ends a field and what ends a record in one answer of Slurm's.

    Users write what they like into names, comments and paths, control characters too. What they cannot write is a word
    that is drawn anew for each call.
    """
    word = secrets.token_hex(16)
    return f"{FIELD_END}{word}{FIELD_END}", f"{RECORD_END}{word}{RECORD_END}"


def job_format(fields: Sequence[str] = JOB_FIELDS, field_end: str = FIELD_END, record_end: str = RECORD_END) -> str:
    """Return the value of `squeue -O` whose output `parse_jobs` and `parse_rows` read."""
    ends = [field_end] * (len(fields) - 1) + [record_end]
    return ",".join(f"{name}:{end}" for name, end in zip(fields, ends, strict=True))


def parse_rows(text: str, fields: Sequence[str], field_end: str, record_end: str) -> Iterator[dict[str, str]]:
    """Yield the records that `squeue --noheader -O` printed, as they are.

    Raises:
        UnreadableAnswer: a record has another number of fields.
    """
    for record in text.split(record_end):
        line = record.removeprefix("\n")
        if not line:
            continue
        values = line.split(field_end)
        if len(values) != len(fields):
            raise UnreadableAnswer(f"squeue printed {len(values)} fields and not {len(fields)}", line)
        yield dict(zip(fields, values, strict=True))


def parse_jobs(
    text: str, fields: Sequence[str] = JOB_FIELDS, field_end: str = FIELD_END, record_end: str = RECORD_END
) -> tuple[Job, ...]:
    """Return the jobs that `squeue --noheader -O` printed, those with a damaged part, too (`slurm_units.py`).

    A record without a job's number, which no user writes, is left out and told.

    Raises:
        UnreadableAnswer: a record has another number of fields, or no job can be read.
    """
    rows = parse_rows(text, fields, field_end, record_end)
    jobs = readable(rows, lambda row: _checked(repr(row), _job, row))
    note_doubts(jobs)
    return jobs


def readable(records: Iterable[_R], read: Callable[[_R], _T]) -> tuple[_T, ...]:
    """Return what is read of records; those that cannot be read are left out and told: users have a say in what they
    hold.

    Raises:
        UnreadableAnswer: none can be read.
    """
    found: list[_T] = []
    unreadable: list[UnreadableAnswer] = []
    for entry in records:
        try:
            found.append(read(entry))
        except UnreadableAnswer as error:
            unreadable.append(error)
    if unreadable and not found:
        raise unreadable[0]
    if unreadable:
        num, first = len(unreadable), unreadable[0]
        logger.warning("%d of squeue's records cannot be read and are left out; one: %s", num, first)
    return tuple(found)


def _job(row: Mapping[str, str]) -> Job:
    read = Reading()

    def number(field: str, otherwise: int = 0) -> int:
        return read(lambda text: whole(text, otherwise), row.get(field, ""), otherwise)

    asked = tres(row["tres-alloc"])
    tasks = read.array_tasks(text_or_empty(row.get("ArrayTaskID", "")))
    het_job_id = number("HetJobID")
    likely_nodes = read(_least, row.get("NumNodes", ""), 0)
    time_limit_s = _limit(read(seconds, row["TimeLimit"], None))
    per_gpu = text_or_empty(row.get("mem-per-tres", ""))
    own_memory = asks_memory_itself(per_gpu)
    job = Job(
        job_id=int(row["JobID"]),
        name=row.get("Name", ""),
        user=row["UserName"],
        uid=int(uid) if (uid := row.get("UserID", "")).isdecimal() else None,
        partitions=tuple(row["Partition"].split(",")),
        state=row["State"],
        reason=text_or_empty(row["Reason"]),
        num_nodes=whole(asked.get("node", ""), likely_nodes or 1),
        likely_nodes=likely_nodes,
        max_nodes=most_nodes(likely_nodes, number("MaxNodes")),
        num_cpus=read(_least, row["NumCPUs"], 1),
        min_cpus_per_node=number("MinCPUs", 1),
        tmp_disk_mb=read(megabytes, row.get("MinTmpDisk", ""), 0),
        layout=read(_layout, row.get("SCT", ""), (0, 0, 0)),
        tasks_per_core=number("NTPerCore"),
        tasks_per_socket=number("NTPerSocket"),
        num_tasks=number("NumTasks", 1),
        cpus_per_task=number("cpus-per-task", 1),
        memory_mb=read(megabytes, asked.get("mem", ""), 0),
        memory_per_cpu_mb=read(lambda _: _per_cpu(row, asked), "", None),
        memory_per_gpu_mb=total(read.gres(per_gpu), "gpu"),
        own_memory=own_memory,
        all_memory=row.get("MinMemory") == "0" and own_memory is not False,
        array_job_id=number("ArrayJobID") if tasks else None,
        array_tasks=tasks,
        het=HetComponent(het_job_id, number("HetJobOffset")) if het_job_id else None,
        account=text_or_empty(row.get("Account", "")),
        qos=text_or_empty(row.get("QOS", "")),
        gres_per_node=read.gres(row["tres-per-node"]),
        gres_per_task=read.gres(row.get("tres-per-task", "")),
        gres_per_job=read.gres(row.get("tres-per-job", "")),
        gres_per_socket=read.gres(row.get("tres-per-socket", "")),
        gpus_requested=read(partial(requested_gpus, row["State"]), row["tres-alloc"], None),
        cpus_per_gpu=total(read.gres(row.get("cpus-per-tres", "")), "gpu"),
        gres_held=read(partial(allocated_gres, row["State"]), row["tres-alloc"], None),
        nodes=read(expand, row["NodeList"], ()),
        submit_s=read(moment, row.get("SubmitTime", ""), None),
        eligible_s=read(moment, row.get("EligibleTime", ""), None),
        start_s=read(moment, row["StartTime"], None),
        end_s=None if has_no_end(row["State"], time_limit_s) else read(moment, row.get("EndTime", ""), None),
        time_limit_s=time_limit_s,
        priority=number("PriorityLong"),
        dependency=text_or_empty(row.get("Dependency", "")),
        required_nodes=read(expand, row.get("ReqNodes", ""), ()),
        planned_nodes=read(expand, row.get("SchedNodes", ""), ()),
        excluded_nodes=read(expand, row.get("ExcNodes", ""), ()),
        is_contiguous=row.get("Contiguous") == "1",
        num_switches=number("ReqSwitch"),
        licenses=text_or_empty(row.get("Licenses", "")),
        features=text_or_empty(row.get("Feature", "")),
        reservation=text_or_empty(row.get("Reservation", "")),
        comment=text_or_empty(row.get("Comment", "")),
        num_restarts=number("RestartCnt"),
        work_dir=row.get("WorkDir", ""),
        # As squeue says it: what NO means depends on the release, which is not known here.
        exclusive=text_or_empty(row.get("OverSubscribe", "")),
        last_sched_eval_s=read(moment, row.get("LastSchedEval", ""), None),
        mcs_label=text_or_empty(row.get("MCSLabel", "")),
    )
    return replace(job, unreadable=read.unreadable, gres_in_doubt=read.gres_in_doubt)


def _least(text: str) -> int:
    """Of `2-4` the first; 1 where nothing is said."""
    return whole(text.split("-")[0], 1)


def asks_memory_itself(per_gpu: str) -> bool | None:
    """Return whether a job asks for memory by nodes or CPUs: not with `--mem-per-gpu`, and None where nothing says so.

    The memory of a node or CPU of a job with `--mem-per-gpu` is 0, or that of a GPU (23.11 on), and says nothing.

    Args:
        per_gpu: `gres:gpu:8000`, later `gres/gpu:8000`; `gpu:8000` is DefMemPerGPU, which slurmctld writes down when it
            first tries a job, whatever that asks for (_set_gpu_defaults in select/cons_tres).
    """
    return False if per_gpu.startswith("gres") else None


def most_nodes(likely: int, most: int) -> int | None:
    """Return the most nodes that a pending job may get, from what Slurm tells as the most and as likely.

    Of a job that set no limit it tells the likely number again (_print_job_max_nodes in src/squeue/print.c), and 23.02
    to 25.11 pack that in its place (_pack_default_job_details in src/slurmctld/job_mgr.c).
    """
    return most if most not in (0, likely) else None


def _layout(text: str) -> tuple[int, int, int]:
    """Sockets, cores and threads of `2:*:1`; 0 where any will do, or nothing is said."""
    found = [int(part) if part.isdecimal() else 0 for part in text.split(":")]
    return (found[0], found[1], found[2]) if len(found) == 3 else (0, 0, 0)


def exclusive_of(said: str) -> str:
    """`NODE` or another word of `--exclusive`, from what releases before 26.05 say of a job's sharing.

    `NO` in tables and `none` in JSON is a job with whole nodes; `OK` or nothing is one that did not say
    (get_job_share_value and job_share_string in Slurm's source). 26.05 says NO of all that do not oversubscribe.
    """
    word = said.upper()
    return "NODE" if word in ("NO", "NONE") else word if word in _EXCLUSIVE else ""


def parse_exclusive(text: str) -> dict[int, str]:
    """Return the same from `scontrol --oneliner show job` of 26.05, by the numbers of jobs; empty where it is
    in doubt.
    """
    return {job_id: word if word in _EXCLUSIVE else "" for job_id, word in said_of_jobs(text, "Exclusive").items()}


def said_of_jobs(text: str, field: str) -> dict[int, str | None]:
    """Return what a field says in each record of `scontrol --oneliner show job`; empty where it is not there, None in
    doubt.

    A user can write a line end and a whole record, or a field, into the name of a job. Slurm's own stands beside it:
    what is said twice is in doubt.
    """
    found: dict[int, str | None] = {}
    for job_id, records in records_of_jobs(text).items():
        said = re.findall(rf"(?<!\S){field}=(\S+)", records[0])
        found[job_id] = "".join(said) if len(records) == 1 and len(said) < 2 else None
    return found


def records_of_jobs(text: str) -> dict[int, list[str]]:
    """Return the lines of `scontrol --oneliner show job` by the numbers of jobs; several where a user has
    written one.
    """
    found: dict[int, list[str]] = {}
    for line in text.split("\n"):
        if match := _JOB_ID.match(line):
            found.setdefault(int(match[1]), []).append(line)
    return found


def parse_excluded(text: str) -> dict[int, tuple[str, ...]]:
    """Return the nodes that jobs exclude, by the jobs' numbers, from lines such as `8123 g[1-4]`."""
    found = {}
    for line in text.splitlines():
        job_id, _, nodes = line.strip().partition(" ")
        if job_id.isdecimal() and text_or_empty(nodes.strip()):
            with contextlib.suppress(ValueError):  # a user has written it, and it keeps no other job from its place
                found[int(job_id)] = expand(nodes.strip())
    return found


def allocated_gres(state: str, allocated: str) -> tuple[Gres, ...] | None:
    """GRES among the allocated TRES of a job that runs; they are there with AccountingStorageTRES=gres/gpu alone."""
    found = () if state in PENDING_STATES else parse_gres(allocated)
    # `gres/gpu=2,gres/gpu:h200=2` are two: what has a type is part of what has none.
    typed = Counter[str]()
    for gres in found:
        typed[gres.name] += gres.count if gres.type else 0
    untyped = (gres if gres.type else replace(gres, count=gres.count - typed[gres.name]) for gres in found)
    return tuple(gres for gres in untyped if gres.count > 0) or None


def requested_gpus(state: str, requested: str) -> int | None:
    """GPUs among the requested TRES of a pending job, of all types; None where they are not accounted for."""
    if state not in PENDING_STATES:
        return None
    return next((gres.count for gres in parse_gres(requested) if gres.name == "gpu" and not gres.type), None)


def _per_cpu(row: Mapping[str, str], asked: Mapping[str, str]) -> int | None:
    """squeue shows memory of a CPU and of a node alike; the sum tells which one it is."""
    least, whole_mb = megabytes(row.get("MinMemory", "")), megabytes(asked.get("mem", ""))
    cpus, nodes = whole(asked.get("cpu", "")), whole(asked.get("node", ""), 1)
    return least if least and least * cpus == whole_mb and cpus > nodes else None


def has_no_end(state: str, time_limit_s: float | None) -> bool:
    """Return whether the end that Slurm names means nothing: of a running job without a time limit it is a year
    away.
    """
    return state in PENDING_STATES or (time_limit_s is None and state in ("RUNNING", "SUSPENDED"))


def _limit(time_s: float | None) -> float | None:
    """A running job without a limit has one of 365 days (seen on 22.05 and 26.05)."""
    return None if time_s == NO_LIMIT_S else time_s


def parse_nodes(text: str) -> tuple[Node, ...]:
    """Return the nodes of `scontrol --details --oneliner show node`; without details nothing says what is in use.

    Raises:
        UnreadableAnswer: a record lacks a value, or a value has another form.
    """
    nodes = tuple(_checked(line, _node, record(line)) for line in _records(text, "NodeName="))
    note_doubts(nodes)
    return nodes


def _node(row: Mapping[str, str]) -> Node:
    read = Reading()
    layout = whole(row.get("Sockets", "")), whole(row.get("CoresPerSocket", "")), whole(row.get("ThreadsPerCore", ""))
    node = Node(
        name=row["NodeName"],
        states=node_states(row["State"].split("+")),
        partitions=tuple(row["Partitions"].split(",")) if row.get("Partitions") else (),
        cpus=whole(row.get("CPUEfctv", ""), whole(row["CPUTot"])),
        cpus_allocated=whole(row["CPUAlloc"]),
        memory_mb=max(0, whole(row["RealMemory"]) - whole(row.get("MemSpecLimit", ""))),
        memory_allocated_mb=whole(row["AllocMem"]),
        gres=read.gres(row["Gres"]),
        gres_used=in_use(read.gres(row.get("GresUsed", ""))),
        gres_drained=read.gres(row.get("GresDrain", "")),
        features=tuple(filter(None, text_or_empty(row.get("ActiveFeatures", "")).split(","))),
        reason=row.get("Reason", ""),
        version=row.get("Version", ""),
        address=row.get("NodeAddr", ""),
        cpu_load=read(float, load, None) if (load := text_or_empty(row.get("CPULoad", ""))) else None,
        reservation=row.get("ReservationName", ""),
        gpus_allocated=gpus_allocated(row.get("CfgTRES", ""), row.get("AllocTRES", "")),
        layout=layout,
        cpus_per_core=cpus_per_core(whole(row["CPUTot"]), layout),
        last_busy_s=read(moment, row.get("LastBusyTime", ""), None),
        owner=owner[1] if (owner := _OWNER.search(row.get("Owner", ""))) else "",
        mcs_label=text_or_empty(row.get("MCS_label", "")),
        tmp_disk_mb=whole(row.get("TmpDisk", "")),
    )
    return replace(node, unreadable=read.unreadable)


def cpus_per_core(cpus: int, layout: tuple[int, int, int]) -> int:
    """Return how many CPUs a core is for Slurm: its threads, or 1 where the site counts cores."""
    cores = layout[0] * layout[1]
    return max(1, cpus // cores) if cores else 1


def gpus_allocated(configured: str, allocated: str) -> int | None:
    """GPUs among the allocated TRES of a node; None where the cluster does not account for gres/gpu of it."""
    if not any(gres.name == "gpu" and not gres.type for gres in known_gres(configured)[0]):
        return None  # with types alone in AccountingStorageTRES, others may be left out
    return sum(gres.count for gres in known_gres(allocated)[0] if gres.name == "gpu" and not gres.type)


def in_use(gres_used: Iterable[Gres]) -> tuple[Gres, ...]:
    """GRES of which something is in use: 22.05 and JSON list the others too, with 0."""
    return tuple(gres for gres in gres_used if gres.count or gres.indices)


def node_states(names: Sequence[str]) -> frozenset[str]:
    """Base state and flags of a node, from words such as `MIXED` or `DOWN*`, whose marks are flags too."""
    marks = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "%": "POWERING_DOWN", "$": "MAINTENANCE",
             "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "!": "POWER_DOWN", "-": "PLANNED"}  # fmt: skip
    found = set()
    for word in names:
        found |= {flag for mark, flag in marks.items() if mark in word}
        found.add(word.strip("".join(marks)).upper())
    return frozenset(found - {""})


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """Return the partitions of `scontrol --oneliner show partition`.

    Raises:
        UnreadableAnswer: a record lacks a value, or a value has another form.
    """
    return tuple(_checked(line, _partition, record(line)) for line in _records(text, "PartitionName="))


def _partition(row: Mapping[str, str]) -> Partition:
    return Partition(
        name=row["PartitionName"],
        nodes=expand(row["Nodes"]),
        is_default=row.get("Default") == "YES",
        is_up=row["State"] in ("UP", "DRAIN"),  # what is drained takes no new jobs, and starts those that wait
        priority_tier=whole(row.get("PriorityTier", ""), 1),
        max_time_s=seconds(row.get("MaxTime", "")),
        max_cpus_per_node=whole(row.get("MaxCPUsPerNode", "")) or None,
        # 26.05 has a word of its own for it.
        is_exclusive="EXCLUSIVE" in row.get("OverSubscribe", "") or row.get("Exclusive") == "NODE",
        qos=text_or_empty(row.get("QoS", "")),
        jobs_per_cpu=whole(row.get("OverSubscribe", "").partition(":")[2], 1),
        all_share=row.get("OverSubscribe", "").startswith("FORCE"),
        max_cpus_per_socket=whole(row.get("MaxCPUsPerSocket", "")) or None,
        allow_accounts=_names(row.get("AllowAccounts", "")),
        deny_accounts=_names(row.get("DenyAccounts", "")),
        allow_qos=_names(row.get("AllowQos", "")),
        deny_qos=_names(row.get("DenyQos", "")),
        allow_groups=_names(row.get("AllowGroups", "")),
        default_cpus_per_gpu=job_default("DefCpuPerGPU", row.get("JobDefaults", "")),
        default_mb_per_gpu=job_default("DefMemPerGPU", row.get("JobDefaults", "")),
        default_mb_per_cpu=whole(row.get("DefMemPerCPU", "")) or None,
        default_mb_per_node=whole(row.get("DefMemPerNode", "")) or None,
    )


def job_default(name: str, text: str) -> int | None:
    """Return one of the numbers in `DefCpuPerGPU=6,DefMemPerGPU=8000`; None if it is not there."""
    found = re.search(rf"\b{name}=(\d+)", text)
    return int(found[1]) if found else None


def _names(text: str) -> tuple[str, ...]:
    """Names in a rule of a partition; of ALL and of none there is no rule."""
    names = text_or_empty(text)
    return () if names.upper() == "ALL" else tuple(filter(None, names.split(",")))


def parse_config(text: str) -> dict[str, str]:
    """Return the settings of `scontrol show config`; of those that it numbers, such as `Prolog[0]`, by these names."""
    found = (re.match(r"(\w+(?:\[\d+\])?)\s*=\s?(.*)", line) for line in text.split("\n"))
    return {match[1]: match[2].strip() for match in found if match}


def record(line: str) -> dict[str, str]:
    """Return the `Key=Value` pairs of a one-line record. Values may hold blanks; of a key given twice the first one
    counts.

    In what people write anything may stand: of that there is the reason, whole, and the rest is left out.
    """
    fields, *written = _WRITTEN.split(line, maxsplit=1)
    pieces = _KEY.split(fields)
    row: dict[str, str] = {}
    for key, value in zip(pieces[1::2], pieces[2::2], strict=True):
        row.setdefault(key, value)
    if written and (reason := _REASON.fullmatch(written[0])):
        first, further, without_time = reason.groups(default="")
        row["Reason"] = "\n".join([first or without_time, *further.split(" " * 10)[1:]])
    return row


def _records(text: str, first: str) -> Iterator[str]:
    return (line for line in text.split("\n") if line.startswith(first))


def _checked(line: str, make: Callable[[Mapping[str, str]], _T], row: Mapping[str, str]) -> _T:
    try:
        return make(row)
    except KeyError as exc:
        raise UnreadableAnswer(f"no field {exc}", line) from exc
    except ValueError as exc:
        raise UnreadableAnswer(str(exc), line) from exc


# What one job can get on the nodes of each partition, from sinfo's and scontrol's text. Pure.

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
    """Return the jobs; pending ones in several partitions without those that do not admit them, as long as others are
    left.

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
    """Return what keeps a job, or one that comes with it, from a partition, by all rules known here; empty if none."""
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
    """Return the names in `scontrol --oneliner show partition` as sinfo writes them: the default one with `*`."""
    found = re.findall(r"^PartitionName=(\S+)(.*)$", partitions, re.MULTILINE)
    return [f"{name}*" if " Default=YES" in more else name for name, more in found]


def parse_limits(sinfo: Iterable[str], partitions: str, config: str) -> dict[str, PartitionLimits]:
    """Return the limits of each partition, with the nodes that sinfo shows there.

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


# What reservations keep of which node, and from whom. Pure; called by `read.py`, and by who asks for one job.
#
# From the one-line records of `scontrol show reservation`. Of a node that a reservation has as a whole no other job
# gets anything; of one of which it has some cores (`CoreCnt=`, `TRES=cpu=`) other jobs get all other cores, and all
# memory. slurmctld flags both nodes RESERVED, or MAINTENANCE, alike, some seconds late (seen on 22.05, 24.11 and
# 26.05): where reservations are known, they decide, and not the flag. 22.05 names the cores some seconds late, too;
# until then it has the whole node.

_CORES = re.compile(r" NodeName=(\S+) CoreIDs=(\S+)")


def parse_reservations(text: str) -> tuple[Reservation, ...]:
    """Return the reservations of nodes, in the order of their beginning.

    Raises:
        UnreadableAnswer: a record lacks a value, or a value has another form.
    """
    found = []
    for line in text.split("\n"):
        if line.startswith("ReservationName="):
            try:
                reservation = _reservation(line)
            except (KeyError, ValueError) as exc:
                raise UnreadableAnswer(f"no reservation: {exc!r}", line) from exc
            found += [reservation] if reservation else []
    return tuple(sorted(found, key=lambda reservation: reservation.start_s))


def _reservation(line: str) -> Reservation | None:
    """None of one without nodes, such as of licenses alone."""
    row = record(line)
    begin_s, end_s = moment(row["StartTime"]), moment(row["EndTime"])
    nodes = expand(row.get("Nodes", ""))
    if begin_s is None or end_s is None or not nodes:
        return None
    kept = tres(row.get("TRES", ""))
    cores = {name: len(expand(f"c[{ids}]")) for name, ids in _CORES.findall(line.split(" TRES=")[0])}
    # Slurm numbers cores and counts CPUs: with two threads a core is two of these.
    threads = whole(kept.get("cpu", "")) / max(1, sum(cores.values()))
    flags = row.get("Flags", "").split(",")
    return Reservation(
        row["ReservationName"],
        tuple(name for name in nodes if name not in cores),
        begin_s,
        end_s,
        is_active=row.get("State") == "ACTIVE",
        is_maintenance="MAINT" in flags,
        is_flexible="FLEX" in flags,
        is_magnetic="MAGNETIC" in flags,
        users=_names_reservations(row, "Users"),
        groups=_names_reservations(row, "Groups"),
        accounts=_names_reservations(row, "Accounts"),
        allowed_partitions=_names_reservations(row, "AllowedPartitions"),
        qos=_names_reservations(row, "QOS"),
        cpus=tuple((name, round(number * max(1.0, threads))) for name, number in cores.items()),
        # Of which of its nodes nothing says: of each as many.
        gpus_on_node=-(-whole(kept.get("gres/gpu", "")) // len(cores)) if cores else 0,
    )


def _names_reservations(row: Mapping[str, str], field: str) -> tuple[str, ...]:
    return tuple(filter(None, text_or_empty(row.get(field, "")).split(",")))


def with_reservations(
    nodes: Iterable[Node], reservations: Sequence[Reservation], jobs: Iterable[Job] = ()
) -> tuple[Node, ...]:
    """Return the nodes as jobs without a reservation see them.

    Those of a reservation that has begun are marked as such and have its name: 22.05 names none with a node. Of those
    of which it has some cores, what it keeps from others is no part any more: CPUs and GPUs that its jobs do not hold.
    """
    active = sorted(
        (reservation for reservation in reservations if reservation.is_active),
        key=lambda reservation: reservation.is_maintenance,
    )
    names = {name: reservation.name for reservation in active for name in reservation.nodes}
    held = _held(jobs, {reservation.name for reservation in active if reservation.cpus})
    parts: dict[str, list[ReservedPart]] = {}
    for reservation in active:
        for name, cpus in reservation.cpus:
            cpus_held, gpus_held = held.get((reservation.name, name), (0, 0))
            gpus = reservation.gpus_on_node
            part = ReservedPart(reservation.name, cpus, min(cpus, cpus_held), gpus, min(gpus, gpus_held))
            parts.setdefault(name, []).append(part)
    found = []
    for node in nodes:
        if node.name in names:
            node = replace(node, states=node.states | {RESERVED}, reservation=names[node.name])
        elif node.name in parts:
            node = _without(node, tuple(parts[node.name]))
        found.append(node)
    return tuple(found)


def _held(jobs: Iterable[Job], names: Collection[str]) -> dict[tuple[str, str], tuple[int, int]]:
    """CPUs and GPUs that the jobs of reservations hold on each node; on each as many where no `shares` are known."""
    held: dict[tuple[str, str], tuple[int, int]] = {}
    for job in jobs if names else ():
        if job.holds_resources and job.nodes:
            for name in set(job.reservations).intersection(names):
                even, known = -(-job.count("gpu") // len(job.nodes)), {share.node: share.gres for share in job.shares}
                for node, has_cpus in job.cpus_on_nodes():
                    cpus, gpus = held.get((name, node), (0, 0))
                    has_gpus = total(known[node], "gpu") if node in known else even
                    held[name, node] = cpus + math.ceil(has_cpus), gpus + has_gpus
    return held


def _without(node: Node, parts: tuple[ReservedPart, ...]) -> Node:
    """A node without what is kept there for the jobs of reservations."""
    cpus = sum(part.cpus_free for part in parts)
    gpus = sum(part.gpus_free for part in parts)
    return replace(
        node,
        states=node.states - {RESERVED} - MAINTENANCE,
        reservation="",
        cpus=max(node.cpus_allocated, node.cpus - cpus),
        gres_drained=(*node.gres_drained, *_of_any_type(node, gpus)),
        reserved_parts=parts,
    )


def _of_any_type(node: Node, gpus: int) -> tuple[Gres, ...]:
    """So many GPUs, of the types of which the node has any left."""
    found = []
    for kind in node.gpu_types:
        num = min(gpus, node.devices(kind) if kind else node.devices())
        gpus -= num
        found += [Gres("gpu", kind, num)] if num else []
    return tuple(found)


def own_reservations(job: Job, reservations: Iterable[Reservation]) -> tuple[str, ...]:
    """Return the names of the reservations that a job may use; an empty one where it may do without."""
    if job.reservation:
        return job.reservations
    admitting = (
        reservation.name
        for reservation in reservations
        if reservation.is_magnetic
        and reservation.is_active
        and (job.user in reservation.users if reservation.groups else _admits(reservation.users, job.user))
        and _admits(reservation.accounts, job.account)
        and _admits(reservation.qos, job.qos)
        and any(_admits(reservation.allowed_partitions, name) for name in job.partitions)
    )
    return ("", *admitting)


def _admits(names: Sequence[str], name: str) -> bool:
    """Whether a list of users or accounts, or of those that it excludes (`-NAME`), has one."""
    excluded = [entry[1:] for entry in names if entry.startswith("-")]
    return name not in excluded if excluded else name in names or not names


def seen_from(nodes: Iterable[Node], reservations: Sequence[Reservation], names: Collection[str]) -> tuple[Node, ...]:
    """Return the nodes as jobs of some reservations see them: what these have there is theirs, and marked so.

    Args:
        nodes: see `with_reservations`.
        reservations: all.
        names: of those; an empty one among them is for jobs that may run outside as well.
    """
    own = [reservation for reservation in reservations if reservation.is_active and reservation.name in names]
    # Which of them has jobs that use what is outside, too.
    outside = next((reservation.name for reservation in own if reservation.is_flexible or "" in names), "")
    found = []
    for node in nodes:
        mine = [part for part in node.reserved_parts if part.reservation in names]
        if node.is_usable and (mine or (outside and not node.is_reserved)):
            name = mine[0].reservation if mine else outside
            node = _seen(replace(node, states=node.states | {RESERVED}, reservation=name), mine, bool(outside))
        found.append(node)
    return tuple(found)


def _seen(node: Node, mine: Sequence[ReservedPart], is_flexible: bool) -> Node:
    """A node with what is kept there for a job's reservations, and with nothing else unless the job may use it, too."""
    cpus = sum(part.cpus_free for part in mine)
    gpus = sum(part.gpus_free for part in mine)
    drained = list(node.gres_drained)
    for place, gres in enumerate(drained):
        if gres.name == "gpu":
            num = min(gpus, gres.count)
            gpus -= num
            drained[place] = replace(gres, count=gres.count - num)
    if is_flexible:
        return replace(node, cpus=node.cpus + cpus, gres_drained=tuple(drained))
    all_cpus = sum(part.cpus for part in mine)
    return replace(node, cpus=all_cpus, cpus_allocated=all_cpus - cpus, gres_drained=tuple(drained))
