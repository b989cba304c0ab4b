"""Rows of files with columns: what `sources.csv` and `sources.parquet` have in common.

A dataset is map-style: a sample is a row, so that order, shards and resume are the loader's, as for any other. It reads
a group of rows at a time and keeps the last few groups of its process. A `Row` is no more than a place in such a group,
so that a batch of many rows is put together column by column (`features.collate.collate_rows`), not value by value.
Never imports torch.
"""

from __future__ import annotations

import csv
import hashlib
import io
import operator
import os
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetstream.base.installed import install_command
from hetstream.base.text import printable
from hetstream.mpi_dataworkers.errors import SourceError

DTYPES = ("float32", "float64", "int32", "int64")


class Column(NamedTuple):
    """The values of a column in a group of rows.

    Attributes:
        values: one for each row, or those of all lists; anything where one is missing.
        valid: whether each is there, of a column whose type ends in `?`.
        starts: of a column of lists, where each row's begins in `values`, and behind the last one where it ends.
    """

    values: npt.NDArray[Any]
    valid: npt.NDArray[np.bool_] | None = None
    starts: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows that were read together.

    Attributes:
        columns: by name.
        origin: file and group, in words.
        first_row: of the file, counted from 0.
        faults: what is wrong with rows that cannot be used, by their places in the group.
    """

    columns: Mapping[str, Column]
    origin: str = ""
    first_row: int = 0
    faults: Mapping[int, str] = field(default_factory=dict)


class Row(Mapping[str, Any]):
    """One row: the values by the columns' names. None where one is missing, an array where it is a list."""

    __slots__ = ("group", "place")

    def __init__(self, group: RowGroup, place: int) -> None:
        self.group = group
        self.place = place

    def __getitem__(self, name: str) -> Any:
        values, valid, starts = self.group.columns[name]
        if starts is not None:
            return values[starts[self.place] : starts[self.place + 1]].copy()
        return None if valid is not None and not valid[self.place] else values[self.place]

    @property
    def origin(self) -> str:
        """Where it is from, in words: file, row group, row of the group and of the file, all counted from 0."""
        return f"{self.group.origin}, row {self.place} (row {self.group.first_row + self.place} of the file)"

    def __iter__(self) -> Iterator[str]:
        return iter(self.group.columns)

    def __len__(self) -> int:
        return len(self.group.columns)

    def __repr__(self) -> str:
        return f"Row({dict(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # not the group that it is in


class ColumnType(NamedTuple):
    """What a column holds, as a user writes it: `int64`, `float32?`, `list<int64>`, `hex`."""

    dtype: str
    is_nullable: bool
    is_list: bool

    @classmethod
    def of(cls, text: object) -> ColumnType | None:
        """Read it; None if it is no such text."""
        if not isinstance(text, str):
            return None
        inner = text.removesuffix("?")
        is_list = inner.startswith("list<") and inner.endswith(">")
        dtype = inner[5:-1] if is_list else inner
        known = dtype in DTYPES or (dtype == "hex" and not is_list)
        return cls(dtype, text.endswith("?"), is_list) if known and not (is_list and text.endswith("?")) else None


class TableFile(NamedTuple):
    """One file of a dataset, as it was when the dataset was made.

    Attributes:
        path: absolute.
        num_bytes, mtime_ns: by which a change is seen.
        group_rows: rows of each group.
    """

    path: Path
    num_bytes: int
    mtime_ns: int
    group_rows: tuple[int, ...]


