"""One of two programs on one service: each has a module `dataset` and a file `rows.txt` of its own beside it.

Started in its own folder; the names are the same in the other one.
"""

import os
import sys
from pathlib import Path

import ledger
from torch.utils.data import DataLoader

sys.path.insert(0, os.getcwd())

from dataset import Rows


def main():
    ledger.seed(10)
    loader = DataLoader(Rows(Path("rows.txt")), batch_size=4, shuffle=True, num_workers=2)
    for epoch in range(3):
        for values, ids in loader:
            ledger.step(f"epoch {epoch}", ids, values)
    ledger.end()


if __name__ == "__main__":
    main()
