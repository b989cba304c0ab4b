"""Loaders as timm makes them: one iterator for all epochs, and a prefetcher that is a batch ahead of the training loop.

The endless sampler says the epoch to the sampler that it repeats, because torch draws the next epoch's first batches
before the training loop has come to its end.
"""

import random

import ledger
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

MEAN, STD = 114.0, 57.0


class RepeatSampler:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        inner = self.sampler.sampler
        epoch = inner.epoch
        while True:
            inner.set_epoch(epoch)
            epoch += 1
            yield from iter(self.sampler)


class MultiEpochsLoader(DataLoader):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._DataLoader__initialized = False
        self.batch_sampler = RepeatSampler(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class PrefetchLoader:
    """Normalises a batch while the training loop has the one before it."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        ready = None
        for images, targets in self.loader:
            following = images.float().sub_(MEAN).div_(STD), targets
            if ready is not None:
                yield ready
            ready = following
        yield ready


class Pictures(Dataset):
    def __init__(self, num_samples, train):
        self.num_samples, self.train = num_samples, train

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        picture = np.full((3, 6, 6), index, dtype=np.uint8)
        if self.train:
            left, top = random.randrange(3), int(np.random.randint(3))
            picture[:, top : top + 3, left : left + 3] = int(torch.randint(256, ()))
        return picture, index


def fast_collate(samples):
    targets = torch.tensor([target for _, target in samples], dtype=torch.int64)
    images = torch.zeros((len(samples), *samples[0][0].shape), dtype=torch.uint8)
    for place, (picture, _) in enumerate(samples):
        images[place] += torch.from_numpy(picture)
    return images, targets


def init_worker(worker_id):
    info = get_worker_info()
    assert info.id == worker_id < info.num_workers
    np.random.seed(info.seed % (2**32 - 1))


def main():
    ledger.seed(5)
    options = {
        "batch_size": 8,
        "num_workers": 2,
        "collate_fn": fast_collate,
        "worker_init_fn": init_worker,
        "persistent_workers": True,
    }
    pictures = Pictures(70, train=True)
    sampler = DistributedSampler(pictures, num_replicas=1, rank=0)
    training = PrefetchLoader(MultiEpochsLoader(pictures, sampler=sampler, drop_last=True, **options))
    validation = PrefetchLoader(DataLoader(Pictures(30, train=False), **options))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for phase, loader in (("training", training), ("validation", validation)):
            ledger.fact("length", len(loader))
            for batch in loader:
                ledger.step(f"{phase}, epoch {epoch}", batch[1], batch)
    ledger.end()


if __name__ == "__main__":
    main()
