"""What a sample changes when it is made a second time."""

from __future__ import annotations

import array
import collections
import enum
import functools
import io
import itertools
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from hetstream import DataLoader
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.changes import TooLarge, changed_by, digest_of_state, state_of

COUNT = 0
READ: list[int] = []


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Held(Dataset[Any]):
    """A dataset of a program, with one thing in it.

    Args:
        make: makes a sample, of the dataset.
        held: what it holds.
    """

    read: ClassVar[list[int]] = []

    def __init__(self, make: Callable[[Any], object], held: object) -> None:
        self.make, self.held = make, held
        self.kept: Any = None

    def __getitem__(self, index: int) -> Any:
        return self.make(self)


def counted_globally(_: Held) -> None:
    global COUNT
    COUNT += 1


def appended_globally(_: Held) -> None:
    READ.append(3)


def in_a_default(_: Held, read: list[int] = []) -> None:  # noqa: B006, that is what programs do
    read.append(3)


def counting() -> Callable[[Held], None]:
    count = 0

    def make(_: Held) -> None:
        nonlocal count
        count += 1

    return make


def with_generator_made_late(dataset: Held) -> Any:
    if dataset.kept is None:
        dataset.kept = np.random.default_rng(1)
    return dataset.kept.random()


def opened_late(dataset: Held) -> None:
    if dataset.kept is None:
        dataset.kept = Path("/dev/null").open()  # noqa: SIM115, it stays open


CONTEXT: ContextVar[int] = ContextVar("CONTEXT", default=0)


class Kind(type):
    count = 0


class OfKind(metaclass=Kind):
    pass


class Name(enum.Enum):
    CAT = 1
    DOG = 2


def in_a_context(_: Held) -> None:
    CONTEXT.set(CONTEXT.get() + 1)


def in_the_environment(_: Held) -> None:
    os.environ["COUNTED"] = str(int(os.environ.get("COUNTED", "0")) + 1)


def in_a_metaclass(_: Held) -> None:
    type(OfKind).count += 1


def counted_at(key: Any) -> Callable[[Held], None]:
    return lambda dataset: dataset.held.__setitem__(key, dataset.held[key] + 1)


def numbers() -> Iterator[int]:
    yield from range(100)


def one_more(dataset: Held) -> None:
    dataset.held += 1


def drawn(dataset: Held) -> Any:
    return next(dataset.held)


def kept(value: Callable[[], object]) -> Callable[[Held], None]:
    return lambda dataset: setattr(dataset, "kept", value())


def called(name: str, *arguments: Any) -> Callable[[Held], Any]:
    return lambda dataset: getattr(dataset.held, name)(*arguments)


CHANGES: list[Any] = [
    pytest.param(one_more, 0, id="a count"),
    pytest.param(one_more, np.zeros(3), id="an array"),
    pytest.param(one_more, torch.zeros(3), id="a tensor"),
    pytest.param(lambda dataset: dataset.held[0].add_(1), [torch.zeros(3)], id="a tensor in a list"),
    pytest.param(
        lambda dataset: dataset.held.__setitem__(0, dataset.held[0] + 1), np.array([1, ""], object), id="objects"
    ),
    pytest.param(counted_globally, None, id="a global"),
    pytest.param(appended_globally, None, id="a global list"),
    pytest.param(lambda dataset: type(dataset).read.append(3), None, id="a class"),
    pytest.param(in_a_default, None, id="a default"),
    pytest.param(functools.partial(in_a_default), None, id="a default of a partial's function"),
    pytest.param(counting(), None, id="a closure"),
    pytest.param(lambda dataset: setattr(dataset.held, "count", dataset.held.count + 1), Slotted(), id="a slot"),
    pytest.param(with_generator_made_late, None, id="a generator that a sample makes"),
    pytest.param(called("random"), random.Random(1), id="Python's generator"),
    pytest.param(called("rand"), np.random.RandomState(1), id="NumPy's older generator"),
    pytest.param(lambda dataset: torch.rand(1, generator=dataset.held), torch.Generator(), id="torch's generator"),
    pytest.param(drawn, itertools.count(), id="an endless count"),
    pytest.param(drawn, iter([*range(100)]), id="an iterator's place"),
    pytest.param(drawn, itertools.cycle("abc"), id="a cycle"),
    pytest.param(drawn, numbers(), id="a generator function"),
    pytest.param(called("append", 3), collections.deque(maxlen=9), id="the last samples"),
    pytest.param(called("append", 3), bytearray(), id="bytes"),
    pytest.param(called("append", 3), array.array("i"), id="numbers"),
    pytest.param(called("update", [3]), collections.Counter(), id="a counter"),
    pytest.param(lambda dataset: dataset.held(torch.ones(2, 3)), torch.nn.BatchNorm1d(3), id="a layer's statistics"),
    pytest.param(kept(time.perf_counter), None, id="a time"),
    pytest.param(in_a_context, None, id="a context variable"),
    pytest.param(in_the_environment, None, id="a variable of the environment"),
    pytest.param(in_a_metaclass, None, id="a metaclass"),
    pytest.param(counted_at(np.int64(0)), {np.int64(0): 0, np.int64(1): 0}, id="a count by NumPy's numbers"),
    pytest.param(counted_at(Name.CAT), {Name.CAT: 0, Name.DOG: 0}, id="a count by names"),
    pytest.param(counted_at((0, 1)), {(0, 1): 0, (1, 1): 0}, id="a count by pairs"),
    pytest.param(called("write", b"3"), io.BytesIO(), id="a buffer"),
    pytest.param(lambda dataset: dataset.held.add(len(dataset.held)), {0}, id="a growing set"),
    pytest.param(kept(lambda: {time.perf_counter()}), None, id="a set of another value"),
    pytest.param(counted_at(0), mmap.mmap(-1, 4096), id="mapped memory"),
]
KEEPS: list[Any] = [
    pytest.param(kept(lambda: 3), None, id="its last value"),
    pytest.param(kept(lambda: float("nan")), None, id="no number"),
    pytest.param(kept(lambda: torch.ones(3).mul_(2)), None, id="a tensor made anew"),
    pytest.param(called("setdefault", 3, Slotted()), {}, id="a cache"),
    pytest.param(called("add", 3), set(), id="what it has read"),
    pytest.param(lambda dataset: dataset.held(3), functools.lru_cache(str), id="a function's cache"),
    pytest.param(
        lambda dataset: (dataset.held.seek(0), dataset.held.read()), io.BytesIO(b"3"), id="a buffer that it reads"
    ),
    pytest.param(opened_late, None, id="a file that it opens"),
    pytest.param(lambda dataset: dataset.held.acquire(blocking=False), threading.Lock(), id="a lock"),
    pytest.param(lambda _: torch.rand(3), None, id="global generators, which are seeded for each"),
]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTED", "0")


