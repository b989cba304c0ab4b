"""Every random transform has a generator of its own, as in MONAI.

`worker_init_fn` walks over the dataset and seeds them from the worker's seed; a loader without workers seeds them when
it is made. The program says how many different values its augmentation has had: equal ones in two workers or two
epochs are a mistake that trains silently.
"""

import ledger
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

MAX_SEED = 2**32 - 1


class Randomizable:
    R = np.random.RandomState()

    def set_random_state(self, seed):
        self.R = np.random.RandomState(seed % MAX_SEED)


class Shift(Randomizable):
    def __call__(self, values):
        return values + self.R.uniform()


class Scale(Randomizable):
    def __call__(self, values):
        return values * self.R.uniform(1, 2)


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, values):
        for transform in self.transforms:
            values = transform(values)
        return values


class Volumes(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return self.transform(np.arange(1, 5) * (index + 1.0)), index


def set_random_states(value, seed):
    if isinstance(value, (list, tuple)):
        for item in value:
            seed = set_random_states(item, seed)
        return seed
    if hasattr(value, "set_random_state"):
        value.set_random_state(seed)
        return seed + 1
    for attribute in getattr(value, "__dict__", {}).values():
        seed = set_random_states(attribute, seed)
    return seed


def init_worker(worker_id):
    info = get_worker_info()
    assert info.id == worker_id
    set_random_states(info.dataset, info.seed)


class SeedingLoader(DataLoader):
    def __init__(self, dataset, num_workers, **options):
        if num_workers == 0:
            first_seed = torch.default_generator.initial_seed()
            set_random_states(dataset, int(torch.empty((), dtype=torch.int64).random_()))
            torch.default_generator.manual_seed(first_seed)
        super().__init__(dataset, num_workers=num_workers, worker_init_fn=init_worker, **options)


def main():
    ledger.seed(4)
    for num_workers in (2, 0):
        loader = SeedingLoader(Volumes(Compose(Scale(), Shift())), num_workers, batch_size=4, shuffle=True)
        augmentations = []
        for _ in range(2):
            for values, ids in loader:
                ledger.step(f"{num_workers} workers", ids, values)
                augmentations += (values[:, 1] / values[:, 0]).tolist()
        ledger.fact("different augmentations", len(set(augmentations)))
    ledger.end()


if __name__ == "__main__":
    main()
