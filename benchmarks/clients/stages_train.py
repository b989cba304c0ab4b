"""A training program with two stages of preprocessing whose costs are sleeps: one on CPUs, one on an emulated GPU.

Started by `benchmarks/stages.py` and `tests/cluster/test_stages_job.py`. Writes a line for each step, as
`elastic_train.py` does: time (s since 1970), time waited for the batch (s), epoch, sample ids. Beside it, in OUT.gpu, a
line for each process that ran the second stage: Slurm job, its GPUs as Slurm numbers them, host, process.

Modes: `local` loads in processes of the trainer and runs the second stage in the training step; `single` runs both
stages in data workers, `multi` each on data workers of its own.

Usage: stages_train.py OUT --mode local|single|multi --cpu-s S --gpu-s S --step-s S [--seconds S]
"""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
import time
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.data import Dataset

from hetstream import DataLoader

BATCH, _LOCAL_PROCESSES = 4, 8


class Costly(Dataset):  # type: ignore[type-arg]
    """Samples that take a CPU time to make."""

    def __init__(self, num_samples: int, sample_s: float) -> None:
        self.num_samples, self.sample_s = num_samples, sample_s

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.sample_s)
        return torch.full((64,), float(index)), index


class OnGpu:
    """The second stage: takes its time on a GPU, which all processes of a data worker have together.

    Args:
        seconds: for a batch.
        out: where it is written down who ran it.
    """

    def __init__(self, seconds: float, out: str) -> None:
        self.seconds, self.out, self.is_written = seconds, out, False

    def __call__(self, batch: Any) -> Any:
        job = os.environ.get("SLURM_JOB_ID", "")
        if not self.is_written:
            self.is_written = True
            words = (job or "-", os.environ.get("SLURM_JOB_GPUS") or "-", socket.gethostname(), str(os.getpid()))
            with open(f"{self.out}.gpu", "a") as out:
                out.write(" ".join(words) + "\n")
        with ExitStack() as held:
            if job:
                data_worker = f"{job}.{os.environ.get('SLURM_STEP_ID', 'batch')}"
                gpu = held.enter_context(open(f"{self.out}.lock-{data_worker}", "w"))
                fcntl.flock(gpu, fcntl.LOCK_EX)
            time.sleep(self.seconds)
        return batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--mode", choices=("local", "single", "multi"), required=True)
    parser.add_argument("--cpu-s", type=float, required=True)
    parser.add_argument("--gpu-s", type=float, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--num-steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    torch.manual_seed(1)
    dataset = Costly(args.num_steps * BATCH, args.cpu_s / BATCH)
    on_gpu = OnGpu(args.gpu_s, os.path.abspath(args.out))
    options: dict[str, Any] = {"num_workers": _LOCAL_PROCESSES, "service": None}
    if args.mode != "local":
        options = {"batch_stage" if args.mode == "single" else "gpu_stage": on_gpu}
    step_s = args.step_s + (args.gpu_s if args.mode == "local" else 0.0)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, **options)
    began = time.monotonic()
    with open(args.out, "w", buffering=1) as out:
        for epoch in range(1_000_000):
            asked = time.monotonic()
            for _, ids in loader:
                now = time.monotonic()
                print(time.time(), f"{now - asked:.4f}", epoch, ",".join(map(str, ids.tolist())), file=out)
                if os.path.exists(f"{args.out}.stop") or now - began > args.seconds:
                    return
                time.sleep(step_s)
                asked = time.monotonic()


if __name__ == "__main__":
    main()
