"""What every transport must do, whatever carries the bytes. It takes them from `transports/registry.py`."""

from __future__ import annotations

import collections
import errno
import os
import queue
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.ops.tree import flatten, unflatten
from hetstream.mpi_dataworkers.transports import registry, sockets
from hetstream.mpi_dataworkers.transports import shm as shm_module
from hetstream.mpi_dataworkers.transports.base import BatchReceiver, BatchSender, PeerUnreachable, ReceivedBatch
from hetstream.mpi_dataworkers.transports.choice import TransportSender
from hetstream.mpi_dataworkers.transports.registry import LoaderSide
from hetstream.mpi_dataworkers.transports.registry import Transport as Registered
from hetstream.mpi_dataworkers.transports.shm import ShmBatchSender
from hetstream.mpi_dataworkers.transports.sockets import SocketBatchSender, SocketReceiver, compress, decompress
from hetstream.mpi_dataworkers.wire.codec import Buffer, Scattered, fuse, size_of, split
from hetstream.mpi_dataworkers.wire.messages import Batch, Batches, EndOfShard

KEY = "5a" * 32
# So much that the pool of shared memory has 5 MiB.
BUFFER_BYTES = 2 << 20
POOL_BYTES = 5 << 20


@dataclass(frozen=True)
class Transport:
    """How to make both ends, with a job's batch key."""

    name: str
    receiver: Callable[[str], BatchReceiver]
    sender: Callable[[str], BatchSender]


def _registered(name: str, transport: Registered) -> Transport:
    """Both ends as loaders and data workers open them, on this host."""

    def skipping() -> None:
        if transport.mpi_world_only:
            _mpi()

    def receiver(key: str) -> BatchReceiver:
        skipping()
        return transport.receiver(LoaderSide(key, "tcp://127.0.0.1:1", BUFFER_BYTES, False, (name,)))

    def sender(key: str) -> BatchSender:
        skipping()
        return transport.sender(key, "w")

    return Transport(name, receiver, sender)


TRANSPORTS = {name: _registered(name, one) for one in registry.TRANSPORTS for name in one.names}


def _mpi() -> Any:
    """The MPI transport, whose import calls MPI_Init: not in a process that goes on to other tests, or forks."""
    if "PMI_RANK" not in os.environ:
        pytest.skip("this process is no rank of an MPI world; test_mpi.py runs this suite in one")
    from hetstream.mpi_dataworkers.transports import mpi

    return mpi


class Loader:
    """A receiver with a thread of its own, as in a loader; what comes is in `batches`."""

    def __init__(self, receiver: BatchReceiver) -> None:
        self.receiver = receiver
        self.address = receiver.addresses[0]
        self.batches: queue.SimpleQueue[ReceivedBatch | ProtocolError] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="receiver")
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in self.receiver.sources:
            poller.register(source, zmq.POLLIN)
        while not self._stop.is_set():
            poller.poll(20)
            for batch in self.receiver.receive():
                self.batches.put(batch)
            batch = None  # nothing here may keep a batch

    def take(self) -> ReceivedBatch:
        batch = self.batches.get(timeout=20)
        assert isinstance(batch, ReceivedBatch), batch
        return batch

    def is_quiet(self, for_s: float = 0.2) -> bool:
        try:
            self.batches.get(timeout=for_s)
        except queue.Empty:
            return True
        return False

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self.receiver.close()


@pytest.fixture(autouse=True, scope="module")
def _mpi_world() -> None:
    if "PMI_RANK" in os.environ:
        _mpi()  # MPI_Init opens what MPI_Finalize closes


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Transport:
    return TRANSPORTS[request.param]


@pytest.fixture
def loader(transport: Transport) -> Iterator[Loader]:
    one = Loader(transport.receiver(KEY))
    yield one
    one.stop()


@pytest.fixture
def sender(transport: Transport) -> Iterator[BatchSender]:
    one = transport.sender(KEY)
    yield one
    one.close(0.0)


