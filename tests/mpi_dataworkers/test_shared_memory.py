"""Datasets in memory that the trainer shares with its worker processes: what it writes there between epochs arrives."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import Path
from typing import Any

import hook_programs as programs
import numpy as np
import pytest
import torch
from hooking import assert_no_local_step, hooked, sent_pipelines_of
from torch.utils.data import DataLoader

from hetstream import DataLoader as OwnLoader
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.pickling import APART_FROM_BYTES, pickle_apart, unpickle
from hetstream.mpi_dataworkers.ops.process_memory import Looking, WriteWatch
from hetstream.mpi_dataworkers.wire.pipeline_transfer import IN_MESSAGE_BYTES

LENGTH = 4


SHARED = ["tensor", "tensor of an array", "array", "column", "field", "memmap"]
MULTIPROCESSING = ["array of multiprocessing", "array without a lock"]


def is_of_multiprocessing(labels: Any) -> bool:
    return isinstance(labels, ctypes.Array | SynchronizedBase)


def labels_in(memory: str, directory: Path) -> Any:
    """Labels that are all zero; the owner of the memory is theirs."""
    if memory == "tensor":
        return torch.zeros(LENGTH).share_memory_()
    if memory == "tensor of an array":
        return torch.from_numpy(np.frombuffer(mmap.mmap(-1, 4 * LENGTH), np.float32))
    if memory == "array":
        return np.frombuffer(mmap.mmap(-1, 4 * LENGTH), np.float32)
    if memory == "column":
        return np.frombuffer(mmap.mmap(-1, 12 * LENGTH), np.float32).reshape(LENGTH, 3)[::-1, 1]
    if memory == "field":
        return np.frombuffer(mmap.mmap(-1, 12 * LENGTH), [("x", "f4"), ("y", "f8")]).view(np.recarray)["x"]
    if memory == "array of multiprocessing":
        return multiprocessing.Array("f", LENGTH)
    if memory == "array without a lock":
        return multiprocessing.Array("f", LENGTH, lock=False)
    return np.memmap(directory / f"labels-{len(list(directory.iterdir()))}", np.float32, "w+", shape=LENGTH)


class Labelled(programs.Numbers):
    """Labels in shared memory; beside them a large array and a number, which belong to the process alone."""

    def __init__(self, labels: Any, own_bytes: int = APART_FROM_BYTES) -> None:
        super().__init__(LENGTH)
        self.labels = labels
        self.own = torch.zeros(own_bytes, dtype=torch.uint8)
        self.offset = 0

    def __getitem__(self, index: int) -> tuple[float, int, int]:
        return float(self.labels[index]), int(self.own[index]), self.offset


def changing_epochs(dataset: Labelled) -> list[Any]:
    """What comes of a dataset of which everything is changed between epochs."""
    loader = DataLoader(dataset, LENGTH, num_workers=1, persistent_workers=True)
    found = []
    for epoch in range(3):
        value = max(1, epoch)  # as it was before the second epoch, and another one before the third
        dataset.labels[:] = [value] * LENGTH if is_of_multiprocessing(dataset.labels) else value
        dataset.own[:] = dataset.offset = epoch
        found += [[part.tolist() for part in batch] for batch in loader]
    if "_hetstream" in vars(loader):
        assert_no_local_step(loader)
    return found


@pytest.mark.parametrize("memory", SHARED + MULTIPROCESSING)
def test_what_is_written_into_shared_memory_between_epochs_arrives_and_nothing_else(
    three: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: str
) -> None:
    """With persistent_workers; without, each epoch has the dataset as it is then."""
    plain = changing_epochs(Labelled(labels_in(memory, tmp_path)))
    assert plain == [[[value] * LENGTH, [0] * LENGTH, [0] * LENGTH] for value in (1, 1, 2)]
    with hooked(three.name, monkeypatch):
        assert changing_epochs(Labelled(labels_in(memory, tmp_path))) == plain
        assert changing_epochs(Labelled(labels_in(memory, tmp_path), IN_MESSAGE_BYTES)) == plain, "sent by a file"


def test_a_step_made_in_the_trainer_has_what_data_workers_have(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetstream.mpi_dataworkers.loader.client.LOCAL_AFTER_S", 0.1)
    dataset = Labelled(torch.zeros(LENGTH).share_memory_())
    with hooked(service.name, monkeypatch):
        loader = DataLoader(dataset, LENGTH, num_workers=1, persistent_workers=True)
        steps = iter(loader)
        dataset.own[:] = 7  # in the middle of the epoch
        assert [part.tolist() for part in next(steps)] == [[0] * LENGTH] * 3
        dataset.labels[:] = 1
        assert [part.tolist() for part in next(iter(loader))] == [[1] * LENGTH, [0] * LENGTH, [0] * LENGTH]


def test_memory_that_stays_as_it_is_is_not_sent_again(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Labelled(torch.zeros(LENGTH).share_memory_())
    with hooked(three.name, monkeypatch):
        loader = DataLoader(dataset, LENGTH, num_workers=1, persistent_workers=True)
        for _ in loader:
            pass
        sent = sent_pipelines_of(loader).last
        assert sent is not None
        assert sent.pickled.shared == [0]
        assert sent_pipelines_of(loader).with_shared_memory(sent) is sent
        dataset.labels[-1] = 1
        assert sent_pipelines_of(loader).with_shared_memory(sent).message.pipeline_id != sent.message.pipeline_id


def test_what_processes_of_one_program_share_by_a_name_a_lock_or_a_manager_stays_with_the_trainer(
    three: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    segment = SharedMemory(create=True, size=4)
    try:
        with multiprocessing.Manager() as manager, hooked(three.name, monkeypatch):
            for owner in (segment, multiprocessing.Lock(), manager.dict(), [manager.Queue()]):
                dataset = programs.Numbers(4)
                dataset.owner = owner  # type: ignore[attr-defined]
                assert [batch.tolist() for batch in DataLoader(dataset, 4)] == [[0, 1, 2, 3]]
    finally:
        segment.close()
        segment.unlink()
    named, locked, managed, queued = (record.getMessage() for record in caplog.records)
    assert "stays local: the dataset cannot be sent to data workers: dataset.owner" in named
    assert "(shared memory belongs to the processes of one host)" in named
    assert "stays local: the dataset cannot be sent to data workers: dataset.owner" in locked
    assert "dataset.owner (multiprocessing.managers.DictProxy) cannot be pickled (a multiprocessing.Manager" in managed
    assert "dataset.owner[0] (multiprocessing.managers.AutoProxy[Queue]) cannot be pickled (a multi" in queued


class Caching(programs.Numbers):
    """Its samples are made once, and kept for all processes: a recipe of PyTorch's forum."""

    def __init__(self, kept: Any) -> None:
        super().__init__(LENGTH)
        self.kept = kept
        self.is_full = False

    def __getitem__(self, index: int) -> float:
        if not self.is_full:
            self.kept[index] = index + 0.5
        return float(self.kept[index])


