"""At which rate batches come to a loader. Called by `partition.py` and `unmodified.py`."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

import torch

from hetstream.mpi_dataworkers.loader.loader_connection import LoaderConnection
from hetstream.mpi_dataworkers.partitioner.cut import Rates

_COPIED_BYTES = 1 << 23


def with_wire(rates: Rates, connection: LoaderConnection) -> Rates:
    """Rates with that at which batches come to a loader, as far as it is known.

    Batches that come through shared memory are copied once, by the data worker, and so come as fast as memory is.
    """
    client = connection.client
    if client is None:
        return rates
    measured = client.wire.bytes_per_s
    if measured is None and client.batches_by_transport and {*client.batches_by_transport} == {"shm"}:
        measured = _copied_bytes_per_s()
    return rates if measured is None else replace(rates, wire_bytes_per_s=measured)


@functools.cache
def _copied_bytes_per_s() -> float:
    """How fast this host copies memory."""
    source, goal = torch.zeros(_COPIED_BYTES, dtype=torch.uint8), torch.zeros(_COPIED_BYTES, dtype=torch.uint8)
    started = time.perf_counter()
    goal.copy_(source)
    return _COPIED_BYTES / max(1e-6, time.perf_counter() - started)
