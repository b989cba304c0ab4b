"""Captured steps that compute the next batch: each replay trains on its own batch's values, whatever the sizes are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from interpreted import interpreted_launch, same

from benchmarks.rap_cases import batch_of
from hetstream.mpi_dataworkers.features.batches import Jagged
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.captured import CapturedCoRun
from hetstream.mpi_dataworkers.gpu_features.fake_streams import FakeStreams
from hetstream.mpi_dataworkers.gpu_features.launches import Launch, LaunchPlan
from hetstream.mpi_dataworkers.gpu_features.plans import PlanSize, make_plan
from hetstream.mpi_dataworkers.gpu_features.streams import Stream

SIZE = PlanSize("small", (1000, 50), 2, 2, 12, list_length=(0, 3))
GRAPH = make_plan(SIZE)
PLAN = LaunchPlan((Launch("0.forward", (2, 0), 2), Launch("0.backward", (1, 3), 1)), 0.0, "by hand")


@pytest.fixture(scope="module", autouse=True)
def _interpreted() -> Iterator[None]:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'hetstream[triton]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


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
) -> tuple[list[dict[str, Any]], int]:
    """Train; the features that each batch had, and how many steps were replayed."""
    training = Training()
    used = FakeStreams() if streams is None else streams
    captured = CapturedCoRun(
        GRAPH, PLAN, training.model, train or training.step, streams=used, kernel=(16, interpreted_launch)
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
            same(features[name], value)


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
