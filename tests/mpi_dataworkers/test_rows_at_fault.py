"""Where a row of a batch is at fault, the error names the sample and its file, and only that one is left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from hetstream.errors import FeatureError, SourceError
from hetstream.mpi_dataworkers.features.batches import Jagged
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, jagged
from hetstream.mpi_dataworkers.features.operators import FirstX
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.sources.tables import CsvDataset

LOADER_OPTIONS: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 5}
STAGE = FeatureTransform(FeatureGraph.of({"ids": jagged("ids") >> FirstX(2)}))
BAD = 13
FALLS = "ids has a negative length: row [0-7] has -1, so its borders fall from [0-9]+ to [0-9]+"


def collate(rows: list[Any]) -> dict[str, Any]:
    """Lists by hand, with a length below zero for one row."""
    numbers = [row if isinstance(row, int) else int(row["number"]) for row in rows]
    lengths = torch.tensor([-1 if number == BAD else number % 4 for number in numbers])
    return {"ids": Jagged(torch.arange(int(lengths.clamp(min=0).sum())), lengths), "numbers": numbers}


@pytest.mark.parametrize("place", ["data workers", "in process"])
def test_a_length_below_zero_is_named_with_its_sample(loaders: Any, three: Any, place: str) -> None:
    options = {"service": three.name} if place == "data workers" else {}
    loader = loaders([*range(40)], collate_fn=collate, batch_stage=STAGE, **options)
    with pytest.raises(FeatureError, match=FALLS) as caught:
        list(loader)
    if place == "data workers":
        assert f"sample {BAD}:" in str(caught.value)


@pytest.mark.shows("a row at fault is told with sample, file and line")
def test_a_length_below_zero_is_named_with_its_file(loaders: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows\x1b[31m\n.csv"
    path.write_text("number\n" + "".join(f"{number}\n" for number in range(40)))
    dataset = CsvDataset(path, {"number": "int64"}, group_rows=10)
    named = re.escape(f"{tmp_path}/rows\\x1b[31m\\n.csv")
    with pytest.raises(FeatureError, match=f"{FALLS}.*; it is {named}: row group 1, row 3 .row 13 of the file"):
        list(loaders(dataset, collate_fn=collate, batch_stage=STAGE))


class Rows(IterableDataset[Any]):
    """The rows of a table one after the other."""

    def __init__(self, table: CsvDataset) -> None:
        self.table = table

    def __iter__(self) -> Any:
        return map(self.table.__getitem__, range(len(self.table)))


@pytest.mark.shows('a row at fault is named with its file, and with `on_error="skip"` it alone is left out')
@pytest.mark.parametrize("place", ["data workers", "in process"])
def test_a_length_below_zero_in_a_stream_is_named_with_its_file(
    loaders: Any, three: Any, tmp_path: Path, place: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("number\n" + "".join(f"{number}\n" for number in range(40)))
    options = {"service": three.name} if place == "data workers" else {}
    stream = Rows(CsvDataset(path, {"number": "int64"}, group_rows=10))
    loader = loaders(stream, shuffle=False, collate_fn=collate, batch_stage=STAGE, **options)
    with pytest.raises(FeatureError, match=f"{FALLS}.*; it is {path}: row group 1, row 3 .row 13 of the file"):
        list(loader)


@pytest.mark.shows('a row at fault is named with its file, and with `on_error="skip"` it alone is left out')
@pytest.mark.parametrize("place", ["data workers", "in process"])
def test_of_a_group_of_rows_only_those_that_cannot_be_used_are_left_out(
    loaders: Any, three: Any, tmp_path: Path, place: str
) -> None:
    wrong = {3: "many", 13: "", 17: "4,5"}
    path = tmp_path / "rows.csv"
    path.write_text("number,more\n" + "".join(f"{wrong.get(number, number)},0\n" for number in range(40)))
    options = {"service": three.name} if place == "data workers" else {}
    dataset = CsvDataset(path, {"number": "int64"}, group_rows=20)
    loader = loaders(dataset, collate_fn=lambda rows: [int(row["number"]) for row in rows], on_error="skip", **options)
    kept = [number for batch in loader for number in batch]
    assert sorted(kept) == [number for number in range(40) if number not in wrong]
    errors = {sample.sample_index: sample.error for sample in loader.skipped_samples}
    assert errors.keys() == wrong.keys()
    for number, said in (
        (3, "line 5: column number: 'many' is no int64"),
        (13, "line 15: column number is empty"),
        (17, "line 19: 3 fields, and 2 columns"),
    ):
        assert errors[number].startswith(f"SourceError: {path}: {said}")
    with pytest.raises(SourceError, match=r"rows\.csv: line (5|15|19): "):
        list(loaders(dataset, collate_fn=len, **options))


@pytest.mark.shows("a row at fault is told with sample, file and line")
@pytest.mark.parametrize("is_sorted", [False, True])
def test_only_the_sample_at_fault_is_left_out(loaders: Any, is_sorted: bool) -> None:
    def in_order(rows: list[int]) -> dict[str, Any]:
        return collate(sorted(rows) if is_sorted else rows)

    loader = loaders([*range(40)], collate_fn=in_order, batch_stage=STAGE, on_error="skip")
    kept = [len(batch["ids"].lengths) for batch in loader]
    assert sum(kept) == 39
    assert [sample.sample_index for sample in loader.skipped_samples] == [BAD]
