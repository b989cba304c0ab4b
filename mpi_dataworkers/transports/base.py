"""The seam between the data plane and a transport.

Control messages have three endpoints (dispatcher, data worker, the loaders of a process), which `zmq.py` implements.
Batches travel on transports: for each there is a `BatchReceiver` in the trainer and a `BatchSender` in the data worker.
`registry.py` lists them, and `choice.py` chooses. The conformance suite
(tests/mpi_dataworkers/test_transport_conformance.py) holds for every transport of the list. An endpoint belongs to one
thread, save `wake`, which any thread may call.

Where the frames of a message lie in one piece of memory is said here, too.
"""

from __future__ import annotations

import abc
import bisect
import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.wire.codec import ALIGN_BYTES, Buffer, Leaf
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


# Where the frames of a message lie in one piece of memory, and which parts of a pool are free. Pure.
#
# Used by `shm.py`, and by `sockets.py` for messages on the wire.

# Extents begin on pages.
PAGE_BYTES = 4096
_COUNTS = struct.Struct("<IQ")  # frames, bytes of frame 0
_LENGTH = struct.Struct("<Q")


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


class Extents:
    """The free parts of a pool. The lowest place that fits is taken, so that memory in use is used again first: it is
    in the processor's cache, and a pool that is hardly used hardly takes memory.

    Args:
        capacity_bytes: size of the pool.
    """

    def __init__(self, capacity_bytes: int) -> None:
        # (offset, bytes), in order of offset, no two adjacent.
        self._free = [(0, capacity_bytes // PAGE_BYTES * PAGE_BYTES)] if capacity_bytes >= PAGE_BYTES else []
        self._taken: dict[int, int] = {}

    def take(self, num_bytes: int) -> int | None:
        """Offset of a new extent, or None while no part is large enough."""
        wanted = max(PAGE_BYTES, _rounded(num_bytes, PAGE_BYTES))
        for index, (offset, size) in enumerate(self._free):
            if size >= wanted:
                self._free[index : index + 1] = [(offset + wanted, size - wanted)] if size > wanted else []
                self._taken[offset] = wanted
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Free an extent.

        Raises:
            ProtocolError: there is none at this offset.
        """
        size = self._taken.pop(offset, None)
        if size is None:
            raise ProtocolError(f"an extent at {offset} was given back, but none begins there")
        at = bisect.bisect(self._free, (offset, 0))
        if at < len(self._free) and self._free[at][0] == offset + size:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            offset, before = self._free.pop(at - 1)
            at, size = at - 1, size + before
        self._free.insert(at, (offset, size))

    def shorten(self, offset: int, num_bytes: int) -> None:
        """Free what an extent has beyond its first bytes.

        Raises:
            ProtocolError: there is none at this offset.
        """
        kept = max(PAGE_BYTES, _rounded(num_bytes, PAGE_BYTES))
        size = self._taken.get(offset)
        if size is None:
            raise ProtocolError(f"the extent at {offset} was given back before it was sent")
        if kept < size:
            self._taken[offset] = kept
            self._taken[offset + kept] = size - kept
            self.give_back(offset + kept)

    def num_taken(self) -> int:
        """Extents in use."""
        return len(self._taken)


def lay_out(sizes: Sequence[int]) -> tuple[bytes, list[int], int]:
    """Lay the frames of a message out in one piece of memory: a table of their sizes, then the frames.

    Args:
        sizes: bytes of each frame, frame 0 first.

    Returns:
        The table, which lies at offset 0; the offset of each frame; the size of the whole.
    """
    table = _COUNTS.pack(len(sizes), sizes[0]) + b"".join(_LENGTH.pack(size) for size in sizes[1:])
    return table, *_places(sizes, len(table))


def _places(sizes: Sequence[int], table_bytes: int) -> tuple[list[int], int]:
    # Frame 0 is read once; only tensors need alignment.
    offsets, end = [table_bytes], table_bytes + sizes[0]
    for size in sizes[1:]:
        offsets.append(_rounded(end, ALIGN_BYTES))
        end = offsets[-1] + size
    return offsets, end


def find_frames(whole: memoryview) -> list[memoryview]:
    """Views of the frames that `lay_out` described.

    Raises:
        ProtocolError: the table does not fit the memory.
    """
    try:
        count, first = _COUNTS.unpack_from(whole)
        table_bytes = _COUNTS.size + _LENGTH.size * (count - 1)
        if count < 1 or table_bytes > whole.nbytes:
            raise ProtocolError(f"a message of {whole.nbytes} bytes names {count} frames")
        sizes = [first, *(size for (size,) in _LENGTH.iter_unpack(whole[_COUNTS.size : table_bytes]))]
    except struct.error as error:
        raise ProtocolError(f"a message of {whole.nbytes} bytes is truncated: {error}") from error
    offsets, end = _places(sizes, table_bytes)
    if end != whole.nbytes:
        raise ProtocolError(f"a message has {whole.nbytes} bytes, but its frames need {end}")
    return [whole[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
