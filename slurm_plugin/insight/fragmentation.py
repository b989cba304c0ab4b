"""How much of a cluster is free and cannot be used: (snapshot) -> per node and for all. Pure.

Called by `hetstream frag`. It knows nothing of time: who wants a history keeps what it returns.

GoldMiner's indicator of a node is freeCPU/CPU - freeGPU/GPU. Below zero its CPUs are gone before its GPUs, above zero
the other way round. "Stranded" is what is free and no pending job could take: for each shape (what one node must give
to one pending job) the node is filled with copies of that shape alone, and the shape that uses most counts; shapes
that insist on different types of GPUs use them side by side. Parts of GPUs, by MIG, are counted apart from whole ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hetstream.slurm_plugin.client.counted import counted
from hetstream.slurm_plugin.client.model import Job, Node, Partition, gpu_share
from hetstream.slurm_plugin.insight.node_table import Counts, Mask, NodeTable
from hetstream.slurm_plugin.insight.shapes import RESOURCES, Shape, alike_jobs, pending_shapes

# The paper counts machines with all CPUs taken and more than this share of the GPUs free, and the reverse.
MUCH_FREE = 0.25
# Of shapes of which none is smaller than another in everything, so many are looked at: those of most jobs.
MAX_SHAPES = 512


ASSUMED_GPU_SHAPE = Shape(cpus=1, gpus=1, memory_mb=0)
ASSUMED_CPU_SHAPE = Shape(cpus=1, gpus=0, memory_mb=0)


@dataclass(frozen=True, slots=True)
class NodeFragmentation:
    """One usable node.

    Attributes:
        gpus, gpus_free: whole ones.
        indicator: freeCPU/CPU - freeGPU/GPU, where a part of a GPU counts as that part; None without GPUs.
        memory_indicator: freeMemory/Memory - freeGPU/GPU; None without GPUs.
        stranded_gpus, stranded_cpus: free, and of no use to any pending job.
        mig, mig_free: parts of GPUs, by MIG.
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
    mig: int = 0
    mig_free: int = 0


@dataclass(frozen=True, slots=True)
class GpuType:
    """What of one type there is on usable nodes.

    Attributes:
        type: empty for those without one.
        is_mig: whether it is a part of a GPU.
    """

    type: str
    is_mig: bool
    num: int
    num_free: int


@dataclass(frozen=True)
class Fragmentation:
    """A cluster.

    Attributes:
        nodes: usable ones, the worst first.
        left_out: nodes that no job can start on, or only jobs of a reservation.
        elsewhere: those of them on which jobs hold something: what they hold, and nothing free.
        gpu_types: of all that counts.
        shapes: of the jobs that wait for resources, the most frequent first.
        assumed: nodes with GPUs for which no job with GPUs is pending; there a shape of 1 GPU and 1 CPU is assumed.
    """

    nodes: tuple[NodeFragmentation, ...]
    left_out: tuple[Node, ...]
    shapes: tuple[Shape, ...]
    assumed: tuple[str, ...]
    gpu_types: tuple[GpuType, ...] = ()
    elsewhere: tuple[NodeFragmentation, ...] = ()

    @property
    def counted_nodes(self) -> tuple[NodeFragmentation, ...]:
        """All rows of which totals are made."""
        return self.nodes + self.elsewhere

    @property
    def gpu_nodes(self) -> tuple[NodeFragmentation, ...]:
        return tuple(node for node in self.nodes if node.indicator is not None)

    def total(self, what: str) -> int:
        """The sum of one count over all that counts; see `client/counted.py`."""
        return sum(getattr(node, what) for node in self.counted_nodes)

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


def measure(
    nodes: Iterable[Node],
    jobs: Iterable[Job],
    partitions: Iterable[Partition] = (),
    alike: Iterable[Sequence[Job]] | None = None,
) -> Fragmentation:
    """Measure a cluster.

    Args:
        nodes: all nodes; those that no job can start on are left out and listed.
        jobs: all jobs; those that wait for resources give the shapes.
        partitions: what they allow counts.
        alike: the pending jobs in groups, where those are known.
    """
    found, known = list(nodes), list(jobs)
    usable = [node for node in found if node.starts_jobs]
    shapes = pending_shapes(alike_jobs(known) if alike is None else alike)
    table = NodeTable(usable, partitions, known)
    measured, assumed = measure_table(table, shapes)
    measured.sort(
        key=lambda stranding: (
            -stranding.stranded_gpus,
            -abs(stranding.indicator or 0),
            -stranding.stranded_cpus,
            stranding.node,
        )
    )
    left_out = tuple(node for node in found if not node.starts_jobs)
    elsewhere = tuple(row for node in left_out if (row := _held_on(node)) is not None)
    return Fragmentation(tuple(measured), left_out, shapes, tuple(assumed), _gpu_types(found), elsewhere)


