"""Programs that a seed makes up, killed and resumed, end with the bits of the ones that torch ran alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.programs import generated

ROOT = Path(__file__).parents[2]
NUM_QUICK = 12


def run(seeds: range, tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    argv = [sys.executable, "-m", "tests.checkpoint.programs.generated", str(tmp_path), *map(str, seeds)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HETSTREAM_"))}
    own_memory = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
    environ["HETSTREAM_TEST_MEMORY"] = str(memory)
    if subprocess.run([*own_memory, "true"], capture_output=True).returncode:
        pytest.skip("a /dev/shm of one's own cannot be mounted here")
    done = subprocess.run([*own_memory, *argv], cwd=ROOT, env=environ, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(seeds)
    assert [line for line in lines if line.split()[1] != "same"] == []


def test_a_killed_program_ends_as_the_one_without_checkpoints(tmp_path: Path) -> None:
    run(range(1, NUM_QUICK + 1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", [1000, 1050, 2000, 2050, 3000, 3050])
def test_three_hundred_killed_programs_end_as_those_without(first: int, tmp_path: Path) -> None:
    run(range(first, first + 50), tmp_path)


def test_the_seeds_make_up_what_programs_are() -> None:
    """Each optimizer, kind of ranks, scheduler, dtype and thing that is left after the kill occurs."""
    quick = [generated.made_up(seed) for seed in range(1, NUM_QUICK + 1)]
    every = [generated.made_up(hundred * 1000 + seed) for hundred in (1, 2, 3) for seed in range(100)]
    for name, value in (("parallel", "fsdp"), ("parallel", "ddp"), ("left", "damaged"), ("left", "closed")):
        assert value in {what[name] for what in quick}, value
    assert any(what["is_app"] for what in quick)
    assert {what["optimizer"] for what in every} == {*generated.OPTIMIZERS}
    assert {what["scheduler"] for what in every} == {*generated.SCHEDULERS}
    assert {tuple(what["ranks"]) for what in every} == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)}
