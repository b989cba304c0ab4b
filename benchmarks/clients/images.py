"""One client for the overhead benchmark: JPEG decode, random resized crop, flip and default collate, by one of
three loaders on one set of cores. The dataset, the transform and the batches are the same for all of them.

The trainer does no training: it reads a byte of each page of a batch and asks for the next, so that every CPU cycle
left over by the loader goes into images.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from benchmarks.clients.service import running, streaming
from benchmarks.clients.window import Meter, touch
from hetstream import sample_generator
from hetstream.mpi_dataworkers.generators import makes_sample

BATCH_SIZE = 64
# One pass over a small folder is shorter than the window; passes are chained so that no epoch ends inside it.
PASSES = 10_000


@dataclass(frozen=True)
class Options:
    """One case.

    Attributes:
        workers: data worker processes; for the in-process loop, independent loops that share nothing.
        cores: where all processes of the system run.
    """

    workers: int
    cores: list[int]


@dataclass(frozen=True)
class Request:
    """What the harness asks.

    Attributes:
        cases: case -> Options.
        root: folder of JPEG files.
        batches: timed batches a case; all systems make the same ones.
        warmup: untimed batches before them.
    """

    cases: dict[str, dict[str, Any]]
    root: str
    batches: int
    warmup: int


@dataclass(frozen=True)
class Timing:
    """Images in the window, its length, the CPU time of the process and its children in it, and the load beside."""

    images: int
    seconds: float
    cpu_s: float
    other_load: float


class Photographs(Dataset[Any]):
    """What a program might have: Pillow decodes, and cuts and resizes at random; uint8 NHWC and the class.

    A file's class is in its name, as in `n02087394_Rhodesian_ridgeback.JPEG`.
    """

    thread_safe = True

    def __init__(self, root: str | Path, size: int = 224) -> None:
        self._files = sorted(Path(root).iterdir())
        names = [file.name.split("_")[0] for file in self._files]
        self.classes = sorted(set(names))
        self._labels = [self.classes.index(name) for name in names]
        self._size = size

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        draw = sample_generator() if makes_sample() else random.Random(random.getrandbits(64))
        with Image.open(self._files[index]) as file:
            image = file.convert("RGB")
        area = image.width * image.height * draw.uniform(0.08, 1)
        ratio = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        width = min(image.width, round(math.sqrt(area * ratio)))
        height = min(image.height, round(math.sqrt(area / ratio)))
        left, top = draw.randint(0, image.width - width), draw.randint(0, image.height - height)
        box = left, top, left + width, top + height
        pixels = np.array(image.resize((self._size, self._size), Image.Resampling.BILINEAR, box))
        return (np.ascontiguousarray(pixels[:, ::-1]) if draw.random() < 0.5 else pixels), self._labels[index]


def images(root: str) -> Dataset[Any]:
    """The dataset of every system."""
    return ConcatDataset([Photographs(root)] * PASSES)


def timed(loader: Iterable[Any], request: Request, cores: set[int], waiting: Callable[[], int] = lambda: 0) -> Timing:
    """Iterate: the warm-up, then the window, which begins and ends with the arrival of a batch.

    Args:
        loader: gives (images, labels).
        request: how many batches.
        cores: where all of it runs.
        waiting: finished batches in the loader's hands. A loader whose workers make several steps at a time holds
            some that were made before the window, or leaves some behind: what counts is what was made in it.
    """
    batches = iter(loader)
    for _ in range(request.warmup):
        touch(next(batches)[0].numpy())
    meter = Meter(cores)
    count, waiting_before = 0, waiting()
    for _ in range(request.batches):
        batch = next(batches)[0].numpy()
        touch(batch)
        count += len(batch)
    spent = meter.read()
    count += (waiting() - waiting_before) * BATCH_SIZE
    return Timing(count, spent.seconds, spent.own_cpu_s + spent.children_cpu_s, spent.other_load)


def in_process(request: Request, options: Options) -> list[Timing]:
    """Run torch's DataLoader without workers; with N workers, N such loops at once, each in a process on a core."""
    if options.workers == 1:
        return [timed(DataLoader(images(request.root), BATCH_SIZE), request, set(options.cores))]
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(options.workers)
    with context.Pool(options.workers, _enter_loop, (barrier,)) as pool:
        return pool.map(partial(_loop, request), options.cores, chunksize=1)


_barrier: Any = None


def _enter_loop(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _loop(request: Request, core: int) -> Timing:
    """One of several loops. They start together; each makes the same batches."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    _barrier.wait(60)
    return timed(DataLoader(images(request.root), BATCH_SIZE), request, {core})


def torch_loader(request: Request, options: Options) -> list[Timing]:
    """Run torch's DataLoader with worker processes."""
    return [
        timed(DataLoader(images(request.root), BATCH_SIZE, num_workers=options.workers), request, set(options.cores))
    ]


def hetstream(request: Request, options: Options) -> list[Timing]:
    """Run hetstream's dispatcher, data workers and loader."""
    from hetstream import DataLoader as StreamingLoader  # here: the peers of this client do without

    with ExitStack() as stack:
        service = stack.enter_context(running(processes=options.workers, cores=set(options.cores)))
        loader = StreamingLoader(images(request.root), BATCH_SIZE, seed=0, service=service, job_name="overhead")
        batches = stack.enter_context(streaming(loader, options.workers))
        return [timed(batches, request, set(options.cores), lambda: int(loader.stats()["batches_waiting"]))]


SYSTEMS: dict[str, Callable[[Request, Options], list[Timing]]] = {
    "in-process": in_process,
    "torch": torch_loader,
    "hetstream": hetstream,
}


def main() -> None:
    """Measure every case of the request with the system of the first argument."""
    request = Request(**json.loads(sys.argv[-1]))
    torch.set_num_threads(1)
    for case, given in request.cases.items():
        options = Options(**given)
        os.sched_setaffinity(0, options.cores)
        timings = SYSTEMS[sys.argv[1]](request, options)
        total = sum(timing.images for timing in timings)
        sample = {
            "case": case,
            "images_per_s": sum(timing.images / timing.seconds for timing in timings),
            "cpu_ms_per_image": 1000 * sum(timing.cpu_s for timing in timings) / total,
            "other_load": max(timing.other_load for timing in timings),
        }
        print(json.dumps(sample), flush=True)


if __name__ == "__main__":
    main()
