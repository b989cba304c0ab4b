"""A feature graph in two parts: wherever it is cut, both together make the bytes of the whole."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch
from random_features import as_bytes, random_batch, random_graph

from hetstream.errors import FeatureError
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged, Nullable
from hetstream.mpi_dataworkers.features.cut import CutGraph, DataWorkersPart, TrainersPart
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense, jagged
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.ops.tree import flatten, unflatten
from hetstream.mpi_dataworkers.wire.codec import fuse, split

GRAPH = FeatureGraph.of(
    {
        "dense": [
            dense("a", is_nullable=True) >> ops.FillNull(0.5) >> ops.Logit(1e-3),
            dense("b") >> ops.Clamp(0.0, 1.0),
        ],
        "ids": jagged("c") >> ops.FirstX(2) >> ops.SigridHash(1, 100),
        "b": dense("b"),
    }
)
BATCH = {
    "a": Nullable(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([True, False, True])),
    "b": torch.tensor([3.0, -1.0, 0.5]),
    "c": Jagged(torch.arange(5), torch.tensor([3, 0, 2])),
}


def through(cut: CutGraph, batch: Any) -> dict[str, Any]:
    """Both parts, with what lies between them pickled and sent as it is between processes."""
    part = pickle.loads(pickle.dumps(DataWorkersPart(cut)))
    spec, leaves = flatten(part(batch))
    frames, places = fuse(leaves)
    return TrainersPart(cut)(unflatten(spec, split([bytearray(frame) for frame in frames], places)))


def check(seed: int) -> None:
    draw = random.Random(seed)
    graph, chains = random_graph(draw)
    batch = random_batch(chains, draw.choice([0, 1, 2, 7, 40]), draw)
    whole = as_bytes(FeatureTransform(graph)(batch))
    names = [step.name for step in graph.steps]
    for first in ([], names, *(draw.sample(names, draw.randint(0, len(names))) for _ in range(4))):
        cut = CutGraph(graph, tuple(first))
        found = as_bytes(through(cut, batch))
        assert found == whole, f"seed {seed}, cut at {first}"
        assert [*found] == [*whole]


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_a_cut_graph_makes_the_bytes_of_the_whole_on_random_graphs(first: int) -> None:
    for seed in range(first, first + 40):
        check(seed)


@pytest.mark.slow
def test_a_cut_graph_makes_the_bytes_of_the_whole_on_2000_random_graphs() -> None:
    for seed in range(120, 2120):
        check(seed)


def test_each_operator_is_in_one_part_and_the_trainer_s_has_all_that_need_it() -> None:
    cut = CutGraph(GRAPH, ("a.FillNull", "c.FirstX.SigridHash"))
    assert cut.data_workers is not None
    assert cut.trainer is not None
    assert {step.name for step in cut.trainer.steps} == {"a.FillNull", "a.FillNull.Logit", "c.FirstX.SigridHash"}
    assert {step.name for step in cut.data_workers.steps} == {"b.Clamp", "c.FirstX"}
    assert cut.passed == (("a", "a"),), "a column with missing values goes as it is"
    assert {output.name for output in cut.data_workers.outputs} == {"b", "b.Clamp", "c.FirstX"}
    assert pickle.loads(pickle.dumps(cut)) == cut


def test_a_cut_with_nothing_on_one_side_is_the_whole_on_the_other() -> None:
    whole = as_bytes(FeatureTransform(GRAPH)(BATCH))
    nothing, everything = CutGraph(GRAPH), CutGraph(GRAPH, tuple(step.name for step in GRAPH.steps))
    assert nothing.trainer is None
    assert everything.data_workers is not None
    assert everything.data_workers.steps == (), "the output that no operator makes"
    assert as_bytes(through(nothing, BATCH)) == as_bytes(through(everything, BATCH)) == whole


def test_what_cannot_be_cut_is_told_at_once() -> None:
    with pytest.raises(FeatureError, match=r"cannot be cut: there is no step 'x'; its steps are .*; there is no .*'y'"):
        CutGraph(GRAPH, ("x", "a.FillNull", "y"))
    with pytest.raises(FeatureError, match=r"there is no step \['x'\]"):
        CutGraph(GRAPH, (["x"],))  # type: ignore[arg-type]
    hostile = FeatureGraph.of({"y": dense("\n\x1b[31m") >> ops.Clamp(0.0, 1.0)})
    with pytest.raises(FeatureError, match=r"its steps are '\\n\\x1b\[31m.Clamp'"):
        CutGraph(hostile, ("x",))
    with pytest.raises(FeatureError, match="it is a dict; give a FeatureGraph"):
        CutGraph({})  # type: ignore[arg-type]
    with pytest.raises(FeatureError, match=r"first='a\.FillNull': names of steps"):
        CutGraph(GRAPH, "a.FillNull")  # type: ignore[arg-type]


def test_a_batch_that_does_not_fit_fails_in_the_data_worker_wherever_the_graph_is_cut() -> None:
    for first in ((), ("a.FillNull",), tuple(step.name for step in GRAPH.steps)):
        part = DataWorkersPart(CutGraph(GRAPH, first))
        with pytest.raises(FeatureError, match="it has no 'a'; it has b, c"):
            part({name: value for name, value in BATCH.items() if name != "a"})
        with pytest.raises(FeatureError, match="b is float64 on cpu, and float32 in the graph"):
            part({**BATCH, "b": torch.zeros(3, dtype=torch.float64)})


def test_features_of_another_cut_are_refused() -> None:
    handed = DataWorkersPart(CutGraph(GRAPH))(BATCH)
    with pytest.raises(FeatureError, match="handed over for another cut"):
        TrainersPart(CutGraph(GRAPH, ("b.Clamp",)))(handed)
