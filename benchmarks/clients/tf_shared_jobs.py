"""Peer: K trainers on one tf.data service worker with CrossTrainerCache, which needs an endless dataset.

Dispatcher, worker and trainers are threads of one process, because a Python transform cannot leave its process there:
the CPU time includes the trainers'. Runs in the peers' environment.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

BATCH_SIZE = 16


def measure(case: str, options: dict[str, Any], num_jobs: int) -> None:
    """Run one case and print its sample."""
    import numpy as np
    import tensorflow as tf  # type: ignore[import-untyped,unused-ignore]

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0, protocol="grpc"))
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=dispatcher.target.split("://")[1]))
    computed = 0

    def transform(index: Any) -> Any:
        nonlocal computed
        computed += 1
        end = time.thread_time() + options["spin_s"]
        while time.thread_time() < end:
            pass
        time.sleep(options["sleep_s"])
        return np.full((224, 224, 3), int(index) % 251, dtype=np.uint8)

    target, failures = dispatcher.target, []

    def read(trainer: int, num_steps: int) -> None:
        try:
            take(trainer, num_steps)
        except Exception as error:  # noqa: BLE001, the thread's boundary: the main thread raises it
            failures.append(error)

    def take(trainer: int, num_steps: int) -> None:
        dataset = tf.data.Dataset.counter().map(lambda i: tf.numpy_function(transform, [i], tf.uint8))
        shared = dataset.batch(BATCH_SIZE).apply(
            service.distribute(
                processing_mode=service.ShardingPolicy.OFF,
                service=target,
                job_name="job",
                compression=None,
                cross_trainer_cache=service.CrossTrainerCache(trainer_id=f"trainer-{trainer}"),
            )
        )
        for _, _ in zip(range(num_steps), shared, strict=False):
            pass

    num_steps = options["samples"] // BATCH_SIZE
    threads = [threading.Thread(target=read, args=(n, num_steps), daemon=True) for n in range(num_jobs)]
    started, cpu_s = time.perf_counter(), time.process_time()
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if failures:
        raise failures[0]
    seconds = time.perf_counter() - started
    sample = {
        "case": case,
        "computed": computed / options["samples"],
        "worker_cpu_s": time.process_time() - cpu_s,
        "batches_per_s": num_jobs * num_steps / seconds,
    }
    print(json.dumps(sample), flush=True)
    del worker


def main() -> None:
    """Measure every case of the request."""
    num_jobs, request = int(sys.argv[1]), json.loads(sys.argv[-1])
    os.sched_setaffinity(0, {request["producer_core"]})
    for case, options in request["cases"].items():
        measure(case, options, num_jobs)
    sys.stdout.flush()
    os._exit(0)  # its servers otherwise wait for the clients to release their iterations


if __name__ == "__main__":
    main()
