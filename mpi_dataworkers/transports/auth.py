"""Who sends on a batch connection: proof of the job's key at its start, a seal on each header. Pure.

Used by the transports. Batches are not encrypted (encryption costs more CPU than all the rest of the transport). CURVE
stays on the control connections, and a batch connection starts with a challenge and a response in both directions,
HMAC-SHA256 over both nonces and the role, which a peer without the key can neither answer nor replay.

What is made into Python objects has to come from that peer to the end: who is on the path of the connection could else
put a pickle of his own into a header after the handshake. So each header is sealed, with keyed BLAKE2b
(https://www.rfc-editor.org/rfc/rfc7693) over it and its number, under a key that both nonces are part of: it cannot be
changed, repeated, left out or moved, in this connection or another. The bytes of tensors have no seal.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import time

from hetstream.base.limits import ConnectionLimit
from hetstream.base.posix import resource
from hetstream.base.unix_sockets import peer_of
from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.wire.codec import Buffer
from hetstream.mpi_dataworkers.wire.messages import AnyMessage, Challenge, Hello, Proof

NONCE_BYTES = 32
SEAL_BYTES = 16


def new_nonce() -> bytes:
    """Random bytes that are used once."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(key: bytes, role: str, worker_nonce: bytes, loader_nonce: bytes, receiver: str) -> bytes:
    """Return the answer that only a holder of `key` can give.

    Args:
        key: the job's batch key.
        role: "loader" or "worker", so that no side can send the other's answer back; "headers" for the key of seals.
        worker_nonce, loader_nonce: both sides' nonces.
        receiver: the address the connection was made to, so that an answer cannot be relayed from another one.
    """
    text = b"\0".join([b"hetstream batch connection", role.encode(), receiver.encode(), worker_nonce, loader_nonce])
    return hmac.new(key, text, hashlib.sha256).digest()


def is_proof(given: bytes, key: bytes, role: str, worker_nonce: bytes, loader_nonce: bytes, receiver: str) -> bool:
    """Return whether `given` is the answer of a holder of `key`, compared in constant time."""
    fresh = len(worker_nonce) == NONCE_BYTES and len(loader_nonce) == NONCE_BYTES
    return fresh and hmac.compare_digest(given, prove(key, role, worker_nonce, loader_nonce, receiver))


