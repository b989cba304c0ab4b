"""What is known of a model's forward: its operators, what may move, what each costs. Called by `partition.py`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from hetstream.mpi_dataworkers.partitioner.capture import CapturedForward, NotCaptured
from hetstream.mpi_dataworkers.partitioner.classify import Offload, Verdict, classify, with_open_outputs
from hetstream.mpi_dataworkers.partitioner.cut import Cutter, Decision, OperatorCost, Rates
from hetstream.mpi_dataworkers.partitioner.describe import Observed, describe
from hetstream.mpi_dataworkers.partitioner.forward_graph import GraphOfForward, graph_of
from hetstream.mpi_dataworkers.partitioner.graph import ForwardGraph, Kind
from hetstream.mpi_dataworkers.partitioner.guards import Guards, owners
from hetstream.mpi_dataworkers.partitioner.leaves import flatten_call
from hetstream.mpi_dataworkers.partitioner.measure import observe, one_thread
from hetstream.mpi_dataworkers.partitioner.modules import check_hooks, unread_values
from hetstream.mpi_dataworkers.partitioner.provenance import Delivery, origin, plain
from hetstream.mpi_dataworkers.partitioner.side_effects import Effects, ModelState, is_plain
from hetstream.mpi_dataworkers.partitioner.split import LeafForm, Split, StageInputs, split


@dataclass(frozen=True)
class Analysis:
    """What is known of a forward; `partition` decides with it, and `hetstream explain` prints it.

    Attributes:
        captured: the forward.
        graph: its operators.
        verdicts: which of them may move, and why not.
        costs: what they take.
        numbers: names of the values that are no tensors.
        leaves: the leaf of the batch that an input of the graph is, by name.
        guards: what must be as it was captured.
        seconds: that the analysis took.
        why_not_all: why the graph is only the beginning of the forward; "" where it is all of it.
    """

    captured: CapturedForward
    graph: ForwardGraph
    verdicts: Mapping[str, Verdict]
    costs: Mapping[str, OperatorCost]
    numbers: frozenset[str]
    leaves: Mapping[str, LeafForm]
    guards: Guards
    seconds: float
    why_not_all: str = ""

    def decide(self, offload: Offload, rates: Rates, read: Set[int] | None = None, gain: float = 1.0) -> Decision:
        """Where to cut.

        Args:
            offload: what may move.
            rates: what the decision depends on.
            read: numbers of the leaves of the batch that the program reads beside; None: all of them.
            gain: what the trainer gains, in parts of what the operators' own times say.
        """
        movable = frozenset(name for name, verdict in self.verdicts.items() if verdict.moves)
        if self.guards.first is not None:
            read = None  # the rest of the forward may read them
        kept = frozenset(name for name, form in self.leaves.items() if read is None or form.number in read)
        costs = {name: replace(cost, trainer_s=gain * cost.trainer_s) for name, cost in self.costs.items()}
        cutter = Cutter(self.graph, movable, costs, kept)
        if offload is not Offload.OFF and (why := self._why_nothing_may()):
            return cutter.nothing(rates, why)
        if offload is Offload.OFF:
            return cutter.nothing(rates, "offloading is off")
        return cutter.largest(rates) if offload is Offload.ALL else cutter.decide(rates)

    def _why_nothing_may(self) -> str:
        """Why no operator may move, by the first of them; "" where one may."""
        operators = [operator for operator in self.graph.operators if operator.kind is Kind.OPERATOR]
        if not operators or any(self.verdicts[operator.name].moves for operator in operators):
            return ""
        first = operators[0]
        where = f"{first.target} ({first.line})" if first.line else first.target
        return f"no operator of the forward may move; the first is {where}: {self.verdicts[first.name].reason}"

    def cut(self, decision: Decision, num_leaves: int, generation: int, spares: bool = False) -> Split:
        """The two sides.

        Args:
            decision: which operators move.
            num_leaves: of a batch.
            generation: number of the cut.
            spares: whether leaves that nothing else reads are not sent.
        """
        buffers = {
            graph_input.name: self.guards.tensor_of(graph_input.target).detach().cpu().clone()
            for graph_input in self.captured.inputs
            if graph_input.kind is Kind.BUFFER and self.verdicts[graph_input.name].moves
        }
        inputs = StageInputs(self.leaves, buffers, num_leaves, generation, spares)
        return split(self.captured, self.graph, decision, inputs, self.numbers)


def analyse(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    effects: Effects,
    offload: Offload,
    delivery: Delivery | None = None,
    changing: frozenset[int] | None = None,
) -> Analysis:
    """Capture a forward and find what of it may move.

    Args:
        module: the model.
        args, kwargs: of its forward, with the tensors of the batch as `BatchLeaf`s.
        effects: what was seen when the forward ran.
        offload: what may move.
        delivery: the batch whose leaves may move; None: all leaves are of one.
        changing: numbers of the flattened arguments that are no tensors and were seen to change; None: not known.

    Raises:
        NotCaptured: nothing can be said of it; the message is the reason.
    """
    started = time.perf_counter()
    state = ModelState(module, effects.read_globals)
    _check_forward(effects, state)
    flat, spec = flatten_call(args, kwargs)
    origins = _origins(flat, delivery)
    values = [plain(value) if isinstance(value, torch.Tensor) else value for value in flat]
    unread = _unread(module, values, spec, effects, changing)
    found = graph_of(module, values, spec, {place: number for place, (_, number) in origins.items()})
    captured, inputs = found.captured, found.inputs
    plain_arguments, types = _plain_arguments(values, unread)
    guards = Guards(
        captured, found.first, spec, plain_arguments, types, found.leaves, found.forms, state, owners(module)
    )
    known = _known_values(guards, inputs)
    everything = classify(describe(captured), Offload.ALL)
    candidates = [call for call in captured.calls if call.name in everything and everything[call.name].moves]
    seen, share, failed = observe(candidates, captured.functions, known)
    with one_thread():
        on_host = {name: value.cpu() for name, value in known.items()}
        by_worker, share_there, failed_there = observe(candidates, captured.functions, on_host)
    graph = with_open_outputs(describe(captured, seen, failed | failed_there))
    return Analysis(
        captured=captured,
        graph=graph,
        verdicts=classify(graph, offload),
        costs=_costs(seen, by_worker, known, (share, share_there)),
        numbers=frozenset(name for name, observed in seen.items() if observed.type_name == "number"),
        leaves=_leaf_forms(found),
        guards=guards,
        seconds=time.perf_counter() - started,
        why_not_all=found.why_not_all,
    )


def _check_forward(effects: Effects, state: ModelState) -> None:
    """What the forward does beside its tensors.

    Raises:
        NotCaptured: a graph would not do it.
    """
    if effects.reasons:
        raise NotCaptured("; ".join(effects.reasons))
    check_hooks(state)


def _origins(flat: Sequence[Any], delivery: Delivery | None) -> dict[int, tuple[Delivery, int]]:
    """The arguments that are leaves of the batch; those of other batches are arguments like any other."""
    origins: dict[int, tuple[Delivery, int]] = {}
    for place, value in enumerate(flat):
        found = origin(value)
        if found is not None and (delivery is None or found[0] is delivery):
            origins[place] = found
        elif found is not None:
            found[0].read.add(found[1])
    if not origins:
        raise NotCaptured(
            "no argument of the forward is a tensor of the loader: what stands between them does more than to move it"
        )
    for place, value in enumerate(flat):
        if not isinstance(value, torch.Tensor) and not is_plain(value):
            raise NotCaptured(f"argument {place} of the forward is a {type(value).__name__}, which no graph can hold")
    return origins


def _unread(
    module: torch.nn.Module, values: Sequence[Any], spec: Any, effects: Effects, changing: frozenset[int] | None
) -> frozenset[int]:
    """The arguments that are no tensors and may change, because the forward does not look at them.

    Raises:
        NotCaptured: one changes that it does look at.
    """
    candidates = [
        place for place, value in enumerate(values) if isinstance(value, str | bytes | int | float | list | tuple)
    ]
    if changing is not None:
        candidates = [place for place in candidates if place in changing]
    found = frozenset[int]()
    if candidates and not effects.asks_for_types:
        found = unread_values(module, values, spec, candidates)
    if changing is not None and (read := [place for place in changing if place not in found]):
        shown = f"{values[read[0]]!r:.60}"
        raise NotCaptured(f"argument {read[0]} of the forward, {shown}, is another one in each step")
    return found


def _plain_arguments(values: Sequence[Any], unread: frozenset[int]) -> tuple[dict[int, Any], dict[int, type]]:
    """The arguments that are no tensors: values of those that must stay, types of those that may change."""
    plain_values = {place: value for place, value in enumerate(values) if not isinstance(value, torch.Tensor)}
    fixed = {place: value for place, value in plain_values.items() if place not in unread}
    return fixed, {place: type(values[place]) for place in unread}


def _leaf_forms(found: GraphOfForward) -> dict[str, LeafForm]:
    """Which leaf of the batch each such input of the graph is, and its form."""
    named = {
        graph_input.name: graph_input.argument for graph_input in found.captured.inputs if graph_input.kind is Kind.LEAF
    }
    tensors = {name: found.inputs[argument] for name, argument in named.items()}
    return {name: LeafForm(found.numbers[named[name]], tensor.dtype, tensor.dim()) for name, tensor in tensors.items()}


def _known_values(guards: Guards, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """What candidates may take: leaves and buffers."""
    known: dict[str, torch.Tensor] = {}
    for graph_input in guards.captured.inputs:
        if graph_input.kind is Kind.LEAF:
            known[graph_input.name] = inputs[graph_input.argument]
        elif graph_input.kind is Kind.BUFFER:
            known[graph_input.name] = guards.tensor_of(graph_input.target)
    return known


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
