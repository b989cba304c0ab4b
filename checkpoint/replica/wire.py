"""How checkpoint writers find each other, know each other, and talk.

They find each other by small files in the checkpoint directory, mode 0600:

    DIR/replicas/key-3              random key of attempt 3; rank 0 writes it before any other rank starts
    DIR/replicas/rank-00001.json    where the checkpoint writer of rank 1 listens, and in which attempt

Who can read the directory is the user who trains; others have no key and get nothing. On a connection between two
checkpoint writers, or a trainer and a checkpoint writer, both prove that they know it:

    stranger or peer   magic, nonce            ->
                       <-                         nonce, proof
                       proof                   ->
                       request (JSON)          ->
                       <-                         reply (JSON)
    then one side sends the record: metadata, payload, whether it was still the same at the end, XXH3 of all

Nothing is allocated before the proof, which is HMAC-SHA256 over both nonces, the role and the receiver. Every wait has
an end. The bytes are not encrypted; the checksum finds damage and no forgery by who is on the way.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from hetstream.base import typed_json
from hetstream.base.files import Directory
from hetstream.checkpoint.errors import DamagedSegment, ForeignOwner, ReplicaError, reach
from hetstream.checkpoint.memory.segment import Header, Segment
from hetstream.checkpoint.record.layout import Checksum, Generation

_FOLDER = "replicas"


_KEY_BYTES = 32


_MAX_FILE_BYTES = 4096


_TRIES = 3


class Endpoint(msgspec.Struct, frozen=True):
    """Where a checkpoint writer listens.

    Attributes:
        attempt: of the job, when it began to.
        rank: of its trainer.
        address: name or number of the host.
        port: of TCP.
    """

    attempt: int
    rank: int
    address: str
    port: int


def make_key(directory: Path, attempt: int) -> None:
    """Write a new attempt's key; what earlier attempts left goes. For rank 0.

    Raises:
        OSError: the directory cannot be written to, or is not this user's alone.
    """
    key = secrets.token_hex(_KEY_BYTES).encode()
    for _ in range(_TRIES):
        # The last checkpoint writer of the attempt before may remove the folder meanwhile.
        with contextlib.suppress(FileNotFoundError), _folder(directory, make=True) as folder:
            for left_over in folder.names():
                folder.unlink(left_over, missing_ok=True)
            return folder.write_whole(_key_name(attempt), key)
    raise FileNotFoundError(f"{directory / _FOLDER} is removed again and again")


def read_key(directory: Path, attempt: int) -> bytes:
    """Return the key of an attempt.

    Raises:
        ReplicaError: there is none.
        ForeignOwner: it is another user's, or others can read it.
    """
    text = _read_private(directory, _key_name(attempt))
    key = bytes.fromhex(text.decode("ascii")) if text and len(text) == 2 * _KEY_BYTES else b""
    if len(key) != _KEY_BYTES:
        raise ReplicaError(
            f"{directory / _FOLDER / _key_name(attempt)} is missing or no key: the attempt has ended, or rank 0 has no "
            "replicas"
        )
    return key


def remove_key(directory: Path, attempt: int) -> None:
    """The attempt has ended. For rank 0."""
    _remove(directory, _key_name(attempt))


def publish(directory: Path, endpoint: Endpoint) -> None:
    """List a checkpoint writer.

    Raises:
        OSError: the directory cannot be written to.
    """
    with _folder(directory) as folder:
        folder.write_whole(_endpoint_name(endpoint.rank), msgspec.json.encode(endpoint))


def withdraw(directory: Path, endpoint: Endpoint) -> None:
    """Take a checkpoint writer off the list, unless another has taken its place."""
    with contextlib.suppress(ForeignOwner):
        is_listed = find(directory, endpoint.rank, endpoint.attempt) == endpoint
        _remove(directory, _endpoint_name(endpoint.rank) if is_listed else None)


def find(directory: Path, rank: int, attempt: int) -> Endpoint | None:
    """Return where the checkpoint writer of a rank listens in this attempt; None while it does not.

    Raises:
        ForeignOwner: the file is another user's.
    """
    with contextlib.suppress(msgspec.MsgspecError):
        text = _read_private(directory, _endpoint_name(rank))
        endpoint = typed_json.decode(text, Endpoint) if text else None
        if endpoint and (endpoint.rank, endpoint.attempt) == (rank, attempt):
            return endpoint
    return None


def _key_name(attempt: int) -> str:
    return f"key-{attempt}"


def _endpoint_name(rank: int) -> str:
    return f"rank-{rank:05}.json"


@contextlib.contextmanager
def _folder(directory: Path, *, make: bool = False) -> Iterator[Directory]:
    """The folder of keys and endpoints, in a directory that is this user's alone."""
    with Directory.open(directory) as root:
        root.check_own()
        with root.make(_FOLDER) if make else root.enter(_FOLDER) as folder:
            folder.check_own()
            yield folder


