"""The seam between the data plane and a transport: four endpoints, one for each role.

The dispatcher, the loader and the data worker are written against these protocols; `zmq.py` implements them. An
endpoint belongs to one thread, save `wake`, which any thread may call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mpi_dataworkers.codec import Buffer
from mpi_dataworkers.errors import HetstreamError, ProtocolError
from mpi_dataworkers.messages import Batch, BatchFailed, Message


class PeerUnreachable(HetstreamError):
    """A batch could not be handed to the loader: no connection, or it does not hold the job's key."""


@dataclass(frozen=True)
class Disconnected:
    """A peer's connection closed: its process ended, or the network between was cut."""


@dataclass(frozen=True)
class Received:
    """What came from a peer: a message, a ProtocolError where the bytes were none, or the end of its connection."""

    peer: str
    message: Message | ProtocolError | Disconnected


@dataclass(frozen=True)
class ReceivedBatch:
    """A batch, or the failure to make it, with the tensor frames that came along."""

    header: Batch | BatchFailed
    frames: Sequence[Buffer]


class DispatcherEndpoint(Protocol):
    """The dispatcher's side of all control connections."""

    @property
    def address(self) -> str:
        """Where peers connect: `tcp://HOST:PORT`."""

    def poll(self, timeout_s: float) -> list[Received]:
        """Wait for messages; all that have come, in order, or none after `timeout_s`."""

    def send(self, peer: str, message: Message) -> None:
        """Send without waiting; a peer that is gone loses it."""

    def close(self) -> None:
        """Send what is queued and free the address."""


class ControlEndpoint(Protocol):
    """A peer's connection to the dispatcher."""

    def send(self, message: Message) -> None:
        """Send without waiting; while the dispatcher is away messages queue."""

    def wake(self) -> None:
        """Make a `poll` in another thread return."""

    def close(self) -> None:
        """Send what is queued, within a second, and close."""


class WorkerEndpoint(ControlEndpoint, Protocol):
    """A data worker's control connection."""

    def poll(self, timeout_s: float) -> list[Message]:
        """Wait for messages of the dispatcher, for a `wake`, or for `timeout_s`."""


class LoaderEndpoint(ControlEndpoint, Protocol):
    """A loader's control connection and the socket on which data workers deliver."""

    @property
    def receiver(self) -> str:
        """Address of the batch socket, for `Session.receiver`."""

    def poll(self, timeout_s: float) -> tuple[list[Message], list[ReceivedBatch | ProtocolError]]:
        """Wait for messages or batches, for a `wake`, or for `timeout_s`; a malformed batch comes as its error."""


class BatchSender(Protocol):
    """A data worker's connections to loaders."""

    def send(self, receiver: str, header: Batch | BatchFailed, frames: Sequence[Buffer]) -> None:
        """Queue one batch, without copying large frames.

        Raises:
            PeerUnreachable: no authenticated connection within the deadline.
        """

    def drop(self, receiver: str) -> None:
        """Close the connection to a loader, with what is queued for it."""

    def close(self, linger_s: float) -> None:
        """Give queued batches `linger_s` to leave, then close."""
