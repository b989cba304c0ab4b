"""The leases that a data worker holds: its control thread gets them, its main thread works on them."""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable

import msgspec

from hetstream.mpi_dataworkers.process.faults import reach
from hetstream.mpi_dataworkers.transports.base import Reconnected, WorkerEndpoint
from hetstream.mpi_dataworkers.transports.choice import Receivers
from hetstream.mpi_dataworkers.transports.zmq import ZmqWorkerEndpoint
from hetstream.mpi_dataworkers.wire.address import ServiceAddress
from hetstream.mpi_dataworkers.wire.messages import Draining, GrantLease, HeldLease, Message, RevokeLease

# A data worker process's connection to the dispatcher. Any thread may tell it something; one thread keeps it.

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


class LeaseGone(Exception):
    """The lease was revoked, or the worker is to stop, while it waited: nobody is to hear of it."""


class HeldLeases:
    """Leases not finished and not revoked, and where the batches of their sessions go.

    Args:
        dispatcher: is told what becomes of them.

    Attributes:
        is_stopping: the data worker leaves after the step that it is making. A plain flag, because `stop` runs in
            signal handlers, where a second signal may come inside the first: the lock of an Event would then wait for
            itself.
        renews: it leaves so that its supervisor forks a fresh process in its slot.
        is_spent: whether it is to do so as soon as no session goes on, so that the next pass finds a fresh process.
    """

    def __init__(self, dispatcher: DispatcherConnection) -> None:
        self.is_stopping = False
        self.renews = False
        self.is_spent: Callable[[], bool] = lambda: False
        self._dispatcher = dispatcher
        self._waiting: queue.SimpleQueue[GrantLease | None] = queue.SimpleQueue()
        # The lock guards all that follows.
        self._lock = threading.Lock()
        self._held: dict[int, GrantLease] = {}
        self._at: tuple[int, int] = (0, 0)  # token and step in work
        self._receivers: dict[str, Receivers] = {}  # where each session's batches go
        self._doubted: set[Receivers] = set()  # receivers to connect to afresh
        self._drains = False

    def stop(self) -> None:
        """Have the data worker leave after the step that it is making; safe in a signal handler."""
        self.is_stopping = True
        self.release()

    def renew(self) -> None:
        """Leave, so that the supervisor forks a fresh process in this one's slot."""
        self.renews = True
        self.stop()

    def release(self) -> None:
        """Let the main thread wait for leases no longer."""
        self._waiting.put(None)  # SimpleQueue.put may be interrupted by itself

    # --- of the main thread -----------------------------------------------------------------------------------------

    def next(self, timeout_s: float) -> GrantLease | None:
        """Wait for a lease to work on; None when there are no more.

        Raises:
            queue.Empty: none came in time.
        """
        return self._waiting.get(timeout=timeout_s)

    def begin(self, token: int, step: int) -> bool:
        """Come to a step of a lease.

        Returns:
            Whether to make it; else the lease ends before it.

        Raises:
            LeaseGone: the lease was revoked.
        """
        with self._lock:
            if self.is_stopping:
                self._drain()
            held = self._held.get(token)
            if held is None:
                raise LeaseGone
            if step >= held.stop_step:
                return False
            self._at = (token, step)
            return True

    def holds(self, token: int) -> bool:
        """Return whether a lease is still to be worked on."""
        with self._lock:
            return token in self._held and not self.is_stopping

    def settle(self, token: int, report: Message) -> None:
        """Be done with a lease, and say so unless it was revoked."""
        with self._lock:
            if self._held.pop(token, None) is not None:
                self._dispatcher.tell(report)

    def give_up(self, token: int) -> None:
        """Be done with a lease and say nothing: the dispatcher takes it back when this process drains."""
        with self._lock:
            self._held.pop(token, None)

    def held(self) -> list[GrantLease]:
        """Return those that are to be worked on, the oldest first."""
        with self._lock:
            return list(self._held.values())

    def take_doubt(self, receivers: Receivers) -> bool:
        """Return whether the connection to a loader is to be made afresh; asked once for each time."""
        with self._lock:
            doubted = receivers in self._doubted
            self._doubted.discard(receivers)
            return doubted

    @property
    def sessions(self) -> dict[str, Receivers]:
        """The sessions that go on, as far as this process had leases of them, and where their batches go."""
        with self._lock:
            return dict(self._receivers)

    # --- of the control thread --------------------------------------------------------------------------------------

    def take(self, lease: GrantLease) -> None:
        """Have the main thread work on a lease."""
        with self._lock:
            if self._drains:
                return  # granted before the dispatcher heard of it; it takes the lease back when it does
            self._held[lease.token] = lease
            self._receivers[lease.session.session_id] = tuple(lease.session.receivers)
        reach("worker.lease_received")
        self._waiting.put(lease)

    def trim(self, token: int, stop_step: int) -> None:
        """End a lease before this step, if it goes on that far."""
        with self._lock:
            lease = self._held.get(token)
            if lease is None:
                return
            if stop_step <= lease.first_step:
                del self._held[token]
            elif stop_step < lease.stop_step:
                self._held[token] = msgspec.structs.replace(lease, stop_step=stop_step)

    def revoke(self, message: RevokeLease) -> None:
        """Forget a lease; its loader may doubt the connection over which its batches went."""
        with self._lock:
            self._held.pop(message.token, None)
            # A lease in doubt was sent, so it is no longer held: the session says where to.
            if message.reconnect and message.session_id in self._receivers:
                self._doubted.add(self._receivers[message.session_id])

    def drop_session(self, session_id: str) -> int:
        """Forget the leases of a session that has ended.

        Returns:
            The token of one of them that is in work, 0 for none.
        """
        with self._lock:
            self._receivers.pop(session_id, None)
            dropped = [token for token, lease in self._held.items() if lease.session.session_id == session_id]
            for token in dropped:
                del self._held[token]
            was_last = not self._receivers
            in_work = self._at[0] if self._at[0] in dropped else 0
        if was_last and self.is_spent():
            self.renew()
        return in_work

    def tokens(self) -> list[int]:
        """Return what is held, for a heartbeat."""
        with self._lock:
            return sorted(self._held)

    def described(self) -> list[HeldLease]:
        """Return what is held, for a registration."""
        with self._lock:
            return [
                HeldLease(lease.token, lease.session.session_id, lease.first_step, lease.stop_step, lease.shift)
                for lease in self._held.values()
            ]

    # --- of both ----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Keep only the step in work, and say once how far that leaves each lease."""
        with self._lock:
            self._drain()

    def _drain(self) -> None:
        if self._drains:
            return
        self._drains = True
        token, step = self._at
        kept = self._held.get(token)
        self._held.clear()
        if kept is not None:
            self._held[token] = msgspec.structs.replace(kept, stop_step=step + 1)
        reach("worker.draining")
        self._dispatcher.tell(Draining([(token, step + 1)] if kept is not None else [], self.renews))

    def drain_again(self) -> None:
        """Say it again, if it was said: another incarnation of the dispatcher does not know."""
        with self._lock:
            if self._drains:
                held = [(lease.token, lease.stop_step) for lease in self._held.values()]
                self._dispatcher.tell(Draining(held, self.renews))
