"""Batches like Criteo's Kaggle set, and two models of it whose embeddings come from outside."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

NUM_DENSE = 13
# Categories of each of the set's 26 features.
KAGGLE = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992),
    *(5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
# So much of all accesses goes to so much of all rows (BagPipe measures it on the Kaggle set: arXiv 2202.12429).
HOT_ACCESSES, HOT_ROWS = 0.92, 0.01
_SMALL = 10_000


class Batch(NamedTuple):
    """Samples.

    Attributes:
        dense: [samples, 13].
        ids: [samples, 26], of one table in which all features' rows lie.
        labels: [samples].
    """

    dense: torch.Tensor
    ids: torch.Tensor
    labels: torch.Tensor


def sizes(divisor: int) -> list[int]:
    """Return the categories of each feature, those of large ones divided."""
    return [num if num < _SMALL else max(_SMALL, num // divisor) for num in KAGGLE]


@dataclass(frozen=True)
class Criteo:
    """Draws batches; each follows from its seed and number alone.

    Args:
        divisor: of large features' categories.
        seed: of all batches.
    """

    divisor: int
    seed: int = 0

    def batches(self, first: int, number: int, num_samples: int) -> list[Batch]:
        """Return batches from a number on."""
        nums = sizes(self.divisor)
        exponent = fitted(nums)
        ends = [np.cumsum(_shares(num, exponent)) for num in nums]
        order = np.random.default_rng(self.seed)
        place = [order.permutation(num) for num in nums]  # a hot row is anywhere in its table
        firsts = np.cumsum([0, *nums[:-1]])
        made = []
        for batch in range(first, first + number):
            draw = np.random.default_rng([self.seed, batch])
            at = draw.random((num_samples, len(nums)))
            ids = np.empty(at.shape, np.int64)
            for feature, end in enumerate(ends):
                rank = np.minimum(np.searchsorted(end, at[:, feature]), nums[feature] - 1)
                ids[:, feature] = firsts[feature] + place[feature][rank]
            dense = draw.standard_normal((num_samples, NUM_DENSE), np.float32)
            labels = (draw.random(num_samples) < 0.26).astype(np.float32)
            made.append(Batch(*map(torch.from_numpy, (dense, ids, labels))))
        return made


def _shares(num: int, exponent: float) -> Any:
    """How often each category is drawn, the most frequent first (Zipf)."""
    weights = np.arange(1, num + 1) ** -exponent
    return weights / weights.sum()


def fitted(nums: list[int]) -> float:
    """Return the exponent of Zipf's law with which the hottest rows take `HOT_ACCESSES`."""
    low, high = 0.5, 3.0
    for _ in range(12):
        middle = (low + high) / 2
        every = np.concatenate([_shares(num, middle) for num in nums]) / len(nums)
        hot = max(1, int(HOT_ROWS * len(every)))
        is_flat = np.partition(every, -hot)[-hot:].sum() < HOT_ACCESSES
        low, high = (middle, high) if is_flat else (low, middle)
    return (low + high) / 2


def hot_share(batches: list[Batch], num_rows: int) -> float:
    """Return which part of accesses goes to the hottest rows of all, those of `HOT_ROWS`."""
    counts = np.zeros(num_rows, np.int64)
    for batch in batches:
        counts += np.bincount(batch.ids.reshape(-1).numpy(), minlength=num_rows)
    counts.sort()
    return float(counts[-int(HOT_ROWS * num_rows) :].sum() / counts.sum())


def _layers(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Facebook's model (arXiv 1906.00091): dot products of all pairs of embeddings and of the dense features' one.

    Args:
        dim: of an embedding.
        width: of hidden layers.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        num = 1 + len(KAGGLE)
        self.bottom = nn.Sequential(_layers(NUM_DENSE, width, dim), nn.ReLU())
        self.top = _layers(dim + num * (num - 1) // 2, width, 1)
        self.register_buffer("pairs", torch.tril_indices(num, num, -1), persistent=False)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return a logit for each sample; rows are [samples, 26, dim]."""
        own = self.bottom(dense)
        vectors = torch.cat([own[:, None], rows], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return self.top(torch.cat([own, products[:, self.pairs[0], self.pairs[1]]], dim=1))[:, 0]


class DeepFM(nn.Module):
    """A factorization machine and a deep part over the same embeddings (arXiv 1703.04247).

    A row's last number is its category's weight of the first order.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_DENSE, 1)
        self.deep = _layers(NUM_DENSE + len(KAGGLE) * (dim - 1), width, width, 1)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return a logit for each sample; rows are [samples, 26, dim]."""
        factors = rows[..., :-1]
        second = 0.5 * (factors.sum(dim=1).square() - factors.square().sum(dim=1)).sum(dim=1)
        deep = self.deep(torch.cat([dense, factors.flatten(1)], dim=1))[:, 0]
        return self.first(dense)[:, 0] + rows[..., -1].sum(dim=1) + second + deep


class Accelerator(nn.Module):
    """Stands for a model on an accelerator: the time is slept, and all rows get gradients.

    Args:
        step_ms: of the sleep.
    """

    def __init__(self, step_ms: float) -> None:
        super().__init__()
        self.first, self.step_s = nn.Linear(NUM_DENSE, 1), step_ms / 1e3

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return a logit for each sample; rows are [samples, 26, dim]."""
        time.sleep(self.step_s)
        return self.first(dense)[:, 0] + rows.flatten(1).sum(dim=1)


def model_of(name: str, dim: int, width: int, accelerator_ms: float) -> nn.Module:
    """Return a new model."""
    if name == "accelerator":
        return Accelerator(accelerator_ms)
    return {"DLRM": DLRM, "DeepFM": DeepFM}[name](dim, width)
