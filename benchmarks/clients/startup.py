"""Client of the startup benchmark: seconds to the first batches, and memory of the processes that make them.

The dataset is a list of paths (str), which costs a pickle for each process that is spawned. For hetstream the service
runs before; two loaders follow one another on it: the second one finds the dataset in the data worker.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

from benchmarks.clients.service import running, wait_for_data_workers
from benchmarks.clients.window import Meter
from benchmarks.processes import children_of, command_line

BATCH_SIZE = 256
EARLY_STEPS = 50  # after which memory is read for the first time
STEPS_LEFT = 20  # when memory is read again: torch's processes end with the last batch
SECOND = "hetstream, second loader"


class Paths(torch.utils.data.Dataset[int]):
    """Sample i is the length of the i-th path."""

    def __init__(self, length: int) -> None:
        self.paths = [f"/data/images/train/class_{i % 1000:04d}/image_{i:08d}.jpg" for i in range(length)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        return len(self.paths[index])


def pss_bytes(pid: int) -> int:
    """Memory of a process and its descendants; what processes share is divided among them (proc(5))."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    own = next(int(line.split()[1]) << 10 for line in rollup if line.startswith("Pss:"))
    return own + sum(map(pss_bytes, children_of(pid)))


def makers_pss_bytes() -> int:
    """Memory of this process's descendants that make batches: all but the dispatcher."""
    return sum(pss_bytes(child) for child in children_of(os.getpid()) if b"dispatcher" not in command_line(child))


def measure(num_steps: int, start: Callable[[], Any], is_served: Callable[[], bool]) -> dict[str, float]:
    """The figures of one loader.

    Args:
        num_steps: of the epoch.
        start: makes the loader and begins to iterate; the time counts from its call.
        is_served: whether the batch received last came from another process.
    """
    meter, started = Meter(os.sched_getaffinity(0)), time.perf_counter()
    batches = start()
    next(batches)
    taken, first_s = 1, time.perf_counter() - started
    while not is_served():
        next(batches)
        taken += 1
    figures = {"first_batch_s": first_s, "first_served_s": time.perf_counter() - started}
    figures["other_load"] = meter.read().other_load
    for _ in range(EARLY_STEPS):
        next(batches)
    taken += EARLY_STEPS
    figures["early_pss_mb"] = makers_pss_bytes() / 1e6
    for _ in range(num_steps - STEPS_LEFT - taken):
        next(batches)
    figures["late_pss_mb"] = makers_pss_bytes() / 1e6
    return figures


def of_torch(dataset: Paths, processes: int, context: str) -> dict[str, float]:
    """torch's DataLoader with worker processes."""

    def start() -> Any:
        return iter(
            torch.utils.data.DataLoader(
                dataset, BATCH_SIZE, shuffle=True, num_workers=processes, multiprocessing_context=context
            )
        )

    return measure(len(dataset) // BATCH_SIZE, start, lambda: True)


def of_hetstream(dataset: Paths, service: str) -> dict[str, float]:
    """A loader on a service whose data workers are there."""
    from hetstream import DataLoader  # here: torch's processes are to hold torch alone

    loaders: list[Any] = []
    num_local = -1

    def start() -> Any:
        loaders.append(DataLoader(dataset, BATCH_SIZE, shuffle=True, service=service))
        return iter(loaders[0])

    def is_served() -> bool:
        nonlocal num_local
        before, num_local = num_local, int(loaders[0].stats()["local_steps"])
        return num_local == before

    try:
        return measure(len(dataset) // BATCH_SIZE, start, is_served)
    finally:
        for loader in loaders:
            loader.close()


def samples_of_hetstream(dataset: Paths, processes: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Two loaders one after the other: the second one finds the dataset in the data worker."""
    from hetstream import DataLoader

    with running(processes, os.sched_getaffinity(0)) as service:
        other: DataLoader[Any] = DataLoader(Paths(BATCH_SIZE), BATCH_SIZE, service=service)
        with other:
            iter(other)
            wait_for_data_workers(other, processes)
        for suffix in ("", "|, second loader"):
            yield suffix, of_hetstream(dataset, service)


def main() -> None:
    """Measure every case of the request with the system that comes first."""
    request = json.loads(sys.argv[-1])
    torch.set_num_threads(1)
    dataset = Paths(request["paths"])
    for case, options in request["cases"].items():
        processes = options["processes"]
        if sys.argv[1] == "hetstream":
            for suffix, figures in samples_of_hetstream(dataset, processes):
                print(json.dumps({"case": case + suffix, **figures}), flush=True)
        else:
            print(json.dumps({"case": case, **of_torch(dataset, processes, sys.argv[1])}), flush=True)


if __name__ == "__main__":
    main()
