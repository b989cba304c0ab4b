"""How much of a cluster is free and cannot be used: (snapshot) -> per node and for all. Pure.

Called by `hetstream frag`. It knows nothing of time: who wants a history keeps what it returns.

GoldMiner's indicator of a node is freeCPU/CPU - freeGPU/GPU. Below zero its CPUs are gone before its GPUs, above zero
the other way round. "Stranded" is what is free and no pending job could take: for each shape (what one node must give
to one pending job) the node is filled with copies of that shape alone, and the shape that uses most counts; shapes
that insist on different types of GPUs use them side by side. Parts of GPUs, by MIG, are counted apart from whole ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetstream.slurm_plugin.client.counted import counted
from hetstream.slurm_plugin.client.model import Job, Node, Partition, gpu_share
from hetstream.slurm_plugin.insight.blockers import OTHER_USERS
from hetstream.slurm_plugin.insight.node_table import (
    RESOURCES,
    Counts,
    Hardware,
    Mask,
    NodeTable,
    Shape,
    alike_jobs,
    pending_shapes,
)

# The paper counts machines with all CPUs taken and more than this share of the GPUs free, and the reverse.
MUCH_FREE = 0.25
# Most shapes that are looked at, those of most jobs. None of them is smaller than another one in everything.
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
        gpu_share_free: which share of its GPUs is free, instances as their share of one; None without GPUs.
        lacking: more of what would let a pending job onto the stranded GPUs, or without such GPUs onto the stranded
            CPUs: `CPUs`, `memory`, `GPUs`, `CPUs and memory`, `whole nodes`, `other users` (who have the node for
            themselves) or nothing. `GPUs` where any would need more of them, whatever else.
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
    gpu_share_free: float | None = None


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
        """Return the sum of one count over all that counts; see `client/counted.py`."""
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
        return _mean([float(not node.cpus_free and (node.gpu_share_free or 0) > MUCH_FREE) for node in self.gpu_nodes])

    @property
    def share_without_gpus(self) -> float | None:
        """Of the nodes with GPUs: all GPUs taken and more than 25 % of the CPUs free (18 % in GoldMiner's trace)."""
        return _mean(
            [float(not node.gpu_share_free and node.cpus_free > MUCH_FREE * node.cpus) for node in self.gpu_nodes]
        )


def measure(
    nodes: Iterable[Node],
    jobs: Iterable[Job],
    partitions: Iterable[Partition] = (),
    alike: Iterable[Sequence[Job]] | None = None,
    config: Mapping[str, str] | None = None,
    *,
    others_are_hidden: bool = False,
) -> Fragmentation:
    """Measure a cluster.

    Args:
        nodes: all nodes; those that no job can start on are left out and listed.
        jobs: all jobs; those that wait for resources give the shapes.
        partitions: what they allow counts.
        alike: the pending jobs in groups, where those are known.
        config: `scontrol show config`; it decides what Slurm gives nothing but whole ones of.
        others_are_hidden: there may be more jobs than these.
    """
    found, known = list(nodes), list(jobs)
    usable = [node for node in found if node.starts_jobs]
    groups = alike_jobs(known) if alike is None else list(alike)
    hardware = Hardware(found, config, partitions)
    table = NodeTable(usable, partitions, known, others_are_hidden=others_are_hidden)
    shapes = pending_shapes(groups, hardware)
    measured, assumed = measure_table(table, shapes_on(table, groups, hardware))
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


def shapes_on(table: NodeTable, alike: Sequence[Sequence[Job]], hardware: Hardware) -> tuple[Shape, ...]:
    """Return the shapes of pending jobs for `measure_table`; where nodes are kept for some, with whose they are.

    Args:
        table: the nodes.
        alike: the pending jobs in groups.
        hardware: of the cluster.
    """
    return pending_shapes(alike, hardware, table.owners if table.whose_matters(alike) else None)


def measure_table(table: NodeTable, shapes: Sequence[Shape]) -> tuple[list[NodeFragmentation], list[str]]:
    """Return each node of a table against the shapes of pending jobs; and the names of those where a shape was
    assumed.
    """
    gpus, gpus_free = table.gpus, table.gpus_free
    of_whole = [shape for shape in shapes if shape.gpus and gpu_share(shape.gpu_type) == 1]
    smallest_gpus, smallest_cpus = _smallest(of_whole, "gpus"), _smallest(shapes, "cpus")
    of_gpus = _best_use(table, "gpus", smallest_gpus, ASSUMED_GPU_SHAPE)
    of_cpus = _best_use(table, "cpus", smallest_cpus, ASSUMED_CPU_SHAPE)
    stranded_gpus = np.where(gpus > 0, np.maximum(0, gpus_free - of_gpus.used), 0)
    stranded_cpus = np.maximum(0, table.cpus_free - of_cpus.used)
    # Stranded GPUs count before stranded CPUs.
    lacking = _Lacking(table, stranded_cpus > 0, of_cpus, _CPUS_ORDER).of(smallest_cpus)
    lacking = np.where(
        stranded_gpus > 0, _Lacking(table, stranded_gpus > 0, of_gpus, _GPUS_ORDER).of(smallest_gpus), lacking
    )
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
        lacking=_LACKS[lacking],
        mig=mig,
        mig_free=node.mig_free() if mig else 0,
        gpu_share_free=gpu_share_free,
    )


