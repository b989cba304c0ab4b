"""A training program that a test leads: it waits at gates, and data workers of a host can be held at a sample.

Usage: train_gated.py DIRECTORY [SAMPLES [SECONDS_PER_SAMPLE]]. In the directory:

    ledger-RANK       one line for each batch that a rank trains on: step, sample ids, SHA-256 of the bytes
    at-N.RANK         made when a rank has trained on N batches, for each N of GATES; it goes on when gate-N is there
    stop              when it is there, training ends after the batch
    hold-HOST         while it is there, a process that begins a sample on HOST makes held-HOST-PID and waits
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

GATES = (10, 60)
SAMPLES = 640
DECODE_S = 0.002
BATCH = 8
LOOK_S = 0.01


class Pictures(Dataset):
    """Samples with random augmentation: the same bytes only come out of the same seeds."""

    def __init__(self, directory: Path, num_samples: int, decode_s: float) -> None:
        self.directory = directory
        self.num_samples = num_samples
        self.decode_s = decode_s

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        host = os.environ.get("SLURMD_NODENAME", "")
        hold = self.directory / f"hold-{host}"
        if hold.exists():
            (self.directory / f"held-{host}-{os.getpid()}").touch()
            while hold.exists():
                time.sleep(LOOK_S)
        time.sleep(self.decode_s)
        return torch.full((8, 8), float(index)) + torch.rand(8, 8), index


def main() -> None:
    directory = Path(sys.argv[1])
    num_samples = int(sys.argv[2]) if len(sys.argv) > 2 else SAMPLES
    decode_s = float(sys.argv[3]) if len(sys.argv) > 3 else DECODE_S
    rank = int(os.environ.get("SLURM_PROCID", 0))
    torch.manual_seed(1234)
    dataset = Pictures(directory, num_samples, decode_s)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=2)
    with open(directory / f"ledger-{rank}", "w", buffering=1) as ledger:
        for step, (images, ids) in enumerate(loader):
            if step in GATES:
                (directory / f"at-{step}.{rank}").touch()
                while not (directory / f"gate-{step}").exists():
                    time.sleep(LOOK_S)
            digest = hashlib.sha256(images.numpy().tobytes()).hexdigest()
            print(step, ",".join(map(str, ids.tolist())), digest, file=ledger)
            if (directory / "stop").exists():
                break
    print("trained")


if __name__ == "__main__":
    main()
