"""Connections that are lost and made again, as the dispatcher sees them."""

from __future__ import annotations

import collections
import contextlib
import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import zmq

from hetstream.base.limits import take_all_descriptors
from hetstream.mpi_dataworkers.transports import zmq as zmq_module
from hetstream.mpi_dataworkers.transports.base import Disconnected, Received
from hetstream.mpi_dataworkers.transports.zmq import ZmqDispatcherEndpoint, new_keys
from hetstream.mpi_dataworkers.wire.codec import encode
from hetstream.mpi_dataworkers.wire.messages import WorkerHeartbeat

PEER, OTHER = "01" * 16, "02" * 16
SERVER_PUBLIC, SERVER_SECRET = new_keys()
CLIENT_PUBLIC, CLIENT_SECRET = new_keys()


@pytest.fixture
def endpoint() -> Iterator[ZmqDispatcherEndpoint]:
    endpoint = ZmqDispatcherEndpoint("tcp://127.0.0.1:0", SERVER_SECRET, SERVER_PUBLIC, CLIENT_PUBLIC)
    yield endpoint
    endpoint.close()


def peer_of(context: zmq.Context[zmq.Socket[bytes]], endpoint: ZmqDispatcherEndpoint, name: str) -> zmq.Socket[bytes]:
    """A connection of a peer that has sent a message and makes no other connection by itself."""
    peer = context.socket(zmq.DEALER)
    peer.identity = bytes.fromhex(name)
    peer.curve_serverkey, peer.curve_publickey = SERVER_PUBLIC.encode(), CLIENT_PUBLIC.encode()
    peer.curve_secretkey, peer.linger, peer.reconnect_ivl = CLIENT_SECRET.encode(), 0, -1
    peer.connect(endpoint.address)
    peer.send(encode(WorkerHeartbeat([])))
    receive_until(endpoint, Received(name, WorkerHeartbeat([])))
    return peer


def receive_until(endpoint: ZmqDispatcherEndpoint, last: Received) -> list[Received]:
    """What came before, and with, this."""
    received: list[Received] = []
    deadline = time.monotonic() + 10
    while last not in received:
        assert time.monotonic() < deadline, f"{last} did not come; {received} came"
        received += endpoint.poll(0.1)
    return received


def test_a_peer_that_came_back_is_not_gone_when_its_old_connection_or_a_strangers_closes(
    endpoint: ZmqDispatcherEndpoint,
) -> None:
    with zmq.Context() as context:
        old = peer_of(context, endpoint, PEER)
        new = peer_of(context, endpoint, PEER)  # as after a cut that only the peer has noticed
        old.close(0)
        received: list[Received] = []
        # Whatever connects now may get the descriptor of the old connection.
        port = int(endpoint.address.rpartition(":")[2])
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"this is no ZMTP" * 8)
                stranger.settimeout(10)
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(4096):
                        pass
            received += endpoint.poll(0)
        new.send(encode(WorkerHeartbeat([])))
        received += receive_until(endpoint, Received(PEER, WorkerHeartbeat([])))
        other = peer_of(context, endpoint, OTHER)
        other.close(0)
        received += receive_until(endpoint, Received(OTHER, Disconnected()))
        assert Received(PEER, Disconnected()) not in received
        new.close(0)
        receive_until(endpoint, Received(PEER, Disconnected()))


CROWD = """
import contextlib, resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
crowd = []
for _ in range(int(sys.argv[2])):
    with contextlib.suppress(OSError):
        crowd.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
print(len(crowd), flush=True)
sys.stdin.read()
"""


def test_a_crowd_of_strangers_takes_few_descriptors_and_keeps_no_peer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_module, "_MAX_UNPROVEN", 20)
    endpoint = ZmqDispatcherEndpoint("tcp://127.0.0.1:0", SERVER_SECRET, SERVER_PUBLIC, CLIENT_PUBLIC)
    port = endpoint.address.rpartition(":")[2]
    argv = [sys.executable, "-c", CROWD, port, "300"]
    with contextlib.closing(endpoint), zmq.Context() as context:
        peer = peer_of(context, endpoint, PEER)
        before = len(os.listdir("/proc/self/fd"))
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as crowd:
            assert crowd.stdout is not None
            received: list[Received] = []
            deadline = time.monotonic() + 10
            num_seen = len(endpoint._newcomers._held)
            while not select.select([crowd.stdout], [], [], 0)[0] or len(endpoint._newcomers._held) != 20:
                assert time.monotonic() < deadline, f"{len(endpoint._newcomers._held)} are held"
                received += endpoint.poll(0.02)
                num_seen = max(num_seen, len(endpoint._newcomers._held))
            assert crowd.stdout.readline() == b"300\n"
            assert num_seen == 20
            peer.send(encode(WorkerHeartbeat([])))
            received += receive_until(endpoint, Received(PEER, WorkerHeartbeat([])))
            newcomer = peer_of(context, endpoint, OTHER)
            assert Received(PEER, Disconnected()) not in received
            # A stranger's connection and ours to it; libzmq closes what was shut down a moment later.
            while len(os.listdir("/proc/self/fd")) > before + 2 * 20 + 10:
                assert time.monotonic() < deadline
                endpoint.poll(0.02)
            crowd.kill()
        newcomer.close(0)
        peer.close(0)


