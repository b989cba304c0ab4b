"""How a cluster is. Called by `devcluster status` and by boot.py; it changes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.client.run import run_slurm
from tests.devcluster.processes import cluster_processes, start_ticks
from tests.devcluster.record import ClusterRecord, DaemonState, read_daemons

# Without these no Slurm command gets an answer, and each would try for many seconds.
NEEDED_BY_COMMANDS = ("munged", "slurmctld")
SINFO_TIMEOUT_S = 20.0
# What sinfo adds to the state of a node that is powered down, going down, about to, or coming up.
POWER_MARKS = ("~", "%", "!", "#")


@dataclass(frozen=True)
class NodeStatus:
    """One node in one partition, in the words of sinfo.

    Attributes:
        node: its name.
        partition: the partition, with `*` if it is the default.
        state: for example `idle` or `mixed`.
        cpus: how many are allocated/idle/other/total.
        gres: for example `gpu:4`.
    """

    node: str
    partition: str
    state: str
    cpus: str
    gres: str


@dataclass(frozen=True)
class DaemonStatus:
    """One daemon.

    Attributes:
        running: the very process that the supervisor started, or the one that a node was powered up with.
        powered_down: a node's, which power saving has ended.
    """

    name: str
    pid: int
    running: bool
    powered_down: bool = False


@dataclass(frozen=True)
class ClusterStatus:
    """What `status` shows.

    Attributes:
        daemons: in the order of their start.
        nodes: in the order of sinfo.
        problem: why the nodes could not be asked for, empty if they could.
    """

    daemons: tuple[DaemonStatus, ...]
    nodes: tuple[NodeStatus, ...]
    problem: str

    @property
    def healthy(self) -> bool:
        return (
            bool(self.daemons)
            and not self.problem
            and all(daemon.running or daemon.powered_down for daemon in self.daemons)
        )


def observe(record: ClusterRecord) -> ClusterStatus:
    """Look at the cluster's daemons and, if they can answer, ask for its nodes."""
    daemons = tuple(
        DaemonStatus(daemon.name, daemon.pid, is_live(daemon)) for daemon in read_daemons(Path(record.state_dir))
    )
    running = {daemon.name for daemon in daemons if daemon.running}
    # With auth/slurm there is no munged.
    names = {daemon.name for daemon in daemons}
    dead = [name for name in NEEDED_BY_COMMANDS if name not in running and (name in names or name == "slurmctld")]
    if dead:
        return ClusterStatus(daemons, (), f"{' and '.join(dead)} does not run, so Slurm's commands get no answer")
    try:
        nodes = list_nodes(record)
        return ClusterStatus(tuple(_with_power(daemon, nodes, record) for daemon in daemons), nodes, "")
    except SlurmCommandError as error:
        return ClusterStatus(daemons, (), str(error))


def _with_power(daemon: DaemonStatus, nodes: tuple[NodeStatus, ...], record: ClusterRecord) -> DaemonStatus:
    """A daemon, where power saving ends and starts those of nodes."""
    name = daemon.name.removeprefix("slurmd ")
    if daemon.running or name == daemon.name:
        return daemon
    pid_file = Path(record.state_dir) / "run" / f"slurmd-{name}.pid"
    if pid_file.exists():
        # Who has written it is the cluster's; the number may be another's by now.
        pid = int(pid_file.read_text())
        if pid != daemon.pid and any(process.pid == pid for process in cluster_processes(record)):
            return replace(daemon, pid=pid, running=True)
    states = [node.state for node in nodes if node.node == name]
    return replace(daemon, powered_down=bool(states) and states[0].endswith(POWER_MARKS))


def list_nodes(record: ClusterRecord) -> tuple[NodeStatus, ...]:
    """The nodes as sinfo shows them.

    Raises:
        SlurmCommandError: slurmctld does not answer.
    """
    argv = ["sinfo", "-h", "-N", "-o", "%N|%P|%T|%C|%G"]
    shown = run_slurm(argv, env=record.environment(os.environ), timeout_s=SINFO_TIMEOUT_S)
    return tuple(NodeStatus(*line.split("|")) for line in shown.stdout.splitlines())


def is_live(daemon: DaemonState) -> bool:
    """Whether the process is still the one that the supervisor started."""
    return start_ticks(daemon.pid) == daemon.start_ticks
