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
import queue
import re
import secrets
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetstream.base.errors import UsageError
from hetstream.mpi_dataworkers.embedding.background import LINGER_S, Frames, Load, Outbox, RegistrationFile
from hetstream.mpi_dataworkers.embedding.log import KEPT_GENERATIONS, LEAST_LOG_BYTES, Dump, Log
from hetstream.mpi_dataworkers.embedding.parts import (
    Applied,
    Change,
    Expectation,
    OfParts,
    Outcome,
    Parts,
    Refusal,
    Request,
)
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
from hetstream.mpi_dataworkers.wire.codec import size_of
from hetstream.mpi_dataworkers.wire.messages import (
    EMBEDDING_PARTS,
    AdoptParts,
    DropParts,
    EmbeddingMessage,
    EmbeddingRefused,
    ExpectParts,
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
# Of them, so much may be on its way: what is asked of the other server comes behind it.
_AHEAD_BYTES = 4 << 20
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
class _Move:
    """Parts that are being sent to another server."""

    said: SendParts
    outbox: Outbox
    rows: Iterator[tuple[PartRows, Frames]]
    is_sent: bool = False


@dataclass
class _Counters:
    """What a server has done since its start."""

    reads: int = 0
    written_rows: int = 0
    is_draining: bool = False


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
        self._counters = _Counters()
        self._parts = Parts()
        self._tables = Tables(options.memory_bytes)
        self._outboxes: dict[str, Outbox] = {}
        self._queues: dict[str, collections.deque[tuple[Request, Frames]]] = {}
        self._moves: dict[tuple[str, int], _Move] = {}
        self._loads: dict[tuple[str, int], Load] = {}
        # Refusals for which there was no room in the log.
        self._unlogged: collections.deque[Refusal] = collections.deque()
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
        for said, waiting, data in self._log.recover():
            if isinstance(said, Parts):
                self._parts = said
                self._tables.add(said.tables())
            elif isinstance(said, WriteRows | PartRows):
                table = self._parts.clients[said.client].tables[said.table]
                self._apply(said, waiting, *rows_of_record(data, table))
            else:
                self._apply(said, waiting)
        for wanted in list(self._parts.expectations()):
            if not isinstance(wanted, ExpectParts):
                self._begin_load(wanted).go()
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
            if not self._counters.is_draining and should_stop():
                self._counters.is_draining = True
                give_up_at = now + self._options.drain_s
                _log.info("embedding server %s drains: it ends when no part lies here", self._options.name)
            if self._counters.is_draining and (now >= give_up_at or (self._parts.is_empty and not self._moves)):
                return
            poller.poll(0 if is_busy else 1000 * min(_LOOK_S, self._receiver.look_again_s))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)
            for received in self._receiver.receive():
                self._take(received)
            is_busy = self._go_on_moving()
            is_busy = self._go_on_loading() or is_busy
            self._tell_kept()
            self._log.look_after(self._parts, self._dump)

    def _close(self) -> None:
        for load in self._loads.values():
            load.cancel()
        self._log.close()
        self._tell_kept()
        until = time.monotonic() + LINGER_S
        outboxes = [*self._outboxes.values(), *(move.outbox for move in self._moves.values())]
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
            "draining": self._counters.is_draining,
            "reads": self._counters.reads,
            "written_rows": self._counters.written_rows,
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
        self._outboxes = {name: outbox for name, outbox in self._outboxes.items() if not outbox.is_over}
        before = self._outboxes.get(said.client)
        if before is None or before.receivers != said.reply_to:
            if before is not None:
                before.abandon()
            self._outboxes[said.client] = Outbox(self._service.batch_key, self._options.name, said.reply_to, self._wake)
        self._queues.pop(said.client, None)  # the client repeats what it has no answer to
        try:
            if self._parts.outcome_of_open(said) is Outcome.DO:
                self._tables.add(said.tables)
                self._append(said)
                self._apply(said)
                _log.info("rank %d has opened %d tables as client %s", said.rank, len(said.tables), said.client)
        except EmbeddingError as error:
            self._answer(said.client, EmbeddingRefused(self._options.name, 0, str(error)))
        self._refuse_replaced()

    def _ask(self, said: Request, frames: Frames) -> None:
        requests = self._queues.setdefault(said.client, collections.deque())
        if requests and self._parts.overtakes(said):
            if isinstance(said, DropParts | RestoreGeneration):
                while requests:
                    other, _ = requests.popleft()
                    self._refuse(
                        other, f"the parts that it waits for were given up by {type(said).__name__} {said.number}"
                    )
            requests.appendleft((said, frames))
        else:
            requests.append((said, frames))
        self._go_on_with(said.client)

    def _go_on_with(self, client: str) -> None:
        """Do what a client has asked, in order, up to what has to wait."""
        requests = self._queues.get(client)
        while requests and self._try(*requests[0]):
            requests.popleft()
        if not requests:
            self._queues.pop(client, None)

    def _try(self, said: Request, frames: Frames) -> bool:
        """Do what is asked, or refuse it; return False if it has to wait."""
        try:
            return self._do_if_ready(said, frames)
        except EmbeddingError as error:
            self._refuse(said, str(error))
        return True

    def _do_if_ready(self, said: Request, frames: Frames) -> bool:
        if isinstance(said, ReadRows | WriteRows):
            return self._read_or_write(said, frames)
        outcome = self._parts.outcome_of(said)
        if outcome is Outcome.DONE:
            self._answer_again(said)
        elif outcome is Outcome.WAIT:
            return False
        elif isinstance(said, SendParts):
            self._begin_move(said)
        else:
            return self._change(said)
        return True

    def _read_or_write(self, said: ReadRows | WriteRows, frames: Frames) -> bool:
        table = self._parts.table_of(said)
        _check_frames(said, frames, 1 if isinstance(said, ReadRows) else 2)
        ids = ids_of(frames[0], table)
        outcome = self._parts.outcome_of(said, parts_of(ids))
        if outcome is Outcome.WAIT:
            return False
        if isinstance(said, ReadRows):
            rows, is_there = self._tables[table].read(ids)
            self._counters.reads += len(ids)
            self._answer(said.client, RowsRead(self._options.name, said.number), (rows.data, is_there.data))
        elif outcome is Outcome.DONE:
            self._answer_again(said)
        else:
            rows = rows_of_frame(frames[1], table, len(ids))
            self._tables.check_room(table, ids)
            self._append(said, frames)
            self._apply(said, (), ids, rows)
            self._counters.written_rows += len(ids)
            self._due_when_kept(said.client)
        return True

    def _change(self, said: OfParts | MarkGeneration) -> bool:
        """Make a change of whole parts, or mark a generation; return False if it has to wait."""
        if isinstance(said, AdoptParts | RestoreGeneration):
            load = self._loads.get((said.client, said.number)) or self._begin_load(said)
            if not load.is_found and not load.error:
                return False
            if load.error:
                del self._loads[said.client, said.number]
                raise EmbeddingError(load.error)
            load.go()
        # What it has overtaken.
        behind = (other for other, _ in self._queues[said.client] if isinstance(other, Change))
        waiting = [other.number for other in behind if other.number < said.number]
        self._append(said, (), waiting)
        self._apply(said, waiting)
        if isinstance(said, MarkGeneration):
            self._due_when_kept(said.client, GenerationMarked(self._options.name, said.number))
            self._refuse_replaced()
        else:
            self._due_when_kept(said.client)
        return True

    def _append(self, said: Applied, frames: Frames = (), waiting: Sequence[int] = ()) -> None:
        while self._unlogged:
            self._log.append(self._unlogged[0])
            self._unlogged.popleft()
        self._log.append(said, frames, waiting)

    def _apply(
        self, said: Applied, waiting: Sequence[int] = (), ids: Ids | None = None, rows: Rows | None = None
    ) -> None:
        if isinstance(said, OpenTables):
            self._tables.add(said.tables)
        emptied = self._parts.apply(said, waiting)
        for part, tables in emptied.items():
            for table in tables:
                self._tables[table].drop(part)
        if isinstance(said, OpenTables | MarkGeneration):
            self._tables.keep_only(self._parts.tables())
        if isinstance(said, WriteRows | PartRows) and ids is not None and rows is not None:
            self._tables[self._parts.table_of(said)].write(ids, rows)

    def _refuse(self, said: Request, text: str) -> None:
        client = self._parts.clients.get(said.client)
        if isinstance(said, Change) and said.number > 0 and client is not None:
            if client.has_decided(said.number):
                text = client.refused.get(said.number, text)
            else:
                self._note_refusal(Refusal(said.client, said.number, text))
        self._answer(said.client, EmbeddingRefused(self._options.name, said.number, text))

    def _note_refusal(self, refusal: Refusal) -> None:
        try:
            self._append(refusal)
        except EmbeddingError:
            self._unlogged.append(refusal)
        self._apply(refusal)

    def _refuse_replaced(self) -> None:
        """Refuse what clients still wait for that others have replaced."""
        for name in [name for name in self._queues if name not in self._parts.clients]:
            for said, frames in self._queues.pop(name):
                self._try(said, frames)
        replaced = [name for name in self._outboxes if name not in self._parts.clients]
        for name in replaced[:-_TOLD_REPLACED]:
            self._outboxes.pop(name).finish()

    # Answers

    def _answer(self, client: str, message: EmbeddingMessage, frames: Frames = ()) -> None:
        if (outbox := self._outboxes.get(client)) is not None:
            outbox.put(message, frames)

    def _answer_again(self, said: Request) -> None:
        client = self._parts.clients[said.client]
        if said.number in client.refused:
            self._answer(said.client, EmbeddingRefused(self._options.name, said.number, client.refused[said.number]))
        elif isinstance(said, MarkGeneration):
            self._due_when_kept(said.client, GenerationMarked(self._options.name, said.number))
        elif isinstance(said, Expectation) and self._parts.is_complete(said):
            self._due_when_kept(said.client, PartsHeld(self._options.name, said.number, said.parts))
        elif not isinstance(said, SendParts):
            self._due_when_kept(said.client)

    def _due_when_kept(self, client: str, message: PartsHeld | GenerationMarked | None = None) -> None:
        """Say, when all that is in the log now is on the disk, that the client's changes are kept; and a message."""
        if message is not None:
            self._due.append((self._log.num_records, client, message))
        kept = WritesKept(self._options.name, self._parts.clients[client].decided_up_to)
        self._due.append((self._log.num_records, client, kept))

    def _tell_kept(self) -> None:
        newest: dict[str, WritesKept] = {}
        if self._due and self._due[0][0] <= self._log.num_synced:
            reach("embedding.before_answer")
        while self._due and self._due[0][0] <= self._log.num_synced:
            _, client, message = self._due.popleft()
            if isinstance(message, WritesKept):
                newest[client] = message
            else:
                self._answer(client, message)
        for client, kept in newest.items():
            self._answer(client, kept)

    # Parts that come

    def _part_rows_came(self, said: PartRows, frames: Frames) -> None:
        """Take rows of parts that are expected; others have come late, or again."""
        if said.client not in self._parts.clients:
            return
        try:
            table = self._parts.table_of(said)
            _check_frames(said, frames, 2)
            ids = ids_of(frames[0], table)
            rows = rows_of_frame(frames[1], table, len(ids))
        except EmbeddingError as error:
            _log.warning("refused rows of another embedding server: %s", error)
            return
        touched = np.flatnonzero(parts_of(ids)).tolist()
        wanted = [part for part in touched if self._parts.expects(said, part)]
        if not wanted:
            return
        if len(wanted) < len(touched):
            chosen = np.isin(ids & (EMBEDDING_PARTS - 1), wanted)
            ids, rows = ids[chosen], rows[chosen]
        try:
            self._tables.check_room(table, ids)
            self._append(said, (ids.data, rows.data))
            self._apply(said, (), ids, rows)
            self._counters.written_rows += len(ids)
            reach("embedding.part_received")
        except EmbeddingError as error:
            self._give_up([self._parts.expected[part] for part in wanted], str(error))

    def _parts_came(self, said: PartsSent) -> None:
        parts = [part for part in said.parts if self._parts.expects(said, part)]
        if not parts:
            return
        reach("embedding.before_held")
        expected = [self._parts.expected[part] for part in parts]
        held = PartsSent(said.client, said.number, parts)
        try:
            self._append(held)
        except EmbeddingError as error:
            self._give_up(expected, str(error))
            return
        self._apply(held)
        for wanted in {wanted.number: wanted for wanted in expected}.values():
            if self._parts.is_complete(wanted):
                self._due_when_kept(said.client, PartsHeld(self._options.name, wanted.number, wanted.parts))
                _log.info("%d parts of client %s are here", len(wanted.parts), said.client)
        self._go_on_with(said.client)

    def _give_up(self, expected: Sequence[Expectation], text: str) -> None:
        """Refuse, late, what has had parts expected that cannot come."""
        for wanted in {wanted.number: wanted for wanted in expected}.values():
            self._note_refusal(Refusal(wanted.client, wanted.number, text))
            self._answer(wanted.client, EmbeddingRefused(self._options.name, wanted.number, text))
            self._go_on_with(wanted.client)

    def _begin_load(self, said: AdoptParts | RestoreGeneration) -> Load:
        tables = list(self._parts.clients[said.client].tables.values())
        load = self._loads[said.client, said.number] = Load(said, tables, self._wake)
        return load

    def _go_on_loading(self) -> bool:
        """Take a piece of each log that is read; return whether there is more to take now."""
        is_busy = False
        for key, load in list(self._loads.items()):
            said = load.said
            if not load.has_begun:
                if load.is_found or load.error:
                    self._go_on_with(said.client)
                if not load.has_begun and said.client not in self._queues:  # nobody asks for it any more
                    load.cancel()
                    self._loads.pop(key, None)
                continue
            try:
                chunk = load.chunks.get_nowait()
            except queue.Empty:
                continue
            is_busy = True
            if chunk is not None:
                table, ids, rows = chunk
                self._part_rows_came(PartRows(said.client, said.number, table.name, -1), (ids.data, rows.data))
                continue
            del self._loads[key]
            if not load.error:
                self._parts_came(PartsSent(said.client, said.number, said.parts))
            elif any(self._parts.expected.get(part) == said for part in said.parts):
                self._give_up([said], load.error)
        return is_busy

    # Parts that go

    def _begin_move(self, said: SendParts) -> None:
        key = said.client, said.number
        if (before := self._moves.get(key)) is not None:
            if before.said.to == said.to and not before.outbox.is_over:
                return
            before.outbox.abandon()
        outbox = Outbox(self._service.batch_key, self._options.name, said.to, self._wake)
        self._moves[key] = _Move(said, outbox, self._rows_to_send(said))

    def _rows_to_send(self, said: SendParts) -> Iterator[tuple[PartRows, Frames]]:
        for part in said.parts:
            for table in list(self._parts.clients[said.client].tables.values()):
                for ids, rows in self._tables[table].rows_of(part, _CHUNK_BYTES):
                    yield PartRows(said.client, said.number, table.name, part), (ids.data, rows.data)

    def _go_on_moving(self) -> bool:
        """Send a piece of the parts of each move; return whether more could leave now."""
        is_busy = False
        for key, move in list(self._moves.items()):
            outbox, said = move.outbox, move.said
            if outbox.is_over:
                del self._moves[key]
                if outbox.why_lost:  # the client has another one adopt the parts, or says where that one is now
                    _log.warning(
                        "parts %s cannot be sent, the other server is not there: %s", said.parts, outbox.why_lost
                    )
            elif any(self._parts.holder[part] != said.client for part in said.parts):
                outbox.abandon()  # whoever gave them to others has them no more to send
                del self._moves[key]
            elif not move.is_sent:
                is_busy = self._send_piece(move) or is_busy
        return is_busy

    def _send_piece(self, move: _Move) -> bool:
        num_sent = 0
        while num_sent < _CHUNK_BYTES:
            if move.outbox.num_waiting > _AHEAD_BYTES:
                return False  # it wakes this thread when some has left
            if (piece := next(move.rows, None)) is None:
                move.outbox.put(PartsSent(move.said.client, move.said.number, move.said.parts))
                move.outbox.finish()
                move.is_sent = True
                return False
            header, frames = piece
            move.outbox.put(header, frames)
            reach("embedding.part_sent")
            num_sent += sum(map(size_of, frames))
        return True

    def _dump(self) -> Dump:
        """Return what gives the rows of all parts that are here, from another thread."""
        places = []
        for part in range(EMBEDDING_PARTS):
            if whose := self._parts.whose(part):
                tables = self._parts.clients[whose].tables.values()
                places += [(whose, part, table.name, self._tables[table]) for table in tables]

        def dump() -> Iterator[tuple[PartRows, Frames]]:
            for client, part, name, store in places:
                for ids, rows in store.rows_of(part, _CHUNK_BYTES):
                    yield PartRows(client, 0, name, part), (ids.data, rows.data)

        return dump


def _check_frames(said: ReadRows | WriteRows | PartRows, frames: Frames, count: int) -> None:
    if len(frames) != count:
        raise EmbeddingError(f"{type(said).__name__} {said.number} came with {len(frames)} frames; it has {count}")
