"""Kinds of sites that a throw-away cluster can be like, by `up --site`: from its spec to text and commands. Pure.

Called by render.py and boot.py. Each choice follows Slurm's manual pages slurm.conf(5), slurmdbd.conf(5), sacctmgr(1)
and scontrol(1). What each kind holds is told in docs/devcluster.md, and the tests count on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tests.devcluster.spec import ClusterSpec, NodeGroup

ACCOUNTING, POWER_SAVING = "accounting", "power-saving"
RESERVATIONS, HIDDEN, EXCLUSIVE, LIMITS = "reservations", "hidden", "exclusive", "limits"
CONFIGLESS, AUTH_SLURM = "configless", "auth-slurm"
GPU_KINDS = "gpu-kinds"
SITES: Mapping[str, str] = {
    ACCOUNTING: "slurmdbd on a MariaDB of its own; associations and QOS with limits, enforced",
    RESERVATIONS: "one GPU node reserved from now on, one CPU node for maintenance in an hour",
    HIDDEN: "a hidden partition, with a CPU node that is in no other",
    EXCLUSIVE: "a partition whose jobs take whole nodes (OverSubscribe=EXCLUSIVE)",
    POWER_SAVING: "nodes can be powered down, and are started for a job",
    LIMITS: "small arrays, small jobs, and a short longest time",
    CONFIGLESS: "nodes and commands have no slurm.conf, and get it from slurmctld",
    AUTH_SLURM: "auth/slurm in the place of MUNGE (24.11 and newer)",
    GPU_KINDS: "GPUs near cores: without a type, of two types, shared in shards, divided by MIG, node by node",
}

# Types of the GPUs of node 0, 1, 2 and 3, half of a node's GPUs of each, and how many shards each GPU has; node 4 is as
# node 0 again. Types are as AutoDetect=nvml gives them, with profiles of MIG.
_KINDS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("", ""), 0), (("a100", "v100"), 0), (("a100", "v100"), 4), (("h100_3g.40gb", "h100_1g.10gb"), 0),
)  # fmt: skip

# Of accounts and QOS, all for root and nobody.
USERS = ("root", "nobody")
ACCOUNTS: Mapping[str, str] = {"free": "", "eight-cpus": "GrpTRES=cpu=8", "one-job": "MaxJobs=1"}
QOS: Mapping[str, str] = {"two-gpus": "MaxTRESPerUser=gres/gpu=2", "ten-minutes": "MaxWall=00:10:00"}

# Long enough that no node goes down but by `scontrol update NodeName=X State=POWER_DOWN`.
SUSPEND_TIME_S = 3600
SUSPEND_TIMEOUT_S, RESUME_TIMEOUT_S = 5, 30


def needs_own_run(kinds: Sequence[str]) -> bool:
    """Whether Slurm of such a site has files in /run, at places that cannot be chosen."""
    return CONFIGLESS in kinds or AUTH_SLURM in kinds


def authentication(spec: ClusterSpec, expiry: str) -> Iterator[str]:
    """Lines of slurm.conf about who is who.

    Args:
        spec: the cluster.
        expiry: what else stands in AuthInfo with MUNGE.
    """
    if AUTH_SLURM in spec.sites:
        # Its key is slurm.key beside slurm.conf.
        yield "AuthType=auth/slurm"
        yield "CredType=cred/slurm"
    else:
        yield "AuthType=auth/munge"
        yield f"AuthInfo=socket={spec.munge_socket}{expiry}"


def settings(spec: ClusterSpec) -> Iterator[str]:
    """Lines of slurm.conf about accounting, power saving, limits, and where the nodes have it from."""
    if ACCOUNTING in spec.sites:
        yield "AccountingStorageType=accounting_storage/slurmdbd"
        yield "AccountingStorageHost=127.0.0.1"
        yield f"AccountingStoragePort={spec.dbd_port}"
        if AUTH_SLURM not in spec.sites:
            yield f"AccountingStoragePass={spec.munge_socket}"
        yield "AccountingStorageTRES=gres/gpu"
        yield "AccountingStorageEnforce=associations,limits,qos"
        yield "JobAcctGatherType=jobacct_gather/linux"
        yield "JobAcctGatherFrequency=1"
    else:
        yield "AccountingStorageType=accounting_storage/none"
        yield "JobAcctGatherType=jobacct_gather/none"
    if POWER_SAVING in spec.sites:
        yield f"SuspendProgram={spec.suspend_program}"
        yield f"ResumeProgram={spec.resume_program}"
        yield f"SuspendTime={SUSPEND_TIME_S}"
        yield f"SuspendTimeout={SUSPEND_TIMEOUT_S}"
        yield f"ResumeTimeout={RESUME_TIMEOUT_S}"
    if CONFIGLESS in spec.sites:
        yield "SlurmctldParameters=enable_configless"
    if LIMITS in spec.sites:
        yield "MaxArraySize=11"
        yield "EnforcePartLimits=NO"


def node_gres(group: NodeGroup, number: int) -> str:
    """What a node with GPUs has, as slurm.conf has it, and the sockets to which its GPUs are near."""
    _, shards = _KINDS[number % len(_KINDS)]
    counts = Counter[str]()
    for kind, devices, _ in _gpus(group, number):
        counts[kind] += len(devices)
    gres = [f"gpu:{f'{kind}:' if kind else ''}{count}" for kind, count in counts.items()]
    sockets = 1 if group.cpus % 2 else 2
    near = f"Sockets={sockets} CoresPerSocket={group.cpus // sockets} ThreadsPerCore=1"
    return f"{near} Gres={','.join([*gres, *([f'shard:{shards * group.gpus}'] if shards else [])])}"


def gres_lines(spec: ClusterSpec, group: NodeGroup) -> Iterator[str]:
    """Lines of gres.conf of the nodes with GPUs."""
    for number, node in enumerate(group.nodes):
        for kind, devices, cores in _gpus(group, number):
            for device in devices:
                of_type = f" Type={kind}" if kind else ""
                yield f"NodeName={node} Name=gpu{of_type} File={spec.gpu_device(device)} Cores={cores}"
        if shards := _KINDS[number % len(_KINDS)][1]:
            yield f"NodeName={node} Name=shard Count={shards * group.gpus}"


def gres_types(spec: ClusterSpec) -> tuple[str, ...]:
    """What beside `gpu` stands in GresTypes."""
    return ("shard",) if GPU_KINDS in spec.sites else ()


def _gpus(group: NodeGroup, number: int) -> Iterator[tuple[str, range, str]]:
    """Of each type of a node's GPUs: their numbers, and the cores that they are near to."""
    kinds, _ = _KINDS[number % len(_KINDS)]
    first = 0
    for place, kind in enumerate(kinds):
        last = group.gpus * (place + 1) // len(kinds)
        half = group.cpus // 2
        cores = (
            f"0-{group.cpus - 1}" if group.cpus % 2 or len(kinds) == 1 else f"{half * place}-{half * (place + 1) - 1}"
        )
        if last > first:
            yield kind, range(first, last), cores
        first = last


