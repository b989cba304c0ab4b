"""The nodes of a cluster as arrays: what each has and what is free of it, for jobs of one kind. No I/O.

Used by `fragmentation.py` and `why.py`, which ask the same of thousands of nodes for thousands of shapes. What a
partition allows is part of the answer: MaxCPUsPerNode, whole nodes (OverSubscribe=EXCLUSIVE), and its nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetstream.slurm_plugin.client.model import PENDING_STATES, SHARING, Gres, Job, Node, Partition, total
from hetstream.slurm_plugin.client.slurm_units import alternatives, for_one_node, meets

# What pending jobs ask of a node, and which of them ask alike. Pure; used by all that explain or measure a cluster.
#
# Tens of thousands of pending jobs ask for a few thousand different things, and what is true of one that asks so is
# true of all: who asks thousands of nodes, asks once for each group.
#
# Slurm alone decides over how many nodes a job spreads, and how unevenly. A shape is the even share on as many as are
# likely, a guess that ranks and counts. What no choice of Slurm's can undercut is in `Least`, and nothing else shows
# that a job can never start.

RESOURCES = ("GPUs", "CPUs", "memory")
Layout = tuple[int, int, int]
_CPUS_OF_PARTS = "22.05"
# CPUs of a node that jobs without GPUs may have (RestrictedCoresPerGPU).
_BESIDE_GPUS = "beside GPUs"


class Whose(NamedTuple):
    """Whose a job is, as far as it decides with whom it shares nodes; attributes are those of `Job`."""

    exclusive: str
    uid: int | None
    user: str
    mcs_label: str


@dataclass(frozen=True, slots=True)
class Shape:
    """What a node must give to a pending job, when the job spreads evenly over a likely number of nodes.

    Attributes:
        gpus: of all types.
        gpu_type: the type that it insists on; empty if any will do, or where `gres` names several.
        partitions: where it may run; empty means everywhere.
        num_jobs: how many pending jobs have this shape.
        whole_nodes: it gets whole nodes alone (`--exclusive`).
        required_nodes: `--nodelist`, where it names as many nodes as it wants: it then runs on no other.
        features, excluded_nodes: `--constraint` and `--exclude`.
        num_nodes: how many such nodes it needs.
        is_guess: Slurm may choose another number, or divide the job otherwise.
        gres: what else it asks for: each of several types of GPUs, and GRES that are no GPUs.
        memory_per_cpu_mb: more of it goes with CPUs that it gets and did not ask for; 0 if none does.
        all_memory: all of a node's memory.
        layout: see `Job`.
        cores: of its own, whatever number of CPUs each is.
        min_cpus: that the node must have free, whether they are given to the job or not.
        tmp_disk_mb: that the node has, whoever uses it.
        unit: of what Slurm gives nothing but whole ones: `CPU`, `core`, `socket` or `node`.
        whose: whose jobs have it; None where it does not matter.
    """

    cpus: int
    gpus: int
    memory_mb: int
    gpu_type: str = ""
    partitions: tuple[str, ...] = ()
    num_jobs: int = 0
    whole_nodes: bool = False
    required_nodes: tuple[str, ...] = ()
    features: str = ""
    excluded_nodes: tuple[str, ...] = ()
    num_nodes: int = 1
    is_guess: bool = False
    gres: tuple[Gres, ...] = ()
    memory_per_cpu_mb: int = 0
    all_memory: bool = False
    layout: Layout = (0, 0, 0)
    cores: int = 0
    min_cpus: int = 0
    unit: str = "core"
    whose: Whose | None = None
    tmp_disk_mb: int = 0


@dataclass(frozen=True, slots=True)
class Least:
    """What a pending job needs however Slurm spreads it.

    Attributes:
        num_nodes: at least.
        max_nodes: at the most; None where nothing says so.
        of_node: what each of its nodes must be able to give at least.
        cpus, memory_mb, gpus: of all its nodes together.
        gres: likewise, by name and type.
        tasks: likewise, each of them on one node with the CPUs of `of_node`; 0 where its tasks say nothing.
        task_memory_mb: that goes with each of these; 0 where it goes with something else.
        task_gres: likewise.
        tasks_per_core: how many of these have a core at the most; 0 where nothing is said.
    """

    num_nodes: int
    max_nodes: int | None
    of_node: Shape
    cpus: int
    memory_mb: int
    gpus: int
    gres: tuple[Gres, ...]
    tasks: int
    task_memory_mb: int
    task_gres: tuple[Gres, ...]
    tasks_per_core: int


class Hardware:
    """What the nodes of a cluster have, as far as it decides how jobs spread over them.

    Args:
        nodes: all of them, in use or not.
        config: `scontrol show config`.
        partitions: all of them; what each gives of a node at the most counts.

    Attributes:
        unit: see `Shape`; by SelectType and SelectTypeParameters (slurm.conf(5)).
        counts_memory: whether Slurm keeps count of memory.
        counts_whole_tasks: whether the CPUs that a node must have free at least are those of whole tasks. 22.05 looks
            for as many as MaxMemPerCPU or `--mincpus` says, and may give fewer; 24.11 and 26.05 do not.
    """

    def __init__(
        self,
        nodes: Iterable[Node] = (),
        config: Mapping[str, str] | None = None,
        partitions: Iterable[Partition] = (),
    ) -> None:
        kinds = (config or {}).get("SelectTypeParameters", "CR_CORE_MEMORY").upper()
        self.unit = next((name for name in ("socket", "core", "CPU") if f"CR_{name.upper()}" in kinds), "core")
        if (config or {}).get("SelectType", "").endswith("linear"):
            self.unit = "node"
        self.counts_memory = "MEMORY" in kinds
        self.counts_whole_tasks = not (config or {}).get("SLURM_VERSION", "").startswith(_CPUS_OF_PARTS)
        # Of each partition, and under the empty name of all: the most that a node has.
        self._most: dict[str, Counter[tuple[str, str]]] = {}
        limits = {partition.name: partition for partition in partitions}
        for node in nodes:
            has = Counter[tuple[str, str]]()
            for gres in node.gres:
                has[gres.name, ""] += gres.count
                if gres.type:
                    has[gres.name, gres.type] += gres.count
            for name in ("", *node.partitions):
                given = _given(node, limits.get(name))
                self._most[name] = self._most.get(name, Counter()) | has | given

    def most(self, partitions: Sequence[str]) -> Counter[tuple[str, str]]:
        """Return the most that a node of these partitions has, by name and type; of `CPUs` and `cores`, too.

        These are of jobs with GPUs; those of others are under the type `beside GPUs`.
        """
        found = Counter[tuple[str, str]]()
        for name in partitions or ("",):
            found |= self._most.get(name, Counter())
        return found


UNKNOWN_HARDWARE = Hardware()


def _given(node: Node, partition: Partition | None) -> Counter[tuple[str, str]]:
    """CPUs and cores of a node that the jobs of a partition may have at the most, with GPUs and without."""
    cpus = node.cpus
    if partition is not None and partition.max_cpus_per_node is not None:
        cpus = min(cpus, partition.max_cpus_per_node)
    if partition is not None and partition.max_cpus_per_socket is not None and node.layout[0]:
        cores = partition.max_cpus_per_socket // node.cpus_per_core
        cpus = min(cpus, node.layout[0] * cores * node.cpus_per_core)
    found = Counter[tuple[str, str]]()
    for kind, num in (("", cpus), (_BESIDE_GPUS, min(cpus, node.cpus - node.gpu_cores * node.cpus_per_core))):
        found["CPUs", kind], found["cores", kind] = num, num // node.cpus_per_core
    return +found


def alike_jobs(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return the pending jobs in groups: those of a group ask alike, in the same places, and have the same reason."""
    groups: dict[Hashable, list[Job]] = {}
    for job in jobs:
        if job.state in PENDING_STATES:
            key = job.reason, request_of(job)
            group = groups.get(key)
            if group is None:
                groups[key] = [job]
            else:
                group.append(job)
    return list(groups.values())


