"""Datasets, samplers and loaders as other people's programs have them, for tests of the start-up hook."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, get_worker_info


class Numbers(Dataset[Any]):
    """Sample i is i; any key is its own sample."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return index


class Keyed(Numbers):
    """Samples have letters for keys."""

    def __getitem__(self, key: Any) -> int:
        return ord(key) if isinstance(key, str) else int(key)


Pair = namedtuple("Other", ["one", "other"])  # type: ignore[name-match]


class Named(Numbers):
    """Its samples are named tuples whose own names do not lead to their classes."""

    Sample = namedtuple("Sample", ["index", "pair"])

    def __getitem__(self, index: int) -> Any:
        return self.Sample(index, Pair(index, -index))


# --- samplers -------------------------------------------------------------------------------------------------------


class Eager(Sampler[Any]):
    """Draws all batches when it is asked for an iterator."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(10).view(5, 2).tolist())


class Drawing(Sampler[int]):
    """Draws each index from the program's own generator as it goes."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.num_drawn = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            self.num_drawn += 1
            yield random.randrange(100)


class Following(Sampler[int]):
    """Gives what the training loop tells it to."""

    first = 0

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[int]:
        for number in range(60):
            yield self.first + number


class Endless(Drawing):
    """Never ends."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from super().__iter__()


class Letters(Sampler[str]):
    """Shuffled keys that are no numbers."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[str]:
        keys = list("abcdef")
        random.shuffle(keys)
        return iter(keys)


class Turning(Sampler[Any]):
    """Batches of numbers, then of keys, of different lengths."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        yield from ([1, 2], [3], [4, 5], ["a", "b"], ["c"], [6, 7])


class CountsEpochs(RandomSampler):
    """Has gone through an epoch when its iterator ends, as accelerate's seedable sampler."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.epoch += 1


# --- loaders --------------------------------------------------------------------------------------------------------


class Filtered:
    """An iterator that changes the batches of another one."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator

    def __iter__(self) -> Filtered:
        return self

    def __next__(self) -> Any:
        return next(self.iterator) * 100


class FilteringLoader(DataLoader[Any]):
    """As torch_geometric's NodeLoader: collates with its own method, and filters batches in the trainer."""

    def __init__(self, data: Any, **keywords: Any) -> None:
        super().__init__(data, collate_fn=self.collate, **keywords)

    def collate(self, samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples) + 1

    def _get_iterator(self) -> Any:
        return Filtered(super()._get_iterator())


class Repeated:
    """A batch sampler that begins again at its end."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.batch_sampler)


class InfiniteLoader(DataLoader[Any]):
    """As Ultralytics' loader: one iterator for all epochs, until it is reset."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.batch_sampler)

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)

    def reset(self) -> None:
        self.iterator = self._get_iterator()


class OwnIteratorLoader(DataLoader[Any]):
    """Makes an iterator of its own, as torchdata's StatefulDataLoader."""

    def _get_iterator(self) -> Any:
        return torch.utils.data.dataloader._SingleProcessDataLoaderIter(self)


# --- worker processes -----------------------------------------------------------------------------------------------


class Told(Numbers):
    """Says what user code sees of the process that it runs in."""

    handle: Any = None
    numpy_seed = -1

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self, "the dataset that this process uses"
        assert self.handle is not None, "worker_init_fn has opened it"
        return info.id, info.num_workers, info.seed, self.numpy_seed


def open_and_seed(worker_id: int) -> None:
    """The recipes of torch's documentation: open what belongs to the process, seed NumPy from torch's seed."""
    info = get_worker_info()
    assert info is not None
    assert info.id == worker_id
    assert torch.initial_seed() == info.seed
    info.dataset.handle = object()
    info.dataset.numpy_seed = torch.initial_seed() % 2**32
    np.random.seed(info.dataset.numpy_seed)


def seed_as_lightning(worker_id: int) -> None:
    """What seed_everything(workers=True) adds: it needs the base seed that torch's worker processes have in common."""
    base_seed = torch.initial_seed() - worker_id
    np.random.seed(np.random.SeedSequence([base_seed, worker_id, 0]).generate_state(4))


class OpensLazily(Numbers):
    """Opens its file at the first sample of a process, as datasets over HDF5 or LMDB do; it cannot be pickled then."""

    def __init__(self, path: Path, length: int) -> None:
        super().__init__(length)
        self.path = path
        self.offset = 0
        self.file: Any = None

    def __getitem__(self, index: int) -> int:
        if self.file is None:
            self.file = self.path.open("rb")
        return index + self.offset

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class Randomizable:
    """A transform with a random state of its own, as MONAI's."""

    def __init__(self) -> None:
        self.R = np.random.RandomState(0)

    def set_random_state(self, seed: int | None = None, state: Any = None) -> Randomizable:
        self.R = np.random.RandomState(seed) if seed is not None else state
        return self

    def __call__(self, value: float) -> float:
        return value + self.R.random_sample()


class OwnGenerators(Numbers):
    """Draws from generators that it holds, directly and in transforms."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.transforms = [Randomizable(), Randomizable()]
        self.by_name = {"numpy": np.random.default_rng(0), "python": random.Random(0)}
        self.state = np.random.RandomState(0)
        self.torch = torch.Generator()

    def __getitem__(self, index: int) -> Any:
        value = float(index)
        for transform in self.transforms:
            value = transform(value)
        own = self.by_name["numpy"].random(), self.by_name["python"].random(), self.state.random_sample()
        return torch.tensor([value, *own, torch.rand(1, generator=self.torch).item()], dtype=torch.float64)
