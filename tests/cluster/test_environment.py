"""On real Slurm: data workers run the Python environment that the script activates, or the one that it names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.environment import make_environment

HETSTREAM = Path(sys.executable).with_name("hetstream")
PROGRAM = Path(__file__).parents[1] / "mpi_dataworkers" / "programs" / "train_in_environment.py"
# What Apptainer does, as far as it matters here: another Python, a mark in its environment, the same files.
APPTAINER = """#!/bin/bash
test "$1" = exec || exit 1
export APPTAINER_CONTAINER=$2 PATH={environment}/bin:$PATH
shift 2
exec "$@"
"""
DIRECTIVE = "#HETSTREAM --data-workers=1 --data-worker-cpus=1 --data-worker-partition=cpu"


@pytest.mark.slurm
@pytest.mark.parametrize("kind", ["activated", "container"])
def test_data_workers_run_the_scripts_python(devcluster: Any, wait_until: Callable[..., None], kind: str) -> None:
    directory = devcluster.out_dir / f"environment-{kind}"
    directory.mkdir()
    environment = make_environment(directory / "environment")
    if kind == "activated":
        script = f"#!/bin/bash\n{DIRECTIVE}\n. {environment}/bin/activate\nsrun python {PROGRAM} out.json\n"
    else:
        image = directory / "image.sif"
        apptainer = directory / "apptainer"
        apptainer.write_text(APPTAINER.format(environment=environment))
        apptainer.chmod(0o755)
        command = f"{apptainer} exec {image} python"
        named = f"#HETSTREAM --data-worker-python='{command}'"
        script = f"#!/bin/bash\n{DIRECTIVE}\n{named}\nsrun {command} {PROGRAM} out.json\n"
    (directory / "job.sbatch").write_text(script)
    done = subprocess.run(
        [HETSTREAM, "sbatch", "--wait", "--parsable", "--time=3", "job.sbatch"],
        cwd=directory, env=dict(devcluster.env), capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    job_id = done.stdout.strip()
    logs = sorted((directory / ".hetstream" / f"job-{job_id}").glob("*.log"))
    said = "\n".join(path.read_text() for path in [directory / f"slurm-{job_id}.out", *logs])
    assert done.returncode == 0, said
    place = json.loads((directory / "out.json").read_text())
    assert place["prefix"] == str(environment), said
    assert place["image"] == (str(directory / "image.sif") if kind == "container" else "")
    job_directory = directory / ".hetstream" / f"job-{job_id}"
    wait_until(lambda: not (job_directory / "address").exists(), timeout_s=60, what="the end of the service")
    wait_until(lambda: not (job_directory / "program-python.json").exists(), timeout_s=30, what="its removal")
