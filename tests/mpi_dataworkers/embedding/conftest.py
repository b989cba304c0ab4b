"""Embedding servers for tests, forked from a process that has loaded what they import."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hetstream.mpi_dataworkers.embedding import connection
from hetstream.mpi_dataworkers.wire.address import ServiceAddress
from tests.mpi_dataworkers.conftest import Zygote
from tests.mpi_dataworkers.embedding.servers import Client, Server, new_service

MakeServer = Callable[[str], Server]
MakeClient = Callable[..., Client]
Servers = Callable[..., list[Server]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory in memory: each server syncs at each change, and the disk is everybody's."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hetstream-test-") as name:
        yield Path(name)


@pytest.fixture
def address(folder: Path) -> ServiceAddress:
    """A service."""
    return new_service(folder)


@pytest.fixture
def server_of(address: ServiceAddress, zygote: Zygote, folder: Path) -> Iterator[MakeServer]:
    """A function from a name to a server of the service, which is not started; killed after the test."""
    made: list[Server] = []

    def make(name: str) -> Server:
        server = Server(address, name, folder / "logs")
        server.zygote = zygote
        made.append(server)
        return server

    before = zygote.children()
    yield make
    for server in made:
        if server.process is not None:
            server.end()
    assert zygote.children() - before == set()


@pytest.fixture
def client_of(address: ServiceAddress) -> Iterator[MakeClient]:
    """A function that makes a client of a rank with tables; closed after the test."""
    with ExitStack() as made:
        yield lambda rank, *tables: made.enter_context(Client(address, rank, tables))


@pytest.fixture
def servers(address: ServiceAddress, server_of: MakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """A function that starts so many servers, which this process then uses; each call is another run of a program."""

    def start(count: int, first: int = 0) -> list[Server]:
        end_connection()
        made = [server_of(f"s{number}").start() for number in range(first, first + count)]
        monkeypatch.setenv("HETSTREAM_SERVICE", f"file:{address.file}")
        monkeypatch.setenv("HETSTREAM_EMBEDDING_SERVERS", str(count))
        return made

    yield start
    end_connection()


def end_connection() -> None:
    """Let the next table connect anew."""
    if connection._client is not None:
        connection._client.close()
    connection._client = connection._marked = None
    connection._wanted.clear()
