"""batchgenerators' augmenters, with which nnU-Net trains, over data workers. The start-up hook puts them in place.

A `MultiThreadedAugmenter` starts processes of its own: each draws batches from a copy of one endless loader. Here each
is a worker of a stream (`unmodified_streams`) with the same loader and transform. So data workers make the batches,
which are compared with those of processes of the program, and those go on where they differ.

What batchgenerators does not have: with HETSTREAM_SEED, batch k follows from (seed, k), whoever makes it, however many
processes there are, and where a run of nnU-Net was resumed.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import secrets
import traceback
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.utils.data

from hetstream.mpi_dataworkers.loader.unmodified import distributed_identity
from hetstream.mpi_dataworkers.ops.pipeline import LARGEST_BASE_SEED, seed_generators
from hetstream.mpi_dataworkers.order.sharding import derive_seed
from hetstream.mpi_dataworkers.process.config import seed_from_environment, service_from_environment

_log = logging.getLogger(__name__)
_KEPT = "_hetstream"
_END = "end"  # as batchgenerators' processes say it
_DEAD = (
    "One or more background workers are no longer alive. Exiting. Please check the print statements above for the "
    "actual error message"
)
_numbers = itertools.count()  # of augmenters in this process, so that no two draw alike
# Batches that a run of nnU-Net has drawn before it was resumed, of the augmenters that it begins now, in their order.
_drawn_before: collections.deque[int] = collections.deque()


class AugmentedStream(torch.utils.data.IterableDataset[Any]):
    """What the processes of an augmenter draw; each of them is one worker.

    Args:
        loader: gives batches, as batchgenerators' loaders do.
        transform: of a batch; None for none.
        seeds: what the program gives each process; None where batch k is to follow from `seed` and k.
        seed: 64 bits.
        first: number of the first batch.
        ends: a loader that ends begins anew, and `"end"` stands between.
    """

    def __init__(self, loader: Any, transform: Any, seeds: list[int] | None, seed: int, first: int, ends: bool) -> None:
        self._loader, self._transform, self._seeds, self._seed = loader, transform, seeds, seed
        self._first, self._ends = first, ends
        self._num_given = 0  # by this worker

    def __iter__(self) -> Iterator[Any]:
        info: Any = torch.utils.data.get_worker_info()
        self._loader.set_thread_id(info.id)
        if self._seeds is not None:
            np.random.seed(self._seeds[info.id])
            torch.manual_seed(self._seeds[info.id])
        while True:
            if self._seeds is None:
                seed_generators(derive_seed(self._seed, self._first + self._num_given * info.num_workers + info.id))
            yield self._next()
            self._num_given += 1

    def _next(self) -> Any:
        try:
            item = next(self._loader)
        except StopIteration as error:
            if self._ends:
                return _END
            raise RuntimeError(
                "the loader of a NonDetMultiThreadedAugmenter has to be infinite, and it ended"
            ) from error
        return item if self._transform is None else self._transform(**item)

    def state_dict(self) -> dict[str, int]:
        """How many batches this worker has given. Of loaders that draw each batch anew that is all."""
        return {"num_given": self._num_given + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self._num_given = state["num_given"]


class _Streamed:
    """The batches of one augmenter from when it starts to when it finishes.

    Args:
        augmenter: of batchgenerators.
        num_cached: batches that wait for the program.
        ends: see `AugmentedStream`.
    """

    def __init__(self, augmenter: Any, num_cached: int, ends: bool) -> None:
        given = seed_from_environment()
        rank, _ = distributed_identity() or (0, 1)
        first = _drawn_before.popleft() if _drawn_before else 0
        seed = secrets.randbits(62) if given is None else derive_seed(given, next(_numbers), rank)
        seeds = list(augmenter.seeds) if None not in augmenter.seeds else None
        stream = AugmentedStream(
            augmenter.generator, augmenter.transform, seeds, seed, 0 if given is None else first, ends
        )
        self._num_processes = augmenter.num_processes
        self._given: list[collections.deque[Any]] = [collections.deque() for _ in range(self._num_processes)]
        self._num_taken = self._num_drawn = self._num_ended = 0
        generator = torch.Generator().manual_seed(seed & LARGEST_BASE_SEED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the number of processes: batchgenerators' start as many
            self._batches = iter(
                torch.utils.data.DataLoader(
                    stream,
                    batch_size=None,
                    num_workers=self._num_processes,
                    prefetch_factor=max(1, -(-num_cached // self._num_processes)),
                    collate_fn=_as_it_is,
                    pin_memory=augmenter.pin_memory and torch.cuda.is_available(),
                    generator=generator,
                )
            )

    def next(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: each process is at the end of its loader; the next call begins anew.
        """
        while True:
            item = self._of_process(self._num_taken % self._num_processes)
            self._num_taken += 1
            if not (isinstance(item, str) and item == _END):
                return item
            self._num_ended += 1
            if self._num_ended == self._num_processes:
                self._num_ended = self._num_taken = 0  # batchgenerators begins with its first process again
                raise StopIteration

    def _of_process(self, number: int) -> Any:
        while not self._given[number]:
            self._given[self._num_drawn % self._num_processes].append(next(self._batches))
            self._num_drawn += 1
        return self._given[number].popleft()


