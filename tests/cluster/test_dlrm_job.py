"""The second demo as a job: sbatch_templates/dlrm/train.sbatch, as a user submits it, and as one process trains."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DLRM = Path(__file__).parents[2] / "sbatch_templates" / "dlrm"
HETSTREAM = str(Path(sys.executable).with_name("hetstream"))
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release, pytest.mark.timeout(300)]


@pytest.mark.shows("Criteo's rows become a trained model: `make demo-dlrm`, also on Slurm")
def test_the_second_demo_trains_on_slurm_as_in_one_process(devcluster: Any) -> None:
    folder = Path(devcluster.out_dir) / "dlrm"
    folder.mkdir()
    for name in ("train.py", "train.sbatch", "prepare.py"):
        shutil.copy(DLRM / name, folder)
    # `python` of the script is the one with hetstream, as in a job of a user's environment.
    path = devcluster.env.get("PATH", os.environ["PATH"])
    environ = dict(devcluster.env) | {"PATH": f"{Path(sys.executable).parent}:{path}"}

    def run(*argv: str) -> str:
        done = subprocess.run(
            argv, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
            check=False,
        )  # fmt: skip
        shown = "".join(path.read_text() for path in folder.glob("dlrm-*.out"))
        assert done.returncode == 0, done.stdout + shown
        return done.stdout

    run(sys.executable, "prepare.py", "criteo.csv", "--rows", "8000")
    run(sys.executable, "train.py", "--data", "criteo.csv", "--epochs", "2", "--ledger", "alone.jsonl")
    job = run(HETSTREAM, "sbatch", "--parsable", "--wait", "train.sbatch").splitlines()[0].strip()
    alone, streamed = ((folder / f"{name}.jsonl").read_text() for name in ("alone", "ledger"))
    assert streamed == alone, "the rows and the losses, batch by batch"
    assert alone
    for epoch in range(2):
        batches = [one for line in streamed.splitlines() if (one := json.loads(line))["epoch"] == epoch]
        assert sorted(row for batch in batches for row in batch["rows"]) == list(range(8000))
    summary = json.loads((folder / ".hetstream" / f"job-{job}" / "summary.json").read_text())
    (loader,) = summary["loaders"]
    assert loader["local_steps"] < loader["steps"] == len(streamed.splitlines())
    assert summary["data_workers_seen"] == 2
    assert not run("squeue", "--noheader", f"--jobs={job}", "--states=PD,R,CG")