def group_nodes(spec: ClusterSpec, group: NodeGroup) -> tuple[str, ...]:
    """The nodes of a group that are in its own partition."""
    hidden = _only_hidden(spec)
    return tuple(node for node in group.nodes if node not in hidden)


def group_limits(spec: ClusterSpec, group: NodeGroup) -> str:
    """What else stands in the line of a group's partition."""
    if LIMITS not in spec.sites:
        return "MaxTime=INFINITE"
    return f"MaxTime={2 if group.gpus else 1}:00:00 MaxNodes=2 MaxMemPerCPU=4000"


def partitions(spec: ClusterSpec) -> Mapping[str, str]:
    """Partitions beside those of the groups: name -> the rest of its line."""
    found = {}
    gpu_nodes = [node for group in spec.groups if group.gpus for node in group.nodes]
    if HIDDEN in spec.sites:
        nodes = ",".join([*gpu_nodes, *_only_hidden(spec)])
        found["hidden"] = f"Nodes={nodes} Hidden=YES MaxTime=INFINITE State=UP"
    if EXCLUSIVE in spec.sites:
        nodes = ",".join(gpu_nodes or spec.nodes)
        found["whole"] = f"Nodes={nodes} OverSubscribe=EXCLUSIVE MaxTime=INFINITE State=UP"
    return found


