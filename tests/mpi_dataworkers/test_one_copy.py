"""The processes of a data worker share the bytes of a large dataset, which are fetched once, and no object."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample_datasets as datasets
import torch

from hetstream import DataLoader
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.pickled_pipeline import PickledPipeline, load_pipeline, pickle_pipeline
from hetstream.mpi_dataworkers.ops.pickling import APART_FROM_BYTES, pickle_apart, unpickle
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline
from hetstream.mpi_dataworkers.wire import pipeline_transfer as handover
from hetstream.mpi_dataworkers.wire.messages import Contents, Program, ProvidePipeline
from hetstream.mpi_dataworkers.wire.pipeline_transfer import HandoverFailed, pack, read_into, remove_unused
from hetstream.mpi_dataworkers.worker.fork_server import Exchange
from tests.processes import pss_of_all


@pytest.mark.usefixtures("commands")
def test_four_processes_hold_one_copy_of_a_large_array_and_a_tensor(service: Any, wait_until: Any) -> None:
    worker = service.start_workers(4)
    empty = pss_of_all(worker.pid)
    array = np.arange(6_000_000, dtype=np.int64)
    dataset = torch.utils.data.ConcatDataset([datasets.InMemory(array), datasets.InMemory(torch.from_numpy(array + 1))])
    with DataLoader(dataset, batch_size=4, service=service.name) as loader:

        def streamed_epoch() -> bool:
            before = loader.stats()["local_steps"]
            rows = [row for batch in loader for row in batch.tolist()]
            assert rows == [*array[:: len(array) // 400].tolist(), *(array[:: len(array) // 400] + 1).tolist()]
            return bool(loader.stats()["local_steps"] == before)

        # Until it has come to them, the loader may make steps itself.
        wait_until(streamed_epoch, timeout_s=60, what="an epoch from data workers")
        grown = pss_of_all(worker.pid) - empty
        assert grown < 1.6 * (num_bytes := 2 * array.nbytes), f"{grown / num_bytes:.2f} copies"
        assert len(list((service.address_file.parent).glob("pipelines-*/*"))) == 1
    assert service.log("worker").count("fetched for this host") == 1
    service.stop()
    assert not list(service.address_file.parent.glob("pipelines-*")), "nothing is left of it"


def test_what_a_dataset_opens_when_it_is_loaded_belongs_to_one_process(three: Any, tmp_path: Path) -> None:
    dataset = datasets.OpenedWhenLoaded(tmp_path / "records", 20_000)
    with DataLoader(dataset, batch_size=50, service=three.name, job_name="opened") as loader:
        assert [row for batch in loader for row in batch.tolist()] == list(range(len(dataset)))
        assert loader.stats()["local_steps"] == 0
    dataset.file.close()


@pytest.mark.parametrize("size", [5, 100_003])
def test_tensors_of_a_dataset_lie_in_a_data_worker_as_in_the_program(size: int) -> None:
    """Kernels that compute with them are the same ones, and so are the results to the last bit."""
    whole = torch.arange(float(size))
    tensors = [whole, whole[1:], torch.ones(size), torch.nn.Parameter(torch.ones(size)), torch.eye(size % 7 + 2)]
    for private in (False, True):
        pickled = pickle_apart((tensors, np.arange(3)))
        buffers: Any = pickled.buffers
        if private:
            buffers = PickledPipeline("", Program("", []), b"", pickled.blob, buffers).in_private().buffers
        here, _ = unpickle(pickled.blob, buffers)[0]
        assert [one.data_ptr() % 64 for one in here] == [one.data_ptr() % 64 for one in tensors]
        assert all(map(torch.equal, here, tensors))
        here[0][1] = -1
        assert here[1][0] == -1, "they still share a storage"


def test_what_a_process_writes_into_its_dataset_is_seen_by_no_other(three: Any) -> None:
    dataset = datasets.WritesIntoItsTable(np.zeros(1 << 20, dtype=np.int64))
    with DataLoader(dataset, batch_size=1, service=three.name, job_name="writes") as loader:
        made = [tuple(int(value) for value in batch) for batch in loader]
    assert len({process for process, _ in made}) > 1
    assert all(process == written for process, written in made)
    assert dataset.table[0] == 0


def test_a_dataset_that_changes_between_epochs_is_seen_and_the_old_one_is_dropped(three: Any) -> None:
    table = np.zeros(2 << 20, dtype=np.int64)
    with DataLoader(datasets.InMemory(table), batch_size=100, service=three.name, job_name="changes") as loader:
        for epoch in range(3):
            table[:] = epoch
            assert [row for batch in loader for row in batch.tolist()] == [epoch] * 400
        assert loader.stats()["local_steps"] == 0


def test_a_large_dataset_that_cannot_be_loaded_is_reported(three: Any) -> None:
    with (
        DataLoader(datasets.LargeOnlyHere(), batch_size=4, service=three.name, job_name="only here") as loader,
        pytest.raises(PipelineError, match="cannot be rebuilt in a data worker: UserError: not here"),
    ):
        next(iter(loader))


def test_a_program_with_a_relative_address_file_may_change_its_directory(
    service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    service.start_workers(1)
    monkeypatch.chdir(tmp_path)
    dataset = datasets.InMemory(np.arange(2_000_000))  # so large that it goes by a file
    with DataLoader(dataset, batch_size=100, service=f"file:{service.address_file.relative_to(tmp_path)}") as loader:
        expected = [batch.tolist() for batch in loader]
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")

        def streamed_epoch() -> bool:
            before = loader.stats()["local_steps"]
            assert [batch.tolist() for batch in loader] == expected
            return bool(loader.stats()["local_steps"] == before)

        # Another directory is another program: until a fresh process is there, the loader may make steps itself.
        wait_until(streamed_epoch, timeout_s=30, what="an epoch from data workers")
    assert service.log("worker").count("fetched for this host") == 2


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    with_two_slots = Exchange(num_slots=2)
    yield with_two_slots
    with_two_slots.close()


def message_of(name: str, *buffers: bytes, blob: bytes = b"pickle") -> ProvidePipeline:
    return ProvidePipeline(name, Program("/", ["/a"]), b"", *pack(blob, buffers, Path("/nowhere")))


def test_a_pickled_pipeline_is_kept_for_all_and_each_one_writes_to_its_own(exchange: Exchange) -> None:
    assert exchange.find("d") is None
    buffers = [b"a" * 100, b"", b"b" * 5000]
    with exchange.alone(lambda: False) as is_its_turn, exchange.alone(lambda: True) as is_anothers:
        assert is_its_turn
        assert not is_anothers
        first = exchange.keep(message_of("d", *buffers), Path("/nowhere"))
    second = exchange.find("d")
    assert second is not None
    assert [bytes(one) for one in second.buffers] == buffers
    assert (second.pipeline_id, second.program, second.blob) == ("d", Program("/", ["/a"]), b"pickle")
    memoryview(first.buffers[0])[:1] = b"x"
    assert bytes(second.buffers[0][:2]) == b"aa"


def test_a_slot_in_use_is_not_used_again(exchange: Exchange) -> None:
    large = bytes(2 << 20)
    held = [exchange.keep(message_of(name, large), Path("/nowhere")) for name in ("d0", "d1")]
    alone = exchange.keep(message_of("d2", b"x" * 100), Path("/nowhere"))
    assert bytes(alone.buffers[0]) == b"x" * 100, "it has memory of its own"
    assert exchange.find("d2") is None
    assert exchange.find("d1") is not None
    del held[0]
    exchange.keep(message_of("d3", large), Path("/nowhere"))
    assert exchange.find("d0") is None
    assert exchange.find("d3") is not None
    assert bytes(held[0].buffers[0]) == large


def test_memory_is_given_back_when_nobody_has_it_mapped(exchange: Exchange) -> None:
    held = exchange.keep(message_of("d", b"a" * 5000), Path("/nowhere"))
    other = exchange.keep(message_of("other", b"b" * 5000), Path("/nowhere"))
    exchange.give_back("d")
    assert exchange.find("d") is not None
    assert bytes(held.buffers[0]) == b"a" * 5000
    del held
    exchange.give_back("d")
    assert exchange.find("d") is None
    assert exchange.find("other") is not None, "the others stay"
    assert bytes(other.buffers[0]) == b"b" * 5000


def test_a_process_that_ended_while_it_fetched_holds_up_nobody(exchange: Exchange) -> None:
    pid = os.fork()
    if pid == 0:
        with exchange.alone(lambda: False):
            os._exit(0)
    os.waitpid(pid, 0)
    with exchange.alone(lambda: True) as is_its_turn:
        assert is_its_turn


def test_a_process_that_is_stopped_while_it_fetches_holds_up_nobody(exchange: Exchange) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with exchange.alone(lambda: False):
            os.kill(os.getpid(), signal.SIGSTOP)
            exchange.keep(message_of("d", b"theirs"), Path("/nowhere"))
            os.write(writing, b"kept")
            signal.pause()
    try:
        os.waitpid(pid, os.WUNTRACED)
        deadline = time.monotonic() + 10
        with exchange.alone(lambda: time.monotonic() > deadline) as is_its_turn:
            assert not is_its_turn
            assert time.monotonic() < deadline
            own = exchange.keep(message_of("d", b"ours"), Path("/nowhere"), shared=is_its_turn)
        assert bytes(own.buffers[0]) == b"ours"
        assert exchange.find("d") is None, "nobody else sees it"
        os.kill(pid, signal.SIGCONT)
        assert os.read(reading, 4) == b"kept"
        theirs = exchange.find("d")
        assert theirs is not None
        assert bytes(theirs.buffers[0]) == b"theirs"
        with exchange.alone(lambda: True) as is_its_turn:
            assert not is_its_turn, "a process that goes on is waited for"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("blob_bytes", [10, 3000], ids=["small stream", "large stream"])
def test_what_is_too_large_for_a_message_goes_by_a_file_that_is_checked(
    exchange: Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blob_bytes: int
) -> None:
    monkeypatch.setattr(handover, "IN_MESSAGE_BYTES", 1000)
    blob, data = os.urandom(blob_bytes), os.urandom(2000)
    directory = tmp_path / "pickled pipelines"
    for _ in range(2):  # another rank
        sent, contents = pack(blob, [data], directory)
    (file,) = directory.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(sent) + len(contents.data) <= 1000
    message = ProvidePipeline("d", Program("/", []), b"", sent, contents)
    kept = exchange.keep(message, directory)
    assert (bytes(kept.blob), [bytes(one) for one in kept.buffers]) == (blob, [data])
    written = file.read_bytes()
    file.write_bytes(bytes([written[0] ^ 1]) + written[1:])
    with pytest.raises(HandoverFailed, match="is damaged"):
        exchange.keep(message, directory)
    file.chmod(0o644)
    with pytest.raises(HandoverFailed, match="not this user's own"):
        exchange.keep(message, directory)
    now = file.stat().st_mtime
    remove_unused(directory, {file.name}, now + 3600)
    remove_unused(directory, (), now + 1)
    assert file.exists()
    remove_unused(directory, (), now + 3600)
    with pytest.raises(HandoverFailed, match=r"cannot be read on this host: .* share"):
        exchange.keep(message, directory)


def test_a_dataset_above_the_cap_or_without_room_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PipelineError, match=r"by a file, and it cannot be written: .*Not a dir"):
        pack(b"", [bytes(handover.IN_MESSAGE_BYTES + 1)], tmp_path / "file" / "pickled pipelines")
    monkeypatch.setattr(handover, "MOST_BYTES", 1000)
    with pytest.raises(PipelineError, match="is 1,002 bytes in pickled form, more than the 1,000"):
        pack(b"xx", [bytes(1000)], tmp_path)


def test_a_message_whose_bytes_are_too_few_is_refused() -> None:
    with pytest.raises(HandoverFailed, match="3 bytes came instead of 64"):
        read_into(memoryview(bytearray(64)), Contents([3], b"abc"), Path("/nowhere"))


class Labelled(torch.Tensor):
    """A subclass of a program."""


def through(value: Any) -> Any:
    """What a data worker makes of it."""
    pickled = pickle_apart(Pipeline(value, list, -1))
    copies = [memoryview(bytearray(buffer)) for buffer in pickled.buffers]
    return load_pipeline(PickledPipeline("d", Program(os.getcwd(), []), b"", pickled.blob, copies)).dataset


def test_tensors_and_arrays_leave_without_a_copy_and_views_stay_views() -> None:
    tensor = torch.arange(40_000).reshape(200, 200)
    array = np.arange(20_000.0)
    half = torch.zeros(50_000, dtype=torch.bfloat16)
    value = {
        "whole": tensor,
        "row": tensor[3],
        "turned": tensor.T,
        "array": array,
        "half": half,
        "small": torch.ones(3),
    }
    pickled = pickle_apart(value)
    assert sorted(map(len, pickled.buffers)) == [100_000, 160_000, 320_000]
    assert pickled.shared == []
    assert len(pickled.blob) < 5000
    assert {np.frombuffer(one, dtype=np.uint8).ctypes.data for one in pickled.buffers} == {
        tensor.data_ptr(),
        array.ctypes.data,
        half.data_ptr(),
    }
    made = through(value)
    assert all(torch.equal(made[name], value[name]) for name in ("whole", "row", "turned", "half", "small"))
    assert np.array_equal(made["array"], array)
    made["whole"][3, 5] = -1
    made["array"][0] = -1
    assert made["row"][5] == made["turned"][5, 3] == -1
    assert tensor[3, 5] == 605


def test_other_tensors_go_torchs_own_way() -> None:
    parameter = torch.nn.Parameter(torch.ones(APART_FROM_BYTES))
    tagged = torch.ones(APART_FROM_BYTES)
    tagged.tag = "mine"  # type: ignore[attr-defined]
    conjugate = torch.ones(APART_FROM_BYTES, dtype=torch.complex64).conj()
    sparse = torch.eye(3).to_sparse()
    value = [parameter, tagged, conjugate, sparse, torch.empty(0), torch.tensor(7)]
    made = through(value)
    assert isinstance(made[0], torch.nn.Parameter)
    assert made[0].requires_grad
    assert made[1].tag == "mine"
    assert torch.equal(made[2], conjugate)
    assert torch.equal(made[3].to_dense(), torch.eye(3))
    assert made[4].numel() == 0
    assert made[5] == 7


def test_tensors_of_any_class_share_their_storage_and_leave_without_a_copy() -> None:
    table = torch.arange(1_000_000.0).reshape(1000, 1000)
    rows = [row.as_subclass(Labelled) for row in table]
    leaves = {"learned": torch.nn.Parameter(table[5]), "leaf": table[5:].requires_grad_()}
    value = {"rows": rows, **leaves, "storage": table.untyped_storage()}
    pickled = pickle_apart(value)
    assert [buffer.nbytes for buffer in pickled.buffers] == [4_000_000]
    assert len(pickled.blob) < 400_000
    made = through(value)
    assert [type(row) for row in made["rows"]] == [type(row) for row in rows]
    assert (made["learned"].requires_grad, made["leaf"].requires_grad, made["leaf"].is_leaf) == (True, True, True)
    made["rows"][5][7] = -1
    assert made["learned"][7].item() == made["leaf"][0, 7].item() == -1
    assert made["storage"].nbytes() == 4_000_000
    assert torch.equal(made["rows"][999].as_subclass(torch.Tensor), table[999])


def test_a_change_of_one_byte_is_another_pickled_pipeline() -> None:
    array = np.zeros(1 << 20, dtype=np.uint8)
    pipeline = Pipeline(array, list, len(array))
    before = pickle_pipeline(pipeline).pipeline_id
    assert pickle_pipeline(pipeline).pipeline_id == before
    array[-1] = 1
    assert pickle_pipeline(pipeline).pipeline_id != before


def test_a_data_worker_whose_dataset_never_loads_ends_when_told(service: Any, tmp_path: Path, wait_until: Any) -> None:
    worker = service.start_workers(2)
    flag = tmp_path / "loading"
    with DataLoader(datasets.NeverLoaded(8, flag), batch_size=8, service=service.name) as loader:
        passing = iter(loader)
        wait_until(flag.exists, timeout_s=30, what="the load in a data worker")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=15) == 0
        assert sum(1 for _ in passing) == 1, "the trainer makes it itself"
