"""Data workers that feed data workers: the same bytes as in process, once and in order, whichever of them die.

There is no GPU here: the last stage runs where a data worker says that it has one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets
import sample_stages as stages

from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.dispatcher.client import StatusClient
from hetstream.mpi_dataworkers.process.faults import POINTS
from hetstream.mpi_dataworkers.wire.address import read_address_file
from hetstream.mpi_dataworkers.wire.messages import SteerDataWorkers
from tests.mpi_dataworkers.batches import as_bytes

LOADER_OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 5, "shuffle": True, "max_attempts": 10}
LENGTH = 120
BOTH = {"batch_stage": stages.Noise(), "gpu_stage": stages.Noise(2.0)}


@pytest.mark.shows("two stages of data workers make what one process makes; each has its controller")
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


OF_WORKERS = sorted(point for point in POINTS if point.startswith("worker.") and point != "worker.draining")
# A data worker with a GPU is a loader, too, but one whose state nobody takes.
OF_HOLDERS = [
    *OF_WORKERS, *sorted(point for point in POINTS if point.startswith("loader.") and point != "loader.state_taken")
]  # fmt: skip


@pytest.mark.shows("data workers of either stage may be killed at each point of the protocol")
def test_a_data_worker_of_either_stage_may_die_at_every_point(
    service: Any, loaders: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = set()
    for device, points, count in (("cpu", OF_WORKERS, 2), ("gpu", OF_HOLDERS, 3)):
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


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_data_worker_of_either_stage_may_die_while_it_leaves(
    service: Any, loaders: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    """It is told to leave in the midst of a pass; beside it is one more of each stage."""
    for other in ("cpu", "gpu"):
        service.start_workers(1, "--device", other)
    monkeypatch.setenv("HETSTREAM_FAULT", f"worker.draining:1:kill:{tmp_path / 'struck'}")
    leaving = service.start_workers(1, "--device", device)
    monkeypatch.delenv("HETSTREAM_FAULT")
    batches = iter(loaders(datasets.Augmented(LENGTH), service=service.name, **BOTH))
    got = as_bytes(islice(batches, 6))
    leaving.send_signal(signal.SIGTERM)
    got += as_bytes(batches)
    assert got == as_bytes(loaders(datasets.Augmented(LENGTH), **BOTH))
    leaving.wait(timeout=20)
    assert (tmp_path / "struck").exists()


def stop_and_continue(service: Any, loader: Any, want: Any, flags: list[Path], least_s: float) -> None:
    """Read until each process has stopped at its point, was taken for lost, and went on after `least_s` or more."""
    waiting, stopped = list(flags), dict[Path, int]()
    deadline = time.monotonic() + 100
    try:
        while waiting or stopped:
            assert time.monotonic() < deadline, f"not stopped: {waiting}, not taken for lost: {stopped}"
            assert as_bytes(loader) == as_bytes(want)
            for flag in [flag for flag in waiting if flag.exists() and flag.read_text()]:
                waiting.remove(flag)
                stopped[flag] = int(flag.read_text())
            for flag, pid in list(stopped.items()):
                is_lost = re.search(rf"pid={pid} lost", service.log("dispatcher")) is not None
                if is_lost and time.time() - flag.stat().st_mtime >= least_s:
                    os.kill(pid, signal.SIGCONT)
                    del stopped[flag]
        # Those that were lost offer themselves again, with what they held.
        assert as_bytes(loader) == as_bytes(want)
    finally:
        for pid in stopped.values():
            os.kill(pid, signal.SIGCONT)


def start_with_stops(
    service: Any, points: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, directory: Path
) -> list[Path]:
    """Data workers of each device, each of which stops once, at a point of its own; and one of each that does not."""
    flags = []
    for device, names in points.items():
        service.start_workers(1, "--device", device)
        for point in names:
            flags.append(directory / f"{device}.{point}")
            monkeypatch.setenv("HETSTREAM_FAULT", f"{point}:1:stop:{flags[-1]}")
            service.start_workers(1, "--device", device)
        monkeypatch.delenv("HETSTREAM_FAULT")
    return flags


@pytest.mark.shows("data workers of either stage may be killed at each point of the protocol")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_data_workers_of_both_stages_may_stop_for_ten_seconds_at_every_point(
    service: Any, loaders: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = start_with_stops(service, {"cpu": OF_WORKERS, "gpu": OF_HOLDERS}, monkeypatch, tmp_path)
    loader = loaders(datasets.Augmented(LENGTH), service=service.name, **BOTH)
    stop_and_continue(service, loader, loaders(datasets.Augmented(LENGTH), **BOTH), flags, 10.0)


@pytest.mark.parametrize("listed", [False, True])
def test_a_data_worker_with_a_gpu_keeps_all_of_the_stage_before_at_work(
    service: Any, loaders: Any, tmp_path: Path, listed: bool
) -> None:
    """Four data workers sleep at once for one with a GPU, so that a step takes a quarter of the time of a batch."""
    service.start_workers(4)
    service.start_workers(1, "--device", "gpu")
    order = {"sampler": [*range(LENGTH)], "shuffle": None} if listed else {}
    stage = {"batch_stage": stages.Resting(0.1, tmp_path / "rests"), "gpu_stage": stages.Times(2.0)}
    loader = loaders(datasets.Augmented(LENGTH), service=service.name, **stage, **order)
    list(loader)
    (tmp_path / "rests").unlink()
    list(loader)
    spans = [tuple(map(float, line.split())) for line in (tmp_path / "rests").read_text().splitlines()]
    assert len(spans) >= LENGTH // 4
    at_once = [sum(begin <= other < end for other, _ in spans) for begin, end in spans]
    assert sum(at_once) / len(at_once) > 2, "what begins while one rests, itself counted"


def test_a_data_worker_with_a_gpu_that_is_started_twice_makes_no_batch_come_twice(
    service: Any, loaders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a companion that Slurm started again while its first start is alive: both say the same Slurm job."""
    service.start_workers(2)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    twice = [service.start_workers(1, "--device", "gpu") for _ in range(2)]
    batches = iter(loaders(datasets.Augmented(LENGTH), service=service.name, **BOTH))
    got = as_bytes(islice(batches, 5))
    with StatusClient(read_address_file(service.address_file)) as client:
        rows = [row for row in client.fetch().data_workers if row.device == "gpu"]
        assert [row.slurm_job for row in rows] == ["77", "77"]
        client.steer(SteerDataWorkers("", "drain", 1, "enough", ["77"], "gpu"))
    got += as_bytes(batches)
    assert got == as_bytes(loaders(datasets.Augmented(LENGTH), **BOTH))
    assert [one.wait(timeout=20) for one in twice] == [0, 0]


