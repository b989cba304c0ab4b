"""What only the transport over plain sockets does: how far it goes ahead, memory used again, silence noticed."""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hetstream.mpi_dataworkers.errors import ServiceError
from hetstream.mpi_dataworkers.transports import sockets
from hetstream.mpi_dataworkers.transports.base import PeerUnreachable
from hetstream.mpi_dataworkers.transports.sockets import ReceiveMemory, SocketBatchSender, SocketReceiver, pieces_of
from hetstream.mpi_dataworkers.wire.codec import Scattered
from hetstream.mpi_dataworkers.wire.messages import Batch

KEY = "5a" * 32


@pytest.fixture
def receiver() -> Iterator[SocketReceiver]:
    one = SocketReceiver(KEY, ["tcp://127.0.0.1:*"])
    yield one
    one.close()


@pytest.fixture
def sender(receiver: SocketReceiver) -> Iterator[SocketBatchSender]:
    """Its connection to the receiver is open."""
    one = SocketBatchSender(KEY, "w")
    opening = threading.Thread(target=one.send, args=(receiver.addresses[0], header(-1), []))
    opening.start()
    take(receiver, 1)
    opening.join()
    yield one
    one.close(0.0)


def header(step: int) -> Batch:
    return Batch("session", step, 1, 1, b"", [])


def take(receiver: SocketReceiver, count: int) -> list[Any]:
    batches: list[Any] = []
    deadline = time.monotonic() + 20
    while len(batches) < count:
        assert time.monotonic() < deadline, f"{len(batches)} of {count}"
        select.select(receiver.sources, [], [], 1.0)
        batches += receiver.receive()
    return batches


def test_golden_bytes_of_a_message_on_the_wire() -> None:
    pieces = pieces_of([b"header", b"", b"tensor", memoryview(b"another")])
    assert b"".join(pieces) == (
        (135).to_bytes(8, "little")  # what follows
        + (4).to_bytes(4, "little")  # frames
        + b"".join(size.to_bytes(8, "little") for size in (6, 0, 6, 7))
        + b"header".ljust(64 - 36, b"\0")
        + b"tensor".ljust(64, b"\0")
        + b"another"
    )


def joined_frames(num_bytes: int, count: int, each: Callable[[int], None]) -> list[Scattered]:
    """Frames that have to be put together; `each` hears how many of them there are in memory when the next one is."""
    alive: list[weakref.ref[Any]] = []

    def write(number: int, memory: memoryview) -> None:
        each(sum(one() is not None for one in alive))
        np.frombuffer(memory, dtype=np.uint8)[:] = number
        alive.append(weakref.ref(memory.obj))

    return [Scattered(num_bytes, functools.partial(write, number)) for number in range(count)]


