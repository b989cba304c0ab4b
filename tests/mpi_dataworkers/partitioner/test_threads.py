"""Operators whose last bits depend on the number of threads stay with a trainer that has several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from hetstream.mpi_dataworkers.partitioner.analysis import ALIKE_IN_PIECES
from hetstream.mpi_dataworkers.partitioner.partition import partition
from hetstream.mpi_dataworkers.partitioner.program import GRAIN_SIZE

LOADER_OPTIONS: dict[str, Any] = {}
SIZE = GRAIN_SIZE + 7234
# How each is called, of those that compute; the others only move numbers.
CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: torch.add(x, x.roll(1), alpha=0.37),
    "sub": lambda x: x - x.roll(1),
    "mul": lambda x: x * x.roll(1),
    "div": lambda x: x / x.roll(1),
    "sqrt": lambda x: x.abs().sqrt(),
    "reciprocal": torch.reciprocal,
    "round": lambda x: torch.round(x, decimals=2),
    "clamp": lambda x: x.clamp(-1, 1),
    "where": lambda x: torch.where(x > 0, x, x.roll(1)),
    "nan_to_num": torch.nan_to_num,
    "relu": torch.relu,
    "exp": torch.exp,
    "log": lambda x: x.abs().log(),
    "log1p": lambda x: x.abs().log1p(),
    "log2": lambda x: x.abs().log2(),
    "log10": lambda x: x.abs().log10(),
    "expm1": torch.expm1,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "rsqrt": lambda x: x.abs().rsqrt(),
}


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_operators_that_move_at_any_size_are_alike_in_pieces() -> None:
    assert CALLS.keys() <= ALIKE_IN_PIECES
    for draw in range(20):
        values = torch.randn(SIZE, generator=torch.Generator().manual_seed(draw)) * 3
        for name, call in CALLS.items():
            torch.set_num_threads(1)
            one = call(values)
            for num_threads in (2, 3, 7):
                torch.set_num_threads(num_threads)
                assert torch.equal(one.view(torch.int32), call(values).view(torch.int32)), (name, num_threads)


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        self.values = torch.randn(40000, 13, generator=torch.Generator().manual_seed(7)) * 3

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.values[index], torch.tensor(float(index % 2))


class Bearings(torch.nn.Module):
    """Angles and softplus, whose last bits depend on the pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(13, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = torch.atan2(values, values.roll(1, 1)) + torch.nn.functional.softplus(values)
        return self.layers(values).squeeze(-1)


def trained(loader: Any, model: torch.nn.Module) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for values, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(values), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    return losses


def test_a_batch_that_grows_too_large_is_the_trainers(three: Any, loaders: Callable[..., Any]) -> None:
    dataset = Rows()
    sizes = [256] * 6 + [2901, 2938, 256, 2975]
    batches = [[(7 * number + step) % 40000 for number in range(size)] for step, size in enumerate(sizes)]
    torch.manual_seed(0)
    expected = trained(DataLoader(dataset, batch_sampler=batches), Bearings())
    torch.manual_seed(0)
    model, loader = Bearings(), loaders(dataset, batch_sampler=batches, service=three.name)
    done = partition(model, default_collate([dataset[row] for row in batches[0]]), loader=loader, offload="all")
    assert trained(loader, model) == expected
    assert done.counts.partitioned + done.counts.checked == 7, (done.reason, done.counts)


def test_a_batch_that_is_too_large_at_first_stays(loaders: Callable[..., Any]) -> None:
    dataset = Rows()
    loader = loaders(dataset, batch_size=4096)
    done = partition(Bearings(), default_collate([dataset[row] for row in range(4096)]), loader=loader, offload="all")
    assert done.analysis is not None
    reasons = [verdict.reason for verdict in done.analysis.verdicts.values()]
    assert any("its last bits depend on the number of threads" in reason for reason in reasons)
    assert all("atan2" not in name and "softplus" not in name for name in done.decision.moved if done.decision)
