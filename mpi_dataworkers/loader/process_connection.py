"""A process's connection to one service: one endpoint and one thread for all its loaders. Knows no torch.

Used by `client.py`. A program may have a loader for each of sixty folds or a thousand clients: what it holds of the
service (descriptors, a thread, connections of data workers) does not grow with them. The first loader opens the
connection, the last one closes it. Messages carry the loader's number, batches belong to the loader that reads their
session. What a loader raises ends that loader and no other.

A process that was forked gets connections of its own and never touches its parent's.
"""

from __future__ import annotations

import atexit
import collections
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hetstream.base.errors import HetstreamError
from hetstream.base.posix import register_at_fork
from hetstream.base.process import generation
from hetstream.mpi_dataworkers.errors import ProtocolError, ServiceError
from hetstream.mpi_dataworkers.process.faults import reach
from hetstream.mpi_dataworkers.transports.base import LoaderEndpoint, ReceivedBatch, Reconnected, ToLoader
from hetstream.mpi_dataworkers.transports.choice import open_loader_endpoint
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, wait_for_address_file
from hetstream.mpi_dataworkers.wire.messages import HEARTBEAT_S, Batches, Delivery, Message

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
# While a session is open, every loader is asked this often for its reports.
REPORT_S = 0.1
# What the last loaders have to say is waited for this long when the program ends.
_SAY_LAST_S = 5.0


@dataclass(frozen=True)
class ConnectionOptions:
    """What loaders must have in common to share a connection.

    Attributes:
        service: address and keys.
        transports: the ways on which batches may come.
        compress: ask data workers that come over TCP to compress.
    """

    service: ServiceAddress
    transports: frozenset[str]
    compress: bool


def service_at(address_file: Path) -> ServiceAddress:
    """Wait for a service's address file.

    Raises:
        ServiceUnavailable, ServiceError: as they say.
    """
    return wait_for_address_file(address_file, CONNECT_TIMEOUT_S)


class ConnectedLoader(Protocol):
    """What the connection's thread asks of a loader. It does not wait, and may raise."""

    def joined(self, connection: ProcessConnection, number: int) -> None:
        """Told first, in the thread that joins: its connection, and its number there."""

    def begin(self, now: float) -> None:
        """Say who it is to the dispatcher."""

    def message_received(self, message: Message | Reconnected, now: float) -> None:
        """A message of the dispatcher has come."""

    def batches_received(self, carried: Delivery, received: ReceivedBatch) -> None:
        """A batch, or small batches, of one of its sessions have come."""

    def attend(self, now: float) -> bool:
        """Report what there is to report.

        Returns:
            Whether it stays; else it wants to leave.
        """

    def leave(self) -> None:
        """Send what is to be sent last."""

    def has_left(self, failure: HetstreamError | None) -> None:
        """It is not connected any more. Does not raise."""


