"""What compares steps changes nothing that the program shares with its processes, and sees samples that do."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import hook_programs as programs
import numpy as np
import pytest
import torch
from hooking import assert_no_local_step, hooked
from torch.utils.data import DataLoader

from hetstream.mpi_dataworkers.ops.process_memory import PrivateMemory

LENGTH = 24
_PR_SET_DUMPABLE = 4
NOBODY = 65534

# What samples reach by no attribute of their dataset.
elsewhere: dict[str, Any] = {}


class Noting(programs.Numbers):
    """Each sample, or some of them, adds one to a number that processes share."""

    def __init__(self, numbers: Any, only: int | None = None) -> None:
        super().__init__(LENGTH)
        self.only = only
        if isinstance(numbers, torch.Tensor | np.ndarray):
            self.numbers = numbers
        else:
            elsewhere["numbers"] = numbers

    def __getitem__(self, index: int) -> int:
        if self.only in (None, index):
            numbers = getattr(self, "numbers", elsewhere.get("numbers"))
            numbers[index] += 1
        return index


def numbers_in(memory: str, directory: Path) -> Any:
    if memory == "tensor":
        return torch.zeros(LENGTH, dtype=torch.int64).share_memory_()
    if memory == "memmap":
        return np.memmap(directory / f"numbers-{len(list(directory.iterdir()))}", np.int64, "w+", shape=LENGTH)
    if memory == "array of processes":
        return multiprocessing.Array("q", LENGTH)
    assert memory == "memory without a name"
    return memoryview(mmap.mmap(-1, 8 * LENGTH)).cast("q")


def noted(memory: str, directory: Path, only: int | None) -> tuple[Any, list[int]]:
    """The batches of two epochs, and how often each number was noted."""
    numbers = numbers_in(memory, directory)
    loader = DataLoader(Noting(numbers, only), 2, num_workers=2)
    batches = [[batch.tolist() for batch in loader] for _ in range(2)]
    return batches, [int(number) for number in numbers]


@pytest.mark.parametrize("memory", ["tensor", "memmap", "array of processes", "memory without a name"])
@pytest.mark.parametrize("only", [None, 0, 13])
def test_samples_that_write_where_processes_share_it_are_made_by_the_program_once(
    three: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    memory: str,
    only: int | None,
) -> None:
    plain = noted(memory, tmp_path, only)
    assert sum(plain[1]) == 2 * (LENGTH if only is None else 1)
    with hooked(three.name, monkeypatch):
        assert noted(memory, tmp_path, only) == plain
    assert [line for line in caplog.messages if "stays local" in line]


LATE = 180


class NotingLate(programs.Numbers):
    """The last samples of many set flags in memory of any size."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(LATE + 4)
        self.flags = torch.zeros(num_bytes, dtype=torch.uint8).share_memory_()

    def __getitem__(self, index: int) -> int:
        if index in (LATE, LATE + 3):
            self.flags[-1 - index] = 1
        return index


def noted_late(num_bytes: int) -> list[Any]:
    dataset = NotingLate(num_bytes)
    loader = DataLoader(dataset, 1, num_workers=2)
    found: list[Any] = []
    for _ in range(2):
        found += [[batch.tolist() for batch in loader], dataset.flags.nonzero().tolist()]
        dataset.flags.zero_()
    return found


