"""ZeroMQ over TCP and, for batches on one host, Unix sockets: CURVE on control connections, proof of the job's key on
batch connections.

The only module that imports zmq; its errors leave it as hetstream's. See `proof.py` for why batches are authenticated
and not encrypted.
"""

from __future__ import annotations

import math
import os
import secrets
import socket as socketlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from mpi_dataworkers.address import ServiceAddress
from mpi_dataworkers.codec import Buffer, Leaf, chop, decode, encode, in_one_piece, join
from mpi_dataworkers.errors import AuthenticationError, ProtocolError, ServiceEnded, ServiceError, ServiceUnavailable
from mpi_dataworkers.messages import Challenge, Compressed, Delivery, Hello, Message, Proof
from mpi_dataworkers.transports.base import (
    BatchReceiver,
    Disconnected,
    PeerUnreachable,
    Received,
    ReceivedBatch,
    Reconnected,
    rail_of,
)
from mpi_dataworkers.transports.compression import compress, decompress
from mpi_dataworkers.transports.door import LOOK_S, Door
from mpi_dataworkers.transports.proof import TicketGate, is_proof, new_nonce, new_ticket, prove

# Frames that libzmq takes; larger ones travel in pieces. What a stranger can make a process hold is one frame for each
# connection, until the handshake's time is over. Control messages of more than a frame (datasets in pickled form) are
# rare; batches of more than a frame cost a copy in the loader. The door of a batch socket cuts strangers off sooner.
CONTROL_FRAME_BYTES = 1 << 20
BATCH_FRAME_BYTES = 64 << 20
_ANSWER_BYTES = 64 << 10
# What CURVE adds to a frame, with room to spare (https://rfc.zeromq.org/spec/26/, MESSAGE command).
_CURVE_BYTES = 256
# Messages taken in one go before replies leave: bounds the delay of the first reply under load.
_BURST = 256
# How long a data worker waits for a loader to answer: a loader that is alive answers from its own thread at once.
_HANDSHAKE_TIMEOUT_S = 5.0
# A batch connection without any traffic for this long is broken (ZMTP PING and PONG, every second).
_SILENCE_MS = 4000
_PING_MS = 1000
_CLOSE_LINGER_MS = 1000
# Bytes that no kernel acknowledged for so long, or probes without an answer, mean a cut link. A peer that is stopped or
# busy is not taken for gone: its kernel still acknowledges. Without this, TCP would try for a quarter of an hour, ever
# more seldom, and a link that is back would not be noticed for as long as it had been away.
_CUT_MS = 5000
_PROBE_S = 2
_NUM_PROBES = 3
# One attempt to connect; within an attempt the kernel tries ever more seldom too.
_ATTEMPT_MS = 2000
# Who waits for a dispatcher looks this often whether the service has ended.
_LOOK_MS = 200
# Loaders come and go, and a connection that its loader closed stays a socket here (libzmq allows 1023).
_MAX_CONNECTIONS = 64
# Past this many connections, those that never proved the key are forgotten: strangers cannot fill the memory.
_MAX_SENDERS = 4096


def new_keys() -> tuple[str, str]:
    """A new CURVE key pair as Z85 text: public, secret."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _notice_cuts(socket: zmq.Socket[Any]) -> None:
    """Let a TCP connection over a cut link end, and be made again as soon as the link is back."""
    socket.tcp_maxrt = _CUT_MS
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = _PROBE_S
    socket.tcp_keepalive_cnt = _NUM_PROBES
    socket.connect_timeout = _ATTEMPT_MS


def local_address_towards(address: str) -> str:
    """This host's IP address on the route to `tcp://HOST:PORT`; no packet is sent."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socketlib.socket(socketlib.AF_INET, socketlib.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


class _Gate:
    """Answers libzmq's questions whom to let in (ZAP 1.0, https://rfc.zeromq.org/spec/27/).

    In the owner's own loop, because pyzmq's authenticator needs a thread with an event loop for the same.

    Args:
        context: whose sockets ask.
        mechanism: `CURVE` or `PLAIN`; no other gets in.
        admits: from the peer's credentials to a verdict.
    """

    def __init__(self, context: zmq.Context[Any], mechanism: bytes, admits: Callable[[list[bytes]], bool]) -> None:
        self._mechanism = mechanism
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
            let_in = mechanism == self._mechanism and self._admits(credentials)
            verdict = [b"200", b"OK"] if let_in else [b"400", b"not this job's key"]
            self.socket.send_multipart([version, request_id, *verdict, b"", b""])


