"""A loader's features: one graph, computed by data workers, by the trainer, or by both, with the same bytes."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_features import as_bytes

from hetstream import DataLoader, FeatureError
from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged, JaggedBatch
from hetstream.mpi_dataworkers.features.cut_graph import CutGraph
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense, jagged
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.loader.feature_parts import FeatureParts
from hetstream.mpi_dataworkers.partitioner.partition import partition

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


@pytest.mark.parametrize("features", [GRAPH, CUT, CutGraph(GRAPH, tuple(step.name for step in GRAPH.steps))], ids=str)
def test_a_plan_that_the_loader_is_given_is_computed_wherever_it_is_cut(
    three: Any, loaders: Any, whole: list[Any], features: Any
) -> None:
    for place in ({"service": three.name}, {}, {"num_workers": 1}):
        assert made(loader_of(loaders, features=features, **place)) == whole, place
    assert isinstance(next(iter(loader_of(loaders, features=features)))["ids"], JaggedBatch)


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


OTHER = CutGraph(GRAPH, ("price.Clamp",))


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


class Short:
    """In the place of a GPU: has no memory for some batches, as `FusedTransform` says it."""

    def __init__(self, graph: FeatureGraph, note_shortage: Any) -> None:
        self.transform, self.note, self.count = FeatureTransform(graph), note_shortage, 0

    def __call__(self, batch: Any) -> dict[str, Any]:
        self.count += 1
        if self.count == 3:
            self.note("CUDA out of memory. Tried to allocate 2 GiB.")
        return self.transform(batch)


def test_without_gpu_memory_data_workers_compute_the_whole_from_then_on_and_that_is_said_once(
    three: Any, loaders: Any, whole: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    loader = loader_of(loaders, features=GRAPH, service=three.name)
    short: list[Short] = []

    def compute(graph: FeatureGraph) -> Short:
        short.append(Short(graph, parts.note_shortage))
        return short[-1]

    parts = FeatureParts(GRAPH, torch.device("cpu"), compute=compute)
    parts.attach(loader._connection, 0)
    loader._features = parts
    with caplog.at_level(logging.WARNING):
        assert made(loader, {0: CUT, 6: CUT}) == whole
    [said] = [record.message for record in caplog.records if "features" in record.message]
    assert "Tried to allocate 2 GiB." in said
    assert [each.count for each in short] == [3], "no batch after the third was the GPU's"


class Unreachable:
    """A loader's connection whose stage cannot be changed."""

    has_features = False

    def __init__(self) -> None:
        self.statistics = SimpleNamespace(features=None)

    def use_batch_stage(self, stage: Any) -> None:
        raise PipelineError(f"{stage} cannot be handed to data workers now")


def test_a_batch_is_there_although_data_workers_cannot_have_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    parts = FeatureParts(CUT, torch.device("cpu"), compute=FeatureTransform)
    parts.attach(Unreachable(), 0)  # type: ignore[arg-type]
    parts.note_shortage("CUDA out of memory")
    assert as_bytes(parts.finish(parts.stage(collate([1, 2])))) == as_bytes(FeatureTransform(GRAPH)(collate([1, 2])))
    assert "the cut stays as it is: " in caplog.text


def no_triton(_: FeatureGraph) -> Any:
    raise FeatureError("features on a GPU need Triton: pip install 'hetstream[triton]'")


def test_without_triton_data_workers_have_the_whole(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(FeatureParts(CUT, torch.device("cpu"), compute=no_triton).stage, FeatureTransform)
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
