"""Peer: splits that tf.data service's dispatcher hands out under ShardingPolicy.DYNAMIC.

Runs in the peers' environment. Every element of the range is a split that the worker asks the dispatcher for; elements
travel to the client in batches, so that the client is not what is measured.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from benchmarks.clients.tf_data_service import running
from benchmarks.clients.window import Meter, read_request

ELEMENTS = 64


def stream(target: str) -> Any:
    """Iterate over a range as the service's only client."""
    import tensorflow as tf  # type: ignore[import-untyped,unused-ignore]

    service = tf.data.experimental.service
    policy = service.ShardingPolicy.DYNAMIC
    dataset = tf.data.Dataset.range(1 << 40).batch(ELEMENTS)
    return iter(dataset.apply(service.distribute(processing_mode=policy, service=target, compression=None)))


def main() -> None:
    """Measure every case of the request."""
    request = read_request()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with running(request) as target:
        for case in request.cases:
            batches = stream(target)
            warm_until = time.monotonic() + request.warmup_s
            next(batches)
            while time.monotonic() < warm_until:
                next(batches)
            meter = Meter({request.client_core, request.producer_core})
            count, end = 0, time.monotonic() + request.seconds
            while time.monotonic() < end:
                count += int(next(batches).shape[0])
            spent = meter.read()
            sample = {
                "case": case,
                "leases_per_s": count / spent.seconds,
                "samples_per_s": count / spent.seconds,
                "dispatcher_cpu_us": spent.children_cpu_s / count * 1e6,
                "other_load": spent.other_load,
            }
            print(json.dumps(sample), flush=True)


if __name__ == "__main__":
    main()