def request_of(job: Job) -> Hashable:
    """Return what a job asks for and where, to compare it with others of one snapshot."""
    # GRES by identity: those parsed of equal text are one object, and hashing them would cost more than all.
    return (
        job.partitions, job.num_nodes, job.num_cpus, job.memory_mb, job.num_tasks, job.cpus_per_gpu,
        id(job.gres_per_node), id(job.gres_per_task), id(job.gres_per_job), id(job.gres_per_socket),
        job.gpus_requested, job.required_nodes, job.features, job.excluded_nodes, job.is_contiguous, job.num_switches,
        job.short_licenses, job.barred, job.begins_s is None,
        job.reservation, job.exclusive, job.user if job.exclusive == "USER" else "",
        job.likely_nodes, job.max_nodes, job.cpus_per_task, job.memory_per_cpu_mb, job.min_cpus_per_node,
        job.layout, job.tasks_per_core, job.tasks_per_socket, job.memory_per_gpu_mb, job.all_memory, job.tmp_disk_mb,
        job.own_memory,
    )  # fmt: skip


def pending_shapes(
    alike: Iterable[Sequence[Job]], hardware: Hardware = UNKNOWN_HARDWARE, owners: Collection[str] | None = None
) -> tuple[Shape, ...]:
    """Return the shapes of the jobs that free resources could start, the most frequent first. Without reservations.

    Args:
        alike: the pending jobs in groups; see `alike_jobs`.
        hardware: of the cluster.
        owners: of nodes, by name or number: jobs of each of them are apart, and those that share nodes with their own
            user or label alone. None where all are together.
    """
    counts: Counter[Shape] = Counter()
    for group in alike:
        if group[0].waits_for_resources and not group[0].reservation:
            shape = shape_of(group[0], hardware)
            if owners is None:
                counts[shape] += sum(job.num_records for job in group)
            for job in group if owners is not None else ():
                counts[replace(shape, whose=_whose(job, owners or ()))] += job.num_records
    return tuple(replace(shape, num_jobs=count) for shape, count in counts.most_common())


def _whose(job: Job, owners: Collection[str]) -> Whose:
    """Whose a job is; all are alike who share nodes with everybody, and have none for themselves."""
    is_known = job.exclusive == "USER" or job.user in owners or str(job.uid) in owners
    label = job.mcs_label if job.exclusive == "MCS" else ""
    return Whose(job.exclusive, job.uid if is_known else None, job.user if is_known else "", label)


