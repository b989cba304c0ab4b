"""One client for the benchmark of comparisons: epochs of an unmodified DataLoader, and the CPU time of its trainer.

Called with `compared`, `not compared` or `torch`. The trainer's CPU time is that of its process and of its own
children: torch's workers, or those that make steps to compare.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.clients.service import running, wait_for_data_workers

BATCH_SIZE = 32
WARMUP_PASSES = 2  # with the comparisons of the first pass


class Samples(Dataset[Any]):
    """Samples of 64 KiB that take about as long as a small picture."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return self.steps * BATCH_SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(16_384).sort().values


def train(batch: torch.Tensor, step_s: float) -> None:
    """Compute for as long as a training step takes."""
    until = time.thread_time() + step_s
    while time.thread_time() < until:
        batch.sum()


def cpu_s() -> float:
    """CPU time of this process and of its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measure(options: dict[str, Any]) -> float:
    """CPU milliseconds of a pass, beside the training itself."""
    loader: Any = DataLoader(Samples(options["steps"]), BATCH_SIZE, num_workers=1)
    passes = options["passes"]
    begun = 0.0
    for number in range(WARMUP_PASSES + passes):
        if number == WARMUP_PASSES:
            begun = cpu_s()
        batches = iter(loader)
        if number == 0 and "_hetstream" in vars(loader):
            wait_for_data_workers(vars(loader)["_hetstream"].connection, 1)
        for batch in batches:
            train(batch, options["step_s"])
        del batches
    connection = vars(loader)["_hetstream"].connection if "_hetstream" in vars(loader) else None
    if connection is not None and connection.stats()["local_steps"]:
        raise RuntimeError(f"the loader made batches in process: {connection.stats()}")
    return 1000 * ((cpu_s() - begun) / passes - options["steps"] * options["step_s"])


def main() -> None:
    """Measure every case of the request with the system of the first argument."""
    request, system = json.loads(sys.argv[-1]), sys.argv[1]
    torch.set_num_threads(1)
    with nullcontext("") if system == "torch" else running(processes=1, cores=os.sched_getaffinity(0)) as service:
        if service:
            from hetstream.mpi_dataworkers.hook import patch
            from hetstream.mpi_dataworkers.loader.canary import Canary

            os.environ["HETSTREAM_SERVICE"] = service
            patch.install()
            if system == "not compared":
                Canary.steps_of_pass = lambda *_: []  # type: ignore[method-assign]
                Canary.num_to_prove = lambda *_: 0  # type: ignore[method-assign]
        for case, options in request["cases"].items():
            trained_ms = 1000 * options["steps"] * options["step_s"]
            pass_ms = measure(options)
            sample = {"case": case, "cpu_ms_per_pass": pass_ms, "cpu_share_of_trainer": 1 + pass_ms / trained_ms}
            print(json.dumps(sample), flush=True)


if __name__ == "__main__":
    main()
