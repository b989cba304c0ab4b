"""Rows in memory: like a dict, and refused where they cannot be."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from hetstream.mpi_dataworkers.embedding.rows import RowStore, Tables, ids_of, rows_of_frame
from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.wire.messages import EMBEDDING_PARTS, EmbeddingTable


@pytest.mark.parametrize("row_bytes", [1, 12, 64])
def test_rows_are_like_a_dict(row_bytes: int) -> None:
    table = EmbeddingTable("t", 3000, row_bytes)
    store, oracle, chance = RowStore(table), dict[int, bytes](), random.Random(row_bytes)
    for _ in range(200):
        if chance.random() < 0.7:
            ids = np.array([chance.randrange(3000) for _ in range(chance.randrange(1, 90))], np.int64)
            rows = np.frombuffer(chance.randbytes(len(ids) * row_bytes), np.uint8).reshape(-1, row_bytes)
            assert store.num_new(ids) == len(set(ids.tolist()) - oracle.keys())
            store.write(ids, rows)
            oracle |= {int(row_id): bytes(row) for row_id, row in zip(ids, rows, strict=True)}  # the last counts
        else:
            part = chance.randrange(EMBEDDING_PARTS)
            store.drop(part)
            oracle = {row_id: row for row_id, row in oracle.items() if row_id % EMBEDDING_PARTS != part}
        rows, is_there = store.read(np.arange(3000))
        assert {row_id: bytes(rows[row_id]) for row_id in np.flatnonzero(is_there).tolist()} == oracle
        assert store.num_rows == len(oracle)
    found = {}
    for part in range(EMBEDDING_PARTS):
        for ids, rows in store.rows_of(part, 4 * row_bytes):
            assert len(ids) <= 4
            found |= {int(row_id): bytes(row) for row_id, row in zip(ids, rows, strict=True)}
    assert found == oracle
    most = store.num_bytes()
    for part in range(EMBEDDING_PARTS):
        store.drop(part)
    assert (store.num_rows, store.num_bytes()) == (0, 0)
    assert most > 0


def test_memory_of_rows_that_have_left_is_given_back() -> None:
    """Else a server that one more has relieved would stay full. Another thread sees each row with its own bytes."""
    table = EmbeddingTable("t", 40_000, 64)
    store, ids = RowStore(table), np.arange(40_000)
    store.write(ids, np.repeat(ids.view(np.uint8).reshape(-1, 8), 8, axis=1))
    full, is_over, seen, wrong = store.num_bytes(), threading.Event(), [0], [0]

    def look() -> None:
        while not is_over.is_set():
            for some, rows in store.rows_of(255, 4096):
                seen[0] += len(some)
                wrong[0] += int((rows != np.repeat(some.view(np.uint8).reshape(-1, 8), 8, axis=1)).sum())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for part in range(200):
            store.drop(part)
    finally:
        is_over.set()
        thread.join()
    assert seen[0] > 0
    assert wrong[0] == 0
    assert store.num_rows == (ids % 256 >= 200).sum()
    assert store.num_bytes() < 0.35 * full
    rows, is_there = store.read(ids)
    assert is_there.tolist() == (ids % 256 >= 200).tolist()
    assert (rows[is_there] == np.repeat(ids[is_there].view(np.uint8).reshape(-1, 8), 8, axis=1)).all()


def test_a_large_table_takes_memory_with_use_only() -> None:
    table = EmbeddingTable("huge", 1_000_000_000, 256)
    store = RowStore(table)
    store.write(np.array([0, 999_999_999]), np.full((2, 256), 7, np.uint8))
    assert store.read(np.array([999_999_999, 5]))[1].tolist() == [True, False]
    assert store.num_bytes() < 20_000


@pytest.mark.parametrize("ids", [[-1], [10], [0, 2**62], [-(2**63)]])
def test_ids_out_of_range_are_refused(ids: list[int]) -> None:
    with pytest.raises(EmbeddingError, match=r"id -?\d+ is out of range, it has the ids 0 to 9"):
        ids_of(np.array(ids, np.int64).data, EmbeddingTable("t", 10, 4))


def test_frames_of_another_size_are_refused() -> None:
    table = EmbeddingTable("t", 10, 4)
    with pytest.raises(EmbeddingError, match="ids of 7 bytes"):
        ids_of(bytes(7), table)
    with pytest.raises(EmbeddingError, match="9 bytes of rows came with 2 ids"):
        rows_of_frame(bytes(9), table, 2)


@pytest.mark.parametrize(
    "table", [("t", 0, 4), ("t", 2**31, 4), ("t", 4, 0), ("t", 4, 2**21), ("", 4, 4), ("a\nb", 4, 4)]
)
def test_impossible_tables_are_refused(table: tuple[str, int, int]) -> None:
    with pytest.raises(EmbeddingError, match=r"must"):
        RowStore(EmbeddingTable(*table))


def test_rows_beyond_the_limit_are_refused() -> None:
    table, other = EmbeddingTable("t", 1000, 1000), EmbeddingTable("other", 1000, 1000)
    tables = Tables(60_000)
    tables.add([table, other])
    ids = np.arange(20)
    tables.check_room(table, ids)
    tables[table].write(ids, np.zeros((20, 1000), np.uint8))
    tables.check_room(table, np.repeat(ids, 50))  # they are there
    with pytest.raises(EmbeddingError, match=r"50 more rows would take .* to 7\d.\d kB, and its limit is 60.0 kB"):
        tables.check_room(other, np.arange(50))
