"""What is known of a model's forward: its operators, what may move, what each costs. Called by `partition.py`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hetstream.mpi_dataworkers.partitioner.capture import Graph, Way, traced
from hetstream.mpi_dataworkers.partitioner.classify import Offload, Verdict, classify, with_open_outputs
from hetstream.mpi_dataworkers.partitioner.cut import Cutter, Decision, OperatorCost, Rates
from hetstream.mpi_dataworkers.partitioner.describe import Observed, describe, is_bounded
from hetstream.mpi_dataworkers.partitioner.effects import Effects, effects_of
from hetstream.mpi_dataworkers.partitioner.forward_graph import CapturedForward, read
from hetstream.mpi_dataworkers.partitioner.graph import ForwardGraph, Kind
from hetstream.mpi_dataworkers.partitioner.leaves import same_bytes
from hetstream.mpi_dataworkers.partitioner.measure import observe, one_thread, seconds_of_graph
from hetstream.mpi_dataworkers.partitioner.program import GRAIN_SIZE, Call, references
from hetstream.mpi_dataworkers.partitioner.quiet import unwarned
from hetstream.mpi_dataworkers.partitioner.split import LeafForm, Split, StageInputs, split
from hetstream.mpi_dataworkers.partitioner.unseen import NotCaptured

_pytree: Any = pytree
# A buffer of which data workers get a copy is compared with it in each step, so it may not be larger.
_MOST_BYTES_TO_COMPARE = 1 << 20


@dataclass(frozen=True)
class Analysis:
    """What is known of a forward; `partition` decides with it, and `hetstream explain` prints it.

    Attributes:
        traced: torch.compile's graph.
        way: of the `Tracer` that gives it.
        captured: the same as plain values.
        graph: its operators.
        verdicts: which of them may move, and why not.
        costs: what they take.
        leaves: the leaf of the batch that an input of the graph is, by name.
        buffers: tensors that the forward only reads, by the name of the input.
        seconds: that the graph takes in the trainer.
        why_not_all: why the graph is only the beginning of the forward; "" where it is all of it.
        observed: what a run has shown of operators.
        bounded: names of the values that depend on the number of threads from some size on.
        num_threads: of the trainer.
    """

    traced: Graph
    way: Way
    captured: CapturedForward
    graph: ForwardGraph
    verdicts: Mapping[str, Verdict]
    costs: Mapping[str, OperatorCost]
    leaves: Mapping[str, LeafForm]
    buffers: Mapping[str, torch.Tensor]
    seconds: float
    why_not_all: str
    observed: Mapping[str, Observed]
    bounded: frozenset[str]
    num_threads: int

    @functools.cached_property
    def keeps_state(self) -> bool:
        """Whether the graph changes something in place that is not its own."""
        own = {operator.name for operator in self.graph.operators if operator.kind is Kind.OPERATOR}
        return not all(own.issuperset(operator.writes) for operator in self.graph.operators)

    @functools.cached_property
    def draws(self) -> bool:
        """Whether the graph draws random numbers."""
        return any(operator.random for operator in self.graph.operators)

    def decide(self, offload: Offload, rates: Rates, gain: float = 1.0) -> Decision:
        """Where to cut.

        Args:
            offload: what may move.
            rates: what the decision depends on.
            gain: what the trainer gains, in parts of what the operators' own times say.
        """
        movable = frozenset(name for name, verdict in self.verdicts.items() if verdict.moves)
        costs = {name: replace(cost, trainer_s=gain * cost.trainer_s) for name, cost in self.costs.items()}
        cutter = Cutter(self.graph, movable, costs)
        if offload is Offload.OFF:
            return cutter.nothing(rates, "offloading is off")
        if why := self._why_nothing_may():
            return cutter.nothing(rates, why)
        return cutter.largest(rates) if offload is Offload.ALL else cutter.decide(rates)

    def _why_nothing_may(self) -> str:
        """Why no operator may move, by the first of them; "" where one may."""
        operators = [operator for operator in self.graph.operators if operator.kind is Kind.OPERATOR]
        if not operators or any(self.verdicts[operator.name].moves for operator in operators):
            return ""
        first = operators[0]
        where = f"{first.target} ({first.line})" if first.line else first.target
        return f"no operator of the forward may move; the first is {where}: {self.verdicts[first.name].reason}"

    def cut(self, decision: Decision, num_leaves: int, generation: int) -> Split:
        """The two sides.

        Args:
            decision: which operators move.
            num_leaves: of a batch.
            generation: number of the cut.
        """
        made_with = StageInputs(
            self.leaves,
            self.buffers,
            num_leaves,
            generation,
            frozenset(name for name, seen in self.observed.items() if seen.type_name == "number"),
            {name: seen.device for name, seen in self.observed.items()},
            self.bounded,
        )
        return split(self.captured, self.graph, decision, made_with)


def analyse(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch: Sequence[Any],
    offload: Offload,
) -> Analysis:
    """Capture a forward and find what of it may move. Nothing of the forward runs but operators that may move.

    Args:
        module: the model.
        args, kwargs: of its forward.
        batch: the leaves of the batch, of which tensors are among the arguments.
        offload: what may move.

    Raises:
        NotCaptured: nothing can be said of it; the message is the reason.
    """
    with unwarned():
        breaks = _graph_breaks()
        try:
            graph, given, way = traced(module, args, kwargs)
        except NotCaptured as problem:
            if _graph_breaks() == breaks:
                raise
            raise NotCaptured(f"{problem}: {_why_not_all(breaks)}") from problem
    why_not_all = _why_not_all(breaks) if way is not Way.WHOLE else ""
    arguments = [value for value in _pytree.tree_leaves((args, dict(kwargs))) if isinstance(value, torch.Tensor)]
    return analysis_of(graph, given, arguments, batch, offload, way, why_not_all)


@unwarned()
def analysis_of(
    graph: Graph,
    given: Sequence[Any],
    arguments: Sequence[torch.Tensor],
    batch: Sequence[Any],
    offload: Offload,
    way: Way,
    why_not_all: str,
) -> Analysis:
    """What of a graph may move.

    Args:
        graph, given: as traced, and what it is given.
        arguments: the tensors among the forward's.
        batch, offload: as of `analyse`.
        way, why_not_all: as of `Analysis`.

    Raises:
        NotCaptured: nothing can be said of it; the message is the reason.
    """
    numbers = _leaves_among(given, batch)
    if not numbers:
        raise NotCaptured(
            "no argument of the forward is a tensor of the loader: what stands between them does more than to move it"
            + (f"; and the graph is the forward's beginning alone: {why_not_all}" if why_not_all else "")
        )
    own = {*map(id, arguments)}
    kinds = {
        place: _kind(value, place in numbers, id(value) in own or place in graph.numbers)
        for place, value in enumerate(given)
    }
    captured, effects = read(graph, kinds, Kind.BUFFER), effects_of(graph)
    _check_catches(graph, captured, effects)
    buffers = _tensors(graph, given, captured)
    leaves = {each.name: each.argument for each in captured.inputs if each.kind is Kind.LEAF}
    known = {name: given[place] for name, place in leaves.items()} | buffers
    candidates = _candidates(captured, effects)
    (seen, share, failed), (by_worker, share_there, failed_there) = _observed(candidates, known)
    bounded = _bounded(effects, known)
    failed |= _too_large(candidates, bounded, seen, known)
    described = with_open_outputs(describe(captured, effects, seen, failed | failed_there))
    return Analysis(
        traced=graph,
        way=way,
        captured=captured,
        graph=described,
        verdicts=classify(described, offload),
        costs=_costs(seen, by_worker, known, (share, share_there)),
        leaves={name: LeafForm(numbers[at], given[at].dtype, given[at].dim()) for name, at in leaves.items()},
        buffers=buffers,
        seconds=seconds_of_graph(graph, given),
        why_not_all=why_not_all,
        observed=seen,
        bounded=bounded,
        num_threads=torch.get_num_threads(),
    )


def _check_catches(graph: Graph, captured: CapturedForward, effects: Mapping[str, Effects]) -> None:
    """Refuse a forward that cannot begin anew where an operator raises what its own code would catch.

    Raises:
        NotCaptured: naming where it catches exceptions.
    """
    own = {call.name for call in captured.calls}
    if (where := graph.unseen.catches) and not all(own.issuperset(effect.writes) for effect in effects.values()):
        raise NotCaptured(
            f"the forward catches exceptions ({where}), and changes tensors in place: it cannot begin anew"
        )


def _candidates(captured: CapturedForward, effects: Mapping[str, Effects]) -> list[Call]:
    """What may move as far as that is known before it has run."""
    everything = classify(describe(captured, effects), Offload.ALL)
    return [call for call in captured.calls if call.name in everything and everything[call.name].moves]


def _observed(calls: Sequence[Call], known: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """What `observe` says, as the trainer runs them and as a data worker does."""
    here = observe(calls, known)
    with one_thread():
        return here, observe(calls, {name: value.cpu() for name, value in known.items()})


def _bounded(effects: Mapping[str, Effects], known: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """The values whose last bits depend on the trainer's number of threads, from some size on."""
    if torch.get_num_threads() == 1 or any(value.is_cuda for value in known.values()):
        return frozenset()
    return frozenset(name for name, effect in effects.items() if is_bounded(effect))


