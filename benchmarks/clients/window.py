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

from benchmarks.processes import all_processes, state_of

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
    meter = Meter({request.client_core, request.producer_core})
    count, end = 0, time.perf_counter() + request.seconds
    while time.perf_counter() < end:
        receive()
        count += 1
    spent = meter.read()
    gigabytes = count * size / 1e9
    sample = {
        "case": case,
        "gb_per_s": gigabytes / spent.seconds,
        "batches_per_s": count / spent.seconds,
        "client_cpu_s_per_gb": spent.own_cpu_s / gigabytes,
        "other_load": spent.other_load,
    }
    if meter.has_children:
        sample["producer_cpu_s_per_gb"] = spent.children_cpu_s / gigabytes
    print(json.dumps(sample), flush=True)


def measure_cpu(
    case: str, batches: Iterator[Any], check: Callable[[Any], bool], request: Request, program_ms: float | None = None
) -> None:
    """Receive batches for the window, read nothing of them but what `check` does, and print the sample.

    Args:
        case: name printed with the sample.
        batches: the stream; it must not end inside the window.
        check: whether a batch is the one that was sent.
        request: the harness's request.
        program_ms: CPU-ms of a batch that the program spends itself, where that is known.

    Raises:
        ValueError: it is another batch.
    """

    def receive() -> None:
        if not check(next(batches)):
            raise ValueError(f"{case}: not the batch that was sent")

    warm_until = time.monotonic() + request.warmup_s
    receive()
    while time.monotonic() < warm_until:
        receive()
    meter = Meter({request.client_core, request.producer_core})
    number, end = 0, time.monotonic() + request.seconds
    while time.monotonic() < end:
        receive()
        number += 1
    spent = meter.read()
    cpu_ms = (spent.own_cpu_s + spent.children_cpu_s) / number * 1e3
    sample = {
        "case": case,
        "batches_per_s": number / spent.seconds,
        "cpu_ms_per_batch": cpu_ms,
        "other_load": spent.other_load,
    }
    if program_ms is not None:
        sample["loader_cpu_ms_per_batch"] = cpu_ms - program_ms
    print(json.dumps(sample), flush=True)


def last_is(count: int) -> Callable[[Any], bool]:
    """A check for `measure_cpu`: a dict of `feature0`, `feature1` .. whose last number is its last feature's number."""
    return lambda batch: len(batch) == count and bool(batch[f"feature{count - 1}"][-1] == count - 1)


@dataclass(frozen=True)
class Spent:
    """What a window cost.

    Attributes:
        seconds: its length.
        own_cpu_s: CPU time of this process.
        children_cpu_s: CPU time of the processes below it.
        other_load: share of the pinned cores that processes of nobody here used: a window with much of it measured
            the neighbours.
    """

    seconds: float
    own_cpu_s: float
    children_cpu_s: float
    other_load: float


class Meter:
    """Measures from its making to `read`.

    Args:
        cores: where the whole system is pinned.
    """

    def __init__(self, cores: set[int]) -> None:
        self._cores = cores
        self._children = descendants()
        self._before = self._now()

    @property
    def has_children(self) -> bool:
        """Whether there is a process below this one."""
        return bool(self._children)

    def _now(self) -> tuple[float, float, float, float]:
        return time.perf_counter(), time.process_time(), cpu_seconds(self._children), busy_seconds(self._cores)

    def read(self) -> Spent:
        """Return what was spent since the meter was made."""
        seconds, own, children, busy = (now - then for now, then in zip(self._now(), self._before, strict=True))
        children += cpu_seconds([process for process in descendants() if process not in self._children])  # new ones
        others = max(0.0, busy - own - children)
        return Spent(seconds, own, children, others / (seconds * len(self._cores)))


def touch(array: np.ndarray) -> int:
    """Read one byte of each page and return their sum."""
    return int(array.reshape(-1)[::PAGE_BYTES].sum())


def descendants() -> list[int]:
    """Return the ids of all processes below this one."""
    parents: dict[int, int] = {}
    for process in all_processes():
        if fields := state_of(process):
            parents[process] = int(fields[1])
    below = found = {os.getpid()}
    while found:
        found = {child for child, parent in parents.items() if parent in below and child not in below}
        below = below | found
    return sorted(below - {os.getpid()})


def cpu_seconds(processes: list[int]) -> float:
    """Sum user and system time of the processes, in the kernel's ticks of 10 ms."""
    ticks = 0
    for process in processes:
        ticks += sum(map(int, state_of(process)[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def busy_seconds(cores: set[int]) -> float:
    """Sum the time in which the cores ran any process, or were taken away by the hypervisor; in ticks of 10 ms.

    Time in interrupts is left out: what a network connection costs there belongs to the system that is measured.
    """
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in {f"cpu{core}" for core in cores}:
            user, nice, system, steal = (int(fields[column]) for column in (0, 1, 2, 7))
            ticks += user + nice + system + steal
    return ticks / os.sysconf("SC_CLK_TCK")
