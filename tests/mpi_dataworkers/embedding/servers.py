"""Real embedding servers for tests, and a small client of its own that knows nothing of the trainer's."""

from __future__ import annotations

import contextlib
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hetstream.mpi_dataworkers.transports.base import PeerUnreachable, ReceivedBatch
from hetstream.mpi_dataworkers.transports.choice import TransportSender
from hetstream.mpi_dataworkers.transports.sockets import SocketReceiver
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, write_address_file
from hetstream.mpi_dataworkers.wire.messages import (
    EMBEDDING_PARTS,
    AdoptParts,
    DropParts,
    EmbeddingRefused,
    EmbeddingTable,
    ExpectParts,
    GenerationMarked,
    MarkGeneration,
    OpenTables,
    PartsHeld,
    ReadRows,
    RestoreGeneration,
    RowsRead,
    SendParts,
    WriteRows,
    WritesKept,
)
from tests.mpi_dataworkers.conftest import Forked, Zygote

HETSTREAM = str(Path(sys.executable).with_name("hetstream"))
DEADLINE_S = 30.0
KEY = "5a" * 32


def new_service(folder: Path) -> ServiceAddress:
    """An address file as a dispatcher writes it; nobody listens there."""
    service = ServiceAddress("tcp://127.0.0.1:9", "s" * 40, "c" * 40, "k" * 40, KEY, folder / "address")
    write_address_file(service.file, service)
    return service


