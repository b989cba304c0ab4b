"""A loader's features: one graph, computed by data workers, by the trainer, or by both, with the same bytes."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from random_features import as_bytes

from hetstream import DataLoader
from hetstream.base.errors import OptionsError
from hetstream.errors import FeatureError
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.features import native
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged, JaggedBatch, Nullable
from hetstream.mpi_dataworkers.features.cut import CutGraph
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense, jagged
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.corun import MOST_IN_A_ROW, Shortage, Try, came_back, fell_short, next_try
from hetstream.mpi_dataworkers.loader.features import FeatureParts, TrainersDevice
from hetstream.mpi_dataworkers.partitioner.partition import partition
from tests.programs import needs

GRAPH = FeatureGraph.of(
    {
        "dense": [
            dense("price") >> ops.Clamp(0.0, 50.0) >> ops.Logit(1e-3),
            dense("price") >> ops.Clamp(0.0, 50.0) >> ops.BoxCox(0.5),
        ],
        "ids": [jagged("ids") >> ops.FirstX(2) >> ops.SigridHash(1, 1000)],
        "row": dense("row", "int64"),
    }
)
FIRST = ("price.Clamp.Logit", "ids.FirstX.SigridHash")
CUT = CutGraph(GRAPH, FIRST)
OTHER = CutGraph(GRAPH, ("price.Clamp",))
LENGTH = 60
LOADER_OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 5}


def collate(rows: list[int]) -> dict[str, Any]:
    return {
        "row": torch.tensor(rows),
        "price": torch.tensor([row * 0.7 for row in rows]),
        "ids": Jagged(
            torch.cat([torch.arange(row % 4) + row for row in rows]), torch.tensor([row % 4 for row in rows])
        ),
    }


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


def made(loader: Any, at: dict[int, Any] | None = None) -> list[Any]:
    """The bytes of a pass, with other features before some steps."""
    found, batches = [], iter(loader)
    for step in range(len(loader)):
        if at and step in at:
            loader.set_features(at[step])
        found.append(as_bytes(next(batches)))
    assert next(batches, None) is None
    return found


def loader_of(loaders: Any, **options: Any) -> Any:
    return loaders([*range(LENGTH)], shuffle=True, **{"collate_fn": collate, **options})


@pytest.fixture(name="whole")
def whole_fixture(loaders: Any) -> list[Any]:
    return made(loader_of(loaders, batch_stage=FeatureTransform(GRAPH)))


@pytest.mark.shows("a loader takes a feature graph by `features=`, under plans 0 to 4")
@pytest.mark.parametrize("features", [GRAPH, CUT, CutGraph(GRAPH, tuple(step.name for step in GRAPH.steps))], ids=str)
def test_a_plan_that_the_loader_is_given_is_computed_wherever_it_is_cut(
    three: Any, loaders: Any, whole: list[Any], features: Any
) -> None:
    for place in ({"service": three.name}, {}, {"num_workers": 1}):
        assert made(loader_of(loaders, features=features, **place)) == whole, place
    assert isinstance(next(iter(loader_of(loaders, features=features)))["ids"], JaggedBatch)


@pytest.mark.shows("data workers are killed while a feature graph is cut")
def test_killed_data_workers_change_no_byte_of_a_cut_stream(
    service: Any, loaders: Any, whole: list[Any], tmp_path: Path
) -> None:
    service.start_workers(2)
    loader = loader_of(loaders, features=CUT, service=service.name, max_attempts=10, collate_fn=Striking(tmp_path))
    assert made(loader) == whole
    assert any(file.name.isdigit() for file in tmp_path.iterdir()), "none has died"


def test_the_graph_is_cut_elsewhere_between_two_steps_and_no_batch_changes_or_is_lost(
    service: Any, loaders: Any, whole: list[Any], tmp_path: Path
) -> None:
    service.start_workers(2)
    changes = {1: CutGraph(GRAPH, ("price.Clamp",)), 4: GRAPH, 5: CUT, 9: CutGraph(GRAPH)}
    striking = {"service": service.name, "max_attempts": 10, "collate_fn": Striking(tmp_path)}
    for place in (striking, {}, {"num_workers": 1}):
        assert made(loader_of(loaders, features=CUT, **place), changes) == whole, place


def test_other_features_begin_at_their_step(loaders: Any, whole: list[Any]) -> None:
    other = FeatureGraph.of({"row": dense("row", "int64") >> ops.Clamp(0, 5)})
    found = made(loader_of(loaders, features=CUT), {3: CutGraph(other, ("row.Clamp",))})
    assert found[:3] == whole[:3]
    assert all([*batch] == ["row"] for batch in found[3:])


def test_a_state_is_continued_with_another_cut(loaders: Any, whole: list[Any]) -> None:
    loader = loader_of(loaders, features=CUT)
    batches = iter(loader)
    assert [as_bytes(next(batches)) for _ in range(4)] == whole[:4]
    other = loader_of(loaders, features=GRAPH)
    other.load_state_dict(loader.state_dict())
    assert [*map(as_bytes, other)] == whole[4:]


class Stream(torch.utils.data.IterableDataset[int]):
    """Row numbers, divided among the processes that read them."""

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        first, every = (info.id, info.num_workers) if info is not None else (0, 1)
        return iter(range(first, LENGTH, every))


def row_length(row: int) -> int:
    return row % 4 + 1


def test_a_stream_by_length_is_cut_elsewhere_in_its_midst(three: Any, loaders: Any) -> None:
    options = {"collate_fn": collate, "length_of": row_length, "bucket_boundaries": [2, 3], "service": three.name}
    before = [*map(as_bytes, loaders(Stream(), batch_stage=FeatureTransform(GRAPH), **options))]
    loader, found = loaders(Stream(), features=CUT, **options), []
    for step, batch in enumerate(loader):
        found.append(as_bytes(batch))
        if step in (2, 6):
            loader.set_features(OTHER if step == 2 else CUT)
    assert found == before


def test_a_position_is_continued_by_another_number_of_ranks_with_another_cut(three: Any) -> None:
    def rank(number: int, ranks: int, **options: Any) -> Any:
        size = {"global_batch_size": 8, "seed": 5, "rank": number, "world_size": ranks, "service": three.name}
        return DataLoader([*range(61)], collate_fn=collate, job_name=f"{options.keys()}{ranks}", **size, **options)

    with rank(0, 1, batch_stage=FeatureTransform(GRAPH)) as loader:
        before = [*map(as_bytes, loader)]
    with rank(0, 2, features=CUT) as loader:
        batches = iter(loader)
        for step in range(4):
            next(batches)
            if step == 2:
                loader.set_features(OTHER)
        state = loader.state_dict()
    with rank(0, 1, features=CutGraph(GRAPH)) as loader:
        loader.load_state_dict(state)
        assert [*map(as_bytes, loader)] == before[4:]


def test_jobs_that_share_batches_may_cut_the_graph_differently(three: Any, loaders: Any, whole: list[Any]) -> None:
    options = {"service": three.name, "sharing": "lossless", "pipeline_name": "features"}
    one_cut, other_cut = (loader_of(loaders, features=features, **options) for features in (CUT, OTHER))
    first, second = iter(one_cut), iter(other_cut)
    found: list[list[Any]] = [[], []]
    for step in range(LENGTH // 4):
        found[0].append(as_bytes(next(first)))
        found[1].append(as_bytes(next(second)))
        if step == 4:
            other_cut.set_features(CUT)
        if step == 9:
            one_cut.set_features(OTHER)
    assert found == [whole, whole]


def test_a_batch_that_is_no_dict_is_one_error(loaders: Any) -> None:
    with pytest.raises(FeatureError, match=r": it is a list; it must be a dict of features \(see collate_rows\)\n"):
        next(iter(loader_of(loaders, features=CUT, collate_fn=list)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("features", [GRAPH, CUT], ids=str)
def test_without_a_gpu_data_workers_compute_the_whole_and_that_is_said_once(
    loaders: Any, whole: list[Any], features: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        loader = loader_of(loaders, features=features, device="cuda")
        assert made(loader, {2: GRAPH, 5: CUT}) == whole
    [said] = [record.message for record in caplog.records if "features" in record.message]
    assert "data workers compute the whole graph: device='cuda': this process has no CUDA device" in said
    with pytest.raises(OptionsError, match="this process has no CUDA device"):
        loader_of(loaders, device="cuda")


class Gpu:
    """In the place of a GPU: computes with torch, and has no memory for some batches, as `FusedTransform` says it.

    Args:
        short_at: numbers of batches, counted from 0 on, for which there is none.
        empty_at: numbers of looks for memory at which there is some; None: at all.
    """

    def __init__(self, short_at: tuple[int, ...], empty_at: tuple[int, ...] | None = None) -> None:
        self.short_at, self.empty_at = short_at, empty_at
        self.num_batches = 0
        self.looked_for: list[int] = []
        self.now_s = 0.0

    def parts_of(self, loader: Any, features: Any) -> FeatureParts:
        """Of a loader, which has them from here on."""
        place = TrainersDevice(self.compute, self.has_memory)
        parts = FeatureParts(features, torch.device("cpu"), place=place, now=lambda: self.now_s)
        parts.attach(loader._connection, 0)
        loader._features = parts
        if loader._connection.pipeline.batch_stage is not parts.stage:
            loader._connection.use_batch_stage(parts.stage)
        return parts

    def compute(self, graph: FeatureGraph, note_shortage: Any) -> Any:
        transform = FeatureTransform(graph)

        def run(batch: Any) -> dict[str, Any]:
            if self.num_batches in self.short_at:
                note_shortage("CUDA out of memory. Tried to allocate 2 GiB.", 2 << 30)
            self.num_batches += 1
            return transform(batch)

        return run

    def has_memory(self, num_bytes: int) -> bool:
        self.looked_for.append(num_bytes)
        return self.empty_at is None or len(self.looked_for) - 1 in self.empty_at


def said_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "features" in record.message]


@pytest.mark.shows("without GPU memory, data workers compute until there is some again")
def test_without_gpu_memory_data_workers_compute_the_whole_from_then_on_and_that_is_said_once(
    three: Any, loaders: Any, whole: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    loader, gpu = loader_of(loaders, features=GRAPH, service=three.name), Gpu((2,))
    gpu.parts_of(loader, CUT)
    with caplog.at_level(logging.WARNING):
        assert made(loader, {6: CUT}) == whole
    [said] = said_of(caplog)
    assert "Tried to allocate 2 GiB." in said
    assert gpu.num_batches == 3, "no batch after the third was the GPU's"
    assert "the GPU is tried again in 10 s" in loader.stats()["features"]["reason"]


@pytest.mark.shows("without GPU memory, data workers compute until there is some again")
@pytest.mark.parametrize("change", [None, OTHER], ids=str)
def test_the_graph_comes_back_when_the_gpu_has_memory_again_and_no_byte_changes(
    three: Any, loaders: Any, whole: list[Any], caplog: pytest.LogCaptureFixture, change: Any
) -> None:
    """In an exact number of steps, since the clock is the test's; also with another cut, given in the meantime."""
    for place in ({"service": three.name}, {}):
        loader, gpu = loader_of(loaders, features=GRAPH, **place), Gpu((1,), empty_at=(1,))
        parts, found = gpu.parts_of(loader, CUT), []
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for step, batch in enumerate(loader):
                found.append(as_bytes(batch))
                gpu.now_s += 6.0
                if step == 3 and change is not None:
                    loader.set_features(change)
        assert found == whole
        # Short at step 1; in vain after 12 s; again after 24 s, and from the step behind that on it is the GPU's.
        assert gpu.looked_for == [2 << 30] * 2
        assert gpu.num_batches == 2 + len(whole) - 8
        assert parts.stage.cut == (change or CUT)
        away, back = said_of(caplog)
        assert "data workers compute the whole graph: CUDA out of memory." in away
        assert "the GPU has memory again" in back


