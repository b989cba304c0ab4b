"""Fragmentation gradient descent (FGD, ATC'23): where the measure of `fragments.py` grows least. Pure, incremental.

Many nodes are nearly alike by that measure: on an idle node one more job makes no fragment. A little of what best fit
counts decides among those; without it jobs spread over idle nodes, and five points of the GPUs are lost in the end.

What a placement of each shape would change is kept for each node, and made anew only for nodes that have changed since
the shape was last asked for: after one placement that is one node. Nodes in the same state are looked at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetstream.slurm_plugin.placement.fragments import TypicalShapes
from hetstream.slurm_plugin.placement.nodes import WHOLE, Counts, Nodes, Shape, Spot
from hetstream.slurm_plugin.placement.scored import free_shares

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
        """The node and the devices for a job, the first of equal ones; None if no node has room."""
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
