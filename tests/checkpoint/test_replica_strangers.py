"""A crowd at a checkpoint writer's port for replicas: whoever has the key gets in all the same."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import StoreFiles, StoreIdentity
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.replica import wire
from hetstream.checkpoint.replica import wire as rendezvous
from hetstream.checkpoint.replica.service import _MAX_UNKNOWN, ReplicaService
from hetstream.checkpoint.replica.wire import Endpoint, ReplicaChannel, ReplicaReply, ReplicaRequest, order_of

TIMEOUT_S = 20.0
# Loopback addresses of the crowd; a peer comes from 127.0.0.1.
ELSEWHERE = "127.0.0.9"


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    """Where the checkpoint writer of rank 1 listens; its key is in the directory beside it."""
    directory = tmp_path / "ckpt"
    directory.mkdir()
    rendezvous.make_key(directory, 1)
    (tmp_path / "host-1").mkdir()
    with Store.open(StoreIdentity("77", 0, 1, directory), shared_memory=tmp_path / "host-1") as store:
        order = order_of(("127.0.0.1", "127.0.0.2"), 1, 1)
        service = ReplicaService(StoreFiles(store.path), directory, order, lambda *_: None)
        try:
            found = rendezvous.find(directory, 1, 1)
            assert found
            yield found
        finally:
            service.close()


def ask(endpoint: Endpoint, directory: Path) -> float:
    """Do what a peer does, and return how long it took."""
    began_s = time.monotonic()
    with ReplicaChannel.connect(endpoint, rendezvous.read_key(directory, 1)) as channel:
        channel.send_message(ReplicaRequest("give", 1, Generation(1, 1)))
        assert "no step 1" in channel.receive_message(ReplicaReply).error
    return time.monotonic() - began_s


@pytest.mark.parametrize("source", ["127.0.0.1", ELSEWHERE])
def test_silent_connections_keep_no_peer_out(endpoint: Endpoint, tmp_path: Path, source: str) -> None:
    address = (endpoint.address, endpoint.port)
    with contextlib.ExitStack() as held:
        for number in (12, 2 * _MAX_UNKNOWN):
            for _ in range(number):
                held.enter_context(socket.create_connection(address, TIMEOUT_S, (source, 0)))
            for _ in range(5):
                assert ask(endpoint, tmp_path / "ckpt") < wire._PROOF_TIMEOUT_S
        assert threading.active_count() < 2 * _MAX_UNKNOWN


def test_a_crowd_that_never_ends_keeps_no_peer_of_another_host_out(endpoint: Endpoint, tmp_path: Path) -> None:
    address = (endpoint.address, endpoint.port)
    over = threading.Event()
    counts = []

    def crowd() -> None:
        count = 0
        # Some say nothing, some begin well; all of them stay, and come again when they are sent away.
        with contextlib.ExitStack() as held:
            while not over.is_set() and count < 500:
                with contextlib.suppress(OSError):
                    one = held.enter_context(socket.create_connection(address, TIMEOUT_S, (ELSEWHERE, 0)))
                    one.sendall(b"HETREPL1"[: count % 9])
                    count += 1
        counts.append(count)

    threads = [threading.Thread(target=crowd) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            ask(endpoint, tmp_path / "ckpt")
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert sum(counts) > _MAX_UNKNOWN


def test_who_sends_byte_by_byte_is_gone_after_one_deadline(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_PROOF_TIMEOUT_S", 1.0)
    with socket.create_connection((endpoint.address, endpoint.port), TIMEOUT_S) as stranger:
        began_s = time.monotonic()
        stranger.sendall(b"HETREPL1" + bytes(31))
        stranger.settimeout(0.1)
        hello_is_whole = False
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < began_s + TIMEOUT_S:
                with contextlib.suppress(TimeoutError):
                    if not stranger.recv(64):
                        break
                # The last byte of the hello after half of the time: the proof gets what is left, and no more.
                if not hello_is_whole and time.monotonic() > began_s + 0.5:
                    stranger.sendall(b"\0")
                    hello_is_whole = True
        assert hello_is_whole
        assert time.monotonic() - began_s < 5.0
