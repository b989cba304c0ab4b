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


LEFT_BEHIND = """
import sys, time
import hetstream
from torch.utils.data import Dataset

class Some(Dataset):
    def __init__(self, at): self.at = at
    def __len__(self): return 100
    def __getitem__(self, index):
        if index == self.at:
            time.sleep(600)
        return index

def taken(most, timeout):
    given = []
    loader = hetstream.DataLoader(Some(40), 4, timeout=timeout)
    try:
        for batch in loader:
            given += batch.tolist()
            if len(given) == most:
                break
    except RuntimeError as error:
        # A data worker may hold the batch before back, to send it with the one that hangs.
        return given == [*range(len(given))], len(given) in (36, 40), str(error)
    finally:
        loader.close()
    return given == [*range(len(given))], len(given), loader.stats()["local_steps"] < 5

if __name__ == "__main__":
    if sys.argv[1] == "times out":
        print(taken(100, 3), taken(100, 3))
    else:
        print(taken(40, 0), taken(40, 0))
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("times out", " ".join(["(True, True, 'DataLoader timed out after 3 seconds')"] * 2)),
        ("is left", "(True, 40, True) (True, 40, True)"),
    ],
)
def test_a_sample_that_hangs_does_not_keep_data_workers_from_the_next_pass(
    how: str, said: str, service: Any, tmp_path: Path, run_program: Any
) -> None:
    """Its pass is over; `sample_timeout_s`, 300 s, is for one that somebody waits for."""
    service.start_workers(1)
    found = run_program(LEFT_BEHIND, tmp_path, how, HETSTREAM_SERVICE=service.name)
    assert found.stdout.strip() == said, found.stderr