def _as_it_is(batch: Any) -> Any:
    return batch


def stand_in(kind: Any, is_started: str, num_cached: Callable[[Any], int], ends: bool) -> None:
    """Have augmenters of a class stream where there is a service, or where their batches are to follow from a seed.

    Args:
        kind: the class.
        is_started: its attribute that says whether its processes were started.
        num_cached: gives how many batches it caches.
        ends: see `AugmentedStream`.
    """
    start, get_next, finish = kind._start, kind.__next__, kind._finish

    @functools.wraps(start)
    def _start(self: Any) -> None:
        if getattr(self, is_started) or (service_from_environment() is None and seed_from_environment() is None):
            start(self)
            return
        vars(self)[_KEPT] = _Streamed(self, num_cached(self), ends)
        setattr(self, is_started, True)

    @functools.wraps(get_next)
    def __next__(self: Any) -> Any:
        if not getattr(self, is_started):
            self._start()
        streamed = vars(self).get(_KEPT)
        if streamed is None:
            return get_next(self)
        try:
            return streamed.next()
        except StopIteration:
            raise
        except Exception as error:
            traceback.print_exc()
            self._finish()
            raise RuntimeError(_DEAD) from error

    @functools.wraps(finish)
    def _finish(self: Any, *args: Any, **keywords: Any) -> None:
        vars(self).pop(_KEPT, None)
        finish(self, *args, **keywords)

    kind._start, kind.__next__, kind._finish = _start, __next__, _finish


def patch_nondeterministic(module: ModuleType) -> None:
    """Of batchgenerators' module that has `NonDetMultiThreadedAugmenter`."""
    stand_in(module.NonDetMultiThreadedAugmenter, "initialized", lambda augmenter: augmenter.num_cached, ends=False)


def patch_deterministic(module: ModuleType) -> None:
    """Of batchgenerators' module that has `MultiThreadedAugmenter`."""

    def num_cached(augmenter: Any) -> int:
        return int(augmenter.num_cached_per_queue * augmenter.num_processes)

    stand_in(module.MultiThreadedAugmenter, "was_initialized", num_cached, ends=True)


def patch_trainer(module: ModuleType) -> None:
    """Of nnU-Net's trainer: a run that is resumed draws what it would have drawn."""
    kind: Any = module.nnUNetTrainer
    get_dataloaders = kind.get_dataloaders

    @functools.wraps(get_dataloaders)
    def wrapped(self: Any) -> Any:
        each_epoch = self.num_iterations_per_epoch, self.num_val_iterations_per_epoch
        _drawn_before.extend(self.current_epoch * number for number in each_epoch)
        try:
            return get_dataloaders(self)
        finally:
            _drawn_before.clear()

    kind.get_dataloaders = wrapped