def header(step: int, buffers: Sequence[tuple[int, int, int]] = (), spec: bytes = b"") -> Batch:
    return Batch("session", step, 1, 1, spec, list(buffers))


def pattern(step: int, size: int) -> bytes:
    return np.random.default_rng(step).bytes(size)


def frames_of(batch: ReceivedBatch) -> list[bytes]:
    return [bytes(frame) for frame in batch.frames]


Point = collections.namedtuple("Point", ["x", "y"])

TREES: dict[str, Any] = {
    "nested": {"a": [torch.arange(7), (torch.ones(2, 3), "text", 3.5, None)], 5: Point(np.arange(4.0), b"raw")},
    "0-d": [torch.tensor(3.25), np.array(7), torch.tensor(True)],
    "empty": [torch.empty(0, 3), np.empty((2, 0), dtype=np.int16), [], {}],
    "non-contiguous": [torch.arange(24).reshape(4, 6).t(), np.arange(24).reshape(4, 6)[:, ::2], torch.arange(9)[::3]],
    "dtypes": [torch.ones(5, dtype=kind) for kind in (torch.bool, torch.bfloat16, torch.float16, torch.complex64)],
    "ragged": [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)],
    "sparse": [torch.eye(4).to_sparse()],
    "large": torch.arange(700_000, dtype=torch.float64),
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        if left.layout is torch.sparse_coo:
            return right.layout is left.layout and same(left.to_dense(), right.to_dense())
        if left.is_nested:
            return right.layout is left.layout and same(left.unbind(), right.unbind())
        return left.dtype is right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.shows("a batch of any structure and type arrives bit for bit on every transport")
@pytest.mark.parametrize("tree", TREES)
def test_every_kind_of_batch_arrives_bit_for_bit(loader: Loader, sender: BatchSender, tree: str) -> None:
    spec, buffers = flatten(TREES[tree])
    frames, places = fuse(buffers)
    sender.send(loader.address, header(1, places, spec), frames)
    received = loader.take()
    assert isinstance(received.header, Batch)
    assert received.transport == loader.address.partition(":")[0]
    assert same(unflatten(received.header.spec, split(received.frames, received.header.buffers)), TREES[tree])


@pytest.mark.shows("work of a dead data worker times out, and the order stays")
def test_batches_of_one_data_worker_come_in_order(loader: Loader, sender: BatchSender) -> None:
    sizes = [0, 1, 100, 20_000, 70_000, 300_000, 5_000_000]
    sent = [[pattern(step, sizes[step % 7])] * (step % 3) for step in range(60)]
    for step, frames in enumerate(sent):
        sender.send(loader.address, header(step), frames)
    for step, frames in enumerate(sent):
        received = loader.take()
        assert isinstance(received.header, Batch)
        assert (received.header.step, frames_of(received)) == (step, frames)


def test_frames_of_any_size_are_whole_again(loader: Loader, sender: BatchSender) -> None:
    frames = [pattern(size, size) for size in ((64 << 10) - 8, 64 << 10, (1 << 20) + 1, 3 << 20, 9 << 20)]
    sender.send(loader.address, header(0, spec=pattern(9, 3 << 20)), [*frames, b""])
    assert frames_of(loader.take()) == [*frames, b""]


def test_many_small_tensors_are_one_frame(loader: Loader, sender: BatchSender) -> None:
    tree = [torch.full((number,), number) for number in range(141)]
    spec, buffers = flatten(tree)
    frames, places = fuse(buffers)
    sender.send(loader.address, header(0, places, spec), frames)
    received = loader.take()
    assert len(received.frames) == 1
    assert same(unflatten(spec, split(received.frames, places)), tree)


