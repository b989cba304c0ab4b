"""Active learning: the pool of labelled samples grows between epochs, so the length of the dataset changes."""

import ledger
from torch.utils.data import DataLoader


def main():
    ledger.seed(9)
    pool = list(range(20))
    loader = DataLoader(pool, batch_size=4, shuffle=True, num_workers=1)
    for round_number in range(3):
        for ids in loader:
            ledger.step(f"round {round_number}", ids, ids)
        pool += range(100 * round_number, 100 * round_number + 6)
    ledger.end()


if __name__ == "__main__":
    main()