def _decode_control(pieces: list[memoryview]) -> Message:
    """Read a control message, which has one frame.

    Raises:
        ProtocolError: it is none.
    """
    frames = join(pieces, CONTROL_FRAME_BYTES)
    return decode(frames[0] if len(frames) == 1 else b"")


class ZmqDispatcherEndpoint:
    """Binds the control socket. See `base.DispatcherEndpoint`.

    Args:
        bind: `tcp://HOST:PORT`; port 0 finds a free one.
        server_secret_key: the dispatcher's CURVE secret, Z85.
        server_public_key: its public half.
        client_public_key: the only client key that is let in.

    Raises:
        ServiceError: the address cannot be bound.
    """

    def __init__(self, bind: str, server_secret_key: str, server_public_key: str, client_public_key: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        client_key = z85.decode(client_public_key)
        self._gate = _Gate(
            self._context, b"CURVE", lambda given: bool(given) and secrets.compare_digest(given[0], client_key)
        )
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
        host, _, port = bind.removeprefix("tcp://").rpartition(":")
        try:
            self._socket.bind(f"tcp://{host}:{'*' if port == '0' else port}")
        except zmq.ZMQError as error:
            self._close_socket()
            taken = error.errno == zmq.EADDRINUSE
            check = (
                f"Who holds the port: ss -ltnp | grep {port}" if taken else "This host's addresses: ip -brief address"
            )
            raise ServiceError(f"dispatcher cannot bind {bind}: {error}. {check}") from error
        # The connection that each peer's last message came by: the monitor names a closed one by its descriptor.
        self._peer_by_descriptor: dict[int, str] = {}
        self._descriptor_by_peer: dict[str, int] = {}
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
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
        self._poller.poll(int(timeout_s * 1000))
        self._gate.answer()
        closed = self._read_closed()
        received: list[Received] = []
        for _ in range(_BURST):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            peer = frames[0].bytes.hex()
            descriptor = int(frames[0].get(zmq.SRCFD))
            self._peer_by_descriptor[descriptor], self._descriptor_by_peer[peer] = peer, descriptor
            try:
                message: Message | ProtocolError = _decode_control([frame.buffer for frame in frames[1:]])
            except ProtocolError as error:
                message = error
            received.append(Received(peer, message))
        return received + closed

    def _read_closed(self) -> list[Received]:
        """Connections that closed. Reported after the messages that they still brought."""
        closed: list[Received] = []
        while self._monitor.poll(0):
            descriptor = recv_monitor_message(self._monitor)["value"]
            peer = self._peer_by_descriptor.pop(descriptor, None)
            # A peer that came back after a cut is not gone with the connection that it had before.
            if peer is not None and self._descriptor_by_peer.get(peer) == descriptor:
                del self._descriptor_by_peer[peer]
                closed.append(Received(peer, Disconnected()))
        return closed

    def send(self, peer: str, message: Message) -> None:
        self._socket.send_multipart([bytes.fromhex(peer), *chop([encode(message)], CONTROL_FRAME_BYTES)])

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._close_socket()

    def _close_socket(self) -> None:
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
        self._poller = zmq.Poller()
        self._poller.register(self._control, zmq.POLLIN)
        self._poller.register(self._waker, zmq.POLLIN)
        try:
            self._connect(service.address, timeout_s, has_ended)
        except BaseException:  # also Ctrl-C: there is nobody yet to close it
            self._control.linger = 0
            self._close_control()
            raise

    def _connect(self, address: str, timeout_s: float, has_ended: Callable[[], bool]) -> None:
        """Wait until the dispatcher has let us in, so that a wrong key is an error and not a silence."""
        # It stays open after this: it tells when a connection that was lost is back.
        self._monitor = monitor = self._control.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        )
        self._poller.register(monitor, zmq.POLLIN)
        deadline = time.monotonic() + timeout_s
        closed = 0
        self._control.connect(address)
        while True:
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
                return
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise AuthenticationError(
                    f"the dispatcher at {address} refused the key in the address file: it belongs to another "
                    "service or an earlier start of it. Use the address file of the running dispatcher."
                )
            closed += event == zmq.EVENT_DISCONNECTED

    def send(self, message: Message) -> None:
        self._control.send_multipart(chop([encode(message)], CONTROL_FRAME_BYTES))

    def wake(self) -> None:
        with self._waker_lock:
            if self._waker >= 0:
                os.eventfd_write(self._waker, 1)

    def _poll_sockets(self, timeout_s: float) -> set[Any]:
        ready = {source for source, _ in self._poller.poll(int(timeout_s * 1000))}
        if self._waker in ready:
            os.eventfd_read(self._waker)
        return ready

    def _read_control(self) -> list[Message | Reconnected]:
        messages: list[Message | Reconnected] = []
        while self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                messages.append(Reconnected())
        for _ in range(_BURST):
            try:
                pieces = self._control.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            messages.append(_decode_control([piece.buffer for piece in pieces]))
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

    def poll(self, timeout_s: float) -> list[Message | Reconnected]:
        ready = self._poll_sockets(timeout_s)
        return self._read_control() if ready & {self._control, self._monitor} else []


