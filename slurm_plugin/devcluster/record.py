"""The files by which a cluster is found again: `cluster.json` (what it is) and `daemons.json` (what runs).

Called by boot.py, supervisor.py, teardown.py and the command line. A directory without `cluster.json` is not a
cluster's and is never removed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetstream.hetjob.convert_class import PARTITIONS_VARIABLE
from hetstream.slurm_plugin.devcluster.network import ClusterNetwork, VirtualHost
from hetstream.slurm_plugin.errors import DevclusterError

RECORD_FILE = "cluster.json"
DAEMONS_FILE = "daemons.json"

# In the environment of every daemon: `down` finds the processes by it.
MARKER_VARIABLE = "HETSTREAM_DEVCLUSTER"


@dataclass(frozen=True)
class ClusterRecord:
    """What `up` wrote down.

    Attributes:
        name: the user's name for the cluster.
        cluster_name: Slurm's ClusterName, unlike any other's.
        state_dir: where its files are.
        slurm_version: for example `22.05.8`.
        nodes: node names.
        partitions: partition names, the default one first.
        path_prefix: directory to put in front of PATH, empty if none.
        ready: `up` saw all nodes idle.
        created_s: when `up` began, in seconds since 1970.
        boot_s: how long `up` took; 0 until ready.
        network: its hosts' own addresses, and by which names the system knows them; None without.
        configless: commands have no slurm.conf.
        opportunistic: partition of opportunistic jobs; empty without `--packing`.
    """

    name: str
    cluster_name: str
    state_dir: str
    slurm_version: str
    nodes: tuple[str, ...]
    partitions: tuple[str, ...]
    path_prefix: str
    ready: bool
    created_s: float
    boot_s: float
    network: ClusterNetwork | None = None
    configless: bool = False
    opportunistic: str = ""

    @property
    def slurm_conf(self) -> str:
        return f"{self.state_dir}/slurm.conf"

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with what Slurm's and hetstream's commands need to know of this cluster."""
        env = {**base, "SLURM_CONF": self.slurm_conf}
        if self.configless:
            del env["SLURM_CONF"]
        if self.opportunistic:
            env[PARTITIONS_VARIABLE] = self.opportunistic
        if self.path_prefix:
            env["PATH"] = self.path_prefix + os.pathsep + env.get("PATH", os.defpath)
        return env


@dataclass(frozen=True)
class DaemonState:
    """One daemon as the supervisor last saw it.

    Attributes:
        name: `munged`, `slurmctld`, `slurmd NODE`; the supervisor itself is `supervisor`.
        pid: its process id.
        start_ticks: when that process began (/proc/PID/stat), so that a reused pid is not taken for it.
        exit_status: how it ended (negative: a signal); None while it runs.
    """

    name: str
    pid: int
    start_ticks: int
    exit_status: int | None


def write_record(record: ClusterRecord) -> None:
    """Write `cluster.json` in one step."""
    _write_json(Path(record.state_dir) / RECORD_FILE, asdict(record))


def read_record(state_dir: Path) -> ClusterRecord | None:
    """The record in `state_dir`, or None if no cluster was begun there."""
    fields = _read_json(state_dir / RECORD_FILE)
    if fields is None:
        return None
    try:
        fields["nodes"] = tuple(fields["nodes"])
        fields["partitions"] = tuple(fields["partitions"])
        if network := fields.get("network"):
            network["hosts"] = tuple(VirtualHost(**host) for host in network["hosts"])
            fields["network"] = ClusterNetwork(**network)
        return ClusterRecord(**fields)
    except (KeyError, TypeError) as exc:
        raise _damaged(state_dir / RECORD_FILE, exc) from exc


def write_daemons(state_dir: Path, daemons: list[DaemonState]) -> None:
    """Write `daemons.json` in one step."""
    _write_json(state_dir / DAEMONS_FILE, {"daemons": [vars(daemon) for daemon in daemons]})


def read_daemons(state_dir: Path) -> list[DaemonState]:
    """What the supervisor last wrote; nothing before it wrote."""
    fields = _read_json(state_dir / DAEMONS_FILE) or {"daemons": []}
    return [DaemonState(**daemon) for daemon in fields["daemons"]]


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(fields, indent=1) + "\n")
    os.replace(scratch, path)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as exc:
        raise _damaged(path, exc) from exc
    return fields


def _damaged(path: Path, exc: Exception) -> DevclusterError:
    return DevclusterError(
        f"{path} is damaged or of another version of hetstream ({exc!r}). End the processes that name "
        f"{path.parent} in `ps -ef` and remove that directory"
    )
