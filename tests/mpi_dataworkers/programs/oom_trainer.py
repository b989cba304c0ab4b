"""A training program that has more memory than its data workers, and a sample that takes more than is left.

oom_trainer.py GROUP: its memory control group, whose limit it lowers when all is loaded.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

GROUP = Path(sys.argv[1])


class Greedy(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 41:
            while not Path("lowered").exists():  # whoever is ahead
                time.sleep(0.01)
            np.ones(512 << 20, dtype=np.uint8)
        return torch.tensor(index)


def lower_limit(num_bytes):
    names = ("memory.current", "memory.max")
    if not (GROUP / names[0]).exists():
        names = ("memory.usage_in_bytes", "memory.limit_in_bytes")
    (GROUP / names[1]).write_text(str(int((GROUP / names[0]).read_text()) + num_bytes))


if __name__ == "__main__":
    mine = np.ones(400 << 20, dtype=np.uint8)
    seen = []
    try:
        for step, batch in enumerate(DataLoader(Greedy(), 4, num_workers=2)):
            if step == 0:
                lower_limit(250 << 20)
                Path("lowered").touch()
            seen += batch.tolist()
    except RuntimeError as error:
        print(f"{len(seen)} samples, then: {str(error).splitlines()[0]}", mine[-1])