@pytest.mark.parametrize("size", [(9,), (1_000,), (20, 50), ()], ids=str)
def test_scattered_frames_arrive_as_one(loader: Loader, sender: BatchSender, size: tuple[int, ...]) -> None:
    tree = [torch.full((*size, number + 1), float(number)) for number in range(20)]
    spec, (buffer,) = flatten(tree)
    assert isinstance(buffer, Scattered)
    sender.send(loader.address, header(0, [(0, 0, buffer.nbytes)], spec), [buffer])
    received = loader.take()
    assert same(unflatten(spec, split(received.frames, [(0, 0, buffer.nbytes)])), tree)


def test_many_large_tensors_arrive_as_one_frame_whatever_they_are(loader: Loader, sender: BatchSender) -> None:
    for dtype, count in ((torch.float32, 20), (torch.bfloat16, 600)):
        tree = {str(number): torch.rand(35_000 + number).to(dtype) for number in range(count)}
        tree["1"] = torch.rand(20_000, 3).to(dtype).t()
        tree["2"].requires_grad_()
        tree["3"] = torch.tensor(2.5, dtype=dtype)
        spec, (buffer,) = flatten(tree)
        assert isinstance(buffer, Scattered)
        assert buffer.pieces is not None, "large enough to leave from where they lie"
        sender.send(loader.address, header(0, [(0, 0, buffer.nbytes)], spec), [buffer])
        received = loader.take()
        came = unflatten(spec, split(received.frames, [(0, 0, buffer.nbytes)]))
        assert all(torch.equal(came[name], tensor) for name, tensor in tree.items())
        assert list(came) == list(tree)


@pytest.mark.parametrize("burst_bytes", [1, 1 << 20, 5 << 20])
def test_a_message_ends_wherever_a_burst_of_reading_does(
    loader: Loader, sender: BatchSender, monkeypatch: pytest.MonkeyPatch, burst_bytes: int
) -> None:
    """The rest of it is less than what a large message wakes the loader for."""
    monkeypatch.setattr(sockets, "_BURST_BYTES", burst_bytes)
    for step, nbytes in enumerate((9 << 20, 5 << 20, (8 << 20) + 12_345, 3, 6 << 20)):
        sender.send(loader.address, header(step, [(0, 0, nbytes)]), [memoryview(pattern(step, nbytes))])
        received = loader.take()
        assert b"".join(bytes(part) for part in split(received.frames, [(0, 0, nbytes)])) == pattern(step, nbytes)


# Alone and packed, copied out of a message and seen in it, around each limit in between.
ALIGNED_SIZES = (1, 3, 10, 17, 100, 1_000, 20_000, 70_001, 300_001)
NAMED_DTYPES = {name: found for name in dir(torch) if isinstance(found := getattr(torch, name), torch.dtype)}
DTYPES = [dtype for name, dtype in NAMED_DTYPES.items() if not name.startswith("q")]


