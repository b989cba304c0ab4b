"""The placements of whole jobs by name, for commands and benchmarks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from hetstream.slurm_plugin.placement import best_fit, dot_product, random_fit
from hetstream.slurm_plugin.placement.fgd import FragmentationGradient
from hetstream.slurm_plugin.placement.fragments import TypicalShapes
from hetstream.slurm_plugin.placement.nodes import Nodes, Shape, Spot
from hetstream.slurm_plugin.placement.scored import Scored


class Placement(Protocol):
    """Chooses nodes of the cluster that it was made for."""

    def choose(self, shape: Shape) -> Spot | None:
        """The node and the devices for a job; None if no node has room. Nothing is taken."""


@dataclass(frozen=True)
class Choice:
    """One placement.

    Attributes:
        meaning: one line.
        make: the cluster, jobs that are expected, a seed -> the placement.
    """

    meaning: str
    make: Callable[[Nodes, TypicalShapes, int], Placement]


CHOICES: Mapping[str, Choice] = {
    "fgd": Choice(
        "where typical jobs lose least (fragmentation gradient descent)",
        lambda nodes, typical, _: FragmentationGradient(nodes, typical),
    ),
    "best-fit": Choice("where least is left", lambda nodes, _, __: Scored(nodes, best_fit.score)),
    "dot-product": Choice(
        "where least is free of what the job asks for", lambda nodes, _, __: Scored(nodes, dot_product.score)
    ),
    "random": Choice("anywhere", lambda nodes, _, seed: Scored(nodes, random_fit.scores(seed))),
}