def commands(spec: ClusterSpec) -> list[Sequence[str]]:
    """What is run once the nodes are idle."""
    found: list[Sequence[str]] = []
    if ACCOUNTING in spec.sites:
        change = ("sacctmgr", "--immediate", "--quiet")
        found += [(*change, "add", "qos", name, limit) for name, limit in QOS.items()]
        found += [(*change, "add", "account", name, *([limit] if limit else [])) for name, limit in ACCOUNTS.items()]
        may = f"QOS=normal,{','.join(QOS)}"
        found += [
            (*change, "add", "user", user, f"Account={','.join(ACCOUNTS)}", "DefaultAccount=free", may)
            for user in USERS
        ]
        found.append((*change, "modify", "user", "where", "name=root", "set", "DefaultAccount=free"))
    if RESERVATIONS in spec.sites:
        create = ("scontrol", "create", "reservation")
        gpu_nodes = [node for group in spec.groups if group.gpus for node in group.nodes]
        cpu_nodes = [node for group in spec.groups if not group.gpus for node in group.nodes]
        for node in gpu_nodes[-1:]:
            found.append((*create, "ReservationName=course", "StartTime=now", "Duration=365-0", "Users=root",
                          f"Nodes={node}"))  # fmt: skip
        for node in cpu_nodes[-1:]:
            found.append((*create, "ReservationName=maintenance", "StartTime=now+1hour", "Duration=02:00:00",
                          "Users=root", "Flags=MAINT", f"Nodes={node}"))  # fmt: skip
    return found


def slurmdbd_conf(spec: ClusterSpec) -> str:
    """The text of slurmdbd.conf. Who is root reaches the database, and nobody else: by its socket, without a word."""
    lines = (
        f"# Written by `devcluster up`; its database is {spec.database_dir}.",
        *(line for line in authentication(spec, "") if line.startswith("Auth")),
        "DbdHost=localhost",
        "DbdAddr=127.0.0.1",
        f"DbdPort={spec.dbd_port}",
        "SlurmUser=root",
        "CommunicationParameters=NoInAddrAny",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
        "StorageUser=root",
        "StorageLoc=slurm",
        f"LogFile={spec.log_dir}/slurmdbd.log",
        f"PidFile={spec.state_dir}/run/slurmdbd.pid",
        *([f"PluginDir={spec.root.plugin_dir}"] if spec.root else []),
    )
    return "".join(f"{line}\n" for line in lines)


def suspend_program(spec: ClusterSpec, path: str) -> str:
    """The script that powers nodes down: it ends their slurmd.

    Args:
        spec: the cluster.
        path: PATH of Slurm's programs.
    """
    return (
        f"#!/bin/sh\nexport PATH={path} SLURM_CONF={spec.slurm_conf}\n"
        'for node in $(scontrol show hostnames "$1"); do\n'
        f'  pid=$(cat "{spec.state_dir}/run/slurmd-$node.pid") && kill "$pid"\n'
        "done\n"
    )


def resume_program(spec: ClusterSpec, path: str, slurmd: Sequence[str]) -> str:
    """The script that starts nodes: a new slurmd for each, which says that its machine has booted (-b).

    Args:
        spec: the cluster.
        path: PATH of Slurm's programs.
        slurmd: how it is started, without the node.
    """
    return (
        f"#!/bin/sh\nexport PATH={path} SLURM_CONF={spec.slurm_conf}\n"
        'for node in $(scontrol show hostnames "$1"); do\n'
        # slurmctld starts this without a place for errors.
        f'  setsid {" ".join(slurmd)} -D -b -N "$node" </dev/null >>"{spec.log_dir}/slurmd-$node.out" 2>&1 &\n'
        # When the script ends, slurmctld ends what is left of its session.
        '  for _ in $(seq 1000); do [ "$(cut -d " " -f 6 "/proc/$!/stat")" = "$!" ] && break; done\n'
        "done\n"
    )


def _only_hidden(spec: ClusterSpec) -> tuple[str, ...]:
    """The last CPU node, where there are two and a partition is hidden."""
    groups = [group.nodes for group in spec.groups if not group.gpus and group.count > 1]
    return groups[0][-1:] if HIDDEN in spec.sites and groups else ()
