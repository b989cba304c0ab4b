"""A loader whose cut follows the steps: decided while it is read, and the bytes are those of the whole graph."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from random_features import as_bytes

from hetstream import DataLoader
from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.dispatcher.client import StatusClient, running_service
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged
from hetstream.mpi_dataworkers.features.cut import CutGraph
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense, jagged
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features import hybrid
from hetstream.mpi_dataworkers.gpu_features.hybrid import HybridFeatures, Recut, Recutter, Seen
from hetstream.mpi_dataworkers.loader import features as feature_recuts


def chains(names: str) -> dict[str, Any]:
    return {
        name: jagged(name) >> ops.Clamp(0, 900) >> ops.Ngram(2) >> ops.SigridHash(ord(name), 1000) for name in names
    }


GRAPH = FeatureGraph.of({"price": dense("price") >> ops.Clamp(0.0, 50.0) >> ops.BoxCox(0.5), **chains("ab")})
# As it is after a while: one feature is gone, others have come.
DRIFTED = FeatureGraph.of({**chains("bcd"), "price": dense("price") >> ops.Clamp(0.0, 50.0) >> ops.Logit(1e-3)})
HYBRID = HybridFeatures(GRAPH)
LENGTH = 240
LOADER_OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 5}


def collate(rows: list[int]) -> dict[str, Any]:
    lengths = torch.tensor([row % 4 for row in rows])
    lists = {
        name: Jagged(torch.cat([torch.arange(row % 4) + row * ord(name) for row in rows]), lengths) for name in "abcd"
    }
    return {"price": torch.tensor([row * 0.7 for row in rows]), **lists}


class Striking:
    """Kills its data worker at some batches, each once."""

    def __init__(self, flags: Path) -> None:
        self.flags, self.trainer = flags, os.getpid()

    def __call__(self, rows: list[int]) -> dict[str, Any]:
        if rows[0] % 7 == 0 and os.getpid() != self.trainer:
            try:
                os.close(os.open(self.flags / str(rows[0]), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return collate(rows)


def loader_of(loaders: Any, **options: Any) -> Any:
    return loaders([*range(LENGTH)], shuffle=True, **{"collate_fn": collate, **options})


def whole_of(graph: FeatureGraph) -> list[Any]:
    with DataLoader(
        [*range(LENGTH)], shuffle=True, collate_fn=collate, batch_stage=FeatureTransform(graph), **LOADER_OPTIONS
    ) as loader:
        return [*map(as_bytes, loader)]


@pytest.fixture(name="hasty")
def hasty_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks after two steps, and nothing is waited for."""
    monkeypatch.setattr(feature_recuts, "_STEPS", 2)
    monkeypatch.setattr(feature_recuts, "_LOOK_S", 0.0)
    monkeypatch.setattr(hybrid, "SETTLE_S", 0.0)


