"""Horovod: the adapter with a stand-in, and two real ranks that share a loader (marker mpi)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from hetstream.base.errors import ConfigError, OptionsError
from hetstream.checkpoint.flash.ranks import communicator
from hetstream.mpi_dataworkers.horovod import horovod_identity
from hetstream.mpi_dataworkers.loader.data_loader import DataLoader
from tests.programs import needs

NUM_SAMPLES = 101  # odd, so that the two ranks' last steps differ in size
NUM_EPOCHS = 2

TRAIN = """
import json
import sys

import horovod.torch as hvd
import torch

from hetstream import DataLoader


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return {num_samples}

    def __getitem__(self, index):
        return torch.tensor([index / {num_samples}]), torch.tensor([(index / {num_samples}) ** 2]), index


hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
epochs = []
with DataLoader(Squares(), batch_size=8, shuffle=True, seed=3, job_name="squares") as loader:
    for epoch in range({num_epochs}):
        epochs.append([])
        for values, squares, ids in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(values), squares).backward()
            optimizer.step()
            epochs[-1].append(ids.tolist())
    stats = loader.stats()
weights = [value.tolist() for value in model.state_dict().values()]
with open(f"{{sys.argv[1]}}/rank{{hvd.rank()}}.json", "w") as file:
    json.dump({{"epochs": epochs, "weights": weights, "local_steps": stats["local_steps"], "size": hvd.size()}}, file)
hvd.shutdown()
"""


class StandIn(ModuleType):
    """What the adapter asks of `horovod.torch`."""

    def __init__(self, identity: tuple[int, int] | None) -> None:
        super().__init__("horovod.torch")
        self.is_initialized = lambda: identity is not None
        self.rank = lambda: identity and identity[0]
        self.size = lambda: identity and identity[1]
        self.allgather = None


def test_without_horovod_there_is_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)
    assert horovod_identity({"HOROVOD_SIZE": "2"}) is None


def test_an_initialised_horovod_says_who_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod.torch", StandIn((3, 4)))
    assert horovod_identity({}) == (3, 4)


def test_a_loader_before_init_is_refused_among_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod.torch", StandIn(None))
    assert horovod_identity({}) is None
    assert horovod_identity({"OMPI_COMM_WORLD_SIZE": "1"}) is None
    for several in ("HOROVOD_SIZE=2", "OMPI_COMM_WORLD_SIZE=2", "PMI_SIZE=2", "SLURM_STEP_NUM_TASKS=2", "WORLD_SIZE=2"):
        with pytest.raises(ConfigError, match=rf"{several}\): call hvd\.init\(\) first"):
            horovod_identity(dict([several.split("=")]))


@pytest.mark.shows("a Horovod that knows no other rank is refused among several; two ranks train as one")
def test_a_horovod_that_knows_no_other_rank_is_refused_among_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without MPI says size 1 in each process that horovodrun has not started."""
    monkeypatch.setitem(sys.modules, "horovod.torch", StandIn((0, 1)))
    assert horovod_identity({"SLURM_NTASKS": "4"}) == (0, 1), "of a batch script, in which one process runs"
    assert horovod_identity({"SLURM_STEP_NUM_TASKS": "4", "HOROVOD_SIZE": "1"}) == (0, 1), "horovodrun -np 1"
    for variable in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"):
        with pytest.raises(ConfigError, match=rf"hvd\.size\(\) is 1, .*\({variable}=4\).*horovod\.sbatch"):
            horovod_identity({variable: "4"})
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(OptionsError, match=r"hvd\.size\(\) is 1.*give the DataLoader rank=0 and world_size=1"):
        DataLoader([1, 2, 3])
    DataLoader([1, 2, 3], rank=0, world_size=1).close()
    with pytest.raises(OptionsError, match=r"hvd\.size\(\) is 1.*ranks=Alone\(\)"):
        communicator()


@pytest.mark.mpi
def test_two_ranks_share_every_epoch_exactly(horovod_bin: Path, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(TRAIN.format(num_samples=NUM_SAMPLES, num_epochs=NUM_EPOCHS))
    launch = [horovod_bin / "horovodrun", "--gloo", "-np", "2", "-H", "localhost:2"]
    argv = [
        horovod_bin / "hetstream",
        "run",
        "--data-workers",
        "2",
        "--",
        *launch,
        horovod_bin / "python",
        program,
        tmp_path,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [rank["size"] for rank in ranks] == [2, 2]
    assert [rank["local_steps"] for rank in ranks] == [0, 0], "the batches did not come from the data workers"
    for epoch in range(NUM_EPOCHS):
        steps = [rank["epochs"][epoch] for rank in ranks]
        assert len(steps[0]) == len(steps[1])
        ids = Counter(index for rank in steps for batch in rank for index in batch)
        assert ids == Counter(range(NUM_SAMPLES))
    assert ranks[0]["epochs"][0] != ranks[0]["epochs"][1]
    assert ranks[0]["weights"] == ranks[1]["weights"]


@pytest.mark.shows("a Horovod that knows no other rank is refused among several; two ranks train as one")
@needs("make")
@needs("g++")
def test_a_build_that_cannot_succeed_says_what_is_missing(tmp_path: Path) -> None:
    """torch for CUDA where only half of CUDA is: a stand-in for such an environment, for the script itself."""
    binaries, cuda = tmp_path / "bin", tmp_path / "cuda"
    binaries.mkdir()
    cuda.mkdir()
    for name, text in (("pip", ""), ("python", f"echo {cuda}")):
        (binaries / name).write_text(f"#!/bin/sh\n{text}\n")
        (binaries / name).chmod(0o755)
    script = Path(__file__).parents[2] / ".ci" / "install-horovod"
    done = subprocess.run([script, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"in {cuda} CUDA's headers are missing" in done.stderr
    assert "TORCH='torch==2.13.0+cpu', from https://download.pytorch.org/whl/cpu" in done.stderr
