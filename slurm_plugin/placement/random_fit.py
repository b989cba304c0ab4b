"""Any node with room, by a seeded generator: the baseline. Pure but for the generator's state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetstream.slurm_plugin.placement.nodes import Nodes, Shape
from hetstream.slurm_plugin.placement.scored import Score


def scores(seed: int) -> Score:
    """A score that is drawn anew for each job."""
    generator = np.random.default_rng(seed)

    def score(nodes: Nodes, shape: Shape, able: NDArray[np.intp]) -> NDArray[np.float64]:
        del nodes, shape
        return generator.random(len(able))

    return score
