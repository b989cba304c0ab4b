"""Parts of tables as logs have them: at a generation that was marked, or at the end of a lost server's log.

A generation has a mark of each rank in the log of each server. The rows of a rank's part are those that the log, which
had the part at that rank's mark, has before this mark; what other ranks wrote between is not its business. So a
generation is exact whichever servers there were, and for any number of servers and ranks that read it.

Nothing is changed here, and a live server may go on writing to a log that is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
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
from hetstream.mpi_dataworkers.embedding.parts import Parts
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
    since: int
    client: str
    tables: dict[str, EmbeddingTable]
    base: int
    begin: int
    end: int


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
    mark = (first := _History(folder, name)).newest
    if mark is None:
        raise EmbeddingError(
            f"log {folder} has no generation {name!r}. A server keeps the last ones that it has marked: restore one of "
            "those, or name another server's log"
        )
    histories = {log: first if log == str(folder) else _History(Path(log), name) for log in mark.logs}
    wanted = {part % mark.world_size for part in parts}
    missing = [
        f"of rank {rank} in {log}" for log in mark.logs for rank in sorted(wanted - histories[log].marked.keys())
    ]
    if missing:
        raise EmbeddingError(
            f"generation {name!r} of {mark.world_size} ranks is not whole: there is no mark "
            f"{' and none '.join(missing[:8])}{' and more' if missing[8:] else ''}. Restore an older one"
        )
    found: dict[int, _Extent] = {}
    for history in histories.values():
        for part in parts:
            extent = history.marked[part % mark.world_size][1].get(part)
            if extent is not None and (part not in found or found[part].since < extent.since):
                found[part] = extent
    return _rows_of(found, parts, tables, f"generation {name!r}")


def parts_now(folder: Path, client: str, parts: Collection[int], tables: Sequence[EmbeddingTable]) -> Iterator[Chunk]:
    """Find parts at the end of the log of a server that is lost, and give their rows, as `parts_of_generation` does.

    A server that was lost before it had heard of the client had no rows of its parts.

    Raises:
        EmbeddingError: the server did not have them, or they do not fit the tables; at once. Later: it is damaged.
    """
    history = _History(folder, None)
    if client not in {*history.parts.clients, *history.parts.replaced}:
        return iter(())
    return _rows_of(history.at_end, parts, tables, f"log {folder}")


class _History:
    """What a log says of its parts, and of a generation; its rows are not looked at.

    Attributes:
        parts: as they are at the end.
        at_end: where they are then.
        newest: the generation's last mark.
        marked: by rank: its last mark, and where the rank's parts are then.
    """

    def __init__(self, folder: Path, name: str | None) -> None:
        self._folder = folder
        self._begin = [0] * EMBEDDING_PARTS
        self.newest: MarkGeneration | None = None
        self.marked: dict[int, tuple[MarkGeneration, dict[int, _Extent]]] = {}
        with open_log(folder) as directory:
            segments = segments_of(directory)
            if not segments:
                raise EmbeddingError(f"{folder} is no log of an embedding server: there is no segment in it")
            first, last = min(segments), max(segments)
            with SegmentFile(directory, base_name(first)) as file:
                said = next((record.said for record in file.records()), None)
            if not isinstance(said, Parts):
                raise EmbeddingError(f"log {folder} is damaged: {base_name(first)} does not begin with its parts")
            self.parts = said
            # That of the first log of all is empty. Of others, one knows it from `BaseComplete` on.
            self._base = first if first == 1 else 0
            for number in [number for number, kinds in segments.items() if "log" in kinds]:
                with SegmentFile(directory, log_name(number)) as file:
                    for record in file.records():
                        self._go_on(record, position(number, record.start), name)
        self._base = max(number for number, kinds in segments.items() if "base" in kinds)
        self.at_end = self._extents(None, position(last + 1, 0))

    def _go_on(self, record: Record, at: int, name: str | None) -> None:
        said = record.said
        if isinstance(said, BaseComplete):
            self._base = said.segment
        elif not isinstance(said, Parts):
            if isinstance(said, MarkGeneration) and said.name == name:
                clients = self.parts.clients
                # What an earlier start of the training has marked by this name is of another generation.
                self.marked = {rank: mark for rank, mark in self.marked.items() if mark[0].client in clients}
                self.newest = said
                self.marked[clients[said.client].rank] = said, self._extents(said.client, at)
            for part in self.parts.apply(said):
                self._begin[part] = at

    def _extents(self, client: str | None, end: int) -> dict[int, _Extent]:
        """Return where the parts of a client are, or of all."""
        return {
            part: _Extent(
                self._folder,
                self.parts.since[part],
                holder,
                dict(self.parts.clients[holder].tables),
                self._base,
                self._begin[part],
                end,
            )
            for part, holder in enumerate(self.parts.holder)
            if holder and client in (None, holder)
        }


def _rows_of(
    found: dict[int, _Extent], parts: Collection[int], tables: Sequence[EmbeddingTable], where: str
) -> Iterator[Chunk]:
    missing = [part for part in parts if part not in found or not found[part].base]
    if missing:
        raise EmbeddingError(
            f"{where} does not have part {', '.join(map(str, missing[:8]))}{' and more' if missing[8:] else ''}: name "
            "the log of a server that had it, or restore another generation"
        )
    groups: dict[tuple[Path, int], dict[int, _Extent]] = {}
    for part in parts:
        groups.setdefault((found[part].folder, found[part].base), {})[part] = found[part]
        for table in tables:
            before = found[part].tables.get(table.name, table)
            if before.row_bytes != table.row_bytes or before.num_rows > table.num_rows:
                raise EmbeddingError(
                    f"{where} has table {table.name!r} with {before.num_rows} rows of {before.row_bytes} bytes, and "
                    f"the program has opened it with {table.num_rows} of {table.row_bytes}: weights, optimizer and "
                    "number of rows must be as they were"
                )
    by_name = {table.name: table for table in tables}
    return (chunk for (folder, base), extents in groups.items() for chunk in _read(folder, base, extents, by_name))


def _read(folder: Path, base: int, extents: dict[int, _Extent], tables: dict[str, EmbeddingTable]) -> Iterator[Chunk]:
    """Read the rows of parts that begin with one base."""
    begin, end = np.zeros(EMBEDDING_PARTS, np.int64), np.zeros(EMBEDDING_PARTS, np.int64)
    for part, extent in extents.items():
        begin[part], end[part] = extent.begin, extent.end
    clients = {extent.client for extent in extents.values()}
    with open_log(folder) as directory:
        logs = [number for number in segments_of(directory) if number >= base and position(number, 0) < end.max()]
        for number, is_base in ((base, True), *((number, False) for number in logs)):
            with SegmentFile(directory, base_name(number) if is_base else log_name(number)) as file:
                for record in file.records():
                    # What is in the base is of before its segment.
                    at = position(number, 0) - 1 if is_base else position(number, record.start)
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
    if chosen.any():
        yield table, ids[chosen], rows[chosen]
