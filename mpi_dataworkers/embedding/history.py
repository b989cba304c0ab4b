"""Parts of tables as logs have them: at a generation that was marked, or at the end of a lost server's log.

A generation has a mark of each rank in the log of each server. The rows of a rank's part are those that the log, which
had the part at that rank's mark, has before this mark; what other ranks wrote between is not its business. So a
generation is exact whichever servers there were, and for any number of servers and ranks that read it.

Nothing is changed here, and a live server may go on writing to a log that is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hetstream.mpi_dataworkers.embedding.log import Head, Mark, Segments, open_log, position
from hetstream.mpi_dataworkers.embedding.parts import Parts
from hetstream.mpi_dataworkers.embedding.rows import Ids, Rows, rows_of_record
from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.wire.messages import EMBEDDING_PARTS, EmbeddingTable, PartRows, WriteRows

# Some rows: of which table, which, and they.
Chunk = tuple[EmbeddingTable, Ids, Rows]


class _Place(NamedTuple):
    """Where a log has a part: behind `begin`, and before `end`, which is behind the base of this segment.

    Attributes:
        since: number of the change with which it came there; what came later to another server is newer.
        client, tables: who had it, and with which tables.
    """

    folder: Path
    base: int
    since: int
    begin: int
    end: int
    client: str
    tables: Mapping[str, EmbeddingTable]


def parts_of_generation(
    folder: Path, name: str, parts: Collection[int], tables: Sequence[EmbeddingTable]
) -> Iterator[Chunk]:
    """Find parts of a generation, and give their rows; of a row that comes again, the last counts.

    Args:
        folder: the log of one server that has marked it.
        name: of the generation.
        parts: which.
        tables: of these.

    Raises:
        EmbeddingError: it is not whole, or does not fit the tables; at once. Later: a log is damaged.
    """
    found = _marks(folder, name)
    if not found:
        raise EmbeddingError(
            f"log {folder} has no generation {name!r}. A server keeps the last ones that it has marked: restore one of "
            "those, or name another server's log"
        )
    mark, _ = next(reversed(found.values()))
    marks = {log: _marks(Path(log), name) for log in mark.said.logs}
    num_ranks = mark.said.world_size
    ranks = sorted({part % num_ranks for part in parts})
    if missing := [f"of rank {rank} in {log}" for log in marks for rank in ranks if rank not in marks[log]]:
        raise EmbeddingError(
            f"generation {name!r} of {num_ranks} ranks is not whole: there is no mark {' and none '.join(missing[:8])}"
            f"{' and more' if missing[8:] else ''}. Restore an older one"
        )
    places: dict[int, _Place] = {}
    for log in marks:
        for part in parts:
            mark, end = marks[log][part % num_ranks]
            since, begin = mark.places.get(part, (-1, 0))
            if since >= 0 and (part not in places or places[part].since < since):
                places[part] = _Place(Path(log), mark.base, since, begin, end, mark.said.client, mark.tables)
    return _rows_at(places, parts, tables, f"generation {name!r}")


def _marks(folder: Path, name: str) -> dict[int, tuple[Mark, int]]:
    """By rank the last mark of a generation in a log, the newest last, each with its position."""
    found: dict[int, tuple[Mark, int]] = {}
    with open_log(folder) as directory:
        for file in Segments(directory).files():
            for record in file.records():
                if isinstance(record.said, Mark) and record.said.said.name == name:
                    found.pop(record.said.rank, None)
                    found[record.said.rank] = record.said, record.at
    return found


def generations_of(folder: Path) -> set[str]:
    """Return the names of the generations that a log has.

    Raises:
        EmbeddingError: it cannot be read, or is damaged.
    """
    names: set[str] = set()
    with open_log(folder) as directory:
        for record in Segments(directory).changes():
            if isinstance(record.said, Head):
                names |= record.said.needs.keys()
            elif isinstance(record.said, Mark):
                names.add(record.said.said.name)
    return names


def parts_now(folder: Path, client: str, parts: Collection[int], tables: Sequence[EmbeddingTable]) -> Iterator[Chunk]:
    """Find parts at the end of the log of a server that is lost, and give their rows, as `parts_of_generation` does.

    A server that was lost before it had heard of the client had no rows of its parts.

    Raises:
        EmbeddingError: the server did not have them, or they do not fit the tables; at once. Later: it is damaged.
    """
    now = Parts()
    with open_log(folder) as directory:
        segments = Segments(directory)
        for record in segments.changes():
            if isinstance(record.said, Head):
                now = record.said.parts
            else:
                now.apply(record.said.said if isinstance(record.said, Mark) else record.said, record.at)
    if client not in {*now.clients, *now.replaced}:
        return iter(())
    end = position(segments.last + 1)
    places = {
        part: _Place(folder, segments.base, now.since[part], now.begin[part], end, holder, now.clients[holder].tables)
        for part, holder in enumerate(now.holder)
        if holder
    }
    return _rows_at(places, parts, tables, f"log {folder}")


def _rows_at(
    places: Mapping[int, _Place], parts: Collection[int], tables: Sequence[EmbeddingTable], where: str
) -> Iterator[Chunk]:
    if missing := [part for part in parts if part not in places]:
        raise EmbeddingError(
            f"{where} does not have part {', '.join(map(str, missing[:8]))}{' and more' if missing[8:] else ''}: name "
            "the log of a server that had it, or restore another generation"
        )
    for table in tables:
        for before in {places[part].tables.get(table.name, table) for part in parts}:
            if before.row_bytes != table.row_bytes or before.num_rows > table.num_rows:
                raise EmbeddingError(
                    f"{where} has table {table.name!r} with {before.num_rows} rows of {before.row_bytes} bytes, and "
                    f"the program has opened it with {table.num_rows} of {table.row_bytes}: weights, optimizer and "
                    "number of rows must be as they were"
                )
    by_base: dict[tuple[Path, int], dict[int, _Place]] = {}
    for part in parts:
        by_base.setdefault((places[part].folder, places[part].base), {})[part] = places[part]
    return (chunk for (folder, base), of_base in by_base.items() for chunk in _read(folder, base, of_base, tables))


def _read(folder: Path, base: int, places: Mapping[int, _Place], tables: Sequence[EmbeddingTable]) -> Iterator[Chunk]:
    """Read the rows of parts that begin with one base."""
    begin, end = np.zeros(EMBEDDING_PARTS, np.int64), np.zeros(EMBEDDING_PARTS, np.int64)
    for part, place in places.items():
        begin[part], end[part] = place.begin, place.end
    clients, by_name = {place.client for place in places.values()}, {table.name: table for table in tables}
    with open_log(folder) as directory:
        for file in Segments(directory).files(base):
            for record in file.records():
                said, counts = record.said, (begin <= record.at) & (record.at < end)
                if not isinstance(said, WriteRows | PartRows) or said.client not in clients or not counts.any():
                    continue
                if said.table in by_name and (not isinstance(said, PartRows) or said.part < 0 or counts[said.part]):
                    ids, rows = rows_of_record(file.rows(record), by_name[said.table])
                    chosen = counts[ids & (EMBEDDING_PARTS - 1)]
                    yield by_name[said.table], ids[chosen], rows[chosen]