def shape_of(job: Job, hardware: Hardware = UNKNOWN_HARDWARE) -> Shape:
    """Return what a job asks of each of its nodes, when it spreads evenly over a likely number of them."""
    nodes = _likely_nodes(job, hardware)
    tasks = _share(job.num_tasks, nodes) if job.is_pending and job.num_tasks >= nodes else 0
    wanted = _wanted(job, nodes, tasks) if job.gres_held is None else Counter[tuple[str, str]]()
    gpus = wanted["gpu", ""]
    is_exact = total(job.gres_per_node, "gpu") or (tasks and total(job.gres_per_task, "gpu"))
    if not is_exact or job.gres_held is not None:
        gpus = max(gpus, _share(job.count("gpu"), nodes))
    if job.gpus_requested is not None and job.gres_held is None:
        gpus = min(gpus, job.gpus_requested)  # what slurmctld made of the request
    types = [kind for name, kind in wanted if name == "gpu" and kind]
    cpus = tasks * job.cpus_per_task if tasks and _tasks_are_whole(job) else _share(job.num_cpus, nodes)
    cpus = max(cpus, job.cpus_per_gpu * gpus)
    whole = job.cpus_per_task if hardware.counts_whole_tasks else 1
    # A job that says no number of nodes asks for one; so does --nodes=1, which Slurm does not tell apart.
    may_be_more = job.max_nodes is None and job.num_nodes <= 1 < job.num_tasks and job.min_cpus_per_node < cpus
    per_cpu_mb = job.memory_per_cpu_mb or 0
    if not job.is_pending:
        memory_mb = _share(job.memory_mb, nodes)
    else:
        memory_mb = 0 if _is_by_gpus(job) else per_cpu_mb * cpus or _share(job.memory_mb, max(1, job.num_nodes))
        memory_mb = max(memory_mb, job.memory_per_gpu_mb * gpus)
    return Shape(
        cpus=cpus,
        gpus=gpus,
        memory_mb=memory_mb if hardware.counts_memory else 0,
        gpu_type=types[0] if len(types) == 1 else "" if types else job.type_of("gpu"),
        partitions=tuple(sorted(job.partitions)),
        whole_nodes=job.exclusive == "NODE",
        required_nodes=job.required_nodes if len(set(job.required_nodes)) >= nodes else (),
        features=job.features if nodes > 1 else for_one_node(job.features),
        excluded_nodes=job.excluded_nodes,
        num_nodes=nodes,
        is_guess=job.is_pending and (nodes != max(1, job.num_nodes) or (job.max_nodes or 0) > nodes or may_be_more),
        gres=_others(wanted) if job.is_pending else (),
        memory_per_cpu_mb=per_cpu_mb if job.is_pending and job.layout[2] == 0 and hardware.counts_memory else 0,
        all_memory=job.is_pending and job.all_memory and hardware.counts_memory,
        layout=job.layout if job.is_pending else (0, 0, 0),
        cores=_share(tasks, job.tasks_per_core) if job.tasks_per_core else 0,
        min_cpus=_share(job.min_cpus_per_node, whole) * whole if job.is_pending else 0,
        unit=hardware.unit,
        tmp_disk_mb=job.tmp_disk_mb if job.is_pending else 0,
    )


def least_of(job: Job, hardware: Hardware = UNKNOWN_HARDWARE) -> Least:
    """Return what a pending job needs however Slurm spreads it: lower bounds, each by itself.

    A node that has less than `MinCPUsNode`, `MinMemoryNode` or the GRES of a node is none for Slurm (node_scheduler.c);
    each of its nodes has a task at least, as long as it has no more nodes than tasks. Of what a job asks for as a
    whole (`--gpus`) each has one at least: where too few have any, sbatch refuses it (seen on 22.05, 24.11 and 26.05).
    """
    shape = shape_of(job, hardware)
    has_tasks = job.num_tasks >= max(1, job.num_nodes)
    per_task = job.gres_per_task if has_tasks else ()
    of_node = _by_type(job.gres_per_node) | _by_type(per_task) | _by_type(job.gres_per_socket)
    of_node |= _one_of_each(job.gres_per_job)
    is_whole = has_tasks and _tasks_are_whole(job)
    cpus = job.cpus_per_task if is_whole else 1
    gpus, per_cpu_mb = min(of_node["gpu", ""], job.count("gpu")), job.memory_per_cpu_mb or 0
    memory_mb = _share(job.memory_mb, max(1, job.num_nodes))
    all_mb = 0
    if job.all_memory or not hardware.counts_memory:
        memory_mb = per_cpu_mb = 0
    elif job.memory_per_gpu_mb and len({gres.type for gres in job.gres_asked if gres.name == "gpu"}) > 1:
        # Of several types Slurm looks at the memory of each, and not at the sum (seen on 22.05, 24.11 and 26.05).
        memory_mb = job.memory_per_gpu_mb * max(
            (of_node[key] for key in of_node if key[0] == "gpu" and key[1]), default=0
        )
    elif job.memory_per_gpu_mb:
        own_mb = 0 if _is_by_gpus(job) else per_cpu_mb or memory_mb
        memory_mb, all_mb = max(own_mb, job.memory_per_gpu_mb * gpus), job.memory_per_gpu_mb * job.count("gpu")
    elif per_cpu_mb:
        memory_mb, all_mb = per_cpu_mb, per_cpu_mb * job.num_cpus
    together = _by_type(job.gres_per_job)
    for gres, number in ((job.gres_per_node, job.num_nodes), (job.gres_per_task, job.num_tasks)):
        together |= Counter({key: count * max(1, number) for key, count in _by_type(gres).items()})
    types = [kind for name, kind in of_node if name == "gpu" and kind]
    return Least(
        num_nodes=max(1, job.num_nodes),
        max_nodes=job.max_nodes,
        of_node=replace(
            shape,
            cpus=cpus,
            gpus=gpus,
            memory_mb=memory_mb,
            gpu_type=types[0] if len(types) == 1 else "",
            gres=_others(of_node),
            memory_per_cpu_mb=0,
            cores=0,
            unit="CPU",
            num_nodes=max(1, job.num_nodes),
            min_cpus=job.min_cpus_per_node,
            # Where it may have more nodes than it names, it may run on others, too.
            required_nodes=(),
        ),
        cpus=job.num_cpus,
        memory_mb=all_mb,
        gpus=job.count("gpu"),
        gres=tuple(Gres(name, kind, count) for (name, kind), count in together.items() if kind or name != "gpu"),
        tasks=job.num_tasks if is_whole else 0,
        tasks_per_core=job.tasks_per_core,
        task_memory_mb=per_cpu_mb * cpus if is_whole and not job.memory_per_gpu_mb else 0,
        task_gres=tuple(gres for gres in job.gres_per_task if gres.count) if is_whole else (),
    )


