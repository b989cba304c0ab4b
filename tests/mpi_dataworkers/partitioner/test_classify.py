"""Which operators may move: written by hand, without torch."""

from __future__ import annotations

import pytest

from hetstream.mpi_dataworkers.partitioner.analysis import Offload, classify
from hetstream.mpi_dataworkers.partitioner.program import ForwardGraph, Kind, Operator

LEAF = Operator("x", "argument 0", kind=Kind.LEAF)
WEIGHT = Operator("w", "weight", kind=Kind.PARAMETER)
BORDERS = Operator("b", "borders", kind=Kind.BUFFER)


def graph(*operators: Operator, outputs: tuple[str, ...] = ()) -> ForwardGraph:
    return ForwardGraph(operators, outputs or (operators[-1].name,))


@pytest.mark.shows("what no parameter, changed buffer or side effect leads to moves out of a forward")
def test_what_a_parameter_leads_to_stays_and_what_leads_there_moves() -> None:
    verdicts = classify(
        graph(
            LEAF,
            WEIGHT,
            BORDERS,
            Operator("log", "aten.log.default", ("x",)),
            Operator("bucket", "aten.bucketize.Tensor", ("log", "b")),
            Operator("dense", "aten.linear.default", ("log", "w")),
            Operator("relu", "aten.relu.default", ("dense",)),
        ),
        Offload.AUTO,
    )
    assert {name for name, verdict in verdicts.items() if verdict.moves} == {"x", "b", "log", "bucket"}
    assert verdicts["dense"].reason == "it needs w: a parameter, which each step changes"
    assert verdicts["relu"].reason == "it needs dense: a parameter, which each step changes"
    assert verdicts["b"].reason == "a buffer that the forward only reads: a copy goes along"


def test_random_operators_move_only_when_asked_for() -> None:
    noise = graph(
        LEAF, Operator("noise", "aten.rand_like.default", ("x",), random=True), Operator("y", "add", ("noise",))
    )
    auto, everything = classify(noise, Offload.AUTO), classify(noise, Offload.ALL)
    assert not auto["noise"].moves
    assert "--offload=all" in auto["noise"].reason
    assert not auto["y"].moves
    assert everything["noise"].moves
    assert everything["y"].moves


@pytest.mark.shows("arguments and leaves that are changed in place stay right")
def test_what_is_changed_in_place_stays_with_all_that_shares_its_memory() -> None:
    verdicts = classify(
        graph(
            LEAF,
            Operator("view", "aten.view.default", ("x",), shares=("x",)),
            Operator("add_", "aten.add_.Tensor", ("view",), writes=("view",), shares=("view",), line="train.py:7"),
            Operator("copy", "aten.mul.Tensor", ("x",)),
        ),
        Offload.AUTO,
    )
    assert not any(verdict.moves for verdict in verdicts.values())
    assert verdicts["x"].reason == "aten.add_.Tensor (train.py:7) changes it in place"


@pytest.mark.shows("what no parameter, changed buffer or side effect leads to moves out of a forward")
def test_a_buffer_that_the_forward_changes_keeps_what_reads_it() -> None:
    verdicts = classify(
        graph(
            LEAF,
            BORDERS,
            Operator("count", "aten.add_.Tensor", ("b",), writes=("b",), shares=("b",)),
            Operator("bucket", "aten.bucketize.Tensor", ("x", "b")),
            Operator("log", "aten.log.default", ("x",)),
        ),
        Offload.AUTO,
    )
    assert not verdicts["bucket"].moves
    assert verdicts["log"].moves


def test_an_operator_that_says_why_it_stays_is_believed() -> None:
    verdicts = classify(graph(LEAF, Operator("own", "mine::op", ("x",), keeps="a custom operator")), Offload.ALL)
    assert verdicts["own"].reason == "a custom operator"


@pytest.mark.shows("that an argument of a forward is a leaf of the batch is proved")
def test_an_argument_that_is_no_leaf_of_the_batch_stays() -> None:
    mixed = Operator("m", "argument 1", kind=Kind.PLAIN)
    verdicts = classify(graph(LEAF, mixed, Operator("y", "aten.log.default", ("m",))), Offload.AUTO)
    assert verdicts["y"].reason == "it needs m: an argument that does not come from the batch"


def test_nothing_moves_when_offloading_is_off() -> None:
    verdicts = classify(graph(LEAF, Operator("y", "aten.log.default", ("x",))), Offload.OFF)
    assert not any(verdict.moves for verdict in verdicts.values())


def test_a_graph_that_is_no_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="no operator before it makes"):
        graph(Operator("y", "aten.log.default", ("x",)))
    with pytest.raises(ValueError, match="two operators are called x"):
        graph(LEAF, LEAF)
    with pytest.raises(ValueError, match="the forward returns"):
        graph(LEAF, outputs=("z",))