def _remove(directory: Path, name: str | None) -> None:
    """Remove a file, and the folder with the last one."""
    with contextlib.suppress(OSError), Directory.open(directory) as root:
        root.check_own()
        if name is not None:
            with root.enter(_FOLDER) as folder:
                folder.unlink(name, missing_ok=True)
        os.rmdir(_FOLDER, dir_fd=root.descriptor)  # unless another checkpoint writer is still listed


def _read_private(directory: Path, name: str) -> bytes | None:
    path = directory / _FOLDER / name
    try:
        with Directory.open(directory) as root, root.enter(_FOLDER) as folder:
            status = folder.status(name)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise ForeignOwner(f"{path} belongs to user {status.st_uid} or is open to others; it is not used")
            return folder.read(name, _MAX_FILE_BYTES)
    except OSError:
        return None


_MAGIC = b"HETREPL1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 16 << 10
_MAX_WORDS = 1000
_TAIL = struct.Struct("<BQ")
_CHUNK_BYTES = 1 << 20
# For connecting; and, on either side, for all that proves the key.
_PROOF_TIMEOUT_S = 5.0
# For a message, and for each chunk: a peer that is stopped is given up after it.
STALL_S = 10.0

T = TypeVar("T")


class ReplicaRequest(msgspec.Struct, frozen=True):
    """What is asked of a checkpoint writer.

    Attributes:
        verb: `keep`: a record follows; `give`: send one.
        rank: whose record.
        generation: which.
        layout_digest: `Layout.digest`, to keep.
        metadata_bytes: of the record, to keep.
        payload_bytes: of the record, to keep.
    """

    verb: Literal["keep", "give"]
    rank: int
    generation: Generation
    layout_digest: str = ""
    metadata_bytes: int = 0
    payload_bytes: int = 0


class ReplicaReply(msgspec.Struct, frozen=True):
    """What the checkpoint writer says.

    Attributes:
        error: why not; "" if it does.
        is_there: it keeps that generation or a newer one; nothing need follow.
        layout_digest: as in `ReplicaRequest`, for `give`.
        metadata_bytes: as in `ReplicaRequest`, for `give`.
        payload_bytes: as in `ReplicaRequest`, for `give`.
    """

    error: str = ""
    is_there: bool = False
    layout_digest: str = ""
    metadata_bytes: int = 0
    payload_bytes: int = 0


