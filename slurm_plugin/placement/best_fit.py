"""Best fit: the node on which least is left. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetstream.slurm_plugin.placement.nodes import Nodes, Shape
from hetstream.slurm_plugin.placement.scored import free_shares


def score(nodes: Nodes, _: Shape, able: NDArray[np.intp]) -> NDArray[np.float64]:
    """What is free, CPUs and GPUs alike: what the job takes is the same everywhere."""
    cpus, gpus = free_shares(nodes, able)
    found: NDArray[np.float64] = cpus + gpus
    return found
