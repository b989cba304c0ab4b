"""Rows of embedding tables in memory, as bytes.

A table's memory is reserved once, for all its rows, and pages come with use: nothing is copied when it grows. Which
slot a row lies in, an index says that is ordered by part, so that the rows of a part are found without looking at the
others.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from hetstream.base.text import size_words
from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.wire.codec import Buffer
from hetstream.mpi_dataworkers.wire.messages import EMBEDDING_PARTS, EmbeddingTable

# Python names it only from 3.13 on (mmap(2), Linux).
_MAP_NORESERVE = 0x4000
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
# A slot is an int32, and slot 0 stands for a row that is not there.
_MOST_ROWS = (1 << 31) - 2
_MOST_ROW_BYTES = 1 << 20
# Slots that are free again, beside those in use: with more, rows move into them.
_MOST_FREE = 1 / 4
_PART_BITS = EMBEDDING_PARTS.bit_length() - 1
assert 1 << _PART_BITS == EMBEDDING_PARTS

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint8]


def check_table(table: EmbeddingTable) -> None:
    """Refuse a table that no server can have.

    Raises:
        EmbeddingError: it is one.
    """
    if not table.name or not table.name.isprintable():
        raise EmbeddingError(f"an embedding table is called {table.name!r}: its name must be printable text")
    if not 1 <= table.num_rows <= _MOST_ROWS or not 1 <= table.row_bytes <= _MOST_ROW_BYTES:
        raise EmbeddingError(
            f"embedding table {table.name!r} has {table.num_rows} rows of {table.row_bytes} bytes: it must have 1 to "
            f"{_MOST_ROWS} rows of 1 to {_MOST_ROW_BYTES} bytes. Divide it into several"
        )


def ids_of(frame: Buffer, table: EmbeddingTable) -> Ids:
    """Return the ids of a message.

    Raises:
        EmbeddingError: they are none of this table.
    """
    num_bytes = memoryview(frame).nbytes
    if num_bytes % 8:
        raise EmbeddingError(f"table {table.name!r}: ids of {num_bytes} bytes; each is an int64, so 8 bytes")
    ids = np.frombuffer(frame, np.int64)
    # As a number without a sign, a negative one is larger than all others.
    if len(ids) and int(ids.view(np.uint64).max()) >= table.num_rows:
        wrong = ids[(ids < 0) | (ids >= table.num_rows)]
        raise EmbeddingError(
            f"table {table.name!r}: id {wrong[0]} is out of range, it has the ids 0 to {table.num_rows - 1}. Is the "
            "table of the program larger than the one that it has opened?"
        )
    return ids


def rows_of_frame(frame: Buffer, table: EmbeddingTable, num_ids: int) -> Rows:
    """Return the rows of a message.

    Raises:
        EmbeddingError: they are not as many as the ids.
    """
    num_bytes = memoryview(frame).nbytes
    if num_bytes != num_ids * table.row_bytes:
        raise EmbeddingError(
            f"table {table.name!r}: {num_bytes} bytes of rows came with {num_ids} ids, and each row has "
            f"{table.row_bytes} bytes"
        )
    return np.frombuffer(frame, np.uint8).reshape(num_ids, table.row_bytes)


def rows_of_record(data: memoryview, table: EmbeddingTable) -> tuple[Ids, Rows]:
    """Return ids and rows that lie one behind the other."""
    num_ids = data.nbytes // (8 + table.row_bytes)
    ids = np.frombuffer(data, np.int64, num_ids)
    return ids, np.frombuffer(data, np.uint8, offset=8 * num_ids).reshape(num_ids, table.row_bytes)


def parts_of(ids: Ids) -> list[int]:
    """Return the parts of which these ids are."""
    touched = np.zeros(EMBEDDING_PARTS, np.bool_)
    touched[ids & (EMBEDDING_PARTS - 1)] = True
    return [int(part) for part in np.flatnonzero(touched)]


class RowStore:
    """The rows of one table. Another thread may look at them while they change: it then sees rows of before and after.

    Raises:
        EmbeddingError: there is no memory for it.

    Attributes:
        table: which.
        num_rows: that are here.
    """

    def __init__(self, table: EmbeddingTable) -> None:
        check_table(table)
        self.table = table
        self.num_rows = 0
        self._per_part = -(-table.num_rows // EMBEDDING_PARTS)
        try:
            index = mmap.mmap(-1, self._per_part * EMBEDDING_PARTS * 4, flags=_RESERVED)
            self._memory = mmap.mmap(-1, (table.num_rows + 1) * table.row_bytes, flags=_RESERVED)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            raise EmbeddingError(
                f"no memory can be reserved for table {table.name!r}, {table.num_rows} rows of {table.row_bytes} "
                f"bytes: {error}. See ulimit -v and /proc/sys/vm/overcommit_memory, or divide the table"
            ) from error
        self._slots = np.frombuffer(index, np.int32)
        self._rows = np.frombuffer(self._memory, np.uint8).reshape(-1, table.row_bytes)
        # One item for each row: assigned faster than by its bytes.
        self._items = self._rows.view(np.dtype((np.void, table.row_bytes))).reshape(-1)
        self._free = np.empty(0, np.int32)
        self._next = 1  # the first slot that was never used
        # Held while rows are where they were, and where they will be.
        self._guard = threading.Lock()

    def num_bytes(self, num_more: int = 0) -> int:
        """Memory in use with so many more rows, at most; slots that are free again are still in use."""
        slots = self._next - 1 + max(0, num_more - len(self._free))
        index_bytes = min(self._slots.nbytes, (self.num_rows + num_more) * mmap.PAGESIZE)
        return slots * self.table.row_bytes + index_bytes

    def read(self, ids: Ids) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """Return rows in the order of the ids, and whether each is here; where it is not, its bytes mean nothing."""
        slots = self._slots.take(self._places(ids))
        return self._rows.take(slots, axis=0), slots != 0

    def num_new(self, ids: Ids) -> int:
        """How many of these rows are not here."""
        places = self._places(ids)
        return len(np.unique(places[self._slots[places] == 0]))

    def write(self, ids: Ids, rows: Rows) -> None:
        """Set rows; of those that are there twice, the last counts."""
        places = self._places(ids)
        slots = self._slots.take(places)
        if not slots.all():
            new = places[slots == 0]
            taken = self._take_slots(len(new))
            self._slots[new] = taken
            # Of a row that is there twice, the last slot is its own.
            if len(unused := taken[self._slots[new] != taken]):
                self._free = np.concatenate([self._free, unused])
                self.num_rows -= len(unused)
            slots = self._slots.take(places)
        self._items[slots] = np.ascontiguousarray(rows).view(self._items.dtype).reshape(-1)

    def drop(self, part: int) -> None:
        """Forget the rows of a part."""
        of_part = self._of_part(part)
        places = np.flatnonzero(of_part)
        if not len(places):
            return
        self._free = np.concatenate([self._free, of_part[places]])
        of_part[places] = 0
        self.num_rows -= len(places)
        if len(self._free) > _MOST_FREE * self.num_rows:
            self._close_ranks()

    def _close_ranks(self) -> None:
        """Have the rows in the first slots, and give the memory behind them back."""
        last = self.num_rows
        holes = self._free[self._free <= last]
        for of_part in map(self._of_part, range(EMBEDDING_PARTS)):
            places = np.flatnonzero(of_part > last)
            taken, holes = holes[: len(places)], holes[len(places) :]
            with self._guard:
                self._items[taken] = self._items[of_part[places]]
                of_part[places] = taken
        self._free, self._next = np.empty(0, np.int32), last + 1
        unused = -(-self._next * self.table.row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if unused < len(self._memory):
            self._memory.madvise(mmap.MADV_DONTNEED, unused)

    def rows_of(self, part: int, chunk_bytes: int) -> Iterator[tuple[Ids, Rows]]:
        """Give the rows of a part, as they are when each chunk is asked for."""
        of_part = self._of_part(part)
        chunk = max(1, chunk_bytes // self.table.row_bytes)
        all_places = np.flatnonzero(of_part)
        for start in range(0, len(all_places), chunk):
            places = all_places[start : start + chunk]
            with self._guard:
                slots = of_part[places]
                rows = self._rows.take(slots, axis=0)
            yield ((places << _PART_BITS) | part)[slots != 0], rows[slots != 0]

    def _places(self, ids: Ids) -> Ids:
        return (ids & (EMBEDDING_PARTS - 1)) * self._per_part + (ids >> _PART_BITS)

    def _of_part(self, part: int) -> npt.NDArray[np.int32]:
        return self._slots[part * self._per_part : (part + 1) * self._per_part]

    def _take_slots(self, count: int) -> npt.NDArray[np.int32]:
        self.num_rows += count
        cut = max(0, len(self._free) - count)
        reused, self._free = self._free[cut:], self._free[:cut]
        first, self._next = self._next, self._next + count - len(reused)
        return np.concatenate([reused, np.arange(first, self._next, dtype=np.int32)])


class Tables:
    """The rows of all tables of a server.

    Args:
        limit_bytes: of memory that they may take together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._stores: dict[EmbeddingTable, RowStore] = {}

    def add(self, tables: Collection[EmbeddingTable]) -> None:
        """Have these tables, beside those that are here.

        Raises:
            EmbeddingError: one of them cannot be had; then none of them is new.
        """
        new = {table: RowStore(table) for table in tables if table not in self._stores}
        self._stores |= new

    def keep_only(self, tables: Collection[EmbeddingTable]) -> None:
        """Forget all others."""
        self._stores = {table: store for table, store in self._stores.items() if table in tables}

    def __getitem__(self, table: EmbeddingTable) -> RowStore:
        return self._stores[table]

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(store.num_rows for store in list(self._stores.values()))

    @property
    def num_bytes(self) -> int:
        """Memory that they take together, at most."""
        return sum(store.num_bytes() for store in list(self._stores.values()))

    def check_room(self, table: EmbeddingTable, ids: Ids) -> None:
        """Refuse rows for which there is no memory.

        Raises:
            EmbeddingError: these are such.
        """
        store = self._stores[table]
        others = self.num_bytes - store.num_bytes()
        if others + store.num_bytes(len(ids)) <= self.limit_bytes:
            return
        wanted = others + store.num_bytes(num_new := store.num_new(ids))
        if num_new and wanted > self.limit_bytes:
            raise EmbeddingError(
                f"table {table.name!r}: {num_new} more rows would take the memory of this embedding server to "
                f"{size_words(wanted)}, and its limit is {size_words(self.limit_bytes)}. Start another server, or this "
                "one with a larger --memory"
            )
