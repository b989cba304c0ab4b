"""Rows at hand against a dict, in random orders, and the memory that is kept of their uses."""

from __future__ import annotations

import numpy as np
import pytest

from hetstream.mpi_dataworkers.embedding.row_cache import RowCache


@pytest.mark.parametrize("seed", range(5))
def test_rows_leave_that_nobody_needs_the_longest_unused_first(seed: int) -> None:
    random = np.random.default_rng(seed)
    cache = RowCache(10_000, 200)
    slot_of: dict[int, int] = {}
    last_use: dict[int, int] = {}
    coming: set[int] = set()
    for step in range(400):
        ids = np.unique((random.random(random.integers(1, 120)) ** 3 * 10_000).astype(np.int64))
        waiting = random.choice(sorted(slot_of.values()), size=min(len(slot_of), 20), replace=False) if slot_of else []
        claimed = cache.claim(ids, step)
        if claimed is None:
            slots_waiting = np.asarray(waiting, np.int64)
            left, slots, _ = cache.evict(len(ids) - cache.num_free, step, [slots_waiting])
            for row_id, slot in zip(left.tolist(), slots.tolist(), strict=True):
                assert slot_of.pop(row_id) == slot
                assert row_id not in coming
                assert slot not in slots_waiting
                assert last_use.pop(row_id) < step
            claimed = cache.claim(ids, step)
            assert claimed is not None
        for row_id, slot, is_new in zip(ids.tolist(), *(each.tolist() for each in claimed), strict=True):
            assert is_new == (row_id not in slot_of)
            assert slot_of.setdefault(row_id, slot) == slot
            last_use[row_id] = step
        assert len({*slot_of.values()}) == len(slot_of) == cache.capacity - cache.num_free
        coming |= {*ids[claimed[1]].tolist()}
        arrived = [row_id for row_id in coming if random.random() < 0.9]
        cache.coming[[slot_of[row_id] for row_id in arrived]] = False
        coming -= {*arrived}


def test_uses_of_rows_that_never_leave_take_no_more_memory() -> None:
    cache = RowCache(1000, 1000)
    for step in range(5000):
        cache.claim(np.arange(step % 7, 900, 3), step // 10)
    assert sum(len(slots) for _, _, slots in cache._uses) <= 5 * cache.capacity
    ids, _, _ = cache.evict(1000, 500, [])
    assert sorted(ids) == [], "all are coming"
    cache.coming[:] = False
    ids, _, _ = cache.evict(1000, 500, [])
    assert len(ids) == 900
