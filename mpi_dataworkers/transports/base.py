"""The seam between the data plane and a transport.

Control messages have three endpoints (dispatcher, data worker, the loaders of a process), which `zmq.py` implements.
Batches travel on transports: for each there is a `BatchReceiver` in the trainer and a `BatchSender` in the data worker.
`registry.py` lists them, and `choice.py` chooses. The conformance suite
(tests/mpi_dataworkers/test_transport_conformance.py) holds for every transport of the list. An endpoint belongs to one
thread, save `wake`, which any thread may call.
"""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.wire.codec import Buffer, Leaf
from hetstream.mpi_dataworkers.wire.messages import Carried, Message

# For `close`: nothing that is queued is waited for.
AT_ONCE = 0.0


class PeerUnreachable(HetstreamError):
    """A batch could not be handed to the loader: no connection, or it does not hold the job's key."""


@dataclass(frozen=True)
class Disconnected:
    """A peer's connection closed: its process ended, or the network between was cut."""


@dataclass(frozen=True)
class Reconnected:
    """The connection to the dispatcher was lost and is back: it may be another incarnation, so register again."""


@dataclass(frozen=True)
class Received:
    """What came from a peer: a message, a ProtocolError where the bytes were none, or the end of its connection.

    Attributes:
        peer: a data worker's id, or `peer_name` of a loader; of a connection that closed, the id of its process.
    """

    peer: str
    message: Message | ProtocolError | Disconnected


@dataclass(frozen=True)
class ToLoader:
    """A message of the dispatcher to one of the loaders that share a connection."""

    loader: int
    message: Message


def peer_name(process: str, loader: int | None) -> str:
    """Return what the dispatcher calls a peer: the id of its process and, of a loader, its number there."""
    return process if loader is None else f"{process}/{loader}"


def parse_peer(peer: str) -> tuple[str, int | None]:
    """Undo `peer_name`."""
    process, _, loader = peer.partition("/")
    return process, int(loader) if loader else None


@dataclass(frozen=True)
class ReceivedBatch:
    """What a data worker delivered, with the frames of its tensors and the transport it came by.

    Attributes:
        began_s: when its beginning had come, on the monotonic clock; None where all of it came at once.
    """

    header: Carried
    frames: Sequence[Buffer]
    transport: str
    began_s: float | None = None


def transport_of(address: str) -> str:
    """Name of the transport that an address belongs to: `tcp` for `tcp://HOST:PORT`."""
    return address.partition(":")[0]


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
    """A process's connection to the dispatcher."""

    def wake(self) -> None:
        """Make a `poll` in another thread return."""

    def close(self) -> None:
        """Send what is queued, within a second, and close."""


class WorkerEndpoint(ControlEndpoint, Protocol):
    """A data worker's control connection."""

    def send(self, message: Message) -> None:
        """Send without waiting; while the dispatcher is away messages queue."""

    def close(self, until: float = math.inf) -> None:
        """Send what is queued, within a second and until then on the monotonic clock, s; then close."""

    def poll(self, timeout_s: float) -> list[Message | Reconnected]:
        """Wait for messages of the dispatcher, for a `wake`, or for `timeout_s`."""


class LoaderEndpoint(ControlEndpoint, Protocol):
    """The control connection of a process's loaders and the transports on which data workers deliver to all of them."""

    def send(self, loader: int, message: Message) -> None:
        """Send a loader's message without waiting; while the dispatcher is away messages queue."""

    @property
    def receivers(self) -> list[str]:
        """Where data workers deliver, the best transport first, for `SessionSpec.receivers`."""

    def poll(self, timeout_s: float) -> tuple[list[ToLoader | Reconnected], list[ReceivedBatch | ProtocolError]]:
        """Wait for messages or batches, for a `wake`, or for `timeout_s`; a malformed batch comes as its error."""


