"""A step that a data worker was at when it was lost as a whole: never made in the trainer's own process."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import deadly_datasets as datasets
import pytest
import torch
from hooking import hooked
from torch.utils.data import DataLoader

from hetstream.base.limits import available_bytes
from hetstream.mpi_dataworkers.errors import DataWorkerDied
from hetstream.mpi_dataworkers.loader.isolated_steps import StepsApart
from hetstream.mpi_dataworkers.ops.pipeline import Watched
from hetstream.mpi_dataworkers.process.config import memory_of_task_from_environment
from hetstream.mpi_dataworkers.wire.messages import ErrorPolicy
from tests.conftest import WaitUntil

LOADER_OPTIONS: dict[str, Any] = {"batch_size": 4, "max_attempts": 2}


def makers(log: Path) -> Counter[str]:
    return Counter(log.read_text().splitlines())


@pytest.mark.shows("the kernel ends the process that runs user code before its parent")
def test_who_runs_user_code_goes_first(service: Any, wait_until: WaitUntil) -> None:
    service.start_workers(1)
    pid = service.workers[0].pid

    def points(process: int) -> int:
        return int(Path(f"/proc/{process}/oom_score_adj").read_text())

    def children() -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    wait_until(lambda: any(points(child) == 1000 for child in children()), 60, "a process for user code")
    assert points(pid) < 1000


@pytest.mark.shows("the kernel ends the process that runs user code before its parent")
def test_a_step_that_ends_whole_data_workers_is_left_out_or_raised_and_the_trainer_goes_on(
    service: Any, loaders: Any, tmp_path: Path
) -> None:
    service.start_workers(2)
    log = tmp_path / "log"
    loader = loaders(datasets.Deadly(40, 13, log), service=service.name, on_error="skip")
    seen = [index for _, indices in loader for index in indices.tolist()]
    assert seen == [index for index in range(40) if index != 13]
    (left_out,) = loader.skipped_samples
    assert left_out.sample_index == 13
    assert "a child of the trainer, was killed by signal 9, at sample 13 of step 3" in left_out.error
    assert makers(log)["child"] == 2, "max_attempts"
    assert 1 <= makers(log)["data worker"] <= 2
    assert "trainer" not in makers(log)

    passing = iter(loaders(datasets.Deadly(40, 13, tmp_path / "again"), service=service.name))
    service.start_workers(1)
    assert [index for _ in range(3) for index in next(passing)[1].tolist()] == list(range(12))
    with pytest.raises(DataWorkerDied, match="at sample 13 of step 3"):
        next(passing)
    assert "trainer" not in makers(tmp_path / "again")


@pytest.mark.shows("the kernel ends the process that runs user code before its parent")
def test_under_the_hook_it_is_the_error_of_its_step(service: Any, tmp_path: Path, monkeypatch: Any) -> None:
    service.start_workers(1)
    with hooked(service.name, monkeypatch):
        loader = DataLoader(datasets.Deadly(40, 13, tmp_path / "log"), 4, num_workers=1)
        passing = iter(loader)
        assert [index for _ in range(3) for index in next(passing)[1].tolist()] == list(range(12))
        with pytest.raises(RuntimeError, match="exited unexpectedly"):  # as torch's for a worker that died
            next(passing)
    # The attempts, and those of torch's own workers, also where no data worker holds anything.
    assert makers(tmp_path / "log")["child"] == 6
    assert "trainer" not in makers(tmp_path / "log")


def test_what_a_child_makes_has_the_bytes_of_data_workers(service: Any, loaders: Any, tmp_path: Path) -> None:
    service.start_workers(1)
    log = tmp_path / "log"
    expected = list(loaders(datasets.Deadly(40, -1, log)))
    found = list(loaders(datasets.DeadlyOnce(40, 13, log), service=service.name))
    assert len(found) == len(expected)
    for (numbers, indices), (others, their_indices) in zip(found, expected, strict=True):
        assert torch.equal(numbers, others)
        assert torch.equal(indices, their_indices)
    assert makers(log) == {"data worker": 1, "child": 1}


@pytest.mark.parametrize("is_slurms", [False, True])
def test_a_child_takes_no_more_memory_than_is_left(
    service: Any, loaders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slurms: bool
) -> None:
    service.start_workers(1)
    wanted_bytes = available_bytes() // 16 * 15
    if is_slurms:
        monkeypatch.setenv("SLURM_MEM_PER_NODE", "1")
        wanted_bytes = 2 << 30  # more than a large test process has freed, and may use again
    dataset = datasets.TooLarge(40, 13, tmp_path / "log", wanted_bytes)
    loader = loaders(dataset, service=service.name, on_error="skip")
    seen = [index for _, indices in loader for index in indices.tolist()]
    assert seen == [index for index in range(40) if index != 13]
    # Where nearly nothing is left, the child may be killed before it can say so.
    assert any(text in loader.skipped_samples[0].error for text in ("Unable to allocate", "a child of the trainer"))
    assert makers(tmp_path / "log") == {"data worker": 1}


def test_what_slurm_gives_a_task_is_read_from_its_variables() -> None:
    for environ, expected in (
        ({}, None),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_NODE": "1000", "SLURM_TASKS_PER_NODE": "2(x3),1"}, 500 << 20),
        ({"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "8"}, 800 << 20),
        ({"SLURM_MEM_PER_GPU": "4000", "SLURM_GPUS_ON_NODE": "2", "SLURM_TASKS_PER_NODE": "2"}, 4000 << 20),
    ):
        assert memory_of_task_from_environment(environ) == expected


def test_a_stream_that_ends_who_reads_it_raises_in_the_trainer(service: Any, loaders: Any, tmp_path: Path) -> None:
    service.start_workers(1)
    loader = loaders(datasets.DeadlyStream(40, 13, tmp_path / "log"), service=service.name)
    passing = iter(loader)
    assert [index for _ in range(3) for index in next(passing).tolist()] == list(range(12))
    with pytest.raises(DataWorkerDied, match="a child of the trainer, was killed by signal 9"):
        next(passing)
    assert makers(tmp_path / "log") == {"data worker": 1, "child": 2}


def test_a_child_that_hangs_is_replaced_and_counts_as_one_that_died() -> None:
    def make(_: ErrorPolicy, watched: Watched) -> Any:
        watched.at_sample(13)
        signal.pause()

    apart = StepsApart(make)
    with pytest.raises(DataWorkerDied, match="was longer at one sample than sample_timeout_s, at sample 13 of step 3"):
        apart.made(3, 4, ErrorPolicy(max_attempts=2, sample_timeout_s=0.5))
    apart.close()
