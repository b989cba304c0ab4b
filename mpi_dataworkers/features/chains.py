"""Which chains of a feature graph run together: the same operators, but for numbers, on features of one type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from hetstream.mpi_dataworkers.features.graph import FeatureGraph, Step
from hetstream.mpi_dataworkers.features.operators import FeatureType, Onehot


@dataclass(frozen=True)
class Chain:
    """Steps of which each has the one before it as its only user, or the feature that it begins with."""

    source: str
    steps: tuple[Step, ...]

    @property
    def result(self) -> str:
        """The feature that it makes."""
        return self.steps[-1].name


def groups_of(graph: FeatureGraph, kept: Iterable[str] = ()) -> list[list[Chain]]:
    """The chains of a graph by what can run together; each group comes after those whose results it needs.

    Args:
        graph: the graph.
        kept: features that are needed although they are no output: a chain ends with them.
    """
    users = Counter(step.of for step in graph.order)
    for names in (*(output.of for output in graph.outputs), kept):
        users.update(dict.fromkeys(names, 2))  # a chain ends where its feature is an output
    next_of = {step.of: step for step in graph.order}
    inputs = {node.name for node in graph.inputs}
    depth = dict.fromkeys(inputs, 0)
    groups: dict[Hashable, list[Chain]] = {}
    for step in graph.order:
        if step.of not in inputs and users[step.of] == 1:
            continue  # within a chain
        steps = [step]
        while users[steps[-1].name] == 1 and steps[-1].name in next_of:
            steps.append(next_of[steps[-1].name])
        chain = Chain(step.of, tuple(steps))
        depth[chain.result] = depth[chain.source] + 1
        given = replace(graph.types[chain.source], is_nullable=False)
        kinds = tuple((type(step.operator), graph.types[step.name].dtype) for step in steps)
        if not any(isinstance(step.operator, Onehot) for step in steps):
            given = FeatureType(given.dtype, given.is_jagged)  # the width is nothing to the others
        groups.setdefault((depth[chain.result], given, kinds), []).append(chain)
    place = {name: at for at, name in enumerate(name for output in graph.outputs for name in output.of)}
    ordered = [sorted(chains, key=lambda chain: place.get(chain.result, len(place))) for chains in groups.values()]
    return sorted(ordered, key=lambda chains: depth[chains[0].result])
