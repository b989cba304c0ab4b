"""IterableDatasets of programs that know nothing of hetstream: how they divide themselves, draw, end and fail."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

_shared_rng = np.random.default_rng(7)
_seen = 0


def part() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class Numbers(IterableDataset[Any]):
    """Each worker has every n-th number, through a shuffle buffer, with noise of all three global generators."""

    def __init__(self, length: int = 160, buffer: int = 10) -> None:
        self.length, self.buffer, self.epoch = length, buffer, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def numbers(self) -> Iterator[int]:
        worker, workers = part()
        yield from range(worker, self.length, workers)

    def __iter__(self) -> Iterator[Any]:
        waiting: list[int] = []
        for number in self.numbers():
            waiting.append(number)
            if len(waiting) > self.buffer:
                yield self.element(waiting.pop(random.randrange(len(waiting))))
        for number in waiting:
            yield self.element(number)

    def element(self, number: int) -> Any:
        return {"at": torch.tensor([number, self.epoch, part()[0]]), "torch": torch.rand(2), "numpy": np.random.rand(2)}


class WithLength(Numbers):
    def __len__(self) -> int:
        return self.length


class Uneven(Numbers):
    """Worker w has 10 * w numbers: the first none, and each ends before the next one."""

    def numbers(self) -> Iterator[int]:
        worker, _ = part()
        yield from range(10 * worker)


class Undivided(Numbers):
    """Every worker reads all."""

    def numbers(self) -> Iterator[int]:
        yield from range(self.length // 2)


class Divided(IterableDataset[Any]):
    """`worker_init_fn` divides it, as torch's documentation shows."""

    def __init__(self, start: int = 0, end: int = 120) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(self.start, self.end))


def divide(worker_id: int) -> None:
    info: Any = get_worker_info()
    dataset = info.dataset
    size = -(-(dataset.end - dataset.start) // info.num_workers)
    start = dataset.start + worker_id * size
    dataset.start, dataset.end = start, min(start + size, dataset.end)
    random.random()


class OwnGenerators(Numbers):
    """It draws from generators that it holds, and one of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy, self.python = np.random.default_rng(1), random.Random(2)
        self.torch = torch.Generator().manual_seed(3)

    def element(self, number: int) -> Any:
        drawn = [self.numpy.random(), self.python.random(), _shared_rng.random(), part()[0] + number]
        return torch.tensor(drawn), torch.rand(1, generator=self.torch)


class HoldsAModule(Numbers):
    """As `rng=random` of a shuffle; `copy.deepcopy` has no copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random

    def element(self, number: int) -> Any:
        return torch.tensor([number, self.rng.random()])


class CountsInItsModule(Numbers):
    """What one worker process leaves in its module: each of torch's has its own."""

    def element(self, number: int) -> Any:
        global _seen
        _seen += 1
        return torch.tensor([number, _seen])


class CountsItsPasses(Numbers):
    """As webdataset's shuffle does: which pass it is, its iterators count."""

    def numbers(self) -> Iterator[int]:
        self.epoch += 1
        return super().numbers()


class SharesItsEpoch(Numbers):
    """As Hugging Face's datasets: kept worker processes see the epoch in shared memory; and it counts in each."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.passes = 0

    def set_epoch(self, epoch: int) -> None:
        self.shared.fill_(epoch)

    def numbers(self) -> Iterator[int]:
        self.epoch, self.passes = 10 * int(self.shared), self.passes + 1
        self.epoch += self.passes
        return super().numbers()


class SharesAValue(SharesItsEpoch):
    """As open_clip's: the epoch is a value of `multiprocessing`."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: Any = multiprocessing.Value("q", 0)

    def set_epoch(self, epoch: int) -> None:
        self.shared.value = epoch

    def numbers(self) -> Iterator[int]:
        self.epoch, self.passes = 10 * self.shared.value, self.passes + 1
        self.epoch += self.passes
        return Numbers.numbers(self)


class SharesAMapping(SharesItsEpoch):
    """The epoch is in an array over a mapping, which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: Any = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)[:1].reshape(())

    def set_epoch(self, epoch: int) -> None:
        self.shared[...] = epoch


class SharesANumber(SharesAValue):
    """A value of `multiprocessing` without a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = multiprocessing.Value("q", 0, lock=False)


class SaysItsProcess(Numbers):
    def element(self, number: int) -> Any:
        return torch.tensor([number, os.getpid()])


class Raises(Numbers):
    """One element of the second worker cannot be made; its iterator goes on behind it."""

    def __iter__(self) -> Iterator[Any]:
        return map(self.element, self.numbers())

    def element(self, number: int) -> Any:
        if number == 81:
            raise ValueError(f"{number} is damaged")
        return super().element(number)


class StopsBySample(Numbers):
    def element(self, number: int) -> Any:
        if number == 83:
            next(iter([]))
        return super().element(number)

    def __iter__(self) -> Iterator[Any]:
        return map(self.element, self.numbers())


class ReadsAhead(Numbers):
    """A pool of threads makes its elements before they are asked for, and asks which worker it is in, as the sources of
    Hugging Face's interleaved datasets do."""

    def __iter__(self) -> Iterator[Any]:
        with ThreadPoolExecutor(2) as pool:
            yield from pool.map(self.element, self.numbers())

    def element(self, number: int) -> Any:
        time.sleep(0.002)
        return torch.tensor([number, *part()])


class HoldsAnIterator(Numbers):
    """It cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.held = (number for number in range(3))


class Slow(Numbers):
    def element(self, number: int) -> Any:
        time.sleep(0.01)
        return super().element(number)


class OfRank(Numbers):
    """Each rank has its part, as `torch.distributed` and the environment say."""

    def numbers(self) -> Iterator[int]:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        assert (rank, ranks) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        worker, workers = part()
        yield from range(rank * workers + worker, self.length, ranks * workers)


def noisy_collate(samples: list[Any]) -> Any:
    """A batch, and what it draws itself."""
    return torch.stack([sample["at"] for sample in samples]), random.random(), np.random.rand(), torch.rand(1)


def until_data_workers_go_on(iterator: Any) -> None:
    """Wait, under the hook, until they are where the program is, or the loader is local."""
    deadline = time.monotonic() + 60
    while iterator._plain is not None and iterator._streamed is not None:
        iterator._look()
        time.sleep(0.02)
        assert time.monotonic() < deadline


def seed_by_worker(worker_id: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)
    random.seed(worker_id)
