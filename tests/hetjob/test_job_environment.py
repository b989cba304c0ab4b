"""What the job master reads from Slurm's environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hetstream.hetjob.errors import MasterError
from hetstream.hetjob.job.job import JobEnvironment, export_variables, plain_variables, script_lines, submitting

ENVIRON = {"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "gpu0", "SLURM_SUBMIT_DIR": "/data/my runs"}


def test_a_job_and_its_directory() -> None:
    job = JobEnvironment.read(ENVIRON | {"SLURM_HET_SIZE": "2", "SLURM_JOB_NAME": "train"})
    assert job == JobEnvironment("17", "train", "gpu0", Path("/data/my runs"), 2, 0)
    assert job.directory == Path("/data/my runs/.hetstream/job-17")


def test_the_directory_of_a_job_elsewhere() -> None:
    job = JobEnvironment.read(ENVIRON | {"SLURM_RESTART_COUNT": "1"}, Path("/scratch/me"))
    assert job.directory == Path("/scratch/me/job-17-restart-1")


def test_a_requeued_job_starts_over() -> None:
    job = JobEnvironment.read(ENVIRON | {"SLURM_RESTART_COUNT": "2"})
    assert (job.het_size, job.directory.name) == (1, "job-17-restart-2")


def test_outside_of_a_job() -> None:
    with pytest.raises(MasterError, match="SLURMD_NODENAME is not set"):
        JobEnvironment.read({**ENVIRON, "SLURMD_NODENAME": ""})


def test_variables_that_a_heterogeneous_job_lacks_are_restored() -> None:
    environ = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_HET_GROUP_0": "2",
        "SLURM_CPUS_PER_TASK_HET_GROUP_0": "4",
        "SLURM_CPUS_PER_TASK_HET_GROUP_1": "9",
    }
    assert plain_variables(environ) == {"SLURM_CPUS_PER_TASK": "4"}
    of_the_submission = {"SLURM_CPUS_PER_TASK": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1"}
    assert plain_variables(environ | of_the_submission) == {"SLURM_CPUS_PER_TASK": "4"}


@pytest.mark.parametrize(("of_nodes", "tasks"), [("2(x2)", "4"), ("4(x2),3", "11"), ("3,1", "4"), ("1", "1")])
def test_tasks_that_slurm_does_not_count_are_counted(of_nodes: str, tasks: str) -> None:
    """Of --ntasks-per-node a plain job has SLURM_NTASKS, and a component has none since Slurm 24.11."""
    environ = {
        **{"SLURM_TASKS_PER_NODE": of_nodes, "SLURM_TASKS_PER_NODE_HET_GROUP_0": of_nodes},
        **{"SLURM_NTASKS_PER_NODE_HET_GROUP_0": "2", "SLURM_NTASKS_HET_GROUP_1": "7"},
    }
    counted = {"SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks}
    expected = counted | {"SLURM_NTASKS_PER_NODE": "2"}
    assert plain_variables(environ) == expected
    # A number from where the job was submitted counts for nothing, as in a plain job.
    assert plain_variables(environ | {"SLURM_NTASKS": "99", "SLURM_NPROCS": "99"}) == expected
    # Of no such option a plain job has none either.
    without = {name: value for name, value in environ.items() if "NTASKS_PER_NODE" not in name}
    assert plain_variables(without) == {}
    assert plain_variables(environ | {"SLURM_TASKS_PER_NODE_HET_GROUP_0": "x"}).keys().isdisjoint(counted)


def test_tasks_of_a_node_are_those_of_the_trainer() -> None:
    """With --cpus-per-gpu Slurm 24.11 and 26.05 count CPUs there, and in a plain job tasks."""
    environ = {"SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2(x2)", "SLURM_HET_SIZE": "2"}
    assert plain_variables(environ) == {"SLURM_TASKS_PER_NODE": "2(x2)"}


def test_what_a_script_says_to_srun_counts_as_in_an_ordinary_job() -> None:
    """srun takes SLURM_NTASKS_HET_GROUP_0 after SLURM_NTASKS, so the script's own word would be lost."""
    of_srun = {f"SLURM_{name}_{kind}_GROUP_0": "4" for name in ("NTASKS", "CPUS_PER_TASK") for kind in ("HET", "PACK")}
    kept = {
        "SLURM_JOB_ID_HET_GROUP_0": "17",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu0",
        "SLURM_TASKS_PER_NODE_HET_GROUP_0": "4",
        "SLURM_NTASKS_HET_GROUP_1": "3",
        "SLURM_HET_SIZE": "2",
    }
    environ = ENVIRON | of_srun | kept | {"PATH": os.defpath}
    script = f"{script_lines(environ)}export SLURM_NTASKS=1\nenv"
    done = subprocess.run(["sh", "-c", script], env=environ, capture_output=True, text=True, check=True)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert not of_srun.keys() & found.keys()
    assert kept.items() <= found.items()
    assert (found["SLURM_NTASKS"], found["SLURM_CPUS_PER_TASK"]) == ("1", "4")
    # Of an ordinary job there is nothing to say, nor of a job that a heterogeneous one has submitted.
    assert script_lines(ENVIRON) == script_lines(environ | {"SLURM_JOB_ID": "20"}) == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, None), ("ALL", None), ("ALL,X=1", None), ("NONE", "A,B"), ("NIL", "A,B"), ("PATH,HOME", "PATH,HOME,A,B")],
)
def test_variables_reach_srun_in_jobs_with_export_lists(before: str | None, after: str | None) -> None:
    environ = {} if before is None else {"SLURM_EXPORT_ENV": before}
    assert export_variables(environ, {"A": "1", "B": "2"}).get("SLURM_EXPORT_ENV") == after


@pytest.mark.parametrize("name", ["sbatch", "salloc"])
def test_what_a_script_submits_is_no_part_of_its_heterogeneous_job(tmp_path: Path, name: str) -> None:
    real = tmp_path / "a b" / name
    real.parent.mkdir()
    real.write_text('#!/bin/sh\nprintf "<%s>" "$@"; echo; env\n')
    real.chmod(0o755)
    components = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "17", "SLURM_NTASKS_HET_GROUP_1": "3"}
    environ = ENVIRON | components | {"PATH": f"{real.parent}:/usr/bin:/bin", "KEPT": "1"}
    environ |= submitting(environ)
    assert submitting(environ)["PATH"] == environ["PATH"], "a second start adds nothing"
    done = subprocess.run([name, "-n1", "a b", ""], env=environ, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "<-n1><a b><>"
    assert f"PATH={real.parent}:/usr/bin:/bin" in lines
    assert {"KEPT=1", "SLURM_JOB_ID=17"} <= {*lines}
    assert not [line for line in lines if "HET_" in line]
    # An ordinary job, and one that was submitted from a heterogeneous one, need nothing.
    assert submitting(ENVIRON | {"PATH": os.defpath}) == submitting(environ | {"SLURM_JOB_ID": "20"}) == {}
