"""On real Slurm: data workers run the Python environment that the script activates, or the one that it names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.containers import bound_paths, make_apptainer, make_conda_environment, make_image
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


def activated(directory: Path) -> tuple[str, str, str]:
    """A virtual environment that the script activates: what comes first, what starts Python, its prefix."""
    environment = make_environment(directory / "environment")
    return f". {environment}/bin/activate", "python", str(environment)


def conda(directory: Path) -> tuple[str, str, str]:
    """A conda environment that the script activates."""
    environment = make_conda_environment(directory)
    return f". {environment}/activate.sh", "python", str(environment)


def stand_in(directory: Path) -> tuple[str, str, str]:
    """What stands for a container."""
    environment = make_environment(directory / "environment")
    apptainer = directory / "apptainer"
    apptainer.write_text(APPTAINER.format(environment=environment))
    apptainer.chmod(0o755)
    return ":", f"{apptainer} exec {directory}/image.sif python", str(environment)


def apptainer(directory: Path) -> tuple[str, str, str]:
    """A real Apptainer with an image whose environment no host has."""
    image, command = make_image(directory / "image.sif"), make_apptainer(directory / "apptainer")
    words = f"{command} -q exec --bind {bound_paths()} {image} /opt/environment/bin/python"
    return ":", words, "/opt/environment"


KINDS = {"activated": activated, "conda": conda, "container": stand_in, "apptainer": apptainer}


@pytest.mark.shows("data workers run in the environment of the program: virtual, conda or a container")
@pytest.mark.slurm
@pytest.mark.parametrize(
    "kind",
    ["activated", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("container", "conda", "apptainer"))],
)
def test_data_workers_run_the_scripts_python(devcluster: Any, wait_until: Callable[..., None], kind: str) -> None:
    directory = devcluster.out_dir / f"environment-{kind}"
    directory.mkdir()
    first, command, prefix = KINDS[kind](directory)
    in_image = kind in ("container", "apptainer")
    named = f"#HETSTREAM --data-worker-python='{command}'\n" if in_image else ""
    script = f"#!/bin/bash\n{DIRECTIVE}\n{named}{first}\nsrun {command} {PROGRAM} out.json\n"
    alone = ["bash", "-c", f"{first} && {command} {PROGRAM} alone.json alone"]
    subprocess.run(alone, cwd=directory, check=True, timeout=120)
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
    assert place["prefix"] == prefix, said
    assert place["image"] == (str(directory / "image.sif") if in_image else "")
    assert place["digest"] == json.loads((directory / "alone.json").read_text())["digest"], (
        "the bytes that it has alone"
    )
    job_directory = directory / ".hetstream" / f"job-{job_id}"
    wait_until(lambda: not (job_directory / "address").exists(), timeout_s=60, what="the end of the service")
    wait_until(lambda: not (job_directory / "program-python.json").exists(), timeout_s=30, what="its removal")
