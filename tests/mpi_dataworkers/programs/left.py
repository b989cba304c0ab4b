"""A program whose dataset is another one in data workers, or raises there, read in many ways. Prints its batches."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
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


class Mixing(Sent):
    """It mixes each sample with the one that was read before it in the process."""

    last = 0

    def __getitem__(self, index: int) -> Any:
        mixed, self.last = index + 100 * self.last, index
        return torch.tensor([mixed])


class Changed(Counting):
    """The program changes it in mid-pass; what it has found is missed late."""

    width = 0

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, self.width, 3 if index < 4 else self.found or 0])


class Registered(Sent):
    """One of its samples is in a table that code finds by a made-up name."""

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            return globals()["KI" + "NDS"]["later"](index)
        return torch.tensor([index])


class BesideRandom(Counting):
    """What data workers do not have decides about one field; another one is random in each process."""

    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng().random(), index * (self.found or 1)


class Record:
    """Writing it down changes it, which making it anew puts right."""

    def __init__(self, x: int) -> None:
        self.x = x
        self.double = [2 * x]

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__
        state.pop("double", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.double = [2 * self.x]


class Records(Sent):
    def __getitem__(self, index: int) -> Any:
        return Record(index)


class Ending(Sent):
    """It ends any process but the trainer's own and its children."""

    def __init__(self) -> None:
        super().__init__()
        self.trainer = os.getpid()

    def __getitem__(self, index: int) -> Any:
        if self.trainer not in (os.getpid(), os.getppid()):
            os.kill(os.getpid(), signal.SIGSEGV)
        return torch.tensor([index])


class Remembering(Sent):
    """Another package's module counts its samples, and from the seventh one of a process on it tells."""

    def __getitem__(self, index: int) -> Any:
        count = np.random.__dict__.setdefault("_counted", [0])
        count[0] += 1
        return torch.tensor([index, int(count[0] > 6)])


class RaisingSampler:
    """It ends with an error, which is no end of data."""

    def __iter__(self) -> Iterator[int]:
        yield from range(24)
        raise ValueError("the sampler is broken")


def of_two(samples: list[Any]) -> Any:
    assert len(samples) > 1, "two samples are mixed"
    return torch.stack(samples)


class Read(Sent):
    """It counts, and what counts is in sight."""

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return torch.tensor([index, int(self.count > 8)])


def doubles(records: list[Record]) -> list[int]:
    return [record.double[0] for record in records]


def as_it_is(samples: list[Any]) -> list[Any]:
    return samples


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
    return DataLoader(dataset, **{"batch_size": 2, "num_workers": 2} | keywords)


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
    for num_workers in (1, 2):
        print("mixed", num_workers, list(steps_of(loader_of(Mixing(), num_workers=num_workers))))
    print("remembered", list(steps_of(loader_of(Remembering(), batch_size=4))))
    broken = loader_of(Remembering(), batch_size=4, sampler=RaisingSampler())
    print("of a sampler", [each if isinstance(each, str) else "a batch" for each in steps_of(broken)])
    print("where one sample is no batch", list(steps_of(loader_of(Read(), collate_fn=of_two))))
    changed = Changed()
    for epoch in range(2):
        for batch in loader_of(changed):
            print("changed meanwhile", epoch, batch[:, 2].tolist())
            changed.width += 1
    KINDS["later"] = refuse
    print("of a sample here", list(steps_of(loader_of(Registered()))))
    print("beside what is random", [[y for _, y in batch] for batch in loader_of(BesideRandom(), collate_fn=as_it_is)])
    print("records", [doubles(batch) for batch in loader_of(Records(), collate_fn=as_it_is)])
    print("where data workers end", list(steps_of(loader_of(Ending()))))
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