class _Best:
    """Of each node the most units that copies of one shape can take, and what those copies take.

    Attributes:
        used: units.
        taken: of each resource, what the copies take.
        by_type: GPUs of each type that shapes which insist on it could take.
        known: where a shape may run at all.
    """

    def __init__(self, num_nodes: int) -> None:
        self.used: Counts = np.zeros(num_nodes, dtype=np.int64)
        self.taken = {name: np.zeros(num_nodes, dtype=np.int64) for name in RESOURCES}
        self.by_type: dict[str, Counts] = {}
        self.known: Mask = np.zeros(num_nodes, dtype=np.bool_)

    def take(self, where: Mask, used: Counts, copies: Counts, shape: Shape, needed: tuple[Counts, Counts]) -> None:
        """Compare a shape on the nodes where it may run, each of which gives it so many CPUs and so much memory."""
        cpus, memory_mb = copies * needed[0], copies * needed[1]
        # Of two that use the same, the one that leaves more CPUs, and of equal ones more memory.
        is_as_good, as_many_cpus = used == self.used, cpus == self.taken["CPUs"]
        leaves_more = (cpus < self.taken["CPUs"]) | (as_many_cpus & (memory_mb < self.taken["memory"]))
        is_better = where & (~self.known | (used > self.used) | (is_as_good & leaves_more))
        self.used = np.where(is_better, used, self.used)
        for name, amount in zip(RESOURCES, (copies * shape.gpus, cpus, memory_mb), strict=True):
            self.taken[name] = np.where(is_better, amount, self.taken[name])
        self.known = self.known | where


def _best_use(table: NodeTable, unit: str, shapes: Sequence[Shape], assumed: Shape) -> _Best:
    """The best use of each node; where no shape may run at all, that of the assumed one.

    Args:
        table: the nodes.
        unit: which counts, `gpus` or `cpus`.
        shapes: of pending jobs.
        assumed: see above.
    """
    best = _Best(len(table.nodes))
    by_type: dict[str, _Best] = {}
    for shape in shapes:
        use = _use(table, shape, unit)
        if use is not None:
            best.take(*use, shape, table.needed(shape))
            if unit == "gpus" and shape.gpu_type:
                by_type.setdefault(shape.gpu_type, _Best(len(table.nodes))).take(*use, shape, table.needed(shape))
    best.by_type = {gpu_type: use.used for gpu_type, use in by_type.items()}
    if len(by_type) > 1:
        # Those that insist on different types use them side by side.
        together = sum(best.by_type.values(), np.zeros_like(best.used))
        is_better = together > best.used
        best.used = np.where(is_better, together, best.used)
        for name in RESOURCES:
            taken = sum((use.taken[name] for use in by_type.values()), np.zeros_like(best.used))
            best.taken[name] = np.where(is_better, taken, best.taken[name])
    known = best.known
    use = _use(table, assumed, unit)
    if use is not None:
        best.take(use[0] & ~known, *use[1:], assumed, table.needed(assumed))
    best.known = known
    return best


