"""What torch's DataLoader warns of under the hook: the same, at the same place, so that filters of programs fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetstream.mpi_dataworkers.hook import environment

# Prints each warning with its place, and whose frame it is given to. More workers than CPUs, and no GPU to pin for.
PROGRAM = """
import os, sys, warnings
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import dataloader

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if sys.argv[1] == "error":
    warnings.filterwarnings("error", module=r"(?!torch\\.utils\\.data)")
elif sys.argv[1] == "once":
    warnings.filterwarnings("error", module=r"torch\\.utils\\.data", message="This DataLoader will create")
else:
    warnings.simplefilter(sys.argv[1])

class Custom(dataloader._SingleProcessDataLoaderIter):
    def __init__(self, loader):
        super().__init__(loader)

class CustomLoader(DataLoader):
    def _get_iterator(self):
        return Custom(self) if self.num_workers == 0 else super()._get_iterator()

given = []
def show(message, category, filename, lineno, file=None, line=None):
    print(category.__name__, filename, lineno, str(message)[:60])
warnings.showwarning = show
for kind, num_workers in ((DataLoader, 2), (DataLoader, 0), (CustomLoader, 2), (CustomLoader, 0)):
    for more in ({}, {"pin_memory": True}, {"pin_memory": True, "pin_memory_device": "cpu"}):
        print(kind.__name__, num_workers, more)
        try:
            for _ in range(2):
                loader = kind(TensorDataset(torch.arange(4)), 2, num_workers=num_workers, **more)
                print([batch.tolist() for batch, in loader])
        except Warning as warning:
            print("raised", str(warning)[:60])
print(sorted(map(str, getattr(dataloader, "__warningregistry__", {}))))
"""


@pytest.mark.parametrize(
    "filtering", ["default", "error", *(pytest.param(each, marks=pytest.mark.slow) for each in ("always", "once"))]
)
def test_torchs_warnings_have_the_place_that_they_have_without_us(
    filtering: str, three: Any, tmp_path: Path, run_program: Any
) -> None:
    plain = run_program(PROGRAM, tmp_path, filtering)
    assert plain.returncode == 0, plain.stderr
    assert "This DataLoader will create" in plain.stdout
    streamed = environment(three.name, {}) | {"HETSTREAM_IN_PROCESS_LOADERS": "1"}
    for variables in (streamed, environment(three.name, {})):
        found = run_program(PROGRAM, tmp_path, filtering, **variables)
        assert found.returncode == 0, found.stderr
        assert found.stdout.splitlines() == plain.stdout.splitlines(), found.stderr