def test_a_gpu_that_stays_full_is_tried_ever_more_rarely_and_then_no_more() -> None:
    shortage, now_s, waits = fell_short(Shortage(), 5.0), 5.0, []
    while shortage.num_in_a_row <= MOST_IN_A_ROW:
        assert not next_try(shortage, now_s).is_due
        began = now_s
        while not next_try(shortage, now_s).is_due:
            now_s += 1.0
        waits.append(now_s - began)
        shortage = fell_short(shortage, now_s)
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600, 600, 600, 600, 600]
    assert next_try(shortage, now_s + 1e9) == (
        Try(False, "the GPU had no memory 13 times in a row, and is not tried again")
    )
    short = came_back(fell_short(Shortage(), 0.0), 10.0)
    assert not next_try(short, 1e9).is_due
    assert fell_short(short, 20.0).num_in_a_row == 2
    assert fell_short(short, 1000.0).num_in_a_row == 1, "it was long ago"


class Unreachable:
    """A loader's connection whose stage cannot be changed."""

    has_features = False

    def __init__(self) -> None:
        self.statistics = SimpleNamespace(features=None)

    def use_batch_stage(self, stage: Any) -> None:
        raise PipelineError(f"{stage} cannot be handed to data workers now")


@pytest.mark.shows("closures that cannot be pickled stay in the trainer")
def test_a_batch_is_there_although_data_workers_cannot_have_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    place = TrainersDevice(lambda graph, _: FeatureTransform(graph))
    parts = FeatureParts(CUT, torch.device("cpu"), place=place)
    parts.attach(Unreachable(), 0)  # type: ignore[arg-type]
    parts.note_shortage("CUDA out of memory")
    assert as_bytes(parts.finish(parts.stage(collate([1, 2])))) == as_bytes(FeatureTransform(GRAPH)(collate([1, 2])))
    assert "the cut stays as it is: " in caplog.text


