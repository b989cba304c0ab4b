"""Peer: one or many columns of numbers through Ray Data, as in `ray_data.py`. Argument 1 is the number of columns.

Runs in the peers' environment. The batch is a block of rows, or some of one: the numbers of a column lie in one piece,
and `iter_batches` gives them as NumPy arrays without a copy, which is the least that Ray can do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.clients import ray_data
from benchmarks.clients.window import last_is, measure_cpu, read_request

ray = ray_data.ray


def stream(num_bytes: int, count: int) -> Iterator[Any]:
    """Iterate over the batches."""
    length = num_bytes // 4 // count
    batches_per_block = max(1, ray_data.BLOCK_BYTES // num_bytes)
    columns = {
        f"feature{number}": np.full(length * batches_per_block, number, dtype=np.float32) for number in range(count)
    }

    def block(_rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return columns

    dataset = ray.data.range(ray_data.NUM_BLOCKS, override_num_blocks=ray_data.NUM_BLOCKS)
    batches = dataset.map_batches(block, batch_size=None).iter_batches(
        batch_size=length, batch_format="numpy", prefetch_batches=2
    )
    return iter(batches)


def main() -> None:
    """Measure every case of the request."""
    request, count = read_request(), int(sys.argv[1])
    with ray_data.running(request):
        for case, options in request.cases.items():
            measure_cpu(case, stream(options["num_bytes"], count), last_is(count), request)


if __name__ == "__main__":
    main()
