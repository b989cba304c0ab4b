"""A program whose samples leave something in memory, in many places. Prints what each pass reads, of two loaders."""

from __future__ import annotations

import functools
import sys
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

COUNTS: dict[int, int] = {}
CALLS = 0


class Indices(Dataset[Any]):
    def __len__(self) -> int:
        return 24


class Array(Indices):
    """Each sample is made in place, in an array of this many numbers."""

    def __init__(self, width: int) -> None:
        self.values = np.arange(24 * width, dtype=np.float64).reshape(24, width)

    def __getitem__(self, index: int) -> Any:
        value = self.values[index]
        value -= 1
        return torch.tensor(value[:2])


class Tensor(Indices):
    def __init__(self) -> None:
        self.values = torch.arange(48.0).reshape(24, 2)

    def __getitem__(self, index: int) -> Any:
        return self.values[index].mul_(2)


class Remembering(Indices):
    """It forgets what it has read when it is pickled."""

    def __init__(self) -> None:
        self.read: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {"read": set()}

    def __getitem__(self, index: int) -> Any:
        known = index in self.read
        self.read.add(index)
        return index, known


class Objects(Indices):
    """More of Python's objects than each process loads for itself."""

    def __init__(self) -> None:
        self.values = [[number, *range(10_000 * number, 10_000 * number + 10_000)] for number in range(24)]

    def __getitem__(self, index: int) -> Any:
        self.values[index][0] += 1
        return self.values[index][0]


class Global(Indices):
    def __getitem__(self, index: int) -> Any:
        COUNTS[index] = COUNTS.get(index, 0) + 1
        return COUNTS[index]


class OfClass(Indices):
    seen: ClassVar[list[int]] = []

    def __getitem__(self, index: int) -> Any:
        self.seen.append(index)
        return self.seen.count(index)


def count(index: int, seen: list[int] = []) -> int:  # noqa: B006, that is what programs do
    seen.append(index)
    return seen.count(index)


class Default(Indices):
    def __getitem__(self, index: int) -> Any:
        return count(index)


@functools.cache
def drawn(index: int) -> float:
    return torch.rand(()).item()


class Once(Indices):
    """What it draws for a sample in a process stays."""

    def __getitem__(self, index: int) -> Any:
        drawn(index)
        return drawn.cache_info().hits > 23


class Library(Indices):
    """It keeps something where nobody looks: as an attribute of another package's module."""

    def __getitem__(self, index: int) -> Any:
        kept: dict[int, int] = np.random.__dict__.setdefault("_kept_by_samples", {})
        kept[index] = kept.get(index, 0) + 1
        return kept[index]


KINDS: list[Any] = [
    functools.partial(Array, 2),
    functools.partial(Array, 50_000),
    Tensor,
    Remembering,
    Objects,
    Global,
    OfClass,
    Default,
    Once,
    Library,
]


def read(name: str, loader: Any) -> None:
    for batch in loader:
        print(name, [part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist())


def main(how: str) -> None:
    for number, kind in enumerate(KINDS):
        dataset, other = kind(), kind()
        training = DataLoader(dataset, 4, num_workers=2)
        for epoch in range(3):
            if how == "anew":
                training = DataLoader(dataset, 4, num_workers=2)
            if how == "seeded":
                torch.manual_seed(1)
            read(f"{number} {epoch} training", training)
            if how == "both":
                read(f"{number} {epoch} validation", DataLoader(other, 4, num_workers=2))


main(sys.argv[1])
