"""Batches between processes of one host and one user: through memory that both have mapped.

A connection is a Unix socket in the abstract namespace, which carries the handshake and then notices of some bytes,
and a *pool*, a memory file without a name (memfd_create(2)) that the loader makes for the connection and passes over
the socket. The data worker finds a free extent of the pool, copies the batch into it (the only copy) and sends a
notice; small batches are gathered in an extent from the beginning, and their header goes with the notice. The loader's
tensors are views of the extent, and when the last of them is gone its offset goes back. Nothing
has a name in a file system, so nothing is left when a process is killed, and a killed worker's memory is free as soon
as the trainer drops the batches that lie in it.

Small batches travel inside the notice. So do, in pieces, batches for which there is no room: the pool is larger than
what the loader's window lets through, so it is full only while the training loop keeps old batches.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import mmap
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hetstream.base.limits import available_bytes
from hetstream.base.posix import fcntl
from hetstream.base.process import generation
from hetstream.mpi_dataworkers.errors import ProtocolError, ServiceError
from hetstream.mpi_dataworkers.transports.auth import LoaderHandshake, WorkerHandshake, accept_peer, is_own_user
from hetstream.mpi_dataworkers.transports.base import (
    ChannelSender,
    Extents,
    PeerUnreachable,
    ReceivedBatch,
    find_frames,
    lay_out,
)
from hetstream.mpi_dataworkers.wire.codec import Buffer, Leaf, Scattered, aligned, decode, encode, size_of
from hetstream.mpi_dataworkers.wire.messages import Carried

# The memory of one connection between processes of a host: made by the loader, written by the data worker.
#
# An extent is read in place, and its offset goes back to the data worker when its last view is
# dropped.

# How an extent's offset goes back.
OFFSET = struct.Struct("<Q")

_Bytes = npt.NDArray[np.uint8]


class Pool:
    """A loader's side of one connection's memory. Lives until the program has dropped the last batch in it."""

    def __init__(self, connection: socket.socket, capacity_bytes: int) -> None:
        self._connection = connection
        self._generation = generation()
        self._unsent: collections.deque[int] = collections.deque()
        self.descriptor = os.memfd_create("hetstream-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, capacity_bytes)
            # Whoever could shrink the file could kill its readers.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapped = mmap.mmap(self.descriptor, capacity_bytes)
        except OSError:
            os.close(self.descriptor)
            raise
        self._memory: _Bytes = np.frombuffer(mapped, dtype=np.uint8)

    def close_descriptor(self) -> None:
        """Once the data worker has its own."""
        os.close(self.descriptor)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return an extent, given back when no view of it is left.

        Raises:
            ProtocolError: it is not inside the pool.
        """
        if offset + num_bytes > self._memory.nbytes:
            raise ProtocolError(f"{num_bytes} bytes at {offset} are outside the pool of {self._memory.nbytes}")
        extent = self._memory[offset : offset + num_bytes]
        weakref.finalize(extent, self._give_back, offset).atexit = False
        return extent.data

    def _give_back(self, offset: int) -> None:
        """Runs where the last view of a batch is dropped, in any thread: one system call, and no lock."""
        if generation() != self._generation:
            return  # a forked child has dropped its copy of the program's objects
        self._unsent.append(offset)
        self.send_offsets()

    def send_offsets(self) -> None:
        """Send what could not be sent before; the data worker takes them off when it needs room."""
        while self._unsent:
            offset = self._unsent.popleft()
            try:
                self._connection.send(OFFSET.pack(offset), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._unsent.appendleft(offset)
                return
            except OSError:
                self._unsent.clear()  # the data worker is gone, and the pool with it
                return

    def __del__(self) -> None:
        # Closed here and not with the connection: then no thread can be about to send on it.
        self._connection.close()


_log = logging.getLogger(__name__)

_SCHEME = "shm:"
# Below this the copy through the kernel costs less than an extent and its way back.
_INLINE_BYTES = 16 << 10
# Linux may cut a message of half the socket's buffer (208 KiB by default, unix(7)) or more.
_PIECE_BYTES = 64 << 10
_HANDSHAKE_BYTES = 4096
_HANDSHAKE_TIMEOUT_S = 5.0
# A loader that takes nothing off the socket for this long is stopped or stuck.
_STUCK_S = 10.0
# How long a full pool is waited for before a batch goes in pieces.
_ROOM_S = 0.05
# Messages taken off one connection in one go.
_BURST = 256
# Connections that have not proved the key; past this the oldest go. They are of the same user.
_MAX_UNPROVEN = 64
# Growing takes what it needs and leaves this share of the memory that is available to others.
_MEMORY_SHARE = 0.5

_INLINE, _EXTENT, _GATHERED, _PIECES = b"I", b"E", b"G", b"P"
_PLACE = struct.Struct("<QQ")  # offset, bytes
_TOTAL = struct.Struct("<Q")
_POOL = b"HETpool"


def _name_of(address: str) -> str:
    return address.removeprefix(_SCHEME).replace("@", "\0", 1)


# --- loader ---------------------------------------------------------------------------------------------------------


class _Connection:
    """One data worker as the loader sees it."""

    def __init__(self, connection: socket.socket, handshake: LoaderHandshake) -> None:
        self.socket = connection
        self.handshake = handshake
        self.pool: Pool | None = None  # since the worker has proved that it holds the key
        # A batch that comes in pieces, and how far it has come.
        self.whole: memoryview | None = None
        self.filled = 0


class ShmReceiver:
    """See `base.BatchReceiver`.

    Args:
        batch_key: the job's batch key in hex.
        pool_bytes: most memory for the batches of one data worker process; taken as it is used.

    Raises:
        ServiceError: this system has no memory files or Unix sockets.
    """

    transport = "shm"

    def __init__(self, batch_key: str, pool_bytes: int) -> None:
        self._key = bytes.fromhex(batch_key)
        self._pool_bytes = pool_bytes
        self._address = f"{_SCHEME}@hetstream-{secrets.token_hex(16)}"
        self._connections: dict[int, _Connection] = {}
        self._buffer = memoryview(bytearray(_PIECE_BYTES))
        try:
            os.close(os.memfd_create("hetstream-probe", os.MFD_CLOEXEC))
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        except (OSError, AttributeError) as error:
            raise ServiceError(f"no shared memory on this system: {error}") from error
        self._listener.bind(_name_of(self._address))
        self._listener.listen(_MAX_UNPROVEN)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)

    @property
    def addresses(self) -> list[str]:
        return [self._address]

    @property
    def sources(self) -> list[int]:
        return [self._epoll.fileno()]

    @property
    def look_again_s(self) -> float:
        return math.inf

    def receive(self) -> list[ReceivedBatch | ProtocolError]:
        batches: list[ReceivedBatch | ProtocolError] = []
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._connections:
                self._read(self._connections[descriptor], batches)
        return batches

    def _accept(self) -> None:
        accepted = accept_peer(self._listener)
        if accepted is None:
            return
        unproven = [connection for connection in self._connections.values() if connection.pool is None]
        if len(unproven) >= _MAX_UNPROVEN:
            self._drop(unproven[0])
        self._connections[accepted.fileno()] = _Connection(accepted, LoaderHandshake(self._key, self._address))
        self._epoll.register(accepted, select.EPOLLIN)

    def _read(self, connection: _Connection, batches: list[ReceivedBatch | ProtocolError]) -> None:
        try:
            for _ in range(_BURST):
                if connection.whole is not None:
                    goal = connection.whole[connection.filled :]
                else:
                    goal = self._buffer[: _HANDSHAKE_BYTES if connection.pool is None else _PIECE_BYTES]
                try:
                    count = connection.socket.recv_into(goal)
                except ConnectionResetError:
                    # It closed with offsets unread. Said once, before what it sent; then comes the end (unix(7)).
                    continue
                if not count:
                    self._drop(connection)
                    return
                frames = self._take(connection, count)
                if frames is not None:
                    batches.append(_delivery(connection.handshake, frames))
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
        except ProtocolError as error:
            # A stranger's bytes are not worth a line in the log; a worker that sends garbage has to prove itself again.
            if connection.pool is not None:
                batches.append(error)
            self._drop(connection)

    def _take(self, connection: _Connection, count: int) -> list[memoryview] | None:
        """The frames of a batch that is complete; else take the step that the message stands for."""
        pool = connection.pool
        if pool is None:
            self._shake_hands(connection, bytes(self._buffer[:count]))
            return None
        pool.send_offsets()
        if connection.whole is not None:
            connection.filled += count
            if connection.filled < connection.whole.nbytes:
                return None
            whole, connection.whole = connection.whole, None
            return find_frames(whole)
        kind, body = bytes(self._buffer[:1]), self._buffer[1:count]
        try:
            if kind == _EXTENT:
                return find_frames(pool.view(*_PLACE.unpack(body)))
            if kind == _GATHERED:
                return [memoryview(bytes(body[_PLACE.size :])), pool.view(*_PLACE.unpack_from(body))]
            if kind == _INLINE:
                return find_frames(memoryview(bytearray(body)))
            if kind == _PIECES:
                connection.whole = aligned(_TOTAL.unpack(body)[0]).data
                connection.filled = 0
                return None
        except (struct.error, MemoryError) as error:
            raise ProtocolError(f"a notice of {count} bytes cannot be followed: {error}") from error
        raise ProtocolError(f"a notice of the unknown kind {kind!r}")

    def _shake_hands(self, connection: _Connection, text: bytes) -> None:
        answer = connection.handshake.answer(decode(text))
        if answer is not None:
            connection.socket.send(encode(answer))
            return
        pool = Pool(connection.socket, self._pool_bytes)
        try:
            socket.send_fds(connection.socket, [_POOL], [pool.descriptor])
        finally:
            pool.close_descriptor()
        connection.pool = pool

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection.socket.fileno()]
        self._epoll.unregister(connection.socket)
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)
        if connection.pool is None:
            connection.socket.close()

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._epoll.close()
        self._listener.close()


