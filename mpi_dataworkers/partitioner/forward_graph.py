"""Reads a graph of torch.compile into plain values: what goes in, what is called, what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hetstream.mpi_dataworkers.partitioner.bytecode import NOT_THE_PROGRAM
from hetstream.mpi_dataworkers.partitioner.capture import PLACE, Graph
from hetstream.mpi_dataworkers.partitioner.graph import Kind
from hetstream.mpi_dataworkers.partitioner.program import METHOD, Call, Ref, place_of, references, replace_in
from hetstream.mpi_dataworkers.partitioner.unseen import NotCaptured


@dataclass(frozen=True)
class GraphInput:
    """What goes into the graph.

    Attributes:
        name: of the value.
        kind: what it is.
        target: where torch.compile has it from, as text; of a constant its name in the graph.
        argument: its number among the graph's inputs; -1 of a constant.
    """

    name: str
    kind: Kind
    target: str
    argument: int


@dataclass(frozen=True)
class CapturedForward:
    """The graph of a forward.

    Attributes:
        inputs: what goes in.
        calls: its operators in the order in which they run.
        lines: where the program calls each of them: file, line, text.
        outputs: what comes out: a `Ref` or a plain value each.
    """

    inputs: tuple[GraphInput, ...]
    calls: tuple[Call, ...]
    lines: Mapping[str, tuple[str, int, str]]
    outputs: tuple[Any, ...]


def read(graph: Graph, kinds: Mapping[int, Kind], constant: Kind) -> CapturedForward:
    """The graph as plain values.

    Args:
        graph: as it was traced.
        kinds: of its inputs, by number.
        constant: what tensors that are written in it are.

    Raises:
        NotCaptured: it has something that is no plain value.
    """
    inputs: list[GraphInput] = []
    calls: list[Call] = []
    lines: dict[str, tuple[str, int, str]] = {}
    outputs: tuple[Any, ...] = ()
    placeholders = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    for number, node in enumerate(placeholders):
        if number in graph.sizes:
            tensor, dimension = graph.sizes[number]
            calls.append(Call(node.name, METHOD, "size", (Ref(placeholders[tensor].name), dimension), {}))
        else:
            inputs.append(GraphInput(node.name, kinds[number], _source(node), number))
    for node in graph.module.graph.nodes:
        if node.op in ("call_function", "call_method"):
            calls.append(_call(node, graph))
            if place := _place(node.meta.get("stack_trace") or ""):
                lines[node.name] = place
        elif node.op == "get_attr" and node.target in graph.constants:
            inputs.append(GraphInput(node.name, constant, node.target, -1))
        elif node.op == "output":
            outputs = tuple(_values(value, graph) for value in node.args[0])
        elif node.op not in ("placeholder", "get_attr"):
            raise NotCaptured(f"a node {node.op} {node.target} in the graph of torch.compile")
    return CapturedForward(tuple(inputs), tuple(calls), lines, outputs)


def _call(node: Any, graph: Graph) -> Call:
    args, kwargs = _values(tuple(node.args), graph), _values(dict(node.kwargs), graph)
    if node.op == "call_method":
        return Call(node.name, METHOD, node.target, args, kwargs)
    place = place_of(node.target)
    if place is None:
        return Call(node.name, "", _name(node.target), args, kwargs, node.target)
    return Call(node.name, *place, args, kwargs)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or function)


def _source(node: Any) -> str:
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name) or str(node.name)


def _values(argument: Any, graph: Graph) -> Any:
    def value_of(item: Any) -> Any:
        if isinstance(item, torch.fx.Node):
            if item.op == "get_attr" and item.target not in graph.constants:
                return getattr(graph.module, str(item.target))  # a graph of its own, for an operator of higher order
            return Ref(item.name)
        if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise NotCaptured("a size in the graph of torch.compile that nothing in it gives")
        return item

    return replace_in(_plain_containers(argument), value_of)


def _plain_containers(value: Any) -> Any:
    """Arguments of a node in Python's own containers."""
    if isinstance(value, tuple | list):
        items = [_plain_containers(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: _plain_containers(item) for key, item in value.items()}
    return value


def _place(stack: str) -> tuple[str, int, str] | None:
    """The last place of the program in a stack, as torch.fx writes it; torch's own where there is no other."""
    lines = stack.splitlines()
    places = [(match, index) for index, line in enumerate(lines) if (match := PLACE.search(line))]
    own = [place for place in places if not NOT_THE_PROGRAM.search(place[0].group(1))] or places
    if not own:
        return None
    match, number = own[-1]
    text = lines[number + 1].strip() if number + 1 < len(lines) else ""
    return match.group(1), int(match.group(2)), text


def on_both_sides(captured: CapturedForward) -> frozenset[str]:
    """Numbers that follow from the sizes of what comes with the batch: each side finds them out itself."""
    known = {each.name for each in captured.inputs if each.kind is Kind.LEAF}
    found: set[str] = set()
    for call in captured.calls:
        names = references((call.args, call.kwargs))
        of_size = (call.module, call.path) in ((METHOD, "size"), ("torch.ops", "aten.sym_size.int"))
        of_numbers = call.module in ("_operator", "math") or call.path == "Size"
        if (of_size and known.issuperset(names)) or (of_numbers and names and found.issuperset(names)):
            found.add(call.name)
    return frozenset(found)
