"""How much of nodes' free GPUs typical jobs could not use: FGD's measure of fragmentation (ATC'23). Pure.

For one typical shape all free GPUs of a node are a fragment if the shape does not fit there, else only those devices
that are too full for it. A node's measure is the mean over the typical shapes, by how frequent each is. A shape without
GPUs makes all free GPUs a fragment on every node, so it moves no choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hetstream.slurm_plugin.placement.nodes import Counts, Shape

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
        """The measure of node states, in thousandths of GPUs.

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
