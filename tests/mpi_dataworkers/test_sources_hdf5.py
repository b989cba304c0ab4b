from __future__ import annotations

import itertools
import os
import pickle
import re
import subprocess
import sys
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
from hetstream.mpi_dataworkers.sources.hdf5 import Hdf5Dataset, _RunRule

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


def pieces(rule: _RunRule, rows: list[int]) -> list[list[int]]:
    ends = rule.ends(rows)
    return [rows[start:end] for start, end in itertools.pairwise([0, *ends])]


@given(st.sets(st.integers(0, 100)).map(sorted), st.integers(0, 5))
def test_reads_are_cut_at_gaps_only(rows: list[int], max_gap: int) -> None:
    found = pieces(_RunRule(1, 0, max_gap, max_gap), rows)
    assert [row for piece in found for row in piece] == rows
    for piece in found:
        assert all(b - a - 1 <= max_gap for a, b in itertools.pairwise(piece))
    assert all(b[0] - a[-1] - 1 > max_gap for a, b in itertools.pairwise(found))


@pytest.mark.shows("`Hdf5Dataset` reads each chunk once and gives h5py's samples in any layout")
@given(st.sets(st.integers(0, 300)).map(sorted), st.integers(1, 40), st.integers(0, 50))
def test_no_compressed_chunk_is_read_twice_or_for_nothing(rows: list[int], chunk_rows: int, max_gap: int) -> None:
    found = pieces(_RunRule(1, chunk_rows, chunk_rows, max_gap), rows)
    assert [row for piece in found for row in piece] == rows
    read = [chunk for piece in found for chunk in range(piece[0] // chunk_rows, piece[-1] // chunk_rows + 1)]
    assert read == sorted({row // chunk_rows for row in rows})


def test_however_much_is_asked_for_a_read_has_an_end() -> None:
    found = pieces(_RunRule(1 << 20, 0, 10, 10), list(range(1000)))
    assert max(map(len, found)) == 64


LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "a chunk for each row": {"chunks": (1, 4, 6)},
    "compressed rows": {"chunks": (1, 4, 6), "compression": "gzip"},
    "small chunks": {"chunks": (8, 4, 6)},
    "chunks within rows": {"chunks": (16, 2, 3), "compression": "lzf", "shuffle": True},
    "a chunk for all": {"chunks": (200, 4, 6), "compression": "gzip"},
}


@pytest.mark.shows("`Hdf5Dataset` reads each chunk once and gives h5py's samples in any layout")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_those_of_h5py_in_any_layout(tmp_path: Path, layout: str) -> None:
    data = np.random.default_rng(0).integers(0, 1 << 60, (200, 4, 6))
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("x", data=data, **LAYOUTS[layout])
        file.create_dataset("numbers", data=data[:, 0, 0], chunks=(16,) if "chunks" in LAYOUTS[layout] else None)
    dataset = Hdf5Dataset(tmp_path / "data.h5", {"x": "x", "number": "numbers"})
    random = np.random.default_rng(1)
    for _ in range(4):  # each second read goes down
        order = random.permutation(200)[:30].tolist()
        for row, sample in zip(order, dataset.__getitems__(order), strict=True):
            assert np.array_equal(sample["x"], data[row])
            assert (sample["number"], type(sample["number"])) == (data[row, 0, 0], np.int64)


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
    assert sorted(reads, key=lambda read: read.start) == [slice(2, 5), slice(11, 13)]


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


def test_text_that_is_declared_to_be_ascii_is_read_as_it_is(tmp_path: Path) -> None:
    """h5py declares so for each numpy array of bytes, of UTF-8 and of JPEG pictures, too."""
    raw = [b"\xff\xd8\x01\xfe", "né".encode(), b"plain", b"\xed\xa0\x80"]
    compound = np.array([(value,) for value in raw], dtype=[("s", "S4")])
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["fixed"] = np.array(raw, dtype="S5")
        file.create_dataset("variable", data=raw, dtype=h5py.string_dtype("ascii"))
        file["table"] = compound
        file.create_dataset("pairs", data=[[value, value] for value in raw], dtype=h5py.string_dtype("ascii"))
        file.create_dataset("utf-8", data=raw, dtype=h5py.string_dtype("utf-8"))
    for column in ("fixed", "variable"):
        read = Hdf5Dataset(tmp_path / "data.h5", column).__getitems__(range(4))
        assert read[1:3] == ["né", "plain"]
        assert [text.encode("utf-8", "surrogateescape") for text in read] == raw
    read = Hdf5Dataset(tmp_path / "data.h5", "table/s").__getitems__(range(4))
    assert [text.encode("utf-8", "surrogateescape") for text in read] == [value[:4] for value in raw]
    assert Hdf5Dataset(tmp_path / "data.h5", "pairs")[1].tolist() == ["né", "né"]
    with pytest.raises(SourceError, match="'utf-8' codec can't decode byte 0xff"):
        Hdf5Dataset(tmp_path / "data.h5", "utf-8")[0]


def test_fields_within_fields_are_columns(tmp_path: Path) -> None:
    inner = np.dtype([("p", "f4"), ("q/r", "i2"), ("names", "S4", (2,))])
    table = np.zeros(6, dtype=[("in", inner), ("many", inner, (3,)), ("own", "i8")])
    table["in"]["p"] = np.arange(6) / 2
    table["in"]["q/r"] = np.arange(6)
    table["in"]["names"] = b"abc"
    table["many"]["p"] = np.arange(18).reshape(6, 3)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["group/tab"] = table
    columns = ["group/tab/in/p", "group/tab/in/q/r", "group/tab/many/p", "group/tab/in/names", "group/tab/own"]
    p, q, many, names, own = Hdf5Dataset(tmp_path / "data.h5", columns).__getitems__([0, 5, 3])[2]
    assert (p, type(p), q, many.tolist(), names.tolist(), own) == (1.5, np.float32, 3, [9, 10, 11], ["abc", "abc"], 0)
    with pytest.raises(SourceError, match=r"tab/in is compound; name its fields as columns: group/tab/in/p, group/tab"):
        Hdf5Dataset(tmp_path / "data.h5", "group/tab/in")
    with pytest.raises(SourceError, match=r"'group/tab/in/z' does not exist; the file has: group/tab/in/names, "):
        Hdf5Dataset(tmp_path / "data.h5", "group/tab/in/z")


def virtual(directory: Path) -> Path:
    """A virtual dataset of four parts, each in a file of its own."""
    layout = h5py.VirtualLayout((8, 2), dtype="f4")
    for part in range(4):
        with h5py.File(directory / f"part{part}.h5", "w") as file:
            file["x"] = np.full((2, 2), part, dtype="f4")
        layout[2 * part : 2 * part + 2] = h5py.VirtualSource(f"part{part}.h5", "x", (2, 2))
    with h5py.File(directory / "whole.h5", "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=-1)
    return directory / "whole.h5"


def test_a_virtual_dataset_with_all_its_parts_is_read(tmp_path: Path) -> None:
    assert [float(row[0]) for row in Hdf5Dataset(virtual(tmp_path), "x")] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.shows("`Hdf5Dataset` reads each chunk once and gives h5py's samples in any layout")
def test_missing_parts_of_a_virtual_dataset_are_an_error(tmp_path: Path) -> None:
    """HDF5 itself gives fill values for them, without a word."""
    whole = virtual(tmp_path)
    dataset = Hdf5Dataset(whole, "x")  # in the trainer; a data worker opens it where a part is missing
    part = tmp_path / "part2.h5"
    part.rename(tmp_path / "elsewhere.h5")
    for read in (lambda: Hdf5Dataset(whole, "x"), lambda: dataset[5]):
        with pytest.raises(SourceError, match=r"part2\.h5: no such file"):
            read()
    with h5py.File(part, "w") as file:
        file["y"] = np.zeros((2, 2), dtype="f4")
    with pytest.raises(SourceError, match=r"that are not there: .*part2\.h5 has no dataset 'x'"):
        Hdf5Dataset(whole, "x")
    with h5py.File(part, "w") as file:
        file["x"] = np.zeros((1, 2), dtype="f4")
    with pytest.raises(SourceError, match=r"that are not there: dataset 'x' of 'part2\.h5' has only \(1, 2\)"):
        Hdf5Dataset(whole, "x")


def test_raw_data_that_end_too_early_are_an_error(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    with h5py.File(tmp_path / "data.h5", "w") as file:
        dataset = file.create_dataset("x", (10,), "i8", external=[(str(raw), 16, 80)])
        dataset[:] = np.arange(10)
    assert Hdf5Dataset(tmp_path / "data.h5", "x")[9] == 9
    os.truncate(raw, 60)
    with pytest.raises(SourceError, match=r"that are not there: .*raw has 60 bytes, and 96 were written"):
        Hdf5Dataset(tmp_path / "data.h5", "x")


def test_a_file_that_is_being_written_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "data.h5"
    script = f"""
import h5py, numpy, sys
file = h5py.File({str(path)!r}, "w", libver="latest")
file.create_dataset("x", data=numpy.arange(9), maxshape=(None,), chunks=(3,))
if sys.argv[1] == "swmr":
    file.swmr_mode = True
file.flush()
print("written", flush=True)
sys.stdin.read()
"""
    for how in ("plain", "swmr"):
        with subprocess.Popen(
            [sys.executable, "-c", script, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout
            assert writer.stdout.readline() == "written\n"
            with pytest.raises(SourceError, match=r"Another program writes it now .* HDF5_USE_FILE_LOCKING=FALSE"):
                Hdf5Dataset(path, "x")
            writer.communicate()
        assert Hdf5Dataset(path, "x")[8] == 8
        path.unlink()