def is_free(job: Job, shape: Shape) -> bool:
    """Return whether Slurm may give the nodes of a job other numbers of tasks than an even share.

    It gives each node as many as it has room for, unless each has one or --ntasks-per-node says how many, which makes
    as many CPUs the least of a node.
    """
    return shape.is_guess or (job.num_tasks > shape.num_nodes and job.min_cpus_per_node < shape.cpus)


def may_divide(job: Job, shape: Shape) -> bool:
    """Return whether room in uneven parts is room for a job as far as `least_of` knows: what ties one thing to another
    on a node (GPUs to CPUs or memory, tasks to nodes or sockets) is not in there.
    """
    return is_free(job, shape) and not (
        job.cpus_per_gpu
        or job.memory_per_gpu_mb
        or job.gres_per_socket
        or job.tasks_per_socket
        or job.min_cpus_per_node > job.cpus_per_task
        or (job.gres_per_task and not _tasks_are_whole(job))
    )


def most_nodes_of(job: Job, shape: Shape, can_be_even: bool) -> int | None:
    """Return the most nodes that a pending job may get; None where there is no limit.

    Of a job without a limit Slurm tells the likely number in its place (see `most_nodes`). It is taken for one, unless
    the job asks for one node at least (as a job does that says nothing), and cannot have all on one.

    Args:
        job: who asks.
        shape: its even share.
        can_be_even: so many nodes could give that, if they were empty.
    """
    if job.max_nodes is not None:
        return job.max_nodes
    is_unlimited = job.num_nodes <= 1 and (shape.num_nodes > 1 or not can_be_even)
    return None if is_unlimited else shape.num_nodes


def gres_in_doubt(shape: Shape) -> str:
    """Shards and MPS that a job asks for: how many of one GPU are free is not looked at."""
    return ", ".join(gres_words(gres) for gres in shape.gres if gres.name in SHARING)


def gres_words(gres: Gres) -> str:
    """Return a request as sbatch takes it."""
    return f"{gres.name}:{gres.type}:{gres.count}" if gres.type else f"{gres.name}:{gres.count}"