class TableDataset(ABC):
    """Samples from the rows of files with columns; sample i is row i of all files together.

    A file is opened for each group of rows that is read and closed again, so the object can be pickled and forked.

    Args:
        paths: One file, or several, in the order of the rows.
        columns: The type of each column that a row is to have, by its name in the files: `float32`, `float64`,
            `int32` or `int64`; with `?` behind it where values may be missing.
        cached_groups: How many groups of rows each process keeps, at least 1.

    Raises:
        SourceError: A file or column is missing, unreadable or of another type; every problem that is seen.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Mapping[str, str],
        *,
        cached_groups: int = 4,
    ) -> None:
        given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        # Absolute, because a data worker may run in another directory.
        absolute = [Path(path).absolute() for path in given]
        self.columns = dict(columns)
        types = {name: ColumnType.of(text) for name, text in self.columns.items()}
        problems = [
            f"column {name}: {self.columns[name]!r} is no type of a column"
            for name, kind in types.items()
            if kind is None
        ]
        problems += ["columns is empty; name at least one"] * (not columns) + ["no file is given"] * (not given)
        problems += [f"cached_groups={cached_groups}: at least 1"] * (cached_groups < 1)
        if problems:
            raise SourceError.of(type(self).__name__, f"{'; '.join(problems)}")
        self._types = {name: kind for name, kind in types.items() if kind is not None}
        self._cached_groups = cached_groups
        self._groups: OrderedDict[int, RowGroup] = OrderedDict()
        self._files = tuple(self._looked_at(path) for path in absolute)
        sizes = [rows for file in self._files for rows in file.group_rows]
        self._ends = [int(end) for end in np.cumsum(sizes)]
        self._places = [(file, index) for file in self._files for index in range(len(file.group_rows))]

    @abstractmethod
    def look_at(self, path: Path) -> tuple[int, ...]:
        """How many rows each group of a file has; checks what can be checked without reading it all.

        Raises:
            SourceError: The file cannot be used.
        """

    @abstractmethod
    def read_group(self, path: Path, number: int) -> tuple[Mapping[str, Column], Mapping[int, str]]:
        """The columns of one group of rows, and `RowGroup.faults`.

        Raises:
            SourceError: The group cannot be read; the message names it.
        """

    def where(self, path: Path, number: int, place: int) -> str:  # noqa: ARG002, a subclass may look into the file
        """In words, the row at a place in a group of a file."""
        return f"row group {number}, row {place}"

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """Rows at `indices`, in that order; each group that they are in is read once.

        Raises:
            IndexError: An index is outside `-len(self) .. len(self) - 1`.
            SourceError: As `read_group`; or a file has changed since this object was made; or a row cannot be used,
                and then the error's `row` is its place among `indices`.
        """
        found: dict[int, RowGroup] = {}  # of this call, whatever is kept
        rows: list[Row] = []
        for index in indices:
            at = operator.index(index)
            if not -len(self) <= at < len(self):
                raise IndexError(f"index {at} is outside 0..{len(self) - 1}: {self!r}")
            at %= len(self)
            number = bisect_right(self._ends, at)
            if number not in found:
                found[number] = self._group(number)
            row = Row(found[number], at - (self._ends[number - 1] if number else 0))
            if fault := row.group.faults.get(row.place):
                file, of_file = self._places[number]
                raise SourceError.of(file.path, f"{self.where(file.path, of_file, row.place)}: {fault}", len(rows))
            rows.append(row)
        return rows

    @property
    def groups(self) -> list[range]:
        """The rows of each group: those of a group come with one read."""
        return [range(start, end) for start, end in zip([0, *self._ends], self._ends, strict=False)]

    @property
    def fingerprint(self) -> str:
        """What the rows depend on: the columns and the files, by size and by when they were last written."""
        known = [(file.path.name, file.num_bytes, file.mtime_ns, sum(file.group_rows)) for file in self._files]
        return hashlib.blake2b(repr((self.columns, known)).encode(), digest_size=16).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": OrderedDict()}

    def __repr__(self) -> str:
        files = str(self._files[0].path) if len(self._files) == 1 else f"{len(self._files)} files"
        return f"{type(self).__name__}({files}, {len(self.columns)} columns, length={len(self)})"

    def _group(self, number: int) -> RowGroup:
        group = self._groups.pop(number, None)
        if group is None:
            file, of_file = self._places[number]
            now = _status(file.path)
            if (now.st_size, now.st_mtime_ns) != (file.num_bytes, file.mtime_ns):
                raise SourceError.of(
                    file.path,
                    f"row group {of_file}: the file has changed since this {type(self).__name__} was made "
                    f"({file.num_bytes:,} bytes then, {now.st_size:,} now); write a new file instead",
                )
            try:
                origin = printable(f"{file.path}: row group {of_file}")
                columns, faults = self.read_group(file.path, of_file)
                group = RowGroup(columns, origin, sum(file.group_rows[:of_file]), faults)
            except OSError as exc:
                raise SourceError.of(file.path, f"row group {of_file}: cannot be read: {exc}") from exc
        self._groups[number] = group
        while len(self._groups) > self._cached_groups:
            self._groups.popitem(last=False)
        return group

    def _looked_at(self, path: Path) -> TableFile:
        status = _status(path)
        return TableFile(path, status.st_size, status.st_mtime_ns, self.look_at(path))


class RowGroupSampler:
    """A shuffled order in which each group of rows is read once: groups at random, and the rows of each at random.

    Given to a loader as `sampler=`. Row by row at random (`shuffle=True`) a batch is of rows of all groups, and each of
    them is read anew for nearly every batch.

    Args:
        dataset: Of `sources.csv` or `sources.parquet`.
        seed: With the epoch it decides the order.
        together: Groups whose rows are mixed with one another. The dataset's `cached_groups` is at least as large.
    """

    def __init__(self, dataset: TableDataset, *, seed: int = 0, together: int = 4) -> None:
        if not 1 <= together <= dataset._cached_groups:
            raise SourceError(f"together={together}: 1 to cached_groups={dataset._cached_groups} of the dataset")
        self._groups = dataset.groups
        self._seed = seed
        self._together = together
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order; loaders call it at the beginning of each epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    def __iter__(self) -> Iterator[int]:
        draw = random.Random(f"{self._seed} {self._epoch}")
        groups = draw.sample(self._groups, len(self._groups))
        for at in range(0, len(groups), self._together):
            rows = [row for group in groups[at : at + self._together] for row in group]
            draw.shuffle(rows)
            yield from rows


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as exc:
        raise SourceError.of(
            path, f"cannot be read: {exc.strerror}; data workers need the same path as the trainer (a shared one)"
        ) from exc


# Map-style dataset over the rows of CSV files, some thousand rows at a time.
#
# Called by the user's program; iterated by a loader or a data worker. Each file is read once when the dataset is made,
# to find where its rows begin; rows are taken apart when they are wanted. It keeps no file open and never imports
# torch.

_BLOCK_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Characters: all digits that a float64 has are fewer.
_LONGEST_NUMBER = 2000


class CsvDataset(TableDataset):
    """Samples from the rows of CSV files: as in RFC 4180, a field in quotes may hold delimiters, newlines and quotes.

    Beside those of TableDataset there is the type `hex`: a hexadecimal number, as int64 (of up to 16 digits; those
    above 2**63 - 1 are negative). An empty field is a missing value.

    Args:
        paths, columns, cached_groups: As for TableDataset.
        names: The names of all columns where the files have none in their first line.
        delimiter: One character, such as a tab.
        group_rows: Rows that are read together.

    Raises:
        SourceError: As TableDataset.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Mapping[str, str],
        *,
        names: Sequence[str] | None = None,
        delimiter: str = ",",
        group_rows: int = 8192,
        cached_groups: int = 4,
    ) -> None:
        self._names = None if names is None else list(names)
        self._delimiter = delimiter
        self._group_rows = group_rows
        self._starts: dict[Path, list[int]] = {}
        if len(delimiter) != 1 or delimiter in '"\r\n' or group_rows < 1:
            raise SourceError(f"delimiter={delimiter!r}: one character, no quote; group_rows={group_rows}: at least 1")
        super().__init__(paths, columns, cached_groups=cached_groups)

    def look_at(self, path: Path) -> tuple[int, ...]:
        lists = [name for name, kind in self._types.items() if kind.is_list]
        if lists:
            raise SourceError.of(path, f"column {lists[0]}: a CSV file has no lists")
        starts, num_rows, first = [], 0, None
        for start in self._row_starts(path):
            if first is None:
                first = start
                if self._names is None:
                    continue
            if num_rows % self._group_rows == 0:
                starts.append(start)
            num_rows += 1
        starts.append(path.stat().st_size)
        self._starts[path] = starts
        header = self._header(path)
        missing = [name for name in self._types if name not in header]
        twice = [name for name in self._types if header.count(name) > 1]
        if missing or twice:
            said = [f"there is no column {name}" for name in missing] + [
                f"column {name} is there twice" for name in twice
            ]
            raise SourceError.of(path, f"{'; '.join(said)}. The file has: {', '.join(header[:20]) or 'nothing'}")
        whole, left = divmod(num_rows, self._group_rows)
        return (self._group_rows,) * whole + ((left,) if left else ())

    def read_group(self, path: Path, number: int) -> tuple[Mapping[str, Column], Mapping[int, str]]:
        header = self._header(path)
        rows = self._rows(path, number)
        faults: dict[int, str] = {}
        for at, row in enumerate(rows):
            if len(row) != len(header):
                faults[at] = f"{len(row)} fields, and {len(header)} columns"
                rows[at] = [""] * len(header)
        by_column = dict(zip(header, zip(*rows, strict=True), strict=True))
        found = {}
        for name, kind in self._types.items():
            texts = np.asarray(_short(name, kind, by_column[name], faults), dtype=np.str_)
            missing = texts == ""
            if not kind.is_nullable:
                for at in np.flatnonzero(missing).tolist():
                    faults.setdefault(at, f'column {name} is empty: say "{kind.dtype}?" if it may be')
            texts[missing] = "0"
            try:
                values = _numbers(texts, kind)
            except (ValueError, OverflowError):
                for at, text in enumerate(texts.tolist()):
                    if not _is_number(text, kind):
                        faults.setdefault(at, f"column {name}: {text[:60]!r} is no {kind.dtype}")
                        texts[at] = "0"
                values = _numbers(texts, kind)
            found[name] = Column(values, ~missing if kind.is_nullable else None)
        return found, faults

    def where(self, path: Path, number: int, place: int) -> str:
        return f"line {self._line(path, number, place)}"

    def _header(self, path: Path) -> list[str]:
        if self._names is not None:
            return self._names
        with path.open("rb") as file:
            first = file.read(max(self._starts[path][0], 1))
        return next(iter(self._parsed(path, first, "the first line")), [])

    def _rows(self, path: Path, number: int) -> list[list[str]]:
        starts = self._starts[path]
        with path.open("rb") as file:
            file.seek(starts[number])
            data = file.read(starts[number + 1] - starts[number])
        return self._parsed(path, data, f"row group {number}")

    def _parsed(self, path: Path, data: bytes, where: str) -> list[list[str]]:
        try:
            text = data.removeprefix(_BYTE_ORDER_MARK).decode()
            return list(csv.reader(io.StringIO(text, newline=""), delimiter=self._delimiter, strict=True))
        except (csv.Error, UnicodeDecodeError) as exc:
            raise SourceError.of(path, f"{where}: cannot be read as CSV: {exc}") from exc

    def _line(self, path: Path, number: int, row: int) -> int:
        """On which line of the file a row begins; counted when an error is to be told."""
        start = self._starts[path][number]
        with path.open("rb") as file:
            line = file.read(start).count(b"\n") + 1
            rows = csv.reader(
                io.StringIO(file.read(self._starts[path][number + 1] - start).decode(), newline=""),
                delimiter=self._delimiter,
            )
            for _ in range(row):
                next(rows)
            return line + rows.line_num

    @staticmethod
    def _line_of(path: Path, place: int) -> int:
        """On which line of the file a byte is."""
        with path.open("rb") as file:
            return file.read(place).count(b"\n") + 1

    def _row_starts(self, path: Path) -> Iterator[int]:
        """Where each row begins: behind a newline that is not within quotes."""
        row = num_quotes = 0
        last = ord("\n")  # the byte before the block
        before_quotes = [ord("\n"), ord('"'), self._delimiter.encode()[-1]]
        try:
            with path.open("rb") as file:
                begin = len(_BYTE_ORDER_MARK) if file.read(len(_BYTE_ORDER_MARK)) == _BYTE_ORDER_MARK else 0
                file.seek(begin)
                while block := file.read(_BLOCK_BYTES):
                    if block.endswith(b"\r"):
                        block += file.read(1)  # what follows it tells what it is
                    data = np.frombuffer(block, dtype=np.uint8)
                    returns = np.flatnonzero(data[:-1] == ord("\r"))
                    returns = returns[data[returns + 1] != ord("\n")]
                    ends = np.flatnonzero(data == ord("\n"))
                    quotes = np.flatnonzero(data == ord('"'))
                    if len(quotes) or num_quotes % 2:
                        ends = ends[(num_quotes + np.searchsorted(quotes, ends)) % 2 == 0]
                        returns = returns[(num_quotes + np.searchsorted(quotes, returns)) % 2 == 0]
                        opening = quotes[num_quotes % 2 :: 2]
                        before = np.where(opening == 0, last, data[opening - 1])
                        stray = opening[~np.isin(before, before_quotes)]
                        if len(stray):
                            # Where it stands alone, all rows up to the next one would be taken for one.
                            line = self._line_of(path, begin + int(stray[0]))
                            raise SourceError.of(path, f"line {line}: a quote in a field that does not begin with one")
                        num_quotes += len(quotes)
                    if len(returns):
                        line = self._line_of(path, begin + int(returns[0]))
                        raise SourceError.of(path, f"line {line}: it ends with \\r alone; \\n and \\r\\n end a line")
                    for end in (ends + begin + 1).tolist():
                        yield row
                        row = end
                    begin, last = begin + len(block), block[-1]
        except OSError as exc:
            raise SourceError.of(path, f"cannot be read: {exc}") from exc
        if num_quotes % 2:
            raise SourceError.of(path, "the file ends within quotes: it is cut off, or a quote is not closed")
        if row < begin:
            yield row


