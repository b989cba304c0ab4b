"""Hugging Face data sets, in many formats, in torch's DataLoader: under the hook each batch is what it is without.

The packages are those of `make test-peers`; without them the tests are skipped.
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

PROGRAM = Path(__file__).parent / "programs" / "tables.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# The loader with random samples, and the one that stays local as a stream.
NOISY, STREAM = "noisy", "stream"


def batches(directory: Path, num_ranks: int, *hetstream: str) -> list[dict[str, Any]]:
    """What each rank's loaders gave, in two passes."""
    directory.mkdir()
    command = [sys.executable, *(TORCHRUN if num_ranks > 1 else ()), str(PROGRAM), str(directory / "found")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HETSTREAM_", "SLURM_"))}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    environment["HF_HOME"] = str(directory / "cache")
    done = subprocess.run(
        [*hetstream, *command], cwd=directory, env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((directory / f"found.{rank}").read_text()) for rank in range(num_ranks)]


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_batches_of_hugging_face_data_sets_are_the_same_under_the_hook(num_ranks: int, tmp_path: Path) -> None:
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("the packages that peers' tests need are not installed: datasets")
    plain = batches(tmp_path / "plain", num_ranks)
    summary = tmp_path / "summary.json"
    command = (sys.executable, "-m", "hetstream.slurm_plugin.cli", "run", "--data-workers", "2", "--json", str(summary))
    hook = batches(tmp_path / "hook", num_ranks, *command, "--")
    for rank, (without, under) in enumerate(zip(plain, hook, strict=True)):
        assert {name: under[name] for name in without if name != NOISY} == {
            name: batches for name, batches in without.items() if name != NOISY
        }
        first, second = under[NOISY]
        assert len(first) == len(without[NOISY][0])
        assert first != second, f"rank {rank} has the same random numbers in each pass"
    if num_ranks > 1:
        assert hook[0][NOISY] != hook[1][NOISY]
    loaders = json.loads(summary.read_text())["loaders"]
    steps = [len(one) for found in plain for name, passes in found.items() if name != STREAM for one in passes]
    assert sum(loader["steps"] - loader["local_steps"] for loader in loaders) == sum(steps)
    assert sum(loader["differing_steps"] for loader in loaders) == 0
