"""Jobs that are submitted from a converted script on real Slurm: they have nothing of the job that they come from."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HETSTREAM = Path(sys.executable).with_name("hetstream")
pytestmark = [pytest.mark.slurm, pytest.mark.every_release]

# What a program has: the kind of its iterator, the job whose memory its checkpoints take, and where these go.
PROGRAM = """
import os, sys
from torch.utils.data import DataLoader
from hetstream.checkpoint.config import directory_of_job, job_and_component, job_has_writers
iterator = iter(DataLoader(list(range(8)), batch_size=4, num_workers=1))
len(list(iterator))
found = type(iterator).__name__, job_and_component()[0], directory_of_job(), job_has_writers()
print(sys.argv[1], os.environ.get("SLURM_JOB_ID"), *found, flush=True)
"""
PARENT = """#!/bin/bash
#SBATCH --gres=gpu:1 -n1 -c4 -t10 -o {directory}/parent.out
#HETSTREAM --data-workers=1 --data-worker-cpus=1 --data-worker-partition=cpu
#HETSTREAM --checkpoint={directory}/saved --checkpoint-size=1M
# A step of another job takes the CPUs of this one where it does not say its own (`SLURM_CPUS_PER_TASK`).
child="sbatch --wait -p cpu -n1 -c1 -t5"
$child -o {directory}/%j.child.out --export=ALL --wrap '{run} plain' &
$child -o {directory}/%A_%a.child.out --array=3 --wrap 'srun -n1 {run} array' &
{hetstream} sbatch --wait -o {directory}/%j.child.out {directory}/child.sbatch &
wait
srun -n1 {run} step
{hetstream} run --data-workers=0 {run} alone
salloc -Q -p cpu -n1 -c1 -t5 srun --mem=0 -n1 {run} salloc
echo done $SLURM_JOB_ID
"""
# Companions alone: no heterogeneous job, unlike the one that it comes from.
CHILD = """#!/bin/bash
#SBATCH -p cpu -n1 -c1 -t5
#HETSTREAM --data-workers=0-1 --data-worker-cpus=1 --data-worker-partition=cpu
srun -n1 {run} converted
"""


def test_jobs_that_a_converted_script_submits_have_their_own_data(
    devcluster: Any, wait_until: Callable[..., None]
) -> None:
    directory = devcluster.out_dir / "nested"
    directory.mkdir()
    (directory / "program.py").write_text(PROGRAM)
    run = f"{sys.executable} {directory}/program.py"
    for name, text in (("parent.sbatch", PARENT), ("child.sbatch", CHILD)):
        (directory / name).write_text(text.format(directory=directory, run=run, hetstream=HETSTREAM))
    argv = [HETSTREAM, "sbatch", "--parsable", "parent.sbatch"]
    job = subprocess.run(
        argv, cwd=directory, env=dict(devcluster.env), capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    output = directory / "parent.out"
    wait_until(lambda: output.exists() and f"done {job}" in output.read_text(), 240, "all jobs have run")
    said = "".join(path.read_text() for path in [output, *directory.glob("*.child.out")])
    found = {
        words[0]: words[1:] for line in said.splitlines() if len(words := line.split()) == 6 and words[1].isdigit()
    }
    of_parent = [f"{directory}/saved", "True"]
    assert found.pop("step") == [job, "StreamedLoaderIter", job, *of_parent], said
    own = found.pop("alone")
    assert (own[0], own[2:]) == (job, [job, *of_parent])
    assert found.keys() == {"plain", "array", "salloc", "converted"}, said
    for kind, (number, iterator, memory, *checkpoints) in found.items():
        is_streamed = kind == "converted"
        assert (iterator == "StreamedLoaderIter") == is_streamed, (kind, said)
        assert (memory, checkpoints) == (number, ["None", "False"]), (kind, said)
        assert number != job
    assert said.count(f"that of job {job}, from which this job") == 3, said
    assert "no job master" not in said
    assert "error" not in said
    wait_until(lambda: not devcluster.run("squeue", "-h"), 60, "the queue is empty")
    summary = json.loads((directory / ".hetstream" / f"job-{job}" / "summary.json").read_text())
    assert len(summary["loaders"]) == 1, summary
