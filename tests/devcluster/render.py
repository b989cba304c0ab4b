"""The configuration files of a cluster as text. Pure; called by boot.py.

Each choice follows Slurm's manual pages slurm.conf(5), gres.conf(5) and cgroup.conf(5) and was tried on 22.05, 24.11
and 26.05.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.devcluster import packing, sites
from tests.devcluster.network import CONTROLLER, ClusterNetwork
from tests.devcluster.spec import NODE_MEMORY_MB, ClusterSpec, NodeGroup

# Heterogeneous jobs start only through the backfill scheduler, which by default looks every 30 s.
TUNED_SCHEDULER = "sched_min_interval=0,bf_interval=1,batch_sched_delay=0"

# A host that is cut off is DOWN after half a minute and not, as by default, after five.
SLURMD_TIMEOUT_S = 10
# A job that is requeued because its node is DOWN waits for so long (and 1 s) before it starts again; by default 120 s.
CRED_EXPIRE_S = 10


def slurm_conf(spec: ClusterSpec, version: str = "") -> str:
    """The text of slurm.conf.

    Args:
        spec: the cluster.
        version: Slurm's, for example `24.11.5`; empty: what every release takes.
    """
    return "\n".join(_slurm_conf_lines(spec, version_tuple(version))) + "\n"


def gres_conf(spec: ClusterSpec) -> str:
    """The text of gres.conf: one line a kind of GPU node, and one a GPU where they are shared."""
    lines: list[str] = []
    for group in spec.groups:
        if group.gpus and sites.GPU_KINDS in spec.sites:
            lines += sites.gres_lines(spec, group)
        elif group.gpus:
            nodes = hostlist(group.name, group.count)
            files = hostlist(str(spec.gpu_device(0).with_name("gpu")), group.gpus)
            lines += [f"NodeName={nodes} Name=gpu File={files}", *packing.gres_lines(spec, group, nodes)]
    return "".join(line + "\n" for line in lines)


def cgroup_conf(version: str, *, cgroups: bool = False, has_gpus: bool = True) -> str | None:
    """The text of cgroup.conf, or None for a Slurm that needs none.

    Args:
        version: Slurm's version, for example `24.11.5`.
        cgroups: Slurm is to use them.
        has_gpus: whether there are devices to be kept from jobs.
    """
    if cgroups:
        # Nodes of one machine share its CPUs; a job's devices and memory can be kept apart.
        devices = "ConstrainDevices=yes\n" if has_gpus else ""
        return f"CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n{devices}"
    # Since 24.11 slurmd ends when it cannot use the cgroups; 22.05 does not know the value "disabled".
    return "CgroupPlugin=disabled\n" if version_tuple(version) >= (24, 11) else None


def task_prolog(commands_dir: Path) -> str:
    """The script that puts a Debian root's commands into the PATH of every batch script and step.

    Slurm runs it before each; what it prints changes their environment (slurm.conf(5), TaskProlog). Most jobs have the
    directory in PATH from their submitter already; those of `sbatch --export=NONE` do not.
    """
    return (
        "#!/bin/sh\n"
        'case ":$PATH:" in\n'
        f"  *:{commands_dir}:*) ;;\n"
        f'  *) echo "export PATH={commands_dir}:${{PATH:-/usr/local/bin:/usr/bin:/bin}}" ;;\n'
        "esac\n"
    )


def version_tuple(version: str) -> tuple[int, ...]:
    """`24.11.5` as (24, 11, 5); what follows the numbers is dropped."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def hostlist(prefix: str, count: int, first: int = 0) -> str:
    """`count` numbered names as Slurm writes them: `gpu[0-3]`, or `gpu0` for one."""
    return f"{prefix}{first}" if count == 1 else f"{prefix}[{first}-{first + count - 1}]"


