"""Peer: Ray Data, `map_batches` into `iter_batches`, one CPU for tasks. Runs in the peers' environment.

Ray has no notion of a finished batch: a block of rows holds it, and `iter_batches` gives the block back whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from math import prod
from typing import Any

os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray  # type: ignore[import-not-found,unused-ignore]

from benchmarks.clients.window import Request, descendants, measure, payload, read_request

BATCH_SIZE = 64
# Ray makes a task of each block. A task that holds little is all overhead, so small batches share one.
BLOCK_BYTES = 8 << 20
NUM_BLOCKS = 400


def stream(shape: list[int]) -> Iterator[Any]:
    """Iterate over the finished batches."""
    batches_per_block = max(1, BLOCK_BYTES // prod(shape))
    finished = np.concatenate([payload(shape)] * batches_per_block)

    def block(_rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"data": finished}

    dataset = ray.data.range(len(finished) * NUM_BLOCKS, override_num_blocks=NUM_BLOCKS)
    batches = dataset.map_batches(block, batch_size=None).iter_batches(
        batch_size=BATCH_SIZE, batch_format="numpy", prefetch_batches=2
    )
    return iter(batches)


@contextlib.contextmanager
def running(request: Request) -> Iterator[None]:
    """Run Ray with all that it starts on the producer's core. The process ends with the block."""
    os.sched_setaffinity(0, {request.producer_core})  # inherited by everything that Ray starts
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=2 << 30,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    os.sched_setaffinity(0, {request.client_core})
    try:
        yield
    except BaseException:
        ray.shutdown()
        raise
    # `ray.shutdown` fails or hangs where a stream that was dropped has not ended, and nothing tells when it has.
    sys.stdout.flush()
    for process in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    """Measure every case of the request."""
    request = read_request()
    with running(request):
        for case, options in request.cases.items():
            measure(case, options["shape"], stream(options["shape"]), lambda rows: rows["data"], request)


if __name__ == "__main__":
    main()
