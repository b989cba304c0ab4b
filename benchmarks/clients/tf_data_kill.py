"""Peer of `kill.py`: tf.data service, DYNAMIC sharding, two workers in processes of their own; one is killed.

Runs in the peers' environment, which has no torch: `watch` is repeated here in few lines.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# It waits for a lost worker for very long: after this the sample says what came so far.
PATIENCE_S = 45.0
# About what one core of today draws.
NORMALS_PER_S = 40_000_000


def serve(role: str, address: str) -> None:
    """Run one server until stdin closes."""
    import tensorflow as tf  # type: ignore[import-untyped,unused-ignore]

    service = tf.data.experimental.service
    if role == "dispatcher":
        server = service.DispatchServer(service.DispatcherConfig(port=0, protocol="grpc"))
        print(server.target, flush=True)
    else:
        server = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
        print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)


def start(role: str, address: str = "") -> tuple[subprocess.Popen[str], str]:
    """Start one server; return its process and what it said."""
    argv = [sys.executable, "-m", "benchmarks.clients.tf_data_kill", "--serve", role, address]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def read(dataset: Any, arrived: queue.SimpleQueue[int | None]) -> None:
    """Hand the numbers on as they come, and None at the end."""
    for number in dataset.as_numpy_iterator():
        arrived.put(int(number))
    arrived.put(None)


def main() -> None:
    """Measure every case of the request."""
    import tensorflow as tf

    request: dict[str, Any] = json.loads(sys.argv[-1])
    length, sleep_s = request["length"], request["sleep_s"]
    for case in request["cases"]:
        dispatcher, target = start("dispatcher")
        workers = [start("worker", target.split("://")[1])[0] for _ in range(2)]

        def slow(number: Any) -> Any:
            # A function of Python cannot go to a worker in another process, and the graph has no sleep: it computes.
            noise = tf.random.stateless_normal([NORMALS_PER_S * int(sleep_s * 1000) // 1000], [number, 0])
            return number + tf.cast(tf.reduce_sum(noise) * 0.0, tf.int64)

        service = tf.data.experimental.service
        dataset = tf.data.Dataset.range(length).map(slow)
        dataset = dataset.apply(service.distribute(processing_mode=service.ShardingPolicy.DYNAMIC, service=target))
        seen: list[int] = []
        waits: list[float] = []
        arrived: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        threading.Thread(target=read, args=(dataset, arrived), daemon=True).start()
        before = time.perf_counter()
        number: int | None = -1
        while number is not None:
            try:
                number = arrived.get(timeout=PATIENCE_S)
            except queue.Empty:
                number = None
            # The end of the data is a wait too: nothing more came until it was said.
            waits.append(time.perf_counter() - before)
            if number is not None:
                seen.append(number)
            if len(seen) == length // 4:
                workers[0].kill()
            before = time.perf_counter()
        sample = {
            "case": case,
            "lost": float(length - len(set(seen))),
            "duplicated": float(len(seen) - len(set(seen))),
            "stall_s": max(waits[length // 4 :]),
        }
        print(json.dumps(sample), flush=True)
        for process in (*workers, dispatcher):
            process.kill()
            process.wait()
    os._exit(0)


if __name__ == "__main__":
    serve(*sys.argv[2:4]) if "--serve" in sys.argv else main()
