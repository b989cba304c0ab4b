"""Where to cut: against every other cut of small graphs, and the two ways in which more is not better."""

from __future__ import annotations

import itertools
import random

import pytest

from hetstream.mpi_dataworkers.partitioner.cut import Cutter, FlowNetwork, OperatorCost, Rates
from hetstream.mpi_dataworkers.partitioner.program import ForwardGraph, Kind, Operator

RATES = Rates(step_s=0.1, batch_s=0.01, num_data_workers=4, wire_bytes_per_s=1e9, batch_bytes=1000)


def chain(*costs: OperatorCost) -> tuple[ForwardGraph, dict[str, OperatorCost]]:
    """x -> o0 -> o1 ... -> dense, of which dense stays."""
    operators = [Operator("x", "argument 0", kind=Kind.LEAF)]
    for number in range(len(costs)):
        operators.append(Operator(f"o{number}", "aten.log.default", (operators[-1].name,)))
    operators.append(Operator("dense", "aten.linear.default", (operators[-1].name,)))
    return ForwardGraph(tuple(operators), ("dense",)), {f"o{number}": cost for number, cost in enumerate(costs)}


def cutter(graph: ForwardGraph, costs: dict[str, OperatorCost]) -> Cutter:
    movable = frozenset(operator.name for operator in graph.operators if operator.name != "dense")
    return Cutter(graph, movable, costs)


@pytest.mark.shows("costs decide where a forward is cut; a cut that gains nothing is taken back")
def test_cheap_bytes_move_all_that_costs_the_trainer() -> None:
    graph, costs = chain(OperatorCost(0.03, 0.01, 1000), OperatorCost(0.02, 0.01, 1000))
    decision = cutter(graph, costs).decide(RATES)
    assert decision.moved == {"o0", "o1"}
    assert decision.sent == ("o1",)
    assert decision.after.total_s == pytest.approx(0.05, rel=0.01)
    assert "2 operators moved" in decision.reason


@pytest.mark.shows("costs decide where a forward is cut; a cut that gains nothing is taken back")
def test_a_value_that_would_fill_the_wire_is_made_by_the_trainer() -> None:
    graph, costs = chain(OperatorCost(0.03, 0.01, 1000), OperatorCost(0.02, 0.001, 500_000_000))
    assert cutter(graph, costs).decide(RATES).moved == {"o0"}


def test_data_workers_that_are_the_slowest_get_no_more_work() -> None:
    graph, costs = chain(OperatorCost(0.03, 0.01, 1000))
    busy = Rates(step_s=0.1, batch_s=0.3, num_data_workers=4, batch_bytes=1000)
    assert cutter(graph, costs).decide(busy).moved == {"o0"}, "0.31 s / 4 is below the trainer's 0.1 s"
    overloaded = Rates(step_s=0.1, batch_s=0.5, num_data_workers=4, batch_bytes=1000)
    refused = cutter(graph, costs).decide(overloaded)
    assert refused.moved == frozenset()
    assert "the data workers are the slowest" in refused.reason


def test_without_data_workers_nothing_moves_and_with_them_it_does() -> None:
    graph, costs = chain(OperatorCost(0.03, 0.01, 1000))
    problem = cutter(graph, costs)
    none = problem.decide(Rates(0.1, 0.01, 0))
    assert (none.moved, none.reason) == (frozenset(), "there are no data workers")
    assert problem.decide(RATES).moved == {"o0"}


def test_nothing_that_may_move_is_said() -> None:
    graph, costs = chain()
    assert cutter(graph, costs).decide(RATES).reason == "no operator of the forward may move"


def test_a_gain_in_the_noise_moves_nothing() -> None:
    graph, costs = chain(OperatorCost(0.0001, 0.0001, 10))
    decision = cutter(graph, costs).decide(RATES)
    assert decision.moved == frozenset()
    assert "faster by 2%" in decision.reason


