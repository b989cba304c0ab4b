"""A validation loop inside the training loop: the training pass stays open, and validation is often cut short.

Ends with an exit code of its own, as programs do that stop early.
"""

import itertools
import random
import sys

import ledger
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

STOPPED_EARLY = 3


class Rows(Dataset):
    def __init__(self, first, num_rows, noise):
        self.first, self.num_rows, self.noise = first, num_rows, noise

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        row = torch.full((16,), float(self.first + index))
        return row + self.noise * torch.randn(16) + self.noise * random.random(), self.first + index


def main():
    ledger.seed(6)
    training = DataLoader(Rows(0, 96, 0.1), batch_size=4, shuffle=True, num_workers=2)
    some = Rows(1000, 40, 0.1)
    validation = DataLoader(some, batch_size=8, sampler=RandomSampler(some, num_samples=24), num_workers=2)
    for epoch in range(2):
        for number, (rows, ids) in enumerate(training):
            ledger.step(f"training, epoch {epoch}", ids, rows)
            random.random()  # the training loop draws, too
            if number % 6 == 5:
                at_most = None if number == 5 else 2
                for checked, their_ids in itertools.islice(validation, at_most):
                    ledger.step(f"validation after step {number}", their_ids, checked)
            if epoch == 1 and number == 13:
                ledger.end()
                sys.exit(STOPPED_EARLY)


if __name__ == "__main__":
    main()
