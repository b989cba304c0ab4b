"""One client for the threads benchmark: images a second and memory of one data worker, or of torch's worker processes.

The same images, transform and batches as in the overhead benchmark.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader

from benchmarks.clients.images import BATCH_SIZE, PASSES, Options, Photographs, Request, Timing, timed
from benchmarks.clients.service import running, streaming
from benchmarks.clients.startup import makers_pss_bytes


class Passes(ConcatDataset[Any]):
    """The same images again and again."""

    thread_safe = True


@dataclass(frozen=True)
class Measured:
    """A window, and the memory of the processes that make batches, at its end."""

    timing: Timing
    pss_bytes: int


def images(root: str) -> Passes:
    """The dataset of every system."""
    return Passes([Photographs(root)] * PASSES)


def torch_loader(request: Request, options: Options) -> Measured:
    """torch's DataLoader with worker processes."""
    loader: Any = DataLoader(images(request.root), BATCH_SIZE, num_workers=options.workers)
    memory: list[int] = []
    # `waiting` is asked at both ends of the window, while the worker processes are there.
    timing = timed(loader, request, set(options.cores), lambda: memory.append(makers_pss_bytes()) or 0)
    return Measured(timing, memory[-1])


def hetstream(num_threads: int, request: Request, options: Options) -> Measured:
    """hetstream's dispatcher, one data worker and loader."""
    from hetstream import DataLoader as StreamingLoader  # here: the peers of this client do without

    with ExitStack() as stack:
        service = stack.enter_context(running(options.workers, set(options.cores), num_threads))
        loader = StreamingLoader(images(request.root), BATCH_SIZE, seed=0, service=service, job_name="threads")
        batches = stack.enter_context(streaming(loader, options.workers))
        timing = timed(batches, request, set(options.cores), lambda: int(loader.stats()["batches_waiting"]))
        return Measured(timing, makers_pss_bytes())


def main() -> None:
    """Measure every case of the request with the system and the number of threads that come first."""
    request = Request(**json.loads(sys.argv[-1]))
    torch.set_num_threads(1)
    for case, given in request.cases.items():
        options = Options(**given | {"workers": int(sys.argv[2])})
        os.sched_setaffinity(0, options.cores)
        num_threads = int(sys.argv[3])
        measured = (
            hetstream(num_threads, request, options) if sys.argv[1] == "hetstream" else torch_loader(request, options)
        )
        timing = measured.timing
        sample = {
            "case": case,
            "images_per_s": timing.images / timing.seconds,
            "cpu_ms_per_image": 1000 * timing.cpu_s / timing.images,
            "pss_mb": measured.pss_bytes / 1e6,
            "other_load": timing.other_load,
        }
        print(json.dumps(sample), flush=True)


if __name__ == "__main__":
    main()