def test_what_data_workers_hand_to_each_other_is_not_in_the_summary(service: Any, loaders: Any) -> None:
    service.start_workers(1)
    service.start_workers(1, "--device", "gpu")
    loader = loaders(datasets.Augmented(LENGTH), service=service.name, **BOTH)
    batches = iter(loader)
    list(islice(batches, 5))
    assert "stage." in service.log("dispatcher")
    service.dispatcher.send_signal(signal.SIGTERM)
    service.dispatcher.wait(timeout=15)
    summary = json.loads((service.directory / "work" / "summary.json").read_text())
    assert [row["job_name"].startswith("stage.") for row in summary["loaders"]] == [False]
    assert len(list(batches)) == LENGTH // 4 - 5


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
def test_all_data_workers_of_both_stages_may_stop_at_once_for_ten_seconds(service: Any, loaders: Any) -> None:
    """The trainer makes its steps meanwhile; then they offer themselves again, and what they held is worth nothing."""
    service.start_workers(2)
    for _ in range(2):
        service.start_workers(1, "--device", "gpu")
    pids = {int(pid) for pid in re.findall(r"pid=(\d+) registered", service.log("dispatcher"))}
    assert len(pids) == 4
    stage = {"batch_stage": stages.Noise(), "gpu_stage": stages.Resting(0.01, service.directory / "rests")}
    loader, want = (
        loaders(datasets.Augmented(4000), service=service.name, **stage),
        loaders(datasets.Augmented(4000), **stage),
    )
    batches = iter(loader)
    got = as_bytes(islice(batches, 10))
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        while time.monotonic() - began < 10:
            got += as_bytes(islice(batches, 1))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    made_here = loader.stats()["local_steps"]
    assert made_here > 0
    got += as_bytes(batches)
    assert got == as_bytes(want)
    assert loader.stats()["local_steps"] < len(got) - 20, "they work again"


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
