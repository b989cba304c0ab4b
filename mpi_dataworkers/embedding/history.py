"""Parts of tables as logs have them: at a generation that was marked, or at the end of a lost server's log.

A generation has a mark of each rank in the log of each server. The rows of a rank's part are those that the log, which
had the part at that rank's mark, has before this mark; what other ranks wrote between is not its business. So a
generation is exact whichever servers there were, and for any number of servers and ranks that read it.

Nothing is changed here, and a live server may go on writing to a log that is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetstream.mpi_dataworkers.embedding.log import (
    BaseComplete,
    Record,
    SegmentFile,
    base_name,
    log_name,
    open_log,
    position,
    segments_of,
)
from hetstream.mpi_dataworkers.embedding.parts import Emptied, Parts
from hetstream.mpi_dataworkers.embedding.rows import Ids, Rows, rows_of_record
from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.wire.messages import (
    EMBEDDING_PARTS,
    EmbeddingTable,
    MarkGeneration,
    PartRows,
    WriteRows,
)

# Some rows: of which table, which, and they.
Chunk = tuple[EmbeddingTable, Ids, Rows]


@dataclass(frozen=True)
class _Extent:
    """Where a log has a part, as it was at some position.

    Attributes:
        since: number of the change with which it came there; what came later to another server is newer.
        client, tables: who had it, and with which tables.
        base: the segment whose base is the beginning; 0: none is there any more.
        begin, end: positions of the records that count; `begin` 0: those of the base, too.
    """

    folder: Path
    part: int
    since: int
    client: str
    tables: dict[str, EmbeddingTable]
    base: int
    begin: int
    end: int


@dataclass
class _History:
    """What a log says of its parts.

    Attributes:
        newest: mark of one generation.
        marks: of it, by rank: the last one.
        at_marks: where the rank's parts are, at its mark.
        at_end: where all parts are, at the end.
        clients: that the log knows.
    """

    newest: MarkGeneration | None = None
    marks: dict[int, MarkGeneration] = field(default_factory=dict)
    at_marks: dict[int, list[_Extent]] = field(default_factory=dict)
    at_end: list[_Extent] = field(default_factory=list)
    clients: frozenset[str] = frozenset()


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
    histories = {str(folder): _history_of(folder, name)}
    mark = histories[str(folder)].newest
    if mark is None:
        raise EmbeddingError(
            f"log {folder} has no generation {name!r}. A server keeps the last ones that it has marked: restore one of "
            "those, or name another server's log"
        )
    for log in mark.logs:
        if log not in histories:
            histories[log] = _history_of(Path(log), name)
    wanted = {part % mark.world_size for part in parts}
    missing = [f"of rank {rank} in {log}" for log in mark.logs for rank in sorted(wanted - histories[log].marks.keys())]
    if missing:
        raise EmbeddingError(
            f"generation {name!r} of {mark.world_size} ranks is not whole: there is no mark "
            f"{' and none '.join(missing[:8])}{' and more' if missing[8:] else ''}. Restore an older one"
        )
    found: dict[int, _Extent] = {}
    for log in mark.logs:
        for rank, extents in histories[log].at_marks.items():
            for extent in extents:
                known = found.get(extent.part)
                is_owner = extent.part % mark.world_size == rank
                if is_owner and (known is None or known.since < extent.since):
                    found[extent.part] = extent
    return _rows_of(found, parts, tables, f"generation {name!r}")


def parts_now(folder: Path, client: str, parts: Collection[int], tables: Sequence[EmbeddingTable]) -> Iterator[Chunk]:
    """Find parts at the end of the log of a server that is lost, and give their rows, as `parts_of_generation` does.

    A server that was lost before it had heard of the client had no rows of its parts.

    Raises:
        EmbeddingError: the server did not have them, or they do not fit the tables; at once. Later: it is damaged.
    """
    history = _history_of(folder, None)
    if client not in history.clients:
        return iter(())
    return _rows_of({extent.part: extent for extent in history.at_end}, parts, tables, f"log {folder}")


def _history_of(folder: Path, name: str | None) -> _History:
    """Look through a log, without its rows."""
    history = _History()
    with open_log(folder) as directory:
        segments = segments_of(directory)
        if not segments:
            raise EmbeddingError(f"{folder} is no log of an embedding server: there is no segment in it")
        first, last = min(segments), max(segments)
        with SegmentFile(directory, base_name(first)) as file:
            said = next((record.said for record in file.records()), None)
        if not isinstance(said, Parts):
            raise EmbeddingError(f"log {folder} is damaged: {base_name(first)} does not begin with its parts")
        walk = _Walk(folder, said, first)
        for number in range(first, last + 1):
            if "log" in segments[number]:
                with SegmentFile(directory, log_name(number)) as file:
                    for record in file.records():
                        walk.go_on(record, number, name, history)
        walk.base = max(number for number, kinds in segments.items() if "base" in kinds)
        history.at_end = walk.extents(None, position(last + 1, 0))
        history.clients = walk.clients
    return history


class _Walk:
    """What follows from the records of a log, one after the other.

    Attributes:
        base: the newest segment whose base is older than the record.
    """

    def __init__(self, folder: Path, parts: Parts, first: int) -> None:
        self._folder, self._parts = folder, parts
        self._begin = [0] * EMBEDDING_PARTS
        # That of the first log of all is empty. Of others, one knows it from `BaseComplete` on.
        self.base = first if first == 1 else 0

    def go_on(self, record: Record, segment: int, name: str | None, history: _History) -> None:
        """Take in a record."""
        said = record.said
        if isinstance(said, BaseComplete):
            self.base = said.segment
        elif not isinstance(said, Parts):
            at = position(segment, record.start)
            if isinstance(said, MarkGeneration) and said.name == name:
                clients = self._parts.clients
                rank = clients[said.client].rank
                # What an earlier start of the training has marked by this name is of another generation.
                history.marks = {other: mark for other, mark in history.marks.items() if mark.client in clients}
                history.newest = history.marks[rank] = said
                history.at_marks[rank] = self.extents(said.client, at)
            emptied: Emptied = self._parts.apply(said, record.waiting)
            for part in emptied:
                self._begin[part] = at

    @property
    def clients(self) -> frozenset[str]:
        """All that have opened tables."""
        return frozenset([*self._parts.clients, *self._parts.replaced])

    def extents(self, client: str | None, end: int) -> list[_Extent]:
        """Return where the parts of a client are, or of all."""
        return [
            _Extent(
                self._folder,
                part,
                self._parts.since[part],
                holder,
                dict(self._parts.clients[holder].tables),
                self.base,
                self._begin[part],
                end,
            )
            for part, holder in enumerate(self._parts.holder)
            if holder and client in (None, holder)
        ]


def _rows_of(
    found: dict[int, _Extent], parts: Collection[int], tables: Sequence[EmbeddingTable], where: str
) -> Iterator[Chunk]:
    missing = [part for part in parts if part not in found or not found[part].base]
    if missing:
        raise EmbeddingError(
            f"{where} does not have part {', '.join(map(str, missing[:8]))}{' and more' if missing[8:] else ''}: name "
            "the log of a server that had it, or restore another generation"
        )
    for part in parts:
        for table in tables:
            before = found[part].tables.get(table.name, table)
            if before.row_bytes != table.row_bytes or before.num_rows > table.num_rows:
                raise EmbeddingError(
                    f"{where} has table {table.name!r} with {before.num_rows} rows of {before.row_bytes} bytes, and "
                    f"the program has opened it with {table.num_rows} of {table.row_bytes}: weights, optimizer and "
                    "number of rows must be as they were"
                )
    groups: dict[tuple[Path, int], list[_Extent]] = {}
    for part in parts:
        groups.setdefault((found[part].folder, found[part].base), []).append(found[part])
    by_name = {table.name: table for table in tables}
    return (chunk for (folder, base), extents in groups.items() for chunk in _read(folder, base, extents, by_name))


def _read(folder: Path, base: int, extents: Sequence[_Extent], tables: dict[str, EmbeddingTable]) -> Iterator[Chunk]:
    """Read the rows of parts that begin with one base."""
    begin, end = np.zeros(EMBEDDING_PARTS, np.int64), np.zeros(EMBEDDING_PARTS, np.int64)
    for extent in extents:
        begin[extent.part], end[extent.part] = extent.begin, extent.end
    start = position(base, 0)
    clients = {extent.client for extent in extents}
    with open_log(folder) as directory:
        # What is in the base is of before its segment.
        with SegmentFile(directory, base_name(base)) as file:
            for record in file.records():
                yield from _chosen(file, record, (begin < start) & (end > 0), clients, tables)
        for number in range(base, max(segments_of(directory)) + 1):
            if position(number, 0) >= int(end.max()):
                break
            with SegmentFile(directory, log_name(number)) as file:
                for record in file.records():
                    at = position(number, record.start)
                    yield from _chosen(file, record, (begin <= at) & (at < end), clients, tables)


def _chosen(
    file: SegmentFile,
    record: Record,
    counts: npt.NDArray[np.bool_],
    clients: set[str],
    tables: dict[str, EmbeddingTable],
) -> Iterator[Chunk]:
    """Give the rows of a record that are of parts which count, if there are any."""
    said = record.said
    if not isinstance(said, WriteRows | PartRows) or said.client not in clients or said.table not in tables:
        return
    if not counts.any() or (isinstance(said, PartRows) and said.part >= 0 and not counts[said.part]):
        return
    table = tables[said.table]
    ids, rows = rows_of_record(file.rows(record), table)
    chosen = counts[ids & (EMBEDDING_PARTS - 1)]
    if chosen.all():
        yield table, ids, rows
    elif chosen.any():
        yield table, ids[chosen], rows[chosen]
