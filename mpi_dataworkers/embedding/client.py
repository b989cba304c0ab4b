"""A trainer's connections to the embedding servers.

The trainer is the authority on the rows of its parts: it reads them ahead of use and writes whole rows back. A change
is kept here until the server has it on the disk, so whatever ends a server costs no update: all that is kept is said
again, in order, to the server's next start or to the one that adopts its parts. What is said twice changes nothing.

Requests are sent in the training thread. A thread of this client takes the answers, notices servers that come, go and
start anew by their registration files, and moves parts; all state is guarded by one lock.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hetstream.mpi_dataworkers.embedding.parts import Change
from hetstream.mpi_dataworkers.embedding.placement import place
from hetstream.mpi_dataworkers.embedding.registration import REGISTRY, Registration, read_registrations
from hetstream.mpi_dataworkers.embedding.row_cache import Ids, Slots
from hetstream.mpi_dataworkers.errors import EmbeddingError, ProtocolError
from hetstream.mpi_dataworkers.transports.base import AT_ONCE, PeerUnreachable, ReceivedBatch
from hetstream.mpi_dataworkers.transports.choice import TransportSender, open_receivers
from hetstream.mpi_dataworkers.wire.address import ServiceAddress
from hetstream.mpi_dataworkers.wire.messages import (
    EMBEDDING_PARTS,
    AdoptParts,
    DropParts,
    EmbeddingMessage,
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

_log = logging.getLogger(__name__)

_LOOK_S = 0.2
# A server that does not answer for this long is asked again; each time twice as long.
_ASK_AGAIN_S, _MOST_ASK_AGAIN_S = 2.0, 30.0
# One whose file is not written anew for this long is asked whether it is there.
_SILENT_S = 3.0
# A server that cannot be reached for this long does not come back: another one adopts its parts.
LOST_AFTER_S = 15.0
# Servers that come later join when they have been there for this long, so that those that start together do so at once.
_JOIN_AFTER_S = 1.0
# How long anything is waited for that servers have to do.
DEADLINE_S = 120.0
# Rows that are on their way from server to server at once: what is asked of them waits until they have arrived.
_MOST_MOVING_BYTES = 16 << 20
# Changes that no server has on its disk yet; then writing waits.
_MOST_KEPT_BYTES = 1 << 30

# Takes rows that were read: their slots, the rows, and which of them there are.
Deliver = Callable[[Slots, npt.NDArray[np.uint8], npt.NDArray[np.bool_]], None]


@dataclass
class _Read:
    message: ReadRows
    table: EmbeddingTable
    ids: Ids
    slots: Slots
    deliver: Deliver


# A change that its server has not on the disk, and its frames.
_Kept = tuple[Change | SendParts, list[memoryview]]


@dataclass(eq=False)
class _Server:
    """Attributes:
    parts: that lie here, or are on their way to here.
    first_parts: that lie here from the beginning, until the server has answered. One that has met this client and
        does not know it any more has lost its log: it refuses.
    kept: by number, in order.
    reads: by number.
    is_open: whether it has been told who this client is, on the connection that there is.
    """

    registration: Registration
    parts: set[int] = field(default_factory=set)
    first_parts: list[int] = field(default_factory=list)
    kept: dict[int, _Kept] = field(default_factory=dict)
    reads: dict[int, _Read] = field(default_factory=dict)
    is_open: bool = False
    since: float = field(default_factory=time.monotonic)
    unreachable_since: float | None = None
    asked_at: float = 0.0
    heard_at: float = field(default_factory=time.monotonic)
    ask_again_s: float = _ASK_AGAIN_S

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self.registration.addresses)


@dataclass
class _Move:
    """Parts on their way: `expect` and `send` are numbers of the messages, -1 where nobody sends them."""

    parts: list[int]
    source: str
    destination: str
    expect: int
    send: int


class EmbeddingClient:
    """See the module.

    Args:
        service: address file's content, with the job's keys.
        rank, world_size: of this trainer; its parts are those whose remainder by `world_size` is `rank`.
        num_servers: to wait for before the first table is opened.
        timeout_s: how long to wait for them.

    Attributes:
        parts: of this rank.

    Raises:
        EmbeddingError: they did not come.
    """

    def __init__(
        self, service: ServiceAddress, rank: int, world_size: int, num_servers: int, timeout_s: float = DEADLINE_S
    ) -> None:
        self._folder = service.file.parent / REGISTRY
        self.rank, self.world_size = rank, world_size
        self.client = uuid.uuid4().hex
        self.parts = [part for part in range(EMBEDDING_PARTS) if part % world_size == rank]
        self._tables: list[EmbeddingTable] = []
        self._servers: dict[str, _Server] = {}
        self._holders: dict[int, str] = {}
        self._moves: list[_Move] = []
        # Parts of servers that were lost.
        self._lost: dict[str, list[int]] = {}
        # When the file of each start of a server was written that was not yet seen to write it anew.
        self._seen_s: dict[str, float] = {}
        self._number = 0
        self._error: str | None = None
        self._closed = False
        self._changed = threading.Condition(threading.RLock())
        self.num_written = 0
        (self._receiver,) = open_receivers(service, {"ipc", "tcp"}, 0, compress=False)
        self._sender = TransportSender(service.batch_key, self.client)
        try:
            self._await_servers(max(1, num_servers), timeout_s)
        except BaseException:
            self._sender.close(AT_ONCE)
            self._receiver.close()
            raise
        self._names: list[str] = []
        self._server_of_part = np.zeros(EMBEDDING_PARTS, dtype=np.int64)
        self._place(place(self.parts, {}, self._servers))
        for server in self._servers.values():
            server.first_parts = sorted(server.parts)
        self._thread = threading.Thread(target=self._run, name="hetstream-embedding", daemon=True)
        self._thread.start()

    def _await_servers(self, num_servers: int, timeout_s: float) -> None:
        """Wait until so many take connections; files of those that were killed may be there, too."""
        deadline = time.monotonic() + timeout_s
        while len(self._servers) < num_servers:
            found = read_registrations(self._folder)
            for name in sorted(found.keys() - self._servers.keys()):
                server = _Server(found[name])
                with contextlib.suppress(PeerUnreachable):
                    self._introduce(server)
                    self._servers[name] = server
            if len(self._servers) >= num_servers:
                return
            if time.monotonic() > deadline:
                raise EmbeddingError(
                    f"{len(self._servers)} of {num_servers} embedding servers, of {len(found)} in {self._folder}, "
                    f"could be reached within {timeout_s:g} s. Read their logs: hetstream job --logs"
                )
            time.sleep(0.05)

    def _introduce(self, server: _Server) -> None:
        reply_to = tuple(self._receiver.addresses)
        opening = OpenTables(self.client, self.rank, reply_to, list(self._tables), server.first_parts)
        self._sender.send(server.addresses, opening, [])

    def _place(self, holders: dict[int, str]) -> None:
        self._holders = holders
        for name, server in self._servers.items():
            server.parts = {part for part, holder in holders.items() if holder == name}
        self._index()

    def _index(self) -> None:
        """Note anew at which place in the names of servers each part's is."""
        self._names = sorted(self._servers)
        for part, name in self._holders.items():
            if name in self._servers:
                self._server_of_part[part] = self._names.index(name)

    @property
    def logs(self) -> list[str]:
        """Directories of all servers."""
        with self._changed:
            return [server.registration.log for server in self._servers.values()]

    def add_table(self, table: EmbeddingTable) -> None:
        """Open a table on all servers; it is empty."""
        with self._changed:
            self._tables.append(table)
            for server in self._servers.values():
                self._open(server)

    def _next(self) -> int:
        self._number += 1
        return self._number

    # --- rows ------------------------------------------------------------------------------------------------------

    def read(self, table: EmbeddingTable, ids: Ids, slots: Slots, deliver: Deliver) -> None:
        """Ask for rows; `deliver` gets them in the client's thread, some at a time."""
        with self._changed:
            for name, which in self._by_server(ids):
                message = ReadRows(self.client, self._next(), table.name)
                read = _Read(message, table, ids[which], slots[which], deliver)
                self._servers[name].reads[message.number] = read
                self._send(self._servers[name], message, [_bytes(read.ids)])

    def _ask_anew(self, server: _Server) -> None:
        """Ask again for the rows that a server has not given, where their parts are now."""
        reads, server.reads = server.reads, {}
        for read in reads.values():
            self.read(read.table, read.ids, read.slots, read.deliver)

    def write(self, table: EmbeddingTable, ids: Ids, rows: npt.NDArray[np.uint8]) -> None:
        """Write rows back. They are kept here, uncopied, until they are on a disk.

        Raises:
            EmbeddingError: servers have refused something, or take nothing.
        """
        if not len(ids):
            return
        with self._changed:
            self._wait(lambda: self._kept_bytes() < _MOST_KEPT_BYTES, "changes reach the servers' disks")
            self.num_written += len(ids)
            self._write(table, ids, rows)

    def _write(self, table: EmbeddingTable, ids: Ids, rows: npt.NDArray[np.uint8]) -> None:
        for name, which in self._by_server(ids):
            message = WriteRows(self.client, self._next(), table.name)
            self._change(self._servers[name], message, [_bytes(ids[which]), _bytes(rows[which])])

    def wait(self, are_here: Callable[[], bool]) -> float:
        """Wait for rows.

        Returns:
            How long, s.

        Raises:
            EmbeddingError: they did not come.
        """
        if self._error is None and are_here():
            return 0.0
        begun = time.monotonic()
        with self._changed:
            self._wait(are_here, "rows come")
        return time.monotonic() - begun

    def _by_server(self, ids: Ids) -> list[tuple[str, Any]]:
        """Which of the ids lie on which server."""
        if len(self._names) == 1:
            return [(self._names[0], slice(None))]
        servers = self._server_of_part[ids % EMBEDDING_PARTS]
        return [
            (name, which) for index, name in enumerate(self._names) if len(which := np.flatnonzero(servers == index))
        ]

    # --- generations -----------------------------------------------------------------------------------------------

    def mark_generation(self, name: str) -> None:
        """Make what is written until now a generation, on the disks of all servers.

        Raises:
            EmbeddingError: it is not there within the deadline.
        """
        self._on_all_servers(
            lambda number, _: MarkGeneration(self.client, number, name, self.world_size, self.logs),
            f"generation {name} is on the disks",
        )

    def restore_generation(self, name: str, log: str) -> None:
        """Make all rows of this rank what they were in a generation.

        Args:
            name: of the generation.
            log: the directory of one of the servers that marked it.

        Raises:
            EmbeddingError: there is no such generation, or it is damaged.
        """
        self._on_all_servers(
            lambda number, server: RestoreGeneration(self.client, number, name, sorted(server.parts), log),
            f"generation {name} is restored",
        )

    def _on_all_servers(self, message: Callable[[int, _Server], MarkGeneration | RestoreGeneration], what: str) -> None:
        """Ask the same of all servers that there are; anew where one of them was lost meanwhile."""
        asked: dict[int, _Server] = {}

        def is_done() -> bool:
            return bool(asked) and not any(number in server.kept for number, server in asked.items())

        def is_lost() -> bool:
            return any(server not in self._servers.values() for server in asked.values())

        with self._changed:
            while not is_done():
                self._wait(lambda: not self._moves, "parts arrive")
                asked.clear()
                asked.update({self._next(): server for server in self._servers.values()})
                for number, server in asked.items():
                    self._change(server, message(number, server), [])
                self._wait(lambda: is_done() or is_lost(), what)

    # --- sending ---------------------------------------------------------------------------------------------------

    def _kept_bytes(self) -> int:
        all_kept = [kept for server in self._servers.values() for kept in server.kept.values()]
        return sum(len(frame) for _, frames in all_kept for frame in frames)

    def _change(self, server: _Server, message: Change | SendParts, frames: list[Any]) -> None:
        """Say something that is said again until the server has it on the disk."""
        server.kept[message.number] = message, frames
        self._send(server, message, frames)

    def _send(self, server: _Server, message: EmbeddingMessage, frames: list[Any]) -> None:
        if not server.is_open:
            return  # it will be said when it is
        try:
            self._sender.send(server.addresses, message, frames)
        except PeerUnreachable as error:
            self._lost_connection(server, error)

    def _lost_connection(self, server: _Server, error: object) -> None:
        server.is_open = False
        if server.unreachable_since is None:
            server.unreachable_since = time.monotonic()
            _log.warning("embedding server %s cannot be reached: %s", server.registration.name, error)

    def _open(self, server: _Server) -> None:
        """Say who this client is, and all that is to be said again."""
        server.asked_at = time.monotonic()
        server.is_open = False
        self._ask_anew(server)
        try:
            self._introduce(server)
            reads = {number: (read.message, [_bytes(read.ids)]) for number, read in server.reads.items()}
            for _, (message, frames) in sorted({**server.kept, **reads}.items()):
                self._sender.send(server.addresses, message, frames)
        except PeerUnreachable as error:
            self._sender.drop(server.addresses)
            self._lost_connection(server, error)
            return
        if server.unreachable_since is not None:
            away_s = time.monotonic() - server.unreachable_since
            _log.warning("embedding server %s is back after %.1f s", server.registration.name, away_s)
        server.is_open, server.unreachable_since = True, None

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            if self._error is not None:
                raise EmbeddingError(self._error)
            if is_done():
                return
            if not self._changed.wait(min(1.0, deadline - time.monotonic())) and time.monotonic() > deadline:
                away = [name for name, server in self._servers.items() if server.unreachable_since is not None]
                raise EmbeddingError(
                    f"waited {DEADLINE_S:g} s until {what}; embedding servers that cannot be reached: "
                    f"{', '.join(away) or 'none'}. Read their logs: hetstream job --logs"
                )

    # --- the client's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        look_at = 0.0
        try:
            while not self._closed:
                select.select(self._receiver.sources, [], [], _LOOK_S)
                received = self._receiver.receive()
                now = time.monotonic()
                with self._changed:
                    for answer in received:
                        self._take(answer)
                    if now >= look_at:
                        look_at = now + _LOOK_S
                        self._look(now)
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001, the boundary of this thread: the training thread raises it
            _log.exception("the thread of the embedding client ended")
            with self._changed:
                self._error = f"the thread that talks to the embedding servers ended: {error!r}"
                self._changed.notify_all()

    def _take(self, received: ReceivedBatch | ProtocolError) -> None:
        if isinstance(received, ProtocolError):
            _log.warning("an embedding server sent what is no message: %s", received)
            return
        message = received.header
        server = self._servers.get(getattr(message, "server", ""))
        if server is None:
            return  # of one that was lost meanwhile
        server.ask_again_s, server.asked_at, server.first_parts = _ASK_AGAIN_S, time.monotonic(), []
        if isinstance(message, RowsRead):
            read = server.reads.pop(message.number, None)
            if read is not None:
                rows = np.frombuffer(received.frames[0], np.uint8).reshape(len(read.ids), read.table.row_bytes)
                read.deliver(read.slots, rows, np.frombuffer(received.frames[1], np.bool_))
        elif isinstance(message, WritesKept):
            for number in [number for number in server.kept if number <= message.number]:
                if isinstance(server.kept[number][0], WriteRows | DropParts):
                    del server.kept[number]
        elif isinstance(message, GenerationMarked):
            server.kept.pop(message.number, None)
        elif isinstance(message, PartsHeld):
            server.kept.pop(message.number, None)
            self._arrived(message.number)
        elif isinstance(message, EmbeddingRefused):
            self._error = f"embedding server {message.server} refused: {message.text}"

    # --- servers that come and go ----------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        found = read_registrations(self._folder)
        for name, server in list(self._servers.items()):
            registration = found.get(name)
            if registration is not None and registration.start != server.registration.start:
                self._sender.drop(server.addresses)
                if server.unreachable_since is None:
                    server.unreachable_since = now
                server.registration = registration
                self._send_anew(name)
                self._open(server)
            elif registration is not None:
                # To look for one that does not write its file either could take seconds.
                is_there = registration.written_s != server.registration.written_s
                server.registration = registration
                if is_there:
                    server.heard_at = now
                if is_there and not server.is_open:
                    self._open(server)
                # So one is missed, too, to which nothing is owed.
                if server.is_open and now > server.heard_at + _SILENT_S:
                    server.heard_at = now
                    self._open(server)
            if not (server.reads or server.kept):
                server.asked_at = now
            elif server.is_open and now > server.asked_at + server.ask_again_s:
                server.ask_again_s = min(2 * server.ask_again_s, _MOST_ASK_AGAIN_S)
                self._open(server)
            if server.unreachable_since is not None and now > server.unreachable_since + LOST_AFTER_S:
                self._give_up(name)
        for name, registration in found.items():
            first_seen_s = self._seen_s.setdefault(registration.start, registration.written_s)
            is_there = registration.written_s != first_seen_s
            if name not in self._servers and is_there and not registration.draining:
                self._servers[name] = server = _Server(registration)
                self._open(server)
                if name in self._lost and self._tables:
                    self._change(server, DropParts(self.client, self._next(), self._lost.pop(name)), [])
                self._index()
        self._balance(now)

    def _balance(self, now: float) -> None:
        """Move parts to servers that came, and away from those that are about to go."""
        if self._moves or not self._tables:
            return
        ready = [
            name
            for name, server in self._servers.items()
            if not server.registration.draining and (server.parts or now > server.since + _JOIN_AFTER_S)
        ]
        for name in [name for name, server in self._servers.items() if server.registration.draining]:
            if not (self._servers[name].parts or self._servers[name].kept or self._servers[name].reads):
                self._forget(name)
        if not ready or any(server.unreachable_since or server.first_parts for server in self._servers.values()):
            return
        wanted = place(self.parts, self._holders, ready)
        for source in sorted({*self._holders.values()}):
            for destination in ready:
                parts = [part for part in self.parts if self._holders[part] == source and wanted[part] == destination]
                if parts and source != destination:
                    there = self._servers[source]
                    at_once = _MOST_MOVING_BYTES * len(there.parts) // max(1, there.registration.bytes)
                    self._move(parts[: max(1, at_once)], source, destination)
                    return  # the others when these are there

    def _move(self, parts: list[int], source: str, destination: str) -> None:
        _log.info("%d parts move from embedding server %s to %s", len(parts), source, destination)
        to, origin = self._servers[destination], self._servers[source]
        if not to.is_open:
            self._open(to)
        expect, send = self._next(), self._next()
        self._change(to, ExpectParts(self.client, expect, parts), [])
        self._change(origin, SendParts(self.client, send, parts, to.addresses), [])
        self._moves.append(_Move(parts, source, destination, expect, send))
        self._place(self._holders | dict.fromkeys(parts, destination))

    def _send_anew(self, destination: str) -> None:
        """Have what is on its way to a server sent to where that is now."""
        for move in self._moves:
            origin = self._servers.get(move.source)
            if move.destination == destination and origin is not None and move.send in origin.kept:
                to = self._servers[destination].addresses
                self._change(origin, SendParts(self.client, move.send, move.parts, to), [])

    def _arrived(self, number: int) -> None:
        """Parts are at their new server: the one before may forget them."""
        for move in [move for move in self._moves if move.expect == number]:
            self._moves.remove(move)
            origin = self._servers.get(move.source)
            if origin is not None and move.send >= 0:
                origin.kept.pop(move.send, None)
                self._change(origin, DropParts(self.client, self._next(), move.parts), [])
            self._balance(time.monotonic())

    def _give_up(self, name: str) -> None:
        """Have the other servers adopt the parts of a lost one, from its log."""
        lost = self._servers[name]
        others = [
            other
            for other, server in self._servers.items()
            if other != name and server.unreachable_since is None and not server.registration.draining
        ]
        if not others:
            return  # it is waited for, until the deadline of whoever needs it
        _log.warning("embedding server %s is lost: its %d parts go to others", name, len(lost.parts))
        coming = {part: move for move in self._moves if move.destination == name for part in move.parts}
        self._lost[name] = sorted(lost.parts)
        self._seen_s[lost.registration.start] = lost.registration.written_s
        self._forget(name)
        placed = place(self.parts, {part: holder for part, holder in self._holders.items() if holder != name}, others)
        moved: dict[tuple[str, str], list[int]] = {}
        for part in sorted(lost.parts):
            # Parts that had not arrived are still where they came from.
            origin = coming[part].source if part in coming else ""
            moved.setdefault((placed[part] if origin not in others else origin, origin), []).append(part)
        for move in [move for move in self._moves if move.destination == name]:
            self._moves.remove(move)
            if move.source in self._servers:
                self._servers[move.source].kept.pop(move.send, None)
        for move in [move for move in self._moves if move.source == name]:
            # What it was to send, its log has.
            self._servers[move.destination].kept.pop(move.expect, None)
            move.expect, move.send = self._adopt(move.destination, move.parts, lost), -1
        for (destination, origin), parts in moved.items():
            placed |= dict.fromkeys(parts, destination)
            if destination != origin:
                self._moves.append(_Move(parts, name, destination, self._adopt(destination, parts, lost), -1))
        self._place(placed)
        for message, frames in lost.kept.values():
            if isinstance(message, WriteRows):
                (table,) = (table for table in self._tables if table.name == message.table)
                ids = np.frombuffer(frames[0], np.int64)
                self._write(table, ids, np.frombuffer(frames[1], np.uint8).reshape(len(ids), table.row_bytes))
        self._ask_anew(lost)

    def _adopt(self, destination: str, parts: list[int], lost: _Server) -> int:
        message = AdoptParts(self.client, self._next(), parts, lost.registration.log)
        self._change(self._servers[destination], message, [])
        return message.number

    def _forget(self, name: str) -> None:
        self._sender.drop(self._servers.pop(name).addresses)
        self._index()

    def close(self) -> None:
        """Let what is kept reach the servers, within some seconds; then end all connections."""
        with self._changed, contextlib.suppress(EmbeddingError):
            deadline = time.monotonic() + 5.0
            while self._kept_bytes() and self._error is None and time.monotonic() < deadline:
                self._changed.wait(0.1)
        self._closed = True
        self._thread.join(10.0)
        self._sender.close(time.monotonic() + 1.0)
        self._receiver.close()


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