class BatchReceiver(Protocol):
    """A loader's end of one transport, or of several that share it."""

    @property
    def addresses(self) -> Sequence[str]:
        """Where data workers connect, the best transport first; see `transport_of`."""

    @property
    def sources(self) -> Sequence[Any]:
        """Descriptors or ZeroMQ sockets, for a poller: readable while `receive` has something to do."""

    @property
    def look_again_s(self) -> float:
        """How soon `receive` is to be called although no source is readable; `math.inf`: not at all."""

    def receive(self) -> list[ReceivedBatch | ProtocolError]:
        """Batches that have come, at most a burst; a malformed batch comes as its error.

        Waits for no more than some milliseconds, and that only inside a batch.
        """

    def close(self) -> None:
        """Close all connections. Memory of batches that the program still holds stays valid."""


class BatchSender(Protocol):
    """A data worker's end of the same, with a connection to each loader."""

    def send(self, receiver: str, header: Carried, frames: Sequence[Leaf]) -> float:
        """Queue one batch, without copying large frames.

        Returns:
            Seconds that it waited for the loader or the network to take what was sent before, or this one.

        Raises:
            PeerUnreachable: no authenticated connection within the deadline.
        """

    def room(self, receiver: str, num_bytes: int) -> memoryview | None:
        """Return memory from which the next message's only frame goes to this loader without a copy, if there is any
        now.

        It may be left unused.
        """

    def drop(self, receiver: str) -> None:
        """Close the connection to a loader, with what is queued for it."""

    def close(self, until: float) -> None:
        """Let queued batches leave until then, on the monotonic clock, s; then close."""


# A data worker's connections to loaders on one transport: opened when a batch goes to a new one, closed when it fails.
#
# What a connection is and how a batch goes over it is the transport's own business, a `Channel` of `shm.py`,
# `sockets.py` or `mpi.py`; which there are, and what their failures mean, is here. Knows no socket.

# A guard for descriptors, 1024 of a process in most places, of which a connection has two at most: data workers close
# those to loaders that read no more.
MAX_CHANNELS = 256
# Messages queued for a closed channel still have this time to leave.
_EVICTED_LINGER_S = 1.0


class Channel(Protocol):
    """A data worker's connection to one loader, proven in both directions."""

    def send(self, header: Carried, frames: Sequence[Leaf]) -> float:
        """Queue one batch, without copying large frames.

        Returns:
            As `base.BatchSender.send`.

        Raises:
            OSError, ProtocolError: the connection is of no use any more.
        """

    def close(self, until: float) -> None:
        """Let what is queued leave until then, on the monotonic clock, s; then close. A time that is over: at once."""


class ChannelSender(abc.ABC):
    """See `base.BatchSender`.

    Args:
        batch_key: the job's batch key in hex.
        worker_id: this worker's id.
    """

    def __init__(self, batch_key: str, worker_id: str) -> None:
        self._key = bytes.fromhex(batch_key)
        self._worker_id = worker_id
        self._channels: dict[str, Channel] = {}  # in order of use

    @abc.abstractmethod
    def _open(self, receiver: str) -> Channel:
        """Connect to a loader.

        Raises:
            PeerUnreachable: that cannot be done.
        """

    def send(self, receiver: str, header: Carried, frames: Sequence[Leaf]) -> float:
        channel = self._channels.pop(receiver, None)
        if channel is None:
            if len(self._channels) >= MAX_CHANNELS:
                self._channels.pop(next(iter(self._channels))).close(time.monotonic() + _EVICTED_LINGER_S)
            channel = self._open(receiver)
        self._channels[receiver] = channel
        try:
            return channel.send(header, frames)
        except (OSError, ProtocolError) as error:
            self.drop(receiver)
            raise PeerUnreachable(f"the connection to the loader at {receiver} is gone: {error}") from error

    def room(self, receiver: str, num_bytes: int) -> memoryview | None:  # noqa: ARG002, most transports have none
        return None

    def drop(self, receiver: str) -> None:
        channel = self._channels.pop(receiver, None)
        if channel is not None:
            channel.close(AT_ONCE)

    def close(self, until: float) -> None:
        for channel in self._channels.values():
            channel.close(until)
        self._channels.clear()
