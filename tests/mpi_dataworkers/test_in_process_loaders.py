"""Programs whose loaders have `num_workers=0`, as written and under the hook: torch promises them their own dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetstream.mpi_dataworkers.hook import environment

SAID = (
    "stays local: torch promises that the program's own dataset makes these batches; set num_workers=1 or more, or "
    "--stream-in-process-loaders, to let data workers make them"
)

# What public bug reports say of programs that need the program's own dataset: it changes while training goes on
# (pytorch#12536, #97326, threestudio#227), notes what it met, and holds parameters that are trained (pytorch#82411).
CHANGING = """
import torch
from torch.utils.data import DataLoader, Dataset

class Changing(Dataset):
    def __init__(self):
        self.weight, self.bad, self.calls = 1.0, set(), 0
    def __len__(self):
        return 6
    def __getitem__(self, index):
        self.calls += 1
        if index == 3:
            self.bad.add(index)
        return torch.tensor([index, self.weight])

dataset = Changing()
for epoch in range(2):
    for batch in DataLoader(dataset, batch_size=2):
        print(batch.tolist(), flush=True)
        dataset.weight += 1
print(dataset.bad, dataset.calls)
"""
LEARNING = """
import torch
from torch.utils.data import DataLoader, Dataset

class Embedded(torch.nn.Module, Dataset):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(4))
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return self.table[index]

dataset = Embedded()
optimizer = torch.optim.SGD(dataset.parameters(), lr=0.5)
for batch in DataLoader(dataset, batch_size=2):
    (batch - 1).pow(2).sum().backward()
    optimizer.step()
print(dataset.table.tolist(), dataset.table.grad.tolist())
"""
STATEFUL = """
import random, torch
from torch.utils.data import DataLoader

class Counting:
    def __init__(self):
        self.count = 0
    def __call__(self, samples):
        self.count += 1
        return self.count, samples, random.random(), torch.rand(1).item()

torch.manual_seed(1)
random.seed(1)
collate = Counting()
print([list(DataLoader(range(8), batch_size=2, shuffle=True, collate_fn=collate)) for _ in range(2)], torch.rand(1))
# In memory that no other process has.
print([(batch.is_shared(), batch.resize_(3).shape) for batch in DataLoader(range(8), batch_size=2)])
"""
# With processes of its own, which torch's worker processes cannot have (pytorch#15950).
POOLED = """
import multiprocessing, torch
from torch.utils.data import DataLoader

class Pooled(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        with multiprocessing.Pool(1) as pool:
            return pool.apply(abs, (-index,))

if __name__ == "__main__":
    print([batch.tolist() for batch in DataLoader(Pooled(), batch_size=2)])
"""


@pytest.mark.shows("a loader with `num_workers=0` stays the program's own, with one line")
@pytest.mark.parametrize(
    "streamed", [pytest.param(True, id="data workers"), pytest.param(False, id="none", marks=pytest.mark.slow)]
)
def test_the_programs_own_dataset_makes_its_batches(
    three: Any, tmp_path: Path, run_program: Any, streamed: bool
) -> None:
    source = "\n".join([CHANGING, LEARNING, STATEFUL, POOLED])
    plain = run_program(source, tmp_path)
    found = run_program(source, tmp_path, **environment(three.name if streamed else None, {}))
    assert (plain.returncode, plain.stderr) == (0, "")
    assert (found.returncode, found.stdout) == (0, plain.stdout), found.stderr
    assert found.stderr.count(SAID) == len(found.stderr.splitlines()) == 4, "once for each kind of dataset"


@pytest.mark.shows("a loader with `num_workers=0` stays the program's own, with one line")
def test_data_workers_make_them_if_that_is_asked_for(three: Any, tmp_path: Path, run_program: Any) -> None:
    found = run_program(CHANGING, tmp_path, **environment(three.name, {}, in_process_loaders=True))
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines()[-1] == "set() 0"


def test_the_environment_says_that_it_is_asked_for() -> None:
    assert "HETSTREAM_IN_PROCESS_LOADERS" not in environment(None, {})
    assert environment(None, {}, in_process_loaders=True)["HETSTREAM_IN_PROCESS_LOADERS"] == "1"
