"""A forward as plain values: its operators in the order in which they run. Needs no torch; tests write it by hand."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What gives a value of the graph."""

    LEAF = "leaf"  # a tensor of the batch, as the loader gave it
    PLAIN = "plain"  # an argument that is no tensor, or a tensor that is no leaf of the batch
    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPERATOR = "operator"


@dataclass(frozen=True)
class Operator:
    """A value of the graph, and what makes it.

    Attributes:
        name: of the value, unique in the graph.
        target: what is called, as `aten.log.default`; for an input what it is, as `weight`.
        inputs: names of the values that it takes.
        kind: what gives it.
        writes: those of its inputs that it changes in place.
        shares: those of its inputs whose memory its value may share.
        several: whether its value is several ones, of which each has an operator that takes it.
        random: whether it draws random numbers.
        keeps: why it cannot run in a data worker, whatever its inputs are; "" when it can.
        line: where the program calls it, as `train.py:12`; "" where that is not known.
        source: the text of that line.
    """

    name: str
    target: str
    inputs: tuple[str, ...] = ()
    kind: Kind = Kind.OPERATOR
    writes: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    several: bool = False
    random: bool = False
    keeps: str = ""
    line: str = ""
    source: str = ""


@dataclass(frozen=True)
class ForwardGraph:
    """The operators of a forward.

    Attributes:
        operators: inputs first, each before what takes its value.
        outputs: names of the values that the forward returns.
    """

    operators: tuple[Operator, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        known: set[str] = set()
        for operator in self.operators:
            if unknown := {*operator.inputs, *operator.writes, *operator.shares} - known:
                raise ValueError(f"{operator.name} takes {sorted(unknown)}, which no operator before it makes")
            if operator.name in known:
                raise ValueError(f"two operators are called {operator.name}")
            known.add(operator.name)
        if unknown := set(self.outputs) - known:
            raise ValueError(f"the forward returns {sorted(unknown)}, which no operator makes")

    def by_name(self) -> dict[str, Operator]:
        """The operators by their names."""
        return {operator.name: operator for operator in self.operators}
