"""Pickled pipelines on the wire: each is sent when it is needed, once, and none is lost for good."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample_datasets as datasets

from hetstream import DataLoader
from hetstream.mpi_dataworkers.loader import process_connection
from hetstream.mpi_dataworkers.loader.batches import TorchBatches
from hetstream.mpi_dataworkers.loader.client import ClientOptions, LoaderName, ServiceClient
from hetstream.mpi_dataworkers.loader.session import SessionRequest
from hetstream.mpi_dataworkers.loader.statistics import LoaderStatistics
from hetstream.mpi_dataworkers.ops.origins import PassSeeds
from hetstream.mpi_dataworkers.process.config import TrainerIdentity
from hetstream.mpi_dataworkers.transports.base import ToLoader
from hetstream.mpi_dataworkers.wire.address import ServiceAddress
from hetstream.mpi_dataworkers.wire.messages import (
    ErrorPolicy,
    LoaderRegistered,
    Message,
    NeedPipeline,
    OpenSession,
    PlannedOrder,
    Program,
    ProvidePipeline,
    RegisterLoader,
    UnknownPeer,
)

ORDER = PlannedOrder(10, 1, 1, 0, False, False, 0)


class Scripted:
    """A loader's endpoint whose dispatcher is the test."""

    def __init__(self) -> None:
        self.receivers = ["tcp://127.0.0.1:1"]
        self.sent: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def answer(self, message: Message) -> None:
        self._answers.put(message)

    def next_of(self, *kinds: type[Message]) -> Any:
        """The next message of these kinds that the loader sends."""
        while not isinstance(message := self.sent.get(timeout=10), kinds):
            pass
        return message

    def send(self, _: int, message: Message) -> None:
        self.sent.put(message)

    def poll(self, timeout_s: float) -> tuple[list[ToLoader], list[Any]]:
        try:
            message = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return [], []
        return [ToLoader(1, message)] if message is not None else [], []

    def wake(self) -> None:
        self._answers.put(None)

    def close(self) -> None:
        pass


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Scripted, ServiceClient]]:
    """A loader that is registered with pipeline `old`, and its dispatcher."""
    endpoint = Scripted()
    monkeypatch.setattr(
        process_connection, "wait_for_address_file", lambda *_: ServiceAddress("tcp://127.0.0.1:1", *"abcd")
    )
    monkeypatch.setattr(process_connection, "open_loader_endpoint", lambda *_: endpoint)
    endpoint.answer(LoaderRegistered(False, 1, "old"))
    options = ClientOptions(
        Path("/nowhere"),
        TrainerIdentity(0, 1, "job"),
        LoaderName(0, 0, "", "", False),
        {},
        TorchBatches(pin=False),
        LoaderStatistics(),
        1 << 20,
        frozenset(),
    )
    loader = ServiceClient(options, pipeline("old"))
    endpoint.next_of(RegisterLoader)
    yield endpoint, loader
    loader.close()


def pipeline(name: str) -> ProvidePipeline:
    return ProvidePipeline(name, Program("/", []), b"", name.encode())


def request(name: str) -> SessionRequest:
    return SessionRequest(
        pipeline=pipeline(name),
        seeds=PassSeeds(0, 1),
        order=ORDER,
        first_step=0,
        num_steps=10,
        min_window=2,
        errors=ErrorPolicy(),
    )


def test_a_dataset_that_changes_while_the_loader_registers_again_is_sent(
    scripted: tuple[Scripted, ServiceClient],
) -> None:
    endpoint, loader = scripted
    endpoint.answer(UnknownPeer())  # the dispatcher was started again
    assert endpoint.next_of(RegisterLoader).pipeline_id == "old"
    loader.open_session(request("new"))
    endpoint.answer(LoaderRegistered(False, 1, "old"))
    sent = [endpoint.next_of(ProvidePipeline, OpenSession) for _ in range(2)]
    assert isinstance(sent[0], ProvidePipeline)
    assert sent[0].pipeline_id == sent[1].session.pipeline_id == "new"


