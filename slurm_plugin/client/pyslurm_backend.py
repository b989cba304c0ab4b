"""Read a cluster with pyslurm, Slurm's C interface for Python: jobs and nodes as the model.

Called by `read.py` where pyslurm is installed and of slurmctld's release. pyslurm runs in a process of its own, this
`main` as its program: libslurm ends a process whose SLURM_CONF it cannot read, and pyslurm stops all of a process's
threads while it waits for slurmctld. It changes nothing, and says nothing of what a job holds on each node.

pyslurm 22.5 has two interfaces and needs both: the old one (`job`, `node`) has the GRES of nodes and what jobs ask
for, the new one (`Jobs`, `Nodes`) has reasons, states and effective CPUs as Slurm's commands print them.
"""

from __future__ import annotations

import pwd
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from hetstream.base import typed_json
from hetstream.slurm_plugin.client.model import PENDING_STATES, HetComponent, Job, Node, total
from hetstream.slurm_plugin.client.parse_text import (
    NO_LIMIT_S,
    allocated_gres,
    asks_memory_itself,
    cpus_per_core,
    in_use,
    most_nodes,
    node_states,
    requested_gpus,
)
from hetstream.slurm_plugin.client.run import run_slurm
from hetstream.slurm_plugin.client.slurm_units import (
    Reading,
    expand,
    megabytes,
    moment,
    note_doubts,
    text_or_empty,
    tres,
)
from hetstream.slurm_plugin.errors import UnreadableAnswer

# Later ones have lost the old interface.
RELEASES = frozenset({(22, 5)})
Row = Mapping[str, Any]


class Answer(msgspec.Struct):
    """What the process says."""

    jobs: tuple[Job, ...]
    nodes: tuple[Node, ...]


def matches(release: tuple[int, int]) -> bool:
    """Return whether pyslurm is installed and of this release of Slurm, and its answers are known. Does not
    import it.
    """
    if release not in RELEASES:
        return False
    try:
        major, minor, *_ = (installed() or "").split(".")
        return (int(major), int(minor)) == release
    except ValueError:
        return False


def installed() -> str | None:
    """Return the version of pyslurm beside hetstream, if there is one."""
    try:
        return version("pyslurm")
    except PackageNotFoundError:
        return None


def read(environ: Mapping[str, str]) -> Answer:
    """Pending and running jobs, and nodes, now.

    Raises:
        SlurmCommandError: the process failed, or took too long.
        UnreadableAnswer: it printed something else.
    """
    # -I and not -m: the working directory, whoever's it is, is no place of modules; this process's places are.
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    done = run_slurm([sys.executable, "-I", "-c", program], env=environ)
    try:
        answer = typed_json.decode(done.stdout, Answer)
    except msgspec.DecodeError as exc:
        raise UnreadableAnswer(f"pyslurm: {exc}", done.stdout) from exc
    note_doubts([*answer.jobs, *answer.nodes])
    return answer


# JOB_SHARED_NONE, _USER and _MCS of slurm.h, as the old interface writes them.
_NO_OWNER = 0xFFFFFFFE  # NO_VAL of slurm.h
_SHARED = {"0": "NODE", "2": "USER", "3": "MCS"}


