"""Slurm kills all processes of a job step at once, as it does with one that exceeds its memory: on real Slurm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "programs" / "train_deadly.py"
HETSTREAM = Path(sys.executable).with_name("hetstream")
SCRIPT = f"""#!/bin/bash
#SBATCH --job-name=deadly --output=out.txt
#SBATCH --gres=gpu:1 --cpus-per-task=4 --time=10
#HETSTREAM --data-workers=2 --data-worker-cpus=1 --data-worker-partition=cpu
{sys.executable} {PROGRAM} $PWD/makers
echo "exit code $?"
"""


@pytest.mark.slurm
@pytest.mark.every_release
def test_a_sample_for_which_slurm_kills_the_data_workers_step_does_not_end_the_trainer(
    release: str, devcluster: Any, wait_until: Callable[..., None]
) -> None:
    directory = devcluster.out_dir / "deadly"
    directory.mkdir()
    (directory / "train.sbatch").write_text(SCRIPT)
    command = [str(HETSTREAM), "sbatch", "--parsable", "train.sbatch"]
    subprocess.run(command, cwd=directory, env=dict(devcluster.env), check=True, capture_output=True, timeout=60)
    output = directory / "out.txt"
    wait_until(lambda: output.exists() and "\nexit code" in output.read_text(), timeout_s=200, what="the job's end")
    text = output.read_text()
    assert "40 samples, then: " in text, text
    assert "at sample 41 of step 10" in text, text
    assert "the trainer ends by itself\nexit code 0" in text, text
    makers = (directory / "makers").read_text().split("\n")
    assert "trainer" not in makers
    assert "data worker" in makers, release
    # The attempts, and torch's own worker once; more often where it met the sample before the loss was known.
    assert makers.count("child") >= 4