def _likely_nodes(job: Job, hardware: Hardware) -> int:
    """The least number of nodes on which even shares would have room on empty ones, from what Slurm holds likely on."""
    least = max(1, job.num_nodes)
    if not job.is_pending:
        return least
    # slurmctld counts threads as cores in some estimates, but gives no task more than one node.
    likely = max(least, min(job.likely_nodes, job.num_tasks))
    most = hardware.most(job.partitions)
    unit = "cores" if job.layout[2] == 1 or job.tasks_per_core == 1 else "CPUs"
    has_gpus = any(gres.name in ("gpu", *SHARING) for gres in job.gres_asked) or job.count("gpu")
    cpus = most[unit, "" if has_gpus else _BESIDE_GPUS]
    if job.num_tasks > 1 and cpus:
        per_task = job.cpus_per_task if _tasks_are_whole(job) else 1
        likely = max(likely, _share(job.num_tasks if per_task > 1 else job.num_cpus, max(1, cpus // per_task)))
    for (name, kind), count in _by_type(job.gres_per_task).items():
        if job.num_tasks > 1 and most[name, kind]:
            likely = max(likely, _share(job.num_tasks, max(1, most[name, kind] // count)))
    for (name, kind), count in _by_type(job.gres_per_job).items():
        if most[name, kind]:
            likely = max(likely, _share(count, most[name, kind]))
    return min(likely, max(least, job.max_nodes)) if job.max_nodes is not None else likely


def _wanted(job: Job, nodes: int, tasks: int) -> Counter[tuple[str, str]]:
    """GRES of a node by name and type, under no type of all types, each in the way that asks for most."""
    sockets = max(1, job.layout[0])
    in_each_way = (
        (job.gres_per_node, lambda count: count),
        (job.gres_per_task, lambda count: count * max(1, tasks)),
        (job.gres_per_job, lambda count: _share(count, nodes)),
        (job.gres_per_socket, lambda count: count * sockets),
    )
    found = Counter[tuple[str, str]]()
    for gres, of_node in in_each_way:
        found |= Counter({key: of_node(count) for key, count in _by_type(gres).items()})
    return found


def _by_type(gres: Iterable[Gres]) -> Counter[tuple[str, str]]:
    """Counts by name and type; under no type of all types."""
    found = Counter[tuple[str, str]]()
    for resource in gres:
        found[resource.name, ""] += resource.count
        if resource.type:
            found[resource.name, resource.type] += resource.count
    return +found


def _one_of_each(gres: Iterable[Gres]) -> Counter[tuple[str, str]]:
    """One of each name, and of its type where there is but one."""
    types: dict[str, set[str]] = {}
    for resource in gres:
        if resource.count:
            types.setdefault(resource.name, set()).add(resource.type)
    found = Counter((name, "") for name in types)
    return found | Counter((name, min(kinds)) for name, kinds in types.items() if len(kinds) == 1)


def _others(wanted: Mapping[tuple[str, str], int]) -> tuple[Gres, ...]:
    """What `gpus` and `gpu_type` of a shape do not say."""
    num_types = Counter(name for name, kind in wanted if kind)
    return tuple(
        Gres(name, kind, count)
        for (name, kind), count in wanted.items()
        if (num_types[name] > 1 if name == "gpu" else True) and bool(kind) == bool(num_types[name])
    )


def _tasks_are_whole(job: Job) -> bool:
    """Whether its CPUs are those of its tasks, each on one node; with `--overcommit` they are fewer."""
    return job.num_cpus == job.num_tasks * job.cpus_per_task


def _is_by_gpus(job: Job) -> bool:
    """Whether its memory goes by GPUs alone.

    Where it asks for other memory itself, Slurm still wants DefMemPerGPU free for each GPU, and gives it what it asks
    for (gres_select_filter.c; seen on 22.05).
    """
    return bool(job.memory_per_gpu_mb) and not job.own_memory


def _share(number: int, parts: int) -> int:
    return -(-number // parts)


Mask = NDArray[np.bool_]
Counts = NDArray[np.int64]


class NodeTable:
    """Nodes in a fixed order; every array has one entry for each.

    Args:
        nodes: which.
        partitions: those that the cluster has; one that is not among them allows everything.
        jobs: running ones count against MaxCPUsPerNode.
        cluster: all nodes in Slurm's order, where more than these follow each other.
        others_are_hidden: there may be more jobs than these.

    Attributes:
        nodes: in the order of the arrays.
        cpus, cpus_free, memory_mb, memory_free_mb, gpus, gpus_free, mig: as in `Node`.
        reserved: whether only jobs of a reservation start there.
        cpus_per_core: as in `Node`.
        last_busy_s: as in `Node`; 0 where nothing says so.
        owners: users who have some of these nodes for themselves now, by name or number.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        partitions: Iterable[Partition] = (),
        jobs: Iterable[Job] = (),
        cluster: Iterable[Node] = (),
        *,
        others_are_hidden: bool = False,
    ) -> None:
        self.nodes = tuple(nodes)
        order = {node.name: place for place, node in enumerate(cluster)}
        self._order = self._counts(order.get(node.name, place) for place, node in enumerate(self.nodes))
        self.cpus = self._counts(node.cpus for node in self.nodes)
        self.cpus_free = self._counts(node.cpus_free for node in self.nodes)
        # What jobs of a reservation hold of its cores no other job can have at all.
        self._most_cpus = self.cpus - self._counts(
            sum(part.cpus_held for part in node.reserved_parts) for node in self.nodes
        )
        self._is_whole = self._mask(not node.reserved_parts for node in self.nodes) & (self.cpus_free == self.cpus)
        self.memory_mb = self._counts(node.memory_mb for node in self.nodes)
        self.memory_free_mb = self._counts(node.memory_free_mb for node in self.nodes)
        self.gpus = self._by_gres(lambda node: node.gpus)
        self.gpus_free = self._by_gres(lambda node: node.gpus_free())
        self.mig = self._by_gres(lambda node: node.mig)
        self.reserved = self._mask(node.is_reserved for node in self.nodes)
        self.cpus_per_core = self._counts(node.cpus_per_core for node in self.nodes)
        self.last_busy_s = self._counts(int(node.last_busy_s or 0) for node in self.nodes)
        self._tmp_disk_mb = self._counts(node.tmp_disk_mb for node in self.nodes)
        self._layout = tuple(self._counts(node.layout[place] for node in self.nodes) for place in range(3))
        self._has_threads = bool((self.cpus_per_core > 1).any())
        self._places = {node.name: place for place, node in enumerate(self.nodes)}
        self._limits = {
            partition.name: partition
            for partition in partitions
            if partition.is_exclusive
            or partition.max_cpus_per_node is not None
            or partition.max_cpus_per_socket is not None
            or (partition.all_share and partition.jobs_per_cpu > 1)
        }
        different = {node.gres for node in self.nodes}
        self._gpu_types = {gres.type for found in different for gres in found if gres.name == "gpu"}
        self._jobs = tuple(jobs)
        self.owners = frozenset(node.owner for node in self.nodes) - {""}
        self._has_labels = any(node.mcs_label for node in self.nodes)
        self._kept: dict[Whose, Mask] = {}
        self._others_are_hidden = others_are_hidden
        self._taken_without_gpus: Counts | None = None
        self._users: dict[tuple[int | None, str], set[str]] | None = None
        self._taken = self._cpus_taken(self._jobs)
        self._for_gpus = self._counts(node.gpu_cores * node.cpus_per_core for node in self.nodes)
        members: dict[str, list[int]] = {}
        for place, node in enumerate(self.nodes):
            for name in node.partitions:
                members.setdefault(name, []).append(place)
        self._members = {name: self.at(places) for name, places in members.items()}
        self._eligible: dict[tuple[frozenset[str], str], Mask] = {}
        self._cpus: dict[frozenset[str], tuple[Counts, Counts]] = {}
        self._devices: dict[str, tuple[Counts, Counts]] = {}
        self._features: dict[str, list[Mask]] = {}
        self._gres: dict[tuple[str, str], tuple[Counts, Counts]] = {}

    @cached_property
    def completing(self) -> Mask:
        """Where jobs that have ended still are: Slurm starts nothing there, although what they held is free.

        Source: cg_node_bitmap in node_scheduler.c and backfill.c.
        """
        return self._mask("COMPLETING" in node.states for node in self.nodes)

    @property
    def is_kept_by_some(self) -> bool:
        """Whether who asks decides where there is room."""
        return bool(self.owners) or self._has_labels

    def eligible(self, partitions: Collection[str], reservation: str = "") -> Mask:
        """Return the nodes of these partitions (of none: all) that are in one of the job's reservations, or in none."""
        key = frozenset(partitions), reservation
        if key not in self._eligible:
            if reservation:
                named = ("", *reservation.split(","))
                mask = self.reserved & self._mask(node.reservation in named for node in self.nodes)
            else:
                mask = ~self.reserved
            self._eligible[key] = mask & self._in(partitions) if partitions else mask
        return self._eligible[key]

    def everywhere(self, partitions: Collection[str]) -> Mask:
        """Return the nodes of these partitions, whoever they are reserved for."""
        return self._in(partitions)

    def named(self, names: Iterable[str]) -> Mask:
        """Return the nodes with these names."""
        return self.at([self._places[name] for name in names if name in self._places])

    def amounts(self, of_nodes: Iterable[tuple[str, int]]) -> Counts:
        """Return the sums of what is said of nodes by their names."""
        found = np.zeros_like(self.cpus)
        for name, amount in of_nodes:
            if name in self._places:
                found[self._places[name]] += amount
        return found

    def asked_for(self, shape: Shape) -> Mask:
        """Return the nodes that `--nodelist`, `--exclude` and `--constraint` leave."""
        mask = self.named(shape.required_nodes) if shape.required_nodes else np.ones(len(self.nodes), dtype=np.bool_)
        if shape.excluded_nodes:
            mask = mask & ~self.named(shape.excluded_nodes)
        choices = self.alike(shape.features)
        return mask & np.logical_or.reduce(choices) if choices else mask

    def alike(self, features: str) -> list[Mask]:
        """Return the nodes that meet each of the alternatives of which all nodes of a job must meet the same one."""
        if features not in self._features:
            self._features[features] = [self._meeting(choice) for choice in alternatives(features)]
        return self._features[features]

    def _meeting(self, expression: str) -> Mask:
        """The nodes that meet an expression of features, in which few of them differ."""
        found = {features: meets(expression, features) for features in {node.features for node in self.nodes}}
        return self._mask(found[node.features] for node in self.nodes)

    def side_by_side(self, mask: Mask, wanted: int) -> NDArray[np.int64]:
        """So many of these nodes that follow each other in the order of the cluster's; none if none do."""
        places = np.flatnonzero(mask)
        places = places[np.argsort(self._order[places], kind="stable")]
        order = self._order[places]
        for start in range(len(places) - wanted + 1):
            if order[start + wanted - 1] - order[start] == wanted - 1:
                return places[start : start + wanted]
        return places[:0]

    def cpus_for(self, partitions: Collection[str], whole_nodes: bool = False) -> tuple[Counts, Counts]:
        """CPUs of each node that a job in one of these partitions could have at all, and now.

        Args:
            partitions: of the job.
            whole_nodes: it wants whole nodes itself.
        """
        if whole_nodes:
            most, free = self.cpus_for(partitions)
            return most, np.where(self._is_whole, free, 0)
        limits = [self._limits[name] for name in partitions if name in self._limits]
        if not limits:
            return self._most_cpus, self.cpus_free
        key = frozenset(partitions)
        if key not in self._cpus:
            most, free = np.zeros_like(self.cpus), np.zeros_like(self.cpus)
            for name in partitions:
                here, now = self._cpus_in(name)
                members = self._in([name])
                most = np.maximum(most, np.where(members, here, 0))
                free = np.maximum(free, np.where(members, now, 0))
            self._cpus[key] = most, free
        return self._cpus[key]

    def without_gpu_cores(self, cpus: Counts, cpus_free: Counts) -> tuple[Counts, Counts]:
        """Of the CPUs that `cpus_for` tells those that a job without GPUs may have (RestrictedCoresPerGPU).

        Which cores other jobs have is not known: of the others at least as many are free as jobs without GPUs leave.
        """
        if not self._for_gpus.any():
            return cpus, cpus_free
        if self._taken_without_gpus is None:
            self._taken_without_gpus = self._given(job for job in self._jobs if not job.count("gpu"))
        others = np.maximum(0, self.cpus - self._for_gpus)
        left = np.maximum(0, others - self._taken_without_gpus)
        return np.minimum(cpus, others), np.where(self._for_gpus > 0, np.minimum(cpus_free, left), cpus_free)

    def kept_from(self, job: Job | Whose) -> Mask:
        """Return the nodes where it cannot start, whatever is free: others have them, or it wants them, for one user or
        label.

        Source: filter_by_node_owner and filter_by_node_mcs in src/slurmctld/node_scheduler.c.
        """
        whose = Whose(job.exclusive, job.uid, job.user, job.mcs_label)
        if whose not in self._kept:
            self._kept[whose] = self._kept_from(whose)
        return self._kept[whose]

    def _kept_from(self, job: Whose) -> Mask:
        if job.exclusive == "USER":
            kept = self._with_jobs_of_others(job)
        elif self.owners:
            kept = self._mask(node.owner not in ("", job.user, str(job.uid)) for node in self.nodes)
        else:
            kept = np.zeros(len(self.nodes), dtype=np.bool_)
        if job.exclusive == "MCS" and job.mcs_label:
            labels = ("", job.mcs_label)
            kept = kept | self._mask(node.mcs_label not in labels for node in self.nodes)
            kept = kept | self._mask(not node.mcs_label and node.cpus_allocated > 0 for node in self.nodes)
        elif self._has_labels:
            kept = kept | self._mask(node.mcs_label != "" for node in self.nodes)
        return kept

    def whose_matters(self, alike: Iterable[Sequence[Job]]) -> bool:
        """Return whether it matters whose the pending jobs of these groups are; see `kept_from`."""
        return self.is_kept_by_some or any(group[0].exclusive in ("USER", "MCS") for group in alike)

    def _with_jobs_of_others(self, job: Whose) -> Mask:
        """The nodes on which another user's jobs run."""
        if self._users is None:
            self._users = {}
            for other in self._jobs:
                if other.is_running:
                    self._users.setdefault((other.uid, other.user), set()).update(other.nodes)
        mine = job.uid, job.user
        theirs = set[str]().union(*(names for owner, names in self._users.items() if owner != mine))
        found = self._mask(node.name in theirs for node in self.nodes)
        if self._others_are_hidden:
            # Somebody has CPUs there, and this user's jobs have no node to themselves for certain.
            found |= self.cpus_free < self.cpus
        return found

    def takes_whole_nodes(self, partitions: Collection[str]) -> bool:
        """Return whether a job in these partitions gets whole nodes only."""
        return bool(partitions) and all(name in self._limits and self._limits[name].is_exclusive for name in partitions)

    def devices(self, gpu_type: str) -> tuple[Counts, Counts]:
        """GPUs, and parts of them by MIG, that a job may ask for at all, and could have now."""
        if gpu_type and gpu_type not in self._gpu_types:
            return np.zeros_like(self.cpus), np.zeros_like(self.cpus)
        if gpu_type not in self._devices:
            self._devices[gpu_type] = (
                self._by_gres(lambda node: node.devices(gpu_type)),
                self._by_gres(lambda node: node.devices_free(gpu_type)),
            )
        return self._devices[gpu_type]

    def gres(self, name: str, kind: str) -> tuple[Counts, Counts]:
        """Return what a job may ask for at all of a GRES that is no GPU, of one type or of all, and what it could have
        now.

        Shards and MPS of a GPU that a job has as a whole are not there; how many of one GPU are left is not known.
        """
        if (name, kind) not in self._gres:
            has, drained, used = (
                self._counts(total(getattr(node, which), name, kind) for node in self.nodes)
                for which in ("gres", "gres_drained", "gres_used")
            )
            had = has - drained
            free = had - used
            if name in SHARING:
                # Of each GPU that no job has as a whole there are as many.
                gpus = np.maximum(1, self._counts(total(node.gres, "gpu") for node in self.nodes))
                whole = self._counts(total(node.gres_used, "gpu") for node in self.nodes)
                free = np.minimum(free, had * np.maximum(0, gpus - whole) // gpus)
            self._gres[name, kind] = np.maximum(0, had), np.maximum(0, free)
        return self._gres[name, kind]

    def gres_of(self, shape: Shape) -> Iterable[tuple[str, int, Counts, Counts]]:
        """Of all that a shape asks for beside its `gpus`: the resource, how many, and both of the above."""
        for gres in shape.gres:
            had, free = self.devices(gres.type) if gres.name == "gpu" else self.gres(gres.name, gres.type)
            yield "GPUs" if gres.name == "gpu" else "GRES", gres.count, had, free

    def needed(self, shape: Shape) -> tuple[Counts, Counts]:
        """Return the CPUs and the memory that each node gives to a job of this shape, which may be more than it asks
        for.

        Slurm gives whole cores (or sockets, or nodes), and where a job uses one thread of each core the others are
        nobody's; memory for each CPU comes with them (seen on 22.05, 24.11 and 26.05).
        """
        asked = max(shape.cpus, shape.min_cpus)
        cpus = np.full_like(self.cpus, asked)
        if self._has_threads or shape.unit in ("socket", "node"):
            used = np.minimum(self.cpus_per_core, shape.layout[2] or self.cpus_per_core)
            cores = np.maximum(-(-asked // used), shape.cores)
            is_part = (used < self.cpus_per_core) | (cores * self.cpus_per_core >= asked + self.cpus_per_core)
            cpus = np.where(is_part, cores * self.cpus_per_core, asked)
            units = {
                "CPU": np.ones_like(cpus),
                "core": self.cpus_per_core,
                "socket": self.cpus // np.maximum(1, self._layout[0]),
                "node": self.cpus,
            }
            rounded = -(-cpus // np.maximum(1, units[shape.unit])) * np.maximum(1, units[shape.unit])
            # What the system keeps for itself leaves less than whole units.
            cpus = np.where((rounded > self.cpus) & (cpus <= self.cpus), self.cpus, rounded)
        memory_mb = shape.memory_mb + shape.memory_per_cpu_mb * np.maximum(0, cpus - shape.cpus)
        # Cores of sockets must be free that it need not be given.
        cores_free = max(1, shape.layout[0]) * max(1, shape.layout[1]) if max(shape.layout[:2]) > 1 else 0
        cpus = np.maximum(cpus, cores_free * self.cpus_per_core)
        # Slurm counts that of a partition's first node for a job that waits, and takes what its own node has.
        return cpus, self.memory_mb if shape.all_memory else memory_mb

    def has_sockets_free(self, shape: Shape, cpus_free: Counts) -> Mask:
        """Return where so few cores are busy that as many sockets as a shape names have as many free, wherever those
        are.
        """
        if max(shape.layout[:2]) < 2:
            return np.ones(len(self.nodes), dtype=np.bool_)
        bad_sockets = np.maximum(1, self._layout[0] - max(1, shape.layout[0]) + 1)
        bad_cores = np.maximum(1, self._layout[1] - max(1, shape.layout[1]) + 1)
        mask: Mask = cpus_free >= self.cpus - (bad_sockets * bad_cores - 1) * self.cpus_per_core
        return mask

    def laid_out(self, shape: Shape) -> Mask:
        """Return the nodes with as many sockets, cores and threads, and as much disk, as a shape names."""
        mask = self._tmp_disk_mb >= shape.tmp_disk_mb
        for wanted, had in zip(shape.layout, self._layout, strict=True):
            if wanted > 1:
                mask = mask & ((had >= wanted) | (had == 0))
        return mask

    def chosen(self, mask: Mask) -> list[Node]:
        """Return the nodes of a mask."""
        return [self.nodes[place] for place in np.flatnonzero(mask).tolist()]

    def _cpus_in(self, name: str) -> tuple[Counts, Counts]:
        limit = self._limits.get(name)
        if limit is None:
            return self._most_cpus, self.cpus_free
        most, free = self._most_cpus, self.cpus_free
        if limit.all_share and limit.jobs_per_cpu > 1 and not self._others_are_hidden:
            # Each job has other CPUs than its own, once, and those of others as often as the partition says.
            shared = np.maximum(0, most - self._given(job for job in self._jobs if job.partitions[0] != name))
            free = np.maximum(free, np.minimum(shared, limit.jobs_per_cpu * shared - self._taken[name]))
        if limit.max_cpus_per_socket is not None:
            cores = limit.max_cpus_per_socket // self.cpus_per_core
            of_sockets = np.where(self._layout[0] > 0, self._layout[0] * cores * self.cpus_per_core, most)
            most, free = np.minimum(most, of_sockets), np.minimum(free, of_sockets)
        if limit.max_cpus_per_node is not None:
            most = np.minimum(most, limit.max_cpus_per_node)
            free = np.minimum(free, np.maximum(0, limit.max_cpus_per_node - self._taken[name]))
        if limit.is_exclusive:
            free = np.where(self._is_whole, free, 0)
        return most, free

    def _cpus_taken(self, jobs: Iterable[Job]) -> dict[str, Counts]:
        """CPUs that the jobs of each limited partition hold on each node."""
        by_partition: dict[str, list[Job]] = {name: [] for name in self._limits}
        for job in jobs if by_partition else ():
            if job.partitions[0] in by_partition:
                by_partition[job.partitions[0]].append(job)
        return {name: self._given(members) for name, members in by_partition.items()}

    def _given(self, jobs: Iterable[Job]) -> Counts:
        """CPUs that jobs were given on each node."""
        shares = (share for job in jobs if job.holds_resources for share in job.cpus_on_nodes())
        return self.amounts((name, math.ceil(cpus)) for name, cpus in shares)

    def _in(self, partitions: Iterable[str]) -> Mask:
        mask = np.zeros(len(self.nodes), dtype=np.bool_)
        for name in partitions:
            if name in self._members:
                mask |= self._members[name]
        return mask

    def at(self, places: list[int]) -> Mask:
        """Return the nodes with these numbers."""
        mask = np.zeros(len(self.nodes), dtype=np.bool_)
        mask[places] = True
        return mask

    def _by_gres(self, of: Callable[[Node], int]) -> Counts:
        """A figure that a node's GRES alone decide: few are different, and equal ones are often one object."""
        known: dict[tuple[int, int, int, int | None], int] = {}
        values = []
        for node in self.nodes:
            key = id(node.gres), id(node.gres_used), id(node.gres_drained), node.gpus_allocated
            value = known.get(key)
            if value is None:
                value = known[key] = of(node)
            values.append(value)
        return self._counts(values)

    def _counts(self, values: Iterable[int]) -> Counts:
        return np.fromiter(values, dtype=np.int64, count=len(self.nodes))

    def _mask(self, values: Iterable[Any]) -> Mask:
        return np.fromiter(values, dtype=np.bool_, count=len(self.nodes))