def _too_large(
    calls: Sequence[Call], bounded: frozenset[str], seen: Mapping[str, Observed], known: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Those of the values that are of that size."""
    sizes = {name: observed.num_elements for name, observed in seen.items()}
    sizes |= {name: value.numel() for name, value in known.items()}
    taken = {call.name: (call.name, *references((call.args, call.kwargs))) for call in calls if call.name in bounded}
    text = f"its last bits depend on the number of threads, from {GRAIN_SIZE:,} elements on"
    return {name: text for name, names in taken.items() if max(sizes.get(each, 0) for each in names) >= GRAIN_SIZE}


def _graph_breaks() -> dict[str, int]:
    return dict(torch._dynamo.utils.counters["graph_break"])


def _why_not_all(before: Mapping[str, int]) -> str:
    """The first reason for which torch.compile could trace no further since."""
    found = next((text for text, number in _graph_breaks().items() if number != before.get(text, 0)), "")
    lines = [line.strip() for line in found.splitlines() if line.strip()]
    explained = next((line for line in lines if line.startswith("Explanation:")), "")
    text = (explained.removeprefix("Explanation:").strip() or (lines[0] if lines else ""))[:160]
    return f"torch.compile traces no further, and says: {text}" if text else "torch.compile cannot trace all of it"


def _leaves_among(given: Sequence[Any], batch: Sequence[Any]) -> dict[int, int]:
    """The inputs of a graph that are leaves of a batch: the very same, or with the same bytes, as on another device."""
    tensors = {number: leaf for number, leaf in enumerate(batch) if type(leaf) is torch.Tensor}
    same = {id(leaf): number for number, leaf in tensors.items()}
    found: dict[int, int] = {}
    for place, value in enumerate(given):
        if type(value) is not torch.Tensor or value.requires_grad or value.layout is not torch.strided:
            continue
        number = same.get(id(value))
        if number is None:
            number = next(
                (number for number, leaf in tensors.items() if leaf.numel() and same_bytes(value, leaf)), None
            )
        if number is not None:
            found[place] = number
    return found


def _kind(value: Any, is_leaf: bool, is_argument: bool) -> Kind:
    if is_leaf:
        return Kind.LEAF
    if isinstance(value, torch.nn.Parameter) or (isinstance(value, torch.Tensor) and value.requires_grad):
        return Kind.PARAMETER
    is_small = type(value) is torch.Tensor and value.layout is torch.strided and value.nbytes <= _MOST_BYTES_TO_COMPARE
    return Kind.BUFFER if is_small and not is_argument else Kind.PLAIN


def _tensors(graph: Graph, given: Sequence[Any], captured: CapturedForward) -> dict[str, torch.Tensor]:
    """Buffers and constants by the names of the inputs."""
    return {
        each.name: graph.constants[each.target] if each.argument < 0 else given[each.argument]
        for each in captured.inputs
        if each.kind is Kind.BUFFER
    }


def _costs(
    seen: Mapping[str, Observed],
    by_worker: Mapping[str, Observed],
    known: Mapping[str, torch.Tensor],
    shares: tuple[float, float],
) -> dict[str, OperatorCost]:
    costs = {name: OperatorCost(value_bytes=value.numel() * value.element_size()) for name, value in known.items()}
    for name, observed in seen.items():
        there = by_worker.get(name, observed)
        costs[name] = OperatorCost(shares[0] * observed.seconds, shares[1] * there.seconds, observed.num_bytes)
    return costs
