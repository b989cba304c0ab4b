"""What was found out about a forward, as a file: written where the program runs, read by `hetstream explain`. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hetstream.mpi_dataworkers.partitioner.classify import Verdict
from hetstream.mpi_dataworkers.partitioner.cut import Cutter, Decision, OperatorCost, Rates
from hetstream.mpi_dataworkers.partitioner.graph import ForwardGraph, Kind, Operator


@dataclass(frozen=True)
class Findings:
    """What is known of a forward.

    Attributes:
        module: name of the model's class.
        reason: why nothing is known; "" when something is.
        graph: the operators.
        verdicts: which of them may move.
        costs: what they take.
        rates: as they were measured, without data workers.
        why_not_all: why the graph is only the beginning of the forward; "" where it is all of it.
    """

    module: str
    reason: str = ""
    graph: ForwardGraph = field(default_factory=lambda: ForwardGraph((), ()))
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    costs: Mapping[str, OperatorCost] = field(default_factory=dict)
    rates: Rates = field(default_factory=lambda: Rates(0.0, 0.0, 0))
    why_not_all: str = ""

    def decide(self, num_data_workers: int, everything: bool) -> Decision:
        """Where the forward would be cut.

        Args:
            num_data_workers: processes that would make batches.
            everything: whether all that may move does, as with `--offload=all`.
        """
        movable = frozenset(name for name, verdict in self.verdicts.items() if verdict.moves)
        cutter = Cutter(self.graph, movable, self.costs)
        rates = replace(self.rates, num_data_workers=num_data_workers)
        return cutter.largest(rates) if everything else cutter.decide(rates)

    def to_json(self) -> str:
        """As text."""
        operators = [asdict(operator) | {"kind": operator.kind.value} for operator in self.graph.operators]
        document = {
            "module": self.module,
            "reason": self.reason,
            "operators": operators,
            "outputs": self.graph.outputs,
            "verdicts": {name: asdict(verdict) for name, verdict in self.verdicts.items()},
            "costs": {name: asdict(cost) for name, cost in self.costs.items()},
            "rates": asdict(self.rates),
            "why_not_all": self.why_not_all,
        }
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> Findings:
        """Read what `to_json` has written."""
        document = json.loads(text)
        operators = tuple(_operator(operator) for operator in document["operators"])
        return cls(
            document["module"],
            document["reason"],
            ForwardGraph(operators, tuple(document["outputs"])),
            {name: Verdict(**verdict) for name, verdict in document["verdicts"].items()},
            {name: OperatorCost(**cost) for name, cost in document["costs"].items()},
            Rates(**document["rates"]),
            document["why_not_all"],
        )


def _operator(fields: dict[str, Any]) -> Operator:
    names = ("inputs", "writes", "shares")
    return Operator(**fields | {name: tuple(fields[name]) for name in names} | {"kind": Kind(fields["kind"])})
