"""Memory of a host that several ranks take from: who has asked first gets it, and what a save allocates is no cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hetstream.checkpoint.errors import SharedMemoryFull
from hetstream.checkpoint.memory.segment import file_bytes
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import StoreIdentity
from hetstream.checkpoint.policy import Schedule
from hetstream.checkpoint.record.layout import Generation

SIZE = 4 << 20
SLOT = file_bytes(SIZE, 5000)

Open = Callable[[int], Store]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """A function that opens a rank's store."""
    stores: list[Store] = []

    def opened(rank: int) -> Store:
        stores.append(Store.open(StoreIdentity("77", 0, rank, tmp_path / "ckpt"), shared_memory=tmp_path))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The one number that the host is said to have available."""
    left = [0]
    monkeypatch.setattr("hetstream.checkpoint.memory.segment.available_bytes", lambda: left[0])
    return left


def test_memory_that_another_rank_has_announced_is_left_to_it(open_store: Open, available: list[int]) -> None:
    mine, other = open_store(0), open_store(1)
    available[0] = int(3.5 * SLOT)
    other.announce(SIZE, 1000)  # two slots
    with mine.begin(SIZE, 1000) as slot:
        slot.publish(Generation(1, 1), b"x", "00" * 16)
    available[0] -= SLOT
    with pytest.raises(SharedMemoryFull, match=r"other ranks of this host will take \d{7}"):
        mine.begin(SIZE, 1000)
    other.prepare(SIZE, 1000)
    available[0] = int(1.2 * SLOT)  # all that it has announced is taken
    with mine.begin(SIZE, 1000) as slot:
        slot.publish(Generation(1, 2), b"x", "00" * 16)


def test_memory_that_a_dead_rank_had_announced_is_free(open_store: Open, available: list[int]) -> None:
    mine, other = open_store(0), open_store(1)
    available[0] = int(1.5 * SLOT)
    other.announce(SIZE, 1000)
    with pytest.raises(SharedMemoryFull):
        mine.begin(SIZE, 1000)
    other._lock.release()
    mine.begin(SIZE, 1000).abandon()


def test_some_memory_is_left_to_the_program(open_store: Open, available: list[int]) -> None:
    store = open_store(0)
    available[0] = SLOT
    with pytest.raises(SharedMemoryFull, match=r"only \d+ bytes of memory are available, and 5% of that is left"):
        store.begin(SIZE, 1000)
    available[0] = int(1.1 * SLOT)
    store.begin(SIZE, 1000).abandon()


def test_what_is_allocated_for_a_save_is_told_apart(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(0)
    with store.begin(SIZE, 1000) as slot:
        assert slot.allocated_s > 0
        slot.publish(Generation(1, 1), b"x", "00" * 16)
    store.prepare(SIZE, 1000)
    with store.begin(SIZE, 1000) as slot:
        assert slot.allocated_s == 0
        slot.publish(Generation(1, 2), b"x", "00" * 16)
    busy = [slot for slot in store._slots if store._occupy(slot)]  # as while they are prepared
    monkeypatch.setattr(store._changed, "wait", lambda _timeout_s: [store._free(slot) for slot in busy])
    with store.begin(SIZE, 1000) as slot:
        assert 0 < slot.allocated_s <= slot.waited_s


def test_the_interval_does_not_count_what_the_first_save_allocates(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, float]] = []
    propose = Schedule.propose

    def noted(self: Schedule, step: int, blocked_s: float, now_s: float, once_s: float = 0.0) -> Any:
        told.append((blocked_s, once_s))
        return propose(self, step, blocked_s, now_s, once_s)

    monkeypatch.setattr(Schedule, "propose", noted)
    state = {"w": torch.ones(16 << 20)}
    with make() as checkpointer:
        for step in (1, 2):
            assert checkpointer.should_save(step) == (step == 1)
            checkpointer.save(step, state)
    [(blocked_s, once_s)] = told
    assert blocked_s / 3 < once_s < blocked_s  # 64 MiB are allocated, which takes longer than to copy them
