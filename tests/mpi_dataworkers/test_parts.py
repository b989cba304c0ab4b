"""One process plays the parts of several of torch's workers: what `worker_init_fn` sets for one is no other's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from hetstream.mpi_dataworkers.ops.origins import PassSeeds
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline
from hetstream.mpi_dataworkers.ops.worker_context import EnteredPipeline
from hetstream.mpi_dataworkers.wire.messages import WorkerSeeds


class Held:
    shared = 0

    def __init__(self) -> None:
        self.variant = 0


class Dataset(torch.utils.data.Dataset[Any]):
    kind = 0

    def __init__(self) -> None:
        self.variant = 0
        self.held = [Held()]
        self.array = np.zeros(3, np.int64)
        self.text = bytearray(2)
        self.generator = np.random.default_rng(1)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return index


def dataset() -> Any:
    return get_worker_info().dataset


def sets_what_was_there_for_the_first(worker_id: int) -> None:
    dataset().variant = dataset().held[0].variant = worker_id


def sets_for_one_alone(worker_id: int) -> None:
    if worker_id == 1:
        dataset().variant = dataset().held[0].variant = 1


def sets_an_array(worker_id: int) -> None:
    dataset().array[1] = worker_id


def sets_bytes(worker_id: int) -> None:
    dataset().text[0] = worker_id


def sets_a_class(worker_id: int) -> None:
    type(dataset()).kind = worker_id


def sets_another_class(worker_id: int) -> None:
    Held.shared = worker_id


def sets_itself(worker_id: int) -> None:
    sets_itself.number = worker_id  # type: ignore[attr-defined]


def sets_the_environment(worker_id: int) -> None:
    os.environ["HETSTREAM_TEST_PART"] = str(worker_id)


def sets_the_same(worker_id: int) -> None:
    os.environ["HETSTREAM_TEST_PART"] = "1"
    Held.shared = 5


def seeds_what_it_holds(worker_id: int) -> None:
    dataset().generator = np.random.default_rng(worker_id)


def entered(worker_init_fn: Callable[[int], None], num_workers: int = 3) -> EnteredPipeline:
    pipeline = Pipeline(Dataset(), default_collate, 100, worker_init_fn=worker_init_fn, num_workers=num_workers)
    return EnteredPipeline(pipeline, 0)


SEEDS = PassSeeds(5, 0, workers=WorkerSeeds(5, 0, [0], False))


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    monkeypatch.setattr(Held, "shared", 0)
    monkeypatch.setattr(Dataset, "kind", 0)
    monkeypatch.setenv("HETSTREAM_TEST_PART", "0")


@pytest.mark.parametrize(
    ("worker_init_fn", "expected"),
    [(sets_what_was_there_for_the_first, [0, 1, 2]), (sets_for_one_alone, [0, 1, 0])],
)
def test_a_part_has_what_it_has_set_and_else_what_the_program_had(
    worker_init_fn: Callable[[int], None], expected: list[int]
) -> None:
    parts = entered(worker_init_fn)
    for step in [0, 1, 2, 0, 2, 1, 1, 0, 2, 2, 0]:
        made = parts.enter(SEEDS, step).dataset
        assert (made.variant, made.held[0].variant) == (expected[step], expected[step])
    parts.rest()
    assert made.variant == made.held[0].variant == 0


@pytest.mark.parametrize(
    "worker_init_fn",
    [sets_an_array, sets_bytes, sets_a_class, sets_another_class, sets_itself, sets_the_environment],
)
def test_what_one_part_leaves_for_the_next_is_named(worker_init_fn: Callable[[int], None]) -> None:
    assert entered(worker_init_fn).left_by_parts(SEEDS)
    assert entered(worker_init_fn, num_workers=1).left_by_parts(SEEDS) == "", "there is no other one"


@pytest.mark.parametrize(
    "worker_init_fn",
    [sets_what_was_there_for_the_first, sets_for_one_alone, sets_the_same, seeds_what_it_holds],
)
def test_what_each_part_has_for_itself_is_not(worker_init_fn: Callable[[int], None]) -> None:
    assert entered(worker_init_fn).left_by_parts(SEEDS) == ""
