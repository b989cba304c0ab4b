"""A training job with flash checkpoints on real Slurm: killed, requeued, cancelled, and at its time limit.

The final weights and the data of every step must be those of a run that nobody disturbed.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ckpt_requeue import measure
from benchmarks.clients.ckpt_job import SAVE_EVERY, CheckpointJob, differences, undisturbed
from hetstream.checkpoint.disk.directory import CheckpointDirectory

MakeJob = Callable[..., CheckpointJob]
pytestmark = [pytest.mark.slurm, pytest.mark.every_release]


@pytest.fixture
def make_job(devcluster: Any) -> Iterator[MakeJob]:
    """A function that submits a job; it is ended, with all that it left, at the end of the test."""
    jobs: list[CheckpointJob] = []

    def make(name: str, steps: int, **options: Any) -> CheckpointJob:
        jobs.append(CheckpointJob(devcluster.out_dir / name, devcluster.env, steps, **options))
        jobs[-1].submit()
        return jobs[-1]

    yield make
    for job in jobs:
        job.cancel()
        for name in job.shared_memory():
            shutil.rmtree(Path("/dev/shm") / name)


def writer_log(job: CheckpointJob) -> str:
    logs = sorted(job.directory.glob(".hetstream/*/writers/gpu*.log"))
    return "".join(path.read_text() for path in logs)


def newest_on_disk(job: CheckpointJob) -> int:
    found = CheckpointDirectory(job.checkpoints).checkpoints()
    return found[0].generation.step if found else 0


@pytest.mark.shows("a restarted step adopts what the killed one held in memory; a requeued job resumes from disk")
@pytest.mark.timeout(400)
def test_a_killed_trainer_goes_on_from_memory_and_a_requeued_job_from_disk(devcluster: Any, tmp_path: Path) -> None:
    directory = devcluster.out_dir / "killed and requeued"
    directory.mkdir()
    rows, problems = measure(directory, devcluster.env, 2)
    assert problems == []
    assert all(row.met is not False for row in rows), rows


@pytest.mark.shows("on SIGTERM the newest generation gets to disk, and all ranks stop after the same step")
@pytest.mark.timeout(400)
@pytest.mark.slow
def test_what_is_in_memory_is_on_disk_when_a_cancelled_job_is_gone(make_job: MakeJob) -> None:
    job = make_job("cancelled", steps=100_000)
    job.wait_for_steps(2 * SAVE_EVERY + 2)
    job.cancel()
    words = job.ledger()[-1]
    assert words[0] == "stopping", "the trainer was not asked to stop, or was killed before it saved"
    assert newest_on_disk(job) == int(words[1])
    assert job.shared_memory() == []
    assert "is not on disk" not in writer_log(job)


@pytest.mark.shows("on SIGTERM the newest generation gets to disk, and all ranks stop after the same step")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_trainer_is_asked_to_stop_before_the_time_limit(make_job: MakeJob) -> None:
    job = make_job("time limit", steps=100_000, time_limit="1")
    job.wait_for_end()
    words = job.ledger()[-1]
    assert words[0] == "stopping"
    assert newest_on_disk(job) == int(words[1])
    assert re.search(r"its time limit: trainers are asked to save and to end, 2\d s before", writer_log(job))
    assert job.shared_memory() == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_without_writers_of_the_job_the_next_trainer_starts_its_own(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("checkpoint writer killed", steps=60, step_s=0.05)
    truth = undisturbed(tmp_path / "truth", 60)
    job.wait_for_steps(SAVE_EVERY + 1)
    job.kill_writer()
    job.kill_trainer()
    job.wait_for_end()
    assert list(differences(job, truth)) == []
    assert newest_on_disk(job) == 60
    assert job.shared_memory() == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_trainer_whose_jobs_writer_dies_starts_its_own(make_job: MakeJob) -> None:
    job = make_job("checkpoint writer died", steps=100_000)
    job.wait_for_steps(SAVE_EVERY + 1)
    job.kill_writer()
    before = newest_on_disk(job)
    job.wait(lambda: newest_on_disk(job) > before + 10 * SAVE_EVERY, "a checkpoint by another checkpoint writer")
    job.cancel()
    assert newest_on_disk(job) == int(job.ledger()[-1][1])
    assert job.shared_memory() == []


@pytest.mark.shows("on SIGTERM the newest generation gets to disk, and all ranks stop after the same step")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_signal_of_sbatch_ends_no_writer_and_reaches_trainers(make_job: MakeJob) -> None:
    job = make_job("signal", steps=100_000)
    job.wait_for_steps(SAVE_EVERY + 1)
    (writer,) = job.writers()
    job.run("scancel", "--signal=USR1", f"{job.job_id}.{_writer_step(job)}")
    job.wait(lambda: job.ledger()[-1][0] == "stopping", "the trainer's end")
    job.wait_for_end()
    assert newest_on_disk(job) == int(job.ledger()[-1][1])
    assert writer not in job.writers()
    assert signal.SIGUSR1.name in writer_log(job)


def _writer_step(job: CheckpointJob) -> str:
    shown = job.run("squeue", "--steps", "--noheader", f"--jobs={job.job_id}", "--format=%i %j")
    return next(line.split()[0].partition(".")[2] for line in shown.splitlines() if line.endswith("hetstream-ckpt"))
