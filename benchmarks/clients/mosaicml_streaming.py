"""Peer: mosaicml-streaming: MDS shards in memory, read by one worker process of torch's DataLoader.

Runs in the peers' environment. Its format is part of what it does: a batch is read out of a shard for each step, where
the others hand over a batch that is there.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

# It imports torchvision, whose PyPI wheel is built for CUDA: beside a CPU build of torch its operators are missing, and
# the import fails on the first. None of them is used here.
for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import MDSWriter, StreamingDataset  # type: ignore[import-not-found,unused-ignore]  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from benchmarks.clients.prebuilt import hand_over  # noqa: E402
from benchmarks.clients.torch_loader import to_core  # noqa: E402
from benchmarks.clients.window import measure, payload, read_request  # noqa: E402

# Written once for each case; a shard that is read again and again stays in the page cache.
CASE_BYTES = 64 << 20
EPOCH_SIZE = 200_000
SHARED_MEMORY = Path("/dev/shm")


def write(folder: Path, shape: list[int]) -> None:
    """Write the batch a few times, as samples of one MDS dataset."""
    finished = payload(shape)
    with MDSWriter(out=str(folder), columns={"data": "ndarray"}) as writer:
        for _ in range(max(2, CASE_BYTES // prod(shape)) if prod(shape) > 1e5 else 256):
            writer.write({"data": finished})


def stream(folder: Path, core: int) -> Iterator[Any]:
    """Iterate over the dataset, again and again."""
    dataset = StreamingDataset(local=str(folder), batch_size=1, epoch_size=EPOCH_SIZE, replication=None)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=1, collate_fn=hand_over, worker_init_fn=partial(to_core, core)
    )
    while True:
        yield from loader


def main() -> None:
    """Measure every case of the request."""
    request = read_request()
    before = set(SHARED_MEMORY.glob("[0-9]*_*"))
    with tempfile.TemporaryDirectory(prefix="mds-", dir=SHARED_MEMORY) as name:
        for number, (case, options) in enumerate(request.cases.items()):
            folder = Path(name) / str(number)
            write(folder, options["shape"])
            # A process for each case: a second StreamingDataset waits for a barrier of the first that is not over.
            if (child := os.fork()) == 0:
                batches = stream(folder, request.producer_core)
                measure(case, options["shape"], batches, lambda sample: np.asarray(sample["data"]), request)
                for worker in multiprocessing.active_children():
                    worker.kill()
                os._exit(0)  # its threads outlive the window by a minute
            _, status = os.waitpid(child, 0)
            for left in set(SHARED_MEMORY.glob("[0-9]*_*")) - before:  # it does not unlink what it made
                left.unlink()
            if status:
                sys.exit(f"{case}: the client ended with status {status}")


if __name__ == "__main__":
    main()
