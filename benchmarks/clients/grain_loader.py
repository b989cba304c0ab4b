"""Peer: grain with one worker process (`mp_prefetch`), an element a finished batch. Runs in the peers' environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import grain  # type: ignore[import-not-found,unused-ignore]
import numpy as np

from benchmarks.clients.window import measure, payload, read_request

# More batches than any window receives.
LENGTH = 50_000_000


class Finished:
    """Gives the same finished batch for every index, from the private memory of the process that asks."""

    def __init__(self, shape: list[int], core: int) -> None:
        self.shape = shape
        self.core = core
        self._batch: np.ndarray | None = None

    def __call__(self, _index: int) -> np.ndarray:
        if self._batch is None:
            os.sched_setaffinity(0, {self.core})
            self._batch = payload(self.shape)
        return self._batch


def stream(shape: list[int], core: int) -> Iterator[Any]:
    """Iterate over the finished batches of one worker process."""
    dataset = grain.MapDataset.range(LENGTH).map(Finished(shape, core))
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(dataset.to_iter_dataset(options).mp_prefetch(grain.MultiprocessingOptions(num_workers=1)))


def main() -> None:
    """Measure every case of the request."""
    request = read_request()
    for case, options in request.cases.items():
        shape = options["shape"]
        measure(case, shape, stream(shape, request.producer_core), np.asarray, request)


if __name__ == "__main__":
    main()
