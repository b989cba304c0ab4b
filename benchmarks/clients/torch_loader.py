"""Peer: torch's DataLoader with one worker process: shared memory segments, descriptors over a Unix socket."""

from __future__ import annotations

import os
from functools import partial

import torch
from torch.utils.data import DataLoader

from benchmarks.clients.prebuilt import loader_arguments
from benchmarks.clients.window import measure, read_request


def to_core(core: int, _worker_id: int) -> None:
    """Move the worker process to the producer's core."""
    os.sched_setaffinity(0, {core})


def main() -> None:
    """Measure every case of the request."""
    request = read_request()
    torch.set_num_threads(1)
    for case, options in request.cases.items():
        loader: DataLoader[torch.Tensor] = DataLoader(
            **loader_arguments(options["shape"], options.get("collate", False)),  # type: ignore[arg-type]
            num_workers=1,
            worker_init_fn=partial(to_core, request.producer_core),
        )
        measure(case, options["shape"], iter(loader), lambda batch: batch.numpy(), request)


if __name__ == "__main__":
    main()
