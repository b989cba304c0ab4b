"""Peer: a dict of one or many tensors through tf.data service, as in `tf_data_service.py`. Argument 1 is the number.

Runs in the peers' environment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.clients.tf_data_service import running, stream
from benchmarks.clients.window import last_is, measure_cpu, read_request


def features(num_bytes: int, count: int) -> Callable[[Any], dict[str, Any]]:
    """What makes the batch, in the worker."""
    import tensorflow as tf  # type: ignore[import-untyped,unused-ignore]

    length = num_bytes // 4 // count
    return lambda _: {f"feature{number}": tf.fill([length], float(number)) for number in range(count)}


def main() -> None:
    """Measure every case of the request."""
    request, count = read_request(), int(sys.argv[1])
    is_right = last_is(count)

    def check(batch: dict[str, Any]) -> bool:
        # To index a tensor costs TensorFlow more than it is to cost here, so one of them is looked at as an array.
        last = f"feature{count - 1}"
        return is_right(batch | {last: np.asarray(memoryview(batch[last]))})

    with running(request) as target:
        for case, options in request.cases.items():
            measure_cpu(case, stream(target, features(options["num_bytes"], count)), check, request)


if __name__ == "__main__":
    main()
