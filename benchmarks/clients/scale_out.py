"""Rate of a stream whose transform sleeps, for a growing number of data workers: hetstream and torch's DataLoader.

Called with `hetstream` or `torch`. The sleep stands for work that takes time on CPUs this machine does not have.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.clients.prebuilt import first
from benchmarks.clients.service import running, streaming
from hetstream import DataLoader

LENGTH = 50_000_000


@dataclass(frozen=True)
class Request:
    """What the harness asks.

    Attributes:
        cases: case -> {"workers": data worker processes}.
        sleep_s: how long the transform of one batch sleeps.
        batch_bytes: size of a batch.
        sleeps: length of the timed window, in sleeps.
    """

    cases: dict[str, dict[str, int]]
    sleep_s: float
    batch_bytes: int
    sleeps: int


class Sleeping(Dataset[torch.Tensor]):
    """A sample is a batch that takes `sleep_s` to make and no CPU."""

    def __init__(self, sleep_s: float, batch_bytes: int) -> None:
        self.sleep_s = sleep_s
        self.batch_bytes = batch_bytes

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_s)
        return torch.full((self.batch_bytes,), index % 251, dtype=torch.uint8)


@contextlib.contextmanager
def hetstream(dataset: Sleeping, workers: int) -> Iterator[Iterator[Any]]:
    """Stream from `workers` processes of hetstream."""
    with running(processes=workers, cores=os.sched_getaffinity(0)) as service:
        loader = DataLoader(dataset, batch_size=1, collate_fn=first, service=service, job_name=f"scale-{workers}")
        with streaming(loader, processes=workers) as batches:
            yield batches


@contextlib.contextmanager
def torch_loader(dataset: Sleeping, workers: int) -> Iterator[Iterator[Any]]:
    """Stream from `workers` processes of torch."""
    torch.multiprocessing.set_sharing_strategy("file_system")  # descriptors run out with many workers
    yield iter(torch.utils.data.DataLoader(dataset, batch_size=1, collate_fn=first, num_workers=workers))


def main() -> None:
    """Measure every case of the request."""
    request = Request(**json.loads(sys.argv[-1]))
    stream = {"hetstream": hetstream, "torch": torch_loader}[sys.argv[1]]
    torch.set_num_threads(1)
    for case, options in request.cases.items():
        with stream(Sleeping(request.sleep_s, request.batch_bytes), options["workers"]) as batches:
            for _ in range(3 * options["workers"]):  # until every worker is in its stride
                next(batches)
            started, count = time.perf_counter(), 0
            while (last := time.perf_counter() - started) < request.sleeps * request.sleep_s:
                next(batches)
                count += 1
        linear = options["workers"] / request.sleep_s
        sample = {"case": case, "batches_per_s": count / last, "of_linear": count / last / linear}
        print(json.dumps(sample), flush=True)


if __name__ == "__main__":
    main()
