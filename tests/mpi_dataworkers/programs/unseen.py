"""A program whose samples depend on those that their process made before, by what nobody sees. Prints its batches."""

from __future__ import annotations

import contextvars
import io
import itertools
import sqlite3
import sys
import threading
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


def kept(name: str, make: Callable[[], Any]) -> Any:
    """What this process has under a name; in another package's module, where nobody looks."""
    place, name = vars(threading), f"_unseen{name}"
    if name not in place:
        place[name] = make()
    return place[name]


def database() -> sqlite3.Connection:
    made = sqlite3.connect(":memory:", check_same_thread=False)
    made.execute("create table seen (number integer primary key)")
    return made


def in_database(number: int) -> int:
    return int(kept("_database", database).execute("insert or ignore into seen values (?)", (number,)).rowcount)


def in_variable(number: int) -> int:
    variable = kept("_variable", lambda: contextvars.ContextVar("seen", default=()))
    before = variable.get()
    variable.set((*before, number))
    return int(number in before)


def in_thread(number: int) -> int:
    seen = vars(kept("_local", threading.local)).setdefault("seen", set())
    is_new = number not in seen
    seen.add(number)
    return int(is_new)


def in_stream(number: int) -> int:
    return int(kept("_stream", lambda: io.BytesIO(bytes(range(256)) * 8)).read(1 + number)[-1])


def squeezed(number: int) -> int:
    return len(kept("_squeezed", zlib.compressobj).compress(bytes([number]) * 40_000))


def counted(number: int) -> int:
    return number if next(kept("_count", itertools.count)) < 9 else -number


def last_good(number: int) -> int:
    good = kept("_good", lambda: [0])
    if number % 4 == 3:  # cannot be read
        return int(good[0])
    good[0] = number
    return number


KINDS = (in_database, in_variable, in_thread, in_stream, squeezed, counted, last_good)


class Depending(Dataset[Any]):
    """Two samples in a row are alike, so that some are seen again, in steps of another number."""

    def __init__(self, kind: Callable[[int], int], begins: int) -> None:
        self.kind, self.begins, self.epoch = kind, begins, 0

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> Any:
        number = index * 5 % 8
        return torch.tensor([index, self.kind(number) if self.epoch >= self.begins else number])


def main(num_workers: int, begins: int) -> None:
    for kind in KINDS:
        dataset = Depending(kind, begins)
        loader = DataLoader(dataset, batch_size=2, num_workers=num_workers)
        for dataset.epoch in range(begins + 2):
            print(kind.__name__, dataset.epoch, [batch.tolist() for batch in loader])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