class Server:
    """One process, and its next ones of the same name.

    Attributes:
        zygote: forks its processes; None: they are commands as a user starts them.
    """

    zygote: Zygote | None = None

    def __init__(self, service: ServiceAddress, name: str, directory: Path) -> None:
        self.service, self.name, self.directory = service, name, directory
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self.says = service.file.parent / f"server-{name}.out"

    @property
    def log(self) -> Path:
        return self.directory / f"server-{self.name}"

    @property
    def registration(self) -> dict[str, Any]:
        path = self.service.file.parent / "embedding-servers" / f"{self.name}.json"
        with contextlib.suppress(FileNotFoundError):
            return dict(msgspec.json.decode(path.read_bytes()))
        return {}

    def begin(self, *options: str, fault: str = "") -> None:
        """Start it, and do not wait until it serves."""
        words = ["internal", "embedding-server", "--service", f"file:{self.service.file}", "--name", self.name]
        words += ["--directory", str(self.directory), "--memory", "1G", *options]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HETSTREAM_FAULT", fault)
            if self.zygote is not None:
                self.process = Forked(self.zygote, tuple(words), self.says)
                return
            with self.says.open("ab") as output:
                self.process = subprocess.Popen([HETSTREAM, *words], stdout=output, stderr=output)

    def start(self, *options: str, fault: str = "") -> Server:
        known = self.registration.get("start")
        self.begin(*options, fault=fault)
        until(lambda: self.registration.get("start", known) != known, f"{self.name} registers", self)
        return self

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self.registration["addresses"])

    def end(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        assert self.process is not None
        code = self.process.wait(DEADLINE_S)
        self.process = None
        return code

    @property
    def output(self) -> str:
        return self.says.read_text() if self.says.exists() else ""


def until(condition: Callable[[], object], what: str, server: Server | None = None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        ended = server is not None and server.process is not None and server.process.poll() is not None
        said = f"\n{server.output}" if server is not None else ""
        assert not ended, f"{what}: ended{said}"
        assert time.monotonic() < deadline, f"{what}: too late{said}"
        time.sleep(0.01)


class Client:
    """One trainer. What it changes it keeps until it is on a disk, and repeats it when it opens a server anew."""

    def __init__(self, service: ServiceAddress, rank: int, tables: Sequence[EmbeddingTable]) -> None:
        self.name = secrets.token_hex(16)
        self.rank, self.tables = rank, {table.name: table for table in tables}
        self.receiver = SocketReceiver(service.batch_key, [f"ipc://@hetstream-test-{secrets.token_hex(8)}"])
        self.sender = TransportSender(service.batch_key, self.name)
        self.number = 0
        self.parts: dict[str, list[int]] = {}
        self.unkept: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {}
        self.got: list[tuple[Any, list[memoryview]]] = []

    def close(self) -> None:
        self.sender.close(time.monotonic() + 1.0)
        self.receiver.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self) -> int:
        self.number += 1
        return self.number

    def send(self, server: Server, message: Any, *frames: Any) -> None:
        with contextlib.suppress(PeerUnreachable):  # it is told again when it is opened anew
            addresses = tuple(server.registration.get("addresses", ()))
            self.sender.send(addresses, message, [np.ascontiguousarray(frame).data for frame in frames])

    def change(self, server: Server, message: Any, *frames: Any) -> int:
        self.unkept.setdefault(server.name, []).append((message, frames))
        self.send(server, message, *frames)
        return int(message.number)

    def take(self, timeout_s: float = 0.0) -> None:
        """Take in what has come."""
        select.select(self.receiver.sources, [], [], timeout_s)
        for received in self.receiver.receive():
            assert isinstance(received, ReceivedBatch), received
            said: Any = received.header
            kept = self.unkept.get(said.server, [])
            if isinstance(said, WritesKept):
                kept[:] = [
                    one for one in kept if one[0].number > said.number or not isinstance(one[0], WriteRows | DropParts)
                ]
            elif isinstance(said, PartsHeld | GenerationMarked | EmbeddingRefused):
                kept[:] = [one for one in kept if one[0].number != said.number]
            self.got.append((said, list(received.frames)))

    def answer(self, kind: type, number: int, timeout_s: float = DEADLINE_S) -> tuple[Any, Any]:
        """The next answer of this kind and number; one that refuses it is raised."""
        deadline = time.monotonic() + timeout_s
        while True:
            for index, (said, frames) in enumerate(self.got):
                is_for = said.number >= number if isinstance(said, WritesKept) else said.number == number
                if isinstance(said, EmbeddingRefused) and is_for and kind is not EmbeddingRefused:
                    del self.got[index]
                    raise RefusedError(said.text)
                if isinstance(said, kind) and is_for:
                    del self.got[index]
                    return said, frames
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {kind.__name__} {number}")
            self.take(0.2)

    def open(self, server: Server, parts: Sequence[int] | None = None) -> None:
        """Open the tables, at first with these parts; anew: repeat what is not kept."""
        mine = self.parts.setdefault(server.name, list(range(EMBEDDING_PARTS) if parts is None else parts))
        self.send(
            server, OpenTables(self.name, self.rank, tuple(self.receiver.addresses), [*self.tables.values()], mine)
        )
        for message, frames in self.unkept.get(server.name, []):
            self.send(server, message, *frames)

    def read(self, server: Server, table: str, ids: Sequence[int]) -> dict[int, bytes]:
        number = self.next()
        self.send(server, ReadRows(self.name, number, table), np.asarray(ids, np.int64))
        return self.rows_read(number, table, ids)

    def rows_read(self, number: int, table: str, ids: Sequence[int]) -> dict[int, bytes]:
        _, (rows, is_there) = self.answer(RowsRead, number)
        size = self.tables[table].row_bytes
        assert len(rows) == len(ids) * size
        assert len(is_there) == len(ids)
        return {row_id: bytes(rows[at * size : (at + 1) * size]) for at, row_id in enumerate(ids) if is_there[at]}

    def write(self, server: Server, table: str, rows: dict[int, bytes], wait: bool = True) -> int:
        message = WriteRows(self.name, self.next(), table)
        data = np.frombuffer(b"".join(rows.values()), np.uint8)
        number = self.change(server, message, np.array(list(rows), np.int64), data)
        if wait:
            self.answer(WritesKept, number)
        return number

    def mark(self, name: str, world_size: int, servers: Sequence[Server]) -> None:
        logs = [str(server.log) for server in servers]
        for server in servers:
            number = self.change(server, MarkGeneration(self.name, self.next(), name, world_size, logs))
            self.answer(GenerationMarked, number)

    def restore(self, server: Server, name: str, parts: Sequence[int], log: Path) -> None:
        message = RestoreGeneration(self.name, self.next(), name, list(parts), str(log))
        self.answer(PartsHeld, self.change(server, message))

    def adopt(self, server: Server, parts: Sequence[int], log: Path) -> None:
        self.answer(PartsHeld, self.change(server, AdoptParts(self.name, self.next(), list(parts), str(log))))

    def begin_move(self, source: Server, target: Server, parts: Sequence[int]) -> tuple[int, int]:
        expect = self.change(target, ExpectParts(self.name, self.next(), list(parts)))
        return expect, self.change(source, SendParts(self.name, self.next(), list(parts), target.addresses))

    def move(self, source: Server, target: Server, parts: Sequence[int]) -> None:
        expect, send = self.begin_move(source, target, parts)
        self.answer(PartsHeld, expect)
        self.end_move(source, send, parts)

    def end_move(self, source: Server, send: int, parts: Sequence[int]) -> None:
        self.unkept[source.name] = [one for one in self.unkept[source.name] if one[0].number != send]
        self.drop(source, parts)

    def drop(self, server: Server, parts: Sequence[int]) -> None:
        self.answer(WritesKept, self.change(server, DropParts(self.name, self.next(), list(parts))))


class RefusedError(Exception):
    """What an `EmbeddingRefused` says."""


@contextlib.contextmanager
def ended(*servers: Server) -> Iterator[None]:
    """End what is still running."""
    try:
        yield
    finally:
        for server in servers:
            if server.process is not None:
                server.end()
