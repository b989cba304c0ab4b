"""A loader whose iterator never ends, as Ultralytics' InfiniteDataLoader.

The iterator is made in the constructor and serves all epochs; `reset` makes a new one, after the program has switched
off an augmentation of the dataset for the last epochs. In which order the samples come then depends on how far torch
had drawn from the sampler ahead.
"""

import random

import ledger
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class RepeatSampler:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class InfiniteLoader(DataLoader):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        object.__setattr__(self, "batch_sampler", RepeatSampler(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)

    def __del__(self):
        if hasattr(self.iterator, "_workers"):
            for process in self.iterator._workers:
                if process.is_alive():
                    process.terminate()
            self.iterator._shutdown_workers()

    def reset(self):
        self.iterator = self._get_iterator()


class Images(Dataset):
    mosaic = True

    def __len__(self):
        return 80

    def __getitem__(self, index):
        image = np.full((3, 8, 8), index, dtype=np.float32) + np.random.normal(size=(3, 1, 1)).astype(np.float32)
        if self.mosaic:
            image[:, 4:] = random.randrange(len(self))
        return {"image": torch.from_numpy(image), "index": index}

    @staticmethod
    def collate_fn(samples):
        return {name: torch.stack([torch.as_tensor(one[name]) for one in samples]) for name in samples[0]}


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def main():
    ledger.seed(3)
    dataset = Images()
    loader = InfiniteLoader(
        dataset,
        batch_size=8,
        shuffle=True,
        num_workers=2,
        prefetch_factor=4,
        collate_fn=dataset.collate_fn,
        worker_init_fn=seed_worker,
        generator=torch.Generator().manual_seed(6148914691236517205),
    )
    for epoch in range(4):
        if epoch == 2:
            dataset.mosaic = False
            loader.reset()
        for batch in loader:
            ledger.step(f"epoch {epoch}", batch["index"], batch)
            if not dataset.mosaic:
                ledger.fact("mosaic", bool((batch["image"][:, :, 4:] != batch["image"][:, :, :4]).any()))
    ledger.end()


if __name__ == "__main__":
    main()
