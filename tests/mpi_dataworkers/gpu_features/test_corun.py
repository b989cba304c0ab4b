"""Preprocessing beside training: who runs when, on streams that find what would be read too early; no GPU is needed."""

from __future__ import annotations

import contextlib
import logging
import pickle
import random
from typing import Any

import pytest
import torch
from interpreted import interpreted_launch, same

from benchmarks.rap_cases import batch_of
from benchmarks.rap_plans import PlanSize, make_plan
from hetstream import DataLoader
from hetstream.errors import FeatureError
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged, JaggedBatch, Nullable
from hetstream.mpi_dataworkers.features.cut import CutGraph, DataWorkersPart, TrainersPart
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, Input, dense, jagged
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.arena import program_of, raw_of
from hetstream.mpi_dataworkers.gpu_features.captured import CapturedCoRun
from hetstream.mpi_dataworkers.gpu_features.corun import (
    AHEAD,
    CoRun,
    HandOver,
    Interleaving,
    Prepare,
    Run,
    Stop,
    after,
    batch_wanted,
    layer_begins,
    next_action,
)
from hetstream.mpi_dataworkers.gpu_features.fused import ComputedByDataWorkers, FusedTransform, PackedByDataWorkers
from hetstream.mpi_dataworkers.gpu_features.hybrid import CutCosts
from hetstream.mpi_dataworkers.gpu_features.launches import Launch, LaunchPlan, all_at_once, plan_launches
from hetstream.mpi_dataworkers.gpu_features.operations import H200, Batches
from hetstream.mpi_dataworkers.gpu_features.schedule import Layer
from hetstream.mpi_dataworkers.gpu_features.streams import CudaStreams, Stream
from tests.mpi_dataworkers.gpu_features.fake_streams import FakeStreams

pytestmark = pytest.mark.usefixtures("interpreted")

SIZE = PlanSize("small", (1000, 50), 2, 2, 12, list_length=(0, 3))
GRAPH = make_plan(SIZE)
ROWS = 6
BATCHES = [batch_of(SIZE, ROWS, seed) for seed in range(5)]
PLAN = LaunchPlan((Launch("table.backward", (2, 0), 2), Launch("dense.forward", (1, 3), 1)), 0.0, "by hand")


