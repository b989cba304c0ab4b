"""Which processes belong to a cluster, read from /proc. Called by teardown.py, boot.py and `status`; signals nothing.

A process belongs to a cluster if its environment names the cluster (daemons carry HETSTREAM_DEVCLUSTER, everything
that runs in a job carries SLURM_CLUSTER_NAME), or if one of its ancestors does. The supervisor adopts orphans, so a
task that detached itself and emptied its environment is still found below it. Slurm's own commands that talk to the
cluster belong to it too: an `sbatch --wait` would wait forever. A shell with SLURM_CONF in its environment does not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.devcluster.programs import COMMANDS
from tests.devcluster.record import MARKER_VARIABLE, ClusterRecord

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One live process.

    Attributes:
        pid: its id.
        parent: its parent's id.
        start_ticks: when it began, in clock ticks since the machine booted.
        is_daemon: it is part of Slurm or the supervisor, not of a job's own programs.
        command: its program, for messages.
    """

    pid: int
    parent: int
    start_ticks: int
    is_daemon: bool
    command: str


def start_ticks(pid: int) -> int | None:
    """When process `pid` began, or None if there is no such process (a zombie is none)."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def cluster_processes(record: ClusterRecord) -> list[Process]:
    """Every live process of the cluster, except this one and its ancestors."""
    daemon_mark = f"{MARKER_VARIABLE}={record.cluster_name}".encode()
    job_mark = f"SLURM_CLUSTER_NAME={record.cluster_name}".encode()
    client_mark = f"SLURM_CONF={record.slurm_conf}".encode()
    own = _own_lineage()
    parents: dict[int, tuple[int, int]] = {}
    marked: dict[int, bool] = {}
    for entry in os.listdir(PROC):
        if not entry.isdigit():
            continue
        pid = int(entry)
        fields = _stat(pid)
        if fields is None or fields[0] == "Z":
            continue
        parents[pid] = (int(fields[1]), int(fields[19]))
        environment = _environment(pid)
        if daemon_mark in environment:
            marked[pid] = True
        elif job_mark in environment or (client_mark in environment and _program(pid) in COMMANDS):
            marked[pid] = False
    found = []
    for pid, (parent, ticks) in parents.items():
        if pid not in own and _marked_ancestor(pid, parents, marked):
            found.append(Process(pid, parent, ticks, marked.get(pid, False), _command(pid)))
    return found


def _marked_ancestor(pid: int, parents: dict[int, tuple[int, int]], marked: dict[int, bool]) -> bool:
    while pid in parents:
        if pid in marked:
            return True
        pid = parents[pid][0]
    return False


def _own_lineage() -> set[int]:
    lineage, pid = set(), os.getpid()
    while pid > 1:
        lineage.add(pid)
        fields = _stat(pid)
        if fields is None:
            break
        pid = int(fields[1])
    return lineage


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on: state, parent, ... (the name before may hold blanks)."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _environment(pid: int) -> set[bytes]:
    try:
        return set((PROC / str(pid) / "environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _program(pid: int) -> str:
    """The name of the program that runs, whatever it calls itself."""
    try:
        return os.path.basename(os.readlink(PROC / str(pid) / "exe"))
    except OSError:
        return ""


def _command(pid: int) -> str:
    try:
        arguments = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return b" ".join(arguments).decode(errors="replace").strip() or "?"
