"""What an embedding server has other threads do: send, read logs, and say that the server is there."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hetstream.base.files import Directory
from hetstream.mpi_dataworkers.embedding.history import Chunk, parts_now, parts_of_generation
from hetstream.mpi_dataworkers.embedding.registration import REGISTRY
from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.transports.base import AT_ONCE, PeerUnreachable
from hetstream.mpi_dataworkers.transports.choice import TransportSender
from hetstream.mpi_dataworkers.wire.address import has_ended
from hetstream.mpi_dataworkers.wire.codec import Buffer
from hetstream.mpi_dataworkers.wire.messages import AdoptParts, EmbeddingMessage, EmbeddingTable, RestoreGeneration

_log = logging.getLogger(__name__)

_REGISTER_S = 1.0
# Messages may leave for so long at the end.
LINGER_S = 2.0
# Pieces of another server's log that are read ahead.
_AHEAD_CHUNKS = 4

Frames = Sequence[Buffer]
Piece = tuple[EmbeddingMessage, Frames]
FromLog = AdoptParts | RestoreGeneration


class Outbox:
    """Sends to one peer, from a thread of its own.

    Args:
        key: the job's batch key in hex.
        server: name of this server.
        receivers: addresses of the peer, best transport first.
        pieces: what is sent; without them, what is put.

    Attributes:
        is_over: nothing is sent any more.
    """

    def __init__(
        self, key: str, server: str, receivers: tuple[str, ...], pieces: Iterator[Piece] | None = None
    ) -> None:
        self.receivers = receivers
        self.is_over = self._is_abandoned = False
        self._queue: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._pieces = iter(self._queue.get, None) if pieces is None else pieces
        self._sender = TransportSender(key, server)
        self._thread = threading.Thread(target=self._run, name="hetstream-answers", daemon=True)
        self._thread.start()

    def put(self, header: EmbeddingMessage, frames: Frames = ()) -> None:
        """Send a message, unless the peer is lost."""
        if not self.is_over:
            self._queue.put((header, frames))

    def finish(self) -> None:
        """Close the connection when all was sent."""
        self._queue.put(None)

    def abandon(self) -> None:
        """Close the connection now."""
        self._is_abandoned = True
        self._queue.put(None)

    def join(self, until: float) -> None:
        """Wait for the end of its thread until then, on the monotonic clock, s."""
        self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        is_lost = False
        try:
            for header, frames in self._pieces:
                if self._is_abandoned:
                    break
                self._sender.send(self.receivers, header, frames)
        except PeerUnreachable as error:
            is_lost = True
            _log.warning("%s cannot be reached any more: %s", self.receivers, error)
        finally:
            self._sender.close(AT_ONCE if is_lost or self._is_abandoned else time.monotonic() + LINGER_S)
            self.is_over = True


class Loader:
    """Reads parts from logs, each in a thread of its own.

    Args:
        changed: called from a thread when there is more to take.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        # Rows of what was asked for; behind the last: "", or why they cannot be had.
        self._read: queue.Queue[tuple[FromLog, Chunk | str]] = queue.Queue(_AHEAD_CHUNKS)

    def load(self, said: FromLog, parts: Sequence[int], tables: Sequence[EmbeddingTable]) -> None:
        """Begin to read parts."""
        threading.Thread(target=self._load, args=(said, parts, tables), name="hetstream-load", daemon=True).start()

    def take(self) -> tuple[FromLog, Chunk | str] | None:
        """Return what was read, if there is anything."""
        try:
            return self._read.get_nowait()
        except queue.Empty:
            return None

    def _load(self, said: FromLog, parts: Sequence[int], tables: Sequence[EmbeddingTable]) -> None:
        folder, end = Path(said.log), ""
        try:
            if isinstance(said, RestoreGeneration):
                rows = parts_of_generation(folder, said.name, parts, tables)
            else:
                rows = parts_now(folder, said.client, parts, tables)
            for chunk in rows:
                self._put(said, chunk)
        except (EmbeddingError, OSError) as error:
            end = str(error)
        self._put(said, end)

    def _put(self, said: FromLog, item: Chunk | str) -> None:
        self._read.put((said, item))
        self._changed()


class RegistrationFile:
    """The file by which trainers find this server; a thread writes it.

    Attributes:
        service_has_ended: the dispatcher has taken its address file away.
    """

    def __init__(self, address_file: Path, name: str, facts: Callable[[], dict[str, object]]) -> None:
        self._address_file, self._name, self._facts = address_file, f"{name}.json", facts
        self.service_has_ended = False
        self._end = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._run, name="hetstream-register", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        with Directory.open(self._address_file.parent) as folder, folder.make(REGISTRY) as directory:
            directory.write_whole(self._name, json.dumps(self._facts()).encode())

    def _run(self) -> None:
        was_written = True
        while not self._end.wait(_REGISTER_S):
            self.service_has_ended = self.service_has_ended or has_ended(self._address_file)
            try:
                if not self.service_has_ended:
                    self._write()
                was_written = True
            except OSError as error:
                if was_written:
                    _log.warning("what this embedding server has cannot be told to trainers now: %s", error)
                was_written = False

    def remove(self) -> None:
        """Take the file away."""
        self._end.set()
        self._thread.join()
        try:
            with Directory.open(self._address_file.parent / REGISTRY) as directory:
                directory.unlink(self._name, missing_ok=True)
        except OSError as error:
            _log.warning("the file of this embedding server stays: %s", error)