class Model(torch.nn.Module):
    """A dense layer and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.LazyLinear(4)
        self.table = torch.nn.Embedding(1000, 4)

    def forward(self, features: dict[str, Any]) -> torch.Tensor:
        sparse: JaggedBatch = features["sparse"]
        found: torch.Tensor = self.dense(features["dense"].nan_to_num(0, 0, 0)).sum()
        return found + self.table(sparse.values % 1000).sum()


def train(model: Model, features: dict[str, Any]) -> float:
    loss = model(features)
    loss.backward()
    return float(loss.detach())


def corun(model: torch.nn.Module, streams: FakeStreams | None = None, plan: LaunchPlan = PLAN, **options: Any) -> CoRun:
    return CoRun(GRAPH, plan, model, streams=streams or FakeStreams(), kernel=(16, interpreted_launch), **options)


def expected(raw: dict[str, Any]) -> dict[str, Any]:
    return dict(FeatureTransform(GRAPH)(raw))


def check(found: dict[str, Any], raw: dict[str, Any]) -> None:
    for name, value in expected(raw).items():
        same(found[name], value)


@pytest.mark.shows("batch n+2 is copied and n+1 computed while n is trained")
@pytest.mark.parametrize("seed", range(20))
def test_each_batch_is_prepared_computed_and_handed_over_once_whatever_begins_when(seed: int) -> None:
    """The pure part alone, with layers that begin twice, not at all, or before there is anything."""
    draw = random.Random(seed)
    count, num_launches = draw.randint(0, 6), draw.randint(0, 4)
    plan = LaunchPlan(tuple(Launch(f"{draw.randrange(3)}", (at,), 1) for at in range(num_launches)), 0.0, "")
    state, done, events = Interleaving(), [], 0
    while Stop() not in done:
        events += 1
        assert events < 1000
        state = batch_wanted(state) if draw.random() < 0.3 else layer_begins(plan, state, f"{draw.randrange(4)}")
        while (action := next_action(plan, state)) is not None:
            there_was_one = not isinstance(action, Prepare) or action.batch < count
            if there_was_one:
                done.append(action)
            state = after(state, action, there_was_one)
            assert state.prepared - state.trained <= AHEAD + 1
            if action == Stop():
                break
    for batch in range(count):
        of_batch = [action for action in done if not isinstance(action, Stop) and action.batch == batch]
        assert of_batch[0] == Prepare(batch)
        assert of_batch[-1] == HandOver(batch)
        assert sorted(of_batch[1:-1], key=str) == [Run(batch, launch) for launch in range(num_launches)]
    assert [action for action in done if isinstance(action, HandOver)] == [HandOver(batch) for batch in range(count)]


def test_the_next_batch_is_computed_beside_the_layers_of_the_plan() -> None:
    """On the streams: copy n + 2, compute n + 1 when its layer begins, train n; and what is read has been written."""
    streams, model = FakeStreams(), Model()
    with corun(model, streams) as beside:
        for number, features in enumerate(beside(BATCHES)):
            check(features, BATCHES[number])
            begin = len(streams.log)
            train(model, features)
            kinds = [(stream, what.split()[0]) for stream, what in streams.log[begin:]]
            is_last = number == len(BATCHES) - 1
            assert kinds == [] if is_last else [(Stream.PREPROCESSING, "launch")] * 2
    assert number == len(BATCHES) - 1
    copies = [what for stream, what in streams.log if stream is Stream.COPYING]
    assert len(copies) == len(BATCHES)


def test_what_no_layer_launches_runs_when_the_batch_is_wanted() -> None:
    """A model whose table is not used in some steps, as of a mixture of experts."""
    model = Model()
    with corun(model) as beside:
        for number, features in enumerate(beside(BATCHES)):
            check(features, BATCHES[number])
            if number % 2:
                train(model, features)
            else:
                model.dense(features["dense"])
    plan = LaunchPlan((*PLAN.launches[:1], Launch("gone.forward", (1, 3), 1)), 0.0, "by hand")
    with corun(model, plan=plan) as beside:
        assert "no layer is called gone.forward" in beside.plan.reason
        for number, features in enumerate(beside(BATCHES)):
            check(features, BATCHES[number])


class Hasty(FakeStreams):
    """Forgets one of the waits."""

    def __init__(self, forgotten: Stream) -> None:
        super().__init__()
        self._forgotten = forgotten

    def wait(self, stream: Stream, event: Any) -> None:
        if stream is not self._forgotten:
            super().wait(stream, event)


@pytest.mark.shows("batch n+2 is copied and n+1 computed while n is trained")
@pytest.mark.parametrize("forgotten", [Stream.PREPROCESSING, Stream.TRAINING])
def test_the_fake_finds_what_would_be_read_too_early(forgotten: Stream) -> None:
    model = Model()
    with corun(model, Hasty(forgotten)) as beside, pytest.raises(AssertionError, match="does not wait for"):
        next(iter(beside(BATCHES)))


@pytest.mark.shows("without GPU memory, data workers compute until there is some again")
@pytest.mark.parametrize("full_at", [(at,) for at in range(10)] + [tuple(range(10))])
def test_wherever_the_gpu_is_full_no_batch_is_lost_and_that_is_said_once(
    full_at: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Copies and results of five batches, of which some find no room."""
    model = Model()
    with corun(model, FakeStreams(full_at)) as beside, caplog.at_level(logging.WARNING):
        for number, features in enumerate(beside(BATCHES)):
            check(features, BATCHES[number])
            train(model, features)
    assert number == len(BATCHES) - 1
    [message] = [record.message for record in caplog.records]
    assert "computed by the trainer's CPU: fake device: out of memory" in message


