"""Random numbers of samples in other projects' own loops: two runs, or two ranks, have them in common where they do
without hetstream, and not where they do not.

The packages are those of `make test-peers`; a package that is missing skips its programs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "programs" / "noise.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# Of each program of `noise.py`: what it needs, with how many ranks it runs, and whether its two runs are equal.
PROGRAMS = {
    "transformers_ranks": ("transformers", 2, False),
    "transformers_resume": ("transformers", 1, True),
    "lightning_ranks": ("lightning", 2, False),
    "timm_ranks": ("timm", 2, False),
    "ignite_resume": ("ignite", 1, True),
    "monai_random_state": ("monai", 1, True),
    "monai_other_seeds": ("monai", 2, False),
    "monai_inverse": ("monai", 1, True),
}


def runs(name: str, num_ranks: int, data_workers: int | None, directory: Path) -> list[Any]:
    """The two runs of a program, plain or under `hetstream run`."""
    directory.mkdir()
    file, summary = directory / "runs", directory / "summary.json"
    command = [sys.executable, *(TORCHRUN if num_ranks > 1 else ()), str(PROGRAM), name, str(file)]
    if data_workers is not None:
        hetstream = [sys.executable, "-m", "hetstream.slurm_plugin.cli", "run", "--data-workers", str(data_workers)]
        command = [*hetstream, "--json", str(summary), "--", *command]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HETSTREAM_", "SLURM_"))}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    if data_workers:
        loaders = json.loads(summary.read_text())["loaders"]
        assert sum(loader["steps"] - loader["local_steps"] for loader in loaders) > 0, "data workers made no step"
    found = [run for rank in range(num_ranks) for run in json.loads(Path(f"{file}.{rank}").read_text())]
    assert len(found) == 2
    return found


@pytest.mark.shows("random numbers agree and differ where they do with torch, also in Lightning and transformers")
@pytest.mark.slow
@pytest.mark.parametrize("data_workers", [None, 0, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_runs_of_a_peers_program_are_equal_where_they_are_without_hetstream(
    name: str, data_workers: int | None, tmp_path: Path
) -> None:
    package, num_ranks, is_equal = PROGRAMS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the packages that peers' tests need are not installed: {package}")
    first, second = runs(name, num_ranks, data_workers, tmp_path / "run")
    assert (first == second) is is_equal
