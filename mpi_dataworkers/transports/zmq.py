"""ZeroMQ over TCP: CURVE on control connections, proof of the job's key on batch connections.

The only module that imports zmq; its errors leave it as hetstream's. See `proof.py` for why batches are authenticated
and not encrypted.
"""

from __future__ import annotations

import os
import secrets
import socket as socketlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from mpi_dataworkers.address import ServiceAddress
from mpi_dataworkers.codec import Buffer, decode, encode
from mpi_dataworkers.errors import AuthenticationError, ProtocolError, ServiceError, ServiceUnavailable
from mpi_dataworkers.messages import Batch, BatchFailed, Challenge, Hello, Message, Proof
from mpi_dataworkers.transports.base import Disconnected, PeerUnreachable, Received, ReceivedBatch
from mpi_dataworkers.transports.proof import is_proof, new_nonce, prove

# Messages taken in one go before replies leave: bounds the delay of the first reply under load.
_BURST = 256
# How long a data worker waits for a loader to answer: a loader that is alive answers from its own thread at once.
_HANDSHAKE_TIMEOUT_S = 5.0
# A batch connection without any traffic for this long is broken (ZMTP PING and PONG, every second).
_SILENCE_MS = 4000
_PING_MS = 1000
_CLOSE_LINGER_MS = 1000
# Loaders come and go, and a connection that its loader closed stays a socket here (libzmq allows 1023).
_MAX_CONNECTIONS = 64
# Past this many connections, those that never proved the key are forgotten: strangers cannot fill the memory.
_MAX_SENDERS = 4096


def new_keys() -> tuple[str, str]:
    """A new CURVE key pair as Z85 text: public, secret."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def local_address_towards(address: str) -> str:
    """This host's IP address on the route to `tcp://HOST:PORT`; no packet is sent."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socketlib.socket(socketlib.AF_INET, socketlib.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