def no_triton(_: FeatureGraph, __: Any) -> Any:
    raise FeatureError("features on a GPU need Triton: pip install 'hetstream[triton]'")


def test_without_triton_data_workers_have_the_whole(caplog: pytest.LogCaptureFixture) -> None:
    assert FeatureParts(CUT, torch.device("cpu"), place=TrainersDevice(no_triton)).stage.cut == CutGraph(GRAPH)
    assert "need Triton: pip install" in caplog.text


def test_what_does_not_go_with_features_is_one_error(loaders: Any) -> None:
    stage = FeatureTransform(GRAPH)
    for options, words in (
        ({"features": GRAPH, "batch_stage": stage}, "features with batch_stage: the graph is the loader's stage"),
        ({"features": GRAPH, "gpu_stage": stage}, "features with gpu_stage"),
        ({"features": stage}, "must be a FeatureGraph, a CutGraph"),
        ({"features": GRAPH, "device": "cudda"}, "device='cudda'"),
    ):
        with pytest.raises(OptionsError, match=words):
            loader_of(loaders, **options)
    loader = loader_of(loaders, features=GRAPH)
    with pytest.raises(OptionsError, match="set_batch_stage on a loader with features"):
        loader.set_batch_stage(stage)
    with pytest.raises(OptionsError, match="features=3: must be a FeatureGraph"):
        loader.set_features(3)
    with pytest.raises(OptionsError, match="set_features on a loader without features"):
        loader_of(loaders).set_features(GRAPH)
    with pytest.raises(OptionsError, match="the loader has features=, and either the graph or the forward"):
        partition(torch.nn.Linear(1, 1), next(iter(loader)), loader=loader)


