"""Rows of files with columns: what `sources.csv` and `sources.parquet` have in common.

A dataset is map-style: a sample is a row, so that order, shards and resume are the loader's, as for any other. It reads
a group of rows at a time and keeps the last few groups of its process. A `Row` is no more than a place in such a group,
so that a batch of many rows is put together column by column (`features.collate.collate_rows`), not value by value.
Never imports torch.
"""

from __future__ import annotations

import hashlib
import operator
import os
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
