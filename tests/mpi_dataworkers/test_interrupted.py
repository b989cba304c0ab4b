"""A handler of a signal raises in the middle of `next`, wherever that may be: the program gets the exception, and then
each batch once, in order.

A signal comes at each line of ours in turn. Lines of others count as the line of ours that has called them.
"""

from __future__ import annotations

import functools
import linecache
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import sample_datasets as datasets
import torch
from hooking import hooked
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hetstream import DataLoader as OwnLoader
from hetstream.mpi_dataworkers.loader import canary
from hetstream.mpi_dataworkers.process.handlers import of_handler

OURS = str(Path(canary.__file__).parents[1])
NUM_STEPS = 9
# Of the lines, so many are tried where a pass begins processes, and, slow, so many.
FEW, MANY = 6, 100
Place = tuple[str, int, str]


class Interrupted(Exception):
    """Raised by the handler."""


def interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise Interrupted


# In a finaliser Python itself drops what a handler raises.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


def is_below_torch(frame: FrameType) -> bool:
    """Whether torch's own iterator, which has a batch in its hands, draws the next step from its sampler: it loses that
    batch with any sampler that raises."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_name != "_process_data":
        caller = caller.f_back
    return caller is not None


@contextmanager
def traced(at_line: Callable[[Place], None]) -> Iterator[None]:
    """Calls a function before each line of ours that this thread runs."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS) or (event == "call" and is_below_torch(frame)):
            return None
        # A line that takes a lock is run once more where it is given back, and there Python calls no handler.
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith(
            "with "
        ):
            at_line((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_STEPS

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


class Raises(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise KeyError(index)
        return torch.tensor(index)


def its_worker(first: int, batch: list[Any]) -> Any:
    """From a sample on, another batch in each of torch's workers, and another one still in a data worker."""
    info = get_worker_info()
    assert info is not None
    return torch.stack([*batch, torch.tensor(info.id if int(batch[0]) >= first else 0)])


def as_list(batch: Any) -> Any:
    """Of a batch of a stream the numbers: its values are others in each epoch."""
    return batch[1].tolist() if isinstance(batch, list) else batch.flatten().tolist()


def batches(loader: Any, at: Place | None, occurrence: int, seen: dict[Place, int]) -> tuple[list[Any], int]:
    """What a program gets that goes on after each exception of its handler, and how many of these there were."""
    given: list[Any] = []
    num_raised = num_there = 0

    def at_line(place: Place) -> None:
        nonlocal num_there
        seen[place] = seen.get(place, 0) + 1
        if place == at:
            num_there += 1
            if num_there == occurrence:
                signal.raise_signal(signal.SIGUSR1)

    iterator = iter(loader)
    while True:
        try:
            with traced(at_line):
                batch = next(iterator)
        except Interrupted as error:
            num_raised += of_handler(error)
        except StopIteration:
            return given, num_raised
        except KeyError:
            given.append("KeyError")
        else:
            given.append(as_list(batch))


def lost_at(make: Callable[[], Any], expected: list[Any] | None, most: int) -> list[str]:
    """Where an exception of the handler changes what the program gets; `most` lines are tried, the first and the last
    time that they are run."""
    seen: dict[Place, int] = {}
    without = batches(make(), None, 0, seen)
    assert without == (expected or without[0], 0)
    assert len(without[0]) >= NUM_STEPS
    points = [(place, occurrence) for place, count in seen.items() for occurrence in sorted({1, count})]
    wrong = []
    for place, occurrence in points[:: max(1, len(points) // most)]:
        canary._num_proved.clear()
        found, num_raised = batches(make(), place, occurrence, {})
        if found != without[0] or num_raised > 1:
            wrong.append(f"{place}, time {occurrence}, raised {num_raised} times: {found} in place of {without[0]}")
    return wrong


def torchs(dataset: Any = None, **options: Any) -> Any:
    return DataLoader(Numbers() if dataset is None else dataset, 1, num_workers=2, **options)


@pytest.mark.parametrize("most", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(torchs, id="plain"),
        pytest.param(lambda: torchs(Raises()), id="a sample raises"),
        pytest.param(lambda: torchs(collate_fn=functools.partial(its_worker, 0)), id="local from its first step on"),
        pytest.param(lambda: torchs(collate_fn=functools.partial(its_worker, 5)), id="local soon"),
    ],
)
def test_a_handler_that_raises_at_any_line_takes_no_batch_along(
    make: Callable[[], Any], most: int, three: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = batches(make(), None, 0, {})
    with hooked(three.name, monkeypatch):
        assert not lost_at(make, expected, most)


@pytest.mark.parametrize(
    ("dataset", "options", "is_streamed"),
    [
        pytest.param(Numbers(), {}, True, id="in its own order", marks=pytest.mark.slow),
        pytest.param(Raises(), {"sampler": range(NUM_STEPS)}, True, id="from a sampler, and a sample raises"),
        pytest.param(datasets.Log(2 * NUM_STEPS), {"num_shards": 3}, True, id="of shards", marks=pytest.mark.slow),
        pytest.param(Raises(), {"sampler": range(NUM_STEPS)}, False, id="in process", marks=pytest.mark.slow),
    ],
)
def test_nor_does_it_of_hetstreams_own_loader(
    dataset: Any, options: dict[str, Any], is_streamed: bool, three: Any
) -> None:
    options = options if "sampler" in options else options | {"shuffle": False}
    options = options | ({"service": three.name} if is_streamed else {})
    with OwnLoader(dataset, 1, **options) as loader:
        assert not lost_at(lambda: loader, None, sys.maxsize)