HERD = """
import resource, sys, time
import zmq
from hetstream.mpi_dataworkers.wire.codec import encode
from hetstream.mpi_dataworkers.wire.messages import WorkerHeartbeat
address, server_public, public, secret, num = sys.argv[1:]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
context = zmq.Context()
context.max_sockets = 4096
peers = [context.socket(zmq.DEALER) for _ in range(int(num))]
for number, peer in enumerate(peers):
    peer.identity = number.to_bytes(16, "big")
    peer.curve_serverkey, peer.curve_publickey = server_public.encode(), public.encode()
    peer.curve_secretkey, peer.linger = secret.encode(), 0
    peer.reconnect_ivl, peer.reconnect_ivl_max, peer.connect_timeout = 50, 200, 2000  # as data workers do
    peer.immediate = 1  # what is sent is sent by a connection that is there
print("ready", flush=True)
for peer in peers:
    peer.connect(address)
while True:
    for peer in peers:
        try:
            peer.send(encode(WorkerHeartbeat([])), zmq.NOBLOCK)
        except zmq.Again:
            pass
    time.sleep(0.3)
"""


@pytest.mark.slow
def test_a_thousand_data_workers_that_start_at_once_all_get_in(request: pytest.FixtureRequest) -> None:
    """From one host, as if strangers: nobody makes room for others without end."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 8192:
        pytest.skip("this process may not have 8,192 descriptors: ulimit -Hn")
    take_all_descriptors()  # as `hetstream internal dispatcher` does
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    endpoint = ZmqDispatcherEndpoint("tcp://127.0.0.1:0", SERVER_SECRET, SERVER_PUBLIC, CLIENT_PUBLIC)
    argv = [sys.executable, "-c", HERD, endpoint.address, SERVER_PUBLIC, CLIENT_PUBLIC, CLIENT_SECRET, "1000"]
    with contextlib.closing(endpoint), subprocess.Popen(argv, stdout=subprocess.PIPE) as herd:
        assert herd.stdout is not None
        assert herd.stdout.readline() == b"ready\n"
        began, there = time.monotonic(), set[str]()
        while len(there) < 1000:
            for one in endpoint.poll(0.1):
                (there.discard if isinstance(one.message, Disconnected) else there.add)(one.peer)
            assert time.monotonic() < began + 60, f"{len(there)} of 1000 are in"
        print(f"1,000 peers were let in within {time.monotonic() - began:.1f} s")
        herd.kill()


def test_libzmq_is_called_once_for_each_frame(endpoint: ZmqDispatcherEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls cost more than the decisions: how fast leases are granted hangs on their number."""
    calls: collections.Counter[str] = collections.Counter()

    def count(name: str) -> None:
        method = getattr(zmq.Socket, name)

        def call(*args: object, **options: object) -> object:
            calls[name] += 1
            return method(*args, **options)

        monkeypatch.setattr(zmq.Socket, name, call)

    with zmq.Context() as context:
        peer = peer_of(context, endpoint, PEER)
        endpoint.poll(0)  # what the monitor has to tell
        for number in range(50):
            peer.send(encode(WorkerHeartbeat([number])))
        for name in ("recv", "send", "poll", "getsockopt", "recv_multipart", "send_multipart"):
            count(name)
        received: list[Received] = []
        polls = 0
        while len(received) < 50:
            received += endpoint.poll(10)
            polls += 1
        assert [one.message for one in received] == [WorkerHeartbeat([number]) for number in range(50)]
        # A frame says who sends it and one says what; the last call of each burst finds nothing.
        assert calls == {"recv": 2 * 50 + polls}
        calls.clear()
        endpoint.send(PEER, WorkerHeartbeat([]))
        assert calls == {"send": 2}
        monkeypatch.undo()
        peer.close(0)
