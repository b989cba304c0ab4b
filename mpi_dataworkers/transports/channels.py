"""A data worker's connections to loaders on one transport: opened when a batch goes to a new one, closed when it fails.

What a connection is and how a batch goes over it is the transport's own business, a `Channel` of `shm.py`, `sockets.py`
or `mpi.py`; which there are, and what their failures mean, is here. Knows no socket.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from typing import Protocol

from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.transports.base import AT_ONCE, PeerUnreachable
from hetstream.mpi_dataworkers.wire.codec import Leaf
from hetstream.mpi_dataworkers.wire.messages import Delivery

# A guard for descriptors, 1024 of a process in most places, of which a connection has two at most: data workers close
# those to loaders that read no more.
MAX_CHANNELS = 256
# What is queued for the one that makes room may leave for so long.
_EVICTED_LINGER_S = 1.0


class Channel(Protocol):
    """A data worker's connection to one loader, proven in both directions."""

    def send(self, header: Delivery, frames: Sequence[Leaf]) -> float:
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

    def send(self, receiver: str, header: Delivery, frames: Sequence[Leaf]) -> float:
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
