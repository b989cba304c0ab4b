"""Whatever bytes a peer sends: they are refused, no process ends, and no memory is taken that was only announced."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import socket
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import fuzz_frames
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.ops import tree
from hetstream.mpi_dataworkers.transports.base import ReceivedBatch, lay_out
from hetstream.mpi_dataworkers.transports.shm import ShmReceiver
from hetstream.mpi_dataworkers.transports.sockets import SocketBatchSender, SocketReceiver
from hetstream.mpi_dataworkers.wire.codec import encode
from hetstream.mpi_dataworkers.wire.messages import (
    Batch,
    Batches,
    Compressed,
    EndOfShard,
    GrantLease,
    Hello,
    ListedOrder,
    Proof,
    SessionSpec,
    StepList,
)

PROGRAM = Path(fuzz_frames.__file__)
TREES: list[Any] = [
    torch.zeros(2, dtype=torch.int32),
    [1, {"a": (2.5, None)}, torch.zeros(8, dtype=torch.uint8), np.zeros(2)],
    [torch.zeros(2, dtype=torch.uint8) for _ in range(9)],
]
SEEDS = [
    encode(Hello("w", "tcp://h:1", bytes(32))),
    encode(Proof(bytes(32))),
    encode(Compressed([-1, 100], b"header")),
    encode(EndOfShard("s", 3, 1)),
    encode(GrantLease(1, SessionSpec("s", "d", 0, 0, ListedOrder(True), ["tcp://h:1"]), 0, 1, StepList(0, b"1", b"2"))),
    *(encode(Batch("s", 0, 0, 1, tree.flatten(one)[0], [(0, 0, 8), (1, 0, 16)])) for one in TREES),
    encode(Batches([Batch("s", 0, 0, 1, tree.flatten(TREES[0])[0], [(0, 0, 8)])])),
]

whole = st.integers(-(2**63), 2**64 - 1)
plain = st.recursive(
    st.none() | st.booleans() | whole | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=12,
)
shapes = st.lists(st.integers(-2, 9) | whole, max_size=4)
names_of_types = st.sampled_from(["uint8", "float32", "complex64", "empty", "x"])
arrays = st.lists(st.tuples(st.sampled_from(["<f8", "|u1", "|O", "x"]), shapes, st.booleans()), max_size=3)
nodes = (
    st.sampled_from([["t"], ["l"], ["u"]])
    | st.tuples(st.just("d"), st.lists(st.text(max_size=4), max_size=4)).map(list)
    | st.tuples(st.just("p"), arrays, st.booleans()).map(list)
    | plain
)
numbers = st.integers(-2, 4)
offsets = st.integers(-1, 70) | whole
notes = st.dictionaries(st.sampled_from(["conj", "neg", "x"]), st.booleans(), max_size=2)
views = st.tuples(numbers, names_of_types, offsets, shapes, shapes, st.booleans(), notes)
places_of_tensors = st.lists(numbers | st.tuples(numbers) | views, max_size=4)
rooms = st.lists(st.tuples(offsets, st.lists(st.tuples(numbers, offsets, shapes, shapes), max_size=2)), max_size=2)
tables = st.lists(st.tuples(names_of_types, shapes), max_size=4)
packs = st.lists(st.lists(st.integers(-1, 4), max_size=3), max_size=2)


@pytest.fixture(autouse=True)
def _no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "load_structure", fuzz_frames.refuse_pickle)


def feed_measured(data: bytes) -> None:
    tracemalloc.start()
    try:
        fuzz_frames.feed(data)
        assert tracemalloc.get_traced_memory()[1] < (1 << 20) + 400 * len(data)
    finally:
        tracemalloc.stop()


@settings(deadline=None)
@given(st.binary(max_size=600))
def test_random_bytes(data: bytes) -> None:
    feed_measured(data)
    feed_measured(SEEDS[0][:4] + data)


@settings(deadline=None)
@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
def test_messages_with_wrong_bytes(seed: bytes, changes: list[tuple[int, int]]) -> None:
    data = bytearray(seed)
    for at, value in changes:
        data[at % len(data)] = value
    feed_measured(bytes(data))


@given(
    plain | st.tuples(tables, packs, nodes) | st.tuples(tables, packs, nodes, places_of_tensors, rooms),
    st.lists(st.tuples(plain, plain, plain), max_size=3),
)
@settings(deadline=None)
def test_structures_that_no_data_worker_writes(structure: object, places: list[object]) -> None:
    spec = msgspec.msgpack.encode(structure)
    feed_measured(spec)
    header = {"type": "Batch", "session_id": "s", "step": 0, "token": 0, "num_samples": 1}
    feed_measured(SEEDS[0][:4] + msgspec.msgpack.encode(header | {"spec": spec, "buffers": places}))


@pytest.mark.parametrize("shape", [[1 << 40], [1], [2**62, 2**62]])
def test_a_tensor_without_bytes_is_empty(shape: list[int]) -> None:
    spec = msgspec.msgpack.encode(([("uint8", shape)], [], ["t"]))
    with pytest.raises(ProtocolError):
        tree.unflatten(spec, [memoryview(b"")])


texts = st.lists(st.sampled_from(SEEDS) | st.binary(min_size=1, max_size=300), min_size=1, max_size=4)


@given(texts)
@settings(max_examples=50, deadline=None)
def test_a_stranger_of_the_same_user_on_shared_memory(texts: list[bytes]) -> None:
    receiver = ShmReceiver("11" * 32, 1 << 20)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(receiver.addresses[0].removeprefix("shm:").replace("@", "\0", 1))
        for text in texts:
            try:
                socket.send_fds(stranger, [text], [0])
            except OSError:
                break
            receiver.receive()
        assert receiver.receive() == []
    receiver.close()


def framed(text: bytes) -> bytes:
    """A message of one frame as it goes over a socket."""
    table, _, total = lay_out([len(text)])
    return total.to_bytes(8, "little") + table + text


@given(st.lists(texts.map(b"".join) | st.sampled_from(SEEDS).map(framed) | st.binary(min_size=1), min_size=1))
@settings(max_examples=50, deadline=None)
def test_a_stranger_on_a_socket(texts: list[bytes]) -> None:
    receiver = SocketReceiver("11" * 32, ["tcp://127.0.0.1:*"])
    host, _, port = receiver.addresses[0].removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        for text in texts:
            try:
                stranger.sendall(text)
            except OSError:
                break
            assert receiver.receive() == []
        assert receiver.receive() == []
    receiver.close()


@given(st.binary(min_size=1, max_size=2000), st.lists(st.integers(1, 700), max_size=6), st.booleans())
@settings(max_examples=50, deadline=None)
def test_a_data_worker_that_sends_garbage_is_refused_and_nobody_else(
    garbage: bytes, cuts: list[int], as_message: bool
) -> None:
    receiver = SocketReceiver("11" * 32, [f"ipc://@hetstream-test-{os.urandom(8).hex()}"])
    worker, other = SocketBatchSender("11" * 32, "w"), SocketBatchSender("11" * 32, "v")
    came: list[Any] = []

    def send(sender: SocketBatchSender, step: int) -> None:
        thread = threading.Thread(target=sender.send, args=(receiver.addresses[0], Batch("s", step, 0, 1, b"", []), []))
        thread.start()
        while thread.is_alive():
            came.extend(receiver.receive())
        thread.join()

    try:
        send(worker, 0)
        connection = worker._channels[receiver.addresses[0]]._socket
        data = framed(garbage) if as_message else garbage
        for start, stop in itertools.pairwise([0, *itertools.accumulate(cuts), len(data)]):
            with contextlib.suppress(OSError):
                connection.sendall(data[start:stop])
            came.extend(receiver.receive())
        send(other, 1)
        while not any(isinstance(one, ReceivedBatch) and one.header.step == 1 for one in came):
            came.extend(receiver.receive())
        assert all(isinstance(one, ReceivedBatch | ProtocolError) for one in came)
    finally:
        worker.close(0.0)
        other.close(0.0)
        receiver.close()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed: hetstream[fuzz]")
def test_a_coverage_guided_fuzzer_finds_nothing(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(SEEDS):
        (corpus / f"seed-{number}").write_bytes(seed)
    arguments = ["-max_total_time=60", "-rss_limit_mb=2048", "-malloc_limit_mb=256", "-timeout=10", "-max_len=4096"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments, str(corpus)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
