"""JSON of `squeue`, `sinfo` (22.05) and `scontrol show node|job` (24.11 on), as the model. Pure; called by `read.py`.

Only the keys named here are decoded: a job of 24.11 has 13 kB, most of it the state of every core. Numbers are plain,
or null, or `{set, infinite, number}`; states are a string or a list of strings.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from hetstream.base import typed_json
from hetstream.slurm_plugin.client.model import HetComponent, Job, Node, NodeShare, total
from hetstream.slurm_plugin.client.parse_text import (
    NO_LIMIT_S,
    allocated_gres,
    asks_memory_itself,
    cpus_per_core,
    exclusive_of,
    gpus_allocated,
    has_no_end,
    in_use,
    most_nodes,
    node_states,
    readable,
    requested_gpus,
)
from hetstream.slurm_plugin.client.slurm_units import Reading, expand, megabytes, note_doubts, tres
from hetstream.slurm_plugin.errors import UnreadableAnswer

# One word for a state that has several, as Slurm's tables choose it (job_state_string in slurm_protocol_defs.c).
_STATE_FLAGS = (
    "COMPLETING", "STAGE_OUT", "CONFIGURING", "EXPEDITING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD",
    "SPECIAL_EXIT", "STOPPED", "REVOKED", "RESV_DEL_HOLD", "SIGNALING",
)  # fmt: skip


# JOB_MEM_SET of slurm.h, as 22.05 and later releases write it.
_ASKS_MEMORY = frozenset({"JOB_MEM_SET", "EXACT_MEMORY_REQUESTED"})


class _Number(msgspec.Struct):
    set: bool = True
    infinite: bool = False
    number: float = 0


_Num = int | float | _Number | None
_Words = str | list[str] | None


class _Count(msgspec.Struct):
    count: int = 0


class _Memory(msgspec.Struct):
    allocated: int = 0


class _Allocation(msgspec.Struct):
    """24.11 on."""

    name: str
    cpus: _Count = msgspec.field(default_factory=_Count)
    memory: _Memory = msgspec.field(default_factory=_Memory)


class _AllocatedNodes(msgspec.Struct):
    allocation: list[_Allocation] = msgspec.field(default_factory=list)


class _Socket(msgspec.Struct):
    cores: dict[str, str] = msgspec.field(default_factory=dict)


class _OldAllocation(msgspec.Struct):
    """22.05; its `cpus_used` is 0, so the cores are counted."""

    nodename: str
    memory_allocated: int = 0
    sockets: dict[str, _Socket] = msgspec.field(default_factory=dict)


class _Resources(msgspec.Struct):
    nodes: str | _AllocatedNodes | None = None
    allocated_nodes: list[_OldAllocation] = msgspec.field(default_factory=list)


class _Job(msgspec.Struct):
    job_id: int
    job_state: _Words
    partition: str = ""
    name: str | None = ""
    user_name: str | None = ""
    user_id: _Num = None
    account: str | None = ""
    qos: str | None = ""
    state_reason: str | None = ""
    node_count: _Num = None
    max_nodes: _Num = None
    cpus: _Num = None
    minimum_cpus_per_node: _Num = None
    minimum_tmp_disk_per_node: _Num = None
    sockets_per_node: _Num = None
    cores_per_socket: _Num = None
    threads_per_core: _Num = None
    tasks_per_core: _Num = None
    tasks_per_socket: _Num = None
    tasks: _Num = None
    cpus_per_task: _Num = None
    memory_per_cpu: _Num = None
    memory_per_node: _Num = None
    memory_per_tres: str | None = ""
    tres_req_str: str | None = ""
    tres_alloc_str: str | None = ""
    tres_per_node: str | None = ""
    tres_per_task: str | None = ""
    tres_per_job: str | None = ""
    tres_per_socket: str | None = ""
    cpus_per_tres: str | None = ""
    array_job_id: _Num = None
    array_task_id: _Num = None
    array_task_string: str | None = ""
    het_job_id: _Num = None
    het_job_offset: _Num = None
    nodes: str | None = ""
    gres_detail: list[str] = msgspec.field(default_factory=list)
    job_resources: _Resources | None = None
    submit_time: _Num = None
    eligible_time: _Num = None
    start_time: _Num = None
    end_time: _Num = None
    time_limit: _Num = None
    priority: _Num = None
    dependency: str | None = ""
    required_nodes: str | None = ""
    excluded_nodes: str | None = ""
    contiguous: bool = False
    required_switches: _Num = None
    licenses: str | None = ""
    scheduled_nodes: str | None = ""
    features: str | None = ""
    resv_name: str | None = ""
    comment: str | None = ""
    restart_cnt: _Num = None
    current_working_directory: str | None = ""
    shared: _Words = None
    last_sched_evaluation: _Num = None
    mcs_label: str | None = ""
    flags: list[str] | None = None


class _Node(msgspec.Struct):
    name: str
    state: _Words
    cpus: int
    alloc_cpus: int
    real_memory: int
    alloc_memory: int
    effective_cpus: int | None = None
    state_flags: list[str] = msgspec.field(default_factory=list)
    partitions: list[str] = msgspec.field(default_factory=list)
    gres: str | None = ""
    gres_used: str | None = ""
    gres_drained: str | None = ""
    tres: str | None = ""
    tres_used: str | None = ""
    active_features: _Words = None
    reason: str | None = ""
    address: str | None = ""
    version: str | None = None
    slurmd_version: str | None = None
    cpu_load: _Num = None
    specialized_memory: _Num = None
    temporary_disk: _Num = None
    reservation: str | None = ""
    sockets: int = 0
    cores: int = 0
    threads: int = 0
    last_busy: _Num = None
    owner: str | None = ""
    gpu_spec: str | None = ""
    mcs_label: str | None = ""


class _JobsAnswer(msgspec.Struct):
    jobs: list[msgspec.Raw]


class _NodesAnswer(msgspec.Struct):
    nodes: list[_Node]


def parse_jobs(text: str | bytes) -> tuple[Job, ...]:
    """Return the jobs of `squeue --json` or `scontrol show job --json`, with what they hold on each node.

    One of which a part cannot be read is kept, as in `parse_text.parse_jobs`.

    Raises:
        UnreadableAnswer: it is not that, or no job can be read.
    """
    jobs = readable(_decode(text, _JobsAnswer).jobs, lambda raw: _job(_decode(bytes(raw), _Job)))
    note_doubts(jobs)
    return jobs


def parse_nodes(text: str | bytes) -> tuple[Node, ...]:
    """Return the nodes of `scontrol show node --json`, or of `sinfo --json` of 22.05.

    Raises:
        UnreadableAnswer: it is not that; newer versions group the nodes of `sinfo --json`.
    """
    nodes = tuple(_node(row) for row in _decode(text, _NodesAnswer).nodes)
    note_doubts(nodes)
    return nodes


_A = TypeVar("_A")


def _decode(text: str | bytes, wanted: type[_A]) -> _A:
    try:
        return typed_json.decode(text, wanted)
    except msgspec.DecodeError as exc:
        shown = text if isinstance(text, str) else text.decode(errors="replace")
        raise UnreadableAnswer(str(exc), shown) from exc


def _job(row: _Job) -> Job:
    state = _state(_words(row.job_state))
    asked = tres(row.tres_alloc_str or row.tres_req_str or "")
    het_job_id = _whole(row.het_job_id)
    task_id = _number(row.array_task_id)
    tasks = row.array_task_string or ("" if task_id is None else str(int(task_id)))
    array_job_id = _whole(row.array_job_id)
    time_limit_s = _limit(_number(row.time_limit))
    read = Reading()
    nodes = read(int, asked.get("node") or str(_whole(row.node_count, 1)), 1)
    own_memory = _asks_memory_itself(row)
    least_mb = _number(row.memory_per_node), _number(row.memory_per_cpu)
    job = Job(
        job_id=row.job_id,
        name=row.name or "",
        user=row.user_name or "",
        uid=None if (uid := _number(row.user_id)) is None else int(uid),
        partitions=tuple(row.partition.split(",")),
        state=state,
        reason="" if row.state_reason in (None, "None") else str(row.state_reason),
        num_nodes=nodes,
        likely_nodes=_whole(row.node_count),
        max_nodes=most_nodes(_whole(row.node_count), _whole(row.max_nodes)),
        num_cpus=_whole(row.cpus, 1),
        min_cpus_per_node=_whole(row.minimum_cpus_per_node, 1),
        tmp_disk_mb=_whole(row.minimum_tmp_disk_per_node),
        layout=(_whole(row.sockets_per_node), _whole(row.cores_per_socket), _whole(row.threads_per_core)),
        tasks_per_core=_whole(row.tasks_per_core),
        tasks_per_socket=_whole(row.tasks_per_socket),
        num_tasks=_whole(row.tasks, 1),
        cpus_per_task=_whole(row.cpus_per_task, 1),
        memory_mb=read(megabytes, asked.get("mem", ""), 0),
        memory_per_cpu_mb=_whole(row.memory_per_cpu) or None if _whole(row.cpus, 1) > nodes else None,
        memory_per_gpu_mb=total(read.gres(row.memory_per_tres or ""), "gpu"),
        own_memory=own_memory,
        # 22.05 writes nothing in the place of 0.
        all_memory=least_mb in ((0, None), (None, None)) and not (row.memory_per_tres and own_memory is False),
        array_job_id=array_job_id if array_job_id and tasks else None,
        array_tasks=read.array_tasks(tasks) if array_job_id else "",
        het=HetComponent(het_job_id, _whole(row.het_job_offset)) if het_job_id else None,
        account=row.account or "",
        qos=row.qos or "",
        gres_per_node=read.gres(row.tres_per_node or ""),
        gres_per_task=read.gres(row.tres_per_task or ""),
        gres_per_job=read.gres(row.tres_per_job or ""),
        gres_per_socket=read.gres(row.tres_per_socket or ""),
        gpus_requested=read(partial(requested_gpus, state), row.tres_req_str or "", None),
        cpus_per_gpu=total(read.gres(row.cpus_per_tres or ""), "gpu"),
        gres_held=read(partial(allocated_gres, state), row.tres_alloc_str or "", None),
        nodes=read(expand, row.nodes or "", ()),
        shares=_shares(row, read),
        submit_s=_number(row.submit_time) or None,
        eligible_s=_number(row.eligible_time) or None,
        start_s=_number(row.start_time) or None,
        end_s=None if has_no_end(state, time_limit_s) else _number(row.end_time) or None,
        time_limit_s=time_limit_s,
        priority=_whole(row.priority),
        dependency=row.dependency or "",
        required_nodes=read(expand, row.required_nodes or "", ()),
        planned_nodes=read(expand, row.scheduled_nodes or "", ()),
        excluded_nodes=read(expand, row.excluded_nodes or "", ()),
        is_contiguous=row.contiguous,
        num_switches=_whole(row.required_switches),
        licenses=row.licenses or "",
        features=row.features or "",
        reservation=row.resv_name or "",
        comment=row.comment or "",
        num_restarts=_whole(row.restart_cnt),
        work_dir=row.current_working_directory or "",
        exclusive=exclusive_of(next(iter(_words(row.shared)), "")),
        last_sched_eval_s=_number(row.last_sched_evaluation) or None,
        mcs_label=row.mcs_label or "",
    )
    return replace(job, unreadable=read.unreadable, gres_in_doubt=read.gres_in_doubt)


def _asks_memory_itself(row: _Job) -> bool | None:
    if row.flags is None:
        return asks_memory_itself(row.memory_per_tres or "")
    return not _ASKS_MEMORY.isdisjoint(row.flags)


def _state(states: list[str]) -> str:
    return next((flag for flag in _STATE_FLAGS if flag in states), states[0] if states else "")


def _limit(limit_min: float | None) -> float | None:
    return None if limit_min in (None, NO_LIMIT_S / 60) else float(limit_min or 0) * 60


def _shares(row: _Job, read: Reading) -> tuple[NodeShare, ...]:
    """GRES of each node are in the order of the nodes."""
    held = row.job_resources
    if held is None:
        return ()
    if isinstance(held.nodes, _AllocatedNodes):
        places = [(node.name, node.cpus.count, node.memory.allocated) for node in held.nodes.allocation]
    else:
        cores = [
            sum(state.startswith("allocated") for socket in node.sockets.values() for state in socket.cores.values())
            for node in held.allocated_nodes
        ]
        threads = _whole(row.cpus, 1) / max(1, sum(cores))
        places = [
            (node.nodename, round(count * threads), node.memory_allocated)
            for node, count in zip(held.allocated_nodes, cores, strict=True)
        ]
    details = [*row.gres_detail, *[""] * (len(places) - len(row.gres_detail))]
    return tuple(
        NodeShare(name, cpus, memory_mb, read.gres(detail))
        for (name, cpus, memory_mb), detail in zip(places, details, strict=False)
    )


def _node(row: _Node) -> Node:
    read = Reading()
    node = Node(
        name=row.name,
        states=node_states([*_words(row.state), *row.state_flags]),
        partitions=tuple(row.partitions),
        cpus=row.effective_cpus or row.cpus,
        cpus_allocated=row.alloc_cpus,
        memory_mb=max(0, row.real_memory - _whole(row.specialized_memory)),
        memory_allocated_mb=row.alloc_memory,
        tmp_disk_mb=_whole(row.temporary_disk),
        gres=read.gres(row.gres or ""),
        gres_used=in_use(read.gres(row.gres_used or "")),
        gres_drained=read.gres(row.gres_drained or ""),
        features=tuple(_words(row.active_features)),
        reason=row.reason or "",
        address=row.address or "",
        version=row.version or row.slurmd_version or "",
        cpu_load=None if (load := _number(row.cpu_load)) is None else load / 100,
        reservation=row.reservation or "",
        gpus_allocated=gpus_allocated(row.tres or "", row.tres_used or ""),
        layout=(row.sockets, row.cores, row.threads),
        cpus_per_core=cpus_per_core(row.cpus, (row.sockets, row.cores, row.threads)),
        last_busy_s=_number(row.last_busy) or None,
        owner=row.owner or "",
        gpu_cores=read(lambda cores: len(expand(f"c[{cores}]")), row.gpu_spec, 0) if row.gpu_spec else 0,
        mcs_label=row.mcs_label or "",
    )
    return replace(node, unreadable=read.unreadable)


def _words(value: _Words) -> list[str]:
    """A list of words, of the string with commas that 22.05 has in its place too."""
    if isinstance(value, str):
        return [word for word in value.split(",") if word]
    return value or []


def _number(value: _Num) -> float | None:
    if isinstance(value, _Number):
        return value.number if value.set and not value.infinite else None
    return value


def _whole(value: _Num, otherwise: int = 0) -> int:
    number = _number(value)
    return otherwise if number is None else int(number)
