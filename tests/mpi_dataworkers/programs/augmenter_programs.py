"""Loaders as batchgenerators has them, and augmenters with the attributes and methods of its own, but no processes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


class Endless:
    """Draws each batch anew."""

    def set_thread_id(self, thread_id: int) -> None:
        self.thread_id = thread_id

    def __next__(self) -> dict[str, Any]:
        return {"data": np.random.rand(2, 3), "noise": torch.rand(2), "keys": [f"case {np.random.randint(9)}"]}


class Ends(Endless):
    """Each process has as many batches as its length says, and begins anew."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.was_initialized, self.rs = lengths, True, np.random.RandomState(5)
        self.position = 99  # as of a program that has read some itself

    def __next__(self) -> dict[str, Any]:
        if not self.was_initialized:
            self.was_initialized, self.position, self.offset = True, 0, self.rs.rand()
        if self.position == self.lengths[self.thread_id]:
            self.was_initialized = False
            raise StopIteration
        self.position += 1
        return {"who": self.thread_id, "position": self.position, "offset": self.offset, **super().__next__()}


class Counts(Endless):
    """What it gives depends on how often it was asked."""

    count = 0

    def __next__(self) -> dict[str, Any]:
        self.count += 1
        return {"late": self.count > 50}


class Breaks(Endless):
    """Its fifth batch of each process raises."""

    count = 0

    def __next__(self) -> dict[str, Any]:
        self.count += 1
        if self.count == 5:
            raise ValueError("a case that cannot be read")
        return super().__next__()


class CannotTravel(Endless):
    """Nothing pickles a generator."""

    def __init__(self) -> None:
        self.held = iter(number for number in range(3))


def twice(**batch: Any) -> dict[str, Any]:
    """A transform that draws, too."""
    return batch | {"more": np.random.rand(), "data": batch.get("data", 0) * 2}


class Augmenter:
    """Attributes and methods of batchgenerators' augmenters that are stood in for."""

    def __init__(
        self, loader: Any, transform: Any, num_processes: int, num_cached: int = 2, seeds: list[int] | None = None
    ) -> None:
        self.generator, self.transform, self.num_processes = loader, transform, num_processes
        self.num_cached = self.num_cached_per_queue = num_cached
        self.seeds = seeds or [None] * num_processes
        self.pin_memory = self.initialized = self.was_initialized = False

    def __iter__(self) -> Any:
        return self

    def _start(self) -> None:
        self.initialized = self.was_initialized = True

    def __next__(self) -> Any:
        return "its own"

    def _finish(self, timeout: float = 10, force: bool = False) -> None:
        self.initialized = self.was_initialized = False


class Single:
    """The same of the one without processes."""

    def __init__(self, data_loader: Any, transform: Any) -> None:
        self.data_loader, self.transform = data_loader, transform

    def __next__(self) -> Any:
        item = next(self.data_loader)
        return item if self.transform is None else self.transform(**item)


class Trainer:
    """What nnU-Net's has to do with its augmenters."""

    def __init__(self, kind: Any, current_epoch: int) -> None:
        self.kind, self.current_epoch = kind, current_epoch
        self.num_iterations_per_epoch, self.num_val_iterations_per_epoch = 5, 2

    def get_dataloaders(self) -> tuple[Any, Any]:
        both = self.kind(Endless(), None, 2), self.kind(Endless(), twice, 1)
        for each in both:
            next(each)
        return both


def modules() -> SimpleNamespace:
    """New classes, which a test may have stood in for."""
    return SimpleNamespace(
        NonDetMultiThreadedAugmenter=type("NonDet", (Augmenter,), dict(vars(Augmenter))),
        MultiThreadedAugmenter=type("Det", (Augmenter,), dict(vars(Augmenter))),
        SingleThreadedAugmenter=type("Single", (Single,), dict(vars(Single))),
        nnUNetTrainer=type("nnUNetTrainer", (Trainer,), dict(vars(Trainer))),
    )


def epochs_of_processes(loader: Any, transform: Any, seeds: list[int], num_epochs: int) -> list[list[Any]]:
    """What batchgenerators' own processes give in some epochs, each read from a queue of its own.

    Of those queues one after the other is asked. Some process is at its end before others and begins anew at once. An
    epoch has ended when as many ends have come as there are processes, and the next one begins with the first queue.
    """
    torchs = torch.get_rng_state()

    def process(number: int) -> Iterator[Any]:
        own = copy.deepcopy(loader)
        own.was_initialized = False
        own.set_thread_id(number)
        generators = np.random.RandomState(seeds[number]).get_state(), torchs
        while True:
            kept = np.random.get_state(), torch.get_rng_state()
            np.random.set_state(generators[0])
            torch.set_rng_state(generators[1])
            try:
                item = transform(**next(own))
            except StopIteration:
                item = None
            generators = np.random.get_state(), torch.get_rng_state()
            np.random.set_state(kept[0])
            torch.set_rng_state(kept[1])
            yield item

    queues = [process(number) for number in range(len(seeds))]
    epochs: list[list[Any]] = []
    for _ in range(num_epochs):
        given: list[Any] = []
        asked = ended = 0
        while ended < len(queues):
            item = next(queues[asked % len(queues)])
            asked += 1
            if item is None:
                ended += 1
            else:
                given.append(item)
        epochs.append(given)
    return epochs
