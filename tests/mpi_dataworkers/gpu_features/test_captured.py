"""Captured steps that compute the next batch: each replay trains on its own batch's values, whatever the sizes are."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import interpreted_launch, same

from benchmarks.rap_cases import batch_of
from benchmarks.rap_plans import PlanSize, make_plan
from hetstream.errors import FeatureError
from hetstream.mpi_dataworkers.features.batches import Jagged, JaggedBatch
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.arena import LEAST_SEEN, MOST_SIZES, StepMode, decide_step, padded
from hetstream.mpi_dataworkers.gpu_features.captured import CapturedCoRun
from hetstream.mpi_dataworkers.gpu_features.fused import PackedByDataWorkers
from hetstream.mpi_dataworkers.gpu_features.launches import Launch, LaunchPlan
from hetstream.mpi_dataworkers.gpu_features.streams import Stream
from tests.mpi_dataworkers.gpu_features.fake_streams import FakeStreams

pytestmark = pytest.mark.usefixtures("interpreted")

SIZE = PlanSize("small", (1000, 50), 2, 2, 12, list_length=(0, 3))
GRAPH = make_plan(SIZE)
PLAN = LaunchPlan((Launch("0.forward", (2, 0), 2), Launch("0.backward", (1, 3), 1)), 0.0, "by hand")


def of_one_size(count: int) -> list[dict[str, Any]]:
    """Batches with other values and other lists, and as many ids."""
    first = batch_of(SIZE, 6)
    batches = [first]
    for seed in range(1, count):
        batch = batch_of(SIZE, 6, seed)
        for name, value in first.items():
            if isinstance(value, Jagged):
                batch[name] = Jagged(value.values.flip(0) + seed, value.lengths.roll(seed))
        batches.append(batch)
    return batches


class Training:
    """A model and a step that notes the features of each batch, as they are when it runs."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 3))
        self.seen: list[dict[str, Any]] = []

    def step(self, features: dict[str, Any]) -> torch.Tensor:
        copies = {name: value.clone() for name, value in features.items() if isinstance(value, torch.Tensor)}
        sparse = features["sparse"]
        self.seen.append({**copies, "sparse": type(sparse)(sparse.keys, sparse.values.clone(), sparse.lengths.clone())})
        loss: torch.Tensor = self.model(features["dense"].nan_to_num(0, 0, 0)).sum()
        loss.backward()
        return loss.detach()


def run(
    batches: list[dict[str, Any]],
    streams: FakeStreams | None = None,
    train: Callable[[dict[str, Any]], Any] | None = None,
    plan: LaunchPlan = PLAN,
) -> tuple[list[dict[str, Any]], int]:
    """Train; the features that each batch had, and how many steps were replayed."""
    training = Training()
    used = FakeStreams() if streams is None else streams
    captured = CapturedCoRun(
        GRAPH, plan, training.model, train or training.step, streams=used, kernel=(16, interpreted_launch)
    )
    found: list[dict[str, Any]] = []
    with captured:
        for _ in captured(batches):
            found.append(training.seen[-1])  # a step that is captured is seen twice on the fake
        for _ in captured(batches[:2]):
            found.append(training.seen[-1])
    return found, captured.num_replays


def check(found: list[dict[str, Any]], batches: list[dict[str, Any]]) -> None:
    for features, raw in zip(found, [*batches, *batches[:2]], strict=True):
        for name, value in FeatureTransform(GRAPH)(raw).items():
            same(without_padding(features[name]), value)


def without_padding(value: Any) -> Any:
    """Lists without the zeros behind them."""
    if not isinstance(value, JaggedBatch):
        return value
    filled = int(value.lengths.sum())
    assert not value.values[filled:].any()
    return JaggedBatch(value.keys, value.values[:filled], value.lengths)


@pytest.mark.shows("batch n+2 is copied and n+1 computed while n is trained")
def test_replays_train_on_each_batch_and_compute_the_next() -> None:
    batches, streams = of_one_size(14), FakeStreams()
    found, num_replays = run(batches, streams)
    check(found, batches)
    # Nine run as they are, the last has nothing beside it and is not captured; two of the second iteration.
    assert num_replays == 14 - 9 + 2
    first = streams.log.index((Stream.TRAINING, "replay"))
    assert (Stream.PREPROCESSING, "launch") in streams.log[first:]


