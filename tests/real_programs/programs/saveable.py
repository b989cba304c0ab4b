"""A loader whose position is saved in the midst of an epoch, as SpeechBrain's SaveableDataLoader does it.

It changes the class of torch's iterators: after a recovery the new iterator draws as many batches from its sampler, and
throws them away, as the old one had given (`_num_yielded`).
"""

import functools
import sys
from pathlib import Path

import ledger
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

_torch_init = _BaseDataLoaderIter.__init__


@functools.wraps(_torch_init)
def _init_and_skip(self, loader, *more, **options):
    _torch_init(self, loader, *more, **options)
    for number in range(getattr(loader, "skip_to", None) or 0):
        next(self._sampler_iter)
        self._num_yielded = number + 1
    loader.skip_to = None


def _reset_unless_first(self, loader, first_iter=False, *more, **options):
    if not first_iter:
        self._sampler_iter = iter(self._index_sampler)
        self._num_yielded = 0
        self._IterableDataset_len_called = loader._IterableDataset_len_called


_BaseDataLoaderIter.__init__ = _init_and_skip
_BaseDataLoaderIter._reset = _reset_unless_first


class SaveableLoader(DataLoader):
    skip_to = None
    iterator = None

    def __iter__(self):
        self.iterator = super().__iter__()
        return self.iterator

    def save(self, path):
        path.write_text(str(self.iterator._num_yielded))

    def load(self, path):
        self.skip_to = int(path.read_text())


class EpochSampler(Sampler):
    """The order is a function of seed and epoch."""

    epoch = 0

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __iter__(self):
        generator = torch.Generator().manual_seed(563 + self.epoch)
        return iter(torch.randperm(self.num_samples, generator=generator).tolist())


class Utterances(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return {"id": index, "signal": torch.arange(8.0) * index}


def make_loader(epoch, **options):
    sampler = EpochSampler(60)
    sampler.epoch = epoch
    return SaveableLoader(Utterances(), batch_size=4, sampler=sampler, num_workers=2, **options)


def train(phase, loader, stop_after=None):
    for number, batch in enumerate(loader, 1):
        ledger.step(phase, batch["id"], batch)
        ledger.fact("given", loader.iterator._num_yielded)
        if number == stop_after:
            return


def main(directory):
    ledger.seed(2)
    for persistent_workers in (False, True):
        position = directory / f"position.{persistent_workers}"
        loader = make_loader(1, persistent_workers=persistent_workers)
        train("before the save", loader, stop_after=6)
        loader.save(position)
        resumed = make_loader(1, persistent_workers=persistent_workers)
        resumed.load(position)
        train("the rest of the epoch", resumed)
        resumed.sampler.epoch += 1
        train("the next epoch", resumed)
        resumed.save(position)
        ledger.fact("saved at the end", position.read_text())
    ledger.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