class Seal:
    """Seals the headers of one connection, or looks at their seals; each end has one.

    Args:
        key: the connection's.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def put_on(self, header: Buffer) -> bytes:
        """Return the next header, with its seal behind it."""
        return b"".join((header, self._next(header)))

    def take_off(self, sealed: memoryview) -> memoryview:
        """Return the next header, if it is what the peer has sent.

        Raises:
            ProtocolError: it is not.
        """
        header, given = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:]
        if not hmac.compare_digest(given, self._next(header)):
            raise ProtocolError(
                f"header {self._count} of a batch connection, of {sealed.nbytes} bytes, was changed on its way, or one "
                "was left out, repeated or moved: somebody is on the network between data worker and trainer"
            )
        return header

    def _next(self, header: Buffer) -> bytes:
        self._count += 1
        number = self._count.to_bytes(16, "little")
        return hashlib.blake2b(header, digest_size=SEAL_BYTES, key=self._key, salt=number).digest()


def _seal(key: bytes, worker_nonce: bytes, loader_nonce: bytes, receiver: str) -> Seal:
    return Seal(prove(key, "headers", worker_nonce, loader_nonce, receiver))


class LoaderHandshake:
    """A loader's side of the start of one connection.

    Args:
        key: the job's batch key.
        receiver: the address that the connection was made to.

    Attributes:
        seal: of what the data worker sends, since it has proved that it holds the key.
    """

    def __init__(self, key: bytes, receiver: str) -> None:
        self._key = key
        self._receiver = receiver
        self._worker_nonce = b""
        self._loader_nonce = b""
        self.seal: Seal | None = None

    @property
    def proven(self) -> bool:
        """Whether the data worker holds the key."""
        return self.seal is not None

    def answer(self, message: AnyMessage, compress: bool = False) -> Challenge | None:
        """Take what the data worker says.

        Args:
            message: its next message.
            compress: ask it to compress.

        Returns:
            The answer; None when it has proved the key.

        Raises:
            ProtocolError: it has not.
        """
        if isinstance(message, Hello) and message.receiver == self._receiver and not self._loader_nonce:
            self._worker_nonce, self._loader_nonce = message.nonce, new_nonce()
            proof = prove(self._key, "loader", self._worker_nonce, self._loader_nonce, self._receiver)
            return Challenge(self._loader_nonce, proof, compress)
        if not isinstance(message, Proof) or not is_proof(
            message.proof, self._key, "worker", self._worker_nonce, self._loader_nonce, self._receiver
        ):
            raise ProtocolError(f"a handshake without the job's key: {type(message).__name__}")
        self.seal = _seal(self._key, self._worker_nonce, self._loader_nonce, self._receiver)
        return None


class WorkerHandshake:
    """A data worker's side of it.

    Args:
        key: the job's batch key.
        worker_id: its id.
        receiver: the address that it connects to.

    Attributes:
        hello: what it says first.
        seal: of what it sends, since the loader has proved that it holds the key.
    """

    def __init__(self, key: bytes, worker_id: str, receiver: str) -> None:
        self._key = key
        self.hello = Hello(worker_id, receiver, new_nonce())
        self.seal = Seal(b"")

    def answer(self, challenge: AnyMessage) -> Proof:
        """Take the loader's challenge, and answer it if that proves the key.

        Raises:
            ProtocolError: it does not.
        """
        nonce, receiver = self.hello.nonce, self.hello.receiver
        if not isinstance(challenge, Challenge) or not is_proof(
            challenge.proof, self._key, "loader", nonce, challenge.nonce, receiver
        ):
            raise ProtocolError("it does not hold this job's key; nothing was sent to it")
        self.seal = _seal(self._key, nonce, challenge.nonce, receiver)
        return Proof(prove(self._key, "worker", nonce, challenge.nonce, receiver))


# Who is at the other end of a connection, as far as the kernel says, and how many strangers may be there.

# A connection that cannot be taken stays, and with it the listener's readiness: without a pause the thread would spin.
_PAUSE_S = 0.01


def most_unproven(most: int) -> int:
    """Return how many connections that have not proved the key a process keeps: an eighth of the descriptors that it
    may have at most, since each takes one, and the training program needs them.

    Args:
        most: where there are many.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit // 8))


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the peer runs as this process's user (SO_PEERCRED, unix(7))."""
    return peer_of(connection)[1] == os.geteuid()


def accept_peer(listener: socket.socket) -> socket.socket | None:
    """Take a connection, not blocking; over a Unix socket only from this process's user.

    Returns:
        None when there is none to take: it has ended already, is another user's, or this process has too many files
        open. Then the data worker comes by another transport, or later.
    """
    try:
        accepted, _ = listener.accept()
    except (BlockingIOError, ConnectionError):
        return None
    except OSError:
        time.sleep(_PAUSE_S)
        return None
    accepted.setblocking(False)
    if accepted.family == socket.AF_UNIX and not is_own_user(accepted):
        accepted.close()
        return None
    return accepted


def _address_of(connection: socket.socket) -> str:
    """The host at the other end; "" of one that is gone."""
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return ""


class Newcomers:
    """Connections that libzmq has accepted and that have brought no message: strangers, or peers in their handshake.

    libzmq sets them a time but no number. Each is held by a descriptor of our own, because libzmq's may be another
    connection's by the time that we use it, and what is shut down must not be a peer's.

    Args:
        most: of them; the oldest of the address with the most make room.
    """

    def __init__(self, most: int) -> None:
        self._held: dict[int, socket.socket] = {}  # by libzmq's descriptor
        self._places: ConnectionLimit[int] = ConnectionLimit(most)

    def came(self, descriptor: int) -> None:
        """libzmq has accepted a connection. If it is closed already, `gone` follows before the next `make_room`."""
        self.gone(descriptor)
        with contextlib.suppress(OSError):
            newcomer = self._held[descriptor] = socket.socket(fileno=os.dup(descriptor))
            self._places.enter(descriptor, _address_of(newcomer))

    def gone(self, descriptor: int) -> None:
        """It has closed, or brought a message."""
        self._places.leave(descriptor)
        if (newcomer := self._held.pop(descriptor, None)) is not None:
            newcomer.close()

    def make_room(self) -> None:
        """End those that are too many. Call it when nothing is left to be read of the monitor."""
        while (descriptor := self._places.one_too_many()) is not None:
            with contextlib.suppress(OSError):
                self._held[descriptor].shutdown(socket.SHUT_RDWR)
            self.gone(descriptor)

    def close(self) -> None:
        """Let go of all."""
        for descriptor in list(self._held):
            self.gone(descriptor)
