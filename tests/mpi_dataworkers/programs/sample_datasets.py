"""Datasets of the tests, in a module beside the programs as a user's would be. Some of them hurt their process."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info


class Augmented(Dataset[Any]):
    """Sample i is (values that depend on i and on all three random generators, i)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(3, 4) + random.random() + float(np.random.rand())
        return torch.full((3, 4), float(index)) + noise, index


class Striking(Augmented):
    """Sends a signal to its own process at one sample, the first time anybody reads it."""

    def __init__(self, length: int, index: int, flag: Path, number: signal.Signals) -> None:
        super().__init__(length)
        self.index = index
        self.flag = flag
        self.number = number
        self.trainer = os.getpid()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.index and os.getpid() != self.trainer:
            try:
                os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                pass
            else:
                self.flag.write_text(str(os.getpid()))
                os.kill(os.getpid(), self.number)
        return super().__getitem__(index)


class UserError(Exception):
    """An exception class that only the user's module knows."""


class Poisoned(Augmented):
    """One sample raises."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 37:
            raise UserError(f"sample {index} is bad")
        return super().__getitem__(index)


class Holding(Augmented):
    """Holds something that cannot be pickled."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.transform = {"crop": Crop()}


class Crop:
    """A transform with a lock in it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Where(Augmented):
    """Sample i tells where it was made: (i, process, data worker number)."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index, os.getpid(), -1 if info is None else info.id


class Growing(Augmented):
    """Its length is that of a file, as of a folder that somebody copies into."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __len__(self) -> int:
        return self.file.stat().st_size

    def __getitem__(self, index: int) -> Any:
        return index


class Prepared(Augmented):
    """Opens its data in worker_init_fn, as datasets over databases do."""

    table: list[int] | None = None
    scale = 1

    def __getitem__(self, index: int) -> Any:
        assert self.table is not None
        return self.table[index] * self.scale


def prepare(_: int) -> None:
    """worker_init_fn of `Prepared`."""
    info = get_worker_info()
    assert info is not None
    info.dataset.table = list(range(100))


class Stubborn:
    """Comes apart when it is put together again."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


class Odd(Augmented):
    """Its batches hold an object that only the data worker can have."""

    def __getitem__(self, index: int) -> Any:
        return Stubborn()


class InBatches(Augmented):
    """Reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        noise = torch.rand(1).item()
        return [(torch.full((2,), index + noise), index) for index in indices]
