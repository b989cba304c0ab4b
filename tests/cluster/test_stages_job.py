"""A job with a stage on GPUs on real Slurm: each stage has data workers and a controller of its own.

GPUs are Slurm's bookkeeping only, as are CPUs: what a stage costs is sleeps.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients.elastic_job import ElasticJob

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "clients" / "stages_train.py"
pytestmark = [pytest.mark.slurm, pytest.mark.every_release]
WaitUntil = Callable[..., None]
DIRECTIVES = (
    "--data-worker-cpus=1 --data-worker-cooldown=2 --gpu-data-worker-mem=512M --gpu-data-worker-partition=gpu "
    "--gpu-data-worker-cpus=1"
)


@pytest.fixture
def submit(devcluster: Any, wait_until: WaitUntil) -> Iterator[Callable[..., ElasticJob]]:
    jobs: list[ElasticJob] = []

    def act(name: str, directives: str, *arguments: str) -> ElasticJob:
        words = ("--mode=multi", *arguments)
        job = ElasticJob(
            devcluster.out_dir / name, devcluster.env, f"{DIRECTIVES} {directives}", *words, program=PROGRAM
        )
        jobs.append(job)
        wait_until((job.home / "address").exists, timeout_s=60, what="the dispatcher")
        return job

    yield act
    for job in jobs:
        print((job.home / "master.log").read_text() if (job.home / "master.log").exists() else "no master.log")
        job.cancel()
        wait_until(job.has_ended, timeout_s=120, what="an empty queue")


def ran_on_gpus(job: ElasticJob) -> list[list[str]]:
    """Slurm job, GPUs, host and process of each that ran the second stage."""
    path = job.directory / "steps.gpu"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def devices(job: ElasticJob) -> list[str]:
    return [one["device"] for one in job.status()["data_workers"]]


@pytest.mark.shows("two stages of data workers make what one process makes; each has its controller")
@pytest.mark.timeout(400)
def test_each_stage_grows_by_its_own_controller_and_each_gpu_has_one_data_worker(
    submit: Callable[..., ElasticJob], wait_until: WaitUntil
) -> None:
    """A step takes the trainer 50 ms, a GPU 70 ms and a CPU 150 ms: more than one of each stage."""
    costs = ("--cpu-s=0.15", "--gpu-s=0.07", "--step-s=0.05", "--num-steps=80")
    job = submit("stages", "--data-workers=1-6 --gpu-data-workers=1-3", *costs)
    wait_until(lambda: devices(job).count("gpu") >= 2 and devices(job).count("cpu") >= 2, 150, "both stages to grow")
    status = job.status()
    assert "data workers" in status["elastic"]
    assert "data workers" in status["elastic_gpu"]
    assert {one["device"] for one in status["decisions"]} == {"cpu", "gpu"}
    gpu_jobs = [one["slurm_job"] for one in status["data_workers"] if one["device"] == "gpu"]
    assert len(set(gpu_jobs)) == len(gpu_jobs), "one process for each"
    shown = job.run("squeue", "--noheader", f"--jobs={','.join(gpu_jobs)}", "--format=%j %C %b").splitlines()
    assert {row.replace("gres/", "").replace("gres:", "") for row in shown} == {"job.sbatch-gpu-data-worker 1 gpu:1"}

    (victim,) = [one["pid"] for one in status["data_workers"] if one["slurm_job"] == gpu_jobs[0]]
    os.kill(victim, signal.SIGKILL)  # all of this cluster's processes are of this machine
    before = len(job.steps())
    wait_until(lambda: len(job.steps()) > before + 160, 120, "steps of two epochs more")
    rows = [row for row in ran_on_gpus(job) if row[0] in gpu_jobs]
    for job_id, gpus, *_ in rows:
        assert gpus.count(",") == 0, f"job {job_id} has more than one GPU: {gpus}"
    held = {(host, gpus) for _, gpus, host, _ in rows}
    assert len(held) == len({job_id for job_id, *_ in rows}), "no GPU belongs to two"

    job.stop()
    wait_until(job.has_ended, timeout_s=120, what="the end of the job")
    assert not job.companions("PD", "R", "CG")
    assert job.ledger_problems(320) == []
    summary = json.loads((job.home / "summary.json").read_text())
    assert summary["elastic_gpu"]["decisions"][0]["reason"] == "the script asks for 1 data workers at the least"
    assert summary["elastic"]["decisions"][0]["reason"].startswith("the trainer waits")
    assert sum(loader["steps"] for loader in summary["loaders"]) == len(job.steps())
    assert "changes of the number of data workers with a GPU" in job.hetstream("job", str(job.home))
    assert not (job.home / "elastic-gpu.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_without_a_free_gpu_the_trainer_makes_its_steps_and_says_so(
    submit: Callable[..., ElasticJob], wait_until: WaitUntil, devcluster: Any
) -> None:
    """All GPUs but the trainer's are another job's."""
    held = ["sbatch", "--parsable", "-p", "gpu", "-N2", "--ntasks-per-node=1", "--mem=1", "--output=/dev/null"]
    costs = ("--cpu-s=0.1", "--gpu-s=0.05", "--step-s=0.02", "--num-steps=40")
    job = submit("no-gpu", "--data-workers=0-4 --gpu-data-workers=0-2", *costs)
    other = ""
    try:
        wait_until(lambda: job.steps(), 60, "the trainer")
        other = devcluster.run(*held, "--gres=gpu:3", "--wrap=sleep 600")
        wait_until(lambda: devcluster.run("squeue", "-hj", other, "-o", "%t") == "R", 60)
        before = len(job.steps())
        wait_until(lambda: len(job.steps()) > before + 45, 90, "steps that the trainer makes")
        assert job.status()["elastic_gpu"]
    finally:
        if other:
            devcluster.run("scancel", other)
    wait_until(lambda: "gpu" in devices(job), 150, "a data worker with a GPU")
    job.stop()
    wait_until(job.has_ended, timeout_s=120, what="the end of the job")
    assert job.ledger_problems(160) == []
