"""A sample that hangs, or ends its process: an unmodified program gets the steps before it, and then torch's error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetstream.mpi_dataworkers.hook import environment

SLOW = pytest.mark.slow
PROGRAM = Path(__file__).parent / "programs" / "hanging.py"


@pytest.mark.parametrize(
    ("part", "sample", "said"),
    [
        pytest.param("hangs", 402, "timed out after N seconds", id="hangs"),
        pytest.param("hangs", 42, "timed out after N seconds", id="hangs while all are compared", marks=SLOW),
        pytest.param("exits", 402, "exited unexpectedly with exit code N", id="exits"),
        pytest.param("is killed", 42, "is killed by signal", id="is killed while all are compared", marks=SLOW),
    ],
)
def test_a_sample_that_never_comes_is_torchs_own_error_behind_all_steps_before_it(
    part: str, sample: int, said: str, service: Any, tmp_path: Path, run_program: Any
) -> None:
    service.start_workers(2)
    source = PROGRAM.read_text()
    plain = run_program(source, tmp_path, part, str(sample))
    assert said in plain.stdout, plain.stderr
    assert f"True {sample // 4 * 4}" in plain.stdout
    found = run_program(source, tmp_path, part, str(sample), **environment(service.name, {}))
    assert (found.stdout, found.returncode) == (plain.stdout, plain.returncode), found.stderr
    assert "stays local" not in found.stderr
    if part != "hangs":
        assert f"at sample {sample} of step {sample // 4}" in found.stderr