def _use(table: NodeTable, shape: Shape, unit: str) -> tuple[Mask, Counts, Counts] | None:
    """Where a shape may run, how many units its copies can take there, and how many copies these are."""
    where = _may_run(table, shape)
    if not where.any():
        return None
    _, cpus_free = table.cpus_for(shape.partitions, shape.whole_nodes)
    rooms = [table.devices(shape.gpu_type)[1] // shape.gpus] if shape.gpus else []
    cpus, memory_mb = table.needed(shape)
    rooms += [cpus_free // np.maximum(1, cpus)] if shape.cpus else []
    rooms += [table.memory_free_mb // np.maximum(1, memory_mb)] if shape.memory_mb or shape.all_memory else []
    rooms += [free // count for _, count, _, free in table.gres_of(shape)]
    copies = np.minimum.reduce(rooms) if rooms else np.zeros_like(table.cpus)
    if shape.whose:
        copies = np.where(table.kept_from(shape.whose), 0, copies)
    # What a copy takes: of a node with two threads for each core, whole cores.
    taken = np.maximum(shape.cpus, cpus) if unit == "cpus" else getattr(shape, unit)
    used = copies * taken
    if unit == "cpus":
        used = np.minimum(used, table.cpus_free)
    if shape.whole_nodes or table.takes_whole_nodes(shape.partitions):
        free = table.cpus_free if unit == "cpus" else table.gpus_free
        used = np.where(copies > 0, free, 0)
    return where, used, copies


def _may_run(table: NodeTable, shape: Shape) -> Mask:
    """The nodes that could give what a shape asks for, were they empty."""
    cpus, _ = table.cpus_for(shape.partitions)
    needed, memory_mb = table.needed(shape)
    where = table.eligible(shape.partitions) & (cpus >= needed) & (table.memory_mb >= memory_mb) & table.laid_out(shape)
    for _, count, had, _ in table.gres_of(shape):
        where = where & (had >= count)
    if shape.required_nodes or shape.features or shape.excluded_nodes:
        where = where & table.asked_for(shape)
    return where & (table.devices(shape.gpu_type)[0] >= shape.gpus) if shape.gpus else where


# What a node lacks, by number; 0 is nothing. What stands first in an order is named where several would do: more of
# something else than what is stranded, and CPUs first, which data workers give.
_LACKS = ("", "CPUs", "memory", "GPUs", "CPUs and memory", "whole nodes", OTHER_USERS)
_CPUS, _MEMORY, _GPUS, _BOTH, _WHOLE, _OTHERS = range(1, 7)
_GPUS_ORDER, _CPUS_ORDER = (_CPUS, _MEMORY, _GPUS), (_GPUS, _MEMORY, _CPUS)


class _Lacking:
    """What would let one more pending job onto what is left of each node, when the best use is made of it.

    Args:
        table: the nodes.
        which: those in question.
        best: what is made of them already.
        order: resources, the one to name first at the front.
    """

    def __init__(self, table: NodeTable, which: Mask, best: _Best, order: Sequence[int]) -> None:
        self._table, self._best, self._order = table, best, order
        self._rows = np.flatnonzero(which)
        self._left_mb = (table.memory_free_mb - best.taken["memory"])[self._rows]
        self._is_known = best.known[self._rows]

    def of(self, shapes: Sequence[Shape]) -> Counts:
        """Of each node the number of what it lacks; where no shape may run, of what the assumed one lacks."""
        found = {number: np.zeros(len(self._rows), dtype=np.bool_) for number in range(len(_LACKS))}
        has_gpus = ~self._is_known
        for shape in shapes if len(self._rows) else ():
            where = _may_run(self._table, shape)[self._rows]
            if where.any():
                has_gpus |= where & (self._left_gpus(shape.gpu_type) >= shape.gpus if shape.gpus else True)
                for number, mask in self._lacks(shape, where):
                    found[number] |= mask
        assumed = ASSUMED_GPU_SHAPE if self._order is _GPUS_ORDER else ASSUMED_CPU_SHAPE
        for number, mask in self._lacks(assumed, ~self._is_known):
            found[number] |= mask
        lacking = np.zeros(len(self._table.nodes), dtype=np.int64)
        for number in reversed((*self._order, _BOTH, _WHOLE, _OTHERS)):
            lacking[self._rows[found[number]]] = number
        # Several things are short: without more GPUs no job can have those that are left, nor CPUs where there are too
        # few GPUs for any job.
        short = lacking[self._rows] == 0
        lacking[self._rows[short & has_gpus]] = _GPUS if self._order is _GPUS_ORDER else _CPUS
        lacking[self._rows[short & ~has_gpus]] = _GPUS
        # A job of another shape has room beside those of the best one.
        lacking[self._rows[found[0]]] = 0
        return lacking

    def _lacks(self, shape: Shape, where: Mask) -> Iterator[tuple[int, Mask]]:
        """Of what alone each of these nodes has too little left for a shape; 0 where it has enough of everything."""
        if shape.whose:
            kept = self._table.kept_from(shape.whose)[self._rows]
            yield _OTHERS, where & kept
            where = where & ~kept
        if shape.whole_nodes or self._table.takes_whole_nodes(shape.partitions):
            yield _WHOLE, where
            return
        _, cpus_free = self._table.cpus_for(shape.partitions)
        needed, memory_mb = self._table.needed(shape)
        cpus = (cpus_free - self._best.taken["CPUs"] >= needed)[self._rows]
        memory = self._left_mb >= memory_mb[self._rows]
        gpus = self._left_gpus(shape.gpu_type) >= shape.gpus if shape.gpus else np.ones_like(where)
        yield 0, where & gpus & memory & cpus
        yield _CPUS, where & gpus & memory & ~cpus
        yield _MEMORY, where & gpus & cpus & ~memory
        yield _GPUS, where & cpus & memory & ~gpus
        yield _BOTH, where & gpus & ~cpus & ~memory

    def _left_gpus(self, gpu_type: str) -> Counts:
        _, free = self._table.devices("")
        left = free - self._best.taken["GPUs"]
        if gpu_type:
            # What is taken of them may be of another type.
            _, of_type = self._table.devices(gpu_type)
            left = np.minimum(left, of_type - np.minimum(self._best.by_type.get(gpu_type, 0), self._best.taken["GPUs"]))
        return left[self._rows]


def _smallest(shapes: Sequence[Shape], unit: str) -> Sequence[Shape]:
    """The shapes that can make a difference: of those alike in the unit, none that is larger than another in the rest.

    Where many remain, those of most jobs do. This is exact up to `MAX_SHAPES`, and makes thousands of shapes cheap.
    """
    other = "cpus" if unit == "gpus" else "gpus"
    groups: dict[tuple[Hashable, ...], list[Shape]] = {}
    for shape in shapes:
        where = shape.partitions, shape.required_nodes, shape.features, shape.excluded_nodes
        how = (
            shape.whose,
            shape.whole_nodes,
            shape.gres,
            shape.layout,
            shape.cores,
            shape.memory_per_cpu_mb,
            shape.all_memory,
        )
        key = getattr(shape, unit), shape.gpu_type, where, shape.min_cpus, how, shape.whose
        groups.setdefault(key, []).append(shape)
    kept: list[Shape] = []
    for group in groups.values():
        least_mb: int | None = None
        for shape in sorted(group, key=lambda shape: (getattr(shape, other), shape.memory_mb)):
            if least_mb is None or shape.memory_mb < least_mb:
                kept.append(shape)
                least_mb = shape.memory_mb
    kept.sort(key=lambda shape: -shape.num_jobs)
    return kept[:MAX_SHAPES]


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
