"""An ordinary training program, as a user writes it; it has never heard of hetstream.

Usage: train.py LEDGER. Writes one line for each batch that it trains on: epoch, sample ids, SHA-256 of the bytes.
"""

from __future__ import annotations

import hashlib
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

EPOCHS = 2
SAMPLES = 640
BATCH = 16


class Pictures(Dataset):
    """Samples with random augmentation: the same bytes only come out of the same seeds."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.01)  # a decode
        return torch.full((8, 8), float(index)) + torch.rand(8, 8), index


def main() -> None:
    torch.manual_seed(1234)
    loader = DataLoader(Pictures(), batch_size=BATCH, shuffle=True, num_workers=2)
    model = torch.nn.Linear(64, 1)
    with open(sys.argv[1], "w", buffering=1) as ledger:
        for epoch in range(EPOCHS):
            for images, ids in loader:
                model(images.flatten(1)).sum().backward()
                digest = hashlib.sha256(images.numpy().tobytes()).hexdigest()
                print(epoch, ",".join(map(str, ids.tolist())), digest, file=ledger)
    print("trained", model.weight.grad.abs().sum().item())


if __name__ == "__main__":
    main()
