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
import hashlib
import itertools
import logging
import random
import secrets
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.utils.data

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.loader.unmodified import distributed_identity, is_streamed
from hetstream.mpi_dataworkers.loader.unmodified_streams import StreamedStreamIter
from hetstream.mpi_dataworkers.ops.pipeline import LARGEST_BASE_SEED, seed_generators
from hetstream.mpi_dataworkers.order.sharding import derive_seed
from hetstream.mpi_dataworkers.process.config import (
    seed_from_environment,
    service_from_environment,
    streams_in_process_loaders,
)

_log = logging.getLogger(__name__)
_KEPT = "_hetstream"
_END = "end"  # as batchgenerators' processes say it
_DEAD = (
    "One or more background workers are no longer alive. Exiting. Please check the print statements above for the "
    "actual error message"
)
_AHEAD = 2  # batches of what the program's process would have made
_LARGEST_HELD_BYTES = 64 << 20  # a loader is looked at from time to time
_numbers = itertools.count()  # of augmenters in this process, so that no two draw alike
# Batches that a run of nnU-Net has drawn before it was resumed, of the augmenters that it begins now, in their order.
_drawn_before: collections.deque[int] = collections.deque()


@dataclass(frozen=True)
class Asked:
    """What a program asks of an augmenter.

    Attributes:
        loader: gives batches, as batchgenerators' loaders do.
        transform: of a batch; None for none.
        num_processes: that take turns; 0 for the program's own.
        num_cached: batches that wait for the program.
        seeds: of each process; None where batch k is to follow from a seed and k.
        seeds_torch: also torch's generator begins with that seed, and not as the program's is.
        pins: batches are to lie in pinned memory.
        ends: a loader that ends begins anew, and `StopIteration` is raised between.
    """

    loader: Any
    transform: Any
    num_processes: int
    num_cached: int
    seeds: list[int] | None = None
    seeds_torch: bool = False
    pins: bool = False
    ends: bool = True

    def __post_init__(self) -> None:
        if self.num_processes and hasattr(self.loader, "was_initialized"):
            self.loader.was_initialized = False  # as batchgenerators says to its own processes


