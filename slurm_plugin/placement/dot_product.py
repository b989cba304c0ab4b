"""Dot product of what a job asks for and what is free, the smallest first. Pure.

Tetris takes the largest, which spreads jobs over empty nodes; FGD's experiments, whose figures this is compared with,
take the smallest: of what the job needs much, little is left free.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetstream.slurm_plugin.placement.nodes import Nodes, Shape
from hetstream.slurm_plugin.placement.scored import free_shares


def score(nodes: Nodes, shape: Shape, able: NDArray[np.intp]) -> NDArray[np.float64]:
    """The dot product, each side over what the largest node has."""
    cpus, gpus = free_shares(nodes, able)
    asked_cpus = shape.cpus / max(1, int(nodes.cpus.max(initial=1)))
    asked_gpus = shape.gpu_total / max(1, 1000 * int(nodes.num_gpus.max(initial=1)))
    found: NDArray[np.float64] = asked_cpus * cpus + asked_gpus * gpus
    return found
