"""A job of several GPUs: on one node if any has room, else on the fewest. All of it or nothing. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetstream.slurm_plugin.placement.choices import Placement
from hetstream.slurm_plugin.placement.nodes import WHOLE, Nodes, Shape, Spot


def place_gang(nodes: Nodes, per_gpu: Shape, num_gpus: int, placement: Placement) -> list[tuple[Spot, Shape]] | None:
    """Where a job goes, and what each node gives; None if it does not fit now. Nothing is taken.

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
    """How many of a shape with at most one whole GPU each node could hold now, shape (n,)."""
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
