"""Time a stream of batches over a window and check that the bytes are the right ones.

Used by every transport client, also in the peers' environment: needs NumPy and nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

# The client reads one byte of each page of a batch: a lazily mapped batch is not counted before its memory is there.
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Request:
    """What the harness asks of a transport client.

    Attributes:
        cases: case -> {"shape": [...], "collate": bool}; batches are uint8.
        seconds: length of the timed window of each case.
        warmup_s: untimed running before it.
        client_core: where this process runs.
        producer_core: where everything runs that makes and sends batches.
    """

    cases: dict[str, dict[str, Any]]
    seconds: float
    warmup_s: float
    client_core: int
    producer_core: int


def read_request() -> Request:
    """Read the request from the command line and move this process to the client's core."""
    request = Request(**json.loads(sys.argv[-1]))
    os.sched_setaffinity(0, {request.client_core})
    return request


def payload(shape: list[int]) -> np.ndarray:
    """Make the batch: bytes that differ from page to page."""
    return (np.arange(prod(shape)) % 251).astype(np.uint8).reshape(shape)


def measure(
    case: str,
    shape: list[int],
    batches: Iterator[Any],
    as_array: Callable[[Any], np.ndarray],
    request: Request,
) -> None:
    """Receive batches for the window and print the sample.

    Args:
        case: name printed with the sample.
        shape: of one batch.
        batches: the stream; it must not end inside the window.
        as_array: a view of a received batch as a NumPy array, without a copy.
        request: the harness's request.

    Raises:
        ValueError: a batch has another size or other bytes than the producer was given.
    """
    expected = touch(payload(shape))
    size = prod(shape)

    def receive() -> None:
        array = as_array(next(batches))
        if array.nbytes != size or touch(array) != expected:
            raise ValueError(f"{case}: received {array.nbytes} bytes that are not the batch of {size} bytes sent")

    warm_until = time.perf_counter() + request.warmup_s
    receive()
    while time.perf_counter() < warm_until:
        receive()
    children = descendants()
    producers_before, client_before, start = cpu_seconds(children), time.process_time(), time.perf_counter()
    count, end = 0, start + request.seconds
    now = start
    while now < end:
        receive()
        count += 1
        now = time.perf_counter()
    client_s = time.process_time() - client_before
    producers_s = cpu_seconds(children) - producers_before
    gigabytes = count * size / 1e9
    sample = {
        "case": case,
        "gb_per_s": gigabytes / (now - start),
        "batches_per_s": count / (now - start),
        "client_cpu_s_per_gb": client_s / gigabytes,
    }
    if children:
        sample["producer_cpu_s_per_gb"] = producers_s / gigabytes
    print(json.dumps(sample), flush=True)


def touch(array: np.ndarray) -> int:
    """Read one byte of each page and return their sum."""
    return int(array.reshape(-1)[::PAGE_BYTES].sum())


def descendants() -> list[int]:
    """Return the ids of all processes below this one."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue  # it ended between the listing and the reading
    below = found = {os.getpid()}
    while found:
        found = {child for child, parent in parents.items() if parent in below and child not in below}
        below = below | found
    return sorted(below - {os.getpid()})


def cpu_seconds(processes: list[int]) -> float:
    """Sum user and system time of the processes, in the kernel's ticks of 10 ms."""
    ticks = 0
    for process in processes:
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