def test_sessions_of_several_pickled_pipelines_are_opened_again_and_none_is_forgotten_between(
    scripted: tuple[Scripted, ServiceClient],
) -> None:
    endpoint, loader = scripted
    for name in ("new", "old", "newest", "new"):
        loader.open_session(request(name))
    for _ in range(4):
        endpoint.next_of(OpenSession)
    endpoint.answer(UnknownPeer())
    asked = endpoint.next_of(RegisterLoader).pipeline_id
    endpoint.answer(LoaderRegistered(False, 1, "old"))
    said = []
    while [kind for kind, _ in said].count("session") < 4:
        message = endpoint.next_of(ProvidePipeline, OpenSession)
        is_session = isinstance(message, OpenSession)
        said.append(
            (
                "session" if is_session else "pipeline",
                message.session.pipeline_id if is_session else message.pipeline_id,
            )
        )
    assert asked == "new"
    newest = [("pipeline", "newest"), ("session", "newest")]
    assert said == [("session", "old"), *newest, ("pipeline", "new"), ("session", "new"), ("session", "new")]


def test_what_the_dispatcher_lacks_is_said_again(scripted: tuple[Scripted, ServiceClient]) -> None:
    endpoint, loader = scripted
    loader.open_session(request("new"))
    assert endpoint.next_of(ProvidePipeline).pipeline_id == "new"
    endpoint.answer(NeedPipeline("unknown"))
    endpoint.answer(NeedPipeline("new"))
    assert endpoint.next_of(ProvidePipeline).pipeline_id == "new"


class SlowLink:
    """Relays connections to a port, so many bytes a second on the way back, and counts them."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self.num_bytes = 0
        self._port, self._bytes_per_s = port, bytes_per_s
        self._stop = threading.Event()
        self._sockets = ExitStack()
        self._threads: list[threading.Thread] = []
        self._listener = self._sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = self._listener.getsockname()[1]
        self._begin(self._accept)

    def _begin(self, target: Any, *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                near.close()
                continue
            for one in (near, far):
                self._sockets.callback(one.close)
            self._begin(self._relay, near, far, False)
            self._begin(self._relay, far, near, True)

    def _relay(self, source: socket.socket, target: socket.socket, is_slow: bool) -> None:
        while not self._stop.is_set():
            try:
                data = source.recv(1 << 16)
                if not data:
                    break
                if is_slow:
                    self.num_bytes += len(data)
                    self._stop.wait(len(data) / self._bytes_per_s)
                target.sendall(data)
            except OSError:
                return
        for one in (source, target):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    def close(self) -> None:
        self._stop.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for one in self._threads[1:]:
            one.join(5)
        self._sockets.close()


def test_a_pipeline_crosses_a_slow_link_once_for_all_processes(service: Any, tmp_path: Path, wait_until: Any) -> None:
    wait_until(service.address_file.exists, 30, "the dispatcher")
    fields = json.loads(service.address_file.read_text())
    host, _, port = fields["address"].rpartition(":")
    table = np.frombuffer(os.urandom(4 << 20), dtype=np.int64)
    link = SlowLink(int(port), 2e6)
    far = service.address_file.with_name("far")
    with open(os.open(far, os.O_CREAT | os.O_WRONLY, 0o600), "w") as stream:
        json.dump(fields | {"address": f"{host}:{link.port}"}, stream)
    worker = service._begin("worker.log", "internal", "worker", "--service", f"file:{far}", "--processes", "3")
    service.workers.append(worker)
    try:
        wait_until(lambda: service.log("dispatcher").count("registered") == 3, 30, "three data workers")
        with DataLoader(datasets.InMemory(table), batch_size=1, service=service.name) as loader:
            wait_until(
                lambda: service.log("worker").count("fetched for this host") or not list(loader), 60, "the dataset"
            )
            before = loader.stats()["local_steps"]
            assert len(list(loader)) == 400
            assert loader.stats()["local_steps"] == before
            assert link.num_bytes < 1.3 * table.nbytes
        service.stop()
    finally:
        link.close()
