"""batchgenerators' own augmenters in a program that knows nothing of hetstream; prints what they gave.

python augmenters.py deterministic | two-ranks STORE RANK
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed
from batchgenerators.dataloading.data_loader import DataLoader
from batchgenerators.dataloading.multi_threaded_augmenter import MultiThreadedAugmenter
from batchgenerators.dataloading.nondet_multi_threaded_augmenter import NonDetMultiThreadedAugmenter

# Seconds in which data workers may come to where the program is.
_BREAK_S = float(os.environ.get("BREAK_S", "0"))


class Numbers(DataLoader):  # type: ignore[misc]
    def __init__(self, length: int, batch_size: int, processes: int, **options: Any) -> None:
        super().__init__(None, batch_size, processes, seed_for_shuffle=7, return_incomplete=True, **options)
        self.indices = [*range(length)]

    def generate_train_batch(self) -> dict[str, Any]:
        indices = self.get_indices()
        data = np.array(indices, np.float32)[:, None] + np.random.rand()
        return {"data": data, "noise": torch.rand(2), "keys": [str(index) for index in indices]}


def noisy(**batch: Any) -> dict[str, Any]:
    batch["data"] = batch["data"] + np.random.normal(size=batch["data"].shape)
    return batch


def digest_of(batch: dict[str, Any]) -> str:
    seen = batch["data"].tobytes(), batch["noise"].numpy().tobytes(), batch["keys"]
    return hashlib.sha256(pickle.dumps(seen)).hexdigest()[:12]


def deterministic() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    for length, batch_size, processes in ((34, 4, 3), (25, 3, 2), (10, 4, 4), (9, 3, 1)):
        loader, seeds = Numbers(length, batch_size, processes), [100 + number for number in range(processes)]
        augmenter = MultiThreadedAugmenter(loader, noisy, processes, 2, seeds)
        for epoch in range(14):
            print(length, epoch, *(digest_of(batch) for batch in augmenter), flush=True)
            if epoch == 6:
                time.sleep(_BREAK_S)
            if epoch == 10:
                augmenter.restart()
        augmenter._finish()
        assert not multiprocessing.active_children()
    print(np.random.rand(), torch.rand(1).item())


def two_ranks(store: str, rank: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    augmenter = NonDetMultiThreadedAugmenter(Numbers(50, 2, 2, infinite=True), noisy, 2, 4)
    for number in range(60):
        batch = next(augmenter)
        total = torch.from_numpy(batch["data"]).sum()
        torch.distributed.all_reduce(total)
        print(number, digest_of(batch), total.item(), flush=True)
        time.sleep(_BREAK_S if number == 30 else 0)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "deterministic":
        deterministic()
    else:
        two_ranks(sys.argv[2], int(sys.argv[3]))
