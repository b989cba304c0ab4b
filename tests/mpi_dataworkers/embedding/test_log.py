"""The log of an embedding server: torn, damaged, in use, and in segments."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hetstream.mpi_dataworkers.embedding.history import parts_now, parts_of_generation
from hetstream.mpi_dataworkers.embedding.log import Log
from hetstream.mpi_dataworkers.embedding.parts import Parts
from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.wire.messages import (
    EMBEDDING_PARTS,
    EmbeddingTable,
    MarkGeneration,
    OpenTables,
    PartRows,
    WriteRows,
)

TABLE = EmbeddingTable("t", 1000, 8)
CLIENT = "c" * 32
ALL = list(range(EMBEDDING_PARTS))


class Kept:
    """A log with what follows from it: a dict instead of memory for rows."""

    def __init__(self, folder: Path, least_log_bytes: int = 1 << 20, kept_generations: int = 3) -> None:
        self.parts, self.rows = Parts(), dict[int, bytes]()
        self.log = Log(folder, lambda: None, kept_generations, least_log_bytes)
        try:
            for said, at, data in self.log.recover():
                if isinstance(said, Parts):
                    self.parts = said
                else:
                    self.parts.apply(said, at)
                if isinstance(said, WriteRows | PartRows):
                    count = len(data) // 16
                    ids = np.frombuffer(data, np.int64, count).tolist()
                    self.rows |= {row: bytes(data[8 * count + 8 * at :][:8]) for at, row in enumerate(ids)}
        except BaseException:
            self.log.close()
            raise

    def change(self, said: OpenTables | WriteRows | MarkGeneration, frames: Sequence[bytes] = ()) -> None:
        is_mark = isinstance(said, MarkGeneration)
        self.parts.apply(said, self.log.mark(said, self.parts) if is_mark else self.log.append(said, frames))

    def open(self) -> None:
        self.change(OpenTables(CLIENT, 0, (), [TABLE], ALL))

    def write(self, number: int, rows: dict[int, bytes]) -> None:
        frames = (np.array(list(rows), np.int64).tobytes(), b"".join(rows.values()))
        self.change(WriteRows(CLIENT, number, "t"), frames)
        self.rows |= rows

    def look_after(self) -> None:
        rows = dict(self.rows)  # as a thread may see them

        dump = (
            (PartRows(CLIENT, 0, "t", row % EMBEDDING_PARTS), (np.int64(row).tobytes(), data))
            for row, data in rows.items()
        )
        self.log.look_after(self.parts, lambda: dump)

    def close(self) -> None:
        self.log.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "server-a"


def some_rows(number: int) -> dict[int, bytes]:
    return {row: number.to_bytes(4, "little") + row.to_bytes(4, "little") for row in range(number, 1000, 300)}


def test_a_torn_record_is_cut_off_at_each_byte(folder: Path, tmp_path: Path) -> None:
    kept = Kept(folder)
    kept.open()
    kept.write(1, some_rows(1))
    before = (folder / "000001.log").stat().st_size
    kept.write(2, some_rows(2))
    kept.close()
    whole = (folder / "000001.log").read_bytes()
    for size in range(before, len(whole) + 1):
        for zeros in (0, 64):  # a file system may have lost what was written
            if zeros and size not in (before, len(whole)):
                continue
            copy = tmp_path / "copy"
            shutil.copytree(folder, copy)
            (copy / "000001.log").write_bytes(whole[:size] + bytes(zeros))
            again = Kept(copy)
            is_whole = size == len(whole)
            assert again.rows == some_rows(1) | (some_rows(2) if is_whole else {})
            assert again.parts.clients[CLIENT].made == (2 if is_whole else 1)
            again.write(3, some_rows(3))
            again.close()
            again = Kept(copy)
            assert again.parts.clients[CLIENT].made == 3
            assert again.rows == some_rows(1) | (some_rows(2) if is_whole else {}) | some_rows(3)
            again.close()
            shutil.rmtree(copy)


def test_a_damaged_record_is_not_passed_over(folder: Path) -> None:
    kept = Kept(folder)
    kept.open()
    kept.write(1, some_rows(1))
    end = (folder / "000001.log").stat().st_size
    kept.write(2, some_rows(2))
    kept.close()
    path = folder / "000001.log"
    whole = path.read_bytes()
    path.write_bytes(whole[: end - 1] + bytes([whole[end - 1] ^ 1]) + whole[end:])
    with pytest.raises(EmbeddingError, match=r"000001.log .* is damaged: the record at byte \d+ has another checksum"):
        Kept(folder)
    path.write_bytes(whole[:end] + b"what is this" * 10)
    with pytest.raises(EmbeddingError, match="begins with b'what'"):
        Kept(folder)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # the last one: the host has ended before it was on the disk
    again = Kept(folder)
    assert again.rows == some_rows(1)
    again.close()


def test_a_directory_is_for_one_server(folder: Path) -> None:
    kept = Kept(folder)
    with pytest.raises(EmbeddingError, match="another embedding server uses"):
        Kept(folder)
    kept.close()
    Kept(folder).close()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_directory_of_somebody_else_is_refused(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, 4242, -1)
    with pytest.raises(EmbeddingError, match="belongs to user 4242"):
        Kept(folder)
    with pytest.raises(EmbeddingError, match="4242"):
        parts_now(folder, CLIENT, [0], [TABLE])


def test_segments_follow_and_old_ones_go(folder: Path) -> None:
    kept = Kept(folder, least_log_bytes=500)
    kept.open()
    generations = {}
    for number in range(1, 200):
        kept.write(number, {row: number.to_bytes(8, "little") for row in range(number % 7, 70, 7)})
        if number % 20 == 0:
            generations[f"g{number}"] = dict(kept.rows)
            kept.change(MarkGeneration(CLIENT, 1000 + number, f"g{number}", 1, [str(folder)]))
        kept.look_after()
        if kept.log._base_writer is not None:
            kept.log._base_writer.join()
    rows = dict(kept.rows)
    kept.close()
    segments = sorted(int(path.stem) for path in folder.glob("*.log"))
    assert segments[0] > 2
    assert segments == list(range(segments[0], segments[-1] + 1))
    again = Kept(folder)
    assert again.rows == rows
    again.close()
    for name in list(generations)[-3:]:
        found = {
            int(row): bytes(data)
            for _, ids, given in parts_of_generation(folder, name, ALL, [TABLE])
            for row, data in zip(ids, given, strict=True)
        }
        assert found == generations[name]
    with pytest.raises(EmbeddingError, match="has no generation 'g20'"):
        parts_of_generation(folder, "g20", ALL, [TABLE])


def test_a_generation_that_is_not_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "server-b"
    kept, second = Kept(folder), Kept(other)
    kept.open()
    kept.write(1, some_rows(1))
    kept.change(MarkGeneration(CLIENT, 2, "g", 2, [str(folder), str(other)]))
    with pytest.raises(
        EmbeddingError, match=r"of 2 ranks is not whole: there is no mark of rank 1 in .*server-a and none"
    ):
        parts_of_generation(folder, "g", ALL, [TABLE])
    with pytest.raises(EmbeddingError, match="rows of 8 bytes, and the program has opened it with 1000 of 16"):
        parts_now(folder, CLIENT, ALL, [EmbeddingTable("t", 1000, 16)])
    assert list(parts_now(other, CLIENT, ALL, [TABLE])) == []  # it was lost before it had heard of this client
    second.change(OpenTables(CLIENT, 0, (), [TABLE], []))
    with pytest.raises(EmbeddingError, match="does not have part 0, 1, 2"):
        parts_now(other, CLIENT, ALL, [TABLE])
    with pytest.raises(EmbeddingError, match="cannot be read"):
        parts_now(tmp_path / "nowhere", CLIENT, ALL, [TABLE])
    kept.close()
    second.close()
