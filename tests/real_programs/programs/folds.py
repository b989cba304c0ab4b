"""Cross-validation with thirty folds: sixty loaders over parts of one dataset, all alive to the end."""

import ledger
import torch
from torch.utils.data import DataLoader, Dataset, Subset

NUM_FOLDS = 30


class Table(Dataset):
    def __init__(self):
        self.rows = torch.arange(60 * 4.0).reshape(60, 4)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index] + torch.rand(4), index


def main():
    ledger.seed(7)
    table = Table()
    folds = torch.randperm(len(table)).reshape(NUM_FOLDS, -1)
    loaders = []
    for number in range(NUM_FOLDS):
        others = folds[torch.arange(NUM_FOLDS) != number].flatten()[:20]
        training = DataLoader(Subset(table, others.tolist()), batch_size=5, shuffle=True, num_workers=1)
        validation = DataLoader(Subset(table, folds[number].tolist()), batch_size=2, num_workers=1)
        loaders.append((training, validation))
    for epoch in range(2):
        for number, (training, validation) in enumerate(loaders):
            if epoch == 1 and number >= 3:  # most folds are trained once
                break
            for phase, loader in (("training", training), ("validation", validation)):
                for rows, ids in loader:
                    ledger.step(f"fold {number}, {phase}, epoch {epoch}", ids, rows)
    ledger.end()


if __name__ == "__main__":
    main()
