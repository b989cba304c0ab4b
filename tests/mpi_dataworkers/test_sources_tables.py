"""Parquet and CSV files row by row: what a row holds, which groups are read, hostile files, and a loader over them."""

from __future__ import annotations

import os
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset

from hetstream import DataLoader, EvaluationRecipe, ImageFolder
from hetstream.errors import FeatureError, SourceError
from hetstream.mpi_dataworkers.features.batches import Jagged, Nullable, collate_rows
from hetstream.mpi_dataworkers.sources.hdf5 import Hdf5Dataset
from hetstream.mpi_dataworkers.sources.tables import CsvDataset, ParquetDataset, RowGroupSampler

ROWS = 50
TYPES = {"row": "int64", "price": "float32?", "clicks": "list<int64>", "count": "int32"}


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """Row groups of 8 rows; every third price is missing, every fifth list."""
    path = tmp_path / "rows.parquet"
    table = pa.table(
        {
            "row": pa.array(range(ROWS), pa.int64()),
            "price": pa.array([None if row % 3 == 0 else row / 2 for row in range(ROWS)], pa.float32()),
            "clicks": pa.array(
                [None if row % 5 == 0 else list(range(row % 4)) for row in range(ROWS)], pa.list_(pa.int64())
            ),
            "count": pa.array([row % 7 for row in range(ROWS)], pa.int8()),
            "name": [f"name {row}" for row in range(ROWS)],
            "double": np.arange(ROWS) / 3,
        }
    )
    pq.write_table(table, path, row_group_size=8)
    return path


