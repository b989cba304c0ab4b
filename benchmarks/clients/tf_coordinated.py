"""Peer: tf.data service's coordinated reads, with the same lengths, boundaries and emulated ranks.

It needs an endless dataset and one worker per round; dispatcher, worker and ranks are threads of one process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from benchmarks.clients.lengths import BATCH_SIZE, BOUNDARIES, WORLD_SIZE, Batch, Emulation, skewed_lengths, train


def main() -> None:
    """Measure every case of the request."""
    import tensorflow as tf  # type: ignore[import-untyped,unused-ignore]

    request = json.loads(sys.argv[-1])
    lengths = skewed_lengths(request["samples"])
    service = tf.data.experimental.service

    def bucket(text: Any) -> Any:
        return tf.cast(tf.searchsorted(tf.constant(BOUNDARIES), [tf.shape(text)[0]], side="right")[0], tf.int64)

    def batches(window: Any) -> Any:
        # A round is one batch of each loader, padded alike; a window that does not fill one is left out.
        texts_and_lengths = window.map(lambda text: (text, tf.shape(text)[0]))
        rounds = texts_and_lengths.padded_batch(BATCH_SIZE * WORLD_SIZE, drop_remainder=True)
        return rounds.flat_map(
            lambda text, length: tf.data.Dataset.from_tensors((text, length)).unbatch().batch(BATCH_SIZE)
        )

    def texts() -> Any:
        dataset = tf.data.Dataset.from_tensor_slices(lengths).shuffle(len(lengths), seed=0)
        dataset = dataset.map(lambda length: tf.zeros([length], tf.int32))
        rounds = dataset.group_by_window(bucket, lambda _, window: batches(window), BATCH_SIZE * WORLD_SIZE)
        return rounds.repeat()

    def read(target: str, dataset_id: Any, case: str, rank: int) -> Iterator[Batch]:
        distributed = service.from_dataset_id(
            processing_mode=service.ShardingPolicy.OFF,
            service=target,
            dataset_id=dataset_id,
            job_name=case.replace(" ", "-"),
            consumer_index=rank,
            num_consumers=WORLD_SIZE,
        )
        for batch, real in distributed:
            yield batch.shape[0], int(tf.reduce_sum(real)), batch.shape[1]

    for case, emulation in request["cases"].items():
        dispatcher = service.DispatchServer(service.DispatcherConfig(port=0, protocol="grpc"))
        worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=dispatcher.target.split("://")[1]))
        dataset_id = service.register_dataset(dispatcher.target, texts(), compression=None)
        ranks = [partial(read, dispatcher.target, dataset_id, case, rank) for rank in range(WORLD_SIZE)]
        train(case, Emulation(**emulation), ranks, request["samples"] // (BATCH_SIZE * WORLD_SIZE))
        del worker
    sys.stdout.flush()
    os._exit(0)  # its servers otherwise wait for the clients to release their iterations


if __name__ == "__main__":
    main()
