"""Threads that make the samples of a batch together: the same bytes, the same errors, faster where the GIL is free."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import sample_datasets as datasets
import torch
from PIL import Image
from torch.utils.data import default_collate

from hetstream import DataLoader, EvaluationRecipe, ImageFolder, numpy_sample_generator, sample_generator
from hetstream.mpi_dataworkers.errors import DataWorkerDied, PipelineError
from hetstream.mpi_dataworkers.generators import making_sample
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline, SampleError, use_one_thread
from hetstream.mpi_dataworkers.order.sharding import SampleSeeds
from hetstream.mpi_dataworkers.sources.hdf5 import Hdf5Dataset
from hetstream.mpi_dataworkers.threads import MAX_THREADS, ThreadTeam
from hetstream.mpi_dataworkers.worker.process import WorkPage


@pytest.fixture
def team() -> Iterator[ThreadTeam]:
    """Four threads."""
    made = ThreadTeam(4, use_one_thread)
    yield made
    made.close()


def batch_of(dataset: Any, indices: list[int], team: ThreadTeam | None, collate_fn: Any = default_collate) -> Any:
    wanted = np.array(indices)
    pipeline = Pipeline(dataset, collate_fn, len(dataset))
    return pipeline.make_batch(wanted, SampleSeeds(wanted, 3, 1), team=team)


def with_noise(samples: list[Any]) -> Any:
    return default_collate(samples), random.random(), np.random.rand(), torch.rand(2)


def test_samples_are_made_at_once_and_the_batch_is_that_of_one_thread(team: ThreadTeam) -> None:
    alone = batch_of(datasets.ThreadSafe(40), list(range(20)), None, with_noise)
    random.seed(), np.random.seed(), torch.seed()
    among = batch_of(datasets.ThreadSafe(40, together={4, 5, 6, 7}), list(range(20)), team, with_noise)
    for one, other in zip(alone[0][:3], among[0][:3], strict=True):
        assert torch.equal(one, other)
    assert alone[1:3] == among[1:3]
    assert torch.equal(alone[3], among[3])
    assert batch_of(datasets.ThreadSafe(40), [7], team)[1] == alone[0][1][7], "whatever else is in the batch"


def test_of_several_errors_the_first_in_order_is_raised(team: ThreadTeam) -> None:
    dataset = datasets.ThreadSafe(40, together={4, 5, 6, 7}, does={5: "raise", 6: "raise", 30: "raise"})
    with pytest.raises(SampleError) as caught:
        batch_of(dataset, list(range(40)), team)
    assert caught.value.sample_index == 5
    assert isinstance(caught.value.user_error(), datasets.UserError)
    assert len(batch_of(datasets.ThreadSafe(40), list(range(8)), team)[0]) == 8, "the threads are there"


def test_what_cannot_be_divided_is_made_by_one_thread(team: ThreadTeam) -> None:
    for dataset in (datasets.Augmented(8), datasets.ThreadSafe(8)):
        pipeline = Pipeline(dataset, default_collate, 8)
        assert pipeline.threads_help is isinstance(dataset, datasets.ThreadSafe)
    assert torch.equal(
        batch_of(datasets.Augmented(8), [1, 2], team)[0], batch_of(datasets.Augmented(8), [1, 2], None)[0]
    )
    assert not Pipeline(datasets.ThreadSafe(8), default_collate, 8, batched=False).threads_help


def test_the_generators_belong_to_a_sample() -> None:
    for ask in (sample_generator, numpy_sample_generator):
        with pytest.raises(PipelineError, match=rf"{ask.__name__}\(\) outside of a sample"):
            ask()
    with making_sample(5):
        first, arrays = sample_generator().random(), numpy_sample_generator().random()
        with making_sample(6):
            assert sample_generator().random() != first
        assert sample_generator().random() != first, "it goes on"
    with making_sample(5):
        assert (sample_generator().random(), numpy_sample_generator().random()) == (first, arrays)
        assert first != random.Random(5).random(), "apart from the global generators"


class Mirror:
    """At random; says that several threads may call it."""

    thread_safe = True

    def __call__(self, image: Any) -> Any:
        return image[:, ::-1].copy() if sample_generator().random() < 0.5 else image


def test_the_sources_are_thread_safe_where_their_transform_is(tmp_path: Path, team: ThreadTeam) -> None:
    for index in range(8):
        path = tmp_path / "images" / "a" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["images"] = np.random.default_rng(0).integers(0, 256, (8, 30, 40, 3), dtype=np.uint8)
    folder = ImageFolder(tmp_path / "images", EvaluationRecipe(16, 20))
    rows = Hdf5Dataset(tmp_path / "rows.h5", "images", transform=Mirror())
    for dataset, place in ((folder, 0), (rows, slice(None))):
        assert Pipeline(dataset, default_collate, 8).threads_help
        alone, among = (batch_of(dataset, list(range(8)), one)[place] for one in (None, team))
        assert torch.equal(alone, among)
    rows.close()
    assert not Pipeline(Hdf5Dataset(tmp_path / "rows.h5", "images"), default_collate, 8).threads_help


def test_of_several_samples_at_work_the_oldest_counts() -> None:
    page = WorkPage()
    page.begin("s", 1, 2, 5.0)
    page.at_sample(7)
    page.at_sample(8, MAX_THREADS - 1)
    page.at_sample(9, 1)
    found = []
    for thread in (0, MAX_THREADS - 1, 1):
        work = page.read()
        assert work is not None
        found.append((work.session_id, work.token, work.step, work.limit_s, work.sample_index))
        page.rest(thread)
    assert found == [("s", 1, 2, 5.0, index) for index in (7, 8, 9)]
    assert page.read() is None
    page.close()


# --- real processes -------------------------------------------------------------------------------------------------


def epoch_of(dataset: Any, **options: Any) -> list[list[Any]]:
    with DataLoader(dataset, batch_size=8, shuffle=True, seed=4, **options) as loader:
        return [[column.tolist() for column in batch[:3]] for batch in loader]


@pytest.mark.parametrize("processes", [1, 2])
def test_an_epoch_is_the_same_wherever_it_is_made(service: Any, processes: int) -> None:
    service.start_workers(processes, "--threads", "4")
    in_process = epoch_of(datasets.ThreadSafe(80))
    assert epoch_of(datasets.ThreadSafe(80), num_workers=1) == in_process
    with DataLoader(
        datasets.ThreadSafe(80), batch_size=8, shuffle=True, seed=4, service=service.name, collate_fn=names_and_columns
    ) as loader:
        batches = list(loader)
        assert loader.stats()["local_steps"] == 0
    assert [columns[:3] for _, columns in batches] == in_process
    assert {number for _, columns in batches for number in columns[3]} == {1}, "torch's threads"
    assert 1 < max(num_threads for num_threads, _ in batches) <= 4, "as many as find work"
    assert "one of the threads makes all samples" not in service.log("worker")


def names_and_columns(samples: list[Any]) -> tuple[int, list[Any]]:
    """The threads that this process has for samples, and the columns as lists."""
    others = sum(one.name.startswith("hetstream-sample") for one in threading.enumerate())
    return 1 + others, [column.tolist() for column in default_collate(samples)]


def test_threads_that_do_not_help_are_said_once(service: Any) -> None:
    service.start_workers(1, "--threads", "2")
    for _ in range(2):
        with DataLoader(datasets.Augmented(16), batch_size=8, service=service.name) as loader:
            assert [ids.tolist() for _, ids in loader] == [list(range(8)), list(range(8, 16))]
    assert service.log("worker").count("one of the threads makes all samples of Augmented") == 1
    assert "Use --processes" in service.log("worker")


@pytest.mark.slow
def test_bad_hung_and_deadly_samples_are_found_among_those_made_at_once(service: Any) -> None:
    service.start_workers(1, "--threads", "4")
    dataset = datasets.ThreadSafe(48, does={9: "raise", 10: "raise", 21: "exit", 37: "hang"})
    options = {"on_error": "skip", "max_attempts": 2, "sample_timeout_s": 1}
    with DataLoader(dataset, batch_size=8, service=service.name, **options) as loader:
        got = [index for batch in loader for index in batch[0].tolist()]
        assert got == [index for index in range(48) if index not in dataset.does]
        assert [one.sample_index for one in loader.skipped_samples] == [9, 10, 21, 37]
        assert loader.stats()["local_steps"] == 0
    with (
        DataLoader(
            datasets.ThreadSafe(8, does={3: "hang"}),
            batch_size=8,
            service=service.name,
            **options | {"on_error": "raise"},
        ) as loader,
        pytest.raises(DataWorkerDied, match="at sample 3 of step 0") as raised,
    ):
        next(iter(loader))
    assert "in hang_for_ever" in str(raised.value)
