"""Another process takes the dispatcher's port while it is away: it comes back at another one, and its peers find it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets

from hetstream import DataLoader
from hetstream.mpi_dataworkers.errors import AddressInUse
from hetstream.mpi_dataworkers.transports.base import Reconnected
from hetstream.mpi_dataworkers.transports.zmq import ZmqDispatcherEndpoint, ZmqWorkerEndpoint, new_keys
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, read_address_file, write_address_file
from hetstream.mpi_dataworkers.wire.messages import WorkerHeartbeat

PEER = "01" * 16
(SERVER_PUBLIC, SERVER_SECRET), (CLIENT_PUBLIC, CLIENT_SECRET) = new_keys(), new_keys()
# ZMTP 3.0 with the mechanism CURVE, and then, in place of what only the key can say, that the key is refused.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
REFUSAL = GREETING + b"\x04\x0a\x05ERROR\x03400"


class Stranger:
    """Listens at a port and says the same to all who connect; it keeps what they say."""

    def __init__(self, port: int, answer: bytes) -> None:
        self._answer = answer
        self._held: list[socket.socket] = []
        self.met = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the listener is shut down
            while True:
                connection, _ = self._listener.accept()
                self._held.append(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(self._answer)
                self.met.set()

    def leave(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for one in self._held:
            one.close()


@contextlib.contextmanager
def stranger_at(address: str, answer: bytes) -> Iterator[Stranger]:
    stranger = Stranger(int(address.rpartition(":")[2]), answer)
    try:
        yield stranger
    finally:
        stranger.leave()


def dispatcher_at(bind: str) -> ZmqDispatcherEndpoint:
    return ZmqDispatcherEndpoint(bind, SERVER_SECRET, SERVER_PUBLIC, CLIENT_PUBLIC)


def service_of(dispatcher: ZmqDispatcherEndpoint, path: Path) -> ServiceAddress:
    service = ServiceAddress(dispatcher.address, SERVER_PUBLIC, CLIENT_PUBLIC, CLIENT_SECRET, "00" * 32, path)
    write_address_file(path, service)
    return service


def meet(worker: ZmqWorkerEndpoint, dispatcher: ZmqDispatcherEndpoint) -> None:
    """Wait until the worker has found the dispatcher again, and is heard there."""
    deadline = time.monotonic() + 15
    messages: list[Any] = []
    while Reconnected() not in messages:
        assert time.monotonic() < deadline, "the dispatcher was not found"
        dispatcher.poll(0.02)
        messages += worker.poll(0.02)
        worker.send(WorkerHeartbeat([1]))
    worker.send(WorkerHeartbeat([2]))
    while not any(one.message == WorkerHeartbeat([2]) for one in dispatcher.poll(0.1)):
        assert time.monotonic() < deadline, "the peer is not heard"


def start_worker(service: ServiceAddress, dispatcher: ZmqDispatcherEndpoint) -> ZmqWorkerEndpoint:
    """A peer that is connected; somebody has to answer for the dispatcher meanwhile."""
    done = threading.Event()

    def answer() -> None:
        while not done.is_set():
            dispatcher.poll(0.02)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        return ZmqWorkerEndpoint(service, PEER, 15)
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, REFUSAL], ids=["", "http", "refusal"])
def test_a_peer_finds_the_dispatcher_at_its_new_port(tmp_path: Path, answer: bytes) -> None:
    first = dispatcher_at("tcp://127.0.0.1:0")
    old = service_of(first, tmp_path / "address")
    worker = start_worker(old, first)
    with contextlib.closing(worker):
        first.close()
        with stranger_at(old.address, answer) as stranger:
            deadline = time.monotonic() + 10
            while not stranger.met.is_set():
                assert time.monotonic() < deadline
                worker.poll(0.02)
                worker.send(WorkerHeartbeat([]))  # it must not wait, whatever the stranger has said
            with pytest.raises(AddressInUse, match="Who holds the port"):
                dispatcher_at(old.address)
            with contextlib.closing(dispatcher_at("tcp://127.0.0.1:0")) as second:
                service_of(second, tmp_path / "address")
                meet(worker, second)


def test_a_peer_that_a_stranger_has_turned_away_comes_back_to_the_same_port(tmp_path: Path) -> None:
    first = dispatcher_at("tcp://127.0.0.1:0")
    service = service_of(first, tmp_path / "address")
    worker = start_worker(service, first)
    with contextlib.closing(worker):
        first.close()
        with stranger_at(service.address, REFUSAL) as stranger:
            deadline = time.monotonic() + 10
            while not stranger.met.is_set():
                assert time.monotonic() < deadline
                worker.poll(0.02)
        with contextlib.closing(dispatcher_at(service.address)) as second:
            meet(worker, second)


def test_who_connects_first_is_not_turned_away_by_a_stranger_either(tmp_path: Path) -> None:
    with contextlib.closing(dispatcher_at("tcp://127.0.0.1:0")) as dispatcher:
        now = service_of(dispatcher, tmp_path / "address")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        before = replace(now, address=f"tcp://127.0.0.1:{port}")
        with stranger_at(before.address, REFUSAL), contextlib.closing(start_worker(before, dispatcher)) as worker:
            worker.send(WorkerHeartbeat([2]))
            deadline = time.monotonic() + 10
            while not any(one.message == WorkerHeartbeat([2]) for one in dispatcher.poll(0.1)):
                assert time.monotonic() < deadline


def test_only_the_address_of_a_service_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "address"
    service = ServiceAddress("tcp://h:1", "a", "b", "c", "00" * 32, path)
    assert service.as_in_file() == service, "there is no file"
    write_address_file(path, replace(service, address="tcp://h:2"))
    assert service.as_in_file() == replace(service, address="tcp://h:2")
    for name in ("server_public_key", "client_public_key", "client_secret_key", "batch_key"):
        write_address_file(path, replace(service, address="tcp://h:3", **{name: "other"}))
        assert service.as_in_file() == service
    path.chmod(0o644)
    assert service.as_in_file() == service


def test_a_job_goes_on_when_somebody_has_taken_the_port(service: Any, wait_until: Any) -> None:
    service.start_workers(2)
    with (
        DataLoader(datasets.Augmented(400), batch_size=8, service=service.name) as loader,
        contextlib.ExitStack() as undo,
    ):
        ids = []
        for _, batch in loader:
            ids += batch.tolist()
            if len(ids) == 80:
                old = read_address_file(service.address_file)
                service.kill_dispatcher()
                undo.enter_context(stranger_at(old.address, b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9))
                service.start_dispatcher()
        assert ids == list(range(400))
        wait_until(lambda: read_address_file(service.address_file) != old, timeout_s=20, what="another address")
        wait_until(
            lambda: service.log("dispatcher").partition("incarnation=2")[2].count("registered") >= 2,
            timeout_s=30,
            what="the data workers at the new port",
        )
        before = loader.stats()["local_steps"]
        assert [i for _, batch in loader for i in batch.tolist()] == list(range(400))
        assert loader.stats()["local_steps"] == before
        assert "the dispatcher takes another port" in service.log("dispatcher")
