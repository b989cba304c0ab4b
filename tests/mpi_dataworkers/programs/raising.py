"""A program whose samples raise in many ways, and which goes on. Prints its batches, and what it catches, whole."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate


class Plain(ValueError):
    pass


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} {code}")
        self.code = code


class OwnText(Exception):
    def __init__(self, number: Any) -> None:
        super().__init__(number)
        self.extra = 5


class ByKeyword(Exception):
    def __init__(self, **keywords: Any) -> None:
        pass


class WithMessage(Exception):
    message = "of the class"

    def __init__(self, number: int = 0, message: str = "") -> None:
        super().__init__(message)


def with_cause(index: int) -> Any:
    try:
        return {}[index]
    except KeyError as error:
        raise Plain("after another") from error


def with_notes(index: int) -> Any:
    error = Plain("with notes")
    error.__notes__ = ["a note"]  # type: ignore[attr-defined]
    raise error


def raising(kind: type[Exception], *arguments: Any, **keywords: Any) -> Callable[[int], Any]:
    def fail(index: int) -> Any:
        raise kind(*arguments, **keywords)

    return fail


FAILS: dict[int, Callable[[int], Any]] = {
    3: raising(Plain, "corrupt", 3),
    9: raising(TwoArguments, 3, "text"),
    18: lambda index: (_ for _ in ()).throw(OwnText(index)),
    21: raising(subprocess.CalledProcessError, 3, ["ls"]),
    30: raising(KeyError, "no\nkey"),
    41: lambda index: b"\xff".decode(),
    50: raising(ByKeyword, x=3),
    55: with_cause,
    58: with_notes,
    62: raising(WithMessage, 3, "text"),
    66: raising(StopIteration, "done"),
    70: raising(FileNotFoundError, 2, "No such file or directory", "/a"),
    75: lambda index: next(each for each in (1, 2) if each > index),
    79: lambda index: {}["missing"],
}


class Failing(Dataset[Any]):
    def __init__(self, fails: dict[int, Callable[[int], Any]] = FAILS, length: int = 84) -> None:
        self.fails, self.length = fails, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index in self.fails:
            self.fails[index](index)
        return torch.tensor([index])


class Together(Failing):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def collate(samples: list[Any]) -> Any:
    if any(sample.item() == 6 for sample in samples):
        raise StopIteration("of a batch")
    if any(sample.item() == 11 for sample in samples):
        raise Plain("of a batch")
    return default_collate(samples)


def of_two_sizes(samples: list[Any]) -> Any:
    return default_collate([sample.repeat(2) if sample.item() == 7 else sample for sample in samples])


def begin(worker_id: int) -> None:
    if worker_id == 1:
        raise Plain("of a worker")


def told(error: BaseException) -> str:
    known = type(error), type(error.__cause__), type(error.__context__), getattr(error, "extra", None)
    text = re.sub(r"0x[0-9a-f]+", "0x", repr((*map(str, error.args), str(error), getattr(error, "__notes__", None))))
    return f"{known} {text}"


def all_of(loader: DataLoader[Any], most_ends: int = 4) -> Iterator[Any]:
    """Batches, and what was raised in the place of one; it goes on behind a StopIteration."""
    iterator = iter(loader)
    while most_ends:
        try:
            yield next(iterator).flatten().tolist()
        except StopIteration as error:
            most_ends -= 1
            yield "the end", told(error)
        except Exception as error:  # noqa: BLE001, whatever comes
            yield told(error)


def loader_of(dataset: Dataset[Any], **keywords: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": 4, "num_workers": 2} | keywords)


def of_samples() -> None:
    for each in all_of(loader_of(Failing())):
        print("one by one", each)
    for each in all_of(loader_of(Failing(length=32), batch_size=None, num_workers=3), 1):
        print("unbatched", each)
    for each in all_of(loader_of(Together(length=32)), 1):
        print("together", each)
    for each in all_of(loader_of(Subset(Failing(length=40), range(28, 40))), 1):
        print("of a subset", each)


def of_others() -> None:
    for each in all_of(loader_of(Failing({}, 20), collate_fn=collate), 2):
        print("of a batch", each)
    for each in all_of(loader_of(Failing({}, 12), collate_fn=of_two_sizes), 1):
        print("of torch", each)
    for each in all_of(loader_of(Failing({}, 24), worker_init_fn=begin), 1):
        print("of a worker", each)
    late = Failing({150: raising(StopIteration), 161: raising(TwoArguments, 1, "late")}, 170)
    for each in all_of(loader_of(late, batch_size=2), 2):
        print("late", each)
    for batch in loader_of(Failing({17: raising(Plain, "uncaught")}, 40)):
        print("until it raises", batch.tolist())


def of_ends() -> None:
    stopping = Failing({21: raising(StopIteration)}, 40)
    for kept in (False, True):
        loader = loader_of(stopping, persistent_workers=kept)
        for epoch in range(3):
            print("it ends early", kept, epoch, [batch.tolist() for batch in loader])
        print("then", list(all_of(loader, 2)))
    torch.manual_seed(3)
    for epoch in range(2):
        loader = loader_of(Failing({17: raising(StopIteration)}, 40), shuffle=True)
        print("shuffled", epoch, [batch.tolist() for batch in loader], torch.rand(2).tolist())


def in_process() -> None:
    loader = loader_of(Failing({21: raising(StopIteration)}, 40), num_workers=0)
    for epoch in range(2):
        print("it ends early", epoch, [batch.tolist() for batch in loader])


if __name__ == "__main__":
    {"samples": of_samples, "others": of_others, "ends": of_ends, "in-process": in_process}[sys.argv[1]]()
