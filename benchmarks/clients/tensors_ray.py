"""Peer: one or many tensor columns through Ray Data, as in `ray_data.py`. Argument 1 is the number of columns.

Runs in the peers' environment. A batch is 64 rows, so a column has up to 0.4 % fewer numbers than a tensor has
elsewhere; a row for each number would cost Ray many times as much. `iter_batches` gives NumPy arrays without a copy.
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
    width = num_bytes // 4 // count // ray_data.BATCH_SIZE
    num_rows = max(1, ray_data.BLOCK_BYTES // num_bytes) * ray_data.BATCH_SIZE
    columns = {f"feature{number}": np.full((num_rows, width), number, dtype=np.float32) for number in range(count)}

    def block(_rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return columns

    dataset = ray.data.range(ray_data.NUM_BLOCKS, override_num_blocks=ray_data.NUM_BLOCKS)
    batches = dataset.map_batches(block, batch_size=None).iter_batches(
        batch_size=ray_data.BATCH_SIZE, batch_format="numpy", prefetch_batches=2
    )
    return iter(batches)


def main() -> None:
    """Measure every case of the request."""
    request, count = read_request(), int(sys.argv[1])
    is_right, last = last_is(count), f"feature{count - 1}"

    def check(batch: dict[str, Any]) -> bool:
        return is_right(batch | {last: batch[last].reshape(-1)})

    with ray_data.running(request):
        for case, options in request.cases.items():
            # Held by nobody else: Ray does not stand a stream that is open when it ends.
            measure_cpu(case, stream(options["num_bytes"], count), check, request)


if __name__ == "__main__":
    main()