class ReplicaChannel:
    """A connection with a deadline for each wait; a context manager that closes it.

    Args:
        peer: a connected socket.
    """

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, endpoint: Endpoint, key: bytes) -> ReplicaChannel:
        """Connect to a checkpoint writer and exchange proofs.

        Raises:
            ReplicaError: it does not prove the key.
            OSError: it does not answer.
        """
        channel = cls(socket.create_connection((endpoint.address, endpoint.port), _PROOF_TIMEOUT_S))
        try:
            receiver = _receiver(endpoint.attempt, endpoint.rank)
            deadline_s = time.monotonic() + _PROOF_TIMEOUT_S
            mine = secrets.token_bytes(_NONCE_BYTES)
            channel.send(_MAGIC + mine, _left_s(deadline_s))
            answer = channel.receive(_NONCE_BYTES + _PROOF_BYTES, _left_s(deadline_s))
            theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
            if not hmac.compare_digest(proof, _prove(key, b"writer", receiver, mine, theirs)):
                raise ReplicaError(f"{endpoint.address}:{endpoint.port} does not have the key of this attempt")
            channel.send(_prove(key, b"caller", receiver, mine, theirs), _left_s(deadline_s))
        except BaseException:
            channel.close()
            raise
        return channel

    def admit(self, key: bytes, attempt: int, rank: int) -> bool:
        """Return the writer's side of `connect`: whether the caller has the key. Reads 72 bytes of a stranger, and no
        more.
        """
        receiver = _receiver(attempt, rank)
        deadline_s = time.monotonic() + _PROOF_TIMEOUT_S
        hello = self.receive(len(_MAGIC) + _NONCE_BYTES, _left_s(deadline_s))
        if not hello.startswith(_MAGIC):
            return False
        theirs, mine = hello[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
        self.send(mine + _prove(key, b"writer", receiver, theirs, mine), _left_s(deadline_s))
        proof = self.receive(_PROOF_BYTES, _left_s(deadline_s))
        return hmac.compare_digest(proof, _prove(key, b"caller", receiver, theirs, mine))

    def send(self, data: bytes | memoryview, timeout_s: float = STALL_S) -> None:
        """Send all of it within the time, or raise TimeoutError."""
        self._socket.settimeout(timeout_s)
        self._socket.sendall(data)

    def receive_into(self, view: memoryview, timeout_s: float = STALL_S) -> None:
        """Fill `view` within the time, or raise TimeoutError; ReplicaError if the other side has ended."""
        deadline_s = time.monotonic() + timeout_s
        while view.nbytes:
            self._socket.settimeout(_left_s(deadline_s))
            num_bytes = self._socket.recv_into(view)
            if num_bytes == 0:
                raise ReplicaError("the other side has closed the connection")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the other side is slower than {_CHUNK_BYTES} bytes in {timeout_s:g} s")
            view = view[num_bytes:]

    def receive(self, num_bytes: int, timeout_s: float = STALL_S) -> bytes:
        """Return a few bytes."""
        buffer = bytearray(num_bytes)
        self.receive_into(memoryview(buffer), timeout_s)
        return bytes(buffer)

    def send_message(self, message: ReplicaRequest | ReplicaReply) -> None:
        """Send a message."""
        text = msgspec.json.encode(message)
        self.send(_LENGTH.pack(len(text)) + text)

    def receive_message(self, kind: type[T]) -> T:
        """Receive a message.

        Raises:
            ReplicaError: it is too long or malformed.
        """
        (length,) = _LENGTH.unpack(self.receive(_LENGTH.size))
        if length > _MAX_MESSAGE_BYTES:
            raise ReplicaError(f"a message of {length} bytes; at most {_MAX_MESSAGE_BYTES}")
        try:
            return typed_json.decode(self.receive(length), kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ReplicaError(f"a malformed message: {error}") from error

    def send_record(self, segment: Segment, header: Header) -> bool:
        """Send what a slot holds, straight from its mapping; no lock holds up the trainer meanwhile.

        Args:
            segment: the slot.
            header: as it was announced.

        Returns:
            Whether it was not overwritten meanwhile; else the receiver refuses it.
        """
        metadata, payload = memoryview(segment.metadata), segment.payload
        # Announced sizes, whatever has become of the slot since.
        is_same = (len(metadata), len(payload)) == (header.metadata_bytes, header.payload_bytes)
        if not is_same:
            raise ReplicaError(f"{header.generation} was overwritten before it was sent")
        digest = Checksum()
        for chunk in _chunks(metadata, payload):
            self.send(chunk)
            digest.update(chunk)
            reach("replica.sending")
        try:
            is_same = segment.header == header
        except DamagedSegment:
            is_same = False
        self.send(_TAIL.pack(is_same, digest.value))
        return is_same

    def receive_record(self, metadata: memoryview, payload: memoryview) -> None:
        """Receive a record.

        Args:
            metadata: filled.
            payload: filled.

        Raises:
            ReplicaError: it is not what was sent, or was overwritten while it was.
        """
        digest = Checksum()
        for chunk in _chunks(metadata, payload):
            self.receive_into(chunk)
            digest.update(chunk)
            reach("replica.receiving")
        is_same, wanted = _TAIL.unpack(self.receive(_TAIL.size))
        if not is_same:
            raise ReplicaError("newer saves have overwritten it while it was sent: the network is slower than they are")
        if wanted != digest.value:
            raise ReplicaError("its checksum is another than that of what was sent")

    def interrupt(self) -> None:
        """End the talk from another thread; who waits in it gets an error, and closes.

        It is not closed here: the next connection would get the number that the other thread still reads from.
        """
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection. A second time does nothing."""
        self.interrupt()
        self._socket.close()

    def __enter__(self) -> ReplicaChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def words(error: Exception) -> str:
    """Return an error as the text of a reply or of a status."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time: it is stopped, or the network is cut"
    return (str(error) or type(error).__name__)[:_MAX_WORDS]


def _left_s(deadline_s: float) -> float:
    """Until a time that may have passed; 0 would mean not to wait at all."""
    return max(1e-3, deadline_s - time.monotonic())


def _receiver(attempt: int, rank: int) -> bytes:
    return f"attempt {attempt} rank {rank}".encode()


def _prove(key: bytes, role: bytes, receiver: bytes, callers_nonce: bytes, writers_nonce: bytes) -> bytes:
    text = b"\0".join([b"hetstream replica", role, receiver, callers_nonce, writers_nonce])
    return hmac.new(key, text, hashlib.sha256).digest()


def _chunks(*parts: memoryview) -> Iterator[memoryview]:
    for part in parts:
        for begin in range(0, len(part), _CHUNK_BYTES):
            yield part[begin : begin + _CHUNK_BYTES]


# Who keeps whose replica: every rank computes the same from the hosts of all, and tells its checkpoint writer.


class Order(msgspec.Struct, frozen=True):
    """What a trainer tells its checkpoint writer to do about replicas.

    Attributes:
        attempt: of the job; its key opens the connections.
        rank: of this trainer.
        host: name under which other hosts reach this one.
        peer: the rank whose checkpoint writer keeps this rank's replica; None: there is no other host.
        serves: ranks whose replicas this rank's checkpoint writer keeps.
    """

    attempt: int
    rank: int
    host: str
    peer: int | None
    serves: list[int]


def peer_of(hosts: Sequence[str], rank: int) -> int | None:
    """Return the rank on the next host, in the order of the ranks' hosts, that has the same place there.

    Args:
        hosts: of all ranks, by rank.
        rank: whose peer.

    Returns:
        Its peer; None if all ranks are on one host.
    """
    mine = hosts[rank]
    order = list(dict.fromkeys(hosts))
    if len(order) == 1:
        return None
    following = order[(order.index(mine) + 1) % len(order)]
    there = [other for other, host in enumerate(hosts) if host == following]
    return there[hosts[:rank].count(mine) % len(there)]


def order_of(hosts: Sequence[str], rank: int, attempt: int) -> Order:
    """Return what one rank's checkpoint writer is told."""
    serves = [other for other in range(len(hosts)) if peer_of(hosts, other) == rank]
    return Order(attempt, rank, hosts[rank], peer_of(hosts, rank), serves)


def write_order(path: Path, order: Order) -> None:
    """Tell a checkpoint writer, in a file of its store.

    Raises:
        OSError: there is no room.
    """
    with Directory.open(path.parent) as store:
        store.write_whole(path.name, msgspec.json.encode(order))


def read_order(path: Path) -> Order | None:
    """Return what a checkpoint writer is to do about replicas; None: nothing."""
    try:
        return typed_json.decode(path.read_bytes(), Order)
    except (OSError, msgspec.MsgspecError):
        return None
