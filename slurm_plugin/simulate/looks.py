"""Looks at the nodes of a run, at equal spans: what is stranded on them. Pure."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.placement.fragments import TypicalShapes
from hetstream.slurm_plugin.simulate.nodes import Nodes
from hetstream.slurm_plugin.simulate.outcome import FragmentationSamples
from hetstream.slurm_plugin.simulate.places import unusable_gpus

# Looks that are kept; a run that takes longer is looked at half as often, from its begin on.
_MOST = 2000


class Looks:
    """The looks of one run.

    Args:
        typical: shapes of the jobs that come.
        every_s: between two looks; 0 for none.

    Attributes:
        next_s: when the next one is due; infinite for never.
    """

    def __init__(self, typical: TypicalShapes, every_s: float) -> None:
        self.next_s = 0.0 if every_s else math.inf
        self._typical = typical
        self._every_s = every_s
        self._found: list[tuple[float, ...]] = []

    def look(self, nodes: Nodes, used_cpus: npt.NDArray[np.float64] | None, now_s: float) -> None:
        """Look at the nodes that have GPUs; the next look is due later.

        Args:
            nodes: without data workers.
            used_cpus: that data workers have of each node; None for none.
            now_s: the time.
        """
        own = nodes.cluster
        free_cpus = np.maximum(0.0, nodes.cpus)
        if used_cpus is not None:
            free_cpus = free_cpus - used_cpus
        seen = (own.gpus > 0) & (own.cpus > 0) & nodes.is_up
        cpus, gpus = free_cpus[seen] / own.cpus[seen], nodes.gpus[seen] / own.gpus[seen]
        if len(cpus):
            cpus_gone = (cpus < 0.5 / own.cpus[seen]) & (gpus > 0.25)
            gpus_gone = (gpus < 0.5 / own.gpus[seen]) & (cpus > 0.25)
            found = (float(np.abs(cpus - gpus).mean()), float(cpus_gone.mean()), float(gpus_gone.mean()))
            self._found.append((now_s, *found, unusable_gpus(self._typical, nodes)))
        if len(self._found) > _MOST:
            self._found = self._found[::2]
            self._every_s *= 2
        self.next_s = now_s + self._every_s

    def samples(self) -> FragmentationSamples | None:
        """All that are kept; None if there are none."""
        return FragmentationSamples(*np.array(self._found).T) if self._found else None
