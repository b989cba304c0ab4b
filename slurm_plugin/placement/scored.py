"""A placement by one score for each node: the lowest among those with room. Pure; used by the simple placements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hetstream.slurm_plugin.placement.nodes import Nodes, Shape, Spot

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
        """The node and the devices for a job, the first of equal ones; None if no node has room."""
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
