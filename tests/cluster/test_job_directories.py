"""Directories of jobs on real Slurm: in a place of their own, and found again by what Slurm knows."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HETSTREAM = Path(sys.executable).with_name("hetstream")
DIRECTIVE = "#HETSTREAM --data-workers=1 --data-worker-cpus=1 --data-worker-partition=cpu\n"
SCRIPT = f'#!/bin/bash\n{DIRECTIVE}echo "$HETSTREAM_SERVICE"\n'
pytestmark = [pytest.mark.slurm, pytest.mark.every_release]


def submit(devcluster: Any, directory: Path, *options: str, **more: str) -> str:
    """Submit the script from a new directory, wait for its end, and return the job's id."""
    directory.mkdir()
    (directory / "job.sbatch").write_text(SCRIPT)
    done = subprocess.run(
        [HETSTREAM, "sbatch", "--wait", "--parsable", f"--output={directory}/out", *options, "job.sbatch"],
        cwd=directory, env={**devcluster.env, **more}, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.strip()


def told(devcluster: Any, *words: str) -> str:
    """What a command tells that is called from another directory, with nothing in its environment."""
    return str(devcluster.run(str(HETSTREAM), *words))


def test_a_directory_elsewhere_is_found_by_what_slurm_knows(devcluster: Any, wait_until: Callable[..., None]) -> None:
    directory, disk = devcluster.out_dir / "elsewhere", devcluster.out_dir / "disk"
    place = devcluster.out_dir / "scratch" / getpass.getuser() / "jobs"
    pattern = str(devcluster.out_dir / "scratch" / "%u" / "jobs")
    job_id = submit(devcluster, directory, f"--jobs-dir={pattern}", f"--journal-dir={disk}")
    assert (directory / "out").read_text() == f"file:{place}/job-{job_id}/address\n"
    assert not (directory / ".hetstream").exists()
    # sbatch waits for the script's component alone; the job master's may end a moment later.
    wait_until(lambda: not [*disk.iterdir()], timeout_s=60, what="the end of the journal on the node's disk")
    assert told(devcluster, "job", "--logs", "--path", f"{job_id}+1", "master") == f"{place}/job-{job_id}/master.log"
    assert json.loads(told(devcluster, "job", "--json", job_id))["record"]["job_name"] == "job.sbatch"

    def cleaned() -> str:
        rows = json.loads(told(devcluster, "job", "--clean", "--jobs-dir", pattern, "--older-than=0h", "--json"))[
            "directories"
        ]
        return {row["directory"]: row["done"] for row in rows}[f"{place}/job-{job_id}"]

    # squeue shows what has ended for MinJobAge seconds, but not as living; the last component ends a moment later.
    wait_until(lambda: cleaned() == "would be removed", timeout_s=30, what="the job's end")
    # The same by the environment, which reaches the job through its script.
    second = submit(devcluster, devcluster.out_dir / "by-environment", "--export=NONE", HETSTREAM_JOBS_DIR=pattern)
    summary = place / f"job-{second}" / "summary.json"
    wait_until(summary.exists, timeout_s=30, what="the summary of the second job")
    assert told(devcluster, "job", "--logs", "--path", second, "master") == f"{place}/job-{second}/master.log"


def test_a_job_with_another_working_directory_is_found_by_its_number(devcluster: Any) -> None:
    there = devcluster.out_dir / "there"
    there.mkdir()
    job_id = submit(devcluster, devcluster.out_dir / "here", f"--chdir={there}")
    (directory,) = devcluster.out_dir.glob(f"*here/.hetstream/job-{job_id}")
    assert told(devcluster, "job", "--logs", "--path", job_id, "master") == f"{directory}/master.log"


@pytest.mark.shows("every directory on the way to a job's directory is safe, or the home directory takes its place")
def test_a_directory_that_somebody_else_could_swap_holds_no_jobs(devcluster: Any) -> None:
    home, share = devcluster.out_dir / "home", devcluster.out_dir / "share"
    home.mkdir()
    share.mkdir()
    os.chown(share, 65533, 65533)
    share.chmod(0o1777)
    (home / "job.sbatch").write_text(SCRIPT)

    def submitted(*options: str) -> subprocess.CompletedProcess[str]:
        argv = [HETSTREAM, "sbatch", "--wait", "--parsable", f"--output={home}/out", *options, home / "job.sbatch"]
        env = {**devcluster.env, "HOME": str(home)}
        return subprocess.run(argv, cwd=share, env=env, capture_output=True, text=True, timeout=120, check=False)

    done = submitted()
    assert done.returncode == 0, done.stderr
    assert f"the job's directory is below {home}/.hetstream, and not where it is submitted" in done.stderr
    assert "the sticky bit does not bind the owner" in done.stderr
    job_id = done.stdout.strip()
    assert (home / "out").read_text() == f"file:{home}/.hetstream/job-{job_id}/address\n"
    assert [*share.iterdir()] == []
    assert told(devcluster, "job", "--logs", "--path", job_id, "master") == f"{home}/.hetstream/job-{job_id}/master.log"
    # A script that was converted elsewhere, or a line of a script's own: the same is decided where the job runs.
    (home / "own.sbatch").write_text(f'#!/bin/bash\neval "$({HETSTREAM} ckpt start)"\n')
    argv = ["sbatch", "--wait", "--parsable", f"--output={home}/out", f"--export=ALL,HOME={home}", home / "own.sbatch"]
    second = subprocess.run(
        argv, cwd=share, env=devcluster.env, capture_output=True, text=True, timeout=120, check=True
    )
    assert f"the job's directory is below {home}/.hetstream" in (home / "out").read_text()
    assert [*(home / ".hetstream" / f"job-{second.stdout.strip()}" / "writers").glob("*.log")]
    assert [*share.iterdir()] == []
    refused = submitted(f"--jobs-dir={share}/jobs")
    assert refused.returncode == 1
    assert f"the place of jobs' directories {share}/jobs is not used" in refused.stderr
