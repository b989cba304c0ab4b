"""The graph of a forward, or of its beginning: what goes into it, and which of that is of the batch.

Called by `analysis.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hetstream.mpi_dataworkers.partitioner.capture import CapturedForward, GraphInput, NotCaptured, capture
from hetstream.mpi_dataworkers.partitioner.first_graph import FirstGraph, first_graph
from hetstream.mpi_dataworkers.partitioner.graph import Kind
from hetstream.mpi_dataworkers.partitioner.guards import Forms, owners

_pytree: Any = pytree


@dataclass(frozen=True)
class GraphOfForward:
    """A graph with what it was captured with.

    Attributes:
        captured: the graph.
        first: set where it is only the beginning of the forward.
        why_not_all: why it is only that.
        inputs: what went into the graph.
        leaves: the leaf of the batch that an argument of the forward is, by the number of the argument.
        numbers: the same of the graph's inputs.
        forms: types and sizes that the inputs may have.
    """

    captured: CapturedForward
    first: FirstGraph | None
    why_not_all: str
    inputs: Sequence[Any]
    leaves: Mapping[int, int]
    numbers: Mapping[int, int]
    forms: Forms


def graph_of(module: torch.nn.Module, values: Sequence[Any], spec: Any, leaves: Mapping[int, int]) -> GraphOfForward:
    """The graph of a forward.

    Args:
        module: the model.
        values, spec: the flattened arguments.
        leaves: the leaf of the batch that an argument is, by its number.

    Raises:
        NotCaptured: there is none, or it takes nothing of the batch.
    """
    call_with = _pytree.tree_unflatten([*values], spec)
    captured, first, why_not_all, inputs = _captured(module, call_with, values, frozenset(leaves))
    own: Mapping[int, tuple[Kind, str]] = {}
    places: Mapping[int, int] = {place: place for place in leaves}
    if first is not None:
        own, places = _own_tensors(inputs, owners(module)), first.places
    taken = {place: number for place, number in leaves.items() if place in places.values()}
    if not taken:
        raise NotCaptured(f"not all of the forward moves: {why_not_all}; its beginning takes no tensor of the batch")
    numbers = {number: taken[place] for number, place in places.items() if place in taken}
    kinds = tuple(_of_the_batch(graph_input, numbers, own) for graph_input in captured.inputs)
    forms = Forms(inputs, captured.shape_rules, _sizes_of(module, spec, first is None))
    return GraphOfForward(replace(captured, inputs=kinds), first, why_not_all, inputs, taken, numbers, forms)


def _captured(
    module: torch.nn.Module, call_with: tuple[Any, Any], values: Sequence[Any], leaves: frozenset[int]
) -> tuple[CapturedForward, FirstGraph | None, str, Sequence[Any]]:
    """The graph of a forward, or of its beginning and why not of all; and what goes into it.

    Raises:
        NotCaptured: there is neither.
    """
    try:
        return capture(module, *call_with), None, "", values
    except NotCaptured as reason:
        why_not_all = str(reason)
    try:
        first, inputs = first_graph(module, call_with, values, leaves)
    except NotCaptured as reason:
        raise NotCaptured(f"{why_not_all}; nor is there a graph of its beginning: {reason}") from reason
    return first.captured, first, why_not_all, inputs


def _sizes_of(module: torch.nn.Module, spec: Any, is_whole: bool) -> Callable[[Sequence[Any]], Mapping[str, Any]]:
    """Gives what the rules of torch.export for sizes are about, of the inputs of a graph."""
    signature = inspect.signature(module.forward)

    def sizes(inputs: Sequence[Any]) -> Mapping[str, Any]:
        if not is_whole:
            return {"inputs": tuple(inputs)}
        args, kwargs = _pytree.tree_unflatten(list(inputs), spec)
        return signature.bind(*args, **kwargs).arguments

    return sizes


def _own_tensors(
    inputs: Sequence[Any], tables: Mapping[str, tuple[dict[str, Any], str]]
) -> dict[int, tuple[Kind, str]]:
    """Those inputs of a graph that are the model's own tensors: what they are, and their qualified names."""
    targets = {id(table[name]): target for target, (table, name) in tables.items()}
    own = {number: value for number, value in enumerate(inputs) if id(value) in targets}
    return {
        number: (Kind.PARAMETER if isinstance(value, torch.nn.Parameter) else Kind.BUFFER, targets[id(value)])
        for number, value in own.items()
    }


def _of_the_batch(
    graph_input: GraphInput, leaves: Mapping[int, int], own: Mapping[int, tuple[Kind, str]]
) -> GraphInput:
    """An input of the graph, whose kind is LEAF only if it is a leaf of the batch.

    Args:
        graph_input: as it was captured.
        leaves: numbers of the leaves of the batch, by the number of the argument.
        own: the model's tensors among the arguments, of a graph that takes them as such.
    """
    if graph_input.kind is not Kind.LEAF or graph_input.argument in leaves:
        return graph_input
    kind, target = own.get(graph_input.argument, (Kind.PLAIN, ""))
    return replace(graph_input, kind=kind, target=target)
