"""A program whose samples are others when they are made a second time: of one dataset alone that says something."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


@functools.lru_cache
def loaded(index: int) -> Any:
    return np.full(4, index)


class InPlace(Dataset[Any]):
    """It normalises what a cache keeps."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        image = loaded(index)
        image += 1
        return torch.from_numpy(image.copy())


class Stamped(InPlace):
    """It says when."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), time.perf_counter_ns()


if __name__ == "__main__":
    for epoch in range(2):
        print("in place", epoch, [batch.tolist() for batch in DataLoader(InPlace(), 2, num_workers=2)])
    print("stamped", [batch.tolist() for batch, _ in DataLoader(Stamped(), 2, num_workers=2)])