@pytest.mark.parametrize("num_bytes", [1000, 1 << 25])
def test_what_samples_write_long_after_the_first_ones_is_not_lost(
    three: Any, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    plain = noted_late(num_bytes)
    assert len(plain[1]) == 2
    with hooked(three.name, monkeypatch):
        assert noted_late(num_bytes) == plain


class Level(programs.Numbers):
    def __init__(self, level: Any) -> None:
        super().__init__(300)
        self.level = level

    def __getitem__(self, index: int) -> int:
        return int(self.level[0])


@pytest.mark.parametrize("memory", ["tensor", "memmap"])
def test_what_the_program_writes_in_the_middle_of_a_pass_is_seen_by_what_follows(
    three: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, memory: str
) -> None:
    """Torch's workers have 4 steps in work; data workers many more, which are not given to the program then."""
    level, found = numbers_in(memory, tmp_path), []
    with hooked(three.name, monkeypatch):
        for step, batch in enumerate(DataLoader(Level(level), 1, num_workers=2)):
            found += batch.tolist()
            if step == 150:
                level[0] = 7
    assert found[:151] == [0] * 151
    assert found[156:] == [7] * 144
    assert "the program has written into shared memory in the middle of a pass" in caplog.text


class Appending(programs.Numbers):
    """Each sample prints, and may append to a file."""

    def __init__(self, file: Path | None) -> None:
        super().__init__(LENGTH)
        self.file = file

    def __getitem__(self, index: int) -> int:
        os.write(1, b"what a sample prints")
        os.write(2, b"and what a library says")
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(f"{index}\n")
        return index


@pytest.mark.parametrize("appends", [False, True])
def test_that_samples_write_to_files_is_said(
    three: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, appends: bool
) -> None:
    with hooked(three.name, monkeypatch):
        loader = DataLoader(Appending(tmp_path / "seen" if appends else None), 2, num_workers=2)
        assert [number for batch in loader for number in batch.tolist()] == list(range(LENGTH))
    assert len([line for line in caplog.messages if "write to files" in line]) == appends


class Reading(programs.Numbers):
    """Reads what processes share."""

    def __init__(self, directory: Path) -> None:
        super().__init__(LENGTH)
        self.epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.map = numbers_in("memmap", directory)

    def __getitem__(self, index: int) -> int:
        return index + int(self.epoch) + int(self.map[index])


@pytest.mark.parametrize("persistent", [False, True])
def test_what_samples_read_there_is_what_the_program_has_written(
    three: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, persistent: bool
) -> None:
    with hooked(three.name, monkeypatch), multiprocessing.Pool(1):  # a pool has locks and queues
        dataset = Reading(tmp_path)
        loader = DataLoader(dataset, 2, num_workers=2, persistent_workers=persistent)
        for epoch in range(3):
            dataset.epoch[:] = epoch
            dataset.map[:] = 100 * epoch
            found = [number for batch in loader for number in batch.tolist()]
            assert found == [index + 101 * epoch for index in range(LENGTH)]
        assert_no_local_step(loader)


def in_child(work: Callable[[], bool], user: int = 0) -> bool:
    child = os.fork()
    if child == 0:
        try:
            if user:
                os.seteuid(user)
                ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("user", [0, NOBODY])
def test_a_process_has_a_copy_of_all_that_it_shares_and_says_where_it_wrote(tmp_path: Path, user: int) -> None:
    """For whoever is not root, memory without a name cannot be opened, and is copied."""
    tmp_path.chmod(0o755)
    segment = SharedMemory(create=True, size=8)
    segment_name, number = f"/dev/shm/{segment.name}", multiprocessing.Value("q", 0)
    unnamed = memoryview(mmap.mmap(-1, 16)).cast("q")
    tensor, mapped = numbers_in("tensor", tmp_path), numbers_in("memmap", tmp_path)
    os.chown(segment_name, user, -1)
    os.chown(str(mapped.filename), user, -1)
    short = np.memmap(tmp_path / "short", np.uint8, "w+", shape=3 * mmap.PAGESIZE)
    os.truncate(tmp_path / "short", 10)  # a process that looks behind its first page is killed
    (tmp_path / "short").unlink()

    def set_number() -> None:
        number.value = 7

    writes: list[Callable[[], Any]] = [
        lambda: tensor.add_(7),
        lambda: mapped.__setitem__(3, 7),
        lambda: unnamed.__setitem__(1, 7),
        lambda: segment.buf.__setitem__(0, 7),
        lambda: short.__setitem__(0, 7),
        set_number,
    ]

    def values() -> list[int]:
        return [int(tensor[0]), int(mapped[3]), unnamed[1], segment.buf[0], int(short[0]), number.value]

    def work() -> bool:
        memory = PrivateMemory()
        with number.get_lock():
            before = values()
        is_right = before == [0] * len(writes) and memory.written() == ""
        for place, write in enumerate(writes):
            write()
            is_right &= memory.written() != "" and values()[place] == 7
            memory.renew()
            is_right &= memory.written() == "" and values() == before
        return is_right

    try:
        assert in_child(work, user)
        assert values() == [0] * len(writes), "nobody else's was changed"
    finally:
        segment.close()
        segment.unlink()


def test_memory_of_which_no_copy_can_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetstream.mpi_dataworkers.ops.process_memory._MOST_COPIED_BYTES", 4096)
    unnamed = mmap.mmap(-1, 8192)

    def work() -> bool:
        with pytest.raises(OSError, match="no copy can be had of 8192 bytes of shared memory"):
            PrivateMemory()
        return True

    assert in_child(work, NOBODY)
    unnamed.close()


def test_what_others_write_is_seen_when_it_is_renewed() -> None:
    unnamed = memoryview(mmap.mmap(-1, 8)).cast("q")
    reading, writing = os.pipe()

    def work() -> bool:
        memory = PrivateMemory()
        os.read(reading, 1)
        memory.renew()
        return unnamed[0] == 5 and memory.written() == ""

    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(0 if in_child(work, NOBODY) else 1))
    child.start()
    unnamed[0] = 5
    os.write(writing, b"x")
    child.join()
    assert child.exitcode == 0
    os.close(reading)
    os.close(writing)