def neighbours() -> Iterator[list[Any]]:
    """Tensors and arrays of all types and sizes, each beside others."""
    for size in ALIGNED_SIZES:
        yield [np.full(size, 1, dtype) for dtype in "?bhilfdFDg"] + [torch.empty(size, dtype=dtype) for dtype in DTYPES]
        shapes: list[list[tuple[int, ...]]] = [
            [(size,)],
            [(size,)] * 9,
            [(size, 3)] * 9,
            [(1 + number % 3, 1 + size // 3) for number in range(20)],
            [(*[1] * (number % 3), size) for number in range(9)],
        ]
        for dtype in (torch.bool, torch.float16, torch.float32, torch.float64):
            yield from ([torch.empty(shape, dtype=dtype) for shape in some] for some in shapes)
    yield [torch.tensor(float(number)) for number in range(40)]
    yield [{"nested": (torch.ones(3), [torch.ones(5), 4]), "sparse": torch.eye(3).to_sparse()}, torch.ones(7)]


def addresses(value: Any) -> Iterator[int]:
    """Where the numbers of a batch lie, but for small arrays, which NumPy copied to memory of their own."""
    if isinstance(value, torch.Tensor):
        parts = [value._indices(), value._values()] if value.is_sparse else [value]
        yield from (part.data_ptr() for part in parts)
    elif isinstance(value, np.ndarray):
        yield from [] if value.flags.owndata else [value.ctypes.data]
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from addresses(part)


def check_that_all_is_aligned(loader: Loader, sender: BatchSender) -> None:
    kept = []  # so that memory is short, too
    for batch in neighbours():
        spec, buffers = flatten(batch)
        frames, places = fuse(buffers)
        sender.send(loader.address, header(1, places, spec), frames)
        apart = [(number, 0, size_of(buffer)) for number, buffer in enumerate(buffers)]
        sender.send(loader.address, header(2, apart, spec), buffers)
        for _ in range(2):
            received = loader.take()
            assert isinstance(received.header, Batch)
            kept.append(unflatten(spec, split(received.frames, received.header.buffers)))
            assert {address % 64 for address in addresses(kept[-1])} == {0}, spec


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_tensor_and_array_lies_where_one_of_torch_would(loader: Loader, sender: BatchSender) -> None:
    """Elsewhere a kernel may be another one, and its results differ in the last bit."""
    check_that_all_is_aligned(loader, sender)


def test_what_is_computed_with_a_tensor_is_as_in_the_program(loader: Loader, sender: BatchSender) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(5, 7, generator=generator)
    batch = [torch.rand(3, 7, generator=generator) for _ in range(40)]
    spec, buffers = flatten(batch)
    frames, places = fuse(buffers)
    sender.send(loader.address, header(1, places, spec), frames)
    came = unflatten(spec, split(loader.take().frames, places))
    for here, there in zip(came, batch, strict=True):
        assert torch.equal(torch.nn.functional.linear(here, weights), torch.nn.functional.linear(there, weights))


def test_everything_that_a_data_worker_delivers_passes(loader: Loader, sender: BatchSender) -> None:
    deliveries = [Batches([header(0), header(1)]), EndOfShard("session", 2, 1)]
    for delivery in deliveries:
        sender.send(loader.address, delivery, [])
    assert [loader.take().header for _ in deliveries] == deliveries


def test_received_tensors_can_be_written(loader: Loader, sender: BatchSender) -> None:
    for size in (100, 300_000):
        sender.send(loader.address, header(0), [bytes(size)])
        tensor = torch.frombuffer(loader.take().frames[0], dtype=torch.uint8)
        assert int(tensor.add_(1).sum()) == size


def test_what_was_sent_before_an_orderly_end_arrives(loader: Loader, sender: BatchSender) -> None:
    for step in range(3):
        sender.send(loader.address, header(step), [bytes(300_000)])
    # Dropped at once, so that a transport which gives memory back has told the data worker, which does not look any
    # more.
    assert [loader.take().header.step for _ in range(3)] == [0, 1, 2]
    for step in range(3, 40):
        sender.send(loader.address, header(step), [b"small"])
    sender.close(5.0)
    assert [loader.take().header.step for _ in range(3, 40)] == list(range(3, 40))


def test_a_loader_that_keeps_every_batch_gets_every_batch(loader: Loader, sender: BatchSender) -> None:
    sent = [pattern(step, 300_000) for step in range(3 * POOL_BYTES // 300_000)]
    for step, frame in enumerate(sent):
        sender.send(loader.address, header(step), [frame])
    kept = [loader.take() for _ in sent]
    assert [frames_of(one) for one in kept] == [[frame] for frame in sent]
    del kept
    for step, frame in enumerate(sent):  # and there is room again
        sender.send(loader.address, header(step), [frame])
        assert frames_of(loader.take()) == [frame]


def test_what_was_made_in_memory_that_the_transport_lends_arrives(loader: Loader, sender: BatchSender) -> None:
    """The memory may be filled in part, left unused, held while others leave, or be full of batches that are kept."""
    sender.send(loader.address, header(0), [pattern(0, 20_000)])
    loader.take()
    kept, sent = [], []
    for step in range(1, 60):
        frame = pattern(step, 100_000 * (step % 6))
        room = sender.room(loader.address, 700_000)
        if step % 7 == 0:
            room = None  # left unused
        elif step % 5 == 0:
            assert sender.room(loader.address, 700_000) is None, "what is lent is not lent twice"
        if room is not None:
            room[: len(frame)] = frame
        if step % 4 == 0:  # something else goes first
            sender.send(loader.address, header(1000 + step), [pattern(1000 + step, 50_000)])
            sent.append(pattern(1000 + step, 50_000))
        sender.send(loader.address, header(step), [frame if room is None else room[: len(frame)]])
        sent.append(frame)
        kept += [loader.take() for _ in range(len(sent) - len(kept))]
    assert [frames_of(one) for one in kept] == [[frame] for frame in sent]


def test_a_batch_with_a_large_header_goes_from_lent_memory_too(loader: Loader, sender: BatchSender) -> None:
    sender.send(loader.address, header(0), [pattern(0, 20_000)])
    loader.take()
    for size in (100, 100_000, 300_000):
        frame = pattern(size, 200_000)
        room = sender.room(loader.address, 200_000)
        if room is not None:
            room[:] = frame
        sender.send(loader.address, header(1, spec=bytes(size)), [frame if room is None else room])
        received = loader.take()
        assert isinstance(received.header, Batch)
        assert (len(received.header.spec), frames_of(received)) == (size, [frame])


def test_shared_memory_is_lent_and_given_back() -> None:
    """What is made there is not copied: the trainer's bytes lie where they were written."""
    loader, sender = Loader(TRANSPORTS["shm"].receiver(KEY)), ShmBatchSender(KEY, "w")
    try:
        assert sender.room(loader.address, 1 << 20) is None, "there is no connection yet"
        sender.send(loader.address, header(0), [])
        loader.take()
        for step in range(1, 200):  # many times what the pool has, if any of it got lost
            room = sender.room(loader.address, 1 << 20)
            assert room is not None
            room[:100_000] = pattern(step, 100_000)
            sender.send(loader.address, header(step), [room[:100_000]])
            received = loader.take()
            room[0] = step  # of the test alone: a program is never given it again
            assert received.frames[0][0] == step
            del room, received
        loader.stop()
        assert sender.room(loader.address, 1 << 20) is None, "a loader that is gone lends nothing"
    finally:
        sender.close(0.0)
        loader.stop()


def test_a_slow_loader_loses_nothing(transport: Transport, sender: BatchSender) -> None:
    """Back-pressure: the data worker may run ahead or wait, but every batch arrives."""
    loader = Loader(transport.receiver(KEY))
    try:
        done = threading.Thread(
            target=lambda: [sender.send(loader.address, header(step), [bytes(400_000)]) for step in range(40)]
        )
        done.start()
        for step in range(40):
            received = loader.take()
            assert isinstance(received.header, Batch)
            assert received.header.step == step
        done.join()
    finally:
        loader.stop()


@pytest.mark.parametrize("size", [100, 3_000_000, 40_000_000])
def test_a_data_worker_that_is_killed_while_it_sends_harms_nobody(
    transport: Transport, loader: Loader, sender: BatchSender, size: int
) -> None:
    if transport.name == "mpi":
        pytest.skip("when a rank is killed, the launcher ends the whole MPI world")
    child = os.fork()
    if child == 0:
        try:
            own = transport.sender(KEY)
            own.send(loader.address, header(0), [b"first"])
            own.send(loader.address, header(1), [bytes(size)])
            own.send(loader.address, header(2), [bytes(size)])
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    sender.send(loader.address, header(3), [b"of another"])
    steps = []
    while 3 not in steps:
        received = loader.take()
        assert isinstance(received.header, Batch)
        assert received.header.step in (0, 3) or len(received.frames[0]) == size, "whole or not at all"
        steps.append(received.header.step)


def test_a_loader_that_is_gone_is_an_error_soon(
    transport: Transport, loader: Loader, sender: BatchSender, wait_until: Any
) -> None:
    sender.send(loader.address, header(0), [bytes(10)])
    loader.take()
    loader.stop()

    def fails() -> bool:
        try:
            sender.send(loader.address, header(1), [bytes(100_000)])
        except PeerUnreachable:
            return True
        return False

    wait_until(fails, timeout_s=10, what="PeerUnreachable")


def test_an_address_without_a_loader_is_an_error(transport: Transport, sender: BatchSender) -> None:
    loader = Loader(transport.receiver(KEY))
    loader.stop()
    with pytest.raises(PeerUnreachable, match=r"hetstream|127\.0\.0\.1|mpi:"):
        sender.send(loader.address, header(0), [])


def test_a_data_worker_with_another_key_delivers_nothing(transport: Transport, loader: Loader) -> None:
    stranger = transport.sender("a5" * 32)
    with pytest.raises(PeerUnreachable, match=r"key|answer"):
        stranger.send(loader.address, header(0), [b"forged"])
    stranger.close(0.0)
    assert loader.is_quiet()


def test_a_new_connection_is_proven_anew(transport: Transport, loader: Loader, sender: BatchSender) -> None:
    for step in range(3):
        sender.send(loader.address, header(step), [b"x"])
        assert frames_of(loader.take()) == [b"x"]
        sender.drop(loader.address)


@pytest.mark.shows("after SIGKILL no process, port, socket name or shared memory is left")
def test_closing_leaves_no_name_behind(loader: Loader, sender: BatchSender, wait_until: Any) -> None:
    sender.send(loader.address, header(0), [bytes(300_000)])
    kept = loader.take()
    sender.close(0.0)
    loader.stop()
    assert bytes(kept.frames[0]) == bytes(300_000), "a batch outlives both ends"
    del kept
    name = loader.address.rpartition("@")[2]
    wait_until(lambda: name not in Path("/proc/net/unix").read_text(), what="the end of the socket's name")


def test_a_loader_with_too_many_files_open_goes_on_and_takes_connections_later(
    transport: Transport, loader: Loader
) -> None:
    if transport.name == "mpi":
        pytest.skip("MPI opens no file for a connection")
    start, begin = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(start, 1)
            transport.sender(KEY).send(loader.address, header(0), [b"late"])
        finally:
            os._exit(0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(start)
    start = os.dup(0)
    os.close(start)  # the number that a connection would get
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (start, limits[1]))
        os.write(begin, b".")
        assert loader.is_quiet()
        assert loader.is_alive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(begin)
        os.waitpid(child, 0)
    assert frames_of(loader.take()) == [b"late"]


# --- the choice between transports
# ---------------------------------------------------------------------------------------


def test_a_data_worker_takes_the_best_transport_that_it_reaches(caplog: pytest.LogCaptureFixture) -> None:
    over_shm, over_tcp = Loader(TRANSPORTS["shm"].receiver(KEY)), Loader(TRANSPORTS["tcp"].receiver(KEY))
    elsewhere = ("shm:@hetstream-elsewhere", "ipc://@hetstream-elsewhere")
    sender = TransportSender(KEY, "w")
    try:
        with caplog.at_level("INFO"):
            sender.send((over_shm.address, over_tcp.address), header(0), [])
            assert over_shm.take().transport == "shm"
            for step in range(2):
                sender.send((*elsewhere, "rdma://h", over_tcp.address), header(step), [])
                assert over_tcp.take().transport == "tcp"
        (first, second) = (record.getMessage() for record in caplog.records)
        assert first == f"batches to the loader go by {over_shm.address}"
        assert "elsewhere" in second
        assert "rdma://h is of no transport that this data worker knows" in second
        over_shm.stop()
        sender.send((over_shm.address, over_tcp.address), header(3), [])
        assert over_tcp.take().transport == "tcp", "a transport that fails is left for the next"
        with pytest.raises(PeerUnreachable, match=r"elsewhere.*; .*elsewhere"):
            sender.send(elsewhere, header(0), [])
        with pytest.raises(PeerUnreachable, match="no transport"):
            sender.send((), header(0), [])
    finally:
        sender.close(0.0)
        over_tcp.stop()
        over_shm.stop()


def test_a_loader_without_address_space_for_a_pool_gets_its_batches_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    over_shm, over_tcp = Loader(TRANSPORTS["shm"].receiver(KEY)), Loader(TRANSPORTS["tcp"].receiver(KEY))
    sender = TransportSender(KEY, "w")
    monkeypatch.setattr(shm_module.mmap, "mmap", refused)
    try:
        for step in range(2):
            sender.send((over_shm.address, over_tcp.address), header(step), [])
            assert over_tcp.take().transport == "tcp"
        assert over_shm.is_alive()
    finally:
        sender.close(0.0)
        over_tcp.stop()
        over_shm.stop()


def test_memory_that_cannot_be_had_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, sender = Loader(TRANSPORTS["shm"].receiver(KEY)), ShmBatchSender(KEY, "w")
    monkeypatch.setattr(shm_module, "available_bytes", lambda: 1 << 20)
    try:
        frames: list[Buffer] = [pattern(1, 600_000)]
        sender.send(loader.address, header(0), frames)
        assert frames_of(loader.take()) == frames
        assert sender._channels[loader.address]._reserved == 0
    finally:
        sender.close(0.0)
        loader.stop()


@pytest.mark.shows("a batch may have more than 2 GiB")
@pytest.mark.slow
def test_a_batch_of_more_than_two_gib_is_whole(loader: Loader, sender: BatchSender) -> None:
    size = (1 << 31) + 12_345
    frame = np.zeros(size, dtype=np.uint8)
    frame[:: 1 << 20] = np.arange(len(frame[:: 1 << 20])) % 251
    frame[-1] = 7
    sender.send(loader.address, header(0), [frame.data, b"behind it"])
    received = loader.batches.get(timeout=120)
    assert isinstance(received, ReceivedBatch)
    assert np.array_equal(np.frombuffer(received.frames[0], dtype=np.uint8), frame)
    assert bytes(received.frames[1]) == b"behind it"


# --- compression ----------------------------------------------------------------------------------------------------

zstandard = pytest.importorskip("zstandard")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_was_compressed_lies_where_a_tensor_of_torch_would() -> None:
    loader, sender = Loader(SocketReceiver(KEY, ["tcp://127.0.0.1:*"], compress=True)), SocketBatchSender(KEY, "w")
    try:
        check_that_all_is_aligned(loader, sender)
    finally:
        sender.close(0.0)
        loader.stop()


def test_over_tcp_only_what_shrinks_is_compressed() -> None:
    loader = Loader(SocketReceiver(KEY, ["tcp://127.0.0.1:*"], compress=True))
    sender = SocketBatchSender(KEY, "w")
    frames: list[Buffer] = [bytes(500_000), pattern(1, 500_000), b"small", bytes(range(256)) * 1000]
    try:
        sender.send(loader.address, header(7, spec=bytes(100_000)), frames)
        received = loader.take()
        assert frames_of(received) == frames
        assert received.header == header(7, spec=bytes(100_000))
        torch.frombuffer(received.frames[0], dtype=torch.uint8).add_(1)  # writable
        sent, sizes = compress(frames)
        assert sizes == [500_000, -1, -1, 256_000]
        assert sum(map(len, sent)) < 510_000
    finally:
        sender.close(0.0)
        loader.stop()


@pytest.mark.parametrize("announced", [-0, 99_999, 100_001, 1 << 60])
def test_a_frame_that_is_not_what_it_announced_is_refused(announced: int) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(100_000))
    with pytest.raises(ProtocolError, match="decompress"):
        decompress([bomb], [announced])
    with pytest.raises(ProtocolError, match="cannot be decompressed"):
        decompress([b"junk"], [10])
    with pytest.raises(ProtocolError, match="1 frames came with 0 sizes"):
        decompress([bomb], [])
