"""Which way batches go: the transports that a loader offers, and the one that a data worker takes for it.

A loader offers an address for each transport of `registry.py`, best first: shared memory and Unix sockets reach data
workers of its own host, TCP all of them, and MPI, if the user asked for it, those of its own MPI world. A data worker
tries them in that order and stays with the first that works, so nobody has to know who shares a host with whom. A
transport that fails later is left for the next one; a connection in doubt begins at the best.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from hetstream.mpi_dataworkers.transports.base import (
    BatchReceiver,
    BatchSender,
    LoaderEndpoint,
    PeerUnreachable,
    transport_of,
)
from hetstream.mpi_dataworkers.transports.registry import TRANSPORTS, LoaderSide
from hetstream.mpi_dataworkers.transports.zmq import ZmqLoaderEndpoint
from hetstream.mpi_dataworkers.wire.address import ServiceAddress
from hetstream.mpi_dataworkers.wire.codec import Leaf
from hetstream.mpi_dataworkers.wire.messages import Carried

_log = logging.getLogger(__name__)

Receivers = tuple[str, ...]


def open_loader_endpoint(
    service: ServiceAddress, peer: str, timeout_s: float, transports: Collection[str], buffer_bytes: int, compress: bool
) -> LoaderEndpoint:
    """Connect the loaders of this process to their dispatcher, and open the transports on which they take batches.

    Args:
        service: address and keys.
        peer: this process's id, 32 hexadecimal digits.
        timeout_s: how long to wait for the dispatcher.
        transports: which of `registry.ALL_NAMES` to open.
        buffer_bytes: finished batches that a loader holds ahead of the training loop.
        compress: ask data workers that come over TCP to compress.

    Raises:
        ServiceUnavailable, AuthenticationError, ServiceError: as they say.
    """
    return ZmqLoaderEndpoint(service, peer, timeout_s, open_receivers(service, transports, buffer_bytes, compress))


def open_receivers(
    service: ServiceAddress, transports: Collection[str], buffer_bytes: int, compress: bool
) -> list[BatchReceiver]:
    """Open the transports, best first; if one cannot be opened, those before it are closed."""
    side = LoaderSide(service.batch_key, service.address, buffer_bytes, compress, transports)
    receivers: list[BatchReceiver] = []
    try:
        for transport in TRANSPORTS:
            if not set(transport.names).isdisjoint(transports):
                receivers.append(transport.receiver(side))
    except BaseException:
        for receiver in receivers:
            receiver.close()
        raise
    return receivers


class TransportSender:
    """A data worker's way to loaders, over the best transport that reaches each.

    Args:
        batch_key: the job's batch key in hex.
        worker_id: this worker's id.
        over_mpi: this process is a rank of an MPI world.
    """

    def __init__(self, batch_key: str, worker_id: str, over_mpi: bool = False) -> None:
        self._senders: dict[str, BatchSender] = {}
        for transport in TRANSPORTS:
            if over_mpi or not transport.mpi_world_only:
                self._senders |= dict.fromkeys(transport.names, transport.sender(batch_key, worker_id))
        self._chosen: dict[Receivers, int] = {}

    def send(self, receivers: Receivers, header: Carried, frames: Sequence[Leaf]) -> float:
        """Send a batch over the transport in use, or over the first behind it that works.

        Returns:
            As `BatchSender.send`.

        Raises:
            PeerUnreachable: none works; the next call begins with the best again.
        """
        failures = []
        for index in range(self._chosen.get(receivers, 0), len(receivers)):
            address = receivers[index]
            sender = self._senders.get(transport_of(address))
            if sender is None:
                failures.append(f"{address} is of no transport that this data worker knows")
                continue
            try:
                waited_s = sender.send(address, header, frames)
            except PeerUnreachable as error:
                failures.append(str(error))
                continue
            if self._chosen.get(receivers) != index:
                self._chosen[receivers] = index
                because = f" ({'; '.join(failures)})" if failures else ""
                _log.info("batches to the loader go by %s%s", address, because)
            return waited_s
        self._chosen.pop(receivers, None)
        raise PeerUnreachable("; ".join(failures) or "the loader offers no transport")

    def room(self, receivers: Receivers, num_bytes: int) -> memoryview | None:
        """See `BatchSender.room`; of the transport in use."""
        number = self._chosen.get(receivers)
        if number is None:
            return None
        address = receivers[number]
        return self._senders[transport_of(address)].room(address, num_bytes)

    def drop(self, receivers: Receivers) -> None:
        """Close the connections to a loader; the next batch begins with the best transport again."""
        self._chosen.pop(receivers, None)
        for address in receivers:
            if (sender := self._senders.get(transport_of(address))) is not None:
                sender.drop(address)

    def close(self, until: float) -> None:
        """Let queued batches leave until then, on the monotonic clock, s; then close all connections."""
        for sender in set(self._senders.values()):
            sender.close(until)
