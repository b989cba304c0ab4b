"""What all programs have in common: a training loop as users write it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        name: of the program.
        model: makes the model.
        dataset: makes the data, of so many samples.
        batch_size: samples in a batch.
        num_inputs: how many tensors of a batch the model gets; the last one of a batch is the label.
        accelerator_ms: what a GPU would take for a step, from the backward pass to the optimizer's: emulated, because
            this machine has none.
        paper_accelerator_ms: the same of the paper's V100, where the paper has what it follows from; None: it has not.
    """

    name: str
    model: Callable[[], torch.nn.Module]
    dataset: Callable[[int], Dataset[tuple[torch.Tensor, ...]]]
    batch_size: int
    num_inputs: int
    accelerator_ms: float = 0.0
    paper_accelerator_ms: float | None = None


def train(program: Program, num_steps: int, num_workers: int = 0, ends: list[float] | None = None) -> list[str]:
    """Train from a seed, and give the losses as exact numbers.

    Args:
        program: what to train.
        num_steps: so many.
        num_workers: of the loader.
        ends: is given the time at the end of each step.
    """
    torch.manual_seed(0)
    model = program.model()
    dataset = program.dataset(num_steps * program.batch_size)
    loader = DataLoader(dataset, batch_size=program.batch_size, num_workers=num_workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        outputs = model(*batch[: program.num_inputs])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(outputs, batch[-1])
        began = time.perf_counter()
        loss.backward()
        optimizer.step()
        # This machine's processor stands in for the accelerator, so what it takes for these is not added once more.
        time.sleep(max(0.0, began + program.accelerator_ms / 1e3 - time.perf_counter()))
        losses.append(float(loss.detach()).hex())
        if ends is not None:
            ends.append(time.perf_counter())
    return losses