class _Gate:
    """Lets in the job's client key and no other: answers libzmq's questions (ZAP 1.0, https://rfc.zeromq.org/spec/27/).

    In the dispatcher's own loop, because pyzmq's authenticator needs a thread with an event loop for the same.
    """

    def __init__(self, context: zmq.Context[Any], client_public_key: str) -> None:
        self._key = z85.decode(client_public_key)
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
            key = credentials[0] if mechanism == b"CURVE" and credentials else b""
            verdict = [b"200", b"OK"] if secrets.compare_digest(key, self._key) else [b"400", b"not this job's key"]
            self.socket.send_multipart([version, request_id, *verdict, b"", b""])


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
        self._gate = _Gate(self._context, client_public_key)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_secretkey = server_secret_key.encode()
        self._socket.curve_publickey = server_public_key.encode()
        self._socket.linger = _CLOSE_LINGER_MS
        # A peer that comes back after a cut keeps its name: the new connection takes over from the dead one.
        self._socket.router_handover = True
        host, _, port = bind.removeprefix("tcp://").rpartition(":")
        try:
            self._socket.bind(f"tcp://{host}:{'*' if port == '0' else port}")
        except zmq.ZMQError as error:
            self._close_socket()
            raise ServiceError(
                f"dispatcher cannot bind {bind}: {error}. Another process may hold the port: ss -ltnp | grep {port}"
            ) from error
        # The connection that each peer's last message came by: the monitor names a closed one by its descriptor.
        self._peer_by_descriptor: dict[int, str] = {}
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
            self._peer_by_descriptor[int(frames[0].get(zmq.SRCFD))] = peer
            try:
                message: Message | ProtocolError = decode(frames[1].buffer if len(frames) == 2 else b"")
            except ProtocolError as error:
                message = error
            received.append(Received(peer, message))
        return received + closed

    def _read_closed(self) -> list[Received]:
        """Connections that closed. Reported after the messages that they still brought."""
        closed: list[Received] = []
        while self._monitor.poll(0):
            peer = self._peer_by_descriptor.pop(recv_monitor_message(self._monitor)["value"], None)
            if peer is not None:
                closed.append(Received(peer, Disconnected()))
        return closed

    def send(self, peer: str, message: Message) -> None:
        self._socket.send_multipart([bytes.fromhex(peer), encode(message)])

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

    def __init__(self, service: ServiceAddress, peer: str, timeout_s: float) -> None:
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
        # No limit that would make a send wait for a dispatcher that is away; what queues is a few messages a second.
        self._control.sndhwm = 0
        self._control.reconnect_ivl = 50
        self._control.reconnect_ivl_max = 500
        self._poller = zmq.Poller()
        self._poller.register(self._control, zmq.POLLIN)
        self._poller.register(self._waker, zmq.POLLIN)
        try:
            self._connect(service.address, timeout_s)
        except ServiceError:
            self._control.linger = 0
            self._close_control()
            raise

    def _connect(self, address: str, timeout_s: float) -> None:
        """Wait until the dispatcher has let us in, so that a wrong key is an error and not a silence."""
        monitor = self._control.get_monitor_socket()
        deadline = time.monotonic() + timeout_s
        closed = 0
        try:
            self._control.connect(address)
            while True:
                if not monitor.poll(max(0, int((deadline - time.monotonic()) * 1000))):
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
        finally:
            self._control.disable_monitor()
            monitor.close(0)

    def send(self, message: Message) -> None:
        self._control.send(encode(message))

    def wake(self) -> None:
        with self._waker_lock:
            if self._waker >= 0:
                os.eventfd_write(self._waker, 1)

    def _poll_sockets(self, timeout_s: float) -> set[Any]:
        ready = {source for source, _ in self._poller.poll(int(timeout_s * 1000))}
        if self._waker in ready:
            os.eventfd_read(self._waker)
        return ready

    def _read_control(self) -> list[Message]:
        messages: list[Message] = []
        for _ in range(_BURST):
            try:
                messages.append(decode(self._control.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return messages

    def _close_control(self) -> None:
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

    Raises:
        ServiceUnavailable, AuthenticationError: as they say.
    """

    def poll(self, timeout_s: float) -> list[Message]:
        return self._read_control() if self._control in self._poll_sockets(timeout_s) else []


@dataclass
class _Sender:
    """A data worker's connection as the loader sees it."""

    worker_nonce: bytes
    loader_nonce: bytes
    proven: bool = False


_STRANGER = _Sender(b"", b"")


class ZmqLoaderEndpoint(_ZmqControl):
    """See `base.LoaderEndpoint`; arguments and errors as `ZmqWorkerEndpoint`."""

    def __init__(self, service: ServiceAddress, peer: str, timeout_s: float) -> None:
        super().__init__(service, peer, timeout_s)
        self._key = bytes.fromhex(service.batch_key)
        self._senders: dict[bytes, _Sender] = {}
        self._batches = self._context.socket(zmq.ROUTER)
        self._batches.linger = 0
        # The dispatcher leases only what fits the loader's window; a limit here would only stall the last frames.
        self._batches.rcvhwm = 0
        try:
            host = local_address_towards(service.address)
            self._receiver = f"tcp://{host}:{self._batches.bind_to_random_port(f'tcp://{host}')}"
        except (OSError, zmq.ZMQError) as error:
            self._control.linger = 0
            self.close()
            raise ServiceError(f"no socket for batches on the route to {service.address}: {error}") from error
        self._poller.register(self._batches, zmq.POLLIN)

    @property
    def receiver(self) -> str:
        return self._receiver

    def poll(self, timeout_s: float) -> tuple[list[Message], list[ReceivedBatch | ProtocolError]]:
        ready = self._poll_sockets(timeout_s)
        messages = self._read_control() if self._control in ready else []
        batches: list[ReceivedBatch | ProtocolError] = []
        if self._batches in ready:
            for _ in range(_BURST):
                try:
                    sender, *frames = self._batches.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                batch = self._take(sender.bytes, [frame.buffer for frame in frames])
                if batch is not None:
                    batches.append(batch)
        return messages, batches

    def _take(self, sender: bytes, frames: list[memoryview]) -> ReceivedBatch | ProtocolError | None:
        """Pass on a batch of a proven sender; answer handshakes; drop everything else."""
        known = self._senders.get(sender)
        try:
            message = decode(frames[0] if frames else b"")
        except ProtocolError as error:
            # A stranger's bytes are not worth a line in the log; a worker that sends garbage is a stranger from now on.
            return error if self._senders.pop(sender, _STRANGER).proven else None
        if isinstance(message, Hello):
            if len(self._senders) >= _MAX_SENDERS:
                self._senders = {name: one for name, one in self._senders.items() if one.proven}
            known = self._senders[sender] = _Sender(message.nonce, new_nonce())
            proof = prove(self._key, "loader", known.worker_nonce, known.loader_nonce, self._receiver)
            self._batches.send_multipart([sender, encode(Challenge(known.loader_nonce, proof))])
        elif isinstance(message, Proof) and known is not None and not known.proven:
            known.proven = is_proof(
                message.proof, self._key, "worker", known.worker_nonce, known.loader_nonce, self._receiver
            )
            if not known.proven:
                del self._senders[sender]
        elif isinstance(message, Batch | BatchFailed) and known is not None and known.proven:
            return ReceivedBatch(message, frames[1:])
        return None

    def close(self) -> None:
        self._batches.close()
        self._close_control()


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

    def send(self, receiver: str, header: Batch | BatchFailed, frames: Sequence[Buffer]) -> None:
        connection = self._connections.pop(receiver, None) or self._connect(receiver)
        self._connections[receiver] = connection  # in order of use, for `_connect`
        try:
            connection.send_multipart([encode(header), *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again as error:
            self.drop(receiver)
            raise PeerUnreachable(f"the connection to the loader at {receiver} is gone") from error

    def _connect(self, receiver: str) -> zmq.Socket[Any]:
        if len(self._connections) >= _MAX_CONNECTIONS:
            self.drop(next(iter(self._connections)))
        connection: zmq.Socket[Any] = self._context.socket(zmq.DEALER)
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
            connection.connect(receiver)
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
        connection.send(encode(Hello(self._worker_id, nonce)))
        if not connection.poll(milliseconds_left()):
            raise PeerUnreachable(f"the loader at {receiver} did not answer within {_HANDSHAKE_TIMEOUT_S:g} s")
        challenge = decode(connection.recv())
        if not isinstance(challenge, Challenge) or not is_proof(
            challenge.proof, self._key, "loader", nonce, challenge.nonce, receiver
        ):
            raise PeerUnreachable(f"the process at {receiver} does not hold this job's key; nothing was sent to it")
        connection.send(encode(Proof(prove(self._key, "worker", nonce, challenge.nonce, receiver))))

    def drop(self, receiver: str) -> None:
        connection = self._connections.pop(receiver, None)
        if connection is not None:
            connection.close()

    def close(self, linger_s: float) -> None:
        for connection in self._connections.values():
            connection.linger = int(linger_s * 1000)
            connection.close()
        self._connections.clear()
        self._context.term()
