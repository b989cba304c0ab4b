"""Batch stages of the tests, in a module beside the programs as a user's would be."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import sample_datasets as datasets
import torch
from torch.utils.data import default_collate, get_worker_info

from hetstream import numpy_sample_generator
from hetstream.mpi_dataworkers.ops.pipeline import StagedBatch


class Noise:
    """Adds numbers of every generator that user code can draw from, one of its own among them."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.own = np.random.default_rng(1)

    def __call__(self, batch: Any) -> Any:
        values, ids = batch
        assert get_worker_info() is None
        drawn = random.random() + float(np.random.rand()) + float(self.own.random())
        drawn += float(numpy_sample_generator().random())
        return [values + self.scale * (drawn + torch.rand(())), ids]


class Times:
    """Multiplies."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, batch: Any) -> Any:
        return [batch[0] * self.factor, *batch[1:]]


class Shifts(Times):
    """Multiplies, and adds a number that it draws."""

    def __call__(self, batch: Any) -> Any:
        return [batch[0] * self.factor + torch.rand(()), *batch[1:]]


class Striking(Times):
    """Kills its data worker at some steps, each once."""

    def __init__(self, factor: float, every: int, flags: Path) -> None:
        super().__init__(factor)
        self.every, self.flags = every, flags
        self.trainer = os.getpid()

    def __call__(self, batch: Any) -> Any:
        first = int(batch[1][0])
        if first % self.every == 0 and os.getpid() != self.trainer:
            try:
                os.close(os.open(self.flags / str(first), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), 9)
        return super().__call__(batch)


class Network(torch.nn.Module):
    """Has a buffer and a parameter, whose gradients do not travel."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5]))
        self.weight = torch.nn.Parameter(torch.tensor([3.0]))

    def forward(self, batch: Any) -> Any:
        return [batch[0] * self.scale * self.weight, batch[1]]


class Annotating:
    """The batch without its values, which go beside it, in pieces of several kinds."""

    def __call__(self, batch: Any) -> StagedBatch:
        values, ids = batch
        return StagedBatch([ids], [values, *values.reshape(-1)[:10].split(1), torch.empty(0, 3), ids.to(torch.int32)])


class Resting:
    """Takes its time without a CPU, and writes down from when to when."""

    def __init__(self, seconds: float, file: Path) -> None:
        self.seconds, self.file = seconds, file

    def __call__(self, batch: Any) -> Any:
        began = time.monotonic()
        time.sleep(self.seconds)
        with self.file.open("a") as out:
            out.write(f"{began} {time.monotonic()}\n")
        return batch


class Raising:
    """Raises for the batch with one sample."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, batch: Any) -> Any:
        if self.index in batch[1].tolist():
            raise datasets.UserError(f"no batch with {self.index}")
        return batch


class Locked:
    """Cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, batch: Any) -> Any:
        return batch


class Opening(datasets.Augmented):
    """Holds what cannot be pickled once it has made a sample, or was told to."""

    handle: Any = None

    def __getitem__(self, index: int) -> Any:
        self.handle = self.handle or threading.Lock()
        return super().__getitem__(index)


def again(batch: Any) -> Any:
    """Collates what was collated: torch looks whether it is in a worker process."""
    return default_collate([batch[0]])[0], batch[1]


def doubled_beside(batch: torch.Tensor) -> StagedBatch:
    """The batch as it is, and twice its numbers beside it."""
    return StagedBatch(batch, [batch * 2])


class Witness:
    """Writes down in which processes it runs."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, batch: Any) -> Any:
        with self.file.open("a") as out:
            print(os.getpid(), file=out)
        return batch
