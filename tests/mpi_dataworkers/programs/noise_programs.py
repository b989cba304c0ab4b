"""Programs that differ in what their random numbers follow from. Each gives the same whenever it is called alike."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

NUM_SAMPLES, BATCH_SIZE = 24, 2


class Noise(Dataset[Any]):
    """A number of each global generator."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([torch.rand(()), np.random.rand(), random.random()], dtype=torch.float64)


class OwnNoise(Noise):
    """A number of each generator that it holds; `drawn` also counts those that it holds twice."""

    def __init__(self, seed: int = 0, image_seed: int = 1) -> None:
        self.torch = torch.Generator().manual_seed(seed)
        self.numpy, self.old = np.random.default_rng(seed), np.random.RandomState(seed)
        self.parts = {"python": random.Random(seed)}
        self.image, self.mask = np.random.default_rng(image_seed), np.random.default_rng(image_seed)

    def __getitem__(self, index: int) -> Any:
        own = torch.rand((), generator=self.torch), self.numpy.random(), self.old.rand()
        parts = self.parts["python"].random(), self.image.random(), self.mask.random()
        return torch.tensor([*own, *parts], dtype=torch.float64)


class Randomizable(Noise):
    """As MONAI's transforms: a generator of the class, until the object is seeded."""

    R = np.random.RandomState(5)

    def set_random_state(self, seed: int | None = None) -> Randomizable:
        self.R = np.random.RandomState(seed)
        return self

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.R.rand()], dtype=torch.float64)


_RNG = np.random.default_rng(3)
_HELPERS = random.Random(4)
_SEED = -1


def _from_a_helper() -> float:
    return _HELPERS.random()


class NamedNoise(Noise):
    """A number of a generator of the module, of one that a function of it names, of one of the class, and a global."""

    of_class = np.random.RandomState(5)

    def __getitem__(self, index: int) -> Any:
        seeded = random.Random(f"{_SEED} {index}").random()
        values = [_RNG.random(), _from_a_helper(), self.of_class.rand(), seeded]
        return torch.tensor(values, dtype=torch.float64)


def seed_the_named(first: int, second: int = 4) -> None:
    """What the program does before it begins: it seeds the generators of its module."""
    global _RNG
    _RNG = np.random.default_rng(first)
    _HELPERS.seed(second)


class SeedsItself(Noise):
    """What other libraries and users do: numbers from a seed that `worker_init_fn` gave, or from torch's."""

    seed = -1

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        values = [np.random.default_rng(seed + index).random() for seed in (self.seed % 2**32, info.seed % 2**32)]
        return torch.tensor([*values, info.id], dtype=torch.float64)


class Nested(Noise):
    """A dataset within others, as Subset has it."""

    def __init__(self, inner: Noise) -> None:
        self.parts = [inner]

    def __getitem__(self, index: int) -> Any:
        return self.parts[0][index]


class AddsRank:
    """A `worker_init_fn` that seeds as Lightning's, timm's and transformers' do: by torch's seed and the rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, worker_id: int) -> None:
        seed = (torch.initial_seed() + 1000 * self.rank + worker_id) % 2**32
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)


class AddsRankToNumpy(AddsRank):
    """The recipe of torch's documentation, with a rank: the other generators stay alike."""

    def __call__(self, worker_id: int) -> None:
        np.random.seed((torch.initial_seed() + 1000 * self.rank) % 2**32)


class SeedsByConfig(AddsRank):
    """As mmengine's: by a number of the configuration, whatever torch's seed is."""

    def __call__(self, worker_id: int) -> None:
        seed = 7 + 100 * self.rank + worker_id
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)


class OnlyTheFirstWorker(AddsRank):
    """Seeds in one of the workers alone."""

    def __call__(self, worker_id: int) -> None:
        if worker_id == 1:
            super().__call__(worker_id)


class DrawsFromIt(AddsRank):
    """Moves the generators on instead of seeding them."""

    def __call__(self, worker_id: int) -> None:
        torch.rand(1 + self.rank)
        np.random.rand(1 + self.rank)
        for _ in range(1 + self.rank):
            random.random()


class SeedsTheDatasets(AddsRank):
    """Seeds generators that the dataset holds, with new ones and in place."""

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        seed = (info.seed + 1000 * self.rank) % 2**32
        info.dataset.numpy = np.random.default_rng(seed)
        info.dataset.torch.manual_seed(seed)
        info.dataset.parts["python"] = random.Random(seed)


class DerivesFromTheDatasets(AddsRank):
    """Makes the dataset's generator of what another one of it draws."""

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.numpy = np.random.default_rng(int(info.dataset.old.randint(2**31)) + worker_id)


class SetsGlobals(AddsRank):
    """Gives the module a generator and a number of the worker's own."""

    def __call__(self, worker_id: int) -> None:
        global _RNG, _SEED
        info = get_worker_info()
        assert info is not None
        _SEED = info.seed + 1000 * self.rank
        _RNG = np.random.default_rng(_SEED % 2**32)


class TellsTheDataset(AddsRank):
    """Gives the dataset, or the one in it, its seed as a number."""

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        dataset = info.dataset
        for held in (dataset, *getattr(dataset, "parts", ())):
            held.seed = info.seed + 1000 * self.rank


def one_pass(dataset: Any, **options: Any) -> Any:
    """What one pass over a dataset gives: an array, a row a sample."""
    options = {"num_workers": 2, "batch_size": BATCH_SIZE} | options
    return torch.cat(list(DataLoader(dataset, **options))).numpy()