def _raw(batches: list[dict[str, Any]]) -> dict[str, Any]:
    return batches[0]


@pytest.mark.parametrize("full_at", [(2,), ()])
def test_data_workers_compute_the_graph_from_then_on(
    full_at: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Of a loader of ours: without room for a batch, and without a GPU."""
    model = Model()
    loader = DataLoader(BATCHES, batch_size=1, collate_fn=_raw, shuffle=False)
    with caplog.at_level(logging.WARNING), loader:
        beside = corun(model, FakeStreams(full_at)) if full_at else CoRun(GRAPH, PLAN, model)
        if torch.cuda.is_available() and not full_at:
            pytest.skip("there is a GPU here")
        with beside:
            for number, features in enumerate(beside(loader)):
                check(features, BATCHES[number])
                train(model, features)
            assert number == len(BATCHES) - 1
            assert isinstance(loader.batch_stage, ComputedByDataWorkers)
        assert loader.batch_stage is None, "whoever iterates the loader next wants other batches"
    [message] = [record.message for record in caplog.records]
    assert "data workers compute the whole graph" in message
    assert ("no room" if full_at else "there is no GPU here") in message


@pytest.mark.shows("without GPU memory, data workers compute until there is some again")
@pytest.mark.parametrize("packed_by", ["trainer", "data workers"])
def test_the_graph_comes_back_when_there_is_room_again_and_that_is_said(
    packed_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No room for two batches, none when it is tried again, then there is; also for the next iteration."""
    batches = [batch_of(SIZE, ROWS, seed) for seed in range(12)]
    stage = PackedByDataWorkers(GRAPH, PLAN, tile=16) if packed_by == "data workers" else None
    model, streams, now_s = Model(), FakeStreams((2, 4, 5)), 0.0
    with (
        DataLoader(batches, batch_size=1, collate_fn=_raw, shuffle=False, batch_stage=stage) as loader,
        corun(model, streams) as beside,
        caplog.at_level(logging.WARNING),
    ):
        beside.fallback.now = lambda: now_s
        stages = []
        for epoch in range(2):
            for number, features in enumerate(beside(loader)):
                check(features, batches[number])
                train(model, features)
                stages.append(type(loader.batch_stage))
                now_s += 6.0 if epoch == 0 else 0.0
            assert number == len(batches) - 1
    away = [at for at, found in enumerate(stages) if found is ComputedByDataWorkers]
    assert away == [*range(away[0], away[-1] + 1)]
    assert len(away) == 6, "in vain after 12 s, and then after 24 s"
    said = [record.message for record in caplog.records if "features" in record.message]
    assert ["no room" in said[0], "the GPU has memory again" in said[1], len(said)] == [True, True, 2]
    num_copied = sum(stream is Stream.COPYING for stream, _ in streams.log)
    assert num_copied >= 2 * len(batches) - len(away) - AHEAD - 1


@pytest.mark.parametrize("full_at", [(), (2,), tuple(range(20))])
def test_data_workers_pack_for_the_trainer(full_at: tuple[int, ...]) -> None:
    """Which only copies; where it has no room, it reads the raw columns out of what was packed."""
    model = Model()
    stage = pickle.loads(pickle.dumps(PackedByDataWorkers(GRAPH, PLAN, tile=16)))
    with DataLoader(BATCHES, batch_size=1, collate_fn=_raw, shuffle=False, batch_stage=stage) as loader:
        with corun(model, FakeStreams(full_at)) as beside:
            for number, features in enumerate(beside(loader)):
                check(features, BATCHES[number])
                train(model, features)
            assert number == len(BATCHES) - 1
            assert isinstance(loader.batch_stage, ComputedByDataWorkers if full_at else PackedByDataWorkers)
        assert isinstance(loader.batch_stage, PackedByDataWorkers)
    other = PackedByDataWorkers(GRAPH, all_at_once(GRAPH, "dense.forward", 1), tile=16)
    with corun(model) as beside, pytest.raises(FeatureError, match="packed for another graph, plan or tile"):
        next(iter(beside([other(BATCHES[0])])))
    with (
        DataLoader(BATCHES, batch_size=1, collate_fn=_raw, batch_stage=stage, device="meta") as moved,
        corun(model) as beside,
        pytest.raises(FeatureError, match=r"is on meta, .* leave out the loader's device="),
    ):
        next(iter(beside(moved)))


@pytest.mark.parametrize("full_at", [(), (2,), tuple(range(20))])
def test_of_a_cut_graph_the_trainers_part_runs_beside_training(full_at: tuple[int, ...]) -> None:
    """Data workers compute the others, and all where the GPU is full; wherever it is cut, values are the whole's."""
    for first in ((GRAPH.steps[0].name,), (GRAPH.outputs[0].of[0], GRAPH.outputs[1].of[1])):
        cut, model = CutGraph(GRAPH, first), Model()
        assert cut.trainer is not None
        plan = all_at_once(cut.trainer, "dense.forward", 2)
        with DataLoader(
            BATCHES, batch_size=1, collate_fn=_raw, shuffle=False, batch_stage=DataWorkersPart(cut)
        ) as loader:
            kernel = 16, interpreted_launch
            with CoRun(cut, plan, model, streams=FakeStreams(full_at), kernel=kernel) as beside:
                for number, features in enumerate(beside(loader)):
                    check(features, BATCHES[number])
                    train(model, features)
                assert number == len(BATCHES) - 1
                assert isinstance(loader.batch_stage, ComputedByDataWorkers if full_at else DataWorkersPart)
            assert isinstance(loader.batch_stage, DataWorkersPart)
    beside = CoRun(cut, plan, model, streams=FakeStreams(), kernel=kernel)
    with beside, pytest.raises(FeatureError, match="is not of the data workers' part"):
        next(iter(beside(BATCHES)))
    with pytest.raises(FeatureError, match="nothing is left for the trainer"):
        CoRun(CutGraph(GRAPH), plan, model, streams=FakeStreams())


def test_what_was_packed_can_be_read_again() -> None:
    """Of every form, and inputs that no output needs."""
    filled = dense("age", is_nullable=True) >> ops.FillNull(3.0)
    wide = dense("wide", "int32", width=2)
    graph = FeatureGraph.of({"age": filled, "ids": jagged("ids"), "wide": wide})
    unused = tuple(Input(f"unused{at}", kind.input.type) for at, kind in enumerate((wide, jagged("x"), dense("y"))))
    graph = FeatureGraph((*graph.inputs, *unused), graph.steps, graph.outputs)
    raw = {
        "age": Nullable(torch.tensor([1.0, 5.0, 8.5]), torch.tensor([True, False, True])),
        "wide": torch.arange(6, dtype=torch.int32).view(3, 2),
        "ids": Jagged(torch.tensor([1, 2, 3, 4]), torch.tensor([3, 0, 1])),
        "unused0": torch.ones(3, 2, dtype=torch.int32),
        "unused1": Jagged(torch.ones(2, dtype=torch.int64), torch.tensor([2, 0, 0])),
        "unused2": torch.ones(3),
    }
    packed = PackedByDataWorkers(graph, all_at_once(graph, "", 1))(raw)
    found = raw_of(graph, program_of(graph), packed)
    for name in ("age", "wide", "ids"):
        same(found[name], raw[name])
    for name, expected_value in FeatureTransform(graph)(raw).items():
        same(FeatureTransform(graph)(found)[name], expected_value)


def test_a_programs_own_batch_stage_stays_where_the_gpu_is_full() -> None:
    model = Model()
    with DataLoader(BATCHES, batch_size=1, collate_fn=_raw, batch_stage=dict, shuffle=False) as loader:
        with corun(model, FakeStreams([2])) as beside:
            for number, features in enumerate(beside(loader)):
                check(features, BATCHES[number])
        assert loader.batch_stage is dict


def test_a_saved_position_is_that_of_the_batch_that_the_loop_has() -> None:
    """Although two more have been taken."""
    model = Model()
    with DataLoader(BATCHES, batch_size=1, collate_fn=_raw, shuffle=False) as loader, corun(model) as beside:
        iteration = iter(beside(loader))
        next(iteration)
        next(iteration)
        saved = beside.state_dict()
    with DataLoader(BATCHES, batch_size=1, collate_fn=_raw, shuffle=False) as loader, corun(model) as beside:
        loader.load_state_dict(saved)
        found = list(beside(loader))
        assert len(found) == 3
        check(found[0], BATCHES[2])
        check(found[2], BATCHES[4])


def test_an_error_of_a_batch_comes_when_the_loop_comes_to_it_and_the_next_batch_follows() -> None:
    model = Model()
    wrong = {**BATCHES[2], "dense1": torch.zeros(ROWS, dtype=torch.float64)}
    with corun(model) as beside:
        iteration = iter(beside([*BATCHES[:2], wrong, BATCHES[3]]))
        for number in range(2):
            check(next(iteration), BATCHES[number])
        with pytest.raises(FeatureError, match="dense1 is float64"):
            next(iteration)
        check(next(iteration), BATCHES[3])
        with pytest.raises(StopIteration):
            next(iteration)
        other = iter(beside(BATCHES))
        check(next(other), BATCHES[0])
        with pytest.raises(FeatureError, match="one at a time"):
            next(iteration)


def test_a_stray_stop_iteration_is_no_end() -> None:
    class Strange(list[Any]):
        calls = 0

        def state_dict(self) -> Any:
            self.calls += 1
            return {} if self.calls == 1 else next(iter(()))

    with corun(Model()) as beside, pytest.raises(FeatureError, match="StopIteration was raised while it was taken"):
        list(beside(Strange(BATCHES)))


def test_what_an_iteration_has_taken_ahead_is_never_left_out_in_silence() -> None:
    with corun(Model()) as beside:
        first = beside(BATCHES)
        check(next(first), BATCHES[0])
        second = beside(BATCHES)
        with pytest.raises(FeatureError, match="another iteration over this CoRun has begun"):
            next(first)
        check(next(second), BATCHES[0])
    with pytest.raises(FeatureError, match="this CoRun was closed"):
        next(second)


@pytest.mark.shows("a feature graph is computed once, also where a loader computes it already")
def test_a_loader_whose_batches_have_the_outputs_already_is_refused() -> None:
    """Else a graph whose outputs have the names of its inputs would be computed twice."""
    graph = FeatureGraph.of({"dense0": dense("dense0", is_nullable=True) >> ops.FillNull(2.0) >> ops.Logit(1e-3)})
    other = FeatureGraph.of({"dense0": dense("dense0", is_nullable=True) >> ops.FillNull(7.0)})
    plan, model = all_at_once(graph, "dense.forward", 1), Model()
    beside = CoRun(graph, plan, model, streams=FakeStreams(), kernel=(16, interpreted_launch))
    for options in ({"features": graph}, {"features": CutGraph(graph)}, {"batch_stage": FeatureTransform(graph)}):
        with DataLoader(BATCHES, batch_size=1, collate_fn=_raw, **options) as loader:
            with pytest.raises(FeatureError, match="have this graph's outputs already, and CoRun needs raw columns"):
                beside(loader)
            with pytest.raises(FeatureError, match="leave out the loader's features= or batch_stage="):
                CoRun(graph, plan, model)(loader)
    with beside, DataLoader(BATCHES, batch_size=1, collate_fn=_raw, features=other) as loader:
        found = next(beside(loader))
        same(found["dense0"], FeatureTransform(graph)(FeatureTransform(other)(BATCHES[0]))["dense0"])


@pytest.mark.shows("a feature graph is computed once, also where a loader computes it already")
def test_what_is_compiled_has_no_preprocessing_in_it() -> None:
    """A model that is compiled as a whole has no layers; one whose modules are compiled has them."""
    whole = torch.nn.Sequential(torch.nn.Linear(2, 2))
    parts = torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2), backend="eager"))
    for model, compiled, has_layers in ((whole, torch.compile(whole, backend="eager"), False), (parts, parts, True)):
        streams, num_beside = FakeStreams(), 0
        with corun(model, streams, all_at_once(GRAPH, "0.forward", 1)) as beside:
            for features, raw in zip(beside(BATCHES), BATCHES, strict=True):
                check(features, raw)
                before = len(streams.log)
                compiled(torch.ones(1, 2)).sum().backward()
                num_beside += (Stream.PREPROCESSING, "launch") in streams.log[before:]
        assert num_beside == (len(BATCHES) - 1 if has_layers else 0)


