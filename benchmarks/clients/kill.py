"""SIGKILL of one of two data workers in mid-epoch: what is lost, what comes twice, how long the trainer waits.

Called with `hetstream` or `torch`. `tf_data_kill.py` does the same with tf.data service.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.clients.prebuilt import first
from benchmarks.clients.service import running, streaming
from benchmarks.clients.window import descendants
from benchmarks.processes import command_line
from hetstream import DataLoader

WORKERS = 2


class Numbered(torch.utils.data.Dataset[torch.Tensor]):
    """A sample is a batch that says which it is; making it takes `sleep_s`."""

    def __init__(self, length: int, sleep_s: float) -> None:
        self.length = length
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_s)
        return torch.tensor([index])


def watch(case: str, length: int, batches: Iterator[int], kill: Callable[[], None]) -> None:
    """Read the epoch, kill after a quarter of it, print the sample.

    Args:
        case: name printed with the sample.
        length: batches of the epoch, numbered from 0.
        batches: the numbers as they come.
        kill: kills one data worker.
    """
    seen: list[int] = []
    waits: list[float] = []
    before = time.perf_counter()
    try:
        for number in batches:
            now = time.perf_counter()
            waits.append(now - before)
            seen.append(number)
            if len(seen) == length // 4:
                kill()
            before = time.perf_counter()
    except RuntimeError as error:
        sys.stderr.write(f"after {len(seen)} batches: {str(error).splitlines()[0]}\n")
    after = waits[length // 4 :]
    sample = {
        "case": case,
        "lost": float(length - len(set(seen))),
        "duplicated": float(len(seen) - len(set(seen))),
        "stall_s": max(after, default=0.0),
    }
    print(json.dumps(sample), flush=True)


def is_data_worker(process: int) -> bool:
    """Whether a process is one that makes batches: a child of `hetstream internal worker`."""
    return b"\0worker\0" in command_line(process)


def kill_last(is_victim: Callable[[int], bool]) -> None:
    """SIGKILL the youngest process below this one: the oldest data worker process is the parent that replaces it."""
    os.kill([process for process in descendants() if is_victim(process)][-1], signal.SIGKILL)


def main() -> None:
    """Measure every case of the request."""
    request: dict[str, Any] = json.loads(sys.argv[-1])
    length, sleep_s = request["length"], request["sleep_s"]
    torch.set_num_threads(1)
    dataset = Numbered(length, sleep_s)
    for case in request["cases"]:
        if sys.argv[1] == "torch":
            loader = torch.utils.data.DataLoader(dataset, batch_size=1, collate_fn=first, num_workers=WORKERS)
            watch(case, length, map(int, loader), partial(kill_last, lambda _process: True))
            continue
        with running(processes=WORKERS, cores=os.sched_getaffinity(0)) as service:
            streamed = DataLoader(dataset, batch_size=1, collate_fn=first, service=service, job_name="kill")
            with streaming(streamed, processes=WORKERS) as passing:
                watch(case, length, map(int, passing), partial(kill_last, is_data_worker))


if __name__ == "__main__":
    main()
