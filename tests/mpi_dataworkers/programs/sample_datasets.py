"""Datasets of the tests, in a module beside the programs as a user's would be. Some of them hurt their process."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from hetstream import numpy_sample_generator, sample_generator


class Augmented(Dataset[Any]):
    """Sample i is (values that depend on i and on all three random generators, i)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(3, 4) + random.random() + float(np.random.rand())
        return torch.full((3, 4), float(index)) + noise, index


class Striking(Augmented):
    """Sends a signal to its own process at one sample, the first time anybody reads it."""

    def __init__(self, length: int, index: int, flag: Path, number: signal.Signals) -> None:
        super().__init__(length)
        self.index = index
        self.flag = flag
        self.number = number
        self.trainer = os.getpid()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.strike(index)
        return super().__getitem__(index)

    def strike(self, index: int) -> None:
        """Send the signal, if it is time."""
        if index == self.index and os.getpid() != self.trainer:
            try:
                os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                pass
            else:
                self.flag.write_text(str(os.getpid()))
                os.kill(os.getpid(), self.number)


class Logged(Augmented):
    """Writes down each sample that is read."""

    def __init__(self, length: int, log: Path) -> None:
        super().__init__(length)
        self.log = log

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        descriptor = os.open(self.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(descriptor, b"%d\n" % index)
        os.close(descriptor)
        return super().__getitem__(index)


class Large(Augmented):
    """Sample i is 64 KiB of the number i."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64, 1024), index % 251, dtype=torch.uint8)


class Heavy(Augmented):
    """Sample i is 2 MiB of the number i."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2, 1024, 1024), index % 251, dtype=torch.uint8)


class UserError(Exception):
    """An exception class that only the user's module knows."""


class Poisoned(Augmented):
    """One sample raises."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 37:
            raise UserError(f"sample {index} is bad")
        return super().__getitem__(index)


class NoText(Exception):
    """An exception that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class WithOneSample(Augmented):
    """One sample is not like the others; how, a class below says."""

    def __init__(self, length: int, index: int, how: str) -> None:
        super().__init__(length)
        self.index = index
        self.how = how


class Surprising(WithOneSample):
    """One sample raises what programs hardly expect."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.index:
            raise {
                "exit": SystemExit(3),
                "interrupt": KeyboardInterrupt(),
                "cancelled": asyncio.CancelledError("by a library"),
                "no text": NoText(),
                "no UTF-8": ValueError("file \udc80.jpg is bad"),
                "long": ValueError("x" * 5_000_000),
            }[self.how]
        return super().__getitem__(index)


class SurprisingElements(IterableDataset[Any]):
    """A stream whose element 5 raises SystemExit."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(12):
            if index == 5:
                raise SystemExit(3)
            yield index


class ExitsElsewhere(Augmented):
    """Its module ends the program where it is imported anew, as one without a guard of `__main__` does."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(40)
        self.num_bytes = num_bytes

    def __reduce__(self) -> Any:
        return exit_elsewhere, (os.getpid(), bytes(self.num_bytes))


def exit_elsewhere(pid: int, table: bytes) -> ExitsElsewhere:
    """Rebuild `ExitsElsewhere` in its own process."""
    if pid != os.getpid():
        raise SystemExit(2)
    return ExitsElsewhere(len(table))


class NoneCanBeMade(Augmented):
    """Every sample raises."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raise UserError(f"sample {index} is bad")


class OpenedWhenLoaded(Dataset[Any]):
    """Records of a file that it opens in `__setstate__`, as is right with torch's workers; its index is large."""

    RECORD = 8

    def __init__(self, path: Path, length: int) -> None:
        self.path = path
        path.write_bytes(np.arange(length, dtype="<i8").tobytes())
        self.index = [
            (i * self.RECORD, f"record {i:08d} of an index that makes the pickle large") for i in range(length)
        ]
        self.file = path.open("rb", buffering=0)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "file"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.file = self.path.open("rb", buffering=0)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> int:
        self.file.seek(self.index[index][0])
        return int.from_bytes(self.file.read(self.RECORD), "little")


class WritesIntoItsTable(Dataset[Any]):
    """Each sample is its process, which it has written into the table, and what is there a moment later."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.table[0] = os.getpid()
        time.sleep(0.001)
        return os.getpid(), int(self.table[0])


class HoldsTheGil(Augmented):
    """One sample is in C code for longer than a heartbeat may be late, and lets no other thread run."""

    def __init__(self, length: int, slow: int, seconds: int) -> None:
        super().__init__(length)
        self.slow, self.seconds = slow, seconds

    def __getitem__(self, index: int) -> Any:
        if index == self.slow:
            ctypes.PyDLL(None).sleep(self.seconds)
        return super().__getitem__(index)


class LeavesAChild(Augmented):
    """One sample starts a program, writes down its process id, and then hangs or ends its process."""

    def __init__(self, length: int, note: Path, how: str) -> None:
        super().__init__(length)
        self.note, self.how = note, how

    def __getitem__(self, index: int) -> Any:
        if index == 3 and not self.note.exists():
            child = subprocess.Popen(["sleep", "600"])
            written = self.note.with_suffix(".new")
            written.write_text(str(child.pid))
            written.rename(self.note)
            if self.how == "killed":
                os._exit(7)
            time.sleep(600)
        return super().__getitem__(index)


class NeverLoaded(Augmented):
    """Large, and rebuilding it in a data worker does not end."""

    def __init__(self, length: int, flag: Path) -> None:
        super().__init__(length)
        self.flag = flag
        self.table = os.urandom(2 << 20)
        self.trainer = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self.trainer:
            self.flag.touch()
            time.sleep(600)


class Holding(Augmented):
    """Holds something that cannot be pickled."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.transform = {"crop": Crop()}


class Crop:
    """A transform with a lock in it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Where(Augmented):
    """Sample i tells where it was made: (i, process, data worker number)."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index, os.getpid(), -1 if info is None else info.id


class Growing(Augmented):
    """Its length is that of a file, as of a folder that somebody copies into."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __len__(self) -> int:
        return self.file.stat().st_size

    def __getitem__(self, index: int) -> Any:
        return index


class Prepared(Augmented):
    """Opens its data in worker_init_fn, as datasets over databases do."""

    table: list[int] | None = None
    scale = 1

    def __getitem__(self, index: int) -> Any:
        assert self.table is not None
        return self.table[index] * self.scale


def prepare(_: int) -> None:
    """worker_init_fn of `Prepared`."""
    info = get_worker_info()
    assert info is not None
    info.dataset.table = list(range(100))


class Stubborn:
    """Comes apart when it is put together again."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


class Odd(Augmented):
    """Its batches hold an object that only the data worker can have."""

    def __getitem__(self, index: int) -> Any:
        return Stubborn()


class AskedForLists(Augmented):
    """Gives the samples that a list of indices names, as torch documents it; for a number, that sample twice."""

    def __getitem__(self, index: Any) -> Any:
        assert type(index) in (list, int)
        return [super(AskedForLists, self).__getitem__(one) for one in (index if type(index) is list else [index] * 2)]


class InBatches(Augmented):
    """Reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        noise = torch.rand(1).item()
        return [(torch.full((2,), index + noise), index) for index in indices]


class Counted(Augmented):
    """Writes down each index that is read, and takes as long as a file of its process says: `pace.PID`, in s."""

    def __init__(self, length: int, directory: Path, sample_s: float = 0.0) -> None:
        super().__init__(length)
        self.directory = directory
        self.sample_s = sample_s

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pace = self.directory / f"pace.{os.getpid()}"
        time.sleep(float(pace.read_text()) if pace.exists() else self.sample_s)
        with (self.directory / "reads").open("a") as log:
            log.write(f"{index} {os.getpid()}\n")
        return super().__getitem__(index)


def reads(directory: Path) -> list[tuple[int, int]]:
    """What `Counted` wrote down: (index, process)."""
    lines = (directory / "reads").read_text().splitlines()
    return [(int(index), int(process)) for index, process in map(str.split, lines)]


class Log(IterableDataset[Any]):
    """A stream of `length` elements that divides itself as torch's documentation tells: worker w of n has w, w + n, ...

    Element i is (values that depend on i and on all three random generators, i).
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def part(self) -> tuple[int, int]:
        info = get_worker_info()
        return (0, 1) if info is None else (info.id, info.num_workers)

    def __iter__(self) -> Iterator[Any]:
        first, stride = self.part()
        for index in range(first, self.length, stride):
            noise = torch.rand(3) + random.random() + float(np.random.rand())
            yield torch.full((3,), float(index)) + noise, index


class PlainLog(Log):
    """Does not know of workers."""

    def part(self) -> tuple[int, int]:
        return 0, 1


class StrikingLog(Log):
    """Sends a signal to its own process at one element, the first time anybody comes to it."""

    def __init__(self, length: int, index: int, flag: Path, number: signal.Signals) -> None:
        super().__init__(length)
        self.striking = Striking(length, index, flag, number)

    def __iter__(self) -> Iterator[Any]:
        for values, index in super().__iter__():
            self.striking.strike(index)
            yield values, index


class PoisonedLog(Log):
    """One element raises."""

    def __iter__(self) -> Iterator[Any]:
        for values, index in super().__iter__():
            if index == 37:
                raise UserError(f"element {index} is bad")
            yield values, index


class SpoiledLog(Log):
    """Some elements cannot be made; its iterator goes on behind them."""

    def __init__(self, length: int, bad: set[int]) -> None:
        super().__init__(length)
        self.bad = bad

    def __iter__(self) -> Iterator[Any]:
        return map(self.decode, super().__iter__())

    def decode(self, element: Any) -> Any:
        if element[1] in self.bad:
            raise UserError(f"element {element[1]} is bad")
        return element


class SpoiledPlainLog(SpoiledLog):
    """The same, and it does not know of workers."""

    def part(self) -> tuple[int, int]:
        return 0, 1


class DeadlyLog(SpoiledLog):
    """An element that ends the process of a data worker."""

    def __init__(self, length: int, deadly: int) -> None:
        super().__init__(length, {deadly})

    def decode(self, element: Any) -> Any:
        if element[1] in self.bad:
            os._exit(7)
        return element


class UnsteadyLog(SpoiledLog):
    """One element cannot be made the first time that anybody comes to it, and a later one ends its process once."""

    def __init__(self, length: int, index: int, flag: Path, deadly: int, struck: Path) -> None:
        super().__init__(length, set())
        self.index, self.flag = index, flag
        self.striking = Striking(length, deadly, struck, signal.SIGKILL)

    def decode(self, element: Any) -> Any:
        if element[1] == self.index and not self.flag.exists():
            self.flag.touch()
            raise UserError("not now")
        self.striking.strike(element[1])
        return element


class HiddenGenerator(Log):
    """Its iterator is a generator, which its class does not show."""

    def __iter__(self) -> Iterator[Any]:
        elements = super().__iter__()
        return (element for element in elements)


class Stuck(Log):
    """An iterator that raises for ever."""

    def __iter__(self) -> Iterator[Any]:
        return map(fail_at_all, iter(int, 1))


def fail_at_all(_: Any) -> None:
    """Raises."""
    raise UserError("never")


class DividedLog(Log):
    """Is divided by worker_init_fn, the other way that torch's documentation tells."""

    start, stop = 0, 0

    def __iter__(self) -> Iterator[Any]:
        yield from range(self.start, self.stop)


def divide(number: int) -> None:
    """worker_init_fn of `DividedLog`."""
    info = get_worker_info()
    assert info is not None
    each = -(-info.dataset.length // info.num_workers)
    info.dataset.start, info.dataset.stop = info.id * each, min(info.dataset.length, (info.id + 1) * each)


def seed_numpy(_number: int) -> None:
    """worker_init_fn as torch's notes on reproducibility have it."""
    np.random.seed(torch.initial_seed() % 2**32)


class TensorLedger(Log):
    """Its iterator's state holds what JSON does not have."""

    def __iter__(self) -> Iterator[Any]:
        return _TensorIterator(*self.part(), self.length)


class _TensorIterator(Iterator[Any]):
    def __init__(self, at: int, stride: int, length: int) -> None:
        self.at, self.stride, self.length = at, stride, length

    def __next__(self) -> Any:
        if self.at >= self.length:
            raise StopIteration
        self.at += self.stride
        return torch.rand(2), self.at - self.stride

    def state_dict(self) -> dict[str, Any]:
        return {"at": {("place", 0): torch.tensor(self.at)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"][("place", 0)])


class SeesWorker(IterableDataset[Any]):
    """The number of workers that it sees."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        yield None if info is None else info.num_workers


class PoisonedPlainLog(PlainLog):
    """Element 2 raises."""

    def __iter__(self) -> Iterator[Any]:
        for values, index in super().__iter__():
            if index == 2:
                raise ValueError("element 2")
            yield values, index


class AsksLate(IterableDataset[Any]):
    """Asks for its worker after it gave elements."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.length):
            info = get_worker_info() if index > 9 else None
            yield index if info is None else index + info.id


class Folder(IterableDataset[Any]):
    """Reads files with an element a line, in the order of the list."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[Any]:
        for file in self.files:
            for line in file.read_text().splitlines():
                yield int(line)


class Numbered(Folder):
    """The same as elements like those of `Log`."""

    def __iter__(self) -> Iterator[Any]:
        return ((torch.rand(3), index) for file in self.files for index in map(int, file.read_text().splitlines()))


class NotedLog(Log):
    """Writes each element that it reads to a file."""

    def __init__(self, length: int, file: Path) -> None:
        super().__init__(length)
        self.file = file

    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            with self.file.open("a") as stream:
                stream.write(f"{element[1]}\n")
            yield element


def noted_collate(file: Path, samples: list[Any]) -> Any:
    """torch's own, and writes the first index of each batch to a file."""
    with file.open("a") as stream:
        stream.write(f"{samples[0][1]}\n")
    return default_collate(samples)


class WhereLog(Log):
    """Element i tells where it was made."""

    def __iter__(self) -> Iterator[Any]:
        for _, index in super().__iter__():
            yield index, os.getpid()


class Zipped(IterableDataset[Any]):
    """Pairs of the ids of two logs."""

    def __init__(self, *logs: Log) -> None:
        self.logs = logs

    def __iter__(self) -> Iterator[Any]:
        for elements in zip(*self.logs, strict=False):
            yield tuple(index for _, index in elements)


class Spoiled(Augmented):
    """Some samples raise, and each try is written down."""

    def __init__(self, length: int, bad: set[int], log: Path) -> None:
        super().__init__(length)
        self.bad = bad
        self.log = log

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.bad:
            descriptor = os.open(self.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.write(descriptor, b"%d\n" % index)
            os.close(descriptor)
            raise UserError(f"sample {index} is bad")
        return super().__getitem__(index)


def tries_of(log: Path) -> list[int]:
    """Samples of `Spoiled` that were tried, in order."""
    return [int(line) for line in log.read_text().split()] if log.exists() else []


class FailsOnce(Augmented):
    """One sample raises the first time anybody reads it."""

    def __init__(self, length: int, index: int, flag: Path) -> None:
        super().__init__(length)
        self.index = index
        self.flag = flag

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.index and not self.flag.exists():
            self.flag.touch()
            raise UserError("this host is odd")
        return super().__getitem__(index)


def collate_without_20(samples: list[Any]) -> Any:
    """A collate function that stumbles over one sample."""
    if any(index == 20 for _, index in samples):
        raise UserError("cannot collate")
    return torch.utils.data.default_collate(samples)


class OnlyHere(Augmented):
    """Can be pickled, and not be put together elsewhere."""

    def __init__(self) -> None:
        super().__init__(40)

    def __reduce__(self) -> Any:
        return fail_elsewhere, (os.getpid(),)


def fail_elsewhere(pid: int, _: bytes = b"") -> OnlyHere:
    """Rebuild `OnlyHere` in its own process."""
    if pid != os.getpid():
        raise UserError("not here")
    return OnlyHere()


class Ledger(Log):
    """Knows its position, and writes each element that it reads to a file."""

    def __init__(self, length: int, file: Path) -> None:
        super().__init__(length)
        self.file = file
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        first, stride = self.part()
        while (index := first + stride * self.position) < self.length:
            with self.file.open("a") as stream:
                stream.write(f"{index}\n")
            self.position += 1
            yield torch.rand(3), index
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class LedgerOfIterators(Ledger):
    """The same, but it is the iterator that knows."""

    def __iter__(self) -> Iterator[Any]:
        return LedgerIterator(self)

    def state_dict(self) -> dict[str, int]:
        raise AssertionError("the iterator's comes first")


class LedgerIterator:
    """Iterator of `LedgerOfIterators`."""

    def __init__(self, ledger: LedgerOfIterators) -> None:
        self.ledger = ledger
        self.next, self.stride = ledger.part()

    def __iter__(self) -> LedgerIterator:
        return self

    def __next__(self) -> Any:
        if self.next >= self.ledger.length:
            raise StopIteration
        index, self.next = self.next, self.next + self.stride
        with self.ledger.file.open("a") as stream:
            stream.write(f"{index}\n")
        return torch.rand(3), index

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Hanging(WithOneSample):
    """One sample takes for ever."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.index:
            hang_for_ever(self.how)
        return super().__getitem__(index)


class HangingWithFlag(Hanging):
    """The same; a file tells when it hangs."""

    def __init__(self, length: int, index: int, how: str, flag: Path) -> None:
        super().__init__(length, index, how)
        self.flag = flag

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.index:
            self.flag.touch()
        return super().__getitem__(index)


def hang_for_ever(how: str) -> None:
    """Sleep in Python, or in C with the GIL held."""
    if how == "sleeps":
        threading.Event().wait()
    while True:
        ctypes.PyDLL(None).sleep(1000)  # until the next signal


class Deadly(Augmented):
    """Some samples end the process that reads them: by a "segfault", or with an exit code."""

    def __init__(self, length: int, deadly: set[int], how: str) -> None:
        super().__init__(length)
        self.deadly = deadly
        self.how = how

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.deadly:
            if self.how != "segfault":
                os._exit(int(self.how))
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__getitem__(index)


class Greedy(Augmented):
    """One sample takes half a GiB."""

    def __init__(self, length: int, index: int) -> None:
        super().__init__(length)
        self.index = index

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.index:
            bytearray(os.urandom(1)) * (512 << 20)
        return super().__getitem__(index)


class ThreadSafe(Dataset[Any]):
    """Sample i is (i, a number of each of its generators, torch's threads); some samples wait, raise or end.

    The samples `together` wait for one another: so many must be made at once.
    """

    thread_safe = True

    def __init__(self, length: int, together: set[int] = frozenset(), does: dict[int, str] = {}) -> None:  # noqa: B006
        self.length = length
        self.together = together
        self.does = does

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, int]:
        first = sample_generator().random()
        if index in self.together:
            barrier_of(len(self.together)).wait(20)
        if self.does.get(index) == "raise":
            raise UserError(f"sample {index} is bad")
        if self.does.get(index) == "hang":
            hang_for_ever("sleeps")
        if self.does.get(index) == "exit":
            os._exit(7)
        second = float(numpy_sample_generator().random())
        return index, first + sample_generator().random(), second, torch.get_num_threads()


@functools.cache
def barrier_of(parties: int) -> threading.Barrier:
    """One barrier for each number of threads in this process."""
    return threading.Barrier(parties)


class InMemory(Dataset[Any]):
    """400 elements of a large array."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        return int(self.array[index * (len(self.array) // 400)])


class LargeOnlyHere(OnlyHere):
    """The same, and large."""

    def __reduce__(self) -> Any:
        return fail_elsewhere, (os.getpid(), bytes(2 << 20))


def no_length(_: Any) -> int:
    """A wrong `length_of`."""
    return -1