def _held_on(node: Node) -> NodeFragmentation | None:
    """What jobs hold on a node on which none can start; None if they hold nothing."""
    held = counted([node])
    if not (held.cpus or held.gpus or held.mig or held.memory_mb):
        return None
    return NodeFragmentation(
        node.name, node.partitions, held.cpus, 0, held.gpus, 0, held.memory_mb, 0, None, None, 0, 0, "", held.mig
    )


def measure_table(table: NodeTable, shapes: Sequence[Shape]) -> tuple[list[NodeFragmentation], list[str]]:
    """Each node of a table against the shapes of pending jobs; and the names of those where a shape was assumed."""
    gpus, gpus_free = table.gpus, table.gpus_free
    of_whole = [shape for shape in shapes if shape.gpus and gpu_share(shape.gpu_type) == 1]
    of_gpus = _best_use(table, _smallest(of_whole, "gpus"), ASSUMED_GPU_SHAPE)
    of_cpus = _best_use(table, _smallest(shapes, "cpus"), ASSUMED_CPU_SHAPE)
    stranded_gpus = np.where(gpus > 0, np.maximum(0, gpus_free - of_gpus.used), 0)
    stranded_cpus = np.maximum(0, table.cpus_free - of_cpus.used)
    lacking = np.where(stranded_gpus > 0, of_gpus.lacking, np.where(stranded_cpus > 0, of_cpus.lacking, -1))
    # Of five thousand nodes: lists are read faster than arrays, item by item.
    columns = [
        counts.tolist()
        for counts in (table.cpus, table.cpus_free, gpus, gpus_free, table.mig, table.memory_mb, table.memory_free_mb)
    ]
    found = [
        _one(node, row, stranded, lack)
        for node, row, stranded, lack in zip(
            table.nodes,
            zip(*columns, strict=True),
            zip(stranded_gpus.tolist(), stranded_cpus.tolist(), strict=True),
            lacking.tolist(),
            strict=True,
        )
    ]
    return found, [node.name for node in table.chosen((gpus > 0) & ~of_gpus.known)]


def _one(node: Node, row: tuple[int, ...], stranded: tuple[int, int], lacking: int) -> NodeFragmentation:
    cpus, cpus_free, gpus, gpus_free, mig, memory_mb, memory_free_mb = row
    gpu_share_free = node.gpu_share_free() if mig else gpus_free / gpus if gpus else None
    return NodeFragmentation(
        node=node.name,
        partitions=node.partitions,
        cpus=cpus,
        cpus_free=cpus_free,
        gpus=gpus,
        gpus_free=gpus_free,
        memory_mb=memory_mb,
        memory_free_mb=memory_free_mb,
        indicator=None if gpu_share_free is None else (cpus_free / cpus if cpus else 0.0) - gpu_share_free,
        memory_indicator=(
            None if gpu_share_free is None else (memory_free_mb / memory_mb if memory_mb else 0.0) - gpu_share_free
        ),
        stranded_gpus=stranded[0],
        stranded_cpus=stranded[1],
        lacking=RESOURCES[lacking] if lacking >= 0 else "",
        mig=mig,
        mig_free=node.mig_free() if mig else 0,
    )


class _Best:
    """Of each node the most units that copies of one shape can take, and what keeps that shape from more."""

    def __init__(self, num_nodes: int) -> None:
        self.used: Counts = np.zeros(num_nodes, dtype=np.int64)
        self.lacking = np.full(num_nodes, -1, dtype=np.int8)
        self.known: Mask = np.zeros(num_nodes, dtype=np.bool_)
        self._modest = np.zeros(num_nodes)

    def take(self, where: Mask, used: Counts, lacking: Counts, modest: float) -> None:
        """Compare a shape on the nodes where it may run."""
        # Of shapes that use the same, the one that asks for the least CPUs per GPU is the nearest to more.
        is_better = where & (~self.known | (used > self.used) | ((used == self.used) & (modest > self._modest)))
        self.used = np.where(is_better, used, self.used)
        self.lacking = np.where(is_better, lacking, self.lacking)
        self._modest = np.where(is_better, modest, self._modest)
        self.known = self.known | where


