"""On which nodes the CPUs of data workers are: on their trainer's own first. Pure, for all jobs at once.

The daemon places whole data workers; here CPUs are cut where a node ends, which changes no sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.placement import placement as places
from hetstream.slurm_plugin.placement.data_workers import Network, spread, traffic_of
from hetstream.slurm_plugin.placement.placement import CHOICES, TypicalShapes, place_gang
from hetstream.slurm_plugin.simulate.running import Nodes, Shape, StartPlace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Homes:
    """Where the trainers of some jobs are: a line for each job and node.

    Attributes:
        row: of the job, as an index of its target.
        node: of the line.
        share: of the job's units that are on the node.
        gbps: that these units take in at the ideal speed.
    """

    row: Ints
    node: Ints
    share: Floats
    gbps: Floats


def local_cpus(homes: Homes, target: Floats, free: Floats) -> tuple[Floats, Floats]:
    """CPUs of data workers that are on their trainer's nodes.

    Args:
        homes: of the jobs.
        target: CPUs of each job.
        free: CPUs of each node that data workers can have.

    Returns:
        Of each job, and of each node.
    """
    order = np.argsort(homes.node, kind="stable")
    node, row = homes.node[order], homes.row[order]
    wanted = target[row] * homes.share[order]
    before = np.cumsum(wanted) - wanted
    first = np.searchsorted(node, node)
    before -= before[first] if len(before) else 0.0
    given = np.clip(free[node] - before, 0.0, wanted)
    of_job: Floats = np.bincount(row, weights=given, minlength=len(target)).astype(np.float64)
    of_node: Floats = np.bincount(node, weights=given, minlength=len(free)).astype(np.float64)
    return of_job, of_node


def used_cpus(homes: Homes, target: Floats, free: Floats) -> Floats:
    """CPUs that data workers hold of each node: local ones, and the others where most is free."""
    local_of_job, used = local_cpus(homes, target, free)
    remote = float((target - local_of_job).sum())
    left = free - used
    order = np.argsort(-left, kind="stable")
    used[order] += np.diff(np.minimum(np.cumsum(left[order]), remote), prepend=0.0)
    return used


def within_network(homes: Homes, speed: Floats, local_share: Floats, budget_gbps: Floats) -> Floats:
    """Speeds that keep what each node takes in from data workers elsewhere within its budget.

    Args:
        homes: of the jobs.
        speed: of each job with all of its data workers.
        local_share: of the job's data workers that are on its own nodes.
        budget_gbps: of each node.
    """
    remote_speed = speed * (1.0 - local_share)
    taken = np.bincount(homes.node, weights=homes.gbps * remote_speed[homes.row], minlength=len(budget_gbps))
    allowed = np.where(taken > budget_gbps, budget_gbps / np.maximum(taken, 1e-12), 1.0)
    # The trainers of a job step together: the tightest of its nodes sets the speed.
    factor = np.ones_like(speed)
    np.minimum.at(factor, homes.row, allowed[homes.node])
    return speed * local_share + remote_speed * factor


# Nodes as places: whole jobs go where a placement puts them, data workers where the daemon would prefer them. Pure.
#
# The placements and the rule for data workers are the objects that the daemon and `make bench-frag` use
# (`hetstream.slurm_plugin.placement`). They count in thousandths of a CPU; what jobs hold is counted by `running.py`
# alone.

_MB_PER_GIB = 1024
# Of a node whose memory, or whose link, is no limit.
_NO_LIMIT_MB, _NO_LIMIT_BYTES_PER_S = 1 << 40, 1e15
_BYTES_PER_GBIT = 1e9 / 8
# Of a thousandth: what sums of fractions leave.
_ROUNDING = 1e-3


class JobPlaces:
    """Where whole jobs go.

    Args:
        name: of the placement, of `placement.choices`.
        nodes: what is free; followed from now on.
        expected: the shape of each job that will come, for placements that look ahead.
        seed: for placements that draw.
    """

    def __init__(self, name: str, nodes: Nodes, expected: Iterable[Shape], seed: int) -> None:
        own = nodes.cluster
        self._nodes = nodes
        self._seen = places.Nodes(_thousandths(own.cpus), _memory_mb(own.memory_gib), own.gpus.astype(np.int64))
        self._placement = CHOICES[name].make(self._seen, typical_shapes(nodes, expected), seed)
        self._changed = nodes.follow()

    def find(self, shape: Shape) -> StartPlace | None:
        """Where a job fits: on the node that the placement chooses, else on the fewest; None if nowhere."""
        self._look()
        if shape.gpus == 1:
            parts = place_gang(self._seen, _asked(shape, 1), shape.units, self._placement)
            found = [(spot.node, part.gpus) for spot, part in parts or ()]
        else:
            spot = self._placement.choose(_asked(shape, shape.units))
            found = [] if spot is None else [(spot.node, shape.units)]
        if not found:
            return self._nodes.find(shape)
        nodes, units = np.array(found, dtype=np.int64).T
        return self._nodes.placed(shape, nodes, units)

    def _look(self) -> None:
        """What is free of the nodes that have changed."""
        free = self._nodes
        for node in sorted(self._changed):
            memory_mb = int(_memory_mb(free.memory_gib[node : node + 1])[0])
            cpus = int(_thousandths(free.cpus[node : node + 1])[0])
            self._seen.set_free(node, cpus, memory_mb, max(0, int(free.gpus[node])))
        self._changed.clear()


def typical_shapes(nodes: Nodes, expected: Iterable[Shape]) -> TypicalShapes:
    """What jobs with GPUs ask of one node; those that no node can hold, of each of several.

    To a job without GPUs all free GPUs are of no use, wherever they are: it says nothing of places.
    """
    own = nodes.cluster
    known: dict[Shape, places.Shape] = {}
    found = []
    for shape in expected:
        if not shape.gpus:
            continue
        if shape not in known:
            fits = ((own.gpus >= shape.units * shape.gpus) & (own.cpus >= shape.units * shape.cpus)).any()
            known[shape] = _asked(shape, shape.units if fits else 1)
        found.append(known[shape])
    return TypicalShapes(found)


def unusable_gpus(typical: TypicalShapes, nodes: Nodes) -> float:
    """GPUs that are free and that typical jobs could not use: FGD's measure of fragmentation, as a share of all."""
    up = nodes.is_up & (nodes.cluster.gpus > 0)
    states = np.stack([_thousandths(nodes.cpus[up]), nodes.gpus[up].astype(np.int64)], axis=1)
    states, counts = np.unique(states, axis=0, return_counts=True)
    devices = np.arange(int(states[:, 1].max(initial=1)))
    gpus = np.where(devices < states[:, 1:], places.WHOLE, 0)
    lost = typical.fragments(states[:, 0], gpus, np.zeros(len(states), np.int64))
    return float(lost @ counts) / (places.WHOLE * max(1.0, nodes.cluster.num_gpus))


