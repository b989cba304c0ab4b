"""A program that only knows torch catches what torch's own worker process raises, and goes on as with torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetstream.mpi_dataworkers.hook import environment

PROGRAM = Path(__file__).parent / "programs" / "raising.py"


@pytest.mark.shows("a StopIteration of user code is an error of `hetstream.DataLoader`")
@pytest.mark.parametrize(
    ("part", "local"),
    [
        pytest.param("samples", 0, id="what samples raise"),
        pytest.param("ends", 0, id="a StopIteration of a sample ends its epoch"),
        pytest.param("others", 1, id="what else raises", marks=pytest.mark.slow),
    ],
)
def test_what_user_code_raises_is_caught_word_for_word_as_from_torch_and_its_epochs_end_as_there(
    part: str, local: int, three: Any, tmp_path: Path, run_program: Any
) -> None:
    source = PROGRAM.read_text()
    plain = run_program(source, tmp_path, part)
    assert plain.returncode == (1 if part == "others" else 0), plain.stderr
    found = run_program(source, tmp_path, part, **environment(three.name, {}))
    assert found.stdout.splitlines() == plain.stdout.splitlines(), found.stderr
    assert found.returncode == plain.returncode, found.stderr
    assert found.stderr.count("stays local") == local, found.stderr


GROWN = """
from torch.utils.data import DataLoader, Dataset

class Grown(Dataset):
    def __init__(self): self.items = list(range(200))
    def __len__(self): return len(self.items)
    def __getitem__(self, index): return self.items[index]

data = Grown()
loader = DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True)
try:
    for epoch in range(2):
        print([batch.tolist() for batch in loader])
        data.items += [1000, 1001]
except IndexError as error:
    print(str(error).partition(chr(10))[0], str(error).splitlines()[-1])
"""


def test_processes_that_persist_raise_what_they_raise_with_the_dataset_of_the_first_pass(
    three: Any, tmp_path: Path, run_program: Any
) -> None:
    plain = run_program(GROWN, tmp_path)
    assert "IndexError: list index out of range" in plain.stdout
    found = run_program(GROWN, tmp_path, **environment(three.name, {}))
    assert found.stdout == plain.stdout, found.stderr
    (said,) = [line for line in found.stderr.splitlines() if "stays local" in line]
    assert "data workers and torch's own worker process raise at step 100: IndexError: list index out of range" in said
    assert "in place of" not in said


@pytest.mark.parametrize("part", ["ends", pytest.param("samples", marks=pytest.mark.slow)])
def test_so_it_is_where_no_service_makes_its_batches(part: str, tmp_path: Path, run_program: Any) -> None:
    source = PROGRAM.read_text()
    plain, found = (run_program(source, tmp_path, part, **hook) for hook in ({}, environment(None, {})))
    assert (found.returncode, plain.returncode) == (0, 0), found.stderr
    assert found.stdout.splitlines() == plain.stdout.splitlines(), found.stderr


@pytest.mark.parametrize("is_served", [True, False], ids=["data workers", "no service"])
def test_a_stop_iteration_of_the_programs_own_process_ends_its_epoch(
    is_served: bool, three: Any, tmp_path: Path, run_program: Any
) -> None:
    source, hook = PROGRAM.read_text(), environment(three.name if is_served else None, {}, in_process_loaders=True)
    plain, found = (run_program(source, tmp_path, "in-process", **each) for each in ({}, hook))
    assert (found.returncode, plain.returncode) == (0, 0), found.stderr
    assert found.stdout.splitlines() == plain.stdout.splitlines(), found.stderr