@pytest.mark.shows("batch n+2 is copied and n+1 computed while n is trained")
def test_an_interrupted_program_that_goes_on_misses_no_batch() -> None:
    class Interrupted(FakeStreams):
        num_copies = 0

        def copy(self, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
            self.num_copies += 1
            if self.num_copies in (1, 4):
                raise KeyboardInterrupt
            return super().copy(source, into)

    found = []
    with corun(Model(), Interrupted()) as beside:
        iteration = iter(beside(BATCHES))
        while len(found) < len(BATCHES):
            with contextlib.suppress(KeyboardInterrupt):
                found.append(next(iteration))
        assert next(iteration, None) is None
    for features, raw in zip(found, BATCHES, strict=True):
        check(features, raw)


@pytest.mark.shows("NaN, ids beyond tables and empty batches are computed alike everywhere")
def test_empty_batches_and_no_batch() -> None:
    model, empty = Model(), batch_of(SIZE, 0)
    with corun(model) as beside:
        assert list(beside([])) == []
        for features in beside([empty, BATCHES[0], empty]):
            assert features["dense"].shape[1:] == expected(empty)["dense"].shape[1:]


def test_plans_of_other_graphs_and_models_are_refused_and_hooks_go_away() -> None:
    model = Model()
    with pytest.raises(FeatureError, match=r"the features \[0, 1\], and the graph 0 to 3"):
        corun(model, plan=LaunchPlan((Launch("dense.forward", (0, 1), 1),), 0.0, ""))
    with pytest.raises(FeatureError, match=r"beside attention.forward, and the model has dense.forward"):
        corun(model, plan=all_at_once(GRAPH, "attention.forward", 1))
    for plan in (None, "all", [Launch("dense.forward", (0, 1, 2, 3), 1)]):
        with pytest.raises(FeatureError, match=r"plan=.*: give a LaunchPlan; plan_launches finds one"):
            CoRun(GRAPH, plan, model)  # type: ignore[arg-type]
        with pytest.raises(FeatureError, match="give a LaunchPlan"):
            PackedByDataWorkers(GRAPH, plan)  # type: ignore[arg-type]
    with pytest.raises(FeatureError, match="tile=48"):
        CoRun(GRAPH, PLAN, model, kernel=(48, None))
    with pytest.raises(FeatureError, match="layer 'other' is no module of the model"):
        corun(model, layers={"other": torch.nn.Linear(1, 1)})
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    corun(model, plan=all_at_once(GRAPH, "optimizer", 1), optimizer=optimizer).close()
    beside = corun(model)
    assert model.table._forward_pre_hooks
    beside.close()
    beside.close()
    assert not model.table._forward_pre_hooks
    assert not model.table._forward_hooks
    if not torch.cuda.is_available():
        with pytest.raises(FeatureError, match="there is no GPU here"):
            CudaStreams()


@pytest.mark.parametrize("is_closed", [True, False])
def test_the_next_corun_on_a_loader_gets_its_own_graph(*, is_closed: bool) -> None:
    """Where there is no GPU, data workers had the graph of the one before."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    filled = dense("dense0", is_nullable=True) >> ops.FillNull(0.0)
    graphs = [FeatureGraph.of({"x": filled >> ops.Clamp(bound, bound + 1.0)}) for bound in (5.0, 7.0)]
    model = Model()
    with DataLoader(BATCHES, batch_size=1, collate_fn=_raw, shuffle=False) as loader:
        open_ones = []
        for graph in graphs:
            beside = CoRun(graph, all_at_once(graph, "dense.forward", 1), model)
            for number, features in enumerate(beside(loader)):
                assert torch.equal(features["x"], FeatureTransform(graph)(BATCHES[number])["x"])
            assert number == len(BATCHES) - 1
            beside.close() if is_closed else open_ones.append(beside)
        for beside in open_ones:
            beside.close()
        assert loader.batch_stage is None
        stage = PackedByDataWorkers(GRAPH, PLAN)
        with CoRun(graphs[0], all_at_once(graphs[0], "dense.forward", 1), model) as beside:
            next(beside(loader))
            loader.set_batch_stage(stage)
        assert loader.batch_stage is stage, "which the program has given"
    computed = [ComputedByDataWorkers(graphs[1])(BATCHES[0])]
    with beside, pytest.raises(FeatureError, match="computed another graph"):
        next(beside(computed))


def test_the_stage_of_data_workers_can_be_pickled() -> None:
    stage = pickle.loads(pickle.dumps(ComputedByDataWorkers(GRAPH)))
    check(stage(BATCHES[0]).features, BATCHES[0])


def test_a_plan_puts_features_where_layers_have_room_and_takes_no_more_programs_than_needed() -> None:
    """The wide layer has all the room; a lighter load has fewer programs."""
    layers = (Layer("narrow.forward", 1e-3, 0.0, 0.0), Layer("wide.forward", 1e-3, 9e-4, 9e-4))
    plan = plan_launches(GRAPH, Batches(4096, 2.0), H200, layers, num_multiprocessors=132, limit_s=0.2)
    [launch] = plan.launches
    assert launch.layer == "wide.forward"
    assert sorted(launch.chains) == [0, 1, 2, 3]
    assert plan.exposed_s == 0
    batches = Batches(4096, 2.0)
    more = plan_launches(GRAPH, batches, H200, layers, num_multiprocessors=132, factor=1000, limit_s=0.2)
    assert 1 <= launch.num_programs < sum(each.num_programs for each in more.launches) <= 132
    at_once = plan_launches(GRAPH, Batches(1), H200, layers, num_multiprocessors=132, limit_s=0)
    assert [launch.layer for launch in at_once.launches] == ["wide.forward"]


@pytest.mark.shows("wrong types and senseless numbers are refused at every entry of GPU features")
def test_what_a_plan_cannot_be_made_of_is_refused_in_words() -> None:
    layers = (Layer("dense.forward", 1e-3, 9e-4, 9e-4),)
    for given, words in (
        ({"batches": 4096}, r"batches=4096: give Batches\(rows=...\)"),
        ({"factor": 0.0}, "factor=0.0: give a finite number, above 0"),
        ({"num_multiprocessors": 0}, "num_multiprocessors=0: give a whole number, 1 to 2147483647"),
        ({"num_multiprocessors": float("nan")}, "num_multiprocessors=nan"),
        ({"limit_s": float("nan")}, "limit_s=nan: give a number, at least 0"),
        ({"limit_s": -1}, "limit_s=-1"),
        ({"device": "H200"}, "device='H200': give a Device"),
        ({"layers": None}, "layers=None: give a tuple of Layer"),
    ):
        options: dict[str, Any] = {
            "batches": Batches(1),
            "device": H200,
            "layers": layers,
            "num_multiprocessors": 4,
        } | given
        with pytest.raises(FeatureError, match=words):
            plan_launches(GRAPH, **options)
    with pytest.raises(FeatureError, match="all_at_once: graph is a int"):
        all_at_once(3, "dense.forward", 1)  # type: ignore[arg-type]
    with pytest.raises(FeatureError, match="layer=3: give a layer's name"):
        all_at_once(GRAPH, 3, 1)  # type: ignore[arg-type]
    with pytest.raises(FeatureError, match="num_programs=0: give a whole number"):
        all_at_once(GRAPH, "dense.forward", 0)
    for launches, words in (
        (None, "plan.launches=None"),
        (("a",), r"launches\[0\]='a'"),
        ((Launch("a", 3, 1),), "chains=3: give a tuple of int"),
        ((Launch("a", ("x",), 1),), r"chains\[0\]='x'"),
        ((Launch(3, (0,), 1),), "layer=3"),
        ((Launch("a", (0,), 0),), "=0"),
    ):
        with pytest.raises(FeatureError, match=words):
            CoRun(GRAPH, LaunchPlan(launches, 0.0, ""), Model())  # type: ignore[arg-type]
    for made in (
        lambda: CoRun(3, PLAN, Model()),  # type: ignore[arg-type]
        lambda: CoRun(GRAPH, PLAN, 3),  # type: ignore[arg-type]
        lambda: CoRun(GRAPH, PLAN, Model(), optimizer=3),  # type: ignore[arg-type]
        lambda: CoRun(GRAPH, PLAN, Model(), kernel=256),  # type: ignore[arg-type]
        lambda: CoRun(GRAPH, PLAN, Model(), kernel=(256, 3)),  # type: ignore[arg-type]
        lambda: CoRun(GRAPH, PLAN, Model(), layers=3),  # type: ignore[arg-type]
        lambda: program_of(3),  # type: ignore[arg-type]
        lambda: CutCosts(GRAPH, 3),  # type: ignore[arg-type]
        lambda: CoRun(GRAPH, PLAN, Model(), streams=3),  # type: ignore[arg-type]
        lambda: CoRun(GRAPH, PLAN, Model())(3),  # type: ignore[arg-type]
        lambda: CapturedCoRun(GRAPH, PLAN, Model(), 3),  # type: ignore[arg-type]
        lambda: PackedByDataWorkers(3, PLAN),  # type: ignore[arg-type]
        lambda: PackedByDataWorkers(GRAPH, PLAN, tile=0),
        lambda: DataWorkersPart(GRAPH),  # type: ignore[arg-type]
        lambda: TrainersPart(GRAPH),  # type: ignore[arg-type]
        lambda: FusedTransform(GRAPH, device="cpu", launch=interpreted_launch, arena_bytes=float("nan")),
        lambda: FusedTransform(GRAPH, device="cpu", launch=3),  # type: ignore[arg-type]
        lambda: FusedTransform(GRAPH, device="cpu", launch=interpreted_launch, on_shortage=3),  # type: ignore[arg-type]
    ):
        with pytest.raises(FeatureError, match=r"[:;] (give|a power of two)"):
            made()


def test_a_features_work_is_that_of_its_values() -> None:
    """Ngram makes more values, and all operators of the feature are carried out for each of them."""
    narrow = FeatureGraph.of({"x": jagged("x") >> ops.SigridHash(1, 100)})
    wide = FeatureGraph.of({"x": jagged("x") >> ops.SigridHash(1, 100) >> ops.Ngram(2)})
    column = FeatureGraph.of({"x": dense("x") >> ops.Bucketize((0.0, 1.0, 2.0))})
    layers = (Layer("a.forward", 1.0, 1.0, 1.0),)
    plans = [
        plan_launches(graph, Batches(10**6, 32), H200, layers, num_multiprocessors=10**6, limit_s=0.1)
        for graph in (narrow, wide, column)
    ]
    narrow_count, wide_count, column_count = (plan.launches[0].num_programs for plan in plans)
    assert wide_count > 1.5 * narrow_count > 15 * column_count
