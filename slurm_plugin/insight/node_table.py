"""The nodes of a cluster as arrays: what each has and what is free of it, for jobs of one kind. No I/O.

Used by `fragmentation.py` and `why.py`, which ask the same of thousands of nodes for thousands of shapes. What a
partition allows is part of the answer: MaxCPUsPerNode, whole nodes (OverSubscribe=EXCLUSIVE), and its nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetstream.slurm_plugin.client.constraint import alternatives, meets
from hetstream.slurm_plugin.client.model import SHARING, Job, Node, Partition, total
from hetstream.slurm_plugin.insight.shapes import Shape, Whose

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
        """The nodes of these partitions (of none: all) that are in one of the job's reservations, or in none."""
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
        """The nodes of these partitions, whoever they are reserved for."""
        return self._in(partitions)

    def named(self, names: Iterable[str]) -> Mask:
        """The nodes with these names."""
        return self.at([self._places[name] for name in names if name in self._places])

    def amounts(self, of_nodes: Iterable[tuple[str, int]]) -> Counts:
        """The sums of what is said of nodes by their names."""
        found = np.zeros_like(self.cpus)
        for name, amount in of_nodes:
            if name in self._places:
                found[self._places[name]] += amount
        return found

    def asked_for(self, shape: Shape) -> Mask:
        """The nodes that `--nodelist`, `--exclude` and `--constraint` leave."""
        mask = self.named(shape.required_nodes) if shape.required_nodes else np.ones(len(self.nodes), dtype=np.bool_)
        if shape.excluded_nodes:
            mask = mask & ~self.named(shape.excluded_nodes)
        choices = self.alike(shape.features)
        return mask & np.logical_or.reduce(choices) if choices else mask

    def alike(self, features: str) -> list[Mask]:
        """The nodes that meet each of the alternatives of which all nodes of a job must meet the same one."""
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
        """The nodes where it cannot start, whatever is free: others have them, or it wants them, for one user or label.

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
        """Whether it matters whose the pending jobs of these groups are; see `kept_from`."""
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
        """Whether a job in these partitions gets whole nodes only."""
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
        """What a job may ask for at all of a GRES that is no GPU, of one type or of all, and what it could have now.

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
        """The CPUs and the memory that each node gives to a job of this shape, which may be more than it asks for.

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
        """Where so few cores are busy that as many sockets as a shape names have as many free, wherever those are."""
        if max(shape.layout[:2]) < 2:
            return np.ones(len(self.nodes), dtype=np.bool_)
        bad_sockets = np.maximum(1, self._layout[0] - max(1, shape.layout[0]) + 1)
        bad_cores = np.maximum(1, self._layout[1] - max(1, shape.layout[1]) + 1)
        mask: Mask = cpus_free >= self.cpus - (bad_sockets * bad_cores - 1) * self.cpus_per_core
        return mask

    def laid_out(self, shape: Shape) -> Mask:
        """The nodes with as many sockets, cores and threads, and as much disk, as a shape names."""
        mask = self._tmp_disk_mb >= shape.tmp_disk_mb
        for wanted, had in zip(shape.layout, self._layout, strict=True):
            if wanted > 1:
                mask = mask & ((had >= wanted) | (had == 0))
        return mask

    def chosen(self, mask: Mask) -> list[Node]:
        """The nodes of a mask."""
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
        """The nodes with these numbers."""
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
