"""Control connections: ZeroMQ over TCP, with CURVE.

Only this module imports zmq; its errors leave them as hetstream's.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from hetstream.mpi_dataworkers.errors import (
    AddressInUse,
    AuthenticationError,
    ProtocolError,
    ServiceEnded,
    ServiceError,
    ServiceUnavailable,
)
from hetstream.mpi_dataworkers.transports.auth import Newcomers, most_unproven
from hetstream.mpi_dataworkers.transports.base import (
    BatchReceiver,
    Disconnected,
    Received,
    ReceivedBatch,
    Reconnected,
    ToLoader,
    parse_peer,
    peer_name,
)
from hetstream.mpi_dataworkers.wire.address import ServiceAddress
from hetstream.mpi_dataworkers.wire.codec import Buffer, chop, decode, encode, join
from hetstream.mpi_dataworkers.wire.messages import Message

# A control message as frames of ZeroMQ. Used by the endpoints.

# Frames that libzmq takes; larger messages (datasets in pickled form, which are rare) travel in pieces. What a stranger
# can make a process hold is one frame for each connection, until the handshake's time is over: small frames are what
# lets many connections be in their handshake at once.
CONTROL_FRAME_BYTES = 64 << 10
# A loader's number in its process, in decimal digits.
_NUMBER_BYTES = 19
# As plain numbers: pyzmq's enums cost more than the calls that get them.
NO_WAIT, _MORE_FOLLOWS = int(zmq.NOBLOCK), int(zmq.SNDMORE)


def receive(socket: zmq.Socket[Any]) -> list[zmq.Frame]:
    """Take the frames of a message that has come, which `recv_multipart` needs twice the time for.

    Raises:
        zmq.Again: none has come.
    """
    frame = socket.recv(NO_WAIT, copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(NO_WAIT, copy=False)
        frames.append(frame)
    return frames


def send(socket: zmq.Socket[Any], frames: Sequence[Buffer]) -> None:
    """Send a message, as `send_multipart` does in more than twice the time.

    Raises:
        zmq.Again: there is no connection, nor one in the making, to queue it for.
    """
    for frame in frames[:-1]:
        socket.send(frame, _MORE_FOLLOWS | NO_WAIT)
    socket.send(frames[-1], NO_WAIT)


def frames_of(message: Message, loader: int | None) -> list[Buffer]:
    """Return a control message as it is sent: one frame, and behind it the number of the loader that it is about."""
    first = encode(message)
    frames: list[Buffer] = [first] if loader is None else [first, b"%d" % loader]
    return frames if len(first) < CONTROL_FRAME_BYTES else chop(frames, CONTROL_FRAME_BYTES)


def decode_control(pieces: list[memoryview]) -> tuple[Message, int | None]:
    """Undo `frames_of`.

    Raises:
        ProtocolError: it is none.
    """
    first, *others = join(pieces, CONTROL_FRAME_BYTES) or [b""]
    if not others:
        return decode(first), None
    if len(others) > 1 or not (number := bytes(others[0][:_NUMBER_BYTES])).isdigit():
        raise ProtocolError(
            f"a control message of {len(others) + 1} frames is none: behind the first is a loader's number"
        )
    return decode(first), int(number)


# What CURVE adds to a frame, with room to spare (https://rfc.zeromq.org/spec/26/, MESSAGE command).
_CURVE_BYTES = 256
# Messages taken in one go before replies leave: bounds the delay of the first reply under load.
_BURST = 256
_HANDSHAKE_TIMEOUT_S = 5.0
_CLOSE_LINGER_MS = 1000
# Bytes that no kernel acknowledged in this time, or probes without an answer, mean a cut link. A peer that is stopped
# or busy is not taken for gone: its kernel still acknowledges. Without this, TCP would try for a quarter of an hour,
# ever more seldom, and a link that is back would not be noticed for as long as it had been away.
_CUT_MS = 5000
_PROBE_S = 2
_NUM_PROBES = 3
# Connections to the dispatcher that have brought no message yet; the oldest make room. Each may have it hold a frame,
# so this limits memory, too: 64 MiB. Peers in their handshake that are shut out come again at once, so there must be
# places for all data workers of a large job, which start together: of a herd that is larger the oldest, which are
# nearly done, would make room for others without end.
_MAX_UNPROVEN = 1024
# One attempt to connect; within an attempt the kernel tries ever more seldom too.
_ATTEMPT_MS = 2000
# libzmq's own thread tells the dispatcher this often that a data worker is alive, also while user code holds the GIL.
# Silent for the longer time it is taken for gone: it is stopped, or the network between is cut.
_ALIVE_MS = 500
_GONE_MS = 4000
# The dispatcher asks, too: a peer that was stopped before it had said how long its silence may be is gone after this.
_NO_REPLY_MS = 15_000
# A dispatcher that is stopped is waited for as one that is away.
_NO_ANSWER_MS = 60_000
# Who waits for a dispatcher looks this often whether the service has ended.
_LOOK_MS = 200
# And this often whether the address file names another port.
_LOOK_FOR_PORT_S = 1.0
# A connection that takes longer is made anew: what a stranger at the port has said may have ended it for good.
_CONNECT_ANEW_S = 5.0
# A dispatcher that refuses the key is believed after this: a stranger at the port can say so, too.
_REFUSED_S = 5.0


def new_keys() -> tuple[str, str]:
    """Return a new CURVE key pair as Z85 text: public, secret."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _notice_cuts(socket: zmq.Socket[Any]) -> None:
    """Let a TCP connection over a cut link end, and be made again as soon as the link is back."""
    socket.tcp_maxrt = _CUT_MS
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = _PROBE_S
    socket.tcp_keepalive_cnt = _NUM_PROBES
    socket.connect_timeout = _ATTEMPT_MS


