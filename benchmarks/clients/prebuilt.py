"""The datasets of the transport benchmark: finished batches at no cost, the same object for torch and for hetstream.

The batch lies in the data worker's private memory, as after a real transform, so whoever moves it must copy it at
least once. (torch would otherwise hand the same shared segment over again and again and move nothing.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch.utils.data import Dataset, default_collate

from benchmarks.clients.window import payload

Batch = TypeVar("Batch")
BATCH_SIZE = 64
# More batches than any window receives; neither loader stores a permutation for an unshuffled dataset.
LENGTH = BATCH_SIZE * 50_000_000


def hand_over(batch: Batch) -> Batch:
    """Collate for a dataset that returns finished batches: nothing to do."""
    return batch


class Batches(Dataset[torch.Tensor]):
    """A map-style dataset whose `__getitems__` returns a finished batch; use it with `collate_fn=hand_over`."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = list(shape)

    def __len__(self) -> int:
        return LENGTH

    @cached_property
    def _bytes(self):  # type: ignore[no-untyped-def]  # NumPy's array type is longer than the function
        return payload(self.shape)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._bytes[index % BATCH_SIZE])

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        # A new tensor object over the same private memory: a tensor that was shared once would stay shared.
        return torch.from_numpy(self._bytes)


class Samples(Dataset[torch.Tensor]):
    """A map-style dataset of finished samples, for torch's own `default_collate`: one stack a batch on top."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.batches = Batches(shape)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batches[index]


class FinishedBatches(Dataset[torch.Tensor]):
    """A map-style dataset whose sample is a finished batch, for peers that know no `__getitems__`."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.batches = Batches(shape)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, _index: int) -> torch.Tensor:
        return self.batches.__getitems__([])


def first(samples: list[Batch]) -> Batch:
    """Collate for `FinishedBatches`: each step asks for one."""
    return samples[0]


def loader_arguments(shape: Sequence[int], collate: bool) -> dict[str, object]:
    """Return the keywords that both loaders get: with `collate` samples and default_collate, else finished batches."""
    if collate:
        return {"dataset": Samples(shape), "batch_size": BATCH_SIZE, "collate_fn": default_collate}
    return {"dataset": Batches(shape), "batch_size": BATCH_SIZE, "collate_fn": hand_over}
