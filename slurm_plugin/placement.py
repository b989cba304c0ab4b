"""On which nodes: whole jobs, gangs and data workers. Pure functions over NumPy arrays; nothing here knows Slurm.

A whole job goes where one of several placements, which have names, puts it by what nodes have free: with several GPUs
on one node if any fits, else on the fewest.

A job's data workers go to the trainer's nodes first, then where least other traffic is (GoldMiner, 3.4.3). A data
worker on another node sends its batches through both nodes' links. A node's budget for that is a share of its link:
beyond it batches would compete with gradients. A job whose batches need more than the budget has its data workers
beside the trainer, or fewer of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# What nodes have free, as arrays, and what a job asks of one node. Only `Nodes` changes anything: by `take`,
# `give_back` and, for books that are kept elsewhere, `set_free`.
#
# Amounts are whole numbers, in thousandths of a CPU and of a GPU, so that what was taken and given back is what it was.

Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]

WHOLE = 1000


@dataclass(frozen=True, slots=True)
class Shape:
    """What one node must give.

    Attributes:
        cpus: in thousandths.
        memory_mb: in MB.
        gpus: how many devices; 0 for none.
        share: of each device, in thousandths: 1000 but for a part of one.
        gpu_types: codes of the types that will do; empty: any.
    """

    cpus: int
    memory_mb: int = 0
    gpus: int = 0
    share: int = WHOLE
    gpu_types: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if min(self.cpus, self.memory_mb, self.gpus) < 0 or not 0 < self.share <= WHOLE:
            raise ValueError(f"{self}: amounts are not negative, a share is between 1 and {WHOLE}")
        if self.gpus != 1 and self.share != WHOLE:
            raise ValueError(f"{self}: a part of a GPU is a part of one")

    @property
    def gpu_total(self) -> int:
        """Thousandths of GPUs in all."""
        return self.gpus * self.share


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a job goes.

    Attributes:
        node: index.
        devices: indices of its GPUs.
    """

    node: int
    devices: tuple[int, ...] = ()


