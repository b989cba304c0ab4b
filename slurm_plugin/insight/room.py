"""Where a job could run, and where it has room now: (nodes as arrays, what it asks for) -> masks. No I/O.

Made by `why.py` for each kind of request. Two jobs that ask alike have the same room, whenever they were submitted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from hetstream.slurm_plugin.client.model import SHARING, Job
from hetstream.slurm_plugin.insight.node_table import Counts, Mask, NodeTable
from hetstream.slurm_plugin.insight.shapes import RESOURCES, Least, Shape, gres_words

# Nodes that others have for themselves, or that it wants without others: `--exclusive=user`, ExclusiveUser=YES, labels.
OTHER_USERS = "other users"
# Nodes on which jobs that have ended still complete.
COMPLETING = "completing"
# GRES that are no GPUs, and types of GPUs where a job wants several, are told as they are.
_ALL = (*RESOURCES, "GRES", OTHER_USERS, COMPLETING)


class Kept(NamedTuple):
    """What reservations to come keep: of some nodes all, of others so many CPUs."""

    nodes: Mask
    cpus: Counts


class Free(NamedTuple):
    """What of one resource is free on the nodes that could run a job if they were empty.

    Attributes:
        what: the resource, such as `CPUs`, `a100 GPUs` or `shard:2`.
        amount: on all of them together.
        num_nodes: on how many.
        num_enough: on how many of these as much as the job asks of a node.
    """

    what: str
    amount: int
    num_nodes: int
    num_enough: int


class Room:
    """The nodes of a table, for one request.

    Args:
        table: nodes.
        shape: what each node must give.
        job: where it may run.
        up: the partitions in which jobs start; None asks for none of it.
        kept: nodes, and CPUs of others, that reservations keep from the job: they begin before it would have to end.

    Attributes:
        shape: as given.
        eligible: nodes that it may use, whatever they have.
        possible: of those the ones that could give what it asks for if they were empty.
        reserved: nodes that could give it, too, and are reserved for others.
        free: of each resource what a node could give now.
        enough: of each resource that it asks for, whether that is enough.
        fits: where it has room now.
        needs_whole_nodes: it gets whole nodes only, and there are not enough idle ones for any other reason to matter.
    """

    def __init__(
        self, table: NodeTable, shape: Shape, job: Job, up: Collection[str] | None, kept: Kept | None = None
    ) -> None:
        names = job.partitions if up is None else tuple(name for name in job.partitions if name in up)
        self.shape, self._names = shape, names
        self._table = table
        self._wanted = shape.num_nodes
        self._is_contiguous = job.is_contiguous and self._wanted > 1
        self._named = table.named(job.required_nodes)
        self._has_named = np.count_nonzero(self._named) == len(set(job.required_nodes))
        anywhere = table.everywhere(names) & table.asked_for(shape)
        mine = table.eligible(names, job.reservation)
        self.needs_whole_nodes = shape.whole_nodes or table.takes_whole_nodes(names)
        if kept is not None:
            mine = mine & ~(kept.nodes | (kept.cpus > 0) if self.needs_whole_nodes else kept.nodes)
        self.eligible: Mask = anywhere & mine
        cpus, cpus_free = table.cpus_for(names, shape.whole_nodes)
        if not shape.gpus and not any(gres.name in ("gpu", *SHARING) for gres in shape.gres):
            cpus, cpus_free = table.without_gpu_cores(cpus, cpus_free)
        if kept is not None:
            cpus_free = np.maximum(0, cpus_free - kept.cpus)
        self._cpus = cpus
        self.free: dict[str, Counts] = {"CPUs": cpus_free, "memory": table.memory_free_mb}
        needed, needed_mb = table.needed(shape)
        could = (cpus >= needed) & (table.memory_mb >= needed_mb) & table.laid_out(shape)
        self._needed = {"CPUs": needed, "memory": needed_mb, "GPUs": np.full_like(needed, shape.gpus)}
        self.enough: dict[str, Mask] = {}
        if shape.gpus:
            devices, self.free["GPUs"] = table.devices(shape.gpu_type)
            could = could & (devices >= shape.gpus)
            self.enough["GPUs"] = self.free["GPUs"] >= shape.gpus
        if shape.cpus:
            self.enough["CPUs"] = cpus_free >= needed
        if shape.memory_mb or shape.all_memory:
            self.enough["memory"] = table.memory_free_mb >= needed_mb
        for resource, count, had, free in table.gres_of(shape):
            could = could & (had >= count)
            self.enough[resource] = self.enough.get(resource, np.ones_like(could)) & (free >= count)
        if (others := table.kept_from(job)).any():
            self.enough[OTHER_USERS] = ~others
        if table.completing.any():
            self.enough[COMPLETING] = ~table.completing
        self.possible: Mask = self.eligible & could
        self.reserved: Mask = anywhere & ~mine & could
        self.fits: Mask = self.enough_but("")

    def enough_but(self, resource: str) -> Mask:
        """Where it has room but for one resource, of which there may be too little."""
        mask = self.possible
        for name, enough in self.enough.items():
            if name != resource:
                mask = mask & enough
        return mask

    @property
    def fits_for_certain(self) -> Mask:
        """Of `fits` where the sockets that it asks for are free, wherever the busy cores are."""
        return self.fits & self._table.has_sockets_free(self.shape, self.free["CPUs"])

    def is_enough(self, mask: Mask) -> bool:
        """Whether these nodes would do: as many as the job wants, with all that it names, and alike or side by side."""
        return self._has_named and any(
            np.count_nonzero(alike) >= self._wanted
            and not (self._named & ~alike).any()
            and (not self._is_contiguous or len(self._table.side_by_side(alike, self._wanted)))
            for alike in self._in_one_way(mask)
        )

    def chosen(self) -> Mask:
        """As many nodes with room as the job wants, with all that it names, alike or side by side; none if too few."""
        for alike in self._in_one_way(self.fits):
            places = np.flatnonzero(alike)
            if len(places) < self._wanted or (self._named & ~alike).any():
                continue
            if self._is_contiguous:
                places = self._table.side_by_side(alike, self._wanted)
            else:
                places = places[np.argsort(~self._named[places], kind="stable")]
            if len(places):
                return self._table.at(places[: self._wanted].tolist())
        return np.zeros_like(self.fits)

    def _in_one_way(self, mask: Mask) -> list[Mask]:
        """Of these nodes those that a job may have at once: of one partition, and with the same features."""
        places = [mask & self._table.everywhere([name]) for name in self._names] if len(self._names) > 1 else [mask]
        choices = self._table.alike(self.shape.features)
        return [place & choice for place in places for choice in choices] if choices else places

    def short_alone(self) -> tuple[str, ...]:
        """The resources of which more of that one alone would let it start on so many nodes.

        GPUs are named last: where more of something else would do, it is that which keeps free GPUs from being used.
        """
        ordered = sorted(_ALL, key=lambda name: name == "GPUs")
        return tuple(name for name in ordered if name in self.enough and self.is_enough(self.enough_but(name)))

    def short(self) -> tuple[str, ...]:
        """The resources of which some node has too little."""
        return tuple(name for name in _ALL if name in self.enough and (self.possible & ~self.enough[name]).any())

    @property
    def scarcest(self) -> str:
        """Of the resources of which some node has too little the one that the fewest nodes have enough of.

        Nodes on which jobs complete alone end that by themselves.
        """
        short = [name for name in self.short() if name != COMPLETING]
        return min(short, key=lambda name: np.count_nonzero(self.possible & self.enough[name]), default="CPUs")

    @property
    def is_enough_apart(self) -> bool:
        """Whether enough nodes have enough of each resource, and not the same nodes of all."""
        return all(self.is_enough(self.possible & enough) for enough in self.enough.values())

    @property
    def num_kept(self) -> int:
        """How many nodes that could run it others have for themselves; see `OTHER_USERS`."""
        return int(np.count_nonzero(self.possible & ~self.enough.get(OTHER_USERS, self.possible)))

    @property
    def num_completing(self) -> int:
        """Of the others on how many jobs that have ended still complete."""
        others = self.possible & self.enough.get(OTHER_USERS, self.possible)
        return int(np.count_nonzero(others & ~self.enough.get(COMPLETING, self.possible)))

    def free_in_all(self) -> list[Free]:
        """What is free of each resource that it asks for, on nodes where Slurm would start it."""
        mine = self.possible & self.enough.get(OTHER_USERS, self.possible) & self.enough.get(COMPLETING, self.possible)
        kind = f"{self.shape.gpu_type} GPUs" if self.shape.gpu_type else "GPUs"
        wanted = [
            (kind if name == "GPUs" else name, self.free[name], self.free[name] >= self._needed[name])
            for name in RESOURCES
            if name in self.enough and name in self.free
        ]
        for gres, (_, number, _, free) in zip(self.shape.gres, self._table.gres_of(self.shape), strict=True):
            wanted.append((gres_words(gres), free, free >= number))
        return [
            Free(what, int(free[mine].sum()), int((free[mine] > 0).sum()), int(enough[mine].sum()))
            for what, free, enough in wanted
        ]

    def lacks_together(self, least: Least) -> tuple[str, ...]:
        """What so many of these nodes as the job may have do not have together, if they were empty.

        The room is one for `least.of_node`. Nothing said means that they could do, in some division or other.
        """
        wanted = self._together(least, now=False)
        found = [kind for kind, number, has in wanted if _most_of(has, self.possible, least.max_nodes) < number]
        return tuple(dict.fromkeys(found))

    def lacks_together_now(self, least: Least, most: int | None) -> tuple[str, ...]:
        """What is too little of what is free on them now; see `most_nodes_of`.

        Nothing said means that the nodes with most of one thing have enough of all.
        """
        if self._is_contiguous or not self.is_enough(self.fits):
            return (self.scarcest,)
        wanted = self._together(least, now=True)
        for mask in self._in_one_way(self.fits):
            for _, _, order in wanted:
                chosen = np.flatnonzero(mask)
                chosen = chosen[np.argsort(-order[chosen], kind="stable")][:most]
                named = not (self._named[np.setdiff1d(np.arange(len(mask)), chosen)]).any()
                if named and all(has[chosen].sum() >= number for _, number, has in wanted):
                    return ()
        found = [kind for kind, number, has in wanted if _most_of(has, self.fits, most) < number]
        return tuple(dict.fromkeys(found))[:1] or ("CPUs",)

    def _together(self, least: Least, *, now: bool) -> list[tuple[str, int, Counts]]:
        """Of all that a job needs on its nodes together: the resource, how much, and what each node has or has free."""
        shape, table = self.shape, self._table
        threads = np.minimum(table.cpus_per_core, shape.layout[2] or table.cpus_per_core)
        cpus = (self.free["CPUs"] if now else self._cpus) // table.cpus_per_core * threads
        cpus = np.where(threads < table.cpus_per_core, cpus, self.free["CPUs"] if now else self._cpus)
        memory_mb = table.memory_free_mb if now else table.memory_mb
        tasks = cpus // max(1, shape.cpus)
        if least.task_memory_mb:
            tasks = np.minimum(tasks, memory_mb // least.task_memory_mb)
        for gres in least.task_gres:
            counts = table.devices(gres.type) if gres.name == "gpu" else table.gres(gres.name, gres.type)
            tasks = np.minimum(tasks, counts[now] // gres.count)
        if now and (per_node := shape.min_cpus // max(1, shape.cpus)) > 1:
            # As --ntasks-per-node says it: so many at the most, and where there is no memory for as many, none.
            tasks = np.where(memory_mb < per_node * least.task_memory_mb, 0, np.minimum(tasks, per_node))
        if now and least.tasks_per_core:
            tasks = np.minimum(tasks, cpus // table.cpus_per_core * least.tasks_per_core)
        wanted = [("CPUs", least.cpus, cpus), ("CPUs", least.tasks, tasks), ("memory", least.memory_mb, memory_mb)]
        wanted.append(("GPUs", least.gpus, table.devices("")[now]))
        for gres in least.gres:
            counts = table.devices(gres.type) if gres.name == "gpu" else table.gres(gres.name, gres.type)
            wanted.append(("GPUs" if gres.name == "gpu" else "GRES", gres.count, counts[now]))
        return wanted

    def most_free(self, resource: str) -> tuple[int, int, str, int]:
        """Of the nodes with enough of all other resources the one with most free of this.

        Where the job names nodes that have no room, of these.

        Returns:
            What it would give to the job, what is free there, its name, and how many such nodes there are.
        """
        others = self.enough_but(resource)
        full = self._named & ~self.fits
        places = np.flatnonzero(others & full if (others & full).any() else others)
        best = int(places[np.argmax(self.free[resource][places])])
        free, needed = int(self.free[resource][best]), int(self._needed[resource][best])
        return needed, free, self._table.nodes[best].name, len(places)


def _most_of(has: Counts, where: Mask, most: int | None) -> int:
    """What so many of these nodes have together, at the most."""
    return int(np.sort(has[where])[::-1][:most].sum())
