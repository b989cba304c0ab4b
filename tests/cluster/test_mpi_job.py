"""Trainers and data workers as ranks of one step over both components of a heterogeneous job."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
PROGRAM = """
import json, sys
import torch
from hetstream import DataLoader

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 1200
    def __getitem__(self, index):
        return torch.full((50_000,), float(index)), torch.tensor(index * index)

if __name__ == "__main__":
    loader = DataLoader(Squares(), batch_size=8, shuffle=True, seed=3)
    ledger = []
    for values, squares in loader:
        assert (values[:, 0] ** 2 == squares).all()
        ledger += squares.sqrt().to(int).tolist()
    report = {"ledger": ledger, "stats": loader.stats()}
    open(f"rank-{loader._order.rank}-of-{loader._order.world_size}.json", "w").write(json.dumps(report))
"""
# As docs/mpi.md shows it.
SCRIPT = f"""#!/bin/bash
#SBATCH --output=%j.out --time=5
#SBATCH --partition=gpu --gres=gpu:1 --ntasks=2 --cpus-per-task=1
#SBATCH hetjob
#SBATCH --partition=cpu --nodes=2 --ntasks=2 --cpus-per-task=1
service=$PWD/service-$SLURM_JOB_ID
{BIN}/hetstream dispatcher --bind "tcp://127.0.0.1:0" --work-dir "$service" --address-file "$service/address" &
export HETSTREAM_SERVICE=file:$service/address HETSTREAM_TRANSPORT=mpi,tcp
srun --mpi=pmi2 --het-group=0 {sys.executable} train.py : \\
    --het-group=1 {BIN}/hetstream worker --mpi --service "$HETSTREAM_SERVICE"
code=$?
kill %1
wait
exit $code
"""


@pytest.mark.slurm
@pytest.mark.mpi
def test_a_step_over_two_components_streams_by_mpi(
    devclusters: Callable[[str], object], wait_until: Callable[..., None]
) -> None:
    pytest.importorskip("mpi4py")
    cluster = devclusters("host")
    directory = cluster.out_dir / "mpi"  # type: ignore[attr-defined]
    directory.mkdir()
    (directory / "train.py").write_text(PROGRAM)
    (directory / "job.sbatch").write_text(SCRIPT)
    environ = dict(cluster.env)  # type: ignore[attr-defined]

    def run(*argv: str) -> str:
        return subprocess.run(
            argv, cwd=directory, env=environ, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    job_id = run("sbatch", "--parsable", "job.sbatch").strip()
    output = directory / f"{job_id}.out"
    try:
        wait_until(
            lambda: not run("squeue", "--noheader", "--states=PD,R,CG"), timeout_s=180, what="the end of the job"
        )
    finally:
        subprocess.run(["scancel", "--quiet", job_id], env=environ, check=False)
    said = output.read_text()
    assert "ExitCode=0:0" in run("scontrol", "show", "job", job_id), said
    reports = [json.loads((directory / f"rank-{rank}-of-2.json").read_text()) for rank in (0, 1)]
    assert sorted(reports[0]["ledger"] + reports[1]["ledger"]) == list(range(1200)), "lost or duplicated samples"
    for report in reports:
        assert report["stats"]["transport"] == {"mpi": 75}, said
        assert report["stats"]["local_steps"] == 0
    assert f"mpi:{job_id}.0/1/" in said, "the address names the job's step and the rank"
