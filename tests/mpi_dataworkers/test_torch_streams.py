"""A data worker in the place of one of torch's: its batches beside torch's own, and who goes on from its state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import stream_programs as programs
import torch
from torch.utils.data import DataLoader

from hetstream.mpi_dataworkers.ops import torch_streams
from hetstream.mpi_dataworkers.ops.batch_comparison import compare
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline, generators_kept
from hetstream.mpi_dataworkers.ops.torch_streams import TorchsWorker
from hetstream.mpi_dataworkers.wire.messages import ShardOrder, WorkerSeeds

_BATCH_SIZE = 4


class Stateful(programs.Numbers):
    """It goes on from where its state says; `num_read` counts what all copies have read."""

    num_read = 0
    first = 0

    def numbers(self) -> Iterator[int]:
        for number in super().numbers():
            if number >= self.first:
                Stateful.num_read += 1
                self.last = number
                yield number

    def __iter__(self) -> Iterator[Any]:
        return map(self.element, self.numbers())

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.last + 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["first"]


class LosesItsBuffer(Stateful):
    """As in many libraries, the shuffle buffer is no part of the state."""

    def __iter__(self) -> Iterator[Any]:
        return programs.Numbers.__iter__(self)


# What torch draws from this generator for a pass.
_GENERATOR_SEED = 0
_BASE_SEED = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(_GENERATOR_SEED)))


def worker_of(dataset: Any, **seeds: Any) -> TorchsWorker:
    """The second of three."""
    pipeline = Pipeline(dataset, torch.utils.data.default_collate, -1, num_workers=3)
    order = ShardOrder("itself", 1, 3, _BATCH_SIZE, False, False, 0, 0)
    held = torch_streams.pack_states(pipeline)
    return TorchsWorker(pipeline, order, WorkerSeeds(_BASE_SEED, 0, [], held=held, **seeds))


def torchs_own(dataset: Any) -> list[Any]:
    """What the second of torch's three worker processes makes."""
    generator = torch.Generator().manual_seed(_GENERATOR_SEED)
    return [*DataLoader(dataset, _BATCH_SIZE, num_workers=3, generator=generator)][1::3]


def batches_of(worker: TorchsWorker, first: int = 0, snapshot: bytes = b"") -> Iterator[Any]:
    """Its batches from one on; something else draws in between."""
    step = first
    while (made := worker.read(step, snapshot)) is not None:
        yield made.batch
        step += 1
        random.seed(1)
        torch.manual_seed(1)


@pytest.fixture(autouse=True)
def _own_numbers() -> Iterator[None]:
    with generators_kept():
        yield


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("dataset", [programs.Numbers(), programs.OwnGenerators(), Stateful()])
def test_its_batches_are_torchs_own(dataset: Any) -> None:
    expected = torchs_own(dataset)
    assert not compare([*batches_of(worker_of(dataset))], expected).differences


@pytest.mark.parametrize("is_kept", [True, False], ids=["all of it is in its state", "its buffer is not"])
def test_another_one_goes_on_from_a_state_that_says_all(is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_streams, "_SAVES_EACH_S", 0.0)
    dataset = (Stateful if is_kept else LosesItsBuffer)(120)
    worker = worker_of(dataset)
    expected, snapshots = [], []
    for batch in batches_of(worker):
        expected.append(batch)
        snapshots.append((worker.snapshot_step, worker.snapshot))
    assert [step for step, snapshot in snapshots if snapshot] == (list(range(1, 10)) if is_kept else [])
    Stateful.num_read = 0
    found = [*batches_of(worker_of(dataset), 7, snapshots[6][1])]
    assert not compare(found, expected[7:]).differences
    # Elements 0 to 39; the state is that before batch 6.
    assert Stateful.num_read in (range(30) if is_kept else range(40, 50))


def test_a_state_that_cannot_be_taken_up_is_read_again() -> None:
    class Refuses(Stateful):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("no")

    expected = [*batches_of(worker_of(Refuses(120)))]
    snapshot = torch_streams.pack({"step": 5, "iterators": False, "state": {}, "states": None, "kept": b""})
    assert not compare([*batches_of(worker_of(Refuses(120)), 6, snapshot)], expected[6:]).differences


def test_user_code_finds_its_trainers_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    environment = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": None}
    found = [*batches_of(worker_of(programs.OfRank(160), rank=1, world_size=4, environment=environment))]
    numbers = [int(number) for batch in found for number in batch["at"][:, 0]]
    assert sorted(numbers) == list(range(4, 160, 12))
    assert not torch.distributed.is_initialized()
    assert torch_streams.os.environ.get("RANK") == "7"
    assert "WORLD_SIZE" not in torch_streams.os.environ
