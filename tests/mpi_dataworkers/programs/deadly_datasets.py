"""Datasets with a sample that ends what makes it, whole data workers too."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset


def end_whoever_makes_it(trainer: int, log: Path) -> None:
    """As a control group does that ends all its processes at once; in the trainer itself, note it and raise."""
    with log.open("a") as noted:
        if os.getpid() == trainer:
            noted.write("trainer\n")
            raise AssertionError("made in the trainer's own process")
        is_child = os.getppid() == trainer
        noted.write("child\n" if is_child else "data worker\n")
    if not is_child:
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly(Dataset[Any]):
    """Sample i is (i, a random number); one ends who makes it."""

    def __init__(self, length: int, index: int, log: Path) -> None:
        self.length, self.index, self.log, self.trainer = length, index, log, os.getpid()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == self.index:
            end_whoever_makes_it(self.trainer, self.log)
        return torch.rand(()), index


class DeadlyStream(IterableDataset[Any]):
    """The same of a stream."""

    def __init__(self, length: int, index: int, log: Path) -> None:
        self.length, self.index, self.log, self.trainer = length, index, log, os.getpid()

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.length):
            if index == self.index:
                end_whoever_makes_it(self.trainer, self.log)
            yield index


class DeadlyOnce(Deadly):
    """Its sample ends whole data workers, and is made in a child of the trainer."""

    def __getitem__(self, index: int) -> Any:
        if index == self.index and os.getppid() != self.trainer:
            end_whoever_makes_it(self.trainer, self.log)
        if index == self.index:
            with self.log.open("a") as noted:
                noted.write("child\n")
        return torch.rand(()), index


class TooLarge(Deadly):
    """Its sample ends whole data workers, and wants so much memory in a child of the trainer."""

    def __init__(self, length: int, index: int, log: Path, wanted_bytes: int) -> None:
        super().__init__(length, index, log)
        self.wanted_bytes = wanted_bytes

    def __getitem__(self, index: int) -> Any:
        if index == self.index and os.getppid() == self.trainer:
            np.empty(self.wanted_bytes, dtype=np.uint8)  # as it is not written to, it takes none
        return super().__getitem__(index)
