"""The program changes its objects while a pass goes on, or between those of kept workers, and the loader goes local."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


class Changing(Dataset[Any]):
    """Samples with an attribute that the loop sets, and with memory that it writes into, which makes a loader local."""

    def __init__(self, length: int) -> None:
        self.level, self.length, self.names = 0, length, list(range(length))
        self.flag = torch.zeros(1).share_memory_()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index, self.level, int(self.flag), self.names[index]


def in_a_pass(kept: bool) -> None:
    data = Changing(240)
    loader = DataLoader(data, batch_size=2, num_workers=2, persistent_workers=kept)
    for epoch in range(2):
        for step, (index, level, flag, _) in enumerate(loader):
            data.level = 1000 * epoch + step
            if step == 90:
                data.flag.add_(1)
            # What torch's workers have made ahead shows no write into shared memory; how much that is, varies. And the
            # trainer looks at that memory less often where a look takes long.
            print(epoch, step, index.tolist(), level.tolist(), flag.tolist() if not 80 < step < 115 else "")


def grown() -> None:
    data = Changing(160)
    loader = DataLoader(data, batch_size=2, shuffle=False, num_workers=2, persistent_workers=True)
    for _ in range(2):
        for index, level, _, name in loader:
            print(index.tolist(), level.tolist(), name.tolist())
        data.length, data.level = 170, 7
        data.names.extend(range(160, 170))


def none_is_left() -> None:
    import multiprocessing

    for kept in (False, True):
        loader = DataLoader(Changing(64), batch_size=2, num_workers=2, persistent_workers=kept)
        steps = iter(loader)
        next(steps)
        print("under way", len(multiprocessing.active_children()) >= 2)
        del steps, loader
        print("dropped", multiprocessing.active_children())
    for _ in DataLoader(Changing(8), batch_size=2, num_workers=2):
        pass
    print("at an end", multiprocessing.active_children())


if __name__ == "__main__":
    {
        "fresh": lambda: in_a_pass(False),
        "kept": lambda: in_a_pass(True),
        "grown": grown,
        "left": none_is_left,
    }[sys.argv[1]]()