@pytest.mark.parametrize("memory", ["tensor", "tensor of an array", "column", *MULTIPROCESSING])
def test_a_cache_that_worker_processes_fill_for_each_other_is_no_silent_zeros(
    three: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Caching(labels_in(memory, tmp_path))
    with hooked(three.name, monkeypatch):
        loader = DataLoader(dataset, LENGTH, num_workers=1)
        for dataset.is_full in (False, True):
            assert [batch.tolist() for batch in loader] == [[0.5, 1.5, 2.5, 3.5]]
    assert [message for message in caplog.messages if "stays local" in message]


def test_our_own_loader_says_that_processes_cannot_fill_a_cache_for_each_other(three: Any, tmp_path: Path) -> None:
    dataset = Caching(labels_in("tensor", tmp_path))
    expected = pytest.raises(PipelineError, match="the dataset writes into shared memory while it makes samples")
    with OwnLoader(dataset, batch_size=LENGTH, service=three.name) as loader, expected:
        next(iter(loader))


def test_a_cache_that_the_trainer_fills_in_place_of_data_workers_is_none_either(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetstream.mpi_dataworkers.loader.client.LOCAL_AFTER_S", 0.1)
    dataset = Caching(torch.zeros(LENGTH).share_memory_())
    with hooked(service.name, monkeypatch):
        assert next(iter(DataLoader(dataset, LENGTH, num_workers=1))).tolist() == [0.5, 1.5, 2.5, 3.5]


def test_looking_for_writes_takes_little_time() -> None:
    now, digests = 0.0, ["a"]

    def digest() -> str:
        nonlocal now
        now += 2
        digests.append(digests[-1])
        return digests[-1]

    watch = WriteWatch(digest, looking=Looking(clock=lambda: now, cpu_clock=lambda: now))
    for _ in range(3):
        watch.check()
    assert len(digests) == 3, "when it is made, and after the first step"
    now += 200
    watch.check()
    assert len(digests) == 4
    digests.append("b")
    watch.check()
    now += 200
    with pytest.raises(PipelineError):
        watch.check()


def test_one_look_that_takes_long_by_chance_delays_no_other() -> None:
    now, took_s, looks = 0.0, 1e-5, []

    def look() -> str:
        nonlocal now
        now += took_s
        looks.append(now)
        return "a"

    watch = WriteWatch(look, "a", Looking(each_s=5e-5, clock=lambda: now, cpu_clock=lambda: now))
    for step in range(100):
        took_s = 1e-3 if step == 50 else 1e-5
        assert not watch.has_written()
    assert len(looks) == 100


def test_views_of_one_shared_storage_stay_views_of_one() -> None:
    whole = torch.arange(4.0).share_memory_()
    pickled = pickle_apart([whole, whole[1:], torch.ones(4)])
    assert [len(buffer) for buffer in pickled.buffers] == [whole.untyped_storage().nbytes()]
    assert pickled.shared == [0]


def test_arrays_with_gaps_in_shared_memory_come_as_what_they_show() -> None:
    whole = np.frombuffer(mmap.mmap(-1, 8 * 60), np.float64).reshape(3, 4, 5)
    whole[:] = np.arange(60).reshape(3, 4, 5)
    records = np.frombuffer(mmap.mmap(-1, 36), [("x", "<i4"), ("y", ">f8")]).view(np.recarray)
    records.x, records.y = [1, 2, 3], [0.5, 1.5, 2.5]
    arrays = [
        whole[:, ::2], whole[::-1, 1:3, ::-2], whole[1, 2:3, 4:0:-1], whole.transpose(1, 2, 0), whole[:, 0, 0],
        records, records["y"], records[::2], np.arange(10)[::2],
    ]  # fmt: skip
    pickled = pickle_apart(arrays)
    came = unpickle(pickled.blob, [bytearray(buffer) for buffer in pickled.buffers])[0]
    for one, other in zip(arrays, came, strict=True):
        assert (type(other), other.dtype, other.shape) == (type(one), one.dtype, one.shape)
        assert other.tolist() == one.tolist()
    assert len(pickled.shared) == len(arrays) - 1, "the last one is the process's own"
    assert all(len(buffer) <= 480 for buffer in pickled.buffers)