@pytest.mark.shows("a loader whose samples change what makes them is local, or refused, from its first step")
@pytest.mark.parametrize(("make", "held"), CHANGES)
def test_what_goes_on_from_sample_to_sample_is_a_change(make: Any, held: Any) -> None:
    dataset = Held(make, held)
    assert changed_by(lambda: dataset[3], {"dataset": dataset}).startswith(("dataset.", "os.environ"))


@pytest.mark.parametrize(("make", "held"), KEEPS)
def test_what_a_sample_finds_or_makes_as_it_was_is_none(make: Any, held: Any) -> None:
    dataset = Held(make, held)
    assert changed_by(lambda: dataset[3], {"dataset": dataset}) == ""
    if hasattr(dataset.kept, "close"):
        dataset.kept.close()


def test_of_large_data_the_beginning_is_looked_at() -> None:
    rows = [{"name": str(number), "at": (number, number + 1)} for number in range(300_000)]
    dataset = Held(kept(lambda: 3), [rows, np.zeros(10_000_000)])
    assert changed_by(lambda: dataset[3], {"dataset": dataset}) == ""
    assert 1_000 < len(state_of({"dataset": dataset})) < 10_000


class Counting(Dataset[Any]):
    """Each sample is another one the next time."""

    count = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.count += 1
        return 100 * index + self.count


@pytest.mark.shows("a loader whose samples change what makes them is local, or refused, from its first step")
def test_our_own_loader_refuses_a_dataset_that_its_samples_change(three: Any) -> None:
    said = r"samples of Counting change what makes them \(dataset\.count: \d+, then \d+\)"
    with DataLoader(Counting(), batch_size=2, service=three.name) as loader, pytest.raises(PipelineError, match=said):
        list(loader)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        pytest.param([0] * 5000, lambda value: value.__setitem__(4000, 1), id="list"),
        pytest.param({n: n for n in range(5000)}, lambda value: value.__setitem__(4000, 1), id="dict"),
        pytest.param([{"a": [n]} for n in range(5000)], lambda value: value[4000]["a"].append(1), id="nested"),
        pytest.param([Slotted() for _ in range(5000)], lambda value: setattr(value[4000], "count", 1), id="objects"),
        pytest.param({(n, "a") for n in range(5000)}, lambda value: value.remove((4000, "a")), id="set"),
        pytest.param(np.zeros(20 << 20), lambda value: value.__setitem__(-1, 1), id="large array"),
        pytest.param(np.array([{}] * 5000), lambda value: value.__setitem__(4000, 1), id="array of objects"),
    ],
)
def test_a_digest_sees_a_value_to_its_end(value: Any, change: Callable[[Any], object]) -> None:
    before = digest_of_state(value)
    assert digest_of_state(value) == before
    change(value)
    assert digest_of_state(value) != before


def test_what_is_too_large_for_a_digest_says_so() -> None:
    with pytest.raises(TooLarge):
        digest_of_state([0] * 10_002_000)