def csv_of(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def reads(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the groups that it reads from now on."""
    seen: list[int] = []
    own = dataset.read_group
    monkeypatch.setattr(dataset, "read_group", lambda path, number: seen.append(number) or own(path, number))
    return seen


def test_a_row_of_parquet(parquet: Path) -> None:
    dataset = ParquetDataset(parquet, TYPES)
    assert (len(dataset), [len(group) for group in dataset.groups]) == (ROWS, [8] * 6 + [2])
    row = dataset[7]
    assert (row["row"], row["price"], row["clicks"].tolist(), row["count"]) == (7, 3.5, [0, 1, 2], 0)
    assert (type(row["row"]), type(row["count"])) == (np.int64, np.int32)
    assert dataset[-ROWS]["price"] is None
    assert dataset[5]["clicks"].tolist() == []
    assert pickle.loads(pickle.dumps(row)).keys() == set(TYPES)
    assert len(pickle.dumps(row)) < 1000, "its group does not travel with it"
    with pytest.raises(IndexError, match=r"index 50 is outside 0\.\.49"):
        dataset[ROWS]


def test_rows_of_several_groups_make_a_batch_in_their_order(parquet: Path) -> None:
    dataset = ParquetDataset([parquet, parquet], TYPES)
    indices = [49, 3, 99, 7, 3, 20]
    batch = collate_rows(dataset.__getitems__(indices))
    assert batch["row"].tolist() == [49, 3, 49, 7, 3, 20]
    assert isinstance(batch["price"], Nullable)
    assert batch["price"].valid.tolist() == [True, False, True, True, False, True]
    assert isinstance(batch["clicks"], Jagged)
    assert batch["clicks"].lengths.tolist() == [1, 3, 1, 3, 3, 0]
    assert batch["clicks"].values.tolist() == [0, 0, 1, 2, 0, 0, 1, 2, 0, 1, 2]
    one = collate_rows(dataset.__getitems__([6, 1, 2]))
    assert one["clicks"].values.tolist() == [0, 1, 0, 0, 1]
    with pytest.raises(FeatureError, match="collate_rows takes rows"):
        collate_rows([{"x": 1}])  # type: ignore[list-item]


@pytest.mark.shows("Parquet and CSV files are read a row group at a time")
@pytest.mark.shows("rows of Parquet and CSV files are samples as any others, and a loader goes on where it was")
def test_each_group_is_read_once_by_its_sampler(parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ParquetDataset(parquet, TYPES, cached_groups=2)
    sampler = RowGroupSampler(dataset, seed=3, together=2)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == list(range(ROWS)) != orders[0]
    seen = reads(dataset, monkeypatch)
    for at in range(0, ROWS, 4):
        dataset.__getitems__(orders[0][at : at + 4])
    assert sorted(seen) == list(range(7))
    with pytest.raises(SourceError, match="together=5: 1 to cached_groups=2"):
        RowGroupSampler(dataset, together=5)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"x": "int64"}, "there is no column x. The file has: row, price, clicks"),
        ({"name": "int64"}, "column name holds string, and not int64"),
        ({"double": "float32"}, "column double holds double, and not float32"),
        ({"row": "int32"}, "column row holds int64, and not int32"),
        ({"row": "float64"}, "column row holds int64"),
        ({"row": "list<int64>"}, "column row holds int64, and not list<int64>"),
        ({"row": "hex"}, "hex is for CSV"),
        ({"row": "uint8"}, "'uint8' is no type of a column"),
        ({}, "columns is empty"),
    ],
)
def test_columns_that_parquet_does_not_have(parquet: Path, columns: dict[str, str], words: str) -> None:
    with pytest.raises(SourceError, match=words):
        ParquetDataset(parquet, columns)


def test_hostile_parquet_files(parquet: Path, tmp_path: Path) -> None:
    for path, words in (
        (csv_of(tmp_path / "text", "a,b\n1,2\n"), "cannot be read as Parquet"),
        (tmp_path / "nowhere", "nowhere: cannot be read: No such file"),
        (csv_of(tmp_path / "empty", ""), "cannot be read as Parquet"),
    ):
        with pytest.raises(SourceError, match=words):
            ParquetDataset(path, TYPES)
    whole = parquet.read_bytes()
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError, match=r"cut\.parquet: cannot be read as Parquet"):
        ParquetDataset(cut, TYPES)
    strict = ParquetDataset(parquet, {**TYPES, "price": "float32"})
    with pytest.raises(SourceError, match=r'row group 1, row 1: column price is missing: say "float32\?"'):
        strict[9]
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(whole[:4] + b"\xff" * 300 + whole[304:])  # pages of the first row group
    with pytest.raises(SourceError, match=r"bad\.parquet: row group 0: "):
        ParquetDataset(bad, {"row": "int64"})[0]


@pytest.mark.shows("Parquet and CSV files are read a row group at a time")
def test_a_damaged_parquet_file_gives_rows_or_one_error_with_its_name(parquet: Path, tmp_path: Path) -> None:
    """Bytes that are no text in the name of a column, sizes below 0, pages that are none: whatever was there before."""
    whole, bad, draw = parquet.read_bytes(), tmp_path / "bad.parquet", random.Random(2)
    footer = len(whole) - int.from_bytes(whole[-8:-4], "little") - 8
    said: list[str] = []
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 8])):
            damaged[draw.randrange(draw.choice([0, footer]), len(damaged))] = draw.randrange(256)
        bad.write_bytes(damaged)
        try:
            dataset = ParquetDataset(bad, TYPES)
            assert all(set(row) == set(TYPES) for row in dataset.__getitems__(range(len(dataset))))
        except SourceError as error:
            said.append(str(error))
    assert [text for text in said if not text.startswith(f"{bad}: ")] == []
    places = {text.split(": ")[1] for text in said}
    assert "cannot be read as Parquet" in places
    assert any(place.startswith("row group") for place in places)


def test_of_a_parquet_file_only_rows_that_lack_a_value_cannot_be_used(parquet: Path, tmp_path: Path) -> None:
    strict = ParquetDataset(parquet, {**TYPES, "price": "float32"})
    with pytest.raises(SourceError) as caught:
        strict.__getitems__([10, 11, 9, 8])
    assert caught.value.row == 2
    assert [row["price"] for row in strict.__getitems__([10, 11, 8])] == [5.0, 5.5, 4.0]
    path = tmp_path / "lists.parquet"
    pq.write_table(pa.table({"ids": pa.array([[1], [], [2, None], [3]], pa.list_(pa.int64()))}), path)
    lists = ParquetDataset(path, {"ids": "list<int64>"})
    with pytest.raises(SourceError, match="row group 0, row 2: column ids: a value is missing") as caught:
        lists.__getitems__([0, 1, 3, 2])
    assert caught.value.row == 3
    assert [row["ids"].tolist() for row in lists.__getitems__([0, 1, 3])] == [[1], [], [3]]


def test_names_of_files_and_columns_are_no_more_than_text_in_errors(tmp_path: Path) -> None:
    """Newlines and escape sequences in them would be lines and colours of a log."""
    name = "a\x1b[31m\n\udcff"
    table = pa.table({"b\x1b[0m\n": [1]})
    for make in (
        lambda: CsvDataset(csv_of(tmp_path / f"{name}.csv", "b\x1b[0m\n1\n"), {"a": "int64"}),
        lambda: CsvDataset(csv_of(tmp_path / f"{name}.csv", "a\nx\n"), {"a": "int64"})[0],
        lambda: CsvDataset(tmp_path / name, {"a": "int64"}),
        lambda: pq.write_table(table, parquet := tmp_path / "names.parquet") or ParquetDataset(parquet, {"a": "int64"}),
        lambda: ParquetDataset(csv_of(tmp_path / f"{name}.parquet", "no"), {"a": "int64"}),
        lambda: ImageFolder(tmp_path / name, EvaluationRecipe()),
        lambda: Hdf5Dataset(tmp_path / name, ["x"]),
    ):
        with pytest.raises(SourceError) as caught:
            make()
        assert str(caught.value).isprintable()


def test_what_is_damaged_in_a_parquet_file_is_named(parquet: Path, tmp_path: Path) -> None:
    group = pq.ParquetFile(parquet).metadata.row_group(2)
    (number,) = (index for index in range(group.num_columns) if group.column(index).path_in_schema == "count")
    column = group.column(number)
    start, bad = column.dictionary_page_offset or column.data_page_offset, tmp_path / "bad.parquet"
    whole = bytearray(parquet.read_bytes())
    whole[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    bad.write_bytes(whole)
    dataset = ParquetDataset(bad, TYPES)
    assert dataset[8]["count"] == 1
    with pytest.raises(SourceError, match=r"bad\.parquet: row group 2: column count: cannot be read as Parquet"):
        dataset[16]


def test_columns_of_types_that_no_feature_has_are_named_together(tmp_path: Path) -> None:
    columns: dict[str, pa.Array] = {
        "nested": pa.array([[[1], [2, 3]]], pa.list_(pa.list_(pa.int64()))),
        "record": pa.array([{"x": 1}]),
        "text": pa.array(["1"]),
        "time": pa.array([0], pa.timestamp("s")),
        "amount": pa.array([1], pa.int64()).cast(pa.decimal128(20, 0)),
        "large": pa.array([2**63], pa.uint64()),
        "nothing": pa.array([None]),
    }
    path = tmp_path / "types.parquet"
    pq.write_table(pa.table(columns), path)
    types = dict.fromkeys(columns, "int64") | {"nested": "list<int64>"}
    with pytest.raises(SourceError) as caught:
        ParquetDataset(path, types)
    for name in columns:
        assert f"column {name} holds " in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_column_that_is_there_twice_or_has_no_type(tmp_path: Path) -> None:
    path = tmp_path / "twice.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    with pytest.raises(SourceError, match="column a is there twice"):
        ParquetDataset(path, {"a": "int64"})
    with pytest.raises(SourceError, match="column a: None is no type of a column"):
        ParquetDataset(path, {"a": None})  # type: ignore[dict-item]


def test_rows_whose_columns_differ_make_no_batch(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "a.csv", "a,b\n1,2\n,4\n")
    whole = CsvDataset(csv_of(tmp_path / "b.csv", "a,b\n1,2\n"), {"a": "int64"})
    for columns, words in (
        ({"a": "int64?"}, r"a is int64 and int64\?"),
        ({"a": "float32?"}, r"a is int64 and float32\?"),
        ({"b": "int64"}, "a is int64 and missing"),
    ):
        rows = ConcatDataset([whole, CsvDataset(path, columns)])  # of which a gap was 0
        with pytest.raises(FeatureError, match=words):
            collate_rows([rows[0], rows[2]])
    same = ConcatDataset([whole, whole])
    assert collate_rows([same[0], same[1]])["a"].tolist() == [1, 1]  # type: ignore[union-attr]


def test_a_file_that_changes_is_told(parquet: Path, tmp_path: Path) -> None:
    dataset = ParquetDataset(parquet, TYPES)
    before = dataset.fingerprint
    assert dataset[0]["row"] == 0
    os.utime(parquet, ns=(1, 1))
    assert dataset[1]["row"] == 1, "of a group that is here already"
    with pytest.raises(SourceError, match=r"rows\.parquet: row group 2: the file has changed"):
        dataset[20]
    assert ParquetDataset(parquet, TYPES).fingerprint != before
    parquet.unlink()
    with pytest.raises(SourceError, match="cannot be read: No such file"):
        pickle.loads(pickle.dumps(dataset))[0]


@pytest.mark.shows("Parquet and CSV files are read a row group at a time")
def test_a_row_of_csv(tmp_path: Path) -> None:
    text = 'id,note,x,c\r\n1,"a, ""b""\r\nc",0.5,ff\r\n2,,,ffffffffffffffff\r\n-3,"\n\n",1e400,0'
    dataset = CsvDataset(
        csv_of(tmp_path / "a.csv", "\ufeff" + text), {"id": "int32", "x": "float32?", "c": "hex"}, group_rows=2
    )
    assert len(dataset) == 3
    assert [dict(row) for row in map(dataset.__getitem__, range(3))] == [
        {"id": 1, "x": 0.5, "c": 255},
        {"id": 2, "x": None, "c": -1},
        {"id": -3, "x": np.inf, "c": 0},
    ]
    tabs = CsvDataset(csv_of(tmp_path / "b.tsv", "1\t2\n3\t4\n"), {"b": "int64"}, names=["a", "b"], delimiter="\t")
    assert [row["b"] for row in map(tabs.__getitem__, range(2))] == [2, 4]
    assert len(CsvDataset(csv_of(tmp_path / "c.csv", "a,b\n"), {"a": "int64"})) == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    notes=st.lists(st.text('a",\n\r é', max_size=6), max_size=9),
    group_rows=st.integers(1, 3),
    block=st.integers(1, 9),
    ends=st.booleans(),
)
def test_rows_are_found_whatever_their_texts_hold(
    tmp_path: Path, notes: list[str], group_rows: int, block: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetstream.mpi_dataworkers.sources.tables._BLOCK_BYTES", block)
    lines = ['"' + note.replace('"', '""') + f'",{at}' for at, note in enumerate(notes)]
    path = csv_of(tmp_path / "notes.csv", "\n".join(["note,id", *lines]) + "\n" * ends)
    dataset = CsvDataset(path, {"id": "int64"}, group_rows=group_rows)
    assert [dataset[at]["id"] for at in range(len(dataset))] == list(range(len(notes)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\nx,2\n", r"line 3: column a: 'x' is no int64"),
        ("a,b\n1,\n", r'line 2: column b is empty: say "float32\?"'),
        ("a,b\n1,2\n3\n", "line 3: 1 fields, and 2 columns"),
        ('a,b\n1,2\n1,"2\n\n"\n5,z\n', "line 6: column b: 'z' is no float32"),
        ("a,b\n9223372036854775808,2\n", "line 2: column a: '9223372036854775808' is no int64"),
        ('a,b\n1,"2\n', "ends within quotes"),
        ('a,b\n1,"2"3\n', "cannot be read as CSV"),
        ("", "there is no column a; there is no column b. The file has: nothing"),
        ("a,c\n1,2\n", "there is no column b. The file has: a, c"),
        ("a,a,b\n1,2,3\n", "column a is there twice"),
        # Each of these would make one row of several, and rows would be lost.
        ('a,c,b\n1,5",1\n2,6",1\n', "line 2: a quote in a field that does not begin with one"),
        ('a,c,b\n1,"x\n",1\n1, "5\n6",1\n', "line 4: a quote in a field that does not begin with one"),
        ("a,b\r1,2\r3,4\r", r"line 1: it ends with \\r alone"),
        ('a,b\n1,"2"\n3,4\r5,6\n', r"line 3: it ends with \\r alone"),
        # Numbers for Python, and for nobody who writes files.
        ("a,b\n1,1_000\n", "line 2: column b: '1_000' is no float32"),
        ("a,b\n\u0661,1\n", "line 2: column a: '\u0661' is no int64"),
        # NumPy takes NUL at the end of a text for its end; files have them after a crash of a host.
        ("a,b\n1,2\n3\0\0,4\n", r"line 3: column a: '3\\x00\\x00' is no int64"),
    ],
)
def test_hostile_csv_files(tmp_path: Path, text: str, words: str) -> None:
    path = csv_of(tmp_path / "bad.csv", text)
    with pytest.raises(SourceError, match=rf"bad\.csv: .*{words}"):
        list(CsvDataset(path, {"a": "int64", "b": "float32"}))
    path.write_bytes(b"a,b\n\xff\xfe,1\n")
    with pytest.raises(SourceError, match="row group 0: cannot be read as CSV"):
        CsvDataset(path, {"a": "int64", "b": "float32"})[0]


def test_a_field_of_nul_is_not_a_missing_one_and_a_long_one_takes_no_memory(tmp_path: Path) -> None:
    rows = 2000
    text = "a,b\n" + "1,2\n" * rows + "1,\0\0\n" + f"{'9' * 100_000},1\n" + f"1,{'0' * 1500}.5\n"
    dataset = CsvDataset(csv_of(tmp_path / "odd.csv", text), {"a": "int64", "b": "float32?"})
    tracemalloc.start()
    assert dict(dataset[0]) == {"a": 1, "b": 2}
    assert tracemalloc.get_traced_memory()[1] < 100 << 20, "an array of text has the room of the longest for each"
    tracemalloc.stop()
    assert dataset[rows + 2]["b"] == 0.5
    with pytest.raises(SourceError, match=rf"line {rows + 2}: column b: '.x00.x00' is no float32"):
        dataset[rows]
    with pytest.raises(SourceError, match=rf"line {rows + 3}: column a: '9{{60}}' is no int64"):
        dataset[rows + 1]


@pytest.mark.shows("rows of Parquet and CSV files are samples as any others, and a loader goes on where it was")
def test_a_loader_streams_rows_and_goes_on_where_it_was(tmp_path: Path, parquet: Path) -> None:
    dataset = ParquetDataset(parquet, TYPES, cached_groups=4)

    def loader() -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=8, shuffle=True, seed=1, collate_fn=collate_rows)

    with loader() as whole:
        batches = list(whole)
    assert sorted(row for batch in batches for row in batch["row"].tolist()) == list(range(ROWS))
    with loader() as first:
        iterator = iter(first)
        for _ in range(3):
            next(iterator)
        state = first.state_dict()
        del iterator
    with loader() as rest:
        rest.load_state_dict(state)
        later = list(rest)
    assert len(later) == len(batches) - 3
    assert all(torch.equal(one["row"], other["row"]) for one, other in zip(later, batches[3:], strict=True))
