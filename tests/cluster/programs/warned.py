"""A training program that goes on after every signal, until a file named stop is there.

Usage: warned.py DIRECTORY. `signals` there gets the number of each signal, `batches` a line for each batch.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


def main() -> None:
    directory = Path(sys.argv[1])
    signals, batches = ((directory / name).open("a", buffering=1) for name in ("signals", "batches"))
    with signals, batches:
        for number in (1, 10, 12, 15, 34):
            signal.signal(number, lambda number, _: print(number, file=signals))
        for batch in DataLoader(Numbers(), batch_size=10, num_workers=1):
            print(batch[0].item(), file=batches)
            time.sleep(0.05)
            if (directory / "stop").exists():
                break


if __name__ == "__main__":
    main()
