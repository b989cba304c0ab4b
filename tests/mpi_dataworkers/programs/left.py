"""A program whose dataset is another one in data workers, or raises there, read in many ways. Prints its batches."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

KINDS: dict[str, Any] = {}


class Counting(Dataset[Any]):
    """Its pickle forgets what it has found; it counts in each process."""

    def __init__(self) -> None:
        self.found: int | None = 3
        self.count = 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"found": None}

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        info = get_worker_info()
        assert info is not None
        return torch.tensor([index, self.found or 0, self.count, info.id])


class Sent(Counting):
    """The same with a pickle that is whole, and nothing that depends on the process."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise LookupError(f"no sample {index}")
        return torch.tensor([index, self.found or 0])


class Registered(Sent):
    """One of its samples is in a table that code finds by a made-up name."""

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            return globals()["KI" + "NDS"]["later"](index)
        return torch.tensor([index])


def refuse(index: int) -> Any:
    raise ValueError(f"refused: {index}")


def steps_of(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches, with the type of what was raised in the place of one."""
    iterator = iter(batches)
    while True:
        try:
            yield next(iterator).tolist()
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001, whatever comes
            yield type(error).__name__


def loader_of(dataset: Dataset[Any], **keywords: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=2, **{"num_workers": 2} | keywords)


def main() -> None:
    loader = loader_of(Counting())
    print("first batches", [next(iter(loader)).tolist() for _ in range(3)])
    print("two at a time", [[a.tolist(), b.tolist()] for a, b in zip(loader, loader, strict=True)])
    for epoch in range(3):
        for batch in loader:
            print("until it breaks", epoch, batch.tolist())
            break
    kept = loader_of(Counting(), persistent_workers=True)
    for epoch in range(3):
        print("kept workers", epoch, list(steps_of(kept)))
    both = loader_of(Counting())
    begun, other = iter(both), iter(both)
    print("two iterators", [next(begun).tolist(), next(other).tolist(), *steps_of(begun), *steps_of(other)])
    print("of a sample", list(steps_of(loader_of(Sent()))))
    print("of a sample, kept", [list(steps_of(each)) for each in [loader_of(Sent(), persistent_workers=True)] * 2])
    KINDS["later"] = refuse
    print("of a sample here", list(steps_of(loader_of(Registered()))))
    KINDS["later"] = lambda index: torch.tensor([index])
    whole = loader_of(Sent(), num_workers=1)
    forked = iter(whole)
    print("before a fork", next(forked).tolist(), flush=True)
    if (child := os.fork()) == 0:
        print("in the child", os.getppid() > 0, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print("after a fork", list(steps_of(forked)))


def spawned() -> None:
    multiprocessing.set_start_method("spawn")
    print("of a sample", list(steps_of(loader_of(Sent(), num_workers=1))))
    KINDS["later"] = refuse  # which spawned processes do not have
    print("of a sample elsewhere", list(steps_of(loader_of(Registered(), num_workers=1))))


if __name__ == "__main__":
    (spawned if "spawn" in sys.argv else main)()