class _Gate:
    """Answers libzmq's questions whom to let in (ZAP 1.0, https://rfc.zeromq.org/spec/27/).

    In the owner's own loop, because pyzmq's authenticator needs a thread with an event loop for the same.

    Args:
        context: whose sockets ask.
        admits: from a peer's public key to a verdict.
    """

    def __init__(self, context: zmq.Context[Any], admits: Callable[[bytes], bool]) -> None:
        self._admits = admits
        self.socket: zmq.Socket[Any] = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer the questions that have come."""
        while True:
            try:
                version, request_id, _, _, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            let_in = mechanism == b"CURVE" and bool(credentials) and self._admits(credentials[0])
            verdict = [b"200", b"OK"] if let_in else [b"400", b"not this job's key"]
            self.socket.send_multipart([version, request_id, *verdict, b"", b""])


def _events_of(monitor: zmq.Socket[Any]) -> Iterator[tuple[int, int]]:
    """What a monitor has to tell: kinds of events, and descriptors."""
    with contextlib.suppress(zmq.Again):
        while True:
            event = recv_monitor_message(monitor, NO_WAIT)
            yield event["event"], event["value"]


class ZmqDispatcherEndpoint:
    """Binds the control socket. See `base.DispatcherEndpoint`.

    Args:
        bind: `tcp://HOST:PORT`; port 0 finds a free one.
        server_secret_key: the dispatcher's CURVE secret, Z85.
        server_public_key: its public half.
        client_public_key: the only client key that is let in.

    Raises:
        AddressInUse: another process has the port.
        ServiceError: the address cannot be bound for another reason.
    """

    def __init__(self, bind: str, server_secret_key: str, server_public_key: str, client_public_key: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        client_key = z85.decode(client_public_key)
        self._gate = _Gate(self._context, lambda given: secrets.compare_digest(given, client_key))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_secretkey = server_secret_key.encode()
        self._socket.curve_publickey = server_public_key.encode()
        self._socket.linger = _CLOSE_LINGER_MS
        self._socket.maxmsgsize = CONTROL_FRAME_BYTES + _CURVE_BYTES
        self._socket.handshake_ivl = int(_HANDSHAKE_TIMEOUT_S * 1000)
        # A peer that comes back after a cut keeps its name: the new connection takes over from the dead one.
        self._socket.router_handover = True
        _notice_cuts(self._socket)
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = _ALIVE_MS, _NO_REPLY_MS
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        host, _, port = bind.removeprefix("tcp://").rpartition(":")
        try:
            self._socket.bind(f"tcp://{host}:{'*' if port == '0' else port}")
        except zmq.ZMQError as error:
            self._close_socket()
            taken = error.errno == zmq.EADDRINUSE
            check = (
                f"Who holds the port: ss -ltnp | grep {port}" if taken else "This host's addresses: ip -brief address"
            )
            kind = AddressInUse if taken else ServiceError
            raise kind(f"dispatcher cannot bind {bind}: {error}. {check}") from error
        # The connection that each process's last message came by: the monitor names a closed one by its descriptor.
        self._process_by_descriptor: dict[int, str] = {}
        self._descriptor_by_process: dict[str, int] = {}
        self._newcomers = Newcomers(most_unproven(_MAX_UNPROVEN))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._gate.socket, zmq.POLLIN)
        self._port = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self._host = host

    @property
    def address(self) -> str:
        return f"tcp://{self._host}:{self._port}"

    def poll(self, timeout_s: float) -> list[Received]:
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._gate.socket in ready:
            self._gate.answer()
        # A connection brings no message before the gate has answered: what the monitor tells of it, or of another one
        # that had its descriptor before, is read by then.
        closed = self._read_closed() if ready.keys() & {self._gate.socket, self._monitor} else []
        received: list[Received] = []
        for _ in range(_BURST):
            try:
                frames = receive(self._socket)
            except zmq.Again:
                self._newcomers.make_room()
                break
            process = frames[0].bytes.hex()
            descriptor = int(frames[0].get(zmq.SRCFD))
            self._newcomers.gone(descriptor)
            self._process_by_descriptor[descriptor], self._descriptor_by_process[process] = process, descriptor
            try:
                message, loader = decode_control([frame.buffer for frame in frames[1:]])
                received.append(Received(peer_name(process, loader), message))
            except ProtocolError as error:
                received.append(Received(process, error))
        return received + closed

    def _read_closed(self) -> list[Received]:
        """Connections that closed. Reported after the messages that they still brought."""
        closed: list[Received] = []
        for event, descriptor in _events_of(self._monitor):
            if event == zmq.EVENT_ACCEPTED:
                self._newcomers.came(descriptor)
                continue
            self._newcomers.gone(descriptor)
            process = self._process_by_descriptor.pop(descriptor, None)
            # Who came back after a cut is not gone with the connection that it had before.
            if process is not None and self._descriptor_by_process.get(process) == descriptor:
                del self._descriptor_by_process[process]
                closed.append(Received(process, Disconnected()))
        return closed

    def send(self, peer: str, message: Message) -> None:
        process, loader = parse_peer(peer)
        send(self._socket, [bytes.fromhex(process), *frames_of(message, loader)])

    def close(self) -> None:
        self._newcomers.close()
        self._close_socket()

    def _close_socket(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._gate.socket.close()
        self._context.term()


class _ZmqControl:
    """A CURVE connection to the dispatcher, with a waker."""

    def __init__(
        self, service: ServiceAddress, peer: str, timeout_s: float, has_ended: Callable[[], bool] = lambda: False
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        # Descriptors are reused: a wake after the close must not write to somebody else's. Reentrant, because a
        # finaliser that runs inside `wake` may call it.
        self._waker_lock = threading.RLock()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._control = self._context.socket(zmq.DEALER)
        self._control.identity = bytes.fromhex(peer)
        self._control.curve_serverkey = service.server_public_key.encode()
        self._control.curve_publickey = service.client_public_key.encode()
        self._control.curve_secretkey = service.client_secret_key.encode()
        self._control.linger = _CLOSE_LINGER_MS
        self._control.maxmsgsize = CONTROL_FRAME_BYTES + _CURVE_BYTES
        # No limit that would make a send wait for a dispatcher that is away; what queues is a few messages a second.
        self._control.sndhwm = 0
        self._control.reconnect_ivl = 50
        self._control.reconnect_ivl_max = 200
        _notice_cuts(self._control)
        self._set_options()
        self._poller = zmq.Poller()
        self._poller.register(self._control, zmq.POLLIN)
        self._poller.register(self._waker, zmq.POLLIN)
        self._service = service
        # When to look for another port of the dispatcher: never while it is there.
        self._next_look = self._connected_at = time.monotonic() + _LOOK_FOR_PORT_S
        try:
            self._connect(timeout_s, has_ended)
        except BaseException:  # also Ctrl-C: there is nobody yet to close it
            self._control.linger = 0
            self._close_control()
            raise

    def _set_options(self) -> None:
        """Set what one kind of peer has beyond the others."""

    def _connect(self, timeout_s: float, has_ended: Callable[[], bool]) -> None:
        """Wait until the dispatcher has let us in, so that a wrong key is an error and not a silence."""
        # It stays open after this: it tells when a connection that was lost is back.
        self._monitor = monitor = self._control.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        )
        self._poller.register(monitor, zmq.POLLIN)
        deadline = time.monotonic() + timeout_s
        refused_until = math.inf
        closed = 0
        self._control.connect(self._service.address)
        while True:
            self._look_for_port()
            address = self._service.address
            if time.monotonic() > refused_until:
                raise AuthenticationError(
                    f"the dispatcher at {address} refused the key in the address file: it belongs to another "
                    "service or an earlier start of it. Use the address file of the running dispatcher."
                )
            left_ms = max(0, int((deadline - time.monotonic()) * 1000))
            if not monitor.poll(min(left_ms, _LOOK_MS)):
                if has_ended():
                    raise ServiceEnded(f"the service at {address} ended before it let this process in")
                if left_ms > 0:
                    continue
                if closed:
                    raise AuthenticationError(
                        f"{address} accepts connections and ends them before the key exchange is complete: the "
                        "server key in the address file is not its key. Use the address file of the running "
                        "dispatcher."
                    )
                raise ServiceUnavailable(
                    f"no dispatcher answered at {address} within {timeout_s:g} s. Is it running, and reachable "
                    "from this host?"
                )
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._next_look = math.inf
                return
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                refused_until = min(refused_until, deadline, time.monotonic() + _REFUSED_S)
                self._connected_at = -math.inf  # libzmq does not try again
            closed += event == zmq.EVENT_DISCONNECTED

    def _look_for_port(self) -> None:
        """Now and then while there is no dispatcher, connect to where the address file says that it is.

        Whoever has its old port cannot answer for it, nor can anybody at the new one: they have not its key. What was
        queued is dropped: it is said anew to a dispatcher that is met again.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_FOR_PORT_S
        before, self._service = self._service, self._service.as_in_file()
        if before.address != self._service.address or now > self._connected_at + _CONNECT_ANEW_S:
            self._connected_at = now
            with contextlib.suppress(zmq.ZMQError):  # libzmq has given it up by itself
                self._control.disconnect(before.address)
            self._control.connect(self._service.address)

    def wake(self) -> None:
        with self._waker_lock:
            if self._waker >= 0:
                os.eventfd_write(self._waker, 1)

    def _poll_sockets(self, timeout_s: float) -> set[Any]:
        if self._next_look < math.inf:  # as there is no dispatcher
            self._look_for_port()
            timeout_s = min(timeout_s, max(0.0, self._next_look - time.monotonic()))
        ready = {source for source, _ in self._poller.poll(int(timeout_s * 1000))}
        if self._waker in ready:
            os.eventfd_read(self._waker)
        return ready

    def _send(self, message: Message, loader: int | None) -> None:
        with contextlib.suppress(zmq.Again):
            send(self._control, frames_of(message, loader))

    def _read_control(self, ready: set[Any]) -> list[tuple[Message | Reconnected, int | None]]:
        messages: list[tuple[Message | Reconnected, int | None]] = []
        for event, _ in _events_of(self._monitor) if self._monitor in ready else ():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._next_look = math.inf
                messages.append((Reconnected(), None))
            elif self._next_look == math.inf:
                self._connected_at = time.monotonic()
                self._next_look = self._connected_at + _LOOK_FOR_PORT_S
        for _ in range(_BURST if self._control in ready else 0):
            try:
                pieces = receive(self._control)
            except zmq.Again:
                break
            self._next_look = math.inf
            messages.append(decode_control([piece.buffer for piece in pieces]))
        return messages

    def _close_control(self) -> None:
        self._control.disable_monitor()
        self._monitor.close(0)
        self._control.close()
        self._context.term()
        with self._waker_lock:
            os.close(self._waker)
            self._waker = -1

    def close(self) -> None:
        self._close_control()


