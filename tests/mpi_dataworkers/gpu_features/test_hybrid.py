"""Where a feature graph is cut: what exceeds the GPU's leftover goes to data workers, by the cost model."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from random_features import as_bytes, random_batch, random_graph

from benchmarks.rap_cases import batch_of, layers, problem_of
from benchmarks.rap_plans import PLANS, make_plan
from hetstream.errors import FeatureError
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.cut import CutGraph, DataWorkersPart, TrainersPart
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.hybrid import HybridDecision, HybridFeatures, decide
from hetstream.mpi_dataworkers.gpu_features.launches import plan_launches
from hetstream.mpi_dataworkers.gpu_features.operations import A100, Batches, operations_of
from hetstream.mpi_dataworkers.gpu_features.schedule import Layer

ROWS = 1 << 17  # so many that work counts, and not launches alone
BATCHES = Batches(ROWS)
PLAN = make_plan(PLANS[0])


def decided(pressure: float, allowed_s: float = 0.0) -> HybridDecision:
    """For plan 0 beside a model that leaves 1 / pressure of what the plan needs."""
    problem = problem_of(operations_of(PLAN, ROWS, 1, A100), A100, pressure)
    return decide(PLAN, BATCHES, A100, problem.layers, allowed_s)


def on_trainer(decision: HybridDecision) -> int:
    trainer = decision.cut.trainer
    return 0 if trainer is None else len(trainer.steps)


def test_a_graph_that_fits_stays_on_the_gpu() -> None:
    decision = decide(PLAN, BATCHES, A100, layers())
    assert on_trainer(decision) == 104
    assert decision.exposed_s == 0
    assert decision.reason == "all 104 operators fit beside training: it is 0 us longer, and 0 us are allowed"


@pytest.mark.shows("what exceeds the GPU's leftover goes to data workers, and is decided anew while it runs")
def test_what_exceeds_the_leftover_goes_to_data_workers_and_no_more() -> None:
    tight = decided(2.0)
    assert 0 < on_trainer(tight) < 104
    assert tight.exposed_s == 0 < tight.whole_exposed_s
    assert f"data workers have {104 - on_trainer(tight)} of 104 operators" in tight.reason
    tighter, allowed = decided(4.0), decided(2.0, tight.whole_exposed_s / 2)
    assert on_trainer(tighter) < on_trainer(tight) < on_trainer(allowed)
    assert 0 < allowed.exposed_s <= tight.whole_exposed_s / 2
    assert decided(2.0) == tight, "the same numbers are decided alike"


def test_a_gpu_that_leaves_nothing_keeps_nothing() -> None:
    full = decide(PLAN, BATCHES, A100, (Layer("all", 1e-3, 0.0, 0.0),))
    assert full.cut.trainer is None
    assert full.exposed_s == 0
    assert "no operator fits, data workers have all 104" in full.reason


def test_a_graph_without_operators_is_the_data_workers() -> None:
    decision = decide(FeatureGraph.of({"x": dense("x")}), BATCHES, A100, layers())
    assert decision.cut.trainer is None
    assert as_bytes(DataWorkersPart(decision.cut)({"x": torch.ones(2)}).features["x"]) == as_bytes(torch.ones(2))


@pytest.mark.parametrize("pressure", [0.5, 1.5, 3.0])
def test_the_decided_cut_makes_the_bytes_of_the_whole(pressure: float) -> None:
    cut, batch = decided(pressure).cut, batch_of(PLANS[0], 9)
    found = TrainersPart(cut)(DataWorkersPart(cut)(batch))
    assert as_bytes(found) == as_bytes(FeatureTransform(PLAN)(batch))


@pytest.mark.shows("what exceeds the GPU's leftover goes to data workers, and is decided anew while it runs")
def test_decided_cuts_of_random_graphs_make_the_bytes_of_the_whole() -> None:
    parts = set()
    for seed in range(30):
        draw = random.Random(seed)
        graph, chains = random_graph(draw)
        layer = Layer("layer", 1e-3, draw.uniform(0, 6e-5), draw.uniform(0, 6e-5))
        cut = decide(graph, Batches(64, 3.0), replace(A100, bytes_per_s=1e9), (layer,)).cut
        batch = random_batch(chains, 7, draw)
        found = TrainersPart(cut)(DataWorkersPart(cut)(batch))
        assert as_bytes(found) == as_bytes(FeatureTransform(graph)(batch)), f"seed {seed}"
        parts.add((cut.trainer is None, cut.data_workers is None))
    assert len(parts) > 1, "cuts of one kind alone"


def test_a_little_too_much_is_not_called_nothing() -> None:
    graph = FeatureGraph.of({"x": dense("x") >> ops.Clamp(0.0, 1.0)})
    room_s = A100.launch_s
    decision = decide(graph, Batches(10_000), A100, (Layer("all", 1e-3, room_s, room_s),))
    assert decision.whole_exposed_s == pytest.approx(8e4 / A100.bytes_per_s)
    assert "a step is 0.0514 us longer, and 0 us are allowed: no operator fits" in decision.reason


def test_numbers_that_make_no_sense_are_refused() -> None:
    for batches, allowed_s, words in (
        (Batches(8), -1.0, "allowed_s=-1.0: give a finite number, at least 0"),
        (Batches(8), math.inf, "allowed_s=inf"),
        (Batches(8), "1", "allowed_s='1'"),
        (8, 0.0, "give Batches"),
    ):
        with pytest.raises(FeatureError, match=words):
            decide(PLAN, batches, A100, layers(), allowed_s)  # type: ignore[arg-type]
    for rows, length in ((0, 1.0), ("8", 1.0), (10**400, 1.0), (8, math.nan), (8, -1.0)):
        with pytest.raises(FeatureError, match=r"Batches: (rows|list_length)=.*: give a finite number, at least"):
            Batches(rows, length)  # type: ignore[arg-type]
    with pytest.raises(FeatureError, match="there is no layer"):
        decide(PLAN, BATCHES, A100, ())
    for graph, gpu, some, words in (
        (CutGraph(PLAN), A100, layers(), "graph is a CutGraph; give a FeatureGraph"),
        (PLAN, "A100", layers(), "the GPU is 'A100'; give a Device"),
        (PLAN, A100, layers()[0], "give a tuple of Layer"),
        (PLAN, A100, (1,), r"layers\[0\]=1: give a Layer"),
        (PLAN, A100, (Layer("mlp", math.nan, 0.0, 0.0),), "duration_s=nan.*finite numbers"),
        (PLAN, A100, (Layer("mlp", "1", 0.0, 0.0),), "duration_s='1'.*finite numbers"),  # type: ignore[arg-type]
    ):
        with pytest.raises(FeatureError, match=words):
            decide(graph, BATCHES, gpu, some)  # type: ignore[arg-type]
        with pytest.raises(FeatureError, match=words):
            HybridFeatures(graph, gpu, some)  # type: ignore[arg-type]
    with pytest.raises(FeatureError, match=r"make_plan\(2\): give a PlanSize"):
        make_plan(2)  # type: ignore[arg-type]
    with pytest.raises(FeatureError, match="plan_launches: graph is a NoneType; give a FeatureGraph"):
        plan_launches(CutGraph(PLAN).trainer, Batches(8, 1), A100, layers(), num_multiprocessors=1)  # type: ignore[arg-type]
