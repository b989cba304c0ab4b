"""An ordinary training program, as a user writes it; it has never heard of hetstream.

Usage: train.py LEDGER, in which %r stands for the rank. Under a launcher with several ranks it trains with
DistributedDataParallel. Writes one line for each batch that it trains on: epoch, sample ids, SHA-256 of the bytes.
DECODE_S in the environment is how long a sample takes; runs that are only compared with take no time for that.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

import torch
import torch.distributed
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS = 2
SAMPLES = 640
BATCH = 16
DECODE_S = float(os.environ.get("DECODE_S", "0.006"))


class Pictures(Dataset):
    """Samples with random augmentation: the same bytes only come out of the same seeds."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(DECODE_S)
        return torch.full((8, 8), float(index)) + torch.rand(8, 8), index


def main() -> None:
    torch.manual_seed(1234)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dataset, sampler = Pictures(), None
    model: torch.nn.Module = torch.nn.Linear(64, 1)
    if size > 1:
        torch.distributed.init_process_group("gloo")
        sampler = DistributedSampler(dataset, shuffle=True)
        model = torch.nn.parallel.DistributedDataParallel(model)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=sampler is None, sampler=sampler, num_workers=2)
    with open(sys.argv[1].replace("%r", str(rank)), "w", buffering=1) as ledger:
        for epoch in range(EPOCHS):
            if sampler is not None:
                sampler.set_epoch(epoch)
            for images, ids in loader:
                model(images.flatten(1)).sum().backward()
                digest = hashlib.sha256(images.numpy().tobytes()).hexdigest()
                print(epoch, ",".join(map(str, ids.tolist())), digest, file=ledger)
    print("trained", sum(weights.grad.abs().sum().item() for weights in model.parameters()))
    if size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
