"""Signals that Slurm sends to all steps of a job before its end, with `sbatch --signal` or `scancel --signal`.

They are for the training: the job master and its data workers work until the job ends, and then end in order.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetstream.hetjob.job.ended_job import SUMMARY_FILE, load_summary

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

HETSTREAM = Path(sys.executable).with_name("hetstream")
PROGRAM = Path(__file__).parent / "programs" / "warned.py"
SCRIPT = f"""#!/bin/bash
#SBATCH --gpus=1 -c 4 --output=job.out {{options}}
#HETSTREAM --data-workers=1 --data-worker-cpus=1 --data-worker-partition=cpu
srun {shlex.quote(sys.executable)} {shlex.quote(str(PROGRAM))} .
"""


class Job:
    """A job whose program goes on after every signal."""

    def __init__(self, cluster: Any, directory: Path, options: str) -> None:
        self.cluster, self.directory = cluster, directory
        directory.mkdir()
        (directory / "train.sbatch").write_text(SCRIPT.format(options=options))
        argv = [str(HETSTREAM), "sbatch", "--parsable", f"--chdir={directory}", f"--jobs-dir={directory}/jobs"]
        self.job_id = cluster.run(*argv, str(directory / "train.sbatch"))
        self.jobs = directory / "jobs" / f"job-{self.job_id}"

    def lines(self, name: str) -> list[str]:
        path = self.directory / name
        return path.read_text().splitlines() if path.exists() else []

    def said(self) -> str:
        path = self.jobs / "master.log"
        return path.read_text() if path.exists() else ""

    def steps(self) -> dict[str, str]:
        """The job's steps, by name."""
        components = f"{self.job_id},{int(self.job_id) + 1}"
        shown = self.cluster.run("squeue", "-h", "-s", "-o", "%j %i", f"--jobs={components}")
        return dict(line.split() for line in shown.splitlines())

    def is_over(self) -> bool:
        return self.job_id not in self.cluster.run("squeue", "-h", "-o", "%A %i").split()

    def num_registered(self) -> int:
        """How often a data worker has come to the dispatcher."""
        return sum(path.read_text().count("registered") for path in self.jobs.glob("data-worker-*.log"))

    def is_served(self) -> bool:
        return self.num_registered() > 0

    def local_steps(self) -> int:
        """How many batches the trainer has made itself, as the job's record says."""
        loaders = load_summary(self.jobs)[0]["loaders"]
        return sum(loader["local_steps"] for loader in loaders)


def check_end_in_order(job: Job, wait_until: Callable[..., None]) -> None:
    wait_until(lambda: (job.jobs / SUMMARY_FILE).exists(), 90, "the job master has ended in order")
    wait_until(job.is_over, 90, "the job is over")
    assert "stopping: signal 15: the job ends" in job.said()
    assert not (job.jobs / "spec.json").exists()


@pytest.mark.shows("`--signal` ends neither the job master nor its data workers before the job's end")
def test_what_warns_the_training_ends_nothing_that_serves_it(
    proctrack_cluster: Any, wait_until: Callable[..., None]
) -> None:
    check_warned(proctrack_cluster, wait_until)


@pytest.mark.slow
@pytest.mark.parametrize("newer", ["24.11", "26.05"])
def test_what_warns_the_training_ends_nothing_on_newer_releases_either(
    devclusters: Callable[[str], Any], wait_until: Callable[..., None], newer: str
) -> None:
    check_warned(devclusters(newer), wait_until)


def check_warned(cluster: Any, wait_until: Callable[..., None]) -> None:
    job = Job(cluster, cluster.out_dir / f"warned-{len(os.listdir(cluster.out_dir))}", "--time=10")
    wait_until(lambda: job.lines("batches") and job.is_served(), 90, "data workers make batches")
    master = job.steps()["hetstream"]
    for name, number in (("USR1", "10"), ("USR2", "12"), ("34", "34"), ("HUP", "1"), ("TERM", "15")):
        cluster.run("scancel", f"--signal={name}", job.job_id)
        wait_until(lambda number=number: number in job.lines("signals"), 30, f"{name} has come")
        count = len(job.lines("batches"))
        wait_until(lambda count=count: len(job.lines("batches")) > count + 20, 60, "the training goes on")
        assert job.steps()["hetstream"] == master, job.said()
        if name in ("USR1", "USR2", "34"):
            assert "data_worker=0 ended" not in job.said()
    assert "dispatcher ended" not in job.said()
    assert "the job master goes on" in job.said()
    told = "".join(path.read_text() for path in job.jobs.glob("data-worker-*.log"))
    assert "starting anew" not in told, "it has the Python of the program from the beginning"
    wait_until(lambda: "data-worker" in job.steps(), 60, "a data worker that Slurm has ended is there again")
    cluster.run("scancel", job.job_id)
    check_end_in_order(job, wait_until)


@pytest.mark.shows("`--signal` ends neither the job master nor its data workers before the job's end")
@pytest.mark.slow
@pytest.mark.every_release
@pytest.mark.parametrize("asked", ["USR1@60", "TERM@60"])
def test_a_signal_before_the_time_limit_leaves_the_data_workers_until_the_end(
    devcluster: Any, wait_until: Callable[..., None], asked: str
) -> None:
    place = devcluster.out_dir / f"limit-{len(os.listdir(devcluster.out_dir))}"
    job = Job(devcluster, place, f"--time=2 --signal={asked}")
    wait_until(lambda: job.lines("batches") and job.is_served(), 90, "data workers make batches")
    steps, num_before, num_registered = job.steps(), len(job.lines("batches")), job.num_registered()
    wait_until(lambda: job.lines("signals"), 130, "the warning has come")
    count = len(job.lines("batches"))
    wait_until(lambda: len(job.lines("batches")) > count + 200, 60, "the training goes on")
    now = job.steps()
    assert now["hetstream"] == steps["hetstream"], job.said()
    if "TERM" not in asked:
        assert now == steps
    else:  # Slurm ends data workers with it, and their step begins anew
        wait_until(lambda: job.num_registered() > num_registered, 45, "a data worker has come again")
        assert "data-worker" in job.steps()
    assert "stopping" not in job.said()
    check_end_in_order(job, wait_until)
    if "TERM" not in asked:
        assert job.local_steps() <= num_before + 20, "data workers made what came after the signal"
