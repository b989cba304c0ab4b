"""Bytes of a message and back. Called by the transports; knows no socket.

A message is a list of frames. Frame 0 is the four-byte prefix `HET` + protocol version and the msgpack body; frames
after it are raw tensor bytes. Small tensors share one frame, large ones have a frame of their own and are not copied.
Small batches of one lease share a message in the same way (`Parcel`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.wire.messages import PROTOCOL_VERSION, AnyMessage, Message

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Scattered:
    """A buffer whose bytes lie in several places: they are put together where they leave from, in one copy, or leave
    from where they lie.

    Attributes:
        nbytes: of all of them.
        write: puts them, in order, into memory of just that size.
        pieces: the places, in order, as bytes; None where they are so small that the copy costs less.
    """

    nbytes: int
    write: Callable[[memoryview], None]
    pieces: Callable[[], list[Buffer]] | None = None


Leaf = Buffer | Scattered

_MAGIC = b"HET"
_PREFIX = _MAGIC + bytes([PROTOCOL_VERSION])
# Below this a copy into a shared frame costs less than a frame of its own, and user code may change what it returned.
FUSE_BELOW_BYTES = 256 * 1024
# Tensors start at a multiple of it, as those do that torch makes. Elsewhere vector loads cost more, and libraries take
# other kernels, whose results differ in the last bit.
ALIGN_BYTES = 64

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Frame 0 of a message."""
    return _PREFIX + _encoder.encode(message)