class ProcessConnection:
    """One endpoint and its thread; `join_service` makes it.

    Args:
        options: to which service, and how.
        buffer_bytes: finished batches that a loader holds ahead of its training loop.

    Attributes:
        last_heard: when the dispatcher last said something, on the monotonic clock.

    Raises:
        ServiceUnavailable, AuthenticationError, ServiceError: as they say.
    """

    def __init__(self, options: ConnectionOptions, buffer_bytes: int) -> None:
        self.options = options
        self._generation = generation()
        self._endpoint: LoaderEndpoint = open_loader_endpoint(
            options.service,
            secrets.token_hex(16),
            CONNECT_TIMEOUT_S,
            options.transports,
            buffer_bytes,
            options.compress,
        )
        self.last_heard = time.monotonic()
        self._numbers = itertools.count(1)
        self._loaders: dict[int, ConnectedLoader] = {}  # changed with _registry_lock
        self._is_over = False  # the last loader has left: nobody joins any more; changed with _registry_lock
        self._is_to_end = False  # the program ends
        self._joining: collections.deque[int] = collections.deque()
        # Loaders that ask for attention. Finalisers put in, too: it takes no lock.
        self._calls: collections.deque[int] = collections.deque()
        self._readers: dict[str, int] = {}  # who reads a session
        self._thread = threading.Thread(target=self._run, name="hetstream-loader", daemon=True)

    # --- any thread -------------------------------------------------------------------------------------------------

    @property
    def is_inherited(self) -> bool:
        """Whether it is that of the process which this one was forked from."""
        return self._generation != generation()

    @property
    def receivers(self) -> list[str]:
        """Where data workers deliver, the best transport first."""
        return self._endpoint.receivers

    def call(self, number: int) -> None:
        """Have the thread attend to a loader soon; may be called from a finaliser."""
        if not self.is_inherited:
            self._calls.append(number)
            self._endpoint.wake()

    def read(self, session_id: str, number: int) -> None:
        """Batches of this session are for this loader."""
        self._readers[session_id] = number

    def stop_reading(self, session_id: str) -> None:
        """Nobody wants them any more."""
        self._readers.pop(session_id, None)

    def wait_for_end(self, timeout_s: float) -> None:
        """If the last loader has left, wait until all is closed."""
        if self._is_over:
            self._thread.join(timeout_s)

    def end(self, timeout_s: float) -> None:
        """Have all loaders leave, and wait until all is closed."""
        self._is_to_end = True
        self._endpoint.wake()
        self._thread.join(timeout_s)

    def add(self, loader: ConnectedLoader) -> int:
        """Give a loader its number; call it with the registry's lock."""
        number = next(self._numbers)
        loader.joined(self, number)
        self._loaders[number] = loader
        self._joining.append(number)
        return number

    def start(self) -> None:
        """Begin to talk to the dispatcher."""
        _running.add(self)
        self._thread.start()

    # --- the connection's thread ------------------------------------------------------------------------------------

    def send(self, number: int, message: Message) -> None:
        """Send a loader's message to the dispatcher."""
        self._endpoint.send(number, message)

    def _run(self) -> None:
        failure: HetstreamError | None = None
        try:
            self._talk()
        except Exception as error:  # noqa: BLE001, the thread's boundary: the training threads raise it
            failure = _as_failure(error)
        finally:
            self._endpoint.close()
            with _registry_lock:
                left, self._loaders = self._loaders, {}
                self._end()
            for loader in left.values():
                loader.has_left(failure)
            _running.discard(self)

    def _talk(self) -> None:
        next_round = 0.0
        while not self._is_over:
            messages, batches = self._endpoint.poll(max(0.0, next_round - time.monotonic()))
            now = time.monotonic()
            while self._joining:
                self._begin(self._joining.popleft(), now)
            concerned = self._pass_on(messages, batches, now)
            del batches  # while it waits, the memory of the last one belongs to the training loop
            while self._calls:
                concerned.add(self._calls.popleft())
            if now >= next_round:
                concerned.update(self._loaders)
                next_round = now + HEARTBEAT_S
            for number in sorted(concerned):
                self._attend(number, now)
            for number in list(self._loaders) if self._is_to_end else ():
                self._part_with(number, None)
            if self._is_to_end:
                return
            if self._readers:
                next_round = min(next_round, now + REPORT_S)

    def _pass_on(
        self, messages: list[ToLoader | Reconnected], batches: list[ReceivedBatch | ProtocolError], now: float
    ) -> set[int]:
        """Hand out what has come.

        Returns:
            Numbers of the loaders that got something.
        """
        concerned: set[int] = set()
        for incoming in messages:
            self.last_heard = now
            if isinstance(incoming, Reconnected):
                concerned.update(self._loaders)
                for number in list(self._loaders):
                    self._pass_message(number, incoming, now)
            else:
                concerned.add(incoming.loader)
                self._pass_message(incoming.loader, incoming.message, now)
        if batches:
            reach("loader.batches_received")
        for received in batches:
            if isinstance(received, ProtocolError):
                _log.warning("refused a batch: %s; its step will be leased again", received)
                continue
            if not isinstance(received.header, Delivery):
                _log.warning("refused %s, which is nothing for a loader", type(received.header).__name__)
                continue
            header = received.header.batches[0] if isinstance(received.header, Batches) else received.header
            reader = self._readers.get(header.session_id)
            if reader is not None:
                concerned.add(reader)
                if (loader := self._loaders.get(reader)) is not None:
                    self._ending_on_error(reader, loader.batches_received, received.header, received)
        return concerned

    # A loader that is not there has left, and the dispatcher did not know yet. What a loader raises is its own end and
    # nobody else's.

    def _begin(self, number: int, now: float) -> None:
        if (loader := self._loaders.get(number)) is not None:
            self._ending_on_error(number, loader.begin, now)

    def _pass_message(self, number: int, message: Message | Reconnected, now: float) -> None:
        if (loader := self._loaders.get(number)) is not None:
            self._ending_on_error(number, loader.message_received, message, now)

    def _attend(self, number: int, now: float) -> None:
        if (loader := self._loaders.get(number)) is not None:
            self._ending_on_error(number, self._attend_to, number, loader, now)

    def _attend_to(self, number: int, loader: ConnectedLoader, now: float) -> None:
        if not loader.attend(now):
            self._part_with(number, None)

    def _ending_on_error(self, number: int, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001, the boundary of a loader: its training thread raises it
            self._part_with(number, _as_failure(error))

    def _part_with(self, number: int, failure: HetstreamError | None) -> None:
        with _registry_lock:
            loader = self._loaders.pop(number)
            if not self._loaders:
                self._end()
        loader.leave()
        loader.has_left(failure)

    def _end(self) -> None:
        self._is_over = True
        if _connections.get(self.options) is self:
            del _connections[self.options]


def _as_failure(error: Exception) -> HetstreamError:
    failure = error if isinstance(error, HetstreamError) else ServiceError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error.__cause__
    return failure


# --- the connections of this process --------------------------------------------------------------------------------

_connections: dict[ConnectionOptions, ProcessConnection] = {}
# Those whose thread has not come to its end, also when nobody joins them any more.
_running: set[ProcessConnection] = set()
_registry_lock = threading.Lock()
# Held for as long as it takes to connect: two loaders that begin at once share what the first one opens.
_joining_lock = threading.Lock()
# Connections of the process that this one was forked from. Kept, so that nothing of them is finalised here.
_inherited: list[ProcessConnection] = []


def join_service(options: ConnectionOptions, loader: ConnectedLoader, buffer_bytes: int) -> None:
    """Connect a loader, over the connection that this process has to the service, or a new one.

    Args:
        options: to which service, and how.
        loader: it; the connection's thread calls it from now on.
        buffer_bytes: finished batches that it holds ahead of its training loop.

    Raises:
        ServiceUnavailable, AuthenticationError, ServiceError: as they say.
    """
    with _joining_lock:
        with _registry_lock:
            known = _connections.get(options)
            if known is not None:
                number = known.add(loader)
        if known is None:
            known = ProcessConnection(options, buffer_bytes)
            with _registry_lock:
                _connections[options] = known
                number = known.add(loader)
            known.start()
    known.call(number)


def _begin_as_child() -> None:
    """In a forked process: the connections are the parent's, and another thread of it may have held the locks."""
    global _registry_lock, _joining_lock
    _registry_lock, _joining_lock = threading.Lock(), threading.Lock()
    _inherited.extend(_running)
    _connections.clear()
    _running.clear()


register_at_fork(after_in_child=_begin_as_child)


@atexit.register
def _say_the_last() -> None:
    """Send the last counts of loaders that nobody holds any more: the thread, which has them, ends with the program."""
    for connection in list(_running):
        connection.end(_SAY_LAST_S)
