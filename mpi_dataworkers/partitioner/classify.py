"""Which operators of a forward may run in a data worker, and why the others may not. Pure; called by `partition.py`.

An operator moves when its value is the same wherever and whenever it is computed: when nothing that leads to it is a
parameter, a buffer that the forward changes, a value that is changed in place, or random.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from hetstream.mpi_dataworkers.partitioner.graph import ForwardGraph, Kind, Operator


class Offload(enum.Enum):
    """What may move."""

    AUTO = "auto"  # deterministic operators, where that pays
    ALL = "all"  # every operator without state, and what draws random numbers too
    OFF = "off"


@dataclass(frozen=True)
class Verdict:
    """What becomes of an operator.

    Attributes:
        moves: whether a data worker may run it.
        reason: why.
    """

    moves: bool
    reason: str


_INPUT_REASONS = {
    Kind.LEAF: Verdict(True, "comes with the batch"),
    Kind.PLAIN: Verdict(False, "an argument that does not come from the batch"),
    Kind.PARAMETER: Verdict(False, "a parameter, which each step changes"),
    Kind.BUFFER: Verdict(True, "a buffer that the forward only reads: a copy goes along"),
}


def classify(graph: ForwardGraph, offload: Offload) -> dict[str, Verdict]:
    """Say for each operator whether it may move.

    Args:
        graph: the forward.
        offload: what may move.

    Returns:
        The verdict of each value by its name. What moves is closed: whatever leads to it moves, too.
    """
    changed = _changed_in_place(graph)
    verdicts: dict[str, Verdict] = {}
    for operator in graph.operators:
        verdicts[operator.name] = _verdict(operator, offload, changed, verdicts)
    return verdicts


def _verdict(
    operator: Operator, offload: Offload, changed: dict[str, Operator], verdicts: dict[str, Verdict]
) -> Verdict:
    if offload is Offload.OFF:
        return Verdict(False, "offloading is off")
    if operator.name in changed:
        writer = changed[operator.name]
        where = f" ({writer.line})" if writer.line else ""
        return Verdict(False, f"{writer.target}{where} changes it in place")
    if operator.kind is not Kind.OPERATOR:
        return _INPUT_REASONS[operator.kind]
    if operator.keeps:
        return Verdict(False, operator.keeps)
    if operator.writes:
        return Verdict(False, "it changes a value in place")
    if operator.random and offload is not Offload.ALL:
        return Verdict(False, "it draws random numbers; --offload=all moves it, too")
    for name in operator.inputs:
        if not verdicts[name].moves:
            return Verdict(False, f"it needs {name}: {_first_reason(name, verdicts)}")
    return Verdict(True, "depends on no state")


def _first_reason(name: str, verdicts: dict[str, Verdict]) -> str:
    """The reason at the root: what stands between says nothing more."""
    return (
        verdicts[name].reason.split(": ")[-1]
        if verdicts[name].reason.startswith("it needs ")
        else verdicts[name].reason
    )


def with_open_outputs(graph: ForwardGraph) -> ForwardGraph:
    """A graph whose outputs may be changed in place: by the program, or by the rest of a forward of which it is a part.

    So an output that shares memory with another one, or with an input, stays: sent, it would have memory of its own.
    """
    root = _memory(graph)
    groups: dict[str, list[Operator]] = {}
    for operator in graph.operators:
        groups.setdefault(root(operator.name), []).append(operator)
    outputs = set(graph.outputs)
    shared: set[str] = set()
    for group in groups.values():
        num_visible = sum(operator.name in outputs or operator.kind is not Kind.OPERATOR for operator in group)
        if num_visible > 1 and any(operator.name in outputs for operator in group):
            shared.update(operator.name for operator in group)
    reason = "what comes behind may change it in place, and with it what shares its memory"
    operators = (
        replace(operator, keeps=operator.keeps or reason)
        if operator.name in shared and operator.kind is Kind.OPERATOR
        else operator
        for operator in graph.operators
    )
    return ForwardGraph(tuple(operators), graph.outputs)


def _memory(graph: ForwardGraph) -> Callable[[str], str]:
    """Gives one name for all values that may share their memory."""
    together: dict[str, str] = {}

    def root(name: str) -> str:
        while together.get(name, name) != name:
            name = together[name]
        return name

    for operator in graph.operators:
        for name in operator.shares:
            together[root(name)] = root(operator.name)
    return root


def _changed_in_place(graph: ForwardGraph) -> dict[str, Operator]:
    """Every value whose memory an operator writes, with that operator."""
    root = _memory(graph)
    writers: dict[str, Operator] = {}
    for operator in graph.operators:
        for name in operator.writes:
            writers.setdefault(root(name), operator)
    return {
        operator.name: writers[root(operator.name)] for operator in graph.operators if root(operator.name) in writers
    }