def decode(frame: Buffer) -> AnyMessage:
    """Read frame 0.

    Raises:
        ProtocolError: not hetstream's bytes, another protocol version, truncated, or an unknown message.
    """
    view = memoryview(frame)
    if view.nbytes < len(_PREFIX) or bytes(view[:3]) != _MAGIC:
        raise ProtocolError(
            f"{view.nbytes} bytes starting {bytes(view[:8])!r} are no hetstream message, which starts with {_MAGIC!r}"
        )
    if view[3] != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {view[3]}, this side version {PROTOCOL_VERSION}. Install the same "
            "hetstream release on trainers and data workers (hetstream --version; docs/upgrade.md)."
        )
    try:
        message: AnyMessage = _decoder.decode(view[4:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message of {view.nbytes} bytes is truncated or malformed: {error}") from error
    return message


def aligned(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return memory in which tensors lie as in torch's own. It need not be touched before it is written.

    Raises:
        MemoryError: there is none of this size.
    """
    try:
        whole = np.empty(num_bytes + ALIGN_BYTES, dtype=np.uint8)
    except (ValueError, OverflowError) as error:
        raise MemoryError(f"no memory has {num_bytes} bytes") from error
    start = -whole.ctypes.data % ALIGN_BYTES
    return whole[start : start + num_bytes]


def in_one_piece(frame: Leaf) -> Buffer:
    """Return the frame in one piece; only a scattered one is copied."""
    if not isinstance(frame, Scattered):
        return frame
    whole = np.empty(frame.nbytes, dtype=np.uint8).data
    frame.write(whole)
    return whole


def in_pieces(frame: Leaf) -> list[Buffer]:
    """Return the frame for whoever can send from many places at once, as bytes; only small places are copied
    together.
    """
    if isinstance(frame, Scattered) and frame.pieces is not None:
        return frame.pieces()
    return [memoryview(in_one_piece(frame)).cast("B")]


def fuse(buffers: Sequence[Leaf]) -> tuple[list[Buffer], list[tuple[int, int, int]]]:
    """Lay leaf buffers out in frames: small ones together, large ones alone and uncopied.

    Returns:
        The frames, and for each buffer (frame, offset, num_bytes); frame numbers count from the first tensor frame.
    """
    parcel = Parcel(shared_bytes(buffers))
    places = parcel.add(buffers)
    return [in_one_piece(frame) for frame in parcel.frames()], places


def size_of(buffer: Leaf) -> int:
    """Return its bytes."""
    return buffer.nbytes if type(buffer) is memoryview or isinstance(buffer, Scattered) else len(buffer)


def shared_bytes(buffers: Sequence[Leaf]) -> int:
    """Room that the buffers take in a shared frame."""
    room_bytes = 0
    for size in map(size_of, buffers):
        if size < FUSE_BELOW_BYTES:
            room_bytes += -(-size // ALIGN_BYTES) * ALIGN_BYTES
    return room_bytes


class Parcel:
    """The tensor frames of one message while it is filled: frame 0 holds the small buffers, the others one large each.

    Small buffers are copied at once, so that user code may change them afterwards.

    Args:
        room_bytes: size of the shared frame; the memory is not touched before it is needed.
        memory: where the frame is to lie, of that size; None for memory of its own.

    Attributes:
        num_bytes: bytes in use of the shared frame.
    """

    def __init__(self, room_bytes: int, memory: memoryview | None = None) -> None:
        self.num_bytes = 0
        self._shared = np.empty(room_bytes, np.uint8).data if memory is None else memory
        self._large: list[Leaf] = []

    @property
    def has_large(self) -> bool:
        """Whether it refers to memory of the caller."""
        return bool(self._large)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether so much fits into the shared frame."""
        return self.num_bytes + num_bytes <= self._shared.nbytes

    def add(self, buffers: Sequence[Leaf]) -> list[tuple[int, int, int]]:
        """Take in the buffers of a batch.

        Returns:
            For each buffer (frame, offset, num_bytes).
        """
        places = []
        for buffer in buffers:
            num_bytes = size_of(buffer)
            if num_bytes >= FUSE_BELOW_BYTES:
                self._large.append(buffer)
                places.append((len(self._large), 0, num_bytes))
                continue
            first = self.num_bytes
            places.append((0, first, num_bytes))
            room = self._shared[first : first + num_bytes]
            if isinstance(buffer, Scattered):
                buffer.write(room)
            elif num_bytes:
                room[:] = memoryview(buffer).cast("B")
            self.num_bytes = first + -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return places

    def frames(self) -> list[Leaf]:
        """Return the frames, without a copy."""
        return [self._shared[: self.num_bytes], *self._large]


def chop(frames: Sequence[Buffer], limit_bytes: int) -> list[Buffer]:
    """Cut frames for a transport that takes no frame over `limit_bytes`, without a copy.

    A piece of exactly `limit_bytes` is continued by the next one; so a frame of just that size gets an empty piece.
    """
    if all(memoryview(frame).nbytes < limit_bytes for frame in frames):
        return list(frames)
    pieces: list[Buffer] = []
    for frame in frames:
        view = memoryview(frame)
        if view.nbytes < limit_bytes:
            pieces.append(frame)
        else:
            flat = view.cast("B")
            pieces += [flat[start : start + limit_bytes] for start in range(0, flat.nbytes + 1, limit_bytes)]
    return pieces


def join(pieces: Sequence[memoryview], limit_bytes: int) -> list[Buffer]:
    """Undo `chop`; only frames that were cut are copied.

    Raises:
        ProtocolError: the last frame is not complete.
    """
    frames: list[Buffer] = []
    open_pieces: list[memoryview] = []
    for piece in pieces:
        if piece.nbytes == limit_bytes:
            open_pieces.append(piece)
        elif open_pieces:
            frames.append(_joined([*open_pieces, piece]))
            open_pieces = []
        else:
            frames.append(piece)
    if open_pieces:
        raise ProtocolError(f"a message ends inside a frame, after {len(pieces)} pieces: it is truncated")
    return frames


def _joined(pieces: Sequence[memoryview]) -> memoryview:
    """One writable buffer with the bytes of all pieces, which need not be touched before they are written."""
    whole = np.empty(sum(piece.nbytes for piece in pieces), dtype=np.uint8).data
    at = 0
    for piece in pieces:
        whole[at : at + piece.nbytes] = piece
        at += piece.nbytes
    return whole


def split(frames: Sequence[Buffer], places: Sequence[tuple[int, int, int]]) -> list[memoryview]:
    """Undo `fuse`: views of each buffer, without a copy.

    Raises:
        ProtocolError: a place lies outside its frame (a truncated message).
    """
    views = [memoryview(frame) for frame in frames]
    result = []
    for frame, offset, num_bytes in places:
        inside = 0 <= frame < len(views) and offset >= 0 and num_bytes >= 0
        if not inside or offset + num_bytes > views[frame].nbytes:
            have = [view.nbytes for view in views]
            raise ProtocolError(
                f"a batch names {num_bytes} bytes at {offset} of frame {frame}, but its frames have {have} bytes: "
                "the message is truncated."
            )
        result.append(views[frame][offset : offset + num_bytes])
    return result
