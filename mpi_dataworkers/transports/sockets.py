"""Batches over plain sockets: TCP between hosts, Unix sockets on one.

A message is its length and then what `layout.lay_out` makes of its frames, so that a loader receives it in one piece
of memory. The data worker hands the kernel its tensors where they lie (sendmsg(2)); what does not fit into the socket's
buffer, a thread sends while the next batch is made. The loader receives without waiting, in the thread that also talks
to the dispatcher, into memory that it uses again.

A peer that has not proved the job's key (`auth.py`) is read a few kilobytes of and no more. The kernel watches the
connection: one that nobody answers ends by itself. It is never made again silently: a new one needs a new proof.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import math
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hetstream.mpi_dataworkers.errors import ProtocolError, ServiceError
from hetstream.mpi_dataworkers.transports.auth import LoaderHandshake, WorkerHandshake, accept_peer, most_unproven
from hetstream.mpi_dataworkers.transports.base import (
    ChannelSender,
    PeerUnreachable,
    ReceivedBatch,
    find_frames,
    lay_out,
    transport_of,
)
from hetstream.mpi_dataworkers.wire.codec import (
    ALIGN_BYTES,
    Buffer,
    Leaf,
    aligned,
    decode,
    encode,
    in_one_piece,
    in_pieces,
    size_of,
)
from hetstream.mpi_dataworkers.wire.messages import Carried, Compressed, Message

# A message on a socket: its length, and then what `layout.lay_out` makes of its frames, as pieces for sendmsg(2).
#
# Pure; the tensors stay where they lie.

LENGTH = struct.Struct("<Q")
_PADDING = bytes(ALIGN_BYTES)


def pieces_of(frames: Sequence[Leaf]) -> list[Buffer]:
    """Return a message as it is sent, with the tensors where they lie."""
    sizes = [size_of(frame) for frame in frames]
    table, offsets, total = lay_out(sizes)
    pieces: list[Buffer] = [b"".join((LENGTH.pack(total), table, in_one_piece(frames[0])))]
    end = len(table) + sizes[0]
    for frame, offset, size in zip(frames[1:], offsets[1:], sizes[1:], strict=True):
        if offset > end:
            pieces.append(_PADDING[: offset - end])
        if size:
            pieces += in_pieces(frame)
        end = offset + size
    return pieces


def left_of(pieces: list[Buffer], num_sent: int) -> list[Buffer]:
    """Return the rest of pieces once a number of their bytes was sent."""
    for index, piece in enumerate(pieces):
        if num_sent < len(piece):
            return [memoryview(piece)[num_sent:], *pieces[index + 1 :]]
        num_sent -= len(piece)
    return []


# The memory into which a loader receives messages.

# Memory that is kept for later messages although messages of other sizes come now.
_KEEP_BYTES = 128 << 20

_Bytes = npt.NDArray[np.uint8]


class ReceiveMemory:
    """Memory for messages, used again when the program has dropped all that lies in it: new memory costs a page fault
    for each 4 KiB, and what was dropped last may still be in the processor's cache."""

    def __init__(self) -> None:
        self._free: dict[int, collections.deque[_Bytes]] = {}  # by size

    def take(self, num_bytes: int) -> memoryview:
        """Return memory of this size, given back when no view of it is left.

        Raises:
            ProtocolError: there is none.
        """
        # An eighth more at most, so that sizes that differ a little share.
        unit = 1 << max(0, num_bytes.bit_length() - 4)
        size = -(-num_bytes // unit) * unit
        free = self._free.setdefault(size, collections.deque())
        try:
            whole = free.pop()
        except IndexError:
            if sum(size * len(unused) for size, unused in self._free.items()) > _KEEP_BYTES:
                self._free = {size: free}
            whole = _aligned(size)
        part = whole[:num_bytes]
        # Runs where the last view is dropped, in any thread; it takes no lock.
        weakref.finalize(part, free.append, whole).atexit = False
        return part.data


def _aligned(num_bytes: int) -> _Bytes:
    try:
        return aligned(num_bytes)
    except MemoryError as error:
        raise ProtocolError(f"there is no memory for a message of {num_bytes} bytes: {error}") from error


# Batches made smaller for slow networks, with Zstandard at its fastest level, where that is worth the time. Pure.
#
# Used on TCP when the loader asks for it. One core compresses some 100 to 300 MB/s, so it pays on links
# of 1 Gbit/s and below, for data that is much alike (masks, token ids), and never for decoded photographs: a frame is
# compressed only if a sample of it shrinks well.

try:
    import zstandard
except ImportError:  # an optional extra: without it nothing is compressed
    zstandard = None  # type: ignore[assignment]

IS_AVAILABLE = zstandard is not None
_LEVEL = 1
# Smaller frames are not worth the call.
_LEAST_BYTES = 16 << 10
_SAMPLE_BYTES = 64 << 10
# A frame is compressed if the sample shrinks to less than this.
_WORTH_RATIO = 0.7


def compress(frames: Sequence[Buffer]) -> tuple[list[Buffer], list[int]]:
    """Compress the frames that shrink well.

    Returns:
        The frames to send, and for each its size before, or -1 where it is sent as it was.
    """
    if not IS_AVAILABLE:
        return list(frames), [-1] * len(frames)
    packer = zstandard.ZstdCompressor(level=_LEVEL)
    sent: list[Buffer] = []
    sizes = []
    for frame in frames:
        view = memoryview(frame)
        start = max(0, (view.nbytes - _SAMPLE_BYTES) // 2)
        sample = view[start : start + _SAMPLE_BYTES]
        if view.nbytes < _LEAST_BYTES or len(packer.compress(sample)) > _WORTH_RATIO * sample.nbytes:
            sent.append(frame)
            sizes.append(-1)
        else:
            sent.append(packer.compress(view))
            sizes.append(view.nbytes)
    return sent, sizes


def decompress(frames: Sequence[Buffer], sizes: Sequence[int]) -> list[Buffer]:
    """Undo `compress`. Takes no more memory than the announced sizes, whatever the frames hold.

    Raises:
        ProtocolError: frames and sizes do not fit, or this side cannot decompress.
    """
    if len(frames) != len(sizes) or not IS_AVAILABLE:
        raise ProtocolError(f"{len(frames)} frames came with {len(sizes)} sizes before compression")
    return [frame if size < 0 else _decompress(frame, size) for frame, size in zip(frames, sizes, strict=True)]


def _decompress(frame: Buffer, size: int) -> memoryview:
    try:
        whole = aligned(size).data
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(frame)) as reader:
            at = 0
            while count := reader.readinto(whole[at:]):
                at += count
            fits = at == size and not reader.read(1)
    except (zstandard.ZstdError, MemoryError, ValueError) as error:
        raise ProtocolError(f"a frame of {len(frame)} bytes cannot be decompressed: {error}") from error
    if not fits:
        raise ProtocolError(f"a frame was to have {size} bytes after decompression, and has not")
    return whole


_HANDSHAKE_BYTES = 4096
# How long either side waits for the other's part of it: a loader that is alive answers from its own thread at once.
_HANDSHAKE_TIMEOUT_S = 5.0
# A TCP connection on which nothing is acknowledged for this long is broken; so is one to a loader that takes nothing.
_SILENCE_S = 5
# What is read before a message's length is known: many small messages at once, but little of a large one, since it is
# copied from here.
_STAGE_BYTES = 64 << 10
# Of a large message, the loader's thread is woken for a quarter and not for each segment: for so much, and no more.
_WAKE_BYTES = 1 << 20
_MOST_WAKE_BYTES = 2 << 20
# How long more of a large message is waited for where the last bytes of it came: the way back to whoever waits for all
# connections costs more than to wait here. On a network of 10 Gb/s so much more comes in this time.
_INSIDE_S = 0.002
# Then the dispatcher's messages have their turn again.
_BURST_S = 0.01
# Bytes taken off one connection in one go: others have their turn, and so have the dispatcher's messages.
_BURST_BYTES = 32 << 20
# Connections that have not proved the key; the oldest make room. A data worker needs some milliseconds for it.
_MAX_UNPROVEN = 256
# What the kernel keeps until we look; the descriptors are not ours yet.
_BACKLOG = 1024
# How far a data worker goes ahead of a connection that takes less than it makes: one message like the next one, and so
# much more, may not have left when that is put together. So it is made while the one before leaves, and in memory that
# was used a moment ago.
_AHEAD_BYTES = 4 << 20
# The data worker waits while bytes leave: what it reports as sent is to arrive soon. If none leaves for this time, the
# loader is held up, and the data worker turns to the others.
_HOLD_S = 0.5
# The thread says this often how much of a message has left.
_SAY_S = 0.1
_TIMEVAL = struct.Struct("@ll")  # s, us
# sendmsg(2) takes 1024 pieces (IOV_MAX).
_MAX_PIECES = 512


def local_address_towards(address: str) -> str:
    """This host's IP address on the route to `tcp://HOST:PORT`; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_tcp_name(address))
        return str(probe.getsockname()[0])


def _tcp_name(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, 0 if port == "*" else int(port)


def _open(address: str) -> tuple[socket.socket, tuple[str, int] | str]:
    """A socket for the address, and the address as the kernel has it."""
    if transport_of(address) == "ipc":
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), address.removeprefix("ipc://").replace("@", "\0", 1)
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM), _tcp_name(address)


def _watch(connection: socket.socket) -> None:
    """Have the kernel end a TCP connection that nobody answers (tcp(7)); the other end of a Unix socket cannot hide."""
    if connection.family != socket.AF_INET:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, _SILENCE_S - 1),
        (socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


# --- loader ---------------------------------------------------------------------------------------------------------


class _Connection:
    """One data worker as the loader sees it.

    Attributes:
        address: that it connected to.
        handshake: how far it has proved the key, until `prove_by`.
        head: the first bytes of a message whose length has not come yet.
        whole, filled: a message of which a part has come, and how much.
        began_s: when its first part had come.
    """

    def __init__(self, accepted: socket.socket, address: str, key: bytes) -> None:
        self.socket = accepted
        self.address = address
        self.handshake = LoaderHandshake(key, address)
        self.prove_by = time.monotonic() + _HANDSHAKE_TIMEOUT_S
        self.head = b""
        self.whole: memoryview | None = None
        self.filled = 0
        self.began_s: float | None = None
        self._is_tcp = accepted.family == socket.AF_INET
        self._wake_bytes = 1

    def wait_for_more(self) -> None:
        """Be readable when a good part of what is missing has come (SO_RCVLOWAT, socket(7))."""
        wake_bytes = 1
        if self.whole is not None:
            quarter = min(max(self.whole.nbytes // 4, _WAKE_BYTES), _MOST_WAKE_BYTES)
            wake_bytes = min(self.whole.nbytes - self.filled, quarter)
        if wake_bytes != self._wake_bytes and self._is_tcp:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            self._wake_bytes = wake_bytes


class SocketReceiver:
    """See `base.BatchReceiver`.

    Args:
        batch_key: the job's batch key in hex.
        binds: `tcp://HOST:*` or `ipc://@NAME`, best first.
        compress: ask data workers that come over TCP to compress what shrinks well.

    Raises:
        ServiceError: one of them cannot be bound.
    """

    def __init__(self, batch_key: str, binds: Sequence[str], compress: bool = False) -> None:
        self._key = bytes.fromhex(batch_key)
        self._compress = compress
        self._most_unproven = most_unproven(_MAX_UNPROVEN)
        self._memory = ReceiveMemory()
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        self._connections: dict[int, _Connection] = {}
        self._unproven: dict[int, _Connection] = {}  # in order of arrival
        self._listeners: dict[int, tuple[socket.socket, str]] = {}
        self.addresses: list[str] = []
        self._epoll = select.epoll()
        try:
            for bind in binds:
                self._listen(bind)
        except OSError as error:
            self.close()
            raise ServiceError(f"no socket for batches at {', '.join(binds)}: {error}") from error

    def _listen(self, bind: str) -> None:
        listener, name = _open(bind)
        self._listeners[listener.fileno()] = listener, ""
        listener.setblocking(False)
        listener.bind(name)
        listener.listen(_BACKLOG)
        address = bind if transport_of(bind) == "ipc" else "tcp://{}:{}".format(*listener.getsockname())
        self._listeners[listener.fileno()] = listener, address
        self._epoll.register(listener, select.EPOLLIN)
        self.addresses.append(address)

    @property
    def sources(self) -> list[int]:
        return [self._epoll.fileno()]

    @property
    def look_again_s(self) -> float:
        return _HANDSHAKE_TIMEOUT_S if self._unproven else math.inf

    def receive(self) -> list[ReceivedBatch | ProtocolError]:
        batches: list[ReceivedBatch | ProtocolError] = []
        ready = self._epoll.poll(0)
        until = time.monotonic() + _BURST_S
        while ready:
            is_inside = False
            for descriptor, _ in ready:
                if descriptor in self._listeners:
                    self._accept(*self._listeners[descriptor])
                elif descriptor in self._connections:
                    connection = self._connections[descriptor]
                    self._read(connection, batches)
                    is_inside = is_inside or (connection.whole is not None and connection.handshake.proven)
            goes_on = is_inside and not batches and time.monotonic() < until
            ready = self._epoll.poll(_INSIDE_S) if goes_on else []
        now = time.monotonic() if self._unproven else 0.0
        for connection in [connection for connection in self._unproven.values() if connection.prove_by < now]:
            self._drop(connection)
        return batches

    def _accept(self, listener: socket.socket, address: str) -> None:
        accepted = accept_peer(listener)
        if accepted is None:
            return
        try:
            _watch(accepted)
        except OSError:
            accepted.close()
            return
        if len(self._unproven) >= self._most_unproven:
            self._drop(next(iter(self._unproven.values())))
        connection = _Connection(accepted, address, self._key)
        self._connections[accepted.fileno()] = self._unproven[accepted.fileno()] = connection
        self._epoll.register(accepted, select.EPOLLIN)

    def _read(self, connection: _Connection, batches: list[ReceivedBatch | ProtocolError]) -> None:
        left = _BURST_BYTES
        try:
            while left > 0:
                count = (
                    self._go_on(connection, batches)
                    if connection.whole is not None
                    else self._begin(connection, batches)
                )
                if not count:
                    self._drop(connection)
                    return
                left -= count
        except BlockingIOError:
            pass
        except (OSError, ProtocolError) as error:
            # A stranger's bytes are not worth a line in the log; a worker that sends garbage has to prove itself again.
            if isinstance(error, ProtocolError) and connection.handshake.proven:
                batches.append(error)
            self._drop(connection)
            return
        # However reading ended: what is missing now may be less than what was to wake us before.
        connection.wait_for_more()

    def _go_on(self, connection: _Connection, batches: list[ReceivedBatch | ProtocolError]) -> int:
        """Read more of a message that has begun."""
        assert connection.whole is not None
        count = connection.socket.recv_into(connection.whole[connection.filled :])
        connection.filled += count
        if connection.filled == connection.whole.nbytes:
            whole, connection.whole = connection.whole, None
            self._take(connection, whole, batches)
            connection.began_s = None
        return count

    def _begin(self, connection: _Connection, batches: list[ReceivedBatch | ProtocolError]) -> int:
        """Read what comes: small messages, and the beginning of one."""
        limit = _STAGE_BYTES if connection.handshake.proven else _HANDSHAKE_BYTES
        at, end = 0, len(connection.head)
        self._stage[:end] = connection.head
        count = connection.socket.recv_into(self._stage[end:limit])
        end += count
        while end - at >= LENGTH.size:
            (num_bytes,) = LENGTH.unpack_from(self._stage, at)
            if num_bytes > _HANDSHAKE_BYTES and not connection.handshake.proven:
                raise ProtocolError(f"a message of {num_bytes} bytes before the proof of the key")
            at += LENGTH.size
            whole = self._memory.take(num_bytes) if num_bytes > _STAGE_BYTES else memoryview(bytearray(num_bytes))
            num_here = min(num_bytes, end - at)
            whole[:num_here] = self._stage[at : at + num_here]
            at += num_here
            if num_here < num_bytes:
                connection.whole, connection.filled, connection.began_s = whole, num_here, time.monotonic()
            else:
                self._take(connection, whole, batches)
        connection.head = bytes(self._stage[at:end])
        return count

    def _take(self, connection: _Connection, whole: memoryview, batches: list[ReceivedBatch | ProtocolError]) -> None:
        """Take in a message: a batch, or a step of the handshake."""
        frames: list[memoryview] = find_frames(whole)
        seal = connection.handshake.seal
        if seal is None:
            answer = connection.handshake.answer(
                decode(frames[0]), self._compress and transport_of(connection.address) == "tcp"
            )
            if answer is not None:
                connection.socket.send(_bytes_of(answer))
            else:
                del self._unproven[connection.socket.fileno()]
            return
        message = decode(seal.take_off(frames[0]))
        if isinstance(message, Compressed):
            frames = [memoryview(frame) for frame in decompress([message.header, *frames[1:]], message.sizes)]
            message = decode(frames[0])
        if not isinstance(message, Carried):
            raise ProtocolError(f"{type(message).__name__} is no message for an open batch connection")
        batches.append(ReceivedBatch(message, frames[1:], transport_of(connection.address), connection.began_s))

    def _drop(self, connection: _Connection) -> None:
        descriptor = connection.socket.fileno()
        del self._connections[descriptor]
        self._unproven.pop(descriptor, None)
        self._epoll.unregister(descriptor)
        connection.socket.close()

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._epoll.close()
        for listener, _ in self._listeners.values():
            listener.close()


# --- data worker ----------------------------------------------------------------------------------------------------


def _bytes_of(message: Message) -> bytes:
    return b"".join(pieces_of([encode(message)]))


class _Channel:
    """A data worker's connection to one loader, proven in both directions.

    Raises:
        PeerUnreachable: it cannot be made.
    """

    def __init__(self, key: bytes, worker_id: str, receiver: str) -> None:
        self._deadline = time.monotonic() + _HANDSHAKE_TIMEOUT_S
        self._socket, name = _open(receiver)
        try:
            self._socket.settimeout(_HANDSHAKE_TIMEOUT_S)
            self._socket.connect(name)
            _watch(self._socket)
            handshake = WorkerHandshake(key, worker_id, receiver)
            self._compresses = self._shake_hands(handshake)
            self._seal = handshake.seal
            self._socket.settimeout(None)
            say_us = int(_SAY_S * 1e6)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(0, say_us))
        except (OSError, ProtocolError) as error:
            self._socket.close()
            raise PeerUnreachable(f"no batch connection to the loader at {receiver}: {error}") from error
        self._changed = threading.Condition()
        # Guarded by _changed: what the thread is to send; bytes that it was handed, that have left, and that had left
        # when they were waited for in vain; how it failed.
        self._waiting: collections.deque[Buffer] = collections.deque()
        self._num_handed = self._num_left = 0
        self._stuck_at = -1
        self._error: OSError | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def _shake_hands(self, handshake: WorkerHandshake) -> bool:
        """Prove the key to each other.

        Returns:
            Whether the loader asks to compress.
        """
        self._socket.sendall(_bytes_of(handshake.hello))
        (num_bytes,) = LENGTH.unpack(self._receive(LENGTH.size))
        if num_bytes > _HANDSHAKE_BYTES:
            raise ProtocolError(f"it answers with {num_bytes} bytes; nothing was sent to it")
        challenge = decode(find_frames(memoryview(self._receive(num_bytes)))[0])
        proof = handshake.answer(challenge)
        self._socket.sendall(_bytes_of(proof))
        return bool(getattr(challenge, "compress", False))

    def _receive(self, num_bytes: int) -> bytes:
        text = b""
        while len(text) < num_bytes:
            self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
            more = self._socket.recv(num_bytes - len(text))
            if not more:
                raise ConnectionResetError("it takes no connections of this job")
            text += more
        return text

    def send(self, header: Carried, frames: Sequence[Leaf]) -> float:
        """Hand one message to the kernel, and what it does not take at once to the thread.

        Returns:
            Seconds that it waited because too much of earlier messages had not left.

        Raises:
            OSError: the loader is gone, or takes nothing.
        """
        self._look_whether_closed()
        first = encode(header)
        waited_s = self._hold_back(sum(map(size_of, frames), len(first)))
        unsent: Sequence[Leaf] = frames
        if self._compresses:
            joined = list(map(in_one_piece, frames))
            (header_smaller, *unsent), sizes = compress([first, *joined])
            if max(sizes) >= 0:
                first = encode(Compressed(sizes, bytes(header_smaller)))
        pieces = pieces_of([self._seal.put_on(first), *unsent])
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._num_handed == self._num_left:
                pieces = self._send_at_once(pieces)
            if pieces:
                self._waiting.extend(pieces)
                self._num_handed += sum(map(len, pieces))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="hetstream-sender", daemon=True)
                    self._thread.start()
                self._changed.notify()
        return waited_s

    def _look_whether_closed(self) -> None:
        # After its challenge a loader says nothing: what can be read is the end.
        with contextlib.suppress(BlockingIOError):
            self._socket.recv(1, socket.MSG_DONTWAIT)
            raise ConnectionResetError("the loader has closed the connection")

    def _hold_back(self, num_bytes: int) -> float:
        """Wait until there is room for a message of so many bytes; not at each for a loader that takes nothing.

        Returns:
            How long, s.
        """
        limit = num_bytes + _AHEAD_BYTES
        begun = time.monotonic()
        with self._changed:
            if self._num_handed - self._num_left <= limit:
                return 0.0
            while self._num_handed - self._num_left > limit and self._error is None:
                before = self._num_left
                goes_on = functools.partial(self._goes_on, before)
                if before == self._stuck_at or not self._changed.wait_for(goes_on, _HOLD_S):
                    self._stuck_at = before
                    break
        return time.monotonic() - begun

    def _goes_on(self, num_left: int) -> bool:
        return self._num_left > num_left or self._error is not None

    def _send_at_once(self, pieces: list[Buffer]) -> list[Buffer]:
        """Send what goes without waiting; the rest."""
        try:
            return left_of(pieces, self._socket.sendmsg(pieces[:_MAX_PIECES], [], socket.MSG_DONTWAIT))
        except BlockingIOError:
            return pieces

    def _run(self) -> None:
        pieces: list[Buffer] = []
        num_sent = 0
        while True:
            with self._changed:
                self._num_left += num_sent
                # Only one of the two threads can be waiting: this one when nothing waits, the other when much does.
                self._changed.notify()
                while not (pieces or self._waiting):
                    if self._closing:
                        return
                    self._changed.wait()
                while self._waiting and len(pieces) < _MAX_PIECES:
                    pieces.append(self._waiting.popleft())
            try:
                num_sent = self._socket.sendmsg(pieces)
            except BlockingIOError:
                num_sent = 0
            except OSError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify()
                return
            pieces = left_of(pieces, num_sent)

    def close(self, until: float) -> None:
        """Let what waits leave until then. What the kernel has taken leaves in any case."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
        with self._changed:
            self._waiting.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a sendmsg that waits
        if self._thread is not None:
            self._thread.join()
        self._socket.close()


class SocketBatchSender(ChannelSender):
    """See `base.BatchSender`."""

    def _open(self, receiver: str) -> _Channel:
        return _Channel(self._key, self._worker_id, receiver)
