"""An embedding server: keeps rows of tables for trainers, which compute with them and write them back.

Called by `hetstream internal embedding-server`. It stores bytes and says what it has; trainers decide everything else.
`parts.py` decides what becomes of a request, `log.py` brings each change to the disk, `rows.py` has the rows. Here is
who waits for whom.

One thread does all that is asked. Others send answers, so that a slow trainer holds up nobody else, and parts that
move; sync the log; and write the file by which trainers find this one. What is read from a log comes as the rows of
another server do: this one sends it to itself.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hetstream.mpi_dataworkers.embedding.background import LINGER_S, Frames, Outbox, Piece, keep_registered, register
from hetstream.mpi_dataworkers.embedding.history import Chunk, parts_now, parts_of_generation
from hetstream.mpi_dataworkers.embedding.log import KEPT_GENERATIONS, LEAST_LOG_BYTES, Log
from hetstream.mpi_dataworkers.embedding.parts import Applied, Emptied, Expectation, Parts, Request
from hetstream.mpi_dataworkers.embedding.rows import Ids, Rows, Tables, ids_of, parts_of, rows_of_frame, rows_of_record
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

FromLog = AdoptParts | RestoreGeneration
_FORMAT = 1
# Rows of a part go in pieces of this size, with other requests between them.
_CHUNK_BYTES = 1 << 20
# How soon the end of the service or a signal is noticed.
_LOOK_S = 0.25


@dataclass
class _Peer:
    """A trainer that has opened tables, and what it asks, in order: the first of it waits for parts."""

    outbox: Outbox
    requests: collections.deque[tuple[Request, Frames]] = field(default_factory=collections.deque)


class EmbeddingServer:
    """See the module.

    Args:
        service: address and keys of the service.
        name: its own, among those of the service.
        directory: its log is the directory `server-NAME` in there.
        memory_bytes: that the rows may take.
        drain_s: how long it goes on serving once it was told to end, while parts lie here.
        kept_generations, least_log_bytes: see `Log`.

    Raises:
        EmbeddingError, ServiceError: it cannot be.
    """

    def __init__(
        self,
        service: ServiceAddress,
        name: str,
        directory: Path,
        memory_bytes: int,
        drain_s: float,
        kept_generations: int = KEPT_GENERATIONS,
        least_log_bytes: int = LEAST_LOG_BYTES,
    ) -> None:
        self._service, self._name, self._drain_s = service, name, drain_s
        self._folder = directory.absolute() / f"server-{name}"
        self._start = secrets.token_hex(16)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._num_read = 0
        self._is_draining = False
        self._parts = Parts()
        self._tables = Tables(memory_bytes)
        self._peers: dict[str, _Peer] = {}
        # Why clients have failed. One that was refused something ends, so all else that concerns it is refused.
        self._refusals: dict[str, str] = {}
        # Parts on their way, to another server or from a log to here, by client and number of the request.
        self._moves: dict[tuple[str, int], Outbox] = {}
        # Answers that wait until so many records are on the disk.
        self._due: collections.deque[tuple[int, str, EmbeddingMessage]] = collections.deque()
        self._log = Log(self._folder, self._wake, kept_generations, least_log_bytes)
        try:
            self._recover()
            binds = [f"ipc://@hetstream-{secrets.token_hex(16)}", f"tcp://{local_address_towards(service.address)}:*"]
            self._receiver = SocketReceiver(service.batch_key, binds)
        except BaseException as error:
            self._log.close()
            if isinstance(error, OSError):
                raise ServiceError(f"embedding server {name} cannot start: {error}") from error
            raise

    def _recover(self) -> None:
        begun = time.monotonic()
        for said, at, data in self._log.recover():
            if isinstance(said, Parts):
                self._parts = said
                self._tables.add(said.tables())
            elif isinstance(said, WriteRows | PartRows):
                self._apply(said, at, *rows_of_record(data, self._parts.clients[said.client].tables[said.table]))
            else:
                self._apply(said, at)
        took_s = time.monotonic() - begun
        _log.info("embedding server %s has %d rows of its log, after %.1f s", self._name, self._tables.num_rows, took_s)

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Serve until the service ends, or until it was told to end and no part lies here.

        Args:
            should_stop: asked several times a second.

        Raises:
            OSError: the log is of no use any more; what was told to be on the disk is.
        """
        place, ended = (self._service.file, self._name), threading.Event()
        keeper = threading.Thread(target=keep_registered, args=(*place, self._facts, ended), name="hetstream-register")
        try:
            register(*place, self._facts())
            keeper.start()
            self._serve(should_stop, ended)
        finally:
            ended.set()
            if keeper.ident is not None:
                keeper.join()
            self._close()

    def _serve(self, should_stop: Callable[[], bool], ended: threading.Event) -> None:
        poller = select.poll()
        for source in (*self._receiver.sources, self._wakeup):
            poller.register(source, select.POLLIN)
        give_up_at = float("inf")
        while not ended.is_set():
            now = time.monotonic()
            if not self._is_draining and should_stop():
                self._is_draining = True
                give_up_at = now + self._drain_s
                _log.info("embedding server %s drains: it ends when no part lies here", self._name)
            # Nobody fetches those of a client that has failed.
            is_needed = self._moves or self._parts.owners() - self._refusals.keys()
            if self._is_draining and (now >= give_up_at or not is_needed):
                return
            poller.poll(1000 * min(_LOOK_S, self._receiver.look_again_s))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)
            for received in self._receiver.receive():
                self._take(received)
            for (client, number), move in [(key, move) for key, move in self._moves.items() if move.is_over]:
                del self._moves[client, number]
                if move.failure and self._parts.awaits(client, number):
                    self._fail(client, number, move.failure)
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
            "name": self._name,
            "start": self._start,
            "addresses": self._receiver.addresses,
            "log": str(self._folder),
            "rows": self._tables.num_rows,
            "bytes": self._tables.num_bytes,
            "limit_bytes": self._tables.limit_bytes,
            "draining": self._is_draining,
            "reads": self._num_read,
            "generations": self._log.num_generations,
        }

    # What comes

    def _take(self, received: ReceivedBatch | ProtocolError) -> None:
        if isinstance(received, ProtocolError):
            _log.warning("refused a message: %s", received)
            return
        said, frames = received.header, received.frames
        if isinstance(said, OpenTables):
            self._open(said)
        elif isinstance(said, PartRows | PartsSent):
            self._parts_came(said, frames)
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
            peer = self._peers[said.client] = _Peer(Outbox(self._service.batch_key, self._name, said.reply_to))
        peer.requests.clear()  # the client repeats what it has no answer to
        try:
            if said.client in self._refusals:
                self._fail(said.client, 0, self._refusals[said.client])
            elif not self._parts.has_opened(said):
                self._tables.add(said.tables)
                self._append_and_apply(said)
                _log.info("rank %d has opened %d tables as client %s", said.rank, len(said.tables), said.client)
            if said.parts and said.client not in self._refusals:
                self._due.append((self._log.num_records, said.client, WritesKept(self._name, 0)))
        except EmbeddingError as error:
            self._fail(said.client, 0, str(error))

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
            self._move(said, said.to, self._rows_of(said.parts, said.number))
        else:
            if not isinstance(said, MarkGeneration):
                parts.check_may_have(said)
            self._append_and_apply(said)
            self._answer(said)
        return True

    def _read_or_write(self, said: ReadRows | WriteRows, frames: Frames) -> bool:
        table = self._parts.table_of(said)
        ids = ids_of(frames[0], table)
        if not self._parts.are_here(said, parts_of(ids)):
            return False
        if isinstance(said, ReadRows):
            rows, is_there = self._tables[table].read(ids)
            self._num_read += len(ids)
            self._say(said.client, RowsRead(self._name, said.number), (rows.data, is_there.data))
        else:
            rows = rows_of_frame(frames[1], table, len(ids))
            self._tables.check_room(table, ids)
            self._append_and_apply(said, ids, rows)
            self._answer(said)
        return True

    def _append_and_apply(self, said: Applied, ids: Ids | None = None, rows: Rows | None = None) -> None:
        if isinstance(said, MarkGeneration):
            at = self._log.mark(said, self._parts)
        else:
            at = self._log.append(said, () if ids is None or rows is None else (ids.data, rows.data))
        self._apply(said, at, ids, rows)
        for name in (self._peers.keys() | self._refusals.keys()) - self._parts.clients.keys():
            self._fail(name, 0, f"client {name} was replaced by another trainer of its rank: end this one")

    def _apply(self, said: Applied, at: int, ids: Ids | None = None, rows: Rows | None = None) -> None:
        if isinstance(said, OpenTables):
            self._tables.add(said.tables)
        self._empty(self._parts.apply(said, at))
        if isinstance(said, OpenTables | MarkGeneration):
            self._tables.keep_only(self._parts.tables())
        if isinstance(said, WriteRows | PartRows) and ids is not None and rows is not None:
            self._tables[self._parts.table_of(said)].write(ids, rows)

    def _empty(self, emptied: Emptied) -> None:
        for part, tables in emptied.items():
            for table in tables:
                self._tables[table].drop(part)

    def _fail(self, client: str, number: int, text: str) -> None:
        """Refuse what a client has asked, and all that it will ask; nothing is expected for it any more."""
        self._refusals[client] = text
        self._empty(self._parts.give_up(client))
        peer = self._peers.get(client)
        if peer is not None:
            peer.requests.clear()
            peer.outbox.put(EmbeddingRefused(self._name, number, text))
        if client not in self._parts.clients:  # it was replaced, or never let in
            del self._refusals[client]
            if peer is not None:
                self._peers.pop(client).outbox.finish()

    # Answers

    def _say(self, client: str, message: EmbeddingMessage, frames: Frames = ()) -> None:
        if (peer := self._peers.get(client)) is not None:
            peer.outbox.put(message, frames)

    def _answer(self, said: Request) -> None:
        """Answer a change, now made or before, when it is on the disk; or have the parts read, if nobody does."""
        message: EmbeddingMessage
        if isinstance(said, WriteRows | DropParts):
            message = WritesKept(self._name, said.number)
        elif isinstance(said, MarkGeneration):
            message = GenerationMarked(self._name, said.number)
        elif isinstance(said, Expectation) and not self._parts.awaits(said.client, said.number):
            message = PartsHeld(self._name, said.number, said.parts)
        else:
            if isinstance(said, FromLog):
                self._move(said, tuple(self._receiver.addresses), self._rows_in_log(said))
            return
        self._due.append((self._log.num_records, said.client, message))

    def _tell_kept(self) -> None:
        if self._due and self._due[0][0] <= self._log.num_synced:
            reach("embedding.before_answer")
        while self._due and self._due[0][0] <= self._log.num_synced:
            _, client, message = self._due.popleft()
            self._say(client, message)

    # Parts that come

    def _parts_came(self, said: PartRows | PartsSent, frames: Frames) -> None:
        """Take parts that are expected; others have come late, or again."""
        if said.client not in self._parts.clients or said.client in self._refusals:
            return
        try:
            if isinstance(said, PartRows):
                self._take_rows(said, frames)
            elif parts := [part for part in said.parts if self._parts.expects(said, part)]:
                reach("embedding.before_held")
                expected = {wanted.number: wanted for wanted in map(self._parts.expected.__getitem__, parts)}
                self._append_and_apply(PartsSent(said.client, said.number, parts))
                for wanted in expected.values():
                    self._answer(wanted)
                self._go_on_with(said.client)
        except (EmbeddingError, LookupError) as error:
            self._fail(said.client, said.number, str(error))

    def _take_rows(self, said: PartRows, frames: Frames) -> None:
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

    # Parts that go

    def _move(self, said: SendParts | FromLog, to: tuple[str, ...], rows: Iterator[Piece]) -> None:
        key = said.client, said.number
        if (before := self._moves.get(key)) is not None:
            if before.receivers == to and not before.is_over:
                return
            before.abandon()

        def pieces() -> Iterator[Piece]:
            for piece in rows:
                yield piece
                reach("embedding.part_sent")
            yield PartsSent(said.client, said.number, said.parts), ()

        self._moves[key] = Outbox(self._service.batch_key, self._name, to, pieces(), self._wake)

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

    def _rows_in_log(self, said: FromLog) -> Iterator[tuple[PartRows, Frames]]:
        """Give the rows of parts that lie in a log, from another thread."""
        parts = [part for part in said.parts if self._parts.expected.get(part) == said]
        tables = [*self._parts.clients[said.client].tables.values()]

        def found() -> Iterator[Chunk]:
            if isinstance(said, AdoptParts):
                yield from parts_now(Path(said.log), said.client, parts, tables)
            else:
                yield from parts_of_generation(Path(said.log), said.name, parts, tables)

        return (
            (PartRows(said.client, said.number, table.name, -1), (ids.data, rows.data)) for table, ids, rows in found()
        )
