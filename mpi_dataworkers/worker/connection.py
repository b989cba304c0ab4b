"""A data worker process's connection to the dispatcher. Any thread may tell it something; one thread keeps it."""

from __future__ import annotations

import collections
from collections.abc import Callable

from hetstream.mpi_dataworkers.transports.base import Reconnected, WorkerEndpoint
from hetstream.mpi_dataworkers.transports.zmq import ZmqWorkerEndpoint
from hetstream.mpi_dataworkers.wire.address import ServiceAddress
from hetstream.mpi_dataworkers.wire.messages import Message

CONNECT_TIMEOUT_S = 30.0


class DispatcherConnection:
    """The connection, and what is to be said over it. `poll`, `send` and `flush` belong to the control thread.

    Args:
        service: address and keys.
        worker_id: 32 hexadecimal digits.
        has_ended: whether the service is over, for when there is no connection on which to be told.

    Attributes:
        address: of the dispatcher.
        has_ended: as above.
    """

    def __init__(self, service: ServiceAddress, worker_id: str, has_ended: Callable[[], bool]) -> None:
        self.address, self.has_ended = service.address, has_ended
        self._endpoint: WorkerEndpoint = ZmqWorkerEndpoint(service, worker_id, CONNECT_TIMEOUT_S, has_ended)
        self._messages: collections.deque[Message] = collections.deque()

    def tell(self, message: Message) -> None:
        """Have the control thread send a message, soon."""
        self._messages.append(message)
        self.wake()

    def wake(self) -> None:
        """Make `poll` return; safe in a signal handler, as the lock inside is reentrant."""
        self._endpoint.wake()

    def poll(self, timeout_s: float) -> list[Message | Reconnected]:
        """Wait for messages of the dispatcher, for a `wake`, or for `timeout_s`."""
        return self._endpoint.poll(timeout_s)

    def send(self, message: Message) -> None:
        """Send without waiting; while the dispatcher is away messages queue."""
        self._endpoint.send(message)

    def flush(self) -> None:
        """Send what was told."""
        while self._messages:
            self._endpoint.send(self._messages.popleft())

    def close(self, until: float) -> None:
        """Send what is queued, within a second and until then on the monotonic clock, s; then close."""
        self._endpoint.close(until)
