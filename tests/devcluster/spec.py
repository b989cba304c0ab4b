"""What a throw-away cluster is: its shape, names, ports and paths. Pure; used by every other module here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from hetstream.base.errors import ConfigError
from hetstream.base.text import count_words
from tests.devcluster.network import ClusterNetwork

# Slurm puts the name into SLURM_CLUSTER_NAME and file names, and turns it to lower case.
NAME_RULE = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")

# The longest socket path below the state directory is run/munge.sock or spool/NODE/NODE_JOBID.STEPID (48 bytes are
# ample); the kernel's limit for the whole path is 107.
MAX_STATE_DIR_BYTES = 59

# More slurmds than this on one machine were never tried.
MAX_NODES = 64
MAX_GPUS_PER_NODE = 16
MAX_CPUS_PER_NODE = 512

# What Slurm is told, not what is there: it schedules by these numbers and enforces none of them.
NODE_MEMORY_MB = 64000

# Not below /run: Debian mounts that noexec, and batch scripts are started from the cluster's directory.
DEFAULT_STATE_ROOT = Path("/var/lib/hetstream/devcluster")
DEFAULT_NAME = "default"


@dataclass(frozen=True)
class ClusterShape:
    """How many nodes of which size. The defaults are the cluster that documentation, demo and tests use."""

    gpu_nodes: int = 2
    gpus_per_node: int = 4
    cpu_nodes: int = 4
    cpus_per_node: int = 16

    def __post_init__(self) -> None:
        problems = [
            f"{option}={value}: must be {low} to {high}"
            for option, value, low, high in (
                ("--gpu-nodes", self.gpu_nodes, 0, MAX_NODES),
                ("--gpus-per-node", self.gpus_per_node, 1, MAX_GPUS_PER_NODE),
                ("--cpu-nodes", self.cpu_nodes, 0, MAX_NODES),
                ("--cpus-per-node", self.cpus_per_node, 1, MAX_CPUS_PER_NODE),
            )
            if not low <= value <= high
        ]
        if not problems and not 1 <= self.num_nodes <= MAX_NODES:
            problems.append(f"--gpu-nodes plus --cpu-nodes is {self.num_nodes}: must be 1 to {MAX_NODES}")
        if problems:
            raise ConfigError("devcluster: " + "; ".join(problems))

    @property
    def num_nodes(self) -> int:
        return self.gpu_nodes + self.cpu_nodes


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one kind, which are also one partition.

    Attributes:
        name: the partition; its nodes are `name` + number.
        count: how many nodes.
        cpus: CPUs of each.
        gpus: fake GPUs of each.
        first_port: slurmd's port on node 0; the others follow.
    """

    name: str
    count: int
    cpus: int
    gpus: int
    first_port: int

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"{self.name}{number}" for number in range(self.count))


@dataclass(frozen=True)
class RootPaths:
    """Parts of a Debian root that a cluster's files name.

    Attributes:
        plugin_dir: Slurm's plugins.
        commands_dir: Slurm's programs under their plain names, for PATH.
    """

    plugin_dir: Path
    commands_dir: Path


