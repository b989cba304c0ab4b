from __future__ import annotations

import itertools
import os
import pickle
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetstream.mpi_dataworkers.errors import SourceError
from hetstream.mpi_dataworkers.sources import hdf5
from hetstream.mpi_dataworkers.sources.hdf5 import Hdf5Dataset, runs

ROWS = 50


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Images, labels, names, a float table, a compound table and a group in one file."""
    path = tmp_path / "data.h5"
    people = np.zeros(ROWS, dtype=[("age", "f4"), ("pair", "i2", (2,)), ("town", "S8")])
    people["age"] = np.arange(ROWS) / 2
    people["pair"] = np.arange(2 * ROWS).reshape(ROWS, 2)
    people["town"] = [b"town%d" % row for row in range(ROWS)]
    with h5py.File(path, "w") as file:
        file["train/images"] = np.arange(ROWS * 4 * 5 * 3, dtype=np.uint8).reshape(ROWS, 4, 5, 3)
        file["train/labels"] = np.arange(ROWS, dtype=np.int64)
        file["names"] = [f"name {row}" for row in range(ROWS)]
        file.create_dataset(
            "table", data=np.arange(ROWS * 6, dtype=np.float64).reshape(ROWS, 6), chunks=(7, 6), compression="gzip"
        )
        file["people"] = people
        file["short"] = np.zeros(ROWS - 1)
        file["single"] = 1.0
    return path


def plus_one(sample: tuple[Any, ...]) -> tuple[Any, ...]:
    sample[0][...] += 1
    return sample


def test_a_sequence_gives_tuples_and_a_mapping_dicts(path: Path) -> None:
    pairs = Hdf5Dataset(path, ["train/images", "train/labels"])
    image, label = pairs[3]
    assert len(pairs) == ROWS
    assert (image.shape, image.dtype, label, type(label)) == ((4, 5, 3), np.uint8, 3, np.int64)
    keyed = Hdf5Dataset(str(path), {"x": "table", "name": "names", "age": "people/age", "town": "people/town"})[4]
    assert keyed["x"].tolist() == [24, 25, 26, 27, 28, 29]
    assert (keyed["name"], keyed["age"], keyed["town"]) == ("name 4", 2.0, "town4")
    assert Hdf5Dataset(path, "people/pair")[4].tolist() == [8, 9]
    pairs.close()


def test_torch_collates_every_column(path: Path) -> None:
    columns = {"x": "table", "image": "train/images", "label": "train/labels", "name": "names", "age": "people/age"}
    (batch,) = torch.utils.data.DataLoader(Hdf5Dataset(path, columns), batch_size=ROWS)
    assert {key: tuple(value.shape) for key, value in batch.items() if key != "name"} == {
        "x": (ROWS, 6),
        "image": (ROWS, 4, 5, 3),
        "label": (ROWS,),
        "age": (ROWS,),
    }
    assert batch["name"][1] == "name 1"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(st.lists(st.integers(-ROWS, ROWS - 1), max_size=30))
def test_a_batch_is_its_single_samples_in_the_asked_order(path: Path, indices: list[int]) -> None:
    dataset = Hdf5Dataset(path, ["train/images", "train/labels", "table"])
    batch = dataset.__getitems__(indices)
    assert [int(label) for _, label, _ in batch] == [index % ROWS for index in indices]
    for index, (image, _, row) in zip(indices, batch, strict=True):
        assert np.array_equal(row, np.arange(6) + 6 * (index % ROWS))
        assert np.array_equal(image, dataset[index][0])


@given(st.sets(st.integers(0, 100)).map(sorted), st.integers(0, 5))
def test_runs_cut_at_gaps_only(rows: list[int], max_gap: int) -> None:
    pieces = list(runs(rows, max_gap))
    assert [row for piece in pieces for row in piece] == rows
    for piece in pieces:
        assert all(b - a - 1 <= max_gap for a, b in itertools.pairwise(piece))
    assert all(b[0] - a[-1] - 1 > max_gap for a, b in itertools.pairwise(pieces))


def test_neighbours_are_one_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5, "READ_OVER_BYTES", 0)
    dataset = Hdf5Dataset(path, "table")
    dataset[0]
    reads = []
    read = h5py.Dataset.__getitem__

    def counted(self: h5py.Dataset, args: Any, **options: Any) -> Any:
        reads.append(args)
        return read(self, args, **options)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", counted)
    dataset.__getitems__([12, 3, 2, 11, 4, 2])
    assert reads == [slice(2, 5), slice(11, 13)]


def test_a_repeated_index_may_be_changed_in_place(path: Path) -> None:
    dataset = Hdf5Dataset(path, ["table"], transform=plus_one)
    first, second = dataset.__getitems__([1, 1])
    assert first[0].tolist() == second[0].tolist() == [7, 8, 9, 10, 11, 12]


def test_a_pickle_holds_no_handle_and_reads_again(path: Path) -> None:
    dataset = Hdf5Dataset(path, ["train/labels"], transform=tuple)
    before = pickle.dumps(dataset)
    dataset[0]
    assert pickle.dumps(dataset) == before
    assert pickle.loads(before)[7] == (7,)


def test_a_fork_opens_the_file_for_itself(path: Path) -> None:
    dataset = Hdf5Dataset(path, ["train/images", "train/labels"])
    dataset[0]
    loader = torch.utils.data.DataLoader(dataset, batch_size=5, num_workers=2, shuffle=True)
    seen = sorted(int(label) for _, labels in loader for label in labels)
    assert seen == list(range(ROWS))
    assert dataset[9][1] == 9


def test_the_path_survives_a_change_of_directory(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(path.parent)
    dataset = Hdf5Dataset(path.name, "train/labels")
    monkeypatch.chdir("/")
    assert dataset[5] == 5


def open_files() -> list[str]:
    entries = list(Path("/proc/self/fd").iterdir())
    return [os.readlink(entry) for entry in entries if entry.is_symlink()]


def test_the_file_is_open_from_the_first_read_until_close(path: Path) -> None:
    dataset = Hdf5Dataset(path, "train/labels")
    assert str(path) not in open_files()
    dataset.__getitems__(range(10))
    dataset[3]
    assert open_files().count(str(path)) == 1
    dataset.close()
    dataset.close()
    assert str(path) not in open_files()
    assert dataset[1] == 1


def test_loops_end(path: Path) -> None:
    assert [int(label) for label in Hdf5Dataset(path, "train/labels")] == list(range(ROWS))


@pytest.mark.parametrize("index", [ROWS, -ROWS - 1])
def test_an_index_outside_is_an_index_error(path: Path, index: int) -> None:
    with pytest.raises(IndexError, match=rf"index {index} is outside 0\.\.49: .*data\.h5 holds 50 samples"):
        Hdf5Dataset(path, "train/labels")[index]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            ["images"],
            "dataset 'images' does not exist; the file has: names, people/age, people/pair, people/town, short",
        ),
        (["train"], "dataset 'train' is a group"),
        (["people"], "dataset people is compound; name its fields as columns: people/age, people/pair, people/town"),
        (["people/height"], "dataset 'people/height' does not exist"),
        (["single"], "dataset single holds a single value"),
        (["table", "short"], "must have one length, these differ (table: 50, short: 49)"),
        ([], "columns is empty"),
    ],
)
def test_wrong_columns_are_named(path: Path, columns: list[str], message: str) -> None:
    with pytest.raises(SourceError, match=re.escape(message)) as caught:
        Hdf5Dataset(path, columns)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        Hdf5Dataset(tmp_path / "none.h5", "x")


def test_a_file_of_another_form_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.h5"
    path.write_text("no HDF5")
    with pytest.raises(SourceError, match="cannot be opened as HDF5"):
        Hdf5Dataset(path, "x")


def test_a_damaged_chunk_names_file_and_rows(path: Path) -> None:
    with h5py.File(path) as file:
        chunk = file["table"].id.get_chunk_info(0)
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\xff" * chunk.size)
    with pytest.raises(SourceError, match=r"cannot read rows 0\.\.2 of dataset table"):
        Hdf5Dataset(path, "table").__getitems__([0, 2])


def test_a_file_that_changed_its_length_is_refused(path: Path) -> None:
    dataset = Hdf5Dataset(path, "train/labels")
    with h5py.File(path, "r+") as file:
        del file["train/labels"]
        file["train/labels"] = np.arange(ROWS + 1)
    with pytest.raises(SourceError, match="has 51 rows and had 50 when"):
        dataset[0]


def test_read_samples_leaves_the_transform_to_its_caller(path: Path) -> None:
    dataset = Hdf5Dataset(path, "train/labels", transform=float)
    assert [(type(sample), sample) for sample in dataset.read_samples([2, 1])] == [(np.int64, 2), (np.int64, 1)]
    assert dataset.__getitems__([2, 1]) == [2.0, 1.0]