def _short(name: str, kind: ColumnType, texts: Sequence[str], faults: dict[int, str]) -> Sequence[str]:
    """The fields of a column, and "0" for those that an array of text must not get: too long, or with NUL in them.

    An array has for each text the room of the longest one, and loses NUL at the end of a text.
    """
    if max(map(len, texts)) <= _LONGEST_NUMBER and "\0" not in "".join(texts):
        return texts
    strange = {at: text for at, text in enumerate(texts) if len(text) > _LONGEST_NUMBER or "\0" in text}
    for at, text in strange.items():
        faults.setdefault(at, f"column {name}: {text[:60]!r} is no {kind.dtype}")
    return ["0" if at in strange else text for at, text in enumerate(texts)]


def _numbers(texts: npt.NDArray[np.str_], kind: ColumnType) -> npt.NDArray[Any]:
    codes = texts.view(np.uint32)
    if ((codes == ord("_")) | (codes > 127)).any():
        raise ValueError  # 1_000 and digits of other scripts are numbers for Python alone
    if kind.dtype == "hex":
        numbers = [int(text, 16) for text in texts.tolist()]
        if any(not 0 <= number < 2**64 for number in numbers):
            raise OverflowError
        return np.asarray(numbers, dtype=np.uint64).view(np.int64)
    values = texts.astype(np.float64 if kind.dtype.startswith("float") else np.int64)
    if kind.dtype == "int32" and len(values) and (values.max() >= 2**31 or values.min() < -(2**31)):
        raise OverflowError
    with np.errstate(over="ignore"):
        return values.astype(kind.dtype)


