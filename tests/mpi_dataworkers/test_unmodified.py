"""The start-up hook against torch itself: the same order, the same random numbers of the program, and the same bytes
with data workers and without."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hook_programs as programs
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler
from torch.utils.data import dataloader as torch_dataloader

from mpi_dataworkers.hook import patch
from mpi_dataworkers.loader import stream as streams
from mpi_dataworkers.loader.stream import Stream

_Iterator: Any = torch_dataloader._BaseDataLoaderIter


@contextlib.contextmanager
def hooked(service: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as the start-up hook makes it."""
    with monkeypatch.context() as changed:
        changed.setattr(DataLoader, "_get_iterator", DataLoader._get_iterator)
        changed.setattr(_Iterator, "__init__", _Iterator.__init__)
        changed.setattr(DataLoader, patch._MARK, True, raising=False)
        delattr(DataLoader, patch._MARK)
        if service is not None:
            changed.setenv("HETSTREAM_SERVICE", service)
        patch.install()
        try:
            yield
        finally:
            for stream in list(streams._open_streams):
                stream.close()


def stream_of(loader: Any) -> Stream:
    """The stream of a loader that is streamed."""
    stream = vars(loader)["_hetstream"].stream
    assert isinstance(stream, Stream)
    return stream


def assert_no_local_step(loader: Any) -> None:
    stats = stream_of(loader).stats
    assert stats.local_steps == 0
    assert stats.steps > 0


@pytest.fixture
def streamed(three: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hook, with three data workers."""
    with hooked(three.name, monkeypatch):
        yield


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hook, without a service."""
    with hooked(None, monkeypatch):
        yield


# --- order ----------------------------------------------------------------------------------------------------------


def values(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def epochs(loader: Any, count: int = 2) -> list[Any]:
    return [[values(batch) for batch in loader] for _ in range(count)]


def shuffled(num_workers: int) -> Any:
    return epochs(DataLoader(programs.Numbers(30), 4, shuffle=True, num_workers=num_workers))


def persistent(num_workers: int) -> Any:
    loader = DataLoader(
        programs.Numbers(30), 4, shuffle=True, num_workers=max(1, num_workers), persistent_workers=True
    )
    first = [values(batch) for batch in itertools.islice(loader, 2)]  # and leave the pass open
    return first, epochs(loader, 3)


def eager(num_workers: int) -> Any:
    return epochs(DataLoader(programs.Numbers(10), batch_sampler=programs.Eager(), num_workers=num_workers), 3)


def left_early_with_a_generator(num_workers: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(programs.Numbers(30), 4, shuffle=True, generator=generator, num_workers=num_workers)
    return [[values(batch) for batch in itertools.islice(loader, 2)] for _ in range(3)]


def side_by_side(num_workers: int) -> Any:
    loaders = [DataLoader(programs.Numbers(20), 4, shuffle=True, num_workers=num_workers) for _ in range(2)]
    return [[values(one), values(other)] for one, other in zip(*loaders, strict=True)]


def with_replacement(num_workers: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    found = []
    for sampler in (
        RandomSampler(range(100), replacement=True, num_samples=200, generator=generator),
        WeightedRandomSampler([0.5] * 9, 40, generator=generator),
        RandomSampler(range(10), num_samples=35, generator=generator),
    ):
        loader = DataLoader(programs.Numbers(100), 4, sampler=sampler, num_workers=num_workers)
        for _ in range(2):
            found += [(values(batch), torch.rand(1, generator=generator).item()) for batch in loader]
    return found


def distributed(num_workers: int) -> Any:
    sampler: Any = DistributedSampler(programs.Numbers(30), num_replicas=2, rank=1)
    loader = DataLoader(programs.Numbers(30), 4, sampler=sampler, num_workers=num_workers)
    found = []
    for epoch in (5, 0, 5):
        sampler.set_epoch(epoch)
        found.append([values(batch) for batch in loader])
    return found


def drawing(num_workers: int) -> Any:
    sampler = programs.Drawing(60)
    loader = DataLoader(programs.Numbers(100), 2, sampler=sampler, num_workers=num_workers)
    return [(values(batch), random.random(), sampler.num_drawn) for batch in loader]


def following(num_workers: int) -> Any:
    sampler = programs.Following()
    found = []
    for number, batch in enumerate(DataLoader(programs.Numbers(200), 2, sampler=sampler, num_workers=num_workers)):
        found.append(values(batch))
        if number == 10:
            sampler.first = 100
    return found


def endless(num_workers: int) -> Any:
    sampler = programs.Endless(50)
    loader = DataLoader(programs.Numbers(100), 2, sampler=sampler, num_workers=num_workers)
    return [values(batch) for batch in itertools.islice(loader, 40)], sampler.num_drawn


def once_only(num_workers: int) -> Any:
    loader = DataLoader(programs.Numbers(10), 3, sampler=iter(range(10)), num_workers=num_workers)  # type: ignore[arg-type]
    return epochs(loader)


def keys(num_workers: int) -> Any:
    loader = DataLoader(programs.Keyed(26), 2, sampler=programs.Letters(), num_workers=num_workers)
    return epochs(loader, 3)


def keys_once_only(num_workers: int) -> Any:
    sampler: Any = (letter for letter in "abcde")
    return epochs(DataLoader(programs.Keyed(26), 2, sampler=sampler, num_workers=num_workers))


def turning(num_workers: int) -> Any:
    return epochs(DataLoader(programs.Keyed(26), batch_sampler=programs.Turning(), num_workers=num_workers))


def whole_batches(num_workers: int) -> Any:
    """As torch's documentation disables automatic batching: the sampler's lists are the dataset's indices."""
    generator = torch.Generator().manual_seed(3)
    sampler: Any = BatchSampler(RandomSampler(range(12), generator=generator), 4, drop_last=False)
    loader = DataLoader(
        torch.arange(12),  # type: ignore[arg-type]
        sampler=sampler,
        batch_size=None,
        generator=generator,
        num_workers=num_workers,
    )
    return epochs(loader)


def counting_epochs(num_workers: int) -> Any:
    sampler = programs.CountsEpochs(range(20))
    loader = DataLoader(programs.Numbers(20), 4, sampler=sampler, num_workers=num_workers)
    return [[(values(batch), sampler.epoch) for batch in loader] for _ in range(2)]


def filtering(num_workers: int) -> Any:
    return epochs(programs.FilteringLoader(programs.Numbers(10), batch_size=4, num_workers=num_workers))


def infinite(num_workers: int) -> Any:
    loader = programs.InfiniteLoader(programs.Numbers(10), batch_size=4, shuffle=True, num_workers=num_workers)
    found = epochs(loader)
    loader.reset()
    return found, epochs(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "program",
    [
        shuffled,
        persistent,
        eager,
        left_early_with_a_generator,
        side_by_side,
        with_replacement,
        distributed,
        drawing,
        following,
        endless,
        once_only,
        keys,
        keys_once_only,
        turning,
        whole_batches,
        counting_epochs,
        filtering,
        infinite,
    ],
)
def test_order_and_the_programs_own_random_numbers_are_torchs(
    three: Any, monkeypatch: pytest.MonkeyPatch, program: Callable[[int], Any], num_workers: int
) -> None:
    def run() -> Any:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        found = program(num_workers)
        return found, torch.rand(1).item(), random.random(), np.random.rand()

    plain = run()
    with hooked(None, monkeypatch):
        assert run() == plain, "without data workers"
    with hooked(three.name, monkeypatch):
        assert run() == plain, "with data workers"
