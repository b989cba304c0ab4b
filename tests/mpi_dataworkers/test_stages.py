"""Data workers that feed data workers: the same bytes as in process, once and in order, whichever of them die.

There is no GPU here: the last stage runs where a data worker says that it has one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets
import sample_stages as stages

from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.faults import POINTS
from tests.mpi_dataworkers.batches import as_bytes

LOADER_OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 5, "shuffle": True, "max_attempts": 10}
LENGTH = 120
BOTH = {"batch_stage": stages.Noise(), "gpu_stage": stages.Noise(2.0)}


@pytest.fixture(scope="module")
def staged(three: Any) -> Iterator[Any]:
    """Three data workers without a GPU, and two with."""
    for _ in range(2):
        three.start_workers(1, "--device", "gpu")
    return three


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampler": [*range(1, LENGTH, 2), *range(0, LENGTH, 2)], "shuffle": None},
        {"lengths": [index % 9 + 1 for index in range(LENGTH)], "bucket_boundaries": [4, 7]},
        {"batch_size": None, "sampler": range(30), "shuffle": None},
    ],
    ids=lambda options: "-".join(options) or "planned",
)
def test_two_stages_make_what_one_process_makes(staged: Any, loaders: Any, options: dict[str, Any]) -> None:
    stage = {"gpu_stage": stages.Times(2.0)} if "batch_size" in options else BOTH
    streamed = loaders(datasets.Augmented(LENGTH), service=staged.name, **stage, **options)
    local = loaders(datasets.Augmented(LENGTH), **stage, **options)
    for _ in range(2):
        want = [[part.tolist() if hasattr(part, "tolist") else part for part in batch] for batch in local]
        got = [[part.tolist() if hasattr(part, "tolist") else part for part in batch] for batch in streamed]
        assert got == want
    assert streamed.stats()["local_steps"] == 0


def test_each_stage_runs_where_it_belongs(staged: Any, loaders: Any, tmp_path: Path) -> None:
    first, last = stages.Witness(tmp_path / "first"), stages.Witness(tmp_path / "last")
    list(loaders(datasets.Augmented(LENGTH), service=staged.name, batch_stage=first, gpu_stage=last))
    without_gpu, with_gpu = (set((tmp_path / name).read_text().split()) for name in ("first", "last"))
    assert without_gpu
    assert with_gpu
    assert without_gpu.isdisjoint({*with_gpu, str(os.getpid())})


def test_a_loader_without_a_gpu_stage_uses_none(staged: Any, loaders: Any, tmp_path: Path) -> None:
    loader = loaders(datasets.Augmented(LENGTH), service=staged.name, batch_stage=stages.Witness(tmp_path / "first"))
    assert as_bytes(loader) == as_bytes(loaders(datasets.Augmented(LENGTH)))
    assert loader.stats()["num_data_workers"] == 3


def test_what_a_stage_raises_reaches_the_trainer_and_what_is_skipped_is_told(staged: Any, loaders: Any) -> None:
    options = {"shuffle": False, "max_attempts": 1, "service": staged.name}
    for stage in ("batch_stage", "gpu_stage"):
        stages_of = {"gpu_stage": stages.Times(1.0)} | {stage: stages.Raising(17)}
        batches = iter(loaders(datasets.Augmented(40), **stages_of, **options))
        seen = [next(batches) for _ in range(4)]
        with pytest.raises(datasets.UserError, match=r"no batch with 17[\s\S]*step 4[\s\S]*sample_stages.py"):
            next(batches)
        assert len([*seen, *batches]) == 9
        skipping = loaders(datasets.Augmented(40), on_error="skip", **stages_of, **options)
        ids = [index for batch in skipping for index in batch[1].tolist()]
        assert ids == [index for index in range(40) if not 16 <= index < 20]
        assert skipping.stats()["skipped"] == 4
    poisoned = loaders(datasets.Poisoned(40), gpu_stage=stages.Noise(), on_error="skip", **options)
    want = loaders(datasets.Poisoned(40), gpu_stage=stages.Noise(), on_error="skip", shuffle=False)
    assert as_bytes(poisoned) == as_bytes(want)
    assert poisoned.stats()["skipped"] == want.stats()["skipped"] == 1


def test_the_other_stage_changes_between_two_steps(staged: Any, loaders: Any) -> None:
    loader = loaders(datasets.Augmented(40), service=staged.name, gpu_stage=stages.Times(2.0))
    batches = iter(loader)
    got = as_bytes(islice(batches, 4))
    loader.set_batch_stage(stages.Times(3.0))
    got += as_bytes(batches)
    last = {"gpu_stage": stages.Times(2.0)}
    before, after = (
        as_bytes(loaders(datasets.Augmented(40), batch_stage=by, **last)) for by in (None, stages.Times(3.0))
    )
    assert got == [*before[:4], *after[4:]]


def test_the_steps_of_a_stage_without_data_workers_are_made_by_the_next(service: Any, loaders: Any) -> None:
    want = as_bytes(loaders(datasets.Augmented(24), **BOTH))
    nobody = loaders(datasets.Augmented(24), service=service.name, **BOTH)
    assert as_bytes(nobody) == want
    assert nobody.stats()["local_steps"] == 6
    service.start_workers(1, "--device", "gpu")
    with_gpu = loaders(datasets.Augmented(24), service=service.name, **BOTH)
    assert as_bytes(with_gpu) == want
    assert with_gpu.stats()["local_steps"] == 0


@pytest.mark.parametrize("stage", ["batch_stage", "gpu_stage"])
def test_data_workers_of_either_stage_may_die(service: Any, loaders: Any, tmp_path: Path, stage: str) -> None:
    service.start_workers(2)
    for _ in range(2):
        service.start_workers(1, "--device", "gpu")
    plain = {"batch_stage": stages.Times(2.0), "gpu_stage": stages.Times(3.0)}
    striking = stages.Striking(plain[stage].factor, 11, tmp_path)
    loader = loaders(datasets.Augmented(LENGTH), service=service.name, **plain | {stage: striking})
    want = loaders(datasets.Augmented(LENGTH), **plain)
    for _ in range(2):
        assert as_bytes(loader) == as_bytes(want)
    assert any(file.name.isdigit() for file in tmp_path.iterdir()), "none has died"


def test_a_data_worker_of_either_stage_may_die_at_every_point(
    service: Any, loaders: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    of_workers = sorted(point for point in POINTS if point.startswith("worker.") and point != "worker.draining")
    of_loaders = sorted(point for point in POINTS if point.startswith("loader.") and point != "loader.state_taken")
    flags = set()
    for device, points, count in (("cpu", of_workers, 2), ("gpu", [*of_workers, *of_loaders], 3)):
        for number in range(count):  # one that loses six processes in a row gives up
            mine = {point: tmp_path / f"{device}.{point}" for point in points[number::count]}
            flags |= set(mine.values())
            faults = ",".join(f"{point}:1:kill:{flag}" for point, flag in mine.items())
            monkeypatch.setenv("HETSTREAM_FAULT", faults)
            service.start_workers(1, "--device", device)
    monkeypatch.delenv("HETSTREAM_FAULT")
    loader = loaders(datasets.Augmented(LENGTH), service=service.name, **BOTH)
    want = loaders(datasets.Augmented(LENGTH), **BOTH)
    for _ in range(20):
        assert as_bytes(loader) == as_bytes(want)
        if all(flag.exists() for flag in flags):
            break
    assert {flag.name for flag in flags if not flag.exists()} == set(), "points at which none has died"


def test_the_dispatcher_may_die_between_the_stages(service: Any, loaders: Any) -> None:
    service.start_workers(2)
    service.start_workers(1, "--device", "gpu")
    loader = loaders(datasets.Augmented(400), service=service.name, **BOTH)
    batches = iter(loader)
    got = as_bytes(islice(batches, 10))
    service.kill_dispatcher()
    service.start_dispatcher()
    got += as_bytes(batches)
    assert got == as_bytes(loaders(datasets.Augmented(400), **BOTH))


@pytest.mark.slow
def test_a_data_worker_with_a_gpu_that_is_stopped_takes_its_sessions_with_it(service: Any, loaders: Any) -> None:
    service.start_workers(1)
    for _ in range(2):
        service.start_workers(1, "--device", "gpu")
    loader = loaders(datasets.Augmented(400), service=service.name, **BOTH)
    batches = iter(loader)
    got = as_bytes(islice(batches, 10))
    stopped = int(service.log("dispatcher").split("registered")[1].rpartition("pid=")[2].split()[0])
    os.kill(stopped, signal.SIGSTOP)
    try:
        got += as_bytes(batches)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert got == as_bytes(loaders(datasets.Augmented(400), **BOTH))


@pytest.mark.parametrize(
    "options",
    [{"dataset": datasets.Log(8), "shuffle": None}, {"sharing": "lossless"}, {"sharding": "data"}, {"in_order": False}],
)
def test_a_gpu_stage_is_refused_where_it_cannot_be(loaders: Any, options: dict[str, Any]) -> None:
    with pytest.raises(OptionsError, match=r"gpu_stage with .* give batch_stage instead"):
        loaders(**{"dataset": datasets.Augmented(8), "gpu_stage": stages.Times(2.0)} | options)