# Of one job: node and number of its data workers there.
Places = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PlacedWorkers:
    """Where data workers are.

    Attributes:
        places: of each job.
        placed_cpus, near_cpus: of each job's data workers that have a place, and of those beside its trainers.
        num_new: of each job's data workers that were not there before.
    """

    places: tuple[Places, ...]
    placed_cpus: Floats
    near_cpus: Floats
    num_new: Ints


def place_workers(
    homes: Homes,
    workers: Sequence[int],
    before: Sequence[Places],
    cpus: int,
    gbps: Floats,
    room: Ints,
    link_gbps: Floats,
    link_share: float,
) -> PlacedWorkers:
    """Give data workers places, job by job: who has one stays there while there is room, the others get one.

    Args:
        homes: where the trainers of the jobs are; jobs choose in the order of their rows.
        workers: data workers of each job.
        before: where they were.
        cpus: of one.
        gbps: that one of each job sends.
        room: data workers that each node could hold if there were none.
        link_gbps: of each node.
        link_share: of a link that data workers may use.
    """
    link = np.minimum(link_gbps * _BYTES_PER_GBIT, _NO_LIMIT_BYTES_PER_S)
    taken, num_remote = np.zeros(len(room)), np.zeros(len(room), np.int64)
    room, sent = room.copy(), (gbps * _BYTES_PER_GBIT).tolist()
    firsts = np.searchsorted(homes.row, np.arange(len(workers) + 1))
    trainers = [homes.node[firsts[row] : firsts[row + 1]].tolist() for row in range(len(workers))]
    kept = [_kept(own, num if nodes else 0, room) for own, num, nodes in zip(before, workers, trainers, strict=True)]
    num_kept = np.array([sum(own.values()) for own in kept], dtype=np.int64)
    for row in np.flatnonzero(num_kept).tolist():
        taken += traffic_of(kept[row].items(), trainers[row], sent[row], len(room))
        num_remote += _num_remote(kept[row], trainers[row], len(room))
    places = [dict(own) for own in kept]
    for row, num in enumerate(workers):
        missing = num - int(num_kept[row])
        if missing <= 0 or not trainers[row]:
            continue
        found = spread(room, trainers[row], missing, sent[row], Network(link, taken, num_remote, link_share))
        taken = taken + found.traffic_bytes_per_s
        num_remote -= _num_remote(places[row], trainers[row], len(room))
        for node, count in found.places:
            room[node] -= count
            places[row][node] = places[row].get(node, 0) + count
        num_remote += _num_remote(places[row], trainers[row], len(room))
    placed = np.array([sum(own.values()) for own in places], dtype=np.int64)
    near = [sum(own.get(node, 0) for node in nodes) for own, nodes in zip(places, trainers, strict=True)]
    placed_cpus, near_cpus = placed.astype(np.float64) * cpus, np.array(near, dtype=np.float64) * cpus
    return PlacedWorkers(tuple(tuple(own.items()) for own in places), placed_cpus, near_cpus, placed - num_kept)


def _kept(places: Places, num: int, room: Ints) -> dict[int, int]:
    """Of a job's data workers, those that can stay where they are; `room` gets less."""
    found: dict[int, int] = {}
    for node, had in places:
        if count := min(had, num, int(room[node])):
            found[node] = count
            num -= count
            room[node] -= count
    return found


def _num_remote(places: Mapping[int, int], trainers: Sequence[int], num_nodes: int) -> Ints:
    """What a job adds to `Network.num_remote`: data workers away from its trainers, and distributed trainers."""
    found = np.zeros(num_nodes, np.int64)
    if len(trainers) > 1 and places:
        found[list(trainers)] = 1
    for node, count in places.items():
        if node not in trainers:
            found[node] += count
    return found


def _asked(shape: Shape, units: int) -> places.Shape:
    """What a number of units asks of one node."""
    cpus = math.ceil(units * shape.cpus * places.WHOLE - _ROUNDING)
    return places.Shape(cpus, math.ceil(units * shape.memory_gib * _MB_PER_GIB - _ROUNDING), int(units * shape.gpus))


def _thousandths(cpus: Floats) -> Ints:
    found: Ints = np.floor(cpus * places.WHOLE + _ROUNDING).astype(np.int64)
    return found


def _memory_mb(memory_gib: Floats) -> Ints:
    found: Ints = np.floor(np.minimum(memory_gib * _MB_PER_GIB, _NO_LIMIT_MB) + _ROUNDING).astype(np.int64)
    return found