def _is_number(text: str, kind: ColumnType) -> bool:
    try:
        _numbers(np.asarray([text]), kind)
    except (ValueError, OverflowError):
        return False
    return True


# Map-style dataset over the rows of Parquet files, a row group at a time.
#
# Called by the user's program; iterated by a loader or a data worker. It keeps no file open and never imports torch.


class ParquetDataset(TableDataset):
    """Samples from the rows of Parquet files. A group of rows is a row group of the file.

    Columns of lists have the types `list<int64>` and so on; a list that is missing is an empty one, a value that is
    missing in a list an error. Smaller integers, and bool, may be read as larger ones, and float32 as float64.

    Args, Raises: As TableDataset; ImportError where pyarrow is not installed.
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
        except _unreadable():
            for name in self._types:
                with _opened(path, f"row group {number}: column {name}: ") as again:
                    again.read_row_group(number, columns=[name], use_threads=False)
            raise

    def _column(self, name: str, chunks: Any, faults: dict[int, str]) -> Column:
        kind, pa = self._types[name], _arrow()
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
    pa = _arrow()
    is_list = pa.types.is_list(found) or pa.types.is_large_list(found)
    if is_list != kind.is_list:
        return False
    inner = found.value_type if is_list else found
    if not (pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)):
        return False
    wanted = np.dtype(kind.dtype)
    given = np.dtype(inner.to_pandas_dtype())
    return bool(np.can_cast(given, wanted, "safe")) and (given.kind == "f") == (wanted.kind == "f")


def _arrow() -> Any:
    """pyarrow, from where Parquet is read: loaders and data workers of all other data do without it.

    Raises:
        ImportError: it is not installed; how to is said.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as exc:
        raise ImportError(f"Parquet files need pyarrow, which is not installed: {install_command('parquet')}") from exc
    return pyarrow


def _unreadable() -> tuple[type[BaseException], ...]:
    """What Arrow raises for a file that is none, or is damaged; UnicodeError for the name of a column, or of a file."""
    return _arrow().ArrowException, OSError, UnicodeError


@contextmanager
def _opened(path: Path, where: str = "") -> Iterator[Any]:
    """The file; what Arrow says of it becomes a SourceError."""
    _arrow()
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except _unreadable() as exc:
        raise SourceError.of(path, f"{where}cannot be read as Parquet: {exc}") from exc