def job_of(row: Row, reason: str) -> Job:
    """Return a job from its record in the old interface and its reason in the new one."""
    read = Reading()
    asked = tres(row["tres_alloc_str"] or row["tres_req_str"] or "")
    num_cpus, memory_mb = int(row["num_cpus"]), read(megabytes, asked.get("mem", ""), 0)
    num_nodes = read(int, asked.get("node") or str(row["num_nodes"]), 1)
    per_cpu_mb = row["min_memory_cpu"] or 0
    tasks = row["array_task_str"] or ("" if row["array_task_id"] is None else str(row["array_task_id"]))
    per_gpu = row.get("mem_per_tres") or ""
    own_memory = asks_memory_itself(per_gpu)
    limit = row["time_limit"]  # minutes, or a word for none
    job = Job(
        job_id=row["job_id"],
        name=row["name"] or "",
        user=_user(row["user_id"]),
        uid=row["user_id"],
        partitions=tuple((row["partition"] or "").split(",")),
        state=row["job_state"],
        reason=text_or_empty(reason),
        num_nodes=num_nodes,
        num_cpus=num_cpus,
        num_tasks=row["num_tasks"],
        cpus_per_task=1 if row["cpus_per_task"] == "N/A" else row["cpus_per_task"],
        memory_mb=memory_mb,
        likely_nodes=row["num_nodes"],
        max_nodes=most_nodes(row["num_nodes"], row.get("max_nodes") or 0),
        min_cpus_per_node=row.get("pn_min_cpus") or 1,
        tmp_disk_mb=row.get("min_tmp_disk_node") or row.get("pn_min_tmp_disk") or 0,
        layout=(_few(row, "sockets_per_node"), _few(row, "cores_per_socket"), _few(row, "threads_per_core")),
        tasks_per_core=_few(row, "ntasks_per_core"),
        tasks_per_socket=_few(row, "ntasks_per_socket"),
        memory_per_gpu_mb=total(read.gres(per_gpu), "gpu"),
        own_memory=own_memory,
        all_memory=not per_cpu_mb and row.get("min_memory_node") == 0 and own_memory is not False,
        memory_per_cpu_mb=per_cpu_mb if per_cpu_mb and num_cpus > num_nodes else None,
        array_job_id=row["array_job_id"] if tasks else None,
        array_tasks=read.array_tasks(tasks),
        het=HetComponent(row["het_job_id"], row["het_job_offset"]) if row["het_job_id"] else None,
        account=row["account"] or "",
        qos=row["qos"] or "",
        gres_per_node=read.gres(row["tres_per_node"] or ""),
        gres_per_task=read.gres(row["tres_per_task"] or ""),
        gres_per_job=read.gres(row["tres_per_job"] or ""),
        gres_per_socket=read.gres(row.get("tres_per_socket") or ""),
        gpus_requested=read(partial(requested_gpus, row["job_state"]), row["tres_req_str"] or "", None),
        cpus_per_gpu=total(read.gres(row.get("cpus_per_tres") or ""), "gpu"),
        gres_held=read(partial(allocated_gres, row["job_state"]), row["tres_alloc_str"] or "", None),
        nodes=read(expand, row["nodes"] or "", ()),
        submit_s=row["submit_time"] or None,
        eligible_s=row["eligible_time"] or None,
        start_s=row["start_time"] or None,
        end_s=None if row["job_state"] in PENDING_STATES or limit == "UNLIMITED" else row["end_time"] or None,
        time_limit_s=None if isinstance(limit, str) or limit * 60 == NO_LIMIT_S else limit * 60.0,
        priority=row["priority"],
        dependency=row["dependency"] or "",
        required_nodes=read(expand, ",".join(row["req_nodes"]), ()),
        planned_nodes=read(expand, row["sched_nodes"] or "", ()),
        excluded_nodes=read(expand, ",".join(row.get("exc_nodes") or ()), ()),
        is_contiguous=bool(row.get("contiguous")),
        num_switches=row.get("req_switch") or 0,
        licenses=",".join(f"{name}:{number}" for name, number in (row.get("licenses") or {}).items()),
        features=",".join(row["features"]),
        reservation=row["resv_name"] or "",
        comment=row["comment"] or "",
        num_restarts=row.get("restart_cnt") or 0,
        work_dir=row["work_dir"] or "",
        exclusive=_SHARED.get(str(row.get("shared")), ""),
        last_sched_eval_s=read(moment, row.get("last_sched_eval") or "", None),
        mcs_label=text_or_empty(row.get("mcs_label") or ""),
    )
    return replace(job, unreadable=read.unreadable, gres_in_doubt=read.gres_in_doubt)


def _few(row: Row, name: str) -> int:
    """A number of 16 bits; 0 where it is not set (NO_VAL16 and INFINITE16 of slurm.h)."""
    value = row.get(name)
    return value if isinstance(value, int) and value < 0xFFFE else 0


def node_of(row: Row, state: str, cpus: int) -> Node:
    """Return a node from its record in the old interface, and state and effective CPUs of the new one."""
    states = node_states(state.split("+"))
    if 0 < row["alloc_cpus"] < cpus:  # scontrol works this out too
        states = states - {"IDLE", "ALLOCATED"} | {"MIXED"}
    read = Reading()
    layout = _few(row, "sockets"), _few(row, "cores"), _few(row, "threads")
    node = Node(
        name=row["name"],
        states=states,
        partitions=tuple(row["partitions"]),
        cpus=cpus,
        cpus_allocated=row["alloc_cpus"],
        memory_mb=max(0, row["real_memory"] - (row.get("mem_spec_limit") or 0)),
        memory_allocated_mb=row["alloc_mem"],
        tmp_disk_mb=row.get("tmp_disk") or 0,
        gres=read.gres(",".join(row["gres"])),
        gres_used=in_use(read.gres(",".join(row["gres_used"] or ()))),
        gres_drained=read.gres(row["gres_drain"] or ""),
        features=tuple(filter(None, (row["features_active"] or "").split(","))),
        reason=row["reason"] or "",
        version=row["version"] or "",
        address=row["node_addr"] or "",
        cpu_load=None if row["cpu_load"] is None else row["cpu_load"] / 100,
        layout=layout,
        cpus_per_core=cpus_per_core(row.get("cpus") or cpus, layout),
        owner=str(owner) if isinstance(owner := row.get("owner"), int) and owner < _NO_OWNER else "",
        mcs_label=text_or_empty(row.get("mcs_label") or ""),
    )
    return replace(node, unreadable=read.unreadable)


@lru_cache(maxsize=4096)
def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "nobody"  # as squeue says


def _load(pyslurm: Any) -> Answer:
    rows = pyslurm.job().get()
    reasons = {job.id: job.state_reason for job in pyslurm.Jobs.load().values()}
    jobs = (job_of(row, reasons.get(job_id) or row["state_reason"] or "") for job_id, row in rows.items())
    shown = {node.name: (node.state, node.effective_cpus or node.total_cpus) for node in pyslurm.Nodes.load().values()}
    nodes = pyslurm.node().get()
    return Answer(
        jobs=tuple(job for job in jobs if job.is_pending or job.is_running),
        nodes=tuple(node_of(row, *shown[name]) for name, row in nodes.items() if name in shown),
    )


def main() -> None:
    """Write the answer to standard output."""
    import pyslurm

    sys.stdout.buffer.write(msgspec.json.encode(_load(pyslurm)))