@pytest.fixture(name="drawn")
def drawn_fixture(hasty: None, monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """In the place of the decisions of the cost model: others at every look. Gives what was seen."""
    draw, looks = random.Random(2), []

    def decide(self: Recutter, seen: Seen, _: float) -> Recut:
        graph = self.features.graph
        looks.append(seen)
        self.cut = CutGraph(graph, tuple(step.name for step in graph.steps if draw.random() < 0.3))
        return Recut(self.cut, f"drawn for the {len(looks)}. time", 0.25)

    monkeypatch.setattr(Recutter, "decide", decide)
    return looks


def decided(loader: Any) -> bool:
    """Whether a decision is there, or was; the thread that makes it ends at once."""
    for thread in threading.enumerate():
        if thread.name == "hetstream-recut":
            thread.join()
    return True


def read(loader: Any) -> Iterator[Any]:
    for batch in loader:
        yield as_bytes(batch)
        assert decided(loader)


@pytest.mark.shows("a feature graph is cut anew while it is read, and no byte changes")
@pytest.mark.shows("data workers are killed while a feature graph is cut")
def test_decisions_at_every_look_change_no_byte_and_lose_no_batch_also_when_data_workers_die(
    service: Any, loaders: Any, drawn: list[Seen], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service.start_workers(2)
    striking = {"service": service.name, "max_attempts": 10, "collate_fn": Striking(tmp_path)}
    whole = whole_of(GRAPH)
    for place in (striking, {}, {"num_workers": 1}):
        drawn.clear()
        caplog.clear()
        loader = loader_of(loaders, features=HYBRID, **place)
        assert [*read(loader)] == whole, place
        assert len(drawn) > 8
        cut = loader.stats()["features"]
        assert (cut["num_operators"], cut["share"]) == (len(GRAPH.steps), 0.25)
        assert cut["reason"].startswith("drawn for the")
        assert f"features: {cut['reason'].partition('; data workers run')[0]}" in caplog.messages[-1]
        assert all(seen.batches.rows == 4 and 0 <= seen.batches.list_length <= 3 for seen in drawn)
    assert any(file.name.isdigit() for file in tmp_path.iterdir()), "none has died"


def test_the_dispatcher_is_told_where_the_graph_is_cut_and_why(three: Any, loaders: Any, drawn: list[Seen]) -> None:
    loader = loader_of(loaders, features=HYBRID, service=three.name)
    with StatusClient(running_service(three.address_file)) as client:
        cuts = []
        for _ in read(loader):
            cuts += [row.features for row in client.fetch().loaders if row.pid == os.getpid()]
            if cuts and cuts[-1] is not None and cuts[-1].reason.startswith("drawn for the"):
                break
    assert (cuts[-1].num_operators, cuts[-1].share) == (len(GRAPH.steps), 0.25)


@pytest.mark.shows("a feature graph is cut anew while it is read, and no byte changes")
@pytest.mark.shows("what exceeds the GPU's leftover goes to data workers, and is decided anew while it runs")
def test_another_graph_begins_at_its_step_while_it_is_decided(
    service: Any, loaders: Any, drawn: list[Seen], tmp_path: Path
) -> None:
    """Features come and go, and come back; the position does not know of it."""
    service.start_workers(2)
    before, after = whole_of(GRAPH), whole_of(DRIFTED)
    striking = {"service": service.name, "max_attempts": 10, "collate_fn": Striking(tmp_path)}
    for place in (striking, {}):
        loader = loader_of(loaders, features=HYBRID, **place)
        found, batches = [], read(loader)
        for step in range(LENGTH // 4):
            if step == 10:
                loader.set_features(DRIFTED)
            if step == 30:
                loader.set_features(HYBRID)
                state = loader.state_dict()
            if step == 45:
                loader.set_features(HybridFeatures(DRIFTED))
            found.append(next(batches))
        assert next(batches, None) is None
        assert found == before[:10] + after[10:30] + before[30:45] + after[45:], place
        other = loader_of(loaders, features=HybridFeatures(DRIFTED), **place)
        other.load_state_dict(state)
        assert [*read(other)] == after[30:]


def test_a_decision_for_the_graph_before_is_not_carried_out(
    loaders: Any, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_decide, begun = threading.Event(), threading.Event()

    def decide(self: Recutter, _: Seen, __: float) -> Recut:
        begun.set()
        assert may_decide.wait(30)
        self.cut = CutGraph(self.features.graph, tuple(step.name for step in self.features.graph.steps))
        return Recut(self.cut, f"for {len(self.features.graph.steps)} operators", 0.5)

    monkeypatch.setattr(Recutter, "decide", decide)
    loader = loader_of(loaders, features=HYBRID)
    batches = iter(loader)
    step = 0
    while not begun.is_set():
        assert as_bytes(next(batches))
        step += 1
    step -= 1
    loader.set_features(DRIFTED)
    before, after = loader.stats()["features"], whole_of(DRIFTED)
    assert as_bytes(next(batches)) == after[step + 1], "it goes on while the search runs"
    may_decide.set()
    assert decided(loader)
    assert as_bytes(next(batches)) == after[step + 2]
    now = loader.stats()["features"]
    assert now == before | {"on_trainer": 0, "reason": now["reason"]}
    assert now["reason"].startswith("nothing is decided yet; data workers run torch")
    assert as_bytes(next(batches)) == after[step + 3]
    for batch in batches:
        assert decided(loader)
        if loader.stats()["features"]["on_trainer"]:
            assert loader.stats()["features"]["reason"] == f"for {len(DRIFTED.steps)} operators"
            break
        del batch


def test_a_cut_ends_the_decisions_and_a_graph_that_does_not_go_leaves_the_one_before(
    loaders: Any, drawn: list[Seen]
) -> None:
    loader = loader_of(loaders, features=HYBRID)
    whole, batches = whole_of(GRAPH), read(loader)
    assert [next(batches) for _ in range(10)] == whole[:10]
    with pytest.raises(OptionsError, match="set_features: features=5: must be a FeatureGraph"):
        loader.set_features(5)
    loader.set_features(CutGraph(GRAPH, ("price.Clamp",)))
    looks = len(drawn)
    assert [next(batches) for _ in range(10)] == whole[10:20]
    assert len(drawn) == looks
    assert loader.stats()["features"]["reason"].startswith("as the program says")
    loader.set_features(HYBRID)
    assert [next(batches) for _ in range(10)] == whole[20:30]
    assert len(drawn) > looks


def test_a_decision_that_fails_or_cannot_be_carried_out_leaves_the_cut(
    loaders: Any, drawn: list[Seen], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise PipelineError("the pipeline cannot be handed over")

    loader = loader_of(loaders, features=HYBRID)
    monkeypatch.setattr(loader._connection, "use_batch_stage", refuse)
    assert [*read(loader)] == whole_of(GRAPH)
    assert "the cut stays as it is, and is not decided anew: the pipeline cannot be handed over" in caplog.text
    assert len(drawn) == 1
    monkeypatch.setattr(Recutter, "decide", lambda *_: 1 / 0)
    assert [*read(loader_of(loaders, features=HYBRID))] == whole_of(GRAPH)
    assert "ZeroDivisionError" in caplog.text


def test_the_same_cut_again_has_no_batch_made_again(three: Any, loaders: Any) -> None:
    cut = CutGraph(GRAPH, ("price.Clamp",))
    for features in (GRAPH, cut):
        loader = loader_of(loaders, features=features, service=three.name)
        stage = loader._connection.pipeline.batch_stage
        loader.set_features(features)
        assert loader._connection.pipeline.batch_stage is stage


def test_cuts_of_long_ago_are_forgotten(loaders: Any) -> None:
    names = [step.name for step in GRAPH.steps]
    loader = loader_of(loaders, features=GRAPH)
    whole, batches = whole_of(GRAPH), iter(loader)
    for step in range(40):
        loader.set_features(CutGraph(GRAPH, tuple(names[at] for at in range(len(names)) if step >> at % 6 & 1)))
        assert as_bytes(next(batches)) == whole[step]
    assert len(loader._features._parts) <= 8


def test_when_the_data_workers_are_gone_the_trainer_takes_the_graph(
    service: Any, loaders: Any, hasty: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The real decision: with what was measured."""
    with caplog.at_level(logging.WARNING):
        loader = loader_of(loaders, features=HYBRID, service=service.name, repeat=None)
        for _ in loader:
            assert decided(loader)
            if loader.stats()["features"]["on_trainer"]:
                break
    assert "without data workers" in caplog.text