@pytest.mark.parametrize("features", [GRAPH, CUT], ids=str)
def test_a_name_that_is_not_in_the_batch_is_told_at_its_step(three: Any, loaders: Any, features: Any) -> None:
    for place in ({"service": three.name}, {}):
        batches = iter(loader_of(loaders, features=features, collate_fn=without_price, **place))
        with pytest.raises(FeatureError, match="it has no 'price'; it has row, ids"):
            next(batches)


def without_price(rows: list[int]) -> dict[str, Any]:
    return {name: value for name, value in collate(rows).items() if name != "price"}


def test_batches_come_to_their_device() -> None:
    with DataLoader([*range(8)], 4, collate_fn=collate, features=CUT, device="meta") as loader:
        assert all(batch["dense"].is_meta and batch["ids"].values.is_meta for batch in loader)


def without_ids(rows: list[int]) -> dict[str, Any]:
    return {name: value for name, value in collate(rows).items() if name != "ids"}


@pytest.mark.shows("a graph that does not fit its batches, or a kernel that cannot be compiled, is told")
@pytest.mark.parametrize("is_remote", [True, False])
def test_a_graph_that_batches_do_not_fit_is_refused_at_the_call(
    three: Any, loaders: Any, whole: list[Any], is_remote: bool
) -> None:
    """As soon as a batch of the pass has come; the graph before goes on, and no batch is lost."""
    place = {"service": three.name} if is_remote else {}
    loader, found = loader_of(loaders, features=CUT, **place), []
    for step, batch in enumerate(loader):
        found.append(as_bytes(batch))
        if step in (0, 5):
            for graph, words in (
                (FeatureGraph.of({"y": dense("age") >> ops.Clamp(0.0, 5.0)}), "'age' is not among row, price, ids"),
                (FeatureGraph.of({"y": dense("row") >> ops.Clamp(0.0, 5.0)}), "row is dense int64, and dense float32"),
                (FeatureGraph.of({"y": jagged("row")}), "row is dense int64, and jagged int64 in the graph"),
                (FeatureGraph.of({"y": dense("price", width=3)}), "price has 1 values in a row, and 3 in the graph"),
            ):
                with pytest.raises(FeatureError, match=f"set_features: the batches of this pass do not fit.*{words}"):
                    loader.set_features(graph)
    assert found == whole