def test_batches_of_other_sizes_run_as_they_are() -> None:
    batches = of_one_size(16)
    batches[12] = batch_of(SIZE, 5, 99)
    batches[13] = batch_of(SIZE, 40, 99)  # has no room in a slot
    found, num_replays = run(batches)
    check(found, batches)
    assert num_replays == 16 - 9 - 2 + 2


@pytest.mark.parametrize("full_at", [(0,), (3,), tuple(range(100))])
def test_without_room_for_slots_or_batches_no_batch_is_lost(full_at: tuple[int, ...]) -> None:
    batches = of_one_size(12)
    found, _ = run(batches, FakeStreams(full_at))
    check(found, batches)


@pytest.mark.shows("batch n+2 is copied and n+1 computed while n is trained")
def test_behind_an_error_training_goes_on_with_the_next_batch_in_its_slot() -> None:
    batches, training = of_one_size(16), Training()
    batches[12] = batches[12] | {"dense0": torch.zeros(6, dtype=torch.float64)}

    def step(features: dict[str, Any]) -> Any:
        loss = training.step(features)
        return next(iter(())) if len(training.seen) == 3 else loss

    captured = CapturedCoRun(GRAPH, PLAN, training.model, step, streams=FakeStreams(), kernel=(16, interpreted_launch))
    found: list[Any] = []
    with captured:
        steps = captured(batches)
        for _ in range(2):
            next(steps)
        with pytest.raises(FeatureError, match="step raised StopIteration"):
            next(steps)
        for number in range(3, 16):
            if number == 12:
                with pytest.raises(FeatureError, match="dense0 is float64"):
                    next(steps)
                continue
            next(steps)
            found.append(training.seen[-1])
        assert next(steps, None) is None
    assert captured.num_replays > 0
    for features, raw in zip(found, [*batches[3:12], *batches[13:]], strict=True):
        for name, value in FeatureTransform(GRAPH)(raw).items():
            same(features[name], value)


def test_a_step_that_cannot_be_captured_runs_as_it_is_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Uncapturable(FakeStreams):
        def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore about it")

    batches = of_one_size(13)
    with caplog.at_level(logging.WARNING):
        found, num_replays = run(batches, Uncapturable())
    check(found, batches)
    assert num_replays == 0
    [message] = [record.message for record in caplog.records]
    assert "operation not permitted" in message
    assert "more about it" not in message


def lists_of(count: int, rows: int = 6) -> list[dict[str, Any]]:
    """Batches whose lists have other lengths each time."""
    return [batch_of(SIZE, rows, seed) for seed in range(count)]


@pytest.mark.shows("batch n+2 is copied and n+1 computed while n is trained")
def test_lists_of_all_lengths_are_replayed_where_the_plan_is_padded() -> None:
    """Without padding nearly each batch has a size of its own."""
    batches = lists_of(40)
    sizes = {len(FeatureTransform(GRAPH)(batch)["sparse"].values) for batch in batches}
    assert len(sizes) > 10
    found, num_replays = run(batches, plan=replace(PLAN, is_padded=True))
    check(found, batches)
    assert num_replays > 25
    found, num_unpadded = run(batches)
    check(found, batches)
    assert num_unpadded < num_replays


@pytest.mark.parametrize("full_at", [(7,), (30,), tuple(range(100))])
def test_padded_batches_are_whole_also_where_there_is_no_room(full_at: tuple[int, ...]) -> None:
    batches = lists_of(14)
    found, _ = run(batches, FakeStreams(full_at), plan=replace(PLAN, is_padded=True))
    check(found, batches)


def test_data_workers_pad_as_the_trainer_does() -> None:
    batches, plan = lists_of(30), replace(PLAN, is_padded=True)
    stage = PackedByDataWorkers(GRAPH, plan, tile=16)
    training = Training()
    captured = CapturedCoRun(
        GRAPH, plan, training.model, training.step, streams=FakeStreams(), kernel=(16, interpreted_launch)
    )
    with captured:
        found = [training.seen[-1] for _ in captured(map(stage, batches))]
    check([*found, *found[:2]], batches)
    assert captured.num_replays > 15


