"""Libraries with something of their own around torch's DataLoader: the same batches with data workers and without.

The programs are in `programs/other_loaders.py`; what of their packages is missing skips a test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "other_loaders.py"
_TORCHVISION = Path(sys.prefix, "torchvision")

# Packages that a program needs, and the batches that it prints.
PROGRAMS = {
    "torchio": (("torchio", "nibabel"), 72),
    "monai_threads": (("monai",), 48),
    "megatron": (("megatron",), 108),
}


def run(name: str, folder: Path, data_workers: int) -> tuple[list[str], dict[str, int]]:
    """What it prints of its batches, and the numbers of its loaders' steps."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("HETSTREAM_", "SLURM_"))}
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(_TORCHVISION)]))
    environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    summary = folder / f"{data_workers}.json"
    command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", "run", "--json", str(summary)]
    program = [sys.executable, str(PROGRAM), name, str(folder)]
    command += ["--data-workers", str(data_workers), "--", *program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    loaders = json.loads(summary.read_text()).get("loaders", [])  # none without data workers
    counted = {key: sum(each[key] for each in loaders) for key in ("steps", "local_steps", "differing_steps")}
    return [line for line in done.stdout.splitlines() if line.startswith("batch")], counted


@pytest.mark.parametrize("name", PROGRAMS)
def test_batches_are_the_same_with_data_workers(name: str, tmp_path: Path) -> None:
    packages, num_batches = PROGRAMS[name]
    if any(importlib.util.find_spec(package) is None for package in packages):
        pytest.skip("the packages that peers' tests need are not installed")
    expected, _ = run(name, tmp_path, 0)
    found, counted = run(name, tmp_path, 2)
    assert len(expected) == num_batches
    assert found == expected
    assert counted["steps"] > counted["local_steps"] == 0
    assert counted["differing_steps"] == 0