class ZmqWorkerEndpoint(_ZmqControl):
    """See `base.WorkerEndpoint`.

    Args:
        service: address and keys.
        peer: this worker's id, 32 hexadecimal digits.
        timeout_s: how long to wait for the dispatcher.
        has_ended: asked while it waits, several times a second: nobody tells a peer that is not connected.

    Raises:
        ServiceUnavailable, ServiceEnded, AuthenticationError: as they say.
    """

    def send(self, message: Message) -> None:
        self._send(message, None)

    def _set_options(self) -> None:
        self._control.heartbeat_ivl, self._control.heartbeat_ttl = _ALIVE_MS, _GONE_MS
        self._control.heartbeat_timeout = _NO_ANSWER_MS

    def poll(self, timeout_s: float) -> list[Message | Reconnected]:
        ready = self._poll_sockets(timeout_s)
        return [message for message, _ in self._read_control(ready)]

    def close(self, until: float = math.inf) -> None:
        left_s = max(0.0, until - time.monotonic())
        self._control.linger = int(min(left_s * 1000, _CLOSE_LINGER_MS))
        self._close_control()


class ZmqLoaderEndpoint(_ZmqControl):
    """See `base.LoaderEndpoint`; arguments and errors as `ZmqWorkerEndpoint`.

    Args:
        receivers: where batches come, best first. They belong to the endpoint from now on, also if this raises.
    """

    def __init__(
        self, service: ServiceAddress, peer: str, timeout_s: float, receivers: Sequence[BatchReceiver]
    ) -> None:
        self._batch_receivers = receivers
        try:
            super().__init__(service, peer, timeout_s)
        except ServiceError:
            self._close_receivers()
            raise
        for receiver in receivers:
            for source in receiver.sources:
                self._poller.register(source, zmq.POLLIN)

    @property
    def receivers(self) -> list[str]:
        return [address for receiver in self._batch_receivers for address in receiver.addresses]

    def send(self, loader: int, message: Message) -> None:
        self._send(message, loader)

    def poll(self, timeout_s: float) -> tuple[list[ToLoader | Reconnected], list[ReceivedBatch | ProtocolError]]:
        look_again_s = [receiver.look_again_s for receiver in self._batch_receivers]
        ready = self._poll_sockets(min([timeout_s, *look_again_s]))
        messages: list[ToLoader | Reconnected] = []
        for message, loader in self._read_control(ready):
            if isinstance(message, Reconnected):
                messages.append(message)
            elif loader is not None:
                messages.append(ToLoader(loader, message))
            else:
                raise ProtocolError(f"the dispatcher did not read what was sent to it: {getattr(message, 'text', '')}")
        batches: list[ReceivedBatch | ProtocolError] = []
        for receiver, again_s in zip(self._batch_receivers, look_again_s, strict=True):
            if again_s < math.inf or not ready.isdisjoint(receiver.sources):
                batches += receiver.receive()
        return messages, batches

    def close(self) -> None:
        self._close_receivers()
        self._close_control()

    def _close_receivers(self) -> None:
        for receiver in self._batch_receivers:
            receiver.close()
