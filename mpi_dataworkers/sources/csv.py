"""Map-style dataset over the rows of CSV files, some thousand rows at a time.

Called by the user's program; iterated by a loader or a data worker. Each file is read once when the dataset is made, to
find where its rows begin; rows are taken apart when they are wanted. It keeps no file open and never imports torch.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetstream.mpi_dataworkers.errors import SourceError
from hetstream.mpi_dataworkers.sources.table import Column, ColumnType, TableDataset

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
