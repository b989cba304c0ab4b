"""Peers: torch's DataLoader and torchdata's StatefulDataLoader with one worker process, shared memory in between.

Called with `torch` or, in the peers' environment, with `torchdata`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.clients.prebuilt import loader_arguments
from benchmarks.clients.window import measure, read_request


def to_core(core: int, _worker_id: int) -> None:
    """Move the worker process to the producer's core."""
    os.sched_setaffinity(0, {core})


def loader_class(name: str) -> Callable[..., Any]:
    """The class of the peer."""
    if name == "torch":
        return DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found,unused-ignore]

    return StatefulDataLoader


def main() -> None:
    """Measure every case of the request."""
    request = read_request()
    torch.set_num_threads(1)
    make_loader = loader_class(sys.argv[1])
    for case, options in request.cases.items():
        loader = make_loader(
            **loader_arguments(options["shape"], options.get("collate", False)),
            num_workers=1,
            worker_init_fn=partial(to_core, request.producer_core),
        )
        measure(case, options["shape"], iter(loader), lambda batch: batch.numpy(), request)


if __name__ == "__main__":
    main()
