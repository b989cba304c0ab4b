"""Companions in backfill holes on real Slurm: in front of a planned start, and gone before it. CPU work is sleeps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients.elastic_job import HETSTREAM, ElasticJob
from hetstream.hetjob.errors import SlurmCommandError

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
WaitUntil = Callable[..., None]


@pytest.fixture
def jobs(devcluster: Any, wait_until: WaitUntil) -> Iterator[Callable[..., str]]:
    """A function that submits a job of sleep to the CPU nodes."""
    submitted: list[str] = []

    def submit(*options: str, sleep_s: int = 600) -> str:
        argv = ["sbatch", "--parsable", "-p", "cpu", "--mem-per-cpu=1", "--output=/dev/null", *options]
        submitted.append(devcluster.run(*argv, f"--wrap=exec sleep {sleep_s}"))
        return submitted[-1]

    yield submit
    devcluster.run("scancel", "--quiet", *submitted)
    wait_until(lambda: not devcluster.run("squeue", "-h"), timeout_s=120, what="an empty queue")


def planned_start(devcluster: Any, job_id: str) -> str:
    return str(devcluster.run("squeue", "-hj", job_id, "-o", "%S"))


@pytest.mark.shows("short data workers in backfill holes move nobody's planned start")
def test_companions_run_in_front_of_a_planned_start_and_are_gone_before_it(
    devcluster: Any, jobs: Callable[..., str], wait_until: WaitUntil
) -> None:
    """Three of four CPU nodes are full, one has two idle CPUs until a job that wants all nodes can start."""
    for cpus in (16, 16, 16, 14):
        jobs("-N1", f"-c{cpus}", "-t", "4", sleep_s=238)
    large = jobs("-N4", "-n4", "-c16", "-t", "10")
    wait_until(lambda: planned_start(devcluster, large) not in ("N/A", ""), timeout_s=30, what="a planned start")
    planned = planned_start(devcluster, large)
    directives = "--data-workers=0-2 --data-worker-cpus=1 --data-worker-cooldown=2 --data-worker-time-min=1"
    job = ElasticJob(
        devcluster.out_dir / "holes", devcluster.env, directives, "--make-s=0.1", "--step-s=0.03", "--num-steps=60"
    )
    try:
        wait_until(lambda: job.companions("R"), timeout_s=90, what="a companion in front of the large job")
        (first, *_) = job.companions("R")
        shown = devcluster.run("scontrol", "show", "job", first)
        assert "Scheduler=Backfill" in shown
        assert re.search(r"Nice=2147483645\b.*TimeMin=00:01:00", shown, re.DOTALL)
        assert planned_start(devcluster, large) == planned
        log = job.home / "master.log"
        leave = "they leave, "
        wait_until(lambda: leave in log.read_text(), timeout_s=200, what="a companion that leaves in time")
        assert planned_start(devcluster, large) == planned
        wait_until(lambda: f"companion job={first} ended" in log.read_text(), timeout_s=60, what="its end")
        shown = devcluster.run("scontrol", "show", "job", first)
        assert "JobState=COMPLETED" in shown, "and not TIMEOUT"
        assert all(one["orderly"] for one in job.events("DataWorkerLost"))
        wait_until(
            lambda: devcluster.run("squeue", "-hj", large, "-o", "%t") == "R",
            timeout_s=300,
            what="the start of the large job",
        )
        late = datetime.fromisoformat(planned_start(devcluster, large)) - datetime.fromisoformat(planned)
        assert late.total_seconds() <= 5, "ends of jobs, and a cycle of backfill on a busy machine"
        assert not job.companions("R"), "none is left on its nodes"
        steps = len(job.steps())
        wait_until(lambda: len(job.steps()) > steps + 10, timeout_s=60, what="steps that the trainer makes itself")
        job.stop()
        wait_until(lambda: (job.home / "summary.json").exists(), timeout_s=60, what="the summary")
    finally:
        print((job.home / "master.log").read_text() if (job.home / "master.log").exists() else "no master.log")
        job.cancel()
    assert job.ledger_problems(240) == []
    elastic = json.loads((job.home / "summary.json").read_text())["elastic"]
    assert elastic["companions_in_holes"] >= 1
    assert 10 < elastic["companion_cpu_s_in_holes"] == elastic["companion_cpu_s"]
    assert "of it in backfill holes" in job.hetstream("job", job.job_id)


def test_a_least_time_that_the_job_does_not_have_is_refused_before_slurm_is_asked(
    devcluster: Any, tmp_path: Path
) -> None:
    script = tmp_path / "train.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --gres=gpu:1 --time=2\n#HETSTREAM --data-workers=0-2\nsrun true\n")
    words = ["--data-worker-partition=cpu", "--data-worker-time-min=5:00", str(script)]
    with pytest.raises(SlurmCommandError, match=r"TimeMinTooLong.*is above --time=2 of the job"):
        devcluster.run(str(HETSTREAM), "sbatch", *words)
