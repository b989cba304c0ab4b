"""The files by which a cluster is found again: `cluster.json` (what it is) and `daemons.json` (what runs).

Called by boot.py, supervisor.py, teardown.py and the command line. A directory without `cluster.json` is not a
cluster's and is never removed. Commands that a record names are run, and processes that it names are killed, by root:
so it is read only where nobody else could have written it, and each of its fields is checked.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetstream.base.files import Directory, UntrustedFile
from hetstream.hetjob.convert.plan import PARTITIONS_VARIABLE
from hetstream.slurm_plugin.database import check_place
from hetstream.slurm_plugin.errors import UnsafePlace
from tests.devcluster.errors import DevclusterError
from tests.devcluster.network import ClusterNetwork, VirtualHost, plan_network
from tests.devcluster.spec import NAME_RULE

RECORD_FILE = "cluster.json"
DAEMONS_FILE = "daemons.json"

# In the environment of every daemon: `down` finds the processes by it.
MARKER_VARIABLE = "HETSTREAM_DEVCLUSTER"
# A cluster of 64 nodes has 15 KiB.
_MOST_BYTES = 1 << 20
_TOKEN_RULE = re.compile(r"[0-9a-f]{8}")
_PARTITION_RULE = re.compile(r"[a-z][a-z0-9_-]*")


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
    """The record in `state_dir`, or None if no cluster was begun there.

    Raises:
        UnsafePlace: somebody else than root and this user could have written it.
        DevclusterError: it is not what `up` writes.
    """
    fields = _read_json(state_dir / RECORD_FILE)
    if fields is None:
        return None
    try:
        fields["nodes"] = tuple(fields["nodes"])
        fields["partitions"] = tuple(fields["partitions"])
        if network := fields.get("network"):
            network["hosts"] = tuple(VirtualHost(**host) for host in network["hosts"])
            fields["network"] = ClusterNetwork(**network)
        record = ClusterRecord(**fields)
        _check(record, state_dir)
        return record
    except (KeyError, TypeError, ValueError) as exc:
        raise _damaged(state_dir / RECORD_FILE, exc) from exc


def _check(record: ClusterRecord, state_dir: Path) -> None:
    """Whether each field that becomes part of a path or a command, or says what is killed, is what `up` writes."""
    name, _, token = record.cluster_name.rpartition("-")
    if not (NAME_RULE.fullmatch(record.name) and name == record.name and _TOKEN_RULE.fullmatch(token)):
        raise ValueError(f"{record.cluster_name!r} is no ClusterName of a cluster called {record.name!r}")
    for text in (*record.nodes, *record.partitions, record.opportunistic or "none"):
        if not _PARTITION_RULE.fullmatch(text):
            raise ValueError(f"{text!r} is no name of a node or partition")
    if not os.path.samefile(record.state_dir, state_dir):
        raise ValueError(f"it is of a cluster in {record.state_dir}")
    network = record.network
    if network is not None and network != plan_network(record.cluster_name, record.nodes, network.subnet):
        raise ValueError("its network is none of this cluster's")
    if record.path_prefix:
        check_place(Path(record.path_prefix).absolute())


def write_daemons(state_dir: Path, daemons: list[DaemonState]) -> None:
    """Write `daemons.json` in one step."""
    _write_json(state_dir / DAEMONS_FILE, {"daemons": [vars(daemon) for daemon in daemons]})


def read_daemons(state_dir: Path) -> list[DaemonState]:
    """What the supervisor last wrote; nothing before it wrote.

    Raises:
        UnsafePlace: somebody else than root and this user could have written it.
        DevclusterError: it is not what the supervisor writes.
    """
    fields = _read_json(state_dir / DAEMONS_FILE) or {"daemons": []}
    try:
        return [DaemonState(**{**daemon, "pid": int(daemon["pid"])}) for daemon in fields["daemons"]]
    except (KeyError, TypeError, ValueError) as exc:
        raise _damaged(state_dir / DAEMONS_FILE, exc) from exc


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(fields, indent=1) + "\n")
    os.replace(scratch, path)


def _read_json(path: Path) -> dict[str, Any] | None:
    check_place(path.parent)
    try:
        with Directory.open_safe(path.parent) as directory:
            fields: dict[str, Any] = json.loads(directory.read(path.name, _MOST_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UntrustedFile as exc:
        raise UnsafePlace(str(exc)) from exc
    except (OSError, ValueError) as exc:
        raise _damaged(path, exc) from exc
    return fields


def _damaged(path: Path, exc: Exception) -> DevclusterError:
    return DevclusterError(
        f"{path} is damaged or of another version of hetstream ({exc!r}). End the processes that name "
        f"{path.parent} in `ps -ef` and remove that directory"
    )
