"""Stages on GPUs that misbehave: what they give is what a run in process gives, or the error that one raises."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import hostile_stages as hostile
import pytest
import sample_datasets as datasets
import sample_stages as stages
import torch

from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.errors import PipelineError
from tests.mpi_dataworkers.batches import as_bytes

LENGTH = 40
LOADER_OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 5}


def loader_of(loaders: Any, staged: Any, stage: Any, **options: Any) -> Any:
    return loaders(datasets.Augmented(LENGTH), gpu_stage=stage, shuffle=False, **{"service": staged.name} | options)


def test_any_structure_that_changes_from_step_to_step(staged: Any, loaders: Any) -> None:
    def plain(value: Any) -> Any:
        return repr([one.tolist() if isinstance(one, torch.Tensor) else one for one in _leaves(value)])

    streamed = loader_of(loaders, staged, hostile.Shapes())
    assert [plain(one) for one in streamed] == [
        plain(one) for one in loader_of(loaders, staged, hostile.Shapes(), service=None)
    ]
    assert streamed.stats()["local_steps"] == 0


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from _leaves(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


@pytest.mark.parametrize("stage", [hostile.Large(), hostile.InPlace()], ids=["large", "in place"])
def test_large_batches_and_batches_changed_in_place(staged: Any, loaders: Any, stage: Any) -> None:
    got, want = (loader_of(loaders, staged, stage, **more) for more in ({}, {"service": None}))
    for one, other in zip(got, want, strict=True):
        assert all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))
    assert got.stats()["local_steps"] == 0


def test_a_stage_that_is_no_function_of_its_batch_loses_no_batch(staged: Any, loaders: Any) -> None:
    ids = [index for _, those in loader_of(loaders, staged, hostile.Counting()) for index in those.tolist()]
    assert ids == [*range(LENGTH)]


def test_a_stage_that_holds_the_gil_is_waited_for(staged: Any, loaders: Any) -> None:
    loader = loader_of(loaders, staged, hostile.HoldsGil(6, 13))
    assert as_bytes(loader) == as_bytes(loaders(datasets.Augmented(LENGTH), shuffle=False))
    assert loader.stats()["duplicates_dropped"] == 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), torch.OutOfMemoryError),
        (RuntimeError("CUDA error: device-side assert triggered"), RuntimeError),
        (MemoryError(), MemoryError),
        (StopIteration("no more"), RuntimeError),
        (RecursionError("too deep"), RecursionError),
        (ImportError("no module of the GPU's node"), ImportError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_it_raises_is_raised_at_its_step(staged: Any, loaders: Any, error: BaseException, kind: type) -> None:
    batches = iter(loader_of(loaders, staged, hostile.Raises(error), max_attempts=1))
    assert len(as_bytes(islice(batches, 2))) == 2
    with pytest.raises(kind, match=str(error) or None) as caught:
        next(batches)
    assert "step 2" in str(caught.value)
    assert "hostile_stages.py" in str(caught.value) or isinstance(error, StopIteration)
    assert len(list(batches)) == 7
    skipping = loader_of(loaders, staged, hostile.Raises(error), on_error="skip", max_attempts=1)
    assert [int(ids[0]) for _, ids in skipping] == [0, 4, 12, 16, 20, 24, 28, 32, 36]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_what_ends_programs_ends_no_data_worker(staged: Any, loaders: Any, error: BaseException) -> None:
    skipping = loader_of(loaders, staged, hostile.Raises(error), on_error="skip", max_attempts=1)
    assert [int(ids[0]) for _, ids in skipping] == [0, 4, 12, 16, 20, 24, 28, 32, 36]


def test_what_cannot_be_sent_is_refused_when_it_is_given(loaders: Any) -> None:
    for stage in (stages.Locked(), sys._getframe(), (number for number in range(3)), [stages.Times(2.0)]):
        with pytest.raises(OptionsError, match="gpu_stage"):
            loaders(datasets.Augmented(LENGTH), gpu_stage=stage)


def test_a_module_that_is_missing_where_the_stage_runs_is_named(
    service: Any, loaders: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "only_here.py").write_text("def stage(batch):\n    return batch\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    stage = importlib.import_module("only_here").stage
    service.start_workers(1)
    service.start_workers(1, "--device", "gpu")
    loader = loader_of(loaders, service, stage)
    (tmp_path / "only_here.py").unlink()
    with pytest.raises(PipelineError, match="No module named 'only_here'"):
        next(iter(loader))


def test_without_a_data_worker_with_a_gpu_the_trainer_says_why_it_works(
    service: Any, loaders: Any, caplog: pytest.LogCaptureFixture
) -> None:
    service.start_workers(1)
    loader = loader_of(loaders, service, stages.Times(2.0))
    began = time.monotonic()
    assert len(list(loader)) == LENGTH // 4
    assert time.monotonic() - began < 20
    assert "no data worker with a GPU has come yet, or none reaches this process; the program makes" in caplog.text


def test_a_data_worker_with_a_gpu_that_nobody_feeds_waits_once(service: Any, loaders: Any) -> None:
    service.start_workers(1, "--device", "gpu")
    loader = loader_of(loaders, service, stages.Times(2.0))
    began = time.monotonic()
    assert len(list(loader)) == LENGTH // 4
    assert time.monotonic() - began < 6, "a second for each step would be ten"
    assert loader.stats()["local_steps"] == 0
