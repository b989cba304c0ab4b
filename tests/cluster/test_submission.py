"""Submission on real Slurm: what the user sees, and what is left after a job that is cancelled."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetstream.slurm_plugin.client.slurm import CommandSlurm

HETSTREAM = Path(sys.executable).with_name("hetstream")
DIRECTIVE = "#HETSTREAM --data-workers=1-2 --data-worker-cpus=1 --data-worker-partition=cpu\n"
pytestmark = [pytest.mark.slurm, pytest.mark.every_release]


def submit(devcluster: Any, directory: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    directory.mkdir()
    (directory / "job.sbatch").write_text(script)
    return subprocess.run(
        [HETSTREAM, "sbatch", *options, "job.sbatch"], cwd=directory, env=dict(devcluster.env), capture_output=True,
        text=True, check=False, timeout=120,
    )  # fmt: skip


def test_wait_returns_the_scripts_exit_code(devcluster: Any, wait_until: Callable[..., None]) -> None:
    directory = devcluster.out_dir / "wait"
    done = submit(devcluster, directory, f'#!/bin/bash\n{DIRECTIVE}echo "$HETSTREAM_SERVICE"\nexit 7\n', "--wait")
    assert done.returncode == 7
    assert done.stderr == ""
    job_id = done.stdout.removeprefix("Submitted batch job ").strip()
    output = (directory / f"slurm-{job_id}.out").read_text()
    assert output == f"file:{directory}/.hetstream/job-{job_id}/address\n"
    assert "JobName=job.sbatch" in devcluster.run("scontrol", "show", "job", job_id)

    def told(*words: str) -> str:
        """From another directory, by the number of a component."""
        return devcluster.run(str(HETSTREAM), *words)

    # sbatch waits for the script's component alone; the job master's may end a moment later.
    summary = directory / ".hetstream" / f"job-{job_id}" / "summary.json"
    wait_until(summary.exists, timeout_s=60, what="the service's last words")
    assert f"job-{job_id} (job.sbatch) has ended: no loader connected" in told("job", f"{job_id}+1")
    own_number = str(int(job_id) + 1)  # of component 1
    assert told("job", "--logs", "--path", own_number, "master") == f"{directory}/.hetstream/job-{job_id}/master.log"
    assert "has ended" in told("job", job_id)


@pytest.mark.parametrize("directive", ["", DIRECTIVE])
def test_what_slurm_refuses_is_refused_in_its_words(devcluster: Any, directive: str) -> None:
    directory = devcluster.out_dir / f"refused-{len(directive)}"
    done = submit(devcluster, directory, f"#!/bin/bash\n{directive}hostname\n", "--partition=no-such-partition")
    assert done.returncode == 1
    assert "invalid partition specified: no-such-partition" in done.stderr
    assert done.stdout == ""


def test_a_job_with_an_export_list_still_streams(devcluster: Any, wait_until: Callable[..., None]) -> None:
    directory = devcluster.out_dir / "export"
    script = f"#!/bin/bash\n#SBATCH --ntasks=1\n{DIRECTIVE}srun bash -c 'echo service=$HETSTREAM_SERVICE'\n"
    done = submit(devcluster, directory, script, "--export=HOME,PATH,SLURM_CONF", "--parsable")
    output = directory / f"slurm-{done.stdout.strip()}.out"
    wait_until(lambda: output.exists() and "service=" in output.read_text(), timeout_s=60, what="the job's output")
    assert "service=file:/" in output.read_text()


def test_the_command_lines_partition_is_the_trainers(devcluster: Any) -> None:
    """sbatch itself would take the data workers there: its command line is for all components."""
    options = ["-p", "gpu", "--gres=gpu:1", "--hold", "--parsable"]
    done = submit(devcluster, devcluster.out_dir / "partition", f"#!/bin/bash\n{DIRECTIVE}hostname\n", *options)
    job_id = done.stdout.strip()
    try:
        jobs = CommandSlurm(devcluster.env).snapshot().jobs
    finally:
        devcluster.run("scancel", job_id)
    components = {job.het.offset: job for job in jobs if job.het and str(job.het.het_job_id) == job_id}
    found = [(job.partitions, job.count("gpu")) for _, job in sorted(components.items())]
    assert found == [(("gpu",), 1), (("cpu",), 0)]


def paste(devcluster: Any, directory: Path, done: subprocess.CompletedProcess[str]) -> str:
    """Save the script that a dry run printed under its name, and run the command that it printed: the new job's id."""
    command = done.stderr.strip().splitlines()[-1].partition("on the script above: ")[2]
    directory.mkdir(exist_ok=True)
    (directory / "job.sbatch").write_text(done.stdout)
    pasted = devcluster.run("sh", "-c", f"cd {directory} && {command}")
    return str(pasted.split()[-1])


@pytest.mark.shows("what a dry run of `sbatch` or `migrate` prints works when pasted")
def test_what_dry_runs_print_works_when_pasted(devcluster: Any, wait_until: Callable[..., None]) -> None:
    directory = devcluster.out_dir / "pasted"
    script = f"#!/bin/bash\n{DIRECTIVE}sleep 600\n"
    done = submit(devcluster, directory, script, "--dry-run", "-p", "gpu", "--comment=it's a test")
    first = paste(devcluster, directory / "again", done)
    jobs = [first]
    try:
        wait_until(lambda: "R" in devcluster.run("squeue", "-hj", first, "-o", "%t"), 60, "the first job")
        printed = devcluster.run("squeue", "-hj", first, "-O", "HetJobOffset,Partition,Comment:50")
        trainer, worker = (row.strip().split(maxsplit=2)[1:] for row in sorted(printed.splitlines()))
        assert trainer == ["gpu", "it's a test"], printed
        assert worker[0] == "cpu"
        argv = [str(HETSTREAM), "migrate", first, "--dry-run", "--hold"]
        moved = subprocess.run(argv, env=dict(devcluster.env), capture_output=True, text=True, check=False, timeout=120)
        assert moved.returncode == 0, moved.stderr
        jobs.append(paste(devcluster, directory / "moved", moved))
        rows = devcluster.run("squeue", "-hj", jobs[1], "-o", "%t")
        assert rows.split() == ["PD", "PD"]
    finally:
        devcluster.run("scancel", *jobs)


def test_nothing_is_left_of_a_cancelled_job(devcluster: Any, wait_until: Callable[..., None]) -> None:
    directory = devcluster.out_dir / "cancelled-submission"
    done = submit(devcluster, directory, f"#!/bin/bash\n{DIRECTIVE}sleep 600\n", "--parsable")
    job_id = done.stdout.strip()
    job_directory = directory / ".hetstream" / f"job-{job_id}"
    log = job_directory / "master.log"
    begins = "the elastic controller begins"
    wait_until(lambda: log.exists() and begins in log.read_text(), timeout_s=60, what="the elastic controller")
    devcluster.run("scancel", job_id)
    active = ["squeue", "--noheader", "--states=PD,R,CG"]
    wait_until(lambda: not devcluster.run(*active), timeout_s=90, what="an empty queue")
    wait_until(lambda: not (job_directory / "address").exists(), timeout_s=30, what="the removal of the keys")
    assert not (job_directory / "dispatcher").exists()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # a process that has just ended
            assert str(job_directory).encode() not in path.read_bytes()
