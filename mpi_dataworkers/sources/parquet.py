"""Map-style dataset over the rows of Parquet files, a row group at a time.

Called by the user's program; iterated by a loader or a data worker. It keeps no file open and never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hetstream.base.installed import install_command
from hetstream.mpi_dataworkers.errors import SourceError
from hetstream.mpi_dataworkers.sources.table import Column, ColumnType, TableDataset

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as exc:
    raise ImportError(f"hetstream.mpi_dataworkers.sources.parquet needs pyarrow: {install_command('parquet')}") from exc


class ParquetDataset(TableDataset):
    """Samples from the rows of Parquet files. A group of rows is a row group of the file.

    Columns of lists have the types `list<int64>` and so on; a list that is missing is an empty one, a value that is
    missing in a list an error. Smaller integers, and bool, may be read as larger ones, and float32 as float64.

    Args, Raises: As TableDataset.
    """

    def look_at(self, path: Path) -> tuple[int, ...]:
        with _opened(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            problems = []
            for name, kind in self._types.items():
                if kind.dtype == "hex":
                    problems.append(f"column {name}: hex is for CSV files")
                elif name not in schema.names:
                    problems.append(f"there is no column {name}")
                elif schema.names.count(name) > 1:
                    problems.append(f"column {name} is there twice")
                elif not _is_read_as(schema.field(name).type, kind):
                    problems.append(f"column {name} holds {schema.field(name).type}, and not {self.columns[name]}")
            if problems:
                shown = ", ".join(schema.names[:20]) + f" and {len(schema.names) - 20} more" * (len(schema.names) > 20)
                raise SourceError.of(path, f"{'; '.join(problems)}. The file has: {shown}")
            rows = tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
            if wrong := [number for number, count in enumerate(rows) if count < 0]:
                raise SourceError.of(path, f"row group {wrong[0]}: it is said to have {rows[wrong[0]]} rows")
            return rows

    def read_group(self, path: Path, number: int) -> tuple[Mapping[str, Column], Mapping[int, str]]:
        with _opened(path, f"row group {number}: ") as file:
            table = self._table(file, path, number)
            num_rows = file.metadata.row_group(number).num_rows
            if table.num_rows != num_rows:
                name = next(iter(self._types))
                raise SourceError.of(
                    path, f"row group {number}: column {name}: {table.num_rows} rows, and the group has {num_rows}"
                )
            faults: dict[int, str] = {}
            return {name: self._column(name, table.column(name), faults) for name in self._types}, faults

    def _table(self, file: Any, path: Path, number: int) -> Any:
        # One thread: a data worker has one CPU, and a fork would leave the others behind.
        try:
            return file.read_row_group(number, columns=list(self._types), use_threads=False)
        except _UNREADABLE:
            for name in self._types:
                with _opened(path, f"row group {number}: column {name}: ") as again:
                    again.read_row_group(number, columns=[name], use_threads=False)
            raise

    def _column(self, name: str, chunks: Any, faults: dict[int, str]) -> Column:
        kind = self._types[name]
        array = chunks.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
        starts = None
        if kind.is_list:
            lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
            starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            array = array.flatten()
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        if not valid.all() and not kind.is_nullable:
            places = np.flatnonzero(~valid)
            if starts is None:
                what = f'column {name} is missing: say "{kind.dtype}?" if it may be'
            else:
                places, what = np.searchsorted(starts, places, side="right") - 1, f"column {name}: a value is missing"
            faults |= dict.fromkeys(places.tolist(), what)
        if pa.types.is_boolean(array.type):
            array = array.cast(pa.int8())
        values = array.fill_null(0).to_numpy(zero_copy_only=False).astype(kind.dtype)
        return Column(values, valid if kind.is_nullable else None, starts)


def _is_read_as(found: Any, kind: ColumnType) -> bool:
    """Whether a column of an Arrow type is read as `kind` without losing anything."""
    is_list = pa.types.is_list(found) or pa.types.is_large_list(found)
    if is_list != kind.is_list:
        return False
    inner = found.value_type if is_list else found
    if not (pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)):
        return False
    wanted = np.dtype(kind.dtype)
    given = np.dtype(inner.to_pandas_dtype())
    return bool(np.can_cast(given, wanted, "safe")) and (given.kind == "f") == (wanted.kind == "f")


# What Arrow raises for a file that is none, or is damaged; UnicodeError for the name of a column, or of a file.
_UNREADABLE = (pa.ArrowException, OSError, UnicodeError)


@contextmanager
def _opened(path: Path, where: str = "") -> Iterator[Any]:
    """The file; what Arrow says of it becomes a SourceError."""
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except _UNREADABLE as exc:
        raise SourceError.of(path, f"{where}cannot be read as Parquet: {exc}") from exc
