"""Rows of `sources.csv` and `sources.parquet` to a batch of columns: a loader's `collate_fn`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.batches import Jagged, Nullable
from hetstream.mpi_dataworkers.features.tiles import ranges
from hetstream.mpi_dataworkers.sources.table import Column, Row, RowGroup

Feature = torch.Tensor | Nullable | Jagged


def collate_rows(rows: Sequence[Row]) -> dict[str, Feature]:
    """The columns of some rows: a tensor each, `Nullable` where the type ends in `?`, `Jagged` where it is a list.

    It costs a call for each column and group of rows, whatever the number of rows.

    Args:
        rows: At least one, in the batch's order.

    Raises:
        FeatureError: They are no rows of these sources, or of datasets whose columns differ.
    """
    if not rows or not all(isinstance(row, Row) for row in rows):
        raise FeatureError("collate_rows takes rows of sources.csv and sources.parquet; use torch's default_collate")
    numbers: dict[RowGroup, int] = {}
    group_of = np.fromiter((numbers.setdefault(row.group, len(numbers)) for row in rows), np.int64, len(rows))
    places = np.fromiter((row.place for row in rows), np.int64, len(rows))
    if len(numbers) == 1:
        parts: list[tuple[RowGroup, npt.NDArray[np.int64]]] = [(rows[0].group, places)]
        order = None
    else:
        _check_alike(list(numbers))
        parts = [(group, places[group_of == number]) for group, number in numbers.items()]
        behind_each_other = np.argsort(group_of, kind="stable")
        order = torch.from_numpy(np.argsort(behind_each_other, kind="stable"))
    return {name: _column(name, parts, order) for name in rows[0].group.columns}


def _check_alike(groups: Sequence[RowGroup]) -> None:
    """Refuse to put columns together whose types differ, as those of two datasets in a ConcatDataset may."""
    first, *others = ({name: _type_of(column) for name, column in group.columns.items()} for group in groups)
    for other in others:
        if other != first:
            name = next(name for name in {**first, **other} if first.get(name) != other.get(name))
            kinds = " and ".join(columns.get(name, "missing") for columns in (first, other))
            raise FeatureError(f"rows of one batch have other columns: {name} is {kinds}; give the datasets one type")


def _type_of(column: Column) -> str:
    """As a user writes it."""
    dtype = column.values.dtype.name
    return f"list<{dtype}>" if column.starts is not None else f"{dtype}{'?' if column.valid is not None else ''}"


def _column(name: str, parts: Sequence[tuple[RowGroup, npt.NDArray[np.int64]]], order: torch.Tensor | None) -> Feature:
    found = [(group.columns[name], places) for group, places in parts]
    first = found[0][0]
    if first.starts is not None:
        return _lists(name, parts, order)
    values = _ordered([column.values[places] for column, places in found], order)
    if first.valid is None:
        return values
    valid = [column.valid[places] for column, places in found if column.valid is not None]
    return Nullable(values, _ordered(valid, order))


def _ordered(pieces: Sequence[npt.NDArray[np.generic]], order: torch.Tensor | None) -> torch.Tensor:
    if order is None:
        return torch.from_numpy(pieces[0])
    return torch.from_numpy(np.concatenate(pieces))[order]


def _lists(name: str, parts: Sequence[tuple[RowGroup, npt.NDArray[np.int64]]], order: torch.Tensor | None) -> Jagged:
    all_values, all_starts, all_lengths, before = [], [], [], 0
    for group, places in parts:
        values, _, starts = group.columns[name]
        assert starts is not None
        all_values.append(torch.from_numpy(values))
        all_starts.append(starts[places] + before)
        all_lengths.append(starts[places + 1] - starts[places])
        before += len(values)
    lengths = _ordered(all_lengths, order)
    joined = all_values[0] if len(all_values) == 1 else torch.cat(all_values)
    return Jagged(joined[ranges(_ordered(all_starts, order), lengths, int(lengths.sum()))], lengths)