def _delivery(handshake: LoaderHandshake, frames: list[memoryview]) -> ReceivedBatch:
    assert handshake.seal is not None, "a connection has a pool since it has proved the key"
    header = decode(handshake.seal.take_off(frames[0]))
    if not isinstance(header, Carried):
        raise ProtocolError(f"{type(header).__name__} is no message for an open batch connection")
    return ReceivedBatch(header, frames[1:], ShmReceiver.transport)


# --- data worker ----------------------------------------------------------------------------------------------------


class _Channel:
    """A data worker's connection to one loader, proven in both directions.

    Raises:
        PeerUnreachable: it cannot be made.
    """

    def __init__(self, key: bytes, worker_id: str, receiver: str) -> None:
        self._receiver = receiver
        self._said = False
        self._waited_s = 0.0  # since the last message
        self._waits_in_vain = False
        self._ready = select.poll()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptor = -1
        try:
            self._socket.settimeout(_HANDSHAKE_TIMEOUT_S)
            self._socket.connect(_name_of(receiver))
            descriptor = self._shake_hands(key, worker_id)
            self._capacity = os.fstat(descriptor).st_size
            self._memory: _Bytes = np.frombuffer(mmap.mmap(descriptor, self._capacity), dtype=np.uint8)
        except (OSError, ProtocolError) as error:
            self._socket.close()
            if descriptor >= 0:
                os.close(descriptor)
            raise PeerUnreachable(f"no shared memory with the loader at {receiver}: {error}") from error
        self._descriptor = descriptor
        self._extents = Extents(self._capacity)
        # The extent that `room` has lent, by its offset, and the memory: without holders it was left unused.
        self._lent: tuple[int, weakref.ref[_Bytes]] | None = None
        self._reserved = 0  # bytes of the pool that are known to be backed by memory
        self._socket.setblocking(False)

    def _shake_hands(self, key: bytes, worker_id: str) -> int:
        if not is_own_user(self._socket):
            raise ProtocolError("it belongs to another user")
        handshake = WorkerHandshake(key, worker_id, self._receiver)
        self._socket.send(encode(handshake.hello))
        self._socket.send(encode(handshake.answer(decode(self._socket.recv(_HANDSHAKE_BYTES)))))
        self._seal = handshake.seal
        text, descriptors, _, _ = socket.recv_fds(self._socket, _HANDSHAKE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if text != _POOL or len(descriptors) != 1:
            raise ProtocolError("it refused this data worker's proof of the key")
        return descriptors[0]

    def send(self, header: Carried, frames: Sequence[Leaf]) -> float:
        """Hand one message to the loader.

        Returns:
            Seconds that it waited for room, in the pool or the socket.

        Raises:
            OSError: the loader is gone, or takes nothing.
            ProtocolError: it gives back what it does not have.
        """
        first = self._seal.put_on(encode(header))
        if len(frames) == 1 and self._is_lent(frames[0]) and len(first) <= _INLINE_BYTES < size_of(frames[0]):
            self._send_lent(first, size_of(frames[0]))
            return self._waited()
        frames = [first, *frames]
        sizes = [size_of(frame) for frame in frames]
        table, offsets, total = lay_out(sizes)
        offset = self._room_for(total) if total > _INLINE_BYTES else None
        whole = np.empty(total, dtype=np.uint8) if offset is None else self._memory[offset : offset + total]
        whole[: len(table)] = np.frombuffer(table, dtype=np.uint8)
        for frame, at, size in zip(frames, offsets, sizes, strict=True):
            if isinstance(frame, Scattered):
                frame.write(whole[at : at + size].data)
            elif size:
                whole[at : at + size] = np.frombuffer(frame, dtype=np.uint8)
        if offset is not None:
            self._send(_EXTENT + _PLACE.pack(offset, total))
        elif total <= _INLINE_BYTES:
            self._send(_INLINE + whole.tobytes())
        else:
            self._send(_PIECES + _TOTAL.pack(total))
            for start in range(0, total, _PIECE_BYTES):
                self._send(whole[start : start + _PIECE_BYTES].data)
        return self._waited()

    def room(self, num_bytes: int) -> memoryview | None:
        """Lend one extent, without waiting for it; while it is held and not sent there is no other."""
        if self._lent is not None:
            unused, memory = self._lent
            if memory() is not None:
                return None
            self._lent = None
            self._extents.give_back(unused)
        offset = self._take_extent(num_bytes)
        if offset is None:
            return None
        extent = self._memory[offset : offset + num_bytes]
        self._lent = offset, weakref.ref(extent)
        return extent.data

    def _is_lent(self, frame: Leaf) -> bool:
        if self._lent is None or not isinstance(frame, memoryview):
            return False
        lender: object = frame.obj
        return lender is self._lent[1]()

    def _send_lent(self, header: bytes, num_bytes: int) -> None:
        assert self._lent is not None
        offset, _ = self._lent
        self._lent = None
        self._extents.shorten(offset, num_bytes)
        self._send(_GATHERED + _PLACE.pack(offset, num_bytes) + header)

    def _waited(self) -> float:
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _send(self, text: Buffer) -> None:
        while True:
            try:
                self._socket.send(text)
                return
            except BlockingIOError:
                if not self._wait(select.POLLOUT, _STUCK_S):
                    raise TimeoutError(f"the loader has taken nothing for {_STUCK_S:g} s") from None

    def _wait(self, event: int, timeout_s: float) -> bool:
        self._ready.register(self._socket, event)
        begun = time.monotonic()
        is_ready = bool(self._ready.poll(timeout_s * 1000))
        self._waited_s += time.monotonic() - begun
        return is_ready

    def _room_for(self, num_bytes: int) -> int | None:
        """Offset of an extent with memory behind it, or None when there will be none soon."""
        offset = self._take_extent(num_bytes)
        # A training loop that keeps its batches is waited for once, not at each of them.
        deadline = time.monotonic() + (0.0 if self._waits_in_vain else _ROOM_S)
        while offset is None and num_bytes <= self._capacity and self._extents.num_taken():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._wait(select.POLLIN, left_s):
                break
            offset = self._take_extent(num_bytes)
        self._waits_in_vain = offset is None
        if offset is None and not self._said:
            self._said = True
            _log.info("no room in shared memory for %d bytes: sent through the socket, which costs more", num_bytes)
        return offset

    def _take_extent(self, num_bytes: int) -> int | None:
        """Offset of an extent with memory behind it, or None when there is none now."""
        self._take_offsets()
        offset = self._extents.take(num_bytes)
        if offset is not None and not self._reserve(offset + num_bytes):
            self._extents.give_back(offset)
            return None
        return offset

    def _take_offsets(self) -> None:
        """Take back the extents that the loader has given back.

        Raises:
            ConnectionError: it is gone.
        """
        try:
            while text := self._socket.recv(_HANDSHAKE_BYTES):
                self._extents.give_back(*OFFSET.unpack(text))
        except BlockingIOError:
            return
        raise ConnectionResetError("the loader has closed the connection")

    def _reserve(self, end: int) -> bool:
        """Have the kernel put memory behind the pool up to `end`: what cannot be had is no error when it is written."""
        if end <= self._reserved:
            return True
        more = end - self._reserved
        try:
            if more > available_bytes() * _MEMORY_SHARE:
                return False
            os.posix_fallocate(self._descriptor, self._reserved, more)
        except OSError:
            return False
        self._reserved = end
        return True

    def close(self, until: float) -> None:  # noqa: ARG002, what was sent is with the loader already
        # It stays readable there, and so does the pool.
        self._socket.close()
        os.close(self._descriptor)


class ShmBatchSender(ChannelSender):
    """See `base.BatchSender`."""

    def _open(self, receiver: str) -> _Channel:
        return _Channel(self._key, self._worker_id, receiver)

    def room(self, receiver: str, num_bytes: int) -> memoryview | None:
        channel = self._channels.get(receiver)
        try:
            return channel.room(num_bytes) if isinstance(channel, _Channel) else None
        except (OSError, ProtocolError):
            return None  # the connection is of no use any more; sending says so