def _best_use(table: NodeTable, chosen: tuple[str, Sequence[Shape]], assumed: Shape) -> _Best:
    """The best use of each node; where no shape may run at all, that of the assumed one.

    Args:
        table: the nodes.
        chosen: which unit counts, `gpus` or `cpus`, and the shapes.
        assumed: see above.
    """
    unit, shapes = chosen
    best = _Best(len(table.nodes))
    by_type: dict[str, _Best] = {}
    for shape in shapes:
        use = _use(table, shape, unit)
        if use is not None:
            best.take(*use)
            if unit == "gpus" and shape.gpu_type:
                by_type.setdefault(shape.gpu_type, _Best(len(table.nodes))).take(*use)
    if len(by_type) > 1:
        # Those that insist on different types use them side by side.
        together = sum((use.used for use in by_type.values()), np.zeros_like(best.used))
        best.used = np.maximum(best.used, together)
    known = best.known
    use = _use(table, assumed, unit)
    if use is not None:
        best.take(use[0] & ~known, *use[1:])
    best.known = known
    return best


def _use(table: NodeTable, shape: Shape, unit: str) -> tuple[Mask, Counts, Counts, float] | None:
    """Where a shape may run, how many units its copies can take there, what they lack, and its CPUs per GPU."""
    cpus, cpus_free = table.cpus_for(shape.partitions)
    where = table.eligible(shape.partitions) & (cpus >= shape.cpus) & (table.memory_mb >= shape.memory_mb)
    rooms = []
    if shape.gpus:
        devices, devices_free = table.devices(shape.gpu_type)
        where = where & (devices >= shape.gpus)
        rooms.append((0, devices_free // shape.gpus))
    if not where.any():
        return None
    if shape.cpus:
        rooms.append((1, cpus_free // shape.cpus))
    if shape.memory_mb:
        rooms.append((2, table.memory_free_mb // shape.memory_mb))
    copies = np.zeros_like(table.cpus)
    lacking = np.full(len(table.nodes), -1, dtype=np.int64)
    for place, (resource, room) in enumerate(rooms):
        is_less = room < copies if place else np.ones(len(table.nodes), dtype=np.bool_)
        copies, lacking = np.where(is_less, room, copies), np.where(is_less, resource, lacking)
    used = copies * getattr(shape, unit)
    if table.takes_whole_nodes(shape.partitions):
        free = table.cpus_free if unit == "cpus" else table.gpus_free
        used = np.where(copies > 0, free, 0)
    modest = -shape.cpus / shape.gpus if shape.gpus else 0.0
    return where, used, lacking, modest


def _smallest(shapes: Sequence[Shape], unit: str) -> tuple[str, Sequence[Shape]]:
    """The shapes that can make a difference: of those alike in the unit, none that is larger than another in the rest.

    Where many remain, those of most jobs do. This is exact up to `MAX_SHAPES`, and makes thousands of shapes cheap.
    """
    other = "cpus" if unit == "gpus" else "gpus"
    groups: dict[tuple[Hashable, ...], list[Shape]] = {}
    for shape in shapes:
        groups.setdefault((getattr(shape, unit), shape.gpu_type, shape.partitions), []).append(shape)
    kept: list[Shape] = []
    for group in groups.values():
        least_mb: int | None = None
        for shape in sorted(group, key=lambda shape: (getattr(shape, other), shape.memory_mb)):
            if least_mb is None or shape.memory_mb < least_mb:
                kept.append(shape)
                least_mb = shape.memory_mb
    kept.sort(key=lambda shape: -shape.num_jobs)
    return unit, kept[:MAX_SHAPES]


def _gpu_types(nodes: Sequence[Node]) -> tuple[GpuType, ...]:
    found: dict[str, tuple[int, int]] = {}
    for node in nodes:
        for kind in node.gpu_types:
            # Without a type `devices` is all of a node.
            is_known = bool(kind) or len(node.gpu_types) == 1
            num, free = (node.devices(kind), node.devices_free(kind)) if is_known else (0, 0)
            if not node.starts_jobs:
                num, free = num - free, 0
            if node.starts_jobs or num:
                before = found.get(kind, (0, 0))
                found[kind] = before[0] + num, before[1] + free
    return tuple(GpuType(kind, gpu_share(kind) < 1, *counts) for kind, counts in sorted(found.items()))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
