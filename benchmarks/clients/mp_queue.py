"""Peer: `multiprocessing.Queue` from one process to another: pickle in band, through a pipe."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator

import numpy as np

from benchmarks.clients.window import measure, payload, read_request

# As many batches ahead as torch's DataLoader with one worker (prefetch_factor=2).
DEPTH = 2


def put(queue: multiprocessing.Queue[np.ndarray], shape: list[int], core: int) -> None:
    """Put the batch until this process is ended."""
    os.sched_setaffinity(0, {core})
    batch = payload(shape)
    while True:
        queue.put(batch)


def get(queue: multiprocessing.Queue[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield what arrives."""
    while True:
        yield queue.get()


def main() -> None:
    """Measure every case of the request."""
    request = read_request()
    context = multiprocessing.get_context("fork")
    for case, options in request.cases.items():
        queue: multiprocessing.Queue[np.ndarray] = context.Queue(DEPTH)
        producer = context.Process(target=put, args=(queue, options["shape"], request.producer_core))
        producer.start()
        measure(case, options["shape"], get(queue), lambda batch: batch, request)
        producer.terminate()
        producer.join()
        queue.cancel_join_thread()
        queue.close()


if __name__ == "__main__":
    main()
