"""One pass over an epoch, from a source that is written down: what it counts, raises and ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sample_datasets as datasets
from torch.utils.data import BatchSampler, SequentialSampler

from hetstream import DataLoader
from hetstream.mpi_dataworkers.errors import ServiceError
from hetstream.mpi_dataworkers.loader.connection import LoaderConnection
from hetstream.mpi_dataworkers.loader.pass_iterator import PassIterator
from hetstream.mpi_dataworkers.loader.session import Delivered
from hetstream.mpi_dataworkers.loader.shards import ListedSteps, PassShards

DATA = datasets.Augmented(24)


class ScriptedSource:
    """Gives what it is given: steps, exceptions to raise, and the end."""

    def __init__(self, *script: Delivered | Exception) -> None:
        self.shards = PassShards.undivided(ListedSteps(BatchSampler(SequentialSampler(DATA), 4, False), True), 0, 3)
        self.calls: list[str] = []
        self.is_away = False
        self.delay_s = 0.0
        self._script = iter(script)

    def begin(self) -> None:
        self.calls.append("begin")
        if self.is_away:
            raise ServiceError("it is away")

    def prepare(self) -> None:
        self.calls.append("prepare")

    def take(self) -> Delivered | Exception | None:
        threading.Event().wait(self.delay_s)
        step = next(self._script, None)
        if isinstance(step, ServiceError):
            raise step
        return step

    def advance(self) -> None:
        self.shards.has_more()  # draws the step
        self.shards.took(0, self.shards.position + 1)

    def shard_state(self) -> dict[str, Any] | None:
        return None

    def close(self) -> None:
        self.calls.append("close")

    def abandon(self) -> None:
        self.calls.append("abandon")


@pytest.fixture
def connection() -> Iterator[LoaderConnection]:
    with DataLoader(DATA, 4) as loader:
        yield loader._connection


def test_it_counts_each_step_once_and_the_pass_at_its_end(connection: LoaderConnection) -> None:
    source = ScriptedSource(Delivered("a", 4, 100), Delivered(None, 0, 0, num_skipped=4), Delivered("b", 3, 0, "local"))
    source.delay_s = 0.02
    assert list(PassIterator(connection, source, owner=None)) == ["a", "b"]
    counted = connection.statistics.counters
    assert (counted.steps, counted.samples, counted.bytes, counted.local_steps) == (2, 7, 100, 1)
    assert (counted.skipped, counted.epochs) == (4, 1)
    assert 3 * 0.02 <= counted.wait_s < counted.elapsed_s, "the step that was left out was waited for, too"
    assert source.calls == ["begin", *["prepare"] * 4, "close"]
    assert source.shards.position == 3


def test_an_exception_of_user_code_takes_its_step_and_one_of_the_service_does_not(connection: LoaderConnection) -> None:
    source = ScriptedSource(ValueError("of user code"), ServiceError("of the service"), Delivered("b", 4, 0))
    passing = PassIterator(connection, source, owner=None)
    with pytest.raises(ValueError, match="of user code"):
        next(passing)
    assert source.shards.position == 1
    with pytest.raises(ServiceError):
        next(passing)
    assert source.shards.position == 1
    assert list(passing) == ["b"]
    assert list(passing) == [], "at the end it stays"
    assert connection.statistics.counters.epochs == 1


def test_a_pass_that_is_closed_is_over_and_a_dropped_one_is_abandoned(connection: LoaderConnection) -> None:
    source = ScriptedSource(Delivered("a", 4, 0), Delivered("b", 4, 0))
    passing = PassIterator(connection, source, owner=None)
    next(passing)
    passing.close()
    passing.close()
    assert list(passing) == []
    assert source.calls == ["begin", "prepare", "close"]
    elapsed_s = connection.statistics.counters.elapsed_s
    dropped = ScriptedSource(Delivered("a", 4, 0))
    next(PassIterator(connection, dropped, owner=None))
    assert dropped.calls == ["begin", "prepare", "abandon"]
    assert connection.statistics.counters.elapsed_s > elapsed_s
    assert connection.statistics.counters.epochs == 0


def test_what_fails_to_begin_is_abandoned(connection: LoaderConnection) -> None:
    source = ScriptedSource()
    source.is_away = True
    with pytest.raises(ServiceError):
        PassIterator(connection, source, owner=None)
    gc.collect()
    assert source.calls == ["begin", "abandon"]


def test_the_owner_lives_as_long_as_the_pass(connection: LoaderConnection) -> None:
    class Owner:
        def __del__(self) -> None:
            source.calls.append("owner")

    source = ScriptedSource(Delivered("a", 4, 0))
    passing = PassIterator(connection, source, owner=Owner())
    next(passing)
    del passing
    assert source.calls == ["begin", "prepare", "abandon", "owner"], "its last counts are told before it leaves"
