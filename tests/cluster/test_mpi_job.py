"""Trainers and data workers as ranks of one step over both components of a heterogeneous job."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Devcluster
from tests.mpi_dataworkers.conftest import PROGRAMS
from tests.mpi_dataworkers.test_mpi_ends import CODES

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
# As docs/mpi.md shows it, with one step or more.
SCRIPT = f"""#!/bin/bash
#SBATCH --output=%j.out --time=15
#SBATCH --partition=gpu --gres=gpu:1 --ntasks=2 --cpus-per-task=1
#SBATCH hetjob
#SBATCH --partition=cpu --nodes=2 --ntasks=2 --cpus-per-task=1
service=$PWD/service-$SLURM_JOB_ID
{BIN}/hetstream internal dispatcher --bind "tcp://127.0.0.1:0" --work-dir "$service" --address-file "$service/address" &
export HETSTREAM_SERVICE=file:$service/address HETSTREAM_TRANSPORT=mpi,tcp
export MPIR_CVAR_CH4_NETMOD=ofi  # MPICH: Slurm's PMI-2 breaks the longer addresses of ucx
step() {{
    srun --mpi=pmi2 --het-group=0 {sys.executable} "$@" : \\
        --het-group=1 {BIN}/hetstream internal worker --mpi --service "$HETSTREAM_SERVICE"
}}
STEPS
code=$?
kill %1
wait
exit $code
"""


def run_job(cluster: Devcluster, directory: Path, steps: str, wait_until: Callable[..., None]) -> tuple[str, str, str]:
    """Submit the script and wait for its end.

    Returns:
        The job's id, what scontrol says of it, and its output.
    """
    (directory / "job.sbatch").write_text(SCRIPT.replace("STEPS", steps))
    environ = dict(cluster.env)

    def run(*argv: str) -> str:
        return subprocess.run(
            argv, cwd=directory, env=environ, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    job_id = run("sbatch", "--parsable", "job.sbatch").strip()
    try:
        wait_until(
            lambda: not run("squeue", "--noheader", "--states=PD,R,CG"), timeout_s=280, what="the end of the job"
        )
    finally:
        subprocess.run(["scancel", "--quiet", job_id], env=environ, check=False)
    return job_id, run("scontrol", "show", "job", job_id), (directory / f"{job_id}.out").read_text()


@pytest.mark.slurm
@pytest.mark.mpi
@pytest.mark.every_release
def test_a_step_over_two_components_streams_by_mpi(devcluster: Devcluster, wait_until: Callable[..., None]) -> None:
    pytest.importorskip("mpi4py")
    directory = devcluster.out_dir / "mpi"
    directory.mkdir()
    (directory / "train.py").write_text(PROGRAM)
    job_id, shown, said = run_job(devcluster, directory, "step train.py", wait_until)
    assert "ExitCode=0:0" in shown, said
    reports = [json.loads((directory / f"rank-{rank}-of-2.json").read_text()) for rank in (0, 1)]
    assert sorted(reports[0]["ledger"] + reports[1]["ledger"]) == list(range(1200)), "lost or duplicated samples"
    for report in reports:
        assert report["stats"]["transport"] == {"mpi": 75}, said
        assert report["stats"]["local_steps"] == 0
    assert f"mpi:{job_id}.0/1/" in said, "the address names the job's step and the rank"


@pytest.mark.shows("over MPI every message is matched before anybody finalises, however the program ends")
@pytest.mark.slurm
@pytest.mark.mpi
@pytest.mark.every_release
@pytest.mark.timeout(400)
def test_an_end_is_the_programs_in_a_step(devcluster: Devcluster, wait_until: Callable[..., None]) -> None:
    pytest.importorskip("mpi4py")
    directory = devcluster.out_dir / "mpi-ends"
    program = PROGRAMS / "mpi_ends.py"
    for end in CODES:
        (directory / end).mkdir(parents=True)
    steps = "\n".join(f"step {program} {end} {directory}/{end} 2; echo $? >{end}/code" for end in CODES)
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    try:
        _, _, said = run_job(devcluster, directory, steps, wait_until)
    finally:
        for left in set(Path("/dev/shm").glob("mpich_shm_*")) - before:
            left.unlink()  # MPICH does not remove it when a world is aborted
    codes = {end: int((directory / end / "code").read_text()) for end in CODES}
    # Slurm ends the ranks of an aborted world by a signal, and srun's code is the largest of a task.
    assert codes.pop("raises") in (1, 137, 143), said
    assert codes == {end: code for end, code in CODES.items() if end != "raises"}, said
    for end in CODES:
        handled = {path.name for path in (directory / end).glob("handler-of-*")}
        assert handled == {f"handler-of-{rank}" for rank in range(1 if end == "raises" else 2)}, said
