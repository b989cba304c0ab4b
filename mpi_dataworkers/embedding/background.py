"""What an embedding server has other threads do: send, read logs, and say that the server is there."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hetstream.base.files import Directory
from hetstream.mpi_dataworkers.embedding.history import Chunk, parts_now, parts_of_generation
from hetstream.mpi_dataworkers.embedding.registration import REGISTRY
from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.transports.base import AT_ONCE, PeerUnreachable
from hetstream.mpi_dataworkers.transports.choice import TransportSender
from hetstream.mpi_dataworkers.wire.address import has_ended
from hetstream.mpi_dataworkers.wire.codec import Buffer, size_of
from hetstream.mpi_dataworkers.wire.messages import AdoptParts, EmbeddingMessage, EmbeddingTable, RestoreGeneration

_log = logging.getLogger(__name__)

_REGISTER_S = 1.0
# Messages may leave for so long at the end.
LINGER_S = 2.0
# Pieces of another server's log that are read ahead.
_AHEAD_CHUNKS = 4
# How soon a reader of a log notices that nobody wants its rows any more.
_LOOK_S = 0.25

Frames = Sequence[Buffer]


class Outbox:
    """Sends to one peer, from a thread of its own.

    Args:
        key: the job's batch key in hex.
        server: name of this server.
        receivers: addresses of the peer, best transport first.
        changed: called from the thread when something was sent, or nothing can be sent any more.

    Attributes:
        is_over: nothing is sent any more.
        why_lost: why the peer cannot be reached, or "".
    """

    def __init__(self, key: str, server: str, receivers: tuple[str, ...], changed: Callable[[], None]) -> None:
        self.receivers = receivers
        self.is_over = False
        self.why_lost = ""
        self._num_put = self._num_sent = 0  # bytes
        self._is_abandoned = False
        self._changed = changed
        self._queue: queue.SimpleQueue[tuple[EmbeddingMessage, Frames] | None] = queue.SimpleQueue()
        sender = TransportSender(key, server)
        self._thread = threading.Thread(target=self._run, args=(sender,), name="hetstream-answers", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Bytes that have not left."""
        return self._num_put - self._num_sent

    def put(self, header: EmbeddingMessage, frames: Frames = ()) -> None:
        """Send a message, unless the peer is lost."""
        if not self.is_over:
            self._num_put += sum(map(size_of, frames))
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

    def _run(self, sender: TransportSender) -> None:
        try:
            while (item := self._queue.get()) is not None and not self._is_abandoned:
                header, frames = item
                sender.send(self.receivers, header, frames)
                self._num_sent += sum(map(size_of, frames))
                self._changed()
        except PeerUnreachable as error:
            self.why_lost = str(error)
        finally:
            at_once = self._is_abandoned or self.why_lost
            sender.close(AT_ONCE if at_once else time.monotonic() + LINGER_S)
            self.is_over = True
            self._changed()


class Load:
    """Reads parts from logs in a thread: it looks whether they are there, waits for `go`, and then reads their rows.

    Attributes:
        is_found: they are there.
        error: why they are not, or what was wrong with the rows.
        has_begun: the rows are wanted.
        chunks: of rows; None behind the last one.
    """

    def __init__(
        self, said: AdoptParts | RestoreGeneration, tables: Sequence[EmbeddingTable], changed: Callable[[], None]
    ) -> None:
        self.said = said
        self.is_found = self.has_begun = False
        self.error = ""
        self.chunks: queue.Queue[Chunk | None] = queue.Queue(_AHEAD_CHUNKS)
        self._tables, self._changed = tables, changed
        self._go = threading.Event()
        self._is_cancelled = False
        threading.Thread(target=self._run, name="hetstream-load", daemon=True).start()

    def go(self) -> None:
        """Read the rows."""
        self.has_begun = True
        self._go.set()

    def cancel(self) -> None:
        """Read no more."""
        self._is_cancelled = True
        self._go.set()

    def _run(self) -> None:
        said, folder = self.said, Path(self.said.log)
        try:
            if isinstance(said, RestoreGeneration):
                rows = parts_of_generation(folder, said.name, said.parts, self._tables)
            else:
                rows = parts_now(folder, said.client, said.parts, self._tables)
            self.is_found = True
            self._changed()
            self._go.wait()
            for chunk in rows:
                if self._is_cancelled:
                    return
                self._put(chunk)
        except (EmbeddingError, OSError) as error:
            self.error = str(error)
        self._put(None)

    def _put(self, chunk: Chunk | None) -> None:
        while not self._is_cancelled:
            try:
                self.chunks.put(chunk, timeout=_LOOK_S)
            except queue.Full:
                continue
            break
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
