"""An embedding server: keeps rows of tables for trainers, which compute with them and write them back.

Called by `hetstream internal embedding-server`. It stores bytes and says what it has; trainers decide everything else.
`parts.py` decides what becomes of a request, `log.py` brings each change to the disk, `rows.py` has the rows. Here is
who waits for whom.

One thread does all that is asked. Others send answers, so that a slow trainer holds up nobody else; sync the log; read
the logs of other servers; and write the file by which trainers find this one.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import re
import secrets
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hetstream.base.errors import UsageError
from hetstream.mpi_dataworkers.embedding.background import LINGER_S, Frames, Loader, Outbox, Piece, RegistrationFile
from hetstream.mpi_dataworkers.embedding.log import KEPT_GENERATIONS, LEAST_LOG_BYTES, Log
from hetstream.mpi_dataworkers.embedding.parts import Applied, Expectation, Parts, Request
from hetstream.mpi_dataworkers.embedding.rows import (
    Ids,
    Rows,
    Tables,
    ids_of,
    parts_of,
    rows_of_frame,
    rows_of_record,
)
from hetstream.mpi_dataworkers.errors import EmbeddingError, ProtocolError, ServiceError
from hetstream.mpi_dataworkers.process.faults import reach
from hetstream.mpi_dataworkers.transports.base import ReceivedBatch
from hetstream.mpi_dataworkers.transports.sockets import SocketReceiver, local_address_towards
from hetstream.mpi_dataworkers.wire.address import ServiceAddress
from hetstream.mpi_dataworkers.wire.messages import (
    EMBEDDING_PARTS,
    AdoptParts,
    DropParts,
    EmbeddingMessage,
    EmbeddingRefused,
    GenerationMarked,
    MarkGeneration,
    OpenTables,
    PartRows,
    PartsHeld,
    PartsSent,
    ReadRows,
    RestoreGeneration,
    RowsRead,
    SendParts,
    WriteRows,
    WritesKept,
)

_log = logging.getLogger(__name__)

_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Rows of a part go in pieces of this size, with other requests between them.
_CHUNK_BYTES = 1 << 20
# Clients that were replaced last are told so when they ask; they, and those before, may be gone.
_TOLD_REPLACED = 4
# How soon the end of the service or a signal is noticed.
_LOOK_S = 0.25


@dataclass(frozen=True)
class ServerOptions:
    """How a server is started.

    Attributes:
        name: its own, among those of the service.
        directory: its log is the directory `server-NAME` in there.
        memory_bytes: that the rows may take.
        drain_s: how long it goes on serving once it was told to end, while parts lie here.
        kept_generations: that can be restored from its log.
        least_log_bytes: size of a segment's log from which on it may be followed by the next one.
    """

    name: str
    directory: Path
    memory_bytes: int
    drain_s: float = 30.0
    kept_generations: int = KEPT_GENERATIONS
    least_log_bytes: int = LEAST_LOG_BYTES

    def __post_init__(self) -> None:
        problems = []
        if not _NAME.fullmatch(self.name):
            problems.append(
                f"name {self.name!r}: 1 to 64 letters, digits, `.`, `_` and `-`, beginning with none of these"
            )
        if self.memory_bytes < 1:
            problems.append(f"memory {self.memory_bytes}: at least 1 byte")
        if not 0 <= self.drain_s < float("inf"):
            problems.append(f"drain {self.drain_s}: seconds, at least 0")
        if self.kept_generations < 1:
            problems.append(f"kept generations {self.kept_generations}: at least 1")
        if problems:
            raise UsageError("; ".join(problems))

    @property
    def log_folder(self) -> Path:
        """Where its log is."""
        return self.directory.absolute() / f"server-{self.name}"


@dataclass
class _Peer:
    """A trainer that has opened tables, and what it asks, in order: the first of it waits for parts."""

    outbox: Outbox
    requests: collections.deque[tuple[Request, Frames]] = field(default_factory=collections.deque)


class EmbeddingServer:
    """See the module.

    Args:
        service: address and keys of the service.
        options: how it is started.

    Raises:
        EmbeddingError, ServiceError: it cannot be.
    """

    def __init__(self, service: ServiceAddress, options: ServerOptions) -> None:
        self._service, self._options = service, options
        self._start = secrets.token_hex(16)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._num_read = 0
        self._is_draining = False
        self._parts = Parts()
        self._tables = Tables(options.memory_bytes)
        self._peers: dict[str, _Peer] = {}
        # Why clients have failed. One that was refused something ends, so all else that concerns it is refused.
        self._refusals: dict[str, str] = {}
        self._moves: dict[tuple[str, int], Outbox] = {}
        self._loader = Loader(self._wake)
        self._loading: set[tuple[str, int]] = set()
        # Answers that wait until so many records are on the disk.
        self._due: collections.deque[tuple[int, str, EmbeddingMessage]] = collections.deque()
        self._log = Log(options.log_folder, self._wake, options.kept_generations, options.least_log_bytes)
        try:
            self._recover()
            binds = [f"ipc://@hetstream-{secrets.token_hex(16)}", f"tcp://{local_address_towards(service.address)}:*"]
            self._receiver = SocketReceiver(service.batch_key, binds)
        except OSError as error:
            self._log.close()
            raise ServiceError(f"embedding server {options.name} cannot start: {error}") from error
        except BaseException:
            self._log.close()
            raise

    def _recover(self) -> None:
        begun = time.monotonic()
        for said, data in self._log.recover():
            if isinstance(said, Parts):
                self._parts = said
                self._tables.add(said.tables())
            elif isinstance(said, WriteRows | PartRows):
                self._apply(said, *rows_of_record(data, self._parts.clients[said.client].tables[said.table]))
            else:
                self._apply(said)
        _log.info(
            "embedding server %s has %d rows of its log, after %.1f s",
            self._options.name,
            self._tables.num_rows,
            time.monotonic() - begun,
        )

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Serve until the service ends, or until it was told to end and no part lies here.

        Args:
            should_stop: asked several times a second.

        Raises:
            OSError: the log is of no use any more; what was told to be on the disk is.
        """
        registration = None
        try:
            registration = RegistrationFile(self._service.file, self._options.name, self._facts)
            self._serve(should_stop, registration)
        finally:
            if registration is not None:
                registration.remove()
            self._close()

    def _serve(self, should_stop: Callable[[], bool], registration: RegistrationFile) -> None:
        poller = select.poll()
        for source in (*self._receiver.sources, self._wakeup):
            poller.register(source, select.POLLIN)
        give_up_at = float("inf")
        is_busy = False
        while not registration.service_has_ended:
            now = time.monotonic()
            if not self._is_draining and should_stop():
                self._is_draining = True
                give_up_at = now + self._options.drain_s
                _log.info("embedding server %s drains: it ends when no part lies here", self._options.name)
            if self._is_draining and (now >= give_up_at or (self._parts.is_empty and not self._moves)):
                return
            poller.poll(0 if is_busy else 1000 * min(_LOOK_S, self._receiver.look_again_s))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)
            for received in self._receiver.receive():
                self._take(received)
            is_busy = self._take_loaded()
            self._moves = {key: move for key, move in self._moves.items() if not move.is_over}
            self._tell_kept()
            self._log.look_after(self._parts, lambda: self._rows_of(range(EMBEDDING_PARTS), 0))

    def _close(self) -> None:
        self._log.close()
        self._tell_kept()
        until = time.monotonic() + LINGER_S
        outboxes = [*(peer.outbox for peer in self._peers.values()), *self._moves.values()]
        for outbox in outboxes:
            outbox.finish()
        for outbox in outboxes:
            outbox.join(until)
        self._receiver.close()
        # The event stays open: a thread that has not ended may write to it.

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    def _facts(self) -> dict[str, object]:
        return {
            "format": _FORMAT,
            "name": self._options.name,
            "start": self._start,
            "addresses": self._receiver.addresses,
            "log": str(self._options.log_folder),
            "rows": self._tables.num_rows,
            "bytes": self._tables.num_bytes,
            "limit_bytes": self._tables.limit_bytes,
            "draining": self._is_draining,
            "reads": self._num_read,
        }

    # What comes

    def _take(self, received: ReceivedBatch | ProtocolError) -> None:
        if isinstance(received, ProtocolError):
            _log.warning("refused a message: %s", received)
            return
        said, frames = received.header, received.frames
        if isinstance(said, OpenTables):
            self._open(said)
        elif isinstance(said, PartRows):
            self._part_rows_came(said, frames)
        elif isinstance(said, PartsSent):
            self._parts_came(said)
        elif isinstance(said, Request):
            self._ask(said, frames)
        else:
            _log.warning("refused a message: %s is none for an embedding server", type(said).__name__)

    def _open(self, said: OpenTables) -> None:
        self._peers = {name: peer for name, peer in self._peers.items() if not peer.outbox.is_over}
        peer = self._peers.get(said.client)
        if peer is None or peer.outbox.receivers != said.reply_to:
            if peer is not None:
                peer.outbox.abandon()
            outbox = Outbox(self._service.batch_key, self._options.name, said.reply_to)
            peer = self._peers[said.client] = _Peer(outbox)
        peer.requests.clear()  # the client repeats what it has no answer to
        try:
            if said.client in self._refusals:
                self._fail(said.client, 0, self._refusals[said.client])
            elif not self._parts.has_opened(said):
                self._tables.add(said.tables)
                self._append_and_apply(said)
                _log.info("rank %d has opened %d tables as client %s", said.rank, len(said.tables), said.client)
        except EmbeddingError as error:
            self._fail(said.client, 0, str(error))
        self._fail_replaced()

    def _ask(self, said: Request, frames: Frames) -> None:
        peer = self._peers.get(said.client)
        if peer is None:
            return  # a stranger: one knows no address
        if said.client in self._refusals:
            self._fail(said.client, said.number, self._refusals[said.client])
        elif self._parts.overtakes(said):
            peer.requests.appendleft((said, frames))
        else:
            peer.requests.append((said, frames))
        self._go_on_with(said.client)

    def _go_on_with(self, client: str) -> None:
        """Do what a client has asked, in order, up to what has to wait."""
        peer = self._peers.get(client)
        while peer is not None and peer.requests:
            said, frames = peer.requests[0]
            try:
                if not self._do(said, frames):
                    return
            except (EmbeddingError, LookupError, ValueError) as error:
                self._fail(client, said.number, str(error))
                return
            peer.requests.popleft()

    def _do(self, said: Request, frames: Frames) -> bool:
        """Do what is asked; return False if it has to wait."""
        parts = self._parts
        if parts.has_made(said):
            self._answer(said)
        elif isinstance(said, ReadRows | WriteRows):
            return self._read_or_write(said, frames)
        elif isinstance(said, SendParts):
            if not parts.are_here(said, said.parts):
                return False
            self._begin_move(said)
        else:
            if not isinstance(said, MarkGeneration):
                parts.check_may_have(said)
            self._append_and_apply(said)
            self._answer(said)
            self._fail_replaced()
        return True

    def _read_or_write(self, said: ReadRows | WriteRows, frames: Frames) -> bool:
        table = self._parts.table_of(said)
        ids = ids_of(frames[0], table)
        if not self._parts.are_here(said, parts_of(ids)):
            return False
        if isinstance(said, ReadRows):
            rows, is_there = self._tables[table].read(ids)
            self._num_read += len(ids)
            self._say(said.client, RowsRead(self._options.name, said.number), (rows.data, is_there.data))
        else:
            rows = rows_of_frame(frames[1], table, len(ids))
            self._tables.check_room(table, ids)
            self._append_and_apply(said, ids, rows)
            self._answer(said)
        return True

    def _append_and_apply(self, said: Applied, ids: Ids | None = None, rows: Rows | None = None) -> None:
        self._log.append(said, () if ids is None or rows is None else (ids.data, rows.data))
        self._apply(said, ids, rows)

    def _apply(self, said: Applied, ids: Ids | None = None, rows: Rows | None = None) -> None:
        if isinstance(said, OpenTables):
            self._tables.add(said.tables)
        for part, tables in self._parts.apply(said).items():
            for table in tables:
                self._tables[table].drop(part)
        if isinstance(said, OpenTables | MarkGeneration):
            self._tables.keep_only(self._parts.tables())
        if isinstance(said, WriteRows | PartRows) and ids is not None and rows is not None:
            self._tables[self._parts.table_of(said)].write(ids, rows)

    def _fail(self, client: str, number: int, text: str) -> None:
        """Refuse what a client has asked, and all that it will ask."""
        self._refusals[client] = text
        if (peer := self._peers.get(client)) is not None:
            peer.requests.clear()
            peer.outbox.put(EmbeddingRefused(self._options.name, number, text))

    def _fail_replaced(self) -> None:
        replaced = [name for name in self._peers if name not in self._parts.clients]
        for name in replaced:
            if name not in self._refusals:
                self._fail(name, 0, f"client {name} was replaced by another trainer of its rank: end this one")
        for name in replaced[:-_TOLD_REPLACED]:
            self._peers.pop(name).outbox.finish()
        known = self._peers.keys() | self._parts.clients.keys()
        self._refusals = {name: text for name, text in self._refusals.items() if name in known}

    # Answers

    def _say(self, client: str, message: EmbeddingMessage, frames: Frames = ()) -> None:
        if (peer := self._peers.get(client)) is not None:
            peer.outbox.put(message, frames)

    def _answer(self, said: Request) -> None:
        """Answer a change, now made or before, when it is on the disk; or read the parts, if no thread reads them."""
        name = self._options.name
        message: EmbeddingMessage | None = None
        if isinstance(said, WriteRows | DropParts):
            message = WritesKept(name, said.number)
        elif isinstance(said, MarkGeneration):
            message = GenerationMarked(name, said.number)
        elif isinstance(said, Expectation) and self._parts.is_complete(said):
            message = PartsHeld(name, said.number, said.parts)
        elif isinstance(said, AdoptParts | RestoreGeneration) and (said.client, said.number) not in self._loading:
            self._loading.add((said.client, said.number))
            parts = [part for part in said.parts if self._parts.expected.get(part) == said]
            self._loader.load(said, parts, list(self._parts.clients[said.client].tables.values()))
        if message is not None:
            self._due.append((self._log.num_records, said.client, message))

    def _tell_kept(self) -> None:
        if self._due and self._due[0][0] <= self._log.num_synced:
            reach("embedding.before_answer")
        while self._due and self._due[0][0] <= self._log.num_synced:
            _, client, message = self._due.popleft()
            self._say(client, message)

    # Parts that come

    def _part_rows_came(self, said: PartRows, frames: Frames) -> None:
        """Take rows of parts that are expected; others have come late, or again."""
        if said.client not in self._parts.clients or said.client in self._refusals:
            return
        try:
            table = self._parts.table_of(said)
            ids = ids_of(frames[0], table)
            rows = rows_of_frame(frames[1], table, len(ids))
            touched = parts_of(ids)
            wanted = [part for part in touched if self._parts.expects(said, part)]
            if not wanted:
                return
            if len(wanted) < len(touched):
                chosen = np.isin(ids & (EMBEDDING_PARTS - 1), wanted)
                ids, rows = ids[chosen], rows[chosen]
            self._tables.check_room(table, ids)
            self._append_and_apply(said, ids, rows)
            reach("embedding.part_received")
        except (EmbeddingError, LookupError) as error:
            self._fail(said.client, said.number, str(error))

    def _parts_came(self, said: PartsSent) -> None:
        parts = [part for part in said.parts if self._parts.expects(said, part)]
        if not parts or said.client in self._refusals:
            return
        reach("embedding.before_held")
        expected = {wanted.number: wanted for wanted in map(self._parts.expected.__getitem__, parts)}
        try:
            self._append_and_apply(PartsSent(said.client, said.number, parts))
        except EmbeddingError as error:
            self._fail(said.client, said.number, str(error))
            return
        for wanted in expected.values():
            self._answer(wanted)
        self._go_on_with(said.client)

    def _take_loaded(self) -> bool:
        """Take what was read from logs; return whether there may be more."""
        if (loaded := self._loader.take()) is None:
            return False
        said, rows = loaded
        if not isinstance(rows, str):
            table, ids, data = rows
            self._part_rows_came(PartRows(said.client, said.number, table.name, -1), (ids.data, data.data))
            return True
        self._loading.discard((said.client, said.number))
        if not rows:
            self._parts_came(PartsSent(said.client, said.number, said.parts))
        elif not self._parts.is_complete(said):
            self._fail(said.client, said.number, rows)
        return True

    # Parts that go

    def _begin_move(self, said: SendParts) -> None:
        key = said.client, said.number
        if (before := self._moves.get(key)) is not None:
            if before.receivers == said.to and not before.is_over:
                return
            before.abandon()
        pieces = self._rows_of(said.parts, said.number)

        def send() -> Iterator[Piece]:
            for piece in pieces:
                yield piece
                reach("embedding.part_sent")
            yield PartsSent(said.client, said.number, said.parts), ()

        self._moves[key] = Outbox(self._service.batch_key, self._options.name, said.to, send())

    def _rows_of(self, parts: Sequence[int], number: int) -> Iterator[tuple[PartRows, Frames]]:
        """Give the rows of parts, from another thread: some as they are now, and some as they will be."""
        places = [
            (whose, part, table.name, self._tables[table])
            for part in parts
            if (whose := self._parts.whose(part))
            for table in self._parts.clients[whose].tables.values()
        ]
        return (
            (PartRows(client, number, name, part), (ids.data, rows.data))
            for client, part, name, store in places
            for ids, rows in store.rows_of(part, _CHUNK_BYTES)
        )
