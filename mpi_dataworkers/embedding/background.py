"""What an embedding server has other threads do: send, and say that the server is there."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hetstream.base.files import Directory
from hetstream.mpi_dataworkers.embedding.registration import REGISTRY
from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.transports.base import AT_ONCE, PeerUnreachable
from hetstream.mpi_dataworkers.transports.choice import TransportSender
from hetstream.mpi_dataworkers.wire.address import has_ended
from hetstream.mpi_dataworkers.wire.codec import Buffer
from hetstream.mpi_dataworkers.wire.messages import EmbeddingMessage

_log = logging.getLogger(__name__)

# Behind the name of a server whose end was in order: what it said last.
ENDED = ".ended"
_REGISTER_S = 1.0
# Messages may leave for so long at the end.
LINGER_S = 2.0

Frames = Sequence[Buffer]
Piece = tuple[EmbeddingMessage, Frames]


class Outbox:
    """Sends to one peer, from a thread of its own.

    Args:
        key: the job's batch key in hex.
        server: name of this server.
        receivers: addresses of the peer, best transport first.
        pieces: what is sent; without them, what is put.
        over: called from the thread at its end.

    Attributes:
        is_over: nothing is sent any more.
        failure: why there are no more pieces, if they could not be had.
    """

    def __init__(
        self,
        key: str,
        server: str,
        receivers: tuple[str, ...],
        pieces: Iterator[Piece] | None = None,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        self.receivers, self.failure = receivers, ""
        self.is_over = self._is_abandoned = False
        self._queue: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._pieces = iter(self._queue.get, None) if pieces is None else pieces
        self._sender, self._over = TransportSender(key, server), over
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
        except (EmbeddingError, OSError) as error:
            self.failure = str(error)
        finally:
            self._sender.close(AT_ONCE if is_lost or self._is_abandoned else time.monotonic() + LINGER_S)
            self.is_over = True
            self._over()


def register(address_file: Path, name: str, facts: dict[str, object]) -> None:
    """Write the file by which trainers find a server.

    Raises:
        OSError: it cannot be written.
    """
    with Directory.open(address_file.parent) as folder, folder.make(REGISTRY) as directory:
        directory.write_whole(f"{name}.json", json.dumps(facts).encode())


def keep_registered(
    address_file: Path, name: str, facts: Callable[[], dict[str, object]], ended: threading.Event
) -> None:
    """Write that file anew each second, and give it another name at the end; that of the service is noticed here."""
    failure = ""
    while not ended.wait(_REGISTER_S):
        if has_ended(address_file):
            ended.set()
            break
        try:
            register(address_file, name, facts())
            failure = ""
        except OSError as error:
            if str(error) != failure:
                _log.warning("what this embedding server has cannot be told to trainers now: %s", error)
            failure = str(error)
    try:
        with Directory.open(address_file.parent / REGISTRY) as directory:
            directory.write_whole(f"{name}{ENDED}", json.dumps(facts()).encode())
            directory.unlink(f"{name}.json", missing_ok=True)
    except FileNotFoundError:
        pass  # nobody is there to be told
    except OSError as error:
        _log.warning("the file of this embedding server stays: %s", error)
