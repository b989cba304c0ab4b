"""Peer: tf.data service, one dispatcher and one worker in a process of their own, one client, no compression.

Runs in the peers' environment. The worker's pipeline makes the batch once and repeats it from memory.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np

from benchmarks.clients.window import Request, measure, read_request

SERVE = "--serve"


def serve() -> None:
    """Run dispatcher and worker until stdin closes, which is when the client ends however it ends."""
    import tensorflow as tf  # type: ignore[import-untyped,unused-ignore]

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0, protocol="grpc"))
    address = dispatcher.target.split("://")[1]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    print(dispatcher.target, flush=True)
    sys.stdin.read()
    del worker, dispatcher
    os._exit(0)  # its servers otherwise wait for the client to release its iteration


@contextlib.contextmanager
def running(request: Request) -> Iterator[str]:
    """Run the service on the producer's core; gives its address."""
    os.sched_setaffinity(0, {request.producer_core})
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.clients.tf_data_service", SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        os.sched_setaffinity(0, {request.client_core})
        assert server.stdin is not None
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.stdin.close()


def stream(target: str, make: Callable[[Any], Any]) -> Iterator[Any]:
    """Iterate over a dataset of the batch that `make` makes once, as the service's only client."""
    import tensorflow as tf

    dataset = tf.data.Dataset.range(1).map(make).cache().repeat()
    service = tf.data.experimental.service
    return iter(
        dataset.apply(service.distribute(processing_mode=service.ShardingPolicy.OFF, service=target, compression=None))
    )


def bytes_of(shape: list[int]) -> Callable[[Any], Any]:
    """What makes `payload` of window.py, in the worker."""
    import tensorflow as tf

    def batch(_: Any) -> Any:
        return tf.reshape(tf.cast(tf.range(prod(shape), dtype=tf.int64) % 251, tf.uint8), shape)

    return batch


def main() -> None:
    """Measure every case of the request."""
    request = read_request()
    with running(request) as target:
        for case, options in request.cases.items():
            shape = options["shape"]
            batches = stream(target, bytes_of(shape))
            measure(case, shape, batches, lambda batch: np.asarray(memoryview(batch)), request)


if __name__ == "__main__":
    serve() if SERVE in sys.argv else main()