@dataclass
class _Sender:
    """A data worker's connection as the loader sees it."""

    receiver: str
    worker_nonce: bytes
    loader_nonce: bytes
    proven: bool = False


_STRANGER = _Sender("", b"", b"")


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

    def poll(self, timeout_s: float) -> tuple[list[Message | Reconnected], list[ReceivedBatch | ProtocolError]]:
        ready = self._poll_sockets(min([timeout_s, *(receiver.look_again_s for receiver in self._batch_receivers)]))
        messages = self._read_control() if ready & {self._control, self._monitor} else []
        batches: list[ReceivedBatch | ProtocolError] = []
        for receiver in self._batch_receivers:
            if receiver.look_again_s < math.inf or any(source in ready for source in receiver.sources):
                batches += receiver.receive()
        return messages, batches

    def close(self) -> None:
        self._close_receivers()
        self._close_control()

    def _close_receivers(self) -> None:
        for receiver in self._batch_receivers:
            receiver.close()


class ZmqBatchReceiver:
    """See `base.BatchReceiver`. One socket for all addresses.

    A connection is let in for a ticket under the job's key, so that ZeroMQ reads no message of a stranger, and proves
    the key by challenge and response before a batch of it counts.

    Args:
        batch_key: the job's batch key in hex.
        binds: `tcp://HOST:*` or `ipc://NAME`, best first.
        compress: ask data workers that come over TCP to compress what shrinks well.

    Raises:
        ServiceError: one of them cannot be bound.
    """

    def __init__(self, batch_key: str, binds: Sequence[str], compress: bool = False) -> None:
        self._key = bytes.fromhex(batch_key)
        self._compress = compress
        self._senders: dict[bytes, _Sender] = {}
        self.addresses: list[str] = []
        self._tickets = TicketGate(self._key, self.addresses)
        self._context: zmq.Context[Any] = zmq.Context()
        self._gate = _Gate(self._context, b"PLAIN", self._admits)
        self._batches = self._context.socket(zmq.ROUTER)
        self._batches.plain_server = True
        self._batches.linger = 0
        # The dispatcher leases only what fits the loader's window; a limit here would only stall the last frames.
        self._batches.rcvhwm = 0
        self._batches.maxmsgsize = BATCH_FRAME_BYTES
        self._batches.handshake_ivl = int(_HANDSHAKE_TIMEOUT_S * 1000)
        _notice_cuts(self._batches)
        self._door = Door(self.addresses)
        self._monitor = self._batches.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.sources: list[Any] = [self._batches, self._gate.socket, self._monitor]
        try:
            for bind in binds:
                self._batches.bind(bind)
                self.addresses.append(self._batches.getsockopt_string(zmq.LAST_ENDPOINT))
        except zmq.ZMQError as error:
            self.close()
            raise ServiceError(f"no socket for batches at {', '.join(binds)}: {error}") from error

    def _admits(self, credentials: list[bytes]) -> bool:
        return len(credentials) == 2 and self._tickets.admits(*credentials)

    @property
    def look_again_s(self) -> float:
        return LOOK_S if self._door else math.inf

    def receive(self) -> list[ReceivedBatch | ProtocolError]:
        self._gate.answer()
        self._watch_door()
        batches: list[ReceivedBatch | ProtocolError] = []
        for _ in range(_BURST):
            try:
                sender, *frames = self._batches.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if self._door:
                self._door.spoke(int(sender.get(zmq.SRCFD)))
            batch = self._take(sender.bytes, [frame.buffer for frame in frames])
            if batch is not None:
                batches.append(batch)
        return batches

    def _watch_door(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._door.came(event["value"])
            else:
                self._door.spoke(event["value"])
        self._door.look()

    def _take(self, sender: bytes, pieces: list[memoryview]) -> ReceivedBatch | ProtocolError | None:
        """Pass on a batch of a proven sender; answer handshakes; drop everything else."""
        known = self._senders.get(sender, _STRANGER)
        try:
            frames = join(pieces, BATCH_FRAME_BYTES) if known.proven else list(pieces[:1])
            message = decode(frames[0] if frames else b"")
            if known.proven and isinstance(message, Compressed):
                frames = decompress(frames[1:], message.sizes)
                message = decode(frames[0] if frames else b"")
        except ProtocolError as error:
            # A stranger's bytes are not worth a line in the log; a worker that sends garbage is a stranger from now on.
            return error if self._senders.pop(sender, _STRANGER).proven else None
        if isinstance(message, Hello):
            if len(self._senders) >= _MAX_SENDERS:
                self._senders = {name: one for name, one in self._senders.items() if one.proven}
            if message.receiver in self.addresses:
                known = self._senders[sender] = _Sender(message.receiver, message.nonce, new_nonce())
                proof = prove(self._key, "loader", known.worker_nonce, known.loader_nonce, known.receiver)
                compress = self._compress and rail_of(known.receiver) == "tcp"
                self._batches.send_multipart([sender, encode(Challenge(known.loader_nonce, proof, compress))])
        elif isinstance(message, Proof) and known is not _STRANGER and not known.proven:
            known.proven = is_proof(
                message.proof, self._key, "worker", known.worker_nonce, known.loader_nonce, known.receiver
            )
            if not known.proven:
                del self._senders[sender]
        elif isinstance(message, Delivery) and known.proven:
            return ReceivedBatch(message, frames[1:], rail_of(known.receiver))
        return None

    def close(self) -> None:
        self._batches.disable_monitor()
        self._monitor.close(0)
        self._batches.close()
        self._gate.socket.close()
        self._context.term()


def _look_for(receiver: str) -> None:
    """Find out at once whether a Unix socket is of this host: ZeroMQ would wait for it to appear.

    Raises:
        PeerUnreachable: it is not.
    """
    with socketlib.socket(socketlib.AF_UNIX, socketlib.SOCK_STREAM) as probe:
        try:
            probe.connect(receiver.removeprefix("ipc://").replace("@", "\0", 1))
        except OSError as error:
            raise PeerUnreachable(f"{receiver} is not on this host ({error})") from error


def _connect_at_once(connection: zmq.Socket[Any], receiver: str, deadline: float) -> None:
    """Connect, and wait until the loader has let us in: a refusal is an error now, not a silence until the deadline.

    Raises:
        PeerUnreachable: nobody is there, the ticket is refused, or the deadline passed.
    """
    monitor = connection.get_monitor_socket()
    try:
        connection.connect(receiver)
        while monitor.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise PeerUnreachable(f"the process at {receiver} does not know this job's key; nothing was sent to it")
            if event in (zmq.EVENT_CLOSED, zmq.EVENT_DISCONNECTED):
                raise PeerUnreachable(f"nobody at {receiver} takes connections of this job")
        raise PeerUnreachable(f"the loader at {receiver} did not answer within {_HANDSHAKE_TIMEOUT_S:g} s")
    finally:
        connection.disable_monitor()
        monitor.close(0)


class ZmqBatchSender:
    """See `base.BatchSender`.

    Args:
        batch_key: the job's batch key in hex.
        worker_id: this worker's id.
    """

    def __init__(self, batch_key: str, worker_id: str) -> None:
        self._key = bytes.fromhex(batch_key)
        self._worker_id = worker_id
        self._context: zmq.Context[Any] = zmq.Context()
        self._connections: dict[str, zmq.Socket[Any]] = {}
        self._compressing: set[str] = set()  # receivers that asked for it

    def send(self, receiver: str, header: Delivery, frames: Sequence[Leaf]) -> None:
        connection = self._connections.pop(receiver, None) or self._connect(receiver)
        self._connections[receiver] = connection  # in order of use, for `_connect`
        try:
            whole: list[Buffer] = [encode(header), *map(in_one_piece, frames)]
            if receiver in self._compressing:
                smaller, sizes = compress(whole)
                whole = [encode(Compressed(sizes)), *smaller] if max(sizes) >= 0 else whole
            pieces = chop(whole, BATCH_FRAME_BYTES)
            connection.send_multipart(pieces, zmq.NOBLOCK, copy=False)
        except zmq.Again as error:
            self.drop(receiver)
            raise PeerUnreachable(f"the connection to the loader at {receiver} is gone") from error

    def _connect(self, receiver: str) -> zmq.Socket[Any]:
        if len(self._connections) >= _MAX_CONNECTIONS:
            self.drop(next(iter(self._connections)))
        if receiver.startswith("ipc:"):
            _look_for(receiver)
        connection: zmq.Socket[Any] = self._context.socket(zmq.DEALER)
        connection.plain_username, connection.plain_password = new_ticket(self._key, receiver)
        connection.maxmsgsize = _ANSWER_BYTES  # nothing comes but the answer to the handshake
        # A name nobody can guess: whoever could claim it after a cut would inherit the proof given on it.
        connection.identity = b"w" + secrets.token_bytes(16)
        connection.linger = 0
        connection.sndhwm = 0  # the loader's window bounds what is leased, so it bounds what is queued
        connection.reconnect_ivl = -1  # a new connection needs a new proof: never reconnect silently
        connection.immediate = True
        connection.heartbeat_ivl = _PING_MS
        connection.heartbeat_timeout = _SILENCE_MS
        deadline = time.monotonic() + _HANDSHAKE_TIMEOUT_S
        try:
            _connect_at_once(connection, receiver, deadline)
            self._handshake(connection, receiver, deadline)
        except (zmq.ZMQError, ProtocolError) as error:
            connection.close()
            raise PeerUnreachable(f"no batch connection to the loader at {receiver}: {error}") from error
        except PeerUnreachable:
            connection.close()
            raise
        self._connections[receiver] = connection
        return connection

    def _handshake(self, connection: zmq.Socket[Any], receiver: str, deadline: float) -> None:
        def milliseconds_left() -> int:
            return max(0, int((deadline - time.monotonic()) * 1000))

        nonce = new_nonce()
        connection.sndtimeo = milliseconds_left()
        connection.send(encode(Hello(self._worker_id, receiver, nonce)))
        if not connection.poll(milliseconds_left()):
            raise PeerUnreachable(f"the loader at {receiver} did not answer within {_HANDSHAKE_TIMEOUT_S:g} s")
        challenge = decode(connection.recv())
        if not isinstance(challenge, Challenge) or not is_proof(
            challenge.proof, self._key, "loader", nonce, challenge.nonce, receiver
        ):
            raise PeerUnreachable(f"the process at {receiver} does not hold this job's key; nothing was sent to it")
        connection.send(encode(Proof(prove(self._key, "worker", nonce, challenge.nonce, receiver))))
        if challenge.compress:
            self._compressing.add(receiver)

    def drop(self, receiver: str) -> None:
        self._compressing.discard(receiver)
        connection = self._connections.pop(receiver, None)
        if connection is not None:
            connection.close()

    def close(self, linger_s: float) -> None:
        for connection in self._connections.values():
            connection.linger = int(linger_s * 1000)
            connection.close()
        self._connections.clear()
        self._context.term()