class Nodes:
    """A cluster.

    Args:
        cpus: of each node, in thousandths, shape (n,).
        memory_mb: shape (n,).
        num_gpus: devices of each node, shape (n,).
        gpu_type: code of their type, shape (n,); any number where there are none.

    Attributes:
        cpus, memory_mb, num_gpus, gpu_type: as given.
        cpus_free, memory_free_mb: shape (n,).
        gpus_free: thousandths of each device, shape (n, d); 0 also where a node has fewer devices.
        version: grows with each change of a node, shape (n,): who keeps figures of nodes sees which are old.
    """

    def __init__(
        self,
        cpus: Sequence[int] | Counts,
        memory_mb: Sequence[int] | Counts,
        num_gpus: Sequence[int] | Counts,
        gpu_type: Sequence[int] | Counts | None = None,
    ) -> None:
        self.cpus = np.array(cpus, dtype=np.int64)
        self.memory_mb = np.array(memory_mb, dtype=np.int64)
        self.num_gpus = np.array(num_gpus, dtype=np.int64)
        self.gpu_type = np.zeros(len(self.cpus), np.int64) if gpu_type is None else np.array(gpu_type, dtype=np.int64)
        self.cpus_free, self.memory_free_mb = self.cpus.copy(), self.memory_mb.copy()
        devices = np.arange(max(1, int(self.num_gpus.max(initial=0))))
        self.gpus_free: Counts = np.where(devices < self.num_gpus[:, None], WHOLE, 0).astype(np.int64)
        self.version = np.zeros(len(self.cpus), np.int64)
        self._clock = 0

    def __len__(self) -> int:
        return len(self.cpus)

    def fits(self, shape: Shape) -> Mask:
        """Return which nodes have room, shape (n,)."""
        found: Mask = (self.cpus_free >= shape.cpus) & (self.memory_free_mb >= shape.memory_mb)
        if shape.gpus:
            found &= (self.gpus_free >= shape.share).sum(axis=1) >= shape.gpus
            if shape.gpu_types:
                found &= np.isin(self.gpu_type, list(shape.gpu_types))
        return found

    def devices(self, node: int, shape: Shape) -> tuple[int, ...]:
        """Return which devices of a node with room a job would get: of a part the fullest that fits, else the first
        whole.
        """
        if not shape.gpus:
            return ()
        free = self.gpus_free[node]
        able = np.flatnonzero(free >= shape.share)
        if shape.share < WHOLE:
            able = able[np.argsort(free[able], kind="stable")]
        return tuple(int(device) for device in able[: shape.gpus])

    def take(self, spot: Spot, shape: Shape) -> None:
        """Give a job what it asks for.

        Raises:
            ValueError: there is no room; nothing is changed.
        """
        free = self.gpus_free[spot.node, list(spot.devices)]
        fits = self.cpus_free[spot.node] >= shape.cpus and self.memory_free_mb[spot.node] >= shape.memory_mb
        if not fits or len(spot.devices) != shape.gpus or (free < shape.share).any():
            raise ValueError(f"node {spot.node} has no room for {shape}")
        self._change(spot, shape, 1)

    def give_back(self, spot: Spot, shape: Shape) -> None:
        """Take from a job what it had.

        Raises:
            ValueError: the node would have more than it has; nothing is changed.
        """
        free = self.gpus_free[spot.node, list(spot.devices)]
        too_much = (
            self.cpus_free[spot.node] + shape.cpus > self.cpus[spot.node]
            or self.memory_free_mb[spot.node] + shape.memory_mb > self.memory_mb[spot.node]
            or (free + shape.share > WHOLE).any()
        )
        if too_much:
            raise ValueError(f"node {spot.node} did not give {shape}")
        self._change(spot, shape, -1)

    def set_free(self, node: int, cpus: int, memory_mb: int, num_gpus: int) -> None:
        """What a node has free, where somebody else keeps the books, of whole GPUs alone.

        Args:
            node: index.
            cpus: in thousandths; negative for a node that is away.
            memory_mb: in MB.
            num_gpus: devices that are free.
        """
        self.cpus_free[node], self.memory_free_mb[node] = cpus, memory_mb
        self.gpus_free[node] = np.where(np.arange(self.gpus_free.shape[1]) < num_gpus, WHOLE, 0)
        self._touch(node)

    def _change(self, spot: Spot, shape: Shape, sign: int) -> None:
        self.cpus_free[spot.node] -= sign * shape.cpus
        self.memory_free_mb[spot.node] -= sign * shape.memory_mb
        self.gpus_free[spot.node, list(spot.devices)] -= sign * shape.share
        self._touch(spot.node)

    def _touch(self, node: int) -> None:
        self._clock += 1
        self.version[node] = self._clock

    @property
    def gpu_allocation(self) -> float:
        """Share of all GPUs that is given out, parts counted as parts; 0 without GPUs."""
        total = int(self.num_gpus.sum()) * WHOLE
        return 1 - float(self.gpus_free.sum()) / total if total else 0.0

    def indicator(self) -> NDArray[np.float64]:
        """GoldMiner's indicator of each node with GPUs: share of free CPUs less share of free GPUs."""
        here = self.num_gpus > 0
        gpus = self.gpus_free[here].sum(axis=1) / (WHOLE * self.num_gpus[here])
        found: NDArray[np.float64] = self.cpus_free[here] / np.maximum(1, self.cpus[here]) - gpus
        return found


# A placement by one score for each node: the lowest among those with room. Pure; used by the simple placements.

Score = Callable[[Nodes, Shape, NDArray[np.intp]], NDArray[np.float64]]
"""Nodes, shape, indices of those with room -> a score for each of these."""


class Scored:
    """Chooses nodes of one cluster.

    Args:
        nodes: the cluster, which may change between two calls.
        score: lower is better.
    """

    def __init__(self, nodes: Nodes, score: Score) -> None:
        self._nodes = nodes
        self._score = score

    def choose(self, shape: Shape) -> Spot | None:
        """Return the node and the devices for a job, the first of equal ones; None if no node has room."""
        able = np.flatnonzero(self._nodes.fits(shape))
        if not len(able):
            return None
        node = int(able[np.argmin(self._score(self._nodes, shape, able))])
        return Spot(node, self._nodes.devices(node, shape))