def test_no_more_sizes_are_captured_than_there_is_memory_for(caplog: pytest.LogCaptureFixture) -> None:
    """Twelve sizes that come often: eight have graphs, and the others run as they are, which is said once."""
    of_each = [batch_of(SIZE, rows, 7) for rows in range(1, 13)]
    warm = [batch_of(SIZE, 12, seed) for seed in range(6)]  # so large that all find room in the slots
    batches = [*warm, *itertools.islice(itertools.cycle(of_each), 36 * (LEAST_SEEN + 2))]
    training = Training()
    with (
        caplog.at_level(logging.WARNING),
        CapturedCoRun(
            GRAPH, PLAN, training.model, training.step, streams=FakeStreams(), kernel=(16, interpreted_launch)
        ) as captured,
    ):
        found = [training.seen[-1] for _ in captured(batches)]
        assert captured.num_graphs <= 3 * MOST_SIZES
        assert captured.num_replays > 0
    check([*found, *found[:2]], batches)
    [message] = [record.message for record in caplog.records]
    assert "steps of other sizes run as they are: 8 sizes are captured, and no more are" in message


def test_a_size_grows_by_an_eighth_at_most_and_has_few_steps() -> None:
    assert [padded(count) for count in (0, 1, 16, 17, 100, 128, 129, 1000)] == [0, 16, 16, 32, 112, 128, 144, 1024]
    for count in [*range(300), *range(10**5, 10**5 + 50)]:
        assert count <= padded(count) < count + max(16, count / 8 + 1)
    assert len({padded(count) for count in range(100_000, 200_000)}) <= 10


def test_what_a_step_does_and_why() -> None:
    often = {"is_captured": False, "is_warm": True, "has_next": True, "num_seen": LEAST_SEEN, "size_at": -1}
    free = {"num_sizes": 0, "refusal": ""}
    for given, act, why in (
        ({"is_captured": True, "refusal": "no"}, StepMode.REPLAY, "captured"),
        ({}, StepMode.CAPTURE, "come often"),
        ({"refusal": "CUDA error"}, StepMode.RUN, "CUDA error"),
        ({"is_warm": False}, StepMode.RUN, "the first steps"),
        ({"has_next": False}, StepMode.RUN, "no next batch"),
        ({"num_seen": LEAST_SEEN - 1}, StepMode.RUN, "2 steps had these sizes before"),
        ({"num_sizes": MOST_SIZES}, StepMode.RUN, "8 sizes are captured"),
        ({"num_sizes": MOST_SIZES, "size_at": 3, "num_seen": 0}, StepMode.CAPTURE, "come often"),
    ):
        decided = decide_step(**{**often, **free, **given})
        assert (decided.act, why in decided.reason) == (act, True), given


@pytest.mark.shows("batch n+2 is copied and n+1 computed while n is trained")
def test_the_fake_finds_what_cuda_would_not_capture() -> None:
    """And what a graph gives is gone when another one is replayed."""
    streams = FakeStreams()
    words, before = streams.empty(4), streams.record(Stream.PREPROCESSING)
    streams.launch(words.zero_, (), [words])

    def joined() -> torch.Tensor:
        streams.wait(Stream.PREPROCESSING, streams.record(Stream.TRAINING))
        streams.launch(words.zero_, (), [words])
        streams.wait(Stream.TRAINING, streams.record(Stream.PREPROCESSING))
        return torch.ones(2)

    inside: list[Any] = []

    def forgotten() -> None:
        streams.wait(Stream.PREPROCESSING, streams.record(Stream.TRAINING))
        inside.append(streams.record(Stream.PREPROCESSING))
        streams.launch(words.zero_, (), [words])

    for run_within, why in (
        (lambda: streams.empty(1), "memory for results while a step is captured"),
        (lambda: streams.copy(torch.zeros(1, dtype=torch.int64)), "a copy from host memory while"),
        (lambda: streams.wait(Stream.TRAINING, before), "cudaErrorStreamCaptureIsolation"),
        (lambda: streams.launch(words.zero_, (), [words]), "would not be captured"),
        (forgotten, "was captured, and training does not wait for it"),
        (lambda: streams.capture(joined), "another capture while"),
    ):
        with pytest.raises(AssertionError, match=why):
            streams.capture(run_within)
    with pytest.raises(AssertionError, match="cudaErrorCapturedEvent"):
        streams.wait(Stream.COPYING, inside[0])
    streams.wait(Stream.TRAINING, streams.record(Stream.PREPROCESSING))
    (replay_first, first), (replay_second, second) = streams.capture(joined), streams.capture(joined)
    replay_first()
    assert first.tolist() == [1, 1]
    replay_second()
    assert first.isnan().all()
    assert second.tolist() == [1, 1]