@dataclass(frozen=True)
class ClusterSpec:
    """Everything that decides the cluster's files and processes.

    Attributes:
        name: what the user calls it.
        cluster_name: Slurm's ClusterName. It ends in a token that no other cluster has, because every process of a job
            carries it in SLURM_CLUSTER_NAME and `down` finds the processes by it.
        state_dir: where all files of the cluster are, absolute.
        base_port: slurmctld's port; the slurmds' ports follow it.
        shape: the nodes.
        tuned_scheduler: let heterogeneous jobs start within a second instead of Slurm's default half minute.
        lua_plugins: load hetstream's Lua plugins into slurmctld and sbatch.
        cgroups: let Slurm find and constrain the processes of a job by control groups.
        packing: opportunistic jobs run on GPUs that others hold, which are emulated ones; see packing.py.
        sites: kinds of sites that it is like; see sites.py.
        settings: more lines of slurm.conf.
        cores: the machine's, to be divided among the nodes; empty where each node runs on all.
        root: where Slurm is when it is not the machine's own.
        network: its hosts' own addresses; None where all are 127.0.0.1.
    """

    name: str
    cluster_name: str
    state_dir: Path
    base_port: int
    shape: ClusterShape = field(default_factory=ClusterShape)
    tuned_scheduler: bool = True
    lua_plugins: bool = False
    cgroups: bool = False
    packing: bool = False
    sites: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    root: RootPaths | None = None
    network: ClusterNetwork | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        path = str(self.state_dir)
        if not self.state_dir.is_absolute() or re.search(r"[^A-Za-z0-9/._-]", path):
            raise ConfigError(
                f"--state-dir={path}: must be an absolute path of letters, digits and / . _ - because "
                "slurm.conf has no quoting"
            )
        if len(path.encode()) > MAX_STATE_DIR_BYTES:
            raise ConfigError(
                f"--state-dir={path}: must be at most {MAX_STATE_DIR_BYTES} characters, because the paths of sockets "
                "below it may not be longer than 107"
            )

        if self.packing and not self.shape.gpu_nodes:
            raise ConfigError("--packing with --gpu-nodes=0: there are no GPUs to share")
        if self.cores and len(self.cores) < self.shape.num_nodes:
            raise ConfigError(
                f"--own-cores: {count_words(len(self.cores), 'core')} for {self.shape.num_nodes} nodes: each needs "
                "one. Give fewer nodes, or leave --own-cores out"
            )

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        """The GPU nodes and the CPU nodes, as far as there are any; the first is the default partition."""
        shape = self.shape
        first = self.base_port + 1
        gpu_node_cpus = cpu_node_cpus = shape.cpus_per_node
        if self.cores:
            gpu_node_cpus, cpu_node_cpus = 1, (len(self.cores) - shape.gpu_nodes) // max(1, shape.cpu_nodes)
        groups = (
            NodeGroup("gpu", shape.gpu_nodes, gpu_node_cpus, shape.gpus_per_node, first),
            NodeGroup("cpu", shape.cpu_nodes, cpu_node_cpus, 0, first + shape.gpu_nodes),
        )
        return tuple(group for group in groups if group.count)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node for group in self.groups for node in group.nodes)

    @property
    def cores_of(self) -> dict[str, tuple[int, ...]]:
        """The cores of each node, where nodes have cores of their own: as many as Slurm is told."""
        remaining = iter(self.cores)
        return {
            node: tuple(islice(remaining, group.cpus)) for group in self.groups for node in group.nodes if self.cores
        }

    @property
    def dbd_port(self) -> int:
        """slurmdbd's port, behind those of all nodes."""
        return self.base_port + 1 + self.shape.num_nodes

    @property
    def slurm_conf(self) -> Path:
        return self.state_dir / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.state_dir / "run" / "munge.sock"

    @property
    def log_dir(self) -> Path:
        return self.state_dir / "log"

    @property
    def hosts_file(self) -> Path:
        return self.state_dir / "hosts"

    @property
    def task_prolog(self) -> Path:
        return self.state_dir / "task_prolog.sh"

    @property
    def sharing_dir(self) -> Path:
        """A directory for each node whose GPUs are shared."""
        return self.state_dir / "sharing"

    @property
    def packing_settings(self) -> Path:
        return self.state_dir / "packing.env"

    @property
    def own_run(self) -> Path:
        """What the cluster has as /run, where it has its own."""
        return self.state_dir / "own-run"

    @property
    def commands_dir(self) -> Path:
        """Slurm's commands as they reach a cluster with a /run of its own."""
        return self.state_dir / "commands"

    @property
    def database_dir(self) -> Path:
        return self.state_dir / "database"

    @property
    def database_socket(self) -> Path:
        return self.database_dir / "socket"

    @property
    def suspend_program(self) -> Path:
        return self.state_dir / "suspend.sh"

    @property
    def resume_program(self) -> Path:
        return self.state_dir / "resume.sh"

    def gpu_device(self, number: int) -> Path:
        return self.state_dir / "dev" / f"gpu{number}"


def ports_needed(shape: ClusterShape, *, accounting: bool) -> int:
    """slurmctld's, those of the nodes, and slurmdbd's."""
    return 1 + shape.num_nodes + int(accounting)


def check_name(name: str) -> None:
    """Refuse a name that Slurm or a file name could not carry."""
    if not NAME_RULE.fullmatch(name):
        raise ConfigError(f"--name={name}: must be 1 to 32 lower-case letters, digits or -, not starting with -")