def test_columns_are_those_of_the_last_batch_also_where_their_names_stay(loaders: Any) -> None:
    """Of the second pass a column has another type; the graph of the first one does not take it."""
    loader = loader_of(loaders, features=CutGraph(FeatureGraph.of({"row": dense("row", "int64")})))
    wide = FeatureGraph.of({"price": dense("price", "float64")})
    next(iter(loader))
    with pytest.raises(FeatureError, match="price is dense float32, and dense float64 in the graph"):
        loader.set_features(wide)
    loader.collate_fn = with_wide_prices
    passed = iter(loader)
    next(passed)
    loader.set_features(wide)
    assert next(passed)["price"].dtype == torch.float64


def with_gaps(rows: list[int]) -> dict[str, Any]:
    valid = torch.tensor([row % 2 == 0 for row in rows])
    return collate(rows) | {"age": Nullable(torch.ones(len(rows)), valid), "tax": np.ones(len(rows), dtype=">f4")}


@pytest.mark.shows("a graph that does not fit its batches, or a kernel that cannot be compiled, is told")
def test_columns_with_gaps_and_of_another_byte_order_are_what_their_step_says(loaders: Any) -> None:
    loader = loader_of(loaders, features=CUT, collate_fn=with_gaps)
    batches = iter(loader)
    next(batches)
    with pytest.raises(FeatureError, match=r"age has missing values; say dense\('age', ..., is_nullable=True\)"):
        loader.set_features(FeatureGraph.of({"y": dense("age") >> ops.Clamp(0.0, 5.0)}))
    loader.set_features(FeatureGraph.of({"y": dense("tax") >> ops.Clamp(0.0, 5.0)}))
    assert next(batches)["y"].tolist() == [1.0] * 4


def with_wide_prices(rows: list[int]) -> dict[str, Any]:
    found = collate(rows)
    return found | {"price": found["price"].double()}


def test_a_graph_for_the_next_pass_is_accepted_where_the_data_changes(loaders: Any, whole: list[Any]) -> None:
    loader = loader_of(loaders, features=CutGraph(FeatureGraph.of({"row": dense("row", "int64")})))
    loader.collate_fn = without_ids
    assert len([*loader]) == len(whole)
    with pytest.raises(FeatureError, match="call set_features behind that pass's iter"):
        loader.set_features(GRAPH)
    loader.collate_fn = collate
    loader.set_epoch(0)
    loader.set_features(GRAPH)
    assert [*map(as_bytes, loader)] == whole


@pytest.mark.shows("features work in mixtures, under DDP, and on hosts with and without a compiler")
@needs("g++")
def test_data_workers_with_and_without_a_compiler_make_the_same_bytes_and_that_is_said(
    service: Any, loaders: Any, whole: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native code begins after some batches, where there is a compiler; Logit and BoxCox stay torch's."""
    monkeypatch.setattr(native, "WORTH_S", 1e-4)
    loader = loader_of(loaders, features=GRAPH)
    assert made(loader) == whole
    said = loader.stats()["features"]["reason"]
    assert "data workers run native code in 2 of 4 chains, torch where Logit or BoxCox is" in said
    states = loader_of(loaders, features=GRAPH)
    batches = iter(states)
    assert [as_bytes(next(batches)) for _ in range(4)] == whole[:4]
    monkeypatch.setattr(native, "compiler", lambda: None)
    without = loader_of(loaders, features=GRAPH)
    without.load_state_dict(states.state_dict())
    assert [*map(as_bytes, without)] == whole[4:]
    assert "data workers run torch, because there is no C++ compiler" in without.stats()["features"]["reason"]
