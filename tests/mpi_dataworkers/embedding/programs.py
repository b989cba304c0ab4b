"""A small model over one table, trained by torch's means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, torch.Tensor]


def batches(num_rows: int, steps: int = 20, samples: int = 64) -> list[Batch]:
    """Return ids [samples, 5], few of which are most of the accesses, and targets [samples, 1]."""
    generator = torch.Generator().manual_seed(5)
    return [
        (
            (torch.rand(samples, 5, generator=generator) ** 4 * num_rows).long(),
            torch.randn(samples, 1, generator=generator),
        )
        for _ in range(steps)
    ]


def train(
    bag: nn.Module,
    dim: int,
    data: Iterable[Batch],
    optimizer: torch.optim.Optimizer | None = None,
    head: nn.Module | None = None,
    before_step: Callable[[int], Any] = lambda _: None,
) -> list[float]:
    """Return the loss of each step."""
    if head is None:
        torch.manual_seed(2)
        head = nn.Linear(dim, 1)
    optimizers = [torch.optim.SGD(head.parameters(), lr=0.01), *([optimizer] if optimizer else [])]
    losses = []
    for number, (ids, target) in enumerate(data):
        before_step(number)
        loss = functional.mse_loss(head(bag(ids)), target)
        for each in optimizers:
            each.zero_grad()
        loss.backward()
        for each in optimizers:
            each.step()
        losses.append(loss.item())
    return losses
