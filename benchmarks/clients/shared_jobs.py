"""K trainers of different jobs read one pipeline from one hetstream service with one data worker process.

Prints how often samples were computed and what the data worker and the dispatcher spent, in one epoch of each trainer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.clients.service import running, wait_for_data_workers
from benchmarks.clients.window import busy_seconds, cpu_seconds, descendants
from hetstream import DataLoader

BATCH_SIZE = 16
IMAGE_SHAPE = (3, 224, 224)


class Images(Dataset[Any]):
    """Samples of the size of an image, whose transform spins or sleeps; each call is written down in a file."""

    def __init__(self, num_samples: int, spin_s: float, sleep_s: float, log: Path) -> None:
        self.num_samples = num_samples
        self.spin_s = spin_s
        self.sleep_s = sleep_s
        self.log = log

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        descriptor = os.open(self.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(descriptor, b".")
        os.close(descriptor)
        end = time.thread_time() + self.spin_s
        while time.thread_time() < end:
            pass
        time.sleep(self.sleep_s)
        return torch.full(IMAGE_SHAPE, index % 251, dtype=torch.uint8)


def epoch(jobs: list[Any]) -> None:
    """Read one epoch in every job, each in a thread of its own, as fast as batches come."""

    def read(batches: Any) -> None:
        for batch in batches:
            batch[0, 0, 0, 0].item()

    threads = [threading.Thread(target=read, args=(one,)) for one in jobs]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


def measure(case: str, options: dict[str, Any], num_jobs: int, sharing: str | None, cores: set[int]) -> None:
    """Run one case and print its sample."""
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "computed"
        service = stack.enter_context(running(processes=1, cores=cores))
        dataset = Images(options["samples"], options["spin_s"], options["sleep_s"], log)
        loaders = [
            DataLoader(dataset, BATCH_SIZE, shuffle=True, service=service, job_name=f"job-{n}", sharing=sharing)  # type: ignore[arg-type]
            for n in range(num_jobs)
        ]
        for loader in loaders:
            stack.enter_context(loader)
            wait_for_data_workers(loader, 1)
        processes = descendants()
        computed, cpu_s = log.stat().st_size if log.exists() else 0, cpu_seconds(processes)
        busy_s, started = busy_seconds(cores), time.perf_counter()
        epoch(loaders)
        seconds = time.perf_counter() - started
        spent_s = cpu_seconds(processes) - cpu_s
        others_s = busy_seconds(cores) - busy_s - spent_s
        sample = {
            "case": case,
            "computed": (log.stat().st_size - computed) / options["samples"],
            "worker_cpu_s": spent_s,
            "batches_per_s": num_jobs * len(loaders[0]) / seconds,
            "repeated": float(sum(loader.stats()["repeated_steps"] for loader in loaders)),
        }
        if len(cores) == 1 and cores != os.sched_getaffinity(0):
            sample["other_load"] = max(0.0, others_s) / seconds
        if any(loader.stats()["local_steps"] for loader in loaders):
            raise RuntimeError("a loader made batches in process")
        print(json.dumps(sample), flush=True)


def main() -> None:
    """Measure every case of the request."""
    num_jobs, sharing, request = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[-1])
    os.sched_setaffinity(0, {request["client_core"]})
    torch.set_num_threads(1)
    for case, options in request["cases"].items():
        measure(case, options, num_jobs, sharing if sharing != "none" else None, {request["producer_core"]})


if __name__ == "__main__":
    main()