class AugmentedStream(torch.utils.data.IterableDataset[Any]):
    """What the processes of an augmenter draw; each of them is one worker.

    Args:
        asked: of the augmenter.
        seed: 64 bits.
        first: number of the first batch.
        process: of which this is the stream; None where it is that of all, in turn.
    """

    def __init__(self, asked: Asked, seed: int, first: int, process: int | None) -> None:
        self._asked, self._seed, self._first, self._process = asked, seed, first, process
        self._num_given = 0  # by this worker
        self._torchs_state = torch.get_rng_state()
        self._held = b""  # what the loader held after a batch

    def __iter__(self) -> Iterator[Any]:
        info: Any = torch.utils.data.get_worker_info()
        process = info.id if self._process is None else self._process
        if self._asked.num_processes:
            self._asked.loader.set_thread_id(process)
        if self._asked.seeds is not None and not self._num_given:
            self._seed_once(self._asked.seeds[process])
        while True:
            if self._asked.seeds is None:
                number = self._num_given * max(1, self._asked.num_processes) + process
                seed_generators(derive_seed(self._seed, self._first + number))
            batch = self._next()
            self._held = self._held or self._holds()
            yield batch
            self._num_given += 1

    def _seed_once(self, seed: int) -> None:
        """Begin as a forked process of batchgenerators; that Python seeds its own generator there as it likes."""
        np.random.seed(seed)
        if self._asked.seeds_torch:
            torch.manual_seed(seed)
        else:
            torch.set_rng_state(self._torchs_state)

    def _next(self) -> Any:
        try:
            item = next(self._asked.loader)
            return item if self._asked.transform is None else self._asked.transform(**item)
        except StopIteration as error:
            if self._asked.ends:
                return _END
            raise RuntimeError(
                "the loader of a NonDetMultiThreadedAugmenter has to be infinite, and it ended"
            ) from error

    def state_dict(self) -> dict[str, int]:
        """How many batches this worker has given, which is all where the loader draws each batch anew.

        Raises:
            PipelineError: it holds something else than after its first batch, such as a position, or too much to tell.
        """
        if not self._held or self._holds() != self._held:
            raise PipelineError("the loader changes from batch to batch, or is large, and is read again")
        return {"num_given": self._num_given + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self._num_given = state["num_given"]

    def _holds(self) -> bytes:
        """A digest of the loader and its transform; empty where there is none."""
        digest = _Digest()
        try:
            cloudpickle.Pickler(digest).dump((self._asked.loader, self._asked.transform))
        except Exception:  # noqa: BLE001, pickling runs user code
            return b""
        return digest.hash.digest()


class _Digest:
    """A file that keeps a hash of what is written, which may not be much."""

    def __init__(self) -> None:
        self.hash, self._num_bytes = hashlib.blake2b(), 0

    def write(self, data: Any) -> None:
        self._num_bytes += memoryview(data).nbytes
        if self._num_bytes > _LARGEST_HELD_BYTES:
            raise PipelineError(f"it holds more than {_LARGEST_HELD_BYTES} bytes")
        self.hash.update(data)


class _Streamed:
    """The batches of one augmenter from when it starts to when it finishes."""

    def __init__(self, asked: Asked) -> None:
        given = seed_from_environment()
        rank, _ = distributed_identity() or (0, 1)
        first = _drawn_before.popleft() if _drawn_before else 0
        if given is None:
            first, given = 0, secrets.randbits(62) if asked.num_processes else _seed_of_program()
        seed = derive_seed(given, next(_numbers), rank)
        self._num_processes = max(1, asked.num_processes)
        self._num_taken = self._num_ended = 0
        # Where each of them may end, their turn begins anew: each has a stream of its own.
        processes = range(self._num_processes) if asked.ends else [None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the number of processes: batchgenerators' start as many
            self._loaders = [_loader(AugmentedStream(asked, seed, first, each), asked) for each in processes]
            self._batches: list[Any] = [iter(loader) for loader in self._loaders]

    @property
    def is_local(self) -> bool:
        """Whether no data worker makes any of it."""
        return not is_streamed(self._loaders[0])

    def next(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: each process is at the end of its loader; the next call begins anew.
        """
        while True:
            item = next(self._batches[self._num_taken % len(self._batches)])
            self._num_taken += 1
            if not (isinstance(item, str) and item == _END):
                return item
            self._num_ended += 1
            if self._num_ended == self._num_processes:
                self._num_ended = self._num_taken = 0  # batchgenerators begins with its first process again
                raise StopIteration

    def close(self) -> None:
        """End what makes batches."""
        for iterator in self._batches:
            if isinstance(iterator, StreamedStreamIter):
                iterator.close()
            else:
                iterator._shutdown_workers()


def _loader(stream: AugmentedStream, asked: Asked) -> torch.utils.data.DataLoader[Any]:
    number = max(1, asked.num_processes)
    return torch.utils.data.DataLoader(
        stream,
        batch_size=None,
        num_workers=1 if asked.ends else number,
        # Each of batchgenerators' processes holds one more that it has made.
        prefetch_factor=1 + max(1, -(-asked.num_cached // number)),
        collate_fn=_as_it_is,
        pin_memory=asked.pins and torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(stream._seed & LARGEST_BASE_SEED),
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _seed_of_program() -> int:
    """What follows from the program's own generators as they are, which draw nothing for it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()
    return int.from_bytes(hashlib.blake2b(repr(states).encode(), digest_size=7).digest(), "big")


def stand_in(kind: Any, is_started: str, asks: Callable[[Any], Asked]) -> None:
    """Have augmenters of a class stream where there is a service, or where their batches are to follow from a seed.

    Args:
        kind: the class.
        is_started: its attribute that says whether its processes were started.
        asks: gives what one of them is asked for.
    """
    start, get_next, finish = kind._start, kind.__next__, kind._finish

    @functools.wraps(start)
    def _start(self: Any) -> None:
        if getattr(self, is_started) or not _is_wanted():
            start(self)
            return
        vars(self)[_KEPT] = _Streamed(asks(self))
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
        streamed = vars(self).pop(_KEPT, None)
        if streamed is not None:
            streamed.close()
        finish(self, *args, **keywords)

    kind._start, kind.__next__, kind._finish = _start, __next__, _finish


def _is_wanted() -> bool:
    return service_from_environment() is not None or seed_from_environment() is not None


def patch_nondeterministic(module: ModuleType) -> None:
    """Of batchgenerators' module that has `NonDetMultiThreadedAugmenter`."""

    def asks(augmenter: Any) -> Asked:
        return Asked(
            augmenter.generator,
            augmenter.transform,
            augmenter.num_processes,
            augmenter.num_cached,
            seeds=_seeds_of(augmenter),
            seeds_torch=True,
            pins=augmenter.pin_memory,
            ends=False,
        )

    stand_in(module.NonDetMultiThreadedAugmenter, "initialized", asks)


def patch_deterministic(module: ModuleType) -> None:
    """Of batchgenerators' module that has `MultiThreadedAugmenter`."""

    def asks(augmenter: Any) -> Asked:
        number = augmenter.num_processes
        return Asked(
            augmenter.generator,
            augmenter.transform,
            number,
            number * augmenter.num_cached_per_queue,
            seeds=_seeds_of(augmenter),
            pins=augmenter.pin_memory,
        )

    stand_in(module.MultiThreadedAugmenter, "was_initialized", asks)


def _seeds_of(augmenter: Any) -> list[int] | None:
    return None if None in augmenter.seeds else list(augmenter.seeds)


def patch_single(module: ModuleType) -> None:
    """Of batchgenerators' module that has `SingleThreadedAugmenter`, which makes batches in the program's process.

    It streams only where the program was run with --stream-in-process-loaders, and where the loader can travel.
    """
    kind: Any = module.SingleThreadedAugmenter
    get_next = kind.__next__

    @functools.wraps(get_next)
    def __next__(self: Any) -> Any:
        if _KEPT not in vars(self):
            streamed = None
            if streams_in_process_loaders() and _is_wanted():
                streamed = _Streamed(Asked(self.data_loader, self.transform, 0, _AHEAD))
                if service_from_environment() is not None and streamed.is_local:
                    streamed.close()
                    streamed = None
            elif seed_from_environment() is not None:
                _log.warning(
                    "HETSTREAM_SEED has no effect on a SingleThreadedAugmenter: the program makes its batches from its "
                    "own random numbers. Give nnU-Net nnUNet_n_proc_DA=1 or more, or --stream-in-process-loaders"
                )
            vars(self)[_KEPT] = streamed
        streamed = vars(self)[_KEPT]
        return get_next(self) if streamed is None else streamed.next()

    kind.__next__ = __next__


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
