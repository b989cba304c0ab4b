"""How much of a cluster is free and cannot be used: (snapshot) -> per node and for all. Pure.

Called by `hetstream frag`. It knows nothing of time: who wants a history keeps what it returns.

GoldMiner's indicator of a node is freeCPU/CPU - freeGPU/GPU. Below zero its CPUs are gone before its GPUs, above zero
the other way round. "Stranded" is what is free and no pending job could take: for each shape (what one node must give
to one pending job) the node is filled with copies of that shape alone, and the shape that uses most counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from slurm_plugin.client.model import Job, Node

# The paper counts machines with all CPUs taken and more than this share of the GPUs free, and the reverse.
MUCH_FREE = 0.25


@dataclass(frozen=True, slots=True)
class Shape:
    """What one node must give to one pending job.

    Attributes:
        gpu_type: the type that it insists on; empty if any will do.
        partitions: where it may run; empty means everywhere.
        num_jobs: how many pending jobs have this shape.
    """

    cpus: int
    gpus: int
    memory_mb: int
    gpu_type: str = ""
    partitions: tuple[str, ...] = ()
    num_jobs: int = 0

    def may_run_on(self, node: Node) -> bool:
        """Whether a job of this shape may use the node at all, when it is empty."""
        if self.cpus > node.cpus or self.memory_mb > node.memory_mb:
            return False
        if self.gpus and (self.gpus > node.gpus or self.gpus > node.gpus_of_type(self.gpu_type)):
            return False
        return not self.partitions or bool(set(self.partitions) & set(node.partitions))

    def room_on(self, node: Node) -> dict[str, int]:
        """How many copies each free resource of the node is enough for."""
        room = {}
        if self.gpus:
            room["GPUs"] = node.gpus_free(self.gpu_type) // self.gpus
        if self.cpus:
            room["CPUs"] = node.cpus_free // self.cpus
        if self.memory_mb:
            room["memory"] = node.memory_free_mb // self.memory_mb
        return room


ASSUMED_GPU_SHAPE = Shape(cpus=1, gpus=1, memory_mb=0)
ASSUMED_CPU_SHAPE = Shape(cpus=1, gpus=0, memory_mb=0)


@dataclass(frozen=True, slots=True)
class NodeFragmentation:
    """One usable node.

    Attributes:
        indicator: freeCPU/CPU - freeGPU/GPU; None without GPUs.
        memory_indicator: freeMemory/Memory - freeGPU/GPU; None without GPUs.
        stranded_gpus, stranded_cpus: free, and of no use to any pending job.
        lacking: what the pending jobs lack that would use the stranded GPUs, or without such GPUs the stranded CPUs:
            `CPUs`, `GPUs`, `memory` or nothing.
    """

    node: str
    partitions: tuple[str, ...]
    cpus: int
    cpus_free: int
    gpus: int
    gpus_free: int
    memory_mb: int
    memory_free_mb: int
    indicator: float | None
    memory_indicator: float | None
    stranded_gpus: int
    stranded_cpus: int
    lacking: str


@dataclass(frozen=True)
class Fragmentation:
    """A cluster.

    Attributes:
        nodes: usable ones, the worst first.
        left_out: nodes that no job can start on.
        shapes: of the jobs that wait for resources, the most frequent first.
        assumed: nodes with GPUs for which no job with GPUs is pending; there a shape of 1 GPU and 1 CPU is assumed.
    """

    nodes: tuple[NodeFragmentation, ...]
    left_out: tuple[Node, ...]
    shapes: tuple[Shape, ...]
    assumed: tuple[str, ...]

    @property
    def gpu_nodes(self) -> tuple[NodeFragmentation, ...]:
        return tuple(node for node in self.nodes if node.gpus)

    def total(self, what: str) -> int:
        """The sum of one count over all usable nodes."""
        return sum(getattr(node, what) for node in self.nodes)

    @property
    def mean_indicator(self) -> float | None:
        """The mean over the nodes with GPUs; the signs may cancel."""
        return _mean([node.indicator for node in self.gpu_nodes if node.indicator is not None])

    @property
    def mean_abs_indicator(self) -> float | None:
        """The mean of the absolute value: 0 is a cluster whose free CPUs and GPUs match everywhere."""
        return _mean([abs(node.indicator) for node in self.gpu_nodes if node.indicator is not None])

    @property
    def share_without_cpus(self) -> float | None:
        """Of the nodes with GPUs: all CPUs taken and more than 25 % of the GPUs free (31 % in GoldMiner's trace)."""
        return _mean([float(not node.cpus_free and node.gpus_free > MUCH_FREE * node.gpus) for node in self.gpu_nodes])

    @property
    def share_without_gpus(self) -> float | None:
        """Of the nodes with GPUs: all GPUs taken and more than 25 % of the CPUs free (18 % in GoldMiner's trace)."""
        return _mean([float(not node.gpus_free and node.cpus_free > MUCH_FREE * node.cpus) for node in self.gpu_nodes])


def measure(nodes: Iterable[Node], jobs: Iterable[Job]) -> Fragmentation:
    """Measure a cluster.

    Args:
        nodes: all nodes; those that no job can start on are left out and listed.
        jobs: all jobs; those that wait for resources give the shapes.
    """
    found = list(nodes)
    usable = [node for node in found if node.is_usable]
    shapes = pending_shapes(jobs)
    measured, assumed = [], []
    for alike in alike_nodes(usable).values():
        first = alike[0]
        one = measure_node(first, shapes)
        measured += [replace(one, node=node.name) for node in alike]
        if first.gpus and not any(shape.gpus for shape in shapes if shape.may_run_on(first)):
            assumed += [node.name for node in alike]
    measured.sort(key=lambda one: (-one.stranded_gpus, -abs(one.indicator or 0), -one.stranded_cpus, one.node))
    return Fragmentation(tuple(measured), tuple(node for node in found if not node.is_usable), shapes, tuple(assumed))


def alike_nodes(nodes: Iterable[Node]) -> dict[tuple[object, ...], list[Node]]:
    """Nodes that no shape tells apart; a large cluster has far fewer kinds than nodes."""
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in nodes:
        key = (
            node.partitions, node.cpus, node.cpus_allocated, node.memory_mb, node.memory_allocated_mb, node.gres,
            node.gres_used, node.gres_drained, node.features,
        )  # fmt: skip
        groups.setdefault(key, []).append(node)
    return groups


def pending_shapes(jobs: Iterable[Job]) -> tuple[Shape, ...]:
    """The shapes of the jobs that free resources could start, the most frequent first."""
    counts: Counter[Shape] = Counter()
    for job in jobs:
        if job.waits_for_resources:
            counts[shape_of(job)] += job.num_records
    return tuple(
        Shape(shape.cpus, shape.gpus, shape.memory_mb, shape.gpu_type, shape.partitions, count)
        for shape, count in counts.most_common()
    )


def shape_of(job: Job) -> Shape:
    """What a job asks of each of its nodes, when it spreads evenly."""
    nodes = max(1, job.num_nodes)
    return Shape(
        cpus=-(-job.num_cpus // nodes),
        gpus=-(-job.count("gpu") // nodes),
        memory_mb=-(-job.memory_mb // nodes),
        gpu_type=job.type_of("gpu"),
        partitions=tuple(sorted(job.partitions)),
    )


def measure_node(node: Node, shapes: Sequence[Shape]) -> NodeFragmentation:
    """Measure one node against the shapes of pending jobs."""
    fitting = [shape for shape in shapes if shape.may_run_on(node)]
    gpu_shapes = [shape for shape in fitting if shape.gpus] or [ASSUMED_GPU_SHAPE]
    fitting = fitting or [ASSUMED_CPU_SHAPE]
    gpus_free = node.gpus_free()
    gpu_share = gpus_free / node.gpus if node.gpus else None
    cpu_share = node.cpus_free / node.cpus if node.cpus else 0.0
    memory_share = node.memory_free_mb / node.memory_mb if node.memory_mb else 0.0
    used_gpus, gpus_lack = _best_use(node, gpu_shapes, lambda shape: shape.gpus)
    used_cpus, cpus_lack = _best_use(node, fitting, lambda shape: shape.cpus)
    stranded_gpus = max(0, gpus_free - used_gpus) if node.gpus else 0
    stranded_cpus = max(0, node.cpus_free - used_cpus)
    return NodeFragmentation(
        node=node.name,
        partitions=node.partitions,
        cpus=node.cpus,
        cpus_free=node.cpus_free,
        gpus=node.gpus,
        gpus_free=gpus_free,
        memory_mb=node.memory_mb,
        memory_free_mb=node.memory_free_mb,
        indicator=None if gpu_share is None else cpu_share - gpu_share,
        memory_indicator=None if gpu_share is None else memory_share - gpu_share,
        stranded_gpus=stranded_gpus,
        stranded_cpus=stranded_cpus,
        lacking=gpus_lack if stranded_gpus else cpus_lack if stranded_cpus else "",
    )


def _best_use(node: Node, shapes: Sequence[Shape], unit: Callable[[Shape], int]) -> tuple[int, str]:
    """The most units that copies of one shape can take on the node, and what keeps that shape from more."""
    best, lacking, least = -1, "", 0.0
    for shape in shapes:
        room = shape.room_on(node)
        copies = min(room.values(), default=0)
        used = copies * unit(shape)
        # Of shapes that use the same, the one that asks for the least CPUs per GPU is the nearest to more.
        modest = -shape.cpus / shape.gpus if shape.gpus else 0.0
        if (used, modest) > (best, least) or best < 0:
            lack = min(room, key=lambda name: room[name], default="")
            best, lacking, least = used, lack, modest
    return best, lacking


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
