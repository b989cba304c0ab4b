"""Where a job could run, and where it has room now: (nodes as arrays, what it asks for) -> masks. No I/O.

Made by `why.py` for each kind of request. Two jobs that ask alike have the same room, whenever they were submitted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from hetstream.slurm_plugin.client.model import Job
from hetstream.slurm_plugin.insight.node_table import Counts, Mask, NodeTable
from hetstream.slurm_plugin.insight.shapes import RESOURCES, Shape


class Kept(NamedTuple):
    """What reservations to come keep: of some nodes all, of others so many CPUs."""

    nodes: Mask
    cpus: Counts


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
        self.shape = shape
        self._table = table
        self._wanted = max(1, job.num_nodes)
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
        if job.exclusive == "USER":
            cpus_free = np.where(table.with_jobs_of_others(job), 0, cpus_free)
        if kept is not None:
            cpus_free = np.maximum(0, cpus_free - kept.cpus)
        self.free: dict[str, Counts] = {"CPUs": cpus_free, "memory": table.memory_free_mb}
        could = (cpus >= shape.cpus) & (table.memory_mb >= shape.memory_mb)
        self.enough: dict[str, Mask] = {}
        if shape.gpus:
            devices, self.free["GPUs"] = table.devices(shape.gpu_type)
            could = could & (devices >= shape.gpus)
            self.enough["GPUs"] = self.free["GPUs"] >= shape.gpus
        if shape.cpus:
            self.enough["CPUs"] = cpus_free >= shape.cpus
        if shape.memory_mb:
            self.enough["memory"] = table.memory_free_mb >= shape.memory_mb
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

    def is_enough(self, mask: Mask) -> bool:
        """Whether these nodes would do: as many as the job wants, with all that it names, and alike or side by side."""
        if not self._has_named or (self._named & ~mask).any():
            return False
        return any(
            np.count_nonzero(alike) >= self._wanted
            and not (self._named & ~alike).any()
            and (not self._is_contiguous or self._table.are_side_by_side(alike, self._wanted))
            for alike in [mask & choice for choice in self._table.alike(self.shape.features)] or [mask]
        )

    def short_alone(self) -> tuple[str, ...]:
        """The resources of which more of that one alone would let it start on so many nodes.

        GPUs are named last: where more of something else would do, it is that which keeps free GPUs from being used.
        """
        ordered = sorted(RESOURCES, key=lambda name: name == "GPUs")
        return tuple(name for name in ordered if name in self.enough and self.is_enough(self.enough_but(name)))

    def short(self) -> tuple[str, ...]:
        """The resources of which some node has too little."""
        return tuple(name for name in RESOURCES if name in self.enough and (self.possible & ~self.enough[name]).any())

    def most_free(self, resource: str) -> tuple[int, str, int]:
        """Of the nodes with enough of all other resources: the most free of this one, where, and how many they are.

        Where the job names nodes that have no room, of these.
        """
        others = self.enough_but(resource)
        full = self._named & ~self.fits
        places = np.flatnonzero(others & full if (others & full).any() else others)
        best = int(places[np.argmax(self.free[resource][places])])
        return int(self.free[resource][best]), self._table.nodes[best].name, len(places)