def _slurm_conf_lines(spec: ClusterSpec, version: tuple[int, ...]) -> Iterator[str]:
    directory = spec.state_dir
    yield f"# Written by `devcluster up`; removed by `devcluster down --state-dir {directory}`."
    yield f"ClusterName={spec.cluster_name}"
    controller = "localhost(127.0.0.1)"
    if spec.network is not None:
        controller = f"{CONTROLLER}({spec.network.host(CONTROLLER).address})"
    yield f"SlurmctldHost={controller}"
    yield f"SlurmctldPort={spec.base_port}"
    if spec.network is None:
        # The daemons listen on 127.0.0.1 only: nobody on the network shall find a throw-away cluster. With a network of
        # its own nobody can, and there the machine's srun must not listen on what its host name resolves to.
        yield "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny"
    yield "SlurmUser=root"
    yield from sites.authentication(spec, f",cred_expire={CRED_EXPIRE_S}" if spec.network or spec.packing else "")
    yield f"StateSaveLocation={directory}/state"
    yield f"SlurmdSpoolDir={directory}/spool/%n"
    yield f"SlurmctldPidFile={directory}/run/slurmctld.pid"
    yield f"SlurmdPidFile={directory}/run/slurmd-%n.pid"
    yield f"SlurmctldLogFile={spec.log_dir}/slurmctld.log"
    yield f"SlurmdLogFile={spec.log_dir}/slurmd-%n.log"
    if spec.root is not None:
        yield f"PluginDir={spec.root.plugin_dir}"
    if spec.root is not None or spec.packing:
        yield f"TaskProlog={spec.task_prolog}"
    yield "MailProg=/bin/true"
    yield f"ProctrackType=proctrack/{'cgroup' if spec.cgroups else 'linuxproc'}"
    yield f"TaskPlugin=task/{'cgroup' if spec.cgroups else 'none'}"
    yield "SchedulerType=sched/backfill"
    if spec.tuned_scheduler:
        yield f"SchedulerParameters={TUNED_SCHEDULER}"
    yield "SelectType=select/cons_tres"
    yield "SelectTypeParameters=CR_Core_Memory"
    # Without a default a job that does not say --mem takes all memory of its nodes.
    yield f"DefMemPerCPU={NODE_MEMORY_MB // spec.shape.cpus_per_node}"
    yield "PriorityType=priority/basic"
    yield "MpiDefault=none"
    yield from sites.settings(spec)
    yield from packing.settings(spec, version)
    yield "ReturnToService=2"
    if spec.network is not None:
        yield f"SlurmdTimeout={SLURMD_TIMEOUT_S}"
    if spec.lua_plugins:
        yield "CliFilterPlugins=lua"
        yield "JobSubmitPlugins=lua"
    # The nodes claim more CPUs and memory than the machine has.
    yield "SlurmdParameters=config_overrides"
    if any(group.gpus for group in spec.groups):
        yield f"GresTypes={','.join(['gpu', *sites.gres_types(spec), *([packing.GRES] if spec.packing else [])])}"
    yield from _node_lines(spec)
    for index, group in enumerate(spec.groups):
        default = " Default=YES" if index == 0 else ""
        nodes = hostlist(group.name, len(sites.group_nodes(spec, group)))
        limits = f"{sites.group_limits(spec, group)}{packing.tier(spec, group)}"
        yield f"PartitionName={group.name} Nodes={nodes}{default} {limits} State=UP"
    for name, settings in {**packing.partitions(spec), **sites.partitions(spec)}.items():
        yield f"PartitionName={name} {settings}"
    yield from spec.settings


def _node_lines(spec: ClusterSpec) -> Iterator[str]:
    for group in spec.groups:
        if group.gpus and sites.GPU_KINDS in spec.sites:
            for number in range(group.count):
                yield _node_line(group, spec.network, sites.node_gres(group, number), (number, 1))
        else:
            gres = f"Gres=gpu:{group.gpus}{packing.node_gres(spec, group)}" if group.gpus else ""
            yield _node_line(group, spec.network, gres, (0, group.count))


def _node_line(group: NodeGroup, network: ClusterNetwork | None, gres: str, which: tuple[int, int]) -> str:
    """The line of some nodes of a group: of the first of them and how many."""
    first, count = which
    address = "NodeAddr=127.0.0.1 NodeHostname=localhost"
    if network is not None:
        prefix, _, host = network.host(group.nodes[first]).address.rpartition(".")
        address = f"NodeAddr={hostlist(f'{prefix}.', count, int(host))}"
    ports = hostlist("", count, group.first_port + first)
    line = (
        f"NodeName={hostlist(group.name, count, first)} {address} Port={ports} "
        f"CPUs={group.cpus} RealMemory={NODE_MEMORY_MB}"
    )
    return f"{line} {gres}" if gres else line
