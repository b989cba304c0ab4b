"""A training program whose costs are sleeps: an ordinary DataLoader loop that has never heard of hetstream.

Started by `benchmarks/elastic.py` and `tests/cluster/test_elastic_job.py` inside Slurm jobs. CPU work is emulated by
sleeping, so that eight data workers "compute" at once on a machine with two cores. Writes a line for each step:
time (s since 1970), time waited for the batch (s), epoch, sample ids.

Usage: elastic_train.py OUT --make-s S --step-s S[,S...] [--period S] [--lock FILE] [--far-s S]
                        (--epochs N | --seconds S)
"""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
import time

import torch
from torch.utils.data import DataLoader, Dataset

BATCH = 4


class Costly(Dataset):  # type: ignore[type-arg]
    """Samples that take time to make; with `lock`, one at a time on the whole cluster, as from one slow disk."""

    def __init__(self, num_samples: int, sample_s: float, lock: str, far_s: float = 0.0) -> None:
        self.num_samples, self.sample_s, self.lock = num_samples, sample_s, lock
        self.host, self.far_s = socket.gethostname(), far_s

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.lock:
            with open(self.lock, "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                time.sleep(self.sample_s)
        else:
            time.sleep(self.sample_s + (self.far_s if socket.gethostname() != self.host else 0.0))
        return torch.full((64,), float(index)), index


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--make-s", type=float, required=True)
    parser.add_argument("--step-s", required=True, help="in turn, each for --period seconds")
    parser.add_argument("--period", type=float, default=60.0)
    parser.add_argument("--lock", default="")
    parser.add_argument("--far-s", type=float, default=0.0, help="more for a step that is made on another host")
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    torch.manual_seed(1)
    steps_s = [float(word) for word in args.step_s.split(",")]
    dataset = Costly(args.num_steps * BATCH, args.make_s / BATCH, args.lock, args.far_s / BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=1)
    began = time.monotonic()
    with open(args.out, "w", buffering=1) as out:
        for epoch in range(args.epochs):
            asked = time.monotonic()
            for _, ids in loader:
                now = time.monotonic()
                print(time.time(), f"{now - asked:.4f}", epoch, ",".join(map(str, ids.tolist())), file=out)
                if os.path.exists(f"{args.out}.stop") or now - began > args.seconds:
                    return
                time.sleep(steps_s[int((now - began) / args.period) % len(steps_s)])
                asked = time.monotonic()


if __name__ == "__main__":
    main()