def free_shares(nodes: Nodes, able: NDArray[np.intp]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Free CPUs and GPUs of nodes, each over what the largest node of the cluster has."""
    cpus = nodes.cpus_free[able] / max(1, int(nodes.cpus.max(initial=1)))
    gpus = nodes.gpus_free[able].sum(axis=1) / max(1, 1000 * int(nodes.num_gpus.max(initial=1)))
    return cpus, gpus


# Best fit: the node on which least is left. Pure.


def best_fit(nodes: Nodes, _: Shape, able: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return what is free, CPUs and GPUs alike: what the job takes is the same everywhere."""
    cpus, gpus = free_shares(nodes, able)
    found: NDArray[np.float64] = cpus + gpus
    return found


# Dot product of what a job asks for and what is free, the smallest first. Pure.
#
# Tetris takes the largest, which spreads jobs over empty nodes; FGD's experiments, whose figures this is compared with,
# take the smallest: of what the job needs much, little is left free.


def dot_product(nodes: Nodes, shape: Shape, able: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the dot product, each side over what the largest node has."""
    cpus, gpus = free_shares(nodes, able)
    asked_cpus = shape.cpus / max(1, int(nodes.cpus.max(initial=1)))
    asked_gpus = shape.gpu_total / max(1, 1000 * int(nodes.num_gpus.max(initial=1)))
    found: NDArray[np.float64] = asked_cpus * cpus + asked_gpus * gpus
    return found


# Any node with room, by a seeded generator: the baseline. Pure but for the generator's state.


def random_fit(seed: int) -> Score:
    """Return a score that is drawn anew for each job."""
    generator = np.random.default_rng(seed)

    def score(nodes: Nodes, shape: Shape, able: NDArray[np.intp]) -> NDArray[np.float64]:
        del nodes, shape
        return generator.random(len(able))

    return score


# How much of nodes' free GPUs typical jobs could not use: FGD's measure of fragmentation (ATC'23). Pure.
#
# For one typical shape all free GPUs of a node are a fragment if the shape does not fit there, else only those devices
# that are too full for it. A node's measure is the mean over the typical shapes, by how frequent each is. A shape
# without GPUs makes all free GPUs a fragment on every node, so it moves no choice.

# The most frequent shapes that make up this share of all jobs stand for all.
COVERED = 0.95


class TypicalShapes:
    """The most frequent shapes, as arrays.

    Args:
        shapes: of all jobs that are expected, such as those of the last months.
        covered: share of them that the most frequent shapes must make up.

    Attributes:
        shapes: the most frequent first.
        frequency: of each, shape (m,); they sum to 1.
    """

    def __init__(self, shapes: Iterable[Shape], covered: float = COVERED) -> None:
        # Memory is left out: it is seldom what a GPU's neighbour lacks, and would make every shape its own.
        counted = Counter(Shape(shape.cpus, 0, shape.gpus, shape.share, shape.gpu_types) for shape in shapes)
        kept: list[tuple[Shape, int]] = []
        num = 0
        for shape, times in counted.most_common():
            if num >= covered * counted.total():
                break
            kept.append((shape, times))
            num += times
        self.shapes = tuple(shape for shape, _ in kept)
        self.frequency = np.array([times / num for _, times in kept], dtype=np.float64)
        self._cpus = np.array([shape.cpus for shape in self.shapes], dtype=np.int64)
        self._gpus = np.array([shape.gpus for shape in self.shapes], dtype=np.int64)
        self._shares, self._share_of = np.unique(
            np.array([shape.share for shape in self.shapes], dtype=np.int64), return_inverse=True
        )
        self._types = [shape.gpu_types for shape in self.shapes]
        self._is_typed = any(self._types)

    def fragments(self, cpus_free: Counts, gpus_free: Counts, gpu_type: Counts) -> NDArray[np.float64]:
        """Return the measure of node states, in thousandths of GPUs.

        Args:
            cpus_free: shape (k,).
            gpus_free: shape (k, d).
            gpu_type: shape (k,).
        """
        total = gpus_free.sum(axis=1)
        if not len(self.shapes):
            return np.zeros(len(total))
        # Few different shares are asked for, so devices are compared with each of those once.
        able = gpus_free[:, None, :] >= self._shares[None, :, None]
        num_able = able.sum(axis=2)
        too_full = total[:, None] - (gpus_free[:, None, :] * able).sum(axis=2)
        fits = (num_able[:, self._share_of] >= self._gpus) & (cpus_free[:, None] >= self._cpus) & (self._gpus > 0)
        if self._is_typed:
            for place, types in enumerate(self._types):
                if types:
                    fits[:, place] &= np.isin(gpu_type, list(types))
        lost = np.where(fits, too_full[:, self._share_of], total[:, None])
        found: NDArray[np.float64] = lost @ self.frequency
        return found


# Fragmentation gradient descent (FGD, ATC'23): where the measure of fragmentation grows least. Pure, incremental.
#
# Many nodes are nearly alike by that measure: on an idle node one more job makes no fragment. A little of what best fit
# counts decides among those; without it jobs spread over idle nodes, and five points of the GPUs are lost in the end.
#
# What a placement of each shape would change is kept for each node, and made anew only for nodes that have changed
# since the shape was last asked for: after one placement that is one node. Nodes in the same state are looked at once.

Floats = NDArray[np.float64]
# What the free resources of the largest node weigh, in thousandths of a GPU: it decides where the measure hardly does.
_FIT_WEIGHT = 60.0


@dataclass
class _Kept:
    """Of one shape.

    Attributes:
        growth: of the measure by a placement on each node, shape (n,); infinite where there is no room.
        device: that a part of a GPU would take there, shape (n,).
        version: of the nodes that these are for, shape (n,); -1: of none.
    """

    growth: Floats
    device: Counts
    version: Counts


class FragmentationGradient:
    """Chooses nodes of one cluster.

    Args:
        nodes: the cluster, which may change between two calls.
        typical: jobs that are expected.
    """

    def __init__(self, nodes: Nodes, typical: TypicalShapes) -> None:
        self._nodes = nodes
        self._typical = typical
        self._kept: dict[Shape, _Kept] = {}

    def choose(self, shape: Shape) -> Spot | None:
        """Return the node and the devices for a job, the first of equal ones; None if no node has room."""
        kept = self._up_to_date(shape)
        able = np.flatnonzero(np.isfinite(kept.growth))
        if not len(able):
            return None
        cpus, gpus = free_shares(self._nodes, able)
        node = int(able[np.argmin(kept.growth[able] + _FIT_WEIGHT * (cpus + gpus))])
        if shape.gpus and shape.share < WHOLE:
            return Spot(node, (int(kept.device[node]),))
        return Spot(node, self._nodes.devices(node, shape))

    def _up_to_date(self, shape: Shape) -> _Kept:
        num = len(self._nodes)
        kept = self._kept.get(shape)
        if kept is None:
            kept = _Kept(np.full(num, np.inf), np.zeros(num, np.int64), np.full(num, -1, np.int64))
            self._kept[shape] = kept
        old = np.flatnonzero(kept.version != self._nodes.version)
        if len(old):
            kept.growth[old], kept.device[old] = self._growth(shape, old)
            kept.version[old] = self._nodes.version[old]
        return kept

    def _growth(self, shape: Shape, places: NDArray[np.intp]) -> tuple[Floats, Counts]:
        """What a placement changes on these nodes, and on which device; equal states are one."""
        nodes = self._nodes
        fits = nodes.fits(shape)[places]
        growth, device = np.full(len(places), np.inf), np.zeros(len(places), np.int64)
        if not fits.any():
            return growth, device
        able = places[fits]
        states = np.column_stack([nodes.cpus_free[able], nodes.gpu_type[able], nodes.gpus_free[able]])
        if len(able) > 1:
            states, same = np.unique(states, axis=0, return_inverse=True)
            same = same.ravel()
        else:
            same = np.zeros(1, np.intp)
        cpus, types, gpus = states[:, 0], states[:, 1], states[:, 2:]
        before = self._typical.fragments(cpus, gpus, types)
        if shape.gpus and shape.share < WHOLE:
            found, chosen = self._part(shape, cpus, gpus, types)
        else:
            # The first whole devices are taken: which ones makes no difference.
            whole = gpus >= WHOLE
            taken = whole & (np.cumsum(whole, axis=1) <= shape.gpus)
            after = np.where(taken, gpus - WHOLE, gpus) if shape.gpus else gpus
            found, chosen = self._typical.fragments(cpus - shape.cpus, after, types), np.zeros(len(cpus), np.int64)
        growth[fits], device[fits] = (found - before)[same], chosen[same]
        return growth, device

    def _part(self, shape: Shape, cpus: Counts, gpus: Counts, types: Counts) -> tuple[Floats, Counts]:
        """The measure after a part of a GPU is taken from the best device, and which that is."""
        num, num_devices = gpus.shape
        after = np.repeat(gpus[:, None, :], num_devices, axis=1)
        every = np.arange(num_devices)
        after[:, every, every] -= shape.share
        measure = self._typical.fragments(
            np.repeat(cpus - shape.cpus, num_devices), after.reshape(-1, num_devices), np.repeat(types, num_devices)
        ).reshape(num, num_devices)
        measure[gpus < shape.share] = np.inf
        best = np.argmin(measure, axis=1)
        return measure[np.arange(num), best], best.astype(np.int64)


class Placement(Protocol):
    """Chooses nodes of the cluster that it was made for."""

    def choose(self, shape: Shape) -> Spot | None:
        """Return the node and the devices for a job; None if no node has room. Nothing is taken."""


@dataclass(frozen=True)
class Choice:
    """One placement.

    Attributes:
        meaning: one line.
        make: the cluster, jobs that are expected, a seed -> the placement.
    """

    meaning: str
    make: Callable[[Nodes, TypicalShapes, int], Placement]


CHOICES: Mapping[str, Choice] = {
    "fgd": Choice(
        "where typical jobs lose least (fragmentation gradient descent)",
        lambda nodes, typical, _: FragmentationGradient(nodes, typical),
    ),
    "best-fit": Choice("where least is left", lambda nodes, _, __: Scored(nodes, best_fit)),
    "dot-product": Choice(
        "where least is free of what the job asks for", lambda nodes, _, __: Scored(nodes, dot_product)
    ),
    "random": Choice("anywhere", lambda nodes, _, seed: Scored(nodes, random_fit(seed))),
}


# A job of several GPUs: on one node if any has room, else on the fewest. All of it or nothing. Pure.


def place_gang(nodes: Nodes, per_gpu: Shape, num_gpus: int, placement: Placement) -> list[tuple[Spot, Shape]] | None:
    """Return where a job goes, and what each node gives; None if it does not fit now. Nothing is taken.

    Args:
        nodes: the cluster.
        per_gpu: what each GPU comes with: CPUs and memory.
        num_gpus: of the job, at least 1.
        placement: chooses among nodes that hold all of it.
    """
    if num_gpus < 1 or per_gpu.gpus != 1 or per_gpu.share != WHOLE:
        raise ValueError("a gang has whole GPUs, at least one, described one by one")
    whole = _times(per_gpu, num_gpus)
    spot = placement.choose(whole)
    if spot is not None:
        return [(spot, whole)]
    room = room_for(nodes, per_gpu)
    # The largest rooms first need the fewest nodes; of the last node only as much as is still missing is used, so the
    # smallest that holds the rest is taken there.
    order = np.argsort(-room, kind="stable")
    held = np.cumsum(room[order])
    enough = int(np.searchsorted(held, num_gpus))
    if enough >= len(order):
        return None
    left = num_gpus - (int(held[enough - 1]) if enough else 0)
    fitting = order[enough:][room[order[enough:]] >= left]
    last = int(fitting[np.argmin(room[fitting])])
    parts = [(int(node), int(room[node])) for node in order[:enough]] + [(last, left)]
    found = []
    for node, num in parts:
        shape = _times(per_gpu, num)
        found.append((Spot(node, nodes.devices(node, shape)), shape))
    return found


def room_for(nodes: Nodes, shape: Shape) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return how many of a shape with at most one whole GPU each node could hold now, shape (n,)."""
    limits = [np.full(len(nodes), np.iinfo(np.int64).max)]
    if shape.cpus:
        limits.append(nodes.cpus_free // shape.cpus)
    if shape.memory_mb:
        limits.append(nodes.memory_free_mb // shape.memory_mb)
    if shape.gpus:
        limits.append((nodes.gpus_free >= WHOLE).sum(axis=1))
        if shape.gpu_types:
            limits.append(np.where(np.isin(nodes.gpu_type, list(shape.gpu_types)), limits[-1], 0))
    found: np.ndarray[tuple[int], np.dtype[np.int64]] = np.minimum.reduce(limits)
    return found


def _times(per_gpu: Shape, num: int) -> Shape:
    return replace(per_gpu, cpus=per_gpu.cpus * num, memory_mb=per_gpu.memory_mb * num, gpus=num)


DEFAULT_LINK_SHARE = 0.5


@dataclass(frozen=True)
class Network:
    """What the links carry.

    Attributes:
        link_bytes_per_s: of each node, shape (n,).
        used_bytes_per_s: by data workers of all jobs, in and out, shape (n,).
        num_remote: data workers of remote trainers and distributed trainers on each node, shape (n,).
        link_share: of a link that data workers may use.
    """

    link_bytes_per_s: NDArray[np.float64]
    used_bytes_per_s: NDArray[np.float64]
    num_remote: Counts
    link_share: float = DEFAULT_LINK_SHARE

    @property
    def left_bytes_per_s(self) -> NDArray[np.float64]:
        """What each node's budget has left, never below 0."""
        found: NDArray[np.float64] = np.maximum(0.0, self.link_share * self.link_bytes_per_s - self.used_bytes_per_s)
        return found


@dataclass(frozen=True)
class Spread:
    """Where data workers go.

    Attributes:
        places: node and number, in the order in which nodes are filled.
        num_left: data workers for which there is no place.
        traffic_bytes_per_s: that these add to each node's link, shape (n,).
        reason: for people.
    """

    places: tuple[tuple[int, int], ...]
    num_left: int
    traffic_bytes_per_s: NDArray[np.float64]
    reason: str


def spread(room: Counts, trainers: Sequence[int], num: int, bytes_per_s: float, network: Network) -> Spread:
    """Places for data workers.

    Args:
        room: data workers of this size that each node could hold now, shape (n,).
        trainers: nodes of the job's trainers, at least one; each takes an equal part of all batches.
        num: data workers that are wanted.
        bytes_per_s: that one data worker sends.
        network: see there.
    """
    num_nodes, num_trainers = len(room), len(trainers)
    is_trainer = np.zeros(num_nodes, dtype=np.bool_)
    is_trainer[list(trainers)] = True
    # Of what a data worker sends, each trainer node gets a part; what it sends itself does not cross its link.
    # Less than a byte a second is nothing, and a link divided by it would be no number.
    bytes_per_s = bytes_per_s if bytes_per_s >= 1.0 else 0.0
    part = bytes_per_s / num_trainers
    left = network.left_bytes_per_s.copy()
    places: list[tuple[int, int]] = []
    missing = num
    for node in trainers:
        others = [other for other in trainers if other != node]
        limits = [int(room[node]), missing]
        if others and part > 0:
            limits += [int(left[node] / (part * len(others))), *(int(left[other] / part) for other in others)]
        count = max(0, min(limits))
        if count:
            places.append((node, count))
            missing -= count
            left[others] -= count * part
            left[node] -= count * part * len(others)
    num_near = num - missing
    most = missing if part <= 0 else min(missing, int(min(left[node] / part for node in trainers)))
    each = np.where(is_trainer, 0, room)
    if bytes_per_s > 0:
        each = np.minimum(each, np.floor(np.minimum(left / bytes_per_s, np.float64(1 << 40))).astype(np.int64))
    order = np.lexsort((np.arange(num_nodes), network.used_bytes_per_s, network.num_remote))
    filled = np.clip(most - np.concatenate([[0], np.cumsum(each[order])[:-1]]), 0, each[order])
    for node, count in zip(order[filled > 0].tolist(), filled[filled > 0].tolist(), strict=True):
        places.append((node, count))
        missing -= count
    traffic = traffic_of(places, trainers, bytes_per_s, num_nodes)
    return Spread(tuple(places), missing, traffic, _reason(num, num_near, missing, most, int(each.sum())))


def traffic_of(
    places: Iterable[tuple[int, int]], trainers: Sequence[int], bytes_per_s: float, num_nodes: int
) -> NDArray[np.float64]:
    """Return what data workers of one job add to each node's link, shape (num_nodes,).

    Args:
        places: node and number.
        trainers: nodes of the job's trainers; each takes an equal part of all batches.
        bytes_per_s: that one data worker sends.
        num_nodes: of the cluster.
    """
    found, part = np.zeros(num_nodes), bytes_per_s / len(trainers)
    for node, count in places:
        others = [trainer for trainer in trainers if trainer != node]
        found[others] += count * part
        found[node] += count * part * len(others)
    return found


def _reason(num: int, num_near: int, missing: int, most: int, num_far: int) -> str:
    said = f"{num_near} of {num} beside the trainer, {num - num_near - missing} where least other traffic is"
    if not missing:
        return said
    why = "the network budget of the trainer's node is used up" if most < min(num - num_near, num_far) else "no room"
    return f"{said}; {missing} have no place: {why}"


def room_of(
    cpus_free: Counts, memory_free_mb: Counts, cpus: int, memory_mb: int = 0, reserved_cpus: int | Counts = 0
) -> Counts:
    """Return how many data workers each node could hold, shape (n,).

    Args:
        cpus_free, memory_free_mb: shape (n,).
        cpus, memory_mb: of one data worker; at least 1 CPU.
        reserved_cpus: that stay free, on each node or on all: for trainers, so that data workers strand no GPU.
    """
    if cpus < 1:
        raise ValueError("a data worker has at least one CPU")
    found: Counts = np.maximum(0, cpus_free - reserved_cpus) // cpus
    return np.minimum(found, memory_free_mb // memory_mb) if memory_mb else found
