"""Where a job's data workers go: the trainer's nodes first, then where least other traffic is (GoldMiner, 3.4.3). Pure.

A data worker on another node sends its batches through both nodes' links. A node's budget for that is a share of its
link: beyond it batches would compete with gradients. A job whose batches need more than the budget has its data workers
beside the trainer, or fewer of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetstream.slurm_plugin.placement.placement import Counts

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
    """What data workers of one job add to each node's link, shape (num_nodes,).

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
    """How many data workers each node could hold, shape (n,).

    Args:
        cpus_free, memory_free_mb: shape (n,).
        cpus, memory_mb: of one data worker; at least 1 CPU.
        reserved_cpus: that stay free, on each node or on all: for trainers, so that data workers strand no GPU.
    """
    if cpus < 1:
        raise ValueError("a data worker has at least one CPU")
    found: Counts = np.maximum(0, cpus_free - reserved_cpus) // cpus
    return np.minimum(found, memory_free_mb // memory_mb) if memory_mb else found