def test_several_values_are_never_sent_but_each_of_them_is() -> None:
    graph = ForwardGraph(
        (
            Operator("x", "argument 0", kind=Kind.LEAF),
            Operator("unique", "aten._unique2.default", ("x",), several=True),
            Operator("first", "getitem", ("unique",)),
            Operator("second", "getitem", ("unique",)),
            Operator("dense", "aten.embedding.default", ("first", "second")),
        ),
        ("dense",),
    )
    decision = cutter(graph, {"unique": OperatorCost(0.05, 0.01, 0)}).decide(RATES)
    assert decision.moved == {"unique", "first", "second"}
    assert decision.sent == ("first", "second")


def test_the_largest_cut_leaves_constants_that_only_the_trainer_needs() -> None:
    graph = ForwardGraph(
        (
            Operator("x", "argument 0", kind=Kind.LEAF),
            Operator("ones", "aten.ones.default"),
            Operator("places", "aten.arange.default"),
            Operator("y", "aten.add.Tensor", ("x", "ones")),
            Operator("dense", "aten.linear.default", ("y", "places")),
        ),
        ("dense",),
    )
    assert cutter(graph, {}).largest(RATES).moved == {"ones", "y"}


def random_problem(seed: int) -> tuple[ForwardGraph, dict[str, OperatorCost]]:
    draw = random.Random(seed)
    operators = [Operator("x", "argument 0", kind=Kind.LEAF), Operator("z", "argument 1", kind=Kind.LEAF)]
    for number in range(7):
        inputs = tuple(sorted({draw.choice(operators).name for _ in range(draw.randint(1, 2))}))
        operators.append(Operator(f"o{number}", "aten.add.Tensor", inputs))
    ends = [one.name for one in operators if not any(one.name in other.inputs for other in operators)]
    operators.append(Operator("dense", "aten.linear.default", tuple(ends)))
    costs = {
        one.name: OperatorCost(draw.random() * 0.02, draw.random() * 0.05, draw.randint(0, 30_000_000))
        for one in operators
        if one.name != "dense"
    }
    return ForwardGraph(tuple(operators), ("dense",)), costs


@pytest.mark.shows("costs decide where a forward is cut; a cut that gains nothing is taken back")
@pytest.mark.parametrize("seed", range(25))
def test_no_cut_is_much_faster_than_the_one_decided(seed: int) -> None:
    graph, costs = random_problem(seed)
    problem = cutter(graph, costs)
    names = [operator.name for operator in graph.operators if operator.name.startswith("o")]
    inputs = graph.by_name()
    best = problem.nothing(RATES, "").after.total_s
    for size in range(1, len(names) + 1):
        for some in itertools.combinations(names, size):
            moved = frozenset(some)
            if all(name in moved or name in "xz" for one in moved for name in inputs[one].inputs):
                best = min(best, problem._decision(moved, RATES, "").after.total_s)
    decision = problem.decide(RATES)
    assert all(name in decision.moved or name in "xz" for one in decision.moved for name in inputs[one].inputs)
    assert decision.after.total_s <= decision.before.total_s
    assert decision.after.total_s <= 1.1 * best, "the prices that are tried miss the best cut by more than 10 %"


def test_a_minimum_cut_is_one() -> None:
    network = FlowNetwork()
    for tail, head, capacity in [
        ("s", "a", 3),
        ("s", "b", 2),
        ("a", "b", 1),
        ("a", "t", 2),
        ("b", "t", 4),
        ("s", "c", 9),
    ]:
        network.add(tail, head, capacity)
    assert network.source_side("s", "t") == {"s", "c"}
    with pytest.raises(ValueError, match="at least 0"):
        network.add("a", "b", -1)


def test_a_forward_of_a_thousand_operators_is_decided_in_seconds() -> None:
    graph, costs = chain(*(OperatorCost(1e-5, 1e-5, 1000) for _ in range(1000)))
    assert len(cutter(graph, costs).decide(RATES).moved) == 1000
