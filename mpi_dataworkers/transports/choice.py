"""Which way batches go: the transports that a loader offers, and the one that a data worker takes for it.

A loader offers an address for each transport, best first: shared memory and Unix sockets reach data workers of its own
host, TCP all of them, and MPI, if the user asked for it, those of its own MPI world. A data worker tries them in that
order and stays with the first that works, so nobody has to know who shares a host with whom. A transport that fails
later is left for the next one; a connection in doubt begins at the best.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Sequence

from hetstream.mpi_dataworkers.errors import ServiceError
from hetstream.mpi_dataworkers.transports.base import (
    BatchReceiver,
    BatchSender,
    LoaderEndpoint,
    PeerUnreachable,
    transport_of,
)
from hetstream.mpi_dataworkers.transports.shm import ShmBatchSender, ShmReceiver
from hetstream.mpi_dataworkers.transports.sockets import SocketBatchSender, SocketReceiver, local_address_towards
from hetstream.mpi_dataworkers.transports.zmq import ZmqLoaderEndpoint
from hetstream.mpi_dataworkers.wire.address import ServiceAddress
from hetstream.mpi_dataworkers.wire.codec import Leaf
from hetstream.mpi_dataworkers.wire.messages import Delivery

_log = logging.getLogger(__name__)

Receivers = tuple[str, ...]

# Loaders of one process that are read at the same time (validation within training) and find room in shared memory; of
# what more there are, batches go in pieces while it is full.
_POOL_LOADERS = 2


def open_loader_endpoint(
    service: ServiceAddress, peer: str, timeout_s: float, transports: Collection[str], buffer_bytes: int, compress: bool
) -> LoaderEndpoint:
    """Connect the loaders of this process to their dispatcher, and open the transports on which they take batches.

    Args:
        service: address and keys.
        peer: this process's id, 32 hexadecimal digits.
        timeout_s: how long to wait for the dispatcher.
        transports: which of `config.ALL_TRANSPORTS` to open.
        buffer_bytes: finished batches that a loader holds ahead of the training loop.
        compress: ask data workers that come over TCP to compress.

    Raises:
        ServiceUnavailable, AuthenticationError, ServiceError: as they say.
    """
    return ZmqLoaderEndpoint(service, peer, timeout_s, open_receivers(service, transports, buffer_bytes, compress))


def open_receivers(
    service: ServiceAddress, transports: Collection[str], buffer_bytes: int, compress: bool
) -> list[BatchReceiver]:
    """Open the transports, best first."""
    receivers: list[BatchReceiver] = []
    if "mpi" in transports:
        # Imported here: the import calls MPI_Init, which only the ranks of an MPI step should do.
        from hetstream.mpi_dataworkers.transports.mpi import MpiReceiver

        receivers.append(MpiReceiver(service.batch_key))
    if "shm" in transports:
        # Larger than what the window lets through: it is full only while the training loop keeps old batches.
        receivers.append(ShmReceiver(service.batch_key, _POOL_LOADERS * (buffer_bytes + buffer_bytes // 4)))
    binds = []
    if "ipc" in transports:
        # A name in the abstract namespace: nothing is left in a directory, whatever ends this process.
        binds.append(f"ipc://@hetstream-{secrets.token_hex(16)}")
    if "tcp" in transports:
        try:
            binds.append(f"tcp://{local_address_towards(service.address)}:*")
        except OSError as error:
            for receiver in receivers:
                receiver.close()
            raise ServiceError(f"no address for batches on the route to {service.address}: {error}") from error
    if binds:
        receivers.append(SocketReceiver(service.batch_key, binds, compress))
    return receivers


class TransportSender:
    """A data worker's way to loaders, over the best transport that reaches each.

    Args:
        batch_key: the job's batch key in hex.
        worker_id: this worker's id.
        over_mpi: this process is a rank of an MPI world.
    """

    def __init__(self, batch_key: str, worker_id: str, over_mpi: bool = False) -> None:
        over_sockets = SocketBatchSender(batch_key, worker_id)
        self._senders: dict[str, BatchSender] = {
            "shm": ShmBatchSender(batch_key, worker_id),
            "ipc": over_sockets,
            "tcp": over_sockets,
        }
        if over_mpi:
            from hetstream.mpi_dataworkers.transports.mpi import MpiBatchSender

            self._senders["mpi"] = MpiBatchSender(batch_key, worker_id)
        self._chosen: dict[Receivers, int] = {}

    def send(self, receivers: Receivers, header: Delivery, frames: Sequence[Leaf]) -> float:
        """Send a batch over the transport in use, or over the first behind it that works.

        Returns:
            As `BatchSender.send`.

        Raises:
            PeerUnreachable: none works; the next call begins with the best again.
        """
        failures = []
        for number in range(self._chosen.get(receivers, 0), len(receivers)):
            address = receivers[number]
            sender = self._senders.get(transport_of(address))
            if sender is None:
                failures.append(f"{address} is of no transport that this data worker knows")
                continue
            try:
                waited_s = sender.send(address, header, frames)
            except PeerUnreachable as error:
                failures.append(str(error))
                continue
            if self._chosen.get(receivers) != number:
                self._chosen[receivers] = number
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