@pytest.mark.parametrize(("num_bytes", "most"), [(1 << 20, 6), (3 << 20, 3), (9 << 20, 2), (20 << 20, 2)])
def test_a_data_worker_goes_no_further_ahead_of_a_slow_network_than_its_bound(
    receiver: SocketReceiver,
    sender: SocketBatchSender,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Any,
    num_bytes: int,
    most: int,
) -> None:
    monkeypatch.setattr(sockets, "_HOLD_S", 60.0)
    address, in_memory = receiver.addresses[0], []
    frames = joined_frames(num_bytes, (48 << 20) // num_bytes + 2, in_memory.append)
    channel: Any = sender._channels[address]
    waited_s: list[float] = []
    sending = threading.Thread(
        target=lambda: waited_s.extend(sender.send(address, header(step), [one]) for step, one in enumerate(frames))
    )
    sending.start()
    waiting_bytes = lambda: channel._num_handed - channel._num_left  # noqa: E731
    wait_until(lambda: waiting_bytes() > num_bytes + sockets._AHEAD_BYTES, what="more than may wait")
    for step, batch in enumerate(take(receiver, len(frames))):
        assert (batch.header.step, batch.frames[0].nbytes, batch.frames[0][-1]) == (step, num_bytes, step)
    sending.join()
    assert max(in_memory) <= most, "messages that lie in memory when the next one is put together"
    wait_until(lambda: waiting_bytes() == 0, what="nothing that waits")
    assert waited_s[0] == 0 < max(waited_s), "and says that it waited"


class Script:
    """In the place of a channel's condition: in each wait so many bytes leave, as if the time for it were over."""

    def __init__(self, channel: Any, leaving: list[int]) -> None:
        self.channel, self.leaving = channel, leaving

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify(self) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        assert timeout_s == sockets._HOLD_S
        self.channel._num_left += self.leaving.pop(0)
        return predicate()


def test_what_leaves_is_waited_for_and_a_loader_that_takes_nothing_once() -> None:
    channel: Any = sockets._Channel.__new__(sockets._Channel)
    channel._num_handed, channel._num_left, channel._stuck_at, channel._error = 50 << 20, 0, -1, None
    channel._changed = script = Script(channel, [1 << 20] * 36 + [0])
    channel._hold_back(10 << 20)
    assert len(script.leaving) == 1, "however long it takes, until 14 MiB are left"
    channel._hold_back(9 << 20)
    assert not script.leaving, "nothing has left"
    channel._hold_back(9 << 20)  # would find nothing to pop
    channel._num_left += 1
    script.leaving = [2 << 20]
    channel._hold_back(9 << 20)
    assert not script.leaving, "it takes some again"
    assert channel._num_handed - channel._num_left < 13 << 20


def test_a_loader_that_takes_nothing_is_waited_for_once(
    receiver: SocketReceiver, sender: SocketBatchSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_HOLD_S", 0.01)
    frames = [np.full(3 << 20, step, dtype=np.uint8) for step in range(30)]
    for step, frame in enumerate(frames):
        sender.send(receiver.addresses[0], header(step), [frame.data, b"small"])
    for step, batch in enumerate(take(receiver, len(frames))):
        assert batch.header.step == step
        assert bytes(batch.frames[0]) == frames[step].tobytes()
        assert bytes(batch.frames[1]) == b"small"


@pytest.mark.parametrize("linger_s", [20.0, 0.0])
def test_what_is_queued_leaves_before_the_end_or_is_dropped_whole(
    receiver: SocketReceiver, sender: SocketBatchSender, monkeypatch: pytest.MonkeyPatch, linger_s: float
) -> None:
    monkeypatch.setattr(sockets, "_HOLD_S", 0.01)
    for step in range(30):
        sender.send(receiver.addresses[0], header(step), [bytes(3 << 20)])
    closing = threading.Thread(target=sender.close, args=(time.monotonic() + linger_s,))
    closing.start()
    if linger_s:
        assert [batch.header.step for batch in take(receiver, 30)] == list(range(30))
    closing.join()
    while receiver._connections:
        select.select(receiver.sources, [], [], 1.0)
        assert all(len(batch.frames[0]) == 3 << 20 for batch in receiver.receive())  # type: ignore[union-attr]


def test_more_tensors_than_a_call_takes_arrive(receiver: SocketReceiver, sender: SocketBatchSender) -> None:
    frames = [np.full(7, number % 251, dtype=np.uint8).tobytes() for number in range(3000)]
    sender.send(receiver.addresses[0], header(0), frames)
    assert [bytes(frame) for frame in take(receiver, 1)[0].frames] == frames


def test_memory_of_batches_that_were_dropped_is_used_again(receiver: SocketReceiver, sender: SocketBatchSender) -> None:
    def receive_one() -> Any:
        sender.send(receiver.addresses[0], header(0), [bytes(1 << 20)])
        return take(receiver, 1)[0]

    def address_of(batch: Any) -> int:
        return int(np.frombuffer(batch.frames[0], dtype=np.uint8).ctypes.data)

    first, second = receive_one(), receive_one()
    places = {address_of(first), address_of(second)}
    assert len(places) == 2
    assert all(place % 64 == 0 for place in places), "on cache lines"
    view = first.frames[0][100:200]
    del first
    third = receive_one()
    assert address_of(third) not in places, "a view of it is left"
    place = address_of(second)
    del second
    assert address_of(receive_one()) == place
    view[:] = bytes(100)


def test_memory_for_other_sizes_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_KEEP_BYTES", 1 << 20)
    memory = ReceiveMemory()
    for size in (400_000, 800_000, 1_600_000):
        parts = [memory.take(size) for _ in range(3)]
        del parts
    kept = sum(size * len(free) for size, free in memory._free.items())
    assert kept < 6_000_000, "only of the last size"


def test_an_address_that_cannot_be_bound_is_an_error() -> None:
    with pytest.raises(ServiceError, match=r"no socket for batches at ipc.*, tcp://192\.0\.2\.1:\*: "):
        SocketReceiver(KEY, ["ipc://@hetstream-test-" + os.urandom(8).hex(), "tcp://192.0.2.1:*"])


def test_a_loader_that_is_stopped_is_an_error_and_its_steps_can_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    monkeypatch.setattr(sockets, "_SILENCE_S", 2)
    receiver = SocketReceiver(KEY, ["tcp://127.0.0.1:*"])
    child = os.fork()
    if child == 0:
        try:
            while True:
                select.select(receiver.sources, [], [], 1.0)
                receiver.receive()
        finally:
            os._exit(1)
    sender = SocketBatchSender(KEY, "w")
    try:
        sender.send(receiver.addresses[0], header(0), [b"x"])
        os.kill(child, signal.SIGSTOP)
        frame, why = bytes(16 << 20), []

        def fails() -> bool:
            try:
                sender.send(receiver.addresses[0], header(1), [frame])
            except PeerUnreachable as error:
                why.append(str(error))
            return bool(why)

        wait_until(fails, timeout_s=20, what="PeerUnreachable")
        assert "is gone" in why[0]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        sender.close(0.0)
        receiver.close()


CUT = """
import subprocess, threading, time
from hetstream.mpi_dataworkers.wire.messages import Batch
from hetstream.mpi_dataworkers.transports import sockets
from hetstream.mpi_dataworkers.transports.base import PeerUnreachable

sockets._SILENCE_S = 2
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
receiver = sockets.SocketReceiver("5a" * 32, ["tcp://127.0.0.1:*"])
sender = sockets.SocketBatchSender("5a" * 32, "w")
address = receiver.addresses[0]
send = lambda step: sender.send(address, Batch("s", step, 0, 1, b"", []), [bytes(1000)])
opening = threading.Thread(target=send, args=(0,))
opening.start()
while not receiver.receive():
    pass
opening.join()
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
if {sends}:
    send(1)
deadline = time.monotonic() + 20
channel = sender._channels[address]
def is_over():
    try:
        channel._look_whether_closed()
    except OSError:
        return True
while receiver._connections or not is_over():
    receiver.receive()
    assert time.monotonic() < deadline, (receiver._connections, is_over())
    time.sleep(0.02)
try:
    send(2)
except PeerUnreachable as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own needs root")
@pytest.mark.parametrize("sends", [True, False])
def test_both_ends_notice_that_the_network_between_them_is_cut(sends: bool) -> None:
    program = CUT.replace("{sends}", str(sends))
    argv = ["unshare", "--net", sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "is gone" in done.stdout


@pytest.mark.parametrize(
    ("num_bytes", "filled", "expected"),
    [
        (100 << 10, 0, 100 << 10),
        (3 << 20, 0, 1 << 20),
        (6 << 20, 0, 3 << 19),
        (38 << 20, 0, 2 << 20),
        (38 << 20, (38 << 20) - 5000, 5000),
    ],
)
def test_a_loader_is_woken_for_a_quarter_of_a_large_message(num_bytes: int, filled: int, expected: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            connection = sockets._Connection(accepted, "tcp://127.0.0.1:1", bytes(32))
            connection.whole, connection.filled = memoryview(bytearray(num_bytes)), filled
            connection.wait_for_more()
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == expected
            connection.whole = None
            connection.wait_for_more()
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
